"""Supports of truncated sampling from vLLM 0.32.0, whose private API this module uses. `tests/generator/test_truncation.py`
checks it.

vLLM's model runner V2, which needs Triton, can return sampling masks itself. The runner that other machines use cannot. Its
sampler computes the log-probabilities after truncation, -inf outside the support, and drops them when it has sampled. Here they
are read before that, and the supports travel as further columns of the sampled tokens' log-probability ids: vLLM slices, copies
and delivers these with the request they belong to.

Shapes: N requests of a step, V vocabulary entries, W words of a bitmap, K columns of words.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLMEngine
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsTensors

from titanrl.generator.compat import engine_core
from titanrl.supports import WORD_BITS, Int32Array, bitmap_words, words_of


class SupportRecording:
    """Switch that makes an engine's outputs carry the support of each sampled token. While it is off, it costs nothing."""

    def __init__(self, engine: LLMEngine, vocab_size: int) -> None:
        """Prepare the sampler of this rank; start switched off."""
        core = engine_core(engine)
        self._vocab_size = vocab_size
        self._sampler: Any = core.model_executor.driver_worker.worker.model_runner.sampler
        self._has_masks = hasattr(self._sampler, "return_sampling_mask")
        self._is_on = False
        self._logprobs_NV: Tensor | None = None
        if self._has_masks:
            assert hasattr(core.scheduler, "return_sampling_mask"), "vLLM's scheduler no longer delivers sampling masks"
            core.scheduler.return_sampling_mask = True
        else:
            self._sample, self._forward = self._sampler.sample, self._sampler.forward
            self._sampler.sample, self._sampler.forward = self._sample_and_keep, self._forward_with_supports

    def switch(self, is_on: bool) -> None:
        """Turn the recording on or off between two steps."""
        self._is_on = is_on
        if self._has_masks:
            self._sampler.return_sampling_mask = is_on

    def _sample_and_keep(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        sampled_N, logprobs_NV = self._sample(*args, **kwargs)
        if self._is_on:
            self._logprobs_NV = logprobs_NV
        return sampled_N, logprobs_NV

    def _forward_with_supports(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        logprobs_NV, self._logprobs_NV = self._logprobs_NV, None
        if logprobs_NV is not None:
            assert logprobs_NV.shape[1] == self._vocab_size, "the logits do not have the vocabulary of the model"
            output.logprobs_tensors = with_supports(output.logprobs_tensors, logprobs_NV)
        return output


def with_supports(tensors: LogprobsTensors, logprobs_NV: Tensor) -> LogprobsTensors:
    """Append the number of words of each row's support and the words to the ids that belong to the log-probabilities."""
    assert tensors.logprob_token_ids.shape[1] == 1, "vLLM returned log-probabilities of further tokens"
    words = torch.cat(encoded(logprobs_NV > -torch.inf), dim=1)
    return tensors._replace(logprob_token_ids=torch.cat([tensors.logprob_token_ids, words], dim=1))


def encoded(is_kept_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words of each row as `Supports` defines them, `[N, K]`, and how many there are, `[N, 1]`."""
    num_rows, vocab_size = is_kept_NV.shape
    num_bitmap = bitmap_words(vocab_size)
    sizes_N = is_kept_NV.sum(-1)
    counts_N = torch.where(sizes_N < vocab_size, sizes_N.clamp(max=num_bitmap), 0)
    words_NK = torch.zeros(num_rows, int(counts_N.max()), dtype=torch.int32, device=is_kept_NV.device)

    lists = (counts_N < num_bitmap).nonzero()[:, 0]
    rows, ids = (is_kept_NV[lists] & (counts_N[lists, None] > 0)).nonzero(as_tuple=True)
    ends = counts_N[lists].cumsum(0)
    places = torch.arange(len(ids), device=ids.device) - (ends - counts_N[lists])[rows]
    words_NK[lists[rows], places] = ids.to(torch.int32)

    bitmaps = (counts_N == num_bitmap).nonzero()[:, 0]
    if len(bitmaps):
        bits = torch.nn.functional.pad(is_kept_NV[bitmaps].to(torch.uint8), (0, num_bitmap * WORD_BITS - vocab_size))
        values = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)
        octets = (bits.view(len(bitmaps), -1, 8) * values).sum(-1, dtype=torch.uint8)
        words_NK[bitmaps] = octets.view(torch.int32)
    return counts_N[:, None].to(torch.int32), words_NK


def support_words(output: EngineCoreOutput, vocab_size: int) -> list[Int32Array]:
    """Return the words of the support of each token in an output, which the engine recorded.

    Raises:
        RuntimeError: vLLM's options in `generator.vllm` select a way of sampling that does not return them.
    """
    if output.new_sampling_mask is not None:
        mask = output.new_sampling_mask
        offsets = [0, len(mask.token_ids)] if mask.offsets is None else mask.offsets.tolist()
        lists = [mask.token_ids[first:end] for first, end in pairwise(offsets)]
        return [words_of(np.array(ids, np.int32), vocab_size) for ids in lists]
    assert output.new_logprobs is not None, "vLLM returned a token without its log-probability"
    columns = output.new_logprobs.logprob_token_ids
    if columns.shape[1] < 2:
        raise RuntimeError(
            "generator.vllm: vLLM returned a token of truncated sampling without the tokens that could be sampled. "
            "Remove options that change how it samples, such as speculative decoding."
        )
    return [row[2 : 2 + row[1]].astype(np.int32) for row in columns]
