"""Read, split and order the examples of supervised training.

Examples have no cursor: a batch depends only on the seed and the index of its first example, so a resumed run continues with
the next one. An epoch contains every example once, in a different order each time. A batch may contain the end of one epoch and
the start of the next.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.carriers.types import BoolArray, Datum, ForwardBackwardOutput, IntArray, Prompt
from titanrl.config.data import data_file
from titanrl.config.errors import BrokenRule, BrokenRules, inline
from titanrl.config.schema import Config
from titanrl.config.sections import ExamplesConfig, ExampleSet, TrainOn, WarmStartConfig
from titanrl.data.entries import (
    BLANK,
    OPTIONS_COLUMN,
    BadRow,
    Message,
    Selection,
    check_media,
    data_digest,
    format_of,
    is_missing,
    parsed_messages,
    read_messages,
    read_options,
    read_rows,
    read_tools,
    scalar_text,
    value_of,
)
from titanrl.data.streams import PromptStream, chat_format, epoch_order, is_heldout, make_encoder, opened
from titanrl.data.tokenizer import MAX_TOKEN_CHARS, Chat, ChatFormat, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A sequence for supervised training, such as a prompt with a correct answer.

    Example: prompt `[5, 6]`, answer `[7, 1]`: `token_ids=[5, 6, 7, 1]`, `mask=[F, F, T, T]`.
    """

    token_ids: IntArray
    """Prompt and answer, including the end-of-sequence token, `[S]`."""
    mask: BoolArray
    """True for tokens to train on, `[S]`."""

    @property
    def num_trained(self) -> int:
        """Number of tokens trained on. The first token is never trained on, because it has no context."""
        return int(self.mask[1:].sum())

    def datum(self, weight: float) -> Datum:
        """Return the datum for the loss `cross_entropy`, with loss weight `weight` for each token trained on."""
        weights = (self.mask[1:] * weight).astype(np.float32)
        return Datum(model_input=self.token_ids[:-1], loss_fn_inputs={"target_tokens": self.token_ids[1:], "weights": weights})


def render_conversation(
    template: ChatFormat,
    messages: Sequence[Message],
    train_on: TrainOn,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    num_prompt: int = 0,
    section: str = "sft",
) -> Demonstration:
    """Tokenize a conversation with the model's chat template, up to the last message to train on.

    The mask covers what the model would have generated: each trained assistant message, and the token that ends its turn. The
    tokens before a message must equal the prompt from which the model would generate it. A template that changes earlier
    messages when others follow, or that adds no token after a message, does not meet this condition.

    The first `num_prompt` messages are not trained on. `options` are the variables of the template that the row sets. Raise
    `BadRow` if there is nothing to train on, or the chat template or the tokenization does not meet the condition; its fix
    names keys of `section`.
    """
    try:
        if train_on == "all":
            _, text = template.fitted(messages, tools, options, reply_follows=False)
            token_ids = template.tokenizer.encode_chat(text)
            return Demonstration(token_ids=np.array(token_ids, np.int64), mask=np.ones(len(token_ids), np.bool_))
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= num_prompt]
        if not replies:
            raise BadRow("no message has the role assistant", f"add an assistant message, or set {section}.train_on to all")
        trained = replies if train_on == "assistant" else replies[-1:]
        if trained[0] == 0:
            fix = f"start with a user or system message, or set {section}.train_on to {'last' if len(replies) > 1 else 'all'}"
            raise BadRow("messages[0] has the role assistant, so there is no prompt that it replies to", fix)
        chat, text = template.fitted(messages[: replies[-1] + 1], tools, options, reply_follows=False)
        return _with_replies(template, chat, text.rstrip(), trained, section)
    except BadRow:
        raise
    except ValueError as error:  # raised by the template, or for a character without a token
        raise BadRow(str(error), "correct the messages, or use a model whose template and tokenizer support them") from error


_TEXTS = (
    "write prompt and completion as the texts that the model reads and generates, with data.chat_template: never and "
    "data.control_tokens: true, or correct the template in a copy of the model"
)


