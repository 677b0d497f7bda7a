"""Calls of the policy by clients, independent of the wire protocol, and the callers that answer them."""

import hashlib
import hmac
import os
import secrets
import stat
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

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
