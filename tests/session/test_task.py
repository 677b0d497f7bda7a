"""Prompts of a task for custom loops, with and without a mixture."""

from pathlib import Path

import pytest

from titanrl.config import Config
from titanrl.data.streams import make_stream
from titanrl.data.tokenizer import load_tokenizer, write_tokenizer
from titanrl.session.session import Task

SUMS = {"task_config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}, "num_prompts": 50}


def test_mixture_alternates_tasks_in_ratio_of_weights(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    mixture = {"sums": {"weight": 2.0}, "others": {}}
    task = Task(Config.model_validate({"name": "a", "num_steps": 1, "data": SUMS | {"mixture": mixture}}), tokenizer, {})
    prompts = task.prompts(60)
    assert [prompt.index for prompt in prompts] == list(range(60))
    assert [prompt.task for prompt in prompts].count("sums") == 40
    assert task.prompts(10, start=30) == prompts[30:40]
    assert {prompt.task for prompt in task.heldout(3, task="others")} == {"others"}
    assert task.heldout(3)[0].task == "sums"
    with pytest.raises(ValueError, match="no such task"):
        task.heldout(1, task="words")


def test_prompts_without_mixture_follow_the_stream(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    config = Config.model_validate({"name": "a", "num_steps": 1, "seed": 3, "data": SUMS})
    stream = make_stream(config.data, tokenizer, seed=3)
    assert Task(config, tokenizer, {}).prompts(4, start=60) == [stream[index] for index in range(60, 64)]
