from pathlib import Path
from typing import Any

import pytest

from tests.config.test_dry_run import dry_run_text
from titanrl.config import Config, dry_run, sizes
from titanrl.config.errors import BrokenRule
from titanrl.config.schema import device_shortage
from titanrl.config.sections import RolloutConfig
from titanrl.config.sizes import Memory, ModelShape, Sizes, TrainerMemory, cpu_bytes, gigabytes, microbatch_rows, notes
from titanrl.config.sizes import derive as derive_with
from titanrl.models.directory import model_shape, published_shapes


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the machine memory for all rows of a micro-batch."""
    monkeypatch.setattr(sizes, "host_bytes", lambda: 10**15)


def make_config(**sections: Any) -> Config:
    return Config(name="a", num_steps=3, **sections)


def derive(config: Config) -> Sizes:
    return derive_with(config, model_shape(config))


def memory_of(**sections: Any) -> Memory:
    memory = derive(make_config(**sections)).memory
    assert memory is not None
    return memory


def all_misfits(**sections: Any) -> list[BrokenRule]:
    config = make_config(**sections)
    return list(dry_run.misfits(config, derive(config).memory))


def misfits(**sections: Any) -> list[str]:
    return list(map(str, all_misfits(**sections)))


def test_recipe_model_has_408320_parameters() -> None:
    # 112 * 128 embedding, also the head; 2 blocks of q, k, v, o, two head norms, gate, up, down, two norms; the last norm.
    block = 128 * 128 + 128 * 64 + 128 * 64 + 128 * 128 + 2 * 32 + 3 * 128 * 384 + 2 * 128
    shape = model_shape(make_config())
    assert shape.num_parameters == 112 * 128 + 2 * block + 128 == 408_320


def test_examples_count_in_the_rows_of_a_micro_batch() -> None:
    trainer = {"row_tokens": 128, "rows_per_microbatch": 64, "parallelism": {"dp_shard": 2}}
    small = {"groups_per_step": 1, "group_size": 2}
    assert sizes._num_rows(make_config(trainer=trainer, rollout=small), 64) == 1
    for max_tokens, rows in ((None, 20), (128, 20), (60, 10)):
        examples = {"path": "x.jsonl", "batch_size": 40, "max_example_tokens": max_tokens}
        assert sizes._num_rows(make_config(trainer=trainer, rollout=small, examples=examples), 64) == rows


def test_published_models_have_their_documented_parameters() -> None:
    parameters = {name: shape.num_parameters for name, shape in published_shapes().items()}
    assert parameters["Qwen3-0.6B"] == 596_049_920
    assert parameters["Qwen3-8B"] == 8_190_735_360
    assert parameters["Qwen2.5-0.5B"] == 494_032_768
    assert parameters["Llama-3.2-1B"] == 1_235_814_400
    assert parameters["Llama-3.1-8B"] == 8_030_261_248
    assert parameters["Mistral-7B-v0.3"] == 7_248_023_552
    # As their model cards say.
    billions = {name.removeprefix("Qwen3-"): round(number / 1e9, 1) for name, number in parameters.items() if "Qwen3" in name}
    assert billions == {
        "0.6B": 0.6,
        "1.7B": 1.7,
        "4B": 4.0,
        "8B": 8.2,
        "14B": 14.8,
        "32B": 32.8,
        "30B-A3B": 30.5,
        "235B-A22B": 235.1,
    }


def test_experts_count_in_all_parameters_and_only_the_chosen_ones_in_the_active_parameters() -> None:
    shape = published_shapes()["Qwen3-30B-A3B"]
    assert shape.expert_parameters == 128 * 3 * 2048 * 768
    assert shape.active_parameters / 1e9 == pytest.approx(3.3, abs=0.1)  # as its model card says
    tiny = model_shape(make_config(model={"recipe": {"family": "qwen3_moe", "intermediate_size": 64}}))
    block = 128 * 128 + 128 * 64 + 128 * 64 + 128 * 128 + 2 * 32 + 8 * (3 * 128 * 64 + 128) + 2 * 128
    assert tiny.num_parameters == 112 * 128 + 2 * block + 128
    assert tiny.num_parameters - tiny.active_parameters == 2 * 6 * 3 * 128 * 64


def test_expert_parallelism_leaves_the_share_and_gathers_fewer_experts() -> None:
    def memory(**plan: int) -> TrainerMemory:
        return memory_of(model={"path": "nowhere/Qwen3-30B-A3B"}, trainer={"parallelism": plan}).trainer

    alone, shared = memory(dp_shard=8), memory(dp_shard=8, ep=8)
    assert alone.state == shared.state
    assert alone.experts == 48 * 128 * 3 * 2048 * 768 * 4 // 8
    assert alone.gathered - shared.gathered == 2 * (128 - 16) * 3 * 2048 * 768 * 4


def test_missing_model_is_recognized_by_its_name() -> None:
    for name in ("Qwen3-8B", "Qwen3-8B-Base", "Qwen3-8B-Instruct"):
        assert memory_of(model={"path": f"nowhere/{name}"}).num_parameters == 8_190_735_360
    assert derive(make_config(model={"path": "nowhere/Qwen3-9B"})).memory is None


def test_sizes_of_the_default_recipe() -> None:
    sizes = derive(make_config(rollout={"num_workers": 3}, trainer={"row_tokens": 200, "rows_per_microbatch": 4}))
    assert sizes.processes == {"controller": 1, "trainer": 1, "generator": 1, "rollout": 3, "store": 1, "sandbox": 24}
    assert sizes.sequences_per_step == 64
    assert sizes.max_tokens_per_step == 64 * (64 + 26)
    # Two sequences of 90 tokens fit a row of 200, so 32 rows, four at once.
    assert sizes.max_microbatches == 8
    assert sizes.memory == Memory(
        num_parameters=408_320,
        active_parameters=408_320,
        trainer=TrainerMemory(
            parameters=408_320 * 4,
            gradients=408_320 * 4,
            optimizer=2 * 408_320 * 4,
            average=0,
            gathered=0,  # on one rank nothing is sharded
            # 4 rows of 200 tokens; 2 layers kept and one at work, each 4 x (128 + 128 + 64 + 384) numbers; logits twice.
            activations=800 * (3 * 4 * 704 + 2 * 112) * 4,
            unreduced=3 * 4 * 112 * 128,
            another_model=0,
        ),
        replica_weights=408_320 * 4,
        generator_rank_weights=408_320 * 4,
        packed_weights=0,
        published=2 * 408_320 * 4,
        # Keys and values of 2 layers x 2 heads x 32 floats are 1024 bytes a token.
        kv_cache=256 * 90 * 1024,
    )
    assert misfits() == []


def test_generator_ranks_share_matrices_and_replicate_norms() -> None:
    sizes = derive(make_config(generator={"replicas": 3, "tp": 2}))
    assert sizes.processes["generator"] == 6
    norms = 2 * (2 * 128 + 2 * 32) + 128
    assert sizes.memory.generator_rank_weights == ((408_320 - norms) // 2 + norms) * 4
    assert sizes.memory.replica_weights == 408_320 * 4
    assert "1.6 MB of weights in float32; 818.2 kB on each of 2 ranks" in dry_run_text(make_config(generator={"tp": 2}))


def test_tensor_parallel_generator_fits_a_larger_model() -> None:
    sections: dict[str, Any] = {
        "device": "cuda",
        "model": {"path": "nowhere/Qwen3-32B"},
        "trainer": {"parallelism": {"dp_shard": 32}, "activation_checkpointing": "full", "compute_dtype": "bfloat16"},
        "hosts": {"devices_per_host": 40},
    }
    (misfit,) = all_misfits(**sections)  # in float32
    assert misfit.values == {"model.path": "nowhere/Qwen3-32B", "generator.tp": 1}
    assert "a generator rank needs about 131.0 GB without KV cache" in misfit.rule
    assert "raise generator.tp" in misfit.fix
    assert misfits(**sections, generator={"tp": 4}) == []


def test_only_sharding_divides_the_state() -> None:
    parallelism = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    sizes = derive(make_config(trainer={"parallelism": parallelism, "dtype": "bfloat16"}, generator={"dtype": "bfloat16"}))
    assert sizes.processes["trainer"] == 8
    assert sizes.memory.trainer.state == 408_320 * 4 * 2 // 4
    assert sizes.memory.replica_weights == 408_320 * 2
    # Two sequences a row, 32 rows over 4 data-parallel ranks, 16 at once.
    assert sizes.max_microbatches == 1


def test_moving_average_of_trainable_parameters_counts_in_float32() -> None:
    half = {"dtype": "bfloat16", "parallelism": {"dp_shard": 2}}
    config = make_config(algorithm={"ema_decay": 0.99}, trainer=half)
    trainer = memory_of(algorithm={"ema_decay": 0.99}, trainer=half).trainer
    assert trainer.average == 408_320 * 4 // 2
    assert trainer.state == 408_320 * (4 * 2 + 4) // 2
    assert "816.6 kB moving average" in dry_run_text(config)
    adapters = memory_of(algorithm={"ema_decay": 0.99}, trainer={**half, "lora": {"rank": 4}}).trainer
    assert adapters.average == adapters.optimizer  # of two moments with half the bytes


def test_small_kv_cache_on_cpu_is_reported() -> None:
    (text,) = misfits(device="cpu", generator={"kv_cache_bytes": 256 * 90 * 1024 - 1})
    assert "need 23.6 MB of KV cache" in text
    assert f"Set generator.kv_cache_bytes to {256 * 90 * 1024}" in text
    assert misfits(device="cpu", generator={"kv_cache_bytes": 256 * 90 * 1024}) == []


def test_model_larger_than_this_machine_is_reported() -> None:
    (text,) = misfits(device="cpu", model={"path": "nowhere/Qwen3-32B"}, generator={"kv_cache_bytes": 10**15})
    # 32 762 123 264 parameters: 16 bytes each in the trainer and 8 for its export, which is more than the activations, 4 in the
    # generator, again 4 for packed layers without the embedding of 151 936 x 5120, twice 4 between them; the cache, and 2 GB of
    # libraries.
    assert "trainer and generators need about 1001309.5 GB" in text


def test_small_batch_limits_the_activations() -> None:
    """One row of 320 tokens takes 3 sequences of 64 + 26 tokens, so 16 sequences take 6 rows."""
    trainer = {"row_tokens": 320, "rows_per_microbatch": 16}
    for num_groups, rows in ((4, 6), (12, 16)):
        memory = memory_of(trainer=trainer, rollout={"groups_per_step": num_groups, "group_size": 4})
        assert memory.trainer.activations == rows * 320 * (3 * 4 * 704 + 2 * 112) * 4


def test_export_sets_the_peak_memory_of_a_large_model_on_cpu() -> None:
    trainer = memory_of(model={"path": "nowhere/Qwen3-0.6B"}, trainer={"row_tokens": 128, "rows_per_microbatch": 1}).trainer
    assert trainer.activations < 2 * 596_049_920 * 4
    assert trainer.cpu_total == 596_049_920 * (16 + 8)
    # At the end of a backward pass: the gradients of embedding and output layer, which are one matrix, and their sum.
    assert trainer.total == trainer.state + 3 * 4 * 151_936 * 1024


def test_rank_larger_than_a_device_is_reported() -> None:
    sections: dict[str, Any] = {"device": "cuda", "model": {"path": "nowhere/Qwen3-8B"}}
    (text,) = misfits(**sections)
    assert "a trainer rank needs about 184.3 GB" in text
    assert misfits(**sections, trainer={"parallelism": {"dp_shard": 4}, "rows_per_microbatch": 4}) == []


def test_shared_device_requires_a_memory_limit() -> None:
    shared = {"devices_per_host": 1, "share_devices": True}
    (text,) = misfits(device="cuda", hosts=shared)
    assert "Set generator.vllm.gpu_memory_utilization" in text
    assert misfits(device="cuda", hosts=shared, generator={"vllm": {"gpu_memory_utilization": 0.4}}) == []


def test_too_few_accelerators_only_warn_if_the_device_is_unknown() -> None:
    (text,) = misfits(device="auto", hosts={"devices_per_host": 1})
    assert text.endswith("; ignore this on CPU.")
    assert misfits(device="cpu", hosts={"devices_per_host": 1}) == []


def test_kv_cache_bytes_per_token() -> None:
    sizes = {"hidden_size": 8, "num_layers": 3, "num_heads": 4, "intermediate_size": 8, "num_kv_heads": 2, "head_dim": 5}
    shape = ModelShape(**sizes, vocab_size=16, max_positions=64)
    assert shape.kv_token_bytes("bfloat16") == 2 * 3 * 2 * 5 * 2


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(12, "12 B"), (1500, "1.5 kB"), (6_533_120, "6.5 MB"), (65_524_246_528, "65.5 GB")]
)
def test_bytes_are_formatted_with_a_suitable_unit(num_bytes: int, text: str) -> None:
    assert gigabytes(num_bytes) == text


def test_sum_reduction_is_noted() -> None:
    assert list(notes(make_config())) == []
    config = make_config(algorithm={"reduction": "sum"}, rollout={"groups_per_step": 4, "group_size": 2, "max_new_tokens": 100})
    (note,) = notes(config)
    assert "algorithm.reduction=sum" in note
    assert "up to 800" in note
    assert f"# Notes\n{note}" in dry_run_text(config)


def test_values_that_override_a_preset_are_noted() -> None:
    assert list(notes(make_config(algorithm={"preset": "ppo", "clip_low": 0.2, "dual_clip": 3.0}))) == []
    (note,) = notes(make_config(algorithm={"preset": "ppo", "advantage": "dr_grpo", "clip_high": 0.3}))
    assert note == (
        'algorithm.preset=ppo: the configuration sets other values for advantage="dr_grpo" (preset: "gae"), '
        "clip_high=0.3 (preset: 0.2). They are used."
    )


def test_short_rows_hold_one_sequence() -> None:
    sections = {"rollout": {"max_new_tokens": 200}, "trainer": {"row_tokens": 100, "overlong": "truncate"}}
    assert derive(make_config(**sections)).max_microbatches == 4


def test_only_adapters_have_gradients_with_lora() -> None:
    full, lora = memory_of(trainer={}), memory_of(trainer={"lora": {"rank": 4}})
    # In each of 2 layers: q, k, v, o of 128+128, 128+64, 128+64, 128+128 and three projections of 128+384, times the rank.
    adapters = 4 * 2 * (2 * 256 + 2 * 192 + 3 * 512)
    assert lora.trainer.parameters == full.trainer.parameters + 4 * adapters
    assert lora.trainer.gradients == 4 * adapters
    assert lora.trainer.optimizer == 8 * adapters
    assert lora.trainer.another_model == 16 * adapters
    memory = memory_of(trainer={"lora": {"rank": 4}}, generator={"model_impl": "native"}, weights={"lora": "adapters"})
    assert memory.published == 408_320 * 4 + 8 * adapters, "one base and two versions of the adapters"


def test_checkpointing_and_tensor_parallelism_save_activations() -> None:
    def activations(**trainer: Any) -> int:
        return memory_of(trainer=trainer).trainer.activations

    plain = activations()
    assert activations(activation_checkpointing="full") < activations(activation_checkpointing="selective") < plain
    assert activations(parallelism={"tp": 2}) == pytest.approx(plain / 2, rel=1e-6)


def test_compiled_layers_store_fewer_activations() -> None:
    model = {"path": "nowhere/Qwen3-0.6B"}
    shape = published_shapes()["Qwen3-0.6B"]
    plain, compiled = (memory_of(model=model, trainer={"compile": on}).trainer.activations for on in (False, True))
    tokens = 16 * 256
    stored = shape.layer_activations - shape.compiled_activations
    assert plain - compiled == 28 * tokens * stored * 4
    assert stored == (1 + 2) * 1024 + 3072  # a value of hidden size, one of queries, one of the feed-forward layer


def test_context_parallelism_divides_state_and_activations_except_keys_and_values() -> None:
    for checkpointing, layers in (("none", 3), ("selective", 2), ("full", 1)):  # of 2 layers, and the one that is recomputed
        trainer: dict[str, Any] = {"activation_checkpointing": checkpointing}
        plain, divided = memory_of(trainer=trainer).trainer, memory_of(trainer={**trainer, "parallelism": {"cp": 2}}).trainer
        assert divided.state == plain.state / 2
        tokens = 16 * 256
        assert divided.activations == pytest.approx(plain.activations / 2 + tokens * layers * 2 * 2 * 32 * 4, rel=1e-6)


def test_gathered_bytes_depend_on_resharding() -> None:
    def gathered(**plan: Any) -> int:
        return memory_of(model={"path": "nowhere/Qwen3-8B"}, trainer={"parallelism": plan}).trainer.gathered

    assert gathered() == 0
    assert gathered(dp_shard=8, fsdp_reshard_after_forward="never") == pytest.approx(4 * 8_190_735_360, rel=1e-3)
    assert gathered(dp_shard=8) < 8_190_735_360


def test_micro_batches_shrink_to_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 sequences of at most 90 tokens fill 6 rows of 320. The machine has the memory for as many rows as asked."""
    large: dict[str, Any] = {"model": {"path": "nowhere/Qwen3-0.6B"}, "trainer": {"row_tokens": 320}, "device": "cpu"}
    large["rollout"] = {"groups_per_step": 4, "group_size": 4}
    config, shape = make_config(**large), published_shapes()["Qwen3-0.6B"]

    def rows(num_bytes: float, config: Config = config) -> int:
        monkeypatch.setattr(sizes, "host_bytes", lambda: int(num_bytes / (1.0 - sizes.SPARE_SHARE)))
        return microbatch_rows(config, shape)

    memory = memory_of(**large)
    all_rows = cpu_bytes(config, memory, memory.trainer.cpu_total)
    assert memory.trainer.activations < 2 * 10**10
    assert rows(all_rows + 1) == 16
    assert rows(all_rows - 1) == 5
    row = 320 * 29 * shape.layer_activations * 4
    assert rows(all_rows - 4 * row + 1) == 2
    assert rows(10**9) == 1
    assert derive(config).max_microbatches == 6
    assert rows(10**9, make_config(**{**large, "device": "cuda"})) == 16


