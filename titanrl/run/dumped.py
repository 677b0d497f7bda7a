"""Base of runs that save their rollouts to a dump, or replay a dump instead of sampling."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from titanrl.base.plugins import Plugins
from titanrl.carriers.dumps import DumpBatches, DumpInfo, DumpReader, fingerprint, holds_dump, read_info
from titanrl.config import Config, ConfigError, Source
from titanrl.config.errors import BrokenRule
from titanrl.config.explain import explain_rule
from titanrl.launch.roles import Roles
from titanrl.metrics.console import Console
from titanrl.replay.groups import Batch
from titanrl.run.evaluated import EvaluatedRun
from titanrl.run.lifecycle import expect_config
from titanrl.run.progress import Resumable


class DumpedRun(EvaluatedRun):
    """Base of loops with rollouts, which adds writing (`rollout.save`) and replaying (`rollout.replay`) dumps."""

    def __init__(
        self,
        config: Config,
        *,
        resume: Path | None = None,
        console: Console | None = None,
        source: Source | None = None,
        accepts_changed_data: bool = False,
        **objects: object,
    ) -> None:
        """Check the dump folders; see `Lifecycle` for the arguments.

        Raises:
            ConfigError: `train: false` needs another class, or a check fails.
        """
        expect_config(self, config)
        save, replay = config.rollout.save, config.rollout.replay
        if not isinstance(self, self.for_config(config)):
            rule = BrokenRule(
                values={"train": False}, rule=f"{type(self).__name__} trains", fix="use titanrl.commands.generation.Generation"
            )
            raise ConfigError(explain_rule(rule, source))
        super().__init__(
            config,
            resume=resume,
            console=console,
            source=source,
            accepts_changed_data=accepts_changed_data,
            **objects,
        )
        self._dump = None if save is None else DumpBatches(save.resolve())
        self._recorded = None if replay is None else DumpReader(replay.resolve())

    @classmethod
    def check(
        cls,
        config: Config,
        *,
        resume: Path | None = None,
        source: Source | None = None,
        plugins: Plugins | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        accepts_changed_data: bool = False,
    ) -> Resumable:
        """Check also that `rollout.save` does not hold the dump of another run; see `Lifecycle.check`."""
        save = config.rollout.save
        if save is not None and holds_dump(save) and (resume is None or read_info(save).run != config.name):
            fix = "choose another folder, remove this one, or resume its run with --resume"
            rule = BrokenRule(values={"rollout.save": str(save)}, rule="the folder holds the dump of another run", fix=fix)
            raise ConfigError(explain_rule(rule, source))
        return super().check(
            config,
            resume=resume,
            source=source,
            plugins=plugins,
            meanwhile=meanwhile,
            accepts_changed_data=accepts_changed_data,
        )

    def roles(self) -> Roles:
        """Return all roles, except generators in a replay."""
        return Roles(generators=self._recorded is None, rollouts=True)

    @property
    def ends_early(self) -> bool:
        """True if evaluations have stopped improving (see `EvaluatedRun`), or if all batches of the dump are used."""
        return super().ends_early or (self._num_recorded is not None and self.state.step >= self._num_recorded)

    def due_evaluations(self, *, is_last: bool) -> Sequence[str]:
        """Return the evaluation sets due after this step; none without generators."""
        return super().due_evaluations(is_last=is_last) if self.config.evaluates else ()

    async def finish_parts(self) -> None:
        """Wait until the dump's list of batches is on disk."""
        if self._dump is not None:
            self._dump.flush()

    def open_dump(self) -> None:
        """Prepare the dump folder for the run's current state, and say how much of a dump is replayed."""
        state, vocabulary = self.state, self.session.tokenizer.vocabulary
        info = DumpInfo(
            run=self.config.name,
            groups_per_step=self.config.rollout.groups_per_step,
            tokenizer=fingerprint(vocabulary),
            vocabulary=len(vocabulary),
        )
        if self._dump is not None:
            self._dump.begin(info, step=state.step, next_index=state.next_index, in_flight=state.in_flight)
        if self._recorded is None:
            return
        assert self._recorded.info.tokenizer == info.tokenizer, "checked before the start"
        num_steps, wanted = self._num_recorded or 0, self.config.num_steps
        ending = f"; it has no more batches, so training ends after step {num_steps}" if num_steps < wanted else ""
        self.console.note(f"replay: {min(num_steps, wanted)} batches of {self._recorded.folder}, without evaluations{ending}")

    def save_batch(self, batch: Batch) -> None:
        """Add the batch of the current step to the dump."""
        if self._dump is None:
            return
        groups = batch.records.by_index().groups["index"].tolist()
        replayed = [] if batch.replayed is None else batch.replayed.records.groups["index"].tolist()
        self._dump.add(self.state.step + 1, self.state.version, groups, replayed)

    def drop_saved(self, indices: Collection[int]) -> None:
        """Remove the saved rollouts of prompts that will be sampled again."""
        if self._dump is not None and indices:
            self._dump.drop(lambda index: index in indices)

    @property
    def _num_recorded(self) -> int | None:
        """Number of steps to replay, rounded down to a multiple of `updates_per_publish`; None without a replay."""
        if self._recorded is None:
            return None
        return self._recorded.num_steps - self._recorded.num_steps % self.config.algorithm.updates_per_publish
