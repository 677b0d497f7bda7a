"""Rollouts apart from training: the figures of a batch, the dump of rollouts, and the loop that only generates.

A dump (`rollout.save`) can be trained on later (`rollout.replay`). A run with `train: false` generates rollouts to inspect,
measure or save the policy's completions.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from titanrl.carriers.dumps import DumpBatches, DumpInfo, DumpReader, fingerprint, holds_dump, read_info
from titanrl.carriers.types import BoolArray, DoubleArray, GroupHandle, IntArray, StepMetrics
from titanrl.config.errors import BrokenRule, ConfigError
from titanrl.config.load import Source, explain_rule
from titanrl.config.schema import Config
from titanrl.data.tokenizer import Tokenizer
from titanrl.launch.roles import Roles
from titanrl.metrics import steps as metrics_of
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import Recorder
from titanrl.replay.groups import Batch
from titanrl.run.checkpoints import RunState
from titanrl.run.run import Run


def batch_metrics(batch: Batch, ages: Sequence[int], version: int, config: Config) -> dict[str, float]:
    """Return the metrics that depend on the batch alone, which trains `version` and has groups of these ages in versions."""
    values = {}
    if config.rollout.group_filter is not None:
        values["group/filtered_frac"] = batch.drops.get("filtered", 0) / batch.num_tried
    if config.rollout.min_group_size > 1:
        values["group/too_small_frac"] = batch.drops.get("too small", 0) / batch.num_tried
    values |= {
        **metrics_of.rollout_metrics(
            batch.records,
            num_tried=batch.num_tried,
            num_equal_rewards=batch.num_equal_rewards,
            num_tried_rollouts=batch.num_tried_rollouts,
            num_errors=batch.num_errors,
            of_turns=bool(batch.counts),
        ),
        **metrics_of.episode_metrics(batch.counts),
        **(metrics_of.state_metrics(batch.records) if config.algorithm.credit == "state" else {}),
        **metrics_of.environment_metrics(batch.environment, is_mixture=len(config.data.tasks) > 1),
        **metrics_of.task_metrics(batch.records, config.data.tasks, batch.drops_by_task),
        **batch.prompts,
        "staleness/mean": metrics_of.mean(ages),
        "staleness/max": float(max(ages)),
    }
    if (replayed := batch.replayed) is not None:
        counts = {"num_stored": replayed.num_stored, "num_evicted": replayed.num_evicted}
        values |= metrics_of.replay_metrics(replayed.records, version=version, **counts)
    return values | {  # the state of the buffer when the batch was taken
        "buffer/bytes": float(batch.usage.num_bytes),
        "buffer/spilled_bytes": float(batch.usage.num_spilled_bytes),
        "buffer/inflight": float(batch.num_in_flight),
        "buffer/ready": float(batch.num_ready),
        "buffer/waiting": float(batch.num_unreleased),
        "buffer/tried": float(batch.num_tried),
    }


def record_drops(recorder: Recorder, batch: Batch, step: int) -> None:
    """Record the groups dropped since the previous batch, and failed rewards."""
    for reason, num_dropped in batch.drops.items():
        recorder.directory.event("drop", step=step, groups=num_dropped, reason=reason)
    if batch.num_errors:
        recorder.scorer_errors(step, batch.num_errors, batch.num_tried_rollouts, batch.first_error)


def recorded_groups(batch: Batch, config: Config) -> dict[GroupHandle, int]:
    """Return the index of each group of a batch that is recorded with its tokens, by the location of its payload."""
    groups = batch.all_records.groups
    chosen = groups[_is_recorded(groups["index"], config) & (groups["has_payload"] > 0)]
    return {
        GroupHandle(shard=shard, location=location, serial=serial): index
        for index, (shard, location, serial) in zip(chosen["index"].tolist(), chosen["handle"].tolist(), strict=True)
    }


def _is_recorded(indices: IntArray, config: Config) -> BoolArray:
    """Return True for each prompt whose group is recorded with its tokens."""
    is_recorded: BoolArray = indices % config.rollout.groups_per_step < config.logging.rollouts_per_step
    return is_recorded


def record_advantages(directory: RunDirectory, batch: Batch, advantages_N: DoubleArray, step: int, config: Config) -> None:
    """Record the advantages of the groups that are recorded with their tokens."""
    if not config.logging.rollouts_per_step:
        return
    groups = batch.all_records.groups
    groups = groups[np.argsort(groups["index"], kind="stable")]  # the order of the advantages
    ends = np.cumsum(groups["num_rollouts"])
    starts = ends - groups["num_rollouts"]
    indices, new = groups["index"].tolist(), set(batch.records.groups["index"].tolist())
    rows = [
        (indices[i], int(groups["max_version"][i]), advantages_N[starts[i] : ends[i]].tolist())
        for i in np.flatnonzero(_is_recorded(groups["index"], config)).tolist()
        if indices[i] in new
    ]
    if rows:
        directory.log_advantages(step, rows)


class Dump:
    """The dump that a run writes, and the one that it replays; both are optional."""

    def __init__(self, config: Config) -> None:
        """Open the dump to replay; `check_dump` has checked the folders."""
        save, replay = config.rollout.save, config.rollout.replay
        self._config = config
        self._saved = None if save is None else DumpBatches(save.resolve())
        self._replayed = None if replay is None else DumpReader(replay.resolve())

    @property
    def is_source(self) -> bool:
        """True if the run trains on a dump instead of sampling."""
        return self._replayed is not None

    @property
    def num_steps(self) -> int | None:
        """Number of steps to replay, rounded down to a multiple of `updates_per_publish`; None without a replay."""
        if self._replayed is None:
            return None
        return self._replayed.num_steps - self._replayed.num_steps % self._config.algorithm.updates_per_publish

    def begin(self, state: RunState, tokenizer: Tokenizer, console: Console) -> None:
        """Prepare the dump folder for the run's current state, and say how much of a dump is replayed."""
        vocabulary = tokenizer.vocabulary
        info = DumpInfo(
            run=self._config.name,
            groups_per_step=self._config.rollout.groups_per_step,
            tokenizer=fingerprint(vocabulary),
            vocabulary=len(vocabulary),
        )
        if self._saved is not None:
            self._saved.begin(info, step=state.step, next_index=state.next_index, in_flight=state.in_flight)
        if self._replayed is None:
            return
        assert self._replayed.info.tokenizer == info.tokenizer, "checked before the start"
        num_steps, wanted = self.num_steps or 0, self._config.num_steps
        ending = f"; it has no more batches, so training ends after step {num_steps}" if num_steps < wanted else ""
        console.note(f"replay: {min(num_steps, wanted)} batches of {self._replayed.folder}, without evaluations{ending}")

    def add(self, batch: Batch, state: RunState) -> None:
        """Add the batch of the next step to the dump."""
        if self._saved is not None:
            groups = batch.records.by_index().groups["index"].tolist()
            replayed = [] if batch.replayed is None else batch.replayed.records.groups["index"].tolist()
            self._saved.add(state.step + 1, state.version, groups, replayed)

    def drop(self, indices: Collection[int]) -> None:
        """Remove the saved rollouts of prompts that will be sampled again."""
        if self._saved is not None and indices:
            self._saved.drop(lambda index: index in indices)

    def flush(self) -> None:
        """Write the list of batches to disk."""
        if self._saved is not None:
            self._saved.flush()


