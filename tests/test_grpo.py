"""Parts of the loop that need no processes."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from titanrl.config import load_config
from titanrl.grpo import GRPO


@pytest.mark.parametrize(
    ("step", "version", "is_measured"),
    [(9, 8, True), (8, 8, True), (8, 7, False), (5, 4, True)],
    ids=["last, after a skipped batch", "last", "skipped batch, so not the last", "due"],
)
def test_heldout_loss_is_measured_at_the_last_version(step: int, version: int, is_measured: bool) -> None:
    async def heldout_loss(forward: object, config: object) -> float:
        return 0.5

    run: Any = SimpleNamespace(
        config=load_config("quickstart", ["num_steps=8", "evaluation.every_steps=5"]),
        state=SimpleNamespace(step=step - 1),
        session=SimpleNamespace(trainer=SimpleNamespace(version=version, run_data=heldout_loss)),
        timer=SimpleNamespace(phase=lambda name: nullcontext()),
        _examples=SimpleNamespace(heldout_loss=heldout_loss),
    )
    assert asyncio.run(GRPO._heldout_loss(run)) == ({"examples/heldout_loss": 0.5} if is_measured else {})
