"""A rollout worker's view of the generators: a `generate` call that finds the least loaded replica."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from monarch.actor import Channel

from titanrl.types import Completion, GenerationRequest

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    """One group, and who waits for its completions."""

    requests: Sequence[GenerationRequest]
    answer: asyncio.Future[list[Completion]]


@dataclass(slots=True)
class _Replica:
    """One generator, its load, and the groups gathered for it in this tick of the event loop."""

    actor: Any
    num_running: int = 0
    gathered: list[_Call] = field(default_factory=list)


class GeneratorPool:
    """Spreads groups over replicas.

    Groups of one tick of the event loop reach a replica as one message, and so join its batch at the same decoding step: a
    synchronous run generates the same batches, hence the same numbers, every time. Answers come back group by group, so
    that early groups are scored while late ones are still being generated.
    """

    def __init__(self, replicas: Sequence[Any]) -> None:
        """Take one generator actor per replica."""
        self._replicas = [_Replica(actor) for actor in replicas]
        self._flushes: set[asyncio.Task[None]] = set()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions of one group, all from the replica with the least work."""
        replica = min(self._replicas, key=lambda replica: replica.num_running)
        replica.num_running += len(requests)
        call = _Call(requests, asyncio.get_running_loop().create_future())
        if not replica.gathered:
            flush = asyncio.create_task(self._flush(replica))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        replica.gathered.append(call)
        try:
            return await call.answer
        finally:
            replica.num_running -= len(requests)

    async def _flush(self, replica: _Replica) -> None:
        """Send what was gathered, and hand each answer on as it comes."""
        calls, replica.gathered = replica.gathered, []
        port, receiver = Channel[Any].open()
        done = asyncio.ensure_future(_awaited(replica.actor.generate.call_one([call.requests for call in calls], port)))
        try:
            for _ in calls:
                place, completions = await _unless_failed(done, receiver.recv())
                calls[place].answer.set_result(completions)
            await done
        except Exception as error:  # belongs to the callers, each of whom raises it
            for call in calls:
                if not call.answer.done():
                    call.answer.set_exception(error)


async def _unless_failed(call: asyncio.Future[None], message: Awaitable[T]) -> T:
    """The next message of a call, or the error it fails with. A call that has returned has sent all its messages."""
    receiving = asyncio.ensure_future(_awaited(message))
    waiting: set[asyncio.Future[Any]] = {call, receiving}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if not receiving.done() and (call.cancelled() or call.exception() is not None):
        receiving.cancel()
        await call
    return await receiving


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable
