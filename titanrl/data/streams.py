"""Prompt streams: training prompts by index, and held-out prompts that are never trained on.

A stream has no cursor: `stream[i]` depends only on the seed and `i`, so a resumed run continues with the next index. A hash of
its text assigns each question to the training or the held-out split, so no question is in both.
"""

import dataclasses
import hashlib
import json
import math
import time
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from titanrl.base.plugins import Plugin, Plugins
from titanrl.carriers.types import IntArray, Prompt
from titanrl.config.data import CurriculumConfig, DataConfig, Split
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.load import did_you_mean
from titanrl.data.entries import (
    BLANK,
    DUPLICATE,
    FORMATS,
    OTHER_ANSWER,
    TOO_LONG,
    BadRow,
    Message,
    Row,
    Selection,
    entries_of,
    read_custom_prompts,
    read_rows,
    value_of,
)
from titanrl.data.gym import create_dataset, import_task
from titanrl.data.tokenizer import MAX_TOKEN_CHARS, ChatFormat, Tokenizer

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

Entry = Mapping[str, Any]
"""Argument of a reward: a mapping with `question`, `answer` and `metadata`."""
Encode = Callable[[Entry], Sequence[int]]
"""Function that tokenizes the question of an entry, or its conversation with tools and template variables."""

_OF_TEMPLATE = {"messages": "conversations", "tools": "tools", "chat_template_kwargs": "variables of the template"}
"""Keys of an entry that only a chat template can render."""
_EXPECTED_TRIES = 100
"""Average number of candidates from the right split before a search fails."""
_HELDOUT_BLOCK = 1000
"""Number of items in each reasoning-gym dataset that is searched for held-out questions."""
_OTHER_SPLIT = "in the other split"
_FIXES = {
    _OTHER_SPLIT: "the task has too few distinct questions; widen data.task_config",
    TOO_LONG: "raise data.max_prompt_tokens",
    DUPLICATE: "the task has too few distinct questions; widen data.task_config, or lower evaluation.num_prompts",
}


class PromptStream:
    """Training prompts by index, shuffled every epoch, and a fixed list of held-out prompts. Created by `make_stream`."""

    def __init__(self, source: "_GymSource | _ListSource", seed: int, heldout_fraction: float) -> None:
        self._source, self._seed, self._heldout_fraction = source, seed, heldout_fraction

    @property
    def num_prompts(self) -> int:
        """Number of prompts per epoch."""
        return self._source.num_prompts

    @property
    def selection(self) -> Selection:
        """Rows of the source by use. For a reasoning-gym task, the items that were tried so far."""
        return self._source.selection

    def __getitem__(self, index: int) -> Prompt:
        """Return the training prompt at `index`, counted from 0 over all epochs.

        An epoch contains every item once. Items of a reasoning-gym task with few questions may be equal. Raise `ValueError` if
        the task has no usable prompt.
        """
        if index < 0:
            raise IndexError(f"prompt {index}: indices start at 0")
        epoch, place = divmod(index, self.num_prompts)
        order_N = epoch_order(self._seed, epoch, self.num_prompts)
        return replace(self._source.training_prompt(int(order_N[place])), index=index)

    def training_prompts(self) -> Sequence[Prompt]:
        """Return all training prompts of a file or of a custom source, in source order."""
        return [self._source.training_prompt(item) for item in range(self.num_prompts)]

    def split(self, groups: Sequence[Sequence[Prompt]]) -> "list[PromptStream]":
        """Return a stream per group of training prompts. These streams have no held-out prompts."""
        nothing = Selection(key="data", source="", num_training=0)
        return [PromptStream(_ListSource(group, (), group, nothing), self._seed, self._heldout_fraction) for group in groups]

    def heldout(
        self, num: int, *, split: Split = "heldout", key: str = "evaluation", limit_s: float = math.inf
    ) -> list[Prompt]:
        """Return the first `num` prompts for an evaluation, or those that the source has, or that the time limit allows.

        They are distinct, and the same for every seed. `key` is the section of the evaluation set, for error messages. Raise
        `ValueError` if the source has no such prompt.
        """
        started = time.monotonic()
        prompts: list[Prompt] = []
        try:
            for prompt in islice(self._source.evaluation_prompts(split), num):
                prompts.append(replace(prompt, index=len(prompts)))
                if time.monotonic() - started > limit_s:
                    return prompts
        except BrokenRules:  # a task without more distinct questions
            if not prompts:
                raise
        if num and not prompts:
            why = self.selection.reasons()
            found = f" ({why})" if why else ""
            if split == "all":
                rule, fix = f"the source must have a usable prompt, but has none{found}", "correct the source"
                raise _broken({f"{key}.num_prompts": num}, rule, f"{fix}, or raise data.max_prompt_tokens" if why else fix)
            off = f"set {key}.num_prompts to 0" if key == "evaluation" else f"remove {key}"
            raise _broken(
                {f"{key}.num_prompts": num, "data.heldout_fraction": self._heldout_fraction},
                f"the source must have a held-out prompt, but has none{found}",
                f"raise data.heldout_fraction, add rows, or {off}",
            )
        return prompts


