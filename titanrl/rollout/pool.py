"""A rollout worker's view of the generators: a `generate` call that finds the least loaded replica."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titanrl.types import Completion, GenerationRequest


@dataclass(slots=True)
class _Replica:
    """One generator, the calls gathered for it in this tick of the event loop, and its load."""

    actor: Any
    num_running: int = 0
    gathered: list[tuple[Sequence[GenerationRequest], asyncio.Future[list[Completion]]]] = field(default_factory=list)


class GeneratorPool:
    """Spreads calls over replicas.

    Calls made in one tick of the event loop reach a replica as one message, and so join its batch at the same decoding
    step: a synchronous run generates the same batches, hence the same numbers, every time.
    """

    def __init__(self, replicas: Sequence[Any]) -> None:
        """Take one generator actor per replica."""
        self._replicas = [_Replica(actor) for actor in replicas]
        self._flushes: set[asyncio.Task[None]] = set()

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Completions of one group, all from the replica with the least work."""
        replica = min(self._replicas, key=lambda replica: replica.num_running)
        replica.num_running += len(requests)
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        if not replica.gathered:
            flush = asyncio.create_task(self._flush(replica))
            self._flushes.add(flush)
            flush.add_done_callback(self._flushes.discard)
        replica.gathered.append((requests, future))
        try:
            return await future
        finally:
            replica.num_running -= len(requests)

    async def _flush(self, replica: _Replica) -> None:
        """Send what was gathered, and hand the answers back."""
        gathered, replica.gathered = replica.gathered, []
        requests = [request for group, _ in gathered for request in group]
        try:
            completions = await replica.actor.generate.call_one(requests)
        except Exception as error:  # belongs to the callers, each of whom raises it
            for _, future in gathered:
                future.set_exception(error)
            return
        answers = iter(completions)
        for group, future in gathered:
            future.set_result([next(answers) for _ in group])
