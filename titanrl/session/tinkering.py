"""A session as the host of a Tinker endpoint.

`AdapterHost` trains one LoRA adapter per model, many at a time, and generators hold the saved ones (`weights.lora: adapters`).
`SessionHost` trains the session's own model, one client at a time: all weights, or adapters that are merged for the generators,
of which only the newest can be sampled.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.carriers.types import (
    AdamParams,
    Completion,
    Datum,
    FloatArray,
    ForwardBackwardOutput,
    GenerationRequest,
    OptimUpdate,
    TopTokens,
)
from titanrl.config.sections import LoraConfig
from titanrl.serving.calls import Refused, new_id
from titanrl.serving.tinker_sessions import FullError, Model, ModelSpec, Sampler
from titanrl.serving.tinker_wire import SampleRequest
from titanrl.session.sampling import (
    AdapterLimitError,
    ReleasedError,
    SamplingClient,
    VersionGoneError,
    read_logprobs,
    reading_request,
    seeded_requests,
)
from titanrl.session.training import TrainingClient

if TYPE_CHECKING:
    from titanrl.session.session import Session


class SessionHost:
    """The host of a session with trainer and generators. Call `start` first."""

    def __init__(self, session: "Session", base_model: str, *, shares_files: bool) -> None:
        """Use a session that has published its weights. With `shares_files`, clients on this machine can open the tokenizer."""
        self._session, self.base_model = session, base_model
        self.tokenizer_id = str(session.model.path) if shares_files else None
        self.vocab_size = session.model.shape.vocab_size
        self.max_tokens = session.config.max_sequence_tokens
        self._lora = session.config.trainer.lora
        self._model: Model | None = None
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
        self._base_sampler = await self._publish()

    async def create(self, spec: ModelSpec, state: Path | None, *, with_optimizer: bool) -> Model:
        """Return the session's model, initialized from the base model or a saved state, unless another client trains it."""
        _check_spec(spec, self._lora)
        async with self._lock:
            if self._model is not None:
                rule = "this server trains one model at a time, and a client has one"
                raise FullError(f"{rule}. Close that client, or wait until its session has ended.")
            is_fresh, self._is_fresh = self._is_fresh, False  # first: a load that fails may have changed weights
            if state is not None or not is_fresh:
                await self._load(state or self._base, with_optimizer=with_optimizer)
            self._model = TrainedModel(self._session.training, self._publish, self._free)
            return self._model

    async def base(self) -> Sampler:
        """Return a sampler of the base model."""
        return self._base_sampler

    async def open_sampler(self, spec: ModelSpec, state: Path) -> Sampler:
        """Load and publish saved weights; raise `Refused` if a client trains the model."""
        _check_spec(replace(spec, seed=None), self._lora)
        async with self._lock:
            if self._model is not None:
                raise Refused(
                    "path: the generators have one set of weights at a time, and a client trains others. Sample what it "
                    "saved last, or wait until its session has ended."
                )
            self._is_fresh = False
            await self._load(state, with_optimizer=False)
            return await self._publish()

    async def _publish(self, state: Path | None = None) -> Sampler:
        return FixedSampler(await self._session.training.publish())

    async def _load(self, state: Path, *, with_optimizer: bool) -> None:
        training = self._session.training
        await training.zero_grad()  # of an earlier client
        await (training.load_state_with_optimizer(state) if with_optimizer else training.load_state(state))

    async def _free(self) -> None:
        async with self._lock:
            self._model = None  # first: the next client discards the gradient, too
            await self._session.training.zero_grad()


