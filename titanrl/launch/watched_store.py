"""The controller's client of the weight store. Each request has a name and a deadline, so that a hanging store is detected."""

from dataclasses import dataclass

from titanrl.launch.supervision import Supervisor
from titanrl.weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class WatchedStore:
    """Client of the weight store whose requests are supervised, and fail if the run has failed."""

    store: WeightStore
    supervisor: Supervisor
    timeout_s: float

    async def delete(self, key: str) -> None:
        """Delete a key."""
        await self.supervisor.ask("store.delete", self.store.delete(key), self.timeout_s)
