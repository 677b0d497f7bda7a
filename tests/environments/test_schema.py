"""Schemas of tools from signatures and docstrings, and the arguments of calls."""

import enum
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from titanrl.environments import ToolError
from titanrl.environments.tools import read_docstring, signature_of


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Place:
    name: str
    height: float = 0.0


def search(
    query: str,
    limit: int = 10,
    unit: Unit = Unit.METRE,
    order: Literal["up", "down"] = "up",
    tags: list[str] | None = None,
    scores: dict[str, float] | None = None,
) -> str:
    """Search places.

    The result is a list of names,
    one per line.

    Args:
        query: Words to look for,
            separated by spaces.
        limit (int): Most results.
        tags: Labels: all of them must fit.

    Returns:
        limit: not an argument.
    """
    return query


def visit(places: list[Place], how: Annotated[int, Field(ge=1, description="Steps")], *, fast: bool = False) -> str:
    """Visit places."""
    return ""


def test_docstring_and_hints_become_the_schema() -> None:
    tool = signature_of(search).tool
    assert (tool.name, tool.description) == ("search", "Search places. The result is a list of names, one per line.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words to look for, separated by spaces."},
            "limit": {"type": "integer", "default": 10, "description": "Most results."},
            "unit": {"enum": ["m", "ft"], "type": "string", "default": "m"},
            "order": {"enum": ["up", "down"], "type": "string", "default": "up"},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "Labels: all of them must fit."},
            "scores": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "required": ["query"],
    }


def test_nested_types_are_inlined() -> None:
    parameters = signature_of(visit).tool.parameters
    assert parameters["properties"]["places"]["items"] == {
        "type": "object",
        "properties": {"name": {"type": "string"}, "height": {"type": "number", "default": 0.0}},
        "required": ["name"],
    }
    assert parameters["properties"]["how"] == {"type": "integer", "minimum": 1, "description": "Steps"}
    assert "$" not in json.dumps(parameters)


def test_arguments_are_converted_to_the_types_of_the_parameters() -> None:
    converted = signature_of(search).arguments({"query": "a", "limit": "3", "unit": "ft", "tags": ["b"]})
    assert converted == {"query": "a", "limit": 3, "unit": Unit.FOOT, "tags": ["b"]}
    assert signature_of(visit).arguments({"places": [{"name": "x"}], "how": 2}) == {"places": [Place("x")], "how": 2}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "query is missing"),
        ({"query": "a", "colour": 1}, "unknown argument colour"),
        ({"query": 3}, "query: input should be a valid string (got 3)"),
        ({"query": "a", "limit": "many"}, "limit: input should be a valid integer"),
        ({"query": "a", "order": "sideways"}, "order: input should be 'up' or 'down' (got 'sideways')"),
        ({"query": "a", "tags": ["b", 1]}, "tags[1]: input should be a valid string (got 1)"),
        (["a"], "the arguments must be a JSON object, not list"),
    ],
)
def test_invalid_arguments_are_named(arguments: Any, problem: str) -> None:
    with pytest.raises(ToolError) as raised:
        signature_of(search).arguments(arguments)
    assert problem in str(raised.value)
    assert str(raised.value).startswith("Invalid call to search: ")
    assert "search takes query, limit (optional)" in str(raised.value)


def without_hint(a, b: int = 1) -> str:  # type: ignore[no-untyped-def]
    """Add."""


def without_docstring(a: int) -> int:
    return a


def with_rest(*values: int) -> int:
    """Add."""


def with_strange_type(call: Callable[[int], int]) -> int:
    """Call."""


def with_wrong_docstring(a: int) -> int:
    """Add.

    Args:
        a: First.
        b: Second.
    """


def with_wrong_hint(a: "Missing") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Add."""


@dataclass
class Tree:
    children: "list[Tree]"


def with_recursive_type(tree: Tree) -> int:
    """Count."""


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (without_hint, "the parameter a has no type hint. To use it as a tool, write `a: int`"),
        (without_docstring, "it has no docstring"),
        (with_rest, "keyword arguments only (got `*values: int`)"),
        (with_strange_type, "JSON Schema cannot express the type of call"),
        (with_wrong_docstring, "describes b, which is not a parameter"),
        (with_wrong_hint, "its type hints cannot be read: NameError"),
        (with_recursive_type, "JSON Schema cannot express the type of tree"),
    ],
)
def test_function_that_cannot_be_a_tool_is_rejected(function: Callable[..., Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^tool {function.__name__}: ") as raised:
        signature_of(function)
    assert problem in str(raised.value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*signature_of(search).types, "other", ""]), values) | values)
def test_any_arguments_are_accepted_or_rejected_with_an_explanation(arguments: Any) -> None:
    with suppress(ToolError):
        converted = signature_of(search).arguments(arguments)
        search(**converted)
        assert isinstance(converted["query"], str)
        assert converted.keys() <= signature_of(search).types.keys()


@given(
    st.text(st.characters(categories=["Lu", "Ll"]), min_size=1, max_size=20),
    st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), st.from_regex(r"[A-Za-z ,.]{0,30}", fullmatch=True)),
)
def test_docstring_with_any_arguments_is_parsed(summary: str, arguments: dict[str, str]) -> None:
    lines = [summary, "", "Args:", *(f"    {name}: {text}" for name, text in arguments.items())]
    assert read_docstring("\n".join(lines)) == (summary, {name: text.strip() for name, text in arguments.items()})
