"""One vLLM engine in this process, as a plain object: add requests, step, swap weights. It knows neither actors nor threads.

Requests go straight to the engine's core, and its tokens come straight from there. What vLLM has in front of it (templates,
text, stop strings, streams) is not needed for tokens in and tokens out, and takes a twelfth of the time of a tiny model.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams

from titanrl.config.sections import GeneratorConfig
from titanrl.device import Device
from titanrl.generator.compat import (
    EngineCoreOutput,
    abort_requests,
    add_request,
    engine_model,
    num_queued,
    prepare_ranks,
    prepare_vllm,
    reset_prefix_cache,
    step_core,
)
from titanrl.types import Completion, EngineLoad, FinishReason, GenerationRequest, SamplingParams

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""vLLM's words for how a completion that was not aborted ended."""
MIN_PREFILL_TOKENS = 4096
"""Tokens of prompts, or of completions computed again after an update, that a CPU runs through the model at once."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A completed request and the ticket it was added under."""

    ticket: int
    completion: Completion


@dataclass(slots=True)
class _Running:
    """A request in the engine, and what it has generated."""

    ticket: int
    request: GenerationRequest
    switches: list[tuple[int, int]]
    """Tokens so far, and the version from there on, oldest first."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def take(self, output: EngineCoreOutput) -> None:
        """Append what a step has generated: as a rule one token; none while its prompt is being computed."""
        if output.new_token_ids:
            assert output.new_logprobs is not None, "vLLM gave a token without its log-probability"
            self.token_ids += output.new_token_ids
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # the sampled token's comes first

    def completion(self, finish_reason: FinishReason) -> Completion:
        """All of it, as our carrier."""
        assert len(self.logprobs) == len(self.token_ids), "expected one log-probability a token"
        return Completion(
            token_ids=np.asarray(self.token_ids, np.int64),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=self._versions(),
            finish_reason=finish_reason,
        )

    def _versions(self) -> np.ndarray:
        """Policy version of each token."""
        starts = [start for start, _ in self.switches]
        counts = np.diff([*starts, len(self.token_ids)])
        return np.repeat([version for _, version in self.switches], counts).astype(np.int64)


class Engine:
    """Continuous batching over one set of weights, which `update_weights` changes between two steps."""

    def __init__(
        self, model_dir: Path, config: GeneratorConfig, device: Device, *, max_len: int, stop_ids: Sequence[int]
    ) -> None:
        """Build the engine with weights that mean nothing yet: it serves only after the first `update_weights`.

        Args:
            model_dir: Hugging Face directory; only its config is read.
            config: engine options.
            device: where it runs.
            max_len: longest prompt plus completion, in tokens.
            stop_ids: tokens that end a completion; they stay in it.
        """
        self._engine = build_engine(model_dir, config, device, max_len)
        self._max_len, self._vocab_size = max_len, self._engine.model_config.get_vocab_size()
        self._stop_ids = tuple(stop_ids)
        self._next_ticket = 0
        self._request_ids = itertools.count()
        self._running: dict[str, _Running] = {}
        self.version: int | None = None
        self._no_weights = "none have been pulled yet"

    @property
    def model(self) -> nn.Module:
        """The model being run."""
        return engine_model(self._engine)

    @property
    def num_running(self) -> int:
        """Requests not finished."""
        return len(self._running)

    @property
    def can_step(self) -> bool:
        """Whether there is something to decode, and weights to do it with."""
        return self.num_running > 0 and self.version is not None

    @property
    def load(self) -> EngineLoad:
        """How much there is to do."""
        return EngineLoad(num_requests=self.num_running, num_queued=num_queued(self._engine))

    def add(self, request: GenerationRequest) -> int:
        """Queue a request; it joins the batch at the next step. Returns its ticket; those that fail use none up.

        Raises:
            RuntimeError: there are no weights to serve it with.
            ValueError: the prompt is empty, leaves no room for a token, or has tokens that the model does not know.
        """
        ticket = self._next_ticket
        self._start(ticket, request)
        self._next_ticket += 1
        return ticket

    def abort(self, tickets: Iterable[int]) -> None:
        """Take requests back; nothing is returned for them."""
        wanted = set(tickets)
        request_ids = [request_id for request_id, running in self._running.items() if running.ticket in wanted]
        for request_id in request_ids:
            del self._running[request_id]
        abort_requests(self._engine, request_ids)

    def restart(self) -> None:
        """Begin every running request again, with the weights as they are now."""
        running = list(self._running.values())
        self.abort(request.ticket for request in running)
        for again in running:
            self._start(again.ticket, again.request)

    def step(self) -> list[Finished]:
        """Decode one token for every running request; returns those that ended."""
        ended = []
        for output in step_core(self._engine):
            running = self._running.get(output.request_id)
            if running is None:  # taken back while a step was under way, which vLLM has on devices
                continue
            running.take(output)
            if output.finish_reason is not None:
                del self._running[output.request_id]
                ended.append(Finished(running.ticket, running.completion(FINISH_REASONS[str(output.finish_reason)])))
        return ended

    def invalidate(self, reason: str) -> None:
        """Refuse requests, with a reason, until the next successful `update_weights`."""
        self.version, self._no_weights = None, reason

    def update_weights(self, version: int, fill: Callable[[nn.Module], None]) -> None:
        """Let `fill` write the weights of `version` into the model; running requests go on with them.

        Their keys and values are computed again, so that each token after the update has the probability that `version`
        gives it after all tokens before. With the old ones kept, it would come from a mixture that no version can reproduce.

        If `fill` fails the weights are undefined: the engine refuses requests until an update succeeds.
        """
        self.invalidate(f"version {version} was not written to its end")
        fill(self.model)
        reset_prefix_cache(self._engine)
        for running in self._running.values():
            running.switches.append((len(running.token_ids), version))
        self.version = version

    def _start(self, ticket: int, request: GenerationRequest) -> None:
        if self.version is None:
            raise RuntimeError(f"the generator has no valid weights: {self._no_weights}")
        self._check_prompt(request.token_ids)
        request_id = str(next(self._request_ids))
        add_request(self._engine, request_id, list(request.token_ids), sampling_params(request.sampling, self._stop_ids))
        self._running[request_id] = _Running(ticket, request, [(0, self.version)])

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        """What would break the engine, for everybody, belongs to who asks for it."""
        if not 0 < len(token_ids) < self._max_len:
            raise ValueError(f"the prompt has {len(token_ids)} tokens; this engine takes 1 to {self._max_len - 1}")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise ValueError(f"the prompt has tokens outside of 0 to {self._vocab_size - 1}")


def build_engine(model_dir: Path, config: GeneratorConfig, device: Device, max_len: int) -> LLMEngine:
    """vLLM's engine with dummy weights; of a tensor-parallel one this rank's part, which returns when all ranks have theirs."""
    prepare_vllm()
    if config.tp > 1:
        prepare_ranks()
    if config.model_impl == "titan":
        from titanrl.generator.titan import register_titan_model

        register_titan_model(model_dir, device, config.tp)
    engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(model_dir, config, device, max_len)))
    if config.model_impl == "titan" and config.tp == 1:
        from titanrl.generator.kernels import use_cpu_kernels
        from titanrl.generator.titan import unwrap_forward

        unwrap_forward(engine_model(engine))
        if device.kind == "cpu":
            use_cpu_kernels(engine_model(engine))
    return engine


def engine_args(model_dir: Path, config: GeneratorConfig, device: Device, max_len: int) -> dict[str, Any]:
    """vLLM's options for our config; `generator.vllm` has the last word.

    Log-probabilities are those of the distribution that was sampled from, temperature included, as the trainer's are.
    """
    args: dict[str, Any] = {
        "model": str(model_dir),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "max_model_len": max_len,
        "max_num_seqs": config.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "load_format": "dummy",
    }
    if device.kind == "cpu":
        # Compiling takes half a minute and gains nothing at these sizes; the smallest block lets short prompts share.
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": config.kv_cache_bytes // config.tp, "block_size": 32}
        # A prompt cut in two makes vLLM 0.32.0 rewind the request's random generator, which those of a CPU cannot do.
        args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(MIN_PREFILL_TOKENS, max_len)}
    if config.tp > 1:
        args |= {"tensor_parallel_size": config.tp, "distributed_executor_backend": "external_launcher"}
    if config.model_impl == "titan":
        from titanrl.generator.titan import CONFIG_FORMAT

        args |= {"config_format": CONFIG_FORMAT, "trust_remote_code": True}
    return args | config.vllm


def sampling_params(sampling: SamplingParams, stop_ids: Sequence[int]) -> VllmSamplingParams:
    """vLLM's sampling parameters; each token comes with its log-probability."""
    return VllmSamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )
