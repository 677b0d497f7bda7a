"""Environments by name, by import path and as objects, and objects that do not implement the interface."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.environments.episodes import calls, episode, says
from titanrl.base.plugins import Plugin
from titanrl.environments import (
    Calculator,
    Done,
    Environment,
    Environments,
    Episode,
    Limit,
    Message,
    Observation,
    ProcessOptions,
    SingleTurn,
    TicTacToe,
    ToolEnvironment,
    make_environment,
)
from titanrl.environments.factories import BUILTIN, FUNCTION_KEY, load_factory


class Echo:
    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    async def reset(self, episode: Episode) -> Observation:
        return Observation(messages=[{"role": "user", "content": self.prefix + episode.question}])

    async def step(self, message: Message) -> Done:
        return Done()

    async def close(self) -> None:
        pass


class Adder:
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


def make_echo(prefix: str) -> Environment:
    return Echo(prefix * 2)


def tool_list() -> list[object]:
    return [Adder(), Calculator()]


def first(environment: Environment) -> Observation:
    return asyncio.run(environment.reset(episode("q")))


OPTIONS: dict[str, dict[str, Any]] = {"tools": {"tools": ["calculator"]}}


@pytest.mark.parametrize("name", sorted(BUILTIN.keys() - {"openenv", "verifiers"}))  # whose servers ask
def test_built_in_environments_ask_the_question(name: str) -> None:
    environment = make_environment(name, OPTIONS.get(name, {}))
    assert isinstance(environment, Environment)
    assert first(environment).messages[-1]["content"].startswith("q")


def test_single_turn_asks_once() -> None:
    environment = make_environment("single_turn", {"system_prompt": "Be brief."})
    assert isinstance(environment, SingleTurn)
    assert first(environment).messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    assert asyncio.run(environment.step(says("a"))) == Done()


@pytest.mark.parametrize(
    ("first_role", "expected"), [("user", ["system", "user", "assistant", "user"]), ("system", ["system", "assistant", "user"])]
)
def test_episode_starts_with_the_complete_conversation_of_the_prompt(first_role: str, expected: list[str]) -> None:
    roles = [first_role, "assistant", "user"]
    messages = [{"role": role, "content": role} for role in roles]
    for name in ("single_turn", "calculator"):
        environment = make_environment(name, {"system_prompt": "Be brief."})
        asked = asyncio.run(environment.reset(episode("q", messages=messages)))
        assert [message["role"] for message in asked.messages] == expected
        assert asked.messages[-3:] == messages


def test_objects_and_import_paths_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from titanrl.environments import TicTacToe\nclass Mine(TicTacToe): ...\nclass Tools:\n"
        "    def add(self, a: int) -> int:\n        'Add one.'\n        return a + 1\n"
    )
    assert first(make_environment(Echo, {"prefix": "a "})).messages[0]["content"] == "a q"
    assert first(make_environment(make_echo, {"prefix": "a "})).messages[0]["content"] == "a a q"
    assert isinstance(make_environment(f"{tmp_path}/mine.py:Mine", {"skill": 0.0}), TicTacToe)
    assert isinstance(make_environment("titanrl.environments.tic_tac_toe:TicTacToe"), TicTacToe)
    assert [tool.name for tool in first(make_environment(f"{tmp_path}/mine.py:Tools")).tools] == ["add"]
    both = make_environment("tools", {"tools": ["calculator", f"{tmp_path}/mine.py:Tools"], "max_calls": 2})
    assert [tool.name for tool in first(both).tools] == ["calculate", "add"]


def test_class_without_environment_methods_is_a_toolset() -> None:
    assert isinstance(make_environment(Adder), ToolEnvironment)
    assert [tool.name for tool in first(make_environment(tool_list)).tools] == ["add", "calculate"]


def test_plugin_takes_precedence() -> None:
    plugins = {FUNCTION_KEY: Plugin(key=FUNCTION_KEY, name="Echo", value=Echo)}
    assert isinstance(make_environment("object:Echo", {}, plugins), Echo)


def test_every_episode_gets_a_new_environment() -> None:
    make = load_factory("calculator")
    assert make() is not make()


class NotAsync(Echo):
    def step(self, message: Message) -> Done:  # type: ignore[override]
        return Done()


class WrongArguments(Echo):
    async def reset(self) -> Observation:  # type: ignore[override]
        return Observation(messages=[])


class WrongJudge(Echo):
    async def judge_truncated(self, message: Message) -> Done:
        return Done()


class SyncJudge(Echo):
    def judge_truncated(self, message: Message | None, limit: Limit) -> Done:
        return Done()


class WithoutClose:
    async def reset(self, episode: Episode) -> Observation:
        return Observation(messages=[])

    async def step(self, message: Message) -> Done:
        return Done()


def raising() -> Environment:
    raise RuntimeError("no game")


def none() -> None:
    return None


@pytest.mark.parametrize(
    ("function", "options", "problem"),
    [
        ("chess", {}, r"data.environment.function: no such environment \(got 'chess'\)"),
        ("nowhere:Chess", {}, "data.environment.function: importing nowhere raised"),
        (Echo, {"suffix": 1}, r"data.environment.function: wrong signature: .*'suffix' \(got Echo\(prefix"),
        (make_echo, {}, "missing a required argument: 'prefix'"),
        (NotAsync, {}, "step is not async .*async def step"),
        (WrongArguments, {}, "reset: too many positional|wrong signature: too many positional arguments .*async def reset"),
        (
            WrongJudge,
            {},
            r"wrong signature: too many positional arguments .*async def judge_truncated\(self, message: Message \| None, ",
        ),
        (SyncJudge, {}, "judge_truncated is not async .*async def judge_truncated"),
        (WithoutClose, {}, "WithoutClose has no close .*\nclass MyEnvironment"),
        (raising, {}, "creating an environment raised RuntimeError: no game"),
        (none, {}, "NoneType has no reset and no step and no close"),
        ("tic_tac_toe", {"skill": 3}, "creating an environment raised ValueError: skill: must be a probability"),
        ("tools", {"tools": ["hammer"]}, r"data.environment.options.tools: no such tool \(got 'hammer'\)"),
    ],
)
def test_invalid_environment_is_rejected(function: object, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_environment(function, options)


def test_environments_run_in_this_process_or_in_separate_ones() -> None:
    async def main(processes: ProcessOptions | None, check: Callable[[Environment], bool]) -> None:
        environments = Environments("calculator", {"max_calls": 2}, processes=processes)
        await environments.start()
        environment = environments.make()
        assert check(environment)
        await environment.reset(episode())
        found = await environment.step(calls(("calculate", {"expression": "7 * 8"}), ("calculate", "{")))
        assert isinstance(found, Observation)
        assert found.messages[0] == {"role": "tool", "tool_call_id": "id_0", "name": "calculate", "content": "56"}
        assert "malformed" in found.messages[1]["content"]
        await environment.close()
        await environments.close()

    asyncio.run(main(None, lambda environment: isinstance(environment, ToolEnvironment)))
    asyncio.run(main(ProcessOptions(num_processes=1), lambda environment: not isinstance(environment, ToolEnvironment)))
