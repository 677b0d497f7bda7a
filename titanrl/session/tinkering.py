"""A session as the host of a Tinker endpoint: the session's own model, trained by one client at a time.

All weights are trained, or the adapters that `trainer.lora` configures. Generators serve the merged weights, of which only the
newest can be sampled.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from titanrl.carriers.datums import Datum, ForwardBackwardOutput
from titanrl.carriers.types import AdamParams, Completion, FloatArray, GenerationRequest, OptimUpdate, SamplingParams
from titanrl.config.sections import LoraConfig
from titanrl.rollout.group import derive_seed
from titanrl.serving.calls import Refused
from titanrl.serving.protocol import new_id
from titanrl.serving.tinker_checkpoints import ModelSpec
from titanrl.serving.tinker_sessions import FullError, Model, Sampler
from titanrl.serving.tinker_wire import SampleRequest
from titanrl.session.sampling import SamplingClient, VersionGoneError
from titanrl.session.session import Session


class SessionHost:
    """The host of a session with trainer and generators. Call `start` first."""

    def __init__(self, session: Session, base_model: str, *, shares_files: bool) -> None:
        """Use a session that has published its weights.

        Args:
            session: The session.
            base_model: Name of the model for clients.
            shares_files: True if clients run on this machine, so that they can open the tokenizer.
        """
        self._session, self.base_model = session, base_model
        self.tokenizer_id = str(session.model.path) if shares_files else None
        self.vocab_size = session.model.shape.vocab_size
        self.max_tokens = session.config.max_sequence_tokens
        self._lora = session.config.trainer.lora
        self._model: SessionModel | None = None
        self._is_fresh = True  # the trainer has the base model, and nothing else
        self._lock = asyncio.Lock()

    @property
    def notice(self) -> str:
        """Return the text that clients print when they connect."""
        if self._lora is None:
            return "This server trains all weights of one model at a time. Create clients with rank=0."
        layers = " and ".join(self._lora.targets)
        kind = f"adapters of rank {self._lora.rank} on {layers}, not on the unembedding"
        return f"This server trains one model at a time, with {kind}."

    async def start(self) -> None:
        """Save the base model, from which every client starts."""
        self._base = await self._session.training.save_state("base")
        self._base_sampler = SessionSampler(self._session, await self._session.training.publish())

    async def create(self, spec: ModelSpec, state: Path | None, *, with_optimizer: bool) -> Model:
        """Return the session's model, initialized from the base model or a saved state.

        Raises:
            FullError: Another client trains it.
            Refused: The trainer has other adapters.
        """
        _check_spec(spec, self._lora)
        async with self._lock:
            if self._model is not None:
                rule = "this server trains one model at a time, and a client has one"
                raise FullError(f"{rule}. Close that client, or wait until its session has ended.")
            if state is not None or not self._is_fresh:
                await self._load(state or self._base, with_optimizer=with_optimizer)
            self._is_fresh = False
            self._model = SessionModel(self._session, self._free)
            return self._model

    async def base(self) -> Sampler:
        """Return a sampler of the base model."""
        return self._base_sampler

    async def open_sampler(self, spec: ModelSpec, state: Path) -> Sampler:
        """Load and publish saved weights.

        Raises:
            Refused: A client trains the model.
        """
        _check_spec(replace(spec, seed=None), self._lora)
        async with self._lock:
            if self._model is not None:
                raise Refused(
                    "the path: the generators have one set of weights at a time, and a client trains others. Sample what it "
                    "saved last, or wait until its session has ended."
                )
            await self._load(state, with_optimizer=False)
            self._is_fresh = False
            return SessionSampler(self._session, await self._session.training.publish())

    async def _load(self, state: Path, *, with_optimizer: bool) -> None:
        training = self._session.training
        await training.zero_grad()  # of an earlier client
        await (training.load_state_with_optimizer(state) if with_optimizer else training.load_state(state))

    async def _free(self) -> None:
        async with self._lock:
            await self._session.training.zero_grad()
            self._model = None


class SessionModel:
    """The session's model, as a client trains it."""

    def __init__(self, session: Session, free: Callable[[], Awaitable[None]]) -> None:
        self._session, self._training, self._free = session, session.training, free

    async def run(
        self, data: Sequence[Datum], loss_fn: str, options: Mapping[str, float], *, backward: bool
    ) -> ForwardBackwardOutput:
        """Run a pass; with `backward`, accumulate the gradient."""
        run = self._training.forward_backward if backward else self._training.forward
        return await run(data, loss_fn, options)

    async def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Take an optimizer step."""
        return await self._training.optim_step(params)

    async def save(self) -> Path:
        """Write weights and optimizer state into a new folder."""
        return await self._training.save_state(new_id("state-"))

    async def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Load what `save` wrote."""
        await (self._training.load_state_with_optimizer(folder) if with_optimizer else self._training.load_state(folder))

    async def publish(self) -> Sampler:
        """Send the weights to the generators."""
        return SessionSampler(self._session, await self._training.publish())

    async def recover(self) -> None:
        """Accept requests after a failed one."""
        self._training.recover()

    async def release(self) -> None:
        """Let the next client use the model."""
        await self._free()


