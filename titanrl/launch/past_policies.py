"""Proximal and reference policy: which weights the trainer keeps, and when it computes log-probabilities with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from titanrl.algorithms.batch_plan import correction_totals, without_rejected
from titanrl.carriers.tables import MicroBatch
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.sections import CheckpointConfig
from titanrl.launch.trainer_mesh import TrainerMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class PastVersions:
    """Versions whose log-probabilities the trainer ranks have stored for a step's micro-batches."""

    proximal: int | None = None
    """Version of the proximal policy; None if the loss needs no extra pass for it."""
    reference: int | None = None
    """Version of the reference policy; None if the loss has no KL term."""


class PastPolicies:
    """Keeps past weights on the trainer, and computes the log-probabilities that the loss compares with."""

    def __init__(
        self,
        trainer: TrainerMesh,
        algorithm: AlgorithmConfig,
        checkpoint: CheckpointConfig,
        *,
        epochs: int = 1,
        num_minibatches: int = 1,
    ) -> None:
        """Keep no weights yet; `start` keeps the reference policy."""
        self._trainer, self._algorithm, self._epochs = trainer, algorithm, epochs
        self._several = epochs * num_minibatches > 1
        self._is_ratio_start = algorithm.proximal == "interval_start"
        saves_between = checkpoint.every_steps > 0 or checkpoint.on_interrupt
        self._keeps_published = algorithm.updates_per_publish > 1 and (self._is_ratio_start or saves_between)
        self._proximal: int | None = None  # the version kept as proximal policy
        self._published: int | None = None  # the version whose publication started the interval

    @property
    def kept(self) -> int | None:
        """Kept version, which is the last published one; None before the first step, or if it is not needed."""
        return self._proximal

    async def start(self) -> None:
        """Keep the current weights as the reference policy, if the loss has a KL term with the initial policy."""
        if self._algorithm.kl.coef and self._algorithm.kl.reference == "initial":
            await self._trainer.keep_weights()

    def resume(self, published: int) -> None:
        """Continue in the middle of an interval: the trainer has loaded and kept the last published version."""
        self._proximal = self._published = published

    async def compute(self, microbatches: Sequence[MicroBatch], *, version: int, published: int) -> PastVersions:
        """Compute the proximal and reference log-probabilities for a step's micro-batches.

        Args:
            microbatches: micro-batches of the step. If it takes several optimizer steps, pass those of its first epoch, before
                the first optimizer step.
            version: version of the current weights.
            published: last published version, at which the current interval of `updates_per_publish` steps started.
        """
        proximal = await self._proximal_version(microbatches, version, published)
        if not self._algorithm.kl.coef:
            return PastVersions(proximal=proximal)
        reference = self._algorithm.kl.reference_version
        await self._compute(microbatches, reference)
        return PastVersions(proximal=proximal, reference=reference)

    async def with_correction_totals(self, microbatches: Sequence[MicroBatch], past: PastVersions) -> Sequence[MicroBatch]:
        """Add the totals of the off-policy correction over the entire step, if the configuration needs them.

        With `denominator: post`, the loss weights are those of a step without the rejected tokens.
        """
        if not self._algorithm.correction.is_measured:
            return microbatches
        measure = self._trainer.measure_correction
        measured = [await measure(microbatch, proximal_version=past.proximal) for microbatch in microbatches]
        totals = correction_totals(chain.from_iterable(measured))
        if self._algorithm.correction.denominator == "post":
            microbatches = without_rejected(microbatches, measured, self._algorithm.reduction)
        return [replace(microbatch, correction=totals) for microbatch in microbatches]

    async def _proximal_version(self, microbatches: Sequence[MicroBatch], version: int, published: int) -> int | None:
        """Compute the proximal log-probabilities, unless the proximal weights are the current ones at every optimizer step.

        With `interval_start`, the proximal weights are the last published ones. The first step after a publication needs no
        pass, because these are its current weights. It keeps them for the following steps of the interval, and for checkpoints
        between them. With several optimizer steps per batch, the first step also needs the pass, because the weights change
        after its first optimizer step.
        """
        if published != self._published:
            self._published, outdated = published, self._proximal
            self._proximal = await self._trainer.keep_weights() if self._keeps_published else None
            is_reference = outdated == self._algorithm.kl.reference_version and self._algorithm.kl.coef > 0
            if outdated is not None and outdated != self._proximal and not is_reference:
                await self._trainer.drop_weights(outdated)
        start = version
        if self._is_ratio_start and self._proximal is not None:
            start = self._proximal
        if self._algorithm.proximal == "sampler" or (start == version and not self._several):
            return None
        await self._compute(microbatches, start)
        return start

    async def _compute(self, microbatches: Sequence[MicroBatch], version: int) -> None:
        for microbatch in microbatches:
            await self._trainer.compute_logprobs(microbatch, at_version=version)
        if self._epochs > 1 and len(microbatches[0].rows) > 1:
            await self._trainer.share_logprobs(version)