def check_dump(config: Config, resume: Path | None, source: Source | None) -> None:
    """Raise `ConfigError` if `rollout.save` holds the dump of another run."""
    save = config.rollout.save
    if save is not None and holds_dump(save) and (resume is None or read_info(save).run != config.name):
        fix = "choose another folder, remove this one, or resume its run with --resume"
        rule = BrokenRule(values={"rollout.save": str(save)}, rule="the folder holds the dump of another run", fix=fix)
        raise ConfigError(explain_rule(rule, source))


class Generation(Run):
    """A run that takes batches as in training, but does not train on them. It writes no checkpoints."""

    with_data = True

    @classmethod
    def check_loop(cls, config: Config, resume: Path | None, source: Source | None) -> None:
        """Check that `rollout.save` does not hold the dump of another run."""
        check_dump(config, resume, source)

    def prepare(self) -> None:
        """Open the dump."""
        self._dump = Dump(self.config)

    def roles(self) -> Roles:
        """Return generators and rollout workers."""
        return Roles(trainer=False, rollouts=True)

    def evaluation_sets(self) -> Mapping[str, int]:
        """Return no evaluation sets."""
        return {}

    async def begin(self) -> None:
        """Start the rollouts with the model's initial weights."""
        self._dump.begin(self.state, self.session.tokenizer, self.console)
        await self.session.rollouts.workers.run()

    async def take_steps(self, num_steps: int) -> None:
        """Take batches until the run has taken `num_steps` of them."""
        while self.state.step < num_steps and not self.is_ending:
            if self.steering.is_pausing:
                await self.steering.wait()
                continue
            await self.step()

    async def train_step(self) -> StepMetrics:
        """Take a batch, report it, and free its slots."""
        started, buffer = time.perf_counter(), self.session.rollouts.buffer
        with self.timer.phase("rollout"):
            batch = await buffer.take_batch()
        await buffer.release(batch.records.handles)
        buffer.prefetch()
        generated = await self.session.generators.take_stats()
        self._dump.add(batch, self.state)
        counts = self.state.counts.plus(**batch.work)
        self.state = replace(self.state, step=self.state.step + 1, next_index=batch.first_untaken, counts=counts)
        step_s = time.perf_counter() - started
        speed = metrics_of.speed_metrics(trained_tokens=0, generated=generated, trainer_busy_s=0.0, step_s=step_s)
        del speed["perf/trainer_idle_frac"]
        values = {
            **batch_metrics(batch, [0] * len(batch.records), 0, self.config),
            **speed,
            **self.timer.take(),
            **self.steering.metrics(),
            **counts.metrics(),
        }
        metrics = StepMetrics(step=self.state.step, version=0, values=values)
        self.recorder.step(metrics)
        record_drops(self.recorder, batch, self.state.step)
        return metrics

    @property
    def num_unsaved_steps(self) -> int:
        """Always 0, because the run has no checkpoints."""
        return 0
