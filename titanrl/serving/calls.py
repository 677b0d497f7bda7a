"""Calls of the policy by clients, and the callers that answer them, independent of the wire protocol.

Then what all protocols use: strict reading of JSON bodies, and the text of a completion while it is sampled.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from titanrl.base.errors import TitanRLError
from titanrl.base.files import why_no_file
from titanrl.carriers.types import Completion, OnTokens
from titanrl.environments.interface import Message, NotAnObject, Tool, parse_object

MAX_ENDED = 65_536
"""Keys of ended callers that `Callers` remembers, to tell a call after the end from a wrong key."""
MIN_KEY_CHARS = 16
"""Shortest key in a file of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One completion that a client asks for. Exactly one of `messages`, `text` and `prompt_ids` is set.

    None as a sampling option means the policy's default.

    Example: `Call(messages=({"role": "user", "content": "7 + 5 ="},), max_tokens=16, temperature=0.0)`
    """

    messages: tuple[Message, ...] | None = None
    """Conversation. The arguments of tool calls are parsed, or text if they are no JSON object."""
    text: str | None = None
    """Text to continue, without a chat template."""
    prompt_ids: tuple[int, ...] | None = None
    """Tokens to continue, `[P]`."""
    tools: tuple[Tool, ...] = ()
    """Functions that the policy may call. Without any, calls in the reply remain text."""
    requires_tool: bool = False
    """True if the client requires a call of a function. Sampling is never constrained, so the policy may not make any."""
    refuses_parallel: bool = False
    """True if the client requires at most one call of a function in a reply; the policy may make more."""
    requires_json: bool = False
    """True if the client requires a JSON object; the policy may write anything."""
    max_tokens: int | None = None
    """Longest completion, in tokens."""
    temperature: float | None = None
    """Divisor of the logits; 0 is greedy."""
    top_p: float | None = None
    """Probability mass of nucleus sampling; 1 disables it."""
    top_k: int | None = None
    """Number of most likely tokens to sample from; 0 disables the limit."""
    min_p: float | None = None
    """Minimum probability of a token relative to the most likely token; 0 disables the limit."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion, in addition to the policy's own; none of them is part of the reply's content."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the completion, in addition to the policy's own."""
    seed: int | None = None
    """Seed of the completion; None draws one."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return at each prompt token, beside the log-probability of the token itself; None returns
    neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A completion of the policy, and the message it is read as."""

    prompt_ids: tuple[int, ...]
    """Tokens before the completion, `[P]`."""
    completion: Completion
    """Sampled tokens with log-probabilities and versions."""
    message: Message
    """Message of the policy: `role`, `content`, and optionally `reasoning_content` and `tool_calls`. Without tools in the call,
    it has no `tool_calls`. A reply to a text or to tokens has only `content`, the text of the completion without stop text."""

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Reason for the end of the completion, in OpenAI's terms."""
        if self.completion.finish_reason == "length":
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    def differs_in_form(self, call: Call) -> bool:
        """Return True if the client required a tool call, at most one, or a JSON object, and the policy replied otherwise."""
        num_calls = len(self.message.get("tool_calls", ()))
        if call.requires_json and not num_calls:
            try:
                parse_object(self.message["content"])
            except (NotAnObject, ValueError):
                return True
        return num_calls < call.requires_tool or (call.refuses_parallel and num_calls > 1)


class Refused(TitanRLError):
    """A call that is not answered; the client gets the status and the message, in the error format of its protocol."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        """Create the error.

        Args:
            message: Value, rule and fix, for the user of the client.
            status: HTTP status: 400 invalid, 401 wrong key, 410 after the end of the episode, 413 too large, 429 too many
                calls, 503 no weights or shutting down, 504 out of time.
            param: Parameter of the request that is to blame.
            code: Code of the error in OpenAI's terms, such as `model_not_found`.
        """
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def kind(self) -> str:
        """Type of the error in OpenAI's terms."""
        if self.status >= 500:
            return "server_error"
        return "rate_limit_error" if self.status == 429 else "invalid_request_error"


def after_end() -> Refused:
    """Return the refusal of a call after the end of its episode."""
    return Refused("the episode of this key has ended. Make no calls after the end.", status=410, code="ended")


