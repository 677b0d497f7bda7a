"""Checks of what environments return."""

import enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.environments.episodes import episode, says
from tests.environments.results import INVALID, INVALID_REWARDS, returned
from titanrl.environments import Done, EnvironmentFailure, EnvironmentPool, InvalidReward, Observation, ProcessOptions, Tool
from titanrl.environments.interface import checked

USER = {"role": "user", "content": "2"}


class Role(enum.StrEnum):
    USER = "user"


def messages(*given: Any) -> Any:
    result = checked(Observation(messages=given))
    assert isinstance(result, Observation)
    return result.messages


@pytest.mark.parametrize("name", INVALID)
def test_invalid_result_is_a_failure(name: str) -> None:
    with pytest.raises(EnvironmentFailure) as raised:
        checked(returned(INVALID[name]))
    assert type(raised.value) is EnvironmentFailure
    text = str(raised.value)
    assert text.isascii()
    assert len(text) < 400


@pytest.mark.parametrize("name", INVALID_REWARDS)
def test_invalid_reward_is_a_failure_of_its_own(name: str) -> None:
    with pytest.raises(InvalidReward, match="must be a finite number"):
        checked(returned(INVALID_REWARDS[name]))


def test_message_names_the_key_and_the_fix() -> None:
    with pytest.raises(EnvironmentFailure) as raised:
        messages(USER, {"role": "tool", "content": b"2"})
    assert str(raised.value) == "messages[1].content: must be text or another JSON value (got b'2'). Convert it to text."


def test_content_becomes_one_text() -> None:
    assert messages({"role": "user", "content": [{"type": "text", "text": "1+"}, "1"]}) == [{"role": "user", "content": "1+1"}]
    assert messages({"role": Role.USER, "content": np.str_("2")}) == [USER]
    assert type(messages({"role": Role.USER, "content": np.str_("2")})[0]["role"]) is str
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    (message,) = messages({"role": "assistant", "content": None, "tool_calls": (call,)})
    assert message["content"] == ""
    assert message["tool_calls"] == [call | {"function": {"name": "add", "arguments": {"a": 1}}}]
    assert messages({"role": "developer", "content": "2"}) == [{"role": "system", "content": "2"}]
    malformed = call | {"function": {"name": "add", "arguments": '{"a": '}}
    assert messages({"role": "assistant", "content": "", "tool_calls": [malformed]})[0]["tool_calls"] == [malformed]


def test_harmless_keys_and_numbers_are_kept() -> None:
    extra = {**USER, "name": "opponent", "scores": [1, 2.5, None, True, {"a": []}], "tool_calls": None}
    assert messages(extra) == [extra]
    tool = Tool(name="add", parameters={"type": "object", "required": ("a",)})
    given = Observation(messages=(USER,), tools=(tool,), reward=np.float32(0.5), replaces=np.True_, metrics={"n": 1}, state="a")  # type: ignore[arg-type]
    result = checked(given)
    parameters = {"type": "object", "required": ["a"]}
    expected = Observation(
        messages=[USER],
        tools=[Tool(name="add", parameters=parameters)],
        reward=0.5,
        replaces=True,
        metrics={"n": 1.0},
        state="a",
    )
    assert result == expected
    done = Done(rewards={"right": True, "steps/left": np.int64(3)}, reward=Fraction(1, 4), metrics={"n": np.int8(2)})  # type: ignore[arg-type]
    assert checked(done) == Done(rewards={"right": 1.0, "steps/left": 3.0}, reward=0.25, metrics={"n": 2.0})


RETURNS = """
from tests.environments.results import returned
from titanrl.environments import Observation

class Returns:
    async def reset(self, episode):
        return returned(episode.question)

    async def step(self, message):
        return returned(message["content"])

    async def judge_truncated(self, message, limit):
        return returned(message["content"])

    async def close(self):
        pass
"""


async def test_process_reports_invalid_results_and_keeps_running(tmp_path: Path) -> None:
    (tmp_path / "returns.py").write_text(RETURNS)
    pool = EnvironmentPool(f"{tmp_path}/returns.py:Returns", processes=ProcessOptions(num_processes=1))
    try:
        await pool.start()
        environment = pool.make()
        assert await environment.reset(episode("seen(user('2'))")) == Observation(messages=[USER], tools=[])
        for failure, expressions in ((EnvironmentFailure, INVALID), (InvalidReward, INVALID_REWARDS)):
            for name, expression in expressions.items():
                with pytest.raises(EnvironmentFailure) as raised:
                    await environment.step(says(expression))
                assert type(raised.value) is failure, name
                if expression != "None":
                    with pytest.raises(failure):
                        await environment.judge_truncated(says(expression), "turns")
        assert await environment.judge_truncated(says("None"), "turns") is None
        assert await environment.judge_truncated(says("Done(reward=1)"), "turns") == Done(reward=1.0)
        with pytest.raises(EnvironmentFailure, match="must not return an Observation"):
            await environment.judge_truncated(says("seen(user('2'))"), "turns")
        await environment.close()
        for expression in INVALID.values():
            environment = pool.make()
            with pytest.raises(EnvironmentFailure):
                await environment.reset(episode(expression))
            await environment.close()
    finally:
        await pool.close()
