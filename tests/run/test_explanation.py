"""Explained tokens of written records, compared with formulas computed here with `math`, and what cannot be explained."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.recorded import record_group
from titanrl.carriers.record import RecordFile
from titanrl.commands import runs
from titanrl.config import load_config
from titanrl.config.load import dump
from titanrl.metrics.reading import open_run
from titanrl.run.explanation import ExplainedSegment, NotExplainedError, explain, share_of

LP = [-1.0, -0.5, -2.0, -0.1]
"""Log-probabilities under the policy being trained."""
GENERATOR = [-1.4, -0.5, -1.5, -0.3]
"""Ratios exp(0.4) = 1.49, 1, exp(-0.5) = 0.61 and exp(0.2) = 1.22."""
PROXIMAL = [-1.1, -0.6, -1.2, -0.1]
"""Ratios to the generator exp(0.3) = 1.35, exp(-0.1), exp(0.3) and exp(0.2)."""
WEIGHT, ADVANTAGE = 0.125, 0.75
PROX = "algorithm.proximal=step_start"


def written(
    run_dir: Path, *overrides: str, advantages: float | Sequence[float] = ADVANTAGE, mean_weight: float = 1.0, **more: Any
) -> Path:
    """Write a run with one sequence of four tokens, trained on in step 3."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(dump(load_config("quickstart", overrides).model_dump()))
    numbers = {
        "logprobs": LP,
        "generator_logprobs": GENERATOR,
        "advantages": np.broadcast_to(advantages, 4),
        "weights": [WEIGHT] * 4,
        **more,
    }
    columns = {
        "positions": np.arange(2, 6, dtype=np.int32),
        "versions": np.full(4, 1, np.int32),
        **{name: np.asarray(values, np.float32) for name, values in numbers.items()},
    }
    line = {"time": 1.0, "step": 3, "version": 2, "index": 17, "segment": 0, "mean_weight": mean_weight}
    file = RecordFile(run_dir, "trained", "trainer_0", 10**6)
    file.append((line, columns))
    file.close()
    return run_dir


def explained(run_dir: Path) -> ExplainedSegment:
    (segment,) = explain(open_run(run_dir), 3, 17)
    return segment


def check(segment: ExplainedSegment, **expected: Sequence[float]) -> None:
    for name, values in expected.items():
        assert segment.columns[name].tolist() == pytest.approx(values, abs=1e-6), name


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


D = minus(LP, GENERATOR)
RATIO = [math.exp(d) for d in D]


@pytest.mark.parametrize(("advantage", "clips"), [(0.75, ["high", "", "", "high"]), (-0.75, ["", "", "low", ""])])
def test_grpo_clips_at_its_bounds(tmp_path: Path, advantage: float, clips: list[str]) -> None:
    segment = explained(written(tmp_path / "run", "algorithm.preset=grpo", "algorithm.clip_high=0.21", advantages=advantage))
    bounded = [min(max(r, 0.8), 1.21) for r in RATIO]
    loss = [-WEIGHT * min(r * advantage, b * advantage) for r, b in zip(RATIO, bounded, strict=True)]
    gradient = [0.0 if clip else -WEIGHT * r * advantage for r, clip in zip(RATIO, clips, strict=True)]
    assert segment.columns["clip"].tolist() == clips
    check(segment, ratio=RATIO, loss=loss, gradient=gradient, correction=[1.0] * 4, weight=[WEIGHT] * 4)
    check(segment, generator_logprob=GENERATOR, proximal_logprob=LP, logprob=LP, advantage=[advantage] * 4)
    squares = [(g * (1.0 - math.exp(lp))) ** 2 for g, lp in zip(gradient, LP, strict=True)]
    check(segment, share=[square / sum(squares) for square in squares])
    assert (segment.step, segment.index, segment.completion, segment.left_out) == (3, 17, None, ())


def test_dual_clip_is_named(tmp_path: Path) -> None:
    segment = explained(written(tmp_path / "run", "algorithm.dual_clip=1.3", advantages=[-1.0] * 4))
    assert segment.columns["clip"].tolist() == ["dual", "", "low", ""]
    check(segment, loss=[1.3 * WEIGHT, WEIGHT, 0.8 * WEIGHT, RATIO[3] * WEIGHT], gradient=[0, WEIGHT, 0, RATIO[3] * WEIGHT])