class Caller(Protocol):
    """The policy, as one client sees it.

    A caller belongs to one key: in training to one episode, in `titanrl serve` to a user.
    """

    stop: tuple[str, ...]
    """Texts that end every completion, in addition to those of a call."""

    async def call(self, call: Call, on_tokens: OnTokens | None = None) -> Reply:
        """Return the policy's reply. Calls may overlap. Cancelling the task cancels the generation.

        Args:
            call: The call.
            on_tokens: Function that may get tokens while they are sampled, in order. The reply has all of them.

        Raises:
            Refused: The call cannot be answered.
        """

    def refused(self, refused: Refused) -> None:
        """Note that the client got an error."""

    def read(self, call: Call, token_ids: Sequence[int]) -> Message:
        """Return the message that the first tokens of a completion are read as; see `Reply.message`."""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, including special tokens."""


class Callers:
    """Callers by key. Keys are compared as keyed digests, so that the time of a look-up reveals nothing about them."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)
        self._callers: dict[bytes, Caller] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    def open(self, caller: Caller, key: str | None = None) -> str:
        """Add a caller; return its key, which by default is new and cannot be guessed."""
        key = secrets.token_urlsafe(32) if key is None else key
        self._callers[self._digest(key)] = caller
        return key

    def close(self, key: str) -> None:
        """End a caller: later calls with its key are refused with status 410. A second call does nothing."""
        digest = self._digest(key)
        if self._callers.pop(digest, None) is not None:
            self._ended[digest] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def find(self, key: str) -> Caller | None:
        """Return the caller of a key; None if there is none. Raise `Refused` if the caller has ended."""
        digest = self._digest(key)
        if digest in self._ended:
            raise after_end()
        return self._callers.get(digest)

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), hashlib.sha256)


def read_keys(file: Path) -> dict[str, int]:
    """Return the keys in a file, which only its user can read, with their line numbers. Skip empty lines and comments."""
    if found := why_no_file(file):
        raise TitanRLError(f"--keys: the file {found} (got {file}). Give a file with one key per line.")
    status = file.stat()
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise TitanRLError(f"--keys: only you may have access to the file (got {file}). Run chmod 600 on it.")
    keys = dict[str, int]()
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < MIN_KEY_CHARS or not key.isascii() or " " in key:
            rule = f"a key must have at least {MIN_KEY_CHARS} ASCII characters, and no space"
            raise TitanRLError(f"--keys: {rule} (got line {number} of {file}). Make one with `openssl rand -hex 24`.")
        if key in keys:
            raise TitanRLError(f"--keys: keys must differ (got line {keys[key]} again on line {number} of {file}). Remove one.")
        keys[key] = number
    if not keys:
        raise TitanRLError(f"--keys: the file must have a key (got {file}). Make one with `openssl rand -hex 24`.")
    return keys


MAX_CHOICES = 128
"""Largest number of completions that one request may ask for."""
MAX_SEED = 2**63 - 1
MAX_TOP = 20
"""Largest number of most likely tokens at each prompt token, as vLLM has by default."""
LOWEST_LOGPROB = -9999.0
"""Lowest log-probability in OpenAI's protocol; it replaces minus infinity, which JSON lacks."""

_MAX_TAG = 32
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_UNSURE_END = re.compile(r"[\s\ufffd]+\Z")

Event = tuple[str | None, object]
"""Server-sent event: its name, if it has one, and its data, which is sent as JSON unless it is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Part of a completion: what is new since the piece before."""

    text: str = ""
    """Text of the reply's content."""
    reasoning: str = ""
    """Text of the reply's reasoning."""
    token_ids: Sequence[int] = ()
    """Tokens, `[T]`."""
    logprobs: Sequence[float] = ()
    """Log-probabilities of the tokens in nats, `[T]`."""


class Exchange(Protocol):
    """One request in a wire protocol, and the formats of its response: either `body`, or a stream.

    A stream is `start`, then for each completion `extend` any number of times and `finish` once, then `end`. The class is
    called with the fields of the body, the name of the model, and the caller. It raises `Refused` for an invalid parameter.
    """

    calls: tuple[Call, ...]
    """Completions to sample; their replies are the choices of the response."""
    streams: bool
    """True if the response is a stream of events."""
    by_token: bool
    """True if an event is due for every token, even if it adds no text."""

    def body(self, replies: Sequence[Reply]) -> object:
        """Return the JSON response."""

    def start(self) -> Iterable[Event]:
        """Return the first events of a stream."""

    def extend(self, index: int, piece: Piece) -> Iterable[Event]:
        """Return the events of a part of completion `index`."""

    def finish(self, index: int, piece: Piece, reply: Reply) -> Iterable[Event]:
        """Return the events of the last part of completion `index`."""

    def end(self, replies: Sequence[Reply]) -> Iterable[Event]:
        """Return the last events of a stream."""


