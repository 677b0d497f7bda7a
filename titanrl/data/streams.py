"""Prompt streams: training prompts by index, and held-out prompts that are never trained on.

A stream has no position: `stream[i]` depends on the seed and `i` alone, so a run resumes by continuing to count. A question
belongs to the held-out part by a hash of its text, so the two parts cannot share one.
"""

import difflib
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from titanrl.config.sections import DataConfig
from titanrl.data.tokenizer import Tokenizer
from titanrl.types import IntArray, Prompt

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Entry = dict[str, Any]
"""`question`, `answer` and `metadata`: what a task's verifier is given."""

_EXPECTED_TRIES = 100
"""How many usable candidates would have been expected by the time a search is given up."""
_HELDOUT_BLOCK = 1000
"""Items of one reasoning-gym dataset that held-out questions are looked for in, before the next one is opened."""
_WRONG_PART = "in the other part of the split"
_TOO_LONG = "longer than data.max_prompt_tokens"
_SEEN = "seen before"
_FIXES = {
    _WRONG_PART: "the task has too few distinct questions: widen data.task_config",
    _TOO_LONG: "raise data.max_prompt_tokens",
    _SEEN: "the task has too few distinct questions: widen data.task_config, or lower evaluation.num_prompts",
}


class PromptStream:
    """Training prompts by index, in a new order every epoch, and a fixed list of held-out prompts. Made by `make_stream`."""

    def __init__(self, source: "_Source", selector: "_Selector", seed: int) -> None:
        self._source = source
        self._selector = selector
        self._seed = seed

    @property
    def num_prompts(self) -> int:
        """Prompts of one epoch."""
        return self._source.num_prompts

    @property
    def num_skipped(self) -> int:
        """Different questions passed over until now because their prompt was too long."""
        return len(self._selector.skipped)

    def __getitem__(self, index: int) -> Prompt:
        """Training prompt number `index`, counted from 0 over all epochs.

        An epoch shows every item once. Two items of a reasoning-gym task may ask the same question if it has few.
        Raises ValueError if the task offers no usable prompt.
        """
        if index < 0:
            raise IndexError(f"prompt {index}: prompts are counted from 0, without an end")
        epoch, place = divmod(index, self.num_prompts)
        order_N = _epoch_order(self._seed, epoch, self.num_prompts)
        return replace(self._source.training_prompt(int(order_N[place])), index=index)

    def heldout(self, num: int) -> list[Prompt]:
        """The first `num` held-out prompts, all different, the same for every seed; generated anew at every call.

        Raises ValueError if there are fewer.
        """
        return [replace(prompt, index=index) for index, prompt in enumerate(self._source.heldout_prompts(num))]


def make_stream(config: DataConfig, tokenizer: Tokenizer, seed: int) -> PromptStream:
    """Open the prompts that `config` names.

    The items of reasoning-gym's word_ladder depend on the environment variable PYTHONHASHSEED: set it where streams must agree.
    Raises ValueError for a task, an option or a file that cannot be used.
    """
    selector = _Selector(config, make_encoder(config, tokenizer))
    source = _GymSource(config, selector, seed) if config.source == "reasoning_gym" else _JsonlSource(config, selector)
    source.training_prompt(0)  # a task that does not fit the tokenizer or the limits is told now, not in the middle of a step
    return PromptStream(source, selector, seed)


def make_gym_dataset(task: str, task_config: dict[str, Any], seed: int, size: int) -> "ProceduralDataset":
    """Make a reasoning-gym dataset, which also scores answers.

    Raises ValueError if the task is unknown or its options are wrong.
    """
    import reasoning_gym  # takes a second
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=1)
        raise ValueError(f"data.task={task}: reasoning-gym has no such task" + (f"; did you mean {near[0]}?" if near else ""))
    if reserved := {"seed", "size"} & task_config.keys():
        raise ValueError(f"data.task_config.{min(reserved)} is set by the run: remove it; use seed and data.num_prompts")
    try:
        options = dict(task_config)
        if task == "composite":
            options["datasets"] = [DatasetSpec(**spec) for spec in options.get("datasets", [])]
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"data.task={task} refuses data.task_config={task_config} with {size} items: {error}; "
            "change data.task_config or data.num_prompts"
        ) from error


def is_heldout(question: str, fraction: float) -> bool:
    """Whether a question is kept from training: by the CRC-32 of its text, in steps of a thousandth."""
    return zlib.crc32(question.encode()) % 1000 < fraction * 1000


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_prompts: int) -> IntArray:
    return np.random.default_rng((seed, epoch)).permutation(num_prompts)


class _Source(Protocol):
    """Questions, split in two. The index of its prompts is set by the stream."""

    num_prompts: int

    def training_prompt(self, item: int) -> Prompt: ...

    def heldout_prompts(self, num: int) -> list[Prompt]: ...