def test_mixed_precision_on_one_rank_holds_a_copy_of_the_parameters() -> None:
    def gathered(**trainer: Any) -> int:
        return memory_of(model={"path": "nowhere/Qwen3-0.6B"}, trainer=trainer).trainer.gathered

    assert gathered(dtype="bfloat16", compute_dtype="bfloat16") == 0
    assert gathered(compute_dtype="bfloat16") == 596_049_920 * 2
    assert gathered(compute_dtype="bfloat16", parallelism={"tp": 2}) == 596_049_920
    # FSDP instead gathers two layers, and embedding and output layer, which are one matrix.
    always = {"fsdp_reshard_after_forward": "always"}
    assert gathered(compute_dtype="bfloat16", parallelism=always) == 2 * (2 * 15_730_944 + 151_936 * 1024)
    assert gathered(parallelism=always) == 0


def test_last_gradients_of_a_pass() -> None:
    def trainer(name: str, **trainer: Any) -> TrainerMemory:
        return memory_of(model={"path": f"nowhere/{name}"}, trainer=trainer).trainer

    embedding = 151_936 * 1024
    # The gradients of embedding and output layer, and their sum.
    mixed = trainer("Qwen3-0.6B", compute_dtype="bfloat16")
    assert mixed.unreduced == 3 * 2 * embedding
    assert mixed.cpu_total == mixed.state + mixed.gathered + mixed.activations + mixed.unreduced
    for settings in ({"compile": True}, {"activation_checkpointing": "selective"}):
        reused = trainer("Qwen3-0.6B", dtype="bfloat16", compute_dtype="bfloat16", **settings)
        assert reused.cpu_total == reused.total == reused.state + reused.activations
    # FSDP's reduction in float32 holds three copies; the gathered parameters in bfloat16 are freed.
    sharded = {"compute_dtype": "bfloat16", "parallelism": {"dp_shard": 8}}
    reduced = trainer("Qwen3-0.6B", **sharded)
    assert reduced.unreduced == (3 * 4 - 2) * embedding
    assert reduced.cpu_total == reduced.state + reduced.gathered + reduced.activations + reduced.unreduced
    assert trainer("Qwen3-0.6B", **sharded, lora={}).unreduced == 0  # the embedding has no gradient
    untied = trainer("Qwen3-8B", **sharded)
    assert untied.unreduced == (3 * 4 - 2) * 2 * 151_936 * 4096
    assert untied.total == untied.state + untied.gathered + max(untied.activations, untied.unreduced)


def test_run_without_training_needs_no_trainer_rank() -> None:
    values = {"name": "sides", "num_steps": 1, "device": "cpu", "hosts": {"devices_per_host": 1}}
    config, alone = (Config.model_validate({**values, "train": train}) for train in (True, False))
    assert (config.num_trainer_ranks, alone.num_trainer_ranks) == (1, 0)
    assert "a host needs one accelerator per trainer rank and generator rank" in str(next(device_shortage(config)))
    assert list(device_shortage(alone)) == []
    assert derive(alone).processes == {"controller": 1, "generator": 1, "rollout": 1, "store": 1, "sandbox": 8}
    replayed = config.model_copy(update={"rollout": RolloutConfig(replay=Path("dump"))})
    assert (replayed.num_generator_ranks, replayed.evaluates, alone.evaluates) == (0, False, False)
