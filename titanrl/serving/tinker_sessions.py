"""State of the server for Tinker: models and checkpoints on disk, futures that clients poll, and sessions.

The files of `Checkpoints` survive a restart of the server, and belong to the user who saved them:

    <root>/<session>/<n>/run.json                   the model: base, rank, user
    <root>/<session>/<n>/weights/<name>.json        a training checkpoint, which names its state
    <root>/<session>/<n>/sampler_weights/<name>.json
    <root>/<session>/<n>/states/<random>/           files of the trainer

A checkpoint exists from the moment that its JSON file does, which is written last and in one step. The next start deletes
states that no file names.

A client numbers the requests of a model 1, 2, 3, ... and sends them in any order; it repeats a request whose response was lost.
Each number runs once, in order, and a failed request does not stop those after it.

Routes (`titanrl.serving.tinker`) read requests, and say what each does; here it is decided when. A model has one worker, which
runs its requests one at a time, by sequence id. A session that ends frees its models and samplers.
"""

import asyncio
import json
import logging
import re
import secrets
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from titanrl.base.errors import FaultError, TitanRLError
from titanrl.base.files import DamagedError, replace_text
from titanrl.carriers.types import AdamParams, Completion, Datum, FloatArray, ForwardBackwardOutput, OptimUpdate, TopTokens
from titanrl.serving.calls import Refused, new_id
from titanrl.serving.http import JSON, dump, internal
from titanrl.serving.tinker_wire import Malformed, SampleRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
Kind = Literal["weights", "sampler_weights"]
KINDS: Mapping[Kind, str] = {"weights": "training", "sampler_weights": "sampler"}
"""Type of a checkpoint in Tinker's terms, by the second part of its path."""
_MODEL_ID = re.compile(r"([A-Za-z0-9_-]{1,64}):train:([0-9]{1,9})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_PATH = re.compile(rf"tinker://({_MODEL_ID.pattern})/({'|'.join(KINDS)})/({_NAME.pattern})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A client's settings of a model."""

    rank: int
    """Rank of its adapters; 0 trains all weights."""
    seed: int | None = None
    """Seed of the initial adapters; None uses the server's."""
    train_attn: bool = True
    """Adapters on the projections of attention."""
    train_mlp: bool = True
    """Adapters on the projections of the MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model of a user, in the protocol a training run, which may have ended."""

    model_id: str
    owner: str
    base_model: str
    spec: ModelSpec
    user_metadata: Mapping[str, str]
    used: float
    """Time of the last request or save, in seconds since the epoch."""

    def wire(self) -> dict[str, Any]:
        """Return the run as the protocol has it."""
        return {
            "training_run_id": self.model_id,
            "base_model": self.base_model,
            "model_owner": self.owner,
            "is_lora": self.spec.rank > 0,
            "lora_rank": self.spec.rank or None,
            "last_request_time": _iso(self.used),
            "user_metadata": dict(self.user_metadata),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A saved state of a model."""

    model_id: str
    kind: Kind
    name: str
    state: str
    """Folder of its files."""
    size_bytes: int
    saved: float
    """Time, in seconds since the epoch."""
    expires: float | None
    """Time after which it is deleted; None keeps it."""
    user_metadata: Mapping[str, str]

    @property
    def path(self) -> str:
        """Path that clients use."""
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def wire(self) -> dict[str, Any]:
        """Return the checkpoint as the protocol has it."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": _iso(self.saved),
            "tinker_path": self.path,
            "size_bytes": self.size_bytes,
            "user_metadata": dict(self.user_metadata),
            "expires_at": None if self.expires is None else _iso(self.expires),
        }


class Checkpoints:
    """The models and checkpoints of all users in one folder. Only one server may use it at a time."""

    def __init__(self, root: Path, now: Callable[[], float] = time.time) -> None:
        """Open a folder that exists; delete expired checkpoints, and what a killed server left. `now` returns Unix seconds."""
        self._root, self.now = root, now
        self._incoming = set[str]()  # states that are being moved into the folder
        for folder in self._run_folders():
            self._clean(folder)

    def open_run(self, run: Run) -> None:
        """Write the file of a new model, or of one whose time of last use has changed."""
        folder = self._folder(run.model_id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(folder / "run.json", json.dumps(asdict(run)), durable=True)

    def run(self, model_id: str, owner: str) -> Run:
        """Return a model of a user; raise `Refused` if there is none of this id."""
        run = self._read_run(model_id) if _MODEL_ID.fullmatch(model_id) else None
        if run is None or run.owner != owner:
            raise Refused(f"model_id: you have no such model (got {model_id[:80]!r})", status=404)
        return run

    def runs(self, owner: str) -> list[Run]:
        """Return the models of a user, the last used first."""
        found = (self._read_run(f"{folder.parent.name}:train:{folder.name}") for folder in self._run_folders())
        return sorted((run for run in found if run is not None and run.owner == owner), key=lambda run: -run.used)

    def check_name(self, model_id: str, kind: Kind, name: str, *, may_exist: bool = False) -> None:
        """Raise `Refused` if the name of a checkpoint is invalid or taken, before anything is written."""
        if not _NAME.fullmatch(name):
            raise Refused(f"path: must have up to 128 letters, digits and ._-, and not start with a dot (got {name[:80]!r})")
        if not may_exist and self._read(model_id, kind, name) is not None:
            path = f"tinker://{model_id}/{kind}/{name}"
            raise Refused(f"path: the checkpoint exists (got {path}). Use overwrite, or another name.")

    async def add(
        self,
        model_id: str,
        kind: Kind,
        name: str,
        state: Path,
        *,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Checkpoint:
        """Move a written state into the folder, and name it. A checkpoint of this name is replaced, in one step.

        Another file system may have the state, so that the move copies it.
        """
        states = self._folder(model_id) / "states"
        states.mkdir(parents=True, exist_ok=True)
        target = states / secrets.token_hex(8)
        self._incoming.add(target.name)
        try:
            await asyncio.to_thread(shutil.move, state, target)
            now, old = self.now(), self._read(model_id, kind, name)
            checkpoint = Checkpoint(
                model_id=model_id,
                kind=kind,
                name=name,
                state=target.name,
                size_bytes=sum(file.stat().st_size for file in target.rglob("*") if file.is_file()),
                saved=now,
                expires=None if ttl_s is None else now + ttl_s,
                user_metadata=user_metadata or {},
            )
            self._write(checkpoint)
        finally:
            self._incoming.discard(target.name)
        if old is not None:
            shutil.rmtree(states / old.state, ignore_errors=True)
        if (run := self._read_run(model_id)) is not None:
            self.open_run(replace(run, used=now))
        return checkpoint

    def find(self, path: str, owner: str, *kinds: Kind) -> tuple[Run, Checkpoint, Path]:
        """Return a checkpoint of a user with its model and the folder of its state; raise `Refused` if there is none."""
        match = _PATH.fullmatch(path)
        if match is None:
            rule = "path: must be tinker://MODEL_ID/weights/NAME or tinker://MODEL_ID/sampler_weights/NAME"
            raise Refused(f"{rule} (got {path[:120]!r})")
        model_id, name = match[1], match[5]
        kind: Kind = "weights" if match[4] == "weights" else "sampler_weights"
        if kinds and kind not in kinds:
            raise Refused(f"path: must be a checkpoint in {' or '.join(kinds)} (got {path[:200]!r})")
        run, checkpoint = self._read_run(model_id), self._read(model_id, kind, name)
        if run is None or run.owner != owner or checkpoint is None:
            raise Refused(f"path: you have no such checkpoint (got {path[:200]!r})", status=404)
        return run, checkpoint, self._folder(model_id) / "states" / checkpoint.state

    def all_of(self, owner: str, model_id: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a user or of one of the user's models, the newest first."""
        runs = self.runs(owner) if model_id is None else [self.run(model_id, owner)]
        found = [each for run in runs for each in self._clean(self._folder(run.model_id))]
        return sorted(found, key=lambda each: -each.saved)

    def set_ttl(self, path: str, owner: str, ttl_s: int | None) -> None:
        """Let a checkpoint expire after some seconds from now, or never; raise `Refused` if there is none."""
        _, checkpoint, _ = self.find(path, owner)
        self._write(replace(checkpoint, expires=None if ttl_s is None else self.now() + ttl_s))

    def delete(self, path: str, owner: str) -> None:
        """Delete a checkpoint; raise `Refused` if there is none."""
        _, checkpoint, state = self.find(path, owner)
        self._file(checkpoint.model_id, checkpoint.kind, checkpoint.name).unlink()
        shutil.rmtree(state, ignore_errors=True)

    def _clean(self, folder: Path) -> list[Checkpoint]:
        """Delete expired checkpoints of a model, and states without one; return the checkpoints."""
        model_id = f"{folder.parent.name}:train:{folder.name}"
        found = list[Checkpoint]()
        for kind in KINDS:
            for file in (folder / kind).glob("*.json"):
                checkpoint = self._read(model_id, kind, file.stem)
                if checkpoint is None:
                    file.unlink(missing_ok=True)
                else:
                    found.append(checkpoint)
        named = self._incoming | {checkpoint.state for checkpoint in found}
        for state in (folder / "states").glob("*"):
            if state.name not in named:
                shutil.rmtree(state, ignore_errors=True)
        return found

    def _run_folders(self) -> Iterator[Path]:
        for file in sorted(self._root.glob("*/*/run.json")):
            if _MODEL_ID.fullmatch(f"{file.parent.parent.name}:train:{file.parent.name}"):
                yield file.parent

    def _folder(self, model_id: str) -> Path:
        match = _MODEL_ID.fullmatch(model_id)
        assert match, model_id
        return self._root / match[1] / match[2]

    def _file(self, model_id: str, kind: Kind, name: str) -> Path:
        return self._folder(model_id) / kind / f"{name}.json"

    def _read_run(self, model_id: str) -> Run | None:
        values = _read_json(self._folder(model_id) / "run.json")
        return None if values is None else Run(**{**values, "spec": ModelSpec(**values["spec"])})

    def _read(self, model_id: str, kind: Kind, name: str) -> Checkpoint | None:
        """Return a checkpoint; None if there is none, or if it has expired."""
        values = _read_json(self._file(model_id, kind, name))
        checkpoint = None if values is None else Checkpoint(**values)
        has_expired = checkpoint is not None and checkpoint.expires is not None and checkpoint.expires <= self.now()
        return None if has_expired else checkpoint

    def _write(self, checkpoint: Checkpoint) -> None:
        file = self._file(checkpoint.model_id, checkpoint.kind, checkpoint.name)
        file.parent.mkdir(exist_ok=True)
        replace_text(file, json.dumps(asdict(checkpoint)), durable=True)


def _read_json(file: Path) -> dict[str, Any] | None:
    """Return a JSON object that this server wrote; None if the file is missing, `DamagedError` if it is damaged."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DamagedError(f"{file} is damaged ({error}). Delete it.") from None
    if not isinstance(values, dict):
        raise DamagedError(f"{file} is damaged. Delete it.")
    return values


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


OVERHEAD = 1024
"""Memory of a future besides its request or result, in bytes."""
MAX_AHEAD = 100_000
"""Largest distance of a sequence id from the next one that runs."""


class Unordered(Exception):
    """A request with a sequence id that has already been used or given up, or that is too far ahead."""


class Order(Generic[T]):
    """Items by sequence id, handed out in their order without gaps."""

    def __init__(self, first: int = 1) -> None:
        self.next = first
        """Sequence id of the item that is handed out next."""
        self._held: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, seq_id: int, item: T) -> None:
        """Add an item; raise `Unordered` if its sequence id is not due any more, has an item, or is too far ahead."""
        if seq_id < self.next or seq_id in self._held:
            raise Unordered(f"seq_id: {seq_id} has already been used (the next one is {self.next}).")
        if seq_id - self.next > MAX_AHEAD:
            raise Unordered(f"seq_id: must be at most {self.next + MAX_AHEAD} now (got {seq_id}).")
        self._held[seq_id] = item

    def take(self) -> T | None:
        """Return the next item; None if it has not arrived."""
        if self.next not in self._held:
            return None
        self.next += 1
        return self._held.pop(self.next - 1)

    @property
    def has_gap(self) -> bool:
        """True if items wait for one that has not arrived."""
        return bool(self._held) and self.next not in self._held

    def skip(self) -> tuple[int, int]:
        """Give up the missing items before the first that has arrived; return the first and last of their sequence ids."""
        first, self.next = self.next, min(self._held)
        return first, self.next - 1

    def clear(self) -> None:
        """Remove all items."""
        self._held.clear()


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a request, as it is sent."""

    body: bytes
    kind: bytes
    """Content type of the body."""
    is_failure: bool = False
    """True if the body is an error."""


@dataclass(eq=False)
class Future:
    """A result that a client polls for. It can be read again and again, because a response can be lost."""

    request_id: str
    owner: str
    """User whose client may read it."""
    group: str
    """Session that it belongs to."""
    size: int
    """Size of the request in bytes; of the result, once there is one."""
    answer: Answer | None = None
    was_read: bool = False
    on_drop: Callable[[], None] | None = None
    """Called when the result is dropped."""
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, limit_s: float) -> Answer | None:
        """Return the answer; None if there is none within the time limit, in seconds."""
        if self.answer is None:
            try:
                async with asyncio.timeout(limit_s):
                    await self._done.wait()
            except TimeoutError:
                return None
        return self.answer


class Futures:
    """Futures of all clients, with bounded memory.

    Results that were read are dropped first-in, first-out when memory is needed. Those that were not are never dropped while
    their session lives: further requests are refused instead.
    """

    def __init__(self, max_bytes: int, max_open: int, max_bytes_per_user: int) -> None:
        """Create the futures.

        Args:
            max_bytes: Largest sum of the sizes of requests and results, in bytes.
            max_open: Largest number of futures of one user that have not been read.
            max_bytes_per_user: Largest sum of their sizes, in bytes.
        """
        self._max_bytes, self._max_open, self._max_bytes_per_user = max_bytes, max_open, max_bytes_per_user
        self._futures: dict[str, Future] = {}
        self._read: OrderedDict[str, Future] = OrderedDict()
        self._num_open = Counter[str]()  # futures that have not been read, by user
        self._bytes_open = Counter[str]()
        self.num_bytes = 0
        """Sum of the sizes of all requests and results, in bytes."""

    def __len__(self) -> int:
        return len(self._futures)

    def open(self, owner: str, group: str, size: int, on_drop: Callable[[], None] | None = None) -> Future:
        """Open a future for a request of a size in bytes; raise `Refused` if the user has too many, or memory is short."""
        if self._num_open[owner] >= self._max_open:
            rule = f"at most {self._max_open} requests of a user may wait or have unread results"
            raise Refused(f"{rule}. Await earlier ones, then retry.", status=429)
        size += OVERHEAD
        if self._bytes_open[owner] + size > self._max_bytes_per_user:
            rule = f"requests and unread results of a user may have {self._max_bytes_per_user} bytes"
            raise Refused(f"{rule}. Await earlier ones, then retry.", status=429)
        self._make_room(size)
        if self.num_bytes + size > self._max_bytes:
            rule = f"requests and unread results may have {self._max_bytes} bytes in all"
            raise Refused(f"{rule}. Retry later.", status=429)
        future = Future(f"future_{secrets.token_hex(12)}", owner, group, size, on_drop=on_drop)
        self._futures[future.request_id] = future
        self._num_open[owner] += 1
        self._bytes_open[owner] += size
        self.num_bytes += size
        return future

    def resolve(self, future: Future, answer: Answer) -> None:
        """Set the result of a future. A future that was dropped ignores it."""
        if future.request_id not in self._futures:
            return
        size = len(answer.body) + OVERHEAD
        self.num_bytes += size - future.size
        self._bytes_open[future.owner] += size - future.size
        future.size, future.answer = size, answer
        future._done.set()
        self._make_room(0)

    def find(self, request_id: str, owner: str) -> Future:
        """Return a future of a user; raise `Refused` if there is none."""
        future = self._futures.get(request_id)
        if future is None or future.owner != owner:
            rule = "there is no such request, its result was read and has been dropped since, or its session has ended"
            raise Refused(f"request_id: {rule}, for example because the server was restarted", status=404)
        return future

    def read(self, future: Future) -> None:
        """Note that the client has been sent the result."""
        if not future.was_read and future.request_id in self._futures:
            future.was_read = True
            self._read[future.request_id] = future
            self._close(future)

    def drop_group(self, group: str) -> None:
        """Drop all futures of a session."""
        for future in [each for each in self._futures.values() if each.group == group]:
            self._drop(future)

    def _make_room(self, size: int) -> None:
        while self._read and self.num_bytes + size > self._max_bytes:
            self._drop(next(iter(self._read.values())))

    def _drop(self, future: Future) -> None:
        if not future.was_read:
            self._close(future)
        del self._futures[future.request_id]
        self._read.pop(future.request_id, None)
        self.num_bytes -= future.size
        future._done.set()
        if future.on_drop is not None:
            future.on_drop()

    def _close(self, future: Future) -> None:
        self._num_open[future.owner] -= 1
        self._bytes_open[future.owner] -= future.size
        if not self._num_open[future.owner]:
            del self._num_open[future.owner], self._bytes_open[future.owner]


KNOWN = TitanRLError, Malformed, Unordered
"""Errors whose messages are for the client."""


class FullError(Refused):
    """The host has no place for another model."""


class Sampler(Protocol):
    """One set of weights to sample from. It never samples others: if they are gone, its methods raise."""

    async def sample(self, asked: SampleRequest) -> Sequence[Completion]:
        """Return `num_samples` completions of the prompt."""

    async def logprobs(self, tokens: Sequence[int], num_top: int) -> tuple[FloatArray, TopTokens | None]:
        """Return the log-probability of each token, `[S]`, in nats at temperature 1; the first is NaN.

        Also return the `num_top` most likely tokens at each token but the first; None if `num_top` is 0.
        """

    async def release(self) -> None:
        """Free what the weights hold."""


class Model(Protocol):
    """A model that is trained. Its methods are called one at a time."""

    async def run(
        self, data: Sequence[Datum], loss_fn: str, options: Mapping[str, float], *, backward: bool
    ) -> ForwardBackwardOutput:
        """Run a pass; with `backward`, accumulate the gradient."""

    async def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Take an optimizer step."""

    async def save(self) -> Path:
        """Write weights and optimizer state into a new folder, and return it."""

    async def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Load what `save` wrote."""

    async def publish(self, state: Path | None = None) -> Sampler:
        """Return a sampler of the current weights. `state` is a folder to which `save` wrote them, and which stays."""

    async def recover(self) -> None:
        """Accept requests after a failed one. The gradient of passes that succeeded remains."""

    async def release(self) -> None:
        """Free what the model holds. No method is called after this."""


class Host(Protocol):
    """The models behind the endpoint."""

    @property
    def base_model(self) -> str:
        """Name of the model that is fine-tuned."""

    @property
    def tokenizer_id(self) -> str | None:
        """Name or path of its tokenizer, if clients can open it."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model."""

    @property
    def max_tokens(self) -> int:
        """Longest prompt and completion together, in tokens."""

    @property
    def notice(self) -> str:
        """Text that clients print when they connect; empty if there is none."""

    async def create(self, spec: ModelSpec, state: Path | None, *, with_optimizer: bool) -> Model:
        """Return a new model, or a saved one; raise `FullError` if there are too many, `Refused` if it is impossible."""

    async def base(self) -> Sampler:
        """Return a sampler of the base model."""

    async def open_sampler(self, spec: ModelSpec, state: Path) -> Sampler:
        """Return a sampler of saved weights; raise `Refused` if they cannot be sampled now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerLimits:
    """Limits of the endpoint."""

    max_json_bytes: int = 8 << 20
    """Longest JSON body."""
    max_pass_bytes: int = 64 << 20
    """Longest body of a pass, also when decompressed. The client splits its data into bodies of about 5 MB."""
    max_bytes: int = 1 << 29
    """Requests that wait and results that can still be read, of all users, in bytes."""
    max_bytes_per_user: int = 1 << 28
    """Requests that wait and unread results of one user, in bytes."""
    max_requests: int = 4096
    """Requests of a user that wait or have unread results."""
    max_samples: int = 1024
    """Completions that all users can wait for at the same time."""
    max_samples_per_user: int = 512
    """Completions that one user can wait for at the same time."""
    max_sessions: int = 64
    """Sessions of one user."""
    max_samplers: int = 10_000
    """Sampling sessions of one session."""
    max_models: int = 1000
    """Models of one session, with those that could not be created."""
    body_s: float = 60.0
    """Time limit for the body of a request, in seconds."""
    silent_s: float = 35.0
    """Time without a sign of life after which a session ends if another one needs its place, in seconds."""
    idle_s: float = 300.0
    """Time without a sign of life after which a session ends, in seconds. The client sends one every 10 s."""
    gap_s: float = 3600.0
    """Time that requests wait for one with a lower sequence id, in seconds. After a sixtieth of it, the log says so."""


@dataclass(eq=False, kw_only=True)
class Job:
    """A request of a model."""

    action: Callable[[], Awaitable[Answer]]
    future: Future


class Weights:
    """Weights that samplers share, which are opened when the first of them is used."""

    def __init__(self, open: Callable[[], Awaitable[Sampler]]) -> None:
        self._open = open
        self._opened: asyncio.Future[Sampler] | None = None

    @classmethod
    def of(cls, sampler: Sampler) -> "Weights":
        """Return weights that are open."""

        async def opened() -> Sampler:
            return sampler

        weights = cls(opened)
        weights._opened = asyncio.ensure_future(opened())
        return weights

    def exchange(self, other: "Weights") -> None:
        """Swap the weights with others, for the requests from now on."""
        self._opened, other._opened = other._opened, self._opened

    async def sampler(self) -> Sampler:
        """Return the sampler, opened once; after a failure, the next call tries again."""
        if self._opened is None or (self._opened.done() and (self._opened.cancelled() or self._opened.exception() is not None)):
            self._opened = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opened)

    async def release(self) -> None:
        """Free what the weights hold. A second call has no effect."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await asyncio.wait({opened})
            if not opened.cancelled() and opened.exception() is None:
                await opened.result().release()


@dataclass(eq=False, kw_only=True)
class OpenModel:
    """A model of a session, and its requests."""

    model_id: str
    session: "OpenSession"
    run: Run
    handle: Model | None = None
    """None before it has been created, and if that failed."""
    problem: str = "the model has not been created."
    order: Order[Job] = field(default_factory=lambda: Order[Job](0))
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a request arrives, or the model is to end."""
    has_ended: bool = False
    seen: dict[int, tuple[bytes, Future]] = field(default_factory=dict)
    """Digest and future of the requests whose results can still be read, by sequence id."""
    following: Weights | None = None
    """Newest weights of a save with `kind: inflight`."""
    making_room: "asyncio.Task[None] | None" = None
    """Wait for the end of silent sessions, while there is no place for the model."""

    def live(self) -> Model:
        """Return the model; raise `Refused` if it was not created."""
        if self.handle is None:
            raise Refused(self.problem)
        return self.handle


@dataclass(eq=False, kw_only=True)
class OpenSampler:
    """A sampling session: weights that a client samples from."""

    sampler_id: str
    session: "OpenSession"
    path: str | None
    """Path of saved weights; None for those that the client's model had."""
    weights: Weights
    seen: dict[int, tuple[Future, list[str]]] = field(default_factory=dict)
    """Future and sequence ids of the requests whose results can still be read, by sequence id."""


@dataclass(eq=False, kw_only=True)
class OpenSession:
    """Models and samplers of one client. A session ends when the client says so, or gives no sign of life."""

    session_id: str
    owner: str
    seen_at: float
    """Time of the last request, on the clock of the event loop."""
    user_metadata: Mapping[str, str]
    display_name: str | None
    timer: asyncio.TimerHandle | None = None
    is_alive: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every request."""
    models: dict[str, OpenModel] = field(default_factory=dict)
    creations: dict[int, Future] = field(default_factory=dict)
    """Futures of the requests that create models, by sequence id."""
    samplings: dict[int, OpenSampler] = field(default_factory=dict)
    tasks: "set[asyncio.Task[None]]" = field(default_factory=set)
    """Requests for completions, and the workers of models."""

    def touch(self) -> None:
        """Note that the client is alive."""
        self.seen_at = asyncio.get_running_loop().time()
        self.is_alive.set()


@dataclass(frozen=True, slots=True)
class NewModel:
    """A request for a new model, once it has been checked."""

    spec: ModelSpec
    user_metadata: Mapping[str, str]
    state: Path | None = None
    """Saved state to start from; None starts from the base model."""
    with_optimizer: bool = False
    """True to also load the state of the optimizer."""


class Sessions:
    """The sessions of all clients of a host."""

    def __init__(self, host: Host, checkpoints: Checkpoints, limits: TinkerLimits) -> None:
        self.futures = Futures(limits.max_bytes, limits.max_requests, limits.max_bytes_per_user)
        """Results that clients poll for."""
        self.open: dict[str, OpenSession] = {}
        """Sessions by id."""
        self.num_samples: Counter[str] = Counter()
        """Completions that are sampled, by user."""
        self.loaded: dict[str, Weights] = {}
        """Saved weights by path, as long as a session uses them."""
        self._host, self._checkpoints, self._limits = host, checkpoints, limits
        self._ending: set[asyncio.Task[None]] = set()
        self._running: dict[str, asyncio.Task[None]] = {}  # of requests for completions, by request

    def add(self, owner: str, user_metadata: Mapping[str, str], display_name: str | None) -> OpenSession:
        """Open a session; raise `Refused` if the user has too many, none of which is silent."""
        loop, own = asyncio.get_running_loop(), [session for session in self.open.values() if session.owner == owner]
        if len(own) >= self._limits.max_sessions:
            longest = min(own, key=lambda session: session.seen_at)
            if loop.time() < longest.seen_at + self._limits.silent_s:
                raise Refused(f"you have {self._limits.max_sessions} sessions. Close one, or wait until it ends.", status=429)
            self.end(longest)
        session = OpenSession(
            session_id=new_id("session_"),
            owner=owner,
            seen_at=loop.time(),
            user_metadata=user_metadata,
            display_name=display_name,
        )
        self.open[session.session_id] = session
        session.timer = loop.call_later(self._limits.idle_s, self._end_if_idle, session)
        return session

    def session(self, session_id: str, owner: str, status: int = 404) -> OpenSession:
        """Return a session of a user, and note that its client is alive; raise `Refused`, with the status, if there is none."""
        session = self.open.get(session_id)
        if session is None or session.owner != owner:
            rule = (
                "you have no such session, or it has ended, for example because the server was restarted. Create a client again"
            )
            raise Refused(f"session_id: {rule} (got {session_id[:80]!r})", status=status)
        session.touch()
        return session

    def end(self, session: OpenSession) -> None:
        """Free what a session holds. Its running requests end first, its waiting ones are dropped."""
        if self.open.pop(session.session_id, None) is None:
            return
        if session.timer is not None:
            session.timer.cancel()
        for model in session.models.values():
            model.has_ended = True
            model.order.clear()
            model.news.set()
            if model.making_room is not None:
                model.making_room.cancel()
        task = asyncio.ensure_future(self._release(session))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _end_if_idle(self, session: OpenSession) -> None:
        loop = asyncio.get_running_loop()
        left = session.seen_at + self._limits.idle_s - loop.time()
        if left > 0:
            session.timer = loop.call_later(left, self._end_if_idle, session)
        else:
            logger.info("session %s ends: no sign of life", session.session_id)
            self.end(session)

    async def _end_silent(self, session: OpenSession) -> None:
        """End the other sessions that have models, but whose clients have exited without saying so."""

        async def end_if_silent(other: OpenSession) -> None:
            other.is_alive.clear()
            try:
                async with asyncio.timeout_at(other.seen_at + self._limits.silent_s):
                    await other.is_alive.wait()
            except TimeoutError:
                self.end(other)

        await asyncio.gather(*(end_if_silent(other) for other in self.open.values() if other is not session and other.models))
        if self._ending:
            await asyncio.wait(self._ending)

    async def _release(self, session: OpenSession) -> None:
        for request_id in [each for each, task in self._running.items() if task in session.tasks]:
            self._running[request_id].cancel()
        self.futures.drop_group(session.session_id)
        while session.tasks:
            await asyncio.wait(session.tasks)
        others = self.open.values()
        models = {model_id for other in others for model_id in other.models}
        used = {each.weights for other in others for each in other.samplings.values()}
        unused = {each.weights for each in session.samplings.values()}
        for path, weights in list(self.loaded.items()):
            if weights not in used and path.removeprefix("tinker://").partition("/")[0] not in models:
                unused.add(self.loaded.pop(path))
        for weights in unused - used - set(self.loaded.values()):
            await self._quietly(weights.release())

    async def close(self) -> None:
        """End all sessions, and wait until what they hold is free."""
        for session in list(self.open.values()):
            self.end(session)
        if self._ending:
            await asyncio.wait(self._ending)

    def create(
        self, session: OpenSession, number: int, size: int, read: Callable[[], NewModel], reply: Mapping[str, str]
    ) -> Future:
        """Queue the creation of a model as its first request, unless it is repeated; return its future.

        Args:
            session: The session.
            number: Number of the model in the session.
            size: Size of the request, in bytes.
            read: Function that checks the request; it may raise.
            reply: Fields of the result.
        """
        model_id = f"{session.session_id}:train:{number}"
        if number in session.creations:
            return session.creations[number]
        if len(session.models) >= self._limits.max_models:
            raise Refused(f"a session can have {self._limits.max_models} models. Open another client.", status=429)
        future = session.creations[number] = self.futures.open(session.owner, session.session_id, size)
        run = Run(
            model_id=model_id,
            owner=session.owner,
            base_model=self._host.base_model,
            spec=ModelSpec(rank=0),
            user_metadata={},
            used=0.0,
        )
        model = session.models[model_id] = OpenModel(model_id=model_id, session=session, run=run)

        async def create() -> Answer:
            try:
                new = read()
                create = partial(self._host.create, new.spec, new.state, with_optimizer=new.with_optimizer)
                try:
                    model.handle = await create()
                except FullError:
                    model.making_room = asyncio.create_task(self._end_silent(session))
                    await asyncio.wait({model.making_room})  # `end` cancels it, or two sessions would wait for each other
                    model.handle = await create()
            except Exception as error:  # whatever the error, later requests of the model fail with it
                model.problem = f"the model was not created: {_text_of(error)}"
                raise
            model.run = replace(run, spec=new.spec, user_metadata=new.user_metadata, used=self._checkpoints.now())
            self._checkpoints.open_run(model.run)
            return json_answer({"model_id": model_id, **reply})

        model.order.add(0, Job(action=create, future=future))
        self._start(session, self._work(model))
        return future

    def model(self, model_id: str, owner: str) -> OpenModel:
        """Return a model of a user, and note that its client is alive; raise `Refused` if there is none."""
        session_id, _, _ = model_id.partition(":")
        session = self.open.get(session_id)
        if session is None or session.owner != owner or model_id not in session.models:
            rule = "you have no such model, or its session has ended, for example because the server was restarted"
            fix = "Create a client from a saved state"
            raise Refused(f"model_id: {rule}. {fix} (got {model_id[:80]!r})", status=404)
        session.touch()
        return session.models[model_id]

    def submit(
        self, model: OpenModel, seq_id: int, size: int, digest: bytes, action: Callable[[OpenModel], Awaitable[Answer]]
    ) -> Future:
        """Queue a request of a model, unless it is repeated; return its future, through which it also fails.

        Args:
            model: The model.
            seq_id: Sequence id of the request.
            size: Size of the request, in bytes.
            digest: Digest of the request. Another request with the same sequence id fails.
            action: Function that runs the request when it is due.
        """
        if seq_id in model.seen and model.seen[seq_id][0] == digest:
            return model.seen[seq_id][1]
        session = model.session
        future = self.futures.open(session.owner, session.session_id, size, lambda: _forget(model.seen, seq_id, future))
        try:
            model.order.add(seq_id, Job(action=lambda: action(model), future=future))
        except Unordered as error:
            self.futures.resolve(future, failure(error))
        else:
            model.seen[seq_id] = digest, future
            model.news.set()
        return future

    def add_sampler(self, session: OpenSession, number: int, path: str | None, weights: Weights) -> OpenSampler:
        """Return the sampler `number` of a session, which the first request with this number opens."""
        if number not in session.samplings:
            if len(session.samplings) >= self._limits.max_samplers:
                raise Refused(f"a session can have {self._limits.max_samplers} samplers. Open another client.", status=429)
            sampler_id = f"{session.session_id}:sample:{number}"
            session.samplings[number] = OpenSampler(sampler_id=sampler_id, session=session, path=path, weights=weights)
        return session.samplings[number]

    def sampler(self, sampler_id: str, owner: str) -> OpenSampler:
        """Return a sampler of a user, and note that its client is alive; raise `Refused` if there is none."""
        session_id, _, number = sampler_id.partition(":sample:")
        session = self.open.get(session_id)
        sampling = session.samplings.get(int(number)) if session is not None and re.fullmatch(r"[0-9]{1,19}", number) else None
        if session is None or session.owner != owner or sampling is None:
            rule = "you have no such sampler, or its session has ended, for example because the server was restarted"
            raise Refused(f"sampling_session_id: {rule}. Create a sampling client again (got {sampler_id[:80]!r})", status=404)
        session.touch()
        return sampling

    def sample(
        self, sampler: OpenSampler, seq_id: int, size: int, num: int, action: Callable[[], Awaitable[Answer]]
    ) -> tuple[Future, list[str]]:
        """Start a request for completions; return its future and their names. Raise `Refused` if there are too many at once."""
        limits, owner = self._limits, sampler.session.owner
        is_full = self.num_samples.total() + num > limits.max_samples
        if is_full or self.num_samples[owner] + num > limits.max_samples_per_user:
            rule = f"at most {limits.max_samples_per_user} completions per user at once, {limits.max_samples} in all"
            raise Refused(f"{rule}. Retry later.", status=429)
        session = sampler.session
        future = self.futures.open(owner, session.session_id, size, lambda: _forget(sampler.seen, seq_id, future))
        sampler.seen[seq_id] = future, [f"{future.request_id}:{index}" for index in range(num)]
        self.num_samples[owner] += num

        async def work() -> None:
            self.futures.resolve(future, await self._outcome(action))

        def done(task: "asyncio.Task[None]") -> None:
            if task.cancelled():
                self.futures.resolve(future, failure(Refused("the request was cancelled.")))
            self.num_samples[owner] -= num
            if not self.num_samples[owner]:
                del self.num_samples[owner]
            del self._running[future.request_id]

        task = self._running[future.request_id] = self._start(session, work())
        task.add_done_callback(done)
        return sampler.seen[seq_id]

    def cancel(self, future: Future) -> None:
        """Cancel a request for completions. Others run to their end."""
        if (task := self._running.get(future.request_id)) is not None:
            task.cancel()

    def free(self, session: OpenSession, weights: Weights) -> None:
        """Free weights in the background, because their running requests end first."""
        self._start(session, self._quietly(weights.release()))

    async def _work(self, model: OpenModel) -> None:
        """Run the requests of a model in order, until its session ends."""
        gap_ends: float | None = None
        warning: asyncio.TimerHandle | None = None
        while not model.has_ended:
            job = model.order.take()
            if job is not None:
                gap_ends = None
                if warning is not None:
                    warning.cancel()
                answer = await self._outcome(job.action)
                if model.handle is not None and answer.is_failure:
                    await self._quietly(model.handle.recover())
                self.futures.resolve(job.future, answer)
                continue
            model.news.clear()
            if model.order.has_gap and gap_ends is None:  # later arrivals do not extend the wait for the missing request
                loop, rule = asyncio.get_running_loop(), "request %d has not arrived. Those after it wait for up to %g s"
                gap_ends = loop.time() + self._limits.gap_s
                arguments = model.model_id, model.order.next, self._limits.gap_s
                warning = loop.call_later(self._limits.gap_s / 60, logger.warning, f"%s: {rule}", *arguments)
            try:
                async with asyncio.timeout_at(gap_ends):
                    await model.news.wait()
            except TimeoutError:
                gap_ends = None
                if not model.order.has_gap:  # the request has just arrived, or the session has ended
                    continue
                first, last = model.order.skip()
                logger.warning(
                    "%s: requests %d to %d did not arrive within %g s", model.model_id, first, last, self._limits.gap_s
                )
        if warning is not None:
            warning.cancel()
        if model.following is not None:
            await self._quietly(model.following.release())
        if model.handle is not None:
            await self._quietly(model.handle.release())

    async def _outcome(self, action: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return await action()
        except Exception as error:  # a failed request must not end the requests after it
            if not isinstance(error, KNOWN):
                logger.exception("a request failed")
            return failure(error)

    async def _quietly(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception:  # the log has it; the session ends in any case, or its fault is reported elsewhere
            logger.warning("a model was not freed", exc_info=True)

    def _start(self, session: OpenSession, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)
        return task


def json_answer(value: object) -> Answer:
    """Return a value as a JSON result."""
    return Answer(dump(value).encode(), JSON)


def failure(error: Exception) -> Answer:
    """Return how a failed request is answered."""
    is_user = isinstance(error, KNOWN) and not isinstance(error, FaultError)
    body = dump({"error": _text_of(error), "category": "user" if is_user else "server"})
    return Answer(body.encode(), JSON, is_failure=True)


def _text_of(error: Exception) -> str:
    """Return what a client sees of an error."""
    return str(error if isinstance(error, KNOWN) else internal(error))


def _forget(seen: "dict[int, Any]", seq_id: int, future: Future) -> None:
    """Remove a request from those that can be repeated, if it is the one of this future."""
    if seq_id in seen and future in seen[seq_id]:
        del seen[seq_id]
