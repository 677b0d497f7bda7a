"""Options of the built-in rewards, and errors for invalid options."""

from pathlib import Path

import pytest

from titanrl.config import ConfigError, device, load_config
from titanrl.config.data import DataConfig, RewardConfig
from titanrl.launch.preflight import broken_rules

JUDGE = "url: 'http://127.0.0.1:1/v1', model: m"


def complaints(folder: Path, reward: str, *more: str) -> tuple[str, ...]:
    path = folder / "run.yaml"
    path.write_text(f"name: a\nnum_steps: 3\ndata:\n  rewards:\n    r: {reward}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config(path, more)
    return tuple(message.replace(str(folder), "configs") for message in raised.value.messages)


def test_url_with_credentials_is_rejected_without_printing_them(tmp_path: Path) -> None:
    (message,) = complaints(tmp_path, "{function: judge, options: {url: 'http://me:secret@host/v1', model: m}}")
    assert "rule: url must not contain credentials" in message
    assert "secret" not in message


def test_overlong_penalty_must_fit_the_completion_length(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("name: a\nnum_steps: 3\n")
    rewards = "data.rewards={r: {function: overlong, options: {cache_tokens: 27}}}"
    broken = list(broken_rules(load_config(tmp_path / "run.yaml", [rewards])))
    assert [str(rule) for rule in broken] == [
        "data.rewards.r.options.cache_tokens=27: cache_tokens must not exceed max_tokens, which is 26. "
        "Set cache_tokens to at most 26."
    ]
    assert list(broken_rules(load_config(tmp_path / "run.yaml", [rewards, "rollout.max_new_tokens=27"]))) == []


def test_key_of_the_judge_must_be_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text(
        f"name: a\nnum_steps: 3\ndata: {{rewards: {{r: {{function: judge, options: {{{JUDGE}, key_variable: MY_KEY}}}}}}}}\n"
    )
    config = load_config(tmp_path / "run.yaml")
    monkeypatch.delenv("MY_KEY", raising=False)
    assert [str(rule) for rule in broken_rules(config)] == [
        'data.rewards.r.options.key_variable="MY_KEY": the environment variable must hold the API key, but it is not set. '
        "Export MY_KEY where the run starts."
    ]
    monkeypatch.setenv("MY_KEY", "secret")
    assert list(broken_rules(config)) == []
    assert "secret" not in config.model_dump_json()


def test_missing_package_of_math_verify_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("name: a\nnum_steps: 3\ndata: {rewards: {r: math_verify}}\n")
    find = device.installed_version
    monkeypatch.setattr(device, "installed_version", lambda name: None if name == "math-verify" else find(name))
    assert [str(rule) for rule in broken_rules(load_config(tmp_path / "run.yaml"))] == [
        'data.rewards.r.function="math_verify": the package math-verify must be installed. Pip install "titanrl[math]".'
    ]


def test_prompts_need_answers_only_for_rewards_that_use_them() -> None:
    def needs(**reward: object) -> bool:
        return DataConfig(rewards={"r": RewardConfig.model_validate(reward)}).compares_with_answer

    judge = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    assert needs(function="math_verify")
    assert needs(function="judge", options=judge)
    assert not needs(function="judge", options={**judge, "prompt": "{question} {completion}"})
    assert not needs(function="regex", options={"pattern": "a"})
    assert not needs(function="repetition")


def test_weight_of_a_part_is_the_product_of_both_weights() -> None:
    judge = {"function": "a.b:judge", "weight": 0.5, "weights": {"style": 0.1}}
    data = DataConfig.model_validate({"rewards": {"right": "exact", "judge": judge}})
    names = ("right", "judge", "judge/style", "judge/facts", "gone", "gone/part")
    assert [data.weight_of(name) for name in names] == [1.0, 0.5, 0.05, 0.5, 0.0, 0.0]
    assert DataConfig().weight_of("answer") == 1.0
