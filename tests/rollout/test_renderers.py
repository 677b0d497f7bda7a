"""Renderers: conversion of messages to tokens, and the guarantee that a turn only appends to earlier tokens."""

import asyncio
import json
import random
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from titanrl.data.recipe import write_tokenizer
from titanrl.data.tokenizer import load_tokenizer
from titanrl.environments import Message, Observation, Tool, ToolEnvironment
from titanrl.environments.results import checked
from titanrl.rollout.renderers import LibraryRenderer, PlainRenderer, Renderer, TurnEnd, make_renderer

QWEN3 = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
ADD = Tool(name="add", description="Add.", parameters={"type": "object", "properties": {"sum": {"type": "string"}}})
QUESTION: list[Message] = [{"role": "user", "content": "What is 1 + 1?"}]
RESULT: list[Message] = [{"role": "tool", "tool_call_id": "call_0", "content": "2"}]


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


def sampled(folder: Path, reply: str) -> list[int]:
    """Return the tokens of a reply and of the turn's end."""
    tokenizer = load_tokenizer(folder)
    return [*tokenizer.encode(reply), tokenizer.vocabulary["<|im_end|>"]]


def turn_end(renderer: Renderer, prompt: list[int], completion: list[int]) -> TurnEnd:
    """Return the end of the policy's first turn after `QUESTION`."""
    return TurnEnd(token_ids=prompt, completion_ids=completion, messages=[*QUESTION, renderer.parse(completion, [ADD])])


