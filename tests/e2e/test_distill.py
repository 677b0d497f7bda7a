"""The command `titanrl distill`: from the model of a finished run into a smaller one."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import REPO, Finished, serving
from titanrl.carriers.types import FloatArray

STUDENT = ("warm_start=null", "model.recipe.num_layers=1", "rollout.groups_per_step=4", "evaluation.num_prompts=16")
RUN = (
    *("num_steps=4", "checkpoint.every_steps=2", "evaluation.every_steps=0", "logging.console=plain"),
    *("algorithm.learning_rate=3e-3", "algorithm.num_warmup_steps=0"),
)


def distill(folder: Path, *arguments: str) -> Finished:
    """Run the command in `folder`; its run is `runs/distill_quickstart`."""
    command = [sys.executable, "-m", "titanrl.commands", "distill", *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280, check=False)
    return Finished(done.returncode, done.stdout + done.stderr, folder / "distill_quickstart")


def start(teacher: Path, folder: Path, *overrides: str) -> Finished:
    places = (f"distill.teacher.path={teacher}", f"output_dir={folder}", f"cache_dir={folder}/cache")
    return distill(folder, "--config", "distill_quickstart", *STUDENT, *RUN, *places, *overrides)


@pytest.fixture(scope="module")
def finished(plain_run: Finished, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A distillation of the plain run's model."""
    finished = start(plain_run.run_dir / "checkpoints/final", tmp_path_factory.mktemp("distill"))
    assert finished.code == 0, finished.output
    return finished


def test_distillation_approaches_its_teacher_and_leaves_the_files_of_a_run(finished: Finished) -> None:
    first, *_, last = finished.steps
    assert first["policy/kl_teacher"] > 1.0  # random weights
    assert last["policy/kl_teacher"] < first["policy/kl_teacher"]
    assert first["loss/policy"] == pytest.approx(first["policy/kl_teacher"], rel=1e-4)
    assert max(row["mismatch/logprob_abs_max"] for row in finished.steps) < 1e-3
    assert [row["version"] for row in finished.steps] == [1, 2, 3, 4]
    assert "kl_teacher" in finished.output
    kinds = [event["kind"] for event in finished.events()]
    assert kinds == ["start", "teacher", *["publication", "publication", "checkpoint"] * 2, "end"]
    assert len(finished.evaluations()) == 2
    assert (finished.run_dir / "checkpoints/final/config.json").is_file()
    assert (finished.run_dir / "report.html").is_file()


def test_recorded_groups_have_the_mean_advantage_of_each_completion(finished: Finished) -> None:
    groups = finished.rollouts()
    lines = (finished.run_dir / "advantages.jsonl").read_text().splitlines()
    advantages = [json.loads(line) for line in lines]
    assert [group["index"] for group in groups] == [row["index"] for row in advantages] == [0, 1, 4, 5, 8, 9, 12, 13]
    for group, row in zip(groups, advantages, strict=True):
        assert len(group["completions"]) == len(row["advantages"]) == 4
        assert (group["version"], row["step"]) == (row["version"], row["version"] + 1)


def curve(finished: Finished) -> FloatArray:
    names = ("policy/kl_teacher", "reward/mean", "grad/norm", "tokens/response_len_mean")
    return np.array([[row[name] for name in names] for row in finished.steps])


