"""Hugging Face model directories: config.json with family and sizes, the weight files, and adapters in the format of peft.

The trainer, vLLM's frozen models and the checks before a start choose the weight files as transformers does. This module does
not import torch, and reads only headers of weights, except to compare the two matrices of a tied model.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from titanrl.base.files import in_shell, why_no_file, why_no_folder
from titanrl.base.plugins import import_object
from titanrl.config.device import Device
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.load import did_you_mean
from titanrl.config.schema import Config
from titanrl.config.sections import FileDtype, LoraConfig, ModelConfig
from titanrl.config.sizes import ModelShape
from titanrl.models.families import FAMILIES
from titanrl.models.family import HFConfig, ModelFamily

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

SIZES = {
    "hidden_size": 1 << 20,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_key_value_heads": 1 << 20,
    "head_dim": 1 << 20,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 32,
}
"""Keys of config.json that must be positive integers, and their largest values, far above those of any model."""
SUPPORTED = ", ".join(FAMILIES)
ADD_FAMILY = "use a model of one of these types, or set model.family to a custom family (docs/howto/model_families.md)"
MODELS_IN = ("*", "checkpoints/final", "snapshots/*")
"""Places of model directories in a parent folder, a run directory, and the hub's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """Hugging Face model directory with a supported family."""

    path: Path
    family: ModelFamily
    hf: HFConfig
    """Contents of config.json, completed with the family's defaults."""

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.family.shape(self.hf)

    @property
    def problems(self) -> list[str]:
        """Error messages for options of config.json that the family does not support."""
        return self.family.problems(self.hf)

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]] | None:
        """Shapes of all tensors of a checkpoint by name; None if the family does not know them."""
        return None if self.family.tensors is None else self.family.tensors(self.hf)

    def weight_files(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> "WeightFiles":
        """Choose the weight files and compare their headers with the tensors of the model, by default those of the family."""
        found = read_weight_files(self.path, self.hf.get("transformers_weights"))
        shapes = self.tensors if shapes is None else shapes
        if shapes is not None and (broken := list(broken_by_tensors(found, shapes))):
            raise BrokenRules(*broken)
        return found

    def notes(self) -> Iterator[str]:
        """Yield remarks on files and tensors of the directory that are not used. The weights must be readable."""
        shapes, found = self.tensors, self.weight_files()
        yield from found.notes(dict.fromkeys(found.tensors, ()) if shapes is None else shapes)

    def spec(self, device: Device, max_positions: int) -> "ModelSpec":
        """Return torchtitan's spec of the model on a device, for rows of at most `max_positions` tokens."""
        from titanrl.models.decoder import attention_for

        return self.family.spec(self.hf, attention_for(device), max_positions)


def open_model(path: Path, family: str | None = None) -> ModelDirectory:
    """Read config.json of a model directory for the trainer or a generator. Without `family`, the model type selects it.

    Raises:
        ValueError: The directory cannot be read, or its model type or one of its options is not supported.
    """
    found = read_model(path, family)
    if isinstance(found, BrokenRule):
        raise BrokenRules(found)
    if found.problems:
        raise ValueError(f"{path / 'config.json'}: {found.problems[0]}")
    return found


def read_model(path: Path, family: str | None = None) -> ModelDirectory | BrokenRule:
    """Read a model directory; return the rule that it breaks if it cannot be read or its model type is not supported.

    Unsupported options of a supported model type are listed in `ModelDirectory.problems`.
    """
    if why := why_no_folder(path):
        return _not_a_directory(path, why)
    file, fix = path / "config.json", "correct it, or download the model again"
    if why := why_no_file(file):
        rule = f"must be a directory whose config.json is a file that can be read, but it {why}"
        return _without_config(path) if why == "does not exist" else _rule(path, rule, fix)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return _rule(path, f"its config.json must be JSON: {error}", fix)
    if not isinstance(raw, dict):
        return _rule(path, "its config.json must be a JSON object", fix)
    found = _family_of(path, raw, family)
    if isinstance(found, BrokenRule):
        return found
    hf = found.completed(raw)
    sizes = {**SIZES, **found.sizes}
    if missing := [key for key in sizes if not isinstance(hf.get(key), int) or hf[key] is True or hf[key] < 1]:
        return _rule(path, f"its config.json must contain positive integers for {', '.join(missing)}", fix)
    if large := [key for key, limit in sizes.items() if hf[key] > limit]:
        rule = f"{large[0]} of its config.json must be at most {sizes[large[0]]:,}, not {hf[large[0]]}"
        return _rule(path, rule, fix)
    return ModelDirectory(path=path, family=found, hf=hf)


def _family_of(path: Path, raw: dict[str, Any], family: str | None) -> ModelFamily | BrokenRule:
    model_type = str(raw.get("model_type"))[:200]
    if "model_type" not in raw:
        rule = f"its config.json must have a model_type, such as {SUPPORTED}, but it has none"
        return _rule(path, rule, "download the version of the model for transformers")
    if family is None:
        if model_type in FAMILIES:
            return FAMILIES[model_type]
        rule = f"its config.json must have one of the supported model types {SUPPORTED}, not {model_type}"
        return _rule(path, rule, ADD_FAMILY)
    chosen = chosen_family(family)
    if isinstance(chosen, ModelFamily) and chosen.model_type != model_type:
        return BrokenRule(
            {"model.family": family, "model.path": str(path)},
            f"the family is for model type {chosen.model_type}, but config.json has {model_type}",
            "remove model.family, or name the family of this model",
        )
    return chosen


def chosen_family(path: str) -> ModelFamily | BrokenRule:
    """Import the family that `model.family` names; return the broken rule if that fails or it is not a `ModelFamily`."""
    try:
        found = import_object(path, key="model.family")
    except ValueError as error:
        rule, fix = str(error).removeprefix("model.family: "), "correct the path or the module"
        return BrokenRule({"model.family": path}, rule, fix)
    if isinstance(found, ModelFamily):
        return found
    rule = f"must name a titanrl.models.family.ModelFamily, but this is of type {type(found).__name__}"
    return BrokenRule({"model.family": path}, rule, "build one with titanrl.models.dense.dense_family")


def recipe_model(model: ModelConfig, path: Path = Path()) -> ModelDirectory | BrokenRule:
    """Return the tiny model of `model.recipe` as if it was already in the directory `path`, or the broken rule."""
    if model.family is not None:
        family = chosen_family(model.family)
    elif model.recipe.family is None:
        family = next(iter(FAMILIES.values()))
    elif model.recipe.family in FAMILIES:
        family = FAMILIES[model.recipe.family]
    else:
        return BrokenRule(
            {"model.recipe.family": model.recipe.family},
            f"must be one of the supported model types {SUPPORTED}",
            did_you_mean(model.recipe.family, FAMILIES) or "choose one of them",
        )
    if isinstance(family, BrokenRule):
        return family
    if family.recipe is None:
        rule = f"the family {family.model_type} has no recipe for a tiny model"
        return BrokenRule({"model.family": model.family}, rule, "set model.path to a checkpoint")
    return ModelDirectory(path=path, family=family, hf=family.completed(family.recipe(model.recipe)))


def export_dtype(config: Config, base: Path) -> FileDtype:
    """Return the dtype of exported weights of a run that starts from the model directory `base`."""
    chosen = config.checkpoint.export_dtype
    return open_model(base, config.model.family).weight_files().dtype if chosen == "base" else chosen


def model_shape(config: Config) -> ModelShape | None:
    """Return the sizes of the policy model, from the recipe or the checkpoint.

    If the checkpoint cannot be read, return the sizes of the published model that has the name of the directory, or None if
    there is no such model.
    """
    model = config.model
    found = recipe_model(model) if model.path is None else read_model(model.path, model.family)
    if isinstance(found, ModelDirectory):
        return found.shape
    # The variants of a model have its sizes.
    name = "" if model.path is None else model.path.name.removesuffix("-Base").removesuffix("-Instruct")
    return published_shapes().get(name)


def published_shapes() -> dict[str, ModelShape]:
    """Return the sizes of the published models by hub name without the organization."""
    return {hub_id.partition("/")[2]: shape for family in FAMILIES.values() for hub_id, shape in family.published.items()}


def _not_a_directory(path: Path, why: str) -> BrokenRule:
    """Return the rule that a path breaks which is a file, does not exist, or is a name on the hub."""
    if not why_no_file(path):
        what, fix = ("GGUF ", ORIGINAL) if path.suffix == ".gguf" else ("", f"give its directory, {path.parent}")
        return _rule(path, f"must be a directory, but it is a {what}file", fix)
    if why != "does not exist":
        return _rule(path, f"must be a directory, but it {why}", "correct the path or its permissions")
    hub_id = _published_id(path)
    is_hub_id = str(path) == hub_id or (len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists())
    if is_hub_id and hub_id in (None, str(path)):
        folder = in_shell(Path("models", path.name))
        fix = f"download the model: `hf download {in_shell(path)} --local-dir {folder}`, and give that directory"
        rule = "must be a directory on this machine, but it does not exist"
        return _rule(path, rule, f"if it is a name on the Hugging Face hub, {fix}")
    rule = "must be a directory, but it does not exist"
    return _rule(path, rule, f"correct the path, or download a model: {_download(path)}")


def _without_config(path: Path) -> BrokenRule:
    """Return the rule that a directory without config.json breaks, with the fix for what it contains."""
    what = "must be a Hugging Face model directory, but it"
    try:
        names = {file.name for file in path.iterdir()}
        models = sorted(file.parent for pattern in MODELS_IN for file in path.glob(f"{pattern}/config.json"))
    except OSError as error:
        return _rule(path, f"must be a readable directory: {error}", "correct its permissions")
    if "adapter_config.json" in names:
        return _rule(path, "must be the directory of a complete model, but it is that of a PEFT adapter", MERGE_ADAPTER)
    if models:
        others = f", which is one of {len(models)} model directories in it" if len(models) > 1 else ""
        return _rule(path, f"{what} has no config.json", f"set it to {models[0]}{others}")
    if "commit.json" in names or "checkpoints" in names:
        fix = "finish the run, which exports the model to checkpoints/final, and give that directory"
        return _rule(path, f"{what} is a checkpoint or a run without an exported model", fix)
    if any(name.endswith(".gguf") for name in names):
        return _rule(path, f"{what} has GGUF files and no config.json", ORIGINAL)
    if "params.json" in names or any(name.startswith("consolidated") for name in names):
        fix = "download the version of the model for transformers"
        return _rule(path, f"{what} is in the format of the model's authors", fix)
    return _rule(path, f"{what} has no config.json", f"complete the download: {_download(path)}")


def _download(path: Path) -> str:
    """Return the command that downloads the model of a directory."""
    hub_id = _published_id(path) or f"ORGANIZATION/{path.name}"
    return f"`hf download {in_shell(Path(hub_id))} --local-dir {in_shell(path)}`"


def _published_id(path: Path) -> str | None:
    """Return the hub id of the published model that has the name of a directory; None if there is none."""
    ids = (hub_id for family in FAMILIES.values() for hub_id in family.published)
    return next((hub_id for hub_id in ids if hub_id.partition("/")[2] == path.name), None)


# Weight files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
OTHER_FORMATS = (".bin", ".pth", ".pt", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")
"""Suffixes of weight files that are never read."""
MAX_JSON_BYTES = 100 << 20
"""Largest header that the safetensors format allows; the limit of an index, too."""
DTYPES: Mapping[str, tuple[int, FileDtype]] = {
    "F64": (8, "float32"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
}
"""Bytes per element of each supported dtype, and the dtype of an export with `checkpoint.export_dtype: base`."""
OTHER_DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits per element of the other dtypes of the format."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Tensors that are one matrix in a tied model."""
BLOCK = re.compile(r"model\.layers\.\d+\.")
"""Prefix of the tensor names of a transformer block."""
FREQUENCIES = ".inv_freq"
"""Suffix of rotary frequencies, which old checkpoints store. config.json defines them."""
LFS = b"version https://git-lfs"
"""First bytes of the text that git clones without Git LFS leave in place of a large file."""
COMPARED_BYTES = 16 << 20
"""Bytes compared at a time."""
MERGE_ADAPTER = (
    "merge the adapter into its base model with `merge_and_unload()` of the package peft, save the result with "
    "`save_pretrained`, and give that directory, or give the base model and set trainer.lora.path to the adapter"
)
CONVERT = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
"""Program that writes `model.safetensors` into a directory whose weights are pickles."""
ORIGINAL = "download the original model, with safetensors, from which the GGUF files were made"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a weight file."""

    file: Path
    dtype: str
    """Dtype in the words of the format, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """Position of its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Weight files of a model directory, and the tensors in them."""

    path: Path
    files: tuple[Path, ...]
    """Files to read."""
    tensors: Mapping[str, StoredTensor]
    """Tensors by name, sorted."""
    not_read: tuple[str, ...]
    """Names of the other weight files in the directory."""

    @property
    def dtype(self) -> FileDtype:
        """Dtype of most of the elements."""
        sizes: Counter[FileDtype] = Counter()
        for tensor in self.tensors.values():
            if tensor.dtype in DTYPES:
                sizes[DTYPES[tensor.dtype][1]] += math.prod(tensor.shape)
        return sizes.most_common(1)[0][0] if sizes else "float32"

    def unused(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the names of the tensors that a model with these tensors does not load."""
        tied = {HEAD} if EMBEDDING in shapes and HEAD not in shapes else set()
        return [name for name in self.tensors if name not in shapes and name not in tied]

    def notes(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
        """Yield remarks on tensors and files of the directory that are not used."""
        if unused := self.unused(shapes):
            what = f"{len(unused)} of {len(self.tensors)} tensors are not part of the model and are not used"
            yield f"{self.path}: {what}: {_some(unused)}"
        if self.not_read:
            names = ", ".join(file.relative_to(self.path).as_posix() for file in self.files[:3])
            more = ", ..." if len(self.files) > 3 else ""
            yield f"{self.path}: the weights are those of {names}{more}. Not read: {_some(self.not_read)}"


def read_weight_files(path: Path, named: object = None) -> WeightFiles:
    """Choose the weight files of a model directory as transformers does, and read their headers.

    `named` is `transformers_weights` of config.json: the name of the file or index to read. Raise `BrokenRules` if there is no
    choice, more than one, or a file is missing, damaged or outside of the directory.
    """
    weight_map = None
    if named is not None:
        name = _inside(path, named, "transformers_weights of config.json")
        files = {name}
        if name.endswith(".index.json"):
            weight_map = _weight_map(path, name)
    elif (path / INDEX).is_file():
        weight_map = _weight_map(path, INDEX)
    elif (path / SINGLE).is_file():
        files = {SINGLE}
    else:
        raise BrokenRules(_without_weights(path))
    if weight_map is not None:
        files = set(weight_map.values())
        if named is None and (path / SINGLE).is_file() and files != {SINGLE}:
            raise _broken(
                path,
                f"must have one set of weights, but {SINGLE} lies beside {INDEX}, which names other files: transformers loads "
                "the first, vLLM the second",
                f"move {SINGLE} or {INDEX} to another folder",
            )
    chosen = tuple(path / name for name in sorted(files))
    tensors: dict[str, StoredTensor] = {}
    for file in chosen:
        for name, tensor in _read_header(path, file).items():
            if name in tensors:
                raise _broken(
                    path,
                    f"must store every tensor once, but {name} is in {tensors[name].file.name} and {file.name}",
                    "correct the index, or download the model again",
                )
            tensors[name] = tensor
    for name, where in (weight_map or {}).items():
        if name not in tensors or tensors[name].file != path / where:
            rule = f"{where} must contain {name}, as the index says, but it does not"
            raise _broken(path, rule, "correct the index, or download the model again")
    not_read = sorted(file.name for file in path.iterdir() if file not in chosen and _is_weight_file(file))
    return WeightFiles(path=path, files=chosen, tensors=dict(sorted(tensors.items())), not_read=tuple(not_read))


def broken_by_tensors(stored: WeightFiles, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[BrokenRule]:
    """Yield the rules that stored tensors break if the model has tensors of these names and shapes."""
    fix = "give a directory whose config.json and weights belong together"
    missing = sorted(shapes.keys() - stored.tensors.keys())
    if missing:
        rule = f"must contain every tensor of the model, but {len(missing)} of {len(shapes)} tensors are missing"
        yield _rule(stored.path, f"{rule}: {_some(missing)}", _fix_of_missing(stored, missing) or fix)
    if len(missing) == len(shapes):
        return
    if unknown := [name for name in stored.unused(shapes) if BLOCK.match(name) and not name.endswith(FREQUENCIES)]:
        rule = f"the blocks of the model must use all of their tensors, but {len(unknown)} tensors are not part of the model"
        yield _rule(stored.path, f"{rule}: {_some(unknown)}", fix)
    found = {name: stored.tensors[name] for name in shapes if name in stored.tensors}
    if other := [name for name, tensor in found.items() if tensor.shape != tuple(shapes[name])]:
        name = other[0]
        rule = (
            f"config.json must have the sizes of the weights, but {len(other)} tensors have other shapes, such as {name}: "
            f"{list(found[name].shape)}, not {list(shapes[name])}"
        )
        yield _rule(stored.path, rule, "correct config.json, or download the model again")
    if other := [name for name, tensor in found.items() if tensor.dtype not in DTYPES]:
        supported = ", ".join(DTYPES)
        rule = (
            f"the weights must have one of the dtypes {supported}, but {len(other)} tensors have others, such as {other[0]}: "
            f"{found[other[0]].dtype}"
        )
        yield _rule(stored.path, rule, "use the checkpoint that is not quantized")
    tensors = stored.tensors
    is_tied = EMBEDDING in shapes and HEAD not in shapes
    if is_tied and {HEAD, EMBEDDING} <= tensors.keys() and not _is_same(tensors[HEAD], tensors[EMBEDDING]):
        yield _rule(
            stored.path,
            f"config.json sets tie_word_embeddings, so {HEAD} must equal {EMBEDDING}, but it differs",
            f"set tie_word_embeddings to false in config.json, to use both matrices, or remove {HEAD} from the weights",
        )


def _fix_of_missing(stored: WeightFiles, missing: Sequence[str]) -> str | None:
    """Return a fix if the missing tensors are stored under names with another prefix, or only the output layer is missing."""
    if missing == [HEAD]:
        return f"set tie_word_embeddings to true in config.json if the model has no separate {HEAD}, or download it again"
    for name in stored.tensors:
        if name.endswith(missing[0]):
            return f"save the model with the usual names: this checkpoint has the prefix {name.removesuffix(missing[0])!r}"
        if name == missing[0].removeprefix("model."):
            return "save the model with its output layer, as a causal language model: these are the weights of the bare model"
    return None


def _weight_map(path: Path, index: str) -> dict[str, str]:
    """Return the file of each tensor in an index, all of which must exist in the directory."""
    try:
        if (path / index).stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
        content = json.loads((path / index).read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError("weight_map is not an object with entries")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        rule = f"{index} must be an index of weight files, but it cannot be read ({type(error).__name__}: {error!s:.200})"
        raise _broken(path, rule, "download the model again") from None
    files = {tensor: _inside(path, name, index) for tensor, name in weight_map.items()}
    if missing := sorted(name for name in set(files.values()) if not (path / name).is_file()):
        rule = f"must contain the {len(set(files.values()))} files that {index} names, but {len(missing)} are missing"
        raise _broken(path, f"{rule}: {_some(missing)}", "complete the download")
    return files


def _inside(path: Path, name: object, where: str) -> str:
    """Return the name of a file of the directory that a file of the directory gives."""
    is_inside = (
        isinstance(name, str)
        and name.endswith((SUFFIX, ".index.json") if where != INDEX else SUFFIX)
        and "\0" not in name
        and not PurePosixPath(name).is_absolute()
        and ".." not in PurePosixPath(name).parts
    )
    if not is_inside:
        rule = f"{where} must name safetensors files in the directory (got {name!r:.200})"
        raise _broken(path, rule, "correct the name, or download the model again")
    assert isinstance(name, str)
    return PurePosixPath(name).as_posix()


def _read_header(path: Path, file: Path) -> dict[str, StoredTensor]:
    """Read the header of a safetensors file, which must be complete."""
    name = file.relative_to(path).as_posix()
    rule, fix = f"{name} must be a complete safetensors file", "complete the download"
    if not file.is_file():
        raise _broken(path, f"{rule}, but it does not exist", fix)
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(len(LFS))
            if first == LFS:
                raise _broken(path, f"{rule}, but it is a Git LFS pointer", "run `git lfs pull` in the directory")
            num_bytes = int.from_bytes(first[:8], "little")
            if num_bytes > min(MAX_JSON_BYTES, size):
                raise ValueError(f"its header has {num_bytes:,} bytes, the file {size:,}")
            stream.seek(8)
            header = json.loads(stream.read(num_bytes))
        tensors = {key: _tensor(file, entry, 8 + num_bytes) for key, entry in header.items() if key != "__metadata__"}
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        if isinstance(error, BrokenRules):
            raise
        raise _broken(path, f"{rule} ({type(error).__name__}: {error!s:.200})", fix) from None
    places = sorted((tensor.start, tensor.start + tensor.num_bytes) for tensor in tensors.values())
    ends = [8 + num_bytes, *(end for _, end in places)]
    if ends[-1] != size or any(start != end for (start, _), end in zip(places, ends, strict=False)):
        raise _broken(path, f"{rule}, but its tensors end at byte {max(ends):,} of {size:,}, or overlap", fix)
    return tensors


def _tensor(file: Path, entry: Any, data_start: int) -> StoredTensor:
    """Convert an entry of a header, whose length must be that of its shape and dtype."""
    dtype, shape, (start, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    bits = 8 * DTYPES[dtype][0] if dtype in DTYPES else OTHER_DTYPE_BITS.get(dtype)
    fits = bits is None or 8 * (end - start) == bits * math.prod(shape)
    if start < 0 or end < start or min(shape, default=0) < 0 or not fits:
        raise ValueError(f"{end - start} bytes are not a tensor of {dtype} {list(shape)}")
    return StoredTensor(file=file, dtype=dtype, shape=shape, start=data_start + start, num_bytes=end - start)


def _is_same(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for position in range(0, one.num_bytes, COMPARED_BYTES):
            size = min(COMPARED_BYTES, one.num_bytes - position)
            if first.read(size) != second.read(size):
                return False
    return True


def _is_weight_file(file: Path) -> bool:
    return file.suffix in (SUFFIX, *OTHER_FORMATS) and file.is_file()


def _without_weights(path: Path) -> BrokenRule:
    """Return the rule that a directory without weights in a supported format breaks, with the fix for what it contains."""
    names = sorted(file.name for file in path.iterdir() if _is_weight_file(file))
    stored = [name for name in names if name.endswith(SUFFIX)]
    what = f"must contain {SINGLE}, or {INDEX} and the files that it names"
    if any(name.startswith("adapter_model.") for name in names):
        return _rule(path, f"{what}, but it has only the weights of an adapter", MERGE_ADAPTER)
    if any(name.startswith("consolidated") for name in names):
        fix = "download the version of the model for transformers"
        return _rule(path, f"{what}, but its weights are in the format of the model's authors: {_some(names)}", fix)
    if any(re.search(r"-\d+-of-\d+\.safetensors$", name) for name in stored):
        return _rule(path, f"{what}, but {INDEX} is missing", "complete the download")
    if len(stored) > 1:
        fix = f"rename the one to load to {SINGLE}, and move the others to another folder"
        return _rule(path, f"{what}, but it has {len(stored)} other weight files: {_some(stored)}", fix)
    if stored:
        return _rule(path, f"{what}, but it has only {stored[0]}", f"rename it to {SINGLE} if it holds the whole model")
    if any(name.endswith(".gguf") for name in names):
        return _rule(path, f"{what}, but it has only GGUF files: {_some(names)}", ORIGINAL)
    if names:
        fix = f"convert them: `python -c '{CONVERT}' {in_shell(path)}`"
        return _rule(path, f"{what}, but its weights have another format: {_some(names)}", fix)
    return _rule(path, f"{what}, but it has no weights", "complete the download")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _rule(path: Path, rule: str, fix: str) -> BrokenRule:
    return BrokenRule({"model.path": str(path)}, rule, fix)


def _broken(path: Path, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(_rule(path, rule, fix))


# Adapters

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."
"""Begin of the names of all tensors; the names of transformers follow."""
ADAPTER_ENDS = {".lora_a.weight": ".lora_A.weight", ".lora_b.weight": ".lora_B.weight"}
"""Ends of the names of torchtitan and of peft."""
IGNORED = (
    *("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules", "revision"),
    *("auto_mapping", "peft_version", "inference_mode", "exclude_modules", "layers_pattern", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
)
"""Options of peft that do not change what its tensors mean. All others must be off or empty."""
PLAIN = (True, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is. With others, peft changes the base when it loads the adapter."""


def adapter_config(lora: LoraConfig, alpha: float, modules: Sequence[str], base: Path | None) -> dict[str, Any]:
    """Return the contents of `adapter_config.json` for adapters of these modules of transformers, such as `q_proj`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else str(base),
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }


def broken_by_adapter(lora: LoraConfig) -> Iterator[BrokenRule]:
    """Yield the rules that the directory of `trainer.lora.path` breaks, except those on its tensors."""
    path = lora.path
    if path is None:
        return
    values: dict[str, object] = {"trainer.lora.path": str(path)}
    fix = "give a directory that peft's save_pretrained or an export wrote, or null"
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if why := why_no_file(path / name):
            yield BrokenRule(values, f"its {name} must be a file that can be read, but it {why}", fix)
            return
    try:
        found = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield BrokenRule(values, f"its {ADAPTER_CONFIG} must be JSON: {error}", fix)
        return
    if not isinstance(found, Mapping) or found.get("peft_type") != "LORA":
        yield BrokenRule(values, f"its {ADAPTER_CONFIG} must have the peft_type LORA", fix)
        return
    for theirs, ours, value in (("r", "rank", lora.rank), ("lora_alpha", "alpha", lora.alpha)):
        if found.get(theirs) != value:
            rule = f"its {theirs} must be trainer.lora.{ours}, but it is {found.get(theirs)!r:.100}"
            yield BrokenRule(values | {f"trainer.lora.{ours}": value}, rule, f"set trainer.lora.{ours} to it")
    harmless = {"bias": ("none",), "init_lora_weights": PLAIN}
    used = [name for name, value in found.items() if value and name not in IGNORED and value not in harmless.get(name, ())]
    if used:
        yield BrokenRule(values, f"its option {used[0]} is not supported (got {found[used[0]]!r:.100})", "use another adapter")
