"""Unmodified tasksets of verifiers, run by the package itself in an interpreter of its own.

TITANRL_VERIFIERS_PYTHON names an interpreter that has verifiers 0.4.0 and marble-v1 0.1.0; without it, they are installed.
"""

import os
import subprocess
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.environments.episodes import calls, episode, says
from titanrl.config.device import install_verifiers
from titanrl.environments import (
    Done,
    Environment,
    EnvironmentFailure,
    Environments,
    EnvironmentTimeout,
    InvalidReward,
    JudgesTruncated,
    Observation,
    ProcessOptions,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # packages are installed


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has verifiers and the tasksets of the tests."""
    folder = tmp_path_factory.mktemp("verifiers")
    given = os.environ.get("TITANRL_VERIFIERS_PYTHON")
    paths = [str(Path(__file__).parent / "tasksets")]
    if given is None:
        assert install_verifiers(folder) == 0
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", "marble-v1==0.1.0"], check=True)
    else:
        venv.create(folder)
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        paths.append(subprocess.run([given, "-c", program], check=True, capture_output=True, text=True).stdout.strip())
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "tests.pth").write_text("\n".join(paths) + "\n")
    return folder / "bin/python"


@asynccontextmanager
async def environments(python: Path, verifiers: str = "sums_of_tests", **options: Any) -> AsyncIterator[Environments]:
    processes = ProcessOptions(num_processes=1, python=python)
    made = Environments("verifiers", {"verifiers": verifiers, **options}, processes=processes)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def started(made: Environments, index: object) -> AsyncIterator[tuple[Environment, Observation]]:
    environment = made.make()
    try:
        yield environment, await environment.reset(episode(metadata={"index": index}))
    finally:
        await environment.close()


async def test_a_taskset_of_a_package_gets_its_rewards(python: Path) -> None:
    async with environments(python, "marble_v1") as made, started(made, 0) as (environment, observation):
        assert "passing through the ring" in observation.messages[0]["content"]
        end = await environment.step(says("I do not know."))
        assert isinstance(end, Done)
        assert end.rewards == {"scored": 0.0}
        assert end.metrics["answered_legally"] == 0.0


async def test_a_simulated_user_continues_the_conversation(python: Path) -> None:
    async with environments(python) as made:
        for _ in range(2):
            async with started(made, 3) as (environment, observation):
                assert [message["role"] for message in observation.messages] == ["system", "user"]
                assert [message["content"] for message in observation.messages] == ["Add.", "3 + 0 ="]
                turn = await environment.step(says("?"))
                assert turn == Observation(messages=[{"role": "user", "content": "Answer with a number."}], tools=[])
                end = await environment.step(says("3"))
                assert isinstance(end, Done)
                assert end.rewards == {"right": 2.0}
                assert end.metrics["length"] == 1.0


@pytest.mark.parametrize(
    ("index", "error", "problem"),
    [
        (2, InvalidReward, "the scorer is broken"),
        (4, EnvironmentTimeout, "out of time"),
        (5, EnvironmentFailure, "the taskset has only 5 tasks"),
        ("0", EnvironmentFailure, "must have the index of its task"),
    ],
)
async def test_failures_have_outcomes_and_leave_the_process(
    python: Path, index: object, error: type[Exception], problem: str
) -> None:
    async with environments(python) as made:
        with pytest.raises(error, match=problem):
            async with started(made, index) as (environment, _):
                await environment.step(says("7"))
        async with started(made, 1) as (environment, _):
            end = await environment.step(says("1"))
            assert isinstance(end, Done)
            assert end.rewards == {"right": 2.0}


async def test_an_episode_that_a_limit_ends_is_scored(python: Path) -> None:
    async with environments(python) as made:
        async with started(made, 3) as (environment, _):
            await environment.step(says("?"))
            assert isinstance(environment, JudgesTruncated)
            end = await environment.judge_truncated(says("3"), "turn_tokens")
            assert end.rewards == {"right": 2.0}
        async with started(made, 3) as (environment, _):
            assert isinstance(environment, JudgesTruncated)
            end = await environment.judge_truncated(None, "turns")
            assert end.rewards == {"right": 0.0}


async def test_a_policy_that_calls_a_missing_tool_ends_the_rollout(python: Path) -> None:
    async with environments(python) as made, started(made, 1) as (environment, _):
        assert isinstance(await environment.step(calls(("nothing", {}))), Done)


async def test_tools_of_a_taskset_are_called(python: Path) -> None:
    async with environments(python, "facts_of_tests") as made, started(made, 1) as (environment, observation):
        assert [tool.name for tool in observation.tools] == ["facts_lookup"]
        turn = await environment.step(calls(("facts_lookup", {"name": "grace"})))
        assert isinstance(turn, Observation)
        assert [(message["role"], message["content"]) for message in turn.messages] == [("tool", "an admiral")]
        end = await environment.step(says("Grace is an admiral."))
        assert isinstance(end, Done)
        assert end.rewards == {"looked_up": 1.0}


@asynccontextmanager
async def user(*replies: str) -> AsyncIterator[str]:
    """Serve another model, which says these texts in turn and then fails; yield its URL."""
    waiting = list(replies)

    async def answer(request: web.Request) -> web.Response:
        if not waiting:
            return web.json_response({"error": {"message": "out of credit", "type": "billing"}}, status=402)
        message = {"role": "assistant", "content": waiting.pop(0)}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return web.json_response({"id": "1", "object": "chat.completion", "created": 0, "model": "user", "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def simulated(url: str) -> dict[str, object]:
    return {"id": "user-sim", "user": {"model": "user", "client": {"base_url": url, "api_key_var": "HOME"}}}


async def test_another_model_is_the_user(python: Path) -> None:
    async with (
        user("Hi, add 3 and 0.", "Sure?", "###DONE###") as url,
        environments(python, env=simulated(url)) as made,
        started(made, 3) as (environment, observation),
    ):
        assert observation.messages[-1] == {"role": "user", "content": "Hi, add 3 and 0."}
        turn = await environment.step(says("Let me think."))
        assert turn == Observation(messages=[{"role": "user", "content": "Sure?"}], tools=[])
        end = await environment.step(says("3"))
        assert isinstance(end, Done)
        assert (end.rewards, end.metrics["user_turns"]) == ({"right": 2.0}, 3.0)


async def test_an_error_of_the_users_provider_fails_the_episode(python: Path) -> None:
    async with user("Hi.") as url, environments(python, env=simulated(url)) as made:
        with pytest.raises(EnvironmentFailure, match="out of credit") as raised:
            async with started(made, 3) as (environment, _):
                await environment.step(says("3"))
        assert type(raised.value) is EnvironmentFailure


async def test_a_missing_taskset_fails_at_the_start(python: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="No module named 'nowhere'"):
        async with environments(python, "nowhere"):
            pass