def add(sum: str) -> str:
    """Add numbers.

    Args:
        sum: The sum.
    """
    return str(sum)


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
    completion = sampled(qwen3_dir, '<tool_call>\n{"name": "add", "arguments": {"sum": "1+1"}}\n</tool_call>')
    assert completion[-1] in renderer.stop_ids
    message = renderer.parse(completion, [ADD])
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"sum": "1+1"}}
    added = renderer.extend(turn_end(renderer, prompt, completion), RESULT, [ADD])
    assert added is not None
    text = "".join(tokenizer.token_text(token) for token in added)
    assert text.startswith("\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    whole = renderer.render([*QUESTION, message, *RESULT], [ADD])
    assert whole[: len(prompt) - 8] == prompt[:-8]


def test_malformed_call_keeps_its_text(qwen3_dir: Path) -> None:
    renderer = automatic(qwen3_dir, enable_thinking=False)
    message = renderer.parse(sampled(qwen3_dir, '<tool_call>\n{"name": "add", "arg\n</tool_call>'), [ADD])
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
            prompt = renderer.render(QUESTION, [ADD])
            added = renderer.extend(turn_end(renderer, prompt, completion), RESULT, [ADD])
            if added is None:
                continue  # a new segment
            tail = renderer.extend(turn_end(renderer, prompt, [*tokenizer.encode("2"), renderer.stop_ids[0]]), RESULT, [ADD])
            assert tail is not None
            assert added[-len(tail) :] == tail, "the messages are the same after every completion"
            has_ended = completion[-1] == renderer.stop_ids[0]
            assert len(added) - len(tail) <= (0 if has_ended else 2), "only the end of the turn is added"


MORE = [{"role": "user", "content": "Sure?"}]


@pytest.mark.parametrize("reply", ["<think>\nhm\n</think>\n\nIt is 2.", "<think>\n\n</think>\n\nIt is 2.", "<think>hm"])
def test_stripped_thinking_starts_a_new_segment(qwen3_dir: Path, reply: str) -> None:
    completion = sampled(qwen3_dir, reply)
    renderer = automatic(qwen3_dir)
    end = turn_end(renderer, renderer.render(QUESTION, ()), completion)
    assert renderer.extend(end, MORE, ()) is None
    if "</think>" in reply:
        assert automatic(qwen3_dir, thinking_retention="all").extend(end, MORE, ()) is not None


@pytest.mark.parametrize("reply", ["It is 2.", "  It is 2. \n", '<tool_call>\n{"name":"add","arguments":{}}\n</tool_call>', ""])
def test_user_message_is_appended_if_the_template_strips_nothing(qwen3_dir: Path, reply: str) -> None:
    renderer = automatic(qwen3_dir)
    end = turn_end(renderer, renderer.render(QUESTION, [ADD]), sampled(qwen3_dir, reply))
    added = renderer.extend(end, MORE, [ADD])
    assert added is not None
    text = "".join(load_tokenizer(qwen3_dir).token_text(token) for token in added)
    assert text == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


def test_thinking_of_an_earlier_turn_is_stripped_once(qwen3_dir: Path) -> None:
    # The first reply thinks, so the second question starts a segment. The third one only appends to it.
    renderer = automatic(qwen3_dir)
    history = [*QUESTION, renderer.parse(sampled(qwen3_dir, "<think>\nhm\n</think>\n\n2"), ()), *MORE]
    prompt = renderer.render(history, ())
    completion = sampled(qwen3_dir, "Yes.")
    end = TurnEnd(token_ids=prompt, completion_ids=completion, messages=[*history, renderer.parse(completion, ())])
    assert renderer.extend(end, MORE, ()) is not None


CALL = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (CALL % '{"sum": "1+1"}', {"sum": "1+1"}),
        (CALL % '{"sum": 12345678901234567890}', {"sum": 12345678901234567890}),
        (CALL % '{"sum": "\\u0000\\ud800"}', {"sum": "\ufffd\ufffd"}),
        (CALL % '{"sum": NaN}', None),
        (CALL % '{"sum": 1e999}', None),
        (CALL % '{"sum": 1, "sum": 2}', None),
        (CALL % f'{{"sum": {"9" * 5000}}}', None),
        (CALL % f'{{"sum": {"[" * 40}{"]" * 40}}}', None),
        (CALL % f'{{"sum": {"[" * 2000}{"]" * 2000}}}', None),
        (CALL % "[1]", None),
        (CALL % '"1"', None),
        (CALL % "null", None),
        ('<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>', None),
        ('<tool_call>\n{"name": ["add"], "arguments": {}}\n</tool_call>', None),
        ("<tool_call>\n5\n</tool_call>", None),
        ("<tool_call>\n</tool_call>", None),
        ("<tool_call>", None),
    ],
    ids=count(),
)
def test_calls_are_valid_or_malformed(qwen3_dir: Path, written: str, arguments: dict[str, object] | None) -> None:
    two = replace(ADD, parameters={"type": "object", "properties": {"sum": {}, "base": {}}})
    for renderer in (automatic(qwen3_dir, enable_thinking=False), PlainRenderer(load_tokenizer(qwen3_dir))):
        message = renderer.parse(sampled(qwen3_dir, written), [two])
        (call,) = message["tool_calls"]
        assert isinstance(call["function"]["name"], str)
        written_as = call["function"]["arguments"]
        assert isinstance(written_as, str) if arguments is None else written_as == arguments
        renderer.render([*QUESTION, message, *RESULT], [two])  # the message can be rendered again
        environment = ToolEnvironment(add)
        reply = asyncio.run(environment.step(message))
        assert isinstance(reply, Observation)
        valid = checked(reply)
        assert isinstance(valid, Observation)
        assert valid.messages == reply.messages
        assert environment.counts.malformed == (arguments is None)


def test_random_completions_are_parsed_and_rendered_again(qwen3_dir: Path) -> None:
    draw, tokenizer = random.Random(1), load_tokenizer(qwen3_dir)
    ids = sorted(tokenizer.vocabulary.values())
    marks = [tokenizer.vocabulary[text] for text in QWEN3] * 20
    for renderer in (automatic(qwen3_dir), PlainRenderer(tokenizer)):
        for _ in range(300):
            completion = draw.choices([*ids, *marks, *tokenizer.encode('{"name":"add","arguments":{}}')], k=draw.randrange(30))
            message = renderer.parse(completion, [ADD])
            valid = checked(Observation(messages=[message, *RESULT]))
            assert isinstance(valid, Observation)
            assert valid.messages[0]["content"] == message["content"]
            renderer.render([*QUESTION, message, *RESULT], [ADD])
