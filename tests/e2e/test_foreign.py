"""Servers and tasksets that others wrote, unmodified from PyPI, in a run each.

TITANRL_FOREIGN names a folder with their virtual environments `mcp`, `openenv` and `verifiers`; without it, they are installed.
"""

import os
import subprocess
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.e2e.conftest import Command, Finished
from tests.e2e.test_agents import AGENTS, check_first_version, make_model
from titanrl.carriers.dumps import DumpReader
from titanrl.carriers.types import Rollout
from titanrl.config.device import VERIFIERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SCRIPTS = Path(__file__).with_name("scripts.py")
RUN: dict[str, Any] = {
    "device": "cpu",
    "max_staleness": 1,
    "rollout": {"groups_per_step": 4, "group_size": 8, "max_new_tokens": 64},
    "algorithm": {"advantage": "dr_grpo", "reduction": "token_mean", "learning_rate": 1e-3},
    "trainer": {"dtype": "float32", "compute_dtype": "float32", "row_tokens": 1024},
    "generator": {"dtype": "float32", "on_update": "drain"},
}
START = "git init -q -b main && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m 1"


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the virtual environments."""
    if given := os.environ.get("TITANRL_FOREIGN"):
        return Path(given)
    return tmp_path_factory.mktemp("foreign")


def installed(folder: Path, *packages: str) -> Path:
    """Return the folder of a virtual environment's programs, after installing packages into a new one."""
    if not folder.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *packages], check=True)
    return folder / "bin"


def trained(
    folder: Path, config: Path, script: str, *overrides: str, num_episodes: int = 128, num_steps: int = 100
) -> tuple[Finished, list[Rollout]]:
    """Make a model that plays as a script does, train it, and compare the first tokens with the model's."""
    places = [f"model.path={folder}/model", f"output_dir={folder}", *overrides]
    make_model(places, {}, num_episodes, num_steps, config=config, script=script)
    more = [f"rollout.save={folder}/dump", "logging.console=plain", "name=run"]
    run = Command(folder / "run", ["--config", str(config), *places, *more], {}).finish(1800)
    assert run.code == 0, run.output
    saved = DumpReader(folder / "dump")
    rollouts = [rollout for place in range(saved.num_groups) for rollout in saved.group(place).rollouts]
    check_first_version(folder / "model", rollouts, at_least=16)
    return run, rollouts


def written(folder: Path, environment: dict[str, Any], **data: Any) -> Path:
    """Write a configuration for an environment, and return its path."""
    section = {"renderer": "template", "step_timeout_s": 600, **environment}
    tasks = {"source": f"{SCRIPTS}:tasks", "options": {"num_tasks": 600}, "task": "work", **data, "environment": section}
    run = RUN | {"name": "made", "num_steps": 20, "data": tasks, "evaluation": {"every_steps": 10, "num_prompts": 16}}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def test_each_episode_has_its_git_server(tmp_path: Path, environments: Path) -> None:
    programs = installed(environments / "mcp", "mcp-server-git==2026.10.19")
    server = f"bash -c 'cd {{folder}} && {START} && exec {programs}/mcp-server-git --repository .'"
    tools = {"mcp": server, "only": ["git_create_branch", "git_branch"], "timeout_s": 300}
    config = written(tmp_path, {"tools": tools, "max_turns": 4}, rewards={"right": "exact"})
    # Starting a server takes more than a second of CPU time, so that the run is short.
    short = ("num_steps=2", "rollout={groups_per_step: 2, group_size: 8, max_new_tokens: 64}", "evaluation.num_prompts=8")
    run, rollouts = trained(tmp_path, config, f"{SCRIPTS}:work", *short, num_episodes=24, num_steps=60)
    assert len(rollouts) >= 2 * 2 * 8
    conversations = [completion["messages"] for group in run.rollouts() for completion in group["completions"]]
    told = [message["content"].split() for messages in conversations for message in messages if message["role"] == "tool"]
    listings = [sorted(words) for words in told if "main" in words and "*" in words]
    assert len(listings) > 16
    assert {len(words) for words in listings} <= {2, 3}, "a repository has at most the branch of its own episode"
    assert any(len(words) == 3 for words in listings)


def test_openenv_server_rewards_a_run(tmp_path: Path, environments: Path) -> None:
    """The server is the one that `openenv init` creates."""
    programs = installed(environments / "openenv", "openenv==0.10.0")
    subprocess.run([programs / "openenv", "init", "echoes"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    install = [programs / "python", "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", tmp_path / "echoes"]
    subprocess.run(install, check=True)
    options = {"python": str(programs / "python"), "sessions": 64, "message": "{echoed_message}"}
    config = written(tmp_path, {"openenv": "echoes", "options": options, "max_turns": 2})
    run, rollouts = trained(tmp_path, config, f"{SCRIPTS}:echo")
    scores = run.evaluations("work")
    assert scores[-1] >= scores[0] + 0.3
    assert {len(rollout.turns) for rollout in rollouts} == {2}
    assert all(0.0 <= turn.reward <= 1.0 for rollout in rollouts for turn in rollout.turns)  # a tenth per character


def test_reward_of_a_taskset_of_verifiers_rises(tmp_path: Path, environments: Path) -> None:
    programs = installed(environments / "verifiers", VERIFIERS, "marble-v1==0.1.0")
    config, python = AGENTS / "marble.yaml", f"data.environment.python={programs / 'python'}"
    run, rollouts = trained(tmp_path, config, f"{AGENTS}/marble.py:reply", python)
    scores = run.evaluations("marble")
    assert scores[-1] > scores[0]
    rewards = np.array([step["reward/mean"] for step in run.steps])
    assert rewards[-10:].mean() > rewards[:10].mean()
    assert {len(rollout.segments) for rollout in rollouts} == {1}
