"""`SamplingClient`: completions and log-probabilities from the generators, with the policy version of every token."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from titanrl.base.arguments import check_count, check_list, check_number, check_type, checked_tokens
from titanrl.base.errors import TitanRLError
from titanrl.carriers.supports import ExpertIds, Supports
from titanrl.carriers.types import (
    BASE,
    Completion,
    Datum,
    FinishReason,
    FloatArray,
    GenerationRequest,
    IntArray,
    OnTokens,
    Prompt,
    SamplingParams,
    TopTokens,
    sampled_datum,
)
from titanrl.config.schema import Config
from titanrl.data.tokenizer import Tokenizer
from titanrl.launch.generators import GeneratorMeshes
from titanrl.launch.supervision import Pace, start_request
from titanrl.rollout.group import derive_seed
from titanrl.rollout.pool import GeneratorPool
from titanrl.weights.records import Commit, HeldAdapter, WeightManifest

T = TypeVar("T")

PromptLike = str | Sequence[int] | IntArray | Prompt
"""A prompt: text (tokenized without a chat template, after BOS if the tokenizer adds it), token ids, or a prompt of a task."""


class ReleasedError(TitanRLError):
    """The client was released, so the generators do not hold its adapter any more."""


class AdapterLimitError(TitanRLError):
    """The generators hold as many adapters as `weights.held_adapters` allows."""


class VersionGoneError(TitanRLError):
    """The generators serve a newer version than the client is pinned to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A sampled completion.

    Example: `Sample(prompt=[5, 6], tokens=[7, 1], logprobs=[-0.1, -0.7], versions=[4, 4], text="9", finish_reason="stop")`
    """

    prompt: IntArray = field(repr=False)
    """Prompt tokens, `[P]`."""
    tokens: IntArray = field(repr=False)
    """Sampled tokens, including the end-of-sequence token if it was sampled, `[T]`."""
    logprobs: FloatArray = field(repr=False)
    """Log-probability of each token under the sampling distribution, in nats, `[T]`."""
    versions: IntArray = field(repr=False)
    """Policy version that sampled each token, `[T]`."""
    text: str
    """Text of the completion, without special tokens and without the stop text that ended it."""
    finish_reason: FinishReason
    """`stop`: ended by the policy or a stop text; `length`: truncated at the limit; `abort`: cancelled."""
    supports: Supports | None = field(default=None, repr=False)
    """Support of each token's distribution, if sampling was truncated, `[T]`."""
    experts: ExpertIds | None = field(default=None, repr=False)
    """Experts of the tokens of prompt and completion, with `trainer.routing: compared` or `replayed`, `[P + T, layers, experts
    of a token]`."""

    @property
    def sequence(self) -> IntArray:
        """Prompt and sampled tokens, `[P + T]`."""
        return np.concatenate([self.prompt, self.tokens])

    def datum(self, advantage: float | Sequence[float] | FloatArray = 0.0, weight: float = 1.0) -> Datum:
        """Return the sample as a datum for a policy loss; see `sampled_datum`."""
        return sampled_datum(self.prompt, self.tokens, self.logprobs, advantage, weight, self.supports, self.experts)


PushAdapter = Callable[[int], Awaitable[Sequence[WeightManifest]]]
"""Puts an adapter into the store under a number; returns the manifests of all trainer ranks."""
FIRST_HELD = 2
"""Lowest number of a held adapter; 0 is the base, and 1 the policy."""


@dataclass(slots=True, eq=False)
class _Held:
    """An adapter that generators hold, or are about to hold."""

    forget: Callable[[int], Awaitable[None]]
    num_running: int = 0
    is_released: bool = False
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.unused.set()


