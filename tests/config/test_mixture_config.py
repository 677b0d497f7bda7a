"""The section `data.mixture`: defaults, settings per task, and rules."""

from pathlib import Path

import pytest

from titanrl.config import Config, ConfigError, load_config
from titanrl.config.data import DataConfig, TaskConfig
from titanrl.config.load import dump
from titanrl.launch.extensions import plugins_of, with_objects

START = "name: a\nnum_steps: 3\n"
TWO = START + "data: {max_prompt_tokens: 48, mixture: {sums: {weight: 3}, words: {source: 'a.py:b', max_prompt_tokens: 16}}}\n"


def loaded(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_tasks_inherit_the_keys_of_data(tmp_path: Path) -> None:
    config = loaded(tmp_path, TWO)
    sums, words = config.data.mixture["sums"], config.data.mixture["words"]
    assert list(config.data.tasks) == ["sums", "words"]
    assert (sums.max_prompt_tokens, words.max_prompt_tokens) == (48, 16)
    assert (sums.weight, words.weight) == (3, 1.0)
    assert config.data.chooses_prompts
    path = tmp_path / "again.yaml"
    path.write_text(dump(config.model_dump()))
    assert load_config(path) == config


def test_data_without_a_mixture_is_its_only_task() -> None:
    config = Config(name="a", num_steps=1, data=DataConfig(task="leg_counting"))
    assert list(config.data.tasks) == ["leg_counting"]
    assert not config.data.chooses_prompts
    assert config.of_task(config.data) == config
    assert config.evaluation_sets["leg_counting"].task == "leg_counting"


def test_task_overrides_sampling_and_advantage(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        START + "data: {mixture: {a: {group_size: 4, max_new_tokens: 50, advantage: pass_at_k, pass_k: 3}, b: {}}}\n",
        "trainer.row_tokens=256",
    )
    a, b = (config.of_task(task) for task in config.data.tasks.values())
    assert (a.rollout.group_size, a.rollout.max_new_tokens) == (4, 50)
    assert (a.algorithm.advantage, a.algorithm.pass_k) == ("pass_at_k", 3)
    assert b.rollout == config.rollout
    assert b.algorithm == config.algorithm
    assert config.max_sequence_tokens == 64 + 50
    sets = config.evaluation_sets
    assert [(eval_set.name, eval_set.task, eval_set.max_new_tokens) for eval_set in sets.values()] == [
        ("a", "a", 50),
        ("b", "b", 26),
    ]


def test_advantage_that_compares_completions_needs_two_of_them(tmp_path: Path) -> None:
    one = START + "rollout: {group_size: 1}\n"
    for alone in ("gae", "reinforce_pp"):
        assert loaded(tmp_path, one, f"algorithm.advantage={alone}").rollout.group_size == 1
    assert loaded(tmp_path, one, "train=false", "rollout.save=dump").rollout.group_size == 1  # there is no advantage
    rule = r"rollout.group_size=1.*\n  rule: grpo compares the completions.*\n  fix:  set rollout.group_size to 2 or more"
    with pytest.raises(ConfigError, match=rule):
        loaded(tmp_path, one, "algorithm.advantage=grpo")
    with pytest.raises(ConfigError, match="dynamic sampling would discard every group"):
        loaded(tmp_path, one, "algorithm.advantage=gae", "rollout.dynamic_sampling=true")
    tasks = START + "data: {mixture: {a: {group_size: 1, advantage: grpo}, b: {}}}\n"
    with pytest.raises(ConfigError, match=r'data.mixture.a.advantage="grpo", data.mixture.a.group_size=1'):
        loaded(tmp_path, tasks)


def test_reward_weights_are_set_per_task() -> None:
    mixture = {
        "a": TaskConfig(rewards={"r": {"function": "exact", "weight": 2.0}}),
        "b": TaskConfig(rewards={"r": {"function": "exact", "weight": 5.0}}),
    }
    config = Config.model_validate({"name": "a", "num_steps": 1, "data": {"mixture": mixture}})
    assert [config.data.weight_of("r", task) for task in (0, 1)] == [2.0, 5.0]


def test_python_objects_are_rejected_with_several_tasks(tmp_path: Path) -> None:
    config = loaded(tmp_path, TWO)
    with pytest.raises(ConfigError, match="a Python object could belong to any task"):
        with_objects(config, {"rewards": lambda completion, entry: 0.0})
    with pytest.raises(ConfigError, match="a sampler chooses among the levels of a curriculum"):
        with_objects(Config(name="a", num_steps=1), {"sampler": object})


def test_custom_objects_of_tasks_are_found_by_key(tmp_path: Path) -> None:
    own = "data.mixture.words.rewards={r: 'a.py:c'}", "data.mixture.sums.advantage=a.py:d"
    curriculum = "data.mixture.sums.curriculum={levels: 2, sampler: 'a.py:e'}"
    plugins = plugins_of(loaded(tmp_path, TWO, *own, curriculum), {})
    assert set(plugins) == {
        "data.mixture.words.source",
        "data.mixture.words.rewards.r",
        "data.mixture.sums.advantage",
        "data.mixture.sums.curriculum.sampler",
    }
