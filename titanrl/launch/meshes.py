"""The controller's typed view of the actor meshes: requests with a name and a deadline, and the replies of all ranks as one."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.actors import resolve
from titanrl.config.operations import TimeoutsConfig
from titanrl.launch.supervision import DeadlineError, Supervisor
from titanrl.replay.buffer import Batch, StarvationError
from titanrl.tables import MicroBatch, Table
from titanrl.types import (
    AdamParams,
    Datum,
    EvaluationResult,
    ForwardBackwardOutput,
    GenerationStats,
    GroupHandle,
    GroupRecord,
    LossSums,
    OptimUpdate,
)
from titanrl.weights.manifest import Commit, WeightManifest

if TYPE_CHECKING:
    from titanrl.trainer.datums import DataResult

T = TypeVar("T")


def same_on_all_ranks(name: str, replies: Sequence[T]) -> T:
    """Return the reply that every rank gave; different replies mean that the ranks have diverged."""
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


def start_request(request: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
    """Start a request as a task that may never be awaited, because the caller failed or was interrupted before."""
    task = asyncio.create_task(request, name=name)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # an exception counts as retrieved
    return task


@dataclass(slots=True)
class TrainerMesh:
    """The trainer ranks as one object. Every request goes to all ranks; each rank serves its requests in order."""

    mesh: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig
    _queued: list["asyncio.Task[Any]"] = field(default_factory=list)
    """Optimizer steps requested behind passes that have not finished."""

    async def start(self) -> None:
        """Load torchtitan and form the process group."""
        await self._all("start", self.mesh.start.call(), self.timeouts.start_s)

    async def load_model(self, model_dir: Path) -> None:
        """Build the policy from a Hugging Face directory."""
        await self._all("load_model", self.mesh.load_model.call(model_dir), self.timeouts.start_s)

    def forward_backward(
        self,
        microbatches: Sequence[MicroBatch],
        loss: str = "policy",
        *,
        proximal_version: int | None = None,
        reference_version: int | None = None,
    ) -> "asyncio.Task[LossSums]":
        """Request the gradients of micro-batches, one after another; the task returns their metrics, summed over all ranks.

        If a pass fails, the optimizer step queued behind it is cancelled; the trainer would refuse it, too.

        Args:
            microbatches: rows for each data-parallel rank.
            loss: `policy` or `cross_entropy`.
            proximal_version: version whose log-probabilities `compute_logprobs` stored as the proximal ones.
            reference_version: the same for the reference.
        """
        call = self.mesh.forward_backward.call  # sends at once
        requests = [call(microbatch, loss, proximal_version, reference_version) for microbatch in microbatches]
        return asyncio.create_task(self._passes(requests), name="forward_backward")

    async def _passes(self, requests: Sequence[Awaitable[Any]]) -> LossSums:
        try:
            replies = await asyncio.gather(*(self._all("forward_backward", request) for request in requests))
        except BaseException:  # an interrupt, too; the caller gets it
            for task in self._queued:
                task.cancel()
            raise
        return merge_losses(part for parts in replies for part in parts)

    def optim_step(self, params: AdamParams, after: Callable[[], Awaitable[None]] | None = None) -> "asyncio.Task[OptimUpdate]":
        """Request an optimizer step behind the passes requested before; no message lies between the last pass and the step.

        Args:
            params: options of this step.
            after: awaited before the request is sent, such as a push that still reads the weights.
        """
        task = start_request(self._optim_step(params, after), "optim_step")
        self._queued.append(task)
        task.add_done_callback(self._queued.remove)
        return task

    async def _optim_step(self, params: AdamParams, after: Callable[[], Awaitable[None]] | None) -> OptimUpdate:
        if after is not None:
            await after()
        updates: list[OptimUpdate] = await self._all("optim_step", self.mesh.optim_step.call(params))
        update = same_on_all_ranks("optim_step", [replace(update, busy_s=0.0) for update in updates])
        return replace(update, busy_s=fmean(update.busy_s for update in updates))

    async def measure_correction(self, microbatch: MicroBatch, *, proximal_version: int | None = None) -> LossSums:
        """Return the sums of the off-policy correction over a micro-batch and all ranks, from a forward pass alone."""
        call = self.mesh.measure_correction.call(microbatch, proximal_version)
        return merge_losses(await self._all("measure_correction", call))

    async def compute_logprobs(self, microbatch: MicroBatch, *, at_version: int) -> None:
        """Compute log-probabilities with the weights of the live version or a kept one, and store them on the ranks."""
        await self._all("compute_logprobs", self.mesh.compute_logprobs.call(microbatch, at_version))

    async def keep_weights(self) -> int:
        """Keep a copy of the current weights; return their version."""
        versions: list[int] = await self._all("keep_weights", self.mesh.keep_weights.call())
        return same_on_all_ranks("keep_weights", versions)

    async def drop_weights(self, version: int) -> None:
        """Drop a version kept by `keep_weights`, and the log-probabilities computed with it."""
        await self._all("drop_weights", self.mesh.drop_weights.call(version))

    async def run_data(
        self, data: Sequence[Datum], loss_fn: str | None, loss_fn_config: Mapping[str, float], *, backward: bool
    ) -> ForwardBackwardOutput:
        """Run the caller's data under a loss, or without one for log-probabilities alone; `backward` adds the gradient."""
        call = self.mesh.run_data.call(data, loss_fn, loss_fn_config, backward=backward)
        return merge_outputs(len(data), await self._all("run_data", call))

    async def compute_data_logprobs(self, data: Sequence[Datum], *, at_version: int) -> ForwardBackwardOutput:
        """Return log-probabilities of the caller's data with the weights of the live version or a kept one."""
        call = self.mesh.compute_data_logprobs.call(data, at_version)
        return merge_outputs(len(data), await self._all("compute_data_logprobs", call))

    async def zero_grad(self) -> None:
        """Discard the gradient accumulated so far."""
        await self._all("zero_grad", self.mesh.zero_grad.call())

    async def push_weights(self, version: int) -> list[WeightManifest]:
        """Publish the weights as a version; return one manifest per rank."""
        return await self._all("push_weights", self.mesh.push_weights.call(version), self.timeouts.sync_s)

    async def start_over(self) -> None:
        """Reset optimizer state and version; keep the weights."""
        await self._all("start_over", self.mesh.start_over.call())

    async def save_checkpoint(self, step: int) -> None:
        """Write model, optimizer and version."""
        await self._all("save_checkpoint", self.mesh.save_checkpoint.call(step))

    async def load_checkpoint(self, step: int) -> int:
        """Restore a checkpoint; return its version."""
        versions: list[int] = await self._all("load_checkpoint", self.mesh.load_checkpoint.call(step))
        return same_on_all_ranks("load_checkpoint", versions)

    async def save_state(self, folder: Path) -> None:
        """Write model, optimizer and version to a folder of their own."""
        await self._all("save_state", self.mesh.save_state.call(folder))

    async def load_state(self, folder: Path, *, with_optimizer: bool) -> int:
        """Restore a state written by `save_state`; return its version."""
        call = self.mesh.load_state.call(folder, with_optimizer=with_optimizer)
        versions: list[int] = await self._all("load_state", call)
        return same_on_all_ranks("load_state", versions)

    async def export_model(self, target: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        await self._all("export_model", self.mesh.export_model.call(target))

    async def close(self) -> None:
        """Leave the process group."""
        await self._all("close", self.mesh.close.call(), self.timeouts.close_s / 4)

    async def _all(self, name: str, call: Awaitable[Any], timeout_s: float | None = None) -> list[Any]:
        """Await a request to all ranks; return their replies by rank."""
        replies = await self.supervisor.ask(f"trainer.{name}", call, timeout_s or self.timeouts.step_s)
        return [reply for _, reply in replies.items()]


@dataclass(frozen=True)
class GeneratorMeshes:
    """All generator replicas, each a mesh of its tensor-parallel ranks."""

    meshes: tuple[Any, ...]
    supervisor: Supervisor
    timeouts: TimeoutsConfig

    @cached_property
    def actors(self) -> tuple[Any, ...]:
        """Rank 0 of each replica, which serves the replica's requests."""
        return tuple(mesh.slice(procs=0) for mesh in self.meshes)

    async def start(self) -> None:
        """Load vLLM and build the engines; from then on, a rank that cannot follow its rank 0 ends the run."""
        await self._each("generator.start", [mesh.start.call() for mesh in self.meshes], self.timeouts.start_s)
        for replica, mesh in enumerate(self.meshes):
            for rank in range(1, mesh.size()):
                follower = mesh.slice(procs=rank)
                self.supervisor.guard(f"rank {rank} of generator_{replica}", follower.follow.call_one())

    async def expect_weights(self, version: int) -> None:
        """Make every replica hold new requests until it has pulled a version."""
        calls = [actor.expect_weights.call_one(version) for actor in self.actors]
        await self._each("generator.expect_weights", calls, self.timeouts.sync_s)

    async def pull_weights(self, replica: int, commit: Commit) -> None:
        """Load a committed version on all ranks of one replica."""
        call = self.meshes[replica].pull_weights.call(commit)
        await self.supervisor.ask(f"generator_{replica}.pull_weights", call, self.timeouts.sync_s)

    def take_stats(self) -> "asyncio.Task[GenerationStats]":
        """Request the work of all replicas since the last call."""
        return start_request(self._take_stats(), "take_stats")

    async def _take_stats(self) -> GenerationStats:
        stats = await self._each("generator.stats", [actor.stats.call_one() for actor in self.actors], self.timeouts.step_s)
        return GenerationStats(
            num_tokens=sum(stat.num_tokens for stat in stats),
            busy_s=sum(stat.busy_s for stat in stats),
            wall_s=sum(stat.wall_s for stat in stats),
            num_replicas=len(stats),
        )

    async def close(self) -> None:
        """Stop the engines."""
        await self._each("generator.close", [mesh.close.call() for mesh in self.meshes], self.timeouts.close_s / 4)

    async def _each(self, name: str, calls: Sequence[Awaitable[T]], timeout_s: float) -> list[T]:
        return await self.supervisor.ask(name, asyncio.gather(*map(resolve, calls)), timeout_s)


@dataclass(frozen=True, slots=True)
class RolloutMesh:
    """All rollout workers."""

    mesh: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig

    async def start(self) -> None:
        """Load prompts, tokenizer and scoring processes."""
        await self.supervisor.ask("rollout.start", self.mesh.start.call(), self.timeouts.start_s)

    async def run(self) -> None:
        """Start rolling out."""
        await self.supervisor.ask("rollout.run", self.mesh.run.call(), self.timeouts.step_s)

    async def evaluate(self, num_prompts: int) -> EvaluationResult:
        """Sample greedy completions of held-out prompts on the first worker, and score them."""
        call = self.mesh.slice(procs=0).evaluate.call_one(num_prompts)
        result: EvaluationResult = await self.supervisor.ask("rollout.evaluate", call, self.timeouts.step_s)
        return result

    async def demonstrate(self, handle: GroupHandle) -> GroupRecord:
        """Store the next batch of demonstrations in a shard, from the first worker."""
        call = self.mesh.slice(procs=0).demonstrate.call_one(handle)
        record: GroupRecord = await self.supervisor.ask("rollout.demonstrate", call, self.timeouts.step_s)
        return record

    async def close(self) -> None:
        """Stop the rollout loops and the scoring processes."""
        await self.supervisor.ask("rollout.close", self.mesh.close.call(), self.timeouts.close_s / 4)


@dataclass(slots=True)
class BufferClient:
    """The replay buffer, with at most one batch requested ahead of time."""

    actor: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig
    starvation_timeout_s: float
    groups_per_step: int
    _requested: "asyncio.Task[Batch] | None" = None

    def prefetch(self) -> None:
        """Request the next batch, so that it is sent as soon as it is complete; `take_batch` waits for it."""
        if self._requested is None:
            request = self.actor.take_batch.call_one(self.groups_per_step)
            self._requested = start_request(resolve(request), "next batch")

    async def take_batch(self) -> Batch:
        """Return the next batch; the deadline starts now. If this wait is interrupted or times out, the request stays.

        Raises:
            StarvationError: no batch with a signal was complete in time; a later call waits for it again.
            RolloutError: a rollout worker failed.
        """
        self.prefetch()
        assert self._requested is not None
        try:
            batch = await self.supervisor.ask("buffer.take_batch", asyncio.shield(self._requested), self.starvation_timeout_s)
        except DeadlineError:
            call = self.actor.why_starved.call_one(self.groups_per_step, self.starvation_timeout_s)
            raise StarvationError(await self.supervisor.ask("buffer.why_starved", call, self.timeouts.close_s)) from None
        self._requested = None
        return batch

    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group, as before a measurement; at most as long as for a batch."""
        call = self.actor.wait_until_full.call_one()
        await self.supervisor.ask("buffer.wait_until_full", call, self.starvation_timeout_s)

    async def release(self, handles: Table) -> None:
        """Free the slots of a batch, given as a table of handles."""
        await self.supervisor.ask("buffer.release", self.actor.release.call_one(handles), self.timeouts.step_s)

    def close(self) -> None:
        """Cancel the request for the next batch."""
        if self._requested is not None:
            self._requested.cancel()