class Sampler:
    """Sends the requests of all sampling clients to the generators of one model."""

    def __init__(self, generators: GeneratorMeshes, config: Config, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.version = 0
        """Newest version that clients may be pinned to."""
        self._generators = generators
        self._pool = GeneratorPool(generators.actors, config.generator.max_num_seqs)
        generators.listeners.append(self._use_generator)
        self._num_pinned = 0
        self._no_pinned = asyncio.Event()
        self._no_pinned.set()
        self._held: dict[int, _Held] = {}
        self._last_number = FIRST_HELD - 1

    async def hold(self, push: PushAdapter, forget: Callable[[int], Awaitable[None]], version: int) -> int:
        """Let the generators hold an adapter until it is released; return its number, which requests name.

        Args:
            push: Function that puts the adapter with a number into the store.
            forget: Function that deletes it from the store.
            version: Policy version of its tokens.

        Raises:
            AdapterLimitError: The generators hold `weights.held_adapters` already.
        """
        limit = self.config.weights.held_adapters
        if len(self._held) >= limit:
            raise AdapterLimitError(
                f"publish(keep=True): the generators hold at most {limit} adapters for clients (weights.held_adapters). "
                "Release a client that is not needed, or raise the limit."
            )
        self._last_number += 1
        number = self._last_number
        self._held[number] = _Held(forget)  # first: adapters that are being pushed count
        try:
            commit = Commit(number, tuple(await push(number)))
            held = HeldAdapter(number=number, version=version, commit=commit)
            await self._generators.hold_adapter(held)
        except BaseException:  # including cancellation
            with suppress(Exception, asyncio.CancelledError):  # the store may have no shards, or only some
                await forget(number)
            del self._held[number]
            raise
        return number

    async def release(self, number: int) -> None:
        """Refuse new requests of an adapter, wait for its running ones, and drop it. A second call has no effect."""
        held = self._held.get(number)
        if held is None or held.is_released:
            return
        held.is_released = True
        await asyncio.shield(start_request(self._drop(number, held), f"drop adapter {number}"))  # even if this is cancelled

    async def _drop(self, number: int, held: _Held) -> None:
        await held.unused.wait()
        try:
            await self._generators.drop_adapter(number)
            await held.forget(number)
        finally:  # a failure must not take the place of another adapter forever
            del self._held[number]

    @contextmanager
    def _using(self, number: int | None) -> Iterator[None]:
        """Count the requests of an adapter, which is not dropped before they have finished."""
        if number is None or number == BASE:
            yield
            return
        held = self._held.get(number)
        if held is None or held.is_released:
            raise ReleasedError(f"SamplingClient: this client was released (got adapter {number}). Publish again.")
        held.num_running += 1
        held.unused.clear()
        try:
            yield
        finally:
            held.num_running -= 1
            if not held.num_running:
                held.unused.set()

    async def generate(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        pinned_to: int | None,
        adapter: int | None = None,
        *,
        is_shared: bool = False,
    ) -> list[list[Completion]]:
        """Return the completions of each group. Requests of a pinned client delay the next `publish` of the session.

        With `adapter`, a held adapter or the base samples, whose version never changes, and `pinned_to` has no effect. With
        `is_shared`, others use the generators at the same time, so that the usual time of a request says nothing.

        Raises:
            VersionGoneError: The generators serve a newer version than `pinned_to`.
            ReleasedError: The adapter has been released.
            DeadlineError: No reply arrived within `timeouts.step_s`.
        """
        if adapter is not None:
            named = [[replace(request, adapter=adapter) for request in group] for group in groups]
            with self._using(adapter):
                return await self._generate(named, is_shared=is_shared)
        self._check(pinned_to, self.version)
        self._num_pinned += pinned_to is not None
        if self._num_pinned:
            self._no_pinned.clear()
        try:
            completions = await self._generate(groups, is_shared=is_shared)
        finally:
            self._num_pinned -= pinned_to is not None
            if not self._num_pinned:
                self._no_pinned.set()
        for group in completions:
            for completion in group:
                self._check(pinned_to, int(completion.versions.max()))
        return completions

    async def _generate(self, groups: Sequence[Sequence[GenerationRequest]], *, is_shared: bool) -> list[list[Completion]]:
        replies = asyncio.gather(*(self._pool.generate(requests) for requests in groups))
        num_tokens = sum(len(request.token_ids) + request.sampling.max_new_tokens for group in groups for request in group)
        timeout_s = self._generators.timeouts.step_s
        pace = Pace(kind=f"generator.generate {num_tokens.bit_length()}")  # learned per power of two
        pace = Pace(min_s=timeout_s) if is_shared else pace
        return await self._generators.supervisor.ask("generator.generate", replies, timeout_s, pace)

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens | None) -> Completion:
        """Return the completion of a request; `on_tokens` gets its tokens while they are sampled, except the last ones.

        Cancelling the task cancels the generation.

        Raises:
            DeadlineError: No reply arrived within `timeouts.step_s`.
        """
        timeout_s = self._generators.timeouts.step_s
        pace = Pace(min_s=timeout_s)  # how long a client waits depends on the other clients
        reply = self._pool.generate([request], on_tokens=on_tokens)
        (completion,) = await self._generators.supervisor.ask("generator.stream", reply, timeout_s, pace)
        return completion

    async def _use_generator(self, replica: int, actor: Any | None) -> None:
        self._pool.use(replica, actor)

    async def advance(self, version: int) -> None:
        """Refuse new requests of clients pinned to older versions, and wait for their running requests."""
        self.version = version
        await self._no_pinned.wait()

    def _check(self, pinned_to: int | None, version: int) -> None:
        if pinned_to is not None and version > pinned_to:
            raise VersionGoneError(
                f"SamplingClient: version {pinned_to} is no longer served (got version {version}). "
                "Use the client that the last publish() returned, or `session.sampling`, which follows the newest version."
            )


