"""The model a run starts from: a given directory, or a tiny model that is made, warm-started and cached."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from titanrl.config.schema import Config

RECIPE_REVISION = 1
"""Number of times the recipe or the demonstrations changed; cached models of other revisions are not used."""


@dataclass(frozen=True, slots=True)
class StartingModel:
    """Folders of the starting model."""

    initial: Path
    """Hugging Face directory before the warm start."""
    base: Path
    """Hugging Face directory that RL starts from; the same as `initial` without a warm start."""

    @property
    def is_ready(self) -> bool:
        """True if the base exists already."""
        return (self.base / "config.json").is_file()


def prepare_starting_model(config: Config) -> StartingModel:
    """Return the run's model; make the recipe's random model if it is not cached."""
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
    # The row layout changes the order of sums, so a base is reused only with the same trainer section.
    settings["trainer"] = config.trainer.model_dump()
    return StartingModel(initial, cached("base", config.cache_dir, settings, config.seed))


def cached(kind: str, cache_dir: Path, settings: dict[str, object], seed: int) -> Path:
    """Return the folder of a model made with these settings."""
    text = json.dumps([RECIPE_REVISION, seed, settings], sort_keys=True)
    return cache_dir.resolve() / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
