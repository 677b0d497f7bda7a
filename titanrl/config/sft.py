"""The section `sft`: supervised fine-tuning on examples."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from titanrl.base.choices import LearningRateDecay, TrainOn
from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, Decay, InputPath, Section, StepsOrZero, Tokens

USED: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("max_skipped_steps",),
    "generator": (),
    "rollout": ("max_new_tokens",),  # by `titanrl chat`
    "sandbox": (),
    "weights": (),
}
"""Keys that fine-tuning uses, in the sections for reinforcement learning. Setting any other key of these sections is an
error."""


class SFTConfig(Section):
    """Supervised fine-tuning on examples (`titanrl sft`), for `num_steps` steps. `evaluation.every_steps` is the number of
    steps between evaluations of the loss on held-out examples. Of the section `data`, only `chat_template`,
    `chat_template_kwargs`, `system_prompt` and `control_tokens` are used."""

    path: InputPath
    """Examples with `messages`, or with `prompt` and `completion` (docs/howto/sft.md): a JSONL or Parquet file, a directory of
    such files, a pattern such as `data/train-*.parquet`, or the directory of a data set saved by Hugging Face datasets."""
    validation_path: InputPath | None = None
    """Held-out examples, in the same formats; null uses `heldout_fraction`."""
    columns: dict[Literal["prompt", "completion", "messages", "tools"], str] = {}
    """Names of the columns, if they are not `prompt`, `completion`, `messages` and `tools`. A dot selects a nested field."""
    heldout_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Fraction of the examples in `path` that is held out. A hash of the prompt, or of the first user message, assigns each
    example, as for `data.heldout_fraction`."""
    train_on: TrainOn = "assistant"
    """Tokens to train on: of every assistant message (`assistant`), of the last one only (`last`), or of the whole example
    (`all`). A `completion` counts as an assistant message."""
    max_example_tokens: Tokens | None = None
    """Maximum example length in tokens; null uses `trainer.row_tokens`."""
    overlong: Literal["error", "truncate", "skip"] = "error"
    """Handling of longer examples: `error` ends the command before training, `truncate` cuts their last tokens, `skip` leaves
    them out."""
    batch_size: Count = 32
    """Number of examples per optimizer step."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""
    num_warmup_steps: StepsOrZero = 0
    """Number of linear learning-rate warm-up steps."""
    lr_decay: LearningRateDecay = "linear"
    """Learning-rate schedule after the warm-up: `constant`, or `linear` decay to zero at the last step."""
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
                rule="held-out examples come either from validation_path or from path",
                fix="remove one of them",
            )


def unused_by_sft(sections: Mapping[str, Section]) -> Iterator[BrokenRule]:
    """Yield a rule for each key that is set although fine-tuning does not use it.

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
                    rule="supervised fine-tuning does not use this key",
                    fix=f"set sft.{key} instead" if key in SFTConfig.model_fields else f"remove {name}.{key}",
                )
