"""Actor of one trainer rank: fetches the planned rollouts, runs the `Learner` and returns metrics."""

import asyncio
import contextlib
import functools
import os
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from titanrl.base.errors import PhaseError
from titanrl.base.files import Digests
from titanrl.base.plugins import Plugin, Plugins, loaded, loading
from titanrl.carriers.record import BackgroundRecord, RecordFile, share, span
from titanrl.carriers.tables import MicroBatch, Row
from titanrl.carriers.types import (
    AdamParams,
    AdapterSpec,
    DataResult,
    Datum,
    GroupHandle,
    LossSums,
    MeasuredCorrection,
    OptimUpdate,
    RankValues,
    Segment,
)
from titanrl.config.device import Device
from titanrl.config.schema import Config
from titanrl.processes.actors import Actor, concurrent_endpoint, current_rank, endpoint
from titanrl.replay.shards import SHARDS
from titanrl.weights.records import WeightManifest, adapters_run, base_run, rank_key

if TYPE_CHECKING:
    from torch import Tensor

    from titanrl.config.sections import FileDtype, TransportName
    from titanrl.trainer.agreement import Agreement, Facts
    from titanrl.trainer.collate import PackedRows
    from titanrl.trainer.learner import Learner
    from titanrl.weights.store import WeightStore

P = ParamSpec("P")
R = TypeVar("R")

