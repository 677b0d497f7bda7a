"""Rules for several optimizer steps per batch: epochs and mini-batches."""

from collections.abc import Iterator

from titanrl.base.choices import Program
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.errors import BrokenRule
from titanrl.config.sections import TrainerConfig


def broken_by_epochs(
    trainer: TrainerConfig, algorithm: AlgorithmConfig, groups_per_step: int, program: Program
) -> Iterator[BrokenRule]:
    """Yield the rules that epochs and mini-batches break together with other keys."""
    keys = {"trainer.epochs": trainer.epochs, "trainer.minibatches_per_batch": trainer.minibatches_per_batch}
    if program != "train":
        for key, value in keys.items():
            if value > 1:
                yield BrokenRule(values={key: value}, rule=f"titanrl {program} does not use this key", fix=f"remove {key}")
        return
    if trainer.minibatches_per_batch > groups_per_step:
        yield BrokenRule(
            values={
                "trainer.minibatches_per_batch": trainer.minibatches_per_batch,
                "rollout.groups_per_step": groups_per_step,
            },
            rule="minibatches_per_batch must not exceed groups_per_step, because each mini-batch needs a group",
            fix=f"set trainer.minibatches_per_batch to at most {groups_per_step}",
        )
    if trainer.epochs > 1 and algorithm.loss_traits.ratio == "none" and not algorithm.correction.is_on:
        yield BrokenRule(
            values={"trainer.epochs": trainer.epochs, "algorithm.loss": algorithm.loss},
            rule="later epochs train on tokens of an earlier policy, which requires an importance ratio or a correction",
            fix="set algorithm.loss to ppo, set algorithm.correction, or set trainer.epochs to 1",
        )
