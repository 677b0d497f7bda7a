"""The controller's client of the trainer: sends each request to all ranks, and merges their replies."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.base.choices import FileDtype
from titanrl.base.files import DamagedError, Digests, check_folder, commit_folder
from titanrl.base.plugins import Plugin
from titanrl.carriers.datums import Datum, ForwardBackwardOutput
from titanrl.carriers.tables import MicroBatch
from titanrl.carriers.types import AdamParams, LossSums, MeasuredCorrection, OptimUpdate
from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.stalls import DISK_S, Pace, size_class
from titanrl.launch.supervision import Supervisor
from titanrl.processes.actors import ask_ranks
from titanrl.weights.manifest import WeightManifest

if TYPE_CHECKING:
    from titanrl.trainer.datums import DataResult

T = TypeVar("T")

_PACE, _DISK = Pace(), Pace(min_s=DISK_S)


def same_on_all_ranks(name: str, replies: Sequence[T]) -> T:
    """Return the reply on which all ranks agree; different replies mean that the ranks have diverged."""
    assert all(reply == replies[0] for reply in replies), f"ranks disagree after {name}: {replies}"
    return replies[0]


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
        version=same_on_all_ranks("run_data", [reply.version for reply in replies]),
    )


def _pace_of(endpoint: str, data: Sequence[Datum]) -> Pace:
    """Return a pace that learns the deadline per size of the caller's data."""
    return Pace(kind=f"trainer.{endpoint} {size_class(sum(len(datum.model_input) for datum in data))}")


