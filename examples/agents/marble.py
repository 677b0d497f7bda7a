"""Tasks of marble.yaml, and a script that plays their policy: put the piece somewhere below the ramp.

python examples/agents/scripted.py examples/agents/marble.yaml examples/agents/marble.py:reply data.environment.python=PYTHON

The taskset asks to place a piece so that a marble bounces through a ring. The script places it at random, and never looks at
the ring. Some places are better than others.
"""

import random
import re


def tasks(seed: int, num_tasks: int) -> list[dict[str, object]]:
    """Return the first tasks of the taskset, which writes their messages."""
    return [{"question": f"task {index}", "answer": "", "metadata": {"index": index}} for index in range(num_tasks)]


def reply(conversation: str) -> str:
    """Return a layout with the piece of the task."""
    rng, piece = random.Random(conversation), re.findall(r"- 1 x (\w+)", conversation)[-1]
    x, y, rot = rng.choice((380, 400, 420, 440)), rng.choice((-660, -840, -1020)), rng.choice((-5, 0, 5))
    return f'[{{"kind": "{piece}", "x": {x}, "y": {y}, "rot": {rot}}}]'
