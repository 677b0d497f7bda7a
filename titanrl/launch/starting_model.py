"""The model a run starts from: a given directory, or the recipe's tiny one, warm-started and cached."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from titanrl.config.schema import Config

RECIPE_REVISION = 1
"""Counts changes of the recipe or the demonstrations that make cached models outdated."""


@dataclass(frozen=True, slots=True)
class StartingModel:
    """Where training starts."""

    initial: Path
    """Hugging Face directory before the warm start."""
    base: Path
    """Hugging Face directory that RL starts from; the same as `initial` without a warm start."""

    @property
    def is_ready(self) -> bool:
        """Whether the base is there already."""
        return (self.base / "config.json").is_file()


def prepare_starting_model(config: Config) -> StartingModel:
    """Find the run's model; makes the recipe's random model if it is not cached."""
    if config.model.path is not None:
        initial = config.model.path.resolve()
    else:
        from titanrl.data.recipe import create_model

        initial = cached("initial", config.cache_dir, config.model.recipe.model_dump(), config.seed)
        create_model(initial, config.model.recipe, config.seed)
    if config.warm_start is None:
        return StartingModel(initial, initial)
    settings: dict[str, object] = {
        "warm_start": config.warm_start.model_dump(),
        "data": config.data.model_dump(mode="json"),
        "from": str(initial),
    }
    # The row layout changes the order of sums, so a base is reused only where it would come out the same.
    settings["trainer"] = config.trainer.model_dump()
    return StartingModel(initial, cached("base", config.cache_dir, settings, config.seed))


def cached(kind: str, cache_dir: Path, settings: dict[str, object], seed: int) -> Path:
    """Folder of a model made with these settings."""
    text = json.dumps([RECIPE_REVISION, seed, settings], sort_keys=True)
    return cache_dir.resolve() / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