def _with_replies(template: ChatFormat, chat: Chat, text: str, replies: Sequence[int], section: str) -> Demonstration:
    """Tokenize a conversation that ends with an assistant message, and mark the given assistant messages."""
    tokenizer = template.tokenizer
    token_ids = tokenizer.encode_chat(text)
    mask = np.zeros(len(token_ids), np.bool_)
    for index in replies:
        prompt = template.text(chat.start(index), reply_follows=True)
        reply = template.text(chat.start(index + 1), reply_follows=False).rstrip()  # drop a newline after the turn
        if not (reply.startswith(prompt) and text.startswith(reply)):
            if len(replies) > 1:
                _with_replies(template, chat, text, replies[-1:], section)  # raises if the last one has the same problem
            raise BadRow(
                f"the chat template does not extend the conversation verbatim at messages[{index}], so the model would "
                "generate this message from another prompt than the text before it",
                f"set {section}.train_on to last, or write a row per reply, which ends with it" if len(replies) > 1 else _TEXTS,
            )
        content = chat.messages[index]["content"] or ""
        parts = (
            (content if template.control_tokens else tokenizer.marked(content)).replace("</think>", "<think>").split("<think>")
        )
        if any(part.strip() not in reply[len(prompt) :] for part in parts):
            raise BadRow(
                f"the chat template leaves out a part of messages[{index}], such as the reasoning before </think>", _TEXTS
            )
        start, end = (_num_tokens(tokenizer, part, text, token_ids, index) for part in (prompt, reply))
        mask[start:end] = True
        if token_ids[end - 1] not in tokenizer.stop_ids:
            raise BadRow(
                f"the chat template does not end messages[{index}] with a token that ends a completion, so the model would not "
                "learn to stop",
                "add the id of the token to eos_token_id in the model's generation_config.json"
                if tokenizer.is_special(token_ids[end - 1])
                else _TEXTS,
            )
    return Demonstration(token_ids=np.array(token_ids, np.int64), mask=mask)


def _num_tokens(tokenizer: Tokenizer, part: str, text: str, token_ids: Sequence[int], index: int) -> int:
    """Return the number of tokens of `part`, the start of `text`. Its tokens must be the first ones of the text."""
    first = tokenizer.encode_chat(part)
    if token_ids[: len(first)] != first:
        starts_blank = text[len(part) : len(part) + 1].isspace()
        raise BadRow(
            f"the start of messages[{index}] is tokenized together with the text before it, which the model could not generate",
            "remove whitespace from the start of the message"
            if starts_blank
            else "use a chat template whose text before a reply does not end with a space",
        )
    return len(first)


_TOO_LONG = "longer than the limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Tokenized examples in two splits."""

    training: tuple[Demonstration, ...]
    """Examples to train on, in file order."""
    heldout: tuple[Demonstration, ...]
    """Held-out examples, in file order."""
    num_truncated: int = 0
    """Number of examples whose last tokens were cut."""
    selections: tuple[Selection, ...] = ()
    """Rows of each file by use."""

    def batch(self, first: int, size: int, seed: int) -> list[Demonstration]:
        """Return `size` training examples from index `first` on. Indices count over all epochs."""
        number = len(self.training)
        places = (divmod(index, number) for index in range(first, first + size))
        return [self.training[epoch_order(seed, epoch, number)[place]] for epoch, place in places]

    def data_of(self, first: int, options: ExamplesConfig, seed: int) -> tuple[list[Datum], int]:
        """Return the data of an optimizer step, from index `first` on, and their number of tokens to train on."""
        batch = self.batch(first, options.batch_size, seed)
        return mean_loss_data(batch, options.weight), sum(example.num_trained for example in batch)

    async def heldout_loss(
        self, forward: Callable[[list[Datum]], Awaitable[ForwardBackwardOutput]], config: Config
    ) -> float | None:
        """Return the cross-entropy of held-out examples, in nats; None without any.

        It is the mean over the trained tokens of the first `evaluation.num_prompts` of them. `forward` computes the loss
        `cross_entropy` of data.
        """
        assert config.example_set is not None
        heldout = self.heldout[: config.evaluation.num_prompts]
        if not heldout:
            return None
        data, size = mean_loss_data(heldout), config.example_set.batch_size
        outputs = [await forward(data[start : start + size]) for start in range(0, len(data), size)]
        return sum(output.metrics["loss:sum"] for output in outputs)

    def summary(self, config: Config) -> dict[str, str]:
        """Return the lines that a dry run prints, by label."""
        assert config.example_set is not None
        batch_size = config.example_set.batch_size * config.trainer.max_optimizer_steps
        truncated = f"; {self.num_truncated:,} truncated" if self.num_truncated else ""
        lengths = [len(example.token_ids) for example in self.training]
        num_trained = sum(example.num_trained for example in self.training)
        number, epochs = len(self.training), batch_size * config.num_steps / len(self.training)
        return {
            "examples": f"{number:,} to train on, {len(self.heldout):,} held out{truncated}",
            "tokens to train on": f"{num_trained:,} of {sum(lengths):,} ({max(lengths):,} in the longest example)",
            "epochs": f"{epochs:.2f} ({number / batch_size:,.1f} steps per epoch)",
        }


