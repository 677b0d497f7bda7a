"""The example with four DDP ranks sharing one buffer learns its task."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples/ddp_replay/ddp_replay.py"


def test_four_ranks_learn_from_one_buffer() -> None:
    ended = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    before, after = map(float, re.findall(r"(\d\.\d\d) -> (\d\.\d\d)", ended.stdout)[0])
    assert before < 0.5
    assert after > 0.7  # the order of the ranks' writes varies
    assert "one buffer of 4 ranks: 19200 items written, " in ended.stdout
