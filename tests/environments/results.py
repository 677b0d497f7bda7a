"""Results that no environment may return, as Python expressions that an environment in another process can evaluate, too.

`user(content)` is a message, `seen(*messages)` an observation.
"""

import math
from typing import Any

from titanrl.environments import Done, Observation, Tool

_MESSAGES = {
    "surrogate": r"user('a\ud800')",
    "NUL": r"user('a\0b')",
    "bytes": "user(b'2')",
    "bytearray": "user(bytearray(b'2'))",
    "None": "user(None)",
    "number": "user(2)",
    "NaN": "user(math.nan)",
    "boolean": "user(True)",
    "mapping": "user({'text': '2'})",
    "list of numbers": "user([2])",
    "list of bytes": "user([b'2'])",
    "image": "user([{'type': 'image_url', 'image_url': {'url': 'x'}}])",
    "text part without text": "user([{'type': 'text'}])",
    "object": "user(object())",
    "set": "user({'2'})",
    "no content": "{'role': 'user'}",
    "no role": "{'content': '2'}",
    "role None": "{'role': None, 'content': '2'}",
    "unknown role": "{'role': 'function', 'content': '2'}",
    "role in a list": "{'role': ['user'], 'content': '2'}",
    "silent assistant": "{'role': 'assistant', 'content': None}",
    "message None": "None",
    "message as text": "'2'",
    "message as bytes": "b'2'",
    "message as number": "2",
    "message as list": "[('role', 'user'), ('content', '2')]",
    "size": "user('2' * (1 << 20))",
    "nesting": "{**user('2'), 'extra': functools.reduce(lambda inner, _: [inner], range(2000), 0)}",
    "cycle": "(lambda ring: ring.append(ring) or {**user('2'), 'extra': ring})([])",
    "extra object": "{**user('2'), 'extra': object()}",
    "extra bytes": "{**user('2'), 'extra': [b'2']}",
    "extra infinity": "{**user('2'), 'extra': math.inf}",
    "extra surrogate": r"{**user('2'), 'extra': '\udfff'}",
    "huge integer": "{**user('2'), 'extra': 10**5000}",
    "key as number": "{**user('2'), 2: 'x'}",
    "key as bytes": "{**user('2'), b'name': 'x'}",
    "key with surrogate": r"{**user('2'), '\ud800': 'x'}",
    "name as number": "{**user('2'), 'name': 2}",
    "call id as number": "{'role': 'tool', 'content': '2', 'tool_call_id': 2}",
    "calls as text": "{'role': 'assistant', 'content': '', 'tool_calls': 'add'}",
    "call without a function": "{'role': 'assistant', 'content': '', 'tool_calls': [{}]}",
    "call with a list": "{'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'add', 'arguments': [1]}}]}",
}
INVALID = {
    **{f"message: {name}": f"seen({message})" for name, message in _MESSAGES.items()},
    "second message": "seen(user('2'), user(b'2'))",
    "messages None": "Observation(messages=None)",
    "messages as text": "Observation(messages='2')",
    "messages as mapping": "Observation(messages=user('2'))",
    "messages as generator": "Observation(messages=(user('2') for _ in range(1)))",
    "too many messages": "seen(*[user('2')] * 4097)",
    "tools None": "Observation(messages=[user('2')], tools=None)",
    "tool as text": "Observation(messages=[user('2')], tools=['add'])",
    "tool with bytes": "Observation(messages=[user('2')], tools=[Tool(name='add', description=b'Add.')])",
    "tool with a schema as text": "Observation(messages=[user('2')], tools=[Tool(name='add', parameters='{}')])",
    "tool with a type": "Observation(messages=[user('2')], tools=[Tool(name='add', parameters={'type': int})])",
    "replaces as text": "Observation(messages=[user('2')], replaces='no')",
    "state None": "Observation(messages=[user('2')], state=None)",
    "state too long": "Observation(messages=[user('2')], state='a' * 100_000_000)",
    "metrics None": "Observation(messages=[user('2')], metrics=None)",
    "metrics with text": "Observation(messages=[user('2')], metrics={'calls': 'many'})",
    "metrics with NaN": "Observation(messages=[user('2')], metrics={'calls': math.nan})",
    "metrics with a space": "Observation(messages=[user('2')], metrics={'a b': 1.0})",
    "metrics of Done": "Done(metrics={'calls': math.inf})",
    "rewards as number": "Done(rewards=1.0)",
    "rewards with a number as name": "Done(rewards={1: 1.0})",
    "rewards with a surrogate": r"Done(rewards={'\ud800': 1.0})",
    "reserved reward": "Done(rewards={'turns': 1.0})",
    "too many rewards": "Done(rewards={f'r{i}': 1.0 for i in range(33)})",
    **{f"result {result}": result for result in ("None", "2", "'2'", "b'2'", "True", "[]", "{}", "(user('2'), 1.0)", "Done")},
}
"""Results that end an episode as `environment_error`."""
INVALID_REWARDS = {
    **{
        f"reward {value}": f"Observation(messages=[user('2')], reward={value})"
        for value in ("math.nan", "-math.inf", "'1.0'", "None", "[1.0]", "10**400", "1j")
    },
    **{f"last reward {value}": f"Done(reward={value})" for value in ("math.nan", "'much'", "None")},
    **{f"named reward {value}": f"Done(rewards={{'right': {value}}})" for value in ("math.inf", "'b'", "None", "b'1'", "{}")},
}
"""Results that end an episode as `reward_error`."""


def returned(expression: str) -> Any:
    """Return the value of an expression of this module."""
    import functools

    def user(content: Any) -> Any:
        return {"role": "user", "content": content}

    def seen(*messages: Any) -> Any:
        return Observation(messages=messages)

    scope = {"Done": Done, "Observation": Observation, "Tool": Tool, "math": math, "functools": functools}
    return eval(expression, {**scope, "user": user, "seen": seen})
