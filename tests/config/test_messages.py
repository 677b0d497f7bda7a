"""Every message about values that cannot be combined, word for word.

`messages.yaml` lists what is added to a valid configuration, and the messages. `python -m tests.config.test_messages` prints it
with the messages of today, so a changed text shows up as a difference of that file.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.wrong import GOOD
from titanrl.config import ConfigError, load_config

FILE = Path(__file__).with_name("messages.yaml")
CASES: list[dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))


def messages(folder: Path, case: dict[str, Any]) -> list[str]:
    path = folder / "run.yaml"
    path.write_text(GOOD + case.get("text", ""), encoding="utf-8")
    try:
        load_config(path, case.get("overrides", []))
    except ConfigError as error:
        return [message.replace(str(folder), "configs") for message in error.messages]
    return []


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join([*case.get("overrides", []), *case.get("text", "").split()]))
def test_messages(tmp_path: Path, case: dict[str, Any]) -> None:
    assert messages(tmp_path, case) == case["messages"]


ALLOWED = [
    *(
        f"rollout: {{top_p: 0.9, top_k: 20, min_p: 0.1}}\nalgorithm: {{loss: {loss}}}"
        for loss in ("ppo", "reinforce, correction: {preset: token_tis}", "ppo, kl: {coef: 0.1}")
    ),
    *(f"trainer: {{row_tokens: 64, overlong: {overlong}}}" for overlong in ("truncate", "skip")),
    "hosts: {devices_per_host: 1}\ndevice: cpu",
    "hosts: {devices_per_host: 1, share_devices: true}\ndevice: cuda",
    "hosts: {kind: slurm, trainer_hosts: 2, devices_per_host: 2}\ndevice: cuda\ntrainer: {parallelism: {dp_shard: 4}}",
    *(
        f"trainer: {{epochs: 2}}\nalgorithm: {{{objective}}}"
        for objective in ("loss: reinforce, correction: {weight: token}", "loss: ppo, proximal: step_start", "loss: dro")
    ),
    *(
        f"replay: {{fraction: 0.5}}\nalgorithm: {{loss: {loss}, correction: {{weight: token}}}}"
        for loss in ("reinforce", "ppo, proximal: step_start")
    ),
    "warm_start: {tool_calls: true}\ndata: {environment: {function: 'tools_of_mine:Abacus'}}",
]


@pytest.mark.parametrize("text", ALLOWED)
def test_values_that_can_be_combined_have_no_message(tmp_path: Path, text: str) -> None:
    assert messages(tmp_path, {"text": text}) == []


class Readable(yaml.SafeDumper):
    """Writes texts of several lines as literal blocks."""


Readable.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        today = [case | {"messages": messages(Path(scratch), case)} for case in CASES]
    print(yaml.dump(today, Dumper=Readable, sort_keys=False, allow_unicode=True, width=1000), end="")
