"""Custom prompt sources: import paths, files and objects."""

import datetime
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanrl.base.plugins import Plugin, plugin_of
from titanrl.config.data import DataConfig, EnvironmentConfig
from titanrl.data.entries import Prompts, read_custom_prompts
from titanrl.data.streams import PromptStream, is_heldout, make_stream
from titanrl.data.tokenizer import Tokenizer

MODULE = """
def squares(seed, *, largest=100):
    return [{"prompt": f"{seed} + {n} =", "answer": str(seed + n), "level": n} for n in range(largest)]
LIST = squares(0)
"""


def entries(source: object, **options: object) -> list[dict[str, Any]]:
    plugin = plugin_of("data.source", source)
    assert plugin is not None
    config = DataConfig.model_validate({"source": "own:prompts", "options": options, "rewards": {"own": "a.b:c"}})
    return [entry for _, entry in read_custom_prompts(plugin, 7, config) if entry is not None]


def stream_of(source: object, tokenizer: Tokenizer, seed: int = 7, **changes: Any) -> PromptStream:
    plugin = plugin_of("data.source", source)
    assert plugin is not None
    config = DataConfig(source="object:prompts", task="sums", **changes)
    return make_stream(config, tokenizer, seed, {"data.source": plugin})


def test_item_becomes_an_entry() -> None:
    items = [
        {"prompt": "1 + 1 =", "answer": "2", "level": 3},
        {"question": "2 + 2 =", "metadata": {"level": 4}},
        {"question": "3 + 3 =", "answer": "6", "metadata": {"level": 4}, "tags": ["a"]},
    ]
    assert entries(items) == [
        {"question": "1 + 1 =", "answer": "2", "metadata": {"level": 3}},
        {"question": "2 + 2 =", "answer": None, "metadata": {"level": 4}},
        {"question": "3 + 3 =", "answer": "6", "metadata": {"level": 4, "tags": ["a"]}},
    ]


class Table:
    """A custom sequence that is also callable."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Mapping[str, str]:
        if index >= 2:
            raise IndexError(index)
        return {"prompt": f"{index} =", "answer": str(index)}


class TableSource:
    def __call__(self, seed: int) -> Table:
        return Table()


@pytest.mark.parametrize("source", [Table(), Table, TableSource(), lambda seed: Table(), lambda seed: tuple(Table())])
def test_source_is_a_sequence_or_returns_one(source: object) -> None:
    if source is Table:
        with pytest.raises(ValueError, match="wrong signature"):  # a class is called with the seed
            entries(source)
    else:
        assert [entry["question"] for entry in entries(source)] == ["0 =", "1 ="]


@pytest.mark.parametrize("by_file", [False, True])
def test_source_is_imported_from_a_module_or_a_file(
    by_file: bool, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_prompts.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    path = f"{tmp_path}/made_prompts.py:squares" if by_file else "made_prompts:squares"
    stream = make_stream(DataConfig(source=path, task="sums", options={"largest": 50}), tokenizer, seed=7)
    num = stream.num_prompts
    assert {stream[index].text for index in range(num)} == {
        f"7 + {n} =" for n in range(50) if not is_heldout(f"7 + {n} =", 0.2)
    }
    prompt = stream[3]
    assert (prompt.index, prompt.task) == (3, "sums")
    assert list(prompt.token_ids) == tokenizer.encode(prompt.text)
    assert prompt.entry["answer"] == str(7 + prompt.entry["metadata"]["level"])


def test_list_of_a_module_is_a_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "listed_prompts.py").write_text(MODULE)
    plugin = Plugin(key="data.source", name=f"{tmp_path}/listed_prompts.py:LIST")
    stream = make_stream(DataConfig(source=plugin.name), tokenizer, seed=7, plugins={"data.source": plugin})
    assert stream[0].text.startswith("0 + ")


def test_conversations_and_columns_work_in_python(chat: Tokenizer) -> None:
    items = [{"chat": [{"role": "user", "content": f"{n} + 1 ="}], "truth": {"value": n + 1}} for n in range(9)]
    columns = {"messages": "chat", "answer": "truth.value"}
    prompt = stream_of(items, chat, columns=columns)[0]
    assert chat.token_text(prompt.token_ids[1]) == "u"
    assert prompt.entry["messages"][0]["content"] == prompt.text
    assert int(prompt.entry["answer"]) == int(prompt.text[0]) + 1


def test_numbers_of_numpy_and_missing_values_are_read() -> None:
    items = [
        {"prompt": "a", "answer": np.int64(5)},
        {"prompt": "b", "answer": np.float32("nan")},
        {"prompt": "c", "answer": Decimal("1E+2")},
        {"prompt": "d", "answer": datetime.date(2026, 1, 5)},
    ]
    assert [entry["answer"] for entry in entries(items)] == ["5", None, "100", "2026-01-05"]


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        ({"prompt": "\ud800"}, r"lone surrogate U\+D800"),
        ({"prompt": "a", "answer": object}, "answer must consist of plain values"),
        ({"prompt": "a", "metadata": {"level": 1}, "level": 2}, "the row and its metadata both have the key level"),
        ({"prompt": "a", "tools": ["calculator"]}, r"tools\[0\] must be the schema of a function with a name"),
        ({"prompt": "a", "own": lambda: 1}, "must be picklable"),
        (None, "must be a mapping with prompt and answer, got NoneType"),
    ],
)
def test_unusable_item_is_named(item: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.source=.*item 1: .*{problem}"):
        entries([{"prompt": "1"}, item])


def test_missing_answer_is_an_error_only_if_a_reward_needs_it(tokenizer: Tokenizer) -> None:
    items = [{"prompt": f"{n} =", "answer": "1"} for n in range(20)] + [{"prompt": "5 + 5 ="}]
    with pytest.raises(ValueError, match=r"item 20: answer is missing. Fill it in, .* or set data\.rewards"):
        stream_of(items, tokenizer)
    assert stream_of(items, tokenizer, rewards={"own": {"function": "a:b"}}).num_prompts > 0


def test_unreadable_list_is_reported_with_its_item() -> None:
    class Columns(dict[str, list[str]]):
        pass

    class Broken(Table):
        def __len__(self) -> int:
            return 3

    with pytest.raises(ValueError, match="item 2: reading it raised IndexError: 2"):
        entries(Broken())
    with pytest.raises(ValueError, match="must return a list of prompts, got Columns"):
        entries(lambda seed: Columns(prompt=["1 =", "2 ="]))


def test_string_is_not_a_list_of_prompts() -> None:
    assert isinstance("text", Prompts)
    with pytest.raises(ValueError, match="must return a list of prompts, got str"):
        entries(lambda seed: "text")


@pytest.mark.parametrize("key", ["tools", "chat_template_kwargs"])
def test_row_with_what_an_environment_sets_is_refused(tokenizer: Tokenizer, key: str) -> None:
    given = {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}], "chat_template_kwargs": {"a": 1}}
    row = {"messages": [{"role": "user", "content": "1 + 1 ="}], "answer": "2", key: given[key]}
    with pytest.raises(ValueError, match=f"{key} are set by data.environment, and not by a row"):
        stream_of([row], tokenizer, environment=EnvironmentConfig(function="calculator"))
