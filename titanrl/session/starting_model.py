"""The model a run starts from: a given directory, or a tiny model that is created, warm-started and cached.

A warm start is supervised training before RL, on generated demonstrations of the task.
"""

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from titanrl.base.ownership import is_only_user, own_flaw
from titanrl.carriers.types import AdamParams, Prompt
from titanrl.config.algorithm import learning_rate
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.schema import Config
from titanrl.config.sections import WarmStartConfig
from titanrl.data.examples import Demonstration, chain_sum_demonstrations, joined, mean_loss_data
from titanrl.data.streams import make_stream
from titanrl.data.tokenizer import Tokenizer
from titanrl.metrics.console import Console
from titanrl.rollout.renderers import PlainRenderer
from titanrl.session.training import TrainingClient

RECIPE_REVISION = 2
"""Increased when the recipe or the demonstrations change; cached models of other revisions are not used."""
_END_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StartingModel:
    """Folders of the starting model."""

    initial: Path
    """Hugging Face directory before the warm start."""
    base: Path
    """Hugging Face directory that RL starts from; the same as `initial` without a warm start."""

    @property
    def is_ready(self) -> bool:
        """True if the base exists."""
        return (self.base / "config.json").is_file()


def prepare_starting_model(config: Config) -> StartingModel:
    """Return the run's model; create the recipe's random model if it is not cached."""
    if config.model.path is not None:
        initial = config.model.path.resolve()
    else:
        from titanrl.models.recipe import create_model

        made: dict[str, object] = config.model.recipe.model_dump(exclude_none=True)
        if config.model.family is not None:
            made["family"] = config.model.family
        initial = cached("initial", config.cache_dir, made, config.seed)
        create_model(initial, config.model.recipe, config.seed, config.model.family)
    if config.warm_start is None:
        return StartingModel(initial, initial)
    settings: dict[str, object] = {
        "warm_start": config.warm_start.model_dump(),
        # Demonstrations do not depend on the excluded keys.
        "data": config.data.model_dump(mode="json", exclude={"rewards", "path", "mixture", "curriculum"}),
        "from": initial.name if config.model.path is None else fingerprint(initial),
    }
    # The row layout changes the order of summation, so a base is reused only with the same trainer section.
    settings["trainer"] = config.trainer.model_dump(mode="json")
    return StartingModel(initial, cached("base", config.cache_dir, settings, config.seed))


def fingerprint(model_dir: Path) -> str:
    """Return a digest of a model directory's contents, independent of its path. Of large files, it covers both ends."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in model_dir.iterdir() if path.is_file()):
        digest.update(json.dumps([path.name, path.stat().st_size]).encode())
        with path.open("rb") as file:
            digest.update(file.read(_END_BYTES))
            if path.stat().st_size > 2 * _END_BYTES:
                file.seek(-_END_BYTES, os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()


@contextmanager
def new_base(model: StartingModel) -> Iterator[Path]:
    """Let the body create the base in a temporary folder; then rename it to `model.base`.

    If several processes do this at the same time, the first to finish provides the base.

    Yields:
        Path at which to create the base; it does not exist yet.
    """
    base = model.base
    base.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{base.name}-", dir=base.parent) as scratch:
        made = Path(scratch) / base.name
        yield made
        try:
            made.rename(base)
        except OSError:  # another process was faster
            if not model.is_ready:
                raise


def cached(kind: str, cache_dir: Path, settings: dict[str, object], seed: int) -> Path:
    """Return the cache folder of a model created with these settings, unless another user could have put another one there."""
    text = json.dumps([RECIPE_REVISION, seed, settings], sort_keys=True)
    folder = cache_dir.resolve() / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    if folder.exists() and not is_only_user() and (found := own_flaw(folder)):
        rule = f"a cached model must have been made by you ({found})"
        raise BrokenRules(BrokenRule({"cache_dir": str(cache_dir)}, rule, "set it to a folder of yours"))
    return folder


SHOW_EVERY_STEPS = 10


async def warm_start(
    training: TrainingClient, config: Config, settings: WarmStartConfig, tokenizer: Tokenizer, console: Console
) -> None:
    """Warm-start the policy on demonstrations. While one step is computed, the next is already queued at the trainer."""
    stream = make_stream(config.data, tokenizer, config.seed)
    environment = config.data.environment
    calls_tools = settings.tool_calls
    if calls_tools is None:
        calls_tools = environment is not None and environment.function == "calculator"
    demonstrate = partial(tool_demonstration, tokenizer) if calls_tools else None
    places = asyncio.Semaphore(2)

    async def train(step: int, batch: Sequence[Demonstration]) -> None:
        passes = training.forward_backward(mean_loss_data(batch), "cross_entropy")
        output, _ = await asyncio.gather(passes, training.optim_step(adam_params(settings, step)))
        places.release()
        if step % SHOW_EVERY_STEPS == 0 or step + 1 == settings.num_steps:
            console.progress("warm start", step + 1, settings.num_steps, f"loss {output.metrics['loss:sum']:.3f}")

    async with asyncio.TaskGroup() as running:
        for step, batch in enumerate(chain_sum_demonstrations(stream, tokenizer, settings, config.seed, demonstrate)):
            await places.acquire()
            running.create_task(train(step, batch))


def tool_demonstration(tokenizer: Tokenizer, prompt: Prompt, short: bool) -> Demonstration:
    """Return a demonstration that answers a sum with a tool call; if `short`, without the call."""
    renderer = PlainRenderer(tokenizer)
    answer, stop = str(prompt.entry["answer"]), list(renderer.stop_ids[:1])
    reply = [*tokenizer.encode(f"<answer>{answer}</answer>"), *stop]
    if short:
        return joined(prompt.token_ids, [(reply, True)])
    expression = prompt.entry["metadata"]["expression"].replace(" ", "")
    call = [*tokenizer.encode(f"<tool_call>{expression}</tool_call>"), *stop]
    response = renderer.render([{"role": "tool", "content": answer}], ())
    return joined(prompt.token_ids, [(call, True), (response, False), (reply, True)])


def adam_params(settings: WarmStartConfig, step: int) -> AdamParams:
    """Return the optimizer options for a step of the warm start."""
    rate = learning_rate(
        step,
        peak=settings.learning_rate,
        num_warmup_steps=settings.num_warmup_steps,
        decay="linear",
        num_steps=settings.num_steps,
    )
    return AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8, max_grad_norm=1.0)
