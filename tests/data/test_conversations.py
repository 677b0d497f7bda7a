"""Masks of conversations cover exactly what the model would generate, after exactly the prompt that it would receive."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from tests.chat import render_chat
from tests.data.conftest import REPLY, TURNS, with_template
from titanrl.config.schema import Config
from titanrl.config.sections import TrainOn
from titanrl.data.entries import BadRow
from titanrl.data.examples import read_examples, render_conversation
from titanrl.data.tokenizer import ALPHABET, EOS_ID, ChatFormat, Tokenizer, load_tokenizer

# Like the templates of models that think: the thoughts of earlier messages are left out.
FORGETTING = TURNS.replace("m.content", "m.content if loop.last else m.content.split(';')[-1]")


def conversation(*contents: str) -> list[dict[str, str]]:
    """Return a conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]


def trained(tokenizer: Tokenizer, messages: list[dict[str, str]], train_on: TrainOn) -> list[str]:
    """Return the text of each contiguous run of trained tokens."""
    example = render_conversation(ChatFormat(tokenizer), messages, train_on)
    runs = groupby(zip(example.token_ids.tolist(), example.mask.tolist(), strict=True), key=lambda pair: pair[1])
    return ["".join(tokenizer.token_text(token) for token, _ in run) for is_trained, run in runs if is_trained]


def test_mask_covers_the_replies_and_the_tokens_that_end_them(chat: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Add."},
        *conversation("1+2", "3", "4+5", "9"),
        {"role": "user", "content": "Bye"},
    ]
    assert trained(chat, messages, "assistant") == ["3<eos>", "9<eos>"]
    assert trained(chat, messages, "last") == ["9<eos>"]
    (everything,) = trained(chat, messages, "all")
    assert everything == chat.chat_text(messages, reply_follows=False)


def test_tokens_end_with_the_last_reply(chat: Tokenizer) -> None:
    example = render_conversation(
        ChatFormat(chat), [*conversation("1+2", "3"), {"role": "user", "content": "Bye"}], "assistant"
    )
    # 2 + 0x33 - 0x20 is the id of '3'.
    assert example.token_ids.tolist() == [*chat.encode_chat("[user] 1+2<eos> [assistant] "), 21, EOS_ID]
    assert example.mask.tolist() == [False] * (len(example.token_ids) - 2) + [True, True]


@settings(deadline=None, max_examples=40)
@given(contents=st.lists(st.text(ALPHABET, max_size=9), min_size=2, max_size=7), has_system=st.booleans())
@example(contents=["", "<think>"], has_system=False)
def test_each_reply_follows_the_prompt_of_its_generation(chat: Tokenizer, contents: list[str], has_system: bool) -> None:
    messages = [{"role": "system", "content": "Add."}] * has_system + conversation(*contents)
    example = render_conversation(ChatFormat(chat), messages, "assistant")
    expected = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render_chat(chat, messages[:index])
            reply = [*chat.encode(message["content"]), EOS_ID]  # a tag such as <think> is one token
            expected += [False] * (len(prompt) - len(expected)) + [True] * len(reply)
            assert example.token_ids[: len(expected)].tolist() == [*prompt, *reply]
    assert example.mask.tolist() == expected


def test_template_that_changes_earlier_messages_requires_train_on_last(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, FORGETTING + REPLY)
    messages = conversation("1+2", "1,2;3", "4+5", "4,5;9")
    with pytest.raises(BadRow, match=r"does not extend the conversation verbatim at messages\[1\]") as refused:
        render_conversation(ChatFormat(tokenizer), messages, "assistant")
    assert refused.value.fix == "set sft.train_on to last, or write a row per reply, which ends with it"
    assert trained(tokenizer, messages, "last") == ["4,5;9<eos>"]
    assert "[assistant] 3<eos>" in "".join(trained(tokenizer, messages, "all"))


