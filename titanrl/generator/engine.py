"""An in-process vLLM engine as a plain object, without actors or threads: add requests, step, update weights.

`Engine` comes first, then how it is built, and last the pullers, which read versions of the weights into it.

It exchanges token ids with vLLM's engine core directly. vLLM's front end (templates, text, stop strings, streaming) is not
needed for token ids, and takes a twelfth of the decoding time of a tiny model.
"""

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.lora.request import LoRARequest

from titanrl.carriers.supports import ExpertIds, Int32Array, first_recorded, supports_of
from titanrl.carriers.types import (
    BASE,
    Completion,
    EngineLoad,
    FinishReason,
    FloatArray,
    GenerationRequest,
    SamplingParams,
    TopTokens,
)
from titanrl.config.device import Device
from titanrl.config.sections import GeneratorConfig, LoraConfig
from titanrl.config.sizes import is_large, packed_weights
from titanrl.data.tokenizer import Tokenizer, load_tokenizer
from titanrl.generator.compat import (
    Decoded,
    DecodeWindow,
    Decoding,
    EngineCoreOutput,
    ExpertRecording,
    PackedExperts,
    PackedLinears,
    SupportRecording,
    abort_requests,
    add_request,
    can_open,
    can_pack,
    decoding_of,
    engine_model,
    num_queued,
    prepare_ranks,
    prepare_vllm,
    reset_prefix_cache,
    step_core,
    support_words,
    temporary_rendezvous,
)
from titanrl.generator.native import POLICY, Adapters, adapter_args, prepare_adapters, register_loader, weight_targets
from titanrl.models.directory import ModelDirectory
from titanrl.models.family import CPU_BLOCK_TOKENS
from titanrl.processes.machine import THREADS
from titanrl.weights.records import Commit, HeldAdapter, WeightManifest, WeightMismatchError, adapters_run, base_run
from titanrl.weights.transport import FetchedWeights, Targets, WeightReader

if TYPE_CHECKING:
    from titanrl.weights.store import WeightSource  # imports Monarch, which templates must not

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""vLLM's finish reasons mapped to ours. Aborted requests have none."""
Fill = Callable[["Engine"], bool | None]
"""Function that writes weights into an engine. It returns True if the linear layers keep theirs, as only adapters changed."""
Sampled = tuple[list[int], list[float]]
"""Tokens and their log-probabilities in nats, `[T]` each."""
MIN_PREFILL_TOKENS = 4096
"""Lower bound of the tokens prefilled per step on CPU, for prompts and for completions recomputed after an update."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A completion and the ticket of its request."""

    ticket: int
    completion: Completion