def test_gspo_has_one_ratio_per_sequence(tmp_path: Path) -> None:
    clip = ("algorithm.preset=gspo", "algorithm.clip_low=0.5", "algorithm.clip_high=0.5")
    segment = explained(written(tmp_path / "run", *clip))
    ratio = math.exp(sum(D) / 4)
    each = -WEIGHT * ratio * ADVANTAGE
    assert segment.columns["clip"].tolist() == [""] * 4
    check(segment, ratio=[ratio] * 4, loss=[each] * 4, gradient=[each] * 4)
    clipped = explained(written(tmp_path / "clipped", "algorithm.loss=gspo", "algorithm.clip_high=4e-4"))
    assert ratio > 1.0 + 4e-4
    assert clipped.columns["clip"].tolist() == ["high"] * 4
    check(clipped, loss=[-WEIGHT * 1.0004 * ADVANTAGE] * 4, gradient=[0.0] * 4, share=[0.0] * 4)


def test_cispo_keeps_the_gradient_of_clipped_tokens(tmp_path: Path) -> None:
    bounds = ("algorithm.loss=cispo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.3")
    segment = explained(written(tmp_path / "run", *bounds))
    bounded = [min(max(r, 0.8), 1.3) for r in RATIO]
    assert segment.columns["clip"].tolist() == ["high", "", "low", ""]
    check(segment, ratio=RATIO, gradient=[-WEIGHT * b * ADVANTAGE for b in bounded])
    check(segment, loss=[-WEIGHT * b * ADVANTAGE * lp for b, lp in zip(bounded, LP, strict=True)])


def test_truncated_importance_weights_multiply_the_loss(tmp_path: Path) -> None:
    # Without a proximal policy, the ratio is that of the current policy, without gradient.
    settings = (
        "algorithm.loss=reinforce",
        "algorithm.correction.preset=token_tis",
        "algorithm.correction.max_prox_over_behavior=1.25",
    )
    segment = explained(written(tmp_path / "run", *settings))
    rho = [min(r, 1.25) for r in RATIO]
    check(segment, correction=rho, gradient=[-WEIGHT * c * ADVANTAGE for c in rho])
    check(segment, loss=[-WEIGHT * c * ADVANTAGE * lp for c, lp in zip(rho, LP, strict=True)])
    normalized = (*settings, "algorithm.correction.batch_normalize=true")
    halved = explained(written(tmp_path / "normalized", *normalized, mean_weight=2.0))
    check(halved, correction=[0.5 * c for c in rho], gradient=[-0.5 * WEIGHT * c * ADVANTAGE for c in rho])


def test_asynchronous_step_has_proximal_ratio_and_correction(tmp_path: Path) -> None:
    settings = (
        "max_staleness=1",
        PROX,
        "algorithm.correction.preset=icepop",
        "algorithm.correction.reject_token_prox_over_behavior=[0.95, 5.0]",
    )
    segment = explained(written(tmp_path / "run", *settings, proximal_logprobs=PROXIMAL))
    ratio = [math.exp(d) for d in minus(LP, PROXIMAL)]
    rho = [math.exp(d) for d in minus(PROXIMAL, GENERATOR)]
    assert rho[1] < 0.95, "the second token is rejected"
    rho[1] = 0.0
    assert segment.columns["clip"].tolist() == ["", "", "", ""], "0.45 is below the bound, but the advantage is positive"
    expected = [-WEIGHT * c * r * ADVANTAGE for c, r in zip(rho, ratio, strict=True)]
    check(segment, proximal_logprob=PROXIMAL, correction=rho, loss=expected, gradient=expected)
    check(segment, ratio=[ratio[0], 1.0, *ratio[2:]])  # a rejected token is not compared


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_kl_penalty_is_in_the_loss_or_the_advantage(tmp_path: Path, place: str) -> None:
    reference, coef = [-1.2, -0.5, -1.0, -0.4], 0.5
    settings = [f"algorithm.kl.coef={coef}", f"algorithm.kl.place={place}", "algorithm.loss=importance_sampling"]
    settings += ["algorithm.kl.estimator=k2", "algorithm.kl.importance_weighted=false"] if place == "loss" else []
    settings += ["algorithm.kl.estimator=k1"] if place == "reward" else []
    segment = explained(written(tmp_path / "run", *settings, reference_logprobs=reference))
    u = minus(LP, reference)
    if place == "loss":
        check(segment, advantage=[ADVANTAGE] * 4, reference_logprob=reference)
        check(segment, loss=[WEIGHT * (coef * v * v / 2 - r * ADVANTAGE) for v, r in zip(u, RATIO, strict=True)])
        check(segment, gradient=[WEIGHT * (coef * v - r * ADVANTAGE) for v, r in zip(u, RATIO, strict=True)])
    else:
        advantages = [ADVANTAGE - coef * sum(u[t:]) for t in range(4)]
        check(segment, advantage=advantages, loss=[-WEIGHT * r * a for r, a in zip(RATIO, advantages, strict=True)])


