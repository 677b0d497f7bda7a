"""Tasks of `test_foreign.py`, and scripts that play their policies."""

import random
import re

BRANCHES = ("red", "blue", "green", "gold")
CREATE = '<tool_call>{{"name": "git_create_branch", "arguments": {{"repo_path": ".", "branch_name": "{}"}}}}</tool_call>'
LIST = '<tool_call>{"name": "git_branch", "arguments": {"repo_path": ".", "branch_type": "local"}}</tool_call>'
RNG = random.Random(0)


def tasks(seed: int, num_tasks: int) -> list[dict[str, object]]:
    """Return questions for a policy that works with a git repository. The answers are names of branches."""
    rng = random.Random(seed)
    names = [rng.choice(BRANCHES) for _ in range(num_tasks)]
    return [{"question": f"Make the branch {name}, worker {i}.", "answer": name} for i, name in enumerate(names)]


def work(conversation: str) -> str:
    """Return a call that creates a branch, then one that lists the branches, then the name that it shows."""
    if "Created branch" not in conversation:
        (asked,) = re.findall(r"Make the branch (\w+), worker", conversation)
        return CREATE.format(asked if RNG.random() < 0.45 else BRANCHES[0])
    seen = re.findall(rf"<tool_response>(?:\* main\s+)?({'|'.join(BRANCHES)})\b", conversation)
    return seen[0] if seen else LIST


def echo(conversation: str) -> str:
    """Return a message, most often a short one. The server rewards long ones."""
    return RNG.choice(("ok", "ok", "ok", "done", "as you wish"))
