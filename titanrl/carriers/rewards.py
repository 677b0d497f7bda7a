"""Interface of custom rewards: Protocols, return types, and the calls of reward functions.

A reward scores one completion or, decorated with `group_reward`, all completions of a prompt together. For each completion, it
returns a number, `TokenRewards`, or a mapping of named parts of either type. It may be `async`. This module imports no
third-party library.
"""

import inspect
import json
import math
import pickle
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any, Literal, Protocol, SupportsFloat

from titanrl.base.errors import TitanRLError
from titanrl.base.plugins import Plugin, Point, check_call, is_async, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRewards:
    """A reward of one completion that is assigned to its tokens, for `algorithm.credit: token`.

    The reward of the completion is the sum of all numbers.

    Example: in `"2 + 2 = 4. 4 + 1 = 6."` the first step is right, but the answer is wrong:
    `TokenRewards(steps=[(10, 1.0), (21, 0.0)], whole=-0.5)`
    """

    tokens: Sequence[float] = ()
    """Reward of each sampled token, including the end-of-sequence token; empty if tokens have no individual rewards."""
    steps: Sequence[tuple[int, float]] = ()
    """End position and reward of each step of the text. The position is the number of characters up to the end of the step;
    the token that completes the step gets the reward."""
    whole: float = 0.0
    """Reward of the completion as a whole; its last token gets it."""

    @property
    def total(self) -> float:
        """Sum of all rewards."""
        return sum((*self.tokens, *(reward for _, reward in self.steps), self.whole))

    def moved(self, num_chars: int) -> "TokenRewards":
        """Return the rewards for the same text with `num_chars` characters prepended."""
        return replace(self, steps=[(end + num_chars, reward) for end, reward in self.steps])


Value = SupportsFloat | TokenRewards | Mapping[str, SupportsFloat | TokenRewards]
"""Reward of one completion: a finite number, token rewards, or a mapping of part names to either."""

MAX_PARTS = 32
"""Largest number of parts that one reward may return."""
PART_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)
"""Pattern of part names."""

EXPECTED = "def reward(completion: str, entry: Mapping[str, Any]) -> float"
_ANSWERS = ("answer", "answers", "ground_truth", "label", "labels", "solution", "solutions", "target", "targets")
"""Names of the reference answer in rewards that are written for other libraries, which pass columns instead of an entry."""
GROUP_EXPECTED = "def reward(completions: Sequence[str], entry: Mapping[str, Any]) -> Sequence[float]"


class RewardFunction(Protocol):
    """A reward of one completion.

    `entry` has the keys `question`, `answer` and `metadata` of the prompt. A function can also declare parameters named
    `num_tokens` (tokens of the completion), `token_ids` (their ids), `raw_completion` (their text with special tokens) or
    `finish_reason` (`stop` or `length`). They are passed as keyword arguments.

    Example:
        def short_and_right(completion: str, entry: Mapping[str, Any], num_tokens: int) -> dict[str, float]:
            return {"right": float(entry["answer"] in completion.split()), "short": float(num_tokens < 20)}
    """

    def __call__(self, completion: str, entry: Mapping[str, Any], /) -> Value | Awaitable[Value]:
        """Return the reward, or its parts."""


class GroupRewardFunction(Protocol):
    """A reward of all completions of a prompt, decorated with `group_reward`. It returns one value per completion, in order.

    A function can also declare parameters named `num_tokens`, `token_ids`, `raw_completions` or `finish_reasons`. They are
    passed as keyword arguments with one value per completion.

    Example:
        @titanrl.group_reward
        def rare(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
            return [1 / completions.count(completion) for completion in completions]
    """

    def __call__(self, completions: Sequence[str], entry: Mapping[str, Any], /) -> Sequence[Value] | Awaitable[Sequence[Value]]:
        """Return the rewards of the completions."""