def make_stream(
    config: DataConfig,
    tokenizer: Tokenizer,
    seed: int,
    plugins: Plugins = MappingProxyType({}),
    *,
    is_trained_on: bool = True,
) -> PromptStream:
    """Open the prompts of a configuration like `open_stream`, with the tokenization that it selects."""
    return open_stream(config, make_encoder(config, tokenizer), seed, plugins, is_trained_on=is_trained_on)


def open_stream(
    config: DataConfig,
    encode: Encode,
    seed: int,
    plugins: Plugins = MappingProxyType({}),
    *,
    is_trained_on: bool = True,
) -> PromptStream:
    """Open the prompts of the section `data`, whose questions `encode` tokenizes.

    The items of reasoning-gym's word_ladder depend on the environment variable PYTHONHASHSEED. Set it in all processes whose
    streams must agree. Prompts only for evaluation are not `is_trained_on`: no training prompt is required. Raise `ValueError`
    if the task, one of its options, the file or the custom source is invalid.
    """
    selector = _Selector(config, encode)
    source: _GymSource | _ListSource
    if config.source == "reasoning_gym":
        source = _GymSource(config, selector, seed)
    elif config.path is not None:
        rows = read_rows(config.path, "data.path", FORMATS[config.source])
        source = _read(config, selector, entries_of(rows, config), {"data.path": str(config.path)})
    else:
        plugin = plugins.get("data.source") or Plugin(key="data.source", name=config.source)
        source = _read(config, selector, read_custom_prompts(plugin, seed, config), {"data.source": plugin.name})
    if is_trained_on:
        source.training_prompt(0)  # fail here instead of during a step if the prompts do not fit the tokenizer or the limits
    return PromptStream(source, seed, config.heldout_fraction)


def make_gym_dataset(task: str, task_config: dict[str, Any], seed: int, size: int) -> "ProceduralDataset":
    """Create a reasoning-gym dataset, which can also score answers.

    Raise `ValueError` if the task is unknown, its options are invalid, or reasoning-gym is not installed.
    """
    try:
        import_task(task)
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise _broken(
            {"data.task": task}, f"the package {error.name} must be installed", "pip install reasoning-gym"
        ) from error
    if task not in DATASETS:
        fix = did_you_mean(task, DATASETS) or "choose a task of https://github.com/open-thought/reasoning-gym"
        raise _broken({"data.task": task}, "reasoning-gym has no such task", fix)
    for reserved, key in {"seed": "seed", "size": "data.num_prompts"}.items():
        if reserved in task_config:
            values = {f"data.task_config.{reserved}": task_config[reserved]}
            raise _broken(values, "TitanRL sets this option", f"remove it, and set {key}")
    for field in dataclasses.fields(DATASETS[task][1]):
        if isinstance(task_config.get(field.name), bool) and field.type in (int, float, str, "int", "float", "str"):
            value, kind = task_config[field.name], str(getattr(field.type, "__name__", field.type))
            raise _broken({f"data.task_config.{field.name}": value}, f"the task expects {kind}", "write a value of this type")
    try:
        return create_dataset(task, task_config, seed, size)
    except Exception as error:  # tasks reject options with various exceptions
        raise _broken(
            {"data.task_config": task_config, "data.task": task},
            f"the task rejects these options for {size} items: {type(error).__name__}: {error}",
            "correct data.task_config, or change data.num_prompts",
        ) from error