def read_examples(config: Config, tokenizer: Tokenizer) -> Examples:
    """Read and tokenize the examples of a configuration with the section `sft` or `examples`."""
    section = config.example_set
    assert section is not None
    key, fraction = "examples" if config.sft is None else "sft", section.heldout_fraction
    validation_path = None if config.sft is None else config.sft.validation_path
    reader = _Reader(config, section, tokenizer, section.path, f"{key}.path")
    training, heldout = list[Demonstration](), list[Demonstration]()
    for text, example in reader.read():
        (heldout if is_heldout(text, fraction) else training).append(example)
    note = f"{key}.heldout_fraction={fraction:g} holds out none of the {len(training):,} examples"
    notes = (note,) if fraction and training and not heldout else ()
    selections = [reader.selection(len(training), len(heldout), notes)]
    num_truncated = reader.num_truncated
    if validation_path is not None:
        reader = _Reader(config, section, tokenizer, validation_path, "sft.validation_path")
        heldout = [example for _, example in reader.read()]
        selections.append(reader.selection(0, len(heldout)))
        num_truncated += reader.num_truncated
    for selection, examples, what in zip(selections, (training, heldout), ("to train on", "to evaluate"), strict=False):
        if not examples:
            counts = "; ".join(filter(None, [f"{selection.num_heldout:,} held out", selection.reasons()]))
            rule = f"must contain an example {what}, but has none: {selection.num_rows:,} rows, {counts}"
            fix = f"add examples, or raise {key}.max_example_tokens" if selection.num_left_out else "add examples"
            raise BrokenRules(BrokenRule({selection.key: selection.source}, rule, fix))
    return Examples(training=tuple(training), heldout=tuple(heldout), num_truncated=num_truncated, selections=tuple(selections))


