"""The tool environment: order of calls, malformed and invalid calls, limits, and the end of an episode; the calculator."""

import asyncio
import datetime
import functools
import json
import math
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.environments.episodes import calls, episode, says
from titanrl.environments import (
    Calculator,
    Done,
    Environment,
    EnvironmentFailure,
    EnvironmentTimeout,
    Episode,
    Observation,
    ToolEnvironment,
    ToolError,
    Toolset,
)
from titanrl.environments.interface import checked
from titanrl.environments.tools import evaluate, functions_of


class Shop:
    """A shop."""

    currency = "EUR"

    def __init__(self) -> None:
        self.log: list[str] = []

    def price(self, article: str, number: int = 1) -> dict[str, Any]:
        """Return the price of an article.

        Args:
            article: Name of the article.
            number: Number of pieces.
        """
        self.log.append(article)
        if article == "air":
            raise ToolError("Air is free.")
        if article == "bomb":
            raise RuntimeError("boom")
        return {"price": 2 * number, "currency": self.currency}

    async def wait(self, seconds: float) -> str:
        """Wait for a while.

        Args:
            seconds: Time.
        """
        await asyncio.sleep(seconds)
        return "done"

    @staticmethod
    def hours() -> str:
        """Return the opening hours."""
        return "9 to 5"

    @property
    def size(self) -> int:
        """Number of calls."""
        return len(self.log)

    def _private(self) -> None:
        pass


class Notes(Toolset):
    """Stateful tools."""

    def __init__(self) -> None:
        self.closed = False

    async def start(self, episode: Episode) -> None:
        self.pages = episode.entry["pages"]
        self.num_read = 0

    def read(self, number: int) -> str:
        """Return a page."""
        self.num_read += 1
        return str(self.pages[number])

    def rewards(self) -> dict[str, float]:
        return {"read": float(self.num_read)}

    async def close(self) -> None:
        self.closed = True


def double(value: int) -> int:
    """Double a number."""
    return 2 * value


def contents(observation: Observation | Done) -> list[str]:
    assert isinstance(observation, Observation)
    return [message["content"] for message in observation.messages]


def test_public_methods_are_tools_in_order() -> None:
    environment = ToolEnvironment([Shop(), double, Calculator()], system_prompt="Be brief.")
    assert isinstance(environment, Environment)
    first = asyncio.run(environment.reset(episode("How much?")))
    assert [tool.name for tool in first.tools] == ["price", "wait", "hours", "double", "calculate"]
    assert first.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How much?"}]
    assert isinstance(asyncio.run(environment.step(says("2"))), Done)


async def test_calls_of_a_message_run_in_order() -> None:
    shop = Shop()
    environment = ToolEnvironment([shop, double])
    await environment.reset(episode())
    found = await environment.step(
        calls(("price", {"article": "tea"}), ("wait", {"seconds": 0}), ("price", {"article": "jam", "number": "3"}),
              ("double", {"value": 4}), ("hours", {}))
    )  # fmt: skip
    assert shop.log == ["tea", "jam"]
    assert environment.counts.succeeded == 5
    prices = [json.dumps({"price": price, "currency": "EUR"}) for price in (2, 6)]
    assert contents(found) == [prices[0], "done", prices[1], "8", "9 to 5"]
    assert isinstance(found, Observation)
    assert found.messages[1] == {"role": "tool", "tool_call_id": "id_1", "name": "wait", "content": "done"}
    assert found.tools == ()


async def test_failed_calls_are_explained_and_counted() -> None:
    environment = ToolEnvironment(Shop(), failed_call_reward=-0.25)
    await environment.reset(episode())
    found = await environment.step(
        calls(("cost", {}), ("", {}), ("price", '{"article": "tea"'), ("price", "[1]"), ("price", '{"article": "tea"}'),
              ("price", {"number": 2}), ("price", {"article": "air"}), ("hours", {}))
    )  # fmt: skip
    counts = environment.counts
    assert (counts.unknown, counts.malformed, counts.wrong, counts.succeeded) == (2, 3, 2, 1)
    assert isinstance(found, Observation)
    assert found.reward == -0.25 * 7
    texts = contents(found)
    assert texts[0] == "There is no tool cost. The tools are price, wait, hours."
    assert texts[1].startswith("The call does not name a tool.")
    assert texts[2].startswith("The call to price is malformed: its arguments are not JSON (")
    assert texts[2].endswith('Write the arguments as one JSON object: {"article": ..., "number": ...}')
    assert "not a JSON object" in texts[3]
    assert "the call is incomplete" in texts[4]
    assert texts[5] == "Invalid call to price: article is missing. price takes article, number (optional)."
    assert texts[6:] == ["Air is free.", "9 to 5"]


