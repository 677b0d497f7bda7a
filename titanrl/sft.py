"""Supervised fine-tuning: the training loop, and the command `titanrl sft --config FILE`.

A step trains on the next `sft.batch_size` examples. The loss is the cross-entropy averaged over all trained tokens of the
batch. The order of examples depends only on the seed, so a resumed run continues with the same examples and the same loss
curve.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from titanrl.carriers.types import AdamParams, GenerationStats, OptimUpdate, StepMetrics
from titanrl.data.examples import Demonstration, mean_loss_data
from titanrl.launch.roles import Roles
from titanrl.metrics import steps as metrics_of
from titanrl.run import command
from titanrl.run.run import Run

NO_GENERATION = GenerationStats(num_tokens=0, busy_s=0.0, wall_s=0.0, num_replicas=0)


class SFT(Run):
    """A fine-tuning run, which trains on examples.

    Example:
        async with SFT(load_config("sft_quickstart")) as run:
            metrics = await run.step()
    """

    program = "sft"
    purpose = "Fine-tune a model on examples."

    def prepare(self) -> None:
        """Take the examples that the check has read."""
        assert self._found.examples is not None
        self.examples = self._found.examples

    async def train_step(self) -> StepMetrics:
        """Train on the next batch, and report the metrics."""
        started, training, sft = time.perf_counter(), self.training, self.config.sft
        assert sft is not None
        batch = self.examples.batch(self.state.next_index, sft.batch_size, self.config.seed)
        params = AdamParams.at_step(sft, training.version, self.config.num_steps, rate=self.state.learning_rate)
        with self.timer.phase("train"):
            passes = training.forward_backward(mean_loss_data(batch), "cross_entropy")
            stepping = training.optim_step(params)
            loss = (await passes).metrics["loss:sum"]
        with self.timer.phase("optim"):
            update = await stepping
        self.count_skipped(update)
        return self._report(batch, loss, update, params, time.perf_counter() - started)

    def evaluation_sets(self) -> Mapping[str, int]:
        """Return one set, the loss on held-out examples."""
        return {"loss": self.config.evaluation.every_steps}

    async def evaluate(self, name: str | None = None) -> float | None:
        """Return the loss on held-out examples, averaged over their trained tokens; None without held-out examples.

        Args:
            name: Only `"loss"` exists.
        """
        if name not in (None, "loss"):
            raise ValueError(f'name: no such evaluation set (got {name!r}). Give "loss" or None.')
        async with self.alone("evaluate"):
            with self.timer.phase("evaluate"):
                loss = await self.examples.heldout_loss(partial(self.training.forward, loss_fn="cross_entropy"), self.config)
        if loss is None:
            return None
        self.recorder.heldout_loss(StepMetrics(step=self.state.step, version=self.state.version, values={"loss/eval": loss}))
        return loss

    def roles(self) -> Roles:
        """Return only the trainer."""
        return Roles(generators=False)

    async def begin(self) -> None:
        """Print the summary of the examples, and load the checkpoint of a resumed run."""
        for name, text in self.examples.summary(self.config).items():
            self.console.note(f"{name}: {text}")
        await self.load_checkpoint()

    def _report(
        self, batch: list[Demonstration], loss: float, update: OptimUpdate, params: AdamParams, step_s: float
    ) -> StepMetrics:
        """Advance the state, and record the metrics of the step."""
        state = self.state
        num_tokens = sum(len(example.token_ids) for example in batch)
        num_trained = sum(example.num_trained for example in batch)
        counts = state.counts.plus(trained_tokens=0 if update.skipped else num_trained)
        next_index = state.next_index + len(batch)
        self.state = replace(state, step=state.step + 1, version=update.version, next_index=next_index, counts=counts)
        values = {
            "loss/train": loss,
            "data/epoch": next_index / len(self.examples.training),
            "tokens/trained": float(num_trained),
            "tokens/examples": float(num_tokens),
            **metrics_of.optimizer_metrics([update], params.learning_rate),
            **metrics_of.speed_metrics(
                trained_tokens=num_tokens, generated=NO_GENERATION, trainer_busy_s=update.busy_s, step_s=step_s
            ),
            **self.timer.take(),
            **self.steering.metrics(),
            "count/trained_tokens": counts.trained_tokens,
        }
        metrics = StepMetrics(step=self.state.step, version=self.state.version, values=values)
        self.recorder.step(metrics)
        return metrics


main = partial(command.main, SFT, prog="titanrl sft")
"""Entry point of `titanrl sft`, called as `main(argv, prog=...)`."""


if __name__ == "__main__":
    main()
