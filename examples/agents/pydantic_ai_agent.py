"""The same agent in pydantic-ai. Its history extends from call to call, so that an episode is one segment."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic_ai import Agent, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def read(context: Any, events: AsyncIterable[Any]) -> None:
    """Read the events of a stream."""
    async for _ in events:
        pass


async def play(task: Any) -> str:
    """Play an episode."""
    model = OpenAIChatModel(task.model, provider=OpenAIProvider(base_url=task.url, api_key=task.key))
    agent = Agent(model, system_prompt="Look at the table, then name the card.")

    @agent.tool_plain
    def look() -> str:
        """Look at the table, and return what lies there."""
        return f"I see {task.entry['answer']}."

    streams = task.seed % 2 == 0  # only to show that both work
    try:
        return (await agent.run(task.question, event_stream_handler=read if streams else None)).output
    except UnexpectedModelBehavior as error:  # the policy's fault, and no failure of the program
        return str(error)


if __name__ == "__main__":
    Path(os.environ["TITANRL_RESULT"]).write_text(asyncio.run(play(SimpleNamespace(**json.load(sys.stdin)))))
