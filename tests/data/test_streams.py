import json
from pathlib import Path
from typing import Any

import pytest

from titanrl.config.data import AnswerConfig, DataConfig, RewardConfig
from titanrl.data.streams import is_heldout, make_gym_dataset, make_stream
from titanrl.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer

CASES = Path(__file__).with_name("cases")
SUMS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}


def gym_config(**changes: Any) -> DataConfig:
    return DataConfig(**{"task_config": SUMS} | changes)


def write_jsonl(path: Path, *lines: Any) -> DataConfig:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return DataConfig(source="jsonl", task="sums", path=path)


def write_sums(path: Path, num: int) -> DataConfig:
    return write_jsonl(path, *({"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(num)))


def test_question_is_held_out_by_the_hash_of_its_text() -> None:
    # The check value of CRC-32 is crc32("123456789") = 0xCBF43926 = 3421780262.
    assert is_heldout("123456789", 0.263)
    assert not is_heldout("123456789", 0.262)


def test_prompt_is_the_unchanged_question(tokenizer: Tokenizer) -> None:
    prompt = make_stream(gym_config(), tokenizer, seed=7)[3]
    assert prompt.index == 3
    assert prompt.task == "chain_sum"
    assert (
        prompt.text == f"State the final answer to the following arithmetic problem: {prompt.entry['metadata']['expression']} ="
    )
    assert list(prompt.token_ids) == tokenizer.encode(prompt.text)
    assert prompt.entry.keys() == {"question", "answer", "metadata"}


def test_prompt_depends_only_on_seed_and_index(tokenizer: Tokenizer) -> None:
    config = gym_config(num_prompts=100)
    forwards = make_stream(config, tokenizer, seed=7)
    backwards = make_stream(config, tokenizer, seed=7)
    wanted = [*range(20), 99, 100, 12_345]
    assert [forwards[i] for i in wanted] == [backwards[i] for i in reversed(wanted)][::-1]
    other = make_stream(config, tokenizer, seed=8)
    assert [forwards[i].text for i in range(20)] != [other[i].text for i in range(20)]


def test_every_epoch_has_the_same_items_in_another_order(tokenizer: Tokenizer) -> None:
    stream = make_stream(gym_config(num_prompts=50), tokenizer, seed=7)
    assert stream.num_prompts == 50
    first, second = ([stream[i].text for i in range(start, start + 50)] for start in (0, 50))
    assert first != second
    assert sorted(first) == sorted(second)


def test_negative_index_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(IndexError, match="indices start at 0"):
        make_stream(gym_config(), tokenizer, seed=7)[-1]


def test_heldout_prompts_are_distinct_fixed_and_never_trained_on(tokenizer: Tokenizer) -> None:
    stream = make_stream(gym_config(num_prompts=2000), tokenizer, seed=7)
    heldout = stream.heldout(200)
    assert [prompt.index for prompt in heldout] == list(range(200))
    questions = {prompt.text for prompt in heldout}
    assert len(questions) == 200
    assert questions.isdisjoint(stream[i].text for i in range(2000))
    assert stream.heldout(50) == heldout[:50]
    assert make_stream(gym_config(), tokenizer, seed=8).heldout(200) == heldout


def test_long_prompts_are_skipped(tokenizer: Tokenizer) -> None:
    config = gym_config(num_prompts=200, max_prompt_tokens=12)
    stream = make_stream(config, tokenizer, seed=7)
    prompts = [stream[i] for i in range(200)]
    assert {len(prompt.token_ids) for prompt in prompts} == {12}  # half of the questions have 16 tokens
    assert all(len(prompt.token_ids) == 12 for prompt in stream.heldout(20))


def test_limit_that_no_prompt_meets_is_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"usable training prompt, but none of 125 .*Raise data\.max_prompt_tokens"):
        make_stream(gym_config(max_prompt_tokens=4), tokenizer, seed=7)


def test_evaluation_takes_all_questions_of_a_task_with_few(tokenizer: Tokenizer) -> None:
    one_term = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}  # ten questions
    stream = make_stream(gym_config(task_config=one_term, heldout_fraction=0.5), tokenizer, seed=7)
    heldout = {prompt.text for prompt in stream.heldout(11)}
    assert 0 < len(heldout) < 10
    assert all(is_heldout(text, 0.5) for text in heldout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chainsum"}, 'data.task="chainsum": .*Did you mean chain_sum?'),
        ({"task_config": {"min_term": 3}}, "rejects these options.*unexpected keyword argument 'min_term'"),
        ({"task_config": {"min_terms": 9}}, "rejects these options.*max_terms must be >= min_terms"),
        ({"task_config": {"seed": 1}}, "data.task_config.seed=1: TitanRL sets this option"),
        ({"system_prompt": "Add."}, "requires a chat template, but the tokenizer has no chat template"),
        ({"task": "maze", "task_config": {}, "max_prompt_tokens": 4096}, "no token for some characters"),
    ],
)
def test_unusable_task_is_rejected_when_opened(tokenizer: Tokenizer, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_stream(gym_config(**changes), tokenizer, seed=7)


def test_composite_task_mixes_tasks(tokenizer: Tokenizer) -> None:
    datasets = [{"name": "chain_sum", "weight": 1, "config": SUMS}, {"name": "spell_backward", "weight": 1, "config": {}}]
    config = gym_config(task="composite", task_config={"datasets": datasets})
    stream = make_stream(config, tokenizer, seed=7)
    prompts = [stream[i] for i in range(40)]
    assert {prompt.entry["metadata"]["source_dataset"] for prompt in prompts} == {"chain_sum", "spell_backward"}
    scorer = make_gym_dataset(config.task, config.task_config, seed=0, size=1)
    assert all(scorer.score_answer(prompt.entry["answer"], entry=prompt.entry) == 1.0 for prompt in prompts)


def test_file_is_split_and_epochs_contain_each_question_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    stream = make_stream(write_sums(tmp_path / "sums.jsonl", 100), tokenizer, seed=7)
    num = stream.num_prompts
    heldout = {prompt.text for prompt in stream.heldout(100 - num)}
    assert heldout == {f"{i} + {i} =" for i in range(100) if is_heldout(f"{i} + {i} =", 0.2)}
    epochs = [[stream[i].text for i in range(start, start + num)] for start in (0, num)]
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) == set(epochs[1]) == {f"{i} + {i} =" for i in range(100)} - heldout
    assert stream[5].task == "sums"


