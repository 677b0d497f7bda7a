"""Directories of many kinds: token ids, BOS and end tokens against transformers."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from tests.chat import render_chat
from tests.data.conftest import CHATML, CHATML_TOKENS, byte_level, write_model_dir
from titanrl.config.data import DataConfig
from titanrl.data.streams import make_encoder
from titanrl.data.tokenizer import load_tokenizer

LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")
ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
TEXTS = ("Hi", "", "How much is 12 plus 34?", " a  b\n\n c", "caf\u00e9 \U0001f600 \u4f60\u597d", "<|im_ end|> [INST] </s >")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}]

Build = Callable[[Path], tuple[str, ...]]
"""Writes a directory and returns the tokens that end a completion."""


def flags(content: str, **options: bool) -> dict[str, Any]:
    plain = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, **options}


def config(directory: Path, **values: Any) -> None:
    (directory / "config.json").write_text(json.dumps(values))


def written(*ends: str, specials: Sequence[str] = CHATML_TOKENS, bos: str | None = None, **settings: Any) -> Build:
    """Return a function that writes a byte-level tokenizer; its first end token is the one that the settings name."""

    def write(directory: Path) -> tuple[str, ...]:
        write_model_dir(directory, byte_level(specials, bos=bos), eos=ends[0], **settings)
        return ends

    return write


def llama(*ends: str, **settings: Any) -> Build:
    return written(*ends, specials=LLAMA, bos_token=LLAMA[0], **settings)


WITH_BOS = "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content }}<|eot_id|>{% endfor %}"
WRITTEN: dict[str, Build] = {
    "chatml": written("<|im_end|>", chat_template=CHATML),
    "chatml_base": written("<|endoftext|>", "<|im_end|>", chat_template=CHATML),
    "null_template": written("<|im_end|>", chat_template=None),
    "eos_is_unk": written(
        "<|endoftext|>", specials=["<|endoftext|>"], unk_token="<|endoftext|>", bos_token="<|endoftext|>", chat_template=ROLES
    ),
    "llama_bos": llama("<|end_of_text|>", bos=LLAMA[0]),
    "llama_chat": llama("<|end_of_text|>", "<|eot_id|>", bos=LLAMA[0], chat_template=WITH_BOS),  # as the post-processor does
    "bos_without_template_bos": llama("<|end_of_text|>", bos=LLAMA[0], chat_template=ROLES),
    "bos_by_option": llama("<|end_of_text|>", add_bos_token=True),
    "no_bos_by_option": llama("<|end_of_text|>", bos=LLAMA[0], add_bos_token=False),
}


def several_end_tokens(directory: Path) -> tuple[str, ...]:
    backend = byte_level()
    write_model_dir(directory, backend, eos="<|im_end|>", chat_template=CHATML)
    ids = [backend.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return ("<|im_end|>", "<|endoftext|>")


def template_file(directory: Path) -> tuple[str, ...]:
    write_model_dir(directory, byte_level(), eos="<|endoftext|>", chat_template="{{ old }}")
    (directory / "chat_template.jinja").write_text(CHATML)
    return ("<|endoftext|>", "<|im_end|>")


def named_templates(directory: Path) -> tuple[str, ...]:
    """Write templates as older versions of transformers do: a list, with another one for tools."""
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools | tojson }}" + CHATML}]
    write_model_dir(directory, byte_level(), eos="<|im_end|>", chat_template=named)
    return ("<|im_end|>",)


def additional_templates(directory: Path) -> tuple[str, ...]:
    template_file(directory)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}" + CHATML)
    return ("<|endoftext|>", "<|im_end|>")


def added_tokens(directory: Path) -> tuple[str, ...]:
    """Write control tokens that only `tokenizer_config.json` has."""
    backend = byte_level(CHATML_TOKENS[:1])
    first = backend.token_to_id("<|endoftext|>")
    added = {str(first + number): flags(token) for number, token in enumerate(CHATML_TOKENS)}
    write_model_dir(directory, backend, eos="<|endoftext|>", chat_template=CHATML, added_tokens_decoder=added)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, first + 2]}))
    return ("<|endoftext|>", "<|im_end|>")


def added_tokens_file(directory: Path) -> tuple[str, ...]:
    backend = byte_level()
    added = {str(backend.token_to_id(token)): flags(token) for token in CHATML_TOKENS}
    added[str(backend.token_to_id("<|im_end|>") + 1)] = flags("<think>", special=False)
    write_model_dir(directory, backend, eos="<|im_end|>", chat_template=CHATML, added_tokens_decoder=added)
    return ("<|im_end|>",)


def stripping_tokens(directory: Path) -> tuple[str, ...]:
    """Write control tokens that take the white space around them."""
    backend = byte_level(CHATML_TOKENS[:1])
    backend.add_special_tokens(
        [AddedToken(token, lstrip=True, rstrip=True, normalized=False, special=True) for token in CHATML_TOKENS[1:]]
    )
    write_model_dir(directory, backend, eos="<|endoftext|>", chat_template=CHATML)
    return ("<|endoftext|>", "<|im_end|>")


def registered_class(directory: Path) -> tuple[str, ...]:
    """Write a model type for which transformers replaces the class that the directory names."""
    write_model_dir(directory, byte_level(), eos="<|endoftext|>", chat_template=CHATML)
    config(directory, model_type="qwen2")
    return ("<|endoftext|>", "<|im_end|>")


def older_files(directory: Path) -> tuple[str, ...]:
    """Write vocab.json and merges.txt instead of tokenizer.json."""
    directory.mkdir(exist_ok=True)
    backend = byte_level()
    backend.model.save(str(directory))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    settings |= {"additional_special_tokens": list(CHATML_TOKENS), "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return ("<|im_end|>",)


def metaspace(directory: Path) -> tuple[str, ...]:
    """Write a tokenizer that was converted from sentencepiece, with bytes for unknown characters."""
    vocab = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    vocab |= {letter: len(vocab) + index for index, letter in enumerate("\u2581abcdefghijklmnopqrstuvwxyzH")}
    vocab |= {"\u2581H": len(vocab), "\u2581Hi": len(vocab) + 1}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [("\u2581", "H"), ("\u2581H", "i")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    names = {"bos_token": "<s>", "unk_token": "<unk>", "chat_template": template}
    write_model_dir(directory, backend, eos="</s>", **names)
    return ("</s>",)


def metaspace_class(directory: Path) -> tuple[str, ...]:
    """Write the same tokenizer with the class that transformers builds itself."""
    metaspace(directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizer"}))
    config(directory, model_type="llama")
    return ("</s>",)


def sentencepiece_model(directory: Path) -> tuple[str, ...]:
    """Write only a sentencepiece model."""
    directory.mkdir(exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["How much is 12 plus 34? It is 46.", "Hi a b c"] * 20),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    config(directory, model_type="llama")
    return ("</s>",)


def truncating(directory: Path) -> tuple[str, ...]:
    """Write a tokenizer.json that cuts and pads every text."""
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    write_model_dir(directory, backend, eos="<|im_end|>", chat_template=CHATML)
    return ("<|im_end|>",)


def word_level(directory: Path) -> tuple[str, ...]:
    """Write a tokenizer without a token for most characters."""
    vocab = {token: index for index, token in enumerate(["<unk>", "</s>", "Hi", "a", "b", "c"])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<unk>", "</s>"])
    write_model_dir(directory, backend, eos="</s>", unk_token="<unk>")
    return ("</s>",)


KINDS: dict[str, Build] = WRITTEN | {
    build.__name__: build
    for build in (
        *(several_end_tokens, template_file, named_templates, additional_templates, added_tokens, added_tokens_file),
        *(stripping_tokens, registered_class, older_files, metaspace, metaspace_class, sentencepiece_model),
        *(truncating, word_level),
    )
}


@pytest.mark.parametrize("kind", KINDS)
def test_directory_is_read_as_by_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    ends = KINDS[kind](tmp_path)
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert [tokenizer.token_text(token) for token in tokenizer.stop_ids] == list(ends)
    assert tokenizer.chat_template == bool(reference.chat_template)
    encode = make_encoder(DataConfig(max_prompt_tokens=64), tokenizer)
    for text in TEXTS:
        expected = reference(text).input_ids
        if reference.unk_token_id in expected and kind == "word_level":
            with pytest.raises(ValueError, match="no token for some characters"):
                tokenizer.encode_start(text)
            continue
        assert tokenizer.encode_start(text) == expected
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids
        if not tokenizer.chat_template:
            assert encode({"question": text}) == expected
            continue
        messages = [{"role": "user", "content": text}]
        for tools in (None, TOOLS):
            rendered = reference.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
            assert render_chat(tokenizer, messages, tools=tools) == rendered
            assert rendered[:2].count(reference.bos_token_id) <= 1, "one BOS at most"
        if text:
            assert encode({"question": text}) == render_chat(tokenizer, messages)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word_level"])
def test_special_text_is_text_in_every_directory(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    special = [token for token in tokenizer.vocabulary if tokenizer.is_special(tokenizer.vocabulary[token])]
    assert special
    attack = "a" + "b".join(special)
    ids = tokenizer.encode(attack)
    assert not any(map(tokenizer.is_special, ids))
    assert "".join(re.split(r"\s+", tokenizer.decode(ids))) == attack
    if tokenizer.chat_template:
        counts = [
            sum(map(tokenizer.is_special, render_chat(tokenizer, [{"role": "user", "content": text}])))
            for text in ("a", attack)
        ]
        assert counts[0] == counts[1]


def test_text_with_control_tokens_has_one_bos(tmp_path: Path) -> None:
    WRITTEN["llama_bos"](tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    (bos,) = tokenizer.start_ids
    assert tokenizer.encode_start(f"{LLAMA[0]}a", control_tokens=True) == [bos, *tokenizer.encode("a")]
    assert tokenizer.encode_start("a", control_tokens=True) == [bos, *tokenizer.encode("a")]
    assert tokenizer.encode_start(f"{LLAMA[0]}a") == [bos, *tokenizer.encode(f"{LLAMA[0]}a")]


def test_unreadable_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path}: transformers cannot load the tokenizer: "):
        load_tokenizer(tmp_path)
