"""The tiny model of the example `agents`, made from episodes that a script plays."""

import asyncio
import sys
from pathlib import Path

from titanrl.base.plugins import import_object
from titanrl.config import load_config
from titanrl.data.tokenizer import load_tokenizer

AGENTS = Path(__file__).parents[2] / "examples/agents"
AGENT = """
import json, openai, sys

task = json.load(sys.stdin)
tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
messages = [{"role": "user", "content": task["question"]}]
reply = openai.OpenAI().chat.completions.create(model="policy", messages=messages, tools=tools)
(call,) = reply.choices[0].message.tool_calls
messages += [reply.choices[0].message]
messages += [{"role": "tool", "tool_call_id": call.id, "content": f"I see {task['entry']['answer']}."}]
print(openai.OpenAI().chat.completions.create(model="policy", messages=messages, tools=tools).choices[0].message.content)
"""


def test_model_is_made_from_the_replies_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    overrides = [f"data.environment.program=['{sys.executable}', '{tmp_path}/agent.py']", f"model.path={tmp_path}/model"]
    config = load_config(AGENTS / "cards.yaml", overrides)
    make = import_object(f"{AGENTS}/scripted.py:make", key="test")
    asyncio.run(make(config, import_object(f"{AGENTS}/cards.py:reply", key="test"), num_episodes=3, num_steps=1))
    tokenizer = load_tokenizer(tmp_path / "model")
    assert len(tokenizer.encode("Look at the table. I see red.")) < 29  # as bytes
    assert (tmp_path / "model/model.safetensors").is_file()