class Feed:
    """The text of a completion while it is sampled.

    A piece ends before anything that later tokens may change: half a character, white space that may be trimmed, the start of a
    stop text, and the start of a tool call. The completion is read again after every token, and later after every 64th of its
    length, so that the time to read a long one grows with its length and not with its square.
    """

    def __init__(self, caller: Caller, call: Call, *, by_token: bool) -> None:
        self._caller, self._call, self._by_token = caller, call, by_token
        self._ids, self._logprobs = list[int](), list[float]()
        self._num_sent, self._next_read = 0, 1
        self._text = self._reasoning = ""

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> Piece | None:
        """Add sampled tokens; return what can be sent, if anything."""
        self._ids += token_ids
        self._logprobs += logprobs
        text, reasoning = self._text, self._reasoning
        if len(self._ids) >= self._next_read:
            self._next_read = len(self._ids) + 1 + len(self._ids) // 64
            message = self._caller.read(self._call, self._ids)
            if not message.get("tool_calls"):
                text, reasoning = self._certain(message["content"]), self._certain(message.get("reasoning_content") or "")
        grown = len(text) > len(self._text) or len(reasoning) > len(self._reasoning)
        if not (grown and text.startswith(self._text) and reasoning.startswith(self._reasoning)):
            text, reasoning = self._text, self._reasoning
            if not self._by_token:
                return None
        return self._piece(text, reasoning)

    def finish(self, reply: Reply) -> Piece:
        """Return the rest of the completion."""
        content, reasoning = reply.message["content"], reply.message.get("reasoning_content") or ""
        if not (content.startswith(self._text) and reasoning.startswith(self._reasoning)):
            raise Refused("the reply differs from the part that was sent. Repeat the call without stream.", status=500)
        self._ids, self._logprobs = reply.completion.token_ids.tolist(), reply.completion.logprobs.tolist()
        return self._piece(content, reasoning)

    def _piece(self, text: str, reasoning: str) -> Piece:
        piece = Piece(
            text=text[len(self._text) :],
            reasoning=reasoning[len(self._reasoning) :],
            token_ids=self._ids[self._num_sent :],
            logprobs=self._logprobs[self._num_sent :],
        )
        self._text, self._reasoning, self._num_sent = text, reasoning, len(self._ids)
        return piece

    def _certain(self, text: str) -> str:
        if not text:
            return text
        text = _UNSURE_END.sub("", text)
        tag = text.rfind("<", -_MAX_TAG) if self._call.tools else -1
        if tag >= 0 and ">" not in text[tag:]:
            text = text[:tag]
        stops = (*self._call.stop, *self._caller.stop)
        held = (size for stop in stops for size in range(1, len(stop) + 1) if text.endswith(stop[:size]))  # may start one
        return text[: len(text) - max(held, default=0)]


