"""Commands that play episodes: their task, their result, and the ends of hostile ones."""

import asyncio
import json
import os
import platform
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanrl.environments import EnvironmentFailure, InvalidReward
from titanrl.environments.programs import Command, ProgramResult, ProgramTask, checked_function, result_of
from titanrl.processes.confine import missing_for_programs
from titanrl.processes.temporary import TemporaryFolder

TASK = ProgramTask(
    url="http://127.0.0.1:9/v1",
    key="secret",
    model="policy",
    task_id="sums/0",
    question="1+1=",
    entry={"metadata": {}},
    seed=5,
    timeout_s=9.0,
    options={"depth": 2},
)


@pytest.fixture(scope="module")
def folders() -> Iterator[TemporaryFolder]:
    folder = TemporaryFolder()
    yield folder
    assert [path.name for path in folder.path.iterdir()] == ["owner.lock"]  # each episode's folder is deleted
    folder.delete()


def run(folders: TemporaryFolder, code: str, **options: Any) -> ProgramResult:
    arguments = options.pop("arguments", (sys.executable, "-c", textwrap.dedent(code)))
    command = Command(arguments=arguments, returns=options.pop("returns", "rewards"), folders=folders, **options)
    return asyncio.run(asyncio.wait_for(command.run(TASK), 30))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_task_comes_on_stdin_in_a_file_and_in_variables(folders: TemporaryFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "internal.example")
    code = """
        import json, os, sys
        task = json.load(sys.stdin)
        assert task == json.load(open(os.environ["TITANRL_TASK"]))
        names = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "TITANRL_MODEL", "ANTHROPIC_BASE_URL", "TITANRL_TIMEOUT_S"]
        names += ["NO_PROXY", "no_proxy"]
        print(json.dumps([task, [os.environ[name] for name in names]]))
    """
    answer = run(folders, code, returns="answer").answer
    assert answer is not None
    task, variables = json.loads(answer)
    assert task == TASK.document()
    assert variables == [
        "http://127.0.0.1:9/v1",
        "secret",
        "policy",
        "http://127.0.0.1:9",
        "9",
        *["internal.example,127.0.0.1"] * 2,
    ]


@pytest.mark.parametrize(
    ("code", "rewards", "metrics"),
    [
        ("print('thinking'); print(0.5)", {"program": 0.5}, {}),
        ("print('{\"reward\": 1, \"metrics\": {\"tries\": 3}}\\n')", {"program": 1.0}, {"tries": 3.0}),
        ("import os; print('x'); open(os.environ['TITANRL_RESULT'], 'w').write('{\"rewards\": {\"a\": 1, \"b\": 2}}')",
         {"a": 1.0, "b": 2.0}, {}),
    ],
)  # fmt: skip
def test_result_is_the_last_line_or_the_file(folders: TemporaryFolder, code: str, rewards: Any, metrics: Any) -> None:
    done = run(folders, code).done
    assert (done.rewards, done.metrics) == (rewards, metrics)


@pytest.mark.parametrize("code", ["print()", "import os; open(os.environ['TITANRL_RESULT'], 'w').close()"])
def test_answer_may_be_empty(folders: TemporaryFolder, code: str) -> None:
    assert run(folders, code, returns="answer").answer == ""  # the policy wrote it, which is no failure of the program
    with pytest.raises(EnvironmentFailure, match="must have its result"):
        run(folders, code)
    with pytest.raises(EnvironmentFailure, match="must have its result"):
        run(folders, "pass", returns="answer")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise ValueError('boom')", "exited with code 1: .*boom"),
        (
            "import sys; sys.exit('Error: boom\\n    at f (a.js:1)\\n' + '    at g\\n' * 9 + '\\nNode.js v20')",
            "1: Error: boom / Node.js v20",
        ),
        ("import os; os.kill(os.getpid(), 9)", "exited with code 137"),
        ("print('no number')", "must be a number or a JSON object"),
        ("print('{\"reward\": 1')", "must be a number or a JSON object"),
        ("print('[1]')", "must be a number or a JSON object"),
        ("pass", "must have its result"),
        ('print(\'{"rewards": {"a b": 1}}\')', "rewards"),
        ("print('{\"result\": 1}')", "must have the key reward or rewards"),
        ("import os; os.mkdir(os.environ['TITANRL_RESULT'])", "cannot be read"),
        ("import os; os.mkfifo(os.environ['TITANRL_RESULT'])", "cannot be read: .*not a regular file"),
        ("import os; os.symlink('/etc/passwd', os.environ['TITANRL_RESULT'])", "cannot be read"),
    ],
)
def test_crash_and_garbage_fail(folders: TemporaryFolder, code: str, problem: str) -> None:
    with pytest.raises(EnvironmentFailure, match=problem):
        run(folders, code)


def test_reward_that_is_no_finite_number_is_named(folders: TemporaryFolder) -> None:
    with pytest.raises(InvalidReward):
        run(folders, "print('nan')")


def test_command_that_does_not_exist_fails(folders: TemporaryFolder) -> None:
    with pytest.raises(EnvironmentFailure, match="cannot be started"):
        run(folders, "", arguments=("/no/such/program",))


def test_broken_pipes_end_the_parts_of_a_pipeline(folders: TemporaryFolder) -> None:
    command = 'yes | head -1; echo "${PIPESTATUS[0]}"'
    assert run(folders, "", arguments=("bash", "-c", command), returns="answer").answer == str(128 + signal.SIGPIPE)


def test_too_much_output_ends_the_command(folders: TemporaryFolder) -> None:
    started = time.monotonic()
    for stream in ("stdout", "stderr"):
        with pytest.raises(EnvironmentFailure, match="printed more than 16 MiB"):
            run(folders, f"import sys\nfor _ in range(1000): sys.{stream}.write('x' * (1 << 20))")
    assert time.monotonic() - started < 20


