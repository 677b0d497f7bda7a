"""Dumps of the shared run: saved, replayed without generators, and sampled without a trainer."""

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from tests.e2e.conftest import Finished, Start
from tests.e2e.test_kill_anywhere import curve, weights
from titanrl.carriers.dumps import DumpReader

PAGE = Path(__file__).parents[2] / "docs/howto/dump.md"


def test_replayed_synchronous_run_has_the_same_gradients(plain_run: Finished, start_run: Start) -> None:
    dump = plain_run.run_dir.parent / "dump"
    assert DumpReader(dump).batches == [list(range(8 * step, 8 * step + 8)) for step in range(4)]
    run = start_run("replayed", f"rollout.replay={dump}", "num_steps=6").finish()
    assert run.code == 0, run.output
    assert "training ends after step 4" in run.output
    assert not list((run.run_dir / "logs").glob("generator_*"))
    assert curve(run) == curve(plain_run)
    assert {"loss/policy", "grad/norm"} <= curve(run)[0].keys()
    assert weights(run.run_dir) == weights(plain_run.run_dir)
    assert run.evaluations() == []


def test_generation_without_a_trainer_saves_the_first_batch_of_training(plain_run: Finished, start_run: Start) -> None:
    dump = plain_run.run_dir.parent / "generated"
    run = start_run("generated", "train=false", f"rollout.save={dump}", "num_steps=2").finish()
    assert run.code == 0, run.output
    assert not list((run.run_dir / "logs").glob("trainer_*"))
    assert len(run.steps) == 2
    assert "perf/gen_tokens_per_s" in run.steps[-1]
    assert DumpReader(dump).batches == [list(range(8)), list(range(8, 16))]
    saved = [row for path in (dump / "rollouts").iterdir() for row in parquet.read_table(path).to_pylist()]
    assert {row["index"] for row in saved} >= set(range(16))
    assert {version for row in saved for version in row["versions"]} == {-1, 0}


def test_documented_example_reads_the_dump(
    plain_run: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/dump").symlink_to(plain_run.run_dir.parent / "dump")
    monkeypatch.chdir(tmp_path)
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    namespace: dict[str, object] = {}
    exec(code, namespace)
    means = [row["reward/mean"] for row in plain_run.steps]
    assert list(namespace["trained"].groupby("step")["reward"].mean()) == pytest.approx(means)  # type: ignore[attr-defined]
    assert len(capsys.readouterr().out.splitlines()) > 4
    assert json.loads((tmp_path / "runs/dump/dump.json").read_text())["groups_per_step"] == 8
