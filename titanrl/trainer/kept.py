"""Per-rank cache of log-probabilities that were computed with the weights of a past version, for a later loss.

The values stay on the trainer rank; the controller only decides when they are computed and used.

Shape suffixes: B rows, L tokens of a row, S tokens of a sequence.
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from titanrl.carriers.tables import Row
from titanrl.carriers.types import GroupHandle


class KeptLogprobs:
    """Log-probabilities by version and sequence. If a storage slot is reused, the values of the new group replace the old."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self._values: dict[tuple[int, int, int, int], tuple[int, Tensor]] = {}

    def put(self, version: int, rows: Sequence[Row], logprobs_BL: Tensor) -> None:
        """Store the log-probabilities of the sequences of some rows."""
        for row, handle, rollout, tokens in _sequences(rows):
            key = (version, handle.shard, handle.slot, rollout)
            self._values[key] = (handle.serial, logprobs_BL[row, tokens].clone())

    def get(self, version: int, rows: Sequence[Row], row_tokens: int) -> Tensor:
        """Return the stored values of the sequences of some rows in the layout of these rows, 0 elsewhere, `[B, L]`.

        The rows may share prompts differently than those of `put`, because only the start of a sequence can be shared.

        Raises:
            KeyError: A sequence has no stored values for this version.
        """
        kept_BL = torch.zeros(max(1, len(rows)), row_tokens)
        for row, handle, rollout, tokens in _sequences(rows):
            serial, values_S = self._values.get((version, handle.shard, handle.slot, rollout), (None, None))
            if values_S is None or serial != handle.serial:
                raise KeyError(f"no log-probabilities of version {version} are kept for rollout {rollout} of {handle}")
            num_tokens = min(len(values_S), tokens.stop - tokens.start)
            kept_BL[row, tokens.stop - num_tokens : tokens.stop] = values_S[len(values_S) - num_tokens :]
        return kept_BL

    def drop(self, version: int) -> None:
        """Discard all values of a version."""
        self._values = {key: value for key, value in self._values.items() if key[0] != version}

    def drop_all_but(self, versions: Collection[int]) -> None:
        """Discard the values of all other versions."""
        self._values = {key: value for key, value in self._values.items() if key[0] in versions}

    def of(self, version: int) -> dict[tuple[int, int, int, int], tuple[int, Tensor]]:
        """Return all values of a version, to be passed to `add` on another rank."""
        return {key: value for key, value in self._values.items() if key[0] == version}

    def add(self, values: dict[tuple[int, int, int, int], tuple[int, Tensor]]) -> None:
        """Add values from another rank."""
        self._values |= values


def _sequences(rows: Sequence[Row]) -> Iterator[tuple[int, GroupHandle, int, slice]]:
    """Yield row index, group handle, rollout and tokens of each sequence."""
    for index, row in enumerate(rows):
        start = 0
        for sequence in row:
            yield index, sequence.handle, sequence.segment, slice(start, start + sequence.num_placed)
            start += sequence.num_placed