FORKS = """
    import os, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            with open(sys.argv[1], "w") as file:
                file.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
        time.sleep(0.01)
    {end}
"""


@pytest.mark.parametrize("ending", ["exit", "hang", "kill the supervisor's child"])
def test_process_that_left_its_session_dies_with_the_command(folders: TemporaryFolder, tmp_path: Path, ending: str) -> None:
    end = {"exit": "print(1)", "hang": "time.sleep(600)"}.get(ending, "os.kill(os.getpid(), 9)")
    code = textwrap.dedent(FORKS).format(end=end)
    command = Command(arguments=(sys.executable, "-c", code, str(tmp_path / "pid")), returns="nothing", folders=folders)

    async def play() -> None:
        if ending == "hang":
            running = asyncio.create_task(command.run(TASK))
            while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
        elif ending == "exit":
            await command.run(TASK)
        else:
            with pytest.raises(EnvironmentFailure):
                await command.run(TASK)

    asyncio.run(asyncio.wait_for(play(), 30))
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_process_without_its_main_thread_dies_with_the_command(folders: TemporaryFolder, tmp_path: Path) -> None:
    code = f"""
        import ctypes, os, threading, time
        def stay():
            os.closerange(0, 3)
            open({str(tmp_path / "new")!r}, "w").write(str(os.getpid()))
            os.replace({str(tmp_path / "new")!r}, {str(tmp_path / "pid")!r})  # which is never empty
            time.sleep(600)
        if os.fork() == 0:
            threading.Thread(target=stay).start()
            ctypes.CDLL(None).syscall({60 if platform.machine() == "x86_64" else 93}, 0)
        while " (zombie)" not in open("/proc/" + open({str(tmp_path / "pid")!r}).read() + "/status").read():
            time.sleep(0.01)
    """
    (tmp_path / "pid").write_text("self")
    run(folders, code, returns="nothing")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_error_stream_is_logged_up_to_a_limit(folders: TemporaryFolder, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run(folders, "import sys; sys.stderr.write('a' * 100_000 + 'end'); print(1)", log=log)
    assert log.stat().st_size == 16 << 10
    assert log.read_text().endswith("aend")


@pytest.mark.skipif(bool(missing_for_programs()), reason="the kernel cannot confine programs")
def test_confined_command_keeps_to_its_folder_and_endpoint(folders: TemporaryFolder, tmp_path: Path) -> None:
    code = f"""
        import json, os, signal, socket, subprocess
        def denied(action):
            try:
                action()
            except OSError as error:
                return error.errno in (1, 13)
            return False
        def connect(port, protocol=0):
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as made:
                try:
                    made.connect(("127.0.0.1", port))
                except ConnectionRefusedError:
                    pass
        def send(call):
            with socket.socket() as made:
                call(made)
        with open(os.environ["TITANRL_RESULT"], "w") as file:
            print(json.dumps({{"rewards": {{
                "write": denied(lambda: open({str(tmp_path / "file")!r}, "w")),
                "read": denied(lambda: os.listdir("/root")),
                "connect": denied(lambda: connect(1)),
                "mptcp": denied(lambda: connect(1, 262)),
                "fastopen": denied(lambda: send(lambda made: made.sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", 1)))),
                "sendmsg": denied(lambda: send(lambda made: made.sendmsg([b"x"], [], socket.MSG_FASTOPEN, ("127.0.0.1", 1)))),
                "signal": denied(lambda: os.kill({os.getpid()}, 0)),
                "udp": denied(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
                "unix": denied(lambda: socket.socket(socket.AF_UNIX)),
                "child": subprocess.run(["true"]).returncode == 0 and "HF_TOKEN" not in os.environ,
                "endpoint": not denied(lambda: connect(9)) and not denied(lambda: connect(9, socket.IPPROTO_TCP)),
                "system": not denied(lambda: open("/etc/hosts")),
            }}}}), file=file)
    """
    rewards = run(folders, code, confined_memory_bytes=1 << 30).done.rewards
    assert rewards == dict.fromkeys(rewards, 1.0)
    assert len(rewards) == 12


def test_results_of_functions() -> None:
    assert result_of("rewards", 2).done.rewards == {"program": 2.0}
    assert result_of("answer", "a\0").answer == "a\ufffd"
    assert result_of("nothing", object()).answer is None
    for returns, value in (("rewards", None), ("rewards", {"reward": 1, "rewards": {}}), ("answer", 1)):
        with pytest.raises(EnvironmentFailure):
            result_of(returns, value)  # type: ignore[arg-type]


def test_function_must_be_async(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def play(task): ...\nasync def works(task): ...\nasync def asks(task, mode): ...\n"
        "class Agent:\n    async def __call__(self, task): ...\nagent = Agent()\n"
        "import functools\npartly = functools.partial(asks, mode=1)\nlacks = functools.partial(asks)\n"
    )
    with pytest.raises(ValueError, match="must be an async function"):
        checked_function(f"{tmp_path}/mine.py:play", {})
    for name in ("works", "agent", "partly"):
        assert checked_function(f"{tmp_path}/mine.py:{name}", {})
    with pytest.raises(ValueError, match=r"missing a required argument: 'mode' .* Write it as `async def play\(task\)"):
        checked_function(f"{tmp_path}/mine.py:lacks", {})
    assert checked_function(f"{tmp_path}/mine.py:asks", {"mode": 1})
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'mode' .* Write it as `async def play\(task, mode\)"):
        checked_function(f"{tmp_path}/mine.py:works", {"mode": 1})
