"""Options of environments behind servers: the short form, and the message for each wrong value."""

from typing import Any

import pytest

from titanrl.config import ConfigError, load_config
from titanrl.config.data import EnvironmentConfig


def environment(value: str, *overrides: str) -> EnvironmentConfig:
    made = load_config("quickstart", [f"data.environment={value}", *overrides]).data.environment
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("short", "function", "options"),
    [
        ("{openenv: 'http://host:1', options: {sessions: 64}}", "openenv", {"openenv": "http://host:1", "sessions": 64}),
        ("{tools: {mcp: server}, options: {max_calls: 2}}", "tools", {"tools": {"mcp": "server"}, "max_calls": 2}),
        ("{tools: [calculator, {mcp: server}], max_turns: 3}", "tools", {"tools": ["calculator", {"mcp": "server"}]}),
    ],
)
def test_name_of_an_environment_can_be_a_key(short: str, function: str, options: dict[str, Any]) -> None:
    made = environment(short, "warm_start=null")
    assert (made.function, made.options) == (function, options)
    assert EnvironmentConfig.model_validate(made.model_dump()) == made


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{openenv: maze env}", 'options.openenv="maze env"\n  rule: must be a URL, or the name of an importable package'),
        ("{openenv: 'http://'}", 'options.openenv="http://"\n  rule: openenv must contain a host'),
        (
            "{openenv: 'http://me:secret@host'}",
            'options.openenv="http://...@host"\n  rule: openenv must not contain credentials',
        ),
        ("{openenv: 'http://host', options: {python: p}}", 'options.python="p"'),
        ("{openenv: maze_env, options: {sessionz: 1}}", "options.sessionz=1\n  rule: openenv has no such option"),
        ("{openenv: maze_env, options: {sessions: 0}}", "options.sessions=0\n  rule:"),
        ("{openenv: maze_env, options: {sessions: 8}}", "all 64 episodes of a worker concurrently, each in its own session"),
        ("{openenv: maze_env, options: {reset: {seed: 1}}}", "seed is set by the run"),
        ("{openenv: maze_env, options: {message: '{a'}}", "message must have paired braces"),
        ("{openenv: maze_env, options: {pattern: '('}}", "must be a regular expression"),
        ("{openenv: maze_env, num_processes: 64}", "an OpenEnv server is a process already"),
        ("{function: openenv}", "options.openenv is required"),
        ("{verifiers: marble_v1}", "an interpreter of its own, because its pins conflict"),
        ("{verifiers: 'a b', python: /p, num_processes: 64}", 'options.verifiers="a b"'),
        ("{verifiers: a, python: /p, num_processes: 64, options: {taskset: {id: b}}}", "id is set by verifiers"),
        ("{verifiers: a, python: /p, num_processes: 8}", "all 64 episodes of a worker concurrently"),
        ("{tools: {mcp: ''}}", 'options.tools.mcp=""\n  rule: must have at least 1 character'),
        ("{tools: {mcp: 'a \"b'}}", "must be a command or a URL (No closing quotation)"),
        ("{tools: {mcp: ' '}}", "must be a command or a URL"),
        ("{tools: {mcp: 'http://a:b@host'}}", "set key_variable to its name"),
        ("{program: 'a \"b'}", "must be a command or an import path (No closing quotation)"),
        ("{program: [null]}", "environment.program=[null]\n  rule: must be a list of strings or an import path or null"),
        ("5", "environment=5\n  rule: must be a string or a mapping\n"),
        ("{tools: [calculator, {mcp: a, shared: maybe}]}", 'options.tools[1].shared="maybe"'),
        ("{tools: {mcp: a, key_variable: KEY}}", "a command has no key"),
        ("{tools: {mcp: 'http://host/{folder}'}}", "only a command can use {folder}"),
        ("{tools: {1: 2}}", "options.tools"),
        ("{tools: [{1: 2}]}", "options.tools[0]"),
        ("{tools: 5}", "options.tools=5\n  rule: tools must be a list of names"),
        ("{tools: [calculator, 5]}", "options.tools[1]=5\n  rule: tools must be a list of names"),
        ("{tools: calculator}", "options.tools"),
        ("{tools: {command: a}}", "options.tools.mcp is required"),
        ("{openenv: a, tools: {mcp: a}}", 'data.environment.openenv="a"'),
    ],
)
def test_wrong_options_are_refused_by_name(value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment(value, "warm_start=null")
    assert problem in str(caught.value)


def test_a_warm_start_with_calls_is_allowed_for_tools() -> None:
    with pytest.raises(ConfigError, match=r"or warm_start.tool_calls to true for a tool that takes a sum"):
        environment("{tools: {mcp: server}}")
    assert environment("{tools: {mcp: server}}", "warm_start.tool_calls=true").function == "tools"
