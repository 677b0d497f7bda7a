"""Read rows of files, convert them and the prompts of custom sources to entries, and record which rows a run uses.

Entries are what prompts and rewards read. Their messages are validated, and have the form that chat templates expect: every
message has a role and text, and the arguments of tool calls are objects. All other keys are kept, so that they reach the
template.
"""

import datetime
import glob
import hashlib
import json
import math
import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np

from titanrl.base.files import digests_of, replace_text
from titanrl.base.plugins import Plugin, Point, check_call
from titanrl.config.data import ACCEPTS_CHANGED_DATA, DataConfig, data_file
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError, inline

Format = Literal["jsonl", "parquet", "arrow"]
"""Format of data files. `arrow` is a data set saved by `save_to_disk` of Hugging Face datasets, or one Arrow file."""

FORMATS: Mapping[str, Format] = {"jsonl": "jsonl", "parquet": "parquet", "arrow": "arrow"}
"""Formats by name."""
_MAX_NESTING = 100
"""Maximum nesting of a line. Entries are pickled, which fails for values nested a few hundred levels deep."""
_BATCH_ROWS = 1024
_SPLITS, _STATE = "dataset_dict.json", "state.json"  # written by `save_to_disk`: of several splits, and of one
_MAGIC: Mapping[bytes | tuple[bytes, ...], tuple[str, str]] = {
    b"\x1f\x8b": ("is compressed with gzip", "decompress it, for example with gunzip"),
    b"\x28\xb5\x2f\xfd": ("is compressed with zstd", "decompress it, for example with unzstd"),
    b"BZh": ("is compressed with bzip2", "decompress it, for example with bunzip2"),
    b"\xfd7zXZ": ("is compressed with xz", "decompress it, for example with unxz"),
    b"PK\x03\x04": ("is a ZIP archive", "extract it"),
    b"version https://git-lfs": ("is a pointer of Git LFS", "download the file itself, for example with git lfs pull"),
    b"PAR1": ("is a Parquet file", "name it .parquet, and set data.source to parquet for prompts"),
    (b"ARROW1", b"\xff\xff\xff\xff"): ("is an Arrow file", "name it .arrow, and set data.source to arrow for prompts"),
    (b"\xff\xfe", b"\xfe\xff"): ("is encoded as UTF-16", "save it as UTF-8"),
}
"""First bytes of files that are often mistaken for JSONL, with the problem and the fix."""
_SPLIT = re.compile(r"(?:^|[-._ ])(train|val|dev|test|eval)(?:ing|id|idation|uation)?(?=[-._ \d])")
"""Names of splits in names of files, as Hugging Face datasets finds them."""


class BadRow(ValueError):
    """Raised for a row that cannot be used."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix[:1].upper()}{self.fix[1:]}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a data source."""

    content: Any
    """Values by column. A custom source may return anything else."""
    values: Mapping[str, object]
    """Configuration key of the source with its value, for error messages."""
    place: str
    """Place of the row in the source, for error messages."""
    is_blank: bool = False
    """True for a line of a file that has only white space, and no content."""

    def broken(self, error: BadRow) -> BrokenRules:
        """Return the error of this row as a broken rule."""
        return BrokenRules(BrokenRule(self.values, f"{self.place}: {error.problem}", error.fix))


def format_of(path: Path) -> Format:
    """Return the format of a file, a directory or a pattern, by its name or contents. The default is JSONL."""
    if path.is_dir():
        saved = any((path / name).is_file() for name in (_SPLITS, _STATE))
        return "arrow" if saved else "parquet" if next(path.glob("*.parquet"), None) is not None else "jsonl"
    return FORMATS.get(path.suffix.removeprefix("."), "jsonl")


def read_rows(path: Path, key: str, kind: Format) -> Iterator[Row]:
    """Yield the rows of a file, of all files of a directory, or of all files that match a pattern.

    `path` may also be the name of a shipped file; `key` is its configuration key, for error messages. Raise `BrokenRules` if a
    file cannot be read, or a line is invalid.
    """
    for file in data_files(path, key, kind):
        try:
            yield from _read_jsonl(file, key) if kind == "jsonl" else _read_table(file, key, kind)
        except OSError as error:  # Arrow also raises it for a corrupt file
            rule = f"must be readable ({error.strerror or inline(str(error))})"
            raise _broken(file, key, rule, "correct the file or its permissions") from error


