"""`titanrl doctor --config` on this machine, with real probes. `tests/cluster/test_doctor.py` has separate hosts."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from titanrl.commands.doctor import main
from titanrl.hosts.holder import MISSING, digest_of, memory_limit

REPO = Path(__file__).parents[1]


def doctor(folder: Path, *overrides: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "titanrl.commands", "doctor", "--config", "quickstart", "device=cpu", "--json"]
    return subprocess.run(
        [*prefix, *command, f"output_dir={folder}", *overrides],
        cwd=REPO,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def found_by(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_this_machine_is_one_host(tmp_path: Path) -> None:
    done = doctor(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = found_by(done)
    assert found["ready"]
    assert [host["node"] for host in found["hosts"]] == [socket.gethostname()]
    assert found["hosts"][0]["report"]["shares_runs"]
    assert found["hosts"][0]["report"]["versions"]["torchmonarch"]
    assert found["links"] == []
    assert list(tmp_path.iterdir()) == []


def test_emulated_hosts_are_connected_with_each_other(tmp_path: Path) -> None:
    done = doctor(tmp_path, "hosts.kind=process")
    assert done.returncode == 0, done.stdout + done.stderr
    links = found_by(done)["links"]
    name = socket.gethostname()
    assert {(link["source"], link["target"]) for link in links} == {(f"{name}:0", f"{name}:1"), (f"{name}:1", f"{name}:0")}
    assert all(link["closed"] == {} and 0 < link["latency_s"] < 1 and link["bytes_per_s"] > 1e6 for link in links)


def test_missing_model_and_memory_limit_are_reported(tmp_path: Path) -> None:
    limited = ("bash", "-c", 'ulimit -v 1500000; exec "$@"', "sh")
    done = doctor(tmp_path, "warm_start=null", f"model.path={tmp_path}/none", prefix=limited)
    assert done.returncode == 1, done.stdout + done.stderr
    first, second = sorted(problem["what"] for problem in found_by(done)["problems"])
    assert first.startswith("1.5 GB of memory (ulimit -v, of each process)")
    assert second == "model.path is missing"


def test_text_has_a_table_and_a_verdict(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "titanrl.commands",
        "doctor",
        "--config",
        "quickstart",
        f"output_dir={tmp_path}",
        "device=cpu",
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=100, check=False)
    assert "Ready: the hosts fit this configuration." in done.stdout
    assert "Equal on all hosts: python" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["num_steps=no"], "num_steps"),
        (["hosts.kind=launcher", "hosts.trusted_network=true"], "torchrun, srun or mpirun"),
        (["hosts.kind=kubernetes", "hosts.trusted_network=true"], "hosts.kubernetes.image"),
    ],
    ids=["wrong value", "launcher without processes", "pods without an image"],
)
def test_wrong_configuration_exits_with_2(
    overrides: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", "quickstart", "device=cpu", "--json", f"output_dir={tmp_path}"]
    with pytest.raises(SystemExit, match=r"^2$"):
        main([*options, *overrides], prog="titanrl doctor")
    assert text in capsys.readouterr().err


def launched(
    tmp_path: Path, overrides: Mapping[int, list[str]], paths: Mapping[int, list[Path]]
) -> tuple[list[int], list[str]]:
    """Run the command as two processes of a launcher; return their exit codes and outputs."""
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    options = ["device=cpu", "hosts.kind=launcher", "hosts.trusted_network=true", f"output_dir={tmp_path}/runs"]
    command = [sys.executable, "-m", "titanrl.commands", "doctor", "--config", "quickstart", *options]
    ranks = []
    for rank in range(2):
        path = os.pathsep.join(map(str, [*paths.get(rank, []), REPO, *filter(None, [os.environ.get("PYTHONPATH")])]))
        ranks.append(
            subprocess.Popen(
                [*command, *overrides.get(rank, [])],
                cwd=REPO,
                env=os.environ | variables | {"RANK": str(rank), "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], outputs


def test_different_torch_version_on_one_rank_is_found(tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "torch-1.0.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    codes, outputs = launched(tmp_path, {}, {1: [fake.parent]})
    assert codes == [1, 1], outputs
    name = socket.gethostname()
    assert f"{name}:1: torch 1.0.0, but {name}:0 has 2." in outputs[0]
    assert "Not ready." in outputs[0]


def test_wrong_configuration_of_one_rank_ends_both_with_2(tmp_path: Path) -> None:
    codes, outputs = launched(tmp_path, {1: ["num_steps=no"]}, {})
    assert codes == [2, 2], outputs
    assert "(rank 1): " in outputs[0]
    assert "num_steps" in outputs[1]
    assert "Traceback" not in "".join(outputs)


def test_folders_are_compared_by_names_sizes_and_settings(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    (first / "config.json").write_text("{}")
    (first / "model.safetensors").write_bytes(b"1234")
    shutil.copytree(first, second)
    assert digest_of(first) == digest_of(second)
    (second / "config.json").write_text("[]")
    assert digest_of(first) != digest_of(second)
    assert digest_of(tmp_path / "c") == MISSING


def test_memory_never_exceeds_the_machine() -> None:
    memory, limited_by = memory_limit()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory <= pages
    assert (limited_by == "") == (memory == pages)


@pytest.mark.parametrize("arguments", [["gpu"], ["verifiers"], ["cpu", "cuda"], ["--install", "--config", "quickstart"]])
def test_wrong_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(arguments, prog="titanrl doctor")
    assert "error:" in capsys.readouterr().err