ROW_MULTIPLE = 8
"""Multiple to which the row length per tensor- and context-parallel rank is rounded up, unless the row length is fixed."""
SHARE = 0.3
"""Fraction of `logging.record_bytes` for the losses of single tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSetup:
    """Arguments of a trainer rank."""

    config: Config
    device: Device
    run_dir: Path
    """Run directory."""
    store: "WeightStore"
    transports: "Sequence[TransportName]"
    """Allowed transports of published weights, in order of preference; if empty, weights are never published."""
    export_dtype: "FileDtype" = "float32"
    plugins: Plugins = field(default_factory=dict)
    """User-defined objects that replace built-in ones."""


def collective(
    method: "Callable[Concatenate[PolicyTrainer, P], Awaitable[R]]",
) -> "Callable[Concatenate[PolicyTrainer, P], Coroutine[Any, Any, R]]":
    """Wrap an endpoint of the session's own policy whose body is a collective, so that all ranks agree on the phase first."""

    @functools.wraps(method)
    async def run(self: "PolicyTrainer", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.agreement.phase(method.__name__) as agree:
            agree(lambda: self.progress(self._learner))
            return await method(self, *args, **kwargs)

    return run


class PolicyTrainer(Actor):
    """One rank of the trainer. The controller calls each endpoint on all ranks, in the same order.

    The argument `model` of an endpoint is the name of a model that `new_model` created; None is the session's own policy.
    """

    def __init__(self, setup: TrainerSetup) -> None:
        self._setup = setup
        self._closing = contextlib.ExitStack()
        self._busy_s: defaultdict[str | None, float] = defaultdict(float)  # by model
        # Held while a push copies the weights, and while other weights replace them for one pass or checkpoint. The controller
        # sends requests that change the weights, such as `optim_step` and `load_state`, only after the push.
        self._weights_lock = asyncio.Lock()

    @endpoint
    async def start(self) -> None:
        """Import torchtitan and join the process group."""
        with loading():
            from titanrl.models.preparation import prepare_torchtitan

            prepare_torchtitan(self._setup.device)
            import torch
            from torchtitan.config import CommConfig
            from torchtitan.distributed.utils import init_distributed

        config, run_dir = self._setup.config, self._setup.run_dir
        limit = share(config.logging.record_bytes, SHARE, config.trainer.parallelism.world_size)
        file = RecordFile(run_dir, "trained", f"trainer_{current_rank().rank}", limit)
        self._record = BackgroundRecord(file)
        if self._setup.device.kind == "cpu":
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        else:
            torch.get_device_module(self._setup.device.kind).set_device(int(os.environ["LOCAL_RANK"]))
        init_distributed(CommConfig(), base_folder=str(run_dir / "logs"))
        self._closing.callback(torch.distributed.destroy_process_group)
        from titanrl.trainer.agreement import agreement_of

        world = torch.distributed.group.WORLD
        assert world is not None
        self._groups = [world]
        self.agreement: Agreement = agreement_of(config.faults.rank_wait_s, self._groups)
        self._closing.callback(self.agreement.close)
        self._closing.callback(self._record.flush)

    @endpoint
    async def load_model(self, model_dir: Path) -> None:
        """Build the policy from a Hugging Face directory, at version 0."""
        with self.agreement.phase("load_model") as agree:
            agree(dict)
            import torch

            from titanrl.models.directory import open_model
            from titanrl.trainer.adapters import Adapters
            from titanrl.trainer.checkpoint import Checkpoints, load_model
            from titanrl.trainer.learner import Critic, Learner
            from titanrl.trainer.model import torch_dtype
            from titanrl.trainer.passes import RowSizes
            from titanrl.trainer.snapshots import KeptLogprobs
            from titanrl.weights.layout import first_holders
            from titanrl.weights.transport import WeightPublisher

            setup, config, rank = self._setup, self._setup.config, current_rank().rank
            self._rank = rank
            torch.manual_seed(config.seed)
            source = open_model(model_dir, config.model.family)
            model = load_model(source, config.trainer, setup.device, seed=config.seed)
            self._groups += model.groups
            self._model_dir = model_dir
            learner = Learner(
                model,
                config.algorithm,
                config.rollout.temperature,
                custom_loss=loaded(setup.plugins, "algorithm.loss"),
                snapshots_on_device=config.trainer.snapshots_on_device,
                publishes_adapters=config.publishes_adapters,
            )
            self._critic: Critic | None = None
            if config.algorithm.has_critic:
                self._critic = Critic(load_model(source, config.trainer, setup.device, is_critic=True), config.algorithm)
                self._groups += self._critic.learner.model.groups
            self._adapters = Adapters(learner, source.family.lora_targets["mlp"], seed=config.seed)
            self._kept = KeptLogprobs()
            self._held: Mapping[GroupHandle, Mapping[int, Segment]] = {}  # rollouts of `hold_rollouts`
            plan = config.trainer.parallelism
            is_fixed = config.trainer.has_fixed_rows(setup.device)
            self._row_multiple = config.trainer.row_tokens if is_fixed else ROW_MULTIPLE * plan.cp * plan.tp
            self._row_sizes = RowSizes(
                row_tokens=config.trainer.row_tokens,
                rows_per_microbatch=config.trainer.rows_per_microbatch,
                multiple=self._row_multiple,
            )
            learner.check_snapshots(self._row_multiple)  # the shortest possible row: a long one would take seconds
            self._checkpoints = Checkpoints(
                learner,
                setup.run_dir / "checkpoints",
                config.checkpoint.keep_last,
                in_background=setup.device.kind != "cpu",
                critic=self._critic,
            )
            self._closing.callback(self._checkpoints.close)
            publish = (setup.store, torch_dtype(config.generator.dtype), setup.transports, config.weights.verify)
            names: list[list[str]] = [[]] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(names, [*learner.base(), *learner.weights()])
            first = first_holders(names)
            self._publisher = WeightPublisher(config.name, rank, *publish, first=first)
            self._base_publisher = WeightPublisher(base_run(config.name), rank, *publish, num_arenas=1, first=first)
            self._base: WeightManifest | None = None
            self._copies: dict[str, Tensor] = {}  # of the adapter that is being pushed
            # Allocate the memory for publishing now. Otherwise page faults would make the first pushes ten times slower.
            if setup.transports:
                weights = self._adapter(None)[0] if config.publishes_adapters else learner.weights()
                await self._publisher.prepare(weights, learner.buffer_names)
                if config.publishes_adapters:
                    await self._base_publisher.prepare(learner.base(), learner.buffer_names)
            self._check_replicas(learner)

    # Passes over planned rows, whose rollouts are fetched from the storage shards

    @endpoint
    async def forward_backward(
        self,
        microbatch: MicroBatch,
        proximal_version: int | None = None,
        reference_version: int | None = None,
    ) -> LossSums:
        """Run forward and backward on this rank's rows of a micro-batch; return the sums of the metrics.

        `compute_logprobs` has kept the log-probabilities of the versions of the proximal and the reference policy. While the
        critic warms up, the policy has no backward pass.
        """
        from titanrl.trainer.collate import recorded_segments

        critic = self._critic
        required = nullcontext() if critic is None else critic.learner.required_pass()
        with self.agreement.phase("forward_backward") as agree, self._learner.required_pass(), required:
            rows, packed = await self._rows(microbatch, proximal_version, reference_version)
            agree(lambda: {**self.progress(self._learner, num_passes=1), **microbatch.sizes})
            with self._computing():
                backward = critic is None or not critic.is_warming_up
                result = self._learner.forward_backward(
                    packed, microbatch.mean_weight, entropy_coef=microbatch.entropy_coef, backward=backward
                )
                of_critic = {} if critic is None else critic.forward_backward(packed).sums
                if microbatch.recorded is not None and self._learner.model.reports:
                    for values, columns in recorded_segments(microbatch, rows, packed, result.logprobs_BL):
                        self._record.put({"version": self._learner.version, **values}, columns)
            return replace(result.sums, sums={**result.sums.sums, **of_critic})

    @endpoint
    async def compute_values(self, microbatch: MicroBatch) -> RankValues:
        """Compute the critic's values of this rank's rows of a micro-batch, without gradient."""
        with self.agreement.phase("compute_values") as agree:
            rows, packed = await self._rows(microbatch)
            assert self._critic is not None, "compute_values: there is no critic"
            agree(lambda: {**self.progress(self._learner), **microbatch.sizes})
            with self._computing():
                return self._critic.values(packed, rows)

    @endpoint
    async def measure_correction(self, microbatch: MicroBatch, proximal_version: int | None = None) -> MeasuredCorrection:
        """Run a forward pass; return the effect of the off-policy correction on this rank's rows of a micro-batch."""
        with self.agreement.phase("measure_correction") as agree:
            rows, packed = await self._rows(microbatch, proximal_version)
            agree(lambda: {**self.progress(self._learner), **microbatch.sizes})
            with self._computing():
                return self._learner.measure_correction(packed, rows)

    @endpoint
    async def compute_logprobs(self, microbatch: MicroBatch, at_version: int, is_reference: bool = False) -> None:
        """Compute log-probabilities with the weights of a version, and keep them on this rank for a later loss.

        A reference policy uses the experts that its own routers choose, whatever the generator chose.
        """
        with self.agreement.phase("compute_logprobs") as agree:
            rows, packed = await self._rows(microbatch)
            if is_reference:
                packed = replace(packed, experts_BLYK=None)
            async with self._weights_lock:
                agree(lambda: {**self.progress(self._learner), **microbatch.sizes})
                with self._computing(), self._learner.weights_at(at_version):
                    logprobs_BL = self._learner.logprobs(packed).cpu()
            self._kept.put(at_version, rows, logprobs_BL)

    # Several optimizer steps on one batch

    @endpoint
    async def hold_rollouts(self, microbatches: Sequence[MicroBatch]) -> None:
        """Fetch this rank's rollouts for all passes over a batch, so that none can be lost between two optimizer steps."""
        self._held = {}
        rows = chain.from_iterable(microbatch.rows[self._learner.model.dp_rank] for microbatch in microbatches)
        wanted = {(sequence.handle, sequence.segment): sequence for row in rows for sequence in row}
        self._held = await self._fetch([tuple(wanted.values())])
        self._kept.drop_all_but(self._learner.snapshots.held)  # other versions belong to the previous batch

    @endpoint
    async def share_logprobs(self, version: int) -> None:
        """Gather the kept log-probabilities of a version on all ranks, because later epochs assign sequences to other ranks."""
        import torch.distributed as dist

        with self.agreement.phase("share_logprobs") as agree:
            agree(lambda: self.progress(self._learner))
            kept: list[dict[Any, Any]] = [{}] * dist.get_world_size()
            dist.all_gather_object(kept, self._kept.of(version) if self._learner.model.reports else {})
            for values in kept:
                self._kept.add(values)

    # User-provided data in Tinker's format

    @endpoint
    async def run_data(
        self,
        data: Sequence[Datum],
        loss_fn: str | Plugin | None,
        loss_fn_config: Mapping[str, Any],
        *,
        backward: bool,
        model: str | None = None,
    ) -> DataResult:
        """Run this rank's share of the data with a loss; without a loss, only compute log-probabilities.

        With `backward`, accumulate the gradient of the loss.
        """
        from titanrl.trainer.passes import plan_pass, run_data

        with self.agreement.phase("run_data") as agree:
            learner = self._adapters.use(model)
            planned = plan_pass(learner.model, data, self._row_sizes, loss_fn, loss_fn_config)
            teacher = None if planned.loss is None else planned.loss.teacher
            turn: AbstractAsyncContextManager[object] = nullcontext()
            if teacher is not None and teacher.at_version is not None:
                turn = self._weights_lock  # the pass replaces the weights, which a push reads
            async with turn:
                agree(planned.facts)
                learner = self._adapters.use(model)  # a push may have exchanged it during the wait
                with learner.required_pass() if backward else nullcontext(), self._computing():
                    return run_data(learner, planned, backward=backward)

    @endpoint
    async def compute_data_logprobs(self, data: Sequence[Datum], at_version: int, *, model: str | None = None) -> DataResult:
        """Compute log-probabilities of this rank's share of the data with the weights of a version."""
        from titanrl.trainer.passes import plan_pass, run_data

        with self.agreement.phase("compute_data_logprobs") as agree:
            learner = self._adapters.use(model)
            planned = plan_pass(learner.model, data, self._row_sizes, None, {})
            async with self._weights_lock:
                agree(planned.facts)
                learner = self._adapters.use(model)  # a push may have exchanged it during the wait
                with self._computing(), learner.weights_at(at_version):
                    return run_data(learner, planned, backward=False)

    # Optimizer, versions and checkpoints

    @endpoint
    async def optim_step(self, params: AdamParams, completes: bool = True, *, model: str | None = None) -> OptimUpdate:
        """Take one optimizer step with the accumulated gradient.

        `completes` is False if more optimizer steps on the same batch follow. Only the last one increments the version.
        """
        with self.agreement.phase("optim_step") as agree:
            learner = self._adapters.use(model)
            agree(lambda: {**self.progress(learner), "parameters without gradient": learner.without_gradient()})
            before = learner.version
            critic = self._critic if model is None else None
            with self._computing():
                try:
                    update = learner.optim_step(params, completes=completes)
                except PhaseError:
                    if critic is not None:  # discard its gradients, too
                        critic.learner.zero_grad()
                    raise
                if critic is not None:
                    update = replace(update, critic=critic.optim_step(params, completes=completes))
            every = self._setup.config.faults.check_replicas_every
            if every and update.version != before and update.version % every == 0:
                self._check_replicas(learner)
        return replace(update, busy_s=self._busy_s.pop(model))

    @endpoint
    async def zero_grad(self, *, model: str | None = None) -> None:
        """Discard the accumulated gradient, also that of the critic."""
        self._adapters.use(model).zero_grad()
        if self._critic is not None and model is None:
            self._critic.learner.zero_grad()

    @endpoint
    async def keep_weights(self, *, model: str | None = None) -> int:
        """Keep a snapshot of the current weights for `compute_logprobs`; return their version."""
        return self._adapters.use(model).keep_weights()

    @endpoint
    async def drop_weights(self, version: int) -> None:
        """Drop the snapshot of a version and its log-probabilities; raise `ValueError` if there is no such snapshot."""
        self._learner.snapshots.drop(version)
        self._kept.drop(version)

    @endpoint
    async def use_temperature(self, temperature: float) -> None:
        """Divide the logits by another temperature from now on. No tokens sampled with the old one may be trained on."""
        self._learner.temperature = temperature

    @concurrent_endpoint
    async def push_weights(self, version: int) -> WeightManifest:
        """Publish this rank's shards of the weights under a version.

        Forward and backward passes may run concurrently, because they do not change the weights. The controller calls
        `optim_step` only after this endpoint has returned.
        """
        own = self._adapters.own  # not necessarily live: merged weights do not depend on it
        assert version == own.version, f"push_weights({version}): the weights have version {own.version}"
        async with self._weights_lock:
            with span("push", version=version):
                if not self._setup.config.publishes_adapters:
                    return await self._publisher.publish(version, own.weights(), own.buffer_names)
                weights, scale = self._adapter(None)
                manifest = await self._publisher.publish(version, weights, own.buffer_names)
                if self._base is None or self._base.version != own.base_version:
                    self._base = await self._base_publisher.publish(own.base_version, own.base(), own.buffer_names)
                return replace(manifest, base=self._base, scale=scale)

    def _adapter(self, model: str | None) -> "tuple[Mapping[str, Tensor], float]":
        """Return copies of a model's adapter, and its scale. A request of another model would exchange the live tensors."""
        from titanrl.weights.layout import local_part

        learner = self._adapters.use(model)
        for name, value in learner.weights().items():
            if name in self._copies:
                local_part(self._copies[name]).copy_(local_part(value.detach()))
            else:
                self._copies[name] = value.detach().clone()
        return self._copies, learner.model.adapter_scale

    @concurrent_endpoint
    async def push_adapter(self, number: int, *, model: str | None = None) -> WeightManifest:
        """Put this rank's shards of a model's adapter into the store, where they stay until `forget_adapter`."""
        from titanrl.trainer.model import torch_dtype
        from titanrl.weights.transport import WeightPublisher

        config, store = self._setup.config, self._setup.store
        assert config.publishes_adapters, "push_adapter: adapters are merged"
        dtype, where = torch_dtype(config.generator.dtype), adapters_run(config.name)
        publisher = WeightPublisher(where, self._rank, store, dtype, ("store",), config.weights.verify, num_arenas=1)
        async with self._weights_lock:
            weights, scale = self._adapter(model)
            with span("push adapter", version=number), contextlib.closing(publisher):
                manifest = await publisher.publish(number, weights, self._adapters.own.buffer_names)
        return replace(manifest, scale=scale)

    @concurrent_endpoint
    async def forget_adapter(self, number: int, *, model: str | None = None) -> None:
        """Delete this rank's shards of an adapter from the store."""
        async with self._weights_lock:  # after `push_adapter`, if its caller was cancelled
            await self._setup.store.delete(rank_key(adapters_run(self._setup.config.name), number, self._rank))

    @endpoint
    @collective
    async def start_over(self) -> None:
        """Reset optimizer state, version, moving average and snapshots, but keep the weights. The critic becomes a copy."""
        self._learner.start_over()
        if self._critic is not None:
            self._critic.start_over(self._learner)
        self._check_replicas(self._learner)

    @endpoint
    @collective
    async def save_checkpoint(self, step: int, published: int | None = None) -> None:
        """Write a checkpoint to resume from: model, optimizer and version, and the weights of snapshot `published` if given."""
        self._record.flush()  # before the checkpoint, because a resumed run does not repeat these steps
        async with self._weights_lock:
            self._adapters.use(None)  # a push that held the lock may have used another adapter
            self._checkpoints.save(step, published)

    @concurrent_endpoint
    async def finish_checkpoint(self, step: int) -> Digests:
        """Wait until this rank's files of a checkpoint are on disk; return their digests."""
        return await asyncio.to_thread(self._checkpoints.finish, step)

    @endpoint
    @collective
    async def load_published(self, step: int, version: int) -> None:
        """Load the last published weights from a checkpoint and keep them as a snapshot, so that they can be republished.

        Call it before `load_checkpoint`.
        """
        self._checkpoints.load_published(step, version)

    @endpoint
    @collective
    async def load_checkpoint(self, step: int) -> int:
        """Restore a checkpoint and return its version."""
        self._checkpoints.load(step)
        self._check_replicas(self._learner)
        return self._learner.version

    @endpoint
    async def save_state(self, folder: Path, *, model: str | None = None) -> Digests:
        """Write model, optimizer and version to a folder; return the digests of this rank's files.

        Of a model that `new_model` created, only the adapter is written, without its base.
        """
        with self.agreement.phase("save_state") as agree:
            learner = self._adapters.use(model)
            agree(lambda: self.progress(learner))
            return self._checkpoints.save_state(folder) if model is None else self._adapters.save(model, folder)

    @endpoint
    async def load_state(self, folder: Path, *, with_optimizer: bool, min_version: int, model: str | None = None) -> int:
        """Restore a state that `save_state` wrote; raise its version to at least `min_version` and return it."""
        with self.agreement.phase("load_state") as agree:
            learner = self._adapters.use(model)
            agree(lambda: self.progress(learner))
            if model is None:
                self._checkpoints.load_state(folder, with_optimizer=with_optimizer)
            else:
                self._adapters.load(model, folder, with_optimizer=with_optimizer)
            self._check_replicas(learner)
            learner.version = max(learner.version, min_version)
            return learner.version

    @endpoint
    async def export_model(self, target: Path, dtype: "FileDtype | None" = None, *, model: str | None = None) -> None:
        """Write the policy as a Hugging Face directory, by default in the dtype of exports. No gradient may be pending."""
        from titanrl.trainer.checkpoint import export_hf

        with self.agreement.phase("export_model") as agree:
            learner = self._adapters.use(model)
            agree(lambda: self.progress(learner))
            learner.require_settled("export_model")
            dtype = dtype or self._setup.export_dtype
            export_hf(learner.model, self._model_dir, target, dtype, is_base=not self._adapters.own.base_version)

    # Further models, which share the base

    @endpoint
    async def new_model(self, spec: AdapterSpec, *, model: str | None = None) -> None:
        """Create the model of the name `model`: an adapter with an optimizer of its own."""
        assert model is not None
        with self.agreement.phase("new_model") as agree:
            self._adapters.add(model, spec)
            agree(lambda: {"models": self._adapters.num_models})

    @endpoint
    async def free_model(self, *, model: str | None = None) -> None:
        """Discard a model and its memory."""
        assert model is not None
        self._adapters.free(model)
        self._busy_s.pop(model, None)

    @endpoint
    async def close(self) -> None:
        """Finish pending writes and destroy the process group, also if one of them raises."""
        self._closing.close()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Add the duration of the body to `OptimUpdate.busy_s`. The body must not await, because waiting is not work."""
        started = time.perf_counter()
        try:
            with span("compute"):
                yield
        finally:
            self._busy_s[self._adapters.live] += time.perf_counter() - started

    async def _rows(
        self, microbatch: MicroBatch, proximal_version: int | None = None, reference_version: int | None = None
    ) -> "tuple[tuple[Row, ...], PackedRows]":
        """Fetch this rank's rows of a micro-batch; return their plan, and their tensors with kept log-probabilities."""
        from titanrl.trainer.collate import collate, row_length

        rows = tuple(microbatch.rows[self._learner.model.dp_rank])
        used = [sum(sequence.num_placed for sequence in row) for row in rows]
        length = row_length(used, self._setup.config.trainer.row_tokens, self._row_multiple)
        packed = collate(rows, await self._fetch(rows), length)
        if proximal_version is not None:
            packed = replace(packed, proximal_BL=self._kept.get(proximal_version, rows, length))
        if reference_version is not None:
            packed = replace(packed, reference_BL=self._kept.get(reference_version, rows, length))
        return rows, packed

    @property
    def _learner(self) -> "Learner":
        """Learner of the session's own policy, whose weights become the live ones."""
        return self._adapters.use(None)

    def progress(self, learner: "Learner", *, num_passes: int = 0) -> "Facts":
        """Return the counts that must be equal on all ranks, including `num_passes` backward passes that are about to run."""
        return {"micro-batches": learner.num_pending + num_passes, "steps taken": learner.version + learner.num_ahead}

    def _check_replicas(self, learner: "Learner") -> None:
        """Compare the replicated tensors of all ranks, unless `faults.check_replicas_every` is 0. This is a collective."""
        from titanrl.trainer.agreement import check_replicas

        if self._setup.config.faults.check_replicas_every:
            check_replicas(learner)
            if self._critic is not None and learner is self._adapters.own:
                check_replicas(self._critic.learner)

    async def _fetch(self, rows: Sequence[Row]) -> Mapping[GroupHandle, Mapping[int, Segment]]:
        """Return the segments of some rows, from the held rollouts if these have all of them, else from the storage shards."""
        if all(sequence.segment in self._held.get(sequence.handle, ()) for row in rows for sequence in row):
            return self._held
        wanted: dict[int, list[tuple[GroupHandle, int]]] = defaultdict(list)
        for sequence in (sequence for row in rows for sequence in row):
            wanted[sequence.handle.shard].append((sequence.handle, sequence.segment))
        with span("wait for rollouts", "wait"):
            replies = await asyncio.gather(*(SHARDS.fetch(shard, keys) for shard, keys in wanted.items()))
        payload: dict[GroupHandle, dict[int, Segment]] = defaultdict(dict)
        for keys, segments in zip(wanted.values(), replies, strict=True):
            for (handle, index), segment in zip(keys, segments, strict=True):
                payload[handle][index] = segment
        return payload
