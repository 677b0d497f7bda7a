"""The metrics of a run, scraped over HTTP and read with the parser of Prometheus' own client."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.ports import free_port
from titanrl.base.errors import TitanRLError
from titanrl.base.files import replace_text
from titanrl.carriers.record import HOST
from titanrl.serving.runs import MetricsServer

FIRST = {"step": 1, "version": 1, "time": 100.0, "reward/mean": 0.25, "time/train_s": 2.0, "time/step_s": 3.0}
SECOND = {"step": 2, "version": 2, "time": 103.5, "reward/mean": 0.5, "time/train_s": 1.5, "time/step_s": 2.0}
EVALUATION = {"step": 2, "version": 2, "time": 104.0, "eval/chain_sum/mean": 0.75}
STEPS: list[dict[str, Any]] = [FIRST | {"count/rollouts": 64}, SECOND | {"count/rollouts": 128}, EVALUATION]
EVENTS = [
    {"time": 99.0, "kind": "start", "step": 0},
    {"time": 101.0, "kind": "fault", "cause": "trainer_0 died"},
    {"time": 102.0, "kind": "drop", "step": 1, "groups": 3, "reason": "no signal"},
    {"time": 103.0, "kind": "drop", "step": 2, "groups": 2, "reason": "no signal"},
]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / 'a "run"'
    (folder / "logs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(lines(STEPS))
    (folder / "events.jsonl").write_text(lines(EVENTS))
    ended = subprocess.Popen([sys.executable, "-c", ""])  # not waited for
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for name, text in {
        "trainer_0": f"{os.getpid()} {HOST}",
        "generator_0_0": f"{ended.pid} {HOST}",
        "rollout_0_0": f"{2**22 + 7} {HOST}",  # above the largest id
        "rollout_1_0": f"{os.getpid()} elsewhere",
    }.items():
        (folder / "logs" / f"{name}.pid").write_text(text)
    return folder


@pytest.fixture
def server(run_dir: Path) -> Iterator[MetricsServer]:
    server = MetricsServer(run_dir, "127.0.0.1", free_port())
    yield server
    server.close()


def get(server: MetricsServer, path: str = "/metrics", **headers: str) -> str:
    request = urllib.request.Request(server.url + path, headers=headers)
    with urllib.request.urlopen(request, timeout=20) as response:
        text: str = response.read().decode()
        return text


def scrape(server: MetricsServer) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by its name and the values of its labels but `run`."""
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "run")): sample.value
        for family in text_string_to_metric_families(get(server))
        for sample in family.samples
    }


def test_scraped_numbers_are_those_of_the_files(server: MetricsServer) -> None:
    found = scrape(server)
    assert {key: value for key, value in found.items() if "requests" not in key[0]} == {
        ("titanrl_step",): 2,
        ("titanrl_version",): 2,
        ("titanrl_step_timestamp_seconds",): 103.5,
        ("titanrl_steps_total",): 2,
        ("titanrl_metric", "reward/mean"): 0.5,
        ("titanrl_metric", "time/train_s"): 1.5,
        ("titanrl_metric", "time/step_s"): 2.0,
        ("titanrl_metric", "eval/chain_sum/mean"): 0.75,
        ("titanrl_count_total", "rollouts"): 128,
        ("titanrl_phase_seconds_total", "train"): 3.5,
        ("titanrl_events_total", "start"): 1,
        ("titanrl_events_total", "fault"): 1,
        ("titanrl_events_total", "drop"): 2,
        ("titanrl_events_total", "host_lost"): 0,
        ("titanrl_events_total", "respawn"): 0,
        ("titanrl_events_total", "restart"): 0,
        ("titanrl_events_total", "stall"): 0,
        ("titanrl_dropped_groups_total", "no signal"): 5,
        ("titanrl_process_up", "trainer_0"): 1,
        ("titanrl_process_up", "generator_0_0"): 0,
        ("titanrl_process_up", "rollout_0_0"): 0,
    }
    families = {family.name: family for family in text_string_to_metric_families(get(server))}
    assert (families["titanrl_metric"].type, families["titanrl_count"].type) == ("gauge", "counter")
    assert all(sample.labels["run"] == 'a "run"' for sample in families["titanrl_metric"].samples)


def test_later_scrape_has_what_was_appended(server: MetricsServer, run_dir: Path) -> None:
    scrape(server)
    row = {"step": 3, "version": 3, "time": 106.0, "reward/mean": 0.6, "time/train_s": 1.0, "time/step_s": 1.0}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(lines([row]) + '{"step": 4, "rew')
    found = scrape(server)
    assert (found["titanrl_step",], found["titanrl_metric", "reward/mean"]) == (3, 0.6)
    assert found["titanrl_phase_seconds_total", "train"] == 4.5


def test_restart_from_an_earlier_step_removes_its_lines(server: MetricsServer, run_dir: Path) -> None:
    scrape(server)
    replace_text(run_dir / "metrics.jsonl", lines(STEPS[:1]))
    replace_text(run_dir / "events.jsonl", lines(EVENTS[:2]))
    found = scrape(server)
    assert (found["titanrl_step",], found["titanrl_steps_total",]) == (1, 1)
    assert found["titanrl_metric", "reward/mean"] == 0.25
    assert found["titanrl_phase_seconds_total", "train"] == 2.0
    assert found["titanrl_events_total", "fault"] == 1
    assert ("titanrl_dropped_groups_total", "no signal") not in found


def test_run_without_files_has_metrics(tmp_path: Path) -> None:
    server = MetricsServer(tmp_path, "::1", free_port())
    assert scrape(server)["titanrl_steps_total",] == 0
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server)


def test_only_metrics_and_health_are_served(server: MetricsServer) -> None:
    assert json.loads(get(server, "/health")) == {"status": "ok"}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server, "/metrics.jsonl")


def test_web_page_cannot_read_the_metrics_under_its_own_name(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(server, Host="attacker.example")


def test_port_in_use_is_named(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(TitanRLError, match=rf"logging.metrics_port: cannot listen on 127.0.0.1 port {port}: .*in use"):
            MetricsServer(run_dir, "127.0.0.1", port)
