"""Agents of unmodified frameworks, trained as programs.

TITANRL_FRAMEWORKS names a folder for PYTHONPATH that has the packages; without it, they are installed.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.e2e.conftest import REPO, Command
from titanrl.carriers.dumps import DumpReader
from titanrl.carriers.types import Rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
AGENTS = REPO / "examples/agents"
PACKAGES = (
    *("smolagents==1.26.0", "pydantic-ai-slim==2.68.0", "pydantic-graph==2.68.0"),
    *("genai-prices==0.2.3", "griffelib==2.4.1", "logfire-api==5.6.0"),
)
"""The frameworks, with their requirements that vLLM does not install."""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables with which Python finds the frameworks."""
    folder = os.environ.get("TITANRL_FRAMEWORKS")
    if folder is None:
        folder = str(tmp_path_factory.mktemp("frameworks"))
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PACKAGES]
        subprocess.run(install, check=True)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}


def overrides_of(folder: Path, program: object) -> list[str]:
    return [f"data.environment.program={program}", f"model.path={folder}/model", f"output_dir={folder}"]


def make_model(
    overrides: list[str],
    variables: dict[str, str],
    num_episodes: int,
    num_steps: int,
    *,
    config: Path = AGENTS / "cards.yaml",
    script: str = f"{AGENTS}/cards.py:reply",
) -> None:
    command = [sys.executable, AGENTS / "scripted.py", config, script, *overrides]
    command += ["--episodes", str(num_episodes), "--steps", str(num_steps)]
    subprocess.run(command, cwd=REPO, env=os.environ | variables, check=True)


def check_first_version(path: Path, rollouts: Sequence[Rollout], *, at_least: int) -> None:
    """Compare the log-probabilities of all segments that the initial model sampled with those of transformers."""
    model, num_compared = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0
    for rollout in rollouts:
        for segment in rollout.segments if set(rollout.sampled.versions) == {0} else ():
            with torch.no_grad():
                logprobs = model(torch.from_numpy(segment.token_ids)[None]).logits[0].log_softmax(-1)
            sampled = np.flatnonzero(segment.mask)
            expected = logprobs[sampled - 1, segment.token_ids[sampled]].numpy()
            np.testing.assert_allclose(segment.logprobs[sampled], expected, atol=1e-5)
            num_compared += 1
    assert num_compared >= at_least


@pytest.mark.parametrize(("agent", "num_segments"), [("smolagents", 2), ("pydantic_ai", 1)])
def test_held_out_score_of_an_agent_rises(tmp_path: Path, variables: dict[str, str], agent: str, num_segments: int) -> None:
    """Half of the episodes stream. smolagents rewrites its history and requires tool calls; that of pydantic-ai extends."""
    overrides = overrides_of(tmp_path, f"{AGENTS}/{agent}_agent.py:play")
    make_model(overrides, variables, 400, 250)
    more = [f"rollout.save={tmp_path}/dump", "logging.console=plain"]
    run = Command(tmp_path / "cards", ["--config", str(AGENTS / "cards.yaml"), *overrides, *more], variables).finish(1500)
    assert run.code == 0, run.output
    scores = run.evaluations("cards")
    assert scores[-1] >= scores[0] + 0.3
    saved = DumpReader(tmp_path / "dump")
    rollouts = [rollout for place in range(saved.num_groups) for rollout in saved.group(place).rollouts]
    counts = Counter(len(rollout.segments) for rollout in rollouts if len(rollout.turns) == 2)
    assert counts[num_segments] >= 0.9 * counts.total() > 0  # pydantic-ai, too, rewrites a call whose arguments are no JSON
    check_first_version(tmp_path / "model", rollouts, at_least=32 * num_segments)


@pytest.mark.parametrize("agent", ["smolagents", "pydantic_ai"])
def test_agents_are_commands_too(tmp_path: Path, variables: dict[str, str], agent: str) -> None:
    program = ["env", f"PYTHONPATH={variables['PYTHONPATH']}", sys.executable, f"{AGENTS}/{agent}_agent.py"]
    make_model([*overrides_of(tmp_path, program), "data.options.num_players=3"], variables, 3, 10)
    assert (tmp_path / "model/model.safetensors").is_file()