class GroupReward:
    """Callable wrapper that marks a function as a group reward; created by `group_reward`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        update_wrapper(self, function)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        return self.function(*args, **options)


def group_reward(function: Callable[..., Any]) -> GroupReward:
    """Decorate a reward that takes all completions of a prompt and returns one value for each; see `GroupRewardFunction`."""
    return GroupReward(function)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its options, for `GRPO(config, rewards={...})`.

    Example: `GRPO(config, rewards={"right": right, "brevity": Reward(brevity, weight=0.1)})`
    """

    function: Callable[..., Any] | str
    """Function, its import path, or the name of a built-in reward (docs/howto/built_in_rewards.md)."""
    weight: float = field(default=1.0, kw_only=True)
    """Factor of this reward in the sum of rewards."""
    weights: Mapping[str, float] = field(default_factory=dict, kw_only=True)
    """Additional factors by returned part; 1 by default."""
    trusted: bool = field(default=False, kw_only=True)
    """True to run the function outside the sandbox."""
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Options of a built-in reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The completions of one prompt, as input of the rewards.

    Example: `Answers(entry={"answer": "4", ...}, completions=("4",), num_tokens=(2,), finish_reasons=("stop",))`
    """

    entry: Mapping[str, Any]
    """Data of the prompt: `question`, `answer`, `metadata`."""
    completions: tuple[str, ...]
    """Text of each completion."""
    num_tokens: tuple[int, ...]
    """Number of tokens of each completion."""
    finish_reasons: tuple[str, ...]
    """Finish reason of each completion."""
    token_ids: tuple[Sequence[int], ...] = ()
    """Token ids of each completion; empty if no reward needs them."""
    decode: Callable[[Sequence[int]], str] | None = None
    """Function that decodes token ids to text; None for an episode, whose text is only its last message."""
    raw_completions: tuple[str, ...] = ()
    """Text of the tokens of each completion with special tokens; empty if no reward needs it."""
    decode_raw: Callable[[Sequence[int]], str] | None = None
    """Function that decodes token ids to text with special tokens; None if there is no tokenizer."""

    def with_raw(self) -> "Answers":
        """Return the answers with `raw_completions`."""
        if self.decode_raw is None:
            return replace(self, raw_completions=self.completions)
        return replace(self, raw_completions=tuple(map(self.decode_raw, self.token_ids)))

    def only(self, index: int) -> "Answers":
        """Return the answers reduced to one completion."""
        one = slice(index, index + 1)
        return replace(
            self,
            completions=self.completions[one],
            num_tokens=self.num_tokens[one],
            finish_reasons=self.finish_reasons[one],
            token_ids=self.token_ids[one],
            raw_completions=self.raw_completions[one],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The reward of one completion, or the error of a failed reward.

    Example: `Scored(reward=1.1, parts={"right": 1.0, "brevity": 1.0})` with a weight of 0.1 for `brevity`
    """

    reward: float | None
    """Weighted sum of the parts; None if one of them failed."""
    parts: Mapping[str, float]
    """Unweighted reward by part."""
    error: str = ""
    """Name and error of each failed part."""
    token_rewards: tuple[float, ...] | None = None
    """Reward of each sampled token; they add up to `reward`. None if no reward returned `TokenRewards`."""


