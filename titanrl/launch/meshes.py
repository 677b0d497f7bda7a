"""The controller's view of the meshes: typed calls with a name and a deadline, answers of many ranks as one."""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.config.sections import TimeoutsConfig
from titanrl.launch.supervision import DeadlineError, Supervisor
from titanrl.replay.buffer import Batch, StarvationError
from titanrl.tables import MicroBatch, Table
from titanrl.types import (
    AdamParams,
    Datum,
    EvaluationResult,
    ForwardBackwardOutput,
    GroupHandle,
    GroupRecord,
    LossSums,
    OptimUpdate,
)
from titanrl.weights.manifest import Commit, WeightManifest

if TYPE_CHECKING:
    from titanrl.trainer.datums import DataAnswer

T = TypeVar("T")


def all_equal(name: str, answers: Sequence[T]) -> T:
    """The one answer of all ranks; they decide alike, or something is badly wrong."""
    assert all(answer == answers[0] for answer in answers), f"ranks disagree after {name}: {answers}"
    return answers[0]


def merge_losses(parts: Iterable[LossSums]) -> LossSums:
    """Sums added, maxima taken, over ranks or micro-batches."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for part in parts:
        for name, value in part.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in part.maxima.items():
            maxima[name] = max(maxima.get(name, value), value)
    return LossSums(sums=sums, maxima=maxima)


def merge_answers(num_data: int, answers: "Iterable[DataAnswer]") -> ForwardBackwardOutput:
    """What all ranks answered, in the caller's order. Sums over the data are named `:sum`, means over tokens `:mean`."""
    answers = list(answers)
    logprobs = {index: values for answer in answers for index, values in answer.logprobs.items()}
    assert logprobs.keys() == set(range(num_data)), "each datum must be answered exactly once"
    merged = merge_losses(part for answer in answers for part in answer.sums)
    sums = dict(merged.sums)
    metrics = {"loss:sum": sums.pop("loss/policy")} if "loss/policy" in sums else {}
    num_tokens = sums.pop("num_tokens", None)
    if num_tokens is None:  # the caller's own loss, whose metrics have the names it gave
        metrics |= sums
    else:
        terms = {name: sums.pop(name) for name in list(sums) if name.startswith("loss/")}
        means = {f"{name}:mean": value / max(num_tokens, 1.0) for name, value in sums.items()}
        metrics |= {"num_tokens:sum": num_tokens, **{f"{name}:sum": value for name, value in terms.items()}, **means}
    metrics |= {f"{name}:max": value for name, value in merged.maxima.items()}
    return ForwardBackwardOutput(
        loss_fn_outputs=tuple({"logprobs": logprobs[index]} for index in range(num_data)),
        metrics=metrics,
        version=all_equal("run_data", [answer.version for answer in answers]),
    )


