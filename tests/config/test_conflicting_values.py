"""Values that can be combined, next to those that `messages.yaml` refuses."""

from pathlib import Path

import pytest

from tests.config.wrong import GOOD, load_config_text
from titanrl.config import load_config


@pytest.mark.parametrize("loss", ["ppo", "reinforce, correction: {preset: token_tis}", "ppo, kl: {coef: 0.1}"])
def test_truncated_sampling_is_allowed_with_importance_ratios(tmp_path: Path, loss: str) -> None:
    truncated = GOOD + "rollout: {top_p: 0.9, top_k: 20, min_p: 0.1}\n"
    assert load_config_text(tmp_path, truncated + f"algorithm: {{loss: {loss}}}\n")


@pytest.mark.parametrize("overlong", ["truncate", "skip"])
def test_short_rows_are_allowed_with_overlong_truncate_or_skip(tmp_path: Path, overlong: str) -> None:
    assert load_config_text(tmp_path, GOOD + f"trainer: {{row_tokens: 64, overlong: {overlong}}}\n")


@pytest.mark.parametrize(
    "text",
    [
        "hosts: {devices_per_host: 1}\ndevice: cpu\n",
        "hosts: {devices_per_host: 1, share_devices: true}\ndevice: cuda\n",
        "hosts: {kind: slurm, trainer_hosts: 2, devices_per_host: 2}\ndevice: cuda\ntrainer: {parallelism: {dp_shard: 4}}\n",
    ],
)
def test_as_many_ranks_as_accelerators(tmp_path: Path, text: str) -> None:
    assert load_config_text(tmp_path, GOOD + text)


@pytest.mark.parametrize(
    "allowed", ["loss: reinforce, correction: {weight: token}", "loss: ppo, proximal: step_start", "loss: dro"]
)
def test_later_epochs_are_allowed_with_a_ratio_or_a_correction(tmp_path: Path, allowed: str) -> None:
    assert load_config_text(tmp_path, GOOD + f"trainer: {{epochs: 2}}\nalgorithm: {{{allowed}}}\n")


@pytest.mark.parametrize("loss", ["reinforce", "ppo, proximal: step_start"])
def test_replay_is_allowed_with_a_correction(tmp_path: Path, loss: str) -> None:
    path = tmp_path / "corrected.yaml"
    path.write_text(GOOD + f"replay: {{fraction: 0.5}}\nalgorithm: {{loss: {loss}, correction: {{weight: token}}}}\n")
    assert load_config(path).replay.num_replayed(8) == 8


def test_demonstrated_tool_calls_are_allowed_with_a_custom_tool(tmp_path: Path) -> None:
    assert load_config_text(
        tmp_path, GOOD + "warm_start: {tool_calls: true}\ndata: {environment: {function: 'tools_of_mine:Abacus'}}\n"
    )
