"""Prompt streams: training prompts by index, and held-out prompts that are never trained on.

A stream has no position: `stream[i]` depends only on the seed and `i`, so a resumed run continues with the next index. A hash
of its text assigns each question to the training or the held-out split, so the splits cannot share a question.
"""

import difflib
import json
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.sections import DataConfig
from titanrl.data.tokenizer import Tokenizer
from titanrl.types import IntArray, Prompt

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Entry = dict[str, Any]
"""Argument of a scorer: `question`, `answer` and `metadata`."""
Encode = Callable[[str], list[int]]
"""Function from a question to token ids."""

_EXPECTED_TRIES = 100
"""Number of candidates of the right split, on average, before a search fails."""
_HELDOUT_BLOCK = 1000
"""Number of items per reasoning-gym dataset that is searched for held-out questions."""
_MAX_NESTING = 100
"""Maximum nesting of a JSONL line. Entries are pickled, which fails for values a few hundred levels deep."""
_WRONG_PART = "in the other split"
_TOO_LONG = "longer than data.max_prompt_tokens"
_SEEN = "duplicates"
_FIXES = {
    _WRONG_PART: "the task has too few distinct questions: widen data.task_config",
    _TOO_LONG: "raise data.max_prompt_tokens",
    _SEEN: "the task has too few distinct questions: widen data.task_config, or lower evaluation.num_prompts",
}


class PromptStream:
    """Training prompts by index, shuffled every epoch, and a fixed list of held-out prompts. Created by `make_stream`."""

    def __init__(self, source: "_Source", seed: int, heldout_fraction: float) -> None:
        self._source = source
        self._seed = seed
        self._heldout_fraction = heldout_fraction

    @property
    def num_prompts(self) -> int:
        """Number of prompts per epoch."""
        return self._source.num_prompts

    def __getitem__(self, index: int) -> Prompt:
        """Return the training prompt at `index`, counted from 0 over all epochs.

        An epoch contains every item once. Two items of a reasoning-gym task with few questions may be equal.

        Raises:
            ValueError: The task offers no usable prompt.
        """
        if index < 0:
            raise IndexError(f"prompt {index}: indices start at 0")
        epoch, place = divmod(index, self.num_prompts)
        order_N = _epoch_order(self._seed, epoch, self.num_prompts)
        return replace(self._source.training_prompt(int(order_N[place])), index=index)

    def heldout(self, num: int, *, limit_s: float = math.inf) -> list[Prompt]:
        """Return the first `num` held-out prompts, all distinct and the same for every seed.

        Args:
            num: Number of prompts.
            limit_s: Return fewer prompts after this many seconds.

        Raises:
            ValueError: There are fewer than `num`.
        """
        started = time.monotonic()
        prompts: list[Prompt] = []
        for prompt in islice(self._source.heldout_prompts(), num):
            prompts.append(replace(prompt, index=len(prompts)))
            if time.monotonic() - started > limit_s:
                return prompts
        if len(prompts) < num:
            raise _broken(
                {"evaluation.num_prompts": num, "data.heldout_fraction": self._heldout_fraction},
                f"the file has {len(prompts)} held-out prompts",
                "lower evaluation.num_prompts, or raise data.heldout_fraction",
            )
        return prompts


def make_stream(config: DataConfig, tokenizer: Tokenizer, seed: int) -> PromptStream:
    """Open the prompts that `config` names, and tokenize them as `config` says.

    Raises:
        ValueError: The task, one of its options, or the file cannot be used.
    """
    return open_stream(config, make_encoder(config, tokenizer), seed)


def open_stream(config: DataConfig, encode: Encode, seed: int) -> PromptStream:
    """Open the prompts that `config` names.

    The items of reasoning-gym's word_ladder depend on the environment variable PYTHONHASHSEED; set it where streams must agree.

    Raises:
        ValueError: The task, one of its options, or the file cannot be used.
    """
    selector = _Selector(config, encode)
    source = _GymSource(config, selector, seed) if config.source == "reasoning_gym" else _JsonlSource(config, selector)
    source.training_prompt(0)  # fail now, not during a step, if the task does not fit the tokenizer or the limits
    return PromptStream(source, seed, config.heldout_fraction)