@dataclass(frozen=True, slots=True)
class TrainerMesh:
    """The trainer mesh as one object; every call goes to all ranks, in the order the calls are made."""

    mesh: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig

    async def start(self) -> None:
        """Load torchtitan and form the process group."""
        await self._all("trainer.start", self.mesh.start.call(), self.timeouts.start_s)

    async def load_model(self, model_dir: Path) -> None:
        """Build the policy from a Hugging Face directory."""
        await self._all("trainer.load_model", self.mesh.load_model.call(model_dir), self.timeouts.start_s)

    async def forward_backward(
        self,
        microbatch: MicroBatch,
        loss: str = "policy",
        *,
        proximal_version: int | None = None,
        reference_version: int | None = None,
    ) -> LossSums:
        """Add the gradient of a micro-batch; returns the sums of its metrics over all ranks.

        The versions name log-probabilities that `compute_logprobs` has computed for this micro-batch.
        """
        call = self.mesh.forward_backward.call(microbatch, loss, proximal_version, reference_version)
        return merge_losses(await self._all("trainer.forward_backward", call))

    async def measure_correction(self, microbatch: MicroBatch, *, proximal_version: int | None = None) -> LossSums:
        """What the off-policy correction does over a micro-batch, summed over all ranks."""
        call = self.mesh.measure_correction.call(microbatch, proximal_version)
        return merge_losses(await self._all("trainer.measure_correction", call))

    async def compute_logprobs(self, microbatch: MicroBatch, *, at_version: int) -> None:
        """Have the ranks compute and keep log-probabilities with the weights of a version: the live one, or one held."""
        call = self.mesh.compute_logprobs.call(microbatch, at_version)
        await self._all("trainer.compute_logprobs", call)

    async def keep_weights(self) -> int:
        """Hold a copy of the weights as they are; returns their version."""
        versions: list[int] = await self._all("trainer.keep_weights", self.mesh.keep_weights.call())
        return all_equal("keep_weights", versions)

    async def drop_weights(self, version: int) -> None:
        """Forget a version that `keep_weights` held, and the log-probabilities computed with it."""
        await self._all("trainer.drop_weights", self.mesh.drop_weights.call(version))

    async def run_data(
        self, data: Sequence[Datum], loss_fn: str | None, loss_fn_config: Mapping[str, float], *, backward: bool
    ) -> ForwardBackwardOutput:
        """Run a caller's data under a loss, or without one only for the log-probabilities; `backward` adds the gradient."""
        call = self.mesh.run_data.call(data, loss_fn, loss_fn_config, backward=backward)
        return merge_answers(len(data), await self._all("trainer.run_data", call))

    async def compute_data_logprobs(self, data: Sequence[Datum], *, at_version: int) -> ForwardBackwardOutput:
        """Log-probabilities of a caller's data with the weights of a version: the live one, or one held."""
        call = self.mesh.compute_data_logprobs.call(data, at_version)
        return merge_answers(len(data), await self._all("trainer.compute_data_logprobs", call))

    async def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Take one optimizer step."""
        updates: list[OptimUpdate] = await self._all("trainer.optim_step", self.mesh.optim_step.call(params))
        return all_equal("optim_step", updates)

    async def zero_grad(self) -> None:
        """Throw away the gradient gathered so far."""
        await self._all("trainer.zero_grad", self.mesh.zero_grad.call())

    async def push_weights(self, version: int) -> list[WeightManifest]:
        """Publish the weights as a version; one manifest per rank."""
        return await self._all("trainer.push_weights", self.mesh.push_weights.call(version), self.timeouts.sync_s)

    async def start_over(self) -> None:
        """Keep the weights, forget optimizer state and version."""
        await self._all("trainer.start_over", self.mesh.start_over.call())

    async def save_checkpoint(self, step: int) -> None:
        """Write model, optimizer and version."""
        await self._all("trainer.save_checkpoint", self.mesh.save_checkpoint.call(step))

    async def load_checkpoint(self, step: int) -> int:
        """Go back to a checkpoint; returns its version."""
        versions: list[int] = await self._all("trainer.load_checkpoint", self.mesh.load_checkpoint.call(step))
        return all_equal("load_checkpoint", versions)

    async def save_state(self, folder: Path) -> None:
        """Write model, optimizer and version into a folder of their own."""
        await self._all("trainer.save_state", self.mesh.save_state.call(folder))

    async def load_state(self, folder: Path, *, with_optimizer: bool) -> int:
        """Take up what `save_state` wrote; returns its version."""
        call = self.mesh.load_state.call(folder, with_optimizer=with_optimizer)
        versions: list[int] = await self._all("trainer.load_state", call)
        return all_equal("load_state", versions)

    async def export_model(self, target: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        await self._all("trainer.export_model", self.mesh.export_model.call(target))

    async def close(self) -> None:
        """Leave the process group."""
        await self._all("trainer.close", self.mesh.close.call(), self.timeouts.close_s / 4)

    async def _all(self, name: str, call: Awaitable[Any], timeout_s: float | None = None) -> list[Any]:
        answers = await self.supervisor.ask(name, call, timeout_s or self.timeouts.step_s)
        return [answer for _, answer in answers.items()]


@dataclass(frozen=True)
class GeneratorMeshes:
    """All generator replicas, each a mesh of its tensor-parallel ranks."""

    meshes: tuple[Any, ...]
    supervisor: Supervisor
    timeouts: TimeoutsConfig

    @cached_property
    def actors(self) -> tuple[Any, ...]:
        """Rank 0 of each replica, which answers for it."""
        return tuple(mesh.slice(procs=0) for mesh in self.meshes)

    async def start(self) -> None:
        """Load vLLM and build the engines; from then on the run ends with a rank that cannot follow rank 0."""
        await self._each("generator.start", [mesh.start.call() for mesh in self.meshes], self.timeouts.start_s)
        for replica, mesh in enumerate(self.meshes):
            for rank in range(1, mesh.size()):
                follower = mesh.slice(procs=rank)
                self.supervisor.guard(f"rank {rank} of generator_{replica}", follower.follow.call_one())

    async def expect_weights(self, version: int) -> None:
        """Let every replica hold new requests until it has pulled a version."""
        calls = [actor.expect_weights.call_one(version) for actor in self.actors]
        await self._each("generator.expect_weights", calls, self.timeouts.sync_s)

    async def pull_weights(self, replica: int, commit: Commit) -> None:
        """Bring a version into all ranks of one replica."""
        call = self.meshes[replica].pull_weights.call(commit)
        await self.supervisor.ask(f"generator_{replica}.pull_weights", call, self.timeouts.sync_s)

    async def take_stats(self) -> tuple[int, float]:
        """Tokens of completions since the last call, and the share of the time that was spent idle."""
        stats = await self._each("generator.stats", [actor.stats.call_one() for actor in self.actors], self.timeouts.step_s)
        wall_s = sum(stat.wall_s for stat in stats)
        # A step counts when it ends, so it may have begun before the time it is counted in.
        return sum(stat.num_tokens for stat in stats), max(0.0, 1.0 - sum(stat.busy_s for stat in stats) / wall_s)

    async def close(self) -> None:
        """End the engines."""
        await self._each("generator.close", [mesh.close.call() for mesh in self.meshes], self.timeouts.close_s / 4)

    async def _each(self, name: str, calls: Sequence[Awaitable[T]], timeout_s: float) -> list[T]:
        return await self.supervisor.ask(name, asyncio.gather(*map(_awaited, calls)), timeout_s)


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
        """Greedy answers to held-out prompts, by the first worker."""
        first = self.mesh.slice(procs=0)
        result: EvaluationResult = await self.supervisor.ask(
            "rollout.evaluate", first.evaluate.call_one(num_prompts), self.timeouts.step_s
        )
        return result

    async def demonstrate(self, handle: GroupHandle) -> GroupRecord:
        """Put the next batch of demonstrations into a shard, by the first worker."""
        first = self.mesh.slice(procs=0)
        record: GroupRecord = await self.supervisor.ask(
            "rollout.demonstrate", first.demonstrate.call_one(handle), self.timeouts.step_s
        )
        return record

    async def close(self) -> None:
        """End loops and scoring processes."""
        await self.supervisor.ask("rollout.close", self.mesh.close.call(), self.timeouts.close_s / 4)


@dataclass(frozen=True, slots=True)
class BufferClient:
    """The replay buffer."""

    actor: Any
    supervisor: Supervisor
    timeouts: TimeoutsConfig
    starvation_timeout_s: float

    def ask_for_batch(self, num_groups: int) -> "asyncio.Task[Batch]":
        """Have the next batch sent as soon as it is together; `take_batch` waits for it."""
        asked = asyncio.create_task(_awaited(self.actor.take_batch.call_one(num_groups)), name="next batch")
        asked.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may ever wait for it
        return asked

    async def take_batch(self, num_groups: int, asked: "asyncio.Task[Batch]") -> Batch:
        """A batch that was asked for; waits for it, with a deadline that begins now.

        Raises:
            StarvationError: no batch with a signal came together in time; it may yet come, and can be waited for again.
            RolloutError: a rollout worker failed.
        """
        try:
            return await self.supervisor.ask("buffer.take_batch", asyncio.shield(asked), self.starvation_timeout_s)
        except DeadlineError:
            call = self.actor.why_starved.call_one(num_groups, self.starvation_timeout_s)
            why = await self.supervisor.ask("buffer.why_starved", call, self.timeouts.close_s)
        raise StarvationError(why)

    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group, taken or not, as before a measurement; no longer than for a batch."""
        call = self.actor.wait_until_full.call_one()
        await self.supervisor.ask("buffer.wait_until_full", call, self.starvation_timeout_s)

    async def release(self, handles: Table) -> None:
        """Free the slots of a batch, given as a table of handles."""
        await self.supervisor.ask("buffer.release", self.actor.release.call_one(handles), self.timeouts.step_s)


async def _awaited(call: Awaitable[T]) -> T:
    return await call
