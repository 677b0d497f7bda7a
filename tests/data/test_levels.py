"""Prompts by level of a curriculum, and the sampler that moves by success rate."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanrl.config.data import CurriculumConfig, DataConfig
from titanrl.config.errors import BrokenRules
from titanrl.data.mixture import MixedTask, Mixture, Outcome, Sampler, SuccessRate, make_sampler
from titanrl.data.streams import gym_levels, make_encoder, open_prompts
from titanrl.data.tokenizer import Tokenizer

TERMS = {"min_digits": 1, "max_digits": 1, "min_terms": 2}


def sums_file(folder: Path, values: list[Any]) -> Path:
    """Write a prompt for each value of the field `level`."""
    path = folder / "sums.jsonl"
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n), "level": value} for n, value in enumerate(values)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def levels_of(tokenizer: Tokenizer, path: Path, **curriculum: Any) -> list[set[Any]]:
    """Return the field values of one epoch, per level."""
    section = CurriculumConfig(field="level", **curriculum)
    config = DataConfig(source="jsonl", path=path, heldout_fraction=0.1, curriculum=section)
    prompts = open_prompts("sums", config, make_encoder(config, tokenizer), seed=7)
    return [
        {prompts.prompt(0, level, place).entry["metadata"]["level"] for place in range(60)}
        for level in range(section.num_levels)
    ]


def test_file_is_divided_by_edges_values_or_equal_groups(tokenizer: Tokenizer, tmp_path: Path) -> None:
    numbers = sums_file(tmp_path, [n % 6 for n in range(90)])
    assert levels_of(tokenizer, numbers, edges=(1, 4)) == [{0}, {1, 2, 3}, {4, 5}]
    assert levels_of(tokenizer, numbers, values=("0", "5", "1", "2", "3", "4"))[1] == {5}
    first, second = levels_of(tokenizer, numbers, levels=2)
    assert max(first) <= min(second)
    assert {0, 1} <= first
    assert {4, 5} <= second


def test_prompts_of_a_level_keep_run_index_and_task_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = sums_file(tmp_path, [n % 2 for n in range(20)])
    config = DataConfig(source="jsonl", path=path, curriculum=CurriculumConfig(field="level", levels=2))
    prompt = open_prompts("small", config, make_encoder(config, tokenizer), seed=7).prompt(41, 1, 3)
    assert (prompt.index, prompt.task, prompt.entry["metadata"]["level"]) == (41, "small", 1)


@pytest.mark.parametrize(
    ("values", "curriculum", "text"),
    [
        ([1, None, 2], {"levels": 2}, "every prompt must have this metadata field"),
        (["a", "b"], {"levels": 2}, "the field must be a number"),
        (["a", "b"], {"values": ("a", "c")}, "every value of level must belong to a level"),
        ([1, 1], {"edges": (5,)}, "every level must have a training prompt, but level 1 of 2 has none"),
    ],
)
def test_prompts_that_do_not_fit_the_levels_are_an_error(
    tokenizer: Tokenizer, tmp_path: Path, values: list[Any], curriculum: dict[str, Any], text: str
) -> None:
    path = sums_file(tmp_path, [value for value in values for _ in range(10)])
    with pytest.raises(BrokenRules, match=text):
        levels_of(tokenizer, path, **curriculum)


def test_task_configs_change_the_options_of_the_task(tokenizer: Tokenizer) -> None:
    curriculum = CurriculumConfig(task_configs=({"max_terms": 2}, {"min_terms": 4, "max_terms": 4}))
    config = DataConfig(task_config=TERMS, num_prompts=50, curriculum=curriculum)
    prompts = open_prompts("chain_sum", config, make_encoder(config, tokenizer), seed=7)
    for level, num_terms in ((0, 2), (1, 4)):
        expressions = [prompts.prompt(0, level, place).entry["metadata"]["expression"] for place in range(20)]
        assert {len(expression.split()) for expression in expressions} == {2 * num_terms - 1}


def test_reasoning_gym_levels_rise_and_keep_configured_options() -> None:
    easy, hard = gym_levels("chain_sum", {"min_digits": 1, "max_digits": 1}, 2)
    assert easy != hard
    assert "max_digits" not in easy
    assert easy["max_terms"] <= hard["max_terms"]
    with pytest.raises(BrokenRules, match="has no curriculum"):
        gym_levels("list_functions", {}, 2)
    with pytest.raises(BrokenRules, match=r"data\.curriculum\.levels=900.* the curriculum of this task has"):
        gym_levels("chain_sum", {}, 900)


def feed(sampler: SuccessRate, rewards: tuple[float, ...], num: int = 1, level: int | None = None) -> None:
    """Report groups of the currently chosen level."""
    for index in range(num):
        sampler.observe(Outcome(sampler.choose() if level is None else level, index, rewards))


def test_success_rate_moves_both_ways_and_ignores_other_levels() -> None:
    sampler = SuccessRate(CurriculumConfig(levels=3, window=4, raise_at=0.75, lower_at=0.25), seed=0)
    feed(sampler, (1.0, 1.0, 1.0, 0.0), 3)
    assert sampler.choose() == 0
    feed(sampler, (1.0, 1.0, 1.0, 0.0))
    assert sampler.choose() == 1
    feed(sampler, (1.0, 1.0), 9, level=0)  # in flight during the move
    assert sampler.metrics() == {"level": 1.0, "moves": 1.0}
    feed(sampler, (0.5, 0.0), 4)  # a reward of 0.5 is no success
    assert sampler.choose() == 0
    feed(sampler, (0.0, 0.0), 9)
    assert sampler.choose() == 0
    assert sampler.metrics() == {"level": 0.0, "moves": 2.0, "success_rate": 0.0}
    feed(sampler, (1.0, 1.0), 20)
    assert sampler.choose() == 2
    feed(sampler, (1.0, 1.0), 20)
    assert sampler.choose() == 2


def test_state_continues_the_choices_with_reviews() -> None:
    config = CurriculumConfig(levels=4, window=3, start_level=2, review=0.5)
    sampler, other = SuccessRate(config, seed=3), SuccessRate(config, seed=3)
    choices = [sampler.choose() for _ in range(200)]
    assert 60 < choices.count(2) < 140
    assert set(choices) == {0, 1, 2}
    feed(sampler, (1.0, 0.0), 2)
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert [sampler.choose() for _ in range(20)] == [other.choose() for _ in range(20)]
    assert sampler.metrics() == other.metrics()
    fewer = SuccessRate(CurriculumConfig(levels=2, window=3), seed=3)
    fewer.load_state_dict(sampler.state_dict())
    assert fewer.metrics() == {"level": 1.0, "moves": 0.0}


def test_sampler_by_import_path_gets_levels_seed_and_options(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from titanrl.data.mixture import SuccessRate\n"
        "from titanrl.config.data import CurriculumConfig\n"
        "def fixed(num_levels, seed, level=0):\n"
        "    return SuccessRate(CurriculumConfig(levels=num_levels, start_level=level), seed)\n"
        "def nothing(num_levels, seed):\n"
        "    return object()\n"
        "def fails(num_levels, seed):\n"
        "    raise KeyError('no')\n"
        "class Stateless(SuccessRate):\n"
        "    def __init__(self, num_levels, seed):\n"
        "        super().__init__(CurriculumConfig(levels=num_levels), seed)\n"
        "    def state_dict(self):\n"
        "        pass\n"
        "class Waits(Stateless):\n"
        "    async def choose(self):\n"
        "        return 0\n"
        "class Observes(Waits):\n"
        "    def choose(self):\n"
        "        return 0\n"
        "    def observe(self):\n"
        "        pass\n"
    )

    def made(name: str, **options: Any) -> Sampler:
        config = CurriculumConfig(levels=3, sampler=f"{tmp_path}/own.py:{name}", options=options)
        return make_sampler(config, 0, None, key="data.curriculum.sampler")

    assert made("fixed", level=2).choose() == 2
    with pytest.raises(ValueError, match=r"data\.curriculum\.sampler: wrong signature"):
        made("fixed", levels=2)
    with pytest.raises(ValueError, match=r"not callable \(got \S+:nothing\.choose, .* Write it as `def choose\(self\) -> int`"):
        made("nothing")
    with pytest.raises(ValueError, match="creating the sampler raised KeyError"):
        made("fails")
    for name, problem in {
        "Stateless": r"state_dict\(\), which must return a mapping .* raised TypeError: .* \(got \S+:Stateless\)",
        "Waits": r"must not be async, .* \(got \S+:Waits\.choose\)\. Write it as `def choose\(self\) -> int`",
        "Observes": r"wrong signature: .* \(got \S+:Observes\.observe\(\)\)\. Write it as `def observe\(self, ",
    }.items():
        with pytest.raises(ValueError, match=problem):
            made(name)


def test_error_of_a_sampler_names_its_method_and_its_task() -> None:
    class Fails(SuccessRate):
        def observe(self, outcome: Outcome) -> None:
            raise KeyError("level")

    mixture = Mixture([MixedTask(name="sums", sampler=Fails(CurriculumConfig(levels=2), 0), num_levels=2)])
    mixture.draw(0)
    mixture.observe(0, (1.0,))
    with pytest.raises(ValueError, match=r"^curriculum\.sampler: observe\(\) raised KeyError: 'level' \(got sums\)\. Correct"):
        mixture.draw(1)