def make_gym_dataset(task: str, task_config: dict[str, Any], seed: int, size: int) -> "ProceduralDataset":
    """Create a reasoning-gym dataset, which also scores answers.

    Raises:
        ValueError: The task is unknown, its options are wrong, or reasoning-gym is not installed.
    """
    try:
        import reasoning_gym  # takes a second
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise _broken(
            {"data.task": task}, f"the package {error.name} must be installed", "pip install reasoning-gym"
        ) from error
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        fix = f"did you mean {near[0]}?" if near else "choose a task of https://github.com/open-thought/reasoning-gym"
        raise _broken({"data.task": task}, "reasoning-gym has no such task", fix)
    for reserved, key in {"seed": "seed", "size": "data.num_prompts"}.items():
        if reserved in task_config:
            values = {f"data.task_config.{reserved}": task_config[reserved]}
            raise _broken(values, "the run sets this option", f"remove it, and set {key}")
    try:
        options = dict(task_config)
        if task == "composite":
            options["datasets"] = [DatasetSpec(**spec) for spec in options.get("datasets", [])]
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except Exception as error:  # tasks check their options by many kinds of exceptions
        raise _broken(
            {"data.task_config": task_config, "data.task": task},
            f"the task rejects its options for {size} items: {type(error).__name__}: {error}",
            "correct data.task_config, or change data.num_prompts",
        ) from error


def is_heldout(question: str, fraction: float) -> bool:
    """Return True if a question belongs to the held-out split, decided by the CRC-32 of its text in steps of a thousandth."""
    return zlib.crc32(question.encode()) % 1000 < fraction * 1000


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_prompts: int) -> IntArray:
    return np.random.default_rng((seed, epoch)).permutation(num_prompts)


def _broken(values: dict[str, Any], rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule(values=values, rule=rule, fix=fix))


class _Source(Protocol):
    """Questions in two splits. The stream sets the index of the prompts."""

    num_prompts: int

    def training_prompt(self, item: int) -> Prompt: ...

    def heldout_prompts(self) -> Iterator[Prompt]: ...


class _Selector:
    """Converts entries to prompts and selects the usable ones."""

    def __init__(self, config: DataConfig, encode: Encode) -> None:
        self.config = config
        self.encode = encode

    def prompt(self, entry: Entry) -> Prompt | None:
        """Return the prompt of an entry; None if it is too long."""
        token_ids = tuple(self.encode(entry["question"]))
        if len(token_ids) > self.config.max_prompt_tokens:
            return None
        return Prompt(index=0, task=self.config.task, text=entry["question"], token_ids=token_ids, entry=entry)

    def first_usable(self, candidates: Iterable[Entry], *, heldout: bool, seen: Collection[str] = ()) -> Prompt:
        """Return the first candidate of one split that is short enough and whose question is not in `seen`."""
        share = self.config.heldout_fraction if heldout else 1.0 - self.config.heldout_fraction
        misses: Counter[str] = Counter()
        for entry in islice(candidates, math.ceil(_EXPECTED_TRIES / share)):
            if is_heldout(entry["question"], self.config.heldout_fraction) != heldout:
                misses[_WRONG_PART] += 1
            elif entry["question"] in seen:
                misses[_SEEN] += 1
            elif (prompt := self.prompt(entry)) is None:
                misses[_TOO_LONG] += 1
            else:
                return prompt
        # Candidates of the other split are the reason only if there were no others.
        reason = max(misses, key=lambda key: (key != _WRONG_PART, misses[key]))
        counts = ", ".join(f"{number} {why}" for why, number in misses.items())
        split = "held-out" if heldout else "training"
        rule = f"the task must have a usable {split} prompt, but none of {misses.total()} candidates is ({counts})"
        raise _broken({"data.task": self.config.task}, rule, _FIXES[reason])


class _GymSource:
    """A reasoning-gym task. Items are generated on demand, because some tasks take a sixth of a second per item.

    Training item k is item k of a dataset. If that item is unusable, item k of a second dataset with another seed replaces it,
    and so on. All datasets have the same size, because the items of some tasks depend on it.
    """

    def __init__(self, config: DataConfig, selector: _Selector, seed: int) -> None:
        self.num_prompts = config.num_prompts
        self._config = config
        self._selector = selector
        self._seed = seed
        self._datasets: dict[int, ProceduralDataset] = {}
        self._dataset(0)

    def training_prompt(self, item: int) -> Prompt:
        return self._selector.first_usable((self._dataset(attempt)[item] for attempt in count()), heldout=False)

    def heldout_prompts(self) -> Iterator[Prompt]:
        candidates = self._heldout_candidates()
        seen: set[str] = set()
        while True:
            prompt = self._selector.first_usable(candidates, heldout=True, seen=seen)
            seen.add(prompt.text)
            yield prompt

    def _dataset(self, attempt: int) -> "ProceduralDataset":
        if attempt not in self._datasets:
            self._datasets[attempt] = self._make(f"train {self._seed} {attempt}", self.num_prompts)
        return self._datasets[attempt]

    def _heldout_candidates(self) -> Iterator[Entry]:
        for block in count():
            dataset = self._make(f"heldout {block}", _HELDOUT_BLOCK)
            yield from (dataset[index] for index in range(_HELDOUT_BLOCK))

    def _make(self, purpose: str, size: int) -> "ProceduralDataset":
        # reasoning-gym generates item k from seed + k, so nearby seeds would share items. pool_matrix passes the sum to numpy
        # as a seed, which must be below 2^32.
        seed = zlib.crc32(purpose.encode()) >> 1
        return make_gym_dataset(self._config.task, self._config.task_config, seed, size)


