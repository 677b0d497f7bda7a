"""The byte-level tokenizer: any text, the chat template with tools, and tokens from a corpus."""

from pathlib import Path

import pytest

from examples.agents.byte_model import create_byte_model, write_byte_tokenizer
from titanrl.config.sections import ModelConfig, RecipeConfig
from titanrl.data.tokenizer import EOS_ID, MAX_TOKEN_CHARS, Tokenizer, load_tokenizer
from titanrl.environments import Tool
from titanrl.models.directory import open_model
from titanrl.rollout.renderers import make_renderer

ADD = Tool(name="add", description="Add.", parameters={"type": "object", "properties": {"sum": {"type": "string"}}})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    assert write_byte_tokenizer(folder) == 272
    return load_tokenizer(folder)


def test_any_text_encodes_and_decodes(tokenizer: Tokenizer) -> None:
    for text in ("plain", "naïve \U0001f600\t\n\x00", "".join(map(chr, range(1, 1000))), "<|im_end|> <tool_call>"):
        ids = tokenizer.encode(text)
        assert EOS_ID not in ids
        assert tokenizer.decode(ids) == text


def test_template_renders_and_parses_tool_calls(tokenizer: Tokenizer) -> None:
    renderer = make_renderer(tokenizer, "template", {})
    assert renderer.stop_ids[0] == EOS_ID
    rendered = tokenizer.decode_raw(renderer.render([{"role": "user", "content": "1+1?"}], [ADD]))
    assert rendered.startswith("<|im_start|>tools\n{")
    assert rendered.endswith("<|im_end|><|im_start|>user\n1+1?<|im_end|><|im_start|>assistant\n")
    said = '<tool_call>{"name": "add", "arguments": {"sum": "1+1"}}</tool_call>'
    message = renderer.parse([*tokenizer.encode(said), EOS_ID], [ADD])
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"sum": "1+1"}}


def test_corpus_shortens_its_text(tmp_path: Path) -> None:
    corpus = "You are a helpful agent that answers questions.\n" * 20
    size = write_byte_tokenizer(tmp_path, corpus, num_merges=1000)
    short = load_tokenizer(tmp_path)
    assert 272 < size <= 368
    assert len(short.encode(corpus)) < len(corpus.encode()) / 4
    assert max(map(len, short.vocabulary)) <= MAX_TOKEN_CHARS
    assert short.decode(short.encode("naïve " + corpus)) == "naïve " + corpus


def test_model_has_a_row_for_each_token(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_byte_model(folder, RecipeConfig(hidden_size=32, max_positions=4096), seed=0)
    model = open_model(folder, ModelConfig().family)
    assert model.hf["vocab_size"] == 272
    with pytest.raises(FileExistsError):
        create_byte_model(folder, RecipeConfig(hidden_size=32, max_positions=4096), seed=0)
