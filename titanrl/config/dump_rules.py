"""Rules for rollout dumps, and for runs without a trainer or without generators."""

from collections.abc import Iterator

from titanrl.base.choices import Program
from titanrl.config.errors import BrokenRule
from titanrl.config.mixture import RunDataConfig
from titanrl.config.replay import ReplayConfig
from titanrl.config.sections import RolloutConfig


def broken_by_dump(
    rollout: RolloutConfig, replay: ReplayConfig, data: RunDataConfig, *, train: bool, program: Program
) -> Iterator[BrokenRule]:
    """Yield the rules that `rollout.save`, `rollout.replay` and `train` break.

    Args:
        rollout: Section with `save` and `replay`.
        replay: Section `replay`.
        data: Section with tasks and levels.
        train: False if no trainer runs.
        program: Subcommand of the configuration.
    """
    given = {"rollout.save": rollout.save, "rollout.replay": rollout.replay}
    values: dict[str, object] = {key: str(path) for key, path in given.items() if path is not None}
    if not train:
        values["train"] = False
    if program != "train":
        for key, value in values.items():
            yield BrokenRule(
                values={key: value},
                rule=f"titanrl {program} does not support this key, because it has no groups of rollouts",
                fix=f"remove {key}",
            )
        return
    if rollout.replay is not None and rollout.save is not None:
        yield BrokenRule(
            values=values, rule="the replay of a dump samples no rollouts to save", fix="remove rollout.save or rollout.replay"
        )
    if rollout.replay is not None and data.draws_by_outcome:
        key = "data.mixture" if data.mixture else "data.curriculum"
        yield BrokenRule(
            values={"rollout.replay": str(rollout.replay), key: "..."},
            rule="the replay of a dump chooses no prompts, so it supports neither tasks nor levels",
            fix=f"remove {key}; all groups then use the advantage of `algorithm`",
        )
    if rollout.replay is not None and not train:
        yield BrokenRule(
            values={"train": False, "rollout.replay": str(rollout.replay)},
            rule="the run would have neither a trainer nor generators",
            fix="remove train: false or rollout.replay",
        )
    if not train and replay.fraction:
        yield BrokenRule(
            values={"train": False, "replay.fraction": replay.fraction},
            rule="replay requires training",
            fix="remove replay.fraction",
        )