def start_request(request: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Start a request as a task that may never be awaited, for example because the caller was interrupted."""
    task = asyncio.create_task(request, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks an exception as retrieved
    return task


@dataclass(slots=True)
class TrainerMesh:
    """Client of all trainer ranks. Each request goes to every rank; a rank serves its requests in order."""

    mesh: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig
    shard_news: Any = None
    """`ShardNews` actors in the trainer's processes; None without rollouts."""
    version: int = 0
    """Version of the weights: the number of completed steps that the controller knows of, one per batch."""
    _queued: list["asyncio.Task[Any]"] = field(default_factory=list)
    """Optimizer steps queued after passes that have not finished."""

    async def start(self) -> None:
        """Load torchtitan and form the process group."""
        await self._all("start", ask_ranks(self.mesh.start), self.timeouts.start_s)

    async def load_model(self, model_dir: Path) -> None:
        """Build the policy from a Hugging Face directory, on every rank."""
        await self._all("load_model", ask_ranks(self.mesh.load_model, model_dir), self.timeouts.start_s)

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
            replies = await asyncio.gather(*(self._all("forward_backward", request) for request in requests))
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
        task = start_request(self._optim_step(params, after, completes), "optim_step")
        self._queued.append(task)
        task.add_done_callback(self._queued.remove)
        return task

    async def _optim_step(
        self, params: AdamParams, after: Callable[[], Awaitable[None]] | None, completes: bool
    ) -> OptimUpdate:
        if after is not None:
            await after()
        updates: list[OptimUpdate] = await self._all("optim_step", ask_ranks(self.mesh.optim_step, params, completes))
        update = same_on_all_ranks("optim_step", [replace(update, busy_s=0.0) for update in updates])
        self.version = update.version
        return replace(update, busy_s=fmean(update.busy_s for update in updates))

    async def measure_correction(
        self, microbatch: MicroBatch, *, proximal_version: int | None = None
    ) -> Sequence[MeasuredCorrection]:
        """Return the effect of the off-policy correction on a micro-batch, by data-parallel rank, from a forward pass."""
        call = ask_ranks(self.mesh.measure_correction, microbatch, proximal_version)
        replies: list[MeasuredCorrection] = await self._all("measure_correction", call)
        return list({reply.dp_rank: reply for reply in replies}.values())  # tensor-parallel ranks compute the same

    async def compute_logprobs(self, microbatch: MicroBatch, *, at_version: int) -> None:
        """Compute log-probabilities with the current or a kept version of the weights, and store them on the ranks."""
        await self._all("compute_logprobs", ask_ranks(self.mesh.compute_logprobs, microbatch, at_version))

    async def hold_rollouts(self, microbatches: Sequence[MicroBatch]) -> None:
        """Make each rank fetch its rollouts for all passes over a batch, before the first optimizer step."""
        await self._all("hold_rollouts", ask_ranks(self.mesh.hold_rollouts, microbatches))

    async def share_logprobs(self, version: int) -> None:
        """Share the log-probabilities that `compute_logprobs` stored for a version among all ranks."""
        await self._all("share_logprobs", ask_ranks(self.mesh.share_logprobs, version))

    async def keep_weights(self) -> int:
        """Keep a copy of the current weights; return their version."""
        versions: list[int] = await self._all("keep_weights", ask_ranks(self.mesh.keep_weights))
        return same_on_all_ranks("keep_weights", versions)

    async def drop_weights(self, version: int) -> None:
        """Drop a version kept by `keep_weights`, and the log-probabilities computed with it."""
        await self._all("drop_weights", ask_ranks(self.mesh.drop_weights, version))

    async def run_data(
        self, data: Sequence[Datum], loss_fn: str | Plugin | None, loss_fn_config: Mapping[str, Any], *, backward: bool
    ) -> ForwardBackwardOutput:
        """Compute a loss and the log-probabilities of user data; `backward` also accumulates the gradient.

        Without `loss_fn`, only the log-probabilities are computed.
        """
        call = ask_ranks(self.mesh.run_data, data, loss_fn, loss_fn_config, backward=backward)
        return merge_outputs(len(data), await self._all("run_data", call, pace=_pace_of("run_data", data)))

    async def compute_data_logprobs(self, data: Sequence[Datum], *, at_version: int) -> ForwardBackwardOutput:
        """Return log-probabilities of user data with the current or a kept version of the weights."""
        call = ask_ranks(self.mesh.compute_data_logprobs, data, at_version)
        return merge_outputs(
            len(data), await self._all("compute_data_logprobs", call, pace=_pace_of("compute_data_logprobs", data))
        )

    async def use_shard(self, number: int, shard: Any | None) -> None:
        """Announce a storage shard or its replacement to all ranks, or None while it is missing.

        Fetches from the previous shard fail with `TokensLostError`, because its process is dead. Without a trainer, this does
        nothing.
        """
        if self.shard_news is not None:
            await self._all("use_shard", ask_ranks(self.shard_news.use, number, shard))

    async def zero_grad(self) -> None:
        """Discard the gradient accumulated so far."""
        await self._all("zero_grad", ask_ranks(self.mesh.zero_grad))

    async def push_weights(self, version: int) -> list[WeightManifest]:
        """Publish the weights as a version; return one manifest per rank."""
        return await self._all("push_weights", ask_ranks(self.mesh.push_weights, version), self.timeouts.sync_s)

    async def start_over(self) -> None:
        """Reset optimizer state and version; keep the weights."""
        await self._all("start_over", ask_ranks(self.mesh.start_over))
        self.version = 0

    async def save_checkpoint(self, step: int, published: int | None = None) -> None:
        """Write model, optimizer and version; also write the weights of the kept version `published`, if given."""
        await self._all("save_checkpoint", ask_ranks(self.mesh.save_checkpoint, step, published), pace=_DISK)

    async def finish_checkpoint(self, step: int) -> dict[str, str]:
        """Wait until the files of a checkpoint are on disk; return their digests."""
        replies: list[Digests] = await self._all("finish_checkpoint", ask_ranks(self.mesh.finish_checkpoint, step), pace=_DISK)
        return {name: digest for reply in replies for name, digest in reply.items()}

    async def load_published(self, step: int, version: int) -> None:
        """Load and keep a checkpoint's weights of the last published version. Call it before `load_checkpoint`."""
        await self._all("load_published", ask_ranks(self.mesh.load_published, step, version), pace=_DISK)

    async def load_checkpoint(self, step: int) -> int:
        """Restore a checkpoint; return its version."""
        versions: list[int] = await self._all("load_checkpoint", ask_ranks(self.mesh.load_checkpoint, step), pace=_DISK)
        self.version = same_on_all_ranks("load_checkpoint", versions)
        return self.version

    async def save_state(self, folder: Path) -> None:
        """Write model, optimizer and version to a new folder."""
        replies: list[Digests] = await self._all("save_state", ask_ranks(self.mesh.save_state, folder), pace=_DISK)
        digests = {name: digest for reply in replies for name, digest in reply.items()}
        await asyncio.to_thread(commit_folder, folder, digests)

    async def load_state(self, folder: Path, *, with_optimizer: bool, at_least: int = 0) -> int:
        """Restore a state written by `save_state`; return its version, or `at_least` if that is higher.

        Raises:
            DamagedError: The state is incomplete, or a file does not match its digest.
        """
        try:
            await asyncio.to_thread(check_folder, folder, needs=(".metadata",))
        except DamagedError as error:
            raise DamagedError(f"load_state: {error} (got {folder}). Give a path from save_state.") from None
        call = ask_ranks(self.mesh.load_state, folder, with_optimizer=with_optimizer, at_least=at_least)
        versions: list[int] = await self._all("load_state", call, pace=_DISK)
        self.version = same_on_all_ranks("load_state", versions)
        return self.version

    async def export_model(self, target: Path, dtype: FileDtype | None = None) -> None:
        """Write the policy as a Hugging Face directory, by default in the dtype of `checkpoint.export_dtype`."""
        await self._all("export_model", ask_ranks(self.mesh.export_model, target, dtype), pace=_DISK)

    async def close(self) -> None:
        """Leave the process group."""
        await self._all("close", ask_ranks(self.mesh.close), self.timeouts.close_s / 4)

    async def _all(
        self, name: str, call: Awaitable[list[Any]], timeout_s: float | None = None, pace: Pace = _PACE
    ) -> list[Any]:
        """Await a request to all ranks; return their replies in rank order."""
        return await self.supervisor.ask(f"trainer.{name}", call, timeout_s or self.timeouts.step_s, pace)
