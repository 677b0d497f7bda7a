"""Everything in a conversation reaches the chat template, or the row is refused with the key."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from tests.data.conftest import CHATML, byte_level, write_model_dir
from titanrl.config.data import DataConfig
from titanrl.config.errors import BrokenRules
from titanrl.config.schema import Config
from titanrl.data.entries import BadRow, read_messages
from titanrl.data.examples import read_examples
from titanrl.data.streams import make_stream
from titanrl.data.tokenizer import ChatFormat, Tokenizer, load_tokenizer, writes_date

CASE = Path(__file__).with_name("cases") / "tool_history.jsonl"
START, END = "<|im_start|>", "<|im_end|>\n"
# As the templates of models that think and call tools: reasoning before the last question is left out, and unknown roles are
# ignored.
TEMPLATE = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role in ('user', 'system') %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<response>{{ m.content }}</response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {"day": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    return load_tokenizer(write_model_dir(directory, byte_level(), eos="<|im_end|>", chat_template=template))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("full"), TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A template that renders only roles and contents."""
    return tokenizer_with(tmp_path_factory.mktemp("plain"), CHATML)


def rows_in(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def rl_text(tokenizer: Tokenizer, rows: list[Mapping[str, Any]], path: Path, **changes: Any) -> str:
    """Return the text of the first prompt, with its control tokens."""
    section = {"source": path.suffix[1:], "path": rows_in(path, rows), "max_prompt_tokens": 4096, "heldout_fraction": 0.001}
    config = DataConfig.model_validate({**section, "rewards": {"own": "a.b:c"}, **changes})
    prompt = make_stream(config, tokenizer, seed=0).training_prompts()[0]
    return "".join(map(tokenizer.token_text, prompt.token_ids))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("as_text", [False, True])
def test_prompt_has_the_calls_and_tools_of_its_row(full: Tokenizer, tmp_path: Path, name: str, as_text: bool) -> None:
    rows = [json.loads(line) for line in CASE.read_text().splitlines()]
    expected = AutoTokenizer.from_pretrained(full.path).apply_chat_template(
        rows[0]["messages"], tools=rows[0]["tools"], tokenize=False, add_generation_prompt=True
    )
    for row in rows if as_text else []:
        function = row["messages"][1]["tool_calls"][0]["function"]
        function["arguments"], row["tools"] = json.dumps(function["arguments"]), json.dumps(row["tools"])
    text = rl_text(full, rows, tmp_path / name)
    assert text == expected
    assert '<call>forecast {"town": "Norden", "day": 0}</call>' in text
    assert '"description": "Weather of a town on a day"' in text


def test_example_has_the_calls_reasoning_and_tools_of_its_row(full: Tokenizer, tmp_path: Path) -> None:
    row = json.loads(CASE.read_text().splitlines()[0])
    row["messages"] = row["messages"][:2]  # the call is the last turn
    path = rows_in(tmp_path / "rows.jsonl", [row])
    config = Config.model_validate({"name": "a", "num_steps": 1, "sft": {"path": path}, "trainer": {"row_tokens": 512}})
    (example,) = read_examples(config, full).training
    text = "".join(map(full.token_text, example.token_ids[example.mask].tolist()))
    assert text == '<think>I should look it up.</think><call>forecast {"town": "Norden", "day": 0}</call><|im_end|>'
    prompt = "".join(map(full.token_text, example.token_ids[~example.mask].tolist()))
    assert prompt.startswith(f"{START}system\nTools:")
    assert prompt.endswith(f"{START}assistant\n")


def fitted(tokenizer: Tokenizer, messages: list[Mapping[str, Any]], **changes: Any) -> str:
    return ChatFormat(tokenizer).fitted(read_messages(messages), **changes, reply_follows=True)[1]


USER, REPLY = {"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes"}


@pytest.mark.parametrize(
    ("messages", "tools", "problem"),
    [
        ([USER, {**REPLY, "tool_calls": [CALL]}, USER], None, "the chat template ignores messages[1].tool_calls"),
        ([USER, {**REPLY, "reasoning_content": "Hm"}, USER], None, "the chat template ignores messages[1].reasoning_content"),
        ([USER, {**REPLY, "weight": 0}, USER], None, "the chat template ignores messages[1].weight"),
        ([USER], [TOOL], "the chat template ignores tools"),
    ],
)
def test_key_that_the_template_does_not_know_is_refused(plain: Tokenizer, messages: Any, tools: Any, problem: str) -> None:
    with pytest.raises(BadRow) as refused:
        fitted(plain, messages, tools=tools)
    assert refused.value.problem == problem


def test_message_of_an_ignored_role_is_refused(tmp_path: Path) -> None:
    only_users = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}")
    tokenizer = tokenizer_with(tmp_path, only_users)
    with pytest.raises(BadRow, match=r"leaves out messages\[1\], with the role tool"):
        fitted(tokenizer, [USER, {"role": "tool", "content": "rain"}])


