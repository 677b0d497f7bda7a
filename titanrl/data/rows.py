"""Read prompts or conversations from JSONL and Parquet files as entries."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRule, BrokenRules, inline
from titanrl.data.jsonl import BadLine, read_jsonl, text_of
from titanrl.data.messages import Message, read_messages

_BATCH_ROWS = 1024


def read_rows(config: DataConfig) -> list[dict[str, Any]]:
    """Read the file `data.path`, and return an entry per row.

    An entry has `question`, `answer` and `metadata`. The entry of a conversation also has `messages`.

    Raises:
        BrokenRules: The file cannot be read, or a row is invalid.
    """
    assert config.path is not None
    if config.source == "jsonl":
        return read_jsonl(config.path, "data.path", lambda line: entry_of(line, config))
    return [entry for file in _parquet_files(config.path) for entry in _read_parquet(file, config)]


def entry_of(row: Mapping[str, Any], config: DataConfig) -> dict[str, Any]:
    """Return the entry of a row. All other columns become its metadata.

    Raises:
        BadLine: The row is invalid.
    """
    asked_name, answer_name = _asked_name(row, config), config.columns.get("answer", "answer")
    asked, answer = _value(row, asked_name), _value(row, answer_name)
    entry: dict[str, Any] = {"metadata": {key: value for key, value in row.items() if key not in (asked_name, answer_name)}}
    is_chat = isinstance(asked, list)
    if is_chat:
        messages, reply = _conversation(asked)
        answer = reply if answer is None else answer
        entry |= {"question": question_of(messages), "messages": messages}
    else:
        entry["question"] = _text(asked, asked_name, config)
    if config.source == "parquet" and isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)  # users cannot put the numbers of a Parquet column in quotes
    needs_answer = config.compares_with_answer or not is_chat
    return {**entry, "answer": _text(answer, answer_name, config) if needs_answer or answer is not None else None}


def question_of(messages: Sequence[Message]) -> str:
    """Return a conversation as one string, which identifies it. For a single message, this is its content."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _asked_name(row: Mapping[str, Any], config: DataConfig) -> str:
    """Return the name of the column that contains the prompt or the conversation."""
    columns = config.columns
    if "messages" in columns:
        return columns["messages"]
    known = ["prompt", "messages"] if config.source == "jsonl" else ["prompt", "question", "messages"]
    names = [columns["prompt"]] if "prompt" in columns else known
    return next((name for name in names if _value(row, name) is not None), names[0])


def _text(value: object, name: str, config: DataConfig) -> str:
    if value is None and (config.source == "parquet" or config.columns):
        raise BadLine(f"{name} is missing", "set data.columns to the column names of the file, or fill in the value")
    return text_of({} if value is None else {name: value}, name, "prompt and answer")


def _conversation(content: object) -> tuple[list[Message], str | None]:
    """Return the messages that the policy replies to, and the final assistant message of the row, if any.

    Raises:
        BadLine: A message is invalid, or there is no message to reply to.
    """
    messages = read_messages(content)
    reply = str(messages[-1]["content"]) if messages[-1]["role"] == "assistant" else None
    messages = messages if reply is None else messages[:-1]
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadLine("messages must contain a user message before the reply", "add one, or delete the conversation")
    if not str(messages[-1]["content"]).strip():
        raise BadLine("the last user message is empty", "fill it in, or delete the conversation")
    return [{"role": message["role"], "content": message["content"]} for message in messages], reply


def _value(row: Mapping[str, Any], path: str) -> Any:
    """Return a value of a row. A dot in the path selects a nested field, unless a column name contains it."""
    if path in row:
        return row[path]
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _parquet_files(path: Path) -> list[Path]:
    """Return the files that a path refers to: one file, all files of a directory, or all matches of a pattern."""
    files = [path] if path.is_file() else sorted(path.glob("*.parquet") if path.is_dir() else path.parent.glob(path.name))
    if not files:
        raise _broken(
            path, "file not found", "give a Parquet file, a directory of such files, or a pattern such as data/train-*.parquet"
        )
    return files


def _read_parquet(file: Path, config: DataConfig) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        rule = BrokenRule(
            values={"data.source": "parquet"}, rule=f"the package {error.name} must be installed", fix="pip install pyarrow"
        )
        raise BrokenRules(rule) from error
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            batches = opened.iter_batches(_BATCH_ROWS)
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows):
                try:
                    yield entry_of(row, config)
                except BadLine as error:
                    raise _broken(file, f"row {number}: {error.problem}", error.fix) from error
    except OSError as error:  # Arrow also raises it for a corrupt file
        raise _broken(
            file, f"must be readable ({error.strerror or inline(str(error))})", "correct the file or its permissions"
        ) from error
    except pyarrow.ArrowException as error:
        raise _broken(file, f"must be a Parquet file ({inline(str(error))})", "correct data.path or data.source") from error


def _broken(path: Path, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule(values={"data.path": str(path)}, rule=rule, fix=fix))
