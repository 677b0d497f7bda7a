"""Error messages for values that cannot be combined."""

from pathlib import Path

import pytest

from tests.config.wrong import GOOD, complaint, load_config_text
from titanrl.config import ConfigError, load_config


def test_rows_shorter_than_a_sequence_are_rejected(tmp_path: Path) -> None:
    assert complaint(tmp_path, GOOD + "trainer: {row_tokens: 64}\n") == (
        "configs/run.yaml:3: trainer.row_tokens=64, data.max_prompt_tokens=64 (default), rollout.max_new_tokens=26 (default)\n"
        "  rule: row_tokens must cover the longest prompt plus completion\n"
        "  fix:  set trainer.row_tokens to at least 90, or trainer.overlong to truncate or skip"
    )
    assert complaint(tmp_path, GOOD, "rollout.max_new_tokens=1000").startswith(
        "override rollout.max_new_tokens=1000: trainer.row_tokens=256"
    )


def test_warm_start_requires_a_task_with_demonstrations(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + "warm_start: {}\ndata: {task: gsm_symbolic}\n")
    assert 'data.task="gsm_symbolic"' in text
    assert "fix:  remove warm_start, or set data.source to reasoning_gym and data.task to chain_sum" in text


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
        ("{loss: grpo}", 'loss="grpo"', 'grpo uses loss="ppo": set that, or set algorithm.preset to grpo'),
        ("{advantage: gspo}", 'advantage="gspo"', 'gspo uses advantage="grpo": set that, or set algorithm.preset to gspo'),
        ("{reduction: dapo}", 'reduction="dapo"', 'dapo uses reduction="token_mean": set that'),
        ("{loss: rloo}", 'loss="rloo"', "rloo is a value of algorithm.advantage: set it there"),
        ("{advantage: ppo}", 'advantage="ppo"', "ppo is a value of algorithm.loss: set it there"),
        ("{advantage: 'own.py'}", 'advantage="own.py"', "choose one of them"),
        (
            "{correction: {preset: token_tis}}",
            'correction.weight="token" (preset or default)',
            "set algorithm.proximal to step_start",
        ),
        (
            "{loss: dro, proximal: step_start, correction: {weight: sequence}}",
            'correction.weight="sequence", algorithm.loss="dro"',
            "set algorithm.correction.weight to none; its rejection bounds are allowed",
        ),
        ("{kl: {coef: 0.1, estimator: k1}}", 'kl.estimator="k1"', "set estimator to k3_straight_through"),
        ("{kl: {coef: 0.1, place: reward}}", 'kl.place="reward"', "set estimator to k1"),
        (
            "{kl: {coef: 0.1, reference: ema}}",
            'ema_decay=null (default), algorithm.kl.reference="ema"',
            "set algorithm.ema_decay, for example to 0.99",
        ),
        (
            "{correction: {veto_prox_over_behavior: [0.1, high]}}",
            'correction.veto_prox_over_behavior[1]="high"',
            "in which any token's ratio is outside these bounds",
        ),
        ("{correction: {denominator: post}}", 'correction.denominator="post"', "set a bound"),
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
def test_truncated_sampling_keys_have_ranges(tmp_path: Path, wrong: str) -> None:
    text = complaint(tmp_path, GOOD, f"rollout.{wrong}")
    key, _, value = wrong.partition("=")
    assert f"rollout.{key}" in text
    assert value in text
    assert "fix:" in text


