"""Measure training steps of a program against those of an environment: `python -m benchmarks.programs --json FILE`.

The same game of two calls is an environment in the rollout worker, an async function with OpenAI's client, and a command with
this client. A reply that was cut ends each of them, as it ends an environment's episode: an untrained model's are nearly all
cut. The runs with the environment and the function alternate every few steps, so that both are measured under equal conditions.
The command, whose processes start while another run would be measured, has its run for itself. All runs train the quick start's
model. `tokens_per_segment` shows how equal their work was.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import openai

from benchmarks.machine import write_result
from titanrl.carriers.types import StepMetrics
from titanrl.config import load_config
from titanrl.environments import Done, Episode, Message, Observation
from titanrl.environments.programs import ProgramTask
from titanrl.grpo import GRPO

COMMAND = """
import json, os, sys, openai
create, model = openai.OpenAI().chat.completions.create, os.environ["TITANRL_MODEL"]
asked = {"role": "user", "content": json.load(sys.stdin)["question"]}
reply = create(model=model, messages=[asked]).choices[0]
if reply.finish_reason != "length":
    create(model=model, messages=[asked, reply.message, asked])
"""
"""Program of the command, which imports nothing but the client."""
GAMES = {
    "environment": "{function: 'benchmarks.programs:Twice', max_turns: 2}",
    "function": "{program: 'benchmarks.programs:play', max_turns: 2}",
    "command": json.dumps({"program": [sys.executable, "-c", COMMAND], "max_turns": 2}),
}
"""Section `data.environment` of each form of the game."""
MEASURED = {"step_s": "time/step_s", "rollout_s": "time/rollout_s", "tokens_per_segment": "tokens/response_len_mean"}
"""Reported values of the steps by name, with the metrics that they are from."""
SKIPPED_STEPS = 2
"""Steps at the start of each turn that are not measured."""


class Twice:
    """Asks the question, and asks it again after the reply."""

    async def reset(self, episode: Episode) -> Observation:
        """Ask the question."""
        self._asked: Message = {"role": "user", "content": episode.question}
        self._num_replies = 0
        return Observation(messages=[self._asked])

    async def step(self, message: Message) -> Observation | Done:
        """Ask again, or end the episode."""
        self._num_replies += 1
        return Observation(messages=[self._asked]) if self._num_replies == 1 else Done()

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


@cache
def client(url: str) -> openai.AsyncOpenAI:
    """Return the client of all episodes; one for each would spend its time on reading certificates."""
    return openai.AsyncOpenAI(base_url=url, api_key="none")


async def play(task: ProgramTask) -> None:
    """Play the game as a function."""
    create = client(task.url).with_options(api_key=task.key).chat.completions.create
    asked: Any = {"role": "user", "content": task.question}
    reply = (await create(model=task.model, messages=[asked])).choices[0]
    if reply.finish_reason != "length":
        await create(model=task.model, messages=[asked, reply.message, asked])


def main() -> None:
    """Measure both programs, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--turns", type=int, default=4, help="number of turns of each run")
    parser.add_argument("--steps", type=int, default=8, help="measured steps per turn")
    parser.add_argument("--only", choices=["function", "command"], help="measure only one kind of program")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        measured = partial(measure, Path(folder), num_steps=arguments.steps, overrides=arguments.overrides)
        steps = dict[str, list[StepMetrics]]()
        if arguments.only != "command":
            steps |= asyncio.run(measured(("environment", "function"), num_turns=arguments.turns))
        if arguments.only != "function":
            steps |= asyncio.run(measured(("command",), num_turns=1))
    result = {
        metric: {game: spread([step.values[name] for step in of_game]) for game, of_game in steps.items()}
        for metric, name in MEASURED.items()
    }
    if arguments.json is not None:
        write_result(arguments.json, "programs", result)
    else:
        print(json.dumps(result, indent=2))


async def measure(
    folder: Path, games: Sequence[str], *, num_turns: int, num_steps: int, overrides: Sequence[str]
) -> dict[str, list[StepMetrics]]:
    """Alternate between runs with some forms of the game, and return the metrics of their steps."""
    runs: dict[str, GRPO] = {}
    try:
        for game in games:
            runs[game] = await started(folder, game, overrides)
        measured: dict[str, list[StepMetrics]] = {game: [] for game in games}
        for _ in range(num_turns):
            for game, run in runs.items():
                measured[game] += [await run.step() for _ in range(SKIPPED_STEPS + num_steps)][SKIPPED_STEPS:]
    finally:
        for run in runs.values():
            await run.close()
    return measured


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and the standard deviation."""
    return {"mean": statistics.fmean(values), "stdev": statistics.stdev(values)}


async def started(folder: Path, game: str, overrides: Sequence[str]) -> GRPO:
    """Start a run."""
    places = [
        f"name={game}",
        f"output_dir={folder}/runs",
        "logging.console=off",
        "num_steps=100000",
        "evaluation.num_prompts=0",
    ]
    equal = ["algorithm.learning_rate=1e-9"]  # policies that learned would sample more or fewer tokens than each other
    settings = [f"data.environment={GAMES[game]}", "data.rewards={answer: reasoning_gym}", "trainer.row_tokens=256", *equal]
    return await GRPO(load_config("configs/quickstart.yaml", [*places, *settings, *overrides])).start()


if __name__ == "__main__":
    main()