async def test_calls_beyond_the_limit_are_refused_then_the_episode_ends() -> None:
    environment = ToolEnvironment(double, max_calls=2)
    await environment.reset(episode())
    found = await environment.step(calls(*[("double", {"value": value}) for value in (1, 2, 3)]))
    assert contents(found) == ["2", "4", "Not run: all 2 calls have been used. Answer without further calls."]
    assert environment.counts.refused == 1
    assert isinstance(await environment.step(calls(("double", {"value": 4}))), Done)
    assert environment.counts.succeeded == 2


def test_exception_of_a_tool_fails_the_episode() -> None:
    environment = ToolEnvironment(Shop(), call_timeout_s=0.01)
    asyncio.run(environment.reset(episode()))
    with pytest.raises(EnvironmentFailure, match="tool price: raised RuntimeError: boom"):
        asyncio.run(environment.step(calls(("price", {"article": "bomb"}))))
    with pytest.raises(EnvironmentTimeout, match=r"tool wait: took longer than 0\.01 s"):
        asyncio.run(environment.step(calls(("wait", {"seconds": 30}))))


async def test_long_results_are_truncated() -> None:
    environment = ToolEnvironment(Notes(), max_result_chars=10)
    await environment.reset(episode(pages=["a" * 25]))
    assert contents(await environment.step(calls(("read", {"number": 0})))) == [f"{'a' * 10}... (15 more characters)"]


async def test_stateful_tools_start_reward_and_close() -> None:
    notes = Notes()
    environment = ToolEnvironment(notes)
    first = await environment.reset(episode(pages=["one", "two"]))
    assert [tool.name for tool in first.tools] == ["read"]
    assert contents(await environment.step(calls(("read", {"number": 1})))) == ["two"]
    end = await environment.step(says("two"))
    numbers = {"tool_calls": 1.0, "failed_calls": 0.0, "malformed_calls": 0.0}
    assert end == Done(rewards={"read": 1.0}, metrics=numbers)
    await environment.close()
    assert notes.closed


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ([double, double], "two tools have this name"),
        (Shop, r"got the class Shop\). Write Shop\(\)"),
        (object(), "object has no public method"),
        ([], "at least one tool is required"),
    ],
)
def test_unusable_tools_are_rejected(tools: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ToolEnvironment(tools)


def test_inherited_methods_are_tools_unless_hidden() -> None:
    class Corner(Shop):
        wait = None  # type: ignore[assignment]

        def close_early(self) -> str:
            """Close."""
            return ""

    assert [function.__name__ for function in functions_of(Corner())] == ["price", "hours", "close_early"]


arguments = (
    st.none() | st.text(max_size=20) | st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=5), max_size=3)
)
names = st.sampled_from(["double", "hours", "price", "", "other"]) | st.text(max_size=5)


@given(st.lists(st.lists(st.tuples(names, arguments), max_size=4), max_size=4))
def test_any_calls_get_one_reply_each(messages: list[list[tuple[str, Any]]]) -> None:
    async def play() -> None:
        environment = ToolEnvironment([double, Shop.hours], max_calls=6)
        await environment.reset(episode())
        for message in messages:
            found = await environment.step(calls(*message))
            if isinstance(found, Done):
                return
            assert [reply["tool_call_id"] for reply in found.messages] == [f"id_{index}" for index in range(len(message))]
            json.dumps(found.messages)
        counts = environment.counts
        assert counts.run <= 6
        assert counts.run + counts.refused == sum(map(len, messages))

    asyncio.run(play())


async def test_environment_reports_its_numbers_of_calls() -> None:
    environment = ToolEnvironment(Notes(), max_calls=4)
    await environment.reset(episode(pages=["one"]))
    first = await environment.step(calls(("read", {"number": 0}), ("read", "{"), ("write", {}), ("read", {"page": 9})))
    second = await environment.step(calls(("read", {"number": 0})))
    assert [found.metrics for found in [first, second, await environment.step(says("one"))]] == [
        {"tool_calls": 4.0, "failed_calls": 3.0, "malformed_calls": 1.0},
        {"tool_calls": 5.0, "failed_calls": 4.0, "malformed_calls": 1.0},  # the fifth one is refused
        {"tool_calls": 5.0, "failed_calls": 4.0, "malformed_calls": 1.0},
    ]


class Odd:
    """Returns values of many types."""

    def get(self, kind: str) -> Any:
        """Return a value.

        Args:
            kind: Name of the value.
        """
        return ODD[kind]


