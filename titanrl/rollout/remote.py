"""Models behind OpenAI-compatible endpoints: the judge, and a teacher. A problem is always an error, never a made-up number.

The judge grades each completion, or decides the criteria of a rubric. It is called from the event loop of the rollout worker.
After an error the completion has no reward and is counted in `reward/error_frac`.

The teacher returns log-probabilities of given tokens. Requests go to `/completions` with token ids as the prompt, and
`prompt_logprobs`, an extension of vLLM that `titanrl serve` has, too.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import cycle, islice
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from titanrl.base.endpoint import Endpoint, EndpointError, read_secret
from titanrl.base.errors import TitanRLError
from titanrl.carriers.types import FloatArray, IntArray, TopTokens
from titanrl.config.data import NO_WEIGHT, Criterion, JudgeOptions, Rubric, total_weight
from titanrl.config.sections import TeacherConfig
from titanrl.data.tokenizer import Tokenizer
from titanrl.rollout.scorers import number
from titanrl.serving.calls import LOWEST_LOGPROB

_MAX_JUDGE_BYTES = 1 << 20
"""Maximum length of a reply's body."""
_MAX_CHARS = 80
_OBJECT = re.compile(r"\{[^{}]*\}")
_RUBRIC: TypeAdapter[dict[str, Criterion]] = TypeAdapter(Rubric)
_SCALE = re.compile(r"[*_`\s}$]*(?:/|\bout\s+of\b)[*_`\s]*(\d[\d.,]*\d|\d)")


class JudgeError(Exception):
    """Raised if the judge returned no valid grade. The completion then has no reward."""


class Judge:
    """An async reward that requests a grade from a model and scales it to the range 0 to 1.

    Example: `await Judge(options, key="data.rewards.judge")("4", {"question": "2 + 2 =", "answer": "4", "metadata": {}})`
    """

    def __init__(self, options: JudgeOptions, *, key: str) -> None:
        """Read the API key from the environment, without a request; `key` is the reward's, for errors."""
        self._options = options
        self._endpoint = Endpoint(
            f"{options.url.rstrip('/')}/chat/completions",
            name="judge",
            secret=read_secret(f"{key}.options", options.key_variable),
            timeout_s=options.timeout_s,
            num_retries=options.num_retries,
            max_reply_bytes=_MAX_JUDGE_BYTES,
        )

    @property
    def limit_s(self) -> float:
        """Upper bound on the duration of a call in seconds, with all attempts and the pauses between them."""
        return self._endpoint.limit_s

    async def __call__(self, completion: str, entry: Mapping[str, Any]) -> float | dict[str, float]:
        """Return the grade of a completion, from 0 to 1, or with criteria the part of each in the reward."""
        options = self._options
        criteria = criteria_of(entry, options)
        prompt = options.prompt.format(
            question=entry["question"],
            answer=entry["answer"],
            metadata=entry["metadata"],
            completion=completion,
            criteria="\n".join(f"- {name}: {criterion.description}" for name, criterion in criteria.items()),
        )
        messages = [] if options.system_prompt is None else [{"role": "system", "content": options.system_prompt}]
        messages.append({"role": "user", "content": prompt})
        body = {**options.request, "model": options.model, "messages": messages}
        try:
            text = await self._endpoint.post(body)
        except EndpointError as error:
            raise JudgeError(str(error)) from None
        try:
            content = json.loads(text)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise JudgeError(f"the judge did not reply with a chat completion (got {text[:_MAX_CHARS]!r})")
        return parts_of(content, criteria) if criteria else grade_of(content, options)

    async def close(self) -> None:
        """Close the connections."""
        await self._endpoint.close()


def grade_of(text: str, options: JudgeOptions) -> float:
    """Extract the grade from the judge's reply, and scale it to the range 0 to 1; raise `JudgeError` if there is none."""
    matches = list(re.finditer(options.score_pattern, text))
    if not matches:
        raise JudgeError(f"the judge replied without a grade (got {text[-_MAX_CHARS:]!r})")
    group = min(matches[-1].re.groups, 1)
    written: str | None = matches[-1][group]  # None if the pattern matched without its group
    exact = None if written is None else number(written)
    if written is not None and exact is None and "." not in written:
        exact = number(written.replace(",", "."))
    if exact is None:
        raise JudgeError(f"score_pattern matched text that is not a number (got {written!a:.60})")
    grade = float(exact)
    scale = _SCALE.match(text, matches[-1].end(group))
    if scale is not None and number(scale[1]) != Fraction(options.max_score):
        raise JudgeError(f"the grade must be out of {options.max_score:g}, but the judge wrote {grade:g} out of {scale[1]}")
    if not options.min_score <= grade <= options.max_score:
        raise JudgeError(f"the grade must be from {options.min_score:g} to {options.max_score:g} (got {grade:g})")
    return (grade - options.min_score) / (options.max_score - options.min_score)


