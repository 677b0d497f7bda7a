"""The example that wraps Gymnasium: actions, rewards, and the real package in an interpreter of its own."""

import subprocess
import sys
import types
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.environments.episodes import episode, says
from titanrl.environments import Done, Environment, Environments, Observation, ProcessOptions, make_environment

EXAMPLE = f"{Path(__file__).parents[2]}/examples/gymnasium/gym_environment.py:Gym"


class Discrete:
    def contains(self, action: object) -> bool:
        return action in (0, 1)


class Countdown:
    """A game in the interface of Gymnasium: action 1 counts down from 3 to the end."""

    action_space = Discrete()

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.left = 3 + seed % 1
        return self.left, {}

    def step(self, action: object) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.left -= action in (1, "down")
        return self.left, 0.5, self.left == 0, False, {}

    def close(self) -> None:
        self.left = -1


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("games")
    module.make = lambda name: {"countdown": Countdown}[name]()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "games", module)


def game(**options: Any) -> Environment:
    return make_environment(EXAMPLE, {"name": "countdown", "module": "games", **options})


@pytest.mark.usefixtures("make")
@pytest.mark.parametrize(("options", "action"), [({}, "1"), ({"text_actions": True}, "down")])
async def test_game_is_played_to_its_end(options: dict[str, Any], action: str) -> None:
    environment = game(**options)
    observation = await environment.reset(episode("Count down."))
    assert observation.messages == [{"role": "user", "content": "Count down.\n3"}]
    for left in (2, 1):
        assert await environment.step(says(action)) == Observation(messages=[{"role": "user", "content": str(left)}])
    assert await environment.step(says(action)) == Done(rewards={"game": 1.5}, metrics={"illegal": 0.0})
    await environment.close()


@pytest.mark.usefixtures("make")
@pytest.mark.parametrize("text", ["two", "2", "[1]"])
async def test_illegal_action_loses(text: str) -> None:
    environment = game()
    await environment.reset(episode())
    await environment.step(says("0"))
    assert await environment.step(says(text)) == Done(rewards={"game": -0.5}, metrics={"illegal": 1.0})


@pytest.mark.slow
async def test_gymnasium_plays_blackjack_in_its_own_interpreter(tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "gymnasium==1.4.0"], check=True)
    processes = ProcessOptions(num_processes=2, python=python)
    environments = Environments(EXAMPLE, {"name": "Blackjack-v1"}, processes=processes)
    await environments.start()
    ends = []
    for seed in range(20):
        environment = environments.make()
        observation = await environment.reset(episode("Play.", seed=seed))
        assert observation.messages[0]["content"].startswith("Play.\n(")
        end = await environment.step(says("0"))
        assert isinstance(end, Done)
        ends.append(end.rewards["game"])
        await environment.close()
    await environments.close()
    assert set(ends) <= {-1.0, 0.0, 1.0, 1.5}
    assert len(set(ends)) > 1
