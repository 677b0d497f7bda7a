"""Train a double DQN on a small grid: four DDP ranks write to one prioritized buffer and learn from it.

Each rank plays its own episodes. All ranks sample from the same distribution, so priorities set by one rank guide the
others. DDP averages their gradients.
"""

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from titanrl.replay import Prefetch, SharedReplay

SIDE, GAMMA, NUM_ENVS, BATCH, TIME_LIMIT = 6, 0.9, 8, 64, 40
MOVES = np.array([[0, 1], [1, 0], [0, -1], [-1, 0]])
EXAMPLE = {"obs": 0, "action": 0, "reward": np.float32(0), "next_obs": 0, "is_end": np.float32(0)}


class Grids:
    """Grid games that start in a random cell; only reaching the last cell gives a reward."""

    def __init__(self, rng: np.random.Generator) -> None:
        """Start `NUM_ENVS` games."""
        self.rng, self.cells, self.ages = rng, rng.integers(0, SIDE, (NUM_ENVS, 2)), np.zeros(NUM_ENVS, int)

    def step(self, actions: Any) -> dict[str, Any]:
        """Move once in every game and return the transitions; finished games start again."""
        obs = self.cells @ [SIDE, 1]
        self.cells = np.clip(self.cells + MOVES[actions], 0, SIDE - 1)
        next_obs, self.ages = self.cells @ [SIDE, 1], self.ages + 1
        is_goal = next_obs == SIDE * SIDE - 1
        is_over = is_goal | (self.ages == TIME_LIMIT)
        self.cells[is_over] = self.rng.integers(0, SIDE, (int(is_over.sum()), 2))
        self.ages[is_over] = 0
        end = is_goal.astype(np.float32)
        return {"obs": obs, "action": actions, "reward": end, "next_obs": next_obs, "is_end": end}


def success(network: nn.Module) -> float:
    """Return the share of cells from which the greedy policy reaches the goal."""
    with torch.no_grad():
        moves = MOVES[network(torch.arange(SIDE * SIDE)).argmax(1).numpy()]
    cells = np.stack(np.divmod(np.arange(SIDE * SIDE), SIDE), 1)
    has_won = np.zeros(len(cells), bool)
    for _ in range(TIME_LIMIT):
        cells = np.clip(cells + moves[cells @ [SIDE, 1]], 0, SIDE - 1)
        has_won |= cells @ [SIDE, 1] == SIDE * SIDE - 1
    return float(has_won.mean())


def new_network() -> nn.Module:
    """Return a small network from cells to move values. The values start at 0, because overestimates decay slowly."""
    head = nn.Linear(64, len(MOVES))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Embedding(SIDE * SIDE, 64), nn.ReLU(), head)


def learn(rank: int, num_ranks: int, num_steps: int, store: str, replay: SharedReplay) -> None:
    """Play and train on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks start from the same weights
    online, target = new_network(), new_network()
    before, learner = success(online), DistributedDataParallel(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 - 2 * step / num_steps))
    rng = np.random.default_rng(rank)
    grids = Grids(rng)
    with Prefetch(replay, BATCH) as batches:  # blocks until some rank has written
        for step in range(num_steps):
            with torch.no_grad():
                greedy = online(torch.from_numpy(grids.cells @ [SIDE, 1])).argmax(1).numpy()
            explores = rng.random(NUM_ENVS) < max(0.1, 1 - 2 * step / num_steps)
            replay.extend(grids.step(np.where(explores, rng.integers(0, len(MOVES), NUM_ENVS), greedy)))
            if step % 10 == 0:
                target.load_state_dict(online.state_dict())
            batch = next(batches)
            data = {name: torch.from_numpy(column) for name, column in batch.payload.items()}
            with torch.no_grad():
                best = online(data["next_obs"]).argmax(1, keepdim=True)
                future = target(data["next_obs"]).gather(1, best)[:, 0]
                wanted = data["reward"] + GAMMA * (1 - data["is_end"]) * future
            td_error = wanted - learner(data["obs"]).gather(1, data["action"][:, None])[:, 0]
            optimizer.zero_grad()
            (torch.from_numpy(batch.weights) * td_error**2).mean().backward()
            optimizer.step()
            decay.step()
            replay.update_priorities(batch.handles, td_error.detach().numpy())
            replay.set_step(step)  # every rank reports it; beta advances once
    if rank == 0:
        print(f"cells from which the goal is reached: {before:.2f} -> {success(online):.2f}")
    dist.destroy_process_group()


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        SharedReplay(20_000, EXAMPLE, alpha=0.6, beta=(0.4, 1.0), beta_steps=arguments.steps) as replay,
    ):
        settings = (arguments.ranks, arguments.steps, f"{folder}/store", replay)
        torch.multiprocessing.start_processes(learn, args=settings, nprocs=arguments.ranks, start_method="forkserver")
        stats = replay.stats()
        print(f"one buffer of {arguments.ranks} ranks: {stats.num_committed} items written, {stats.num_sampled} drawn")


if __name__ == "__main__":
    main()
