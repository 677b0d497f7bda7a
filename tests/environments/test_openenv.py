"""Environments behind OpenEnv servers: a local server and a URL, actions, rewards, limits of sessions, and faults."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.environments.episodes import calls, episode, says
from tests.ports import free_port
from tests.processes.processes import wait_until_gone
from titanrl.environments import (
    Done,
    Environment,
    EnvironmentDied,
    EnvironmentFailure,
    Environments,
    EnvironmentTimeout,
    InvalidReward,
    Observation,
)
from titanrl.environments.openenv import OpenEnv

PACKAGE = "openenv_server:app"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@asynccontextmanager
async def environments(openenv: str = PACKAGE, **options: Any) -> AsyncIterator[Environments]:
    made = Environments("openenv", {"openenv": openenv, **options})
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def started(openenv: str = "", **options: Any) -> AsyncIterator[Environment]:
    """Yield an environment after its reset; without an address, that of a server in this process, which starts at once."""
    async with served() as address, environments(openenv or f"http://{address}", **options) as made:
        environment = made.make()
        await environment.reset(episode())
        yield environment
        await environment.close()


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    """Serve in this process; yield host and port."""
    import uvicorn
    from openenv_server import app  # type: ignore[import-not-found]

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield f"127.0.0.1:{port}"
    assert not serving.done()
    server.should_exit = True
    await serving


async def reply(text: str, openenv: str = "", **options: Any) -> Observation | Done:
    async with started(openenv, **options) as environment:
        return await environment.step(says(text))


async def test_reset_gets_seed_and_arguments_of_the_options_and_of_the_prompt() -> None:
    async with environments(reset={"size": 1, "level": 2}, system_prompt="Play.") as made:
        environment = made.make()
        observation = await environment.reset(episode(seed=7 + (1 << 31), metadata={"reset": {"level": 3}}))
        system, question = observation.messages
        assert system == {"role": "system", "content": "Play."}
        assert json.loads(question["content"]) == {"size": 1, "level": 3, "seed": 7, "episode_id": "task/0"}
        await environment.close()


async def test_rewards_of_steps_belong_to_turns_and_the_last_to_the_episode() -> None:
    async with started() as environment:
        observation = await environment.step(says("walk"))
        assert observation == Observation(
            messages=[{"role": "user", "content": '{"text": "go on", "left": 3}'}],
            reward=0.25,
            metrics={"invalid_actions": 0.0},
        )
        end = await environment.step(says("end"))
        assert end == Done(rewards={"openenv": 1.0}, metrics={"step_count": 2.0, "invalid_actions": 0.0})
        assert isinstance(environment, OpenEnv)
        assert (await environment.judge_truncated(None, "turns")).rewards == {"openenv": 0.0}


async def test_a_template_shows_fields_of_the_observation() -> None:
    observation = await reply("walk", message="{left} left: {text}")
    assert observation.messages == [{"role": "user", "content": "3 left: go on"}]  # type: ignore[union-attr]
    with pytest.raises(EnvironmentFailure, match="message does not fit the observation: KeyError: 'missing'"):
        await reply("walk", message="{missing}")


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("guess", "7", "go on"),
        ("guess", '{"guess": 7}', "go on"),
        ("guess", "seven", "Invalid action: write guess (integer), and nothing else."),
        ("guess", '"7"', "Invalid action: guess: input should be a valid integer."),
        ("both", '{"guess": 7, "text": "a"}', "go on"),
        ("both", "[7]", "Invalid action: write one JSON object with guess, text."),
        ("both", '{"guess": NaN}', "Invalid action: write one JSON object, and nothing else."),
    ],
)
async def test_texts_become_actions_and_the_policy_learns_of_invalid_ones(
    kind: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENENV_ACTION", kind)
    observation = await reply(text, message="{text}")
    assert isinstance(observation, Observation)
    assert observation.messages[0]["content"] == shown
    assert observation.metrics["invalid_actions"] == (0.0 if shown == "go on" else 1.0)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<a>walk</a> or <a>end</a>", None),
        ("end", "Invalid action: there is no match of <a>(.*?)</a>."),
        ("<a>end</a><a></a>", '{"text": "go on", "left": 3}'),
    ],
)
async def test_a_pattern_finds_the_action(text: str, shown: str | None) -> None:
    result = await reply(text, pattern="<a>(.*?)</a>")
    assert isinstance(result, Done) if shown is None else result.messages[0]["content"] == shown  # type: ignore[union-attr]


async def test_actions_that_are_calls_of_tools_are_calls_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_ACTION", "tools")
    async with environments() as made:
        environment = made.make()
        observation = await environment.reset(episode("What?"))
        assert observation.messages == [{"role": "user", "content": "What?"}]
        assert [tool.name for tool in observation.tools] == ["echo"]
        turn = await environment.step(calls(("echo", {"text": "hi"}), ("nothing", {}), ("echo", "{")))
        assert isinstance(turn, Observation)
        texts = [message["content"] for message in turn.messages]
        assert texts == ["hi", "unknown", "the arguments must be one JSON object"]
        assert (turn.reward, turn.metrics) == (0.5, {"invalid_actions": 2.0})
        assert isinstance(await environment.step(says("no call")), Done)
        await environment.close()


@pytest.mark.parametrize(
    ("text", "error", "problem"),
    [
        ("raise", EnvironmentFailure, "step failed on the server: .*the wall is in the way"),
        ("hang", EnvironmentTimeout, "step took longer than 3 s"),
        ("crash", EnvironmentDied, r"step failed: .*\(exit code 3\)"),
        ("garbage", EnvironmentFailure, "the reply to step is no JSON"),
        ("shape", EnvironmentFailure, "the reply to step is not one of OpenEnv"),
        ("huge", EnvironmentDied, "message too big|exceeds limit"),
        ("infinite", EnvironmentFailure, "no JSON"),
        ("word", InvalidReward, "a reward must be a number"),
        ("close", EnvironmentDied, "step failed"),
    ],
)
async def test_failures_of_a_server_fail_the_episode(text: str, error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem):
        await reply(text, PACKAGE if text in ("hang", "crash") else "", timeout_s=3.0 if text == "hang" else 30.0)


async def test_errors_are_shown_where_the_options_say_so() -> None:
    observation = await reply("raise", show_errors=True)
    assert observation.messages[0]["content"] == "Invalid action: the wall is in the way."  # type: ignore[union-attr]


async def test_a_finished_reset_fails_the_episode() -> None:
    with pytest.raises(EnvironmentFailure, match="reset must not return done"):
        await reply("walk", reset={"do": "done"})


async def test_episodes_wait_for_a_session() -> None:
    async with served() as address, environments(f"http://{address}", sessions=2) as made:

        async def play() -> Observation | Done:
            environment = made.make()
            await environment.reset(episode())
            try:
                return await environment.step(says("end"))
            finally:
                await environment.close()

        assert len([end for end in await asyncio.gather(*(play() for _ in range(8))) if isinstance(end, Done)]) == 8


async def test_an_episode_cancelled_while_it_waits_frees_no_session() -> None:
    async with served() as address, environments(f"http://{address}", sessions=1) as made:
        first, cancelled, last = (made.make() for _ in range(3))
        await first.reset(episode())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cancelled.reset(episode()), 0.1)
        await cancelled.close()
        waiting = asyncio.create_task(last.reset(episode()))
        await asyncio.wait([waiting], timeout=0.2)
        assert not waiting.done()
        await first.close()
        await waiting
        await last.close()


async def test_a_server_without_a_free_session_is_named() -> None:
    async with environments() as made:
        playing = [made.make() for _ in range(3)]
        results = await asyncio.gather(*(environment.reset(episode()) for environment in playing), return_exceptions=True)
        (failure,) = [result for result in results if isinstance(result, BaseException)]
        assert isinstance(failure, EnvironmentFailure)
        assert "no free session: all 2 sessions are used Set sessions" in str(failure)
        await asyncio.gather(*(environment.close() for environment in playing))


async def test_a_local_server_is_shared_replaced_after_its_death_and_stopped_at_the_end() -> None:
    async with environments() as made:
        await made.start()
        pids = []
        for _ in range(2):
            environment = made.make()
            await environment.reset(episode())
            observation = await environment.step(says("pid"))
            assert isinstance(observation, Observation)
            pids.append(int(observation.messages[0]["content"]))
            await environment.close()
        assert pids[0] == pids[1]
        environment = made.make()
        await environment.reset(episode())
        with pytest.raises(EnvironmentDied):
            await environment.step(says("crash"))
        await environment.close()
        environment = made.make()
        await environment.reset(episode())
        observation = await environment.step(says("pid"))
        assert isinstance(observation, Observation)
        last = int(observation.messages[0]["content"])
        assert last != pids[0]
    assert not wait_until_gone({last}, 10.0)


async def test_a_server_at_a_url_is_used_and_not_stopped() -> None:
    async with served() as address:
        for scheme in ("http", "ws"):
            assert isinstance(await reply("end", f"{scheme}://{address}/"), Done)


@pytest.mark.parametrize(
    ("openenv", "options", "problem"),
    [
        ("json", {}, "has no attribute|No module named 'json.server'"),
        ("http://127.0.0.1:1", {}, "cannot be reached"),
        (PACKAGE, {"action": "nothing"}, r"actions have no such field \(got 'nothing'\). Choose one of text."),
        (PACKAGE, {"python": "/bin/false"}, r"cannot be reached: .*\(exit code 1\)"),
    ],
)
async def test_a_server_that_cannot_be_used_fails_at_the_start(openenv: str, options: dict[str, Any], problem: str) -> None:
    async with environments(openenv, **options) as made:
        with pytest.raises(EnvironmentFailure, match=problem):
            await made.start()


async def test_a_server_without_a_schema_fails_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_ACTION", "none")
    async with environments() as made:
        with pytest.raises(EnvironmentFailure, match="no schema of actions, so it is no OpenEnv server"):
            await made.start()


def test_missing_packages_and_interpreters_are_errors_of_the_configuration() -> None:
    with pytest.raises(ValueError, match=r"no such package \(got 'nowhere.server'\). Install it, or set options.python"):
        Environments("openenv", {"openenv": "nowhere.server"})
    with pytest.raises(ValueError, match=r"options.python: must be an executable file on this machine \(got '/nowhere'\)"):
        Environments("openenv", {"openenv": "nowhere", "python": "/nowhere"})
    assert Environments("openenv", {"openenv": "nowhere", "python": sys.executable})
