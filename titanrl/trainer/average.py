"""Exponential moving average (EMA) of the weights.

After each optimizer step, `average = decay * average + (1 - decay) * weights`. As the reference policy of the KL penalty, the
average is the dynamic anchor of WARP (arXiv:2406.16768).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from titanrl.trainer.snapshots import Entry, layout_of
from titanrl.weights.layout import local_part


class MovingAverage(Stateful):
    """Exponential moving averages of this rank's shards, in float32.

    Updates need no communication, and ranks with equal shards compute equal averages.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Initialize the averages with the weights.

        Args:
            weights: Detached, sharded trainable parameters by name. `update` reads these tensors again, so their storage must
                not be replaced.
            decay: Decay factor of the average, between 0 and 1.
        """
        self._weights, self._decay = weights, decay
        self.tensors = {name: torch.empty_like(value, dtype=torch.float32) for name, value in weights.items()}
        """The averages, sharded like the weights."""
        self.restart()

    def update(self) -> None:
        """Update the averages with the current weights. A weight that never changes keeps its average bit for bit."""
        weights = [local_part(value).to(torch.float32) for value in self._weights.values()]
        torch._foreach_lerp_(self._local(), weights, 1.0 - self._decay)

    def restart(self) -> None:
        """Reset the averages to the current weights."""
        for average, weight in zip(self._local(), self._weights.values(), strict=True):
            average.copy_(local_part(weight))

    def entries(self) -> Mapping[str, Entry]:
        """Return the averages as snapshot entries. Writing them into the parameters rounds them to the parameter dtype."""
        return {name: Entry(layout_of(self._weights[name]), local_part(value)) for name, value in self.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name."""
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the averages in place."""
        for name, average in self.tensors.items():
            local_part(average).copy_(local_part(state_dict[name]))

    def _local(self) -> list[Tensor]:
        return [local_part(average) for average in self.tensors.values()]
