"""Rollouts without training (`train: false`), to inspect, measure or save the policy's completions."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titanrl.carriers.types import StepMetrics
from titanrl.config import Config, Source
from titanrl.launch.roles import Roles
from titanrl.metrics import steps as metrics_of
from titanrl.run.dump import Dump, check_dump
from titanrl.run.recording import batch_metrics, record_drops
from titanrl.run.run import Run


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
        self.state = replace(self.state, step=self.state.step + 1, next_index=batch.next_index, counts=counts)
        step_s = time.perf_counter() - started
        speed = metrics_of.speed_metrics(trained_tokens=0, generated=generated, trainer_busy_s=0.0, step_s=step_s)
        del speed["perf/trainer_idle_frac"]
        values = {
            **batch_metrics(batch, [0] * len(batch.records), 0, self.config),
            **speed,
            **self.timer.take(),
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
