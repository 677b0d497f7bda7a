"""Train with direct preference optimization (arXiv:2305.18290) on pairs of a right and a wrong sample of one prompt.

python examples/dpo/dpo.py num_steps=40
"""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from titanrl import AdamParams, Datum, batches, connect, load_config
from titanrl.carriers.types import FloatArray

BETA = 0.1


def margins(reference: Sequence[FloatArray], data: Sequence[Datum], logprobs: Sequence[Tensor]) -> Tensor:
    """Return the margin of each pair: how much more than the reference the policy prefers its chosen sample.

    `data` alternates between chosen and rejected samples; `reference` and `logprobs` have one array of token values for each.
    """
    weights = [torch.from_numpy(datum.loss_fn_inputs["weights"]) for datum in data]  # 0 for the prompt, 1 for the sample
    olds = map(torch.from_numpy, reference)
    gains = torch.stack([((new - old) * weight).sum() for new, old, weight in zip(logprobs, olds, weights, strict=True)])
    return BETA * (gains[::2] - gains[1::2])


def dpo_loss(
    reference: Sequence[FloatArray], data: Sequence[Datum], logprobs: Sequence[Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Return the DPO loss, and the mean margin as a metric."""
    margins_P = margins(reference, data, logprobs)
    return -torch.nn.functional.logsigmoid(margins_P).mean(), {"margin": margins_P.mean().item()}


async def main(overrides: list[str]) -> None:
    """Build pairs from samples, train on all but 32 of them, and report the margin of those 32."""
    config = load_config("quickstart", ["name=dpo", "num_steps=40", "algorithm.learning_rate=1e-4", *overrides])
    async with connect(config) as session:
        training, task = session.training, await session.task()
        prompts = task.prompts(32 * config.rollout.groups_per_step)
        groups = await session.sampling.sample(prompts, num_samples=8, seed=0)
        pairs = []
        for group, rewards in zip(groups, await task.rewards(prompts, groups), strict=True):
            if min(rewards) < max(rewards):
                pairs.append([group[np.argmax(rewards)].datum(), group[np.argmin(rewards)].datum()])
        start, heldout = await training.keep_weights(), list(chain(*pairs[:32]))
        print(f"held-out reward {(await task.evaluate(session.sampling)).mean:.3f}")
        for step, batch in zip(range(config.num_steps), batches(pairs[32:], 16), strict=False):
            data = list(chain(*batch))
            reference = await training.compute_logprobs(data, at_version=start)
            passes = training.forward_backward_custom(data, partial(dpo_loss, reference))
            await training.optim_step(AdamParams(learning_rate=config.algorithm.learning_rate))
            metrics = (await passes).metrics
            print(f"step {step + 1}: loss {metrics['loss:sum']:.3f}, margin {metrics['margin']:.3f}")
        reference = await training.compute_logprobs(heldout, at_version=start)
        margins_P = margins(reference, heldout, [torch.from_numpy(new) for new in await training.compute_logprobs(heldout)])
        print(f"held-out margin {margins_P.mean():.3f}, positive for {(margins_P > 0).float().mean():.0%} of the pairs")
        print(f"held-out reward {(await task.evaluate(await training.publish())).mean:.3f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
