"""Recipes of tinker-cookbook, unchanged, on local data: they learn, resume exactly, and end.

The package tinker-cookbook 0.6.1 is not in requirements/: it pins a version of tml-renderers that indexes lack.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.agents.byte_model import create_byte_model
from tests.e2e.conftest import Serving, serving
from titanrl.config.sections import RecipeConfig

pytest.importorskip("tinker_cookbook")
pytestmark = pytest.mark.slow

NAME = "Qwen/Qwen3-8B"
"""Name under which the cookbook knows format and tokenizer of the tiny model."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at "
    "positions 3, 8, and 9. \\boxed{3}"
)
BEFORE = [
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {"role": "assistant", "content": SPELLED},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a working directory with a tokenizer and data sets where the recipes look for them."""
    folder = tmp_path_factory.mktemp("recipes")
    chats = [
        {"messages": [*BEFORE, {"role": "user", "content": f"{n} + 1?{SUFFIX}"}, {"role": "assistant", "content": answer}]}
        for n in range(64)
        for answer in ("\\boxed{42}", "\\boxed{7}")
    ]
    corpus = "\n".join(f"<|im_start|>user\n{message['content']}" for message in chats[0]["messages"]) * 4
    create_byte_model(folder / NAME, RecipeConfig(max_positions=1024), seed=3, corpus=corpus, num_merges=200)
    no_robots, gsm8k = folder / "HuggingFaceH4/no_robots", folder / "openai/gsm8k"
    no_robots.mkdir(parents=True)
    gsm8k.mkdir(parents=True)
    for split in ("train", "test"):
        (no_robots / f"{split}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        questions = [{"question": f"{n} + 1?", "answer": "It is so. #### 42"} for n in range(160)]
        (gsm8k / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    lines = ["---", "configs:", "- config_name: main", "  data_files:"]
    lines += [line for split in ("train", "test") for line in (f"  - split: {split}", f"    path: {split}.jsonl")]
    (gsm8k / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    settings = ("data.max_prompt_tokens=700", "rollout.max_new_tokens=64", "trainer.row_tokens=1024")
    options = ("--checkpoints", str(folder / "checkpoints"), "--name", NAME, "--max-calls", "2048", *settings)
    with serving(folder / NAME, "--tinker", *options) as server:
        yield server


def recipe(server: Serving, folder: Path, name: str, *options: str) -> list[dict[str, Any]]:
    """Run a recipe; return its metrics."""
    log = folder / "logs" / name.rpartition(".")[2]
    environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-" + "0" * 16, "HF_HUB_OFFLINE": "1"}
    environment["HF_HOME"] = str(folder / "hub")
    options = tuple(option.replace("LOG", str(log)) for option in options)
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


COMMON = ("log_path=LOG", f"model_name={NAME}", "lora_rank=0")


def test_supervised_loop_learns_and_resumes_exactly(server: Serving, folder: Path) -> None:
    options = (*COMMON, "batch_size=16", "learning_rate=0.01", "save_every=4")
    rows = recipe(server, folder, "sl_loop", *options, "max_steps=8")
    losses = [row["train_mean_nll"] for row in rows]
    assert losses[-1] < 0.5 * losses[0]
    file = folder / "logs/sl_loop/checkpoints.jsonl"
    (folder / "states.jsonl").write_text(file.read_text())
    file.write_text(file.read_text().splitlines()[0] + "\n")  # as if the recipe had been killed after step 4
    (folder / "logs/sl_loop/metrics.jsonl").unlink()
    again = recipe(server, folder, "sl_loop", *options, "max_steps=8")
    assert [row["train_mean_nll"] for row in again] == losses[4:]


def test_rl_loop_learns_from_rewards(server: Serving, folder: Path) -> None:
    log = folder / "logs/rl_loop"
    log.mkdir(parents=True)
    last = json.loads((folder / "states.jsonl").read_text().splitlines()[-1])
    (log / "checkpoints.jsonl").write_text(json.dumps({**last, "batch": 0}) + "\n")  # continue from the supervised model
    options = (*COMMON, "batch_size=8", "group_size=8", "max_tokens=32", "learning_rate=0.003", "save_every=0")
    rows = recipe(server, folder, "rl_loop", *options, "loss_fn=importance_sampling", "max_steps=8")
    rewards = [row["reward/total"] for row in rows]
    assert max(rewards[-2:]) > rewards[0] + 0.2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sl_basic", ("max_steps=2",)),
        ("rl_basic", ("max_steps=1", "max_tokens=4")),
        ("math_rl.train", ("env=gsm8k", "max_steps=2", "max_tokens=8", "groups_per_batch=4", "group_size=4")),
    ],
)
def test_recipes_of_the_library_end(server: Serving, folder: Path, name: str, options: tuple[str, ...]) -> None:
    loss = () if name.startswith("sl") else ("loss_fn=importance_sampling",)
    assert recipe(server, folder, name, *COMMON, *options, *loss)
