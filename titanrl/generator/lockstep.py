"""Lockstep execution of tensor-parallel ranks: the other ranks replay rank 0's calls between the same decoding steps.

Every rank runs a complete engine on its shard of the model. vLLM's scheduler is deterministic, so engines that get the same
requests, aborts and weights at the same steps build the same batches and meet in the model's collectives. Rank 0 logs every
change of its engine and sends the log over sockets before each step or weight swap; the other ranks block until it arrives.
An idle engine sends nothing, and the other ranks never reply.
"""

import logging
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

from titanrl.base.errors import DivergedError
from titanrl.base.ownership import is_own_peer
from titanrl.carriers.types import EngineLoad, GenerationRequest
from titanrl.generator.compat import gather_objects
from titanrl.generator.engine import Engine, Fill, Finished, Sampled
from titanrl.processes.temporary import private_folder
from titanrl.weights.records import WeightMismatchError

STOPPED = "the engine of this rank has stopped"


@dataclass(frozen=True, slots=True)
class Abort:
    """Cancelled requests."""

    tickets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart of every running request."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Adapters that are not held any more."""

    adapters: tuple[int, ...]


Change = GenerationRequest | Abort | Restart | Drop


@dataclass(frozen=True, slots=True)
class Swap:
    """Weights that all ranks write between two steps."""

    version: int
    """Version of the policy, or of the adapter's tokens."""
    adapter: int | None
    """Number of the adapter to hold; None for the policy."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Changes of rank 0's engine since the last turn, and the next action of all ranks."""

    changes: tuple[Change, ...]
    """Changes in order; a request represents its addition."""
    num_running: int
    """Unfinished requests after the changes, the same on all ranks."""
    swap: Swap | None
    """Weights to write; if None, decode one token."""


class Leader:
    """Rank 0's engine, with the interface of `Engine`; the other ranks replay every call."""

    def __init__(self, engine: Engine, others: Sequence[Connection]) -> None:
        """Wrap rank 0's engine; `others` are its connections to the other ranks."""
        self._engine = engine
        self._others = others
        self._changes: list[Change] = []

    @property
    def can_step(self) -> bool:
        """True if there are unfinished requests and valid weights."""
        return self._engine.can_step

    @property
    def load(self) -> EngineLoad:
        """Load of rank 0, the same on all ranks."""
        return self._engine.load

    def add(self, request: GenerationRequest) -> int:
        """Add a request on all ranks; see `Engine.add`."""
        ticket = self._engine.add(request)
        self._changes.append(request)
        return ticket

    def abort(self, tickets: Iterable[int]) -> None:
        """Call `Engine.abort`."""
        abort = Abort(tuple(tickets))
        self._engine.abort(abort.tickets)
        self._changes.append(abort)

    def sampled(self, starts: Mapping[int, int]) -> dict[int, Sampled]:
        """Call `Engine.sampled` on rank 0, whose tokens are those of all ranks."""
        return self._engine.sampled(starts)

    def restart(self) -> None:
        """Call `Engine.restart`."""
        self._engine.restart()
        self._changes.append(Restart())

    def step(self) -> list[Finished]:
        """Call `Engine.step`."""
        self._send(None)
        return self._engine.step()

    def invalidate(self, reason: str) -> None:
        """Call `Engine.invalidate` on rank 0 only; the other ranks get no requests or steps before the next swap."""
        self._engine.invalidate(reason)

    def update_weights(self, version: int, fill: Fill) -> None:
        """Call `Engine.update_weights` on all ranks; raise if it fails on any rank."""
        self._swap(Swap(version, None), fill)

    @property
    def held_adapters(self) -> frozenset[int]:
        """Adapters of rank 0, the same on all ranks."""
        return self._engine.held_adapters

    def hold_adapter(self, adapter: int, version: int, fill: Fill) -> None:
        """Call `Engine.hold_adapter` on all ranks; raise if it fails on any rank."""
        self._swap(Swap(version, adapter), fill)

    def drop_adapters(self, adapters: Iterable[int]) -> None:
        """Call `Engine.drop_adapters`."""
        drop = Drop(tuple(adapters))
        self._engine.drop_adapters(drop.adapters)
        self._changes.append(drop)

    def close(self) -> None:
        """Close the connections, which stops the other ranks. Call this after the engine's thread has exited."""
        for other in self._others:
            other.close()

    def _swap(self, swap: Swap, fill: Fill) -> None:
        self._send(swap)
        swap_together(self._engine, swap, fill)

    def _send(self, swap: Swap | None) -> None:
        turn = Turn(tuple(self._changes), self._engine.num_running, swap)
        self._changes.clear()
        for other in self._others:
            other.send(turn)


