"""A small typed wrapper around a Hugging Face tokenizer and its chat template: the only place that makes token ids of text.

Text is encoded as text: the text of a special token, such as `<|im_end|>` in a prompt or in the output of a tool, does not
become the token. Only the chat template's own control tokens do. Without such text, the ids are those of transformers.

A template ignores keys, roles and tools that it does not know, without an error. So `ChatFormat` compares what matters with and
without: a part that does not change the rendered text has not reached the model, and the conversation is refused.
"""

import datetime
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from titanrl.config.data import TEMPLATE_ARGUMENTS
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.data.entries import BadRow, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_TOKEN_CHARS = 512
"""Upper bound on the length of a token in characters. The longest tokens of known vocabularies have 256."""
STOP_MARGIN = 8
"""Tokens that are decoded in addition to the longest stop text, because the first ones may be parts of a character."""
TEMPLATE_DATE = "2024-07-26"
"""Date that chat templates get as today's, so that prompts do not change from day to day. Known templates default to it."""
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model")
"""Files of which a directory with a tokenizer has at least one."""


class Tokenizer:
    """A tokenizer with its chat template and the ids of its end-of-sequence tokens. Created by `load_tokenizer`."""

    def __init__(self, path: Path, backend: tokenizers.Tokenizer, renderer: "PreTrainedTokenizerFast | None" = None) -> None:
        """Read the special tokens from the configuration files in the directory.

        Truncation and padding that the file of `backend` sets are disabled. `renderer` is transformers' tokenizer of the same
        directory; None loads it when a chat template is rendered. Raise `ValueError` if no file defines an end-of-sequence
        token, or the model of the directory does not have it.
        """
        self.path = path
        """Hugging Face directory of the tokenizer."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._renderer = renderer
        config = _read_json(path / "tokenizer_config.json")
        self._unk_id = self._id_of(config.get("unk_token")) if renderer is None else renderer.unk_token_id
        given = [_read_json(path / file).get("eos_token_id") for file in ("generation_config.json", "config.json")]
        listed = [ids if isinstance(ids, list) else [ids] for ids in (*given, self._id_of(config.get("eos_token")))]
        found = [token_id for ids in listed for token_id in ids if token_id is not None]
        if wrong := [token_id for token_id in found if not (type(token_id) is int and token_id >= 0)]:
            rule = "eos_token_id must be a token id or a list of them"
            raise ValueError(f"{path}: {rule} (got {wrong[0]!r:.100}). Correct generation_config.json or config.json.")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(found))
        """Token ids that end a text; the first one is appended to demonstrations."""
        if not self.eos_ids:
            raise ValueError(
                f"{path}: no end-of-sequence token is defined. Set eos_token_id in generation_config.json or config.json, "
                "or eos_token in tokenizer_config.json."
            )
        size: Any = _read_json(path / "config.json").get("vocab_size")
        last = max(backend.get_vocab_size(with_added_tokens=True) - 1, *backend.get_added_tokens_decoder(), 0)
        is_larger = isinstance(size, int) and last >= size
        self._without_row = {token_id for token_id in self.vocabulary.values() if token_id >= size} if is_larger else set()
        """Tokens beyond the embedding of the model in the same directory; usually there is none."""
        self._checked(self.eos_ids[:1])  # the model never samples the others
        self.chat_template: bool = (
            bool(config.get("chat_template") or (path / "chat_template.jinja").is_file())
            if renderer is None
            else bool(renderer.chat_template)
        )
        """True if the directory contains a chat template."""
        self._nonce = secrets.token_hex(8)  # marks and spellings that contain it cannot occur in any text
        self._marks = re.compile(f"{self._nonce}x([0-9a-f]*)z")

    @cached_property
    def turn_end_id(self) -> int | None:
        """Token that follows an assistant message in the chat template; None if text or nothing follows it."""
        if not self.chat_template:
            return None
        reply = "The reply."
        try:
            text = self.chat_text(
                [{"role": "user", "content": "The question."}, {"role": "assistant", "content": reply}], reply_follows=False
            )
            _, found, rest = text.rpartition(reply)
            after = self.encode_chat(rest.lstrip()) if found else []
        except ValueError:  # a template for other conversations
            return None
        return after[0] if after and after[0] in self._backend.get_added_tokens_decoder() else None

    @property
    def vocabulary(self) -> dict[str, int]:
        """Id of each token."""
        ids: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return ids

    @cached_property
    def start_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer puts before a text without a chat template: usually BOS or nothing."""
        encoding = self._backend.encode("a", add_special_tokens=True)
        added = takewhile(lambda pair: pair[1], zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        return tuple(token_id for token_id, _ in added)

    def encode(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """Return the token ids of a text, without adding special tokens.

        With `control_tokens`, the text of a special token becomes the token. Never set it for text of other people. Raise
        `ValueError` if the tokenizer has no token for some characters of the text, or the model has not all of its tokens.
        """
        encoding = self._encoding(text)
        if self._unk_id not in encoding.ids and (control_tokens or self._special_ids.isdisjoint(encoding.ids)):
            return self._checked(encoding.ids)
        return self._checked(self._literal_ids(self._with_spelled_controls(text, encoding) if control_tokens else text))

    def encode_start(self, text: str, *, control_tokens: bool = False) -> list[int]:
        """Return the token ids of a text that starts a sequence, after `start_ids`. The arguments are those of `encode`."""
        ids = self.encode(text, control_tokens=control_tokens)
        start = list(self.start_ids)
        return ids if start and ids[: len(start)] == start else start + ids

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: `eos_ids`, and the token with which the chat template ends the policy's turn.

        The template of a base model may end turns with another token than the end of the text. A policy that learned to end
        its turns with that token would continue to the length limit.
        """
        turn_end = () if self.turn_end_id is None else (self.turn_end_id,)
        return tuple(dict.fromkeys([*self.eos_ids, *turn_end]))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens and ids that have no token."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def decode_raw(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def decode_completion(self, ids: Sequence[int], stop: Sequence[str | int] = (), *, keep_stop: bool = False) -> str:
        """Return the text of a completion without special tokens and, as in vLLM, without the stop text that ended it.

        `stop` are texts and token ids that end a completion. With `keep_stop`, the text includes the stop text, or the stop
        token if it is not special. The tokens of `stop_ids` are never part of the text.
        """
        if len(ids) and ids[-1] in self.stop_ids:
            ids = ids[:-1]
        text = self.decode(ids)
        if not len(ids) or not stop:
            return text
        before = self.decode(ids[:-1])
        if ids[-1] in stop:
            return text if keep_stop else before
        found = [
            (start + len(wanted), start)
            for wanted in stop
            if isinstance(wanted, str) and (start := text.find(wanted)) >= 0 and wanted not in before
        ]
        if not found:
            return text
        end, start = min(found, key=lambda place: place[0])  # the text that is complete first, as if it came by character
        return text[: end if keep_stop else start]

    def completes_stop(self, ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Return True if the text ends with a stop text, or shortly after one. Special tokens count as their text."""
        size = max(len(text.encode()) for text in stop) + STOP_MARGIN  # a token has at least one character or byte
        known = (token_id for token_id in reversed(ids) if self._backend.id_to_token(token_id) is not None)
        tail = list(islice(known, size))[::-1]
        text = self._backend.decode(tail, skip_special_tokens=False)
        return any(wanted in text for wanted in stop)

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, including special tokens; `<id 105>` for an id without a token."""
        if self._backend.id_to_token(token_id) is None:
            return f"<id {token_id}>"
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text

    def encode_chat(self, text: str) -> list[int]:
        """Return the token ids of a text from `chat_text`, or of its start.

        Raise `ValueError` if the tokenizer has no token for some characters of the text, or the model has not all of its
        tokens.
        """
        encoding = self._encoding(text)
        if self._unk_id not in encoding.ids and self._nonce not in text:
            return self._checked(encoding.ids)
        return self._checked(self._literal_ids(self._with_spelled_controls(text, encoding)))

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply_follows: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        control_tokens: bool = False,
    ) -> str:
        """Return the text of a conversation in the chat template, for `encode_chat`.

        The text of special tokens in messages and tools is replaced by marks, which `encode_chat` encodes as that text; with
        `control_tokens`, it becomes the token. The same text always has the same mark, so the texts of a conversation and of
        its start can be compared. With `reply_follows`, the text ends with the start of the assistant's reply. `tools` are the
        JSON schemas of functions, and `options` other variables of the template, such as `enable_thinking`; `strftime_now` is
        the date that its function of this name formats, `TEMPLATE_DATE` by default. Raise `ValueError` if the template rejects
        the conversation, or an option cannot be set.
        """
        import jinja2

        if reserved := sorted(options.keys() & set(TEMPLATE_ARGUMENTS)):
            raise ValueError(f"{reserved[0]} is not an option of a chat template. Remove it.")
        content: tuple[Any, Any] = ([dict(message) for message in messages], None if tools is None else list(tools))
        conversation, functions = content if control_tokens else self.marked(content)
        day = str(options.get("strftime_now", TEMPLATE_DATE))
        try:
            variables = {**options, "strftime_now": datetime.datetime.fromisoformat(day).strftime}
        except ValueError:
            raise ValueError(f"strftime_now must be a date (got {day!r}). Write it as {TEMPLATE_DATE}.") from None
        try:
            text = self._template_renderer.apply_chat_template(
                conversation, tools=functions, tokenize=False, add_generation_prompt=reply_follows, **variables
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:  # a template's operations raise any of them
            raise ValueError(f"the chat template rejects the conversation: {error}") from error
        assert isinstance(text, str)
        if self._nonce in self._marks.sub("", text).lower():
            raise ValueError("the chat template changes the text of special tokens in a message. Remove this text.")
        return text

    def unknown_options(self, options: Mapping[str, Any]) -> list[str]:
        """Return the options that the chat template does not mention, so that they have no effect."""
        templates = self._template_renderer.chat_template if self.chat_template else ""
        source = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
        return [name for name in options if re.search(rf"\b{re.escape(name)}\b", source) is None]

    def is_special(self, token_id: int) -> bool:
        """Return True if the token is special, such as the end of a turn."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self._special_texts)

    @cached_property
    def _special_texts(self) -> dict[int, str]:
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items() if token.special}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Pattern that occurs in every text with a special token; None if only the tokenizer can tell."""
        added = self._backend.get_added_tokens_decoder()
        if self._backend.normalizer is not None and any(token.special and token.normalized for token in added.values()):
            return None
        return re.compile("|".join(map(re.escape, self._special_texts.values())) or r"(?!)")

    @cached_property
    def _template_renderer(self) -> "PreTrainedTokenizerFast":
        return self._renderer or _load_with_transformers(self.path)

    @cached_property
    def _literal(self) -> tuple[tokenizers.Tokenizer, dict[int, int], str]:
        """A copy of the tokenizer that encodes special tokens as text, except for their spellings by `_spelled`.

        The second value maps ids of these spellings to the special tokens; the third is a text that only separates tokens.
        """
        literal = tokenizers.Tokenizer.from_str(self._backend.to_str())
        literal.encode_special_tokens = True
        spelled = {token_id: self._spelled(token_id) for token_id in self._special_ids}
        separator = self._spelled(-1)
        literal.add_tokens(
            [tokenizers.AddedToken(text, normalized=False, special=False) for text in (*spelled.values(), separator)]
        )
        vocabulary = literal.get_vocab()
        ids = {vocabulary[text]: token_id for token_id, text in spelled.items()}
        return literal, ids, separator

    def _spelled(self, token_id: int) -> str:
        return f"<{self._nonce}:{token_id}>"

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except TypeError as error:  # the library's answer to a lone surrogate
            raise ValueError(f"the text is not valid Unicode (got {text[:200]!r})") from error

    def _with_spelled_controls(self, text: str, encoding: tokenizers.Encoding) -> str:
        """Return a text with its special tokens spelled for `_literal`, and with its marks replaced by the marked text."""
        parts, end = [], 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            special = self._special_texts.get(token_id)
            # Characters without a token have the id of the unknown token, too.
            if special is not None and (token_id != self._unk_id or text[start:stop].strip() == special.strip()):
                parts += [self._unmarked(text[end:start]), self._spelled(token_id)]
                end = stop
        return "".join([*parts, self._unmarked(text[end:])])

    def _literal_ids(self, text: str) -> list[int]:
        literal, controls, separator = self._literal
        while True:
            encoding = literal.encode(text, add_special_tokens=False)
            if self._unk_id is not None and self._unk_id in encoding.ids:
                start, stop = encoding.offsets[encoding.ids.index(self._unk_id)]
                shown = f"{text[start:stop]!r} in {re.sub(f'<{self._nonce}:-?[0-9]+>', '', text)[:200]!r}"
                raise ValueError(
                    f"{self.path}: the tokenizer has no token for some characters (got {shown}). "
                    "Use a model whose tokenizer covers the text of the task, or another task."
                )
            # Some vocabularies have the special token itself as an entry, which a separator in its text keeps from being found.
            found = [
                start + 1
                for token_id, (start, _) in zip(encoding.ids, encoding.offsets, strict=True)
                if token_id in self._special_ids
            ]
            if not found:
                dropped = literal.token_to_id(separator)
                return [controls.get(token_id, token_id) for token_id in encoding.ids if token_id != dropped]
            for place in reversed(found):
                text = text[:place] + separator + text[place:]

    def marked(self, value: Any) -> Any:
        """Return messages in which marks replace the text of special tokens, for `encode_chat`.

        They also replace the start or the end of such text at the end or the start of a string, because a template may join
        strings. The keys that a template reads, and the roles, contain no such text.
        """
        if isinstance(value, str):
            parts, end = [], 0
            for start, stop in sorted([*self._special_spans(value), *self._fragments(value)]):
                start = max(start, end)
                if start < stop:
                    parts += [value[end:start], f"{self._nonce}x{value[start:stop].encode().hex()}z"]
                    end = stop
            return "".join([*parts, value[end:]])
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item) for item in value]
        return value

    def _unmarked(self, text: str) -> str:
        return self._marks.sub(lambda mark: bytes.fromhex(mark[1]).decode(), text)

    def _special_spans(self, text: str) -> list[tuple[int, int]]:
        if self._special_pattern is not None and self._special_pattern.search(text) is None:
            return []
        encoding = self._encoding(text)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [span for token_id, span in pairs if token_id in self._special_ids]

    def _fragments(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where a string ends with the start of a special token's text, and where it starts with the end of one."""
        starts, ends, longest = self._special_fragments
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())  # templates trim messages
        for size in range(min(longest, last - first), 0, -1):
            if text[last - size : last] in starts:
                yield last - size, last
            if text[first : first + size] in ends:
                yield first, first + size

    @cached_property
    def _special_fragments(self) -> tuple[frozenset[str], frozenset[str], int]:
        """Starts and ends of the texts of special tokens that contain more than letters, digits and _, and the longest size."""
        texts = self._special_texts.values()
        starts = {text[:size] for text in texts for size in range(1, len(text))}
        ends = {text[size:] for text in texts for size in range(1, len(text))}
        starts, ends = ({text for text in texts if re.search(r"\W", text)} for texts in (starts, ends))
        return frozenset(starts), frozenset(ends), max(map(len, starts | ends), default=0)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        if self._without_row and (found := self._without_row.intersection(ids)):
            size = min(self._without_row)
            raise ValueError(
                f"{self.path}: the tokenizer has tokens that the model lacks, whose vocabulary ends before {size} (got "
                f"{self.token_text(min(found))!r}, token {min(found)}). Resize the model's embedding, or use its own tokenizer."
            )
        return list(ids)

    def _id_of(self, token: str | Mapping[str, Any] | None) -> int | None:
        """Return the id of a token from tokenizer_config.json, given as text or as an object with `content`."""
        if token is None:
            return None
        token_id: int | None = self._backend.token_to_id(token if isinstance(token, str) else token["content"])
        return token_id


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a Hugging Face directory as transformers does, without network access.

    Raise `ValueError` if the directory has no tokenizer that the `tokenizers` library supports.
    """
    if not _has_tokenizer(path):
        raise ValueError(f"{path}: no tokenizer found. Use a directory with tokenizer.json, or with vocab.json and merges.txt.")
    # Importing transformers takes seconds, importing tokenizers 20 ms. The recipe's tokenizer needs nothing of transformers.
    if is_recipe(path):
        return Tokenizer(path, tokenizers.Tokenizer.from_file(str(path / "tokenizer.json")))
    renderer = _load_with_transformers(path)
    return Tokenizer(path, renderer.backend_tokenizer, renderer)


def writes_date(path: Path) -> bool:
    """Return True if the chat template in a directory writes the date. Other variables of it are not looked at."""
    files = (path / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    return any("strftime_now" in file.read_text(encoding="utf-8") for file in files if file.is_file())


def export_stop_ids(directory: Path) -> None:
    """Add the end of a turn to the end tokens in a directory's `generation_config.json`, so that other programs stop there."""
    if not _has_tokenizer(directory):
        return
    stop_ids, file = load_tokenizer(directory).stop_ids, directory / "generation_config.json"
    settings = _read_json(file)
    named = settings.get("eos_token_id", _read_json(directory / "config.json").get("eos_token_id"))
    if not set(stop_ids) <= set([named] if isinstance(named, int) else named or ()):
        file.write_text(json.dumps({**settings, "eos_token_id": list(stop_ids)}, indent=2) + "\n", encoding="utf-8")


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def _load_with_transformers(path: Path) -> "PreTrainedTokenizerFast":
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # both libraries raise bare exceptions for broken files
        raise ValueError(f"{path}: transformers cannot load the tokenizer: {type(error).__name__}: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{path}: {type(tokenizer).__name__} has no fast version. Save the tokenizer with tokenizer.json.")
    return tokenizer


