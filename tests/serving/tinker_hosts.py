"""A host of models without processes: a model is one number, which training moves."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from titanrl.carriers.types import AdamParams, Completion, Datum, FloatArray, ForwardBackwardOutput, OptimUpdate, TopTokens
from titanrl.serving.tinker_sessions import FullError, ModelSpec
from titanrl.serving.tinker_wire import SampleRequest

VOCAB = 100


class NumberHost:
    """Models whose log-probability of token t is `value - t / 100`. Adam is plain gradient descent."""

    base_model = "base/number"
    tokenizer_id = None
    vocab_size = VOCAB
    max_tokens = 64
    notice = "Models are numbers."

    def __init__(self, folder: Path, max_models: int = 4) -> None:
        self.folder, self.max_models = folder, max_models
        self.models, self.num_samplers, self.num_samples = list["NumberModel"](), 0, 0
        self.calls = list[str]()
        self.pause: asyncio.Event | None = None
        """If set, sampling waits for it."""

    async def create(self, spec: ModelSpec, state: Path | None, *, with_optimizer: bool) -> "NumberModel":
        if len(self.models) >= self.max_models:
            raise FullError(f"this server trains {self.max_models} models at a time. Close another client.")
        model = NumberModel(self)
        self.models.append(model)
        if state is not None:
            await model.load(state, with_optimizer=with_optimizer)
        return model

    async def base(self) -> "NumberSampler":
        return NumberSampler(self, 0.0)

    async def open_sampler(self, spec: ModelSpec, state: Path) -> "NumberSampler":
        return NumberSampler(self, json.loads((state / "value").read_text())[0])


class NumberModel:
    def __init__(self, host: NumberHost) -> None:
        self.host, self.value, self.gradient, self.momentum, self.num_steps = host, 0.0, 0.0, 0.0, 0

    async def run(
        self, data: Sequence[Datum], loss_fn: str, options: Mapping[str, float], *, backward: bool
    ) -> ForwardBackwardOutput:
        self.host.calls.append(f"{'forward_backward' if backward else 'forward'} {len(data)}")
        await asyncio.sleep(0)
        if any(datum.model_input[0] == 13 for datum in data):
            raise RuntimeError("a secret of the server")
        logprobs = [np.float32(self.value) - datum.loss_fn_inputs["target_tokens"] / 100 for datum in data]
        weights = [datum.loss_fn_inputs.get("weights", np.ones(len(datum.model_input))) for datum in data]
        if backward:
            self.gradient -= float(sum(each.sum() for each in weights))
        loss = -sum(float((each * weight).sum()) for each, weight in zip(logprobs, weights, strict=True))
        outputs = tuple({"logprobs": each.astype(np.float32)} for each in logprobs)
        return ForwardBackwardOutput(loss_fn_outputs=outputs, metrics={"loss:sum": loss}, version=self.num_steps)

    async def optim_step(self, params: AdamParams) -> OptimUpdate:
        self.host.calls.append("optim_step")
        if not math.isfinite(self.gradient):
            norm, self.gradient = abs(self.gradient), 0.0
            return OptimUpdate(version=self.num_steps, grad_norm=norm, skipped=True)
        self.momentum = 0.5 * self.momentum + self.gradient
        self.value -= params.learning_rate * self.momentum
        self.num_steps += 1
        update = OptimUpdate(version=self.num_steps, grad_norm=abs(self.gradient), skipped=False)
        self.gradient = 0.0
        return update

    async def save(self) -> Path:
        state = self.host.folder / f"state-{self.num_steps}"
        state.mkdir(parents=True)
        (state / "value").write_text(json.dumps([self.value, self.momentum]))
        return state

    async def load(self, folder: Path, *, with_optimizer: bool) -> None:
        self.value, momentum = json.loads((folder / "value").read_text())
        self.momentum = momentum if with_optimizer else 0.0

    async def publish(self, state: Path | None = None) -> "NumberSampler":
        return NumberSampler(self.host, self.value)

    async def recover(self) -> None:
        self.host.calls.append("recover")

    async def release(self) -> None:
        self.host.models.remove(self)


class NumberSampler:
    """Tokens are the seed and what follows it; their log-probabilities are those of the model."""

    def __init__(self, host: NumberHost, value: float) -> None:
        self.host, self.value = host, value
        self.unused, self.num_running = asyncio.Event(), 0
        self.unused.set()
        host.num_samplers += 1

    async def sample(self, asked: SampleRequest) -> list[Completion]:
        self.host.num_samples += 1
        self.num_running += 1
        self.unused.clear()
        try:
            if self.host.pause is not None:
                await self.host.pause.wait()
        except asyncio.CancelledError:
            self.host.calls.append("cancelled")
            raise
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.unused.set()
        seed = asked.sampling.seed or 0
        tokens = [(seed + np.arange(asked.sampling.max_new_tokens) + index) % VOCAB for index in range(asked.num_samples)]
        return [
            Completion(
                token_ids=each.astype(np.int64),
                logprobs=(self.value - each / 100).astype(np.float32),
                versions=np.zeros(len(each), np.int64),
                finish_reason="length",
            )
            for each in tokens
        ]

    async def logprobs(self, tokens: Sequence[int], num_top: int) -> tuple[FloatArray, TopTokens | None]:
        found = (self.value - np.asarray(tokens) / 100).astype(np.float32)
        found[0] = np.nan
        if not num_top:
            return found, None
        ids = np.tile(np.arange(num_top), (len(tokens) - 1, 1))
        return found, TopTokens(token_ids=ids, logprobs=(self.value - ids / 100).astype(np.float32))

    async def release(self) -> None:
        await self.unused.wait()
        self.host.num_samplers -= 1
