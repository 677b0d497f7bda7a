"""Fine-tune on worked examples, then continue with GRPO.

python examples/sft_then_grpo/sft_then_grpo.py
"""

import asyncio
import sys

from titanrl import GRPO, SFT, load_config


async def main(overrides: list[str]) -> None:
    """Run both stages; overrides apply to both."""
    tuning = load_config("sft_quickstart", ["name=sft_stage", "num_steps=300", *overrides])
    async with SFT(tuning) as run:
        await run.train()
        model = await run.export()
    # A fine-tuned model that solves most problems gains little from each of them, so a step takes four times as many.
    learning = ["num_steps=60", "rollout.groups_per_step=32", "algorithm.learning_rate=1e-4"]
    stage = ["name=grpo_stage", "warm_start=null", f"model.path={model}", *learning]
    async with GRPO(load_config("quickstart", [*stage, *overrides])) as run:
        await run.train()
        await run.export()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
