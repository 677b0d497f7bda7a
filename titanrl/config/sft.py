"""The section `sft`: supervised fine-tuning on examples."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from titanrl.config.choices import LearningRateDecay, TrainOn
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, Decay, FilePath, Section, StepsOrZero, Tokens

USED: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("max_skipped_steps",),
    "generator": (),
    "rollout": ("max_new_tokens",),  # by `titanrl chat`
    "sandbox": (),
    "weights": (),
}
"""Keys that a fine-tuning uses of the sections for reinforcement learning; another key with a value of its own is an error."""


class SFTConfig(Section):
    """Supervised fine-tuning on examples (`titanrl sft`), for `num_steps` steps. `evaluation` says how often the loss on
    held-out examples is measured. Of the section `data` only `chat_template` and `system_prompt` are used."""

    path: FilePath
    """JSONL file of examples: one object per line with `messages`, or with `prompt` and `completion` (docs/howto/sft.md)."""
    validation_path: FilePath | None = None
    """JSONL file of held-out examples."""
    heldout_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Fraction of the examples in `path` that is held out, selected by a hash of the prompt or of the first user message as
    `data.heldout_fraction` does."""
    train_on: TrainOn = "assistant"
    """Tokens to train on: those of every message of the assistant, of the last one only, or `all`. A `completion` is such a
    message."""
    max_example_tokens: Tokens | None = None
    """Longest example, in tokens; null means `trainer.row_tokens`."""
    overlong: Literal["error", "truncate", "skip"] = "error"
    """Handling of longer examples: an error before the start, dropping their last tokens, or leaving them out."""
    batch_size: Count = 32
    """Examples per optimizer step."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""
    num_warmup_steps: StepsOrZero = 0
    """Number of steps of linear learning-rate warm-up."""
    lr_decay: LearningRateDecay = "linear"
    """Schedule after the warm-up: constant, or linear decay to zero at the last step."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.validation_path is not None and self.heldout_fraction > 0:
            yield BrokenRule(
                values={"heldout_fraction": self.heldout_fraction, "validation_path": str(self.validation_path)},
                rule="held-out examples come from a file of their own, or from path, but not from both",
                fix="remove one of them",
            )


def unused_by_sft(sections: Mapping[str, Section]) -> Iterator[BrokenRule]:
    """Yield the keys of other sections that were set although a fine-tuning does not use them.

    Args:
        sections: The sections of `USED`, by name.
    """
    for name, used in USED.items():
        section = sections[name]
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            if key not in used and value != field.get_default():
                yield BrokenRule(
                    values={f"{name}.{key}": value.model_dump() if isinstance(value, Section) else value},
                    rule="supervised fine-tuning has no rollouts and does not use this key",
                    fix=f"set sft.{key} instead" if key in SFTConfig.model_fields else f"remove {name}.{key}",
                )
