"""Trial calls of user-defined rewards before a start, in the sandbox and outside of it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.processes.processes import needs_confinement
from titanrl.config.errors import BrokenRules
from titanrl.config.schema import Config
from titanrl.launch.preflight import sample_answers, try_rewards

pytestmark = needs_confinement
ENTRY = {"question": "2 + 2 =", "answer": "4", "metadata": {}}
REWARDS = """
import asyncio, socket, titanrl

def right(completion, entry): return {"right": float(entry["answer"] in completion), "long": len(completion) / 100}
def steps(completion, entry): return titanrl.TokenRewards(steps=[(3, 1)], tokens=[0.5] * len(completion))
def raises(completion, entry): return entry["metadata"]["level"]
def optional(completion, entry):
    try:
        return float(len(open("/etc/passwd").read()))
    except OSError:
        return 0.0

def text(completion, entry): return "1.0"
def nothing(completion, entry): return None
def undefined(completion, entry): return float("nan")
def listed(completion, entry): return [1.0]
def network(completion, entry): return 1.0 if socket.create_connection(("127.0.0.1", 9), 1) else 0.0

async def waits(completion, entry):
    await asyncio.sleep(0.001)
    return 1.0

@titanrl.group_reward
def optionals(completions, entry): return [optional(completion, entry) for completion in completions]

@titanrl.group_reward
def short(completions, entry): return [1.0]

@titanrl.group_reward
def group(completions, entry, finish_reasons): return [float(reason == "stop") for reason in finish_reasons]
"""


def tried(
    folder: Path, names: Sequence[str], *, trusted: bool = False, section: str = "data"
) -> tuple[dict[str, str], list[str]]:
    """Try the named rewards; return the broken rules by key, and the warnings."""
    (folder / "own_rewards.py").write_text(REWARDS)
    rewards = {name: {"function": f"{folder}/own_rewards.py:{name}", "trusted": trusted} for name in names}
    config = Config.model_validate({"name": "a", "num_steps": 1, "data": {"rewards": rewards}})
    try:
        return {}, try_rewards(config, {}, ENTRY, section)
    except BrokenRules as error:
        return {next(iter(rule.values)): f"{rule.rule}; {rule.fix}" for rule in error.broken}, []


def test_values_that_are_no_rewards_are_errors(tmp_path: Path) -> None:
    found, _ = tried(
        tmp_path, ["right", "text", "nothing", "undefined", "listed", "short", "network", "waits"], section="data.mixture.sums"
    )
    sample = "for the sample completion '<answer>4</answer>'"
    expected = {
        "text": ("TypeError: the reward returned '1.0'. Expected a finite number", sample, "return a finite number"),
        "nothing": ("TypeError: the reward returned None.", sample, "return 0 for a wrong answer"),
        "undefined": ("TypeError: the reward returned nan.", sample, "raise an exception if the reward is unknown"),
        "listed": ("TypeError: the reward returned [1.0].", sample, "return a finite number"),
        "short": ("TypeError: the reward returned 1 of 2 values. Expected one per completion", sample, "return"),
        "network": (
            "the reward needs the network, which the sandbox denies",
            sample,
            "set data.rewards.network.trusted to true",
        ),
        "waits": ("the reward needs an event loop, which the sandbox denies", sample, "set data.rewards.waits.trusted to true"),
    }
    assert found.keys() == {f"data.mixture.sums.rewards.{name}" for name in expected}
    for name, parts in expected.items():
        assert all(part in found[f"data.mixture.sums.rewards.{name}"] for part in parts), found


def test_exception_on_a_sample_is_only_a_warning(tmp_path: Path) -> None:
    broken, warnings = tried(tmp_path, ["right", "steps", "raises", "group"])
    assert broken == {}
    assert warnings == [
        "data.rewards.raises: the reward failed for the sample completion '<answer>4</answer>' "
        "(KeyError: 'level' (own_rewards.py:6)). If it fails on real completions, they have no reward."
    ]


def test_reward_that_goes_on_without_a_denied_file_is_a_warning(tmp_path: Path) -> None:
    broken, warnings = tried(tmp_path, ["right", "optional", "optionals"])
    assert broken == {}
    assert warnings == [
        f"data.rewards.{name}: it tried to read /etc/passwd, which the sandbox denies, and went on without it. Read it when "
        f"the module is imported, or set data.rewards.{name}.trusted to true, unless its rewards do not depend on it."
        for name in ("optional", "optionals")
    ]
    assert tried(tmp_path, ["optional"], trusted=True) == ({}, [])


def test_trusted_rewards_are_tried_with_an_event_loop(tmp_path: Path) -> None:
    broken, warnings = tried(tmp_path, ["waits", "nothing", "raises"], trusted=True)
    assert broken.keys() == {"data.rewards.nothing"}
    assert tried(tmp_path, ["waits", "group"], trusted=True) == ({}, [])
    assert warnings == []


def test_weights_of_missing_parts_are_errors(tmp_path: Path) -> None:
    (tmp_path / "own_rewards.py").write_text(REWARDS)
    reward = {"function": f"{tmp_path}/own_rewards.py:right", "weights": {"length": 2.0}}
    config = Config.model_validate({"name": "a", "num_steps": 1, "data": {"rewards": {"answer": reward}}})
    with pytest.raises(BrokenRules) as raised:
        try_rewards(config, {}, ENTRY, "data")
    assert "it returned long, right, but data.rewards.answer.weights names length" in raised.value.broken[0].rule


def test_reward_that_cannot_be_loaded_is_left_to_another_check(tmp_path: Path) -> None:
    assert tried(tmp_path, ["absent"]) == tried(tmp_path, ["absent"], trusted=True) == ({}, [])


def test_samples_contain_the_right_answer_and_a_wrong_one() -> None:
    answers = sample_answers({"question": "2 + 2 =", "answer": None, "metadata": {}})
    assert answers.completions == ("<answer>a sample</answer>", "I do not know.")
    assert answers.num_tokens == tuple(len(ids) for ids in answers.token_ids) == (25, 14)
