"""Decoding steps of an in-process engine on a CPU without vLLM's scheduler, for vLLM 0.32.0.

In most steps of a rollout, each running request decodes one token. vLLM schedules, prepares and finishes every request
separately, which takes longer than a tiny model. A `DecodeWindow` takes these steps for all requests at once, with one array
per quantity. It ends when the engine is to do something else, such as accept a request. vLLM then continues as if it had taken
the steps itself.

Tokens and log-probabilities are the same, bit for bit: the kernels, the order of the requests in the batch, and the random
numbers are vLLM's. `tests/generator/test_window.py` compares them.

Shapes: N requests of the batch, in vLLM's order; R requests with which the window opened; V vocabulary entries; T steps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm import LLMEngine
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from titanrl.carriers.types import FinishReason, SamplingParams
from titanrl.generator.compat import ExpertRecording, abort_requests, engine_core

GREEDY_BELOW = 1e-5
"""Temperature below which vLLM samples greedily."""
SEEDS = 1 << 31
"""Number of different seeds that vLLM's sampler draws from a request's generator, one for each token."""

MAX_STEPS = 256
"""Steps after which a window ends, which bounds its memory."""

Indices = npt.NDArray[np.intp]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decoding:
    """A request that can decode in a window."""

    sampling: SamplingParams
    stop_ids: frozenset[int]
    """All tokens that end the completion."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens of a request from one window."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    """None if the request continues."""


def decoding_of(sampling: SamplingParams, stop_ids: Collection[int]) -> Decoding | None:
    """Return a request's settings in a `DecodeWindow`; None if only vLLM can sample its tokens."""
    is_limited = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
    is_random = sampling.temperature >= GREEDY_BELOW
    if sampling.supports or sampling.stop or (is_random and (sampling.seed is None or is_limited)):
        return None
    return Decoding(sampling, frozenset(stop_ids))


def seeds_of(sampling: SamplingParams, first: int, count: int) -> Ids:
    """Draw the seeds that vLLM's sampler draws for `count` tokens of a completion, from token `first` on; zeros if greedy."""
    if sampling.seed is None or sampling.temperature < GREEDY_BELOW:
        return np.zeros(count, np.int64)
    generator = torch.Generator().manual_seed(sampling.seed)
    drawn: Ids = torch.randint(0, SEEDS, (first + count,), generator=generator, dtype=torch.long).numpy()
    return drawn[first:]


def can_open(engine: LLMEngine) -> bool:
    """Return True if the engine's options allow windows: one rank on a CPU, whose layers all attend to the whole sequence."""
    core = engine_core(engine)
    config, scheduler = core.vllm_config, core.scheduler
    worker = core.model_executor.driver_worker.worker
    if not isinstance(worker.model_runner, CPUModelRunner) or config.parallel_config.world_size > 1:
        return False
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    has_one_kind = len(groups) == 1 and len(worker.model_runner.attn_groups[0]) == 1
    spec = groups[0].kv_cache_spec
    is_full = isinstance(spec, FullAttentionSpec) and spec.sliding_window is None
    is_plain = config.speculative_config is None and config.kv_transfer_config is None
    return (
        has_one_kind
        and is_full
        and is_plain
        and not (config.scheduler_config.async_scheduling or scheduler.needs_kv_cache_zeroing)
    )


