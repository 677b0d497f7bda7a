"""Calls of rewards: arguments, return values, and the signature check at startup."""

import functools
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import cloudpickle
import numpy as np
import pytest

import titanrl
from titanrl.carriers.rewards import Answers, BoundReward, GroupReward, TokenRewards, check_reward

ANSWERS = Answers(
    entry={"question": "2 + 2 =", "answer": "4", "metadata": {}},
    completions=("4", "five"),
    num_tokens=(2, 3),
    finish_reasons=("stop", "length"),
    token_ids=((8, 1), (9, 9, 9)),
)


def plain(completion: str, entry: dict[str, Any]) -> float:
    return float(completion == entry["answer"])


def measured(text: str, data: dict[str, Any], num_tokens: int, *, finish_reason: str) -> str:
    return f"{text} {num_tokens} {finish_reason}"


def read(text: str, data: dict[str, Any], token_ids: list[int]) -> list[int]:
    return [*token_ids, 0]


def rest(completion: str, entry: dict[str, Any], scale: float = 2.0, **other: Any) -> float:
    assert not other
    return scale


class Judge:
    """A reward with a state."""

    def __init__(self, word: str) -> None:
        self.word = word

    def __call__(self, completion: str, entry: dict[str, Any], num_tokens: int) -> float:
        return float(completion == self.word) + num_tokens


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (plain, [1.0, 0.0]),
        (measured, ["4 2 stop", "five 3 length"]),
        (read, [[8, 1, 0], [9, 9, 9, 0]]),
        (rest, [2.0, 2.0]),
        (Judge("five"), [2.0, 4.0]),
        (functools.partial(rest, scale=3.0), [3.0, 3.0]),
        (lambda completion, entry: len(completion), [1, 4]),
    ],
)
def test_reward_gets_the_arguments_it_accepts(function: Callable[..., Any], expected: list[object]) -> None:
    reward = BoundReward("answer", function)
    assert [reward.call_one(ANSWERS, index) for index in range(2)] == expected
    assert not reward.is_group


def test_group_reward_gets_all_completions() -> None:
    @titanrl.group_reward
    def order(
        completions: list[str], entry: Any, finish_reasons: list[str], num_tokens: list[int], token_ids: Any
    ) -> list[Any]:
        return [(completions, entry["answer"], num_tokens, token_ids), finish_reasons]

    reward = BoundReward("answer", order)
    assert reward.is_group
    assert reward.call_group(ANSWERS) == [(["4", "five"], "4", [2, 3], [[8, 1], [9, 9, 9]]), ["stop", "length"]]


def test_decorated_function_is_callable_and_pickled_by_value() -> None:
    offset = 3.0

    @titanrl.group_reward
    def shifted(completions: list[str], entry: dict[str, Any]) -> list[float]:
        """Shift."""
        return [offset + len(text) for text in completions]

    loaded = pickle.loads(cloudpickle.dumps(shifted))
    assert isinstance(loaded, GroupReward)
    assert loaded(["a", "bc"], {}) == shifted(["a", "bc"], {}) == [4.0, 5.0]
    assert (loaded.__name__, loaded.__doc__) == ("shifted", "Shift.")


def test_async_functions_and_objects_are_recognized() -> None:
    async def waits(completion: str, entry: dict[str, Any]) -> float:
        return 1.0

    class Waits:
        async def __call__(self, completion: str, entry: dict[str, Any]) -> float:
            return 1.0

    flags = [
        BoundReward("answer", f).is_async
        for f in (waits, titanrl.group_reward(waits), functools.partial(waits), Waits(), plain)
    ]
    assert flags == [True, True, True, True, False]


def test_mapping_becomes_parts() -> None:
    parts = BoundReward("judge", plain).parts({"style": 0.5, "facts": 1})
    assert parts == {"judge/style": 0.5, "judge/facts": 1.0}


@pytest.mark.parametrize("returned", [[1.0, 2.0], (1.0, 2.0), np.array([1.0, 2.0]), iter([1.0, 2.0])])
def test_group_returns_one_value_per_completion(returned: object) -> None:
    assert BoundReward("judge", plain).values(returned, 2) == [1.0, 2.0]


@pytest.mark.parametrize("returned", [1.0, None, [1.0], "ab", {"a": 1.0, "b": 2.0}])
def test_wrong_number_of_values_is_an_error(returned: object) -> None:
    with pytest.raises(TypeError, match="the reward returned"):
        BoundReward("judge", plain).values(returned, 2)


@pytest.mark.parametrize("function", [plain, measured, rest, Judge(""), titanrl.group_reward(plain), len.__call__])
def test_valid_signatures_are_accepted(function: object) -> None:
    check_reward(function, key="data.rewards.x", name="x")


@pytest.mark.parametrize(
    ("function", "problem", "expected"),
    [
        (lambda completion: 0.0, "wrong signature: too many positional arguments", "def reward(completion: str, entry: "),
        (lambda a, b, c: 0.0, "wrong signature: missing a required argument: 'c'", "def reward(completion: str, entry: "),
        (
            lambda a, b, *, finish_reasons: 0.0,
            "wrong signature: missing a required argument: 'finish_reasons'",
            "def reward(completion: str, entry: ",
        ),
        (3, "not callable", "def reward(completion: str, entry: "),
        (titanrl.group_reward(lambda a: []), "wrong signature: too many", "def reward(completions: Sequence[str], entry: "),
    ],
)
def test_wrong_signature_shows_the_expected_one(function: object, problem: str, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^data\.rewards\.x: {problem}") as raised:
        check_reward(function, key="data.rewards.x", name="mine")
    assert f"Write it as `{expected}" in str(raised.value)


def of_trl(completions: list[str], answer: list[str], level: list[int], scale: float = 2.0, **kwargs: object) -> list[float]:
    return [scale * level[0] * (text == right) for text, right in zip(completions, answer, strict=True)]


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth and data_source == "a" and extra_info == {"index": 3})


