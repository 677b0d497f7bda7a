"""Numbers as people read them: short, aligned, with units."""

from collections.abc import Sequence

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
_ASCII_BLOCKS = "_.-=+*#@"


def duration(seconds: float) -> str:
    """`12.3 s`, from a minute on `1:02`, from an hour on `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def count(number: float) -> str:
    """Three digits and a unit: `950`, `2.1k`, `340k`, `1.2M`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            scaled = number / limit
            return f"{scaled:.1f}{unit}" if scaled < 10 else f"{scaled:.0f}{unit}"
    return f"{number:.0f}"


def number(value: float | None, spec: str) -> str:
    """`value` under the format `spec`, `-` where there is none."""
    return "-" if value is None else format(value, spec)


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """One character per value, its height between the lowest and the highest of them."""
    blocks = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)
