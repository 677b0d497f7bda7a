"""Renderers: conversion of messages to tokens, and the guarantee that a turn only appends to earlier tokens."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from titanrl.data.recipe import write_tokenizer
from titanrl.data.tokenizer import load_tokenizer
from titanrl.environments import Tool
from titanrl.rollout.renderers import LibraryRenderer, PlainRenderer, Renderer, make_renderer

QWEN3 = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
ADD = Tool(name="add", description="Add.", parameters={"type": "object", "properties": {"sum": {"type": "string"}}})
QUESTION = [{"role": "user", "content": "What is 1 + 1?"}]
RESULT = [{"role": "tool", "tool_call_id": "call_0", "content": "2"}]


@pytest.fixture(scope="module")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a byte-level tokenizer with the special tokens and the model type of Qwen3."""
    folder = tmp_path_factory.mktemp("qwen3")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN3[:3])})
    tokenizer.add_tokens(list(QWEN3[3:]))
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return folder


def automatic(folder: Path, **options: object) -> Renderer:
    return make_renderer(load_tokenizer(folder), "auto", options)


def test_automatic_renderer_follows_the_model(qwen3_dir: Path, tmp_path: Path) -> None:
    assert isinstance(automatic(qwen3_dir), LibraryRenderer)
    write_tokenizer(tmp_path)
    assert isinstance(automatic(tmp_path), PlainRenderer)


def test_error_names_an_unknown_model_family(qwen3_dir: Path, tmp_path: Path) -> None:
    for file in qwen3_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt9"}))
    with pytest.raises(ValueError, match=r"data\.environment\.renderer: .*models of type gpt9 \(got auto\)\. Name a renderer"):
        automatic(tmp_path)


@pytest.mark.parametrize(
    ("name", "options"), [("qwen9", {}), ("qwen3", {"enable_thinkin": False}), ("gpt-oss", {})], ids=["name", "option", "model"]
)
def test_error_names_an_unusable_renderer(qwen3_dir: Path, name: str, options: dict[str, object]) -> None:
    with pytest.raises(
        ValueError, match=rf"data\.environment\.renderer: {name} cannot be used with .*Choose another renderer\."
    ):
        make_renderer(load_tokenizer(qwen3_dir), name, options)


def test_conversation_with_a_tool_is_one_sequence(qwen3_dir: Path) -> None:
    renderer, tokenizer = automatic(qwen3_dir, enable_thinking=False), load_tokenizer(qwen3_dir)
    prompt = renderer.render(QUESTION, [ADD])
    reply = '<tool_call>\n{"name": "add", "arguments": {"sum": "1+1"}}\n</tool_call><|im_end|>'
    completion = tokenizer.encode(reply, control_tokens=True)
    assert completion[-1] in renderer.stop_ids
    message = renderer.parse(completion, [ADD])
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"sum": "1+1"}}
    added = renderer.extend(prompt, completion, RESULT, [ADD])
    assert added is not None
    text = "".join(tokenizer.token_text(token) for token in added)
    assert text.startswith("\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    whole = renderer.render([*QUESTION, message, *RESULT], [ADD])
    assert whole[: len(prompt) - 8] == prompt[:-8]


def test_malformed_call_keeps_its_text(qwen3_dir: Path) -> None:
    renderer, tokenizer = automatic(qwen3_dir, enable_thinking=False), load_tokenizer(qwen3_dir)
    message = renderer.parse(
        tokenizer.encode('<tool_call>\n{"name": "add", "arg\n</tool_call><|im_end|>', control_tokens=True), [ADD]
    )
    (call,) = message["tool_calls"]
    assert isinstance(call["function"]["arguments"], str)
    assert '"arg' in call["function"]["arguments"]


def test_extension_keeps_the_sampled_tokens_unchanged(qwen3_dir: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    draw = random.Random(0)
    for folder, num in ((qwen3_dir, 2_000), (tmp_path, 8_000)):
        renderer, tokenizer = automatic(folder), load_tokenizer(folder)
        ids = sorted(tokenizer.vocabulary.values())
        for _ in range(num):
            completion = draw.choices(ids, k=draw.randrange(1, 12)) + draw.choice([[], [renderer.stop_ids[0]]])
            prompt = renderer.render([{"role": "user", "content": "2"}], [ADD])
            added = renderer.extend(prompt, completion, RESULT, [ADD])
            if added is None:
                continue  # a new segment
            tail = renderer.extend(prompt, [*tokenizer.encode("2"), renderer.stop_ids[0]], RESULT, [ADD])
            assert tail is not None
            assert added[-len(tail) :] == tail, "the messages are the same after every completion"
            has_ended = completion[-1] == renderer.stop_ids[0]
            assert len(added) - len(tail) <= (0 if has_ended else 2), "only the end of the turn is added"


def test_stripped_thinking_starts_a_new_segment(qwen3_dir: Path) -> None:
    tokenizer = load_tokenizer(qwen3_dir)
    completion = tokenizer.encode("<think>\nhm\n</think>\n\nIt is 2.<|im_end|>", control_tokens=True)
    more = [{"role": "user", "content": "Sure?"}]
    prompt = automatic(qwen3_dir).render(QUESTION, ())
    assert automatic(qwen3_dir).extend(prompt, completion, more, ()) is None
    assert automatic(qwen3_dir, thinking_retention="all").extend(prompt, completion, more, ()) is not None
