"""Make a tiny model that can play in the format of an environment or of a program, but badly.

python examples/agents/scripted.py CONFIG MODULE:FUNCTION OVERRIDES [--episodes N] [--steps N]

The function returns the reply to a conversation, in text. It plays the part of the policy in some episodes of the
configuration, and the model of the configuration is made from them: a tokenizer that encodes any text and has long tokens for
the prompts, and weights that are trained on the replies.
"""

import argparse
import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from byte_model import create_byte_model, write_byte_tokenizer

import titanrl
from titanrl.base.plugins import import_object
from titanrl.carriers.rewards import Answers, Scored
from titanrl.carriers.types import Completion, GenerationRequest, Prompt, Segment
from titanrl.config import Config
from titanrl.config.sections import RecipeConfig
from titanrl.data.tokenizer import Tokenizer, load_tokenizer
from titanrl.rollout.episodes import start_episodes

MAX_TOKENS = 40_000
"""Longest episode in tokens, before the tokenizer has long ones."""


def longer(config: Config) -> Config:
    """Return a configuration for episodes whose tokens are bytes."""
    assert config.data.environment is not None
    environment = config.data.environment.model_copy(update={"max_conversation_tokens": MAX_TOKENS})
    data = config.data.model_copy(update={"environment": environment})
    return config.model_copy(update={"data": data, "rollout": config.rollout.model_copy(update={"max_new_tokens": 1000})})


async def play(config: Config, tokenizer: Tokenizer, reply: Callable[[str], str], num_episodes: int) -> list[Segment]:
    """Play episodes of the first tasks with a function that returns the policy's replies, and return their segments."""

    async def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        return [completed(tokenizer.encode(reply(tokenizer.decode_raw(request.token_ids)))) for request in requests]

    def completed(ids: list[int]) -> Completion:
        size = len(ids) + 1
        values: dict[str, Any] = {"logprobs": np.zeros(size, np.float32), "versions": np.zeros(size, np.int64)}
        return Completion(token_ids=np.array([*ids, tokenizer.eos_ids[0]]), finish_reason="stop", **values)

    async def score(answers: Answers) -> list[Scored]:
        return [Scored(reward=0.0, parts={}) for _ in answers.completions]

    source = import_object(str(config.data.source), key="data.source")
    rows = islice(source(seed=config.seed, **config.data.options), num_episodes)
    entries = [{"metadata": {}} | row for row in rows]
    prompts = [
        Prompt(index=number, task="scripted", text=entry["question"], token_ids=(), entry=entry)
        for number, entry in enumerate(entries)
    ]
    episodes = await start_episodes(config, tokenizer, score, {})
    try:
        sampling: dict[str, Any] = {"num_samples": 1, "temperature": 0.0, "seed": 0}
        groups = await episodes.answer(prompts, generate, max_new_tokens=config.rollout.max_new_tokens, **sampling)
    finally:
        await episodes.close()
    if errors := [failure.error for group in groups for failure in group.failures]:
        raise SystemExit(f"an episode failed: {errors[0]}")
    return [segment for group in groups for rollout in group.rollouts for segment in rollout.segments]


def learn(folder: Path, segments: Sequence[Segment], num_steps: int) -> None:
    """Train the model in a folder on the sampled tokens of segments."""
    torch.manual_seed(0)
    rng, model = random.Random(0), transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(num_steps):
        losses = []
        for segment in rng.choices(segments, k=8):
            ids = torch.from_numpy(segment.token_ids)
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            losses.append(-logprobs[torch.from_numpy(segment.mask[1:])].mean())
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)


async def make(config: Config, reply: Callable[[str], str], num_episodes: int, num_steps: int) -> None:
    """Write the model that the configuration names."""
    assert config.model.path is not None
    folder = Path(config.model.path)
    with TemporaryDirectory() as scratch:
        write_byte_tokenizer(Path(scratch))
        tokenizer = load_tokenizer(Path(scratch))
        segments = await play(longer(config), tokenizer, reply, min(8, num_episodes))
        prompts = [tokenizer.decode_raw(each.token_ids[~each.mask].tolist()) for each in segments]
    shutil.rmtree(folder, ignore_errors=True)
    create_byte_model(folder, RecipeConfig(max_positions=2048), seed=0, corpus="".join(prompts), num_merges=8000)
    segments = await play(config, load_tokenizer(folder), reply, num_episodes)
    print(f"{len(segments)} segments of at most {max(len(segment.token_ids) for segment in segments)} tokens")
    learn(folder, segments, num_steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a tiny model that can play in a format, but badly.")
    parser.add_argument("config")
    parser.add_argument("function", help="MODULE:FUNCTION of the script that plays the policy's part")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--episodes", type=int, default=128, help="episodes that the script plays")
    parser.add_argument("--steps", type=int, default=100, help="steps in which the model learns from them")
    asked = parser.parse_intermixed_args()
    config, reply = titanrl.load_config(asked.config, asked.overrides), import_object(asked.function, key="FUNCTION")
    asyncio.run(make(config, reply, asked.episodes, asked.steps))
