"""Base class of TitanRL's training loops: steps, due evaluations, checkpoints and export."""

import asyncio
import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.base.arguments import check_number
from titanrl.base.errors import TitanRLError
from titanrl.base.files import uncommit_folder
from titanrl.carriers.tables import DoubleArray
from titanrl.carriers.types import AdamParams, OptimUpdate, StepMetrics
from titanrl.config import Config
from titanrl.launch.supervision import PartDiedError
from titanrl.run.lifecycle import Lifecycle
from titanrl.run.progress import RunState, checkpoint_dir, complete_checkpoint

HUGE_REWARD = 1e6
"""Absolute reward from which rewards are considered the likely cause of non-finite gradients."""


class NonFiniteGradientError(TitanRLError):
    """Training cannot continue, because too many consecutive steps had non-finite gradients."""


class Run(Lifecycle):
    """Base class of the loops, which define `roles`, `begin`, `step`, `due_evaluations` and `evaluate_all`."""

    @classmethod
    def for_config(cls, config: Config) -> "type[Run]":
        """Return the class that runs a configuration: this class or a subclass."""
        return cls

    async def step(self) -> StepMetrics:
        """Take one training step, and return its metrics."""
        raise NotImplementedError

    def due_evaluations(self, *, is_last: bool) -> Sequence[str]:
        """Return the evaluations due after this step. All are due before the first step and at the end."""
        raise NotImplementedError

    async def evaluate_all(self, names: Sequence[str], *, is_last: bool) -> None:
        """Evaluate the policy, and record the results.

        Args:
            names: Due evaluations.
            is_last: True at the end of training.
        """
        raise NotImplementedError

    async def train(self, num_steps: int | None = None) -> None:
        """Train until the policy reaches version `num_steps`, with evaluations and checkpoints.

        After a fault, training continues from the last checkpoint; see `restart`.

        Args:
            num_steps: Version to reach; the configuration's `num_steps` by default.
        """
        await self._with_restarts(partial(self.take_steps, num_steps or self.config.num_steps))

    async def take_steps(self, num_steps: int) -> None:
        """Train as `train` does, but raise faults instead of restarting."""
        self.is_training = True
        await self._evaluate_if_due(num_steps)
        while self.state.version < num_steps and not (self.ends_early or self._ending.is_set()):
            await self.step()
            await self._evaluate_if_due(num_steps)
            if is_due(self.state.step, self.config.checkpoint.every_steps) or self._is_last(num_steps):
                await self.save()
            elif self._saving is not None and self._saving.done():
                await self._finish_save()
        if self._ending.is_set() and self.num_unsaved_steps:
            await self.save()
        self.is_training = False
        await self._finish_save()

    def end_after_step(self) -> None:
        """Make `train` save a checkpoint and return after the current step.

        A running evaluation is abandoned; a resumed run repeats it.
        """
        self._ending.set()

    async def _evaluate_if_due(self, num_steps: int) -> None:
        """Run the due evaluations, unless they already ran at this step before the run was resumed."""
        step = self.state.step
        is_last = self._is_last(num_steps)
        due = self.due_evaluations(is_last=is_last)
        if step == self.state.evaluated_step or not due or self._ending.is_set():
            return
        if await self._unless_ending(self.evaluate_all(due, is_last=is_last)):
            self._note(evaluated_step=step)

    def _is_last(self, num_steps: int) -> bool:
        return self.state.version == num_steps or self.ends_early

    def _note(self, **changes: Any) -> None:
        """Update fields of the state. Updates before the first step also survive a restart from the start of the run."""
        self.state = replace(self.state, **changes)
        if self.state.step == 0:
            self._found = replace(self._found, state=replace(self._found.state, **changes))

    async def start_and_train(self) -> None:
        """Execute the complete run: start, train, and export the model."""
        await self.start()
        await self._with_restarts(self._train_and_export)

    async def _train_and_export(self) -> None:
        await self.train()
        if not self._ending.is_set():
            await self.export()

    async def save(self) -> Path:
        """Write a checkpoint that `--resume` can continue from, and return its folder.

        On an accelerator, the files are written while training continues. The checkpoint is then completed, and hooks are
        called, before a later step, at the latest before the next checkpoint.
        """
        await self._finish_save()
        while True:
            with contextlib.suppress(PartDiedError):  # retry without the dead worker, whose groups are sampled again
                return await self._save()

    async def _save(self) -> Path:
        with self._timer.phase("checkpoint"):
            await self.session.weights.ready()
            self.state = replace(self.state, version=self.session.trainer.version)
            folder = checkpoint_dir(self.recorder.directory.checkpoints, self.state.step)
            uncommit_folder(folder)
            shutil.rmtree(folder, ignore_errors=True)  # remnants of a killed attempt
            await self.save_parts(folder)
            self._saving = asyncio.create_task(self._complete(self.state), name="complete checkpoint")
            if self.device.kind == "cpu":
                await asyncio.wait({self._saving})
        if self._saving.done():
            await self._finish_save()
        return folder

    async def save_parts(self, folder: Path) -> None:
        """Start writing a checkpoint. Loops override this to add their own files to the folder."""
        await self.session.trainer.save_checkpoint(self.state.step)

    async def finish_parts(self) -> None:
        """Wait until the files added by the loop are on disk."""

    async def _complete(self, state: RunState) -> Path:
        """Wait until the files of a checkpoint are on disk, commit it, and return its folder."""
        digests = await self.session.trainer.finish_checkpoint(state.step)
        await self.finish_parts()
        directory = self.recorder.directory
        checkpoints = directory.checkpoints
        await asyncio.to_thread(directory.flush_to_disk)
        await asyncio.to_thread(complete_checkpoint, checkpoints, state, digests)
        self._saved_step = state.step
        return checkpoint_dir(checkpoints, state.step)

    async def _finish_save(self) -> None:
        """Wait for a checkpoint in progress, record it, and call the hooks; do nothing if there is none."""
        if self._saving is None:
            return
        saving, self._saving = self._saving, None
        try:
            folder = await saving
        except PartDiedError:  # a rollout worker died while its shard was being written
            await self.save()
            return
        self.recorder.directory.event("checkpoint", step=self._saved_step, path=str(folder))
        await self._hooks.after_checkpoint(self, folder)

    async def export(self) -> Path:
        """Export the policy as a Hugging Face directory with configuration and tokenizer, and return its path."""
        await self._finish_save()
        await self.session.weights.ready()
        target = self.recorder.directory.checkpoints / "final"
        await self.session.trainer.export_model(target)
        return target

    def set_learning_rate(self, learning_rate: float | None) -> None:
        """Set the learning rate from the next optimizer step on, overriding the schedule.

        The change is recorded as an event, and survives a resume.

        Args:
            learning_rate: New rate; None returns to the schedule.

        Raises:
            TypeError: The rate is not a number.
            ValueError: The rate is negative or not finite.
        """
        if learning_rate is not None:
            fix = "Give a rate such as 1e-6, or None for the schedule."
            check_number("set_learning_rate", learning_rate, fix, least=0.0)
            learning_rate = float(learning_rate)
        self._note(learning_rate=learning_rate, num_rates=self.state.num_rates + 1)
        state = self.state
        self.recorder.directory.event("learning_rate", step=state.step, value=learning_rate, number=state.num_rates)

    def steered(self, params: AdamParams) -> AdamParams:
        """Return the options of an optimizer step, with the learning rate of `set_learning_rate` applied, if set."""
        rate = self.state.learning_rate
        return params if rate is None else replace(params, learning_rate=rate)

    def count_skipped(self, update: OptimUpdate, rewards: DoubleArray | None = None) -> None:
        """Count consecutive optimizer steps skipped because of non-finite gradients.

        Args:
            update: Result of the optimizer step.
            rewards: Rewards of the step's batch, if it has any.

        Raises:
            NonFiniteGradientError: More than `algorithm.max_skipped_steps` consecutive steps were skipped.
        """
        if not update.skipped:
            if self.state.num_skipped:
                self.state = replace(self.state, num_skipped=0)
            return
        largest_reward = 0.0 if rewards is None else float(np.abs(rewards).max())
        self.state = replace(self.state, num_skipped=self.state.num_skipped + 1)
        event = {"step": self.state.step + 1, "grad_norm": update.grad_norm, "largest_reward": largest_reward}
        self.recorder.directory.event("skipped_step", **event)
        if self.state.num_skipped > self.config.algorithm.max_skipped_steps:
            raise NonFiniteGradientError(
                f"algorithm.max_skipped_steps: {self.state.num_skipped} steps in a row had a non-finite gradient (got "
                f"{self.config.algorithm.max_skipped_steps}). {_advice(largest_reward)}"
            )


def is_due(step: int, every: int) -> bool:
    """Return True if an action that repeats every `every` steps is due after `step`; 0 means never."""
    return every > 0 and step % every == 0


def _advice(largest_reward: float) -> str:
    """Return advice for the error message about non-finite gradients."""
    if largest_reward >= HUGE_REWARD:
        return (
            f"The rewards reach {largest_reward:g}, and gradients grow with them: return smaller numbers from data.rewards, or "
            "set a smaller weight there."
        )
    return "Lower the learning rate; grad/norm in metrics.jsonl shows where it began."