class _Selector:
    """Turns entries into prompts and says which of them may be used."""

    def __init__(self, config: DataConfig, encode: Callable[[str], list[int]]) -> None:
        self.config = config
        self.encode = encode
        self.skipped: set[str] = set()

    def prompt(self, entry: Entry) -> Prompt | None:
        """The prompt of an entry; None, and counted, if it is too long."""
        question = entry["question"]
        token_ids = tuple(self.encode(question))
        if len(token_ids) > self.config.max_prompt_tokens:
            self.skipped.add(question)
            return None
        return Prompt(index=0, task=self.config.task, text=question, token_ids=token_ids, entry=entry)

    def first_usable(self, candidates: Iterable[Entry], *, heldout: bool, seen: Collection[str] = ()) -> Prompt:
        """The first candidate of the wanted part that is short enough and asks nothing in `seen`."""
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
        # Candidates of the other part are no fault as long as there were others.
        reason = max(misses, key=lambda key: (key != _WRONG_PART, misses[key]))
        counts = ", ".join(f"{number} {why}" for why, number in misses.items())
        raise ValueError(
            f"data.task={self.config.task}: no usable {'held-out' if heldout else 'training'} prompt among "
            f"{misses.total()} candidates ({counts}); {_FIXES[reason]}"
        )


class _GymSource:
    """A reasoning-gym task. Items are made on demand, for some tasks take a sixth of a second each.

    Item k of training is the k-th item of a dataset; where that one cannot be used, the k-th item of a second dataset with a
    seed of its own takes its place, and so on. Some tasks need the size of a dataset to stay the same, and some limit it.
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

    def heldout_prompts(self, num: int) -> list[Prompt]:
        candidates = self._heldout_candidates()
        prompts: dict[str, Prompt] = {}
        while len(prompts) < num:
            prompt = self._selector.first_usable(candidates, heldout=True, seen=prompts)
            prompts[prompt.text] = prompt
        return list(prompts.values())

    def _dataset(self, attempt: int) -> "ProceduralDataset":
        if attempt not in self._datasets:
            self._datasets[attempt] = self._make(f"train {self._seed} {attempt}", self.num_prompts)
        return self._datasets[attempt]

    def _heldout_candidates(self) -> Iterator[Entry]:
        for block in count():
            dataset = self._make(f"heldout {block}", _HELDOUT_BLOCK)
            yield from (dataset[index] for index in range(_HELDOUT_BLOCK))

    def _make(self, purpose: str, size: int) -> "ProceduralDataset":
        # reasoning-gym makes item k from seed + k: seeds near each other would share items, and pool_matrix gives the sum to
        # numpy as a seed, which must stay below 2^32.
        seed = zlib.crc32(purpose.encode()) >> 1
        return make_gym_dataset(self._config.task, self._config.task_config, seed, size)


class _JsonlSource:
    """A file of questions, read and split as a whole; of equal questions the first is kept."""

    def __init__(self, config: DataConfig, selector: _Selector) -> None:
        assert config.path is not None
        self._config = config
        entries: dict[str, Entry] = {}
        for entry in _read_jsonl(config.path):
            entries.setdefault(entry["question"], entry)
        prompts = [prompt for entry in entries.values() if (prompt := selector.prompt(entry)) is not None]
        self._heldout = [prompt for prompt in prompts if is_heldout(prompt.text, config.heldout_fraction)]
        self._training = [prompt for prompt in prompts if not is_heldout(prompt.text, config.heldout_fraction)]
        self.num_prompts = len(self._training)
        if not self._training:
            raise ValueError(
                f"data.path={config.path}: nothing to train on among {len(entries)} questions ({len(self._heldout)} held out, "
                f"{len(selector.skipped)} {_TOO_LONG}); add questions, or raise data.max_prompt_tokens"
            )

    def training_prompt(self, item: int) -> Prompt:
        return self._training[item]

    def heldout_prompts(self, num: int) -> list[Prompt]:
        if num > len(self._heldout):
            raise ValueError(
                f"evaluation.num_prompts={num}: data.path={self._config.path} has {len(self._heldout)} held-out questions; "
                "lower evaluation.num_prompts, or raise data.heldout_fraction"
            )
        return self._heldout[:num]


def make_encoder(config: DataConfig, tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """How a question becomes token ids: as the user's turn of a chat, or as it is."""
    if config.chat_template == "never" or not tokenizer.chat_template:
        if config.system_prompt is not None:
            why = "data.chat_template is never" if tokenizer.chat_template else "the tokenizer has no chat template"
            raise ValueError(f"data.system_prompt is set, but {why}: remove it, or put its text into the questions")
        return tokenizer.encode
    system = [] if config.system_prompt is None else [{"role": "system", "content": config.system_prompt}]
    return lambda question: tokenizer.render_chat([*system, {"role": "user", "content": question}])


def _read_jsonl(path: Path) -> list[Entry]:
    if not path.is_file():
        raise ValueError(f"data.path={path}: no such file")
    with path.open("rb") as file:
        return [_read_line(f"{path}:{number}", line) for number, line in enumerate(file, start=1) if line.strip()]


def _read_line(place: str, line: bytes) -> Entry:
    """One line as an entry; keys beyond `prompt` and `answer` become its metadata."""
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not JSON ({error}); write one object a line") from error
    if not isinstance(content, dict):
        raise ValueError(f"{place}: must be an object with prompt and answer, got {type(content).__name__}")
    for key in ("prompt", "answer"):
        if key not in content:
            raise ValueError(f"{place}: {key} is missing; every line needs prompt and answer")
        if not isinstance(content[key], str):
            raise ValueError(f"{place}: {key} must be a string, got {json.dumps(content[key])}; put it in quotes")
        if not content[key].strip():
            raise ValueError(f"{place}: {key} is empty; write it, or delete the line")
    metadata = {key: value for key, value in content.items() if key not in ("prompt", "answer")}
    return {"question": content["prompt"], "answer": content["answer"], "metadata": metadata}
