"""Error messages for invalid configurations: location, key and value, rule, and fix."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.config.wrong import GOOD, complaint
from titanrl.config import ConfigError, load_config
from titanrl.config.load import dump, sections


def test_unknown_key(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "rollout:\n  group_sise: 8\n") == (
        "configs/run.yaml:4: rollout.group_sise=8\n"
        "  rule: no such key in rollout\n"
        "  fix:  did you mean rollout.group_size? Keys of rollout: groups_per_step, group_size, min_group_size, "
        "max_new_tokens, temperature, top_p, top_k, min_p, stop, keep_stop, dynamic_sampling, window, num_spare_completions, "
        "group_filter, num_workers, starvation_timeout_s, save, replay"
    )


def test_key_in_the_wrong_section(tmp_path: Path) -> None:
    assert "did you mean rollout.group_size?" in complaint(tmp_path, GOOD + "group_size: 8\n")
    text = complaint(tmp_path, GOOD, "rollouts.group_size=8")
    assert text.startswith("override rollouts.group_size=8: rollouts=")
    assert "did you mean rollout?" in text


@pytest.mark.parametrize(
    ("unknown", "suggested"),
    [
        ("learning_rate", "algorithm.learning_rate"),
        ("lr", "algorithm.learning_rate"),
        ("kl_coef", "algorithm.kl.coef"),
        ("trainer.tp", "trainer.parallelism.tp"),
        ("algorithm.num_steps", "num_steps"),
        ("max_tokens", "rollout.max_new_tokens"),
        ("warm_start.lr", "warm_start.learning_rate"),
        ("steps", "num_steps"),
        ("checkpoint.keep", "checkpoint.keep_last"),
        ("evaluation.steps", "evaluation.every_steps"),
        ("batch_size", "rollout.groups_per_step"),
        ("algorithm.beta", "algorithm.kl.coef"),
        ("trainer.gradient_checkpointing", "trainer.activation_checkpointing"),
        ("dtype", "trainer.dtype or generator.dtype"),
        ("evaluation.sets.hard.num_sample", "evaluation.sets.hard.num_samples"),
        ("rollout.temprature", "rollout.temperature"),
        ("numSteps", "num_steps"),
    ],
)
def test_unknown_key_suggests_the_most_similar_key_of_any_section(tmp_path: Path, unknown: str, suggested: str) -> None:
    assert f"fix:  did you mean {suggested}? " in complaint(tmp_path, GOOD, f"{unknown}=1")


def test_unknown_key_unlike_any_other_has_no_suggestion(tmp_path: Path) -> None:
    assert "fix:  remove it. Keys of rollout" in complaint(tmp_path, GOOD, "rollout.xyzzy=1")


@pytest.mark.parametrize(
    ("value", "shown"), [("[1.5]", "[0]=1.5"), ("[true]", "[0]=true"), ('[""]', '[0]=""'), ("[-1]", "[0]=-1")]
)
def test_wrong_stop_text_is_reported_once(tmp_path: Path, value: str, shown: str) -> None:
    text = complaint(tmp_path, GOOD, f"rollout.stop={value}")
    assert text.count("rule:") == 1
    assert f"rollout.stop{shown}" in text
    assert "rule: must be a string or an integer >= 0" in text


def test_every_integer_has_an_upper_bound() -> None:
    unbounded = [
        f"{section.path}.{key}"
        for section in sections()
        for key, node in section.keys.items()
        for option in (node, *node.get("anyOf", ()))
        if option.get("type") == "integer" and not {"enum", "maximum"} & option.keys()
    ]
    assert unbounded == []


@pytest.mark.parametrize("key", ["rollout.num_workers", "generator.replicas", "sandbox.num_processes", "max_staleness"])
def test_huge_count_is_rejected_with_its_upper_bound(tmp_path: Path, key: str) -> None:
    assert "and <= 10,000\n" in complaint(tmp_path, GOOD, f"{key}=1000000000000")


def test_wrong_type(tmp_path: Path) -> None:
    assert complaint(tmp_path, 'name: a\nnum_steps: "5"\n') == (
        'configs/run.yaml:2: num_steps="5"\n'
        "  rule: must be an integer >= 1 and <= 100,000,000\n"
        "  fix:  remove the quotes. Number of training steps. Each step trains on one batch of "
        "`rollout.groups_per_step` groups."
    )
    assert complaint(tmp_path, GOOD, "rollout.group_size=abc") == (
        'override rollout.group_size=abc: rollout.group_size="abc"\n'
        "  rule: must be an integer >= 1 and <= 1,000,000\n"
        "  fix:  the default is 8. Number of completions per prompt. Most advantages compare the completions of a group, so "
        "they need at least two; `gae`, `reinforce_pp`, custom advantages and distillation also work with one."
    )
    assert "name=5\n  rule: must be a string" in complaint(tmp_path, "name: 5\nnum_steps: 3\n")
    assert "seed=true\n  rule: must be an integer >= 0" in complaint(tmp_path, GOOD + "seed: true\n")
    assert "dynamic_sampling=1\n  rule: must be true or false" in complaint(tmp_path, GOOD + "rollout: {dynamic_sampling: 1}\n")
    assert "sandbox=5\n  rule: must be a section\n  fix:  write its keys below it" in complaint(tmp_path, GOOD + "sandbox: 5\n")
    assert "algorithm.betas=[0.9]\n  rule: must be a list of 2 numbers" in complaint(
        tmp_path, GOOD + "algorithm: {betas: [0.9]}\n"
    )
    assert "generator.vllm has the key 1\n  rule: its keys must be strings" in complaint(
        tmp_path, GOOD + "generator: {vllm: {1: 2}}\n"
    )
    assert 'data.columns has the key "promt"\n  rule: its keys must be among prompt' in complaint(
        tmp_path, GOOD + "data: {columns: {promt: q}}\n"
    )


def test_value_out_of_range(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "algorithm:\n  betas: [0.9, 1.5]\n") == (
        "configs/run.yaml:4: algorithm.betas[1]=1.5\n"
        "  rule: must be a number >= 0 and < 1\n"
        "  fix:  the default is [0.9, 0.95]. AdamW's decay rates of the first and second moment."
    )
    text = complaint(tmp_path, GOOD, "rollout.temperature=0.0")
    assert "temperature=0.0\n  rule: must be a number >= 0.01 and <= 2\n" in text


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nothing.yaml: configuration file\n  rule: must be a YAML file, but it does not exist"
    ):
        load_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="but it is a directory"):
        load_config(tmp_path)


def test_invalid_yaml(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "rollout: [1\n") == (
        "configs/run.yaml:3: rollout: [1\n"
        "  rule: must be YAML: expected ',' or ']', but got '<stream end>'\n"
        "  fix:  correct the syntax; strings that contain ': ' or ' #' need quotes"
    )
    assert "duplicate key num_steps, first defined at line 2\n  fix:  keep one of them" in complaint(
        tmp_path, GOOD + "num_steps: 4\n"
    )
    assert "duplicate key" in complaint(tmp_path, "rollout: {group_size: 2, group_size: 3}\n")
    assert "run.yaml:3: rollout: &x {}\n  rule: must be YAML: anchors" in complaint(tmp_path, GOOD + "rollout: &x {}\n")
    assert "the tag !!python/name:os.system is not supported" in complaint(tmp_path, "name: !!python/name:os.system\n").replace(
        "tag:yaml.org,2002:", "!!"
    )


@pytest.mark.parametrize(
    ("text", "found"), [("", "is empty"), ("# nothing\n", "is empty"), ("- 1\n", "contains [1]"), ("abc\n", 'contains "abc"')]
)
def test_file_without_a_mapping(tmp_path: Path, text: str, found: str) -> None:
    assert f"run.yaml:1: configuration file\n  rule: must be a mapping of keys, but it {found}" in complaint(tmp_path, text)


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="must be a readable UTF-8 file"):
        load_config(path)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("9" * 5000, "must be YAML: an integer has more than 100 digits"),
        ("[" * 5000 + "]" * 5000, "must be YAML: the value is nested deeper than 50 levels"),
        ("{a: " * 5000 + "1" + "}" * 5000, "must be YAML: the value is nested deeper than 50 levels"),
        ('"a\\0b"', "must be YAML: the character U+0000 is not supported"),
        ('"\\ud800"', "must be YAML: the character U+D800 is not supported"),
    ],
)
def test_unconvertible_value_is_an_error_with_its_location(value: str, rule: str, tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + f"data:\n  task: {value}\n")
    assert text.startswith("configs/run.yaml:4: ")
    assert f"\n  rule: {rule}\n" in text
    text = complaint(tmp_path, GOOD, f"data.task={value}")
    assert text.startswith("override data.task=")
    assert rule in text
    assert len(text) < 6000


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        (f"output_dir={'a' * 300}", "a file or directory name must not be longer than 255 bytes"),
        ("model.path=" + "\u00e9" * 130 + "/x", "a file or directory name must not be longer than 255 bytes"),
        (f"cache_dir={'a/' * 2000}", "a path must not be longer than 3,000 bytes, but has 3,999"),
        (f"name={'a' * 201}", "must be a string matching"),
        (".".join(["a"] * 3000) + "=1", "must have the form key.path=value, with no empty name in the path"),
        ("a" * 100_000 + "=1", "no such key at the top level"),
        ("data.rewards={\u00b2: exact}", "a reward's name must consist of letters, digits and _"),
    ],
)
def test_overlong_names_and_paths_are_rejected(override: str, rule: str, tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD, override)
    assert f"rule: {rule}" in text
    assert len(text) < 10_000


def test_configuration_with_an_overlong_name_or_size_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(File name too long\)"):
        load_config("a" * 300)
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "# long\n" * 200_000)
    with pytest.raises(ConfigError, match=r"must not be larger than 1,000,000 bytes, but has 1,400,021"):
        load_config(path)


def test_unknown_choice(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "trainer:\n  dtype: float16\n") == (
        'configs/run.yaml:4: trainer.dtype="float16"\n  rule: must be one of float32, bfloat16\n  fix:  choose one of them'
    )


@pytest.mark.parametrize(
    "unknown",
    ["nodes", "dropout", "sp", "tokenizer", "max_length", "num_gpus", "num_epochs", "ref_model", "train_files", "hosts.nodes"],
)
def test_key_of_another_meaning_is_never_suggested(tmp_path: Path, unknown: str) -> None:
    assert "fix:  remove it. Keys " in complaint(tmp_path, GOOD, f"{unknown}=1")


@pytest.mark.parametrize(
    ("text", "rule", "fix"),
    [
        ("train: yes", "must be true or false", "write true, without quotes. The default is true."),
        ("train: 'false'", "must be true or false", "write false, without quotes."),
        ("warm_start: None", "must be a section", "write null, without quotes, or its keys below it"),
        ("rollout: {group_size: 010}", "must be an integer >= 1", "write 10. The default is 8."),
        ("rollout: {group_size: 0x10}", "must be an integer >= 1", "write 16."),
        ("rollout: {group_size: 8.0}", "must be an integer >= 1", "write 8."),
        ("seed: 1,000", "must be an integer >= 0", "write 1000."),
        ("seed: 10k", "must be an integer >= 0", "write 10000."),
        ("timeouts: {start_s: 10m}", "must be a number > 0", "write 600."),
        ("seed: '.nan'", "must be an integer >= 0", "the default is 0. Seed"),
        ("seed: '1e999'", "must be an integer >= 0", "the default is 0. Seed"),
        pytest.param(f"seed: '{'9' * 5000}k'", "must be an integer >= 0", "the default is 0. Seed", id="long"),
        ("algorithm: {learning_rate: '1e-5'}", "must be a number > 0", "remove the quotes."),
        ("algorithm: {learning_rate: .inf}", "must be a finite number > 0", "write a finite number."),
        ("logging: {loggers: wandb}", "must be a list of values", "write it as a list: [wandb]."),
        ("1: 2", "keys must be strings", "correct or remove it"),
        ("~: 2", "keys must be strings", "correct or remove it"),
        ("rollout.group_size: 4", "no such key", "write `group_size` inside the section `rollout`"),
        ("rollout:\n\tgroup_size: 4", "must be YAML: found character", "replace tabs by spaces"),
        ("seed:4", "must be YAML: could not find expected ':'", "write a space after the colon"),
        ("---\nseed: 4", "must be YAML: found another document", "remove the line `---`"),
        ("rollout: {<<: {group_size: 4}}", "must be YAML: merge keys (<<)", "write the keys that it would merge"),
        (
            "output_dir: ~/runs",
            "a path is used as written: ~ and environment variables are not expanded",
            "write /home/me/runs",
        ),
        ("model: {path: $HOME/x}", "a path is used as written", "write /home/me/x"),
        ("model: {path: $NOTHING/x}", "a path is used as written", "shorten or correct it"),
    ],
)
def test_usual_slip_in_a_file_is_explained(
    text: str, rule: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    found = complaint(tmp_path, f"{GOOD}{text}\n")
    assert f"\n  rule: {rule}" in found
    assert f"\n  fix:  {fix}" in found


@pytest.mark.parametrize(
    ("override", "rule", "fix"),
    [
        ("model.path=", "an override must have a value", "write model.path=null for no value"),
        ("seed =4", "a key must have no spaces", "write it like rollout.group_size=16"),
        ("--seed=4", "a key must have no spaces, brackets or leading dashes", "write it like rollout.group_size=16"),
        ("algorithm.betas[0]=0.5", "a key must have no spaces, brackets", "or algorithm.betas=[0.9, 0.95]"),
        ("algorithm.betas.0=0.5", "must be a list of 2 numbers", "set the list as a whole: algorithm.betas=[...]"),
        (
            "data.system_prompt=Answer after #### now",
            "YAML reads the text from #",
            "data.system_prompt='\"Answer after #### now\"'",
        ),
        ("data.system_prompt=# Rules", "YAML reads the text from #", "quote the value: data.system_prompt='\"# Rules\"'"),
        ("name=\udcff", "must be valid UTF-8", "correct the encoding"),
    ],
)
def test_usual_slip_in_an_override_is_explained(override: str, rule: str, fix: str, tmp_path: Path) -> None:
    found = complaint(tmp_path, GOOD, override)
    assert f"\n  rule: {rule}" in found
    assert fix in found.partition("\n  fix:  ")[2]


def test_argument_of_an_ascii_locale_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    assert load_config(tmp_path / "run.yaml", ["data.task=\udcc3\udca9"]).data.task == "\u00e9"


@pytest.mark.parametrize(
    ("path", "overrides"),
    [("quickstart", "seed=1"), ("quickstart", {"seed": 1}), ("quickstart", [1]), (None, []), ({"name": "a"}, [])],
)
def test_arguments_of_wrong_types_are_named(path: Any, overrides: Any) -> None:
    with pytest.raises(TypeError, match="load_config: expected a path and a list of overrides"):
        load_config(path, overrides)


@pytest.mark.parametrize("override", ["foo", "a..b=1", "=3", ".a=1", "a.=1"])
def test_malformed_override(tmp_path: Path, override: str) -> None:
    assert complaint(tmp_path, GOOD, override) == (
        f'override {override}: "{override}"\n'
        "  rule: must have the form key.path=value, with no empty name in the path\n"
        "  fix:  write it like rollout.group_size=16"
    )


def test_override_with_invalid_yaml(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD, "algorithm.betas=[0.9").startswith(
        "override algorithm.betas=[0.9: algorithm.betas=[0.9\n  rule: the value must be YAML"
    )


def test_missing_key(tmp_path: Path) -> None:
    assert complaint(tmp_path, "\nname: a\n") == (
        "configs/run.yaml:2: num_steps is missing\n"
        "  rule: this key is required\n"
        "  fix:  add `num_steps: ...`. Number of training steps. Each step trains on one batch of "
        "`rollout.groups_per_step` groups."
    )


KEYS = [f"{section.path}.{key}".lstrip(".") for section in sections() for key in section.keys]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), children, max_size=3)
    ),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(key=st.sampled_from(KEYS), value=VALUES)
@example(key="data.rewards.<name>.weights", value={0: None})  # a number where a mapping has a name
def test_no_value_raises_anything_but_a_config_error(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "run.yaml"
    *parents, name = key.split(".")
    tree: dict[str, object] = {name: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    path.write_text(dump({"name": "a", "num_steps": 3} | tree), encoding="utf-8")
    for overrides in ([], [f"{key}.more=1"]):
        with suppress(ConfigError):
            load_config(path, overrides)
