"""The benchmark of failing environments: its figures, computed by hand, and its environment."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from benchmarks.flaky_rollouts import SHARES, Flaky, figures
from titanrl.environments import Done, Episode, make_environment

NUM = 500
"""Episodes."""


def row(step_s: float, count: float = 80.0, failed: float = 0.0) -> dict[str, float]:
    shares = {f"episode/{name}_frac": failed for name in ("environment_error", "timeout", "reward_error")}
    return {"time/step_s": step_s, "episode/count": count, **shares}


def test_throughput_is_groups_of_all_steps_over_their_time() -> None:
    found = figures([row(1.0), row(3.0)], [row(2.0, 60.0, 0.3), row(6.0, 20.0, 0.1)], groups_per_step=8)
    assert found == {
        "trained_groups_per_s": {"undisturbed": 4.0, "flaky": 2.0},
        "ratio": 0.5,
        "steps": 2,
        "failed_episodes_frac": dict.fromkeys(("environment_error", "timeout", "reward_error"), 0.25),
    }


def test_environment_fails_as_often_as_its_options_say() -> None:
    async def outcome(number: int, **shares: float) -> str:
        environment: Any = Flaky(**shares) if number else make_environment(Flaky, shares)
        await environment.reset(Episode(task_id=f"sums/{number}", question="?", entry={}, seed=0))
        try:
            end = await asyncio.wait_for(environment.step({"role": "assistant", "content": ""}), 0.05)
        except (RuntimeError, TimeoutError) as error:
            return type(error).__name__
        assert isinstance(end, Done)
        return "reward" if end.rewards else "ok"

    async def main(**shares: float) -> Counter[str]:
        Flaky.numbers.clear()
        return Counter(await asyncio.gather(*(outcome(number, **shares) for number in range(NUM))))

    counts = asyncio.run(main(**SHARES))
    assert [counts[name] / NUM for name in ("RuntimeError", "TimeoutError", "reward", "ok")] == pytest.approx(
        [0.2, 0.1, 0.1, 0.6], abs=0.06
    )
    assert asyncio.run(main()) == {"ok": NUM}
