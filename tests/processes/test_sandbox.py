"""Code snippets in confined processes."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.processes import descendants, needs_confinement, wait_until_gone
from titanrl.config.sections import SandboxConfig
from titanrl.processes.sandbox import SandboxDied, SnippetPool, SnippetResult

pytestmark = needs_confinement

CONFIG = SandboxConfig(timeout_s=2.0, num_processes=2, memory_bytes=1 << 29)


class Runner:
    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.pool = SnippetPool(CONFIG)
        self.runner.run(self.pool.start())

    def run(self, code: str, max_output_chars: int = 1000) -> SnippetResult:
        return self.runner.run(self.pool.run(code, max_output_chars=max_output_chars))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.runner.run(runner.pool.close())
    runner.runner.close()


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("2 * 3", "6\n"),
        ("print(2 * 3)", "6\n"),
        ("x = 2\nprint('a')\nx + 1", "a\n3\n"),
        ("None", ""),
        ("x = 1", ""),
        ("", ""),
        ("import math\nmath.sqrt(16)", "4.0\n"),
        ("import sys; print('b', file=sys.stderr)", "b\n"),
        ("def f(n): return 1 if n < 2 else n * f(n - 1)\nf(5)", "120\n"),
        ("print('a'); exit()", "a\n"),
        ("print('\\ud800')", "\ud800\n"),
    ],
)
def test_output_is_printed_text_and_last_value(runner: Runner, code: str, output: str) -> None:
    assert runner.run(code) == SnippetResult(status="ok", output=output)


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (
            "print('before')\n1 / 0",
            ['  File "<code>", line 2, in <module>', "    1 / 0", "ZeroDivisionError: division by zero"],
        ),
        ("1 +", ['  File "<code>", line 1', "SyntaxError: invalid syntax"]),
        ("raise BaseException('a')", ["BaseException: a"]),
        ("def f(): f()\nf()", ["RecursionError: maximum recursion depth exceeded"]),
        ("bytearray(1 << 30)", ["MemoryError"]),
        ("open('/etc/passwd')", ["PermissionError: [Errno 13] Permission denied: '/etc/passwd'"]),
        ("open('/tmp/titanrl_snippet', 'w')", ["PermissionError"]),
        ("import socket; socket.socket()", ["PermissionError"]),
        ("import subprocess; subprocess.run(['true'])", ["Error"]),
    ],
)
def test_tracebacks_show_only_frames_of_the_code(runner: Runner, code: str, lines: list[str]) -> None:
    result = runner.run(code)
    assert result.status == "error"
    for line in lines:
        assert line in result.error
    assert "zygote.py" not in result.error
    assert result.output == ("before\n" if "before" in code else "")


def test_hanging_or_dying_code_affects_no_other_snippet(runner: Runner) -> None:
    async def main() -> list[SnippetResult]:
        codes = ("while True: pass", "import os; os._exit(3)", "1 + 1", "9**9**9**9")
        return await asyncio.gather(*(runner.pool.run(code, max_output_chars=100) for code in codes))

    assert [result.status for result in runner.runner.run(main())] == ["timeout", "crash", "ok", "timeout"]


def test_output_is_limited(runner: Runner) -> None:
    result = runner.run("for _ in range(1000): print('a' * 1000)", max_output_chars=50)
    assert result.output == "a" * 50 + "... (1000950 more characters)"


def test_snippets_share_no_state(runner: Runner) -> None:
    runner.run("import builtins; builtins.leak = 1")
    assert "NameError" in runner.run("leak").error


@pytest.mark.parametrize("reply", ["[1]", '[{"text": 3}]', "{", '[{"text": {"output": 1, "error": ""}}]'])
def test_forged_reply_is_a_crash(runner: Runner, reply: str) -> None:
    code = f"""
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, {(reply + chr(10)).encode()!r})
    except OSError:
        pass
while True:
    pass
"""
    assert runner.run(code).status == "crash"


async def test_closed_pool_raises_and_leaves_no_process(tmp_path: Path) -> None:
    before = descendants(os.getpid())
    pool = SnippetPool(CONFIG, modules=["json"])
    await pool.start()
    # The zygote of `runner` may still be replacing a process that the test before has killed.
    started = descendants(os.getpid()) - before.union(*map(descendants, before))
    await pool.close()
    with pytest.raises(SandboxDied):
        await pool.run("1", max_output_chars=10)
    assert started
    assert wait_until_gone(started, 30.0) == set()