class TrainedModel:
    """A model that a client trains, through the training client of a session."""

    def __init__(
        self,
        training: TrainingClient,
        publish: Callable[[Path | None], Awaitable[Sampler]],
        free: Callable[[], Awaitable[None]],
    ) -> None:
        """Train a model; the last two arguments are `publish` and `release` of the host."""
        self._training, self._publish, self._free = training, publish, free

    async def run(
        self, data: Sequence[Datum], loss_fn: str, options: Mapping[str, float], *, backward: bool
    ) -> ForwardBackwardOutput:
        """Run a pass; with `backward`, accumulate the gradient."""
        start = self._training.forward_backward if backward else self._training.forward
        try:
            return await start(data, loss_fn, options)
        except (TypeError, ValueError) as error:  # of a check, here or at the start of the pass in the trainer
            raise Refused(str(error)) from None

    async def optim_step(self, params: AdamParams) -> OptimUpdate:
        """Take an optimizer step."""
        return await self._training.optim_step(params)

    async def save(self) -> Path:
        """Write weights and optimizer state into a new folder."""
        return await self._training.save_state(new_id("state-"))

    async def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Load what `save` wrote."""
        await (self._training.load_state_with_optimizer(folder) if with_optimizer else self._training.load_state(folder))

    async def publish(self, state: Path | None = None) -> Sampler:
        """Return a sampler of the current weights; see `Model.publish`."""
        return await self._publish(state)

    async def recover(self) -> None:
        """Accept requests after a failed one."""
        self._training.recover()

    async def release(self) -> None:
        """Free what the model holds."""
        await self._free()


class FixedSampler:
    """Weights that the generators have: a version of the session's model, or the base of its adapters."""

    def __init__(self, client: SamplingClient) -> None:
        self._client = client

    async def sample(self, asked: SampleRequest) -> list[Completion]:
        """Return completions. The same seed gives the same ones."""
        (requests,) = seeded_requests([asked.prompt], asked.sampling, asked.num_samples)
        return await self.generate(requests)

    async def logprobs(self, tokens: Sequence[int], num_top: int) -> tuple[FloatArray, TopTokens | None]:
        """Return the log-probability of each token, and the most likely ones."""
        (completion,) = await self.generate([reading_request(tokens, num_top)])
        logprobs, top = read_logprobs(completion, num_top)
        return logprobs, top if num_top else None

    async def release(self) -> None:
        """Do nothing: the next publication replaces a version, and the base stays."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return completions; raise `Refused` if a later publication has replaced the version."""
        try:
            return await self._client.generate(requests, is_shared=True)
        except VersionGoneError:
            raise Refused(
                "the weights of this sampler have been replaced by a later save, and the generators have one set at a time. "
                "Create a sampling client after the last save."
            ) from None