def _read_json(file: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; empty if it does not exist."""
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: it is not valid JSON: {error}. Correct it, or download the model again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must be a JSON object (got {content!r:.100}). Correct it, or download the model again.")
    return content


PAD_TOKEN, PAD_ID = "<pad>", 0
EOS_TOKEN, EOS_ID = "<eos>", 1
ALPHABET = "".join(map(chr, range(0x20, 0x7F)))
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
RECIPE_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD_TOKEN,
    "eos_token": EOS_TOKEN,
    "unk_token": PAD_TOKEN,
    "clean_up_tokenization_spaces": False,
}
"""`tokenizer_config.json`."""


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: `<pad>` 0, `<eos>` 1, the alphabet 2 to 96, the phrases 97 to 105."""
    (directory / "tokenizer.json").write_text(_recipe_json(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(RECIPE_SETTINGS, indent=2) + "\n", encoding="utf-8")


def is_recipe(directory: Path) -> bool:
    """Return True if the directory's tokenizer is the one that `write_tokenizer` writes, up to its chat template."""
    file, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not (file.is_file() and settings.is_file()) or file.stat().st_size != len(_recipe_json().encode()):
        return False
    changed = _read_json(settings).keys() - RECIPE_SETTINGS.keys() - {"chat_template"}
    return not changed and file.read_text(encoding="utf-8") == _recipe_json()


@cache
def _recipe_json() -> str:
    vocab = {token: index for index, token in enumerate((PAD_TOKEN, EOS_TOKEN, *ALPHABET))}
    # Characters outside the alphabet become <pad>, which titanrl's Tokenizer.encode rejects, so no text changes silently.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    tokenizer.add_tokens([tokenizers.AddedToken(phrase, normalized=False, special=False) for phrase in PHRASES])
    text: str = tokenizer.to_str(pretty=True)
    return text


_IDENTIFIERS = ("name", "tool_call_id")
"""Keys that many templates do not need, because the order of the messages says the same."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning of a message. A template knows at most one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation as the chat template takes it."""

    messages: Sequence[Message]
    """The messages, with the keys and roles that the template knows."""
    tools: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any]
    """Variables of the template."""

    def start(self, length: int) -> "Chat":
        """Return the first messages of the conversation."""
        return replace(self, messages=self.messages[:length])


class ChatFormat:
    """The chat template of a tokenizer, with the variables of a configuration."""

    def __init__(
        self, tokenizer: Tokenizer, options: Mapping[str, Any] = MappingProxyType({}), *, control_tokens: bool = False
    ) -> None:
        """Store the arguments. Raise `BrokenRules` if the template has no variable of an option.

        Variables of a row override `options`. With `control_tokens`, the text of a special token in a message is encoded as the
        token.
        """
        if unknown := tokenizer.unknown_options(options):
            values = {f"data.chat_template_kwargs.{unknown[0]}": options[unknown[0]]}
            rule, fix = "the chat template has no such variable", "correct its name, or remove it"
            raise BrokenRules(BrokenRule(values, rule, fix))
        self.tokenizer = tokenizer
        """Tokenizer with the chat template."""
        self._options, self.control_tokens = options, control_tokens
        self._known: set[object] = set()  # parts that the template is known to use
        self._call_form = 0

    def fitted(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        reply_follows: bool,
        is_sampled: bool = False,
    ) -> tuple[Chat, str]:
        """Return a conversation as the template takes it, and its text.

        The role `developer` becomes `system`, and reasoning, arguments and empty text beside calls get the form that the
        template takes. `options` are the variables that a row sets. With `reply_follows`, the text ends with the start of the
        assistant's reply. Raise `BadRow` if the template rejects the conversation, or leaves a part of it out. If it
        `is_sampled`, that may be text of the assistant, or another key than `content` and `tool_calls`.
        """
        if unknown := self.tokenizer.unknown_options(options or {}):
            raise BadRow(f"the chat template has no variable {unknown[0]}", "remove it from chat_template_kwargs")
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        chat = Chat(messages=messages, tools=tools, options={**self._options, **(options or {})})
        chat, text = self._rendered(chat, reply_follows)
        for index, message in enumerate(chat.messages):
            needed = "tool_calls" if message["role"] == "assistant" else "content"
            for key in message if not is_sampled else message.keys() & {needed}:
                if key != "role" and key not in _IDENTIFIERS and not self._uses(chat, index, key, text, reply_follows):
                    chat, text = self._renamed(chat, index, key, reply_follows)
        if tools and "tools" not in self._known:
            other = {**tools[-1], "function": {**tools[-1]["function"], "name": "zxq"}}
            if self._text(replace(chat, tools=[*tools[:-1], other]), reply_follows) == text:
                raise BadRow("the chat template ignores tools", "remove them, or use a model with a template for tools")
            self._known.add("tools")
        return chat, text

    def text(self, chat: Chat, *, reply_follows: bool) -> str:
        """Return the text of a conversation, or of its start. Raise `ValueError` if the template rejects the conversation."""
        return self.tokenizer.chat_text(
            chat.messages,
            reply_follows=reply_follows,
            tools=chat.tools,
            options=chat.options,
            control_tokens=self.control_tokens,
        )

    def _rendered(self, chat: Chat, reply_follows: bool) -> tuple[Chat, str]:
        """Return a conversation with tool calls in the form that the template takes, without `None` or dicts of Python."""
        calls = [call for message in chat.messages for call in message.get("tool_calls") or ()]
        given = [call["function"]["arguments"] for call in calls]
        objects = [
            str(each if self.control_tokens else self.tokenizer.marked(each)) for each in given if isinstance(each, dict)
        ]
        forms = [_with_calls(chat, form) for form in range(4 if calls else 1)]
        found: list[tuple[int, int, str]] = []
        for form in sorted(range(len(forms)), key=lambda form: form != self._call_form):  # usually the same for all rows
            if (text := self._text(forms[form], reply_follows)) is not None:
                found.append((text.count("None") + sum(text.count(each) for each in objects if len(each) > 2), form, text))
                if calls and found == [(0, self._call_form, text)]:
                    break
        if not found:
            try:
                self.text(chat, reply_follows=reply_follows)
            except ValueError as error:
                fix = "correct the template or the messages; data.chat_template: never tokenizes prompts without it"
                raise BadRow(str(error).removesuffix("."), fix) from error
        _, form, text = min(found)
        self._call_form = form if calls else self._call_form
        return forms[form], text

    def _text(self, chat: Chat, reply_follows: bool) -> str | None:
        """Return the text of a conversation; None if the template rejects it."""
        try:
            return self.text(chat, reply_follows=reply_follows)
        except ValueError:
            return None

    def _uses(self, chat: Chat, index: int, key: str, text: str, reply_follows: bool) -> bool:
        message = chat.messages[index]
        value, other = message[key], dict[str, Any]()
        # A template may use a key only in messages with, or without, another one.
        part = (message["role"], key, *(name for name, more in message.items() if more))
        if key == "content":
            other = {key: ""}
            if not (value or "").strip() or (part in self._known and value.strip() in text):
                return True
        elif key == "tool_calls":  # a template may show only that there are calls, or only the first
            function = {**value[-1]["function"], "arguments": {"zxq": 1}}
            other, part = {key: [*value[:-1], {**value[-1], "function": function}]}, (*part, len(value) > 1)
        if key != "content" and part in self._known:
            return True
        replaced = _replaced(chat, index, {k: v for k, v in message.items() if k != key} | other)
        without = _with_calls(replaced, self._call_form)
        used = self._text(without, reply_follows) != text
        if not used and message["role"] == "assistant":
            # Some templates leave out the reasoning of earlier turns on purpose. They use it in the last turn.
            used = self._text(without.start(index + 1), False) != self._text(chat.start(index + 1), False)
        if used:
            self._known.add(part)
        return used

    def _renamed(self, chat: Chat, index: int, key: str, reply_follows: bool) -> tuple[Chat, str]:
        """Return the conversation with another name for a key that the template does not use."""
        message = chat.messages[index]
        for name in _THOUGHTS if key in _THOUGHTS else ():
            if name not in message:
                other = _replaced(chat, index, {name if k == key else k: v for k, v in message.items()})
                text = self._text(other, reply_follows)
                if text is not None and self._uses(other, index, name, text, reply_follows):
                    return other, text
        fix = "remove it, or use a model whose template knows it"
        if key == "content":
            raise BadRow(f"the chat template leaves out messages[{index}], with the role {message['role']}", fix)
        raise BadRow(f"the chat template ignores messages[{index}].{key}", fix)

    @cached_property
    def _knows_developer(self) -> bool:
        asked = [{"role": "developer", "content": "zxq"}, {"role": "user", "content": "a"}]
        return "zxq" in (self._text(Chat(messages=asked, options=self._options), True) or "")


def _replaced(chat: Chat, index: int, message: Message) -> Chat:
    return replace(chat, messages=[*chat.messages[:index], message, *chat.messages[index + 1 :]])


def _with_calls(chat: Chat, form: int) -> Chat:
    """Return a conversation with null or empty text beside calls (form 2, 3), and arguments as objects or text (form 1, 3)."""
    messages = []
    for message in chat.messages:
        calls = []
        for call in message.get("tool_calls") or ():
            given = call["function"]["arguments"]
            if form in (1, 3) and not isinstance(given, str):
                given = json.dumps(given, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": given}})
        content = message.get("content") or (None if form < 2 else "")
        messages.append({**message, "content": content, "tool_calls": calls} if calls else message)
    return replace(chat, messages=messages)
