"""A calculator tool. It interprets the parsed expression within limits, and never executes text that the policy wrote."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from titanrl.environments.interface import ToolError
from titanrl.environments.tools import ToolEnvironment

MAX_CHARS = 500
"""Maximum length of an expression."""
MAX_BITS = 1024
"""Maximum size of an integer in bits; about 300 digits."""

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """A tool for arithmetic."""

    def calculate(self, expression: str) -> str:
        """Calculate an arithmetic expression.

        Args:
            expression: Numbers, + - * / // % ** and parentheses, such as (3 + 4) * 2
        """
        return shown(evaluate(expression))


def calculator(**options: Any) -> ToolEnvironment:
    """Return an environment whose only tool is the calculator. `options` are passed to `ToolEnvironment`."""
    return ToolEnvironment(Calculator(), **options)


def evaluate(expression: str) -> Number:
    """Return the value of an arithmetic expression.

    Raises:
        ToolError: The text is not an arithmetic expression, or its value is too large or undefined.
    """
    if len(expression) > MAX_CHARS:
        raise ToolError(f"The expression is longer than {MAX_CHARS} characters.")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError:
        raise ToolError("Division by zero.") from None
    except OverflowError:
        raise ToolError("The result is too large.") from None
    except (SyntaxError, ValueError):
        raise ToolError(f"Not an arithmetic expression: {expression:.60}") from None
    except (MemoryError, RecursionError):  # raised by the parser for deep nesting
        raise ToolError("The expression is nested too deeply.") from None


def shown(value: Number) -> str:
    """Format a number: an integer in full, a float with 12 significant digits and without trailing zeros."""
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _limited(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left), _value(right)
            is_whole_power = isinstance(op, ast.Pow) and isinstance(first, int) and isinstance(second, int)
            if is_whole_power and second > 0 and abs(first) > 1 and second * math.log2(abs(first)) > MAX_BITS:
                raise OverflowError  # computing it would take too much time or memory
            return _limited(_BINARY[type(op)](first, second))
        case ast.BinOp(op=ast.BitXor()):
            raise ToolError("Write powers as **.")
        case ast.Tuple():
            raise ToolError("Write numbers without commas.")
    raise ToolError("Only numbers, + - * / // % ** and parentheses are allowed.")


def _limited(value: Any) -> Number:
    if isinstance(value, complex):
        raise ToolError("The result is not a real number.")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    number: Number = value
    return number
