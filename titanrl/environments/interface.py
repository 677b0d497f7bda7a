"""The interface of environments. They exchange chat messages with the policy, and do not depend on tokens or actors.

After it follow the checks of what an environment returned and what the policy wrote, before it reaches chat template,
tokenizer, tools and files. This module imports no third-party library.
"""

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, SupportsFloat, runtime_checkable

from titanrl.base.errors import TitanRLError
from titanrl.carriers.rewards import MAX_PARTS, PART_NAME

Message = Mapping[str, Any]
"""Chat message in OpenAI's format: `role` (`system`, `user`, `assistant` or `tool`), `content`, and optionally `tool_calls`
(`[{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]`, with parsed arguments) or
`tool_call_id`. All values are JSON values, without NUL and unpaired surrogates."""

Limit = Literal["turn_tokens", "conversation_tokens", "turns"]
"""Limit that ends an episode: `rollout.max_new_tokens` of a turn, `max_conversation_tokens` or `max_turns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The task that an environment receives at the start of an episode.

    Example: `Episode(task_id="chain_sum/17", question="7 + 5 - 3 =", entry={"answer": "9", ...}, seed=123)`
    """

    task_id: str
    """Identifier of the task, equal for all episodes of the same prompt, in every run."""
    question: str
    """Question from the prompt source, without a chat template."""
    entry: Mapping[str, Any]
    """Data from the prompt source, as rewards receive it: `question`, `answer`, `metadata`."""
    seed: int
    """Seed for all randomness in the episode, shared by all episodes of a group. It is derived from the prompt and, for
    training episodes, from the run's seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the policy may call."""

    name: str
    """Name of the function."""
    description: str = ""
    """Description for the policy, one or two sentences."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Messages for the policy's next turn."""

    messages: Sequence[Message]
    """Messages to append to the conversation; with `replaces`, the complete new conversation."""
    tools: Sequence[Tool] = ()
    """Functions that the policy may call from now on; empty keeps those of the last observation. Chat templates put them before
    the conversation, so other tools start a new segment."""
    reward: float = 0.0
    """Reward of the turn that just ended."""
    replaces: bool = False
    """True if the messages replace the conversation, for example with a summary. The policy's next turn then starts a new
    segment, because the tokens of the earlier turns are no longer a prefix of it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode so far, as in `Done`. They are reported if a limit ends the episode before `Done`."""
    state: str = ""
    """Name of the environment's state, for `algorithm.credit: state`. If it is empty, observations with equal messages are in
    the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an episode."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the episode by name, reported as `reward/<name>`. The rewards of the configuration, which score the policy's
    last message, are added to them."""
    reward: float = 0.0
    """Reward of the last turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the episode by name, such as the number of tool calls. The mean of each over the episodes that report it is
    logged as `environment/<name>_mean`."""


@runtime_checkable
class Environment(Protocol):
    """An environment for one episode. If a method raises, the episode fails; it does not get a reward of 0.

    Example:
        class GuessNumber:
            async def reset(self, episode: Episode) -> Observation:
                self.secret = random.Random(episode.seed).randint(1, 9)
                return Observation(messages=[{"role": "user", "content": "Guess a number from 1 to 9."}])

            async def step(self, message: Message) -> Observation | Done:
                guess = message["content"].strip()
                if guess == str(self.secret):
                    return Done(rewards={"found": 1.0})
                return Observation(messages=[{"role": "user", "content": "No. Try another one."}])

            async def close(self) -> None:
                pass
    """

    async def reset(self, episode: Episode) -> Observation:
        """Start the episode and return the first messages."""

    async def step(self, message: Message) -> Observation | Done:
        """Process a message of the policy, and continue or end the episode."""

    async def close(self) -> None:
        """Release the resources of the episode. This is called once, even after a failure."""


@runtime_checkable
class JudgesTruncated(Protocol):
    """The optional method of an environment that judges episodes that a limit ends before `Done`.

    Without it, such an episode gets `data.environment.truncated_reward` in place of the environment's rewards.

    Example:
        class GuessNumber:
            ...
            async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None:
                return Done(rewards={"found": 0.0})
    """

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None:
        """Return the rewards of an episode that a limit ended; None for `truncated_reward`. Only `close` follows.

        Args:
            message: Last message of the policy if it was cut off, so that `step` did not receive it; None otherwise.
            limit: The limit.
        """


