"""Readers pull only complete and matching versions, even while a writer overwrites its arenas."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.shared_memory import abandoned
from tests.weights.processes import MemoryStore, publish_versions
from titanrl.config.sections import TransportName, Verify
from titanrl.weights.layout import PartOf
from titanrl.weights.records import ArenaHandle, Commit, WeightManifest, WeightMismatchError
from titanrl.weights.transport import MappedArena, Targets, WeightPublisher, WeightReader

STATE = {"norm.weight": torch.arange(6.0).view(2, 3), "head.weight": torch.ones(2)}


def publish(
    store: Any, version: int, state: dict[str, torch.Tensor], verify: Verify = "sampled"
) -> tuple[Commit, WeightPublisher]:
    publisher = WeightPublisher("run", 0, store, torch.float32, ["arena"], verify)
    return Commit(version, (asyncio.run(publisher.publish(version, state)),)), publisher


def pull(reader: WeightReader, commit: Commit, targets: Targets) -> None:
    async def run() -> None:
        (await reader.fetch(commit)).copy_into(targets)

    asyncio.run(run())


# Tensors that do not fit

WRONG = {
    r"tensors not published: \['extra.weight'\]": STATE | {"extra.weight": torch.ones(1)},
    r"published but not expected: \['head.weight'\]": {"norm.weight": torch.zeros(2, 3)},
    r"norm.weight: published as torch.float32\[2, 3\], expected as torch.float32\[3, 2\]": STATE
    | {"norm.weight": torch.zeros(3, 2)},
    r"head.weight: published as torch.float32\[2\], expected as torch.bfloat16\[2\]": STATE
    | {"head.weight": torch.zeros(2, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("text", WRONG)
def test_mismatched_tensor_is_reported_before_anything_is_written(text: str) -> None:
    store: Any = MemoryStore()
    commit, _publisher = publish(store, 1, STATE)
    targets = {name: torch.full_like(value, -1) for name, value in WRONG[text].items()}
    with pytest.raises(WeightMismatchError, match=text):
        pull(WeightReader("run", store), commit, targets)
    assert all((value == -1).all() for value in targets.values())


def test_manifests_of_another_version_and_unknown_layouts_are_refused() -> None:
    store: Any = MemoryStore()
    commit, _publisher = publish(store, 1, STATE)
    with pytest.raises(WeightMismatchError, match=r"version 2: the manifests of ranks \[0\] are of another version"):
        pull(WeightReader("run", store), Commit(2, commit.manifests), {})
    store.values.clear()
    with pytest.raises(WeightMismatchError, match=r"layout .* of the weights is not in the store"):
        pull(WeightReader("run", store), commit, {})


def test_layout_is_stored_once_and_read_once() -> None:
    store: Any = MemoryStore()
    publisher = WeightPublisher("run", 0, store, torch.float32, ["arena"])
    reader = WeightReader("run", store)
    targets = {name: torch.zeros_like(value) for name, value in STATE.items()}
    for version in (1, 2, 3):
        state = {name: value + version for name, value in STATE.items()}
        pull(reader, Commit(version, (asyncio.run(publisher.publish(version, state)),)), targets)
        assert all(torch.equal(targets[name], state[name]) for name in state)
        plan, store.values = reader.plan, {}  # later versions name the layout only
    assert reader.plan is plan


@pytest.mark.parametrize(("verify", "is_found"), [("off", False), ("sampled", True), ("full", True)])
def test_digest_detects_bytes_that_changed_after_publication(verify: Verify, is_found: bool) -> None:
    store: Any = MemoryStore()
    commit, publisher = publish(store, 1, STATE, verify)
    publisher._arenas[0].data[0] += 1
    targets = {name: torch.zeros_like(value) for name, value in STATE.items()}
    if is_found:
        with pytest.raises(WeightMismatchError, match=f"version 1 of rank 0 does not match its published digest .{verify}"):
            pull(WeightReader("run", store), commit, targets)
    else:
        pull(WeightReader("run", store), commit, targets)


def test_slow_reader_keeps_its_version_when_only_even_versions_are_published() -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, ["arena"]), WeightReader("run", store)
    state, targets = {"w": torch.zeros(5)}, {"w": torch.full((5,), -1.0)}

    async def publish(version: int) -> Commit:
        state["w"].fill_(version)
        return Commit(version, (await publisher.publish(version, state),))

    async def scenario() -> None:
        for version in (0, 2, 4, 6):
            slow = await reader.fetch(await publish(version))
            newer = await publish(version + 20)
            slow.copy_into(targets)  # the previous publication is still readable
            assert targets["w"].tolist() == [version] * 5
            (await reader.fetch(newer)).copy_into(targets)
            assert targets["w"].tolist() == [version + 20] * 5

    asyncio.run(scenario())


@pytest.mark.parametrize(("transport", "num_kept"), [("arena", 2), ("store", 0)])
def test_only_memory_of_later_versions_is_kept_alive(transport: TransportName, num_kept: int) -> None:
    store: Any = MemoryStore()
    publisher, reader = WeightPublisher("run", 0, store, torch.float32, [transport]), WeightReader("run", store)
    targets = {name: torch.zeros_like(value) for name, value in STATE.items()}
    for version in range(5):
        state = {name: value + version for name, value in STATE.items()}
        pull(reader, Commit(version, (asyncio.run(publisher.publish(version, state)),)), targets)
        assert all(torch.equal(targets[name], state[name]) for name in state)
    assert len(reader.plan._copies) == num_kept


def test_empty_tensor_is_pulled_with_the_others() -> None:
    store: Any = MemoryStore()
    state = STATE | {"empty.weight": torch.zeros(0, 3)}
    commit, _publisher = publish(store, 1, state)
    targets = {name: torch.zeros_like(value) for name, value in state.items()}
    pull(WeightReader("run", store), commit, targets)
    assert all(torch.equal(targets[name], state[name]) for name in state)


def test_matrix_and_its_transposed_view_are_both_pulled() -> None:
    store: Any = MemoryStore()
    weight = torch.arange(9.0).view(3, 3)
    commit, _publisher = publish(store, 1, {"w": weight, "transposed": weight.T})
    targets = {"w": torch.zeros(3, 3), "transposed": torch.zeros(3, 3)}
    pull(WeightReader("run", store), commit, targets)
    assert torch.equal(targets["w"], weight)
    assert torch.equal(targets["transposed"], weight.T)


def transpose_in_place(targets: dict[str, torch.Tensor]) -> None:
    targets["w"].data = targets["w"].data.T


def move_in_place(targets: dict[str, torch.Tensor]) -> None:
    targets["w"].data = torch.zeros(2, 2)


def replace_in_mapping(targets: dict[str, torch.Tensor]) -> None:
    targets["w"] = torch.zeros(2, 2)


@pytest.mark.parametrize("change", [transpose_in_place, move_in_place, replace_in_mapping])
def test_reader_detects_changed_targets_in_the_same_mapping(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    store: Any = MemoryStore()
    state = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    commit, _publisher = publish(store, 1, state)
    reader, targets = WeightReader("run", store), {"w": torch.zeros(2, 2)}
    pull(reader, commit, targets)
    change(targets)
    pull(reader, commit, targets)
    assert torch.equal(targets["w"], state["w"])


def test_reader_refuses_a_target_that_was_reshaped() -> None:
    store: Any = MemoryStore()
    commit, _publisher = publish(store, 1, {"w": torch.ones(2, 3)})
    reader, targets = WeightReader("run", store), {"w": torch.zeros(2, 3)}
    pull(reader, commit, targets)
    targets["w"].data = targets["w"].data.view(3, 2)
    with pytest.raises(WeightMismatchError, match=r"w: published as torch.float32\[2, 3\], expected as torch.float32\[3, 2\]"):
        pull(reader, commit, targets)


# Readers that hold one part


def test_ranks_with_uneven_parts_each_get_their_rows() -> None:
    store: Any = MemoryStore()
    state = {"embed.weight": torch.arange(21.0).view(7, 3)}
    commit, _publisher = publish(store, 1, state)
    for rows in ((0, 4), (4, 7), (7, 7)):
        local = torch.zeros(rows[1] - rows[0], 3)
        pull(WeightReader("run", store), commit, {"embed.weight": PartOf(local, (7, 3), (rows[0], 0))})
        assert torch.equal(local, state["embed.weight"][slice(*rows)])
    outside = PartOf(torch.zeros(4, 3), (7, 3), (4, 0))
    with pytest.raises(WeightMismatchError, match=r"embed\.weight: only 9 of 12 elements published"):
        pull(WeightReader("run", store), commit, {"embed.weight": outside})


# Writers that overwrite without waiting


class WriterProcess:
    """A separate process that publishes versions without a pause."""

    def __init__(self, num_versions: int, pause_after: int, num_tensors: int, numel: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=publish_versions, args=(theirs, num_versions, pause_after, num_tensors, numel))
        self.process.start()

    def next_manifest(self) -> tuple[WeightManifest, dict[str, Any]]:
        received: tuple[WeightManifest, dict[str, Any]] = self.pipe.recv()
        return received

    def stop_in_mid_push(self, newest: WeightManifest) -> tuple[WeightManifest, ArenaHandle]:
        """Freeze the process while it writes an arena; return the newest manifest that it sent, and the arena."""
        arenas: dict[ArenaHandle, MappedArena] = {}
        assert self.process.pid is not None
        while True:
            newest = drain(self.pipe, newest)
            (handle,) = newest.handles
            assert isinstance(handle, ArenaHandle)
            arenas.setdefault(handle, MappedArena(handle))
            os.kill(self.process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
            for handle, arena in arenas.items():
                if arena.sequence % 2:
                    return drain(self.pipe, newest), handle
            os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


@pytest.fixture
def writer(request: pytest.FixtureRequest) -> Iterator[WriterProcess]:
    process = WriterProcess(*request.param)
    yield process
    process.stop()


def drain(pipe: Connection, newest: WeightManifest) -> WeightManifest:
    """Return the newest manifest that has arrived."""
    while pipe.poll():
        newest, _ = pipe.recv()
    return newest


@pytest.mark.parametrize(
    ("writer", "numel"),
    [((200, 0, 8, numel), numel) for numel in (50_000, 300_000)],  # below and above the total from which copies are streamed
    indirect=["writer"],
)
def test_reader_racing_with_200_versions_never_accepts_a_mixture(writer: WriterProcess, numel: int) -> None:
    manifest, values = writer.next_manifest()
    store: Any = MemoryStore(values)
    reader = WeightReader("run", store)
    targets = {f"w{number}": torch.zeros(numel) for number in range(8)}
    whole = 0
    refusals: list[str] = []
    while manifest.version < 200:
        manifest = drain(writer.pipe, manifest)
        try:
            pull(reader, Commit(manifest.version, (manifest,)), targets)
        except WeightMismatchError as error:
            refusals.append(str(error))
            continue
        assert all((target == manifest.version).all() for target in targets.values())
        whole += 1
    assert all("was overwritten while it was read" in refusal for refusal in refusals), refusals
    assert whole > 0, "no version was read completely"


@pytest.mark.parametrize("writer", [(1_000_000, 2, 4, 16_000_000)], indirect=True)
def test_committed_version_stays_readable_after_writer_is_killed(writer: WriterProcess) -> None:
    before = abandoned()
    (first, values), (second, _) = writer.next_manifest(), writer.next_manifest()
    store: Any = MemoryStore(values)
    reader = WeightReader("run", store)
    targets = {f"w{number}": torch.zeros(16_000_000) for number in range(4)}
    for manifest in (first, second):
        pull(reader, Commit(manifest.version, (manifest,)), targets)
    writer.pipe.send("go on")
    newest, half = writer.stop_in_mid_push(second)
    writer.stop()

    pull(reader, Commit(newest.version, (newest,)), targets)
    assert all((target == newest.version).all() for target in targets.values())
    torn = replace(newest, version=newest.version + 1, handles=(half,), sequence=newest.sequence + 2, digest=None)
    with pytest.raises(WeightMismatchError, match=r"was overwritten while it was read \(sequence \d*[13579], "):
        pull(reader, Commit(torn.version, (torn,)), targets)
    with pytest.raises(WeightMismatchError, match=f"process {writer.process.pid}, which published the weights, is gone"):
        pull(WeightReader("run", store), Commit(newest.version, (newest,)), targets)
    assert abandoned() <= before
