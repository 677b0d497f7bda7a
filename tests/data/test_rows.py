"""Prompts and conversations from JSONL and Parquet files."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRules, ConfigError
from titanrl.config.load import load_config
from titanrl.data.rows import read_rows
from titanrl.data.streams import make_stream, open_stream
from titanrl.data.tokenizer import Tokenizer

OWN = {"a": "my.py:reward"}
"""A reward that needs no answer."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(path: Path, rows: Sequence[Mapping[str, Any]], **changes: Any) -> DataConfig:
    """Write rows to a file, and return the section that names it."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    source = "parquet" if path.suffix == ".parquet" else "jsonl"
    return DataConfig.model_validate({"source": source, "path": path, **changes})


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_prompt_and_answer_are_read_from_either_format(file: Path) -> None:
    rows = [
        {"prompt": "2 + 2 =", "answer": "4", "level": 1, "tags": ["a", "b"]},
        {"prompt": "3 =", "answer": "3", "level": 2, "tags": []},
    ]
    assert read_rows(written(file, rows)) == [
        {"question": "2 + 2 =", "answer": "4", "metadata": {"level": 1, "tags": ["a", "b"]}},
        {"question": "3 =", "answer": "3", "metadata": {"level": 2, "tags": []}},
    ]


def test_columns_can_be_renamed(file: Path) -> None:
    rows = [{"problem": "2 + 2 =", "reward": {"truth": "4", "style": "rule"}}]
    columns = {"prompt": "problem", "answer": "reward.truth"}
    (entry,) = read_rows(written(file, rows, columns=columns))
    assert (entry["question"], entry["answer"]) == ("2 + 2 =", "4")
    assert entry["metadata"] == {"reward": {"truth": "4", "style": "rule"}}
    (gsm,) = read_rows(written(file.with_suffix(".parquet"), [{"question": "1 =", "answer": "1"}]))
    assert (gsm["question"], gsm["answer"], gsm["metadata"]) == ("1 =", "1", {})


def test_final_reply_of_a_conversation_becomes_the_answer(file: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, user("2 + 2?"), assistant("4"), user("And 3 + 3?")]
    (entry,) = read_rows(written(file, [{"messages": [*turns, assistant("6")], "id": "x"}]))
    assert entry == {
        "question": "system: Be brief.\n\nuser: 2 + 2?\n\nassistant: 4\n\nuser: And 3 + 3?",
        "messages": turns,
        "answer": "6",
        "metadata": {"id": "x"},
    }


def test_list_of_messages_may_be_the_prompt(file: Path) -> None:
    (entry,) = read_rows(written(file, [{"prompt": [user("2 + 2?")], "answer": "4"}]))
    assert (entry["question"], entry["messages"], entry["answer"]) == ("2 + 2?", [user("2 + 2?")], "4")
    (entry,) = read_rows(written(file, [{"chat": [user("2 + 2?")]}], columns={"messages": "chat"}, rewards=OWN))
    assert (entry["question"], entry["answer"]) == ("2 + 2?", None)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "4"}, "prompt is missing"),
        ({"prompt": "2 + 2 ="}, "answer is missing"),
        ({"messages": [user("a")]}, "answer is missing"),
        ({"messages": [assistant("a")]}, "messages must contain a user message before the reply"),
        ({"messages": [user(" ")], "answer": "4"}, "the last user message is empty"),
        ({"messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\].role must be one of"),
        ({"prompt": " ", "answer": "4"}, "prompt is empty"),
    ],
)
def test_unusable_row_is_named(file: Path, row: dict[str, Any], problem: str) -> None:
    good = {"prompt": "1 =", "answer": "1"} if "messages" not in row else {"messages": [user("b"), assistant("c")]}
    place = "row 1: " if file.suffix == ".parquet" else ":2: "
    with pytest.raises(BrokenRules, match=f"data.path.*{place}{problem}"):
        read_rows(written(file, [good, row]))


def test_prompt_that_is_not_a_string_is_named(file: Path) -> None:
    with pytest.raises(BrokenRules, match="prompt must be a string, got 3"):
        read_rows(written(file, [{"prompt": 3, "answer": "4"}]))


def test_numeric_parquet_column_can_be_the_answer(tmp_path: Path) -> None:
    (entry,) = read_rows(written(tmp_path / "a.parquet", [{"prompt": "2 + 2 =", "answer": 4}]))
    assert entry["answer"] == "4"


def test_directory_and_pattern_select_several_parquet_files(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "test-0"):
        written(tmp_path / f"{name}.parquet", [{"prompt": name, "answer": "1"}])
    section = DataConfig(source="parquet", path=tmp_path)
    assert [entry["question"] for entry in read_rows(section)] == ["test-0", "train-0", "train-1"]
    section = DataConfig(source="parquet", path=tmp_path / "train-*.parquet")
    assert [entry["question"] for entry in read_rows(section)] == ["train-0", "train-1"]


def test_invalid_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("prompt,answer\n")
    with pytest.raises(BrokenRules, match=r"data.path.*must be a Parquet file"):
        read_rows(DataConfig(source="parquet", path=tmp_path / "a.parquet"))
    with pytest.raises(BrokenRules, match=r"data.path.*file not found"):
        read_rows(DataConfig(source="parquet", path=tmp_path / "b.parquet"))


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = written(tmp_path / "a.parquet", [{"prompt": "a", "answer": "b"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BrokenRules, match=r"data.source.*the package pyarrow must be installed.*[Pp]ip install pyarrow"):
        read_rows(section)


def test_stream_renders_complete_conversations(tmp_path: Path) -> None:
    rows = [{"messages": [user(f"{i}?"), assistant("a"), user("and?"), assistant(str(i))]} for i in range(40)]
    asked: list[Any] = []

    def encode(question: Any) -> list[int]:
        asked.append(question)
        return [1, 2]

    stream = open_stream(written(tmp_path / "a.parquet", rows), encode, seed=0)
    assert stream.num_prompts + len(stream.heldout(4)) <= 40
    assert stream[0].entry["messages"] in asked
    assert all(isinstance(messages, list) and messages[-1] == user("and?") for messages in asked)


def test_conversation_gets_the_chat_template(tmp_path: Path, chat: Tokenizer) -> None:
    rows = [{"messages": [user(f"{i} + 2 ="), assistant("4"), user("3 + 3 =")], "answer": "6"} for i in range(9)]
    stream = make_stream(written(tmp_path / "a.parquet", rows, system_prompt="1 + 1", max_prompt_tokens=512), chat, seed=0)
    prompt = stream[0]
    assert list(prompt.token_ids) == chat.render_chat([{"role": "system", "content": "1 + 1"}, *prompt.entry["messages"]])
    assert prompt.text.endswith("assistant: 4\n\nuser: 3 + 3 =")


def test_conversations_need_a_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = written(tmp_path / "a.jsonl", [{"messages": [user("2 + 2 =")], "answer": "4"}])
    with pytest.raises(ValueError, match="conversations require a chat template, but the tokenizer has no chat template"):
        make_stream(section, tokenizer, seed=0)


def test_columns_need_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)data.columns.*only a JSONL or Parquet file has columns"):
        load_config("quickstart", ["data.columns={prompt: problem}"])