class _JsonlSource:
    """A JSONL file of questions, read as a whole. Of equal questions only the first is kept."""

    def __init__(self, config: DataConfig, selector: _Selector) -> None:
        assert config.path is not None
        entries: dict[str, Entry] = {}
        for entry in _read_jsonl(config.path):
            entries.setdefault(entry["question"], entry)
        prompts = [prompt for entry in entries.values() if (prompt := selector.prompt(entry)) is not None]
        self._heldout = [prompt for prompt in prompts if is_heldout(prompt.text, config.heldout_fraction)]
        self._training = [prompt for prompt in prompts if not is_heldout(prompt.text, config.heldout_fraction)]
        self.num_prompts = len(self._training)
        if not self._training:
            counts = f"{len(self._heldout)} held out, {len(entries) - len(prompts)} {_TOO_LONG}"
            rule = f"the file must have a training prompt, but none of its {len(entries)} questions is one ({counts})"
            raise _broken({"data.path": str(config.path)}, rule, "add questions, or raise data.max_prompt_tokens")

    def training_prompt(self, item: int) -> Prompt:
        return self._training[item]

    def heldout_prompts(self) -> Iterator[Prompt]:
        return iter(self._heldout)


def make_encoder(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    """Return the function that tokenizes a question, as the user message of a chat or unchanged.

    Raises:
        ValueError: A system prompt is set, but no chat template applies.
    """
    if config.chat_template == "never" or not tokenizer.chat_template:
        if config.system_prompt is not None:
            why = "data.chat_template is never" if tokenizer.chat_template else "the tokenizer has no chat template"
            fix = "remove it, or put its text into the questions"
            raise _broken({"data.system_prompt": config.system_prompt}, f"requires a chat template, but {why}", fix)
        return tokenizer.encode
    system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
    return lambda question: tokenizer.render_chat([*system, {"role": "user", "content": question}])


def _read_jsonl(path: Path) -> list[Entry]:
    if not path.is_file():
        raise _broken({"data.path": str(path)}, "no such file", "correct the path; it is relative to the current directory")
    try:
        with path.open("rb") as file:
            return [_read_line(path, number, line) for number, line in enumerate(file, start=1) if line.strip()]
    except OSError as error:
        raise _broken({"data.path": str(path)}, f"must be readable: {error.strerror}", "change its permissions") from None


def _read_line(path: Path, number: int, line: bytes) -> Entry:
    try:
        return _parse_line(line)
    except _BadLine as error:
        raise _broken({"data.path": str(path)}, f"{path}:{number}: {error.problem}", error.fix) from error


class _BadLine(Exception):
    """Raised for a line that is not an entry."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix


def _parse_line(line: bytes) -> Entry:
    """Parse one line as an entry; keys other than `prompt` and `answer` become its metadata."""
    nesting = _BadLine(f"must not be nested deeper than {_MAX_NESTING} levels", "flatten the line")
    try:
        content = json.loads(line)
    except RecursionError:
        raise nesting from None
    except ValueError as error:
        raise _BadLine(f"must be JSON, but is not ({error})", "write one object per line") from error
    if not isinstance(content, dict):
        raise _BadLine(f"must be an object with prompt and answer, got {type(content).__name__}", "write one object per line")
    if _is_nested(content, _MAX_NESTING):
        raise nesting
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(error.object[error.start]):04X}"
        raise _BadLine(f"must be Unicode text, but has the lone surrogate {found}", "remove or replace it") from None
    for key in ("prompt", "answer"):
        if key not in content:
            raise _BadLine(f"{key} is missing", "give every line the keys prompt and answer")
        if not isinstance(content[key], str):
            raise _BadLine(f"{key} must be a string, got {json.dumps(content[key])}", "put it in quotes")
        if not content[key].strip():
            raise _BadLine(f"{key} is empty", "fill it in, or delete the line")
    metadata = {key: value for key, value in content.items() if key not in ("prompt", "answer")}
    return {"question": content["prompt"], "answer": content["answer"], "metadata": metadata}


def _is_nested(value: Any, levels: int) -> bool:
    """Return True if a JSON value is nested deeper than `levels`."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_nested(child, levels - 1) for child in children)
