"""Convert rows of files and the prompts of custom sources to entries, which prompts and rewards read."""

import datetime
import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from titanrl.base.plugins import Plugin, Point, check_call
from titanrl.config.data import AnswerConfig, DataConfig
from titanrl.config.errors import BrokenRule, BrokenRules, inline
from titanrl.data.files import FORMATS, BadRow, Row, check_unicode, read_rows
from titanrl.data.messages import Message, question_of, read_messages, read_tools

PROMPT_COLUMNS = ("prompt", "question", "messages", "conversations")
"""Columns that may hold the prompt or the conversation, in the order in which they are searched."""
OPTIONS_COLUMN = "chat_template_kwargs"
EXPECTED = "def prompts(seed: int) -> Sequence[Mapping[str, Any]]"
_MARKED = re.compile(r"^\s*#{4}\s*\S.*\Z", re.MULTILINE)
"""Last line of an answer in the notation of GSM8K."""


def read_entries(config: DataConfig) -> Iterator[tuple[Row, dict[str, Any] | None]]:
    """Yield each row of the file `data.path` with its entry; None for a blank line.

    An entry has `question`, `answer` and `metadata`. The entry of a conversation also has `messages`, and `reply` if the row
    ends with the assistant's reply. `tools` and `chat_template_kwargs` are there if the row has them.

    Raises:
        BrokenRules: The file cannot be read, or a row is invalid.
    """
    assert config.path is not None
    return entries_of(read_rows(config.path, "data.path", FORMATS[config.source]), config)


def entries_of(rows: Iterator[Row], config: DataConfig) -> Iterator[tuple[Row, dict[str, Any] | None]]:
    """Yield each row with its entry; None for a blank line.

    Raises:
        BrokenRules: A row is invalid.
    """
    for row in rows:
        try:
            yield row, None if row.is_blank else entry_of(row.content, config)
        except BadRow as error:
            raise row.broken(error) from error


def entry_of(row: Any, config: DataConfig) -> dict[str, Any]:
    """Return the entry of a row. All other columns become its metadata.

    Raises:
        BadRow: The row is invalid.
    """
    if not isinstance(row, Mapping):
        raise BadRow(f"must be a mapping with prompt and answer, got {type(row).__name__}", "return a list of dicts")
    has_fillers, columns = config.source != "jsonl", config.columns
    asked_name, answer_name = _asked_name(row, config), columns.get("answer", "answer")
    tools_name = columns.get("tools", "tools")
    asked, answer = value_of(row, asked_name), value_of(row, answer_name)
    answer = None if is_missing(answer) else answer
    used = {asked_name, answer_name, tools_name, OPTIONS_COLUMN}
    entry: dict[str, Any] = {"metadata": _metadata({key: value for key, value in row.items() if key not in used})}
    if is_missing(asked) or isinstance(asked, str):
        entry["question"] = _prompt_text(None if is_missing(asked) else asked, asked_name, config)
    elif isinstance(asked, Sequence):
        messages, reply = _conversation(read_messages(asked, has_fillers=has_fillers))
        entry |= {"question": question_of(messages), "messages": messages}
        if reply is not None:
            entry["reply"] = reply
            answer = (reply["content"] or None) if answer is None else answer
    else:
        raise BadRow(f"{asked_name} must be a string or a list of messages, got {inline(asked)}", "convert it to text")
    if (tools := read_tools(value_of(row, tools_name), has_fillers=has_fillers)) is not None:
        entry["tools"] = tools
    if options := read_options(row.get(OPTIONS_COLUMN)):
        entry[OPTIONS_COLUMN] = options
    entry["answer"] = _answer(answer, answer_name, entry, config)
    check_unicode({key: value for key, value in entry.items() if key != "metadata"})
    return entry


def read_options(value: Any) -> dict[str, Any]:
    """Return the variables of the chat template that a row sets; those that are null are not set.

    Raises:
        BadRow: The value is not a mapping.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadRow(f"{OPTIONS_COLUMN} must be an object, got {inline(value)}", "write an object, or rename the column")
    return {str(key): option for key, option in value.items() if option is not None}


def value_of(row: Mapping[str, Any], path: str) -> Any:
    """Return a value of a row. A dot in the path selects a nested field, unless a column name contains it."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def is_missing(value: Any) -> bool:
    """Return True for None and for the missing values of tables: NaN and NaT."""
    if value is None:
        return True
    return isinstance(value, float | Decimal | np.generic | datetime.date) and bool(value != value)


