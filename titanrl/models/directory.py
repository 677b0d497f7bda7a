"""Read Hugging Face model directories: config.json, model family and model sizes. This module does not import torch."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanrl.base.choices import FileDtype
from titanrl.base.files import in_shell, why_no_file, why_no_folder
from titanrl.base.plugins import import_object
from titanrl.config.device import Device
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.load import did_you_mean
from titanrl.config.schema import Config
from titanrl.config.sections import ModelConfig
from titanrl.config.sizes import ModelShape
from titanrl.models.families import FAMILIES
from titanrl.models.family import HFConfig, ModelFamily
from titanrl.models.weight_files import MERGE_ADAPTER, ORIGINAL, WeightFiles, broken_by_tensors, read_weight_files

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

    def weight_files(self, shapes: Mapping[str, tuple[int, ...]] | None = None) -> WeightFiles:
        """Choose the weight files and compare their headers with the tensors of the model, by default those of the family.

        Raises:
            BrokenRules: The weights cannot be read, or do not fit.
        """
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
        from titanrl.models.attention import attention_for

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
    values = {"model.path": str(path)}
    if why := why_no_folder(path):
        return _not_a_directory(path, why)
    file, fix = path / "config.json", "correct it, or download the model again"
    if why := why_no_file(file):
        rule = f"must be a directory whose config.json is a file that can be read, but it {why}"
        return _without_config(path) if why == "does not exist" else BrokenRule(values=values, rule=rule, fix=fix)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return BrokenRule(values, f"its config.json must be JSON: {error}", fix)
    if not isinstance(raw, dict):
        return BrokenRule(values, "its config.json must be a JSON object", fix)
    found = _family_of(raw, family, values)
    if isinstance(found, BrokenRule):
        return found
    hf = found.completed(raw)
    sizes = {**SIZES, **found.sizes}
    if missing := [key for key in sizes if not isinstance(hf.get(key), int) or hf[key] is True or hf[key] < 1]:
        rule = f"its config.json must contain positive integers for {', '.join(missing)}"
        return BrokenRule(values, rule, fix)
    if large := [key for key, limit in sizes.items() if hf[key] > limit]:
        rule = f"{large[0]} of its config.json must be at most {sizes[large[0]]:,}, not {hf[large[0]]}"
        return BrokenRule(values, rule, fix)
    return ModelDirectory(path=path, family=found, hf=hf)


def _family_of(raw: dict[str, Any], family: str | None, values: dict[str, str]) -> ModelFamily | BrokenRule:
    model_type = str(raw.get("model_type"))[:200]
    if "model_type" not in raw:
        rule = f"its config.json must have a model_type, such as {SUPPORTED}, but it has none"
        return BrokenRule(values, rule, "download the version of the model for transformers")
    if family is None:
        if model_type in FAMILIES:
            return FAMILIES[model_type]
        rule = f"its config.json must have one of the supported model types {SUPPORTED}, not {model_type}"
        return BrokenRule(values, rule, ADD_FAMILY)
    chosen = chosen_family(family)
    if isinstance(chosen, ModelFamily) and chosen.model_type != model_type:
        return BrokenRule(
            {"model.family": family, **values},
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
    return (
        None if model.path is None else published_shapes().get(model.path.name.removesuffix("-Base").removesuffix("-Instruct"))
    )


def published_shapes() -> dict[str, ModelShape]:
    """Return the sizes of the published models by hub name without the organization."""
    return {hub_id.partition("/")[2]: shape for family in FAMILIES.values() for hub_id, shape in family.published.items()}


def _not_a_directory(path: Path, why: str) -> BrokenRule:
    """Return the rule that a path breaks which is a file, does not exist, or is a name on the hub."""
    values = {"model.path": str(path)}
    if not why_no_file(path):
        what, fix = ("GGUF ", ORIGINAL) if path.suffix == ".gguf" else ("", f"give its directory, {path.parent}")
        return BrokenRule(values, f"must be a directory, but it is a {what}file", fix)
    if why != "does not exist":
        fix = "correct the path or its permissions"
        return BrokenRule(values, f"must be a directory, but it {why}", fix)
    hub_id = _published_id(path)
    is_hub_id = str(path) == hub_id or (len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists())
    if is_hub_id and hub_id in (None, str(path)):
        return BrokenRule(
            values,
            "must be a directory on this machine, but it does not exist",
            f"if it is a name on the Hugging Face hub, download the model: `hf download {in_shell(path)} --local-dir "
            f"{in_shell(Path('models', path.name))}`, and give that directory",
        )
    fix = f"correct the path, or download a model: {_download(path)}"
    return BrokenRule(values, "must be a directory, but it does not exist", fix)


def _without_config(path: Path) -> BrokenRule:
    """Return the rule that a directory without config.json breaks, with the fix for what it contains."""
    values, rule = {"model.path": str(path)}, "must be a Hugging Face model directory, but it has no config.json"
    try:
        names = {file.name for file in path.iterdir()}
        models = sorted(file.parent for pattern in MODELS_IN for file in path.glob(f"{pattern}/config.json"))
    except OSError as error:
        return BrokenRule(values, f"must be a readable directory: {error}", "correct its permissions")
    if "adapter_config.json" in names:
        rule = "must be the directory of a complete model, but it is that of a PEFT adapter"
        return BrokenRule(values, rule, MERGE_ADAPTER)
    if models:
        others = f", which is one of {len(models)} model directories in it" if len(models) > 1 else ""
        return BrokenRule(values, rule, f"set it to {models[0]}{others}")
    if "commit.json" in names or "checkpoints" in names:
        rule = "must be a Hugging Face model directory, but it is a checkpoint or a run without an exported model"
        fix = "finish the run, which exports the model to checkpoints/final, and give that directory"
        return BrokenRule(values, rule, fix)
    if any(name.endswith(".gguf") for name in names):
        rule = "must be a Hugging Face model directory, but it has GGUF files and no config.json"
        return BrokenRule(values, rule, ORIGINAL)
    if "params.json" in names or any(name.startswith("consolidated") for name in names):
        rule = "must be a Hugging Face model directory, but it is in the format of the model's authors"
        return BrokenRule(values, rule, "download the version of the model for transformers")
    return BrokenRule(values, rule, f"complete the download: {_download(path)}")


def _download(path: Path) -> str:
    """Return the command that downloads the model of a directory."""
    hub_id = _published_id(path) or f"ORGANIZATION/{path.name}"
    return f"`hf download {in_shell(Path(hub_id))} --local-dir {in_shell(path)}`"


def _published_id(path: Path) -> str | None:
    """Return the hub id of the published model that has the name of a directory; None if there is none."""
    ids = (hub_id for family in FAMILIES.values() for hub_id in family.published)
    return next((hub_id for hub_id in ids if hub_id.partition("/")[2] == path.name), None)
