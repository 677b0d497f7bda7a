"""The example of a custom tool and a custom group reward, without a run."""

import runpy
from pathlib import Path

import pytest

from titanrl.config import load_config
from titanrl.environments import Episode, make_environment

FOLDER = Path(__file__).parents[2] / "examples/custom_tool"
OWN = runpy.run_path(str(FOLDER / "custom_tool.py"))


@pytest.mark.parametrize(
    ("terms", "reply"),
    [
        ("12+345-67", "290"),
        (" 3 - 4 ", "-1"),
        ("-2", "-2"),
        ("2*3", "Write whole numbers with + or - between them."),
        ("2+", "Write whole numbers with + or - between them."),
    ],
)
async def test_tool_answers_a_call(terms: str, reply: str) -> None:
    environment = make_environment(f"{FOLDER}/custom_tool.py:Abacus")
    first = await environment.reset(Episode(task_id="sums/0", question="?", entry={}, seed=0))
    (tool,) = first.tools
    assert (tool.name, list(tool.parameters["properties"])) == ("total", ["terms"])
    call = {"id": "call_0", "type": "function", "function": {"name": tool.name, "arguments": {"terms": terms}}}
    observation = await environment.step({"role": "assistant", "content": "", "tool_calls": [call]})
    assert str(observation.messages[0]["content"]) == reply


def test_shortest_correct_answers_of_a_group_are_rewarded() -> None:
    answers = ["<answer>9</answer>", "<answer>9</answer>", "<answer>9</answer>", "<answer>8</answer>"]
    assert OWN["brief"](answers, {"answer": "9"}, num_tokens=[12, 10, 10, 4]) == [0.0, 1.0, 1.0, 0.0]
    assert OWN["brief"](answers, {"answer": "7"}, num_tokens=[12, 10, 10, 4]) == [0.0] * 4


def test_configuration_of_the_example_uses_both() -> None:
    config = load_config(FOLDER / "custom_tool.yaml")
    assert config.data.environment.function == f"{FOLDER}/custom_tool.py:Abacus"
    assert config.data.rewards["brief"].function == f"{FOLDER}/custom_tool.py:brief"