def test_raw_log_probabilities_are_rejected(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + "generator: {vllm: {logprobs_mode: raw_logprobs}}\n")
    assert (
        'generator.vllm.logprobs_mode="raw_logprobs"\n'
        "  rule: the generator must return log-probabilities after temperature and truncation" in text
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
    assert "which is 2\n  fix:  set hosts.devices_per_host to 2 if the host has that many" in text
    assert load_config_text(tmp_path, one_device + "  share_devices: true\ndevice: cuda\n")
    slurm = (
        GOOD
        + "device: cuda\nhosts: {kind: slurm, trainer_hosts: 2, devices_per_host: 2}\ntrainer: {parallelism: {dp_shard: 4}}\n"
    )
    assert load_config_text(tmp_path, slurm)
    assert "which is 3" in complaint(tmp_path, slurm, "generator.replicas=3")


@pytest.mark.parametrize(
    ("override", "rule", "fix"),
    [
        ("rollout.window=0.5", "a reordering window requires asynchronous training", "set max_staleness to 1"),
        ("algorithm.updates_per_publish=2", "updates_per_publish must divide num_steps", "set num_steps to 4"),
        ("trainer.minibatches_per_batch=9", "minibatches_per_batch must not exceed groups_per_step", "to at most 8"),
        ("replay={max_uses: 3, alpha: 1}", "have no effect while fraction is 0", "set replay.fraction"),
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
    assert "later epochs train on tokens of an earlier policy, which requires an importance ratio or a correction" in text
    for allowed in ("loss: reinforce, correction: {weight: token}", "loss: ppo, proximal: step_start", "loss: dro"):
        path = tmp_path / "allowed.yaml"
        path.write_text(GOOD + epochs + f"algorithm: {{{allowed}}}\n")
        load_config(path)


def test_only_rl_training_supports_epochs(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD + "trainer: {epochs: 2}\nsft: {path: examples.jsonl}\n")
    assert "titanrl sft does not use this key" in text
    assert "remove trainer.epochs" in text


@pytest.mark.parametrize("loss", ["reinforce", "ppo, proximal: step_start"])
def test_replay_requires_a_ratio_to_the_sampler_or_a_correction(tmp_path: Path, loss: str) -> None:
    replay = "replay: {fraction: 0.5}\n"
    text = complaint(tmp_path, GOOD + replay + f"algorithm: {{loss: {loss}}}\n")
    assert "replay requires importance sampling: a loss with the ratio to the sampling policy" in text
    path = tmp_path / "corrected.yaml"
    path.write_text(GOOD + replay + f"algorithm: {{loss: {loss}, correction: {{weight: token}}}}\n")
    assert load_config(path).replay.num_replayed(8) == 8
    with pytest.raises(ConfigError, match=r"is older than a new one(.|\n)*set replay\.max_age to at least 4"):
        load_config(path, ["max_staleness=3", "replay.max_age=3"])


@pytest.mark.parametrize(
    ("text", "keys", "rule", "fix"),
    [
        (
            "trainer: {compile: true, activation_checkpointing: full, parallelism: {tp: 2}}",
            "trainer.compile=true, trainer.parallelism.tp=2, trainer.activation_checkpointing",
            "cannot compile activation checkpointing with tensor parallelism",
            "set trainer.compile to false",
        ),
        (
            "device: npu\ntrainer: {float8: rowwise}",
            "trainer.float8",
            "supports float8 only on CUDA",
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
            "intermediate_size must be a multiple of the tensor-parallel degree",
            "set model.recipe.intermediate_size to 386",
        ),
        ("trainer: {lora: {targets: []}}", "trainer.lora.targets", "must", "attention"),
        ("trainer: {lora: {rank: 0}}", "trainer.lora.rank=0", "must be an integer >= 1", "Rank of the adapters"),
        ("trainer: {float8: blockwise}", "trainer.float8", "must be one of", "tensorwise"),
        ("trainer: {deterministic: true}", "trainer.deterministic", "must be one of", "error"),
        (
            "model: {family: 'my.module:family', recipe: {family: llama}}",
            "model.recipe.family=",
            "both select the model family",
            "remove one of them",
        ),
        ("generator: {tp: 4}", "generator.tp=4", "num_kv_heads must be a multiple of", "set generator.tp to 2"),
        (
            "model: {recipe: {intermediate_size: 385}}\ngenerator: {tp: 2}",
            "generator.tp=2",
            "intermediate_size must be a multiple of the tensor-parallel degree",
            "set model.recipe.intermediate_size to 386",
        ),
        (
            "generator: {vllm: {tensor_parallel_size: 2}}",
            "generator.vllm.tensor_parallel_size=2",
            "TitanRL sets this argument",
            "remove generator.vllm.tensor_parallel_size, and set generator.tp",
        ),
        (
            "device: cuda\ngenerator: {replicas: 2, tp: 2}\nhosts: {devices_per_host: 4}",
            "generator.tp=2",
            "a host needs one accelerator per trainer rank and generator rank, which is 5",
            "set hosts.devices_per_host to 5",
        ),
    ],
)
def test_impossible_trainers_and_generators(tmp_path: Path, text: str, keys: str, rule: str, fix: str) -> None:
    error = complaint(tmp_path, f"{GOOD}{text}\n")
    assert keys.split("=")[0] in error
    assert rule in error
    assert fix in error


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (["data.system_prompt=Add."], "rule: the environment writes the messages of the conversation"),
        (
            ["data.rewards={truncated: exact}"],
            "must not be one of mean, error_frac, num_errors, num_completions",
        ),
        (["data.environment.truncated_reward=.inf"], "data.environment.truncated_reward"),
    ],
)
def test_environment_excludes_other_values(tmp_path: Path, changes: list[str], rule: str) -> None:
    text = complaint(tmp_path, GOOD, "data.environment.function=calculator", *changes)
    assert rule in " ".join(text.split())


def test_demonstrated_tool_calls_require_an_environment(tmp_path: Path) -> None:
    text = complaint(tmp_path, GOOD, "warm_start.tool_calls=true")
    assert "rule: tool calls require an environment that runs them" in text
    assert "fix:  set data.environment.function to calculator or to a custom tool" in text
    own = load_config(tmp_path / "run.yaml", ["warm_start.tool_calls=true", "data.environment.function=tools_of_mine:Abacus"])
    assert own.warm_start is not None
    assert own.warm_start.tool_calls