@runtime_checkable
class Prepares(Protocol):
    """The optional method of an environment that needs something before the first episode, such as a server."""

    async def prepare(self) -> None:
        """Start or check it. The method is called once per process, on an environment that plays no episode.

        Raises:
            EnvironmentFailure: It cannot be used, so that the run cannot start.
        """


def opening(episode: Episode, system_prompt: str | None) -> list[Message]:
    """Return the first messages of an episode: the conversation from the prompt source, or else the question.

    The system prompt is prepended unless the conversation starts with a system message.
    """
    asked: list[Message] = list(episode.entry.get("messages") or [{"role": "user", "content": episode.question}])
    if system_prompt is None or asked[0]["role"] in ("system", "developer"):
        return asked
    return [{"role": "system", "content": system_prompt}, *asked]


# Exceptions. A failed episode is retried or dropped; it does not get a reward of 0.


class EnvironmentFailure(TitanRLError):
    """Raised if an environment fails: it raised an exception, returned an invalid value, or its process died."""


class EnvironmentTimeout(EnvironmentFailure):
    """Raised if a call of an environment exceeds its time limit."""


class InvalidReward(EnvironmentFailure):
    """Raised if a reward of an environment is not a finite number."""


class EnvironmentDied(EnvironmentFailure):
    """Raised if the process of an environment died."""


