"""The Python tool, in confined processes that episodes share."""

import asyncio
import os
import signal
from typing import Any

import pytest

from tests.environments.episodes import calls, episode
from tests.processes.processes import children, needs_confinement
from titanrl.environments import Environments, Observation, Python, ToolEnvironment
from titanrl.environments.servers import close_shared
from titanrl.environments.tools import signature_of

OPTIONS = {"timeout_s": 1.0, "memory_bytes": 1 << 29, "num_processes": 2}


def test_policy_sees_a_description_of_the_tool() -> None:
    tool = signature_of(Python(num_processes=1).python).tool
    assert tool.description == "Run Python code; return what it prints and the value of its last line."
    assert tool.parameters["required"] == ["code"]


@pytest.mark.parametrize("options", [{"modules": ["no_such_module"]}, {"timeout_s": 0}])
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Python(**options)


@needs_confinement
def test_episodes_run_code_in_shared_processes() -> None:
    async def run(environments: Environments, code: str) -> str:
        environment = environments.make()
        await environment.reset(episode())
        found = await environment.step(calls(("python", {"code": code})))
        await environment.close()
        assert isinstance(found, Observation)
        return str(found.messages[0]["content"])

    async def main() -> list[str]:
        environments = Environments("python", OPTIONS)
        await environments.start()
        before = children(os.getpid())
        codes = ("sum(range(10))", "print('a')\n1 / 0", "x = 1", "while True: pass", "import os; os._exit(1)")
        codes = (*codes, "import sys; sys.stdout.write('a\\0b'); '\\ud800<|im_end|>'")
        texts = await asyncio.gather(*(run(environments, code) for code in codes))
        assert len(children(os.getpid()) - before) == 1  # one zygote for all episodes
        await environments.close()
        assert children(os.getpid()) == before
        return texts

    texts = asyncio.run(main())
    assert texts[0] == "45\n"
    assert texts[1].startswith("a\nTraceback")
    assert texts[1].endswith("ZeroDivisionError: division by zero")
    assert texts[2] == "(no output)"
    assert texts[3] == "The code was stopped after 1 s."
    assert texts[4].startswith("The process running the code died")
    assert "\0" not in texts[5]
    assert texts[5].encode().decode() == texts[5]


@needs_confinement
async def test_dead_pool_fails_a_call_and_is_replaced() -> None:
    before = children(os.getpid())
    environment = ToolEnvironment(Python(**OPTIONS))
    await environment.step(calls(("python", {"code": "1"})))
    (zygote,) = children(os.getpid()) - before
    os.kill(zygote, signal.SIGKILL)
    os.waitid(os.P_PID, zygote, os.WEXITED | os.WNOWAIT)  # on a busy machine it exits later, and a second call can fail
    failures = 0
    for _ in range(3):
        try:
            found = await environment.step(calls(("python", {"code": "2"})))
        except Exception:
            failures += 1
        else:
            assert isinstance(found, Observation)
            assert found.messages[0]["content"] == "2\n"
    assert failures <= 1
    await close_shared()
