"""Choose the weight files of a model directory, and report files that cannot be read or do not fit the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import add_changed_weights, change_config, change_weights, shard, write_index
from titanrl.config.errors import BrokenRules
from titanrl.config.sections import RecipeConfig
from titanrl.models.directory import DTYPES, HEAD, OTHER_DTYPE_BITS, WeightFiles, open_model, read_weight_files
from titanrl.models.recipe import create_model

NUM_TENSORS = 24
"""Two layers of 11 tensors, the embedding and the last norm."""
INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tied"
    create_model(folder, RecipeConfig(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96), seed=3)
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def files_of(model: Path) -> WeightFiles:
    return open_model(model).weight_files()


def names_of(found: WeightFiles) -> list[str]:
    return [file.name for file in found.files]


def test_single_file_is_read_without_others(model: Path) -> None:
    add_changed_weights(model, "model-old.safetensors")
    (model / "pytorch_model.bin").write_bytes(b"weights")
    found = files_of(model)
    assert (names_of(found), len(found.tensors)) == (["model.safetensors"], NUM_TENSORS)
    assert list(open_model(model).notes()) == [
        f"{model}: the weights are those of model.safetensors. Not read: model-old.safetensors, pytorch_model.bin"
    ]


def test_files_of_the_index_are_read_without_others(model: Path) -> None:
    add_changed_weights(model, "zz-backup.safetensors")
    found = files_of(shard(model))
    assert (names_of(found), len(found.tensors)) == (SHARDS, NUM_TENSORS)
    assert {tensor.file.name for tensor in found.tensors.values()} == set(SHARDS)
    assert found.not_read == ("zz-backup.safetensors",)


@pytest.mark.parametrize(
    "names", [("weights-a.safetensors", "weights-b.safetensors"), ("parts/1.safetensors", "last.safetensors")]
)
def test_index_may_give_any_file_in_the_directory(names: tuple[str, str], model: Path) -> None:
    (model / "parts").mkdir()
    found = files_of(shard(model, names))
    assert {file.relative_to(model).as_posix() for file in found.files} == set(names)
    assert len(found.tensors) == NUM_TENSORS


def test_file_named_by_config_json_is_read(model: Path) -> None:
    add_changed_weights(model, "other.safetensors")
    assert names_of(files_of(change_config(model, transformers_weights="other.safetensors"))) == ["other.safetensors"]
    with pytest.raises(BrokenRules, match=r"transformers_weights of config\.json must name safetensors files in the directory"):
        files_of(change_config(model, transformers_weights="../model.safetensors"))


def test_linked_files_of_a_hub_cache_are_read(model: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "8f3a"
    blob.parent.mkdir()
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    assert names_of(files_of(model)) == ["model.safetensors"]


def without_file(name: str) -> Callable[[Path], object]:
    return lambda model: (shard(model) / name).unlink()


def renamed(*names: str) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        for name in names:
            shutil.copy(model / "model.safetensors", model / name)
        (model / "model.safetensors").unlink()

    return change


def replaced(*names: str) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        for name in names:
            (model / name).write_bytes(b"weights")
        (model / "model.safetensors").unlink()

    return change


def indexed(**weight_map: object) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        known = json.loads((shard(model) / INDEX).read_text())["weight_map"]
        write_index(model, known | weight_map)

    return change


def index_text(text: str) -> Callable[[Path], object]:
    return lambda model: (shard(model) / INDEX).write_text(text)


def beside_index(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "copy")
    (shard(model) / "copy").rename(model / "model.safetensors")


def named_single(model: Path) -> None:
    known = json.loads((shard(model) / INDEX).read_text())["weight_map"]
    (model / SHARDS[0]).rename(model / "model.safetensors")
    write_index(model, {name: "model.safetensors" if file == SHARDS[0] else file for name, file in known.items()})


def repeated(model: Path) -> None:
    weights = load_file(shard(model) / SHARDS[0])
    save_file(weights | {"extra": torch.zeros(2)}, model / "third.safetensors")
    known = json.loads((model / INDEX).read_text())["weight_map"]
    write_index(model, known | {"extra": "third.safetensors"})


def cut(num_bytes: int) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:num_bytes])

    return change


def lfs_pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 134\n")


def with_header(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def write(model: Path) -> None:
        file = model / "model.safetensors"
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return write


CHOICES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing shard": (without_file(SHARDS[1]), f"2 files that {INDEX} names, but 1 are missing: {SHARDS[1]}", "Complete the"),
    "missing index": (without_file(INDEX), f"but {INDEX} is missing", "Complete the download"),
    "outside": (indexed(a="../x.safetensors"), r"must name safetensors files in the directory \(got '../x.safe", "Correct the"),
    "absolute": (indexed(a="/etc/x.safetensors"), r"must name safetensors files in the directory \(got '/etc", "Correct the"),
    "number": (indexed(a=3), r"must name safetensors files in the directory \(got 3\)", "Correct the"),
    "pickle in the index": (indexed(a="pytorch_model.bin"), "must name safetensors files in the directory", "Correct the"),
    "name not in its shard": (indexed(a=SHARDS[0]), f"{SHARDS[0]} must contain a, as the index says", "Correct the index"),
    "name in another shard": (indexed(**{EMBEDDING: SHARDS[1]}), f"{SHARDS[1]} must contain {EMBEDDING}", "Correct the"),
    "repeated name": (repeated, "must store every tensor once, but .* is in .* and third", "Correct the index"),
    "index and single file": (beside_index, "must have one set of weights, but model.safetensors lies beside", "Move model"),
    "single file in the index": (named_single, "must have one set of weights, but model.safetensors lies beside", "Move model"),
    "broken index": (index_text("{"), f"{INDEX} must be an index of weight files", "Download the model again"),
    "deep index": (index_text("[" * 100_000), f"{INDEX} must be an index of weight files", "Download the model again"),
    "empty index": (index_text('{"weight_map": {}}'), "weight_map is not an object with entries", "Download the model again"),
    "list as index": (index_text('{"weight_map": ["a"]}'), "weight_map is not an object with entries", "Download"),
    "other name": (renamed("weights.safetensors"), "but it has only weights.safetensors", "Rename it to model.safetensors"),
    "two candidates": (renamed("a.safetensors", "b.safetensors"), "it has 2 other weight files: a.s.*, b.s", "Rename the one"),
    "adapter": (replaced("adapter_model.safetensors"), "only the weights of an adapter", "Merge the .*merge_and_unload"),
    "pickle": (replaced("pytorch_model.bin", "training_args.bin"), "its weights have another format: pytorch", "Convert them"),
    "GGUF": (replaced("model-q4.gguf"), "it has only GGUF files: model-q4.gguf", "Download the original model"),
    "authors' format": (replaced("consolidated.00.pth"), "in the format of the model's authors", "Download the version"),
    "nothing": (replaced(), "but it has no weights", "Complete the download"),
    "truncated": (cut(-1), "must be a complete safetensors file, but its tensors end at byte", "Complete the"),
    "header only": (cut(60), "model.safetensors must be a complete safetensors file", "Complete the download"),
    "empty file": (cut(0), "model.safetensors must be a complete safetensors file", "Complete the download"),
    "Git LFS": (lfs_pointer, "model.safetensors must be .*, but it is a Git LFS pointer", "Run `git lfs pull`"),
    "folder": (lambda model: ((model / "model.safetensors").unlink(), (model / "model.safetensors").mkdir()), "no weights", ""),
    "overlap": (
        with_header(lambda header: header[EMBEDDING].update(data_offsets=header["model.norm.weight"]["data_offsets"])),
        "bytes are not a tensor of F32",
        "Complete the download",
    ),
    "wrong length": (
        with_header(lambda header: header[EMBEDDING].update(shape=[7, 64])),
        r"bytes are not a tensor of F32 \[7, 64\]",
        "Complete the download",
    ),
    "no offsets": (with_header(lambda header: header[EMBEDDING].pop("data_offsets")), "KeyError: 'data_offsets'", "Complete"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHOICES)
def test_unreadable_weights_are_reported_with_rule_and_fix(kind: str, model: Path) -> None:
    change, rule, fix = CHOICES[kind]
    change(model)
    with pytest.raises(BrokenRules, match=rf'(?s)^model\.path="[^:]+: .*{rule}.*{fix}'):
        files_of(model)


def cast(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda weights: weights.update({name: value.to(dtype) for name, value in weights.items()})


def with_prefix(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[new + name.removeprefix(old)] = weights.pop(name)

    return change


TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str, str]] = {
    "missing": (lambda w: w.pop("model.norm.weight"), "1 of 24 tensors are missing: model.norm.weight", "Give a directory"),
    "prefix": (with_prefix("", "module."), "24 of 24 tensors are missing: model.emb", "this checkpoint has the prefix 'module"),
    "bare model": (with_prefix("model.", ""), "24 of 24 tensors are missing: model.embed", "weights of the bare model"),
    "not in a block": (
        lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        "1 tensors are not part of the model: model.layers.0.self_attn.q_proj.bias",
        "Give a directory",
    ),
    "more layers": (
        lambda w: w.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)}),
        "1 tensors are not part of the model: model.layers.2.mlp.up_proj.weight",
        "Give a directory",
    ),
    "shape": (
        lambda w: w.update({EMBEDDING: torch.zeros(120, 64)}),
        r"1 tensors have other shapes, such as model.embed_tokens.weight: \[120, 64\], not \[112, 64\]",
        "Correct config.json",
    ),
    "dtype": (
        lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.float8_e4m3fn)}),
        "dtypes F64, F32, F16, BF16, but 1 tensors have others, such as model.norm.weight: F8_E4M3",
        "Use the checkpoint that is not quantized",
    ),
    "tied head with other values": (
        lambda w: w.update({HEAD: w[EMBEDDING] + 1}),
        "sets tie_word_embeddings, so lm_head.weight must equal model.embed_tokens.weight, but it differs",
        "Set tie_word_embeddings to false in config.json",
    ),
    "tied head with another dtype": (
        lambda w: w.update({HEAD: w[EMBEDDING].half()}), "lm_head.weight must equal", "Set tie_word_embeddings to false"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_that_do_not_fit_are_reported(kind: str, model: Path) -> None:
    change, rule, fix = TENSORS[kind]
    with pytest.raises(BrokenRules, match=f"{rule}.*{fix}"):
        files_of(change_weights(model, change))


def test_missing_output_layer_has_its_own_fix(model: Path) -> None:
    with pytest.raises(BrokenRules, match=r"1 of 25 tensors are missing: lm_head\.weight\. Set tie_word_embeddings to true"):
        files_of(change_config(model, tie_word_embeddings=False))


def test_equal_output_layer_of_a_tied_model_is_used(model: Path) -> None:
    change_weights(model, lambda weights: weights.update({HEAD: weights[EMBEDDING].clone()}))
    assert list(open_model(model).notes()) == []
    files_of(shard(model))
    assert list(open_model(model).notes()) == []


def test_unused_tensors_are_counted_and_named(model: Path) -> None:
    more = {"value_head.weight": torch.zeros(1, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    change_weights(model, lambda weights: weights.update(more))
    assert list(open_model(model).notes()) == [
        f"{model}: 2 of 26 tensors are not part of the model and are not used: model.layers.0.self_attn.rotary_emb.inv_freq, "
        "value_head.weight"
    ]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, "float32"), (torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")],
)
def test_dtype_is_that_of_most_elements(dtype: torch.dtype, expected: str, model: Path) -> None:
    assert files_of(change_weights(model, cast(dtype))).dtype == expected
    change_weights(model, lambda weights: weights.update({"model.norm.weight": torch.ones(64)}))
    assert files_of(shard(model)).dtype == expected


def test_every_dtype_of_the_format_is_known(tmp_path: Path) -> None:
    kinds = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
        "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32,
        "U64": torch.uint64, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
        "C64": torch.complex64,
    }  # fmt: skip
    save_file({name: torch.zeros(6, dtype=kind) for name, kind in kinds.items()}, tmp_path / "model.safetensors")
    found = read_weight_files(tmp_path).tensors
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: name for name in kinds}
    assert kinds.keys() <= DTYPES.keys() | OTHER_DTYPE_BITS.keys()


def test_damaged_bytes_never_raise_another_error(model: Path) -> None:
    file, index = model / "model.safetensors", shard(Path(shutil.copytree(model, model.parent / "sharded"))) / INDEX
    for damaged in (file, index):
        content = damaged.read_bytes()
        for position in range(0, min(len(content), 3000), 7):
            damaged.write_bytes(content[:position] + bytes([content[position] ^ (1 << position % 8)]) + content[position + 1 :])
            try:
                open_model(damaged.parent).weight_files()
            except BrokenRules:
                continue
