"""Custom loss, advantage, group filter, priority, tracker and hooks, given by module, by file and as objects."""

import ast
import asyncio
import functools
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import custom_objects
from tests.algorithms.test_policy_loss import example
from tests.records import make_record, plan_rewards
from tests.rollout.test_filters import GROUP, decode
from titanrl.algorithms.batch_plan import ReplaySchedule
from titanrl.algorithms.contracts import bound_loss
from titanrl.algorithms.objective import policy_loss
from titanrl.base.plugins import Plugins, loaded
from titanrl.carriers.tables import RecordTable
from titanrl.config import Config, ConfigError, load_config, read_source
from titanrl.config.algorithm import ADVANTAGES, LOSSES, AlgorithmConfig
from titanrl.config.load import dump, validate
from titanrl.config.sections import TRACKERS, ReplayConfig
from titanrl.launch.extensions import plugins_of, with_declared_traits, with_objects
from titanrl.launch.preflight import preflight
from titanrl.metrics.trackers import Hooks, make_trackers
from titanrl.rollout.group import keeps

ROOT = Path(__file__).parents[1]
NAMES = {
    "algorithm.loss": "clipped",
    "algorithm.advantage": "centred",
    "rollout.group_filter": "odd",
    "replay.priority": "closeness",
    "logging.loggers": "Tracker",
    "hooks": "Hook",
}
ARGUMENTS = {
    "loss": custom_objects.clipped,
    "advantage": custom_objects.centred,
    "group_filter": custom_objects.odd,
    "priority": custom_objects.closeness,
    "trackers": [custom_objects.Tracker],
    "hooks": [custom_objects.Hook()],
}


def yaml(names: dict[str, str], module: str) -> str:
    """Return a configuration that names objects in a module."""
    path = {key: f"{module}:{name}" for key, name in names.items()}
    return (
        f"name: own\nnum_steps: 1\ndevice: cpu\nhooks: ['{path['hooks']}']\n"
        f"logging: {{loggers: ['{path['logging.loggers']}']}}\n"
        f"rollout: {{group_filter: '{path['rollout.group_filter']}'}}\n"
        f"replay: {{fraction: 0.5, priority: '{path['replay.priority']}'}}\n"
        f"algorithm: {{loss: '{path['algorithm.loss']}', advantage: '{path['algorithm.advantage']}'}}\n"
    )


def configured(how: str, folder: Path) -> tuple[Config, Plugins]:
    """Return a run's configuration and plugins, with the objects given in one of three ways."""
    if how == "object":
        config = with_objects(Config(name="own", num_steps=1, replay=ReplayConfig(fraction=0.5)), ARGUMENTS)
        return config, plugins_of(config, ARGUMENTS)
    module = "tests.custom_objects"
    if how == "file":
        (folder / "code").mkdir()
        shutil.copy(custom_objects.__file__, folder / "code" / "mine.py")
        module = "../code/mine.py"
    (folder / "configs").mkdir()
    (folder / "configs" / "run.yaml").write_text(yaml(NAMES, module))
    config = load_config(folder / "configs" / "run.yaml")
    return config, plugins_of(config, {})


@pytest.fixture(params=["module", "file", "object"])
def own(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Config, Plugins]:
    """Configuration and plugins of a run with six custom objects."""
    config, plugins = configured(request.param, tmp_path)
    return with_declared_traits(config, plugins), plugins


Own = tuple[Config, Plugins]


def test_custom_loss_matches_built_in_bit_for_bit(own: Own) -> None:
    config, plugins = own
    assert not config.algorithm.runs_without_advantage, "the declared traits must be known"
    inputs = example(dtype=torch.float32)
    totals = [
        policy_loss(inputs, config.algorithm, bound_loss(config.algorithm, loaded(plugins, "algorithm.loss")))[0],
        policy_loss(inputs, AlgorithmConfig())[0],
    ]
    gradients = [torch.autograd.grad(total, inputs.logprobs_N)[0] for total in totals]
    assert torch.equal(*totals)
    assert torch.equal(*gradients)


def test_custom_advantage_plans_the_same_batch(own: Own) -> None:
    config, plugins = own
    records = RecordTable.of([make_record(0, rewards=[1.0, 0.0, 0.25]), make_record(1, rewards=[0.5, 0.5])])
    sizes: dict[str, Any] = {"constant_length": 26, "row_tokens": 99, "rows_per_microbatch": 1, "dp_size": 1}
    advantage = loaded(plugins, "algorithm.advantage")
    plan = plan_rewards(records, algorithm=config.algorithm, own=advantage, **sizes)
    assert plan.advantages_N.tolist() == plan_rewards(records, algorithm=AlgorithmConfig(), **sizes).advantages_N.tolist()


