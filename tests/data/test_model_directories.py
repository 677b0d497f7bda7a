"""Directories of many kinds: token ids, BOS and end tokens against transformers."""

import json
import re
from collections.abc import Callable
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


def chatml(directory: Path) -> tuple[str, ...]:
    write_model_dir(directory, byte_level(), eos="<|im_end|>", chat_template=CHATML)
    return ("<|im_end|>",)


def chatml_base(directory: Path) -> tuple[str, ...]:
    write_model_dir(directory, byte_level(), eos="<|endoftext|>", chat_template=CHATML)
    return ("<|endoftext|>", "<|im_end|>")


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


def null_template(directory: Path) -> tuple[str, ...]:
    write_model_dir(directory, byte_level(), eos="<|im_end|>", chat_template=None)
    return ("<|im_end|>",)


def llama_bos(directory: Path) -> tuple[str, ...]:
    write_model_dir(directory, byte_level(LLAMA, bos=LLAMA[0]), eos="<|end_of_text|>", bos_token=LLAMA[0])
    return ("<|end_of_text|>",)


def llama_chat(directory: Path) -> tuple[str, ...]:
    """Write a template that emits BOS, as the post-processor does."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}\n{{ m.content }}<|eot_id|>{% endfor %}"
    backend = byte_level(LLAMA, bos=LLAMA[0])
    write_model_dir(directory, backend, eos="<|end_of_text|>", bos_token=LLAMA[0], chat_template=template)
    return ("<|end_of_text|>", "<|eot_id|>")


def bos_without_template_bos(directory: Path) -> tuple[str, ...]:
    backend = byte_level(LLAMA, bos=LLAMA[0])
    write_model_dir(directory, backend, eos="<|end_of_text|>", bos_token=LLAMA[0], chat_template=ROLES)
    return ("<|end_of_text|>",)


def bos_by_option(directory: Path) -> tuple[str, ...]:
    """Write a post-processor only as the option `add_bos_token`."""
    write_model_dir(directory, byte_level(LLAMA), eos="<|end_of_text|>", bos_token=LLAMA[0], add_bos_token=True)
    return ("<|end_of_text|>",)


def no_bos_by_option(directory: Path) -> tuple[str, ...]:
    backend = byte_level(LLAMA, bos=LLAMA[0])
    write_model_dir(directory, backend, eos="<|end_of_text|>", bos_token=LLAMA[0], add_bos_token=False)
    return ("<|end_of_text|>",)


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


def eos_is_unk(directory: Path) -> tuple[str, ...]:
    same = "<|endoftext|>"
    write_model_dir(directory, byte_level((same,)), eos=same, unk_token=same, bos_token=same, chat_template=ROLES)
    return (same,)


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


KINDS: tuple[Build, ...] = (
    *(chatml, chatml_base, several_end_tokens, template_file, named_templates, additional_templates, null_template, llama_bos),
    *(llama_chat, bos_without_template_bos, bos_by_option, no_bos_by_option, added_tokens, added_tokens_file),
    *(stripping_tokens, eos_is_unk, registered_class, older_files, metaspace, metaspace_class, sentencepiece_model),
    *(truncating, word_level),
)


@pytest.mark.parametrize("build", KINDS, ids=lambda build: build.__name__)
def test_directory_is_read_as_by_transformers(tmp_path: Path, build: Build) -> None:
    from transformers import AutoTokenizer

    ends = build(tmp_path)
    tokenizer, reference = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert [tokenizer.token_text(token) for token in tokenizer.stop_ids] == list(ends)
    assert tokenizer.chat_template == bool(reference.chat_template)
    encode = make_encoder(DataConfig(max_prompt_tokens=64), tokenizer)
    for text in TEXTS:
        expected = reference(text).input_ids
        if reference.unk_token_id in expected and build is word_level:
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


@pytest.mark.parametrize("build", [kind for kind in KINDS if kind is not word_level], ids=lambda build: build.__name__)
def test_special_text_is_text_in_every_directory(tmp_path: Path, build: Build) -> None:
    build(tmp_path)
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
    llama_bos(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    (bos,) = tokenizer.start_ids
    assert tokenizer.encode_start(f"{LLAMA[0]}a", control_tokens=True) == [bos, *tokenizer.encode("a")]
    assert tokenizer.encode_start("a", control_tokens=True) == [bos, *tokenizer.encode("a")]
    assert tokenizer.encode_start(f"{LLAMA[0]}a") == [bos, *tokenizer.encode(f"{LLAMA[0]}a")]


def test_unreadable_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{tmp_path}: transformers cannot load the tokenizer: "):
        load_tokenizer(tmp_path)