@dataclass(slots=True)
class _Running:
    """A request in the engine and the tokens generated for it."""

    ticket: int
    request: GenerationRequest
    switches: list[tuple[int, int]]
    """(token index, version) pairs, oldest first: the version generated the tokens from this index on."""
    decoding: Decoding | None
    """Settings of the request in a `DecodeWindow`; None if only vLLM can sample its tokens."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: FloatArray | None = None
    prompt_top: TopTokens | None = None
    supports: list[Int32Array] = field(default_factory=list)
    experts: list[ExpertIds] = field(default_factory=list)
    num_routed: int = 0
    """Number of tokens in `experts`."""

    def take(self, output: EngineCoreOutput, vocab_size: int) -> None:
        """Append the tokens of one step: usually one, or none during prefill."""
        if output.new_token_ids:
            assert output.new_logprobs is not None, "vLLM returned a token without its log-probability"
            self.token_ids += output.new_token_ids
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()  # column 0 is the sampled token
            if self.request.sampling.supports:
                self.supports += support_words(output, vocab_size)
        if output.new_prompt_logprobs_tensors is not None:
            found = output.new_prompt_logprobs_tensors
            self.prompt_logprobs = found.logprobs[:, 0].numpy()  # column 0 is the prompt's token
            if self.request.sampling.prompt_logprobs:
                top_ids = found.logprob_token_ids[:, 1:].numpy().astype(np.int64)
                self.prompt_top = TopTokens(token_ids=top_ids, logprobs=found.logprobs[:, 1:].numpy())

    def extend(self, decoded: Decoded) -> None:
        self.token_ids += decoded.token_ids
        self.logprobs += decoded.logprobs

    def completion(self, finish_reason: FinishReason, vocab_size: int) -> Completion:
        """Return everything generated so far as a completion."""
        assert len(self.logprobs) == len(self.token_ids), "expected one log-probability per token"
        counts = np.diff([*(start for start, _ in self.switches), len(self.token_ids)])
        return Completion(
            token_ids=np.asarray(self.token_ids, np.int64),
            logprobs=np.asarray(self.logprobs, np.float32),
            versions=np.repeat([version for _, version in self.switches], counts).astype(np.int64),
            finish_reason=finish_reason,
            prompt_logprobs=self.prompt_logprobs,
            prompt_top=self.prompt_top,
            supports=supports_of(self.supports, vocab_size) if self.request.sampling.supports else None,
            experts=self._experts() if self.request.sampling.experts else None,
        )

    def _experts(self) -> ExpertIds | None:
        num_tokens = len(self.request.token_ids) + len(self.token_ids)
        return first_recorded([np.concatenate(self.experts)[:num_tokens]], num_tokens) if self.experts else None


class Engine:
    """Continuous batching over one set of weights, which `update_weights` replaces between two steps."""

    def __init__(
        self,
        source: ModelDirectory,
        config: GeneratorConfig,
        device: Device,
        *,
        max_len: int,
        stop_ids: Sequence[int],
        lora: LoraConfig | None = None,
        num_held: int = 0,
        has_expert_bias: bool = False,
    ) -> None:
        """Build the engine with placeholder weights. It accepts requests after the first `update_weights`.

        Only the config of the model directory is read, unless `generator.vllm` sets `load_format`. `max_len` is the longest
        prompt plus completion, in tokens. `stop_ids` end a completion, which includes them. With `lora`, the policy is the
        model with an adapter, and `fill` also writes the adapter; the engine can hold `num_held` others. `has_expert_bias` says
        that updates contain a bias of the experts.
        """
        self._engine = build_engine(source, config, device, max_len, lora, num_held, has_expert_bias=has_expert_bias)
        self.adapters = None if lora is None else Adapters(self.model, source)
        """LoRA adapters; None if the policy has none."""
        self._held: dict[int, int] = {}
        has_packed = source.shape.num_experts > 0 and config.model_impl == "native" and "load_format" not in config.vllm
        self._experts = PackedExperts(self.model) if has_packed else None
        self._linears: PackedLinears | None = None
        if device.kind == "cpu" and packed_weights(config, source.shape) and can_pack(self._engine):
            self._linears = PackedLinears(self.model)
            if "load_format" in config.vllm:  # the weights are already there
                self._linears.pack()
        self._max_len, self._vocab_size = max_len, self._engine.model_config.get_vocab_size()
        self._model_dir, self._stop_ids = source.path, tuple(stop_ids)
        self._next_ticket = 0
        self._request_ids = itertools.count()
        self._running: dict[str, _Running] = {}
        self._recording: SupportRecording | None = None
        self._num_experts, self._is_titan = source.shape.num_experts, config.model_impl == "titan"
        self._routes: ExpertRecording | None = None
        self._has_windows = can_open(self._engine)
        self._window: DecodeWindow | None = None
        self.version: int | None = None
        self._no_weights = "none have been pulled yet"

    @property
    def model(self) -> nn.Module:
        """The model being served."""
        return engine_model(self._engine)

    @property
    def plain_experts(self) -> Mapping[str, Tensor]:
        """Tensors to write instead of parameters of these names, before `update_weights` packs them."""
        return {} if self._experts is None else self._experts.plain

    @property
    def num_running(self) -> int:
        """Number of unfinished requests."""
        return len(self._running)

    @property
    def can_step(self) -> bool:
        """True if there are unfinished requests and valid weights."""
        return self.num_running > 0 and self.version is not None

    @property
    def load(self) -> EngineLoad:
        """Unfinished requests, and those still waiting for batch or KV-cache space."""
        return EngineLoad(num_requests=self.num_running, num_queued=num_queued(self._engine))

    def add(self, request: GenerationRequest) -> int:
        """Queue a request for the next step and return its ticket. A refused request does not use up a ticket.

        Raises:
            RuntimeError: The engine has no valid weights.
            ValueError: The prompt is empty, leaves no room for a token, or contains unknown token ids.
        """
        ticket = self._next_ticket
        self._start(ticket, request)
        self._next_ticket += 1
        return ticket

    def abort(self, tickets: Iterable[int]) -> None:
        """Cancel requests; `step` returns nothing for them."""
        self._close_window()
        wanted = set(tickets)
        request_ids = [request_id for request_id, running in self._running.items() if running.ticket in wanted]
        for request_id in request_ids:
            del self._running[request_id]
        abort_requests(self._engine, request_ids)

    def sampled(self, starts: Mapping[int, int]) -> dict[int, Sampled]:
        """Return the tokens that running requests have sampled so far.

        Args:
            starts: Index of the first token to return, by ticket.
        """
        found = dict[int, Sampled]()
        for request_id, running in self._running.items():
            start = starts.get(running.ticket)
            if start is not None:
                token_ids, logprobs = running.token_ids[start:], running.logprobs[start:]
                if self._window is not None:
                    more = self._window.sampled(request_id, max(0, start - len(running.token_ids)))
                    token_ids, logprobs = token_ids + more[0], logprobs + more[1]
                if token_ids:
                    found[running.ticket] = token_ids, logprobs
        return found

    def restart(self) -> None:
        """Restart every running request from its prompt, with the current weights."""
        running = list(self._running.values())
        self.abort(request.ticket for request in running)
        for again in running:
            self._start(again.ticket, again.request)

    def step(self) -> list[Finished]:
        """Decode one token for every running request; return the requests that finished."""
        if self._routes is not None:
            self._routes.is_on = any(running.request.sampling.experts for running in self._running.values())
        if self._window is None and self._has_windows:  # vLLM computes the prompts first
            requests = {request_id: running.decoding for request_id, running in self._running.items() if running.decoding}
            if len(requests) == len(self._running):
                self._window = DecodeWindow.open(self._engine, requests, self._routes)
        if self._window is not None:
            decoded = self._window.step()
            self._take_routes()
            if decoded is not None:
                return [self._ended(tokens) for tokens in decoded]
            self._close_window()  # if the KV cache is full, vLLM decides which request has to wait
        ended = []
        if self._recording is not None:
            self._recording.switch(any(running.request.sampling.supports for running in self._running.values()))
        outputs = step_core(self._engine)
        self._take_routes()
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is None:  # aborted during an asynchronous step, which vLLM runs on accelerators
                continue
            running.take(output, self._vocab_size)
            stop = running.request.sampling.stop
            has_stopped = bool(stop and output.new_token_ids) and self._tokenizer.completes_stop(running.token_ids, stop)
            if output.finish_reason is not None:
                del self._running[output.request_id]
                reason = "stop" if has_stopped else FINISH_REASONS[str(output.finish_reason)]
                ended.append(Finished(running.ticket, running.completion(reason, self._vocab_size)))
            elif has_stopped:
                self.abort([running.ticket])
                ended.append(Finished(running.ticket, running.completion("stop", self._vocab_size)))
        return ended

    def invalidate(self, reason: str) -> None:
        """Refuse requests with this reason until the next successful `update_weights`."""
        self.version, self._no_weights = None, reason

    def update_weights(self, version: int, fill: Fill) -> None:
        """Call `fill` to write the weights of `version` into the model; running requests continue with them.

        vLLM recomputes the keys and values of running requests. Each later token thus has the probability that `version`
        assigns it given all earlier tokens. With cached keys and values of an older version, no version could reproduce it.

        If `fill` fails, the weights are undefined, and the engine refuses requests until an update succeeds.
        """
        self._close_window()
        self.invalidate(f"version {version} was not written completely")
        keeps_linears = fill(self)
        if not keeps_linears:
            if self._experts is not None:
                self._experts.pack()
            if self._linears is not None:
                self._linears.pack()
        reset_prefix_cache(self._engine)
        for running in self._running.values():
            if running.request.adapter is None:
                running.switches.append((len(running.token_ids), version))
        self.version = version

    @property
    def held_adapters(self) -> frozenset[int]:
        """Numbers of the adapters from `hold_adapter`, without the policy's own."""
        return frozenset(self._held)

    def hold_adapter(self, adapter: int, version: int, fill: Fill) -> None:
        """Call `fill` to write an adapter, which later requests can name. Its tokens have this version."""
        self._close_window()
        fill(self)
        self._held[adapter] = version

    def drop_adapters(self, adapters: Iterable[int]) -> None:
        """Forget held adapters. Requests that name them must have finished; unknown ones are ignored."""
        self._close_window()
        for adapter in adapters:
            assert self.adapters is not None
            used = [running for running in self._running.values() if running.request.adapter == adapter]
            assert not used, f"{len(used)} running requests use adapter {adapter}"
            self._held.pop(adapter, None)
            self.adapters.drop(adapter)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model_dir)  # loaded on first use, because only stop texts need it

    def _take_routes(self) -> None:
        for request_id, start, experts in () if self._routes is None else self._routes.take():
            running = self._running.get(request_id)
            if running is not None and running.request.sampling.experts:
                # vLLM computes tokens again after an update of the weights, or after a preemption. The next token was sampled
                # with the experts of the first time.
                assert start <= running.num_routed, "vLLM did not compute some tokens of the request"
                fresh = experts[running.num_routed - start :]
                running.experts.append(fresh)
                running.num_routed += len(fresh)

    def _close_window(self) -> None:
        """Let vLLM continue: call this before any change of its requests or of the weights."""
        if self._window is not None:
            window, self._window = self._window, None
            for decoded in window.close():
                self._running[decoded.request_id].extend(decoded)

    def _ended(self, decoded: Decoded) -> Finished:
        """Return the completion of a request that ended in a window."""
        assert decoded.finish_reason is not None
        running = self._running.pop(decoded.request_id)
        running.extend(decoded)
        if not self._running:
            self._window = None
        return Finished(running.ticket, running.completion(decoded.finish_reason, self._vocab_size))

    def _start(self, ticket: int, request: GenerationRequest) -> None:
        if self.version is None:
            raise RuntimeError(f"the generator has no valid weights: {self._no_weights}")
        adapter, version = self._adapter_of(request, self.version)
        token_ids = request.token_ids  # vLLM's core does not check them; an invalid one would fail all requests
        if not 0 < len(token_ids) < self._max_len:
            fix = "Shorten the prompt, or raise data.max_prompt_tokens or rollout.max_new_tokens."
            raise ValueError(f"prompt: length must be 1 to {self._max_len - 1} tokens (got {len(token_ids)}). {fix}")
        low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            raise ValueError(f"prompt: token ids must be 0 to {self._vocab_size - 1} (got {low} to {high})")
        if (request.sampling.prompt_logprobs or 0) > self._vocab_size:
            raise ValueError(f"num: must be at most {self._vocab_size}, the size of the vocabulary. Ask for fewer tokens.")
        if request.sampling.supports and self._recording is None:
            self._recording = SupportRecording(self._engine, self._vocab_size)
        if request.sampling.experts and self._routes is None:
            if not self._num_experts:
                raise ValueError("experts: the model has none. Set trainer.routing to own.")
            choices = None
            if self._is_titan:
                from titanrl.generator.titan import expert_choices

                choices = expert_choices(self.model)
            self._routes = ExpertRecording(self._engine, self._num_experts, choices)
        self._close_window()
        request_id = str(next(self._request_ids))
        params = sampling_params(request.sampling, self._stop_ids)
        named = LoRARequest(f"adapter {adapter}", adapter, "titanrl") if adapter else None  # the prefix cache compares names
        add_request(self._engine, request_id, list(token_ids), params, named)
        decoding = decoding_of(request.sampling, [*self._stop_ids, *request.sampling.stop_ids]) if self._has_windows else None
        self._running[request_id] = _Running(ticket, request, [(0, version)], decoding)

    def _adapter_of(self, request: GenerationRequest, version: int) -> tuple[int, int]:
        """Return the adapter of a request, and the version of its tokens, if that of the policy is `version`."""
        if self.adapters is None and request.adapter is not None:
            raise ValueError(f"adapter: this generator holds none (got {request.adapter}). Set weights.lora to adapters.")
        if self.adapters is None:
            return BASE, version
        if request.adapter is None:
            return POLICY, version
        if request.adapter == BASE:
            return BASE, 0
        if request.adapter not in self._held:
            raise ValueError(f"adapter: not held by this generator (got {request.adapter}). It has been released.")
        return request.adapter, self._held[request.adapter]