class ToolError(TitanRLError):
    """Raised by a tool to reject a call that the policy got wrong. The policy sees the message, and the episode continues.

    Any other exception that a tool raises fails the episode.

    Example: `raise ToolError(f"There is no article {number}. The numbers are 1 to {len(self._articles)}.")`
    """


ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages."""
MAX_MESSAGES = 4096
"""Maximum number of messages in one observation."""
MAX_CHARS = 1 << 20
"""Maximum size of the messages and tools of one observation: characters of text, and one for each other value."""
MAX_DEPTH = 32
"""Maximum nesting of lists and mappings in a message or tool."""
MAX_CALL_DEPTH = 32
"""Maximum nesting of lists and mappings in the arguments of a call."""
RESERVED_REWARDS = ("turns", "truncated")
"""Names of reward parts that the run adds itself."""

_REWARD_NAME = re.compile(rf"{PART_NAME.pattern}(?:/{PART_NAME.pattern})?", re.ASCII)
_MAX_BITS = 4096
_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 60


def checked(result: object) -> Observation | Done:
    """Return the result of an environment's method with plain values: messages are dictionaries, and their content is text.

    Raise `InvalidReward` if a reward is not a finite number, and `EnvironmentFailure` for any other invalid value.
    """
    match result:
        case Done():
            metrics = _numbers("metrics", result.metrics, PART_NAME, EnvironmentFailure)
            rewards = _numbers("rewards", result.rewards, _REWARD_NAME, InvalidReward)
            for name in RESERVED_REWARDS:
                if name in rewards:
                    raise _broken("rewards", f"the name {name} is reserved", result.rewards, "Rename it")
            return Done(rewards=rewards, reward=_number("reward", result.reward, InvalidReward), metrics=metrics)
        case Observation():
            budget, messages = _Budget(), _list("messages", result.messages, "message")
            if len(messages) > MAX_MESSAGES:
                rule = f"there must be at most {MAX_MESSAGES} (got {len(messages)})"
                raise EnvironmentFailure(f"messages: {rule}. Return fewer.")
            return Observation(
                messages=[_message(f"messages[{i}]", message, budget) for i, message in enumerate(messages)],
                tools=[_tool(f"tools[{i}]", tool, budget) for i, tool in enumerate(_list("tools", result.tools, "Tool"))],
                reward=_number("reward", result.reward, InvalidReward),
                replaces=_bool("replaces", result.replaces),
                metrics=_numbers("metrics", result.metrics, PART_NAME, EnvironmentFailure),
                state=_state(result.state),
            )
    raise EnvironmentFailure(f"the result must be an Observation or Done (got {shown(result)})")


def _state(state: object) -> str:
    if not isinstance(state, str):
        raise _broken("state", "must be a string", state, "Correct it")
    if len(state) > MAX_CHARS:
        raise EnvironmentFailure(f"state: must have at most {MAX_CHARS} characters (got {len(state)}). Shorten it.")
    return state


def shown(value: object) -> str:
    """Return a short representation of any value, in ASCII."""
    try:
        return _shown.repr(value).encode("ascii", "backslashreplace").decode()
    except Exception:  # an integer may be too long for Python, and `__repr__` of user code may raise anything
        return f"a value of type {type(value).__name__}"


class _Budget:
    """Remaining size of an observation."""

    def __init__(self) -> None:
        self._num_left = MAX_CHARS

    def take(self, key: str, size: int) -> None:
        self._num_left -= size
        if self._num_left < 0:
            raise EnvironmentFailure(f"{key}: the observation has more than {MAX_CHARS} characters. Shorten it.")


def _message(key: str, value: object, budget: _Budget) -> dict[str, Any]:
    """Return a message in OpenAI's format, with content that is text, and parsed arguments of tool calls.

    The role `developer` becomes `system`, which every chat template knows.
    """
    if not isinstance(value, Mapping):
        raise _broken(key, "must be a mapping with role and content", value, "Return a dictionary")
    message: dict[str, Any] = _plain(key, value, budget, MAX_DEPTH)
    if message.get("role") == "developer":
        message["role"] = "system"
    if message.get("role") not in ROLES:
        raise _broken(f"{key}.role", f"must be one of {', '.join(ROLES)}", message.get("role"), "Correct it")
    for name in ("tool_call_id", "name", "reasoning_content"):
        if not isinstance(message.get(name) or "", str):
            raise _broken(f"{key}.{name}", "must be a string", message[name], "Correct it")
    if message.get("tool_calls"):
        calls = _list(f"{key}.tool_calls", message["tool_calls"], "call")
        message["tool_calls"] = [_call(f"{key}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return message | {"content": _content(f"{key}.content", message)}


def _content(key: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None and message["role"] == "assistant" and (message.get("tool_calls") or message.get("reasoning_content")):
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _broken(key, "must be a string", content, "Convert it to text")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise _broken(key, "must be a string, or a list of text parts", part, "Convert it to text")
        texts.append(text)
    return "".join(texts)


def _call(key: str, call: object) -> dict[str, Any]:
    """Return a tool call in OpenAI's format. Arguments that are a string with a JSON object are parsed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _broken(key, 'must be {"function": {"name": ..., "arguments": {...}}}', call, "Correct it")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_object(arguments)
        except ValueError:  # a malformed call of the policy, whose arguments are its text
            return call
    if not isinstance(arguments, dict | None):
        raise _broken(f"{key}.function.arguments", "must be a mapping", arguments, "Correct it")
    return call | {"function": function | {"arguments": arguments or {}}}


def _tool(key: str, tool: object, budget: _Budget) -> Tool:
    if not isinstance(tool, Tool):
        raise _broken(key, "must be a Tool", tool, "Return Tool(name=..., description=..., parameters=...)")
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    plain = _plain(key, fields, budget, MAX_DEPTH)
    for name, kind in (("name", str), ("description", str), ("parameters", dict)):
        if not isinstance(plain[name], kind):
            raise _broken(f"{key}.{name}", f"must be a {'string' if kind is str else 'JSON schema'}", plain[name], "Correct it")
    return Tool(**plain)


def _plain(key: str, value: object, budget: _Budget, depth: int) -> Any:
    """Return a copy of a JSON value whose types are exactly those of the `json` module."""
    if depth < 0:
        raise EnvironmentFailure(f"{key[:80]}: must be nested at most {MAX_DEPTH} levels deep. Flatten it.")
    if isinstance(value, str):
        budget.take(key, len(value) + 1)
        return _text(key, value)
    budget.take(key, 1)
    match value:
        case None | bool():
            return value
        case int() if value.bit_length() <= _MAX_BITS:
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case Mapping():
            plain = {}
            for name, item in value.items():
                if not isinstance(name, str):
                    raise _broken(key, "must have string keys", name, "Convert it to a string")
                budget.take(key, len(name))
                plain[_text(key, name)] = _plain(f"{key}.{name:.40}", item, budget, depth - 1)
            return plain
        case list() | tuple():
            return [_plain(f"{key}[{i}]", item, budget, depth - 1) for i, item in enumerate(value)]
    raise _broken(key, "must be text or another JSON value", value, "Convert it to text")