def _asked_name(row: Mapping[str, Any], config: DataConfig) -> str:
    """Return the name of the column that contains the prompt or the conversation."""
    columns = config.columns
    if "messages" in columns or "prompt" in columns:
        return columns.get("messages") or columns["prompt"]
    return next((name for name in PROMPT_COLUMNS if not is_missing(row.get(name))), PROMPT_COLUMNS[0])


def _metadata(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a row: its other columns, and the keys of its column `metadata` if this is a mapping."""
    nested = columns.get("metadata")
    if not isinstance(nested, Mapping):
        return columns
    if twice := columns.keys() & nested.keys() - {"metadata"}:
        raise BadRow(f"the row and its metadata both have the key {min(twice)}", "rename one of them")
    return {**{str(key): value for key, value in nested.items()}, **{k: v for k, v in columns.items() if k != "metadata"}}


def _prompt_text(value: str | None, name: str, config: DataConfig) -> str:
    if value is None:
        known = ", ".join(PROMPT_COLUMNS)
        raise BadRow(f"{name} is missing", f"fill it in, or set data.columns to the column of the prompts (default: {known})")
    if not value.strip():
        raise BadRow(f"{name} is empty", "fill it in, or leave the row out")
    return value


def _conversation(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """Return the messages that the policy replies to, and the final assistant message of the row, if any.

    Raises:
        BadRow: There is no message to reply to.
    """
    reply = messages[-1] if messages[-1]["role"] == "assistant" else None
    messages = messages if reply is None else messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadRow("messages must contain a user message before the reply", "add one, or delete the conversation")
    if messages[-1]["role"] == "user" and not messages[-1]["content"].strip():
        raise BadRow("the last user message is empty", "fill it in, or delete the conversation")
    return messages, reply


def _answer(value: Any, name: str, entry: dict[str, Any], config: DataConfig) -> Any:
    """Return the reference answer: text, or any value if no reward compares completions with it; None if it is missing."""
    is_needed = config.compares_with_answer
    if value is None:
        if is_needed:
            fix = "fill it in, set data.columns to the column of the answers, or set data.rewards to rewards that need none"
            raise BadRow(f"{name} is missing", fix)
        return None
    text = scalar_text(value)
    if text is None:
        if is_needed or config.answer is not None:
            what = "must be text or a number"
            raise BadRow(f"{name} {what}, got {inline(value)}", "write the text that the model should answer")
        try:
            json.dumps(value)  # it is recorded with the rollouts
        except (TypeError, ValueError) as error:
            raise BadRow(f"{name} must consist of plain values ({error})", "use text, numbers, lists and objects") from None
        return value
    if config.answer is not None:
        entry["metadata"][name] = text
        text = extracted(text, config.answer, name)
    if is_needed and not text.strip():
        raise BadRow(f"{name} is empty", "fill it in, or leave the row out")
    if config.compares_texts and (found := _MARKED.search(text)) is not None:
        raise BadRow(
            f"{name} ends with {inline(found[0].strip())}, after a solution that no completion equals",
            'set data.answer to {after: "####"}, which takes the text after the mark',
        )
    return text


def extracted(text: str, answer: AnswerConfig, name: str) -> str:
    """Return the part of a reference answer that `data.answer` selects.

    Raises:
        BadRow: The text has no such part.
    """
    _, marker, part = text.rpartition(answer.after)
    if not marker:
        raise BadRow(
            f"{name} must contain {inline(answer.after)} (data.answer.after), but is {inline(text[-200:])}",
            "correct data.answer.after, or the row",
        )
    return part.strip()


def scalar_text(value: Any) -> str | None:
    """Return text, a number or a date as text; None for other values. Booleans have no notation that a model should use."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(value) if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return f"{value:f}" if value.is_finite() else None
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else None


def check_picklable(entry: Mapping[str, Any]) -> None:
    """Refuse an entry of a custom source that cannot be sent to rewards.

    Raises:
        BadRow: It cannot be pickled.
    """
    try:
        pickle.dumps(entry)
    except Exception as error:  # pickling runs custom code
        problem = f"must be picklable, to be sent to rewards: {type(error).__name__}: {error}"
        raise BadRow(problem, "use plain values") from error


@runtime_checkable
class Prompts(Protocol):
    """A sequence of prompts, such as a list of dicts.

    A prompt is a mapping with `prompt` or `question` (a string) or `messages` (a conversation), and usually `answer`, as a row
    of a file. Rewards receive it as `question`, `answer` (None if missing) and `metadata`, a dict of all other keys.

    Example: `[{"prompt": "What is 7 * 8?", "answer": "56", "level": 2}]`
    """

    def __len__(self) -> int:
        """Return the number of prompts."""
        ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """Return a prompt."""
        ...


class PromptSource(Protocol):
    """A function that returns the prompts of a run. It receives `data.options` as keyword arguments.

    Every rollout worker calls it, so the same seed must give the same prompts.

    Example:
        def squares(seed: int, largest: int = 100) -> list[dict[str, str]]:
            return [{"prompt": f"{n} * {n} =", "answer": str(n * n)} for n in range(largest)]
    """

    def __call__(self, seed: int, /) -> Prompts:
        """Return the prompts."""
        ...


def check_prompt_source(source: object, *, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Check that an object is a list of prompts, or has the signature of `PromptSource`.

    Raises:
        ValueError: It is neither.
    """
    if not _is_list(source):
        check_call(source, PromptSource.__call__, key=key, name=name, expected=EXPECTED, options=options)
    elif options:
        raise ValueError(
            f"data.options: a list of prompts does not take options (got {dict(options)}). "
            f"Remove them, or write a function `{EXPECTED}`."
        )


POINT = Point(
    key="data.source",
    argument="prompts",
    protocol=PromptSource.__call__,
    expected=EXPECTED,
    checked=lambda source, plugin, config: check_prompt_source(
        source, key=plugin.key, name=plugin.name, options=config.data.options
    ),
)


def read_custom_prompts(plugin: Plugin, seed: int, config: DataConfig) -> Iterator[tuple[Row, dict[str, Any] | None]]:
    """Yield the prompts of a custom source with their entries, as `read_entries` does for files.

    Args:
        plugin: The list, or the function that returns it.
        seed: Seed of the run.
        config: Section `data`, with the keyword arguments of the function.

    Raises:
        ValueError: The source or one of its prompts is invalid.
    """
    source = plugin.load()
    check_prompt_source(source, key=plugin.key, name=plugin.name, options=config.options)
    prompts = source if _is_list(source) else _called(source, plugin, seed, config.options)
    for row, entry in entries_of(_rows(prompts, plugin), config):
        assert entry is not None
        try:
            check_picklable(entry)
        except BadRow as error:
            raise row.broken(error) from error
        yield row, entry


def _rows(prompts: Prompts, plugin: Plugin) -> Iterator[Row]:
    for index in range(len(prompts)):
        row = Row(content=None, values={plugin.key: plugin.name}, place=f"item {index}")
        try:
            item: object = prompts[index]
            content = dict(item) if isinstance(item, Mapping) else item
        except Exception as error:  # custom code may raise anything
            raise row.broken(BadRow(f"reading it raised {type(error).__name__}: {error}", "give a list of dicts")) from error
        yield Row(content=content, values=row.values, place=row.place)


def _is_list(source: object) -> TypeGuard[Prompts]:
    return isinstance(source, Prompts) and not isinstance(source, str | Mapping | type)


def _called(source: Callable[..., Any], plugin: Plugin, seed: int, options: Mapping[str, Any]) -> Prompts:
    try:
        prompts = source(seed, **options)
    except Exception as error:  # custom code may raise anything
        raise _broken(plugin, f"the function raised {type(error).__name__}: {error}", "correct it, or data.options") from error
    if not _is_list(prompts):
        raise _broken(plugin, f"must return a list of prompts, got {type(prompts).__name__}", f"write it as `{EXPECTED}`")
    return prompts


def _broken(plugin: Plugin, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule({plugin.key: plugin.name}, rule, fix))
