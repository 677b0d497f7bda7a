"""Adapters that generators hold for clients, with generators that only take notes."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from titanrl.session.sampling import Sampler


@dataclass
class Lab:
    """Generators and a store."""

    calls: list[str] = field(default_factory=list)
    actors: tuple[Any, ...] = ()
    listeners: list[Any] = field(default_factory=list)

    def sampler(self) -> Sampler:
        config = SimpleNamespace(weights=SimpleNamespace(held_adapters=1), generator=SimpleNamespace(max_num_seqs=1))
        return Sampler(self, config, None)  # type: ignore[arg-type]

    async def push(self, number: int) -> list[Any]:
        self.calls.append(f"push {number}")
        return []

    async def forget(self, number: int) -> None:
        self.calls.append(f"forget {number}")

    async def hold_adapter(self, held: Any) -> None:
        self.calls.append(f"hold {held.number}")

    async def drop_adapter(self, number: int) -> None:
        self.calls.append(f"drop {number}")


async def test_cancelled_release_still_drops_the_adapter() -> None:
    lab = Lab()
    sampler = lab.sampler()
    number = await sampler.hold(lab.push, lab.forget, 0)
    with sampler._using(number):
        releasing = asyncio.create_task(sampler.release(number))
        await asyncio.sleep(0)
        releasing.cancel()
        await asyncio.wait({releasing})
    while "forget 2" not in lab.calls:
        await asyncio.wait_for(asyncio.sleep(0), 1)
    await asyncio.sleep(0)
    assert await sampler.hold(lab.push, lab.forget, 0) == 3
