"""The ranks of a tensor-parallel engine in step: rank 0 decides, the others do the same between the same two decoding steps.

Every rank runs a whole engine on its share of the model. vLLM's scheduler is deterministic, so engines that are given the
same requests, aborts and weights at the same steps make the same batches, and meet in the collectives of the model. Rank 0
writes down what is done to its engine, and sends it to the others before the next step or swap of weights; they wait on a
socket for that. Nothing is sent while there is nothing to do, and nothing is ever sent back.
"""

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener

from torch import nn

from titanrl.generator.compat import gather_objects
from titanrl.generator.engine import Engine, Finished
from titanrl.types import EngineLoad, GenerationRequest
from titanrl.weights.manifest import WeightMismatchError

Fill = Callable[[nn.Module], None]
"""Writes weights into a model."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Requests were taken back."""

    tickets: tuple[int, ...]
    """Which."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Every running request was begun again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was done to rank 0's engine since the last turn, and what all ranks do now."""

    changes: tuple[GenerationRequest | Abort | Restart, ...]
    """In order; a request was added."""
    num_running: int
    """Requests not finished after that, the same on all ranks."""
    version: int | None
    """Weights to swap in; None: decode a token instead."""


class DivergedError(Exception):
    """A rank is not where rank 0 is; the text says how."""


class Leader:
    """Rank 0's engine, as the loop drives it: what is done to it, the other ranks' engines do too."""

    def __init__(self, engine: Engine, others: Sequence[Connection]) -> None:
        """Lead the ranks at the other ends of these connections."""
        self._engine = engine
        self._others = others
        self._changes: list[GenerationRequest | Abort | Restart] = []

    @property
    def can_step(self) -> bool:
        """Whether there is something to decode, and weights to do it with."""
        return self._engine.can_step

    @property
    def load(self) -> EngineLoad:
        """How much there is to do."""
        return self._engine.load

    def add(self, request: GenerationRequest) -> int:
        """As `Engine.add`."""
        ticket = self._engine.add(request)
        self._changes.append(request)
        return ticket

    def abort(self, tickets: Iterable[int]) -> None:
        """As `Engine.abort`."""
        abort = Abort(tuple(tickets))
        self._engine.abort(abort.tickets)
        self._changes.append(abort)

    def restart(self) -> None:
        """As `Engine.restart`."""
        self._engine.restart()
        self._changes.append(Restart())

    def step(self) -> list[Finished]:
        """As `Engine.step`."""
        self._tell(None)
        return self._engine.step()

    def invalidate(self, reason: str) -> None:
        """As `Engine.invalidate`. The others need not know: they are sent no request and no step until the next swap."""
        self._engine.invalidate(reason)

    def update_weights(self, version: int, fill: Fill) -> None:
        """As `Engine.update_weights`, on all ranks; fails if one of them does."""
        self._tell(version)
        swap_together(self._engine, version, fill)

    def close(self) -> None:
        """Let the other ranks go; call when the engine's thread has ended."""
        for other in self._others:
            other.close()

    def _tell(self, version: int | None) -> None:
        turn = Turn(tuple(self._changes), self._engine.num_running, version)
        self._changes.clear()
        for other in self._others:
            other.send(turn)


class Follower:
    """Another rank's engine on a thread of its own: it does what rank 0's does, and pulls its own share of the weights."""

    def __init__(self, build: Callable[[], tuple[Engine, Connection]]) -> None:
        """Start the thread, which first builds the engine; `started` waits for that.

        Args:
            build: makes the engine, and the connection that rank 0's turns come from.
        """
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._swaps: queue.SimpleQueue[tuple[Fill, Future[None]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(build,), name="engine", daemon=True).start()

    def swap(self, fill: Fill) -> Future[None]:
        """Fill the model when rank 0 swaps in its next version; fails if that fails on any rank."""
        result: Future[None] = Future()
        self._swaps.put((fill, result))
        if self.ended.done():
            self._fail_swaps()
        return result

    def close(self) -> None:
        """Wait for no further weights; rank 0's own end is the end of this thread."""
        self._swaps.put(None)

    def _run(self, build: Callable[[], tuple[Engine, Connection]]) -> None:
        """The thread: whatever ends it, nobody is left waiting."""
        try:
            engine, leader = build()
            self.started.set_result(None)
            with leader:
                self._follow(engine, leader)
        except EOFError:  # rank 0 has closed, or is gone
            self.ended.set_result(None)
        except Exception as error:  # the edge of the thread: the actor is told the cause
            logging.getLogger(__name__).exception("this rank cannot follow rank 0 any longer")
            self.ended.set_exception(error)
            if not self.started.done():
                self.started.set_exception(error)
        finally:
            self._fail_swaps()

    def _follow(self, engine: Engine, leader: Connection) -> None:
        while True:
            turn: Turn = leader.recv()
            repeat(engine, turn)
            if turn.version is None:
                engine.step()
            else:
                self._swap(engine, turn.version)

    def _swap(self, engine: Engine, version: int) -> None:
        waiting = self._swaps.get()
        if waiting is None:
            raise EOFError
        fill, result = waiting
        try:
            swap_together(engine, version, fill)
            result.set_result(None)
        except WeightMismatchError as error:  # belongs to who pulled; the next version may be whole
            result.set_exception(error)

    def _fail_swaps(self) -> None:
        while not self._swaps.empty():
            waiting = self._swaps.get()
            if waiting is not None:
                waiting[1].set_exception(WeightMismatchError("the engine of this rank has ended"))


def repeat(engine: Engine, turn: Turn) -> None:
    """Do to an engine what was done to rank 0's.

    Raises:
        DivergedError: it is left with another number of requests.
    """
    for change in turn.changes:
        match change:
            case Abort(tickets):
                engine.abort(tickets)
            case Restart():
                engine.restart()
            case request:
                engine.add(request)
    if engine.num_running != turn.num_running:
        raise DivergedError(f"{engine.num_running} requests are running on this rank, {turn.num_running} on rank 0")


def swap_together(engine: Engine, version: int, fill: Fill) -> None:
    """Fill the models of all ranks; every rank calls it between the same two steps.

    Raises:
        WeightMismatchError: it failed on a rank; all of them refuse requests until a swap succeeds.
    """
    failure: Exception | None = None
    try:
        engine.update_weights(version, fill)
    except Exception as error:  # whatever it is, the other ranks must not go on without this one
        failure = error
    failures = gather_objects(None if failure is None else str(failure))
    if failure is not None:
        raise WeightMismatchError(str(failure)) from failure
    if any(failures):
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        engine.invalidate(told)
        raise WeightMismatchError(told)


def connect(rank: int, num_ranks: int) -> list[Connection]:
    """Connections from rank 0 to the others, in no order; on these the one to rank 0. All ranks of a built engine call it.

    A Unix socket without a file, so nothing is left of it and nothing listens beyond this machine. Its name and key are told
    through the engine's own process group.
    """
    if rank == 0:
        name, key = f"\0titanrl-{secrets.token_hex(8)}", secrets.token_bytes(32)
        with Listener(name, family="AF_UNIX", backlog=num_ranks, authkey=key) as listener:
            gather_objects((name, key))
            return [listener.accept() for _ in range(num_ranks - 1)]
    name, key = gather_objects(None)[0]
    return [Client(name, family="AF_UNIX", authkey=key)]
