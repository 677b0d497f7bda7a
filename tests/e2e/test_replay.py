"""Runs with replay: their metrics, several storage shards, spilled groups, and a resume."""

import signal

from tests.e2e.conftest import Finished, Start

REPLAY = ("replay.fraction=0.5", "replay.capacity=8", "replay.max_age=2", "evaluation.num_prompts=8", "rollout.top_p=0.95")
CURVE = ("reward/mean", "loss/policy", "grad/norm", "policy/ratio_max", "replay/weight_mean", "replay/age_mean")
CURVE += ("tokens/support_size_mean",)


def test_replay_is_unaffected_by_shards_spilling_and_kills(start_run: Start, plain_run: Finished) -> None:
    plain = start_run("replay", *plain_run.as_start, *REPLAY).finish()
    assert plain.code == 0, plain.output
    assert [row["replay/groups"] for row in plain.steps[:1]] == [0]
    assert all(1 <= row["replay/groups"] <= 8 for row in plain.steps[1:])
    assert all(1 <= row["replay/age_mean"] <= row["replay/age_max"] <= 2 for row in plain.steps[1:])
    assert max(row["replay/stored"] for row in plain.steps) == 8
    assert plain.steps[-1]["replay/evicted"] > 0
    assert all(row["staleness/max"] == 0 for row in plain.steps), "the age of new groups"
    assert plain.steps[-1]["mismatch/stale/logprob_abs_max"] > 0
    assert all(row["mismatch/numeric/logprob_abs_max"] < 1e-4 for row in plain.steps)
    assert all(row["buffer/spilled_bytes"] == 0 for row in plain.steps)
    assert all(1.0 < row["tokens/support_size_mean"] < 20.0 for row in plain.steps), "the checkpoint keeps supports"

    # First four workers, whose shards keep almost everything in files; then two workers.
    many = ("rollout.num_workers=4", "replay.shard_memory_bytes=2000")
    command = start_run("replay_many", *plain_run.as_start, *REPLAY, *many)
    command.wait_for_step(3)
    command.process.send_signal(signal.SIGKILL)
    command.finish()
    resumed = start_run("replay_many", "rollout.num_workers=2", resume=True).finish()
    assert resumed.code == 0, resumed.output
    assert all(row["buffer/spilled_bytes"] > 0.5 * row["buffer/bytes"] for row in resumed.steps)
    for name in CURVE:
        assert [row.get(name) for row in resumed.steps] == [row.get(name) for row in plain.steps], name
    assert [row["step"] for row in resumed.steps] == [1, 2, 3, 4]
    assert resumed.evaluations() == plain.evaluations()