def test_duplicate_and_long_questions_are_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{"prompt": "1 + 2 =", "answer": "3"}, {"prompt": "1 + 2 =", "answer": "4"}, {"prompt": "1" * 65, "answer": "0"}]
    config = write_jsonl(tmp_path / "four.jsonl", *lines, lines[0])
    config.path.write_bytes(b"\xef\xbb\xbf" + config.path.read_bytes().replace(b"\n", b"\r\n") + b" \r\n")
    stream = make_stream(config, tokenizer, seed=0)
    assert stream.num_prompts == 1
    assert stream[0].entry["answer"] == "3"
    assert (stream.selection.num_rows, stream.selection.num_training, stream.selection.num_heldout) == (5, 1, 0)
    assert stream.selection.is_mostly_left_out
    assert stream.selection.reasons().startswith("4 of 5 rows left out: 1 duplicates with another answer, 1 longer than ")
    assert stream.selection.left_out == {
        "duplicates with another answer": 1,
        "longer than data.max_prompt_tokens (the longest has 65 tokens)": 1,
        "duplicates": 1,
        "blank lines": 1,
    }


def test_repeated_long_questions_count_as_long(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{"prompt": "1 =", "answer": "1"}, *[{"prompt": "1" * 65, "answer": "0"}] * 2]
    counts = make_stream(write_jsonl(tmp_path / "a.jsonl", *lines), tokenizer, seed=0).selection.left_out
    assert list(counts.values()) == [2]


def test_answers_of_gsm8k_need_an_extraction(tokenizer: Tokenizer) -> None:
    config = DataConfig(source="jsonl", path=CASES / "gsm8k.jsonl", heldout_fraction=0.001, max_prompt_tokens=512)
    with pytest.raises(ValueError, match=r'gsm8k.jsonl:1: answer ends with "#### 31".* Set data\.answer to \{after: "####"\}'):
        make_stream(config, tokenizer, seed=0)
    math = config.model_copy(update={"rewards": {"math": RewardConfig(function="math_verify")}})
    with pytest.raises(ValueError, match="answer ends with"):
        make_stream(math, tokenizer, seed=0)
    stream = make_stream(config.model_copy(update={"answer": AnswerConfig(after="####")}), tokenizer, seed=0)
    entries = [prompt.entry for prompt in stream.training_prompts()]
    assert [entry["answer"] for entry in entries] == ["31", "1,014"]
    assert entries[1]["metadata"]["answer"].endswith("books.\n#### 1,014")
    with pytest.raises(ValueError, match=r'answer must contain "Answer:" \(data\.answer\.after\), but is "In 7 days'):
        make_stream(config.model_copy(update={"answer": AnswerConfig(after="Answer:")}), tokenizer, seed=0)


