"""The dumps of a run: rollouts that it saves (`rollout.save`), or that it trains on instead of sampling (`rollout.replay`)."""

from collections.abc import Collection
from pathlib import Path

from titanrl.carriers.dumps import DumpBatches, DumpInfo, DumpReader, fingerprint, holds_dump, read_info
from titanrl.config import Config, ConfigError, Source
from titanrl.config.errors import BrokenRule
from titanrl.config.load import explain_rule
from titanrl.data.tokenizer import Tokenizer
from titanrl.metrics.console import Console
from titanrl.replay.groups import Batch
from titanrl.run.checkpoints import RunState


class Dump:
    """The dump that a run writes, and the one that it replays; both are optional."""

    def __init__(self, config: Config) -> None:
        """Open the dump to replay; `check_dump` has checked the folders."""
        save, replay = config.rollout.save, config.rollout.replay
        self._config = config
        self._saved = None if save is None else DumpBatches(save.resolve())
        self._replayed = None if replay is None else DumpReader(replay.resolve())

    @property
    def is_replay(self) -> bool:
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
    """Check that `rollout.save` does not hold the dump of another run.

    Raises:
        ConfigError: It does.
    """
    save = config.rollout.save
    if save is not None and holds_dump(save) and (resume is None or read_info(save).run != config.name):
        fix = "choose another folder, remove this one, or resume its run with --resume"
        rule = BrokenRule(values={"rollout.save": str(save)}, rule="the folder holds the dump of another run", fix=fix)
        raise ConfigError(explain_rule(rule, source))