def test_custom_filter_keeps_some_groups(own: Own) -> None:
    _, plugins = own
    assert GROUP.prompt.index == 7
    assert keeps(loaded(plugins, "rollout.group_filter"), GROUP, decode, "odd")


def test_custom_priority_matches_built_in(own: Own) -> None:
    config, plugins = own
    records, advantages = RecordTable.of([make_record(0), make_record(1)]), np.array([-0.5, 0.5, -0.25, 0.25])
    schedules = [ReplaySchedule(config.replay, 1, loaded(plugins, "replay.priority")), ReplaySchedule(ReplayConfig(), 1)]
    values = [schedule.priorities(records, advantages).tolist() for schedule in schedules]
    assert values == [[0.5, 0.25]] * 2


def test_custom_tracker_is_started_and_gets_metrics(own: Own, tmp_path: Path) -> None:
    config, plugins = own
    trackers = make_trackers(config.logging.loggers, tmp_path, {}, warn=pytest.fail, plugins=plugins)
    trackers.log(3, {"reward/mean": 0.5})
    (tracker,) = trackers._trackers.values()
    assert tracker.logged == [3]  # type: ignore[attr-defined]


def test_custom_hook_is_called(own: Own) -> None:
    _, plugins = own
    run: list[str] = []
    asyncio.run(Hooks.of(plugins).before_step(run))
    assert run == ["called"]


def test_configuration_records_the_names_of_objects(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump(configured("object", tmp_path)[0].model_dump()))
    config = load_config(file)
    assert (config.algorithm.loss, config.algorithm.advantage) == ("object:clipped", "object:centred")
    assert config.replay.priority == "object:closeness"
    assert (config.rollout.group_filter, config.logging.loggers) == ("object:odd", ("object:Tracker",))
    assert config.hooks == ("object:Hook",)
    with pytest.raises(ValueError, match=r"^algorithm\.loss: a Python object, which a configuration cannot hold"):
        loaded(plugins_of(config, {}), "algorithm.loss")
    resumed = with_objects(config, ARGUMENTS)  # the objects again
    assert resumed == config
    assert loaded(plugins_of(resumed, ARGUMENTS), "hooks.0") is ARGUMENTS["hooks"][0]


def test_python_trackers_and_hooks_follow_configured_ones() -> None:
    config = Config.model_validate({"name": "own", "num_steps": 1, "logging": {"loggers": ["tensorboard"]}, "hooks": ["a.b:C"]})
    config = with_objects(config, {"trackers": custom_objects.Tracker, "hooks": [custom_objects.Hook(), "c.d:E"]})
    assert config.logging.loggers == ("tensorboard", "object:Tracker")
    assert config.hooks == ("a.b:C", "object:Hook", "c.d:E")
    plugins = plugins_of(config, {"trackers": custom_objects.Tracker, "hooks": [custom_objects.Hook(), "c.d:E"]})
    assert {key: plugin.name for key, plugin in plugins.items()} == {
        "logging.loggers.1": "Tracker",
        "hooks.0": "a.b:C",
        "hooks.1": "Hook",
        "hooks.2": "c.d:E",
    }


def test_name_of_built_in_replaces_configured_value() -> None:
    config = with_objects(Config(name="own", num_steps=1), {"loss": "reinforce", "advantage": "rloo"})
    assert (config.algorithm.loss, config.algorithm.advantage) == ("reinforce", "rloo")
    assert plugins_of(config, {"loss": "reinforce", "advantage": "rloo"}) == {}


