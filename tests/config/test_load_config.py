from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.config import Config, ConfigError, load_config, recorded_config
from titanrl.config.algorithm import ALGORITHM_PRESETS, CORRECTION_PRESETS, AlgorithmConfig
from titanrl.config.load import dump, parse


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_missing_keys_have_their_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "name: a\nnum_steps: 3\nrollout:\n  group_size: 4\n"))
    assert config == Config(name="a", num_steps=3, rollout={"group_size": 4})
    assert config.rollout.groups_per_step == 8
    assert config.run_dir == Path("runs/a")


def test_scientific_notation_without_a_point_is_a_number(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, "name: a\nnum_steps: 3\nalgorithm: {learning_rate: 1e-5, eps: 1E-8, weight_decay: 0}\n")
    )
    assert config.algorithm.learning_rate == 0.00001
    assert config.algorithm.eps == 0.00000001
    assert config.algorithm.weight_decay == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("12:00:00", "12:00:00"),
        ("2024-01-01", "2024-01-01"),
        ("010", "010"),
        ("12_000", 12000),
        ("-.5e+3", -500.0),
        ("true", True),
        ("~", None),
        ("", None),
        ("'5'", "5"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert parse(f"key: {text}")[0] == {"key": value}
    assert type(parse(f"key: {text}")[0]["key"]) is type(value)


def test_later_overrides_win(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nnum_steps: 3\nrollout: {group_size: 4, groups_per_step: 2}\n")
    config = load_config(
        path, ["rollout.group_size=6", "rollout.group_size=16", "algorithm.betas=[0.5, 0.75]", "logging.console=off"]
    )
    assert (config.rollout.group_size, config.rollout.groups_per_step) == (16, 2)
    assert config.algorithm.betas == (0.5, 0.75)
    assert config.logging.console == "off"


def test_override_creates_removes_and_extends_a_section(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nnum_steps: 3\nwarm_start:\n")
    assert load_config(path).warm_start is None
    made = load_config(path, ["warm_start.num_steps=500"]).warm_start
    assert made.num_steps == 500
    assert load_config(path, ["warm_start.num_steps=500", "warm_start=null"]).warm_start is None
    assert load_config(path, ["data.task_config={min_terms: 2}", "data.task_config.max_terms=3"]).data.task_config == {
        "min_terms": 2,
        "max_terms": 3,
    }


def test_override_extends_a_function_that_is_written_in_short(tmp_path: Path) -> None:
    short = "data: {rewards: {right: exact}, environment: calculator}"
    path = write(tmp_path, f"name: a\nnum_steps: 3\n{short}\n")
    data = load_config(path, ["data.rewards.right.weight=2", "data.environment.max_turns=3"]).data
    assert (data.rewards["right"].function, data.rewards["right"].weight) == ("exact", 2.0)
    assert (data.environment.function, data.environment.max_turns) == ("calculator", 3)


def test_stop_texts_and_ids_are_told_apart() -> None:
    stops = load_config("quickstart", ['rollout.stop=["</answer>", 5]', "rollout.keep_stop=true"]).rollout
    assert (stops.stop_texts, stops.stop_ids) == (("</answer>",), (5,))


def test_replayed_groups_are_a_share_of_the_batch() -> None:
    assert load_config("quickstart", ["replay.fraction=0.5"]).replay.num_replayed(8) == 8


def test_override_may_contain_an_equals_sign(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nnum_steps: 3\n")
    assert load_config(path, ["data.system_prompt=a=b"]).data.system_prompt == "a=b"


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nnum_steps: -1\nrollout:\n  group_sise: 4\ntrainer:\n  row_tokens: 7\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, ["seed=x"])
    assert len(raised.value.messages) == 3
    path = write(tmp_path, "name: a\nnum_steps: 1\ntrainer:\n  row_tokens: 51\n  parallelism: {tp: 4}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert len(raised.value.messages) == 3


def test_rules_also_hold_for_configs_built_in_python() -> None:
    with pytest.raises(ValueError, match="constant_length is allowed only when reduction is constant"):
        AlgorithmConfig(constant_length=5)


def test_dumped_config_loads_equal(tmp_path: Path) -> None:
    same = ["one", "list"]
    config = Config(
        name="a",
        num_steps=3,
        output_dir=tmp_path / "runs",
        warm_start={},
        data={"system_prompt": "Two\nlines: # yes", "task_config": {"a": "1e-5", "b": "off", "c": same, "d": same, "e": None}},
        logging={"loggers": ["wandb"]},
    )
    assert load_config(write(tmp_path, dump(config.model_dump()))) == config


TEXTS = (st.text() | st.from_regex(r"[-+.0-9:eE_~]*")).filter(lambda text: "\0" not in text)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
TREES = st.recursive(SCALARS, lambda children: st.lists(children) | st.dictionaries(TEXTS, children), max_leaves=8)


@given(TREES)
def test_any_tree_round_trips_through_yaml(tree: object) -> None:
    assert parse(dump({"key": tree}))[0] == {"key": tree}


def test_preset_sets_keys_that_are_not_given(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nnum_steps: 3\nalgorithm: {preset: dapo, clip_low: 0.1}\n")
    algorithm = load_config(path).algorithm
    assert (algorithm.advantage, algorithm.reduction, algorithm.clip_low, algorithm.clip_high) == (
        "grpo",
        "token_mean",
        0.1,
        0.28,
    )
    assert load_config(path, ["algorithm.clip_high=0.3"]).algorithm.clip_high == 0.3
    assert load_config(path, ["algorithm.preset=gspo"]).algorithm.loss == "gspo"


@pytest.mark.parametrize("preset", ALGORITHM_PRESETS)
def test_algorithm_preset_round_trips(tmp_path: Path, preset: str) -> None:
    config = Config(name="a", num_steps=3, algorithm={"preset": preset})
    assert load_config(write(tmp_path, dump(config.model_dump()))) == config
    values = config.algorithm.model_dump(mode="json")
    assert {key: values[key] for key in ALGORITHM_PRESETS[preset]} == ALGORITHM_PRESETS[preset]


@pytest.mark.parametrize("preset", CORRECTION_PRESETS)
def test_correction_preset_round_trips(tmp_path: Path, preset: str) -> None:
    config = Config(name="a", num_steps=3, algorithm={"proximal": "step_start", "correction": {"preset": preset}})
    assert load_config(write(tmp_path, dump(config.model_dump()))) == config
    values = config.algorithm.correction.model_dump(mode="json")
    assert {key: values[key] for key in CORRECTION_PRESETS[preset]} == CORRECTION_PRESETS[preset]


def test_inputs_are_found_here_or_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
    monkeypatch.chdir(here)
    text = (
        "name: a\nnum_steps: 1\nmodel: {path: model}\ndata: {source: jsonl, path: data.jsonl, rewards: {own: own.py:score}}\n"
        "evaluation: {sets: {b: {data: {source: parquet, path: 'part-*.parquet'}}}}\n"
    )
    file = write(beside, text)

    def paths() -> list[str]:
        config = load_config(file)
        data = config.evaluation.sets["b"].data
        return [str(path) for path in (config.model.path, config.data.path, data.path)] + [config.data.rewards["own"].function]

    assert paths() == ["model", "data.jsonl", "part-*.parquet", f"{here}/own.py:score"]  # none exists
    (beside / "model").mkdir()
    for name in ("data.jsonl", "own.py", "part-0.parquet"):
        (beside / name).touch()
    assert paths() == [f"{beside}/{name}" for name in ("model", "data.jsonl", "part-*.parquet", "own.py:score")]
    (here / "data.jsonl").touch()
    with pytest.raises(ConfigError, match=r'(?s)data.path="data.jsonl".*exists in the current directory and beside the config'):
        load_config(file)
    (beside / "data.jsonl").unlink()
    assert paths()[1] == "data.jsonl"
    (beside / "data.jsonl").symlink_to(here / "data.jsonl")
    assert paths()[1] == "data.jsonl", "both are one file"
    (beside / "data.jsonl").unlink()
    (here / "own.py").touch()
    with pytest.raises(ConfigError, match=r'(?s)data.rewards.own.function="own.py".*write the absolute path of the one that'):
        load_config(file)


def test_recorded_paths_do_not_depend_on_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("quickstart", ["warm_start=null", "data.source=jsonl", "data.path=data.jsonl", "rollout.save=dump"])
    recorded = recorded_config(config)
    monkeypatch.chdir("/")
    again = load_config(write(tmp_path, recorded))
    paths = (again.data.path, again.rollout.save, again.output_dir, again.cache_dir, again.model.path)
    assert paths == (*(tmp_path / name for name in ("data.jsonl", "dump", "runs", "cache")), None)
    shipped = load_config(write(tmp_path, recorded_config(load_config("sft_quickstart"))))
    assert shipped.sft.path.is_file()


def test_prompts_of_another_source_are_not_labelled_as_the_default_task() -> None:
    def task(**data: object) -> str:
        return Config.model_validate({"name": "a", "num_steps": 1, "data": data}).data.task

    assert task() == "chain_sum"
    assert task(source="jsonl", path="a.jsonl") == "prompts"
    assert task(source="jsonl", path="a.jsonl", task="sums") == "sums"
    mixture = {"sums": {"source": "reasoning_gym", "path": None}, "mine": {}}
    config = Config.model_validate(
        {"name": "a", "num_steps": 1, "data": {"source": "jsonl", "path": "a.jsonl", "mixture": mixture}, "device": "cpu"}
    )
    assert [each.task for each in config.data.mixture.values()] == ["chain_sum", "prompts"]
