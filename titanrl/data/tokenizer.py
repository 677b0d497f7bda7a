"""A small typed wrapper around a Hugging Face tokenizer."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

MAX_TOKEN_CHARS = 512
"""Upper bound on the length of a token in characters. The longest tokens of known vocabularies have 256."""


class Tokenizer:
    """A tokenizer with the ids of its end-of-sequence tokens. Created by `load_tokenizer`."""

    def __init__(self, path: Path, backend: tokenizers.Tokenizer) -> None:
        """Read the special tokens from the configuration files in the directory.

        Raises:
            ValueError: No file defines an end-of-sequence token.
        """
        self.path = path
        """Hugging Face directory of the tokenizer."""
        self._backend = backend
        config = _read_json(path / "tokenizer_config.json")
        self._unk_id = self._id_of(config.get("unk_token"))
        self.eos_ids: tuple[int, ...] = self._find_eos_ids(config)
        """Token ids that end a completion; the first one is appended to demonstrations."""
        self.chat_template: bool = "chat_template" in config or (path / "chat_template.jinja").is_file()
        """True if the directory contains a chat template."""

    @property
    def vocabulary(self) -> dict[str, int]:
        """Id of each token."""
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return ids

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens.

        Raises:
            ValueError: The tokenizer has no token for some characters of the text.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if self._unk_id is not None and self._unk_id in ids:
            raise ValueError(
                f"{self.path}: the tokenizer has no token for some characters (got {text[:200]!r}). "
                "Use a model whose tokenizer covers the text of the task, or another task."
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens and ids that have no token."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, including special tokens; `<id 105>` for an id without a token."""
        if self._backend.id_to_token(token_id) is None:
            return f"<id {token_id}>"
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation in the chat template, up to the start of the assistant's reply."""
        return self.encode(self.chat_text(messages, reply_follows=True))

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, reply_follows: bool) -> str:
        """Return the text of a conversation in the chat template. `reply_follows` adds the start of the assistant's reply.

        Raises:
            ValueError: The template rejects the conversation.
        """
        import jinja2

        try:
            text: str = self._template_renderer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=reply_follows
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template rejects the conversation: {error}") from error
        return text

    def is_special(self, token_id: int) -> bool:
        """Return True if the token is special, such as the end of a turn."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _template_renderer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, local_files_only=True)

    def _find_eos_ids(self, tokenizer_config: Mapping[str, Any]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for file in ("generation_config.json", "config.json"):
            ids = _read_json(self.path / file).get("eos_token_id")
            found.update(dict.fromkeys([] if ids is None else [ids] if isinstance(ids, int) else ids))
        eos_id = self._id_of(tokenizer_config.get("eos_token"))
        found.update({} if eos_id is None else {eos_id: None})
        if not found:
            raise ValueError(
                f"{self.path}: no end-of-sequence token is defined. Set eos_token_id in generation_config.json or config.json, "
                "or eos_token in tokenizer_config.json."
            )
        return tuple(found)

    def _id_of(self, token: str | Mapping[str, Any] | None) -> int | None:
        """Return the id of a token from tokenizer_config.json, given as text or as an object with `content`."""
        if token is None:
            return None
        token_id: int | None = self._backend.token_to_id(token if isinstance(token, str) else token["content"])
        return token_id


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory, without network access.

    Raises:
        ValueError: The directory has no tokenizer that the `tokenizers` library supports.
    """
    if not (path / "tokenizer.json").is_file() and not (path / "vocab.json").is_file():
        raise ValueError(f"{path}: no tokenizer found. Use a directory with tokenizer.json, or with vocab.json and merges.txt.")
    # Importing transformers takes seconds, importing tokenizers 20 ms. So transformers is imported only to convert older files
    # and by the first `render_chat`.
    file = path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else _convert(path)
    return Tokenizer(path, backend)


def _convert(path: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{path}: {type(tokenizer).__name__} has no fast version. Save the tokenizer with tokenizer.json.")
    return tokenizer.backend_tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; empty if it does not exist."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content
