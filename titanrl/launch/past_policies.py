"""The proximal and the reference policy of a run: which weights the trainer keeps, and when it computes with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from titanrl.algorithms.loss_weights import correction_totals
from titanrl.config.sections import AlgorithmConfig
from titanrl.launch.meshes import TrainerMesh, merge_losses
from titanrl.tables import MicroBatch

REFERENCE = 0
"""Version of the reference policy: the weights the run began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastVersions:
    """Versions whose log-probabilities the trainer ranks have stored for the micro-batches of a step."""

    proximal: int | None = None
    """Version of the proximal policy; None if the loss needs no pass for it."""
    reference: int | None = None
    """Version of the reference policy; None without a divergence from it."""


class PastPolicies:
    """Computes log-probabilities under past weights before the loss needs them."""

    def __init__(self, trainer: TrainerMesh, algorithm: AlgorithmConfig) -> None:
        """Keep nothing yet; `start` keeps the reference."""
        self._trainer, self._algorithm = trainer, algorithm
        self._proximal: int | None = None  # the version kept as proximal policy

    async def start(self) -> None:
        """Keep the current weights as the reference policy, if the loss has a divergence from it."""
        if self._algorithm.kl.coef:
            await self._trainer.keep_weights()

    async def compute(self, microbatches: Sequence[MicroBatch], *, version: int, published: int) -> PastVersions:
        """Compute the log-probabilities that the loss over these micro-batches compares with.

        Args:
            microbatches: the step's.
            version: version of the current weights.
            published: version published last, where the current interval of `updates_per_publish` steps starts.
        """
        proximal = await self._interval_start(microbatches, version, published)
        if not self._algorithm.kl.coef:
            return PastVersions(proximal=proximal)
        await self._compute(microbatches, REFERENCE)
        return PastVersions(proximal=proximal, reference=REFERENCE)

    async def with_correction_totals(self, microbatches: Sequence[MicroBatch], past: PastVersions) -> Sequence[MicroBatch]:
        """Add the totals of the off-policy correction over the whole step, if the configuration needs them."""
        if not self._algorithm.correction.is_measured:
            return microbatches
        measure = self._trainer.measure_correction
        sums = [await measure(microbatch, proximal_version=past.proximal) for microbatch in microbatches]
        totals = correction_totals(merge_losses(sums).sums)
        return [replace(microbatch, correction=totals) for microbatch in microbatches]

    async def _interval_start(self, microbatches: Sequence[MicroBatch], version: int, published: int) -> int | None:
        """Compute with the weights published last, if the ratio starts from them.

        The first step after a publication needs no pass, because these are its current weights. It keeps them for the next.
        """
        if self._algorithm.proximal != "interval_start" or self._algorithm.updates_per_publish == 1:
            return None
        if version > published:
            await self._compute(microbatches, published)
            return published
        await self._trainer.keep_weights()
        outdated, self._proximal = self._proximal, published
        is_reference = outdated == REFERENCE and self._algorithm.kl.coef > 0
        if outdated is not None and outdated != published and not is_reference:
            await self._trainer.drop_weights(outdated)
        return None

    async def _compute(self, microbatches: Sequence[MicroBatch], version: int) -> None:
        for microbatch in microbatches:
            await self._trainer.compute_logprobs(microbatch, at_version=version)
