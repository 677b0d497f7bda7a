"""Distill a teacher on-policy with a session; `titanrl distill` does the same with checkpoints and records.

python examples/distillation/distillation.py distill.teacher.path=runs/quickstart/checkpoints/final
"""

import asyncio
import sys

from titanrl import AdamParams, connect, load_config


async def main(overrides: list[str]) -> None:
    """Sample, compute the teacher's log-probabilities, train on the difference, publish."""
    config = load_config("distill_quickstart", ["name=distillation", *overrides])
    async with connect(config) as session:
        task, teacher = await session.task(), await session.teacher(config.distill.teacher.path)
        print(f"held-out reward of the teacher {(await task.evaluate(teacher)).mean:.3f}")
        print(f"held-out reward {(await task.evaluate(session.sampling)).mean:.3f}")
        for step in range(config.num_steps):
            num = config.rollout.groups_per_step
            prompts = task.prompts(num, start=step * num)
            groups = await session.sampling.sample(prompts, num_samples=config.rollout.group_size, seed=step)
            samples = [sample for group in groups for sample in group]
            logprobs = await teacher.compute_logprobs([sample.sequence for sample in samples])
            gaps = [values[len(sample.prompt) :] - sample.logprobs for sample, values in zip(samples, logprobs, strict=True)]
            data = [sample.datum(gap) for sample, gap in zip(samples, gaps, strict=True)]
            session.training.forward_backward(data, "importance_sampling")
            await session.training.optim_step(AdamParams(learning_rate=config.algorithm.learning_rate))
            await session.training.publish()
            divergence = -sum(gap.sum() for gap in gaps) / sum(map(len, gaps))
            print(f"step {step + 1}: divergence from the teacher {divergence:.3f} nats per token")
        print(f"held-out reward {(await task.evaluate(session.sampling)).mean:.3f}")
        await session.training.export()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