def data_files(path: Path, key: str, kind: Format) -> list[Path]:
    """Return the files that a path refers to, in reading order. Raise `BrokenRules` if there is no such file."""
    path = data_file(path)
    if os.path.isfile(path):  # unlike Path.is_file, does not raise for a name that is too long
        return [path]
    if os.path.isdir(path):
        return _files_in(path, key, kind)
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(name)]
    if not files:
        rule = "file not found" if glob.escape(str(path)) == str(path) else "no file matches the pattern"
        others = f"a directory of .{kind} files or a pattern such as data/train-*.{kind} also works"
        fix = f"correct the path, which is relative to the current directory; {others}"
        raise _broken(path, key, rule, fix)
    return files


def _files_in(folder: Path, key: str, kind: Format) -> list[Path]:
    if (folder / _SPLITS).is_file():
        splits = _read_json(folder / _SPLITS, key).get("splits", [])
        rule = f"is a saved data set with the splits {', '.join(map(str, splits))}"
        raise _broken(folder, key, rule, f"name one of them, such as {folder}/{splits[0] if splits else 'train'}")
    found = format_of(folder)
    if found == "arrow" and kind == "arrow":
        try:
            return [folder / entry["filename"] for entry in _read_json(folder / _STATE, key)["_data_files"]]
        except (LookupError, TypeError):
            raise _broken(folder, key, f"{_STATE} lists no data files", "save the data set again") from None
    files = sorted(file for file in folder.glob(f"*.{kind}") if file.is_file())
    if not files:
        holds = f", but it holds {found} data" if found != kind else ""
        rule = f"a directory must contain .{kind} files{holds}"
        raise _broken(folder, key, rule, f"set data.source to one of {', '.join(FORMATS)}, or give another path")
    splits = dict.fromkeys(named[1] for file in files[::-1] if (named := _SPLIT.search(file.name)))
    if len(splits) > 1:
        fix = f"name those of one, such as {folder}/*{next(iter(splits))}*.{kind}, or {folder}/*.{kind} to read all"
        raise _broken(folder, key, f"holds files of several splits ({', '.join(splits)})", fix)
    return files


def data_digest(path: Path, key: str, kind: Format) -> str:
    """Return a digest of the contents of the files that a path refers to. Raise `BrokenRules` if one cannot be read."""
    files = data_files(path, key, kind)
    try:
        digests = digests_of(Path("/"), [file.absolute() for file in files])
    except OSError as error:
        raise _broken(path, key, f"must be readable ({error.strerror})", "correct the permissions") from None
    return hashlib.sha256("\n".join(digests[file.absolute().as_posix().lstrip("/")] for file in files).encode()).hexdigest()


def check_unicode(content: Any) -> None:
    """Raise `BadRow` for a string with a lone surrogate, which no encoding and no tokenizer accepts."""
    try:
        json.dumps(content, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(error.object[error.start]):04X}"
        raise BadRow(f"must be valid Unicode, but contains the lone surrogate {found}", "remove or replace it") from None


def _read_jsonl(path: Path, key: str) -> Iterator[Row]:
    with path.open("rb") as file:
        start = file.read(24)
        for magic, (problem, fix) in _MAGIC.items():
            if start.startswith(magic):
                raise _broken(path, key, f"must be a JSONL file, but {problem}", fix)
        file.seek(0)
        for number, line in enumerate(file, start=1):
            blank = Row(content={}, values={key: str(path)}, place=f"{path}:{number}", is_blank=True)
            try:
                yield replace(blank, content=_parse(line), is_blank=False) if line.strip() else blank
            except BadRow as error:
                raise blank.broken(error) from error


