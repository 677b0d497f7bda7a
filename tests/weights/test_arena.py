"""Arenas shared by real processes: mappings, refusals, and the state after a crash."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.shared_memory import abandoned
from titanrl.weights.records import ArenaHandle, WeightMismatchError
from titanrl.weights.transport import Arena, MappedArena

OWNER = """
import sys, torch
from titanrl.weights.transport import Arena
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
    """A process that owns an arena and overwrites half of it on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        host, *numbers = self.process.stdout.readline().strip().split("|")
        pid, started, fd, num_bytes, self.sequence = map(int, numbers)
        self.handle = ArenaHandle(host, pid, started, fd, num_bytes)

    def overwrite_half(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "half\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def owner() -> Owner:
    return Owner()


def test_reader_shares_memory_with_the_owner(owner: Owner) -> None:
    mapped = MappedArena(owner.handle)
    assert mapped.sequence == owner.sequence
    assert mapped.data.tolist() == [0, 1, 2, 3, 4, 5]
    owner.overwrite_half()
    assert mapped.data.tolist() == [9, 9, 9, 3, 4, 5]
    owner.kill()


def test_sequence_number_is_odd_during_a_write(owner: Owner) -> None:
    mapped = MappedArena(owner.handle)
    owner.overwrite_half()
    assert mapped.sequence == owner.sequence + 1
    owner.kill()


def test_mapped_bytes_outlive_a_killed_owner(owner: Owner) -> None:
    before = abandoned()
    mapped = MappedArena(owner.handle)
    owner.kill()
    assert mapped.sequence == owner.sequence
    assert mapped.data.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(WeightMismatchError, match=f"process {owner.handle.pid}, which published the weights, is gone"):
        MappedArena(owner.handle)
    assert abandoned() <= before


def test_reused_pid_and_other_host_are_refused() -> None:
    arena = Arena(4)
    with pytest.raises(WeightMismatchError, match="is gone"):
        MappedArena(replace(arena.handle, started=arena.handle.started + 1))
    with pytest.raises(WeightMismatchError, match="another host"):
        MappedArena(replace(arena.handle, host="elsewhere"))
    arena.close()


def test_arena_has_fixed_size_and_read_only_readers() -> None:
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


def test_arena_may_be_empty() -> None:
    arena = Arena(0)
    assert arena.data.numel() == 0
    assert torch.equal(MappedArena(arena.handle).data, torch.empty(0, dtype=torch.uint8))
    arena.close()


def test_failed_write_keeps_the_odd_sequence_number() -> None:
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


NON_ROOT_READER = """
import ctypes, os, pickle, signal
from titanrl.weights.transport import Arena, MappedArena
from titanrl.weights.records import WeightMismatchError
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, cleared by setuid: lets processes of the same user read /proc
receiving, sending = os.pipe()
owner = os.fork()
if owner == 0:
    os.write(sending, pickle.dumps(Arena(4).handle))
    signal.pause()
handle = pickle.loads(os.read(receiving, 4096))
print(MappedArena(handle).sequence)

def print_error():
    try:
        MappedArena(handle)
    except WeightMismatchError as error:
        print(error)

os.kill(owner, signal.SIGKILL)
os.waitid(os.P_PID, owner, os.WEXITED | os.WNOWAIT)
print_error()  # the owner is a zombie, whose descriptors belong to root
os.waitpid(owner, 0)
print_error()
"""


def test_killed_owner_is_reported_to_readers_without_root() -> None:
    done = subprocess.run([sys.executable, "-c", NON_ROOT_READER], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[:1] == ["0"], done.stderr
    assert [", which published the weights, is gone" in line for line in lines[1:]] == [True, True], done.stderr
