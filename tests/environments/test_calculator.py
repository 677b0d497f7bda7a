"""Arithmetic within limits."""

import math
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanrl.environments import Calculator, ToolError
from titanrl.environments.calculator import evaluate, shown


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("7 + 5 - 3", "9"),
        (" (3 + 4) * 2 ", "14"),
        ("8 / 2", "4"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("+-3", "-3"),
        ("10 ** 300", "1" + "0" * 300),
        ("1_000", "1000"),
        ("1.5e3", "1500"),
    ],
)
def test_calculator_computes(expression: str, result: str) -> None:
    assert Calculator().calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "Not an arithmetic expression"),
        ("7 +", "Not an arithmetic expression"),
        ("1\x000", "Not an arithmetic expression"),
        ("1 / 0", "Division by zero"),
        ("2 ** 3 ** 4 ** 5", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("10 ** 309", "too large"),
        ("10.0 ** 309", "too large"),
        ("1e999", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("3 ^ 2", "Write powers as"),
        ("1,000 + 1", "without commas"),
        ("__import__('os').getcwd()", "Only numbers"),
        ("True + 1", "Only numbers"),
        ("x", "Only numbers"),
        ("'a' * 9", "Only numbers"),
        ("1 if 2 else 3", "Only numbers"),
        ("1j", "Only numbers"),
        ("(" * 400, "nested too deeply|Not an arithmetic expression"),
        ("1" + " " * 600, "longer than 500 characters"),
    ],
)
def test_calculator_rejects_invalid_or_large_expressions(expression: str, problem: str) -> None:
    with pytest.raises(ToolError, match=problem):
        Calculator().calculate(expression)


numbers = st.integers(-50, 50).map(str) | st.floats(0, 9, allow_nan=False).map(lambda number: f"{number:.3f}")
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%", "**"]), inner).map(
        lambda parts: f"({' '.join(parts)})"
    ),
    max_leaves=6,
)


@given(expressions)
def test_calculator_agrees_with_python_and_is_fast(expression: str) -> None:
    began_s = time.perf_counter()
    try:
        value = evaluate(expression)
    except ToolError:
        value = None
    assert time.perf_counter() - began_s < 2.0
    if value is not None:
        expected = eval(expression)
        assert value == expected or math.isclose(value, expected)
        assert len(shown(value)) < 400


@given(st.text(alphabet="0123456789+-*/%(). e_j,xX^~&|<>[]{}'\"\n", max_size=40) | st.text(max_size=20))
def test_any_text_gives_a_number_or_an_explanation(text: str) -> None:
    with suppress(ToolError):
        assert isinstance(evaluate(text), int | float)