def is_heldout(question: str, fraction: float) -> bool:
    """Return True if a question belongs to the held-out split. The CRC-32 of its text decides, in steps of 1/1000."""
    return zlib.crc32(question.encode()) % 1000 < fraction * 1000


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, num_items: int) -> IntArray:
    """Return the permutation of the items in an epoch, `[num_items]`."""
    return np.random.default_rng((seed, epoch)).permutation(num_items)


def _broken(values: dict[str, Any], rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule(values, rule, fix))


class _Selector:
    """Converts entries to prompts, and selects usable ones."""

    def __init__(self, config: DataConfig, encode: Encode) -> None:
        self.config = config
        self.encode = encode
        self.longest = 0
        """Number of tokens of the longest prompt that was tokenized."""
        self.counts: Counter[str] = Counter()
        """Number of prompts left out, by reason, and of those that are used under the empty reason."""

    def prompt(self, entry: Entry) -> Prompt | None:
        """Return the prompt of an entry, or None if it is too long. Raise `BadRow` if the prompt cannot be tokenized."""
        if len(entry["question"]) > self.config.max_prompt_tokens * MAX_TOKEN_CHARS:
            return None  # tokenizing it could exhaust the memory
        try:
            token_ids = tuple(self.encode(entry))
        except (BadRow, BrokenRules):
            raise
        except ValueError as error:  # raised by the template, or for a character without a token
            raise BadRow(str(error), "correct the prompt, or use a model whose template and tokenizer support it") from error
        self.longest = max(self.longest, len(token_ids))
        if len(token_ids) > self.config.max_prompt_tokens:
            return None
        return Prompt(index=0, task=self.config.task, text=entry["question"], token_ids=token_ids, entry=entry)

    def first_usable(self, candidates: Iterable[Entry], *, heldout: bool | None, seen: Collection[str] = ()) -> Prompt:
        """Return the first usable candidate: short enough, in the right split (None: either), and not a question in `seen`."""
        fraction = self.config.heldout_fraction
        share = 1.0 if heldout is None else fraction if heldout else 1.0 - fraction
        misses: Counter[str] = Counter()
        for entry in islice(candidates, math.ceil(_EXPECTED_TRIES / share)):
            if heldout is not None and is_heldout(entry["question"], fraction) != heldout:
                misses[_OTHER_SPLIT] += 1
            elif entry["question"] in seen:
                misses[DUPLICATE] += 1
            else:
                try:
                    prompt = self.prompt(entry)
                except BadRow as error:
                    raise _broken({"data.task": self.config.task}, error.problem, error.fix) from error
                self.counts["" if prompt else TOO_LONG] += 1
                if prompt is not None:
                    return prompt
                misses[TOO_LONG] += 1
        # Candidates of the other split are the main reason only if there was no other reason.
        reason = max(misses, key=lambda key: (key != _OTHER_SPLIT, misses[key]))
        counts = ", ".join(f"{number} {why}" for why, number in misses.items())
        split = "" if heldout is None else "held-out " if heldout else "training "
        rule = f"the task must have a usable {split}prompt, but none of {misses.total()} candidates is usable ({counts})"
        raise _broken({"data.task": self.config.task}, rule, _FIXES[reason])


