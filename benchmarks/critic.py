"""Compare a critic with the mean of the group as the baseline: `python -m benchmarks.critic --json FILE`.

An episode consists of several independent sums, one per turn, each with a reward of 1 if it is correct. The reward of a rollout
is their sum, so with the mean of the group as the baseline, a wrong turn is reinforced if the other turns are right. With a
critic, each turn has its own advantage. Every variant starts from the same model and plays as many episodes per step.
"""

import argparse
import random
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from benchmarks.quickstart import run_command
from titanrl.environments import Done, Episode, Message, Observation
from titanrl.metrics.reading import read_metrics

NUM_TURNS = 4
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "mean of the group": (),
    "critic": (
        "algorithm.advantage=gae",
        "algorithm.turn_discount=0",
        "algorithm.critic={learning_rate: 5e-4, warmup_steps: 5}",
    ),
}
PHRASE = "State the final answer to the following arithmetic problem: "
"""Start of the prompts that the model of the quick start knows."""
_ANSWER = re.compile(r"<answer>\s*(-?\d+)\s*</answer>")


class Sums:
    """An environment that asks for one sum per turn. Each sum replaces the conversation, so that turns are independent."""

    def __init__(self) -> None:
        """Start without an episode."""
        self._random = random.Random()
        self._left, self._answer = NUM_TURNS, 0

    async def reset(self, episode: Episode) -> Observation:
        """Ask for the first sum."""
        self._random.seed(episode.seed)
        return self._ask(reward=0.0)

    async def step(self, message: Message) -> Observation | Done:
        """Compare the answer, and ask for the next sum."""
        answers = _ANSWER.findall(str(message.get("content") or ""))
        reward = float(bool(answers) and int(answers[-1]) == self._answer)
        self._left -= 1
        return self._ask(reward) if self._left else Done(reward=reward)

    async def close(self) -> None:
        """Release nothing."""

    def _ask(self, reward: float) -> Observation:
        terms = [self._random.randint(1, 9) for _ in range(self._random.randint(3, 4))]
        question, self._answer = str(terms[0]), terms[0]
        for term in terms[1:]:
            sign = self._random.choice([1, -1])
            question, self._answer = f"{question} {'+' if sign > 0 else '-'} {term}", self._answer + sign * term
        return Observation(messages=[{"role": "user", "content": f"{PHRASE}{question} ="}], reward=reward, replaces=True)


def main() -> None:
    """Measure every variant with every seed and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.critic", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    parser.add_argument("--model", type=Path, help="warm-started model of the quick start; by default, it is trained first")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as temporary:
        folder = Path(temporary)
        model = arguments.model or warm_started(folder)
        runs = [measure(folder, model, name, seed, arguments.steps) for seed in arguments.seeds for name in VARIANTS]
    variants = {name: summary([run for run in runs if run["variant"] == name]) for name in VARIANTS}
    write_result(arguments.json, "critic", {"variants": variants, "runs": runs}, shown=variants)


def warm_started(folder: Path) -> Path:
    """Return the exported model of a quick start that has taken one small step."""
    run_command([f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "name=base", "num_steps=1", "logging.console=off"])
    return folder / "runs/base/checkpoints/final"


def overrides(model: Path, name: str) -> list[str]:
    """Return the changes to the quick start for a variant."""
    return [
        "warm_start=null",
        f"model.path={model}",
        f"data.environment={{function: '{Path(__file__).resolve()}:Sums', max_turns: {NUM_TURNS}}}",
        "data.rewards={}",
        "rollout.groups_per_step=4",
        "rollout.group_size=4",
        "evaluation.every_steps=0",
        *VARIANTS[name],
    ]


def measure(folder: Path, model: Path, name: str, seed: int, num_steps: int) -> dict[str, Any]:
    """Run one variant and return its measurements. Rewards are per turn."""
    run = f"{name.replace(' ', '_')}_{seed}"
    places = [f"seed={seed}", f"output_dir={folder}/runs", f"name={run}", "logging.console=off", f"num_steps={num_steps}"]
    run_command([*places, *overrides(model, name)])
    steps = [row for row in read_metrics(folder / "runs" / run / "metrics.jsonl") if "reward/mean" in row]
    rewards = [row["reward/mean"] / NUM_TURNS for row in steps]
    found = {
        "variant": name,
        "seed": seed,
        "correct_mean": statistics.fmean(rewards),
        "correct_first_10": statistics.fmean(rewards[:10]),
        "correct_last_10": statistics.fmean(rewards[-10:]),
        "step_s": statistics.median(row["time/step_s"] for row in steps[5:]),
    }
    if "critic/explained_variance" in steps[-1]:
        found["explained_variance_last_10"] = statistics.fmean(row["critic/explained_variance"] for row in steps[-10:])
    return found


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the means over seeds."""
    return {name: statistics.fmean(run[name] for run in runs) for name in runs[0] if name not in ("variant", "seed")}


if __name__ == "__main__":
    main()
