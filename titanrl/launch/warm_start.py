"""Supervised training before RL, on the same path as RL data: worker, shard, plan, trainer."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.algorithms.batch_plan import plan_demonstrations
from titanrl.algorithms.schedule import learning_rate
from titanrl.config.schema import Config
from titanrl.config.sections import WarmStartConfig
from titanrl.metrics.console import Console
from titanrl.types import AdamParams, GroupHandle, GroupRecord

if TYPE_CHECKING:
    from titanrl.launch.assembly import Parts

SHOW_EVERY_STEPS = 10


async def warm_start(parts: "Parts", config: Config, settings: WarmStartConfig, target: Path, console: Console) -> None:
    """Train on demonstrations, export the result to `target`, and reset the trainer to version 0 with these weights.

    One batch is prepared and one is queued at the trainer while a third is trained on.
    """
    upcoming = asyncio.create_task(parts.workers.demonstrate(demonstration_handle(0)))
    training: asyncio.Task[None] | None = None
    for step in range(settings.num_steps):
        record = await upcoming
        if step + 1 < settings.num_steps:
            upcoming = asyncio.create_task(parts.workers.demonstrate(demonstration_handle(step + 1)))
        before, training = training, asyncio.create_task(_train(parts, config, settings, step, record, console))
        if before is not None:
            await before
    if training is not None:
        await training
    await parts.trainer.export_model(target)
    await parts.trainer.start_over()


async def _train(
    parts: "Parts", config: Config, settings: WarmStartConfig, step: int, record: GroupRecord, console: Console
) -> None:
    """Take one optimizer step; the trainer serves its requests in the order they are made."""
    microbatches = plan_demonstrations(
        record,
        row_tokens=config.trainer.row_tokens,
        rows_per_microbatch=config.trainer.rows_per_microbatch,
        dp_size=config.trainer.parallelism.dp_size,
    )
    passes = parts.trainer.forward_backward(microbatches, "cross_entropy")
    losses, _ = await asyncio.gather(passes, parts.trainer.optim_step(adam_params(settings, step)))
    if step % SHOW_EVERY_STEPS == 0 or step + 1 == settings.num_steps:
        console.progress("warm start", step + 1, settings.num_steps, f"loss {losses.sums['loss/policy']:.3f}")


def adam_params(settings: WarmStartConfig, step: int) -> AdamParams:
    """Return the optimizer's options at a step of the warm start."""
    rate = learning_rate(
        step,
        peak=settings.learning_rate,
        num_warmup_steps=settings.num_warmup_steps,
        decay="linear",
        num_steps=settings.num_steps,
    )
    return AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def demonstration_handle(step: int) -> GroupHandle:
    """Return where to store the demonstrations of a step: outside the buffer's slots, in one of three places in turn."""
    return GroupHandle(shard=0, slot=-1 - step % 3, serial=step)