class _GymSource:
    """A reasoning-gym task. Items are generated on demand, because some tasks take a sixth of a second per item.

    Training item k is item k of a dataset. If that item is unusable, it is replaced by item k of a second dataset with another
    seed, and so on. All datasets have the same size, because the items of some tasks depend on it.
    """

    def __init__(self, config: DataConfig, selector: _Selector, seed: int) -> None:
        self.num_prompts = config.num_prompts
        self._config, self._selector, self._seed = config, selector, seed
        self._datasets: dict[int, ProceduralDataset] = {}
        self._dataset(0)

    @property
    def selection(self) -> Selection:
        counts = self._selector.counts
        left_out = {_too_long(self._selector.longest): counts[TOO_LONG]} if counts[TOO_LONG] else {}
        return Selection(key="data.task", source=self._config.task, num_training=counts[""], left_out=left_out)

    def training_prompt(self, item: int) -> Prompt:
        return self._selector.first_usable((self._dataset(attempt)[item] for attempt in count()), heldout=False)

    def evaluation_prompts(self, split: Split) -> Iterator[Prompt]:
        blocks = (self._make(f"heldout {block}", _HELDOUT_BLOCK) for block in count())
        candidates = (dataset[index] for dataset in blocks for index in range(_HELDOUT_BLOCK))
        seen: set[str] = set()
        while True:
            prompt = self._selector.first_usable(candidates, heldout=True if split == "heldout" else None, seen=seen)
            seen.add(prompt.text)
            yield prompt

    def _dataset(self, attempt: int) -> "ProceduralDataset":
        if attempt not in self._datasets:
            self._datasets[attempt] = self._make(f"train {self._seed} {attempt}", self.num_prompts)
        return self._datasets[attempt]

    def _make(self, purpose: str, size: int) -> "ProceduralDataset":
        # reasoning-gym generates item k from seed + k, so nearby seeds would share items. pool_matrix passes the sum to numpy
        # as a seed, which must be below 2^32.
        seed = zlib.crc32(purpose.encode()) >> 1
        return make_gym_dataset(self._config.task, self._config.task_config, seed, size)


@dataclasses.dataclass(frozen=True, slots=True)
class _ListSource:
    training: Sequence[Prompt]
    heldout: Sequence[Prompt]
    all: Sequence[Prompt]
    selection: Selection

    @property
    def num_prompts(self) -> int:
        return len(self.training)

    def training_prompt(self, item: int) -> Prompt:
        if not self.training:
            found = self.selection
            counts = "; ".join(filter(None, [f"{found.num_heldout:,} held out", found.reasons()]))
            raise _broken(
                {found.key: found.source},
                f"the source must have a training prompt, but none of its {found.num_rows:,} rows is usable ({counts})",
                "raise data.max_prompt_tokens" if any(TOO_LONG in reason for reason in found.left_out) else "add questions",
            )
        return self.training[item]

    def evaluation_prompts(self, split: Split) -> Iterator[Prompt]:
        return iter(self.heldout if split == "heldout" else self.all)


def _read(
    config: DataConfig, selector: _Selector, listed: Iterable[tuple[Row, Entry | None]], values: dict[str, str]
) -> _ListSource:
    """Read a list of questions. Only the first of several equal ones is used; they are equal if the model receives the same."""
    seen: dict[bytes, Any] = {}  # answer by digest of what the model receives; the text of the reason if it is left out
    left_out: Counter[str] = Counter()
    digest, num_own_system, num_multi_line = hashlib.sha256(), 0, 0
    prompts: list[Prompt] = []
    for row, entry in listed:
        if entry is None:
            left_out[BLANK] += 1
            continue
        received = [entry.get("messages", entry["question"]), entry.get("tools"), entry.get("chat_template_kwargs")]
        asked = hashlib.blake2b(json.dumps(received, sort_keys=True, default=str).encode(), digest_size=16).digest()
        digest.update(asked + repr(entry["answer"]).encode())
        if asked in seen:
            first = seen[asked]
            left_out[TOO_LONG if first is TOO_LONG else DUPLICATE if first == entry["answer"] else OTHER_ANSWER] += 1
            continue
        try:
            prompt = selector.prompt(entry)
        except BadRow as error:
            raise row.broken(error) from error
        seen[asked] = TOO_LONG if prompt is None else entry["answer"]
        if prompt is None:
            left_out[TOO_LONG] += 1
        else:
            prompts.append(prompt)
            num_multi_line += config.compares_texts and "\n" in str(entry["answer"]).strip()
            num_own_system += config.system_prompt is not None and _has_system(entry.get("messages", ()))
    heldout = [prompt for prompt in prompts if is_heldout(prompt.text, config.heldout_fraction)]
    training = [prompt for prompt in prompts if not is_heldout(prompt.text, config.heldout_fraction)]
    notes = {
        "rows have a system message, which replaces data.system_prompt": num_own_system,
        "answers have several lines, all of which a completion must give; data.answer can take a part": num_multi_line,
    }
    ((key, source),) = values.items()
    selection = Selection(
        key=key,
        source=source,
        num_training=len(training),
        num_heldout=len(heldout),
        left_out={_too_long(selector.longest) if reason == TOO_LONG else reason: n for reason, n in left_out.items()},
        notes=tuple(f"{number:,} {text}" for text, number in notes.items() if number),
        digest=digest.hexdigest(),
    )
    return _ListSource(training, heldout, prompts, selection)


