"""The judge: a model behind an OpenAI-compatible endpoint that grades each completion.

The judge is called from the event loop of the rollout worker. A problem is always an error, never a grade: the completion then
has no reward and is counted in `reward/error_frac`.
"""

import asyncio
import json
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import httpx

from titanrl.config.data import JudgeOptions
from titanrl.rewards.answers import number

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP status codes for which the request is retried."""
MAX_PAUSE_S = 30.0
"""Maximum pause before a retry in seconds, even if the server requests a longer one."""
MAX_REPLY_BYTES = 1 << 20
"""Maximum length of a reply's body."""
_MAX_CHARS = 80
_SCALE = re.compile(r"[*_`\s}$]*(?:/|\bout\s+of\b)[*_`\s]*(\d[\d.,]*\d|\d)")


class JudgeError(Exception):
    """Raised if the judge returned no valid grade. The completion then has no reward."""


class Judge:
    """An async reward that requests a grade from a model and scales it to the range 0 to 1.

    Example: `await Judge(options, key="data.rewards.judge")("4", {"question": "2 + 2 =", "answer": "4", "metadata": {}})`
    """

    def __init__(self, options: JudgeOptions, *, key: str) -> None:
        """Read the API key from the environment, without making a request.

        Args:
            options: Options of the judge.
            key: Configuration key of the reward, for error messages.

        Raises:
            ValueError: The environment variable with the API key is not set.
        """
        headers = {"Accept-Encoding": "identity"}  # a small compressed body can have any length
        if options.key_variable is not None:
            if not (secret := os.environ.get(options.key_variable)):
                raise ValueError(
                    f"{key}.options.key_variable: the environment variable must hold the API key, but it is not set "
                    f"(got {options.key_variable}). Export it where the run starts."
                )
            headers["Authorization"] = f"Bearer {secret}"
        self._options = options
        self._url = f"{options.url.rstrip('/')}/chat/completions"
        # Each call sets a limit for the complete request. The timeouts of httpx apply to single reads.
        self._client = httpx.AsyncClient(headers=headers, timeout=None)

    @property
    def limit_s(self) -> float:
        """Upper bound on the duration of a call in seconds, with all attempts and the pauses between them."""
        options = self._options
        return (1 + options.num_retries) * options.timeout_s + options.num_retries * MAX_PAUSE_S + 1.0

    async def __call__(self, completion: str, entry: Mapping[str, Any]) -> float:
        """Return the grade of a completion, from 0 to 1.

        Raises:
            JudgeError: The judge did not reply, or its reply contains no valid grade.
        """
        options = self._options
        prompt = options.prompt.format(
            question=entry["question"], answer=entry["answer"], metadata=entry["metadata"], completion=completion
        )
        messages = [] if options.system_prompt is None else [{"role": "system", "content": options.system_prompt}]
        messages.append({"role": "user", "content": prompt})
        body = {**options.request, "model": options.model, "messages": messages}
        attempt = 0
        while True:
            try:
                return grade_of(await self._attempt(body), options)
            except _TemporaryError as failure:
                if attempt == options.num_retries:
                    raise JudgeError(f"{failure} (attempts: {attempt + 1})") from None
                # Without a pause, retries would add to the load of an overloaded server.
                asked = failure.retry_after_s
                await asyncio.sleep(min(2.0**attempt / 2 if asked is None else asked, MAX_PAUSE_S))
            attempt += 1

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempt(self, body: Mapping[str, Any]) -> str:
        """Make one request and return the text of the reply.

        Raises:
            _TemporaryError: The request failed, and a retry can succeed.
            JudgeError: The request failed, and a retry would fail as well.
        """
        try:
            async with asyncio.timeout(self._options.timeout_s), self._client.stream("POST", self._url, json=body) as reply:
                status, received = reply.status_code, bytearray()
                async for chunk in reply.aiter_bytes():
                    received += chunk
                    if len(received) > MAX_REPLY_BYTES:
                        rule = f"the judge's reply must not have more than {MAX_REPLY_BYTES} bytes"
                        raise JudgeError(f"{rule} (status {status})")
                text = received.decode(errors="replace")
        except TimeoutError:
            raise _TemporaryError(f"the judge did not reply within timeout_s={self._options.timeout_s:g}") from None
        except httpx.HTTPError as error:
            raise _TemporaryError(f"the judge cannot be reached: {type(error).__name__}: {error}") from None
        if status != httpx.codes.OK:
            refusal = f"the judge replied with HTTP status {status} ({text[:_MAX_CHARS]!a})"
            if status not in RETRIED:
                raise JudgeError(refusal)
            pause = reply.headers.get("Retry-After", "")  # seconds, or a date
            raise _TemporaryError(refusal, float(pause) if re.fullmatch(r"\d{1,6}", pause) else None)
        try:
            content = json.loads(text)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise JudgeError(f"the judge did not reply with a chat completion (got {text[:_MAX_CHARS]!a})")
        return content


class _TemporaryError(Exception):
    """Raised for a failed request that can succeed if it is retried."""

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        """Pause in seconds that the server requests; None if it requests none."""


def grade_of(text: str, options: JudgeOptions) -> float:
    """Extract the grade from the judge's reply, and scale it to the range 0 to 1.

    Raises:
        JudgeError: The reply contains no grade, the grade is out of bounds, or it is out of another maximum, as `3/5`.
    """
    matches = list(re.finditer(options.score_pattern, text))
    if not matches:
        raise JudgeError(f"the judge replied without a grade (got {text[-_MAX_CHARS:]!a})")
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