def build_engine(
    source: ModelDirectory,
    config: GeneratorConfig,
    device: Device,
    max_len: int,
    lora: LoraConfig | None = None,
    num_held: int = 0,
    *,
    has_expert_bias: bool = False,
) -> LLMEngine:
    """Build vLLM's engine. With `generator.tp` > 1, build this rank's shard and wait for the other ranks to build theirs."""
    prepare_vllm()
    if device.kind == "cpu":
        # Calls of a small model are too short for more than one thread.
        torch.set_num_threads(int(os.environ.get(THREADS, "1")) if is_large(config, source.shape) else 1)
    if config.tp > 1:
        prepare_ranks()
    if config.model_impl == "titan":
        from titanrl.generator.titan import register_titan_model

        register_titan_model(source, device, max_len, config.tp, has_expert_bias=has_expert_bias)
    register_loader(source)
    args = engine_args(source.path, config, device, max_len, has_experts=source.shape.num_experts > 0)
    if lora is not None:
        prepare_adapters()
        args |= adapter_args(source, lora, 1 + num_held)
    with temporary_rendezvous():
        engine = LLMEngine.from_engine_args(EngineArgs(**args))
    logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.WARNING)  # it logs each reset of the prefix cache
    if device.kind == "cpu":  # vLLM's function does nothing either, but warns of it twice in each pull
        torch.set_num_threads = lambda nthreads: None
    if config.model_impl == "titan" and config.tp == 1:
        from titanrl.generator.titan import speed_up

        speed_up(engine_model(engine), device)
    return engine