def _too_long(longest: int) -> str:
    return f"{TOO_LONG} (the longest has {longest:,} tokens)" if longest else TOO_LONG


def _has_system(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[0]["role"] in ("system", "developer")


def make_encoder(config: DataConfig, tokenizer: Tokenizer) -> Encode:
    """Return the function that tokenizes questions and conversations.

    With a chat template, a question becomes a user message; otherwise it is tokenized unchanged, after the tokens that the
    tokenizer puts before a text. Raise `ValueError` if a system prompt or a variable of the chat template is set, but there is
    no template that uses it.
    """
    if config.environment is not None:
        encode_row = make_encoder(config.model_copy(update={"environment": None}), tokenizer)

        def checked(entry: Entry) -> Sequence[int]:
            for key in ("tools", "chat_template_kwargs"):  # set by the environment instead of the row
                if entry.get(key):
                    raise BadRow(f"{key} are set by data.environment, and not by a row", f"remove {key}, or the environment")
            return encode_row(entry)

        return checked
    if config.chat_template == "auto" and tokenizer.chat_template:
        template = chat_format(config, tokenizer)

        def render(entry: Entry) -> Sequence[int]:
            messages = opened(config, entry.get("messages") or [{"role": "user", "content": entry["question"]}])
            own = entry.get("chat_template_kwargs")
            _, text = template.fitted(messages, entry.get("tools"), own, reply_follows=True)
            return tokenizer.encode_chat(text)

        return render
    why = "data.chat_template is never" if tokenizer.chat_template else "the tokenizer has no chat template"
    for key, value in {"system_prompt": config.system_prompt, "chat_template_kwargs": config.chat_template_kwargs}.items():
        if value:
            fix = "remove it, or put its text into the questions" if key == "system_prompt" else "remove it"
            raise _broken({f"data.{key}": value}, f"requires a chat template, but {why}", fix)

    def encode(entry: Entry) -> Sequence[int]:
        for key, needed in _OF_TEMPLATE.items():
            if key in entry:
                fix = "write prompt instead of messages" if key == "messages" else f"remove {key}"
                raise BadRow(f"{needed} require a chat template, but {why}", f"{fix}, or use a model with a chat template")
        return tokenizer.encode_start(entry["question"], control_tokens=config.control_tokens)

    return encode


def chat_format(config: DataConfig, tokenizer: Tokenizer) -> ChatFormat:
    """Return the chat template of a tokenizer, as the section `data` configures it."""
    return ChatFormat(tokenizer, config.chat_template_kwargs, control_tokens=config.control_tokens)


def opened(config: DataConfig, messages: Sequence[Message]) -> Sequence[Message]:
    """Prepend the message of `data.system_prompt` to a conversation, unless the conversation has a system message."""
    if config.system_prompt is None or _has_system(messages):
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


@dataclasses.dataclass(frozen=True, slots=True)
class LeveledPrompts:
    """Prompts of a task by difficulty level. A task without a curriculum has one level."""

    name: str
    stream: PromptStream
    """Prompts of the task without levels, including the held-out ones."""
    levels: Sequence[PromptStream]
    """Training prompts by level."""
    has_options: bool = False
    """True if the levels are options of a reasoning-gym task, with which it also scores. The entry then has its `level`."""

    def prompt(self, index: int, level: int, place: int) -> Prompt:
        """Return the training prompt at a place in a level. Its index in the run determines its sampling seeds."""
        prompt = replace(self.levels[level][place], index=index, task=self.name)
        return replace(prompt, entry={**prompt.entry, "level": level}) if self.has_options else prompt


def open_prompts(
    name: str, config: DataConfig, encode: Encode, seed: int, plugins: Plugins = MappingProxyType({})
) -> LeveledPrompts:
    """Open the prompts of the task `name` by level. The other arguments are those of `open_stream`.

    Raise `ValueError` if the source is invalid, a level has no prompts, or the task does not have these levels.
    """
    stream, curriculum = open_stream(config, encode, seed, plugins), config.curriculum
    options = level_options(config)
    if curriculum is None:
        levels = [stream]
    elif curriculum.field is not None:
        levels = stream.split(_groups(stream.training_prompts(), curriculum, curriculum.field))
    else:
        levels = [open_stream(config.model_copy(update={"task_config": each}), encode, seed) for each in options]
    return LeveledPrompts(name, stream, levels, has_options=bool(options))


def level_options(config: DataConfig) -> list[dict[str, Any]]:
    """Return the options of a reasoning-gym task at each level of its curriculum; none without levels that have options."""
    curriculum = config.curriculum
    if curriculum is None or curriculum.field is not None:
        return []
    changes = curriculum.task_configs or gym_levels(config.task, config.task_config, curriculum.num_levels)
    return [{**config.task_config, **change} for change in changes]


def gym_levels(task: str, task_config: Mapping[str, Any], num_levels: int) -> list[dict[str, Any]]:
    """Return the options of a reasoning-gym task at the first levels of the curriculum that reasoning-gym defines for it.

    All attributes of the task rise together. Options in `task_config` are not changed. Raise `ValueError` if the task has no
    curriculum, or fewer levels.
    """
    make_gym_dataset(task, dict(task_config), seed=0, size=1)  # raises a specific error for an invalid task
    from reasoning_gym.factory import create_curriculum

    values = {"data.curriculum.levels": num_levels, "data.task": task}
    try:
        curriculum = create_curriculum(task)
    except ValueError as error:
        raise _broken(values, "reasoning-gym has no curriculum for this task", "set task_configs instead") from error
    most = max(len(attribute.levels) for attribute in curriculum.attributes.values())
    if num_levels > most:
        raise _broken(values, f"the curriculum of this task has {most} levels", f"set levels to at most {most}")
    options = []
    for level in range(num_levels):
        curriculum.set_global_level(level)
        chosen = vars(curriculum.generate_configuration())
        options.append({key: value for key, value in chosen.items() if key not in ("seed", "size", *task_config)})
    return options


def _groups(prompts: Sequence[Prompt], curriculum: CurriculumConfig, field: str) -> list[list[Prompt]]:
    """Group prompts by level, according to the value of a metadata field."""
    found = [value_of(prompt.entry["metadata"], field) for prompt in prompts]
    missing = next((prompt for prompt, value in zip(prompts, found, strict=True) if value is None), None)
    if missing is not None:
        rule = f"every prompt must have this metadata field, but {missing.text[:60]!r} does not"
        raise _broken({"data.curriculum.field": field}, rule, "use another field, or add it to all prompts")
    groups: list[list[Prompt]] = [[] for _ in range(curriculum.num_levels)]
    for prompt, level in zip(prompts, _levels_of(found, curriculum, field), strict=True):
        groups[level].append(prompt)
    empty = [level for level, group in enumerate(groups) if not group]
    if empty:
        rule = f"every level must have a training prompt, but level {empty[0]} of {len(groups)} has none"
        raise _broken({"data.curriculum.field": field}, rule, "change the edges, values or number of levels")
    return groups


def _levels_of(found: Sequence[Any], curriculum: CurriculumConfig, field: str) -> list[int]:
    if curriculum.values:
        unknown = next((value for value in found if str(value) not in curriculum.values), None)
        if unknown is not None:
            rule = f"every value of {field} must belong to a level, but {unknown!r} does not"
            raise _broken(
                {"data.curriculum.values": curriculum.values, "data.curriculum.field": field}, rule, "add it to values"
            )
        return [curriculum.values.index(str(value)) for value in found]
    wrong = next((value for value in found if isinstance(value, bool) or not isinstance(value, int | float)), None)
    if wrong is not None:
        rule = f"with levels or edges, the field must be a number, but a prompt has {wrong!r}"
        raise _broken({"data.curriculum.field": field}, rule, "set values instead, to the values in order of difficulty")
    if curriculum.edges:
        return [bisect_right(curriculum.edges, value) for value in found]
    order = sorted(range(len(found)), key=lambda place: found[place])  # equal values keep the order of the prompts
    levels = [0] * len(found)
    for rank, place in enumerate(order):
        levels[place] = rank * curriculum.num_levels // len(found)
    return levels
