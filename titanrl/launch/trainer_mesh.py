"""The controller's client of the trainer: sends each request to all ranks, and merges their replies.

`PastPolicies` decides which weights the trainer keeps, and when it computes log-probabilities with them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from titanrl.algorithms.batch_plan import mean_correction_weight, without_rejected
from titanrl.base.files import DamagedError, Digests, check_folder, commit_folder, why_no_folder
from titanrl.base.plugins import Plugin
from titanrl.carriers.tables import MicroBatch
from titanrl.carriers.types import (
    AdamParams,
    AdapterSpec,
    DataResult,
    Datum,
    ForwardBackwardOutput,
    LossSums,
    MeasuredCorrection,
    OptimUpdate,
    RankValues,
)
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.sections import CheckpointConfig, TimeoutsConfig
from titanrl.launch.supervision import DISK, PACE, Limit, Pace, Supervisor, Verb, agreed, done, per_rank, start_request
from titanrl.processes.actors import ask_ranks
from titanrl.trainer.rank import PolicyTrainer
from titanrl.weights.records import WeightManifest

T = TypeVar("T")
OfRank = TypeVar("OfRank", MeasuredCorrection, RankValues)


def merge_losses(parts: Iterable[LossSums]) -> LossSums:
    """Merge the loss metrics of ranks or micro-batches: add the sums, take the largest of the maxima."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    return LossSums(sums=sums, maxima=maxima)


def merge_outputs(num_data: int, replies: Iterable[DataResult]) -> ForwardBackwardOutput:
    """Merge the replies of all ranks in the caller's order; metrics end in `:sum`, `:mean` (over tokens) or `:max`."""
    replies = list(replies)
    logprobs = {index: values for reply in replies for index, values in reply.logprobs.items()}
    assert logprobs.keys() == set(range(num_data)), "each datum must be computed exactly once"
    merged = merge_losses(part for reply in replies for part in reply.sums)
    sums = dict(merged.sums)
    metrics = {"loss:sum": sums.pop("loss/policy")} if "loss/policy" in sums else {}
    num_tokens = sums.pop("num_tokens", None)
    if num_tokens is None:  # a custom loss names its own metrics
        metrics |= sums
    else:
        terms = {name: sums.pop(name) for name in list(sums) if name.startswith("loss/")}
        means = {f"{name}:mean": value / max(num_tokens, 1.0) for name, value in sums.items()}
        metrics |= {"num_tokens:sum": num_tokens, **{f"{name}:sum": value for name, value in terms.items()}, **means}
    metrics |= {f"{name}:max": value for name, value in merged.maxima.items()}
    return ForwardBackwardOutput(
        loss_fn_outputs=tuple({"logprobs": logprobs[index]} for index in range(num_data)),
        metrics=metrics,
        version=agreed("run_data", [reply.version for reply in replies]),
    )


def per_dp_rank(name: str, replies: Sequence[OfRank]) -> Sequence[OfRank]:
    """Return one reply per data-parallel rank, because tensor-parallel ranks compute the same."""
    return list({reply.dp_rank: reply for reply in replies}.values())


def merge_digests(name: str, replies: Sequence[Digests]) -> Digests:
    """Return the digests of the files of all ranks."""
    return {file: digest for reply in replies for file, digest in reply.items()}


def merge_updates(name: str, replies: Sequence[OptimUpdate]) -> OptimUpdate:
    """Return the update on which all ranks agree, with the mean of their times of computation."""
    update = agreed(name, [replace(reply, busy_s=0.0) for reply in replies])
    return replace(update, busy_s=fmean(reply.busy_s for reply in replies))


