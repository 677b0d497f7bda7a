"""The judge: a model behind an OpenAI-compatible endpoint that grades each completion, or decides the criteria of a rubric.

The judge is called from the event loop of the rollout worker. A problem is always an error, never a grade: the completion then
has no reward and is counted in `reward/error_frac`.
"""

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titanrl.base.endpoint import Endpoint, EndpointError, read_secret
from titanrl.config.data import NO_WEIGHT, Criterion, JudgeOptions, Rubric, total_weight
from titanrl.rollout.answers import number

MAX_REPLY_BYTES = 1 << 20
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
            max_reply_bytes=MAX_REPLY_BYTES,
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
