"""Models on every layout: compared with transformers, exported, with adapters, and with losses that are not finite."""

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from tests.trainer import checks, variants
from tests.trainer.ranks import World
from titanrl.trainer.checkpoint import Checkpoints

Worlds = Callable[[int], World]
FSDP, TP, CP, BOTH = {"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 2, "tp": 2}
LAYOUTS = {"one rank": (1, {}), "fsdp": (2, FSDP), "cp": (2, CP), "fsdp x tp": (4, BOTH)}
WITH_TP = {**LAYOUTS, "tp": (2, TP)}
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny_model: Path, untied_model: Path) -> Path:
    return {"tied": tiny_model, "untied": untied_model}[request.param]


@functools.cache
def expected_logprobs(model: Path) -> list[np.ndarray]:
    """Compute log-probabilities with transformers, one sequence at a time, over the support if sampling was truncated."""
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plans, payload = checks.sequences()
    found = []
    for plan in plans:
        segment = payload[plan.handle][0]
        tokens = torch.from_numpy(segment.token_ids)
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, :-1]
        outside = torch.zeros_like(logits, dtype=torch.bool)
        for place in range(len(outside) if segment.supports is not None else 0):
            outside[place] = True
            outside[place, segment.supports.ids(place + 1)] = False
        logprobs = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
        found.append(logprobs.gather(-1, tokens[1:, None])[:, 0].numpy())
    return found


def assert_close(found: list[np.ndarray], expected: list[np.ndarray], atol: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=0)


@pytest.mark.parametrize(("layout", "model"), [*((layout, "tied") for layout in LAYOUTS), ("cp", "untied")], indirect=["model"])
def test_logprobs_match_transformers(layout: str, world: Worlds, model: Path) -> None:
    size, plan = LAYOUTS[layout]
    for found in world(size).run(variants.logprobs_one_by_one, model, {"parallelism": plan}):
        assert_close(found, expected_logprobs(model))


@pytest.mark.parametrize(
    ("layout", "model"),
    [("one rank", "tied"), ("fsdp", "untied"), ("tp", "tied"), ("fsdp x tp", "untied")],
    indirect=["model"],
)
def test_hugging_face_export_loads_bitwise_equal(layout: str, world: Worlds, model: Path, tmp_path: Path) -> None:
    size, plan = WITH_TP[layout]
    written = world(size).run(variants.export, model, {"parallelism": plan}, tmp_path / "out", 1)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"config.json", "tokenizer.json"}
    assert_close(written[0][0], expected_logprobs(tmp_path / "out"))
    assert world(size).run(variants.loaded_bytes, tmp_path / "out", {"parallelism": plan}) == [own for _, own in written]
    assert ("lm_head.weight" in load_file(next((tmp_path / "out").glob("*.safetensors")))) == (model.name == "untied")


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OTHER_FILES = (
    "pytorch_model.bin", "consolidated.00.pth", "model-q4.gguf", "optimizer.pt", "old.safetensors",
    "other.safetensors.index.json", "adapter_model.safetensors", "training_args.bin", "trainer_state.json",
    "README.md", "recipe.json",
)  # fmt: skip
TOKENIZER_FILES = (
    "chat_template.jinja",
    "special_tokens_map.json",
    "merges.txt",
    "LICENSE",
    "additional_chat_templates/tool.jinja",
)


