"""SFT examples: tokenization, splits, limits, order, and errors for invalid files."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.config import Config, load_config
from titanrl.config.data import data_file
from titanrl.config.errors import BrokenRules
from titanrl.config.sections import FOLDER
from titanrl.data.examples import Demonstration, Examples, mean_loss_data, read_examples
from titanrl.data.streams import is_heldout
from titanrl.data.tokenizer import Tokenizer
from titanrl.grpo import GRPO
from titanrl.run.checkpoints import FIRST


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def config_of(path: Path, data: dict[str, Any] | None = None, **sft: Any) -> Config:
    sections = {"data": data or {}, "trainer": {"row_tokens": 64}}
    return Config.model_validate({"name": "a", "num_steps": 1, "sft": {"path": path, **sft}, **sections})


def problem(path: Path, tokenizer: Tokenizer, data: dict[str, Any] | None = None, **sft: Any) -> str:
    with pytest.raises(BrokenRules) as raised:
        read_examples(config_of(path, data, **sft), tokenizer)
    return str(raised.value)


def texts(examples: tuple[Demonstration, ...], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the context and the trained part of each example."""
    parts = []
    for example in examples:
        context, trained = example.token_ids[~example.mask], example.token_ids[example.mask]
        parts.append(tuple("".join(map(tokenizer.token_text, ids.tolist())) for ids in (context, trained)))
    return parts


SUM = {"prompt": "1+2=", "completion": "3"}


def test_prompt_and_completion_without_a_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", SUM, {**SUM, "prompt": "2+1=", "note": "ignored"})
    examples = read_examples(config_of(path), tokenizer)
    assert texts(examples.training, tokenizer) == [("1+2=", "3<eos>"), ("2+1=", "3<eos>")]
    assert texts(read_examples(config_of(path, train_on="all"), tokenizer).training, tokenizer)[0] == ("", "1+2=3<eos>")


def test_prompt_and_completion_are_rendered_as_a_chat(tmp_path: Path, chat: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", SUM)
    data: dict[str, Any] = {"system_prompt": "Add."}
    (example,) = read_examples(config_of(path, data), chat).training
    assert texts((example,), chat) == [("[system] Add.<eos> [user] 1+2=<eos> [assistant] ", "3<eos>")]
    assert texts(read_examples(config_of(path, {"chat_template": "never"}), chat).training, chat) == [("1+2=", "3<eos>")]


def test_prompt_and_completion_may_be_the_json_text_of_messages(tmp_path: Path, chat: Tokenizer) -> None:
    asked, reply = [{"role": "user", "content": "1+2="}], [{"role": "assistant", "content": "3"}]
    path = write(tmp_path / "a.jsonl", {"prompt": json.dumps(asked), "completion": json.dumps(reply)})
    assert texts(read_examples(config_of(path), chat).training, chat) == [("[user] 1+2=<eos> [assistant] ", "3<eos>")]
    write(path, {"prompt": asked, "completion": str(reply)})
    assert "completion looks like a list of messages, which must be valid JSON" in problem(path, chat)


def test_split_matches_the_split_of_prompts(tmp_path: Path, chat: Tokenizer) -> None:
    questions = [f"{i}+1=" for i in range(60)]
    conversations = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "1"}]} for question in questions
    ]
    by_prompt = write(tmp_path / "a.jsonl", *({**SUM, "prompt": question} for question in questions))
    by_message = write(tmp_path / "b.jsonl", *conversations)
    for path in (by_prompt, by_message):
        examples = read_examples(config_of(path, heldout_fraction=0.3), chat)
        assert len(examples.heldout) == sum(is_heldout(question, 0.3) for question in questions) > 5
        assert len(examples.training) + len(examples.heldout) == 60


