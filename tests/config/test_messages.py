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


class Readable(yaml.SafeDumper):
    """Writes texts of several lines as literal blocks."""


Readable.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        today = [case | {"messages": messages(Path(scratch), case)} for case in CASES]
    print(yaml.dump(today, Dumper=Readable, sort_keys=False, allow_unicode=True, width=1000), end="")