def test_names_and_ids_may_be_ignored(plain: Tokenizer) -> None:
    messages = [{**USER, "name": "Ada"}, {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "f"}]
    assert fitted(plain, messages) == f"{START}user\nRain?{END}{START}tool\nrain{END}{START}assistant\n"


def test_reasoning_that_the_template_drops_from_history_is_accepted(full: Tokenizer) -> None:
    assert "Hm" not in fitted(full, [USER, {**REPLY, "reasoning_content": "Hm"}, USER])


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_reasoning_gets_the_name_that_the_template_knows(full: Tokenizer, name: str) -> None:
    messages = [USER, {**REPLY, name: "Hm", "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}]
    assert "<think>Hm</think>Yes<call>" in fitted(full, messages)


def test_developer_becomes_system_unless_the_template_knows_it(full: Tokenizer, plain: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    assert fitted(full, messages).startswith(f"{START}system\nBe brief.{END}")
    assert fitted(plain, messages).startswith(f"{START}developer\nBe brief.{END}")


def test_arguments_are_text_for_a_template_that_joins_text(tmp_path: Path) -> None:
    joining = TEMPLATE.replace("c.function.arguments | tojson", "'' + c.function.arguments")
    messages = [USER, {**REPLY, "tool_calls": [CALL]}, {"role": "tool", "content": "rain"}]
    assert '<call>f {"day": 1}</call>' in fitted(tokenizer_with(tmp_path, joining), messages)


CALLS = "{% for c in m.tool_calls %}<call>{{ c.function.name }} {{ c.function.arguments }}</call>{% endfor %}"


def called(tokenizer: Tokenizer, content: str | None = None, number: int = 1) -> str:
    """Return the text of the message with calls, and without its start and its end."""
    other = {**CALL, "function": {"name": "g", "arguments": {"town": "None"}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [CALL, other][:number]},
    ]
    return fitted(tokenizer, [*messages, {"role": "tool", "content": "r"}]).split("assistant\n")[1].split(END)[0]


@pytest.mark.parametrize("content", [None, "", "I ask."])
def test_arguments_are_json_where_the_template_shows_them_as_they_are(tmp_path: Path, content: str | None) -> None:
    tokenizer = tokenizer_with(
        tmp_path, CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}" + CALLS + "{% endif %}")
    )
    assert called(tokenizer, content, 2) == (content or "") + '<call>f {"day": 1}</call><call>g {"town": "None"}</call>'


def test_calls_without_text_have_null_where_the_template_asks_for_it(tmp_path: Path) -> None:
    either = "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
    tokenizer = tokenizer_with(tmp_path / "either", CHATML.replace("{{ m.content }}", either))
    assert called(tokenizer, "") == called(tokenizer, None) == '<call>f {"day": 1}</call>'
    with pytest.raises(BadRow, match=r"ignores messages\[1\]\.tool_calls"):  # although it used those of other rows
        called(tokenizer, "I ask.")
    extra = CHATML.replace(
        "{{ m.content }}",
        "{% if m.tool_calls %}" + CALLS + "{% endif %}{% if m.content is not none %}[{{ m.content }}]{% endif %}",
    )
    assert called(tokenizer_with(tmp_path / "extra", extra), "") == '<call>f {"day": 1}</call>'


@pytest.mark.parametrize(
    ("shown", "number"),
    [
        ("[CALLS]{{ m.content }}", 1),
        ("{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}", 1),
        ("{{ m.tool_calls[0].function }}", 2),
    ],
)
def test_calls_that_the_template_shows_in_part_are_refused(tmp_path: Path, shown: str, number: int) -> None:
    tokenizer = tokenizer_with(
        tmp_path, CHATML.replace("{{ m.content }}", "{% if m.tool_calls %}" + shown + "{% else %}{{ m.content }}{% endif %}")
    )
    with pytest.raises(BadRow, match=r"ignores messages\[1\]\.tool_calls"):
        called(tokenizer, None, number)


def test_variables_of_the_template_come_from_configuration_and_row(full: Tokenizer, tmp_path: Path) -> None:
    def end(variables: dict[str, Any], row: dict[str, Any]) -> str:
        rows = [{"prompt": "Rain?", **row}]
        return rl_text(full, rows, tmp_path / "rows.jsonl", chat_template_kwargs=variables).rpartition("assistant\n")[2]

    off = {"enable_thinking": False}
    assert end({}, {}) == ""
    assert end(off, {}) == end({}, {"chat_template_kwargs": off}) == "<think></think>"
    assert end(off, {"chat_template_kwargs": {"enable_thinking": True}}) == ""
    with pytest.raises(BrokenRules, match=r"data\.chat_template_kwargs\.enable_thinkin=false: the chat template has no such"):
        end({"enable_thinkin": False}, {})
    with pytest.raises(BrokenRules, match=r"rows\.jsonl:1: the chat template has no variable thinks"):
        end({}, {"chat_template_kwargs": {"thinks": True}})


def test_date_of_a_template_is_the_same_on_every_day(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%d %b %Y') }}, {{ strftime_now('%H:%M') }} " + CHATML
    tokenizer = tokenizer_with(tmp_path / "model", dated)
    rows, path = [{"prompt": "Rain?", "answer": "Yes"}], tmp_path / "rows.jsonl"
    assert rl_text(tokenizer, rows, path).startswith("26 Jul 2024, 00:00 <|im_start|>")
    own = {"chat_template_kwargs": {"strftime_now": "2026-01-31T12:30"}}
    assert rl_text(tokenizer, rows, path, **own).startswith("31 Jan 2026, 12:30 <|im_start|>")
    with pytest.raises(BrokenRules, match=r"strftime_now must be a date \(got 'today'\)\. Write it as 2024-07-26\."):
        rl_text(tokenizer, rows, path, chat_template_kwargs={"strftime_now": "today"})
    assert writes_date(tmp_path / "model")
    assert not writes_date(tokenizer_with(tmp_path / "plain", CHATML).path)


def test_tools_and_variables_need_a_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for row in ({"tools": [TOOL]}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(BrokenRules, match=r"rows\.jsonl:1: .* require a chat template"):
            rl_text(tokenizer, [{"prompt": "1", **row}], tmp_path / "rows.jsonl")
    with pytest.raises(BrokenRules, match=r"data\.chat_template_kwargs=.*requires a chat template"):
        rl_text(tokenizer, [{"prompt": "1"}], tmp_path / "rows.jsonl", chat_template_kwargs={"a": 1})
    with pytest.raises(ValueError, match="tokenize is not a variable of a chat template"):
        DataConfig(chat_template_kwargs={"tokenize": True})


def test_own_system_message_replaces_the_configured_one(plain: Tokenizer, tmp_path: Path) -> None:
    own = {"messages": [{"role": "system", "content": "Own."}, USER]}
    text = rl_text(plain, [own], tmp_path / "rows.jsonl", system_prompt="Add.")
    assert text.startswith(f"{START}system\nOwn.{END}{START}user\nRain?")
    config = DataConfig(
        source="jsonl", path=tmp_path / "rows.jsonl", system_prompt="Add.", rewards={}, max_prompt_tokens=4096
    ).model_copy(update={"rewards": DataConfig.model_validate({"rewards": {"own": "a.b:c"}}).rewards})
    selection = make_stream(config, plain, seed=0, is_trained_on=False).selection
    assert selection.notes == ("1 rows have a system message, which replaces data.system_prompt",)


def test_rows_that_differ_only_in_their_tools_are_kept(full: Tokenizer, tmp_path: Path) -> None:
    other = {**TOOL, "function": {**TOOL["function"], "name": "g"}}  # type: ignore[dict-item]
    rows = [{"messages": [USER], "tools": [tool]} for tool in (TOOL, other, TOOL)]
    config = {"source": "jsonl", "path": rows_in(tmp_path / "a.jsonl", rows), "max_prompt_tokens": 999}
    section = DataConfig.model_validate({**config, "rewards": {"own": "a.b:c"}})
    selection = make_stream(section, full, seed=0, is_trained_on=False).selection
    assert (selection.num_training + selection.num_heldout, selection.left_out) == (2, {"duplicates": 1})
