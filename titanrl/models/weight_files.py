"""Choose the weight files of a Hugging Face directory, read their headers, and compare them with the model.

The trainer, vLLM's frozen models and the checks before a start use the same choice, which is that of transformers. This module
does not import torch, and reads only headers, except to compare the two matrices of a tied model.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from titanrl.base.choices import FileDtype
from titanrl.base.files import in_shell
from titanrl.config.errors import BrokenRule, BrokenRules

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

    `named` is `transformers_weights` of config.json: the name of the file or index to read.

    Raises:
        BrokenRules: There is no choice, more than one, or a file is missing, damaged or outside of the directory.
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
        if named is None and (path / SINGLE).is_file() and SINGLE not in files:
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