ODD = {
    "bytes": b"2",
    "bytes in a list": [1, {"a": bytearray(b"2")}],
    "bytes as key": {b"a": 1},
    "huge integer": 10**5000,
    "surrogate": "\ud800",
    "surrogate in a list": ["\udfff"],
    "NUL": "a\0",
    "deep": functools.reduce(lambda inner, _: [inner], range(100_000), 0),
    "number": 2.5,
    "list": [1, "a", None],
    "nothing": None,
    "date": datetime.date(2026, 11, 26),
    "special": "<|im_end|>",
}


@pytest.mark.parametrize("kind", list(ODD)[:8])
async def test_result_that_is_not_text_fails_the_episode(kind: str) -> None:
    environment = ToolEnvironment(Odd())
    await environment.reset(episode())
    with pytest.raises(EnvironmentFailure) as raised:
        checked(await environment.step(calls(("get", {"kind": kind}))))
    assert str(raised.value).isascii()
    assert len(str(raised.value)) < 400


def test_other_results_are_json() -> None:
    environment = ToolEnvironment(Odd())
    messages = asyncio.run(environment.step(calls(*(("get", {"kind": kind}) for kind in list(ODD)[8:])))).messages  # type: ignore[union-attr]
    assert [message["content"] for message in messages] == ["2.5", '[1, "a", null]', "null", '"2026-11-26"', "<|im_end|>"]


async def test_truncated_episode_keeps_the_rewards_of_its_tools() -> None:
    numbers = {"tool_calls": 1.0, "failed_calls": 0.0, "malformed_calls": 0.0}
    environment = ToolEnvironment(Notes())
    await environment.reset(episode(pages=["one", "two"]))
    await environment.step(calls(("read", {"number": 1})))
    cut_off = calls(("read", {"number": 0}))
    assert [done.metrics for done in [await environment.judge_truncated(message, "turns") for message in (None, cut_off)]] == [
        numbers
    ] * 2


def test_malformed_call_without_a_name_is_explained() -> None:
    environment = ToolEnvironment(Shop())
    found = asyncio.run(environment.step(calls(("", '{"name": "price", "arg'), ("", '{"number": 1, "number": 2}'))))
    assert isinstance(found, Observation)
    first, second = (message["content"] for message in found.messages)
    assert first.startswith("The call is malformed: its arguments are not JSON (")
    assert second.startswith("The call is malformed: its arguments have the key number twice. The tools are price, ")
    assert environment.counts.malformed == 2


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("7 + 5 - 3", "9"),
        (" (3 + 4) * 2 ", "14"),
        ("8 / 2", "4"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("+-3", "-3"),
        ("10 ** 300", "1" + "0" * 300),
        ("1_000", "1000"),
        ("1.5e3", "1500"),
    ],
)
def test_calculator_computes(expression: str, result: str) -> None:
    assert Calculator().calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "Not an arithmetic expression"),
        ("7 +", "Not an arithmetic expression"),
        ("1\x000", "Not an arithmetic expression"),
        ("1 / 0", "Division by zero"),
        ("2 ** 3 ** 4 ** 5", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("10 ** 309", "too large"),
        ("10.0 ** 309", "too large"),
        ("1e999", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("3 ^ 2", "Write powers as"),
        ("1,000 + 1", "without commas"),
        ("__import__('os').getcwd()", "Only numbers"),
        ("True + 1", "Only numbers"),
        ("x", "Only numbers"),
        ("'a' * 9", "Only numbers"),
        ("1 if 2 else 3", "Only numbers"),
        ("1j", "Only numbers"),
        ("(" * 400, "nested too deeply|Not an arithmetic expression"),
        ("1" + " " * 600, "longer than 500 characters"),
    ],
)
def test_calculator_rejects_invalid_or_large_expressions(expression: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        Calculator().calculate(expression)


numbers = st.integers(-50, 50).map(str) | st.floats(0, 9, allow_nan=False).map(lambda number: f"{number:.3f}")
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner).map(
        lambda parts: f"({' '.join(parts)})"
    ),
    max_leaves=6,
)


@given(expressions)
def test_calculator_agrees_with_python_and_is_fast(expression: str) -> None:
    began_s = time.thread_time()
    try:
        value = evaluate(expression)
    except ToolError:
        value = None
    assert time.thread_time() - began_s < 2.0
    if value is not None:
        expected = eval(expression)
        assert value == expected or math.isclose(value, expected)
        assert len(Calculator().calculate(expression)) < 400


@given(st.text(alphabet="0123456789+-*/%(). e_j,xX^~&|<>[]{}'\"\n", max_size=40) | st.text(max_size=20))
def test_any_text_gives_a_number_or_an_explanation(text: str) -> None:
    with suppress(ToolError):
        assert isinstance(evaluate(text), int | float)