class _Reader:
    """Reads the examples of a path, and counts those that are too long."""

    def __init__(self, config: Config, options: ExampleSet, tokenizer: Tokenizer, path: Path, key: str) -> None:
        make_encoder(config.data, tokenizer)  # rejects a system prompt without a chat template
        self._left_out: Counter[str] = Counter()
        self._unused: dict[str, None] = {}
        self._longest = self.num_truncated = 0
        self._config, self._options, self._tokenizer, self._path, self._key = config.data, options, tokenizer, path, key
        self._section = key.partition(".")[0]
        self._max_tokens = options.max_example_tokens or config.trainer.row_tokens
        self._template = chat_format(config.data, tokenizer) if tokenizer.chat_template else None
        self._kind = format_of(data_file(path))

    def read(self) -> Iterator[tuple[str, Demonstration]]:
        """Yield the examples that are not left out, each with the text that assigns it to a split."""
        for row in read_rows(self._path, self._key, self._kind):
            if row.is_blank:
                self._left_out[BLANK] += 1
                continue
            try:
                text, example = self._converted(row.content)
                check_media(row.content, text)
                kept = self._limited(example)
            except BadRow as error:
                raise row.broken(error) from error
            if kept is not None:
                yield text, kept

    def selection(self, num_training: int, num_heldout: int, notes: tuple[str, ...] = ()) -> Selection:
        """Return the rows of the path by use, once all are read."""
        too_long = f"{_TOO_LONG} (the longest has {self._longest:,} tokens)"
        unused = f"columns that are not used: {', '.join(self._unused)}"
        return Selection(
            key=self._key,
            source=str(data_file(self._path).absolute()),
            num_training=num_training,
            num_heldout=num_heldout,
            left_out={too_long if reason == _TOO_LONG else reason: number for reason, number in self._left_out.items()},
            notes=(*notes, *((unused,) if self._unused else ())),
            digest=data_digest(self._path, self._key, self._kind),
        )

    def _converted(self, row: Mapping[str, Any]) -> tuple[str, Demonstration]:
        """Return the text that assigns a row to a split, and its example."""
        columns = self._options.columns
        names = {name: columns.get(name, name) for name in ("prompt", "completion", "messages", "tools")}
        is_chat = "messages" in columns or ("prompt" not in columns and not is_missing(row.get("messages")))
        if not is_chat and not columns and not is_missing(row.get("conversations")) and is_missing(row.get("prompt")):
            is_chat, names["messages"] = True, "conversations"
        asked_names = {names["messages"]} if is_chat else {names["prompt"], names["completion"]}
        used = asked_names | {name.split(".")[0] for name in asked_names} | {names["tools"], OPTIONS_COLUMN}
        self._unused |= dict.fromkeys(str(name) for name in row if name not in used)
        has_fillers = self._kind != "jsonl"
        tools = read_tools(value_of(row, names["tools"]), has_fillers=has_fillers)
        options = read_options(row.get(OPTIONS_COLUMN))
        if is_chat:
            messages = read_messages(value_of(row, names["messages"]), has_fillers=has_fillers)
            return _question(messages), self._conversation(messages, tools, options)
        asked, reply = (parsed_messages(value_of(row, names[key]), names[key]) for key in ("prompt", "completion"))
        is_rendered = self._config.chat_template == "auto" and self._tokenizer.chat_template
        if is_rendered or any(isinstance(value, list | tuple) for value in (asked, reply)):
            turns = self._turns(asked, names["prompt"], "user")
            whole = [*turns, *self._turns(reply, names["completion"], "assistant")]
            return _question(turns), self._conversation(whole, tools, options, num_prompt=len(turns))
        prompt, completion = self._text(asked, names["prompt"]), self._text(reply, names["completion"])
        for key, given in {names["tools"]: tools, OPTIONS_COLUMN: options}.items():
            if given:
                raise BadRow(f"{key} requires a chat template", "remove it, or use a model with a chat template")
        tokenizer, control_tokens, start = self._tokenizer, self._config.control_tokens, self._cut(prompt)
        try:
            prompt_ids = tokenizer.encode_start(start, control_tokens=control_tokens)
            token_ids = tokenizer.encode_start(start + self._cut(completion), control_tokens=control_tokens)
            if token_ids[: len(prompt_ids)] != prompt_ids:  # a token would span the end of the prompt
                token_ids = prompt_ids + tokenizer.encode(self._cut(completion), control_tokens=control_tokens)
        except ValueError as error:
            raise BadRow(str(error), "correct the row") from error
        if token_ids[-1:] != [tokenizer.eos_ids[0]]:
            token_ids.append(tokenizer.eos_ids[0])
        first = 0 if self._options.train_on == "all" else len(prompt_ids)
        mask = np.arange(len(token_ids)) >= first
        return prompt, Demonstration(token_ids=np.array(token_ids, np.int64), mask=mask)

    def _cut(self, text: str) -> str:
        """Return the start of a text, with more tokens than the limit, because those of all of it could exhaust the memory."""
        return text[: 2 * self._max_tokens * MAX_TOKEN_CHARS]

    def _conversation(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        num_prompt: int = 0,
    ) -> Demonstration:
        if self._template is None:
            raise BadRow(
                "messages require a chat template, but the tokenizer has none",
                "write prompt and completion, or set model.path to a model with a chat template",
            )
        whole = opened(self._config, [{**message, "content": self._cut(message["content"])} for message in messages])
        return render_conversation(
            self._template,
            whole,
            self._options.train_on,
            tools=tools,
            options=options,
            num_prompt=num_prompt + len(whole) - len(messages) if num_prompt else 0,
            section=self._section,
        )

    def _turns(self, value: Any, name: str, role: str) -> list[Message]:
        if isinstance(value, list | tuple):
            return read_messages(value, has_fillers=self._kind != "jsonl")
        return [{"role": role, "content": self._text(value, name)}]

    def _text(self, value: Any, name: str) -> str:
        if is_missing(value):
            needed = f"every row must have prompt and completion, or messages ({self._section}.columns names other columns)"
            raise BadRow(f"{name} is missing", f"add it; {needed}")
        text = scalar_text(value)
        if text is None:
            raise BadRow(f"{name} must be a string, got {inline(value)}", "put it in quotes")
        if not text.strip():
            raise BadRow(f"{name} is empty", "fill it in, or delete the row")
        return text

    def _limited(self, example: Demonstration) -> Demonstration | None:
        """Return an example within the length limit, or None if it is left out."""
        length, limit, key = len(example.token_ids), self._max_tokens, self._section
        self._longest = max(self._longest, length)
        if length > limit and self._options.overlong == "error":
            fix = f"cut it, raise {key}.max_example_tokens and trainer.row_tokens, or set {key}.overlong to truncate or skip"
            raise BadRow(f"the example has {length} tokens, more than the limit of {limit}", fix)
        if length > limit and self._options.overlong == "skip":
            self._left_out[_TOO_LONG] += 1
            return None
        kept = Demonstration(token_ids=example.token_ids[:limit], mask=example.mask[:limit])
        if not kept.mask[1:].any():
            self._left_out["without a token to train on" + (" within the limit" if length > limit else "")] += 1
            return None
        self.num_truncated += length > limit
        return kept


