"""Pulling versions of the weights into a generator rank: all weights, or with LoRA adapters the base once, then only adapters.

Importing this module imports torch, but not vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanrl.config.sections import GeneratorConfig
from titanrl.models.directory import ModelDirectory
from titanrl.weights.records import Commit, HeldAdapter, WeightManifest, WeightMismatchError, adapters_run, base_run
from titanrl.weights.store import WeightSource
from titanrl.weights.transfer import FetchedWeights, Targets, WeightReader

if TYPE_CHECKING:
    from titanrl.generator.engine import Engine, Fill


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A version that is accessible in this process."""

    base: FetchedWeights | None
    """All weights, or with adapters the base; None if this rank has the base."""
    adapter: FetchedWeights | None
    """Tensors of the adapter; None without adapters."""


class Puller:
    """Reader of the policy's versions into the model of one generator rank. Fetch and fill one version after the other."""

    def __init__(
        self, source: WeightSource, model: ModelDirectory, config: GeneratorConfig, rank: int, *, has_adapters: bool
    ) -> None:
        """Prepare to read from a source; `rank` is the tensor-parallel rank."""
        self._model, self._config, self._rank, self._has_adapters = model, config, rank, has_adapters
        self._reader = WeightReader(source.run, source.store, source.verify, source.name)
        self._base_reader = WeightReader(base_run(source.run), source.store, source.verify, f"{source.name}-base")
        self._base: Sequence[WeightManifest] = ()
        self._targets: Targets = {}

    async def fetch(self, commit: Commit) -> "Fill":
        """Make a version accessible; return the function that writes it into the model, to be called between two steps.

        Raises:
            WeightMismatchError: As in `WeightReader.fetch`.
        """
        from titanrl.generator.native import POLICY

        base = commit.base
        if not self._has_adapters:
            fetched = _Fetched(await self._reader.fetch(commit), None)
        else:
            needed = None if base == self._base else await self._base_reader.fetch(Commit(base[0].version, base))
            fetched = _Fetched(needed, await self._reader.fetch(commit))

        def fill(engine: "Engine") -> bool:
            if fetched.base is not None:
                if held := engine.held_adapters:
                    raise WeightMismatchError(
                        f"the base changed while {len(held)} adapters on it are held. Release their sampling clients "
                        "before loading a state with another base."
                    )
                self._base = ()
                fetched.base.copy_into(self._weight_targets(engine))
                self._base = base
            if fetched.adapter is not None:
                fill_adapter(engine, POLICY, fetched.adapter)
            return fetched.base is None

        return fill

    def take_received(self) -> int:
        """Return the bytes received since the previous call, not counting shared memory."""
        return self._reader.take_received() + self._base_reader.take_received()

    def close(self) -> None:
        """Stop receiving. The puller must not be used afterwards."""
        self._reader.close()
        self._base_reader.close()

    def _weight_targets(self, engine: "Engine") -> Targets:
        """Map the trainer's names to the model's tensors. The mapping is cached, so that the reader can reuse its copy plan."""
        if not self._targets:
            if self._config.model_impl == "titan":
                from titanrl.generator import titan  # imports torchtitan, which is slow; vLLM's own model does not need it

                self._targets = titan.weight_targets(engine.model)
            else:
                from titanrl.generator import native

                self._targets = native.weight_targets(
                    engine.model, self._model, self._rank, self._config.tp, engine.plain_experts
                )
        return self._targets


class HeldPuller:
    """Reader of adapters that an engine holds beside the policy's."""

    def __init__(self, source: WeightSource) -> None:
        self._reader = WeightReader(adapters_run(source.run), source.store, source.verify, f"{source.name}-adapters")

    async def fetch(self, held: HeldAdapter) -> "Fill":
        """Make an adapter accessible; return the function that writes it into the engine, to be called between two steps.

        Raises:
            WeightMismatchError: As in `WeightReader.fetch`.
        """
        fetched = await self._reader.fetch(held.commit)
        return lambda engine: fill_adapter(engine, held.number, fetched)

    def close(self) -> None:
        """Stop receiving. The puller must not be used afterwards."""
        self._reader.close()


def fill_adapter(engine: "Engine", adapter: int, fetched: FetchedWeights) -> None:
    """Write an adapter into an engine, which drops it if that fails."""
    assert engine.adapters is not None
    try:
        fetched.copy_into(engine.adapters.tensors(adapter, fetched.layouts))
    except BaseException:  # whatever the error, the tensors may hold a mixture
        engine.adapters.drop(adapter)
        raise
    engine.adapters.use(adapter, fetched.commit.scale)