class Fields:
    """The fields of a JSON object. A method that takes one returns None if it is missing or null, unless it says otherwise, and
    raises `Refused` if it is invalid. `done` refuses those that are left."""

    def __init__(self, value: object, path: str = "") -> None:
        """Read an object; raise `Refused` if it is none. `path` is its name in messages, such as `messages[0]`."""
        if not isinstance(value, dict):
            raise wrong(path or "body", "must be an object", value)
        self._left: dict[str, Any] = dict(value)
        self._path = path

    def name(self, key: str) -> str:
        """Return the name of a field for error messages, with the path of the object, such as `messages[0].role`."""
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str) -> Any:
        """Return a field of any type; None if it is missing or null."""
        return self._left.pop(key, None)

    def text(self, key: str, *choices: str) -> str | None:
        """Return a text, which must be one of the choices if there are any."""
        value = self.take(key)
        if value is not None and (not isinstance(value, str) or (choices and value not in choices)):
            raise wrong(self.name(key), f"must be {' or '.join(choices) or 'a text'}", value)
        return value

    def needed(self, key: str, *choices: str) -> str:
        """Return a text that must not be missing."""
        value = self.text(key, *choices)
        if value is None:
            raise wrong(self.name(key), f"is required: {' or '.join(choices) or 'a text'}", value)
        return value

    def refuse_null(self, key: str) -> None:
        """Refuse null for a number that may be missing, because JSON encoders of clients write NaN and infinity as null."""
        if key in self._left and self._left[key] is None:
            raise wrong(self.name(key), "must be a finite number", None)

    def number(self, key: str, least: float, most: float) -> float | None:
        """Return a finite number within bounds."""
        value = self.take(key)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # NaN is in no range
        if not (is_number and least <= value <= most):
            raise wrong(self.name(key), f"must be a number from {least:g} to {most:g}", value)
        return float(value)

    def count(self, key: str, least: int, most: int) -> int | None:
        """Return an integer within bounds."""
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise wrong(self.name(key), f"must be an integer from {least} to {most}", value)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false; the default if it is missing."""
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise wrong(self.name(key), "must be true or false", value)
        return default if value is None else value

    def items(self, key: str) -> list[Any]:
        """Return a list; empty if it is missing."""
        value = self.take(key)
        if value is not None and not isinstance(value, list):
            raise wrong(self.name(key), "must be a list", value)
        return value or []

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a text or a list of texts, none of which is empty, as a tuple; an empty one if it is missing."""
        value = self.take(key)
        found = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found) or len(found) > 16:
            raise wrong(self.name(key), "must be a text or a list of up to 16 texts, none of them empty", value)
        return tuple(found)

    def nested(self, key: str) -> "Fields | None":
        """Return an object; None if it is missing."""
        value = self.take(key)
        return None if value is None else Fields(value, self.name(key))

    def rest(self) -> dict[str, Any]:
        """Return all fields that are left."""
        left, self._left = self._left, {}
        return left

    def only(self, key: str, *values: object) -> None:
        """Refuse a field unless it is missing, null, or one of some values without effect here."""
        value = self.take(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            allowed = " or ".join(json.dumps(each) for each in values)
            raise wrong(self.name(key), f"is not supported{f'; only {allowed} is' if values else ''}", value)

    def skip(self, *keys: str) -> None:
        """Drop fields that name the client, or hint at billing and caches, and have no effect on the reply."""
        for key in keys:
            self._left.pop(key, None)

    def done(self) -> None:
        """Refuse the fields that have not been taken, unless they are null."""
        for key, value in self._left.items():
            if value is not None:
                raise wrong(self.name(key), "is not a parameter that is supported here", value)


def wrong(name: str, rule: str, value: object) -> Refused:
    """Return the refusal of a parameter."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return Refused(f"{name}: {rule} (got {shown})", param=name)


def load_json(body: bytes) -> Fields:
    """Read the body of a request; raise `Refused` unless it is a JSON object."""

    def reject(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(body, parse_constant=reject)
        if b"\\u" in body:  # the only way to write them
            text = json.dumps(value, ensure_ascii=False)
            text.encode()
            if _NUL.search(text):
                raise ValueError("a text contains NUL")
        return Fields(value)
    except (ValueError, RecursionError) as error:
        raise Refused(f"body: must be a JSON object ({type(error).__name__}: {str(error)[:200]})") from None


def joined_text(value: object, name: str, *kinds: str) -> str:
    """Return the content of a message, given as text or as text parts of some types; parts are joined by newlines."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise wrong(name, "must be a text or a list of parts", value)
    texts = []
    for index, part in enumerate(value):
        fields = Fields(part, f"{name}[{index}]")
        kind = fields.take("type")
        if kind not in kinds:
            raise wrong(fields.name("type"), f"must be {' or '.join(kinds)}; only text is supported", kind)
        texts.append(fields.needed("text"))
        fields.only("annotations", [])
        fields.only("logprobs", [])
        fields.skip("cache_control", "citations")
        fields.done()
    return "\n".join(texts)


def tool_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call of a message. Arguments that are no JSON object remain text."""
    if isinstance(arguments, str):
        with suppress(NotAnObject, ValueError):
            arguments = parse_object(arguments or "{}")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_text(call: Mapping[str, Any]) -> str:
    """Return the arguments of a tool call as JSON text."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def read_function(fields: Fields, schema: str) -> Tool:
    """Return a function that the policy may call; `schema` is the name of the field with its JSON Schema."""
    name = fields.needed("name")
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", name):
        raise wrong(fields.name("name"), "must have up to 128 letters, digits, and _ . : -", name)
    parameters = fields.take(schema)
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(fields.name(schema), "must be a JSON Schema", parameters)
    return Tool(name=name, description=fields.text("description") or "", parameters=parameters or {})


def chosen_tools(tools: Sequence[Tool], choice: str | None, name: str, *, is_required: bool = False) -> tuple[Tool, ...]:
    """Return the functions that the policy sees: all, or the one that the client chose. Raise `Refused` if that is none."""
    if is_required and not tools:
        raise wrong(name, "requires tools", [])
    names = [tool.name for tool in tools]
    if repeated := next((each for each in names if names.count(each) > 1), None):
        raise wrong("tools", "must have different names", repeated)
    if choice is not None and choice not in names:
        raise wrong(name, f"must be one of the tools ({', '.join(names) or 'there are none'})", choice)
    return tuple(tool for tool in tools if choice in (None, tool.name))


def new_id(prefix: str) -> str:
    """Return a new identifier."""
    return f"{prefix}{secrets.token_hex(12)}"


def version_spans(reply: Reply) -> list[dict[str, Any]]:
    """Return the policy versions of a completion as vLLM does: `[{"version": "3", "start": 0, "end": 7}]`."""
    spans = list[dict[str, Any]]()
    for index, version in enumerate(reply.completion.versions.tolist()):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = index + 1
        else:
            spans.append({"version": str(version), "start": index, "end": index + 1})
    return spans


def reply_version(reply: Reply) -> str:
    """Return the fingerprint of a reply: the newest policy version that sampled it."""
    versions = reply.completion.versions
    return f"version-{versions.max()}" if len(versions) else "version-none"


def conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return messages that the policy can reply to; raise `Refused` if there are none."""
    if not messages:
        raise wrong("messages", "must not be empty", list(messages))
    return tuple(messages)
