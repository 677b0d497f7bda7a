"""Versions that the trainer keeps for the proximal and reference policies, and versions it computes with."""

import asyncio
from typing import Any

import numpy as np
import pytest

from titanrl.carriers.tables import SEQUENCE, MicroBatch, RowTable
from titanrl.config.algorithm import AVERAGE, AlgorithmConfig, KLConfig
from titanrl.config.sections import CheckpointConfig
from titanrl.launch.trainer_mesh import PastPolicies, PastVersions

NO_CHECKPOINTS = CheckpointConfig(every_steps=0)
NO_ROWS = RowTable(np.zeros(0, SEQUENCE), np.zeros(0, np.int64))
TWO_RANKS = MicroBatch(rows=(NO_ROWS, NO_ROWS))


class Copies:
    """Fake trainer that keeps versions."""

    def __init__(self) -> None:
        self.version = 0
        self.held: set[int] = set()
        self.computed: list[int] = []
        self.shared: list[int] = []

    async def keep_weights(self) -> int:
        self.held.add(self.version)
        return self.version

    async def drop_weights(self, version: int) -> None:
        self.held.remove(version)

    async def compute_logprobs(self, microbatch: Any, *, at_version: int, is_reference: bool) -> None:
        assert at_version in self.held or at_version in (self.version, AVERAGE)
        self.computed.append(at_version)

    async def share_logprobs(self, version: int) -> None:
        self.shared.append(version)


def walk(
    copies: Copies, algorithm: AlgorithmConfig, checkpoint: CheckpointConfig, **passes: int
) -> list[tuple[PastVersions, set[int]]]:
    """Take six steps with a publication after every second one; return past versions and held copies of each."""

    async def run() -> list[tuple[PastVersions, set[int]]]:
        past = PastPolicies(copies, algorithm, checkpoint, **passes)  # type: ignore[arg-type]
        await past.start()
        found = []
        for version in range(6):
            copies.version = version
            published = version - version % algorithm.updates_per_publish
            versions = await past.compute([TWO_RANKS], version=version, published=published)
            assert past.kept in (None, published)
            found.append((versions, set(copies.held)))
        return found

    return asyncio.run(run())


@pytest.mark.parametrize("checkpoint", [CheckpointConfig(), CheckpointConfig(every_steps=0, on_interrupt=True)])
def test_published_weights_are_kept_for_a_checkpoint_between_publications(checkpoint: CheckpointConfig) -> None:
    copies = Copies()
    found = walk(copies, AlgorithmConfig(updates_per_publish=2), checkpoint)
    assert [held for _, held in found] == [{0}, {0}, {2}, {2}, {4}, {4}]
    assert copies.computed == []


def test_no_weights_are_kept_if_no_checkpoint_can_need_them() -> None:
    copies = Copies()
    found = walk(copies, AlgorithmConfig(updates_per_publish=2), NO_CHECKPOINTS)
    assert found == [(PastVersions(), set())] * 6


def test_ratio_that_starts_at_the_publication_keeps_its_weights_without_checkpoints() -> None:
    copies = Copies()
    algorithm = AlgorithmConfig(updates_per_publish=2, proximal="interval_start")
    found = walk(copies, algorithm, NO_CHECKPOINTS)
    assert [past.proximal for past, _ in found] == [None, 0, None, 2, None, 4]
    assert [held for _, held in found] == [{0}, {0}, {2}, {2}, {4}, {4}]


async def test_kept_weights_of_a_resumed_interval_are_dropped_after_it() -> None:
    copies = Copies()
    past = PastPolicies(copies, AlgorithmConfig(updates_per_publish=2), NO_CHECKPOINTS)  # type: ignore[arg-type]
    copies.held, copies.version = {4}, 5
    past.resume(4)
    await past.compute([], version=5, published=4)
    assert (past.kept, copies.held) == (4, {4})
    await past.compute([], version=6, published=6)
    assert past.kept is None
    assert copies.held == set()


def test_initial_reference_is_kept_and_the_moving_average_is_not() -> None:
    initial, average = Copies(), Copies()
    found = walk(initial, AlgorithmConfig(kl=KLConfig(coef=0.1), updates_per_publish=2), CheckpointConfig())
    assert [held for _, held in found] == [{0}, {0}, {0, 2}, {0, 2}, {0, 4}, {0, 4}]
    assert initial.computed == [0] * 6
    found = walk(average, AlgorithmConfig(kl=KLConfig(coef=0.1, reference="ema"), ema_decay=0.9), NO_CHECKPOINTS)
    assert found == [(PastVersions(reference=AVERAGE), set())] * 6
    assert average.computed == [AVERAGE] * 6


@pytest.mark.parametrize(("updates_per_publish", "started"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 0, 2, 2, 4, 4])])
def test_several_optimizer_steps_need_the_start_of_every_interval(updates_per_publish: int, started: list[int]) -> None:
    copies = Copies()
    algorithm = AlgorithmConfig(updates_per_publish=updates_per_publish, proximal="interval_start")
    found = walk(copies, algorithm, NO_CHECKPOINTS, num_minibatches=2)
    assert [past.proximal for past, _ in found] == copies.computed == started


def test_several_optimizer_steps_start_from_the_weights_before_the_first() -> None:
    copies = Copies()
    found = walk(copies, AlgorithmConfig(updates_per_publish=2, proximal="step_start"), NO_CHECKPOINTS, num_minibatches=2)
    assert [past.proximal for past, _ in found] == copies.computed == [0, 1, 2, 3, 4, 5]
    assert all(held == set() for _, held in found)


def test_ranks_share_values_only_for_later_epochs() -> None:
    for epochs, num_minibatches, shared in ((2, 1, [0, 1, 2, 3, 4, 5]), (1, 2, [])):
        copies = Copies()
        algorithm = AlgorithmConfig(proximal="step_start")
        walk(copies, algorithm, NO_CHECKPOINTS, epochs=epochs, num_minibatches=num_minibatches)
        assert copies.shared == shared
