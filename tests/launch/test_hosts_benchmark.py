"""Figures of `benchmarks.hosts` from counters and metrics, with numbers worked out by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.hosts import TRAFFIC, traffic
from benchmarks.table import hosts_table


def test_bytes_are_counted_between_the_first_and_the_last_counted_step(tmp_path: Path) -> None:
    rows = [
        {"step": step, "ctl": [100 * step, 10 * step], "n1": [7 * step, 0], "n2": [1000 * step, 5], "n3": [0, 0]}
        for step in range(1, 10)
    ]
    file = tmp_path / TRAFFIC
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = traffic(file, [{"step": step, "count/prompts": 8 * step} for step in range(1, 10)])
    assert found == {
        "controller_bytes_per_group": 110 / 8,
        "n1_received_bytes_per_step": 7,
        "n2_received_bytes_per_step": 1000,
        "n3_received_bytes_per_step": 0,
    }
    assert traffic(tmp_path / "none", []) == {}


@pytest.mark.parametrize(("counted", "cell"), [({"controller_bytes_per_group": 1234.6}, "1,235"), ({}, "-")])
def test_table_has_a_column_for_each_case(counted: dict[str, float], cell: str) -> None:
    case = {"step_s": 0.25, "push_s": 0.002, "pull_s": 0.003, "times_over_the_network": 2.0, "version_bytes": 1.5e6}
    cases = {"1 host": {**case, "rewards": [0.5]}, "3 hosts": {**case, "rewards": [0.5], **counted}}
    machine = {"cores": 2, "processor": "Example", "commit": "abc"}
    lines = hosts_table({"emulation": "processes", "cases": cases, "machine": machine}).splitlines()
    assert lines[0] == "| | 1 host | 3 hosts |"
    assert "| weights over the network per version | 2 x 1.50 MB | 2 x 1.50 MB |" in lines
    assert any(
        line.startswith("| bytes through the controller's host per group |") and line.endswith(f"| {cell} |") for line in lines
    )
    assert lines[-1].endswith("hosts emulated by processes, 2 cores of an Example, commit abc.")
