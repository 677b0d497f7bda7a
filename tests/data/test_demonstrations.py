import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from titanrl.config.data import DataConfig
from titanrl.config.sections import WarmStartConfig
from titanrl.data.examples import Demonstration, chain_sum_demonstrations
from titanrl.data.streams import PromptStream, is_heldout, make_gym_dataset, make_stream
from titanrl.data.tokenizer import Tokenizer

SUMS = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def stream(tokenizer: Tokenizer) -> PromptStream:
    return make_stream(DataConfig(task_config=SUMS), tokenizer, seed=7)


def answer_of(demonstration: Demonstration, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(demonstration.token_ids[demonstration.mask].tolist())


@pytest.mark.parametrize(
    ("expression", "answer", "working"),
    [
        ("7 + 5 - 3", "9", "7+5=12-3=9"),
        ("2 - 9 + 4 - 0", "-3", "2-9=-7+4=-3-0=-3"),
        ("12 - 345", "-333", "12-345=-333"),
        ("7 + -5 - -3", "5", "7+-5=2--3=5"),
        ("8", "8", "8"),
    ],
)
def test_worked_solution_is_the_running_sum(
    tmp_path: Path, tokenizer: Tokenizer, expression: str, answer: str, working: str
) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"prompt": f"{expression} =", "answer": answer, "expression": expression}))
    stream = make_stream(DataConfig(source="jsonl", path=file, heldout_fraction=0.001), tokenizer, seed=0)
    warm_start = WarmStartConfig(num_steps=2, num_long_only_steps=1, short_fraction=1.0, batch_size=1)
    [worked], [short] = chain_sum_demonstrations(stream, tokenizer, warm_start, seed=0)
    assert answer_of(worked, tokenizer) == f"<think>{working}</think><answer>{answer}</answer>"
    assert answer_of(short, tokenizer) == f"<answer>{answer}</answer>"


def test_mask_covers_the_answer_and_its_end(tokenizer: Tokenizer, stream: PromptStream) -> None:
    warm_start = WarmStartConfig(num_steps=1, num_long_only_steps=1, batch_size=32)
    [batch] = chain_sum_demonstrations(stream, tokenizer, warm_start, seed=0)
    for index, demonstration in enumerate(batch):
        prompt_len = len(stream[index].token_ids)
        assert demonstration.token_ids[:prompt_len].tolist() == list(stream[index].token_ids)
        assert demonstration.mask.tolist() == [i >= prompt_len for i in range(len(demonstration.token_ids))]
        assert demonstration.token_ids[-1] == tokenizer.eos_ids[0]


def test_every_demonstration_scores_1(tokenizer: Tokenizer, stream: PromptStream) -> None:
    from reasoning_gym.utils import extract_answer

    warm_start = WarmStartConfig(num_steps=20, num_long_only_steps=10, batch_size=64)
    dataset = make_gym_dataset("chain_sum", SUMS, seed=0, size=1)
    demonstrations = [d for batch in chain_sum_demonstrations(stream, tokenizer, warm_start, seed=0) for d in batch]
    answers = [extract_answer(answer_of(demonstration, tokenizer)) for demonstration in demonstrations]
    assert all(dataset.score_answer(answer, entry=dict(stream[i].entry)) == 1.0 for i, answer in enumerate(answers))
    assert max(demonstration.mask.sum() for demonstration in demonstrations) <= 26  # the quick start's max_new_tokens


def test_short_answers_start_after_the_long_only_steps(tokenizer: Tokenizer, stream: PromptStream) -> None:
    warm_start = WarmStartConfig(num_steps=30, num_long_only_steps=10, short_fraction=0.75, batch_size=64)
    batches = list(chain_sum_demonstrations(stream, tokenizer, warm_start, seed=0))
    assert [len(batch) for batch in batches] == [64] * 30
    is_short = [["<think>" not in answer_of(demonstration, tokenizer) for demonstration in batch] for batch in batches]
    assert not any(map(any, is_short[:10]))
    assert np.mean(is_short[10:]) == pytest.approx(0.75, abs=0.04)  # 1280 draws: standard deviation 0.012


def test_demonstrations_use_training_questions_and_depend_on_the_seed(tokenizer: Tokenizer, stream: PromptStream) -> None:
    warm_start = WarmStartConfig(num_steps=10, num_long_only_steps=0, batch_size=16)

    def texts(seed: int) -> list[str]:
        batches = chain_sum_demonstrations(stream, tokenizer, warm_start, seed)
        return [tokenizer.decode(demonstration.token_ids.tolist()) for batch in islice(batches, 10) for demonstration in batch]

    assert texts(0) == texts(0) != texts(1)
    assert not any(is_heldout(stream[i].text, 0.2) and text.startswith(stream[i].text) for i, text in enumerate(texts(0)))
