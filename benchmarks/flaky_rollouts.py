"""Measure throughput with environments that fail: `python -m benchmarks.flaky_rollouts --json FILE`.

An undisturbed run alternates every few steps with one in which a fifth of the episodes raise, a tenth hang and a tenth of the
rewards fail, so that both are measured under the same conditions. The benchmark compares a synchronous pair of runs first, then
an asynchronous pair. All runs train the quick start in a single-turn environment.
"""

import argparse
import asyncio
import statistics
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import write_result
from titanrl.config import load_config
from titanrl.environments import Done, Episode, Message, Observation
from titanrl.grpo import GRPO

SHARES = {"errors": 0.2, "hangs": 0.1, "rewards": 0.1}
"""Shares of episodes that raise and that hang, and of rewards that fail, in the disturbed runs."""
STEP_TIMEOUT_S, RETRIES = 0.5, 1
"""Time limit of an environment call, and number of retries after a failure."""
STALENESS = {"sync": 0, "async": 1}
"""`max_staleness` of the two pairs of runs."""
SKIPPED_STEPS = 2
"""Steps at the start of each turn that are not measured: an asynchronous run buffers groups while the other is measured."""
FAILURES = ("environment_error", "timeout", "reward_error")
"""Outcomes of episodes without a reward."""


class Flaky:
    """Asks the question, and fails for a share of the episodes that a hash selects."""

    numbers: dict[str, int] = {}  # noqa: RUF012  # number of episodes per task so far

    def __init__(self, errors: float = 0.0, hangs: float = 0.0, rewards: float = 0.0) -> None:
        """Set the shares of episodes that raise, that hang, and whose reward fails."""
        self._errors, self._hangs, self._rewards = errors, hangs, rewards

    async def reset(self, episode: Episode) -> Observation:
        """Ask the question."""
        number = Flaky.numbers[episode.task_id] = Flaky.numbers.get(episode.task_id, 0) + 1
        self._place = zlib.crc32(f"{episode.task_id}/{number}".encode()) / 2**32
        return Observation(messages=[{"role": "user", "content": episode.question}])

    async def step(self, message: Message) -> Done:
        """End the episode, or fail."""
        if self._place < self._errors:
            raise RuntimeError("flaky")
        if self._place < self._errors + self._hangs:
            await asyncio.Event().wait()
        has_reward = self._place >= self._errors + self._hangs + self._rewards
        return Done() if has_reward else Done(rewards={"bonus": float("nan")})

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def main() -> None:
    """Measure both pairs of runs, and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flaky_rollouts", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--turns", type=int, default=3, help="number of turns of each run")
    parser.add_argument("--steps", type=int, default=6, help="measured steps per turn")
    parser.add_argument(
        "--set", dest="overrides", nargs="+", default=[], metavar="key.path=value", help="changes to configs/quickstart.yaml"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        result = {
            mode: asyncio.run(measure(Path(folder), mode, arguments.turns, arguments.steps, arguments.overrides))
            for mode in STALENESS
        }
    limits = {"shares": SHARES, "step_timeout_s": STEP_TIMEOUT_S, "retries": RETRIES}
    write_result(arguments.json, "flaky_rollouts", {**result, **limits})


async def measure(folder: Path, mode: str, num_turns: int, num_steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Alternate between an undisturbed and a disturbed run, and return their measurements."""
    runs: dict[str, GRPO] = {}
    try:
        for name, shares in (("undisturbed", {}), ("flaky", SHARES)):
            runs[name] = await started(folder, f"{mode}-{name}", STALENESS[mode], shares, overrides)
        rows: dict[str, list[Mapping[str, float]]] = {name: [] for name in runs}
        for _ in range(num_turns):
            for name, run in runs.items():
                steps = [(await run.step()).values for _ in range(SKIPPED_STEPS + num_steps)]
                rows[name] += steps[SKIPPED_STEPS:]
        groups_per_step = runs["flaky"].config.rollout.groups_per_step
    finally:
        for run in runs.values():
            await run.close()
    return figures(rows["undisturbed"], rows["flaky"], groups_per_step)


def figures(
    undisturbed: Sequence[Mapping[str, float]], flaky: Sequence[Mapping[str, float]], groups_per_step: int
) -> dict[str, Any]:
    """Return the trained groups per second of both runs, and the shares of failed episodes in the disturbed one."""
    speeds = {
        name: groups_per_step / statistics.fmean(row["time/step_s"] for row in rows)
        for name, rows in (("undisturbed", undisturbed), ("flaky", flaky))
    }
    num_episodes = sum(row["episode/count"] for row in flaky)
    counted = {name: sum(row[f"episode/{name}_frac"] * row["episode/count"] for row in flaky) for name in FAILURES}
    return {
        "trained_groups_per_s": {name: round(speed, 2) for name, speed in speeds.items()},
        "ratio": round(speeds["flaky"] / speeds["undisturbed"], 3),
        "steps": len(flaky),
        "failed_episodes_frac": {name: round(count / num_episodes, 3) for name, count in counted.items()},
    }


async def started(folder: Path, name: str, max_staleness: int, shares: Mapping[str, float], overrides: Sequence[str]) -> GRPO:
    """Start a run."""
    places = [f"name={name}", f"output_dir={folder}/runs", f"cache_dir={folder}/cache", "logging.console=off"]
    # A short warm start suffices for groups whose rewards differ; the speed does not depend on the score.
    short = ["num_steps=100000", "warm_start.num_steps=60", "warm_start.num_long_only_steps=40", "evaluation.num_prompts=0"]
    options = ", ".join(f"{key}: {share}" for key, share in shares.items())
    environment = (
        f"data.environment={{function: 'benchmarks.flaky_rollouts:Flaky', options: {{{options}}}, "
        f"step_timeout_s: {STEP_TIMEOUT_S}, retries: {RETRIES}}}"
    )
    # data.rewards are scored even if the environment returns a reward that fails.
    settings = [environment, "data.rewards={answer: reasoning_gym}", f"max_staleness={max_staleness}"]
    return await GRPO(load_config("configs/quickstart.yaml", [*places, *short, *settings, *overrides])).start()


if __name__ == "__main__":
    main()
