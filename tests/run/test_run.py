"""A run without processes: the checks of a start, skipped steps, evaluations, a full disk, files after a rollback."""

import asyncio
import json
import os
import re
import resource
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.recorded import record, recorded
from titanrl import ConfigError, grpo
from titanrl.base.errors import TitanRLError
from titanrl.base.files import commit_folder, uncommit_folder
from titanrl.carriers.record import read_lines
from titanrl.carriers.types import EvaluationResult, OptimUpdate, StepMetrics
from titanrl.config import load_config
from titanrl.config.load import dump, read_source, recorded_config, validate
from titanrl.config.sections import RecipeConfig
from titanrl.grpo import GRPO
from titanrl.metrics.console import Console
from titanrl.metrics.reading import read_metrics
from titanrl.metrics.run_directory import LOCK_FILE, RunDirectory, RunLock, check_idle, check_new_run, claim_new_run, claim_run
from titanrl.metrics.trackers import Hooks, Recorder, Trackers
from titanrl.models.recipe import create_model
from titanrl.run.checkpoints import FIRST, Checkpoints, Evaluations, Resumable, RunState, complete_checkpoint
from titanrl.run.run import NonFiniteGradientError, open_recorder
from titanrl.run.steering import CHANGES_FILE, Steering
from titanrl.sft import SFT

pytestmark = pytest.mark.usefixtures("scratch")

QUICK = ["device=cpu", "warm_start=null", "data.source=jsonl", "data.path=sums.jsonl", "evaluation.num_prompts=0"]


