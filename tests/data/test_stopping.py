"""Completions end at the end of a turn in the chat template and at stop texts, which may span tokens."""

import json
from pathlib import Path

import pytest

from tests.data.conftest import CHATML, byte_level, write_model_dir
from titanrl.data.examples import render_conversation
from titanrl.data.tokenizer import ChatFormat, Tokenizer, export_stop_ids, load_tokenizer

QUESTION = [{"role": "user", "content": "Hi"}]
EURO = "1 \u20ac!"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A base model with ChatML: the only EOS token is <|endoftext|>, but turns end with <|im_end|>."""
    directory = write_model_dir(
        tmp_path_factory.mktemp("base"), byte_level(plain=("</turn>",)), eos="<|endoftext|>", chat_template=CHATML
    )
    return load_tokenizer(directory)


def test_end_of_a_turn_is_a_stop_token(base: Tokenizer) -> None:
    ids = base.vocabulary
    assert base.eos_ids == (ids["<|endoftext|>"],)
    assert base.stop_ids == (ids["<|endoftext|>"], ids["<|im_end|>"])
    example = render_conversation(ChatFormat(base), [*QUESTION, {"role": "assistant", "content": "Yes."}], "assistant")
    assert example.token_ids[example.mask].tolist()[-1] in base.stop_ids


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CHATML.replace("<|im_end|>", "</turn>"), ["<|endoftext|>", "</turn>"]),
        (CHATML.replace("<|im_end|>", " <|im_end|>"), ["<|endoftext|>", "<|im_end|>"]),
        (CHATML.replace("<|im_end|>", "{{ eos_token }}"), ["<|endoftext|>"]),
        (CHATML.replace("<|im_end|>", "</s>"), ["<|endoftext|>"]),
        ("{{ raise_exception('images only') }}", ["<|endoftext|>"]),
        ("<|im_start|>{{ messages | length }}", ["<|endoftext|>"]),
    ],
    ids=["not-special", "after-a-space", "eos", "text", "other-conversations", "no-reply"],
)
def test_end_of_a_turn_is_found_in_the_template(tmp_path: Path, template: str, ends: list[str]) -> None:
    backend = byte_level(plain=("</turn>",))
    tokenizer = load_tokenizer(write_model_dir(tmp_path, backend, eos="<|endoftext|>", chat_template=template))
    assert tokenizer.stop_ids == tuple(map(backend.token_to_id, ends))


def test_exported_model_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    directory = write_model_dir(tmp_path, byte_level(), eos="<|endoftext|>", chat_template=CHATML)
    tokenizer, file = load_tokenizer(directory), directory / "generation_config.json"
    (directory / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_ids[0]}))
    file.write_text(json.dumps({"temperature": 0.6, "eos_token_id": tokenizer.eos_ids[0]}))
    export_stop_ids(directory)
    assert json.loads(file.read_text()) == {"temperature": 0.6, "eos_token_id": list(tokenizer.stop_ids)}
    written = file.read_bytes()
    export_stop_ids(directory)
    assert file.read_bytes() == written
    export_stop_ids(tmp_path / "without a tokenizer")


@pytest.mark.parametrize(
    ("stop", "kept", "text"),
    [
        ((" \u20ac",), "1 \u20ac", "1"),  # over several tokens, and in the middle of a character
        (("\u20ac",), "1 \u20ac", "1 "),
        (("\u20ac!", "!"), EURO, "1 "),  # both are complete at the same token: the first one
        (("!", "\u20ac!"), EURO, "1 \u20ac"),
        (("x", "1 \u20ac!"), EURO, ""),
    ],
)
def test_stop_text_is_found_at_the_token_that_completes_it(
    base: Tokenizer, stop: tuple[str, ...], kept: str, text: str
) -> None:
    ids = base.encode(EURO + " and more")
    end = next(end for end in range(1, len(ids)) if base.completes_stop(ids[:end], stop))
    assert base.decode(ids[:end]) == kept
    assert base.decode_completion(ids[:end], stop) == text
    assert base.decode_completion(ids[:end], stop, keep_stop=True) == kept


def test_long_stop_text_of_many_bytes_is_found(base: Tokenizer) -> None:
    wanted = "\u7b54\u6848\u7ed3\u675f" * 5  # 20 characters, 60 tokens of a byte each
    ids = base.encode(f"a{wanted}")
    assert len(ids) == 61
    assert [end for end in range(1, 62) if base.completes_stop(ids[:end], [wanted])] == [61]


def test_text_after_the_stop_text_in_its_token_is_cut(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1<answer>")  # <answer> is one token of the quick start's vocabulary
    assert tokenizer.completes_stop(ids, ["<ans"])
    assert tokenizer.decode_completion(ids, ["<ans"]) == "1"
    assert tokenizer.decode_completion(ids, ["<ans"], keep_stop=True) == "1<ans"


def test_stop_text_may_contain_special_tokens(base: Tokenizer) -> None:
    ids = [*base.encode("a"), base.vocabulary["<|im_start|>"], *base.encode("b")]
    assert base.completes_stop(ids[:-1], ["<|im_start|>"])
    assert base.completes_stop(ids, ["a<|im_start|>b"])
    assert not base.completes_stop(ids, ["ab"])
    assert base.decode_completion(ids[:-1], ["<|im_start|>"]) == "a"


def test_tokens_that_end_completions_are_not_text(tmp_path: Path) -> None:
    backend = byte_level(plain=("</turn>",))
    template = CHATML.replace("<|im_end|>", "</turn>")
    tokenizer = load_tokenizer(write_model_dir(tmp_path, backend, eos="<|endoftext|>", chat_template=template))
    ids = tokenizer.encode("a.")
    assert tokenizer.decode_completion([*ids, backend.token_to_id("</turn>")]) == "a."
    assert tokenizer.decode_completion(ids, [ids[-1]]) == "a"
    assert tokenizer.decode_completion(ids, [ids[-1]], keep_stop=True) == "a."
    assert tokenizer.decode_completion([], ["x"]) == ""


def test_ids_without_a_token_do_not_hide_a_stop_text(base: Tokenizer) -> None:
    unknown = max(base.vocabulary.values()) + 1
    ids = [*base.encode("abc")[:2], *([unknown] * 40), *base.encode("c")]
    assert base.completes_stop(ids, ["abc"])