def engine_args(
    model_dir: Path, config: GeneratorConfig, device: Device, max_len: int, *, has_experts: bool = False
) -> dict[str, Any]:
    """Return vLLM's options for our config; `generator.vllm` overrides them.

    `processed_logprobs` selects log-probabilities of the sampling distribution, with temperature, as in the trainer.
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
        # Compiling takes half a minute and does not help small models. The smallest block lets short prompts share a prefix.
        args |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
        args |= {"kv_cache_memory_bytes": config.kv_cache_bytes // config.tp}
        # With a split prompt, vLLM 0.32.0 rewinds the request's random generator, which torch's CPU generators do not support.
        args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(MIN_PREFILL_TOKENS, max_len)}
    if config.tp > 1:
        args |= {"tensor_parallel_size": config.tp, "distributed_executor_backend": "external_launcher"}
    if config.model_impl == "titan":
        from titanrl.generator.titan import CONFIG_FORMAT

        args["config_format"] = CONFIG_FORMAT
    else:
        if has_experts and device.kind == "cuda":
            args["moe_backend"] = "triton"  # the others rearrange the weights, which updates would have to repeat
        args["config_format"] = "hf"  # by default, vLLM reads params.json if there is one
    return args | config.vllm


def sampling_params(sampling: SamplingParams, stop_ids: Sequence[int]) -> VllmSamplingParams:
    """Return vLLM's sampling parameters, with the log-probability of each sampled token."""
    return VllmSamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_new_tokens,
        seed=sampling.seed,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop_token_ids=[*stop_ids, *sampling.stop_ids],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=sampling.prompt_logprobs,
        # A token in the prefix cache is not computed, so its experts would be unknown. None: vLLM decides.
        skip_reading_prefix_cache=True if sampling.experts else None,
        detokenize=False,
    )


