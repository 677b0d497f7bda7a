"""The controller's client of the trainer: sends each request to all ranks, and merges their replies."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.base.files import DamagedError, Digests, check_folder, commit_folder
from titanrl.base.plugins import Plugin
from titanrl.carriers.datums import Datum, ForwardBackwardOutput
from titanrl.carriers.tables import MicroBatch
from titanrl.carriers.types import AdamParams, LossSums, MeasuredCorrection, OptimUpdate
from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.stalls import Pace, size_class
from titanrl.launch.supervision import Supervisor
from titanrl.launch.verbs import DISK, PACE, Limit, Verb, agreed, done, per_rank
from titanrl.processes.actors import ask_ranks
from titanrl.trainer.rank import PolicyTrainer
from titanrl.weights.records import WeightManifest

if TYPE_CHECKING:
    from titanrl.trainer.passes import DataResult

T = TypeVar("T")


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


def merge_outputs(num_data: int, replies: "Iterable[DataResult]") -> ForwardBackwardOutput:
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


def merge_corrections(name: str, replies: Sequence[MeasuredCorrection]) -> Sequence[MeasuredCorrection]:
    """Return one reply per data-parallel rank, because tensor-parallel ranks compute the same."""
    return list({reply.dp_rank: reply for reply in replies}.values())


def merge_digests(name: str, replies: Sequence[Digests]) -> Digests:
    """Return the digests of the files of all ranks."""
    return {file: digest for reply in replies for file, digest in reply.items()}


def merge_updates(name: str, replies: Sequence[OptimUpdate]) -> OptimUpdate:
    """Return the update on which all ranks agree, with the mean of their times of computation."""
    update = agreed(name, [replace(reply, busy_s=0.0) for reply in replies])
    return replace(update, busy_s=fmean(reply.busy_s for reply in replies))


def start_request(request: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Start a request as a task that may never be awaited, for example because the caller was interrupted."""
    task = asyncio.create_task(request, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks an exception as retrieved
    return task


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
    _queued: list["asyncio.Task[Any]"] = field(default_factory=list)
    """Optimizer steps queued after passes that have not finished."""

    start = Verb(PolicyTrainer.start, done, limit="start_s")
    load_model = Verb(PolicyTrainer.load_model, done, limit="start_s")
    measure_correction = Verb(PolicyTrainer.measure_correction, merge_corrections)
    compute_logprobs = Verb(PolicyTrainer.compute_logprobs, done)
    hold_rollouts = Verb(PolicyTrainer.hold_rollouts, done)
    share_logprobs = Verb(PolicyTrainer.share_logprobs, done)
    keep_weights = Verb(PolicyTrainer.keep_weights, agreed)
    drop_weights = Verb(PolicyTrainer.drop_weights, done)
    zero_grad = Verb(PolicyTrainer.zero_grad, done)
    push_weights = Verb[[int], WeightManifest, Sequence[WeightManifest]](PolicyTrainer.push_weights, per_rank, limit="sync_s")
    save_checkpoint = Verb(PolicyTrainer.save_checkpoint, done, pace=DISK)
    finish_checkpoint = Verb[[int], Digests, Digests](PolicyTrainer.finish_checkpoint, merge_digests, pace=DISK)
    load_published = Verb(PolicyTrainer.load_published, done, pace=DISK)
    export_model = Verb(PolicyTrainer.export_model, done, pace=DISK)

    # Requests that the methods below send

    _optim_step = Verb(PolicyTrainer.optim_step, merge_updates)
    _start_over = Verb(PolicyTrainer.start_over, done)
    _load_checkpoint = Verb(PolicyTrainer.load_checkpoint, agreed, pace=DISK)
    _save_state = Verb(PolicyTrainer.save_state, merge_digests, pace=DISK)
    _load_state = Verb(PolicyTrainer.load_state, agreed, pace=DISK)

    def forward_backward(
        self,
        microbatches: Sequence[MicroBatch],
        *,
        proximal_version: int | None = None,
        reference_version: int | None = None,
    ) -> "asyncio.Task[LossSums]":
        """Run forward and backward passes over micro-batches, in order; the task returns the metrics, merged over all ranks.

        If a pass fails, the optimizer step queued after it is cancelled; the trainer would also refuse it.

        Args:
            microbatches: rows for each data-parallel rank.
            proximal_version: version whose log-probabilities `compute_logprobs` stored for the proximal policy.
            reference_version: the same for the reference policy.
        """
        versions = proximal_version, reference_version
        requests = [ask_ranks(self.mesh.forward_backward, microbatch, *versions) for microbatch in microbatches]
        return asyncio.create_task(self._passes(requests), name="forward_backward")

    async def _passes(self, requests: Sequence[Awaitable[Any]]) -> LossSums:
        try:
            replies = await asyncio.gather(*(self.ask("forward_backward", request) for request in requests))
        except BaseException:  # including interrupts
            for task in self._queued:
                task.cancel()
            raise
        return merge_losses(part for parts in replies for part in parts)

    def optim_step(
        self, params: AdamParams, after: Callable[[], Awaitable[None]] | None = None, *, completes: bool = True
    ) -> "asyncio.Task[OptimUpdate]":
        """Queue an optimizer step after the passes requested so far, without waiting for their replies.

        Args:
            params: options of this step.
            after: awaited before the request is sent, for example until a push has read the weights.
            completes: whether the step completes its batch and increments the version.
        """
        task = start_request(self._step(params, after, completes), "optim_step")
        self._queued.append(task)
        task.add_done_callback(self._queued.remove)
        return task

    async def _step(self, params: AdamParams, after: Callable[[], Awaitable[None]] | None, completes: bool) -> OptimUpdate:
        if after is not None:
            await after()
        update = await self._optim_step(params, completes)
        self.version = update.version
        return update

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
        """Send a request whose deadline is learned per size of the data."""
        pace = Pace(kind=f"trainer.{name} {size_class(sum(len(datum.model_input) for datum in data))}")
        call = ask_ranks(getattr(self.mesh, name), data, *args, **options)
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

    async def load_state(self, folder: Path, *, with_optimizer: bool, at_least: int = 0) -> int:
        """Restore a state written by `save_state`; return its version, or `at_least` if that is higher.

        Raises:
            DamagedError: The state is incomplete, or a file does not match its digest.
        """
        try:
            await asyncio.to_thread(check_folder, folder, needs=(".metadata",))
        except DamagedError as error:
            raise DamagedError(f"load_state: {error} (got {folder}). Give a path from save_state.") from None
        self.version = await self._load_state(folder, with_optimizer=with_optimizer, at_least=at_least)
        return self.version

    async def close(self) -> None:
        """Leave the process group."""
        await self.supervisor.ask("trainer.close", ask_ranks(self.mesh.close), self.timeouts.close_s / 4)

    async def ask(self, name: str, call: Awaitable[list[Any]], limit: Limit = "step_s", pace: Pace = PACE) -> list[Any]:
        """Await a request to all ranks; return their replies in rank order."""
        return await self.supervisor.ask(f"trainer.{name}", call, getattr(self.timeouts, limit), pace)