def test_solutions_of_math_need_a_reward_that_reads_their_box(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = write_jsonl(tmp_path / "a.jsonl", {"prompt": "1", "answer": "So $x = 3 - 1$, and $\\boxed{2}$."})
    with pytest.raises(ValueError, match=r"answer is a solution with a \\boxed, .* Use the reward math_verify"):
        make_stream(config, tokenizer, seed=0)
    math = config.model_copy(update={"rewards": {"math": RewardConfig(function="math_verify")}})
    assert make_stream(math, tokenizer, seed=0).num_prompts == 1


def test_answers_of_several_lines_are_noted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    stream = make_stream(write_jsonl(tmp_path / "a.jsonl", {"prompt": "1", "answer": "a\nb"}), tokenizer, seed=0)
    assert stream.selection.notes[0].startswith("1 answers have several lines")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json}", "must be valid JSON"),
        ("[1]", "must be a JSON object, got list"),
        ('{"prompt": "1 + 2 ="}', "answer is missing"),
        ('{"prompt": null, "answer": "3"}', "prompt is missing"),
        ('{"prompt": "1 + 2 =", "answer": true}', "answer must be text or a number, got true. Write the text that the model"),
        ('{"prompt": "1 + 2 =", "answer": NaN}', "answer is missing"),
        ('{"prompt": "1 + 2 =", "answer": "3", "answer": "4"}', 'the key "answer" occurs more than once in an object'),
        ('{"prompt": "1", "answer": "1", "x": ' + "9" * 5000 + "}", "must not have an integer of more than 4,300 digits"),
        ('{"prompt": " ", "answer": "3"}', "prompt is empty"),
        (b'{"prompt": "\xff", "answer": "3"}', "must be UTF-8 text"),
        (b'{"prompt": "1", "answer": "3"}\r{"prompt": "2", "answer": "3"}', "must be valid JSON .* End lines with a line feed"),
        ('{"prompt": "\\ud800", "answer": "3"}', r"must be valid Unicode, but contains the lone surrogate U\+D800"),
        (
            '{"prompt": "1", "answer": "3", "level": "\\ud83d"}',
            r"must be valid Unicode, but contains the lone surrogate U\+D83D",
        ),
        ("[" * 10_000 + "]" * 10_000, "must not be nested deeper than 100 levels"),
        ('{"prompt": "1", "answer": "3", "x": ' + "[" * 101 + "]" * 101 + "}", "must not be nested deeper than 100 levels"),
    ],
)
def test_invalid_line_is_reported_by_number(tmp_path: Path, tokenizer: Tokenizer, line: str | bytes, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt": "1 + 2 =", "answer": "3"}\n\n' + (line if isinstance(line, bytes) else line.encode()))
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: {message}"):
        make_stream(DataConfig(source="jsonl", path=file), tokenizer, seed=0)


def test_file_with_too_few_questions_is_rejected(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="file not found"):
        make_stream(DataConfig(source="jsonl", path=tmp_path / "missing"), tokenizer, seed=0)
    with pytest.raises(ValueError, match=r"none of its 1 rows is usable \(0 held out; 1 of 1 rows left"):
        make_stream(write_jsonl(tmp_path / "long.jsonl", {"prompt": "1" * 65, "answer": "0"}), tokenizer, seed=0)
    stream = make_stream(write_sums(tmp_path / "sums.jsonl", 20), tokenizer, seed=0)
    assert len(stream.heldout(21)) == stream.selection.num_heldout > 0
    config = write_sums(tmp_path / "sums.jsonl", 3).model_copy(update={"heldout_fraction": 0.001})
    with pytest.raises(ValueError, match=r"evaluation\.num_prompts=21, .* must have a held-out prompt, but has none\. Raise"):
        make_stream(config, tokenizer, seed=0).heldout(21)


def test_chat_template_is_applied_unless_disabled(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant] "
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(tmp_path)
    config = write_jsonl(tmp_path / "one.jsonl", {"prompt": "1 + 2 =", "answer": "3"})

    def prompt_text(**changes: Any) -> str:
        return tokenizer.decode(make_stream(config.model_copy(update=changes), tokenizer, seed=0)[0].token_ids)

    assert prompt_text() == "[user] 1 + 2 = [assistant] "
    assert prompt_text(system_prompt="Add.") == "[system] Add. [user] 1 + 2 = [assistant] "
    assert prompt_text(chat_template="never") == "1 + 2 ="
    with pytest.raises(ValueError, match=r"data\.chat_template is never"):
        prompt_text(chat_template="never", system_prompt="Add.")


def test_evaluation_file_needs_no_training_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = write_sums(tmp_path / "test.jsonl", 10).model_copy(update={"heldout_fraction": 0.999})
    stream = make_stream(config, tokenizer, seed=7, is_trained_on=False)
    assert [prompt.text for prompt in stream.heldout(10, split="all")] == [f"{i} + {i} =" for i in range(10)]
    assert len(stream.heldout(11, split="all", key="evaluation.sets.a")) == 10
    short = make_stream(config.model_copy(update={"max_prompt_tokens": 1}), tokenizer, seed=7, is_trained_on=False)
    with pytest.raises(ValueError, match=r"evaluation\.sets\.a\.num_prompts=11: .* has none \(10 of 10 rows left out: 10"):
        short.heldout(11, split="all", key="evaluation.sets.a")
    with pytest.raises(ValueError, match="must have a training prompt"):
        make_stream(config.model_copy(update={"heldout_fraction": 0.9999}), tokenizer, seed=7)


def test_every_question_of_a_task_can_be_evaluated(tokenizer: Tokenizer) -> None:
    stream = make_stream(gym_config(), tokenizer, seed=7, is_trained_on=False)
    prompts = stream.heldout(50, split="all")
    assert len({prompt.text for prompt in prompts}) == 50
    assert 0 < sum(is_heldout(prompt.text, 0.2) for prompt in prompts) < 50
