"""An agent in smolagents, as an async function and as a command: it looks at a table, then names the card that lies there.

smolagents writes the history in words of its own before each call, so that each call is a segment of its own.
"""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

THREADS = ThreadPoolExecutor(max_workers=1000)


def answer(task: Any) -> str:
    """Play an episode."""

    @tool
    def look() -> str:
        """Look at the table, and return what lies there."""
        return f"I see {task.entry['answer']}."

    model = OpenAIServerModel(task.model, api_base=task.url, api_key=task.key)
    streams = task.seed % 2 == 0  # only to show that both work
    agent = ToolCallingAgent(tools=[look], model=model, max_steps=3, verbosity_level=-1, stream_outputs=streams)
    return str(agent.run(task.question))


async def play(task: Any) -> str:
    """Play an episode in a thread, because smolagents blocks. `asyncio.to_thread` has too few threads for all episodes."""
    return await asyncio.get_running_loop().run_in_executor(THREADS, answer, task)


if __name__ == "__main__":
    Path(os.environ["TITANRL_RESULT"]).write_text(answer(SimpleNamespace(**json.load(sys.stdin))))
