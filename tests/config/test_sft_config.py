"""The section `sft`: keys that it allows, and the sizes of a run without generators."""

from typing import Any

from titanrl.config import Config
from titanrl.config.dry_run import placements
from titanrl.config.sizes import derive


def make_config(**sections: Any) -> Config:
    return Config(name="a", num_steps=3, **{"sft": {"path": "examples.jsonl"}, **sections})


def test_keys_that_sft_uses_are_allowed() -> None:
    assert make_config(rollout={"max_new_tokens": 99}, algorithm={"max_skipped_steps": 1}).program == "sft"
    assert make_config(trainer={"row_tokens": 16}).max_sequence_tokens == 16
    assert make_config(device="cuda", hosts={"devices_per_host": 1}).num_generator_ranks == 0


def test_sizes_count_no_generators() -> None:
    config = make_config(
        sft={"path": "examples.jsonl", "batch_size": 48}, trainer={"row_tokens": 100, "rows_per_microbatch": 16}
    )
    sizes = derive(config, None)
    assert sizes.processes == {"controller": 1, "trainer": 1, "store": 1}
    assert (sizes.sequences_per_step, sizes.max_tokens_per_step, sizes.max_microbatches) == (48, 4800, 3)
    assert [row.role for row in placements(config, sizes, "cpu")] == ["trainer rank", "store", "controller"]
