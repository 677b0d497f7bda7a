"""Checks of the arguments of public functions. A message states argument, value, rule and fix."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import numpy.ma  # `np.unique` would load it, which ends in a RecursionError if two threads are the first to call it
import numpy.random  # likewise, at the first `np.random`
import numpy.typing as npt


def shown(value: object) -> str:
    """Return a value for a message, shortened to 60 characters, with its type unless it is a number."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if isinstance(value, int | float) else f"{type(value).__name__} {text}"


def check_type(name: str, value: object, kinds: type | tuple[type, ...], rule: str, fix: str) -> None:
    """Raise a `TypeError` unless a value has one of some types."""
    if not isinstance(value, kinds):
        raise TypeError(f"{name}: must be {rule} (got {shown(value)}). {fix}")


def check_number(
    name: str,
    value: object,
    fix: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> None:
    """Raise `TypeError` unless a value is a number, and `ValueError` unless it is finite and within bounds."""
    rule = "a finite number" + (f" >= {least:g}" if least > -math.inf else f" > {above:g}" if above > -math.inf else "")
    rule += f" and <= {most:g}" if most < math.inf else f" and < {below:g}" if below < math.inf else ""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError(f"{name}: must be {rule} (got {shown(value)}). {fix}")
    if not (math.isfinite(value) and least <= float(value) <= most and above < float(value) < below):
        raise ValueError(f"{name}: must be {rule} (got {value}). {fix}")


def check_count(name: str, value: object, fix: str, *, least: int = 1, most: float = math.inf) -> None:
    """Raise `TypeError` unless a value is an integer, and `ValueError` unless it is within bounds."""
    rule = f"an integer >= {least}" + (f" and <= {most}" if most < math.inf else "")
    if isinstance(value, bool | np.bool_) or not isinstance(value, Integral):
        raise TypeError(f"{name}: must be {rule} (got {shown(value)}). {fix}")
    if not least <= int(value) <= most:
        raise ValueError(f"{name}: must be {rule} (got {value}). {fix}")


def check_list(name: str, value: object, items: str, fix: str) -> Sequence[Any]:
    """Return a value that is a sequence, but not a text or a mapping; raise a `TypeError` otherwise."""
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise TypeError(f"{name}: must be a list of {items} (got {shown(value)}). {fix}")
    return value  # type: ignore[return-value]  # an array is used like a sequence


def checked_tokens(name: str, value: object) -> npt.NDArray[np.int64]:
    """Return token ids as an array, `[S]`; raise `TypeError` unless they are integers, `ValueError` if one is negative."""
    fix = "Give token ids, such as those of session.tokenizer.encode."
    tokens = _array(name, check_list(name, value, "token ids", fix), "token ids", fix)
    if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"{name}: must be a list of token ids (got {shown(value)}). {fix}")
    if tokens.size and int(tokens.min()) < 0:
        raise ValueError(f"{name}: token ids must not be negative (got {int(tokens.min())}). {fix}")
    return tokens.astype(np.int64)


def checked_numbers(name: str, value: object, fix: str) -> npt.NDArray[Any]:
    """Return a list of numbers as an array, `[S]`; NaN and infinity are allowed. Raise `TypeError` for anything else."""
    numbers = _array(name, check_list(name, value, "numbers", fix), "numbers", fix)
    if numbers.size and not np.issubdtype(numbers.dtype, np.number):
        raise TypeError(f"{name}: must be a list of numbers (got {shown(value)}). {fix}")
    return numbers


def _array(name: str, value: Sequence[Any], items: str, fix: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.zeros((0, 0))
    if array.ndim != 1:
        raise TypeError(f"{name}: must be a flat list of {items} (got {shown(value)}). {fix}")
    return array