@pytest.mark.parametrize(("dtype", "layout"), [("float32", "one rank"), ("float16", "one rank"), ("bfloat16", "fsdp")])
def test_export_has_one_dtype_and_only_files_of_a_model(
    dtype: str, layout: str, world: Worlds, tiny_model: Path, tmp_path: Path
) -> None:
    size, plan = LAYOUTS[layout]
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text()) | {"torch_dtype": "float32", "transformers_weights": None}
    (base / "config.json").write_text(json.dumps(config))
    (base / "additional_chat_templates").mkdir()
    for name in (*OTHER_FILES, *TOKENIZER_FILES):
        (base / name).write_text("{}")
    stale = tmp_path / "out.partial" / "sharded" / "shard-00009-model-00001-of-00001.safetensors"
    stale.parent.mkdir(parents=True)
    save_file({"stale": np.ones(3, np.float32)}, stale)
    world(size).run(variants.export, base, {"parallelism": plan}, out := tmp_path / "out", 1, dtype)
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", *TOKENIZER_FILES,
        "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    }  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], "torch_dtype" in config, "transformers_weights" in config) == (dtype, False, False)
    with safe_open(out / "model-00001-of-00001.safetensors", framework="pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {DTYPES[dtype]}  # noqa: SIM118
    assert next(transformers.AutoModelForCausalLM.from_pretrained(out).parameters()).dtype == DTYPES[dtype]


def test_export_in_bfloat16_rounds_trained_weights_to_nearest(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    for dtype in ("float32", "bfloat16"):
        world(2).run(variants.export, tiny_model, {"parallelism": FSDP}, tmp_path / dtype, 1, dtype)
    exact, rounded = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / dtype).state_dict()[name]
        for dtype in ("float32", "bfloat16")
    )
    assert torch.equal(exact.to(torch.bfloat16), rounded)
    assert not torch.equal(exact, rounded.float())