class SamplingClient:
    """Samples completions, and computes log-probabilities, with one model.

    Example:
        groups = await client.sample(["1 + 2 ="], num_samples=4, max_tokens=8)
        print(groups[0][0].text, groups[0][0].logprobs)
    """

    def __init__(self, sampler: Sampler, version: int | None = None, adapter: int | None = None) -> None:
        self._sampler, self._adapter = sampler, adapter
        self.version = version
        """Policy version that samples every token; None uses the newest version at the time."""

    def __repr__(self) -> str:
        of = "the newest version" if self.version is None else f"version {self.version}"
        return f"<SamplingClient of {of} of {self._sampler.config.name}>"

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self._sampler.tokenizer

    async def sample(
        self,
        prompts: Sequence[PromptLike],
        *,
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: Sequence[str | int] | None = None,
        keep_stop: bool | None = None,
        seed: int | None = None,
    ) -> list[list[Sample]]:
        """Sample completions of each prompt.

        Args:
            prompts: Texts, token ids, or prompts of a task.
            num_samples: Completions per prompt.
            max_tokens: Longest completion; `rollout.max_new_tokens` by default.
            temperature: Divisor of the logits, 0 for greedy decoding; `rollout.temperature` by default, which is also the
                temperature of the trainer's log-probabilities.
            top_p: Probability mass of nucleus sampling; 1 disables it. The returned log-probabilities are those of the
                truncated distribution, and the trainer computes the same for `Sample.datum`.
            top_k: Number of most likely tokens to sample from; 0 disables the limit.
            min_p: Lowest probability to sample, as a fraction of the most likely token's; 0 disables the limit.
            stop: Texts and token ids that end a completion, in addition to the model's end tokens; `rollout.stop` by default.
            keep_stop: True to keep the stop text in `Sample.text`; `rollout.keep_stop` by default.
            seed: Seed of all samples; the same seed gives the same completions. None draws a random seed.

        Returns:
            A list of `num_samples` samples for each prompt, in the order of the prompts.

        Raises:
            TypeError: An argument has another type.
            ValueError: A prompt is empty or too long, or a number is out of range.
            VersionGoneError: The client is pinned to a version that is no longer served.
        """
        check_count("num_samples", num_samples, "Give the number of completions per prompt.")
        if max_tokens is not None:
            check_count("max_tokens", max_tokens, "None uses rollout.max_new_tokens.")
        if temperature is not None:
            check_number("temperature", temperature, "0 decodes greedily; None uses rollout.temperature.", least=0.0)
        check_number("top_p", top_p, "1 disables it.", above=0.0, most=1.0)
        check_count("top_k", top_k, "0 disables it.", least=0)
        check_number("min_p", min_p, "0 disables it.", least=0.0, below=1.0)
        if seed is not None:
            check_count("seed", seed, "None draws a random seed.", least=0)
        rollout = self._sampler.config.rollout
        stop = rollout.stop if stop is None else check_list("stop", stop, "texts and token ids", 'Use ["\\n"].')
        for index, value in enumerate(stop):
            check_type(f"stop[{index}]", value, (str, int), "a text or a token id", 'Use ["\\n"].')
            if value == "" or (isinstance(value, int) and value < 0):
                raise ValueError(f"stop[{index}]: must not be empty or negative (got {value!r}). Remove it.")
        decode = partial(
            self.tokenizer.decode_completion, stop=stop, keep_stop=rollout.keep_stop if keep_stop is None else keep_stop
        )
        sampling = SamplingParams(
            max_new_tokens=max_tokens or rollout.max_new_tokens,
            temperature=rollout.temperature if temperature is None else temperature,
            seed=seed,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            supports=top_p < 1.0 or top_k > 0 or min_p > 0.0,
            experts=self._sampler.config.records_experts,
            stop_ids=tuple(value for value in stop if isinstance(value, int)),
            stop=tuple(value for value in stop if isinstance(value, str)),
        )
        prompt_ids = self._all_token_ids("prompts", prompts)
        groups = seeded_requests(prompt_ids, sampling, num_samples)
        completions = await self._sampler.generate(groups, self.version, self._adapter)
        return [
            [
                Sample(
                    prompt=np.asarray(token_ids, np.int64),
                    tokens=completion.token_ids,
                    logprobs=completion.logprobs,
                    versions=completion.versions,
                    text=decode(completion.token_ids.tolist()),
                    finish_reason=completion.finish_reason,
                    supports=completion.supports,
                    experts=completion.experts,
                )
                for completion in group
            ]
            for token_ids, group in zip(prompt_ids, completions, strict=True)
        ]

    async def generate(self, requests: Sequence[GenerationRequest], *, is_shared: bool = False) -> list[Completion]:
        """Return the completions of requests that share a prompt. This method is the `Generate` function of a rollout.

        With `is_shared`, other clients use the generators at the same time, and a request may take up to `timeouts.step_s`.

        Raises:
            ValueError: A prompt is empty or too long.
            VersionGoneError: The client is pinned to a version that is no longer served.
        """
        (completions,) = await self._sampler.generate([requests], self.version, self._adapter, is_shared=is_shared)
        return completions

    async def compute_logprobs(self, sequences: Sequence[PromptLike]) -> list[FloatArray]:
        """Compute the log-probability of each token given the preceding tokens, at temperature 1.

        Args:
            sequences: Texts or token ids, `[S]` each, no longer than a prompt and a completion together.

        Returns:
            One array per sequence, `[S]`, in nats. The first value is NaN, because no token precedes the first.

        Raises:
            ValueError: A sequence is empty or too long.
            VersionGoneError: The client is pinned to a version that is no longer served.
        """
        return [logprobs for logprobs, _ in await self._read(sequences, 0)]

    async def compute_top(self, sequences: Sequence[PromptLike], num: int) -> list[TopTokens]:
        """Compute the most likely tokens at each token but the first, given the preceding tokens, at temperature 1.

        Args:
            sequences: Texts or token ids, `[S]` each, no longer than a prompt and a completion together.
            num: Number of tokens, K, at most that of the vocabulary.

        Returns:
            `[S - 1, K]` for each sequence.

        Raises:
            ValueError: A sequence is empty or too long.
            VersionGoneError: The client is pinned to a version that is no longer served.
        """
        check_count("num", num, "Give the number of tokens.")
        return [top for _, top in await self._read(sequences, num)]

    async def _read(self, sequences: Sequence[PromptLike], num_top: int) -> list[tuple[FloatArray, TopTokens]]:
        requests = [[reading_request(token_ids, num_top)] for token_ids in self._all_token_ids("sequences", sequences)]
        completions = await self._sampler.generate(requests, self.version, self._adapter)
        return [read_logprobs(completion, num_top) for (completion,) in completions]

    async def release(self) -> None:
        """Free what the generators hold for this client, after its running requests. A second call has no effect.

        Only a client from `publish(keep=True)` holds anything.

        Raises:
            DeadlineError: A generator did not reply.
        """
        if self._adapter is not None:
            await self._sampler.release(self._adapter)

    def _all_token_ids(self, name: str, prompts: Sequence[PromptLike]) -> list[tuple[int, ...]]:
        fix = 'Use ["1 + 2 ="], also for one prompt.'
        found = list[tuple[int, ...]]()
        for index, prompt in enumerate(check_list(name, prompts, "texts, lists of token ids, or prompts of a task", fix)):
            if isinstance(prompt, Prompt):
                found.append(prompt.token_ids)
            elif isinstance(prompt, str):
                found.append(tuple(self.tokenizer.encode_start(prompt)))
            else:
                found.append(tuple(checked_tokens(f"{name}[{index}]", prompt).tolist()))
        return found