class BoundReward:
    """A named reward function, called with the keyword arguments that it accepts."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.is_group = isinstance(function, GroupReward)
        self.function: Callable[..., Any] = function.function if isinstance(function, GroupReward) else function
        self.is_async = is_async(self.function)
        self._keywords = frozenset(keywords_of(function))

    @property
    def takes_token_ids(self) -> bool:
        """True if the function has the parameter `token_ids`."""
        return "token_ids" in self._keywords

    @property
    def takes_raw(self) -> bool:
        """True if the function has the parameter `raw_completion`, or `raw_completions` for a group reward."""
        return not self._keywords.isdisjoint(("raw_completion", "raw_completions"))

    def call_one(self, answers: Answers, index: int) -> Any:
        """Call the function for one completion; the result may be awaitable."""
        if not self._keywords:
            return self.function(answers.completions[index], _copied(answers.entry))
        options: dict[str, object]
        options = {"num_tokens": answers.num_tokens[index], "finish_reason": answers.finish_reasons[index]}
        if self.takes_token_ids:
            options["token_ids"] = list(answers.token_ids[index])
        if self.takes_raw:
            options["raw_completion"] = answers.raw_completions[index]
        return self.function(answers.completions[index], _copied(answers.entry), **self._taken(options))

    def call_group(self, answers: Answers) -> Any:
        """Call the function for all completions; the result may be awaitable."""
        options: dict[str, object]
        options = {
            "num_tokens": list(answers.num_tokens),
            "finish_reasons": list(answers.finish_reasons),
            "raw_completions": list(answers.raw_completions),
            "token_ids": list(map(list, answers.token_ids)),
        }
        return self.function(list(answers.completions), _copied(answers.entry), **self._taken(options))

    def values(self, returned: object, num_completions: int) -> list[object]:
        """Convert the return value of a group call to a list; raise `TypeError` unless it has one value per completion."""
        if isinstance(returned, str | Mapping | Set) or not isinstance(returned, Iterable):
            raise TypeError(f"the reward returned {returned!a:.60}. Expected one value per completion: `{GROUP_EXPECTED}`.")
        values = list(returned)
        if len(values) != num_completions:
            raise TypeError(f"the reward returned {len(values)} of {num_completions} values. Expected one per completion.")
        return values

    def parts(self, value: object) -> dict[str, float | TokenRewards]:
        """Return a value by part name: the name of this reward, or `name/part` for each part of a mapping.

        Raise `TypeError` if the value is not a finite number, not `TokenRewards` of finite numbers, and not a mapping of names
        to either.
        """
        if isinstance(value, float) or not isinstance(value, Mapping):  # the fast check covers the usual type
            return {self.name: _checked(value)}
        if not 0 < len(value) <= MAX_PARTS or not all(isinstance(part, str) and PART_NAME.fullmatch(part) for part in value):
            names = f"{list(value)!a:.60}"
            raise TypeError(f"the reward returned the parts {names}. Expected 1 to {MAX_PARTS} names of letters and digits.")
        return {f"{self.name}/{part}": _checked(number) for part, number in value.items()}

    def _taken(self, options: Mapping[str, object]) -> dict[str, object]:
        return {key: value for key, value in options.items() if key in self._keywords}


def _copied(entry: Mapping[str, Any]) -> Any:
    # Other calls read the entry, too. `copy.deepcopy` raises an audit event for every value, which calls the sandbox's hook.
    return pickle.loads(pickle.dumps(entry, pickle.HIGHEST_PROTOCOL))


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """Return the names of the optional keyword arguments that a reward accepts."""
    is_group = isinstance(function, GroupReward)
    known = (
        "num_tokens",
        "token_ids",
        *(("raw_completions", "finish_reasons") if is_group else ("raw_completion", "finish_reason")),
    )
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in _parameters(function)[2:] if parameter.name in known and parameter.kind in kinds]


def check_reward(candidate: object, *, key: str, name: str) -> None:
    """Check that an object can be called as a reward.

    Args:
        candidate: User-defined object.
        key: Configuration key, for error messages.
        name: Import path or name of the candidate.

    Raises:
        ValueError: The candidate is not callable, or does not accept the arguments.
    """
    is_group = isinstance(candidate, GroupReward)
    expected = GROUP_EXPECTED if is_group else EXPECTED
    if conversion := _conversion(candidate):
        rule = "these are the arguments of TRL or verl, which pass columns; here, entry has those of one prompt"
        raise ValueError(f"{key}: {rule} (got {name}). Convert it in one line, `{conversion}`.")
    first, second = [*(parameter.name for parameter in _parameters(candidate)), "", ""][:2]
    if first in ("entry", "prompt") or second.startswith("completion") or second in _ANSWERS:
        rule = 'the first argument is the completion and the second the entry of the prompt, with entry["answer"]'
        raise ValueError(f"{key}: {rule} (got {name}({first}, {second})). Write it as `{expected}`.")
    check_call(
        candidate.function if isinstance(candidate, GroupReward) else candidate,
        GroupRewardFunction.__call__ if is_group else RewardFunction.__call__,
        key=key,
        name=name,
        expected=expected,
        options=keywords_of(candidate) if callable(candidate) else (),
    )


def custom_reward(plugin: Plugin) -> Callable[..., Any]:
    """Load and check a user-defined reward function of any of the signatures that `BoundReward` accepts."""
    function: Callable[..., Any] = plugin.load()
    check_reward(function, key=plugin.key, name=plugin.name)
    return function


POINT = Point(
    key="data.rewards",
    argument="rewards",
    protocol=RewardFunction.__call__,
    expected=EXPECTED,
    checked=lambda reward, plugin, config: check_reward(reward, key=plugin.key, name=plugin.name),
)


def _parameters(candidate: object) -> list[inspect.Parameter]:
    """Return the parameters of a reward; empty if it is not callable, or a builtin without a signature."""
    try:
        return list(inspect.signature(candidate).parameters.values())  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


def _conversion(candidate: Any) -> str:
    """Return the code that converts a reward that is written for TRL or verl; empty for another function."""
    parameters = {parameter.name: parameter for parameter in _parameters(candidate)}
    names, is_verl = [*parameters], parameters.keys() >= {"solution_str", "ground_truth"}
    takes_columns = names[1:2] and (names[1] in _ANSWERS or parameters[names[1]].kind is inspect.Parameter.VAR_KEYWORD)
    if not (is_verl or {*names[:2]} == {"prompts", "completions"} or (names[0:1] == ["completions"] and takes_columns)):
        return ""
    passed = []
    for name, parameter in parameters.items():
        if name == "extra_info" or (parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD):
            column = {"prompts": "question", **dict.fromkeys(_ANSWERS, "answer")}.get(name)
            value = f'entry["metadata"]["{name}"]' if column is None else f'entry["{column}"]'
            value = value if is_verl else f"[{value}] * len(completions)"
            passed.append(f"{name}=" + {"completions": "completions", "solution_str": "completion"}.get(name, value))
    function, mark = name_of(candidate), "" if is_verl else "titanrl.group_reward"
    return f"{mark}(lambda completion{'' if is_verl else 's'}, entry: {function}({', '.join(passed)}))"


def _checked(value: object) -> float | TokenRewards:
    """Return the value of one part with all numbers converted to Python floats; raise `TypeError` for anything else."""
    if not isinstance(value, TokenRewards):
        return _finite(value)
    ends: list[Any] = [end for end, _ in value.steps]
    if not all(isinstance(end, int) and end > 0 for end in ends):
        raise TypeError(f"the reward returned steps that end after {ends!a:.60} characters. Expected positive integers.")
    checked = TokenRewards(
        tokens=[_finite(reward) for reward in value.tokens],
        steps=[(end, _finite(reward)) for end, reward in value.steps],
        whole=_finite(value.whole),
    )
    _finite(checked.total)
    return checked


def _finite(value: object) -> float:
    """Convert a reward to a float. Raise `TypeError` for a string, although `float("1.5")` works, and if it is not finite."""
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, int) and abs(value) > 1 << 1023:  # too large for a float, and perhaps for a text
        raise TypeError(f"the reward returned an integer of {value.bit_length()} bits. Expected a finite number: `{EXPECTED}`.")
    if isinstance(value, SupportsFloat) and not isinstance(value, str):
        try:
            number = float(value)
        except Exception:  # an object of the user may raise anything, such as an array of several numbers
            number = math.nan
        if math.isfinite(number):
            return number
    raise TypeError(f"the reward returned {value!a:.60}. Expected a finite number: `{EXPECTED}`.")


class RolloutError(TitanRLError):
    """A rollout worker failed; the message is the worker's exception."""


