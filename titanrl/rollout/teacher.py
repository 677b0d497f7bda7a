"""A teacher behind an OpenAI-compatible endpoint that returns log-probabilities of given tokens.

Requests go to `/completions` with token ids as the prompt, and `prompt_logprobs`, an extension of vLLM that `titanrl serve`
has, too. A problem is always an error: no token gets a made-up log-probability.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np

from titanrl.base.endpoint import Endpoint, EndpointError, read_secret
from titanrl.base.errors import TitanRLError
from titanrl.carriers.types import FloatArray, IntArray, TopTokens
from titanrl.config.sections import TeacherConfig
from titanrl.data.tokenizer import Tokenizer
from titanrl.serving.calls import LOWEST_LOGPROB

MAX_REPLY_BYTES = 1 << 28
"""Maximum length of a reply's body."""
MAX_PROBED = 4096
"""Tokens of a vocabulary that `RemoteTeacher.check` compares; of larger ones, it takes every n-th."""
_MAX_LOGPROB = 1e-3  # rounding can lift the log-probability of a certain token above 0
_UNKNOWN = "\ufffd"


class TeacherError(TitanRLError):
    """The teacher's endpoint did not return what training needs."""


class RemoteTeacher:
    """The teacher at `TeacherConfig.url`."""

    def __init__(self, config: TeacherConfig, *, key: str) -> None:
        """Read the API key, without making a request; `key` is the path of the section, for messages."""
        assert config.url is not None
        self._key, self._model, self._url = key, config.model, config.url
        self._endpoint = Endpoint(
            f"{config.url.rstrip('/')}/completions",
            name="teacher",
            secret=read_secret(key, config.key_variable, config.key_file),
            timeout_s=config.timeout_s,
            num_retries=config.num_retries,
            max_reply_bytes=MAX_REPLY_BYTES,
            max_connections=config.max_num_seqs,
        )
        self._places = asyncio.Semaphore(config.max_num_seqs)

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Compute the log-probability of each token given the preceding tokens, `[S]` for each sequence; the first is NaN."""
        found = await self._ask(sequences, 0)
        return [
            np.array([np.nan, *(entries[token] for token, entries in zip(tokens[1:], by_token, strict=True))], np.float32)
            for tokens, by_token in zip(sequences, found, strict=True)
        ]

    async def compute_top(self, sequences: Sequence[Sequence[int]], num: int) -> list[TopTokens]:
        """Compute the `num` most likely tokens at each token but the first, `[S - 1, num]` for each sequence."""
        return [self._top(by_token, num) for by_token in await self._ask(sequences, num)]

    async def check(self, tokenizer: Tokenizer, longest: int) -> None:
        """Check that the endpoint accepts sequences of `longest` tokens, and has the vocabulary of a tokenizer.

        It compares the texts of up to `MAX_PROBED` tokens, except those that are part of a character.
        """
        token_ids = sorted(tokenizer.vocabulary.values())
        token_ids = token_ids[:: -(-len(token_ids) // MAX_PROBED)]
        following = cycle(token_ids)
        num = -(-len(token_ids) // max(longest - 1, 1))
        sequences = [[token_ids[0], *islice(following, max(longest - 1, 1))] for _ in range(num)]
        texts = dict[int, str]()
        for tokens, entries in zip(sequences, await self._entries(sequences, 0), strict=True):
            texts |= {
                token: str(entry[str(token)].get("decoded_token")) for token, entry in zip(tokens[1:], entries, strict=True)
            }
        own = {token: tokenizer.token_text(token) for token in texts}
        # Engines differ in the spaces around the text of a single token.
        compared = [token for token in texts if _UNKNOWN not in own[token] and _UNKNOWN not in texts[token]]
        different = [token for token in compared if own[token].strip() != texts[token].strip()]
        if different or not compared:
            example = (different or list(texts))[0]
            raise TeacherError(
                f"{self._key}.url: the teacher must have the vocabulary of the policy, whose tokens it scores, but "
                f"{len(different)} of {len(compared)} compared tokens differ, such as {example}: {own[example]!r} here, "
                f"{texts[example]!r} there (got {self._url}). Choose a teacher of the policy's family."
            )

    def take_retries(self) -> int:
        """Return the number of repeated requests since the last call."""
        num, self._endpoint.num_retried = self._endpoint.num_retried, 0
        return num

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()

    async def _ask(self, sequences: Sequence[Sequence[int]], num_top: int) -> list[list[dict[int, float]]]:
        """Return the known log-probabilities by token, for each token but the first of each sequence."""
        return [
            [{int(token): float(entry["logprob"]) for token, entry in known.items()} for known in entries]
            for entries in await self._entries(sequences, num_top)
        ]

    async def _entries(self, sequences: Sequence[Sequence[int]], num_top: int) -> list[list[Mapping[str, Any]]]:
        """Send one request for each sequence; if one fails, cancel the others."""
        tasks = [asyncio.create_task(self._request(tokens, num_top)) for tokens in sequences]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _request(self, tokens: Sequence[int], num_top: int) -> list[Mapping[str, Any]]:
        model = {} if self._model is None else {"model": self._model}
        options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": num_top}
        try:
            async with self._places:
                text = await self._endpoint.post({**model, "prompt": [int(token) for token in tokens], **options})
        except EndpointError as error:
            fix = f"It must serve prompts of {len(tokens)} tokens of the policy's vocabulary, and sample one more token."
            raise TeacherError(f"{self._key}.url: {error} (got {self._url}). {fix}") from None
        try:
            (choice,) = json.loads(text)["choices"]
            entries = list(_checked(choice["prompt_logprobs"], tokens))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            cause = f"{type(error).__name__}: {error}"
            rule = f"the teacher did not return the log-probability of each token of the prompt ({cause})"
            fix = "The endpoint must support prompt_logprobs, as vLLM and titanrl serve do."
            raise TeacherError(f"{self._key}.url: {rule} (got {text[:80]!r} from {self._url}). {fix}") from None
        return entries

    def _top(self, by_token: Sequence[Mapping[int, float]], num: int) -> TopTokens:
        token_ids: IntArray = np.zeros((len(by_token), num), np.int64)
        logprobs: FloatArray = np.zeros((len(by_token), num), np.float32)
        for index, known in enumerate(by_token):
            if len(known) < num:
                rule = f"the teacher must return the {num} most likely tokens, but returned {len(known)}"
                raise TeacherError(f"{self._key}.url: {rule} (got {self._url}). Lower distill.top_k.")
            best = sorted(known.items(), key=lambda item: -item[1])[:num]  # the token of the prompt may be one more
            token_ids[index], logprobs[index] = zip(*best, strict=True)
        return TopTokens(token_ids=token_ids, logprobs=logprobs)


def _checked(entries: Sequence[Any], tokens: Sequence[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of all tokens but the first, each with a finite log-probability; raise `ValueError` at another."""
    for index, (token, known) in enumerate(zip(tokens, entries, strict=True)):
        if index == 0:
            continue
        logprob = known[str(token)]["logprob"]
        if not LOWEST_LOGPROB < logprob <= _MAX_LOGPROB:
            raise ValueError(f"token {token} at place {index} has {logprob}")
        yield known