def wrong_hook() -> None:
    pass


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            {"loss": custom_objects.two_arguments},
            r"^algorithm\.loss: .* Write it as `def loss\(inputs: LossInputs, ",
        ),
        (
            {"advantage": custom_objects.no_arguments},
            r"^algorithm\.advantage: .* Write it as `def advantage\(group: ",
        ),
        (
            {"group_filter": custom_objects.no_arguments},
            r"^rollout\.group_filter: .* Write it as `def keep\(group: ScoredGroup\)",
        ),
        ({"priority": custom_objects.no_arguments}, r"^replay\.priority: .* Write it as `def priority\(group: "),
        (
            {"trackers": [custom_objects.Hook]},
            r"^logging\.loggers\.0: .* Write it as `class MyTracker: def __init__\(self, ",
        ),
        ({"hooks": [wrong_hook]}, r"^hooks\.0: not a hook .* Write it as `class MyHook\(titanrl\.Hook\)`"),
    ],
    ids=["loss", "advantage", "group_filter", "priority", "trackers", "hooks"],
)
def test_object_with_wrong_signature_is_rejected(arguments: dict[str, Any], problem: str) -> None:
    config = with_objects(Config(name="own", num_steps=1, replay=ReplayConfig(fraction=0.5)), arguments)
    with pytest.raises(ValueError, match=problem):
        plugins_of(config, arguments)


def test_wrong_signatures_exit_with_2_and_show_expected_ones(tmp_path: Path) -> None:
    shutil.copy(custom_objects.__file__, tmp_path / "mine.py")
    wrong = {
        "algorithm.loss": "two_arguments",
        "algorithm.advantage": "no_arguments",
        "rollout.group_filter": "keep",
        "replay.priority": "no_arguments",
        "logging.loggers": "Hook",
        "hooks": "Tracker",
    }
    reward = "data: {rewards: {short: {function: 'mine.py:no_arguments'}}}\n"
    (tmp_path / "run.yaml").write_text(yaml(wrong, "mine.py") + reward)
    command = [sys.executable, "-m", "titanrl.grpo", "--config", str(tmp_path / "run.yaml"), "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for key, line, expected in (
        ("algorithm.loss", 8, "write it as `def loss(inputs: LossInputs, *, option: float = 1.0) -> Tensor`"),
        (
            "algorithm.advantage",
            8,
            "write it as `def advantage(group: GroupRewards) -> Sequence[float] | Sequence[Sequence[float]]`",
        ),
        ("replay.priority", 7, "write it as `def priority(group: GroupRewards, advantages: Sequence[float]) -> float`"),
        ("rollout.group_filter", 6, "write it as `def keep(group: ScoredGroup) -> bool`"),
        ("logging.loggers[0]", 5, "write it as `class MyTracker: def __init__(self, run_dir: Path, "),
        ("hooks[0]", 4, "write it as `class MyHook(titanrl.Hook)`"),
        ("data.rewards.short", 9, "write it as `def reward(completion: str, entry: Mapping[str, Any]) -> float`"),
    ):
        place = f"run.yaml:{line}: {key}="
        assert place in done.stderr, done.stderr
        assert expected in done.stderr.partition(place)[2].partition("\n  fix:  ")[2].partition("\n")[0]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py", "run.yaml"]


def test_conflicting_traits_are_rejected_before_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(inputs):\n    return -inputs.ratio_N * inputs.advantages_N\n")
    (tmp_path / "run.yaml").write_text("name: own\nnum_steps: 1\nmax_staleness: 1\nalgorithm: {loss: 'mine.py:loss'}\n")
    source = read_source(tmp_path / "run.yaml")
    with pytest.raises(ConfigError) as raised:
        preflight(validate(source), source)
    text = str(raised.value)
    assert "run.yaml:4: algorithm.loss=" in text
    assert "max_staleness=1 (" in text
    assert "decorate the loss with titanrl.policy_loss(ratio=...)" in text


@functools.cache
def texts_of_modules() -> dict[str, set[str]]:
    """Return the string constants of each module."""
    package = ROOT / "titanrl"
    return {
        str(path.relative_to(package)): {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for path in package.rglob("*.py")
    }


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (
            LOSSES,
            {"config/algorithm.py", "algorithms/contracts.py", "config/sections.py", "serving/tinker_wire.py", "distill.py"},
        ),
        (ADVANTAGES, {"config/algorithm.py", "config/data.py", "config/schema.py"}),
        (TRACKERS, {"config/sections.py", "metrics/trackers.py"}),
    ],
    ids=["losses", "advantages", "trackers"],
)
def test_built_in_is_named_only_by_its_registration(names: Mapping[str, object], files: set[str]) -> None:
    # The other files are presets, one rule each about an option of ppo and of pass_at_k, and Tinker's and distillation's names.
    wanted = set(names) - {"grpo"}  # `grpo` is a module and a preset, too
    assert {file for file, texts in texts_of_modules().items() if wanted & texts} <= files
