"""Measure rollouts per second through driver and environment: `python -m benchmarks.rollouts --json FILE`.

A stub replaces the generators and replies to each request immediately, so the benchmark measures the event loop of one rollout
worker: rendering, parsing, the environment, scoring by a plain function, and the record of the group. The cases alternate.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_result
from titanrl.carriers.rewards import Answers, Scored
from titanrl.carriers.types import Completion, GenerationRequest, Group, GroupHandle, OnTokens, Prompt
from titanrl.config import Config
from titanrl.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer
from titanrl.rollout.episodes import start_episodes
from titanrl.rollout.group import record_of, roll_out, sampling_requests
from titanrl.rollout.workers import packed

NUM_GROUPS, GROUP_SIZE, GROUPS_AT_ONCE = 64, 8, 8
"""Groups per measurement, rollouts per group, and groups that a worker rolls out concurrently."""
NUM_ROUNDS = 9
"""Measurements per case, after a warm-up."""
QUESTION = "State the final answer to the following arithmetic problem: 12 + 345 - 67 ="
ANSWERS = ("<tool_call>12+345-67</tool_call>", "<tool_call>290*1</tool_call>", "<answer>290</answer>")
"""Turns of the policy in the case with a tool."""

MakeGroup = Callable[[Prompt], Awaitable[Group]]


class Stub:
    """Stub that replies with the text of the current turn, which it recognizes by the length of the request."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        """Tokenize the answers."""
        self._answers = [np.array([*tokenizer.encode(text), tokenizer.eos_ids[0]]) for text in texts]
        self._lengths: dict[int, int] = {}

    async def __call__(self, requests: Sequence[GenerationRequest], *, on_tokens: OnTokens | None = None) -> list[Completion]:
        """Return the completions."""
        return [self._completion(len(request.token_ids)) for request in requests]

    def _completion(self, length: int) -> Completion:
        turn = self._lengths.setdefault(length, min(len(self._lengths), len(self._answers) - 1))
        ids = self._answers[turn]
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=np.zeros(len(ids), np.int64),
            finish_reason="stop",
        )


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    write_result(arguments.json, "rollouts", asyncio.run(measure()))


async def measure() -> dict[str, Any]:
    """Return the rollouts per second of each case."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = load_tokenizer(Path(folder))
    cases = {
        "without_environment": await completions(tokenizer),
        "single_turn": await episodes(tokenizer, "single_turn", ANSWERS[-1:]),
        "three_turns_with_tool": await episodes(tokenizer, "calculator", ANSWERS),
    }
    speeds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(NUM_ROUNDS + 1):
        for name, make in cases.items():
            speeds[name].append(await rollouts_per_s(make, tokenizer))
    return {
        "rollouts_per_s": {name: round(statistics.median(values[1:])) for name, values in speeds.items()},
        "rollouts_per_s_min": {name: round(min(values[1:])) for name, values in speeds.items()},
        "group_size": GROUP_SIZE,
        "groups_at_once": GROUPS_AT_ONCE,
    }


async def rollouts_per_s(make: MakeGroup, tokenizer: Tokenizer) -> float:
    """Return the rollouts per second of one case."""
    ids = tuple(tokenizer.encode(QUESTION))
    prompts = [
        Prompt(index=index, task="sums", text=QUESTION, token_ids=ids, entry={"answer": "290"}) for index in range(NUM_GROUPS)
    ]
    started = time.perf_counter()
    for first in range(0, NUM_GROUPS, GROUPS_AT_ONCE):
        groups = await asyncio.gather(*map(make, prompts[first : first + GROUPS_AT_ONCE]))
        for group in groups:
            assert len(group.rollouts) == GROUP_SIZE, group.failures
            handle = GroupHandle(shard=0, location=group.prompt.index, serial=1)
            record_of(group, handle, has_payload=True, num_overlong=0)
            packed(group.rollouts)
    return NUM_GROUPS * GROUP_SIZE / (time.perf_counter() - started)


async def completions(tokenizer: Tokenizer) -> MakeGroup:
    """Return a function that rolls out a group without an environment."""
    config, stub = make_config(), Stub(tokenizer, ANSWERS[-1:])

    async def make(prompt: Prompt) -> Group:
        return await roll_out(prompt, sampling_requests(prompt, config.rollout, config.seed), stub, score, tokenizer.decode)

    return make


async def episodes(tokenizer: Tokenizer, environment: str, texts: Sequence[str]) -> MakeGroup:
    """Return a function that rolls out a group of episodes in a built-in environment."""
    config = make_config(environment=environment)
    made, stub = await start_episodes(config, tokenizer, score, {}), Stub(tokenizer, texts)

    async def make(prompt: Prompt) -> Group:
        return await made.roll_out(prompt, stub, in_round=False)

    return make


def make_config(**data: object) -> Config:
    """Return a configuration with these values in its section `data`."""
    settings = {"name": "rollouts", "num_steps": 1, "data": data, "rollout": {"group_size": GROUP_SIZE}}
    return Config.model_validate(settings)


async def score(answers: Answers) -> list[Scored]:
    """Return reward 1 for completions with the right number, else 0."""
    return [Scored(reward=float("290" in text), parts={"answer": 1.0}) for text in answers.completions]


if __name__ == "__main__":
    main()
