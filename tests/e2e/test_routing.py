"""Runs of a mixture of experts: routing replay with turns and a resume; balance by a bias, beside examples."""

import signal
from pathlib import Path

from tests.e2e.conftest import REPO, Start
from titanrl.carriers.dumps import DumpReader
from titanrl.carriers.supports import has_ids_S

EXPERTS = (
    "model.recipe={family: qwen3_moe, hidden_size: 64, intermediate_size: 32, num_layers: 2}",
    "warm_start=null",  # routing is replayed for the tokens of any policy
    f"data.environment={{function: '{REPO}/examples/second_try/train.py:SecondTry', max_turns: 2}}",
    f"data.rewards={{parity: '{Path(__file__).with_name('token_rewards.py')}:parity'}}",
    "trainer.row_tokens=192",
    "rollout.groups_per_step=4",
    "evaluation.num_prompts=8",
    "generator.dtype=bfloat16",
)


def test_replay_of_turns_survives_a_resume(start_run: Start, tmp_path: Path) -> None:
    reuse = ("replay.fraction=0.5", "trainer.share_prompts=true", f"rollout.save={tmp_path}/dump")
    command = start_run("routed", *EXPERTS, *reuse, "trainer.routing=replayed")
    command.wait_for_step(3)
    command.process.send_signal(signal.SIGKILL)
    command.finish()
    run = start_run("routed", resume=True).finish()
    assert run.code == 0, run.output
    assert len(run.steps) == 4
    for step in run.steps:
        assert step["mismatch/numeric/logprob_abs_max"] < 0.1
        assert 0.0 < step["experts/differ_frac"] < 0.5
        assert step["experts/no_ids_frac"] == 0.0
        assert step["experts/id_bytes"] == 2 * 2
    saved = DumpReader(tmp_path / "dump")
    rollouts = [rollout for place in range(saved.num_groups) for rollout in saved.group(place).rollouts]
    assert max(len(rollout.turns) for rollout in rollouts) > 1
    for segment in (segment for rollout in rollouts for segment in rollout.segments):
        assert segment.experts is not None
        assert has_ids_S(segment.experts).tolist() == [True] * (len(segment.token_ids) - 1) + [False]


def test_generators_choose_with_the_bias_of_the_experts(start_run: Start) -> None:
    # The scores of 8 experts are about 0.125, so the bias decides from the second step on.
    exact = ("generator.dtype=float32", "trainer.expert_bias_rate=0.05", "num_steps=3", "trainer.routing=compared")
    run = start_run("balanced", *EXPERTS, *exact, f"examples={{path: {REPO}/configs/chain_sum.jsonl, batch_size: 4}}").finish()
    assert run.code == 0, run.output
    assert len(run.steps) == 3
    for step in run.steps:
        assert step["experts/max_bias"] >= 0.05
        assert step["mismatch/logprob_abs_max"] < 1e-4
        assert step["experts/differ_frac"] == 0.0
        assert 0.0 < step["experts/no_ids_frac"] < 0.5, "the examples"
        assert step["examples/loss"] > 0.0
    assert "the exported model has no bias of experts" in run.output
    assert "2 layers, 16 numbers up to" in (run.run_dir / "logs" / "trainer_0.log").read_text()