@pytest.mark.parametrize(
    ("function", "passed"),
    [
        (
            lambda prompts, completions, **kwargs: [1.0],
            'prompts=[entry["question"]] * len(completions), completions=completions',
        ),
        (lambda completions, **kwargs: [1.0], "completions=completions"),
        (
            lambda completions, prompts, **kwargs: [1.0],
            'completions=completions, prompts=[entry["question"]] * len(completions)',
        ),
        (of_trl, 'completions=completions, answer=[entry["answer"]] * len(completions), level=[entry["metadata"]["level"]]'),
        (titanrl.group_reward(of_trl), 'completions=completions, answer=[entry["answer"]] * len(completions), level='),
        (
            of_verl,
            'data_source=entry["metadata"]["data_source"], solution_str=completion, ground_truth=entry["answer"], extra_info=',
        ),
    ],
)
def test_rewards_written_for_other_libraries_are_refused_with_the_conversion(function: Any, passed: str) -> None:
    with pytest.raises(
        ValueError, match=r"^data\.rewards\.x: these are the arguments of TRL or verl, .*\(got mine\)\."
    ) as raised:
        check_reward(function, key="data.rewards.x", name="mine")
    conversion = str(raised.value).rpartition(", `")[2].removesuffix("`.")
    assert passed in conversion
    if "lambda>" in conversion:
        return
    converted = eval(conversion, {"titanrl": titanrl, "of_trl": of_trl, "of_verl": of_verl})
    check_reward(converted, key="data.rewards.x", name="mine")
    metadata = {"level": 3, "data_source": "a", "extra_info": {"index": 3}}
    if isinstance(converted, GroupReward):
        assert converted(["4", "5"], {"question": "2 + 2 =", "answer": "4", "metadata": metadata}) == [6.0, 0.0]
    else:
        assert converted("4", {"question": "2 + 2 =", "answer": "4", "metadata": metadata}) == 1.0


@pytest.mark.parametrize(
    "function",
    [
        lambda entry, completion: 0.0,
        lambda prompt, response: 0.0,
        lambda completion, answer: 0.0,
        lambda question, completion, num_tokens=0: 0.0,
        titanrl.group_reward(lambda entry, completions: [0.0]),
    ],
)
def test_reward_with_its_arguments_in_another_order_is_refused(function: object) -> None:
    with pytest.raises(ValueError, match=r"^data\.rewards\.x: the first argument is the completion .*Write it as `def reward"):
        check_reward(function, key="data.rewards.x", name="mine")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
        (np.float16(0.25), 0.25),
        (np.int64(-3), -3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (True, 1.0),
        (-0.0, 0.0),
        (10**300, 1e300),
    ],
)
def test_numbers_of_every_type_become_floats(value: Any, number: float) -> None:
    parts = BoundReward("x", plain).parts(value)
    assert parts == {"x": number}
    assert type(parts["x"]) is float


def test_other_values_are_type_errors() -> None:
    numbers = [
        10**400,
        -(10**5000),
        Decimal("NaN"),
        np.float32("inf"),
        float("nan"),
        1j,
        b"1",
        np.array([1.0, 2.0]),
        "1",
        [1.0],
    ]
    mappings = [{}, {"style": "good"}, {"a b": 1.0}, {1: 1.0}, {"x": float("nan")}]
    for value in (*numbers, None, *mappings):  # not parameters, because a name of the test could not show the second one
        with pytest.raises(TypeError, match=r"^the reward returned .*Expected "):
            BoundReward("x", plain).parts(value)


def test_token_rewards_with_an_infinite_sum_are_refused() -> None:
    with pytest.raises(TypeError, match="returned inf"):
        BoundReward("x", plain).parts(TokenRewards(tokens=[1e308, 1e308]))


def test_token_rewards_become_parts() -> None:
    reward = BoundReward("process", plain)
    made = TokenRewards(tokens=[np.float32(0.5), 1], steps=[(2, True)], whole=0)
    checked = TokenRewards(tokens=[0.5, 1.0], steps=[(2, 1.0)], whole=0.0)
    assert reward.parts(made) == {"process": checked}
    assert reward.parts({"steps": made, "short": 2}) == {"process/steps": checked, "process/short": 2.0}
    assert checked.total == 2.5
    assert TokenRewards(steps=[(2, 1.0)]).moved(3) == TokenRewards(steps=[(5, 1.0)])


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (TokenRewards(tokens=[1.0, float("nan")]), "returned nan. Expected a finite number"),
        (TokenRewards(whole=float("inf")), "returned inf. Expected a finite number"),
        (TokenRewards(steps=[(3, "1.0")]), "returned '1.0'. Expected a finite number"),  # type: ignore[list-item]
        (TokenRewards(steps=[(0, 1.0)]), r"steps that end after \[0\] characters. Expected positive integers"),
        (TokenRewards(steps=[(1.5, 1.0)]), r"steps that end after \[1.5\] characters"),  # type: ignore[list-item]
    ],
)
def test_invalid_token_rewards_are_rejected(value: TokenRewards, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        BoundReward("process", plain).parts(value)