class SessionSampler:
    """Published weights."""

    def __init__(self, session: Session, client: SamplingClient) -> None:
        self._session, self._client = session, client

    async def sample(self, asked: SampleRequest) -> list[Completion]:
        """Return completions. The same seed gives the same ones."""
        sampling = asked.sampling
        seeds = list[int | None]([None] * asked.num_samples)
        if sampling.temperature > 0:
            base = int(np.random.default_rng().integers(2**62)) if sampling.seed is None else sampling.seed
            seeds = [derive_seed(base, 0, index) for index in range(asked.num_samples)]
        return await self._generate(
            [GenerationRequest(token_ids=asked.prompt, sampling=replace(sampling, seed=seed)) for seed in seeds]
        )

    async def logprobs(self, tokens: Sequence[int]) -> FloatArray:
        """Return the log-probability of each token; the first is NaN."""
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, seed=None, prompt_logprobs=True)
        (completion,) = await self._generate([GenerationRequest(token_ids=tuple(tokens), sampling=sampling)])
        first, rest = np.full(1, np.nan, np.float32), completion.prompt_logprobs
        return first if rest is None else np.concatenate([first, rest.astype(np.float32)])

    async def release(self) -> None:
        """Do nothing: the next publication replaces the weights."""

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        try:
            return await self._client.generate(requests, is_shared=True)
        except VersionGoneError:
            raise Refused(
                "the weights of this sampler have been replaced by a later save, and the generators have one set at a time. "
                "Create a sampling client after the last save."
            ) from None


def _check_spec(spec: ModelSpec, lora: LoraConfig | None) -> None:
    """Check that the trainer can train a model.

    Raises:
        Refused: It cannot.
    """
    if lora is None:
        if spec.rank:
            fix = f"Create the client with rank=0, or start the server with trainer.lora.rank={spec.rank}"
            raise Refused(f"lora_config.rank: this server trains all weights (got {spec.rank}). {fix}.")
        return
    if spec.rank != lora.rank:
        fix = f"Create the client with rank={lora.rank}, or start the server with trainer.lora.rank={spec.rank}"
        raise Refused(f"lora_config.rank: this server has adapters of rank {lora.rank} (got {spec.rank}). {fix}.")
    for name, wanted in (("attention", spec.train_attn), ("mlp", spec.train_mlp)):
        if wanted != (name in lora.targets):
            key = "train_attn" if name == "attention" else "train_mlp"
            raise Refused(f"lora_config.{key}: this server has adapters on {', '.join(lora.targets)} (got {wanted}).")
    if spec.seed is not None:
        fix = "Leave it out, or start the server with another seed"
        raise Refused(f"lora_config.seed: the seed of this server initializes the adapters (got {spec.seed}). {fix}.")
