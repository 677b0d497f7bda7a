"""A small typed view of a Hugging Face tokenizer directory."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers


class Tokenizer:
    """Text to token ids and back, and the ids that end a completion. Made by `load_tokenizer`."""

    def __init__(self, path: Path, backend: tokenizers.Tokenizer) -> None:
        """Read the special tokens that the files beside the tokenizer name.

        Raises ValueError if none of them names an end-of-sequence token.
        """
        self._path = path
        self._backend = backend
        config = _read_json(path / "tokenizer_config.json")
        self._unk_id = self._id_of(config.get("unk_token"))
        self.eos_ids: tuple[int, ...] = self._find_eos_ids(config)
        """Every id that ends a completion; the first is the one to write at the end of a text."""
        pad_id = self._id_of(config.get("pad_token"))
        self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
        """Filler for places that no token holds."""
        self.chat_template: bool = "chat_template" in config or (path / "chat_template.jinja").is_file()
        """Whether the directory brings a chat template."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with nothing put before or after it.

        Raises ValueError if the tokenizer has no token for a part of the text.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if self._unk_id is not None and self._unk_id in ids:
            raise ValueError(
                f"the tokenizer in {self._path} has no token for a part of {text[:200]!r}; "
                "use a model whose tokenizer covers the task's text, or a task that fits the tokenizer"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens such as the end of sequence, and ids without a token, leave no trace."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """One token for people to read, special tokens included; `<id 105>` for an id without a token."""
        if self._backend.id_to_token(token_id) is None:
            return f"<id {token_id}>"
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation in the model's own chat template, up to where the assistant begins to speak."""
        text: str = self._template_renderer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
        return self.encode(text)

    @cached_property
    def _template_renderer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path, local_files_only=True)

    def _find_eos_ids(self, tokenizer_config: Mapping[str, Any]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for file in ("generation_config.json", "config.json"):
            ids = _read_json(self._path / file).get("eos_token_id")
            found.update(dict.fromkeys([] if ids is None else [ids] if isinstance(ids, int) else ids))
        eos_id = self._id_of(tokenizer_config.get("eos_token"))
        found.update({} if eos_id is None else {eos_id: None})
        if not found:
            raise ValueError(
                f"{self._path}: no end-of-sequence token; give eos_token_id in generation_config.json or config.json, "
                "or eos_token in tokenizer_config.json"
            )
        return tuple(found)

    def _id_of(self, token: str | Mapping[str, Any] | None) -> int | None:
        """Id of a token named in tokenizer_config.json, where it stands as text or as an object with `content`."""
        if token is None:
            return None
        token_id: int | None = self._backend.token_to_id(token if isinstance(token, str) else token["content"])
        return token_id


def load_tokenizer(path: Path) -> Tokenizer:
    """Open the tokenizer of a Hugging Face directory; nothing is fetched from elsewhere.

    Raises ValueError if the directory holds no tokenizer that the `tokenizers` library can run.
    """
    if not (path / "tokenizer.json").is_file() and not (path / "vocab.json").is_file():
        raise ValueError(f"{path}: no tokenizer here; give a folder with tokenizer.json, or with vocab.json and merges.txt")
    # Importing transformers takes seconds, the tokenizers library it wraps takes 20 ms. So transformers is loaded only to
    # convert older files, or at the first `render_chat`.
    file = path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file)) if file.is_file() else _convert(path)
    return Tokenizer(path, backend)


def _convert(path: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{path}: {type(tokenizer).__name__} runs in Python only; save the tokenizer with tokenizer.json")
    return tokenizer.backend_tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    """Content of a JSON file, nothing if there is none."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return content
