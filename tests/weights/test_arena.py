"""Arenas between real processes: what is shared, what is refused, what a crash leaves."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from titanrl.weights.arena import Arena, MappedArena
from titanrl.weights.manifest import ArenaHandle, WeightMismatchError

OWNER = """
import sys, torch
from titanrl.weights.arena import Arena
arena = Arena(6)
with arena.writing() as data:
    data.copy_(torch.arange(6, dtype=torch.uint8))
handle = arena.handle
print(handle.host, handle.pid, handle.started, handle.fd, handle.num_bytes, arena.sequence, sep="|", flush=True)
sys.stdin.readline()
with arena.writing() as data:
    data[:3] = 9
    print("half", flush=True)
    sys.stdin.readline()
"""


class Owner:
    """A process that publishes an arena, and half overwrites it when told."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        host, *numbers = self.process.stdout.readline().strip().split("|")
        pid, started, fd, num_bytes, self.sequence = map(int, numbers)
        self.handle = ArenaHandle(host, pid, started, fd, num_bytes)

    def overwrite_half(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "half\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def owner() -> Owner:
    return Owner()


def test_a_reader_sees_what_another_process_wrote_without_a_copy(owner: Owner) -> None:
    mapped = MappedArena(owner.handle)
    assert mapped.sequence == owner.sequence
    assert mapped.data.tolist() == [0, 1, 2, 3, 4, 5]
    owner.overwrite_half()
    assert mapped.data.tolist() == [9, 9, 9, 3, 4, 5]
    owner.kill()


def test_a_read_that_meets_a_write_sees_it_at_the_sequence_number(owner: Owner) -> None:
    mapped = MappedArena(owner.handle)
    owner.overwrite_half()
    assert mapped.sequence == owner.sequence + 1
    owner.kill()


def test_a_killed_owner_leaves_attached_readers_their_bytes_and_nothing_else(owner: Owner) -> None:
    before = set(os.listdir("/dev/shm"))
    mapped = MappedArena(owner.handle)
    owner.kill()
    assert mapped.sequence == owner.sequence
    assert mapped.data.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(WeightMismatchError, match=f"process {owner.handle.pid}, which published the weights, is gone"):
        MappedArena(owner.handle)
    assert set(os.listdir("/dev/shm")) <= before


def test_a_reused_pid_and_another_host_are_not_mistaken_for_the_owner() -> None:
    arena = Arena(4)
    with pytest.raises(WeightMismatchError, match="is gone"):
        MappedArena(replace(arena.handle, started=arena.handle.started + 1))
    with pytest.raises(WeightMismatchError, match="another host"):
        MappedArena(replace(arena.handle, host="elsewhere"))
    arena.close()


def test_an_arena_cannot_shrink_under_its_readers_and_readers_cannot_write() -> None:
    arena = Arena(1 << 16)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.handle.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(arena.handle.fd, 1 << 20)
    maps = Path("/proc/self/maps").read_text()
    mapped = MappedArena(arena.handle)
    (line,) = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "titanrl-weights" in line and line not in maps
    ]
    assert " r--s " in line
    assert mapped.data.numel() == 1 << 16
    arena.close()


def test_an_arena_of_nothing_is_possible() -> None:
    arena = Arena(0)
    assert arena.data.numel() == 0
    assert torch.equal(MappedArena(arena.handle).data, torch.empty(0, dtype=torch.uint8))
    arena.close()


def test_a_write_that_failed_marks_the_arena_until_the_next_one() -> None:
    arena = Arena(4)
    mapped = MappedArena(arena.handle)

    def fail() -> None:
        with arena.writing():
            raise RuntimeError("half written")

    with pytest.raises(RuntimeError, match="half written"):
        fail()
    assert mapped.sequence % 2 == 1
    with arena.writing():
        assert mapped.sequence % 2 == 1
    assert mapped.sequence == arena.sequence == 4
    arena.close()
