"""Rewards of the user: functions from completions to numbers, and how they are called. This module loads no library.

A reward scores one completion or, marked by `group_reward`, all completions of a prompt at once. It returns a number for each,
`TokenRewards`, or a mapping of named parts of either kind. It may be `async`.
"""

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any, Protocol, SupportsFloat

from titanrl.plugins import check_call


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRewards:
    """A reward of one completion that says which of its tokens earned it, for `algorithm.credit: token`.

    The completion's reward is the sum of all of its numbers.

    Example: in `"2 + 2 = 4. 4 + 1 = 6."` the first step is right, and the answer is wrong:
    `TokenRewards(steps=[(10, 1.0), (21, 0.0)], whole=-0.5)`
    """

    tokens: Sequence[float] = ()
    """Reward of each sampled token, with the end-of-sequence token; empty if no token has one."""
    steps: Sequence[tuple[int, float]] = ()
    """Rewards of steps of the text: the number of characters up to the end of the step, and its reward. The token that
    completes this part of the text gets it."""
    whole: float = 0.0
    """Reward of the completion as a whole. Its last token gets it."""

    @property
    def total(self) -> float:
        """Sum of all rewards."""
        return sum((*self.tokens, *(reward for _, reward in self.steps), self.whole))

    def moved(self, num_chars: int) -> "TokenRewards":
        """Return the rewards for a text with so many more characters at its start."""
        return replace(self, steps=[(end + num_chars, reward) for end, reward in self.steps])


Value = SupportsFloat | TokenRewards | Mapping[str, SupportsFloat | TokenRewards]
"""Reward of one completion: a finite number, rewards of its tokens, or several of these by part."""

MAX_PARTS = 32
"""Largest number of parts that one reward returns."""
PART_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)
"""Pattern of the names of parts."""

EXPECTED = "def reward(completion: str, entry: Mapping[str, Any]) -> float"
GROUP_EXPECTED = "def reward(completions: Sequence[str], entry: Mapping[str, Any]) -> Sequence[float]"


class RewardFunction(Protocol):
    """A reward of one completion.

    `entry` has `question`, `answer` and `metadata` of the prompt. A function with parameters named `num_tokens` (tokens of the
    completion), `token_ids` (these tokens) or `finish_reason` (`stop` or `length`) gets them as keywords.

    Example:
        def short_and_right(completion: str, entry: Mapping[str, Any], num_tokens: int) -> dict[str, float]:
            return {"right": float(entry["answer"] in completion.split()), "short": float(num_tokens < 20)}
    """

    def __call__(self, completion: str, entry: Mapping[str, Any], /) -> Value | Awaitable[Value]:
        """Return the reward, or its parts."""
        ...


class GroupRewardFunction(Protocol):
    """A reward of all completions of a prompt, marked by `group_reward`. It returns one value per completion, in their order.

    A function with parameters named `num_tokens`, `token_ids` or `finish_reasons` gets them as keywords, one value per
    completion.

    Example:
        @titanrl.group_reward
        def rare(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
            return [1 / completions.count(completion) for completion in completions]
    """

    def __call__(self, completions: Sequence[str], entry: Mapping[str, Any], /) -> Sequence[Value] | Awaitable[Sequence[Value]]:
        """Return the rewards of the completions."""
        ...


class GroupReward:
    """A function that `group_reward` has marked; calls are passed on to it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Wrap the function."""
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        return self.function(*args, **options)


