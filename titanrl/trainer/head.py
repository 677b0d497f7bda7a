"""Chunked scoring: compute log-probabilities and entropies from hidden states without materializing all logits.

Shape suffixes: B rows, L tokens of a row, C tokens of a chunk, D hidden size, V vocabulary entries on this rank, N tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from titanrl.algorithms.logprobs import TokenSupports, logprobs_and_entropy

LOGITS_AT_ONCE = 1 << 27
"""Maximum number of logits in memory at a time, 883 tokens for a vocabulary size of 151 936. They take 256 MiB in bfloat16, and
their gradient as much again."""


class ScoringHead:
    """Replacement of `lm_head.forward` in torchtitan's model that can return log-probabilities instead of logits.

    Inside the context `scoring`, the model returns the log-probabilities of given targets and the entropies, `[B, L]` each.
    Rows longer than a chunk are scored in chunks, and the backward pass recomputes the logits of each chunk. Because the
    chunks run inside one call of the module, its FSDP and TP hooks run once.
    """

    def __init__(self, lm_head: nn.Module, vocab_size: int) -> None:
        """Wrap the current `forward` of the output layer, including its tensor parallelism."""
        self._logits: Callable[[Tensor], Tensor] = lm_head.forward
        self._vocab_size = vocab_size
        self._targets_BL: Tensor | None = None
        self._supports: TokenSupports | None = None
        self._temperature = 1.0
        lm_head.forward = self

    @contextmanager
    def scoring(self, targets_BL: Tensor, temperature: float, supports: TokenSupports | None = None) -> Iterator[None]:
        """Make the model score targets inside the context. `supports` are those of the flattened targets."""
        self._targets_BL, self._temperature, self._supports = targets_BL, temperature, supports
        try:
            yield
        finally:
            self._targets_BL = self._supports = None

    def __call__(self, hidden_BLD: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits, `[B, L, V]`; inside `scoring`, return log-probabilities and entropies, `[B, L]` each."""
        if self._targets_BL is None:
            return self._logits(hidden_BLD)
        targets_BL, temperature, supports = self._targets_BL, self._temperature, self._supports
        num_rows, length = targets_BL.shape
        width = max(1, LOGITS_AT_ONCE // (num_rows * self._vocab_size))
        if length <= width:
            return self._score(hidden_BLD, targets_BL, temperature, supports)
        chunks = [
            checkpoint(
                self._score,
                hidden_BLD[:, start : start + width],
                targets_BL[:, start : start + width],
                temperature,
                None if supports is None else supports.columns(num_rows, start, min(start + width, length)),
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, length, width)
        ]
        logprobs, entropies = zip(*chunks, strict=True)
        return torch.cat(logprobs, dim=1), torch.cat(entropies, dim=1)

    def _score(
        self, hidden_BCD: Tensor, targets_BC: Tensor, temperature: float, supports: TokenSupports | None
    ) -> tuple[Tensor, Tensor]:
        logits_BCV, vocab_start, group = local_logits(self._logits(hidden_BCD), self._vocab_size)
        logprobs_N, entropy_N = logprobs_and_entropy(
            logits_BCV.flatten(0, 1),
            targets_BC.flatten(),
            group=group,
            vocab_start=vocab_start,
            temperature=temperature,
            supports=supports,
        )
        return logprobs_N.view(targets_BC.shape), entropy_N.view(targets_BC.shape)


def local_logits(logits_BLV: Tensor, vocab_size: int) -> tuple[Tensor, int, Any]:
    """Return this rank's columns of the logits, the vocabulary id of its first column, and the tensor-parallel group.

    Without tensor parallelism, the group is None.
    """
    if not isinstance(logits_BLV, DTensor):
        return logits_BLV, 0, None
    mesh = logits_BLV.device_mesh
    width = -(-vocab_size // mesh.size())
    return logits_BLV.to_local(), min(vocab_size, width * mesh.get_local_rank()), mesh.get_group()