def test_resumed_distillation_continues_the_same_curve(finished: Finished, tmp_path: Path) -> None:
    run_dir = tmp_path / "distill_quickstart"
    shutil.copytree(finished.run_dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-4")
    resumed = distill(tmp_path, "--resume", str(run_dir))
    assert resumed.code == 0, resumed.output
    assert [row["step"] for row in resumed.steps] == [1, 2, 3, 4]
    assert np.array_equal(curve(resumed), curve(finished))


@pytest.fixture(scope="module")
def url(plain_run: Finished) -> Iterator[str]:
    """The model of the plain run, behind an endpoint that has room for one more token than a prompt and a completion."""
    with serving(plain_run.run_dir / "checkpoints/final", "data.max_prompt_tokens=64") as server:
        yield f"{server.url}/v1"


def test_teacher_by_url_gives_the_curve_of_the_same_teacher_in_an_engine(finished: Finished, url: str, tmp_path: Path) -> None:
    teacher = f"distill.teacher={{url: {url}}}"
    places = (teacher, f"output_dir={tmp_path}", f"cache_dir={tmp_path}/cache", "num_steps=2", "checkpoint.every_steps=0")
    remote = distill(tmp_path, "--config", "distill_quickstart", *STUDENT, *RUN, *places)
    assert remote.code == 0, remote.output
    np.testing.assert_allclose(curve(remote), curve(finished)[:2], atol=1e-4)
    assert [row["teacher/retries"] for row in remote.steps] == [0.0, 0.0]


def test_tasks_with_teachers_in_an_engine_and_by_url_and_one_without(plain_run: Finished, url: str, tmp_path: Path) -> None:
    folder = plain_run.run_dir / "checkpoints/final"
    mixture = (
        "{a: {}, b: {teacher: remote, distill_weight: 0.5, reward_weight: 1.0}, c: {distill_weight: 0.0, reward_weight: 1.0}}"
    )
    run = distill(
        tmp_path,
        *("--config", "distill_quickstart", *STUDENT, *RUN, f"output_dir={tmp_path}", f"cache_dir={tmp_path}/cache"),
        f"distill={{teacher: {{path: {folder}}}, teachers: {{remote: {{url: {url}}}}}, loss: forward_kl, top_k: 5}}",
        *(f"data.mixture={mixture}", "rollout.groups_per_step=6", "checkpoint.every_steps=0"),
    )
    assert run.code == 0, run.output
    first, *_, last = run.steps
    assert first["policy/kl_teacher"] > last["policy/kl_teacher"] > 0
    assert all(0 < row["teacher/outside_top_frac"] < 0.5 for row in run.steps)
    assert [event["task"] for event in run.events() if event["kind"] == "teacher"] == ["a"]


@pytest.mark.slow
def test_hints_raise_the_held_out_score_of_a_policy_that_does_not_see_them(tmp_path: Path) -> None:
    """The largest of three digits: with the digit as a hint, the policy copies it; without, it names any of the three."""
    choose, examples, questions = random.Random(0), [], []
    for number in range(1000):
        prompt = f"{number:03d}="
        answer = max(prompt[:3])
        examples += [
            {"prompt": f"{answer}:{prompt}", "completion": answer},
            {"prompt": prompt, "completion": choose.choice(prompt[:3])},
        ]
        questions.append({"prompt": prompt, "answer": answer})
    for name, rows in (("examples", examples), ("questions", questions)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = [
        *("name=base", f"output_dir={tmp_path}", f"cache_dir={tmp_path}/cache", f"sft.path={tmp_path}/examples.jsonl"),
        *("num_steps=150", "model.recipe.hidden_size=64", "evaluation.every_steps=0", "logging.console=plain"),
    ]
    command = [sys.executable, "-m", "titanrl.commands", "sft", "--config", "sft_quickstart", *base]
    subprocess.run(command, cwd=REPO, capture_output=True, timeout=280, check=True)
    finished = distill(
        tmp_path,
        *("--config", "distill_quickstart", f"output_dir={tmp_path}", f"cache_dir={tmp_path}/cache", "warm_start=null"),
        *(f"model={{path: {tmp_path}/base/checkpoints/final}}", "num_steps=20", "checkpoint.every_steps=10"),
        "distill={teacher: {policy: initial}, loss: forward_kl, hint: '{answer}:{question}'}",
        f"data={{source: jsonl, path: {tmp_path}/questions.jsonl, max_prompt_tokens: 8}}",
        *("rollout={groups_per_step: 32, group_size: 2, max_new_tokens: 2}", "trainer={row_tokens: 64}"),
        *("algorithm={learning_rate: 1.0e-3, num_warmup_steps: 3}", "evaluation={every_steps: 20, num_prompts: 100}"),
        "logging.console=plain",
    )
    assert finished.code == 0, finished.output
    before, after = finished.evaluations("prompts")
    assert before < 0.7
    assert after > 0.95
    first, *_, last = finished.steps
    assert last["policy/kl_teacher"] < 0.2 * first["policy/kl_teacher"]
    assert first["loss/policy"] == pytest.approx(first["policy/kl_teacher"], rel=1e-4)  # rewards have no weight
    assert [event["kind"] for event in finished.events()].count("teacher") == 0
    run_dir = finished.run_dir
    expected = curve(finished)
    shutil.rmtree(run_dir / "checkpoints/step-20")
    resumed = distill(tmp_path, "--resume", str(run_dir))
    assert resumed.code == 0, resumed.output
    assert np.array_equal(curve(resumed), expected)