class AdapterHost:
    """The host of a session whose models are adapters on one base.

    Generators hold a limited number of saved adapters. If they hold no more, the least recently used one is dropped, and loaded
    from disk when it is used again.
    """

    def __init__(self, session: "Session", base_model: str, *, shares_files: bool) -> None:
        """Use a session with `weights.lora: adapters`; the arguments are those of `SessionHost`."""
        assert session.config.trainer.lora is not None, "AdapterHost requires trainer.lora"
        self._session, self.base_model, self._lora = session, base_model, session.config.trainer.lora
        self.tokenizer_id = str(session.model.path) if shares_files else None
        self.vocab_size = session.model.shape.vocab_size
        self.max_tokens = session.config.max_sequence_tokens
        layers = " and ".join(self._lora.targets)
        self.notice = f"Adapters have at most rank {self._lora.rank}, on {layers}, not on the unembedding."
        self._held: dict[AdapterSampler, SamplingClient] = {}  # the least recently used first
        self._num_models = 0
        self._loading = asyncio.Lock()  # one model is reserved for loading saved adapters
        self._holding = asyncio.Lock()  # a publication must not miss the place that another one is freeing

    async def start(self) -> None:
        """Do nothing: every model starts from the base."""

    async def create(self, spec: ModelSpec, state: Path | None, *, with_optimizer: bool) -> Model:
        """Return a new adapter, or a saved one; raise `FullError` or `Refused` if the trainer cannot have it."""
        most = max(1, self._lora.max_models - 1)
        if self._num_models >= most:
            raise FullError(
                f"this server trains at most {most} models at a time. Close a client, wait until the session of another has "
                "ended, or start the server with a higher trainer.lora.max_models."
            )
        self._num_models += 1
        try:
            training = await self._new(spec)
        except BaseException:  # including cancellation: the place is free again
            self._num_models -= 1
            raise
        model = TrainedModel(training, partial(self._publish, spec, training), partial(self._free, training))
        if state is not None:
            try:
                await model.load(state, with_optimizer=with_optimizer)
            except BaseException:  # including cancellation: the caller has no model to free
                await model.release()
                raise
        return model

    async def base(self) -> Sampler:
        """Return a sampler of the base model."""
        return FixedSampler(self._session.base)

    async def open_sampler(self, spec: ModelSpec, state: Path) -> Sampler:
        """Return a sampler of a saved adapter, which generators hold once it is used."""
        return AdapterSampler(self, spec, state)

    async def hold(self, sampler: "AdapterSampler", publish: Callable[[], Awaitable[SamplingClient]]) -> SamplingClient:
        """Publish an adapter for a sampler; if generators hold no more, drop the least recently used one."""
        async with self._holding:
            while True:
                try:
                    client = self._held[sampler] = await publish()
                    return client
                except AdapterLimitError:
                    if not self._held:
                        raise
                    await self.drop(next(iter(self._held)))

    async def client(self, sampler: "AdapterSampler") -> SamplingClient:
        """Return the client of a sampler; load its adapter if generators do not hold it. Raise `Refused` if it was deleted."""
        async with sampler.lock:
            if sampler not in self._held:
                if not sampler.state.exists():
                    raise Refused(
                        "the generators have dropped this sampler, and its checkpoint has been deleted or has expired. Create "
                        "a sampling client of another save."
                    )
                async with self._loading:
                    training = await self._new(replace(sampler.spec, seed=None))
                    try:
                        await training.load_state(sampler.state)
                        return await self.hold(sampler, training.publish)
                    finally:
                        await training.free()
            self._held[sampler] = self._held.pop(sampler)
            return self._held[sampler]

    async def drop(self, sampler: "AdapterSampler") -> None:
        """Let generators drop the adapter of a sampler after its running requests."""
        client = self._held.pop(sampler, None)
        if client is not None:
            await client.release()

    async def _publish(self, spec: ModelSpec, training: TrainingClient, state: Path | None) -> Sampler:
        written = await training.save_state(new_id("state-")) if state is None else state  # lets generators drop the adapter
        sampler = AdapterSampler(self, spec, written, is_owner=state is None)
        try:
            await self.hold(sampler, training.publish)
        except BaseException:  # including cancellation: the caller has no sampler to release
            await sampler.release()
            raise
        return sampler

    async def _free(self, training: TrainingClient) -> None:
        await training.free()
        self._num_models -= 1

    async def _new(self, spec: ModelSpec) -> TrainingClient:
        if not spec.rank:
            raise Refused(
                "lora_config.rank: this server trains adapters (got 0). Create the client with a rank, or start the server "
                "without trainer.lora."
            )
        name, layers = new_id("model-"), {"train_attn": spec.train_attn, "train_mlp": spec.train_mlp}
        try:
            return await self._session.new_model(name, rank=spec.rank, seed=spec.seed, **layers)
        except ValueError as error:
            raise Refused(f"lora_config: {error}") from None


class AdapterSampler(FixedSampler):
    """A saved adapter, which generators hold while it is used."""

    def __init__(self, host: AdapterHost, spec: ModelSpec, state: Path, *, is_owner: bool = False) -> None:
        """Sample a saved adapter from the folder `state`; its owner deletes the folder when it is released."""
        self._host, self.spec, self.state, self._is_owner = host, spec, state, is_owner
        self.lock = asyncio.Lock()

    async def release(self) -> None:
        """Let generators drop the adapter."""
        async with self.lock:
            await self._host.drop(self)
        if self._is_owner:
            await asyncio.to_thread(shutil.rmtree, self.state, ignore_errors=True)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Return completions; load the adapter first if generators have dropped it. A cancelled request does not end that."""
        while True:
            client = await asyncio.shield(self._host.client(self))
            with suppress(ReleasedError):  # dropped for another sampler before it was used
                return await client.generate(requests, is_shared=True)


def _check_spec(spec: ModelSpec, lora: LoraConfig | None) -> None:
    """Raise `Refused` if the trainer cannot train a model."""
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
