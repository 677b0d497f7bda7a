"""Train with REINFORCE on a session, with the mean reward of the other samples as baseline.

python examples/reinforce/reinforce.py num_steps=60
"""

import asyncio
import sys

from titanrl import AdamParams, connect, group_advantages, load_config


async def main(overrides: list[str]) -> None:
    """Sample, score, take a policy-gradient step, publish."""
    config = load_config("quickstart", ["name=reinforce", "num_steps=60", "rollout.groups_per_step=32", *overrides])
    async with connect(config) as session:
        task = await session.task()
        print(f"held-out reward {(await task.evaluate(session.sampling)).mean:.3f}")
        for step in range(config.num_steps):
            num = config.rollout.groups_per_step
            prompts = task.prompts(num, start=step * num)
            groups = await session.sampling.sample(prompts, num_samples=config.rollout.group_size, seed=step)
            rewards = await task.rewards(prompts, groups)
            data = [
                sample.datum(advantage)
                for group, rewards_G in zip(groups, rewards, strict=True)
                for sample, advantage in zip(group, group_advantages(rewards_G, "rloo"), strict=True)
            ]
            session.training.forward_backward(data, "importance_sampling")
            update = await session.training.optim_step(AdamParams(learning_rate=config.algorithm.learning_rate))
            await session.training.publish()
            print(f"step {step + 1}: reward {sum(map(sum, rewards)) / len(data):.3f}, gradient norm {update.grad_norm:.3g}")
        print(f"held-out reward {(await task.evaluate(session.sampling)).mean:.3f}")
        await session.training.export()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