class ScorerError(RolloutError):
    """The reward failed on every completion; the message contains the first exception."""


def scorer_failed(tried: str, error: str) -> ScorerError:
    """Return the exception for a reward or environment that failed on the completions that `tried` describes."""
    if error.startswith("data.environment"):
        return ScorerError(f"{error} (it affects {tried}). Correct the environment, or raise its time limits.")
    return ScorerError(
        f"data.rewards: the reward failed on {tried} (first error: {error}). Correct the reward; if it lacks time or memory, "
        "raise sandbox.timeout_s or sandbox.memory_bytes."
    )


SEPARATOR = b"\x1e"
"""Byte between the results of two answers in a reply; JSON never contains it."""
MAX_RESULT_BYTES = 16 << 10
"""Maximum length of the result of one answer: 32 parts with the longest names, or an error."""
MAX_TOKEN_BYTES = 64
"""Additional length per token of an answer for a custom reward, which may return token rewards."""

INVALID = "TypeError: the reward returned"
"""Start of the error of a value that is not a reward."""
DENIED = "which the sandbox denies"
"""Part of the error of a reward that needs what the sandbox denies."""

ProcessFailure = Literal["timeout", "crash"]
"""Reason why a scoring process returned no scores."""
Status = Literal["ok", "error"] | ProcessFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """A reward to load in the sandbox, and the scores that it may return.

    Example: `RewardSpec(name="answer", factory="titanrl.rollout.scorers:exact", bounds=(0.0, 1.0))`
    """

    name: str
    """Name of the reward."""
    factory: str
    """Import path `module:function` of a function that returns the reward function. It is called once, with `kwargs`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest valid value. They also limit the score that a malicious completion can forge."""
    is_custom: bool = False
    """True for a user-defined function. If it tries to use the network, scoring fails with an error that names the remedy."""
    returns_text: bool = False
    """True for a function that returns text instead of a reward, such as the one that runs code snippets."""

    def allows(self, parts: Mapping[Any, object]) -> bool:
        """Return True if all parts are finite numbers within the bounds and have valid names for this reward."""
        low, high = self.bounds
        return 0 < len(parts) <= MAX_PARTS and all(
            self._is_name(name) and isinstance(value, float) and math.isfinite(value) and low <= value <= high
            for name, value in parts.items()
        )

    def allows_tokens(self, rewards: Mapping[object, object]) -> bool:
        """Return True if this reward may return token rewards, and these are in the format of `encoded_score`."""
        return not rewards or (self.is_custom and all(map(self._is_name, rewards)) and all(map(_are_tokens, rewards.values())))

    def max_result_bytes(self, num_tokens: int) -> int:
        """Return the maximum length of the result of one answer."""
        return MAX_RESULT_BYTES + MAX_TOKEN_BYTES * num_tokens * self.is_custom

    def _is_name(self, name: object) -> bool:
        if not isinstance(name, str) or not name.startswith(f"{self.name}/"):
            return name == self.name
        return self.is_custom and PART_NAME.fullmatch(name.removeprefix(f"{self.name}/")) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one completion, or the reason why it has none.

    Example: `Score(parts={"answer": 1.0}, status="ok")`
    """

    parts: Mapping[str, float]
    """Unweighted rewards by part; empty unless the status is `ok`."""
    status: Status
    """`ok`; `error`: the reward raised or returned no valid score; `timeout`: it took too long; `crash`: its process died."""
    detail: str = ""
    """Error message in printable ASCII; if the status is `ok`, a file that the sandbox denied to the reward, or empty. Do not
    trust it: a completion can forge it."""
    token_rewards: Mapping[str, TokenRewards] = field(default_factory=dict)
    """Token rewards by part. Their sum is the reward of the part."""

    @classmethod
    def of(cls, parts: Mapping[str, float | TokenRewards]) -> "Score":
        """Create a score from the values that a reward function returned."""
        token_rewards = {part: value for part, value in parts.items() if isinstance(value, TokenRewards)}
        if not token_rewards:
            return cls(parts=parts, status="ok")  # type: ignore[arg-type]  # all values are numbers
        numbers = {part: value.total if isinstance(value, TokenRewards) else value for part, value in parts.items()}
        return cls(parts=numbers, status="ok", token_rewards=token_rewards)

    def moved(self, num_chars: int) -> "Score":
        """Return the score for the text with `num_chars` additional characters at its start."""
        if not num_chars or not self.token_rewards:
            return self
        return replace(self, token_rewards={part: own.moved(num_chars) for part, own in self.token_rewards.items()})


def encoded_score(parts: Mapping[str, float | TokenRewards]) -> dict[str, Any]:
    """Convert the parts of a reward to JSON values."""
    if not any(isinstance(value, TokenRewards) for value in parts.values()):
        return {"parts": parts}
    score = Score.of(parts)
    tokens = {part: [own.whole, own.tokens, own.steps] for part, own in score.token_rewards.items()}
    return {"parts": score.parts, "tokens": tokens}


def parse_scores(reply: bytes, spec: RewardSpec, num_tokens: Sequence[int]) -> list[Score] | None:
    """Parse the untrusted reply of a scoring process; return None unless it has one JSON value per answer.

    Args:
        reply: Results of the answers, joined by `SEPARATOR`.
        spec: Reward that scored them.
        num_tokens: Number of tokens of each answer, which limits the length of its result.
    """
    results = reply.split(SEPARATOR, len(num_tokens)) if num_tokens else []
    if len(results) != len(num_tokens) or (reply and not num_tokens):
        return None
    if any(len(result) > spec.max_result_bytes(num) for result, num in zip(results, num_tokens, strict=True)):
        return None
    try:
        return [_parse_result(result, spec) for result in results]
    except (ValueError, RecursionError):  # not JSON
        return None


def _parse_result(encoded: bytes, spec: RewardSpec) -> Score:
    match result := json.loads(encoded):
        case {"parts": dict(parts)} if "tokens" not in result and spec.allows(parts):
            return Score(parts=parts, status="ok", detail=ascii(result.get("denied", ""))[1:-1])
        case {"parts": dict(parts), "tokens": dict(tokens)} if spec.allows_tokens(tokens):
            by_token = {
                part: TokenRewards(whole=whole, tokens=own, steps=[(end, reward) for end, reward in steps])
                for part, (whole, own, steps) in tokens.items()
            }
            score = Score.of(parts | by_token)
            if spec.allows(score.parts):  # sums recomputed here, because those in the reply cannot be trusted
                return replace(score, detail=ascii(result.get("denied", ""))[1:-1])
        case {"error": str(detail)}:
            return Score(parts={}, status="error", detail=repr(detail)[1:-1])
    low, high = spec.bounds
    expected = f"finite numbers from {low:g} to {high:g}"
    return Score(
        parts={}, status="error", detail=f"invalid score (got {encoded.decode()!a:.200}). The reward must return {expected}."
    )


def _are_tokens(rewards: object) -> bool:
    """Return True for a valid encoding of `TokenRewards`: `[whole, tokens, steps]` with finite rewards and positive ends."""
    match rewards:
        case [whole, list(tokens), list(steps)]:
            pairs = [step for step in steps if isinstance(step, list) and len(step) == 2]
            values = (whole, *tokens, *(reward for _, reward in pairs))
            are_ends = len(pairs) == len(steps) and all(type(end) is int and end > 0 for end, _ in pairs)
            return are_ends and all(isinstance(value, float) and math.isfinite(value) for value in values)
    return False