def test_validation_file_replaces_the_split(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, validation = write(tmp_path / "a.jsonl", SUM), write(tmp_path / "b.jsonl", {**SUM, "prompt": "0+3="})
    examples = read_examples(config_of(path, validation_path=validation), tokenizer)
    assert texts(examples.heldout, tokenizer) == [("0+3=", "3<eos>")]
    assert len(examples.training) == 1


def test_long_examples_are_truncated_skipped_or_rejected(tmp_path: Path, tokenizer: Tokenizer) -> None:
    long, hopeless = {"prompt": "1", "completion": "2" * 9}, {"prompt": "1" * 9, "completion": "2"}
    path = write(tmp_path / "a.jsonl", SUM, long, hopeless)
    cut = read_examples(config_of(path, max_example_tokens=8, overlong="truncate"), tokenizer)
    assert texts(cut.training, tokenizer) == [("1+2=", "3<eos>"), ("1", "2" * 7)]
    assert (cut.num_truncated, cut.selections[0].num_left_out) == (1, 1)
    kept = read_examples(config_of(path, max_example_tokens=8, overlong="skip"), tokenizer)
    assert (len(kept.training), kept.num_truncated, kept.selections[0].num_left_out) == (1, 0, 2)
    assert kept.selections[0].reasons() == "2 of 3 rows left out: 2 longer than the limit (the longest has 11 tokens)"
    text = problem(path, tokenizer, max_example_tokens=8)
    assert f"{path}:2: the example has 11 tokens, more than the limit of 8" in text
    assert "set sft.overlong to truncate or skip" in text


def test_examples_beside_rollouts_name_their_own_section(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", SUM, {"prompt": "1", "completion": "2" * 9})
    values = {"name": "a", "num_steps": 4, "trainer": {"row_tokens": 128, "epochs": 3}}
    config = Config.model_validate({**values, "examples": {"path": path, "batch_size": 1}})
    examples = read_examples(config, tokenizer)
    assert [selection.key for selection in examples.selections] == ["examples.path"]
    assert examples.summary(config)["epochs"] == "6.00 (0.7 steps per epoch)"  # 4 steps of 3 optimizer steps, 2 examples
    short = Config.model_validate({**values, "examples": {"path": path, "max_example_tokens": 8}})
    with pytest.raises(BrokenRules) as raised:
        read_examples(short, tokenizer)
    assert str(raised.value).startswith("examples.path=")
    assert "raise examples.max_example_tokens and trainer.row_tokens, or set examples.overlong" in str(raised.value)


def test_loss_weights_of_a_batch_add_up_to_its_weight(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", SUM, {"prompt": "1", "completion": "234"})  # 2 and 4 trained tokens, with the end
    data = mean_loss_data(read_examples(config_of(path), tokenizer).training, 0.75)
    weights = np.concatenate([datum.loss_fn_inputs["weights"] for datum in data])
    assert weights[weights != 0].tolist() == [0.125] * 6


def test_huge_example_is_cut_before_tokenization(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, longest = Tokenizer.encode, []

    def recorded(self: Tokenizer, text: str, **options: bool) -> list[int]:
        longest.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    path = write(tmp_path / "a.jsonl", {"prompt": "1", "completion": "2" * 50_000_000})
    cut = read_examples(config_of(path, max_example_tokens=8, overlong="truncate"), tokenizer)
    assert texts(cut.training, tokenizer) == [("1", "2" * 7)]
    assert max(longest) == 1 + 2 * 8 * 512
    assert f"{path}:1: the example has" in problem(path, tokenizer, max_example_tokens=8)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{not json}", "must be valid JSON"),
        ("[1]", "must be a JSON object, got list"),
        ('{"prompt": "1"}', "completion is missing. Add it; every row must have prompt and completion, or messages"),
        ('{"text": "1"}', "prompt is missing"),
        ('{"prompt": "1", "completion": true}', "completion must be a string, got true"),
        ('{"prompt": " ", "completion": "2"}', "prompt is empty"),
        ('{"prompt": "<image> 1?", "completion": "2", "image": "a.png"}', "the text has the placeholder <image>"),
        ('{"prompt": "caf\\u00e9", "completion": "2"}', "no token for some characters"),
        ('{"messages": [{"role": "user"}]}', "messages[0].content must be a string"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "messages require a chat template, but the tokenizer has none"),
    ],
)
def test_invalid_line_is_named_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, line: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be shortened in the message
    path = Path("a.jsonl")
    path.write_text(f"{json.dumps(SUM)}\n\n{line}\n")
    text = problem(path, tokenizer)
    assert text.startswith(f'sft.path="{path}": {path}:3: ')
    assert expected in text


def test_unusable_files_are_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert "file not found" in problem(tmp_path / "none.jsonl", tokenizer)
    path = write(tmp_path / "a.jsonl", SUM)
    assert problem(path, tokenizer, validation_path=tmp_path / "none.jsonl").startswith("sft.validation_path=")
    assert "has none: 1 rows, 0 held out; 1 of 1 rows left out: 1 longer than the limit" in problem(
        path, tokenizer, max_example_tokens=3, overlong="skip"
    )
    assert problem(path, tokenizer, {"system_prompt": "Add."}).startswith("data.system_prompt=")


def test_shipped_examples_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert data_file(Path("chain_sum.jsonl")) == FOLDER / "chain_sum.jsonl"
    assert data_file(Path("quickstart.yaml")) == Path("quickstart.yaml")
    own = write(tmp_path / "chain_sum.jsonl", SUM)
    assert data_file(Path("chain_sum.jsonl")).resolve() == own


def numbered(number: int) -> Examples:
    """Return examples that differ in their first token."""
    mask = np.array([False, True])
    training = tuple(Demonstration(token_ids=np.array([index, 1]), mask=mask) for index in range(number))
    return Examples(training=training, heldout=())


@given(number=st.integers(1, 9), size=st.integers(1, 7), seed=st.integers(0, 2**32 - 1), num_steps=st.integers(1, 12))
def test_every_epoch_has_every_example_once(number: int, size: int, seed: int, num_steps: int) -> None:
    examples = numbered(number)
    batches = [examples.batch(step * size, size, seed) for step in range(num_steps)]
    order = [int(example.token_ids[0]) for batch in batches for example in batch]
    assert len(order) == num_steps * size
    for start in range(0, len(order) - number + 1, number):
        assert sorted(order[start : start + number]) == list(range(number))
    assert set(Counter(order[len(order) // number * number :]).values()) <= {1}
    middle = num_steps // 2  # a resumed run
    assert examples.batch(middle * size, size, seed) == batches[middle]


def test_order_changes_with_seed_and_epoch() -> None:
    examples = numbered(30)

    def order(first: int, seed: int) -> list[int]:
        return [int(example.token_ids[0]) for example in examples.batch(first, 30, seed)]

    assert order(0, 0) != order(30, 0)
    assert order(0, 0) != order(0, 1)


def test_next_examples_follow_those_of_the_last_step_whatever_the_batch_size_was() -> None:
    run = object.__new__(GRPO)  # only its position is asked for
    run.config = load_config("quickstart", ["examples={path: x, batch_size: 16}"])
    run.state = replace(FIRST, step=3, next_example=12)  # three steps with batches of 4
    assert run._first_example == 12
    run.state = replace(run.state, next_example=None)  # of an earlier version
    assert run._first_example == 48