def seeded_requests(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, num_samples: int
) -> list[list[GenerationRequest]]:
    """Return the requests for samples of each prompt. Each has a seed of its own, or none if decoding is greedy."""
    base = int(np.random.default_rng().integers(2**62)) if sampling.seed is None else sampling.seed

    def request(p: int, n: int) -> GenerationRequest:
        seed = derive_seed(base, p, n) if sampling.temperature > 0 else None
        return GenerationRequest(token_ids=prompts[p], sampling=replace(sampling, seed=seed))

    return [[request(p, n) for n in range(num_samples)] for p in range(len(prompts))]


def reading_request(token_ids: Sequence[int], num_top: int) -> GenerationRequest:
    """Return the request whose completion has the log-probabilities of a sequence; see `read_logprobs`."""
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, seed=None, prompt_logprobs=num_top)
    return GenerationRequest(token_ids=tuple(token_ids), sampling=sampling)


def read_logprobs(completion: Completion, num_top: int) -> tuple[FloatArray, TopTokens]:
    """Return the log-probability of each token of a sequence, NaN for the first, and the most likely tokens at each other."""
    first, rest = np.full(1, np.nan, np.float32), completion.prompt_logprobs
    empty = TopTokens(token_ids=np.zeros((0, num_top), np.int64), logprobs=np.zeros((0, num_top), np.float32))
    return first if rest is None else np.concatenate([first, rest.astype(np.float32)]), completion.prompt_top or empty