def _text(key: str, value: str) -> str:
    """Return text as exactly a `str`, which subclasses such as enumerations are not."""
    text = str.__str__(value)
    if "\0" in text:
        raise _broken(key, "must not contain NUL", text, "Remove it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _broken(key, "must not contain an unpaired surrogate", text, 'Decode bytes with errors="replace"') from None
    return text


def _list(key: str, value: object, item: str) -> Sequence[object]:
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise _broken(key, f"must be a list with one entry per {item}", value, "Return a list")
    return value


def _bool(key: str, value: object) -> bool:
    if isinstance(value, SupportsFloat) and not isinstance(value, str) and float(value) in (0.0, 1.0):
        return bool(value)  # a number from numpy, too
    raise _broken(key, "must be True or False", value, "Correct it")


def _numbers(key: str, values: object, names: re.Pattern[str], error: type[EnvironmentFailure]) -> dict[str, float]:
    """Return named numbers. `error` is raised if a value is not a number."""
    is_valid = isinstance(values, Mapping) and len(values) <= MAX_PARTS
    if not is_valid or not all(isinstance(name, str) and names.fullmatch(name) for name in values):  # type: ignore[attr-defined]
        rule = f"must map names of letters and digits to numbers, {MAX_PARTS} at most"
        raise _broken(key, rule, values, "Correct it")
    assert isinstance(values, Mapping)
    return {str.__str__(name): _number(f"{key}[{name!r}]", value, error) for name, value in values.items()}


def _number(key: str, value: object, error: type[EnvironmentFailure]) -> float:
    try:
        number = float(value) if isinstance(value, SupportsFloat) and not isinstance(value, str) else math.nan
    except (TypeError, ValueError, OverflowError):  # an array, or an integer that is too large
        number = math.nan
    if not math.isfinite(number):
        raise error(f"{key}: must be a finite number (got {shown(value)}). Correct it.")
    return number


def _broken(key: str, rule: str, value: object, fix: str) -> EnvironmentFailure:
    return EnvironmentFailure(f"{key[:120]}: {rule} (got {shown(value)}). {fix}.")


# Arguments of tool calls


class NotAnObject(ValueError):
    """Raised for text that is not a JSON object."""


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object strictly. The messages of the exceptions continue a sentence, such as "its arguments ...".

    Raises:
        NotAnObject: The text is not a JSON object.
        ValueError: The object has NaN, an infinite number, an integer of more than 4300 digits, a duplicate key, or too deep
            nesting.
    """
    try:
        parsed = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise NotAnObject(f"are not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise NotAnObject("are not a JSON object")
    arguments: dict[str, Any] = readable(parsed)
    return arguments


def readable(value: Any, depth: int = MAX_CALL_DEPTH) -> Any:
    """Copy a JSON value, with U+FFFD for NUL and unpaired surrogates; raise `ValueError` for NaN or too deep nesting."""
    if depth < 0:
        raise ValueError("are nested too deeply")
    match value:
        case str():
            return readable_text(value)
        case float() if not math.isfinite(value):
            raise ValueError("have a number that is not finite")
        case dict():
            return {readable_text(str(name)): readable(item, depth - 1) for name, item in value.items()}
        case list():
            return [readable(item, depth - 1) for item in value]
    return value


def readable_text(text: str) -> str:
    """Return the text with U+FFFD in place of NUL and unpaired surrogates, as in text decoded from invalid bytes."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"have the key {next(name for name in parsed if names.count(name) > 1):.60} twice")
    return parsed


def _refuse(constant: str) -> Any:
    raise ValueError(f"have {constant}, which is not JSON")