def test_export_names_weights_that_float16_cannot_hold(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    found = world(2).run(variants.warnings_of_export, tiny_model, {"parallelism": FSDP}, tmp_path / "out")
    text = "export: model.norm.weight: values beyond float16 are infinite now; see checkpoint.export_dtype"
    assert found == [[text], []], "only the rank that holds the value says so"


@pytest.mark.parametrize("section", [{}, {"dtype": "bfloat16"}, {"lora": LORA}], ids=["float32", "bfloat16", "lora"])
@pytest.mark.parametrize(("layout", "model"), [("one rank", "tied"), ("fsdp x tp", "untied")], indirect=["model"])
def test_loading_without_random_init_gives_same_tensors(layout: str, section: dict, world: Worlds, model: Path) -> None:
    size, plan = LAYOUTS[layout]
    world(size).run(variants.tensors_after_loading, model, {**section, "parallelism": plan}, 5)


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_tensor_missing_from_the_checkpoint_is_named(layout: str, world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    size, plan = LAYOUTS[layout]
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(tiny_model / "model.safetensors")
    del weights[name]
    folder = with_weights(tiny_model, tmp_path / "model", weights)
    with pytest.raises(AssertionError, match=rf"1 of 24 tensors are missing: {re.escape(name)}\."):
        world(size).run(variants.loaded_bytes, folder, {"parallelism": plan})


def test_missing_slice_of_tensor_is_an_error(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    """A file of torch's sharded checkpoints holds rows that begin at an offset, under the name of the tensor."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = with_weights(tiny_model, tmp_path / "model", weights := load_file(tiny_model / "model.safetensors"))
    places = json.dumps(
        {key: {SAVED_OFFSETS_KEY: [32 * (key == name)] + [0] * (value.ndim - 1)} for key, value in weights.items()}
    )
    save_file(weights, folder / "model.safetensors", metadata={CUSTOM_METADATA_KEY: places})
    with pytest.raises(AssertionError, match=rf"(?s)load the model in .*{name}|1 tensors were not loaded completely"):
        world(1).run(variants.loaded_bytes, folder, {})
    save_file(weights | {name: weights[name][:32]}, folder / "model.safetensors")
    with pytest.raises(
        AssertionError, match=rf"1 tensors have other shapes, such as {re.escape(name)}: \[32, 64\], not \[96, 64\]"
    ):
        world(1).run(variants.loaded_bytes, folder, {})


def with_weights(model: Path, target: Path, weights: Mapping[str, np.ndarray]) -> Path:
    """Copy a model directory and replace its weights."""
    shutil.copytree(model, target)
    save_file(dict(weights), target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize(("kind", "layout"), [("selective", "one rank"), ("selective", "fsdp x tp"), ("full", "cp")])
def test_activation_checkpointing_does_not_change_gradient(kind: str, layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    plain, loss = world(1).run(variants.gradient_and_loss, tiny_model, {})[0]
    section = {"parallelism": plan, "activation_checkpointing": kind}
    found, same_loss = world(size).run(variants.gradient_and_loss, tiny_model, section)[0]
    assert same_loss == pytest.approx(loss, abs=1e-6)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, plain[name], atol=1e-6)


@pytest.mark.parametrize("layout", ["one rank", "fsdp", "cp"])
def test_bfloat16_compute_stays_close(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    _, loss = world(1).run(variants.gradient_and_loss, tiny_model, {})[0]
    _, found = world(size).run(variants.gradient_and_loss, tiny_model, {"parallelism": plan, "compute_dtype": "bfloat16"})[0]
    assert found != loss
    assert found == pytest.approx(loss, rel=0.02)


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32")], ids=["bf16 passes", "bf16 weights"])
def test_mixed_precision_on_one_data_parallel_rank_is_that_of_fsdp(
    dtypes: tuple[str, str], world: Worlds, tiny_model: Path, tmp_path: Path
) -> None:
    """Without FSDP and with it, over which either continues from the other's checkpoint, and with tensor parallelism."""
    section = dict(zip(("dtype", "compute_dtype"), dtypes, strict=True))
    own, fsdp = ({**section, "parallelism": {"fsdp_reshard_after_forward": policy}} for policy in ("default", "always"))
    gradient, weights = world(1).run(variants.mixed_precision, tiny_model, fsdp, tmp_path / "fsdp")[0]
    for size, plan, folder in (
        (1, own, tmp_path / "own"),
        (1, own, tmp_path / "fsdp"),
        (1, fsdp, tmp_path / "own"),
        (2, {**section, "parallelism": TP}, tmp_path / "tp"),
    ):
        found, continued = world(size).run(variants.mixed_precision, tiny_model, plan, folder)[0]
        tolerance = 0.05 if size > 1 else 0.01  # one unit in the last place of bfloat16 is 0.8 %
        for name, expected in gradient.items():
            assert np.abs(found[name] - expected).max() <= tolerance * np.abs(expected).max(), name
        for name, expected in weights.items():
            np.testing.assert_allclose(continued[name], expected, rtol=0.01, atol=4 * checks.ADAM.learning_rate)


@pytest.mark.parametrize(
    ("layout", "policy"), [("one rank", "default"), ("one rank", "always"), ("cp", "default"), ("fsdp x tp", "always")]
)
def test_scoring_in_chunks_does_not_change_gradient(layout: str, policy: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    section = {"parallelism": {**plan, "fsdp_reshard_after_forward": policy}}
    assert all(world(size).run(variants.chunked_gradient_is_equal, tiny_model, section))


def test_lora_trains_only_adapters_and_publishes_them_merged_or_separately(world: Worlds, tiny_model: Path) -> None:
    size, plan = WITH_TP["tp"]
    alone = world(1).run(variants.train_adapters, tiny_model, {"lora": LORA})[0]
    found = world(size).run(variants.train_adapters, tiny_model, {"lora": LORA, "parallelism": plan})[0]
    for name, value in found["after"].items():
        assert np.array_equal(value, found["before"][name]) == (".lora_" not in name), name
        np.testing.assert_allclose(found["before"][name], alone["before"][name], atol=0)
        # AdamW divides by the size of the gradient, which magnifies the rounding of small ones; CPUs differ in it.
        np.testing.assert_allclose(value, alone["after"][name], atol=5e-5)
    stem = "layers.0.attention.qkv_linear.wq"
    product = found["after"][f"{stem}.lora_b.weight"] @ found["after"][f"{stem}.lora_a.weight"]
    assert np.abs(product).max() > 1e-3
    by_hand = found["before"][f"{stem}.weight"] + 2.0 * product
    np.testing.assert_allclose(found["merged"][f"{stem}.weight"], by_hand, atol=1e-6)
    assert not [name for name in found["merged"] if "lora" in name]

    adapters, base, versions = world(size).run(variants.published_adapters, tiny_model, {"lora": LORA, "parallelism": plan})[0]
    merged = found["merged"]
    assert versions == [0, 1]
    assert all(".lora_" in name for name in adapters)
    assert base.keys() == merged.keys()
    stem = "layers.1.feed_forward.w2"
    product = adapters[f"{stem}.lora_b.weight"] @ adapters[f"{stem}.lora_a.weight"]
    np.testing.assert_allclose(merged[f"{stem}.weight"], base[f"{stem}.weight"] + 2.0 * product, atol=1e-6)


def test_initial_adapters_depend_only_on_seed(world: Worlds, tiny_model: Path) -> None:
    one, other = (world(1).run(variants.initial_adapters, tiny_model, {"lora": LORA}, seed)[0] for seed in (1, 2))
    for size, plan in (LAYOUTS["cp"], LAYOUTS["fsdp x tp"]):
        section = {"lora": LORA, "parallelism": plan}
        for found in world(size).run(variants.initial_adapters, tiny_model, section, 1):
            assert found.keys() == one.keys()
            assert all(np.array_equal(found[name], one[name]) for name in one)
    assert all((one[name] != other[name]).mean() > 0.99 for name in one)


def test_lora_model_is_exported_merged(world: Worlds, untied_model: Path, tmp_path: Path) -> None:
    section = {"lora": {**LORA, "targets": ["mlp"]}, "parallelism": BOTH}
    found = world(4).run(variants.export, untied_model, section, tmp_path / "out", 1)
    assert_close(found[0][0], expected_logprobs(tmp_path / "out"))


@pytest.mark.parametrize(
    ("size", "plan", "recipe"),
    [(2, CP, "tensorwise"), (2, TP, "rowwise"), (1, {}, "rowwise_with_gw_hp")],
    ids=["cp", "tp, rowwise", "one rank, rowwise_with_gw_hp"],
)
def test_float8_emulated_on_cpu_stays_close(size: int, plan: dict, recipe: str, world: Worlds, tiny_model: Path) -> None:
    plain, loss = world(1).run(variants.gradient_and_loss, tiny_model, {})[0]
    section = {"parallelism": plan, "float8": recipe}
    gradient, found = world(size).run(variants.gradient_and_loss, tiny_model, section)[0]
    assert found != loss
    assert found == pytest.approx(loss, rel=0.05)
    assert gradient.keys() == plain.keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_model_has_same_gradient(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    plain, loss = world(1).run(variants.gradient_and_loss, tiny_model, {})[0]
    found, same_loss = world(size).run(variants.gradient_and_loss, tiny_model, {"parallelism": plan, "compile": True})[0]
    assert same_loss == pytest.approx(loss, abs=1e-5)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, plain[name], atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layer_is_compiled_once_for_all_row_lengths(world: Worlds, tiny_model: Path) -> None:
    (counts,) = world(1).run(variants.graphs_by_row_length, tiny_model, [24, 32, 28])
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.slow
def test_adapters_and_critic_compile_for_any_number_of_rows(world: Worlds, tiny_model: Path) -> None:
    (num_graphs,) = world(1).run(variants.passes_with_compiled_adapters, tiny_model)
    assert num_graphs > 8  # the default limit of torch, beyond which it fails


@pytest.mark.parametrize("plan", [FSDP, TP], ids=["fsdp", "tp"])
def test_nan_loss_on_one_rank_skips_step_on_all_ranks(world: Worlds, tiny_model: Path, plan: dict) -> None:
    assert world(2).run(variants.nan_loss_on_one_rank, tiny_model, plan) == [[(0, True), (1, False)]] * 2


def test_infinite_gradient_on_one_rank_skips_step_on_all_ranks(world: Worlds, tiny_model: Path) -> None:
    assert world(2).run(variants.infinite_gradient_on_one_rank, tiny_model, FSDP) == [(0, True)] * 2


@pytest.mark.parametrize("layout", ["one rank", "fsdp x tp"])
def test_step_without_loss_tokens_has_zero_gradient(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    assert world(size).run(variants.step_without_loss_tokens, tiny_model, plan) == [0.0] * size


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_forward_between_backward_and_step_changes_nothing(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    assert all(world(size).run(variants.forward_before_step, tiny_model, plan))


def test_gradient_norm_does_not_depend_on_layout(world: Worlds, tiny_model: Path) -> None:
    norms = [
        norm
        for rows, (size, plan) in ((8, LAYOUTS["one rank"]), *((1, layout) for layout in LAYOUTS.values()))
        for norm in world(size).run(variants.gradient_norm, tiny_model, plan, rows)
    ]
    assert min(norms) > 0.1
    assert max(norms) - min(norms) <= 1e-6 * max(norms)


def test_resume_from_a_background_write_is_bitwise_and_works_on_other_layouts(
    world: Worlds, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    uninterrupted = world(2).run(variants.save_and_continue, tiny_model, FSDP, folder, True)
    kept = sorted(path.name for path in folder.iterdir())
    assert kept[-2:] == ["step-2", "step-3"]
    assert len(kept) <= 3  # a write in the background can still fail, so the oldest may be kept until the next one
    resumed = world(2).run(variants.load_and_continue, tiny_model, FSDP, folder, 3)
    assert [version for version, _, _ in resumed] == [3, 3]
    assert [own for _, own, _ in resumed] == uninterrupted
    for size, plan in ((1, {}), (4, BOTH)):
        version, _, parameters = world(size).run(variants.load_and_continue, tiny_model, plan, folder, 3)[0]
        assert version == 3
        for name, value in parameters.items():
            np.testing.assert_allclose(value, resumed[0][2][name], atol=1e-5)


def test_resume_with_muon_is_bitwise_and_refuses_another_optimizer(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    """The checkpoints are not written in the background."""
    folder = tmp_path / "checkpoints"
    uninterrupted = world(2).run(variants.save_and_continue, tiny_model, FSDP, folder, False, "muon")
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-3"]
    resumed = world(2).run(variants.load_and_continue, tiny_model, FSDP, folder, 3, "muon")
    assert [own for _, own, _ in resumed] == uninterrupted
    with pytest.raises(AssertionError, match=r"it has no optimizer\.state\..*\. Resume with the model"):
        world(2).run(variants.load_and_continue, tiny_model, FSDP, folder, 3)


def momenta(model_dir: Path, folder: Path) -> list[set[float]]:
    """Return Muon's momenta after loading a checkpoint with another configured momentum, and after a step."""
    saved, learner = (checks.make_learner(model_dir, optimizer="muon") for _ in range(2))
    Checkpoints(saved, folder, 2).save(1)
    learner._algorithm = learner._algorithm.model_copy(update={"muon_momentum": 0.5})
    Checkpoints(learner, folder, 2).load(1)
    found = []
    for _ in range(2):
        groups = [group for optimizer in learner.optimizers for group in optimizer.param_groups]
        found.append({group["momentum"] for group in groups if "momentum" in group})
        variants.train(learner)
    return found


def test_configured_momentum_of_muon_replaces_that_of_a_checkpoint(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    assert world(1).run(momenta, tiny_model, tmp_path / "checkpoints") == [[{0.95}, {0.5}]]


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_kl_reference_is_snapshot_of_start(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    before, after = world(size).run(variants.kl_to_start, tiny_model, plan)[0]
    assert before == 0.0
    assert after > 1e-6


@pytest.mark.parametrize("layout", ["one rank", "fsdp"])
def test_optimizer_steps_on_one_batch_increment_version_once(layout: str, world: Worlds, tiny_model: Path) -> None:
    size, plan = LAYOUTS[layout]
    assert world(size).run(variants.steps_on_one_batch, tiny_model, plan) == [[0, 0, 1, 1]] * size