def group_reward(function: Callable[..., Any]) -> GroupReward:
    """Mark a reward that gets all completions of a prompt at once, and returns one value for each.

    Example:
        @titanrl.group_reward
        def shortest(completions, entry):
            return [float(len(text) == min(map(len, completions))) for text in completions]
    """
    return GroupReward(function)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward with its options, for `GRPO(config, rewards={...})`.

    Example: `GRPO(config, rewards={"right": right, "brevity": Reward(brevity, weight=0.1)})`
    """

    function: Callable[..., Any] | str
    """The function, its import path, or the name of a built-in reward (docs/howto/built_in_rewards.md)."""
    weight: float = field(default=1.0, kw_only=True)
    """Factor of this reward in the sum."""
    weights: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Further factors by returned part; 1 by default."""
    trusted: bool = field(default=False, kw_only=True)
    """True to run it outside the sandbox."""
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Options of a built-in reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The completions of one prompt, as rewards get them.

    Example: `Answers(entry={"answer": "4", ...}, completions=("4",), num_tokens=(2,), finish_reasons=("stop",))`
    """

    entry: Mapping[str, Any]
    """Data of the prompt: `question`, `answer`, `metadata`."""
    completions: tuple[str, ...]
    """Texts."""
    num_tokens: tuple[int, ...]
    """Number of tokens of each."""
    finish_reasons: tuple[str, ...]
    """Reason why each ended."""
    token_ids: tuple[Sequence[int], ...] = ()
    """Tokens of each; empty where no reward asks for them."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Function from token ids to their text; None if a text is not that of all of its tokens, but an episode's last message."""

    def only(self, index: int) -> "Answers":
        """Return the answers without the other completions."""
        one = slice(index, index + 1)
        return Answers(
            entry=self.entry,
            completions=self.completions[one],
            num_tokens=self.num_tokens[one],
            finish_reasons=self.finish_reasons[one],
            token_ids=self.token_ids[one],
            decode=self.decode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The reward of one completion, or the reason why it has none.

    Example: `Scored(reward=1.1, parts={"right": 1.0, "brevity": 1.0})` with a weight of 0.1 for `brevity`
    """

    reward: float | None
    """Weighted sum of the parts; None if one of them failed."""
    parts: Mapping[str, float]
    """Unweighted reward by part."""
    error: str = ""
    """Name of each part that failed, with its error."""
    token_rewards: tuple[float, ...] | None = None
    """Part of `reward` that each sampled token earned; they add up to it. None if no reward is one of tokens."""


class BoundReward:
    """A reward under its name, with the arguments that its function takes."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        """Read the signature of the function."""
        self.name = name
        self.is_group = isinstance(function, GroupReward)
        self.function: Callable[..., Any] = function.function if isinstance(function, GroupReward) else function
        self._keywords = frozenset(keywords_of(function))

    @property
    def is_async(self) -> bool:
        """True for a function or an object whose call is a coroutine."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(type(self.function).__call__)

    @property
    def takes_token_ids(self) -> bool:
        """True if the function has a parameter for the ids of tokens."""
        return "token_ids" in self._keywords

    def call_one(self, answers: Answers, index: int) -> Any:
        """Score one completion; the result may be awaitable."""
        if not self._keywords:
            return self.function(answers.completions[index], answers.entry)
        options: dict[str, object]
        options = {"num_tokens": answers.num_tokens[index], "finish_reason": answers.finish_reasons[index]}
        if self.takes_token_ids:
            options["token_ids"] = list(answers.token_ids[index])
        return self.function(answers.completions[index], answers.entry, **self._taken(options))

    def call_group(self, answers: Answers) -> Any:
        """Score all completions; the result may be awaitable."""
        options = {"num_tokens": list(answers.num_tokens), "finish_reasons": list(answers.finish_reasons)}
        options["token_ids"] = list(map(list, answers.token_ids))
        return self.function(list(answers.completions), answers.entry, **self._taken(options))

    def values(self, returned: object, num_completions: int) -> list[object]:
        """Return what a call for the whole group returned, one value per completion.

        Raises:
            TypeError: It is not one value per completion.
        """
        if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
            raise TypeError(f"the reward returned {returned!a:.60}. Expected one value per completion: `{GROUP_EXPECTED}`.")
        values = list(returned)
        if len(values) != num_completions:
            raise TypeError(f"the reward returned {len(values)} of {num_completions} values. Expected one per completion.")
        return values

    def parts(self, value: object) -> dict[str, float | TokenRewards]:
        """Return a value by part: under the name of this reward, or `name/part` for each of several parts.

        Raises:
            TypeError: It is neither a finite number nor `TokenRewards` of such numbers, nor a mapping of names to them.
        """
        if isinstance(value, float) or not isinstance(value, Mapping):  # the usual type needs no slower check
            return {self.name: _checked(value)}
        if not 0 < len(value) <= MAX_PARTS or not all(isinstance(part, str) and PART_NAME.fullmatch(part) for part in value):
            names = f"{list(value)!a:.60}"
            raise TypeError(f"the reward returned the parts {names}. Expected 1 to {MAX_PARTS} names of letters and digits.")
        return {f"{self.name}/{part}": _checked(number) for part, number in value.items()}

    def _taken(self, options: Mapping[str, object]) -> dict[str, object]:
        return {key: value for key, value in options.items() if key in self._keywords}


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the optional arguments that a reward takes, as keywords."""
    is_group = isinstance(function, GroupReward)
    known = ("num_tokens", "token_ids", "finish_reasons" if is_group else "finish_reason")
    try:
        _, _, *parameters = inspect.signature(function).parameters.values()  # that of the function in a group reward
    except (TypeError, ValueError):  # some builtins have no signature, and some functions too few parameters
        return []
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.name in known and parameter.kind in kinds]


def check_reward(candidate: object, *, key: str, name: str) -> None:
    """Check that an object can be called as a reward.

    Args:
        candidate: The object of the user.
        key: Configuration key, for the error message.
        name: Import path or name of the candidate.

    Raises:
        ValueError: It is not callable, or does not accept the arguments.
    """
    is_group = isinstance(candidate, GroupReward)
    check_call(
        candidate.function if isinstance(candidate, GroupReward) else candidate,
        GroupRewardFunction.__call__ if is_group else RewardFunction.__call__,
        key=key,
        name=name,
        expected=GROUP_EXPECTED if is_group else EXPECTED,
        options=keywords_of(candidate) if callable(candidate) else (),
    )


def _checked(value: object) -> float | TokenRewards:
    """Return a reward of one part with numbers of Python.

    Raises:
        TypeError: One of its numbers is no number, or not a finite one, or a step does not end at an index of the text.
    """
    if not isinstance(value, TokenRewards):
        return _finite(value)
    ends: list[Any] = [end for end, _ in value.steps]
    if not all(isinstance(end, int) and end > 0 for end in ends):
        raise TypeError(f"the reward returned steps that end after {ends!a:.60} characters. Expected whole numbers from 1 up.")
    return TokenRewards(
        tokens=[_finite(reward) for reward in value.tokens],
        steps=[(end, _finite(reward)) for end, reward in value.steps],
        whole=_finite(value.whole),
    )


def _finite(value: object) -> float:
    """Return a reward as a float. A string is not a reward, although `float("1.5")` works.

    Raises:
        TypeError: The value is no number, or not a finite one.
    """
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, SupportsFloat) and not isinstance(value, str) and math.isfinite(number := float(value)):
        return number
    raise TypeError(f"the reward returned {value!a:.60}. Expected a finite number: `{EXPECTED}`.")
