"""Read, split and order the examples of supervised fine-tuning.

Examples have no cursor: a batch depends only on the seed and the index of its first example, so a resumed run continues with
the next one. An epoch contains every example once, in a different order each time. A batch may contain the end of one epoch and
the start of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.schema import Config
from titanrl.config.sft import SFTConfig
from titanrl.config.shipped import data_file
from titanrl.data.conversations import render_conversation
from titanrl.data.demonstrations import Demonstration
from titanrl.data.jsonl import BadLine, read_jsonl, text_of
from titanrl.data.messages import Message, read_messages
from titanrl.data.streams import epoch_order, is_heldout, make_encoder
from titanrl.data.tokenizer import MAX_TOKEN_CHARS, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Tokenized examples in two splits."""

    training: tuple[Demonstration, ...]
    """Examples to train on, in file order."""
    heldout: tuple[Demonstration, ...]
    """Held-out examples, in file order."""
    num_truncated: int = 0
    """Number of examples whose last tokens were cut."""
    num_skipped: int = 0
    """Number of examples left out, because they are too long or have no token to train on within the limit."""

    def batch(self, first: int, size: int, seed: int) -> list[Demonstration]:
        """Return `size` training examples from index `first` on. Indices count over all epochs."""
        number = len(self.training)
        places = (divmod(index, number) for index in range(first, first + size))
        return [self.training[epoch_order(seed, epoch, number)[place]] for epoch, place in places]

    def summary(self, batch_size: int, num_steps: int) -> dict[str, str]:
        """Return the lines that a dry run prints, by label."""
        overlong = self.num_truncated + self.num_skipped
        left_out = f"; {self.num_truncated} truncated, {self.num_skipped} skipped" if overlong else ""
        lengths = [len(example.token_ids) for example in self.training]
        num_trained = sum(example.num_trained for example in self.training)
        number, epochs = len(self.training), batch_size * num_steps / len(self.training)
        return {
            "examples": f"{number:,} to train on, {len(self.heldout):,} held out{left_out}",
            "tokens to train on": f"{num_trained:,} of {sum(lengths):,} ({max(lengths):,} in the longest example)",
            "epochs": f"{epochs:.2f} ({number / batch_size:,.1f} steps per epoch)",
        }


def read_examples(config: Config, tokenizer: Tokenizer) -> Examples:
    """Read and tokenize the examples of a configuration with the section `sft`.

    Raises:
        BrokenRules: A file, one of its lines, or a key is invalid.
    """
    assert config.sft is not None
    converter = _Converter(config, config.sft, tokenizer)
    listed = read_jsonl(data_file(config.sft.path), "sft.path", converter.convert)
    fraction, validation_path = config.sft.heldout_fraction, config.sft.validation_path
    training = [example for text, example in listed if example is not None and not is_heldout(text, fraction)]
    heldout = [example for text, example in listed if example is not None and is_heldout(text, fraction)]
    if validation_path is not None:
        lines = read_jsonl(data_file(validation_path), "sft.validation_path", converter.convert)
        heldout = [example for _, example in lines if example is not None]
    if not training:
        raise _without_examples(config.sft.path, len(listed), len(heldout), converter.num_skipped)
    return Examples(
        training=tuple(training),
        heldout=tuple(heldout),
        num_truncated=converter.num_truncated,
        num_skipped=converter.num_skipped,
    )


def _without_examples(path: Path, num_lines: int, num_heldout: int, num_skipped: int) -> BrokenRules:
    rule = f"must contain an example to train on, but of {num_lines} lines {num_heldout} are held out and {num_skipped} skipped"
    fix = "add examples, or raise sft.max_example_tokens"
    return BrokenRules(BrokenRule(values={"sft.path": str(path)}, rule=rule, fix=fix))


class _Converter:
    """Converts JSONL lines to examples, and counts those that are too long."""

    def __init__(self, config: Config, sft: SFTConfig, tokenizer: Tokenizer) -> None:
        make_encoder(config.data, tokenizer)  # rejects a system prompt without a chat template
        self.num_truncated = self.num_skipped = 0
        self._tokenizer, self._train_on, self._overlong = tokenizer, sft.train_on, sft.overlong
        self._max_tokens = sft.max_example_tokens or config.trainer.row_tokens
        self._control_tokens = config.data.control_tokens
        self._is_chat = config.data.chat_template == "auto" and tokenizer.chat_template
        system = config.data.system_prompt
        self._first_messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def convert(self, line: dict[str, Any]) -> tuple[str, Demonstration | None]:
        """Return the text that assigns a line to a split, and its example; None as the example if it is left out."""
        if "messages" in line:
            messages = read_messages(line["messages"])
            question = next((message["content"] for message in messages if message["role"] == "user"), messages[0]["content"])
            return question, self._limited(self._conversation([{**m, "content": self._cut(m["content"])} for m in messages]))
        prompt, completion = (text_of(line, key, "prompt and completion, or messages") for key in ("prompt", "completion"))
        asked, reply = self._cut(prompt), self._cut(completion)
        if not self._is_chat:
            return prompt, self._limited(self._texts(asked, reply))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        return prompt, self._limited(self._rendered([*self._first_messages, *turns]))

    def _cut(self, text: str) -> str:
        """Return only the start of a very long text, because tokenizing all of it could need too much memory.

        The start has more tokens than the limit, so the tokens that are kept do not change.
        """
        return text[: 2 * self._max_tokens * MAX_TOKEN_CHARS]

    def _conversation(self, messages: Sequence[Message]) -> Demonstration:
        if not self._tokenizer.chat_template:
            raise BadLine(
                "messages require a chat template, but the tokenizer has none",
                "write prompt and completion, or set model.path to a model with a chat template",
            )
        return self._rendered(messages)

    def _rendered(self, messages: Sequence[Message]) -> Demonstration:
        return render_conversation(self._tokenizer, messages, self._train_on, control_tokens=self._control_tokens)

    def _texts(self, prompt: str, completion: str) -> Demonstration:
        """Tokenize prompt and completion without a chat template, with an end-of-sequence token after the completion."""
        encode, eos_id = partial(self._tokenizer.encode_start, control_tokens=self._control_tokens), self._tokenizer.eos_ids[0]
        try:
            prompt_ids, token_ids = encode(prompt), encode(prompt + completion)
            if token_ids[: len(prompt_ids)] != prompt_ids:  # a token would span the end of the prompt
                token_ids = prompt_ids + self._tokenizer.encode(completion, control_tokens=self._control_tokens)
        except ValueError as error:
            raise BadLine(str(error), "correct the line") from error
        if token_ids[-1:] != [eos_id]:
            token_ids.append(eos_id)
        first = 0 if self._train_on == "all" else len(prompt_ids)
        return Demonstration(token_ids=np.array(token_ids, np.int64), mask=np.arange(len(token_ids)) >= first)

    def _limited(self, example: Demonstration) -> Demonstration | None:
        """Return an example within the length limit, or None if it is left out."""
        length, limit = len(example.token_ids), self._max_tokens
        if length > limit and self._overlong == "error":
            raise BadLine(
                f"the example has {length} tokens, more than the limit of {limit}",
                "shorten it, raise sft.max_example_tokens and trainer.row_tokens, or set sft.overlong to truncate or skip",
            )
        kept = Demonstration(token_ids=example.token_ids[:limit], mask=example.mask[:limit])
        if (length > limit and self._overlong == "skip") or not kept.mask[1:].any():
            self.num_skipped += 1
            return None
        self.num_truncated += length > limit
        return kept