@pytest.mark.parametrize("loss", ["ppo", "importance_sampling", "reinforce", "gspo", "cispo", "dro", "sapo"])
def test_every_loss_has_the_gradient_of_finite_differences(tmp_path: Path, loss: str) -> None:
    segment = explained(
        written(tmp_path / "run", f"algorithm.loss={loss}", "algorithm.clip_high=5.0", "algorithm.clip_low=0.9")
    )
    if loss in ("gspo", "cispo"):  # part of their value has no gradient
        assert segment.columns["gradient"].all()
        return
    for t in range(4):
        sums = []
        for sign in (1, -1):
            moved = [lp + sign * 1e-3 * (i == t) for i, lp in enumerate(LP)]
            other = explained(
                written(
                    tmp_path / f"{t}{sign}",
                    f"algorithm.loss={loss}",
                    "algorithm.clip_high=5.0",
                    "algorithm.clip_low=0.9",
                    logprobs=moved,
                )
            )
            sums.append(float(other.columns["loss"].sum()))
        assert (sums[0] - sums[1]) / 2e-3 == pytest.approx(segment.columns["gradient"][t], abs=1e-4)


def test_share_is_within_its_bounds_of_the_exact_one() -> None:
    torch.manual_seed(0)
    for temperature in (0.3, 1.0, 3.0):
        logits_NV = torch.randn(50, 20, dtype=torch.float64) / temperature
        sampled_N, gradient_N = torch.randint(20, (50,)), torch.randn(50, dtype=torch.float64)
        p_NV = logits_NV.softmax(-1)
        onehot_NV = torch.nn.functional.one_hot(sampled_N, 20)
        exact_N = (gradient_N[:, None] * (onehot_NV - p_NV)).square().sum(-1)
        exact_N /= exact_N.sum()
        share_N = share_of(gradient_N, logits_NV.log_softmax(-1).gather(1, sampled_N[:, None])[:, 0])
        assert float(share_N.sum()) == pytest.approx(1.0)
        assert ((share_N / exact_N) >= 0.5).all()
        assert ((share_N / exact_N) <= 2.0).all()


def test_group_without_a_recorded_loss_names_those_that_have_one(tmp_path: Path) -> None:
    run = open_run(written(tmp_path / "run"))
    with pytest.raises(NotExplainedError, match=r"step 3: no loss of group 18 is recorded. The step has those of 17. logging"):
        explain(run, 3, 18)
    with pytest.raises(NotExplainedError, match=r"step 4: no loss of group 17 is recorded. The record has steps 3 to 3"):
        explain(run, 4, 17)
    assert explained(written(tmp_path / "bonus", "algorithm.entropy_coef=0.1")).left_out == ("entropy bonus",)


def test_custom_loss_is_executed_only_if_it_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "own_loss.py").write_text(
        "import pathlib, titanrl\npathlib.Path(__file__).with_name('ran').touch()\n"
        "@titanrl.policy_loss(ratio='sampler')\ndef own(inputs):\n    return -2.0 * inputs.ratio_N * inputs.advantages_N\n"
    )
    run = open_run(written(tmp_path / "run", f"algorithm.loss={tmp_path}/own_loss.py:own"))
    with pytest.raises(NotExplainedError, match="a custom loss is executed to explain it, so it must be allowed"):
        explain(run, 3, 17)
    assert not (tmp_path / "ran").exists()
    (segment,) = explain(run, 3, 17, loads_loss=True)
    check(segment, loss=[-2.0 * WEIGHT * r * ADVANTAGE for r in RATIO])
    (tmp_path / "own_loss.py").unlink()
    moved = open_run(written(tmp_path / "moved", f"algorithm.loss={tmp_path}/gone.py:own"))
    with pytest.raises(NotExplainedError, match="no such file"):
        explain(moved, 3, 17, loads_loss=True)


def test_command_prints_a_table_with_texts_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = written(tmp_path / "run")
    completion = {"text": "aaaaaa", "num_tokens": 6, "reward": 1.0}
    record_group(run_dir, {"index": 17, "version": 1, "completions": [completion]})
    runs.explain([str(run_dir), "3", "17"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "# step 3, update 0, group 17, completion 0, sequence 0"
    assert lines[1].split() == "token text lp_gen lp_prox lp ratio clip corr adv weight loss gradient share".split()  # noqa: SIM905
    assert lines[2].split()[:7] == ["2", '"a"', "-1.4000", "-1.0000", "-1.0000", "1.4918", "high"]
    runs.explain([str(run_dir), "3", "17", "--json"])
    (segment,) = json.loads(capsys.readouterr().out)
    assert (segment["index"], segment["completion"], segment["columns"]["token_id"]) == (17, 0, [7] * 4)
    with pytest.raises(SystemExit, match=r"^2$"):
        runs.explain([str(run_dir), "1", "17"])
    assert "no loss of group 17 is recorded" in capsys.readouterr().err
