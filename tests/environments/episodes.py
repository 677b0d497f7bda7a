"""Helpers that make episodes and messages of a policy."""

from collections.abc import Mapping
from typing import Any

from titanrl.environments import Episode, Message


def episode(question: str = "What is 7 * 8?", *, seed: int = 0, **entry: Any) -> Episode:
    return Episode(task_id="task/0", question=question, entry={"question": question, **entry}, seed=seed)


def says(content: str) -> Message:
    """Return a message without calls."""
    return {"role": "assistant", "content": content}


def calls(*named: tuple[str, Mapping[str, Any] | str]) -> Message:
    """Return a message with calls: names, and parsed arguments or the text that could not be parsed."""
    tool_calls = [
        {"id": f"id_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(named)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}