def write_run(steps: int, *overrides: str) -> Path:
    """Write a run directory with the controller's part of a checkpoint, and return it."""
    Path("sums.jsonl").write_text("".join(json.dumps({"prompt": f"{i} =", "answer": "1"}) + "\n" for i in range(50)))
    run_dir = Path("runs/quickstart")
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(dump(load_config("quickstart", [*QUICK, *overrides]).model_dump()))
    if steps:
        folder = run_dir / "checkpoints" / f"step-{steps}"
        folder.mkdir(parents=True)
        state = RunState(step=steps, version=steps, next_index=8 * steps)
        (folder / "controller.json").write_text(json.dumps(asdict(state)))
        (folder / ".metadata").touch()
        commit_folder(folder, {})
    return run_dir


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def dry_run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    before = files(Path())
    with pytest.raises(SystemExit) as ended:
        grpo.main(["--resume", str(run_dir), "--dry-run"])
    assert files(Path()) == before
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_dry_run_of_a_resume_names_the_step_it_continues_after(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(steps=3)
    (run_dir / "checkpoints" / "step-5").mkdir()
    code, out, _ = dry_run(run_dir, capsys)
    assert code == 0
    assert "Ready to start, continuing after step 3; step-5 cannot be used: commit.json is missing" in out


def test_dry_run_of_a_finished_run_says_that_nothing_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = dry_run(write_run(3, "num_steps=3"), capsys)
    assert code == 0
    assert "Ready to start, continuing after step 3, with nothing to train because num_steps is 3. The dry run" in out


def test_resume_needs_space_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(steps=3)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    code, _, err = dry_run(run_dir, capsys)
    assert code == 2
    assert f"one checkpoint and the exported model need 6.5 MB, but {run_dir.absolute()} has 1.0 kB free" in err
    assert "fix:  free space, or copy the directory of the run to a larger disk" in err


def test_dry_run_refuses_changes_that_a_resume_cannot_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(steps=3)
    change = {"step": 2, "key": "evaluation.patience", "value": 3, "before": None, "configured": None, "time": 1.0}
    for content, problem in (("{", "cannot be read: it is not a list of changes"), ([change], "patience requires best_metric")):
        (run_dir / CHANGES_FILE).write_text(content if isinstance(content, str) else json.dumps(content))
        code, _, err = dry_run(run_dir, capsys)
        assert (code, problem in err) == (2, True)


def test_dry_run_refuses_what_a_resume_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(steps=0)
    code, _, err = dry_run(run_dir, capsys)
    assert code == 2
    with pytest.raises(ConfigError, match="no intact checkpoint") as raised:
        GRPO(load_config(run_dir / "config.yaml"), resume=run_dir)
    assert err.endswith(f"{raised.value}\n")
    lock = RunLock(run_dir)
    owner = (run_dir / LOCK_FILE).read_text()
    code, _, err = dry_run(run_dir, capsys)
    assert code == 2
    assert f"--resume: the run is still active in process {os.getpid()} on " in err
    with pytest.raises(ConfigError, match="still active") as raised:
        claim_run(run_dir)
    assert err.endswith(f"{raised.value}\n")
    assert (run_dir / LOCK_FILE).read_text() == owner
    lock.release()
    check_idle(run_dir)


LORA = "trainer.lora={rank: 4, targets: [mlp, attention]}"
GENERATED = ["data.source=reasoning_gym", "data.path=null"]
WARM = [*GENERATED, "warm_start={num_steps: 400, num_long_only_steps: 300}"]
MOE = "model.recipe.family=qwen3_moe"


@pytest.mark.parametrize(
    ("saved", "changed", "key", "before"),
    [
        ([], "algorithm.optimizer=muon", 'algorithm.optimizer="muon"', "adamw"),
        (["algorithm.optimizer=muon"], "algorithm.optimizer=adamw", 'algorithm.optimizer="adamw"', "muon"),
        ([], "algorithm.ema_decay=0.9", "algorithm.ema_decay=0.9", None),
        ([], "algorithm={advantage: gae,credit: rollout}", 'algorithm.advantage="gae"', "dr_grpo"),
        ([], "trainer.lora={rank: 4}", 'trainer.lora={"rank": 4, ', None),
        ([LORA], "trainer.lora=null", "trainer.lora=null", '{"rank": 4, "alpha": 32.0, "targets": ["mlp", "attention"], '),
        ([LORA], "trainer.lora.rank=8", "trainer.lora.rank=8", 4),
        ([LORA], "trainer.lora.alpha=8", "trainer.lora.alpha=8.0", 32.0),
        ([LORA], "trainer.lora.targets=[mlp]", 'trainer.lora.targets=["mlp"]', ["mlp", "attention"]),
        ([MOE], "trainer.expert_bias_rate=0.01", "trainer.expert_bias_rate=0.01", 0.0),
        ([], "name=other", 'name="other"', "quickstart"),
        ([], "output_dir=elsewhere", 'output_dir="elsewhere"', "runs"),
        (GENERATED, "warm_start={num_steps: 500}", 'warm_start={"num_steps": 500, ', None),
        (WARM, "warm_start.num_steps=500", "warm_start.num_steps=500\n", '{"num_steps": 400}, and it precedes'),
        (
            WARM,
            "warm_start={num_steps: 500}",
            "warm_start.num_steps=500, warm_start.num_long_only_steps=400",
            '{"num_steps": 400, "num_long_only_steps": 300}, and it precedes',
        ),
    ],
)
def test_resume_refuses_what_the_checkpoint_was_not_saved_with(
    saved: list[str], changed: str, key: str, before: object, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(3, *saved)
    unchanged = files(run_dir)
    shown = before if isinstance(before, str) and before.startswith("{") else json.dumps(before)
    for flags in (["--dry-run"], []):
        with pytest.raises(SystemExit, match=r"^2$"):
            grpo.main(["--resume", str(run_dir), *flags, changed])
        text = capsys.readouterr().err
        assert f"override {changed}: {key}" in text
        assert f"\n  rule: the checkpoint of step 3 was saved with {shown}" in text
        name = changed.partition("=")[0].partition(".num")[0]
        fix = f"restore these values of {name}" if "{" in shown else f"set {key.partition('=')[0]} to {shown}"
        assert f"\n  fix:  {fix}, or start" in text
        assert "{" not in shown or text.count(shown) == 1
        assert "or start a new run from an exported model (model.path)" in text
        assert text.count("rule:") == 1
    assert {path: found for path, found in files(run_dir).items() if path.name != LOCK_FILE} == unchanged


def test_resume_without_the_warm_start_that_made_the_reference_policy_is_refused() -> None:
    run_dir = write_run(3, *WARM, "algorithm.kl.coef=0.1")
    config = validate(read_source(run_dir / "config.yaml", ["warm_start=null"]))
    with pytest.raises(ConfigError, match=r"which made the weights that algorithm\.kl\.reference names"):
        GRPO.check(config, resume=run_dir)


@pytest.mark.parametrize(
    ("saved", "changed"),
    [
        ([LORA], "trainer.lora.targets=[attention,mlp]"),
        ([LORA], "trainer.lora.max_models=3"),
        (["algorithm.optimizer=muon"], "algorithm.muon_momentum=0.9"),
        (["algorithm.ema_decay=0.9"], "algorithm.ema_decay=null"),
        (WARM, "warm_start=null"),
        ([*WARM, "algorithm.kl={coef: 0.1, reference: ema}", "algorithm.ema_decay=0.9"], "warm_start=null"),
        ([], "output_dir=./runs"),
        ([MOE, "trainer.expert_bias_rate=0.01"], "trainer.expert_bias_rate=0.02"),
    ],
)
def test_resume_accepts_what_fits_the_checkpoint(saved: list[str], changed: str) -> None:
    run_dir = write_run(3, *saved)
    config = validate(read_source(run_dir / "config.yaml", [changed]))
    assert GRPO.check(config, resume=run_dir).state.step == 3


def test_settings_edited_by_hand_are_compared_with_those_of_the_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(3)
    config, folder = run_dir / "config.yaml", run_dir / "checkpoints" / "step-3"
    original = recorded_config(load_config(config))
    uncommit_folder(folder)
    complete_checkpoint(folder.parent, RunState(step=3, version=3, next_index=24), {}, original)
    config.write_text(original)
    assert "continuing after step 3. The dry run" in dry_run(run_dir, capsys)[1]
    edited = original.replace("clip_high: 0.2", "clip_high: 0.3").replace("seed: 0\n", "seed: 7\n")
    config.write_text(edited.replace("  vllm: {}\n", "  vllm:\n    block_size: 16\n"))
    code, out, _ = dry_run(run_dir, capsys)
    assert code == 0
    differ = "settings differ from those that the checkpoint of step 3 was saved with"
    added = "generator.vllm.block_size is 16 instead of null"
    assert f"{differ}: algorithm.clip_high is 0.3 instead of 0.2, {added}, seed is 7 instead of 0. The dry run" in out
    source = read_source(config, ["algorithm.clip_high=0.4"])
    found = GRPO.check(validate(source), resume=run_dir, source=source)
    assert found.remarks == (f"{differ}: {added}, seed is 7 instead of 0",)
    config.write_text(original.replace("optimizer: adamw", "optimizer: muon"))
    code, _, err = dry_run(run_dir, capsys)
    assert (code, 'the checkpoint of step 3 was saved with "adamw"' in err) == (2, True)


def test_resume_refuses_a_model_of_other_sizes(tmp_path: Path) -> None:
    run_dir, model = write_run(3), tmp_path / "model"
    create_model(model, RecipeConfig(num_layers=3), seed=0)
    for changed, key in (("model.recipe.num_layers=3", "model.recipe"), (f"model.path={model}", "model.path")):
        config = validate(read_source(run_dir / "config.yaml", [changed]))
        rule = r"the checkpoint of step 3 was saved with a model of other sizes \(num_layers 2\)"
        with pytest.raises(ConfigError, match=rf"{key}.*\n  rule: {rule}"):
            GRPO.check(config, resume=run_dir)
    create_model(tmp_path / "same", RecipeConfig(), seed=7)
    config = validate(read_source(run_dir / "config.yaml", [f"model.path={tmp_path / 'same'}"]))
    assert GRPO.check(config, resume=run_dir).state.step == 3


def test_record_of_an_earlier_version_has_the_defaults() -> None:
    run_dir = write_run(3)
    text = (run_dir / "config.yaml").read_text()
    earlier = re.sub(r"^  (optimizer|muon_momentum|expert_bias_rate): .*\n", "", text, flags=re.MULTILINE)
    assert text.count("\n") == earlier.count("\n") + 3
    (run_dir / "config.yaml").write_text(earlier)
    assert GRPO.check(load_config(run_dir / "config.yaml"), resume=run_dir).state.step == 3


@pytest.mark.parametrize(
    ("folder", "problem"),
    [
        ("nowhere", r"the run directory does not exist \(got nowhere\)"),
        ("sums.jsonl", "the run directory is not a directory"),
        ("/proc/self", r"must be writable, but /proc/self is not \("),
    ],
)
def test_unusable_run_directory_is_refused_before_it_is_locked(folder: str, problem: str) -> None:
    write_run(steps=0)
    for check in (claim_run, check_idle):
        with pytest.raises(ConfigError, match=problem):
            check(Path(folder))


def test_name_taken_by_a_file_counts_as_taken() -> None:
    Path("runs").mkdir()
    Path("runs/a").touch()
    lock = claim_new_run(Path("runs/a"))
    assert lock.path == Path("runs/a-2")
    lock.release()


def test_check_returns_the_state_before_the_first_step() -> None:
    write_run(steps=0)
    assert GRPO.check(load_config("quickstart", QUICK)).state == FIRST


def test_dry_run_refuses_a_lock_that_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    write_run(steps=0).rename("runs/other")
    (Path("runs/quickstart") / LOCK_FILE).mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"^2$"):
        grpo.main(["--config", "quickstart", *QUICK, "--dry-run"])
    with pytest.raises(ConfigError, match="in the directory of a run must be a regular file") as raised:
        claim_new_run(Path("runs/quickstart"))
    assert capsys.readouterr().err.endswith(f"{raised.value}\n")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("metrics.jsonl", "must be a regular file that can be written, but it is a directory"),
        ("events.jsonl", "must be a regular file that can be written, but it is a directory"),
        ("report.html", "must be a regular file that can be written, but it is a directory"),
        ("checkpoints", "must be a directory that can be written, but it is not a directory"),
        ("record", "must be a directory that can be written, but it does not exist"),
    ],
)
def test_dry_run_and_start_refuse_other_things_in_place_of_a_runs_files(
    name: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(steps=0)
    path, refused = run_dir / name, rf"^output_dir: {name} in the directory of a run {problem} \(got {run_dir / name}\)"
    match name:
        case "checkpoints":
            path.touch()
        case "record":
            path.symlink_to("nowhere")
        case _:
            path.mkdir()
    for check in (claim_run, check_idle):
        with pytest.raises(ConfigError, match=refused):
            check(run_dir)
    (run_dir / "config.yaml").unlink()
    if name == "metrics.jsonl":  # it counts as the file of a run, so that a new one gets another directory
        claim_new_run(run_dir).release()
        return
    with pytest.raises(ConfigError, match=refused) as raised:
        claim_new_run(run_dir)
    with pytest.raises(SystemExit, match=r"^2$"):
        grpo.main(["--config", "quickstart", *QUICK, "--dry-run"])
    assert capsys.readouterr().err.endswith(f"{raised.value}\n")


def test_directory_in_which_nothing_can_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))  # as on a full disk, a folder can be created, but no file written
    try:
        with pytest.raises(ConfigError, match=rf"must be writable, but {tmp_path}/run is not \(File too large\)"):
            check_new_run(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("config", ["quickstart", {"name": "a"}, None])
def test_anything_but_a_config_is_refused_with_how_to_load_one(config: Any) -> None:
    for kind in (GRPO, SFT):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}: must be a Config .* Load it: {kind.__name__}\(load_config"):
            kind(config)


SKIPPED = OptimUpdate(version=0, grad_norm=float("inf"), skipped=True)


def run_in(path: Path) -> GRPO:
    run = object.__new__(GRPO)
    run.config = load_config("quickstart", ["algorithm.max_skipped_steps=1"])
    run.state = RunState(step=0, version=0, next_index=0)
    run.console = Console("off", total_steps=1)
    run._lock = claim_new_run(path)
    run._recorder = Recorder(RunDirectory(path), Trackers({}, print), run.console)
    run.checkpoints, run.evaluations = Checkpoints(run), Evaluations(run)
    run.run_dir, run.hooks, run._ending = path, Hooks([]), asyncio.Event()
    run.steering = Steering(run, [])
    run._session = run._closing = run._kept = run._running = run._left = None
    run._is_idle = asyncio.Event()
    run._is_idle.set()
    return run


@pytest.mark.parametrize(
    ("version", "largest_reward", "advice"),
    [
        (0, 1e30, "The rewards reach 1e+30, and gradients grow with them: return smaller numbers from data.rewards"),
        (1, 1.0, "Lower algorithm.learning_rate; grad/norm in metrics.jsonl shows where it began."),
        (0, 1.0, "No step had a finite one, so the learning rate is not the cause: check the loss and the model."),
    ],
)
def test_advice_after_skipped_steps_names_the_likely_cause(
    version: int, largest_reward: float, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "run")
    run.state = replace(run.state, version=version)
    rewards = np.array([0.5, -largest_reward])
    run.count_skipped(SKIPPED, rewards)
    with pytest.raises(NonFiniteGradientError, match=re.escape(advice)):
        run.count_skipped(SKIPPED, rewards)
    events = [row for row in read_lines(run.recorder.directory.events) if row["kind"] == "skipped_step"]
    assert [event["largest_reward"] for event in events] == [largest_reward, largest_reward]
    assert capsys.readouterr().err.count("is skipped: the gradient of the policy is not finite") == 1
    asyncio.run(run.stop())


def test_skipped_steps_of_the_critic_end_the_run_too(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    run.state = replace(run.state, version=1)
    of_critic = {"critic/grad_norm": float("inf"), "critic/skipped": 1.0}
    update = OptimUpdate(version=1, grad_norm=1.0, skipped=False, critic=of_critic)
    run.count_skipped(update)
    run.count_skipped(replace(update, critic={"critic/grad_norm": 1.0, "critic/skipped": 0.0}))
    run.count_skipped(update)
    with pytest.raises(
        NonFiniteGradientError, match=r"gradient of the critic \(got 1\)\. Lower algorithm\.critic\.learning_rate"
    ):
        run.count_skipped(update)
    events = [row for row in read_lines(run.recorder.directory.events) if row["kind"] == "skipped_step"]
    assert [(event["model"], event["grad_norm"]) for event in events] == [("critic", None)] * 3
    asyncio.run(run.stop())


def test_each_evaluation_is_compared_once_and_another_metric_starts_over(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    run.config = load_config("quickstart", ["evaluation.best_metric=eval/chain_sum/mean", "evaluation.patience=1"])
    run.state = RunState(step=2, version=2, next_index=0, best_value=0.5, best_step=1, best_metric="eval/chain_sum/mean")
    worse = EvaluationResult(task="chain_sum", version=2, mean=0.4, num_prompts=10, response_len_mean=1.0)
    for _ in range(2):  # an interrupt between two sets, after which both are evaluated again
        asyncio.run(run.evaluations._compare(2, worse))
        assert (run.state.num_without_better, super(GRPO, run).ends_early) == (1, True)
    run.state = replace(run.state, best_metric="eval/chain_sum/pass@8")  # of the run before it was resumed
    assert not super(GRPO, run).ends_early
    failed = replace(worse, num_errors=10, first_error="boom")  # not compared, but the earlier best value is no longer used
    asyncio.run(run.evaluations._compare(4, failed))
    assert (run.state.best_value, run.state.best_step, run.state.num_without_better) == (None, -1, 0)
    asyncio.run(run.stop())


@pytest.mark.parametrize(
    ("num_errors", "max_error_frac", "is_compared"), [(0, 0.0, True), (1, 0.0, False), (1, 0.1, True), (2, 0.1, False)]
)
def test_evaluation_with_failed_rewards_is_not_compared(
    num_errors: int, max_error_frac: float, is_compared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "run")
    best = ("evaluation.best_metric=eval/chain_sum/mean", f"evaluation.max_error_frac={max_error_frac}")
    run.config = load_config("quickstart", best)
    run.state = RunState(step=2, version=2, next_index=0, best_value=0.5, best_step=1)
    worse = EvaluationResult(
        task="chain_sum", version=2, mean=0.4, num_prompts=10, response_len_mean=1.0, num_errors=num_errors, first_error="boom"
    )
    run.recorder.directory.event("start", step=0)
    asyncio.run(run.evaluations._compare(2, worse))
    events = [row for row in read_lines(run.recorder.directory.events) if row["kind"] == "not_compared"]
    assert run.state.num_without_better == is_compared
    assert [(event["count"], event["completions"]) for event in events] == [] if is_compared else [(num_errors, 10)]
    warned = f"{num_errors} of 10 completions have no reward; mean over 10 of 10 prompts, but evaluation.max_error_frac is"
    assert (warned in capsys.readouterr().err.replace("\n", " ")) is not is_compared
    asyncio.run(run.stop())


def test_steps_and_evaluations_of_two_tasks_do_not_mix(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    with pytest.raises(TitanRLError, match=r"^run.step: the run has not started, or has been closed\. Use `async with run:`"):
        asyncio.run(run.step())
    run._session = cast(Any, SimpleNamespace())
    stepped: list[str] = []

    async def train_step() -> StepMetrics:
        async with run.alone("evaluate"):  # as a hook does in its step
            await asyncio.sleep(0)
        stepped.append("step")
        return StepMetrics(step=1, version=1, values={})

    async def both() -> list[Any]:
        return await asyncio.gather(run.step(), run.evaluate(), run.step(), return_exceptions=True)

    run.train_step = train_step  # type: ignore[method-assign]
    first, *others = asyncio.run(both())
    assert (first.step, stepped) == (1, ["step"])
    assert [str(error) for error in others] == [
        f"run.{verb}: run.step is in progress in another task. Await it first." for verb in ("evaluate", "step")
    ]
    assert asyncio.run(run.step()).step == 1, "a refused call leaves the run as it was"

    async def train_step_beside() -> StepMetrics:
        run.state = replace(run.state, step=run.state.step + 1, version=run.state.version + 1)
        return StepMetrics(step=run.state.step, version=run.state.version, values={})

    async def nothing(**_: object) -> None: ...

    run._dump = cast(Any, SimpleNamespace(num_steps=None))
    run.evaluations = cast(Any, SimpleNamespace(run_due=nothing, close=nothing))
    run.checkpoints = cast(Any, SimpleNamespace(save=nothing, finish=nothing, finish_if_done=nothing, settle=nothing))

    async def evaluate_between_steps() -> int:
        async with run.alone("evaluate"):
            training = asyncio.create_task(run.take_steps(1))
            for _ in range(20):
                await asyncio.sleep(0)
            assert run.state.version == 0, "training waits for the evaluation"
        await training
        return run.state.version

    run.train_step = train_step_beside  # type: ignore[method-assign]
    assert asyncio.run(evaluate_between_steps()) == 1
    run._session = None
    asyncio.run(run.stop())


async def test_cancelled_step_continues_and_the_next_call_waits_for_it(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    run._session = cast(Any, SimpleNamespace())
    goes_on = asyncio.Event()
    ended: list[str] = []

    async def train_step() -> StepMetrics:
        try:
            await goes_on.wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        run.state = replace(run.state, step=run.state.step + 1)
        if run.state.step == 3:
            raise ValueError("step 3")
        return StepMetrics(step=run.state.step, version=0, values={})

    async def cancelled() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await run.step()

    run.train_step = train_step  # type: ignore[method-assign]
    await cancelled()
    for verb in ("save", "export", "evaluate", "step"):
        with pytest.raises(TimeoutError):  # while it waits for the first step
            async with asyncio.timeout(0.05):
                await getattr(run, verb)()
    goes_on.set()
    assert (await run.step()).step == 2, "both steps were taken"
    goes_on.clear()
    await cancelled()
    goes_on.set()
    with pytest.raises(ValueError, match="step 3"):
        await run.step()
    assert (await run.step()).step == 4
    goes_on.clear()
    await cancelled()
    run._session = None
    await run.stop()
    assert ended == ["cancelled"], "closing the run cancels the step"


def test_notebook_shows_the_run_with_its_state(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    assert "<b>GRPO run</b>: idle after step 0 of 100</p>" in run._repr_html_()
    assert repr(run) == "<GRPO quickstart: idle after step 0 of 100, in run>"
    asyncio.run(run.stop())
    assert "No step yet." in run._repr_html_()


class ClosedConsole(Console):
    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


def test_run_whose_directory_cannot_be_locked_closes_its_console(monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(steps=0)
    Path("runs/taken").mkdir()
    os.mkfifo(Path("runs/taken") / LOCK_FILE)
    config = load_config("runs/quickstart/config.yaml", ["name=taken"])
    monkeypatch.setattr(GRPO, "check", lambda run, config, **options: Resumable(state=FIRST, unusable={}))
    console = ClosedConsole("off", total_steps=1)
    with pytest.raises(ConfigError, match="must be a regular file"):
        GRPO(config, console=console)
    assert console.is_closed


@pytest.mark.parametrize("is_resumed", [False, True])
def test_run_that_cannot_be_prepared_releases_its_directory(is_resumed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(steps=1)
    config = load_config(run_dir / "config.yaml")

    def fail(run: GRPO) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(GRPO, "check", lambda run, config, **options: Resumable(state=FIRST, unusable={}))
    monkeypatch.setattr(GRPO, "prepare", fail)
    console = ClosedConsole("off", total_steps=1)
    with pytest.raises(KeyboardInterrupt):
        GRPO(config, resume=run_dir if is_resumed else None, console=console)
    assert console.is_closed
    assert [path.name for path in Path("runs").iterdir()] == ["quickstart"]
    claim_run(run_dir).release()


@pytest.mark.parametrize("starts", [False, True])
async def test_resume_records_its_settings_only_once_its_processes_run(starts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write_run(steps=3)
    change = {"step": 2, "key": "evaluation.patience", "value": None, "before": None, "configured": None, "time": 1.0}
    recorded = {"config.yaml": None, "data.json": {"data.path": {"source": "old.jsonl", "digest": "1"}}, CHANGES_FILE: [change]}
    for name, content in recorded.items():
        if content is not None:
            (run_dir / name).write_text(json.dumps(content))
    before, found = [(run_dir / name).read_text() for name in recorded], []

    async def open_session(run: GRPO) -> None:
        found.extend((run_dir / name).read_text() for name in recorded)
        if not starts:
            raise RuntimeError("out of memory")
        run._session = cast(Any, object())

    monkeypatch.setattr(GRPO, "_open", open_session)
    monkeypatch.setattr("titanrl.run.run._import_heavy_packages", lambda: None)
    config = validate(source := read_source(run_dir / "config.yaml", ["generator.replicas=2", "evaluation.patience=null"]))
    run = GRPO(config, resume=run_dir, source=source, console=Console("off", total_steps=1))
    with nullcontext() if starts else pytest.raises(RuntimeError):
        await run.start()
    run._session = None
    await run.stop(code=1, cause="out of memory")
    after = [(run_dir / name).read_text() for name in recorded]
    assert found == before
    if not starts:
        assert after == before
        return
    assert load_config(run_dir / "config.yaml").generator.replicas == 2
    assert ("old" in after[1], json.loads(after[2])) == (False, [])


def test_stop_on_a_full_disk_raises_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path / "run")
    run.recorder.directory.events.symlink_to("/dev/full")
    asyncio.run(run.stop(code=1, cause="boom"))
    assert f"the end of the run is not recorded: [Errno 28] No space left on device: '{tmp_path}/run/events.jsonl'" in "".join(
        capsys.readouterr().err.splitlines()
    )


# Files of a run that rolls back to a checkpoint, or to its start

QUICKSTART = load_config("quickstart", ["logging.loggers=[]"])
EVALUATION = EvaluationResult(task="sums", version=0, mean=0.5, num_prompts=8, response_len_mean=3.0)


def open_at(run_dir: Path, state: RunState, kind: str) -> Recorder:
    found = Resumable(state=state, unusable={})
    return open_recorder(QUICKSTART, run_dir, kind, found, Console("off", total_steps=9), {})  # type: ignore[arg-type]


def take_steps(recorder: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        recorder.step(StepMetrics(step=step, version=step, values={"reward/mean": 0.1}))
        recorder.directory.event("publication", version=step)
        record(recorder.directory.path, "rollouts", {"index": step})
        recorder.directory.log_advantages(step, [(step, step, [0.0])])


def test_run_rolls_back_to_a_checkpoint_or_its_start(tmp_path: Path) -> None:
    recorder = open_at(tmp_path, RunState(step=0, version=0, next_index=0), "start")
    recorder.evaluation(0, EVALUATION)
    recorder.directory.event("publication", version=0)
    take_steps(recorder, 1, 3)
    (recorder.directory.checkpoints / "step-2").mkdir()
    half_written = recorder.directory.checkpoints / "step-3"
    half_written.mkdir()

    recorder.close(resumes=True)
    recorder = open_at(tmp_path, RunState(step=2, version=2, next_index=3, published=(2,)), "restart")
    directory = recorder.directory
    assert [row["step"] for row in read_metrics(directory.metrics)] == [0, 1, 2]
    assert recorded(directory.path, "rollouts") == [1, 2]
    assert [row["step"] for row in read_lines(directory.advantages)] == [1, 2]
    events = [(row["kind"], row.get("version", row.get("step"))) for row in read_lines(directory.events)]
    assert events == [("start", 0), ("publication", 0), ("publication", 1), ("checkpoint", 2)]
    assert not half_written.exists()
    directory.event("restart", step=3, from_step=2)
    take_steps(recorder, 3, 4)

    recorder.close(resumes=True)
    recorder = open_at(tmp_path, RunState(step=0, version=0, next_index=0, evaluated_step=0), "restart")
    directory = recorder.directory
    assert [row["step"] for row in read_metrics(directory.metrics)] == [0], "the evaluation before the first step stays"
    assert recorded(directory.path, "rollouts") == list(read_lines(directory.advantages)) == []
    assert [row["kind"] for row in read_lines(directory.events)] == ["start", "restart"]
    recorder.close()