class DecodeWindow:
    """Decoding steps of all running requests. After `close`, or if `step` returns None, vLLM takes the next step."""

    def __init__(self, engine: LLMEngine, requests: Mapping[str, Decoding], routes: ExpertRecording | None) -> None:
        """Take over the batch of vLLM's model runner; use `open`."""
        self._routes = routes
        core = engine_core(engine)
        self._engine, self._config, self._scheduler = engine, core.vllm_config, core.scheduler
        self._runner: Any = core.model_executor.driver_worker.worker.model_runner
        self._batch = self._runner.input_batch
        self._table = self._batch.block_table[0]
        (self._attention,) = self._runner.attn_groups[0]
        self._drop([request_id for request_id in self._batch.req_ids if request_id not in requests])

        ids: list[str] = list(self._batch.req_ids)
        self._decoding, self._index = requests, {request_id: index for index, request_id in enumerate(ids)}
        held = [self._scheduler.requests[request_id] for request_id in ids]
        made_R = np.array([request.num_output_tokens for request in held])
        lengths_R = np.array([request.num_tokens for request in held])
        most_R = np.array([request.max_tokens for request in held])
        self._left_R = np.minimum(most_R - made_R, self._scheduler.max_model_len - lengths_R)
        self._computed_R = np.array([request.num_computed_tokens for request in held], np.int64)
        self._temperature_R = np.array([requests[request_id].sampling.temperature for request_id in ids], np.float32)
        width = min(int(self._left_R.max()), MAX_STEPS)
        self._seeds_RT = np.stack([
            seeds_of(requests[request.request_id].sampling, request.num_output_tokens, width) for request in held
        ])  # fmt: skip
        self._tokens_RT, self._logprobs_RT = np.empty((len(ids), width), np.int64), np.empty((len(ids), width), np.float32)
        self._last_R = np.array([request.all_token_ids[-1] for request in held], np.int32)
        self._num_known_R = np.zeros(len(ids), np.int64)  # of the window's tokens, those that vLLM knows
        self._num_steps = 0
        self._is_stop_V = np.zeros(self._batch.vocab_size, np.bool_)
        stop_ids = frozenset[int]().union(*(decoding.stop_ids for decoding in requests.values()))
        self._is_stop_V[[stop_id for stop_id in stop_ids if stop_id < len(self._is_stop_V)]] = True
        self._starts = torch.arange(len(ids) + 1, dtype=torch.int32)
        self._regroup()

    @classmethod
    def open(cls, engine: LLMEngine, requests: Mapping[str, Decoding], routes: ExpertRecording | None = None) -> Self | None:
        """Open a window on all requests of the engine; return None if any of them waits, or has prompt tokens to compute."""
        scheduler = engine_core(engine).scheduler
        running = scheduler.running
        if not running or len(running) < len(requests) or scheduler.get_request_counts()[1]:
            return None
        if any(request.num_tokens - request.num_computed_tokens != 1 for request in running):
            return None
        return cls(engine, requests, routes)

    @torch.inference_mode()
    def step(self) -> list[Decoded] | None:
        """Decode one token for every request; return the requests that finished.

        Return None without decoding if the KV cache is full, or after `MAX_STEPS` steps.
        """
        if self._num_steps == self._tokens_RT.shape[1] or not self._reserve():
            return None
        batch, rows_N, num = self._batch, self._rows_N, len(self._rows_N)
        tokens_N, logprobs_N = self._sample(self._logits())
        self._tokens_RT[self._index_N, self._num_steps] = tokens_N
        self._logprobs_RT[self._index_N, self._num_steps] = logprobs_N
        ends_N = batch.num_tokens_no_spec[:num]
        batch.token_ids_cpu[rows_N, ends_N] = tokens_N
        batch.is_token_ids[rows_N, ends_N] = True
        ends_N += 1
        self._last_R[self._index_N] = tokens_N
        self._num_steps += 1
        finished_N = self._is_stop_V[tokens_N] | (self._num_steps >= self._left_N)
        return self._finish(np.flatnonzero(finished_N)) if finished_N.any() else []

    def sampled(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        """Return the tokens of a request that this window has sampled, from index `start` on, and their log-probabilities."""
        index, steps = self._index[request_id], slice(start, self._num_steps)
        return self._tokens_RT[index, steps].tolist(), self._logprobs_RT[index, steps].tolist()

    def close(self) -> list[Decoded]:
        """Bring vLLM's state up to date; return the tokens of all requests that continue."""
        continuing = []
        for row, request_id in enumerate(self._batch.req_ids):
            continuing.append(self._tell(request_id, None))
            if row in self._batch.generators:  # vLLM would have drawn a seed for each token
                torch.randint(0, SEEDS, (self._num_steps,), generator=self._batch.generators[row], dtype=torch.long)
        return continuing

    def _regroup(self) -> None:
        """Find the window's data of each row of the batch, after the batch has changed."""
        index_N = np.array([self._index[request_id] for request_id in self._batch.req_ids], np.intp)
        self._index_N, self._rows_N = index_N, np.arange(len(index_N))
        self._left_N = self._left_R[index_N]
        temperature_N = self._temperature_R[index_N]
        greedy_N = temperature_N < GREEDY_BELOW
        divisors_N = np.where(greedy_N, np.float32(1), temperature_N)
        self._divisors_N1 = None if (divisors_N == 1).all() else torch.from_numpy(divisors_N)[:, None]
        self._is_greedy_N = torch.from_numpy(greedy_N) if greedy_N.any() else None
        if self._config.lora_config is not None and len(index_N):
            self._runner.set_active_loras(self._batch, np.ones(len(index_N), np.int32))

    def _reserve(self) -> bool:
        """Give each request a block for its next token; return False if none is left."""
        size, held_N = self._table.block_size, self._table.num_blocks_per_row[: len(self._rows_N)]
        positions_N = self._computed_R[self._index_N] + self._num_steps
        for row in np.flatnonzero(positions_N >= held_N * size):
            request_id = self._batch.req_ids[row]
            self._tell(request_id, None)
            blocks = self._scheduler.kv_cache_manager.allocate_slots(self._scheduler.requests[request_id], 1)
            if blocks is None:
                return False
            new_ids = blocks.get_block_ids()
            for ids, added in zip(self._runner.requests[request_id].block_ids, new_ids, strict=True):
                ids.extend(added)
            self._batch.block_table.append_row(new_ids, row)
        self._positions_N = positions_N
        return True

    def _logits(self) -> Tensor:
        """Run the model on the last token of each request; return the logits of the next, `[N, V]`."""
        num, positions_N, size = len(self._rows_N), self._positions_N, self._table.block_size
        blocks_N = self._table.block_table.np[self._rows_N, positions_N // size]
        slots = torch.from_numpy(blocks_N * np.int64(size) + positions_N % size)
        starts = self._starts[: num + 1]
        metadata = self._attention.get_metadata_builder().build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.from_numpy((positions_N + 1).astype(np.int32)),
                num_reqs=num,
                num_actual_tokens=num,
                max_query_len=1,
                max_seq_len=int(positions_N.max()) + 1,
                block_table_tensor=self._table.block_table.cpu[:num],
                slot_mapping=slots,
            ),
        )
        layers = self._attention.layer_names
        with set_forward_context(
            dict.fromkeys(layers, metadata), self._config, num_tokens=num, slot_mapping=dict.fromkeys(layers, slots)
        ):
            hidden = self._runner.model(
                input_ids=torch.from_numpy(self._last_R[self._index_N]),
                positions=torch.from_numpy(positions_N),
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        if self._routes is not None:
            self._routes.keep(self._batch.req_ids, [1] * num, positions_N.tolist())
        logits: Tensor = self._runner.model.compute_logits(hidden)
        return logits.to(torch.float32)

    def _sample(self, logits_NV: Tensor) -> tuple[Ids, npt.NDArray[np.float32]]:
        """Sample a token of each request as vLLM's sampler does; return the tokens and their log-probabilities."""
        if self._is_greedy_N is not None:
            greedy_N = torch.ops._C.greedy_argmax(logits_NV)
        if self._divisors_N1 is not None:
            logits_NV.div_(self._divisors_N1)
        logprobs_NV = logits_NV.log_softmax(dim=-1)
        sampled_N = torch.ops._C.fused_gumbel_argmax(
            logits_NV, torch.from_numpy(self._seeds_RT[self._index_N, self._num_steps])
        )
        if self._is_greedy_N is not None:
            sampled_N = torch.where(self._is_greedy_N, greedy_N, sampled_N)
        tokens_N: Ids = sampled_N.numpy().astype(np.int64, copy=False)
        return tokens_N, logprobs_NV.numpy()[self._rows_N, tokens_N]

    def _finish(self, rows: Indices) -> list[Decoded]:
        """End the requests of these rows that have a stop token or as many tokens as they may have."""
        finished = []
        for row in rows:
            request_id, index = self._batch.req_ids[row], self._index_N[row]
            if self._tokens_RT[index, self._num_steps - 1] in self._decoding[request_id].stop_ids:
                finished.append(self._tell(request_id, "stop"))
            elif self._num_steps >= self._left_N[row]:
                finished.append(self._tell(request_id, "length"))
        for decoded in finished:  # later turns of an episode find the computed blocks in the prefix cache
            request = self._scheduler.requests[decoded.request_id]
            self._scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        finished_ids = [decoded.request_id for decoded in finished]
        abort_requests(self._engine, finished_ids)
        self._drop(finished_ids)
        self._regroup()
        return finished

    def _tell(self, request_id: str, reason: FinishReason | None) -> Decoded:
        """Append the tokens that vLLM does not know to its state; return all tokens of the window."""
        index = self._index[request_id]
        request, known = self._scheduler.requests[request_id], self._num_known_R[index]
        token_ids: list[int] = self._tokens_RT[index, : self._num_steps].tolist()
        request.append_output_token_ids(token_ids[known:])
        request.num_computed_tokens += len(token_ids) - known
        self._runner.requests[request_id].output_token_ids.extend(token_ids[known:])
        self._num_known_R[index] = self._num_steps
        return Decoded(request_id, token_ids, self._logprobs_RT[index, : self._num_steps].tolist(), reason)

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Remove finished requests from the batch as vLLM's model runner does in its next step."""
        for request_id in request_ids:
            self._runner.requests.pop(request_id, None)
            self._runner.num_prompt_logprobs.pop(request_id, None)
            self._batch.remove_request(request_id)
        if request_ids:
            self._batch.condense()
            self._batch.refresh_metadata()
