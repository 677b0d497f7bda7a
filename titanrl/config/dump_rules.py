"""The rules of dumps of rollouts, and of runs with only one of the two sides."""

from collections.abc import Iterator

from titanrl.config.choices import Program
from titanrl.config.errors import BrokenRule
from titanrl.config.mixture import RunDataConfig
from titanrl.config.replay import ReplayConfig
from titanrl.config.sections import RolloutConfig


def broken_by_dump(
    rollout: RolloutConfig, replay: ReplayConfig, data: RunDataConfig, *, train: bool, program: Program
) -> Iterator[BrokenRule]:
    """Yield the rules that `rollout.save`, `rollout.replay` and `train` break.

    Args:
        rollout: Section with the folders.
        replay: Groups that are trained on again.
        data: Tasks and levels.
        train: False without a trainer.
        program: Subcommand of the configuration.
    """
    given = {"rollout.save": rollout.save, "rollout.replay": rollout.replay}
    values: dict[str, object] = {key: str(path) for key, path in given.items() if path is not None}
    if not train:
        values["train"] = False
    if program != "train":
        for key, value in values.items():
            yield BrokenRule(values={key: value}, rule=f"titanrl {program} has no groups of rollouts", fix=f"remove {key}")
        return
    if rollout.replay is not None and rollout.save is not None:
        yield BrokenRule(
            values=values, rule="a replay samples nothing that could be saved", fix="remove rollout.save or rollout.replay"
        )
    if rollout.replay is not None and data.draws_by_outcome:
        key = "data.mixture" if data.mixture else "data.curriculum"
        yield BrokenRule(
            values={"rollout.replay": str(rollout.replay), key: "..."},
            rule="a replay draws no prompts, so it has neither tasks nor levels",
            fix=f"remove {key}; the advantages are then those of `algorithm`",
        )
    if rollout.replay is not None and not train:
        yield BrokenRule(
            values={"train": False, "rollout.replay": str(rollout.replay)},
            rule="without trainer and generators nothing is left to run",
            fix="remove train or rollout.replay",
        )
    if not train and replay.fraction:
        yield BrokenRule(
            values={"train": False, "replay.fraction": replay.fraction},
            rule="groups are replayed to train on them again, and nothing is trained",
            fix="remove replay.fraction",
        )