@dataclass(slots=True)
class TrainerMesh:
    """Client of all trainer ranks. Each request goes to every rank; a rank serves its requests in order.

    `PolicyTrainer` describes the verbs.
    """

    mesh: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig
    shard_news: Any = None
    """`ShardNews` actors in the trainer's processes; None without rollouts."""
    version: int = 0
    """Version of the weights: the number of completed steps that the controller knows of, one per batch."""
    rows_per_microbatch: int = 1
    """Maximum number of rows in a rank's micro-batch; see `microbatch_rows`."""
    model: str | None = None
    """Model that the requests concern; None for the session's own policy."""
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock under which the clients of all models send their requests, one at a time and in turn. A request then waits for no
    other one at the trainer, where the wait would count towards its deadline."""
    _queued: list["asyncio.Task[Any]"] = field(default_factory=list)
    """Optimizer steps queued after passes that have not finished."""

    start = Verb(PolicyTrainer.start, done, limit="start_s")
    load_model = Verb(PolicyTrainer.load_model, done, limit="start_s")
    measure_correction = Verb(PolicyTrainer.measure_correction, per_dp_rank)
    compute_values = Verb(PolicyTrainer.compute_values, per_dp_rank)
    compute_logprobs = Verb(PolicyTrainer.compute_logprobs, done)
    hold_rollouts = Verb(PolicyTrainer.hold_rollouts, done)
    share_logprobs = Verb(PolicyTrainer.share_logprobs, done)
    keep_weights = Verb(PolicyTrainer.keep_weights, agreed)
    drop_weights = Verb(PolicyTrainer.drop_weights, done)
    use_temperature = Verb(PolicyTrainer.use_temperature, done)
    zero_grad = Verb(PolicyTrainer.zero_grad, done)
    push_weights = Verb[[int], WeightManifest, Sequence[WeightManifest]](PolicyTrainer.push_weights, per_rank, limit="sync_s")
    push_adapter = Verb[[int], WeightManifest, Sequence[WeightManifest]](PolicyTrainer.push_adapter, per_rank, limit="sync_s")
    forget_adapter = Verb(PolicyTrainer.forget_adapter, done, limit="sync_s")
    save_checkpoint = Verb(PolicyTrainer.save_checkpoint, done, pace=DISK)
    finish_checkpoint = Verb[[int], Digests, Digests](PolicyTrainer.finish_checkpoint, merge_digests, pace=DISK)
    load_published = Verb(PolicyTrainer.load_published, done, pace=DISK)
    export_model = Verb(PolicyTrainer.export_model, done, pace=DISK)
    free_model = Verb(PolicyTrainer.free_model, done)

    # Requests that the methods below send

    _optim_step = Verb(PolicyTrainer.optim_step, merge_updates)
    _start_over = Verb(PolicyTrainer.start_over, done)
    _load_checkpoint = Verb(PolicyTrainer.load_checkpoint, agreed, pace=DISK)
    _save_state = Verb(PolicyTrainer.save_state, merge_digests, pace=DISK)
    _load_state = Verb(PolicyTrainer.load_state, agreed, pace=DISK)
    _new_model = Verb(PolicyTrainer.new_model, done)

    async def new_model(self, name: str, spec: AdapterSpec) -> "TrainerMesh":
        """Create a model on the same base; return a client whose requests concern it."""
        client = replace(self, model=name, version=0, _queued=[])
        async with self.turns:
            await client._new_model(spec)
        return client

    def forward_backward(
        self,
        microbatches: Sequence[MicroBatch],
        *,
        proximal_version: int | None = None,
        reference_version: int | None = None,
    ) -> "asyncio.Task[LossSums]":
        """Run forward and backward passes over micro-batches, in order; the task returns the metrics, merged over all ranks.

        If a pass fails, the optimizer step queued after it is cancelled; the trainer would also refuse it. The versions are
        those whose log-probabilities `compute_logprobs` stored for the proximal and the reference policy.
        """
        versions = proximal_version, reference_version
        requests = [ask_ranks(self.mesh.forward_backward, microbatch, *versions) for microbatch in microbatches]

        async def passes() -> LossSums:
            try:
                replies = await asyncio.gather(*(self.ask("forward_backward", request) for request in requests))
            except BaseException:  # including interrupts
                for task in self._queued:
                    task.cancel()
                raise
            return merge_losses(part for parts in replies for part in parts)

        return asyncio.create_task(passes(), name="forward_backward")

    def optim_step(
        self, params: AdamParams, after: Callable[[], Awaitable[None]] | None = None, *, completes: bool = True
    ) -> "asyncio.Task[OptimUpdate]":
        """Queue an optimizer step after the passes requested so far, without waiting for their replies.

        The ranks clip the gradients to a global norm, take a step of the optimizer and clear the gradients. They skip the step
        if a loss or the gradient norm is not finite on any rank. A step that `completes` its batch increments the version,
        unless all steps on the batch were skipped.

        `after` is awaited before the request is sent, for example until a push has read the weights.
        """

        async def step() -> OptimUpdate:
            if after is not None:
                await after()
            update = await self._optim_step(params, completes)
            self.version = update.version
            return update

        task = start_request(step(), "optim_step")
        self._queued.append(task)
        task.add_done_callback(self._queued.remove)
        return task

    async def run_data(
        self, data: Sequence[Datum], loss_fn: str | Plugin | None, loss_fn_config: Mapping[str, Any], *, backward: bool
    ) -> ForwardBackwardOutput:
        """Compute a loss and the log-probabilities of user data; `backward` also accumulates the gradient.

        Without `loss_fn`, only the log-probabilities are computed.
        """
        return await self._on_data("run_data", data, loss_fn, loss_fn_config, backward=backward)

    async def compute_data_logprobs(self, data: Sequence[Datum], *, at_version: int) -> ForwardBackwardOutput:
        """Return log-probabilities of user data with the current or a kept version of the weights."""
        return await self._on_data("compute_data_logprobs", data, at_version)

    async def _on_data(self, name: str, data: Sequence[Datum], *args: Any, **options: Any) -> ForwardBackwardOutput:
        """Send a request whose deadline is learned per size of the data, in powers of two."""
        pace = Pace(kind=f"trainer.{name} {sum(len(datum.model_input) for datum in data).bit_length()}")
        call = ask_ranks(getattr(self.mesh, name), data, *args, model=self.model, **options)
        return merge_outputs(len(data), await self.ask(name, call, pace=pace))

    async def use_shard(self, number: int, shard: Any | None) -> None:
        """Announce a storage shard or its replacement to all ranks, or None while it is missing.

        Fetches from the previous shard fail with `TokensLostError`, because its process is dead. Without a trainer, this does
        nothing.
        """
        if self.shard_news is not None:
            await self.ask("use_shard", ask_ranks(self.shard_news.use, number, shard))

    async def start_over(self) -> None:
        """Reset optimizer state and version; keep the weights."""
        await self._start_over()
        self.version = 0

    async def load_checkpoint(self, step: int) -> int:
        """Restore a checkpoint; return its version."""
        self.version = await self._load_checkpoint(step)
        return self.version

    async def save_state(self, folder: Path) -> None:
        """Write model, optimizer and version to a new folder."""
        await asyncio.to_thread(commit_folder, folder, await self._save_state(folder))

    async def load_state(self, folder: Path, *, with_optimizer: bool, min_version: int = 0) -> int:
        """Restore a state written by `save_state`; raise its version to at least `min_version` and return it.

        Raise `DamagedError` if the state is incomplete, or a file does not match its digest.
        """
        fix = "Give a path from save_state."
        if reason := why_no_folder(folder):
            raise DamagedError(f"load_state: the folder {reason} (got {folder}). {fix}")
        try:
            await asyncio.to_thread(check_folder, folder, needs=(".metadata",))
        except DamagedError as error:
            raise DamagedError(f"load_state: {error} (got {folder}). {fix}") from None
        self.version = await self._load_state(folder, with_optimizer=with_optimizer, min_version=min_version)
        return self.version

    async def close(self) -> None:
        """Leave the process group."""
        await self.supervisor.ask("trainer.close", ask_ranks(self.mesh.close), self.timeouts.close_s / 4)

    async def ask(self, name: str, call: Awaitable[list[Any]], limit: Limit = "step_s", pace: Pace = PACE) -> list[Any]:
        """Await a request to all ranks; return their replies in rank order."""
        return await self.supervisor.ask(f"trainer.{name}", call, getattr(self.timeouts, limit), pace)


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
        self._has_several_steps = epochs * num_minibatches > 1  # optimizer steps on a batch
        self._uses_interval_start = algorithm.proximal == "interval_start"
        saves_between = checkpoint.every_steps > 0 or checkpoint.on_interrupt
        self._keeps_published = algorithm.updates_per_publish > 1 and (self._uses_interval_start or saves_between)
        self.kept: int | None = None
        """Kept version, which is the last published one; None before the first step, or if it is not needed."""
        self._published: int | None = None  # the version whose publication started the interval

    async def start(self) -> None:
        """Keep the current weights as the reference policy, if the loss has a KL term with the initial policy."""
        if self._algorithm.kl.coef and self._algorithm.kl.reference == "initial":
            await self._trainer.keep_weights()

    def resume(self, published: int) -> None:
        """Continue in the middle of an interval: the trainer has loaded and kept the last published version."""
        self.kept = self._published = published

    async def compute(self, microbatches: Sequence[MicroBatch], *, version: int, published: int) -> PastVersions:
        """Compute the proximal and reference log-probabilities for a step's micro-batches.

        If the step takes several optimizer steps, the micro-batches are those of its first epoch, before its first optimizer
        step. `published` is the last published version, at which the current interval of `updates_per_publish` steps started.
        """
        proximal = await self._proximal_version(microbatches, version, published)
        if not self._algorithm.kl.coef:
            return PastVersions(proximal=proximal)
        reference = self._algorithm.kl.reference_version
        # The log-probabilities are kept by version.
        await self._compute(microbatches, reference, is_reference=reference != proximal)
        return PastVersions(proximal=proximal, reference=reference)

    async def with_correction(self, microbatches: Sequence[MicroBatch], past: PastVersions) -> Sequence[MicroBatch]:
        """Add the mean weight of the off-policy correction over the entire step, if the configuration needs it.

        With `denominator: post`, the loss weights are those of a step without the rejected tokens.
        """
        if not self._algorithm.correction.is_measured:
            return microbatches
        measure = self._trainer.measure_correction
        measured = [await measure(microbatch, proximal_version=past.proximal) for microbatch in microbatches]
        mean_weight = mean_correction_weight(chain.from_iterable(measured))
        if self._algorithm.correction.denominator == "post":
            microbatches = without_rejected(microbatches, measured, self._algorithm.reduction)
        return [replace(microbatch, mean_weight=mean_weight) for microbatch in microbatches]

    async def _proximal_version(self, microbatches: Sequence[MicroBatch], version: int, published: int) -> int | None:
        """Compute the proximal log-probabilities, unless the proximal weights are the current ones at every optimizer step.

        With `interval_start`, the proximal weights are the last published ones. The first step after a publication needs no
        pass, because these are its current weights. It keeps them for the following steps of the interval, and for checkpoints
        between them. With several optimizer steps per batch, the first step also needs the pass, because the weights change
        after its first optimizer step.
        """
        if published != self._published:
            self._published, outdated = published, self.kept
            self.kept = await self._trainer.keep_weights() if self._keeps_published else None
            is_reference = outdated == self._algorithm.kl.reference_version and self._algorithm.kl.coef > 0
            if outdated is not None and outdated != self.kept and not is_reference:
                await self._trainer.drop_weights(outdated)
        start = version
        if self._uses_interval_start and self.kept is not None:
            start = self.kept
        if self._algorithm.proximal == "sampler" or (start == version and not self._has_several_steps):
            return None
        await self._compute(microbatches, start)
        return start

    async def _compute(self, microbatches: Sequence[MicroBatch], version: int, *, is_reference: bool = False) -> None:
        for microbatch in microbatches:
            await self._trainer.compute_logprobs(microbatch, at_version=version, is_reference=is_reference)
        if self._epochs > 1 and len(microbatches[0].rows) > 1:
            await self._trainer.share_logprobs(version)
