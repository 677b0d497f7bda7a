"""One vLLM engine in this process, as a plain object: add requests, step, swap weights. It knows neither actors nor threads."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from titanrl.config.sections import GeneratorConfig
from titanrl.device import Device
from titanrl.generator.compat import engine_model, num_generated_tokens, prepare_vllm, reset_prefix_cache
from titanrl.types import Completion, FinishReason, GenerationRequest

FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
"""vLLM's words for how a completion that was not aborted ended."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A completed request and the ticket it was added under."""

    ticket: int
    completion: Completion


@dataclass(slots=True)
class _Running:
    """A request in the engine. `switches` holds (tokens so far, version from there on), oldest first."""

    ticket: int
    switches: list[tuple[int, int]] = field(default_factory=list)

    def versions(self, num_tokens: int) -> np.ndarray:
        """Policy version of each of its tokens."""
        starts = [start for start, _ in self.switches]
        counts = np.diff([*starts, num_tokens]).clip(min=0)
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
        self._stop_ids = list(stop_ids)
        self._tickets = itertools.count()
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

    def add(self, request: GenerationRequest) -> int:
        """Queue a request; it joins the batch at the next step. Returns its ticket."""
        if self.version is None:
            raise RuntimeError(f"the generator has no valid weights: {self._no_weights}")
        ticket = next(self._tickets)
        sampling = request.sampling
        request_id = self._engine.add_request(
            str(ticket),
            {"prompt_token_ids": list(request.token_ids)},
            VllmSamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                seed=sampling.seed,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                stop_token_ids=self._stop_ids,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        self._running[request_id] = _Running(ticket, [(0, self.version)])
        return ticket

    def step(self) -> list[Finished]:
        """Decode one token for every running request; returns those that ended."""
        outputs = self._engine.step()
        return [self._finish(output) for output in outputs if isinstance(output, RequestOutput) and output.finished]

    def invalidate(self, reason: str) -> None:
        """Refuse requests, with a reason, until the next successful `update_weights`."""
        self.version, self._no_weights = None, reason

    def update_weights(self, version: int, fill: Callable[[nn.Module], None]) -> None:
        """Let `fill` write the weights of `version` into the model; running requests go on with them.

        If `fill` fails the weights are undefined: the engine refuses requests until an update succeeds.
        """
        self.invalidate(f"version {version} was not written to its end")
        fill(self.model)
        reset_prefix_cache(self._engine)
        for request_id, num_tokens in num_generated_tokens(self._engine).items():
            self._running[request_id].switches.append((num_tokens, version))
        self.version = version

    def _finish(self, output: RequestOutput) -> Finished:
        request_id = next(key for key in self._running if key.startswith(f"{output.request_id}-"))
        running = self._running.pop(request_id)
        return Finished(running.ticket, completion_of(output.outputs[0], running.versions))


def build_engine(model_dir: Path, config: GeneratorConfig, device: Device, max_len: int) -> LLMEngine:
    """vLLM's engine with dummy weights."""
    prepare_vllm()
    if config.model_impl == "native":
        return LLMEngine.from_engine_args(EngineArgs(**engine_args(model_dir, config, device, max_len)))
    from titanrl.generator.titan import register_titan_model, unwrap_forward

    register_titan_model(model_dir, device)
    engine = LLMEngine.from_engine_args(EngineArgs(**engine_args(model_dir, config, device, max_len)))
    unwrap_forward(engine_model(engine))
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
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": config.kv_cache_bytes, "block_size": 32}
    if config.model_impl == "titan":
        from titanrl.generator.titan import CONFIG_FORMAT

        args |= {"config_format": CONFIG_FORMAT, "trust_remote_code": True}
    return args | config.vllm


def completion_of(output: CompletionOutput, versions: Callable[[int], np.ndarray]) -> Completion:
    """vLLM's output as our carrier."""
    token_ids = np.asarray(output.token_ids, np.int64)
    return Completion(
        token_ids=token_ids,
        logprobs=np.asarray(flat(output.logprobs), np.float32),
        versions=versions(len(token_ids)),
        finish_reason=FINISH_REASONS[str(output.finish_reason)],
    )


def flat(logprobs: Any) -> Iterable[float]:
    """The sampled tokens' log-probabilities; with `logprobs=0` there is one entry a position."""
    assert len(logprobs.logprobs) == len(logprobs.start_indices), "expected one log-probability a token"
    values: list[float] = logprobs.logprobs
    return values
