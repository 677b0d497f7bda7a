"""Error messages of wrong configurations: place, key and value, rule, and fix."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from titanrl.config import ConfigError, load_config
from titanrl.config.keys import sections
from titanrl.config.strict_yaml import dump

GOOD = "name: a\nnum_steps: 3\n"


def complaint(folder: Path, text: str, *overrides: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    assert len(raised.value.messages) == 1, str(raised.value)
    return str(raised.value).replace(str(folder), "configs")


def test_unknown_key(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "rollout:\n  group_sise: 8\n") == (
        "configs/run.yaml:4: rollout.group_sise=8\n"
        "  rule: no such key in rollout\n"
        "  fix:  did you mean rollout.group_size? Keys of rollout: groups_per_step, group_size, min_group_size, "
        "max_new_tokens, temperature, top_p, top_k, min_p, dynamic_sampling, window, num_spare_completions, group_filter, "
        "num_workers, starvation_timeout_s, save, replay"
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
    ],
)
def test_unknown_key_suggests_the_likeliest_key_of_any_section(tmp_path: Path, unknown: str, suggested: str) -> None:
    assert f"fix:  did you mean {suggested}? " in complaint(tmp_path, GOOD, f"{unknown}=1")


def test_unknown_key_unlike_any_other_has_no_suggestion(tmp_path: Path) -> None:
    assert "fix:  remove it. Keys of rollout" in complaint(tmp_path, GOOD, "rollout.xyzzy=1")


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
def test_absurd_count_is_rejected_with_its_upper_bound(tmp_path: Path, key: str) -> None:
    assert "and <= 10,000\n" in complaint(tmp_path, GOOD, f"{key}=1000000000000")


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (("rollout.groups_per_step=10000", "rollout.group_size=1000"), "must not sample more than 1,000,000 completions"),
        (("max_staleness=9999", "rollout.groups_per_step=1000"), "these values need 10,000,000 slots with 80,000,000"),
        (
            ("max_staleness=9999", "rollout.groups_per_step=1", "rollout.group_size=100000"),
            "must not need more than 1,000,000 slots and 10,000,000 completions, and these values need 10,000 slots",
        ),
    ],
)
def test_counts_with_an_absurd_product_are_rejected(tmp_path: Path, overrides: tuple[str, ...], rule: str) -> None:
    assert rule in complaint(tmp_path, GOOD, *overrides)


def test_wrong_type(tmp_path: Path) -> None:
    assert complaint(tmp_path, 'name: a\nnum_steps: "5"\n') == (
        'configs/run.yaml:2: num_steps="5"\n'
        "  rule: must be an integer >= 1 and <= 100,000,000\n"
        "  fix:  remove the quotes. Number of steps, each on one batch."
    )
    assert complaint(tmp_path, GOOD, "rollout.group_size=abc") == (
        'override rollout.group_size=abc: rollout.group_size="abc"\n'
        "  rule: must be an integer >= 2 and <= 1,000,000\n"
        "  fix:  the default is 8. Number of completions per prompt. Advantages compare the completions of a group, so it "
        "needs at least two."
    )
    assert "name=5\n  rule: must be text" in complaint(tmp_path, "name: 5\nnum_steps: 3\n")
    assert "seed=true\n  rule: must be an integer >= 0" in complaint(tmp_path, GOOD + "seed: true\n")
    assert "dynamic_sampling=1\n  rule: must be true or false" in complaint(tmp_path, GOOD + "rollout: {dynamic_sampling: 1}\n")
    assert "sandbox=5\n  rule: must be a section\n  fix:  put its keys under it" in complaint(tmp_path, GOOD + "sandbox: 5\n")
    assert "algorithm.betas=[0.9]\n  rule: must be a list of 2 numbers" in complaint(
        tmp_path, GOOD + "algorithm: {betas: [0.9]}\n"
    )
    assert "generator.vllm has the key 1\n  rule: its keys must be text" in complaint(
        tmp_path, GOOD + "generator: {vllm: {1: 2}}\n"
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
        "  fix:  correct the syntax; text that holds ': ' or ' #' needs quotes"
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
    ("text", "found"), [("", "is empty"), ("# nothing\n", "is empty"), ("- 1\n", "holds [1]"), ("abc\n", 'holds "abc"')]
)
def test_file_without_a_mapping(tmp_path: Path, text: str, found: str) -> None:
    assert f"run.yaml:1: configuration file\n  rule: must be a mapping of keys, but it {found}" in complaint(tmp_path, text)


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="must be readable UTF-8"):
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
def test_value_that_cannot_be_converted_names_its_place(value: str, rule: str, tmp_path: Path) -> None:
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
        (f"output_dir={'a' * 300}", "a name in a path must not have more than 255 bytes"),
        ("model.path=" + "\u00e9" * 130 + "/x", "a name in a path must not have more than 255 bytes"),
        (f"cache_dir={'a/' * 2000}", "a path must not have more than 3,000 bytes, but has 3,999"),
        (f"name={'a' * 201}", "must be text matching"),
        (".".join(["a"] * 3000) + "=1", "must be key.path=value, with a name between the dots"),
        ("a" * 100_000 + "=1", "no such key in the top level"),
        ("data.rewards={\u00b2: exact}", "a reward's name must consist of letters, digits and _"),
    ],
)
def test_overlong_names_and_paths_are_rejected(override: str, rule: str, tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD, override)
    assert f"rule: {rule}" in text
    assert len(text) < 10_000


def test_configuration_with_an_overlong_name_or_size_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="but it does not exist"):
        load_config("a" * 300)
    path = tmp_path / "run.yaml"
    path.write_text(GOOD + "# long\n" * 200_000)
    with pytest.raises(ConfigError, match=r"must not have more than 1,000,000 bytes, but has 1,400,021"):
        load_config(path)


def test_impossible_parallelism(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "trainer:\n  row_tokens: 255\n  parallelism:\n    tp: 3\n") == (
        "configs/run.yaml:6: trainer.parallelism.tp=3, model.recipe.num_kv_heads=2 (default)\n"
        "  rule: tp must divide the number of key-value heads\n"
        "  fix:  set trainer.parallelism.tp to 2"
    )
    text = complaint(tmp_path, GOOD + "trainer:\n  parallelism: {dp_shard: 3}\nhosts: {kind: slurm}\n", "hosts.trainer_hosts=2")
    assert text.startswith(
        "override hosts.trainer_hosts=2: hosts.trainer_hosts=2, trainer.parallelism.dp_shard=3 (configs/run.yaml:4)\n"
    )
    assert "trainer_hosts must divide the 3 trainer ranks\n  fix:  set hosts.trainer_hosts to 1" in text


def test_unknown_choice(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "trainer:\n  dtype: float16\n") == (
        'configs/run.yaml:4: trainer.dtype="float16"\n  rule: must be one of float32, bfloat16\n  fix:  did you mean bfloat16?'
    )


@pytest.mark.parametrize("override", ["foo", "a..b=1", "=3", ".a=1", "a.=1"])
def test_malformed_override(tmp_path: Path, override: str) -> None:
    assert complaint(tmp_path, GOOD, override) == (
        f'override {override}: "{override}"\n'
        "  rule: must be key.path=value, with a name between the dots\n"
        "  fix:  write it like rollout.group_size=16"
    )


def test_override_with_invalid_yaml(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD, "algorithm.betas=[0.9").startswith(
        "override algorithm.betas=[0.9: algorithm.betas=[0.9\n  rule: the value must be YAML"
    )


def test_missing_key(tmp_path: Path) -> None:
    assert complaint(tmp_path, "\nname: a\n") == (
        "configs/run.yaml:2: num_steps is not given\n"
        "  rule: required\n"
        "  fix:  add `num_steps: ...`. Number of steps, each on one batch."
    )


def test_rows_shorter_than_a_sequence_are_rejected(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "trainer: {row_tokens: 64}\n") == (
        "configs/run.yaml:3: trainer.row_tokens=64, data.max_prompt_tokens=64 (default), rollout.max_new_tokens=26 (default)\n"
        "  rule: a row must hold the longest prompt and completion\n"
        "  fix:  set trainer.row_tokens to at least 90, or trainer.overlong to truncate or skip"
    )
    assert complaint(tmp_path, GOOD, "rollout.max_new_tokens=1000").startswith(
        "override rollout.max_new_tokens=1000: trainer.row_tokens=256"
    )


def test_warm_start_requires_a_task_with_demonstrations(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + "warm_start: {}\ndata: {task: gsm_symbolic}\n")
    assert 'data.task="gsm_symbolic"' in text
    assert "fix:  remove warm_start, or set data.task to chain_sum" in text


@pytest.mark.parametrize(
    ("algorithm", "what", "fix"),
    [
        ("{pass_k: 4}", 'pass_k=4, algorithm.advantage="dr_grpo" (default)', "remove pass_k"),
        ("{advantage: pass_at_k}", 'pass_k=null (default), algorithm.advantage="pass_at_k"', "set pass_k"),
        ("{loss: cispo, dual_clip: 3.0}", 'dual_clip=3.0, algorithm.loss="cispo"', "remove dual_clip"),
        ("{constant_length: 5}", "constant_length=5", "remove constant_length"),
        ("{loss_options: {beta: 1.0}}", 'loss_options.beta=1.0, algorithm.loss="ppo" (default)', "remove it"),
        ("{loss: 'a.b:c', loss_options: {clip_low: 0.1}}", "loss_options.clip_low=0.1", "set algorithm.clip_low instead"),
        ("{loss: pppo}", 'loss="pppo"', "did you mean ppo?"),
        ("{advantage: 'own.py'}", 'advantage="own.py"', "choose one of them"),
        ("{correction: {preset: token_tis}}", 'correction.weight="token" (preset or default)', "set proximal to step_start"),
        (
            "{loss: dro, proximal: step_start, correction: {weight: sequence}}",
            'correction.weight="sequence", algorithm.loss="dro"',
            "set correction.weight to none; rejection is still allowed",
        ),
        ("{kl: {coef: 0.1, estimator: k1}}", 'kl.estimator="k1"', "set estimator to k3_straight_through"),
        ("{kl: {coef: 0.1, place: reward}}", 'kl.place="reward"', "set estimator to k1"),
        (
            "{kl: {coef: 0.1, reference: ema}}",
            'ema_decay=null (default), algorithm.kl.reference="ema"',
            "set ema_decay, for example to 0.99",
        ),
        (
            "{correction: {veto_prox_over_behavior: [0.1, high]}}",
            'correction.veto_prox_over_behavior[1]="high"',
            "with any ratio outside these bounds",
        ),
        ("{correction: {denominator: post}}", 'correction.denominator="post"', "set a bound"),
        (
            "{reduction: prompt_mean, correction: {preset: geometric_rejection, denominator: post}}",
            'correction.denominator="post", algorithm.reduction="prompt_mean"',
            "set correction.denominator to pre",
        ),
        ("{correction: {batch_normalize: true}}", "correction.batch_normalize=true", "set weight to token or sequence"),
        (
            "{correction: {reject_token_prox_over_behavior: [1.5, 2.0]}}",
            "correction.reject_token_prox_over_behavior=[1.5, 2.0]",
            "write them like [0.5, 2.0]",
        ),
        ("{preset: dappo}", 'preset="dappo"', "did you mean dapo?"),
        ("{correction: {max_prox_over_behaviour: 2}}", "correction.max_prox_over_behaviour=2", "max_prox_over_behavior?"),
    ],
)
def test_conflicting_values_of_the_objective(tmp_path: Path, algorithm: str, what: str, fix: str) -> None:
    text = complaint(tmp_path, GOOD + f"algorithm: {algorithm}\n")
    assert text.startswith("configs/run.yaml:3: algorithm.")
    assert f"algorithm.{what}" in text
    rule, _, advice = text.partition("\n  rule: ")[2].partition("\n  fix:  ")
    assert rule
    assert fix in advice


def test_pass_k_larger_than_the_group(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + "algorithm: {advantage: pass_at_k, pass_k: 9}\n")
    assert "algorithm.pass_k=9, rollout.group_size=8 (default)\n" in text
    assert "fix:  set algorithm.pass_k to at most 8" in text


@pytest.mark.parametrize("loss", ["ppo", "reinforce, correction: {preset: token_tis}", "ppo, kl: {coef: 0.1}"])
def test_truncated_sampling_is_allowed_with_importance_ratios(tmp_path: Path, loss: str) -> None:
    truncated = GOOD + "rollout: {top_p: 0.9, top_k: 20, min_p: 0.1}\n"
    assert load_config_text(tmp_path, truncated + f"algorithm: {{loss: {loss}}}\n")


@pytest.mark.parametrize("wrong", ["top_p=0", "top_p=1.1", "top_k=-1", "top_k=1.5", "min_p=-0.1", "min_p=1"])
def test_limits_of_sampling_have_ranges(tmp_path: Path, wrong: str) -> None:
    text = complaint(tmp_path, GOOD, f"rollout.{wrong}")
    key, _, value = wrong.partition("=")
    assert f"rollout.{key}" in text
    assert value in text
    assert "fix:" in text


def test_raw_log_probabilities_are_rejected(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + "generator: {vllm: {logprobs_mode: raw_logprobs}}\n")
    assert (
        'generator.vllm.logprobs_mode="raw_logprobs"\n  rule: log-probabilities must include temperature and truncation' in text
    )


def test_short_rows_are_allowed_with_overlong_truncate_or_skip(tmp_path: Path) -> None:
    for overlong in ("truncate", "skip"):
        assert load_config_text(tmp_path, GOOD + f"trainer: {{row_tokens: 64, overlong: {overlong}}}\n")
    text = complaint(tmp_path, GOOD + "trainer: {overlong: skip}\nrollout: {max_new_tokens: 600}\n")
    assert "fix:  set model.recipe.max_positions to at least 664" in text


def test_more_ranks_than_accelerators(tmp_path: Path) -> None:
    one_device = GOOD + "hosts:\n  devices_per_host: 1\n"
    assert load_config_text(tmp_path, one_device + "device: cpu\n")
    text = complaint(tmp_path, one_device + "device: cuda\n")
    assert "run.yaml:4: hosts.devices_per_host=1, generator.replicas=1 (default)\n" in text
    assert "which is 2\n  fix:  set hosts.devices_per_host to 2 if the host has as many" in text
    assert load_config_text(tmp_path, one_device + "  share_devices: true\ndevice: cuda\n")
    slurm = (
        GOOD
        + "device: cuda\nhosts: {kind: slurm, trainer_hosts: 2, devices_per_host: 2}\ntrainer: {parallelism: {dp_shard: 4}}\n"
    )
    assert load_config_text(tmp_path, slurm)
    assert "which is 3" in complaint(tmp_path, slurm, "generator.replicas=3")


def load_config_text(folder: Path, text: str) -> bool:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path).name == "a"


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


@pytest.mark.parametrize(
    ("override", "rule", "fix"),
    [
        ("rollout.window=0.5", "synchronous training consumes groups in order", "set max_staleness to 1"),
        ("algorithm.updates_per_publish=2", "updates_per_publish must divide num_steps", "set num_steps to 4"),
        ("trainer.minibatches_per_batch=9", "each mini-batch needs at least one group", "to at most 8"),
        ("replay={max_uses: 3, alpha: 1}", "have no effect without replayed groups", "set replay.fraction"),
        ("replay.fraction=0.01", "these values give 0", "raise replay.fraction"),
        ("replay={fraction: 0.9, capacity: 3}", "these values give 72", "set replay.capacity to at least 72"),
    ],
)
def test_conflicting_numbers(tmp_path: Path, override: str, rule: str, fix: str) -> None:
    text = complaint(tmp_path, GOOD, override)
    assert rule in text
    assert fix in text


def test_later_epochs_require_a_ratio_or_a_correction(tmp_path: Path) -> None:
    epochs = "trainer: {epochs: 2}\n"
    text = complaint(tmp_path, GOOD + epochs + "algorithm: {loss: reinforce}\n")
    assert "later epochs train on tokens of an earlier policy, and the loss has no ratio to it" in text
    for allowed in ("loss: reinforce, correction: {weight: token}", "loss: ppo, proximal: step_start", "loss: dro"):
        path = tmp_path / "allowed.yaml"
        path.write_text(GOOD + epochs + f"algorithm: {{{allowed}}}\n")
        load_config(path)


def test_only_training_has_epochs(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + "trainer: {epochs: 2}\nsft: {path: examples.jsonl}\n")
    assert "titanrl sft has no such key" in text
    assert "remove trainer.epochs" in text


@pytest.mark.parametrize("loss", ["reinforce", "ppo, proximal: step_start"])
def test_replay_requires_a_ratio_to_the_sampler_or_a_correction(tmp_path: Path, loss: str) -> None:
    replay = "replay: {fraction: 0.5}\n"
    text = complaint(tmp_path, GOOD + replay + f"algorithm: {{loss: {loss}}}\n")
    assert "with replayed tokens the loss must contain the ratio to the sampling policy" in text
    path = tmp_path / "corrected.yaml"
    path.write_text(GOOD + replay + f"algorithm: {{loss: {loss}, correction: {{weight: token}}}}\n")
    assert load_config(path).replay.num_replayed(8) == 8
    with pytest.raises(ConfigError, match=r"is older when it is replayed(.|\n)*set replay\.max_age to at least 4"):
        load_config(path, ["max_staleness=3", "replay.max_age=3"])


@pytest.mark.parametrize(
    ("text", "keys", "rule", "fix"),
    [
        (
            "trainer: {compile: true, activation_checkpointing: full, parallelism: {tp: 2}}",
            "trainer.compile=true, trainer.parallelism.tp=2, trainer.activation_checkpointing",
            "cannot compile activation checkpointing under tensor parallelism",
            "set trainer.compile to false",
        ),
        (
            "device: npu\ntrainer: {float8: rowwise}",
            "trainer.float8",
            "supports float8 on CUDA",
            "set trainer.float8 to null",
        ),
        (
            "device: cpu\ntrainer: {float8: rowwise, compile: true}",
            "trainer.compile=true",
            "torch.compile does not support float8 emulation",
            "set trainer.compile to false",
        ),
        ("device: npu\ntrainer: {compile: true}", "trainer.compile=true", "no NPU backend", "set trainer.compile to false"),
        (
            "model: {recipe: {intermediate_size: 385}}\ntrainer: {parallelism: {tp: 2}}",
            "trainer.parallelism.tp=2",
            "tp must divide the width of the feed-forward block",
            "set model.recipe.intermediate_size to 386",
        ),
        ("trainer: {lora: {targets: []}}", "trainer.lora.targets", "must", "attention"),
        ("trainer: {lora: {rank: 0}}", "trainer.lora.rank=0", "must be an integer >= 1", "Rank of each adapter"),
        ("trainer: {float8: blockwise}", "trainer.float8", "must be one of", "tensorwise"),
        ("trainer: {deterministic: true}", "trainer.deterministic", "must be one of", "error"),
        (
            "model: {family: 'my.module:family', recipe: {family: llama}}",
            "model.recipe.family=",
            "only one key may select the family",
            "remove one of them",
        ),
        ("generator: {tp: 4}", "generator.tp=4", "tp must divide the number of key-value heads", "set generator.tp to 2"),
        (
            "model: {recipe: {intermediate_size: 385}}\ngenerator: {tp: 2}",
            "generator.tp=2",
            "tp must divide the width of the feed-forward block",
            "set model.recipe.intermediate_size to 386",
        ),
        (
            "generator: {vllm: {tensor_parallel_size: 2}}",
            "generator.vllm.tensor_parallel_size=2",
            "TitanRL starts the processes of an engine",
            "remove vllm.tensor_parallel_size, and set generator.tp",
        ),
        (
            "device: cuda\ngenerator: {replicas: 2, tp: 2}\nhosts: {devices_per_host: 4}",
            "generator.tp=2",
            "a host must have one accelerator per trainer rank and generator rank on it, which is 5",
            "set hosts.devices_per_host to 5",
        ),
    ],
)
def test_impossible_trainers_and_generators(tmp_path: Path, text: str, keys: str, rule: str, fix: str) -> None:
    error = complaint(tmp_path, f"{GOOD}{text}\n")
    assert keys.split("=")[0] in error
    assert rule in error
    assert fix in error


def test_demonstrated_calls_of_tools_need_an_environment(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD, "warm_start.tool_calls=true")
    assert "rule: only an environment runs calls of tools" in text
    assert "fix:  set data.environment.function to calculator or to a tool of your own" in text
    own = load_config(tmp_path / "run.yaml", ["warm_start.tool_calls=true", "data.environment.function=tools_of_mine:Abacus"])
    assert own.warm_start is not None
    assert own.warm_start.tool_calls