def _parse(line: bytes) -> dict[str, Any]:
    nesting = BadRow(f"must not be nested deeper than {_MAX_NESTING} levels", "flatten the object")
    fix, for_lists = "write one JSON object per line", ", for example with: jq -c '.[]' FILE"
    try:
        content = json.loads(line, object_pairs_hook=_object)
    except RecursionError:
        raise nesting from None
    except BadRow:
        raise
    except UnicodeDecodeError as error:
        raise BadRow(f"must be UTF-8 text ({error})", "save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        fix += for_lists if line.lstrip().startswith(b"[") else ""
        if b"\r" in line.rstrip():
            fix = "end lines with a line feed, not with a carriage return alone"
        raise BadRow(f"must be valid JSON ({error})", fix) from error
    except ValueError as error:  # Python converts no longer ones
        raise BadRow(
            f"must not have an integer of more than {sys.get_int_max_str_digits():,} digits", "write it as text"
        ) from error
    if not isinstance(content, dict):
        fix += for_lists if isinstance(content, list) else ""
        raise BadRow(f"must be a JSON object, got {type(content).__name__}", fix)
    if _is_nested(content, _MAX_NESTING):
        raise nesting
    check_unicode(content)
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRow(f"the key {inline(twice)} occurs more than once in an object", "rename or remove one of them")
    return content


def _is_nested(value: Any, levels: int) -> bool:
    """Return True if a JSON value is nested deeper than `levels`."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_nested(child, levels - 1) for child in children)


def _read_table(file: Path, key: str, kind: Format) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise _broken(file, key, f"the package {error.name} must be installed to read it", "pip install pyarrow") from error
    try:
        for number, content in enumerate(_table_rows(file, kind)):
            yield Row(content=content, values={key: str(file)}, place=f"row {number}")
    except pyarrow.ArrowException as error:
        what = "a Parquet file" if kind == "parquet" else "an Arrow file"
        source = f"correct {key}" + (" or data.source" if key == "data.path" else "")
        raise _broken(file, key, f"must be {what} ({inline(str(error))})", source) from error
    except (ValueError, OverflowError, LookupError) as error:  # of values that Python cannot represent
        rule = f"must have values that Python can read ({inline(f'{type(error).__name__}: {error}')})"
        raise _broken(file, key, rule, "correct or remove the column") from error


def _table_rows(file: Path, kind: Format) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH_ROWS):
                yield from _batch_rows(batch)
        return
    with pyarrow.memory_map(str(file)) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        batches: Any = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
        if is_file:
            batches = map(batches.get_batch, range(batches.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from _batch_rows(batch.slice(start, _BATCH_ROWS))


def _batch_rows(batch: Any) -> Iterator[dict[str, Any]]:
    import pyarrow

    names = batch.schema.names
    if len({*names}) < len(names):
        raise ValueError(f"several columns have the same name: {', '.join(names)}")
    for index, column in enumerate(batch.columns):
        as_text = _with_floats(column.type, pyarrow.string())
        if as_text != column.type:  # the text has the fewest digits; as a wider float, 0.1 would be 0.10000000149011612
            wide = column.cast(as_text).cast(_with_floats(column.type, pyarrow.float64()))
            batch = batch.set_column(index, names[index], wide)
    yield from batch.to_pylist()


def _with_floats(kind: Any, other: Any) -> Any:
    """Return an Arrow type with `other` in place of floats of 32 bits, also in lists and structs."""
    from pyarrow import large_list, list_, struct, types

    if types.is_struct(kind):
        return struct([field.with_type(_with_floats(field.type, other)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        item = kind.value_field.with_type(_with_floats(kind.value_type, other))
        return list_(item) if types.is_list(kind) else large_list(item)
    return other if types.is_float32(kind) else kind


def _read_json(file: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(file, key, f"must be a readable JSON file ({error})", "save the data set again") from None
    return content if isinstance(content, dict) else {}


def _broken(source: Path | str, key: str, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule({key: str(source)}, rule, fix))


Message = Mapping[str, Any]
PROMPT_COLUMNS = ("prompt", "question", "messages", "conversations")
"""Columns that may hold the prompt or the conversation, in the order in which they are searched."""
OPTIONS_COLUMN = "chat_template_kwargs"
EXPECTED = "def prompts(seed: int) -> Sequence[Mapping[str, Any]]"
_MARKED = re.compile(r"^\s*#{4}\s*\S.*\Z", re.MULTILINE)
"""Last line of an answer in the notation of GSM8K."""
_LISTED = re.compile(r"\s*\[\s*\{\s*[\"'](?:role|content|from|value)[\"']\s*:.*\}\s*\]\s*", re.DOTALL)
"""List of messages as text, in JSON or in the notation of Python."""


def entries_of(rows: Iterator[Row], config: DataConfig) -> Iterator[tuple[Row, dict[str, Any] | None]]:
    """Yield each row with its entry; None for a blank line. Raise `BrokenRules` if a row is invalid.

    An entry has `question`, `answer` and `metadata`. The entry of a conversation also has `messages`, and `reply` if the row
    ends with the assistant's reply. `tools` and `chat_template_kwargs` are there if the row has them.
    """
    for row in rows:
        try:
            yield row, None if row.is_blank else entry_of(row.content, config)
        except BadRow as error:
            raise row.broken(error) from error


def entry_of(row: Any, config: DataConfig) -> dict[str, Any]:
    """Return the entry of a row. All other columns become its metadata. Raise `BadRow` if the row is invalid."""
    if not isinstance(row, Mapping):
        raise BadRow(f"must be a mapping with prompt and answer, got {type(row).__name__}", "return a list of dicts")
    has_fillers, columns = config.source != "jsonl", config.columns
    if "messages" in columns or "prompt" in columns:
        asked_name = columns.get("messages") or columns["prompt"]
    else:
        asked_name = next((name for name in PROMPT_COLUMNS if not is_missing(row.get(name))), PROMPT_COLUMNS[0])
    is_conversation = "messages" in columns or ("prompt" not in columns and asked_name in ("messages", "conversations"))
    answer_name = columns.get("answer", "answer")
    tools_name = columns.get("tools", "tools")
    asked, answer = value_of(row, asked_name), value_of(row, answer_name)
    asked, answer = asked if is_conversation else parsed_messages(asked, asked_name), None if is_missing(answer) else answer
    used = {asked_name, answer_name, tools_name, OPTIONS_COLUMN}
    entry: dict[str, Any] = {"metadata": _metadata({key: value for key, value in row.items() if key not in used})}
    if is_missing(asked) or (isinstance(asked, str) and not is_conversation):
        if is_missing(asked):
            fix = f"fill it in, or set data.columns to the column of the prompts (default: {', '.join(PROMPT_COLUMNS)})"
            raise BadRow(f"{asked_name} is missing", fix)
        if not asked.strip():
            raise BadRow(f"{asked_name} is empty", "fill it in, or leave the row out")
        entry["question"] = asked
    elif isinstance(asked, Sequence) and not isinstance(asked, bytes):
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
    check_media(row, entry["question"])
    check_unicode({key: value for key, value in entry.items() if key != "metadata"})
    return entry


def check_media(row: Mapping[str, Any], text: str) -> None:
    """Raise `BadRow` if a text has the placeholder of an image, video or sound of its row, which the model does not get."""
    for name in ("image", "video", "audio"):
        if f"<{name}>" in text and not all(is_missing(row.get(column)) for column in (name, f"{name}s")):
            raise BadRow(f"the text has the placeholder <{name}>, but only text reaches the model", "leave out the row")


def hinted_entry(entry: Mapping[str, Any], hint: str) -> dict[str, Any]:
    """Return an entry whose question, or last message, is `hint` with names in braces replaced by columns of the entry.

    The columns are `question` (of a conversation its last message), `answer` and those of the metadata. Raise `BadRow` if the
    entry has no column of a name, or it is empty.
    """
    messages = entry.get("messages")
    question = messages[-1]["content"] if messages else entry["question"]
    columns = {**entry.get("metadata", {}), "question": question, "answer": entry.get("answer")}
    try:
        text = hint.format_map({name: value for name, value in columns.items() if not is_missing(value)})
    except KeyError as error:
        names = ", ".join(map(str, columns))
        rule = f"has no value for {error} of distill.hint; there are {names}"
        if error.args[0] in columns:
            rule = f"must not be empty in column {error}, which distill.hint uses"
        raise BadRow(rule, "correct distill.hint, or fill in the column") from error
    except (IndexError, AttributeError, ValueError) as error:
        raise BadRow(f"does not fit distill.hint ({error})", "correct distill.hint") from error
    if messages:
        return {**entry, "messages": [*messages[:-1], {**messages[-1], "content": text}], "question": text}
    return {**entry, "question": text}


def read_options(value: Any) -> dict[str, Any]:
    """Return the variables of the chat template that a row sets; those that are null are not set."""
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


def _metadata(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a row: its other columns, and the keys of its column `metadata` if this is a mapping."""
    nested = columns.get("metadata")
    if not isinstance(nested, Mapping):
        return columns
    if twice := columns.keys() & nested.keys() - {"metadata"}:
        raise BadRow(f"the row and its metadata both have the key {min(twice)}", "rename one of them")
    return {**{str(key): value for key, value in nested.items()}, **{k: v for k, v in columns.items() if k != "metadata"}}


def _conversation(messages: list[Message]) -> tuple[list[Message], Message | None]:
    """Return the messages that the policy replies to, and the final assistant message of the row, if any."""
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
            fix = "write the text that the model should answer"
            raise BadRow(f"{name} must be text or a number, got {inline(value)}", fix)
        try:
            json.dumps(value)  # it is recorded with the rollouts
        except (TypeError, ValueError) as error:
            raise BadRow(f"{name} must consist of plain values ({error})", "use text, numbers, lists and objects") from None
        return value
    if config.answer is not None:
        entry["metadata"][name] = text
        _, mark, part = text.rpartition(config.answer.after)
        if not mark:
            rule = f"must contain {inline(config.answer.after)} (data.answer.after), but is {inline(text[-200:])}"
            raise BadRow(f"{name} {rule}", "correct data.answer.after, or the row")
        text = part.strip()
    if is_needed and not text.strip():
        raise BadRow(f"{name} is empty", "fill it in, or leave the row out")
    if config.compares_texts and (found := _MARKED.search(text)) is not None:
        raise BadRow(
            f"{name} ends with {inline(found[0].strip())}, after a solution that no completion equals",
            'set data.answer to {after: "####"}, which takes the text after the mark',
        )
    before, box, _ = text.partition("\\boxed")  # in the notation of MATH
    if is_needed and box and re.search(r"\w", before) and "exact" in [part.function for part in config.reward_parts.values()]:
        fix = "use the reward math_verify, which reads the box, or a column of short answers"
        raise BadRow(f"{name} is a solution with a \\boxed, which no completion equals", fix)
    return text


def scalar_text(value: Any) -> str | None:
    """Return text, a number or a date as text; None for other values. Booleans have no notation that a model should use."""
    if isinstance(value, np.generic):
        value = float(str(value)) if isinstance(value, np.floating) else value.item()  # the shortest text of a float32
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


@runtime_checkable
class Prompts(Protocol):
    """A sequence of prompts, such as a list of dicts.

    A prompt is a mapping with `prompt` or `question` (a string) or `messages` (a conversation), and usually `answer`, as a row
    of a file. Rewards receive it as `question`, `answer` (None if missing) and `metadata`, a dict of all other keys.

    Example: `[{"prompt": "What is 7 * 8?", "answer": "56", "level": 2}]`
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


class PromptSource(Protocol):
    """A function that returns the prompts of a run. It receives `data.options` as keyword arguments.

    Every rollout worker calls it, so the same seed must give the same prompts.

    Example:
        def squares(seed: int, largest: int = 100) -> list[dict[str, str]]:
            return [{"prompt": f"{n} * {n} =", "answer": str(n * n)} for n in range(largest)]
    """

    def __call__(self, seed: int, /) -> Prompts:
        """Return the prompts."""


def check_prompt_source(source: object, *, key: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless an object is a list of prompts, or has the signature of `PromptSource`."""
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
    """Yield the prompts of a custom source with their entries, as `entries_of` does.

    `plugin` is the list, or the function that returns it. Raise `ValueError` if the source or one of its prompts is invalid.
    """
    source = plugin.load()
    check_prompt_source(source, key=plugin.key, name=plugin.name, options=config.options)
    if not _is_list(source):
        try:
            source = source(seed, **config.options)
        except Exception as error:  # custom code may raise anything
            rule = f"the function raised {type(error).__name__}: {error}"
            raise _broken(plugin.name, plugin.key, rule, "correct it, or data.options") from error
        if not _is_list(source):
            rule = f"must return a list of prompts, got {type(source).__name__}"
            raise _broken(plugin.name, plugin.key, rule, f"write it as `{EXPECTED}`")
    for row, entry in entries_of(_rows(source, plugin), config):
        try:
            pickle.dumps(entry)
        except Exception as error:  # pickling runs custom code
            problem = f"must be picklable, to be sent to rewards: {type(error).__name__}: {error}"
            raise row.broken(BadRow(problem, "use plain values")) from error
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


ROLES = ("system", "developer", "user", "assistant", "tool")

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
"""Roles by the value of `from` in the ShareGPT format."""


def read_messages(content: Any, *, has_fillers: bool = False) -> list[Message]:
    """Validate and return the messages of a conversation, a list or its JSON text.

    - Messages in the ShareGPT format (`from`, `value`) get a role and a content.
    - Text parts (`[{"type": "text", "text": ...}]`) are joined by line breaks, as vLLM does for templates of text models.
    - A missing content is empty text beside tool calls or reasoning. Keys with the value null are dropped.
    - The arguments of tool calls may be an object or its JSON text.
    - With `has_fillers`, the source fills missing keys of nested objects with null, as Arrow does.

    Raise `BadRow` if a message has no valid role, no text, or invalid tool calls.
    """
    fix = 'write [{"role": "user", "content": "..."}, ...]'
    if isinstance(content, str):
        content = _parsed(content, "messages", fix)
    if not isinstance(content, Sequence) or isinstance(content, str) or not content:
        raise BadRow("messages must be a non-empty list", fix)
    return [_message(message, f"messages[{index}]", has_fillers) for index, message in enumerate(content)]


def parsed_messages(value: Any, name: str) -> Any:
    """Return the messages that a column holds as JSON text, as of tables that pandas wrote; any other value as it is.

    Raise `BadRow` if it holds them in the notation of Python.
    """
    if not isinstance(value, str) or _LISTED.fullmatch(value) is None:
        return value
    messages = _parsed(value, f"{name} looks like a list of messages, which", "write it with json.dumps, not with str")
    roles = [message.get("role", message.get("from")) if isinstance(message, Mapping) else None for message in messages]
    return messages if all(role in (*ROLES, *_SHAREGPT_ROLES) for role in roles) else value


def read_tools(content: Any, *, has_fillers: bool = False) -> list[Mapping[str, Any]] | None:
    """Validate and return the tools of a row, as JSON schemas of functions; None if there are none.

    A list, or its JSON text, of `{"type": "function", "function": {...}}`, or of functions without this wrapper. Raise `BadRow`
    if the value is not such a list.
    """
    fix = 'write [{"type": "function", "function": {"name": ..., "parameters": {...}}}], or rename the column'
    if isinstance(content, str) and content.strip():
        content = _parsed(content, "tools", fix)
    if not content:
        return None
    if not isinstance(content, Sequence) or isinstance(content, str):
        raise BadRow(f"tools must be a list of function schemas, got {inline(content)}", fix)
    tools: list[Mapping[str, Any]] = []
    for index, tool in enumerate(content):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow(f"tools[{index}] must be the schema of a function with a name, got {inline(tool)}", fix)
        tool = tool if "function" in tool else {"type": "function", "function": tool}
        tools.append(_without_nulls(tool) if has_fillers else tool)
    return tools


def question_of(messages: Sequence[Message]) -> str:
    """Return a conversation as one string. For a single message, this is its content."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {_shown(message)}" for message in messages)


def _shown(message: Message) -> str:
    thoughts = [message[key] for key in ("reasoning_content", "reasoning", "thinking") if isinstance(message.get(key), str)]
    calls = [json.dumps(call.get("function", call), ensure_ascii=False, default=str) for call in message.get("tool_calls", ())]
    return "\n".join(filter(None, [*thoughts, message["content"], *calls]))


def _message(message: Any, place: str, has_fillers: bool) -> Message:
    if not isinstance(message, Mapping):
        raise BadRow(f"{place} must be an object, got {type(message).__name__}", "write an object with role and content")
    kept = {key: value for key, value in message.items() if value is not None}
    if "role" not in kept and "from" in kept and "value" in kept:
        sender = kept.pop("from")
        if sender not in _SHAREGPT_ROLES:
            known = ", ".join(_SHAREGPT_ROLES)
            fix = "write tool calls as an assistant message with tool_calls" if sender == "function_call" else "correct it"
            raise BadRow(f"{place}.from must be one of {known}, got {inline(sender)}", fix)
        kept = {"role": _SHAREGPT_ROLES[sender], "content": kept.pop("value"), **kept}
    if kept.get("role") not in ROLES:
        fix = "write it as the role tool" if kept.get("role") == "function" else "correct the role"
        raise BadRow(f"{place}.role must be one of {', '.join(ROLES)}, got {inline(kept.get('role'))}", fix)
    if "tool_calls" in kept:
        calls = _calls(kept.pop("tool_calls"), f"{place}.tool_calls", has_fillers)
        if calls and kept["role"] != "assistant":
            raise BadRow(f"{place} has tool_calls, but the role {kept['role']}", "only an assistant message can call tools")
        kept |= {"tool_calls": calls} if calls else {}
    for key in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if key in kept and not isinstance(kept[key], str):
            raise BadRow(f"{place}.{key} must be a string, got {inline(kept[key])}", "correct or remove it")
    others = {key: value for key, value in kept.items() if key not in ("role", "content")}
    return {"role": kept["role"], "content": _text(kept.get("content"), f"{place}.content", is_optional=bool(others)), **others}


def _text(content: Any, place: str, *, is_optional: bool) -> str:
    if content is None and is_optional:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise BadRow(f"{place} must be a string, got {inline(content)}", "write the content as a string")
    texts = []
    for index, part in enumerate(content):
        named = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
        text = part if isinstance(part, str) else named.get("text")
        if not isinstance(text, str) or named.keys() - {"type", "text"} or named.get("type", "text") != "text":
            raise BadRow(
                f"{place}[{index}] must be a text part, got {inline(part)}", "only text is supported; write it as a string"
            )
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: Any, place: str, has_fillers: bool) -> list[dict[str, Any]]:
    fix = 'write [{"type": "function", "function": {"name": ..., "arguments": {...}}}]'
    if isinstance(calls, str):
        calls = _parsed(calls, place, fix)
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRow(f"{place} must be a list, got {inline(calls)}", fix)
    read = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRow(f"{place}[{index}] must have a function with a name, got {inline(call)}", fix)
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.strip():
            arguments = _parsed(arguments, f"{place}[{index}].function.arguments", "write an object, or its JSON text")
        elif has_fillers:
            arguments = _without_nulls(arguments)
        if not isinstance(arguments or {}, Mapping):
            raise BadRow(f"{place}[{index}].function.arguments must be an object, got {inline(arguments)}", fix)
        outer = {key: value for key, value in call.items() if value is not None and key in ("id", "type")}
        named = {key: value for key, value in call.items() if value is not None and key not in ("id", "type", "function")}
        inner = {key: value for key, value in function.items() if value is not None}
        if "function" in call and named:
            raise BadRow(f"{place}[{index}] has the unknown key {next(iter(named))}", "remove it")
        if unknown := inner.keys() - {"name", "arguments", "id", "type"}:
            raise BadRow(f"{place}[{index}].function has the unknown key {min(unknown)}", "remove it")
        read.append({"type": "function", **outer, "function": {"name": function["name"], "arguments": dict(arguments or {})}})
    return read


def _parsed(text: str, place: str, fix: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{place} must be valid JSON ({error})", fix) from None


def _without_nulls(value: Any) -> Any:
    """Return a value without the keys whose value is null, which Arrow adds for keys of other rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


# Rows by use

TOO_LONG = "longer than data.max_prompt_tokens"
DUPLICATE = "duplicates"
OTHER_ANSWER = "duplicates with another answer"
BLANK = "blank lines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows of a source by use.

    Example: `Selection(key="data.path", source="/data/train.jsonl", num_training=10, num_heldout=2, left_out={TOO_LONG: 60})`
    """

    key: str
    """Configuration key of the source."""
    source: str
    """Value of the key. Paths are absolute."""
    num_training: int
    """Number of rows to train on; for a generated task, of those that were tried."""
    num_heldout: int = 0
    """Number of rows held out for evaluation."""
    num_other: int = 0
    """Number of usable rows that an evaluation set does not take, because they are in the other split."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of rows left out, by reason."""
    notes: tuple[str, ...] = ()
    """Other facts about the rows."""
    digest: str | None = None
    """Digest of the contents; None for a generated task."""

    @property
    def num_left_out(self) -> int:
        """Number of rows left out."""
        return sum(self.left_out.values())

    @property
    def num_rows_used(self) -> int:
        """Number of rows that are not left out."""
        return self.num_training + self.num_heldout + self.num_other

    @property
    def num_rows(self) -> int:
        """Number of rows of the source."""
        return self.num_rows_used + self.num_left_out

    @property
    def is_mostly_left_out(self) -> bool:
        """True if more than half of the rows are left out."""
        return 2 * self.num_left_out > self.num_rows

    def reasons(self) -> str:
        """Return the rows left out, such as `60 of 72 rows left out: 58 longer than ..., 2 duplicates`; empty if none is."""
        if not self.num_left_out:
            return ""
        listed = ", ".join(f"{number:,} {reason}" for reason, number in self.left_out.items() if number)
        what = "tried items" if self.digest is None else "rows"
        return f"{self.num_left_out:,} of {self.num_rows:,} {what} left out: {listed}"

    def row(self) -> tuple[str, ...]:
        """Return the row of the dry run's table: key, rows, to train on, held out, left out.

        A generated task has no number of rows: its items are generated when they are needed.
        """
        if self.digest is None:
            return self.key, "generated", "", "", self.reasons() or f"0 of {self.num_rows:,} tried items"
        numbers = (self.num_rows, self.num_training, self.num_heldout)
        return (self.key, *(f"{number:,}" for number in numbers), self.reasons() or "0")

    def messages(self) -> list[str]:
        """Return the lines for the console of a run. `is_mostly_left_out` says whether the first is a warning."""
        return [f"{self.key}: {text}" for text in (self.reasons(), *self.notes) if text]


RECORD = "data.json"
"""File in the run directory with source and digest of each data key."""


def record_data(run_dir: Path, selections: Sequence[Selection]) -> None:
    """Write the digests of a run's data. Generated tasks have none."""
    found = {found.key: {"source": found.source, "digest": found.digest} for found in selections if found.digest is not None}
    if found:
        replace_text(run_dir / RECORD, json.dumps(found, indent=2) + "\n")


def check_recorded(run_dir: Path, selections: Sequence[Selection], *, accepts_changes: bool) -> list[str]:
    """Compare the data of a resumed run with the recorded digests; return remarks about changes that are accepted.

    A change is accepted if the configuration now names another source, which is a request for it, or with `accepts_changes`.
    Data that moved without a change are the same. Raise `ConfigError` if the contents of a source have changed, or the record
    cannot be read.
    """
    recorded = _recorded(run_dir / RECORD)
    remarks, refused = [], []
    for found in selections:
        before = recorded.get(found.key)
        if found.digest is None or before is None or before["digest"] == found.digest:
            continue
        changed = f"{found.key}: the data differ from those that the run was trained on"
        if before["source"] != found.source:
            remarks.append(f"{changed}: now {found.source}, before {before['source']}")
        elif accepts_changes:
            remarks.append(f"{changed} ({found.source}; {ACCEPTS_CHANGED_DATA})")
        else:
            refused.append(
                f"{changed} (got {found.source}). Restore them, or continue on the changed data with {ACCEPTS_CHANGED_DATA}, "
                "which takes prompts and examples in another order."
            )
    if refused:
        raise ConfigError(*(f"--resume: {text}" for text in refused))
    return remarks


def _recorded(file: Path) -> dict[str, dict[str, Any]]:
    """Return the record of a run; empty for a run without one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {str(key): {"source": str(value["source"]), "digest": str(value["digest"])} for key, value in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--resume: the record of the data cannot be read: {error} (got {file}). Restore or delete it."
        ) from None