class Follower:
    """Engine of a rank other than 0, on a thread that replays rank 0's turns with this rank's shard of the weights."""

    def __init__(self, build: Callable[[], tuple[Engine, Connection]]) -> None:
        """Start the thread. The future `started` resolves when the engine is built, `stopped` when the thread exits.

        The thread calls `build`, which returns the engine and the connection to rank 0.
        """
        self.started: Future[None] = Future()
        self.stopped: Future[None] = Future()
        self._swaps: queue.SimpleQueue[tuple[Fill, Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(build,), name="engine", daemon=True).start()

    def swap(self, fill: Fill) -> Future[None]:
        """Queue `fill` for rank 0's next weight swap. The returned future fails if the swap fails on any rank."""
        result: Future[None] = Future()
        self._swaps.put((fill, result))
        if self.stopped.done():  # checked after the put: a thread that stops later fails the swap itself
            result = Future()
            result.set_exception(WeightMismatchError(STOPPED))
        return result

    def close(self) -> None:
        """Announce that no more swaps follow. The thread exits when rank 0 closes the connection."""
        self._swaps.put(None)

    def _run(self, build: Callable[[], tuple[Engine, Connection]]) -> None:
        """Run the thread. When it exits for any reason, every pending future gets a result or an exception."""
        try:
            engine, leader = build()
            self._engine = engine  # kept, as that of an `EngineLoop`
            self.started.set_result(None)
            with leader:
                while True:
                    turn: Turn = leader.recv()
                    apply_changes(engine, turn)
                    if turn.swap is None:
                        engine.step()
                    else:
                        self._swap(engine, turn.swap)
        except EOFError:  # rank 0 closed the connection or died
            self.stopped.set_result(None)
        except Exception as error:  # `Generator.follow` raises it
            logging.getLogger(__name__).exception("this rank can no longer follow rank 0")
            self.stopped.set_exception(error)
            if not self.started.done():
                self.started.set_exception(error)
        finally:
            while not self._swaps.empty():
                waiting = self._swaps.get()
                if waiting is not None:
                    waiting[1].set_exception(WeightMismatchError(STOPPED))

    def _swap(self, engine: Engine, swap: Swap) -> None:
        waiting = self._swaps.get()
        if waiting is None:
            raise EOFError
        fill, result = waiting
        try:
            swap_together(engine, swap, fill)
            result.set_result(None)
        except WeightMismatchError as error:  # raised to the caller of `swap`; the next version may succeed
            result.set_exception(error)


def apply_changes(engine: Engine, turn: Turn) -> None:
    """Apply the changes of rank 0's engine to this rank's engine.

    Raises:
        DivergedError: The engines have different numbers of requests afterwards.
    """
    for change in turn.changes:
        match change:
            case Abort(tickets):
                engine.abort(tickets)
            case Restart():
                engine.restart()
            case Drop(adapters):
                engine.drop_adapters(adapters)
            case request:
                engine.add(request)
    if engine.num_running != turn.num_running:
        raise DivergedError(f"{engine.num_running} requests are running on this rank, {turn.num_running} on rank 0")


def swap_together(engine: Engine, swap: Swap, fill: Fill) -> None:
    """Update the policy or hold an adapter on all ranks. Every rank must call this between the same two steps.

    Raises:
        WeightMismatchError: A rank failed. All ranks refuse requests until a swap succeeds, or do not hold the adapter.
    """
    failure: Exception | None = None
    try:
        if swap.adapter is None:
            engine.update_weights(swap.version, fill)
        else:
            engine.hold_adapter(swap.adapter, swap.version, fill)
    except Exception as error:  # whatever the error, the other ranks must not continue without this one
        failure = error
    failures = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise WeightMismatchError(str(failure)) from failure
    if any(failures):
        summary = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        if swap.adapter is None:
            engine.invalidate(summary)
        else:
            engine.drop_adapters([swap.adapter])
        raise WeightMismatchError(summary)


def connect(rank: int, num_ranks: int) -> list[Connection]:
    """Connect rank 0 with the other ranks; return its connections, in any order, or this rank's connection to rank 0.

    All ranks must call this after building their engines, because it exchanges the socket's name and key over the engine's
    process group. Only the current user can access the socket. Rank 0 deletes its folder once all ranks are connected.
    """
    if rank == 0:
        folder, key = private_folder(), secrets.token_bytes(32)
        try:
            with Listener(str(folder.path / "ranks"), family="AF_UNIX", backlog=num_ranks, authkey=key) as listener:
                gather_objects((listener.address, key))
                return [_of_own_user(listener.accept()) for _ in range(num_ranks - 1)]
        finally:
            folder.delete()
    name, key = gather_objects(None)[0]
    return [_of_own_user(Client(name, family="AF_UNIX", authkey=key))]


def _of_own_user(connection: Connection) -> Connection:
    """Return a connection after checking that a process of this user is at the other end, because messages are unpickled."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        if not is_own_peer(end):
            raise AuthenticationError("a process of another user is at the other end of the ranks' socket")
    return connection
