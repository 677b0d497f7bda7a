"""Custom rewards and prompts, passed to `GRPO` or named in a configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import titanrl
from titanrl.carriers.rewards import Reward
from titanrl.config import Config, ConfigError, load_config
from titanrl.config.load import dump
from titanrl.grpo import GRPO
from titanrl.launch.extensions import plugins_of, with_objects

CONFIG = Config(name="a", num_steps=1)
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def right(completion: str, entry: Mapping[str, Any]) -> float:
    return float(completion == entry["answer"])


def brief(completion: str, entry: Mapping[str, Any]) -> dict[str, float]:
    return {"a": 1.0}


def squares(seed: int, largest: int = 50) -> list[dict[str, str]]:
    return [{"prompt": f"{n} * {n} =", "answer": str(n * n)} for n in range(largest)]


def test_configuration_records_names_and_options_of_rewards(tmp_path: Path) -> None:
    rewards = {
        "right": right,
        "brevity": Reward(brief, weight=0.1, weights={"a": 2.0}, trusted=True),
        "exact": "exact",
    }
    config = with_objects(CONFIG, {"rewards": rewards})
    assert {name: reward.model_dump() for name, reward in config.data.rewards.items()} == {
        "right": {"function": "object:right", "weight": 1.0, "weights": {}, "trusted": False, "options": {}},
        "brevity": {
            "function": "object:brief",
            "weight": 0.1,
            "weights": {"a": 2.0},
            "trusted": True,
            "options": {},
        },
        "exact": {"function": "exact", "weight": 1.0, "weights": {}, "trusted": False, "options": {}},
    }
    plugins = plugins_of(config, {"rewards": rewards})
    assert plugins.keys() == {"data.rewards.right", "data.rewards.brevity"}
    assert plugins["data.rewards.right"].load()("4", {"answer": "4"}) == 1.0
    (tmp_path / "config.yaml").write_text(dump(config.model_dump()))
    assert load_config(tmp_path / "config.yaml") == config


def test_python_rewards_replace_configured_rewards() -> None:
    config = load_config(QUICKSTART, ["data.rewards={brevity: {function: a.b:c, weight: 0.5}}"])
    assert with_objects(config, {}).data.rewards["brevity"].weight == 0.5
    config = with_objects(config, {"rewards": right})
    assert list(config.data.rewards) == ["answer"]
    assert plugins_of(config, {"rewards": right}).keys() == {"data.rewards.answer"}


def test_recorded_object_must_be_passed_again() -> None:
    (plugin,) = plugins_of(with_objects(CONFIG, {"rewards": right}), {}).values()
    with pytest.raises(ValueError, match=r"^data\.rewards\.answer: a Python object, .* \(got 'object:right'\)\. Start the run"):
        plugin.load()


@pytest.mark.parametrize(
    ("objects", "problem"),
    [
        (
            {"rewards": lambda completion: 0.0},
            r"data\.rewards\.answer: wrong signature: .*`def reward\(completion",
        ),
        ({"rewards": {"short": 3}}, r"data\.rewards\.short: not callable \(got int, of type int\)"),
        ({"rewards": {"mean": right}}, r"data\.rewards\.mean=.*\n  rule: a reward's name must consist of"),
        ({"rewards": {"x": Reward("exact", trusted=True)}}, r"data\.rewards\.x\.trusted=true.*\n  rule: built-in rewards run"),
        ({"rewards": {"x": Reward(right, weight="1")}}, r'data\.rewards\.x\.weight="1"\n  rule: '),  # type: ignore[arg-type]
        ({"prompts": lambda: []}, r"data\.source: wrong signature: .* Write it as `def prompts\(seed: int\)"),
        ({"prompts": 3}, r"data\.source: not callable"),
        ({"loss": {"a": right}}, r"algorithm\.loss: not callable \(got dict, of type dict\)"),
    ],
)
def test_unusable_object_is_rejected_before_start(objects: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GRPO(load_config(QUICKSTART, ["warm_start=null"]), **objects)


def test_cross_section_rules_apply_to_objects() -> None:
    with pytest.raises(ConfigError, match=r"rule: warm_start has demonstrations only for the reasoning_gym task chain_sum"):
        GRPO(load_config(QUICKSTART), prompts=squares)


def test_unknown_argument_error_lists_known_arguments() -> None:
    with pytest.raises(TypeError, match=r"rewrads: no such argument\. Choose one of .*rewards"):
        GRPO(CONFIG, rewrads=right)


def test_preflight_checks_python_prompts_and_rewards(tmp_path: Path) -> None:
    offset = 1.0

    @titanrl.group_reward
    def shifted(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
        return [offset] * len(completions)

    overrides = [f"output_dir={tmp_path}", f"cache_dir={tmp_path}", "warm_start=null", "evaluation.num_prompts=5"]
    run = GRPO(load_config(QUICKSTART, overrides), prompts=squares, rewards={"right": right, "shifted": shifted})
    assert run.config.data.source.startswith("object:")
    with pytest.raises(ConfigError, match=r"item 0: answer is missing"):
        GRPO(load_config(QUICKSTART, overrides), prompts=[{"prompt": "1 + 1 ="}])
