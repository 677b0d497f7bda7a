"""The section `sft`: its rules, and the sizes of a run without generators."""

from pathlib import Path
from typing import Any

import pytest

from tests.config.test_wrong_configs import complaint
from titanrl.config import Config
from titanrl.config.dry_run import placements
from titanrl.config.sizes import derive

SFT = "name: a\nnum_steps: 3\nsft:\n  path: examples.jsonl\n"


def make_config(**sections: Any) -> Config:
    return Config(name="a", num_steps=3, **{"sft": {"path": "examples.jsonl"}, **sections})


@pytest.mark.parametrize(
    ("text", "keys", "rule", "fix"),
    [
        ("rollout: {group_size: 4}", "rollout.group_size=4", "does not use this key", "remove rollout.group_size"),
        ("algorithm: {learning_rate: 1e-4}", "algorithm.learning_rate=0.0001", "does not use", "set sft.learning_rate instead"),
        (
            "data: {heldout_fraction: 0.3}",
            "data.heldout_fraction=0.3",
            "does not use this key",
            "set sft.heldout_fraction instead",
        ),
        ("data: {rewards: {right: exact}}", "data.rewards=", "does not use this key", "remove data.rewards"),
        ("generator: {tp: 2}", "generator.tp=2", "does not use this key", "remove generator.tp"),
        (
            "distill: {teacher: {path: big}}",
            "sft=",
            "sft and distill select different subcommands",
            "remove one of the two sections",
        ),
    ],
)
def test_keys_without_effect_are_errors(tmp_path: Path, text: str, keys: str, rule: str, fix: str) -> None:
    found = complaint(tmp_path, f"{SFT}{text}\n")
    assert keys in found
    assert rule in found
    assert fix in found


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("sft.max_example_tokens=300", "row_tokens must be at least max_example_tokens"),
        (
            "sft={path: a.jsonl, validation_path: b.jsonl, heldout_fraction: 0.1}",
            "come either from validation_path or from path",
        ),
        ("sft.heldout_fraction=1.0", "must be a number >= 0 and < 1"),
        ("sft.train_on=user", "must be one of assistant, last, all"),
        ("sft={batch_size: 3}", "required"),
    ],
)
def test_impossible_values_are_errors(tmp_path: Path, override: str, rule: str) -> None:
    assert rule in complaint(tmp_path, SFT, override)


def test_keys_that_sft_uses_are_allowed() -> None:
    assert make_config(rollout={"max_new_tokens": 99}, algorithm={"max_skipped_steps": 1}).program == "sft"
    assert make_config(trainer={"row_tokens": 16}).max_sequence_tokens == 16


def test_sizes_count_no_generators() -> None:
    config = make_config(
        sft={"path": "examples.jsonl", "batch_size": 48}, trainer={"row_tokens": 100, "rows_per_microbatch": 16}
    )
    sizes = derive(config, None)
    assert sizes.processes == {"controller": 1, "trainer": 1, "store": 1}
    assert (sizes.sequences_per_step, sizes.max_tokens_per_step, sizes.max_microbatches) == (48, 4800, 3)
    assert [row.role for row in placements(config, sizes, "cpu")] == ["trainer rank", "store", "controller"]


def test_one_accelerator_is_enough_for_one_rank(tmp_path: Path) -> None:
    assert make_config(device="cuda", hosts={"devices_per_host": 1}).num_generator_ranks == 0
    found = complaint(
        tmp_path, f"{SFT}device: cuda\nhosts: {{devices_per_host: 1}}\ntrainer: {{parallelism: {{dp_shard: 2}}}}\n"
    )
    assert "a host needs one accelerator per trainer rank, which is 2" in found
