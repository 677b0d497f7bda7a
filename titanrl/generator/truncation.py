"""Supports of truncated sampling (top-k, top-p, min-p), recorded from the samplers of vLLM 0.32.0.

vLLM's model runner V2, which needs Triton, can return sampling masks. The runner used on other machines cannot: its sampler
computes the log-probabilities after truncation, with -inf outside the support, and discards them after sampling. This module
reads them first and appends the support to the sampled tokens' log-probability ids, as additional columns. vLLM slices, copies
and delivers these columns together with the request.

This module uses vLLM's private API; `tests/generator/test_truncation.py` checks it.

Shapes: N requests of a step, V vocabulary entries, K columns of words.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import LLMEngine
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsTensors

from titanrl.carriers.supports import WORD_BITS, Int32Array, bitmap_words, words_of
from titanrl.generator.compat import engine_core


class SupportRecording:
    """Recording of the support of each sampled token in an engine's outputs. It costs nothing while it is off."""

    def __init__(self, engine: LLMEngine, vocab_size: int) -> None:
        """Patch the sampler of this rank; recording is initially off."""
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
        """Turn recording on or off; call this between two steps."""
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
    """Append each row's support to the log-probability ids: the number of its words, then the words."""
    assert tensors.logprob_token_ids.shape[1] == 1, "vLLM returned log-probabilities of more than the sampled token"
    words = torch.cat(encoded(logprobs_NV > -torch.inf), dim=1)
    return tensors._replace(logprob_token_ids=torch.cat([tensors.logprob_token_ids, words], dim=1))


def encoded(is_kept_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Encode each row of a mask as `Supports` defines; return the number of words, `[N, 1]`, and the words, `[N, K]`."""
    num_rows, vocab_size = is_kept_NV.shape
    num_bitmap = bitmap_words(vocab_size)
    sizes_N = is_kept_NV.sum(-1)
    counts_N = torch.where(sizes_N < vocab_size, sizes_N.clamp(max=num_bitmap), 0)
    words_NK = torch.zeros(num_rows, int(counts_N.max()), dtype=torch.int32, device=is_kept_NV.device)

    lists = (counts_N < num_bitmap).nonzero()[:, 0]
    rows, ids = (is_kept_NV[lists] & (counts_N[lists, None] > 0)).nonzero(as_tuple=True)
    ends = counts_N[lists].cumsum(0)
    columns = torch.arange(len(ids), device=ids.device) - (ends - counts_N[lists])[rows]
    words_NK[lists[rows], columns] = ids.to(torch.int32)

    bitmaps = (counts_N == num_bitmap).nonzero()[:, 0]
    if len(bitmaps):
        bits = torch.nn.functional.pad(is_kept_NV[bitmaps].to(torch.uint8), (0, num_bitmap * WORD_BITS - vocab_size))
        values = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)
        octets = (bits.view(len(bitmaps), -1, 8) * values).sum(-1, dtype=torch.uint8)
        words_NK[bitmaps] = octets.view(torch.int32)
    return counts_N[:, None].to(torch.int32), words_NK


def support_words(output: EngineCoreOutput, vocab_size: int) -> list[Int32Array]:
    """Return the recorded support of each token in an output, encoded as words.

    Raises:
        RuntimeError: Options in `generator.vllm` select a sampling method whose supports cannot be recorded.
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
            "generator.vllm: vLLM did not return the support of a token from truncated sampling. "
            "Remove options that change how it samples, such as speculative decoding."
        )
    return [row[2 : 2 + row[1]].astype(np.int32) for row in columns]
