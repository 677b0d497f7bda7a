"""Supervised training before RL, through the very path that RL data takes: worker, shard, plan, trainer."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.algorithms.planning import plan_demonstrations
from titanrl.algorithms.schedule import learning_rate
from titanrl.config.schema import Config
from titanrl.config.sections import WarmStartConfig
from titanrl.metrics.console import Console
from titanrl.types import AdamParams, Handle

if TYPE_CHECKING:
    from titanrl.launch.assembly import Parts

SHOW_EVERY_STEPS = 10


async def warm_start(parts: "Parts", config: Config, settings: WarmStartConfig, target: Path, console: Console) -> None:
    """Train on demonstrations, export the result to `target`, and leave the trainer at version 0 with these weights."""
    trainer, plan = parts.trainer, config.trainer
    upcoming = asyncio.create_task(parts.workers.demonstrate(demonstration_handle(0)))
    for step in range(settings.num_steps):
        record = await upcoming
        if step + 1 < settings.num_steps:
            upcoming = asyncio.create_task(parts.workers.demonstrate(demonstration_handle(step + 1)))
        microbatches = plan_demonstrations(
            record,
            row_tokens=plan.row_tokens,
            rows_per_microbatch=plan.rows_per_microbatch,
            dp_size=plan.parallelism.dp_size,
        )
        losses = [await trainer.forward_backward(microbatch, "cross_entropy") for microbatch in microbatches]
        await trainer.optim_step(adam_params(settings, step))
        if step % SHOW_EVERY_STEPS == 0 or step + 1 == settings.num_steps:
            loss = sum(part.sums["loss/policy"] for part in losses)
            console.progress("warm start", step + 1, settings.num_steps, f"loss {loss:.3f}")
    await trainer.export_model(target)
    await trainer.start_over()


def adam_params(settings: WarmStartConfig, step: int) -> AdamParams:
    """The optimizer's settings at a step of the warm start."""
    rate = learning_rate(
        step,
        peak=settings.learning_rate,
        num_warmup_steps=settings.num_warmup_steps,
        decay="linear",
        num_steps=settings.num_steps,
    )
    return AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)


def demonstration_handle(step: int) -> Handle:
    """Where a batch of demonstrations lies: two places outside the buffer's slots, by turns, so that one can be prepared."""
    return Handle(shard=0, slot=-1 - step % 2, generation=step)
