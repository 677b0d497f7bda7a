"""Read Hugging Face model directories: config.json, model family and model sizes. This module does not import torch."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.schema import Config
from titanrl.config.sections import ModelConfig
from titanrl.config.shapes import ModelShape
from titanrl.device import Device
from titanrl.files import in_shell, why_no_folder
from titanrl.loading import import_object
from titanrl.models.families import FAMILIES
from titanrl.models.family import HFConfig, ModelFamily

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
"""Keys of config.json that must be positive integers."""
SUPPORTED = ", ".join(FAMILIES)
ADD_FAMILY = "use a model of one of these types, or set model.family to a custom family (docs/howto/model_families.md)"
VARIANTS = ("-Base", "-Instruct")
"""Suffixes of model names whose models have the sizes of the model without the suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """Hugging Face model directory with a supported family."""

    path: Path
    """Path of the directory."""
    family: ModelFamily
    """Family of the model."""
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

    def spec(self, device: Device, max_positions: int) -> "ModelSpec":
        """Return torchtitan's spec of the model on a device, for rows of at most `max_positions` tokens."""
        from titanrl.models.attention import attention_for

        return self.family.spec(self.hf, attention_for(device), max_positions)


def open_model(path: Path, family: str | None = None) -> ModelDirectory:
    """Read a model directory for use by the trainer or a generator.

    Args:
        path: Hugging Face directory; only its config.json is read.
        family: Import path in `model.family`; None selects the family by model type.

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
    fix = f"correct the path, or download a model: `hf download {_hub_id(path.name)} --local-dir {in_shell(path)}`"
    if why := why_no_folder(path):
        return BrokenRule(values=values, rule=f"must be a directory, but it {why}", fix=fix)
    file = path / "config.json"
    if not file.is_file():
        return BrokenRule(values=values, rule="must be a Hugging Face model directory, but it has no config.json", fix=fix)
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return BrokenRule(values=values, rule=f"its config.json must be JSON: {error}", fix=fix)
    if not isinstance(raw, dict):
        return BrokenRule(values=values, rule="its config.json must be a JSON object", fix=fix)
    found = _family_of(raw, family, values)
    if isinstance(found, BrokenRule):
        return found
    hf = found.completed(raw)
    missing = [key for key in SIZES if not isinstance(hf.get(key), int) or hf[key] is True or hf[key] < 1]
    if missing:
        rule = f"its config.json must contain positive integers for {', '.join(missing)}"
        return BrokenRule(values=values, rule=rule, fix=fix)
    return ModelDirectory(path=path, family=found, hf=hf)


def _family_of(raw: dict[str, Any], family: str | None, values: dict[str, str]) -> ModelFamily | BrokenRule:
    model_type = str(raw.get("model_type"))
    if family is None:
        if model_type in FAMILIES:
            return FAMILIES[model_type]
        rule = f"its config.json must have one of the supported model types {SUPPORTED}, not {model_type}"
        return BrokenRule(values=values, rule=rule, fix=ADD_FAMILY)
    chosen = chosen_family(family)
    if isinstance(chosen, ModelFamily) and chosen.model_type != model_type:
        return BrokenRule(
            values={"model.family": family, **values},
            rule=f"the family is for model type {chosen.model_type}, but config.json has {model_type}",
            fix="remove model.family, or name the family of this model",
        )
    return chosen


def chosen_family(path: str) -> ModelFamily | BrokenRule:
    """Import the family that `model.family` names; return the broken rule if that fails or it is not a `ModelFamily`."""
    try:
        found = import_object(path, key="model.family")
    except ValueError as error:
        rule, fix = str(error).removeprefix("model.family: "), "correct the path or the module"
        return BrokenRule(values={"model.family": path}, rule=rule, fix=fix)
    if isinstance(found, ModelFamily):
        return found
    rule = f"must name a titanrl.models.family.ModelFamily, but this is of type {type(found).__name__}"
    return BrokenRule(values={"model.family": path}, rule=rule, fix="build one with titanrl.models.dense.dense_family")


def recipe_family(model: ModelConfig) -> ModelFamily | BrokenRule:
    """Return the family of the tiny model in `model.recipe`, or the rule that the configuration breaks."""
    if model.family is not None:
        found = chosen_family(model.family)
    elif model.recipe.family is None:
        found = next(iter(FAMILIES.values()))
    elif model.recipe.family in FAMILIES:
        found = FAMILIES[model.recipe.family]
    else:
        near = difflib.get_close_matches(model.recipe.family, FAMILIES, n=1)
        return BrokenRule(
            values={"model.recipe.family": model.recipe.family},
            rule=f"must be one of the supported model types {SUPPORTED}",
            fix=f"did you mean {near[0]}?" if near else "choose one of them",
        )
    if isinstance(found, ModelFamily) and found.recipe is None:
        rule = f"the family {found.model_type} has no recipe for a tiny model"
        return BrokenRule(values={"model.family": model.family}, rule=rule, fix="set model.path to a checkpoint")
    return found


def recipe_model(model: ModelConfig, path: Path = Path()) -> ModelDirectory | BrokenRule:
    """Return the tiny model of `model.recipe` as if it was already in the directory `path`, or the broken rule."""
    family = recipe_family(model)
    if isinstance(family, BrokenRule):
        return family
    assert family.recipe is not None
    return ModelDirectory(path=path, family=family, hf=family.completed(family.recipe(model.recipe)))


def model_shape(config: Config) -> ModelShape | None:
    """Return the sizes of the policy model, from the recipe or the checkpoint.

    If the checkpoint cannot be read, return the sizes of the published model that has the name of the directory, or None if
    there is no such model.
    """
    model = config.model
    found = recipe_model(model) if model.path is None else read_model(model.path, model.family)
    if isinstance(found, ModelDirectory):
        return found.shape
    return None if model.path is None else published_shapes().get(_without_variant(model.path.name))


def published_shapes() -> dict[str, ModelShape]:
    """Return the sizes of the published models by hub name without the organization."""
    return {hub_id.partition("/")[2]: shape for family in FAMILIES.values() for hub_id, shape in family.published.items()}


def _without_variant(name: str) -> str:
    for ending in VARIANTS:
        name = name.removesuffix(ending)
    return name


def _hub_id(name: str) -> str:
    """Return the hub id of the published model with this name, or a default: the first model of the first family."""
    ids = [hub_id for family in FAMILIES.values() for hub_id in family.published]
    return next((hub_id for hub_id in ids if hub_id.partition("/")[2] == name), ids[0])
