"""Choice of CPU cores, and processes bound to them."""

import os
import subprocess
import sys

import pytest

from titanrl.config import Config
from titanrl.config.sections import HostsConfig
from titanrl.processes.machine import Cores, bind, chosen_cores, numa_nodes, numbers
from titanrl.processes.variables import broken_by_cores

NODES = [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_linux_cpu_lists_are_parsed() -> None:
    assert numbers("0-3,8") == {0, 1, 2, 3, 8}
    assert numbers("\n") == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("split 0 2", {0, 1, 2, 3}),
        ("split 1 2", {4, 5, 6, 7}),
        ("split 1 3", {2, 3, 4}),
        ("split 9 16", {4}),
        ("numa 0 2", {0, 1, 2, 3}),
        ("numa 1 2", {4, 5, 6, 7}),
        ("numa 1 4", {0, 1, 2, 3}),
        ("numa 3 4", {4, 5, 6, 7}),
        ("0-1,6 5 8", {0, 1, 6}),
        ("6-9 0 1", {6, 7}),
        ("64 0 1", set()),
    ],
)
def test_cores_by_share_node_or_number(text: str, expected: set[int]) -> None:
    assert chosen_cores(text, range(8), NODES) == expected


def test_nodes_without_usable_cores_are_skipped() -> None:
    assert chosen_cores("numa 0 1", [4, 5], NODES) == {4, 5}
    assert chosen_cores("numa 0 1", [0, 1], []) == set()


def test_shares_cover_all_cores_without_overlap() -> None:
    for count in (1, 2, 3, 5, 8):
        cores = Cores("split", 0, count)
        shares = [chosen_cores(cores.text(number), range(8), []) for number in range(count)]
        assert sorted(core for share in shares for core in share) == list(range(8))


def test_bound_process_and_its_children_use_only_their_cores() -> None:
    core = max(os.sched_getaffinity(0))
    code = (
        f"import os, subprocess, sys; from titanrl.processes.machine import bind; bind('{core} 0 1'); "
        "print(os.sched_getaffinity(0)); sys.stdout.flush(); "
        "subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{{{core}}}"] * 2


def test_cores_that_the_host_lacks_change_nothing() -> None:
    before = os.sched_getaffinity(0)
    bind("100000 0 1")
    assert os.sched_getaffinity(0) == before


def test_nodes_of_this_machine_have_its_cores() -> None:
    nodes = numa_nodes()
    if not nodes:
        pytest.skip("this kernel shows no NUMA nodes")
    assert os.sched_getaffinity(0) <= set().union(*nodes)


def test_cores_that_this_machine_lacks_are_refused_before_the_start() -> None:
    config = Config(name="a", num_steps=1, placement={"cpus": {"store": "99990-99999", "trainer": "numa"}})  # type: ignore[arg-type]
    (broken,) = broken_by_cores(config)
    assert broken.values == {"placement.cpus.store": "99990-99999"}
    elsewhere = config.model_copy(update={"hosts": HostsConfig(kind="slurm")})
    assert list(broken_by_cores(elsewhere)) == []