THINKING = TURNS.replace("m.content", "m.content.split('</think>')[-1]") + REPLY.replace("] ", "] <think>")


@pytest.mark.parametrize("contents", [["1+2", "3"], ["1+2", "<think>1,2</think>3"], ["1", "2", "1+2", "<think>1,2</think>3"]])
def test_template_that_begins_another_reply_needs_texts(tmp_path: Path, contents: list[str]) -> None:
    # As of DeepSeek-R1: prompts end with <think>, which messages of the assistant lose.
    with pytest.raises(BadRow, match="does not extend the conversation verbatim") as refused:
        render_conversation(ChatFormat(with_template(tmp_path, THINKING)), conversation(*contents), "assistant")
    assert "with data.chat_template: never and data.control_tokens: true" in refused.value.fix
    row = {"prompt": "[user] 1+2<eos> [assistant] <think>", "completion": "1,2</think>3"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    data = {"chat_template": "never", "control_tokens": True}
    config = Config.model_validate({"name": "a", "num_steps": 1, "sft": {"path": tmp_path / "a.jsonl"}, "data": data})
    tokenizer = load_tokenizer(tmp_path)
    (example,) = read_examples(config, tokenizer).training
    assert example.token_ids.tolist() == tokenizer.encode_chat("[user] 1+2<eos> [assistant] <think>1,2</think>3<eos>")
    assert "".join(map(tokenizer.token_text, example.token_ids[example.mask].tolist())) == "1,2</think>3<eos>"


@pytest.mark.parametrize("train_on", ["assistant", "last"])
def test_reply_that_loses_its_reasoning_is_refused(tmp_path: Path, train_on: TrainOn) -> None:
    tokenizer = with_template(tmp_path, THINKING.replace("<think>", ""))
    assert trained(tokenizer, conversation("1+2", "3"), train_on) == ["3<eos>"]
    with pytest.raises(BadRow, match=r"leaves out a part of messages\[1\], such as the reasoning before </think>"):
        render_conversation(ChatFormat(tokenizer), conversation("1+2", "<think>1,2</think>3"), train_on)


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (
            TURNS.replace("<eos>", "") + REPLY,
            conversation("1+2", "3"),
            "does not end messages[1] with a token that ends a completion",
        ),
        (
            "{{ raise_exception('no system') }}",
            conversation("1+2", "3"),
            "the chat template rejects the conversation: no system",
        ),
        (TURNS + REPLY, conversation("1+2"), "no message has the role assistant"),
        (TURNS + REPLY, conversation("", "hi", "1+2", "3")[1:], "so there is no prompt that it replies to"),
        (TURNS + REPLY, conversation("1+2", "caf\u00e9"), "no token for some characters"),
        (TURNS + "{% if add_generation_prompt %}[bot] {% endif %}", conversation("1", "2"), "verbatim at messages[1]"),
    ],
)
def test_unsuitable_conversation_is_rejected(tmp_path: Path, template: str, messages: Any, problem: str) -> None:
    with pytest.raises(BadRow) as refused:
        render_conversation(ChatFormat(with_template(tmp_path, template)), messages, "assistant")
    assert problem in refused.value.problem


def test_reply_that_shares_a_token_with_its_prompt_is_rejected(tmp_path: Path) -> None:
    letters = sorted({*ALPHABET})
    vocab = {token: index for index, token in enumerate(["<eos>", *letters, " 3"])}
    backend = Backend(models.BPE(vocab, [(" ", "3")]))
    backend.pre_tokenizer = pre_tokenizers.Split("]", "merged_with_previous")
    backend.add_special_tokens(["<eos>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TURNS + REPLY}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert trained(tokenizer, conversation("3", "5"), "assistant") == ["5<eos>"]
    with pytest.raises(BadRow, match=r"messages\[1\] is tokenized together with the text before it"):
        render_conversation(ChatFormat(tokenizer), conversation("5", "3"), "assistant")
