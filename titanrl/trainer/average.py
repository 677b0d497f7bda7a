"""The exponential moving average of the weights: a policy that follows the trained one slowly.

Each optimizer step moves it: `average = decay * average + (1 - decay) * weights`. As the reference of the divergence it is the
dynamic anchor of WARP (arXiv:2406.16768).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from titanrl.trainer.snapshots import Entry, layout_of
from titanrl.weights.layout import local_part


class MovingAverage(Stateful):
    """Averages of this rank's shards of some tensors, in float32.

    No rank needs data of another one, and ranks with equal shards compute equal averages.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Start at the weights, which must stay in the same memory.

        Args:
            weights: Sharded trainable parameters by name, without gradient.
            decay: Share of the average that a step keeps, between 0 and 1.
        """
        self._weights, self._decay = weights, decay
        self.tensors = {name: torch.empty_like(value, dtype=torch.float32) for name, value in weights.items()}
        """The averages, sharded like the weights."""
        self.restart()

    def update(self) -> None:
        """Move the averages towards the current weights; weights that do not change keep their average bit for bit."""
        weights = [local_part(value).to(torch.float32) for value in self._weights.values()]
        torch._foreach_lerp_(self._local(), weights, 1.0 - self._decay)

    def restart(self) -> None:
        """Start again at the current weights."""
        for average, weight in zip(self._local(), self._weights.values(), strict=True):
            average.copy_(local_part(weight))

    def entries(self) -> Mapping[str, Entry]:
        """Return the averages to write into the parameters, which rounds them to the dtype of the parameters."""
        return {name: Entry(layout_of(self._weights[name]), local_part(value)) for name, value in self.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name."""
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore them."""
        for name, average in self.tensors.items():
            local_part(average).copy_(local_part(state_dict[name]))

    def _local(self) -> list[Tensor]:
        return [local_part(average) for average in self.tensors.values()]
