"""An agent with OpenAI's official client, as an async function and as a command.

python -m titanrl.grpo --config quickstart 'data.environment={program: examples/agents/sums.py:play}'
python -m titanrl.grpo --config quickstart 'data.environment={program: python examples/agents/sums.py}'
"""

import functools
import json
import os
import sys

import openai

from titanrl.environments.programs import ProgramTask


@functools.cache
def shared(url: str) -> openai.AsyncOpenAI:
    """Return the client of all episodes. A new one for each would take longer than their calls."""
    return openai.AsyncOpenAI(base_url=url, api_key="none")


async def play(task: ProgramTask) -> None:
    """Ask the policy; the reward of the configuration scores its last message."""
    client = shared(task.url).with_options(api_key=task.key)
    messages = [{"role": "user", "content": task.question}]
    await client.chat.completions.create(model=task.model, messages=messages)  # type: ignore[arg-type]


def main() -> None:
    """Do the same as a command. The client finds URL and key in OPENAI_BASE_URL and OPENAI_API_KEY."""
    task = json.load(sys.stdin)
    messages = [{"role": "user", "content": task["question"]}]
    openai.OpenAI().chat.completions.create(model=os.environ["TITANRL_MODEL"], messages=messages)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
