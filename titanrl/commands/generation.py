"""Rollouts without training (`train: false`), to inspect, measure or save the policy's completions."""

import time
from dataclasses import replace

from titanrl.carriers.types import StepMetrics
from titanrl.grpo import GRPO
from titanrl.launch.roles import Roles
from titanrl.metrics import steps as metrics_of


class Generation(GRPO):
    """A run that takes batches as in training, but does not train on them. It writes no checkpoints."""

    def roles(self) -> Roles:
        """Return generators and rollout workers."""
        return Roles(trainer=False, rollouts=True)

    async def begin(self) -> None:
        """Start the rollouts with the model's initial weights."""
        self.open_dump()
        await self.session.rollouts.workers.run()

    async def take_steps(self, num_steps: int) -> None:
        """Take batches until the run has taken `num_steps` of them."""
        while self.state.step < num_steps and not self._ending.is_set():
            await self.step()

    async def step(self) -> StepMetrics:
        """Take a batch, report it, and free its slots."""
        await self._hooks.before_step(self)
        started, buffer = time.perf_counter(), self.session.rollouts.buffer
        with self._timer.phase("rollout"):
            batch = await buffer.take_batch()
        await buffer.release(batch.records.handles)
        buffer.prefetch()
        generated = await self.session.generators.take_stats()
        self.save_batch(batch)
        self._count(batch)
        self.state = replace(self.state, step=self.state.step + 1, next_index=batch.next_index)
        step_s = time.perf_counter() - started
        speed = metrics_of.speed_metrics(trained_tokens=0, generated=generated, trainer_busy_s=0.0, step_s=step_s)
        del speed["perf/trainer_idle_frac"]
        values = {
            **self._batch_metrics(batch, [0] * len(batch.records)),
            **speed,
            **self._timer.take(),
            **self.state.counts.metrics(),
        }
        metrics = StepMetrics(step=self.state.step, version=0, values=values)
        self.recorder.step(metrics)
        self.record_drops(batch)
        await self._hooks.after_step(self, metrics)
        return metrics

    @property
    def num_unsaved_steps(self) -> int:
        """Always 0, because the run has no checkpoints."""
        return 0

    async def _train_and_export(self) -> None:
        await self.train()
