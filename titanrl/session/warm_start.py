"""Warm start: supervised training before RL, on generated demonstrations of the task."""

import asyncio
from collections.abc import Sequence
from functools import partial

from titanrl.algorithms.schedule import learning_rate
from titanrl.carriers.types import AdamParams, Prompt
from titanrl.config.schema import Config
from titanrl.config.sections import WarmStartConfig
from titanrl.data.demonstrations import Demonstration, chain_sum_demonstrations, joined, mean_loss_data
from titanrl.data.streams import make_stream
from titanrl.data.tokenizer import Tokenizer
from titanrl.metrics.console import Console
from titanrl.rollout.renderers import PlainRenderer
from titanrl.session.training import TrainingClient

SHOW_EVERY_STEPS = 10


async def warm_start(
    training: TrainingClient, config: Config, settings: WarmStartConfig, tokenizer: Tokenizer, console: Console
) -> None:
    """Train on demonstrations. While one step is computed, the next is already queued at the trainer."""
    stream = make_stream(config.data, tokenizer, config.seed)
    environment = config.data.environment
    calls_tools = settings.tool_calls
    if calls_tools is None:
        calls_tools = environment is not None and environment.function == "calculator"
    demonstrate = partial(tool_demonstration, tokenizer) if calls_tools else None
    steps: asyncio.Queue[None] = asyncio.Queue(maxsize=2)
    async with asyncio.TaskGroup() as running:
        for step, batch in enumerate(chain_sum_demonstrations(stream, tokenizer, settings, config.seed, demonstrate)):
            await steps.put(None)
            running.create_task(_train(training, settings, step, batch, steps, console))


async def _train(
    training: TrainingClient,
    settings: WarmStartConfig,
    step: int,
    batch: Sequence[Demonstration],
    steps: "asyncio.Queue[None]",
    console: Console,
) -> None:
    """Take one optimizer step on the mean cross-entropy of the demonstrations' answer tokens."""
    passes = training.forward_backward(mean_loss_data(batch), "cross_entropy")
    output, _ = await asyncio.gather(passes, training.optim_step(adam_params(settings, step)))
    steps.get_nowait()
    if step % SHOW_EVERY_STEPS == 0 or step + 1 == settings.num_steps:
        console.progress("warm start", step + 1, settings.num_steps, f"loss {output.metrics['loss:sum']:.3f}")


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
