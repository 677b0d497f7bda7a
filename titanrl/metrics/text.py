"""Compact formatting of durations, counts and other numbers."""

from collections.abc import Sequence

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BLOCKS = "_.-=+*#@"


def duration(seconds: float) -> str:
    """Format seconds as `12.3 s`, `1:02` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    """Format a count with at most three digits and a metric suffix: `950`, `2.1k`, `340k`, `1.2M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            scaled = number / limit
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def number(value: float | None, spec: str) -> str:
    """Format `value` with the format specification `spec`; None becomes `-`."""
    return "-" if value is None else format(value, spec)


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Return one block character per value, scaled between the lowest and the highest value."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)
