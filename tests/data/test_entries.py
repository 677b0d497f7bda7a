"""Prompts and conversations from JSONL and Parquet files, in the form that chat templates expect, with nothing dropped."""

import datetime
import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.chat import render_chat
from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRules, ConfigError
from titanrl.config.load import load_config
from titanrl.data.entries import (
    FORMATS,
    BadRow,
    data_digest,
    data_files,
    entries_of,
    question_of,
    read_messages,
    read_rows,
    read_tools,
    scalar_text,
)
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


def entries(config: DataConfig) -> list[dict[str, Any]]:
    assert config.path is not None
    rows = read_rows(config.path, "data.path", FORMATS[config.source])
    return [entry for _, entry in entries_of(rows, config) if entry is not None]


@pytest.fixture(params=["rows.jsonl", "rows.parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / str(request.param)


def test_prompt_and_answer_are_read_from_either_format(file: Path) -> None:
    rows = [
        {"prompt": "2 + 2 =", "answer": "4", "level": 1, "tags": ["a", "b"]},
        {"prompt": "3 =", "answer": "3", "level": 2, "tags": []},
    ]
    assert entries(written(file, rows)) == [
        {"question": "2 + 2 =", "answer": "4", "metadata": {"level": 1, "tags": ["a", "b"]}},
        {"question": "3 =", "answer": "3", "metadata": {"level": 2, "tags": []}},
    ]


def test_columns_can_be_renamed(file: Path) -> None:
    rows = [{"problem": "2 + 2 =", "reward": {"truth": "4", "style": "rule"}}]
    columns = {"prompt": "problem", "answer": "reward.truth"}
    (entry,) = entries(written(file, rows, columns=columns))
    assert (entry["question"], entry["answer"]) == ("2 + 2 =", "4")
    assert entry["metadata"] == {"reward": {"truth": "4", "style": "rule"}}
    (gsm,) = entries(written(file.with_suffix(".parquet"), [{"question": "1 =", "answer": "1"}]))
    assert (gsm["question"], gsm["answer"], gsm["metadata"]) == ("1 =", "1", {})


def test_final_reply_of_a_conversation_becomes_the_answer(file: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, user("2 + 2?"), assistant("4"), user("And 3 + 3?")]
    (entry,) = entries(written(file, [{"messages": [*turns, assistant("6")], "id": "x"}]))
    assert entry == {
        "question": "system: Be brief.\n\nuser: 2 + 2?\n\nassistant: 4\n\nuser: And 3 + 3?",
        "messages": turns,
        "answer": "6",
        "reply": assistant("6"),
        "metadata": {"id": "x"},
    }


def test_list_of_messages_may_be_the_prompt(file: Path) -> None:
    (entry,) = entries(written(file, [{"prompt": [user("2 + 2?")], "answer": "4"}]))
    assert (entry["question"], entry["messages"], entry["answer"]) == ("2 + 2?", [user("2 + 2?")], "4")
    (entry,) = entries(written(file, [{"chat": [user("2 + 2?")]}], columns={"messages": "chat"}, rewards=OWN))
    assert (entry["question"], entry["answer"]) == ("2 + 2?", None)


@pytest.mark.parametrize("messages", [[user("2 + 2?")], [{"from": "human", "value": "2 + 2?"}]])
def test_prompt_may_be_the_json_text_of_messages(file: Path, messages: Any) -> None:
    (entry,) = entries(written(file, [{"prompt": json.dumps(messages, indent=1), "answer": "4"}]))
    assert (entry["question"], entry["messages"], entry["answer"]) == ("2 + 2?", [user("2 + 2?")], "4")
    with pytest.raises(BrokenRules, match=r"prompt looks like a list of messages, which must be valid JSON .*with json\.dumps"):
        entries(written(file, [{"prompt": str(messages), "answer": "4"}]))


@pytest.mark.parametrize(
    "text", ['[{"role": "engineer", "age": 3}]', '[{"content": 1}]', '[{"role": "user"}] has a role', "[{1: 2}]"]
)
def test_text_that_only_resembles_messages_stays_text(file: Path, text: str) -> None:
    (entry,) = entries(written(file, [{"prompt": text, "answer": "4"}]))
    assert (entry["question"], "messages" in entry) == (text, False)


def test_placeholder_of_an_image_is_refused(file: Path) -> None:
    row = {"messages": [user("<image>\nWhat is it?"), assistant("A cat")], "images": [{"bytes": "a", "path": "b"}]}
    assert entries(written(file, [row | {"images": None}]))[0]["question"] == "<image>\nWhat is it?"  # it may be text, of HTML
    with pytest.raises(BrokenRules, match="the text has the placeholder <image>, but only text reaches the model"):
        entries(written(file, [row]))


def test_floats_of_32_bits_have_their_shortest_notation(tmp_path: Path) -> None:
    narrow = pyarrow.float32()
    point = pyarrow.struct([("x", narrow), ("ys", pyarrow.list_(pyarrow.struct([("y", narrow)])))])
    table = pyarrow.table(
        {
            "prompt": ["1 =", "2 ="],
            "answer": pyarrow.array([0.1, None], narrow),
            "point": pyarrow.array([{"x": 1e-30, "ys": [{"y": 3.3}, None]}, None], point),
            "weights": pyarrow.array([None, [0.2, float("nan"), float("-inf")]], pyarrow.large_list(narrow)),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    config = DataConfig.model_validate({"source": "parquet", "path": tmp_path / "a.parquet", "rewards": OWN})
    first, second = entries(config)
    assert (first["answer"], second["answer"]) == ("0.1", None)
    assert first["metadata"] == {"point": {"x": 1e-30, "ys": [{"y": 3.3}, None]}, "weights": None}
    assert (second["metadata"]["point"], str(second["metadata"]["weights"])) == (None, "[0.2, nan, -inf]")
    assert scalar_text(np.float32(0.1)) == "0.1"  # of a source in Python


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
        entries(written(file, [good, row]))


def test_prompt_that_is_not_a_string_is_named(file: Path) -> None:
    with pytest.raises(BrokenRules, match="prompt must be a string or a list of messages, got 3"):
        entries(written(file, [{"prompt": 3, "answer": "4"}]))


def test_binary_prompt_is_not_read_as_messages(tmp_path: Path) -> None:
    with pytest.raises(BrokenRules, match=r"prompt must be a string or a list of messages, got .*2 ="):
        entries(written(tmp_path / "rows.parquet", [{"prompt": b"2 =", "answer": "4"}]))


@pytest.mark.parametrize(
    ("values", "answers"),
    [
        ([4, None], ["4", None]),
        ([4.5, float("nan")], ["4.5", None]),
        ([Decimal("1014.50"), None], ["1014.50", None]),
        ([datetime.date(2026, 1, 5), None], ["2026-01-05", None]),
        ([["a", "b"], None], [["a", "b"], None]),
        ([True, None], [True, None]),
    ],
)
def test_values_of_parquet_columns_become_answers(tmp_path: Path, values: list[Any], answers: list[Any]) -> None:
    rows = [{"prompt": f"{n} =", "answer": value} for n, value in enumerate(values)]
    assert [entry["answer"] for entry in entries(written(tmp_path / "a.parquet", rows, rewards=OWN))] == answers
    with pytest.raises(BrokenRules, match=r"row 1: answer is missing|row 0: answer must be text or a number"):
        entries(written(tmp_path / "a.parquet", rows))


def test_saved_data_set_is_read(tmp_path: Path) -> None:
    rows = [{"messages": [user(f"{n}?"), assistant(str(n))], "level": n} for n in range(5)]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    section = DataConfig(source="arrow", path=tmp_path / "one")
    assert [(entry["question"], entry["answer"]) for entry in entries(section)] == [(f"{n}?", str(n)) for n in range(5)]
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "two")
    with pytest.raises(BrokenRules, match=r"with the splits train, test\. Name one of them, such as .*/train"):
        entries(DataConfig(source="arrow", path=tmp_path / "two"))
    with pytest.raises(BrokenRules, match=r"must contain \.parquet files, but it holds arrow data\. Set data\.source"):
        entries(DataConfig(source="parquet", path=tmp_path / "one"))


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (gzip.compress(b"{}", mtime=0), "is compressed with gzip. Decompress it"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS. Download the file itself"),
        (b"PAR1abc", "is a Parquet file. Name it .parquet, and set data.source to parquet"),
        ('{"a": 1}'.encode("utf-16"), "is encoded as UTF-16. Save it as UTF-8"),
        (b'[{"prompt": "1"}]', "must be a JSON object, got list. Write one JSON object per line, for example with: jq -c"),
        (b'[\n{"prompt": "1"}]', "must be valid JSON .* for example with: jq -c"),
    ],
)
def test_file_of_another_format_is_named(tmp_path: Path, start: bytes, problem: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(start)
    with pytest.raises(BrokenRules, match=problem):
        entries(DataConfig(source="jsonl", path=tmp_path / "a.jsonl"))


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_directories_and_patterns_are_read(source: Any, tmp_path: Path) -> None:
    for name in ("b", "a", "test"):
        written(tmp_path / f"{name}.{source}", [{"prompt": name, "answer": "1"}])
    for pattern, names in (("", ["a", "b", "test"]), (f"*.{source}", ["a", "b", "test"]), (f"[ab].{source}", ["a", "b"])):
        assert [entry["question"] for entry in entries(DataConfig(source=source, path=tmp_path / pattern))] == names
    with pytest.raises(BrokenRules, match="no file matches the pattern"):
        entries(DataConfig(source=source, path=tmp_path / f"c*.{source}"))


def test_digest_covers_the_contents_and_not_the_names(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, names in {one: "ab", two: "cd"}.items():
        folder.mkdir()
        for number, name in enumerate(names):
            written(folder / f"{name}.jsonl", [{"prompt": str(number)}])
    first = data_digest(one, "data.path", "jsonl")
    assert first == data_digest(two, "data.path", "jsonl") == data_digest(one / "*.jsonl", "data.path", "jsonl")
    (two / "d.jsonl").rename(two / "b.jsonl")  # another order
    assert first != data_digest(two, "data.path", "jsonl")
    assert first != data_digest(one / "a.jsonl", "data.path", "jsonl")


def test_invalid_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("prompt,answer\n")
    with pytest.raises(BrokenRules, match=r"data.path.*must be a Parquet file"):
        entries(DataConfig(source="parquet", path=tmp_path / "a.parquet"))
    with pytest.raises(BrokenRules, match=r"data.path.*file not found"):
        entries(DataConfig(source="parquet", path=tmp_path / "b.parquet"))


def column(values: list[Any], kind: pyarrow.DataType) -> pyarrow.Array:
    return pyarrow.array(values, kind)


STRUCT = pyarrow.StructArray.from_arrays([column(["a"], pyarrow.string())] * 2, names=["k", "k"])


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        ("prompt", column(["b"], pyarrow.string()), "several columns have the same name: prompt, prompt"),
        ("x", STRUCT, "must have values that Python can read .*duplicate"),
        ("x", column([2**60], pyarrow.timestamp("us")), "must have values that Python can read .*OverflowError"),
        ("x", column([1], pyarrow.timestamp("us", tz="Mars/Base")), "must have values that Python can read .*Mars/Base"),
        (
            "x",
            column([b"\xff"], pyarrow.binary()).view(pyarrow.string()),
            "must have values that Python can read .*UnicodeDecode",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_column_that_cannot_be_read_is_refused(tmp_path: Path, kind: str, name: str, values: Any, problem: str) -> None:
    file = tmp_path / f"a.{kind}"
    table = pyarrow.Table.from_arrays([column(["a"], pyarrow.string()), values], names=["prompt", name])
    if kind == "parquet":
        pyarrow.parquet.write_table(table, file)
    else:
        with pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(BrokenRules, match=f"data.path.*{problem}"):
        entries(DataConfig(source=kind, path=file))


def test_directory_of_several_splits_is_refused(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        written(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": "1"}])
    with pytest.raises(
        BrokenRules, match=r"data.path.*holds files of several splits \(train, test\)\. Name .*/\*train\*\.jsonl, or"
    ):
        data_files(tmp_path, "data.path", "jsonl")
    assert len(data_files(tmp_path / "train*.jsonl", "data.path", "jsonl")) == 2
    assert len(data_files(tmp_path / "*.jsonl", "data.path", "jsonl")) == 3
    (tmp_path / "test-00000-of-00001.jsonl").rename(tmp_path / "contest.jsonl")
    assert len(data_files(tmp_path, "data.path", "jsonl")) == 3


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_conversation_may_be_json_text(tmp_path: Path, name: str) -> None:
    row = {name: json.dumps([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])}
    (entry,) = entries(written(tmp_path / "a.jsonl", [row]))
    assert (entry["question"], entry["answer"]) == ("2 + 2?", "4")
    with pytest.raises(BrokenRules, match="messages must be valid JSON"):
        entries(written(tmp_path / "b.jsonl", [{name: "2 + 2?", "answer": "4"}]))


def test_key_that_occurs_twice_in_json_text_is_refused() -> None:
    call = {"name": "f", "arguments": '{"day": 1, "day": 2}'}
    with pytest.raises(BadRow, match=r'tool_calls\[0\]\.function\.arguments must be valid JSON \(the key "day" occurs'):
        read_messages([{"role": "assistant", "tool_calls": [call]}])


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = written(tmp_path / "a.parquet", [{"prompt": "a", "answer": "b"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BrokenRules, match=r"data.path.*the package pyarrow must be installed.*[Pp]ip install pyarrow"):
        entries(section)


def test_stream_renders_complete_conversations(tmp_path: Path) -> None:
    rows = [{"messages": [user(f"{i}?"), assistant("a"), user("and?"), assistant(str(i))]} for i in range(40)]
    asked: list[Any] = []

    def encode(entry: Any) -> list[int]:
        asked.append(entry["messages"])
        return [1, 2]

    stream = open_stream(written(tmp_path / "a.parquet", rows), encode, seed=0)
    assert stream.num_prompts + len(stream.heldout(4)) <= 40
    assert stream[0].entry["messages"] in asked
    assert all(isinstance(messages, list) and messages[-1] == user("and?") for messages in asked)


def test_conversation_gets_the_chat_template(tmp_path: Path, chat: Tokenizer) -> None:
    rows = [{"messages": [user(f"{i} + 2 ="), assistant("4"), user("3 + 3 =")], "answer": "6"} for i in range(9)]
    stream = make_stream(written(tmp_path / "a.parquet", rows, system_prompt="1 + 1", max_prompt_tokens=512), chat, seed=0)
    prompt = stream[0]
    assert list(prompt.token_ids) == render_chat(chat, [{"role": "system", "content": "1 + 1"}, *prompt.entry["messages"]])
    assert prompt.text.endswith("assistant: 4\n\nuser: 3 + 3 =")


def test_conversations_need_a_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    section = written(tmp_path / "a.jsonl", [{"messages": [user("2 + 2 =")], "answer": "4"}])
    with pytest.raises(ValueError, match="conversations require a chat template, but the tokenizer has no chat template"):
        make_stream(section, tokenizer, seed=0)


def test_columns_need_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)data.columns.*a reasoning-gym task has no columns"):
        load_config("quickstart", ["data.columns={prompt: problem}"])


USER = {"role": "user", "content": "Rain?"}
CALL = {"type": "function", "function": {"name": "forecast", "arguments": {"town": "Norden", "day": 0}}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"from": "human", "value": "Rain?"}, USER),
        ({"from": "gpt", "value": "No", "weight": 0}, {"role": "assistant", "content": "No", "weight": 0}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {**USER, "content": "a\nb"},
        ),
        ({"role": "user", "content": [{"type": "text", "text": "Rain?", "image_url": None}]}, USER),
        ({"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "Be brief."}),
        (
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
        ({"role": "assistant", "reasoning_content": "Hm"}, {"role": "assistant", "content": "", "reasoning_content": "Hm"}),
        ({**USER, "tool_calls": None, "name": None}, USER),
        ({**USER, "tool_calls": []}, USER),
        (
            {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "forecast"},
            {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "forecast"},
        ),
    ],
)
def test_message_gets_a_role_and_text(message: Any, expected: Any) -> None:
    assert read_messages([message]) == [expected]


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {**CALL, "function": {"name": "forecast", "arguments": json.dumps(CALL["function"]["arguments"])}},  # type: ignore[index]
        {"name": "forecast", "arguments": {"town": "Norden", "day": 0}},
        {**CALL, "id": None, "function": {"name": "forecast", "arguments": {"town": "Norden", "day": 0, "unit": None}}},
    ],
)
def test_arguments_of_a_call_become_an_object(call: Any) -> None:
    (message,) = read_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], has_fillers=True)
    assert message["tool_calls"] == [CALL]


def test_null_arguments_are_kept_unless_the_source_adds_them() -> None:
    call = {"name": "forecast", "arguments": {"town": None}}
    (message,) = read_messages([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"town": None}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "messages[0].content[0] must be a text part"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]},
            "messages[0].content[0] must be a text part",
        ),
        ({"role": "user", "content": None}, "messages[0].content must be a string, got null"),
        ({"role": "user", "content": 3}, "messages[0].content must be a string, got 3"),
        ({**USER, "tool_calls": [CALL]}, "messages[0] has tool_calls, but the role user"),
        ({"role": "function", "content": "4"}, "messages[0].role must be one of"),
        ({"from": "function_call", "value": "{}"}, "messages[0].from must be one of"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[0].tool_calls[0] must have a function with a name"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "messages[0].tool_calls[0].function.arguments must be valid JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]},
            "messages[0].tool_calls[0].function.arguments must be an object, got [1]",
        ),
        ({"role": "assistant", "tool_calls": [{**CALL, "index": 1}]}, "messages[0].tool_calls[0] has the unknown key index"),
        ({"role": "assistant", "reasoning_content": ["a"]}, "messages[0].reasoning_content must be a string"),
        (
            {"role": "bot", "content": "Hi"},
            'messages[0].role must be one of system, developer, user, assistant, tool, got "bot"',
        ),
        ({"role": "user"}, "messages[0].content must be a string, got null"),
        ("Hi", "messages[0] must be an object, got str"),
    ],
)
def test_message_that_would_lose_something_is_named(message: Any, problem: str) -> None:
    with pytest.raises(BadRow) as refused:
        read_messages([message])
    assert refused.value.problem.startswith(problem)


@pytest.mark.parametrize("content", ["Hi", '"Hi"', "[]", []])
def test_messages_must_be_a_list(content: Any) -> None:
    with pytest.raises(BadRow, match=r"messages must be (a non-empty list|valid JSON)"):
        read_messages(content)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("as_text", [True, False])
def test_tools_are_read_in_every_notation(wrapped: bool, as_text: bool) -> None:
    function = {"name": "forecast", "parameters": {"properties": {"day": {"type": "integer"}, "other": None}}}
    listed = [{"type": "function", "function": function} if wrapped else function]
    tools = read_tools(json.dumps(listed) if as_text else listed, has_fillers=True)
    parameters = {"properties": {"day": {"type": "integer"}}}
    assert tools == [{"type": "function", "function": {"name": "forecast", "parameters": parameters}}]
    assert read_tools([]) is read_tools(None) is read_tools("") is None


def test_question_of_a_conversation_shows_calls_and_reasoning() -> None:
    calls = {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [CALL]}
    text = question_of(read_messages([USER, calls, {"role": "tool", "content": "rain"}]))
    call = '{"name": "forecast", "arguments": {"town": "Norden", "day": 0}}'
    assert text == f"user: Rain?\n\nassistant: Hm\n{call}\n\ntool: rain"
