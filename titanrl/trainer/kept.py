"""Log-probabilities that a rank computed earlier, with the weights of a known version, and uses again in a loss.

They stay on the rank: the controller only orders that they be computed and used. Shapes: B rows, L tokens of a row, S tokens
of a sequence.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from titanrl.types import GroupHandle, Row


class KeptLogprobs:
    """Log-probabilities by version and sequence. A slot that is used again forgets what was kept for it."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self._values: dict[tuple[int, int, int, int], tuple[int, Tensor]] = {}

    def put(self, version: int, rows: Sequence[Row], logprobs_BL: Tensor) -> None:
        """Keep what a forward pass over some rows gave."""
        for row, sequence_handle, rollout, tokens in _places(rows):
            key = (version, sequence_handle.shard, sequence_handle.slot, rollout)
            self._values[key] = (sequence_handle.serial, logprobs_BL[row, tokens].clone())

    def get(self, version: int, rows: Sequence[Row], row_tokens: int) -> Tensor:
        """What is kept for the sequences of some rows, laid out as these are, 0 elsewhere, `[B, L]`.

        Raises:
            KeyError: nothing was computed for a sequence with the weights of this version.
        """
        laid_out_BL = torch.zeros(max(1, len(rows)), row_tokens)
        for row, handle, rollout, tokens in _places(rows):
            serial, values_S = self._values.get((version, handle.shard, handle.slot, rollout), (None, None))
            if values_S is None or serial != handle.serial:
                raise KeyError(f"no log-probabilities of version {version} are kept for rollout {rollout} of {handle}")
            laid_out_BL[row, tokens] = values_S
        return laid_out_BL

    def drop(self, version: int) -> None:
        """Forget everything of a version."""
        self._values = {key: value for key, value in self._values.items() if key[0] != version}


def _places(rows: Sequence[Row]) -> Iterator[tuple[int, GroupHandle, int, slice]]:
    """Row, handle, rollout and tokens of each sequence."""
    for index, row in enumerate(rows):
        start = 0
        for sequence in row:
            yield index, sequence.handle, sequence.rollout, slice(start, start + sequence.num_placed)
            start += sequence.num_placed