def criteria_of(entry: Mapping[str, Any], options: JudgeOptions) -> Mapping[str, Criterion]:
    """Return the criteria by name, none if the judge gives a grade; raise `JudgeError` if the prompt's are invalid."""
    if options.criteria_field is None:
        return options.criteria or {}
    given = entry["metadata"].get(options.criteria_field)
    try:
        criteria = _RUBRIC.validate_python(given)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        where = ".".join(map(str, (options.criteria_field, *details["loc"])))
        raise JudgeError(f"metadata.{where} of the prompt: {details['msg']} (got {given!a:.80})") from None
    if total_weight(criteria) == 0.0:
        raise JudgeError(f"metadata.{options.criteria_field} of the prompt: {NO_WEIGHT} (got {given!a:.80})")
    return criteria


def parts_of(text: str, criteria: Mapping[str, Criterion]) -> dict[str, float]:
    """Return the part of each criterion in the reward: weight * verdict / sum of the positive weights.

    The verdicts are the values of the last JSON object in the judge's reply: true, false, or a number from 0 to 1. With all
    positive weights, the sum of the parts is the weighted mean of the verdicts. Source: HealthBench (arXiv:2505.08775). Raise
    `JudgeError` if there is no such object, a criterion is missing or unknown, or a verdict is invalid.
    """
    found = _OBJECT.findall(text)
    try:
        pairs = json.loads(found[-1], object_pairs_hook=list) if found else None
    except ValueError:
        pairs = None
    if pairs is None:
        raise JudgeError(f"the judge replied without a JSON object of verdicts (got {text[-_MAX_CHARS:]!r})")
    if sorted(name for name, _ in pairs) != sorted(criteria):
        raise JudgeError(f"the judge must decide each of {', '.join(criteria)} once (got {found[-1]!a:.200})")
    for name, verdict in pairs:
        if not isinstance(verdict, bool | int | float) or not 0 <= verdict <= 1:
            raise JudgeError(f"the verdict on {name} must be true, false or a number from 0 to 1 (got {verdict!a:.60})")
    total, verdicts = total_weight(criteria), dict(pairs)
    return {name: criterion.weight * verdicts[name] / total for name, criterion in criteria.items()}


_MAX_TEACHER_BYTES = 1 << 28
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
            max_reply_bytes=_MAX_TEACHER_BYTES,
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
        found = []
        for by_token in await self._ask(sequences, num):
            token_ids: IntArray = np.zeros((len(by_token), num), np.int64)
            logprobs: FloatArray = np.zeros((len(by_token), num), np.float32)
            for index, known in enumerate(by_token):
                if len(known) < num:
                    rule = f"the teacher must return the {num} most likely tokens, but returned {len(known)}"
                    raise TeacherError(f"{self._key}.url: {rule} (got {self._url}). Lower distill.top_k.")
                best = sorted(known.items(), key=lambda item: -item[1])[:num]  # the token of the prompt may be one more
                token_ids[index], logprobs[index] = zip(*best, strict=True)
            found.append(TopTokens(token_ids=token_ids, logprobs=logprobs))
        return found

    async def check(self, tokenizer: Tokenizer, longest: int, num_top: int) -> None:
        """Check that the endpoint accepts sequences of `longest` tokens, returns the `num_top` most likely tokens, and has the
        vocabulary of a tokenizer.

        It compares the texts of up to `MAX_PROBED` tokens, except those that are part of a character.
        """
        token_ids = sorted(tokenizer.vocabulary.values())
        token_ids = token_ids[:: -(-len(token_ids) // MAX_PROBED)]
        following = cycle(token_ids)
        num = -(-len(token_ids) // max(longest - 1, 1))
        sequences = [[token_ids[0], *islice(following, max(longest - 1, 1))] for _ in range(num)]
        if num_top:
            await self.compute_top([sequences[0][:2]], num_top)
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
            if num_top:
                fix += f" It must return the {num_top} most likely tokens (distill.top_k)."
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


def _checked(entries: Sequence[Any], tokens: Sequence[int]) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of all tokens but the first, each with a finite log-probability; raise `ValueError` at another."""
    for index, (token, known) in enumerate(zip(tokens, entries, strict=True)):
        if index == 0:
            continue
        logprob = known[str(token)]["logprob"]
        if not LOWEST_LOGPROB < logprob <= _MAX_LOGPROB:
            raise ValueError(f"token {token} at place {index} has {logprob}")
        yield known
