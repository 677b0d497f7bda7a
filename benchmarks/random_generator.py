"""A generator with random weights, for benchmarks."""

from titanrl.generator.actor import Generator
from titanrl.processes.actors import endpoint


class RandomGenerator(Generator):
    """Generator that serves with its initial weights."""

    @endpoint
    async def trust_weights(self) -> None:
        """Declare the initial weights to be version 0."""
        await self._loop.call(lambda engine: engine.update_weights(0, lambda engine: None))