def _question(messages: Sequence[Message]) -> str:
    """Return the text that assigns a conversation to a split: the first user message."""
    return str(next((message["content"] for message in messages if message["role"] == "user"), messages[0]["content"]))


def chain_sum_demonstrations(
    stream: PromptStream,
    tokenizer: Tokenizer,
    warm_start: WarmStartConfig,
    seed: int,
    demonstrate: Callable[[Prompt, bool], Demonstration] | None = None,
) -> Iterator[list[Demonstration]]:
    """Yield one batch of `batch_size` demonstrations per optimizer step, over training prompts in stream order.

    Answers in the first `num_long_only_steps` batches are long. Later answers are short with probability `short_fraction`.

    `demonstrate` returns the demonstration for a prompt and True for a short answer. The default is `answer_demonstration`,
    whose long answers contain the worked solution.
    """
    demonstrate = demonstrate or partial(answer_demonstration, tokenizer)
    for step in range(warm_start.num_steps):
        short_fraction = warm_start.short_fraction if step >= warm_start.num_long_only_steps else 0.0
        is_short = np.random.default_rng((seed, step)).random(warm_start.batch_size) < short_fraction
        start = step * warm_start.batch_size
        yield [demonstrate(stream[start + i], bool(short)) for i, short in enumerate(is_short)]


def mean_loss_data(batch: Sequence[Demonstration], weight: float = 1.0) -> list[Datum]:
    """Return the data of a batch, weighted so that the sum of the losses is `weight` times their mean over all tokens trained
    on."""
    of_token = weight / sum(demonstration.num_trained for demonstration in batch)
    return [demonstration.datum(of_token) for demonstration in batch]


def answer_demonstration(tokenizer: Tokenizer, prompt: Prompt, short: bool) -> Demonstration:
    """Return a sum with its answer, preceded by the worked solution unless `short`."""
    working, answer = worked_sum(prompt.entry["metadata"]["expression"])
    assert answer == int(prompt.entry["answer"])
    thought = "" if short else f"<think>{working}</think>"
    return joined(prompt.token_ids, [([*tokenizer.encode(f"{thought}<answer>{answer}</answer>"), tokenizer.eos_ids[0]], True)])


def joined(prompt_ids: Sequence[int], parts: Sequence[tuple[Sequence[int], bool]]) -> Demonstration:
    """Return a demonstration of a prompt followed by parts. Each part has its token ids and whether they are trained on."""
    token_ids, mask = list(prompt_ids), [False] * len(prompt_ids)
    for ids, is_trained in parts:
        token_ids += ids
        mask += [is_trained] * len(ids)
    return Demonstration(token_ids=np.array(token_ids, np.int64), mask=np.array(mask, np.bool_))


def worked_sum(expression: str) -> tuple[str, int]:
    """Return the running sum as text, and its value: `7 + 5 - 3` gives `7+5=12-3=9` and 9."""
    first, *rest = expression.split()
    working, total = first, int(first)
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        total += int(term) if operator == "+" else -int(term)
        working += f"{operator}{term}={total}"
    return working, total