class Puller:
    """Reader of the policy's versions into the model of one generator rank. Fetch and fill one version after the other.

    It reads all weights, or with LoRA adapters the base once, then only adapters.
    """

    def __init__(
        self, source: "WeightSource", model: ModelDirectory, config: GeneratorConfig, rank: int, *, has_adapters: bool
    ) -> None:
        """Prepare to read from a source; `rank` is the tensor-parallel rank."""
        self._model, self._config, self._rank, self._has_adapters = model, config, rank, has_adapters
        self._reader = WeightReader(source.run, source.store, source.verify, source.name)
        self._base_reader = WeightReader(base_run(source.run), source.store, source.verify, f"{source.name}-base")
        self._base: Sequence[WeightManifest] = ()
        self._targets: Targets = {}

    async def fetch(self, commit: Commit) -> Fill:
        """Make a version accessible; return the function that writes it into the model, to be called between two steps.

        Raises:
            WeightMismatchError: As in `WeightReader.fetch`.
        """
        base = commit.base
        weights: FetchedWeights | None = None  # all, or with adapters the base, unless this rank has it
        adapter: FetchedWeights | None = None
        if not self._has_adapters:
            weights = await self._reader.fetch(commit)
        else:
            if base != self._base:
                weights = await self._base_reader.fetch(Commit(base[0].version, base))
            adapter = await self._reader.fetch(commit)

        def fill(engine: Engine) -> bool:
            if weights is not None:
                if held := engine.held_adapters:
                    raise WeightMismatchError(
                        f"the base changed while {len(held)} adapters on it are held. Release their sampling clients "
                        "before loading a state with another base."
                    )
                self._base = ()
                weights.copy_into(self._weight_targets(engine))
                self._base = base
            if adapter is not None:
                fill_adapter(engine, POLICY, adapter)
            return weights is None

        return fill

    def take_received(self) -> int:
        """Return the bytes received since the previous call, not counting shared memory."""
        return self._reader.take_received() + self._base_reader.take_received()

    def close(self) -> None:
        """Stop receiving. The puller must not be used afterwards."""
        self._reader.close()
        self._base_reader.close()

    def _weight_targets(self, engine: Engine) -> Targets:
        """Map the trainer's names to the model's tensors. The mapping is cached, so that the reader can reuse its copy plan."""
        if not self._targets:
            if self._config.model_impl == "titan":
                from titanrl.generator import titan  # imports torchtitan, which is slow; vLLM's own model does not need it

                self._targets = titan.weight_targets(engine.model)
            else:
                self._targets = weight_targets(engine.model, self._model, self._rank, self._config.tp, engine.plain_experts)
        return self._targets


class HeldPuller:
    """Reader of adapters that an engine holds beside the policy's."""

    def __init__(self, source: "WeightSource") -> None:
        self._reader = WeightReader(adapters_run(source.run), source.store, source.verify, f"{source.name}-adapters")

    async def fetch(self, held: HeldAdapter) -> Fill:
        """Make an adapter accessible; return the function that writes it into the engine, to be called between two steps.

        Raises:
            WeightMismatchError: As in `WeightReader.fetch`.
        """
        fetched = await self._reader.fetch(held.commit)
        return lambda engine: fill_adapter(engine, held.number, fetched)

    def close(self) -> None:
        """Stop receiving. The puller must not be used afterwards."""
        self._reader.close()


def fill_adapter(engine: Engine, adapter: int, fetched: FetchedWeights) -> None:
    """Write an adapter into an engine, which drops it if that fails."""
    assert engine.adapters is not None
    try:
        fetched.copy_into(engine.adapters.tensors(adapter, fetched.layouts))
    except BaseException:  # whatever the error, the tensors may hold a mixture
        engine.adapters.drop(adapter)
        raise
    engine.adapters.use(adapter, fetched.commit.scale)
