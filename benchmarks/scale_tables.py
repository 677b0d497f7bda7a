"""Markdown tables of `benchmarks.scale` and `benchmarks.growth_by_size`."""

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("controller", "store", "rollout", "generator", "trainer")
"""Roles of the processes of a run; the process `store` has the buffer."""


def growth_table(name: str, result: Mapping[str, Any]) -> str:
    """Return the figures of a size as a Markdown table, whose last row has the slopes."""
    heads = [f"{role} CPU" for role in ROLES] + [f"{role} MB" for role in ROLES]
    lines = [f"| {name} | step | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for case in result["cases"]:
        cpu = [f"{case[f'{role}_cpu_s'] * 1e3:.1f} ms" for role in ROLES]
        memory = [f"{case[f'{role}_bytes'] / 1e6:.0f}" for role in ROLES]
        lines.append(f"| {case['value']} | {case['step_s'] * 1e3:.1f} ms | {' | '.join([*cpu, *memory])} |")
    slopes = [result["slopes"][key] for key in ("step_s", *(f"{r}_cpu_s" for r in ROLES), *(f"{r}_bytes" for r in ROLES))]
    lines.append(f"| slope | {' | '.join(f'{each:.2f}' for each in slopes)} |")
    return "\n".join(lines)


def size_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the figures of the sizes as a Markdown table."""
    lines = [
        "| generators | trainer ranks | groups per step | step | tokens/s | overhead | controller CPU | messages "
        "| buffer CPU | worker CPU | push, pull | trainer busy | generators busy | first bottleneck |",
        "|" + "---|" * 14,
    ]
    for row in rows:
        cells = [
            f"{row['generators']:,}",
            f"{row['trainer_ranks']:,}",
            f"{row['groups_per_step']:,}",
            f"{row['step_s']:.2f} s",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['overhead']:.0%}",
            f"{row['controller_s'] * 1e3:,.0f} ms",
            f"{row['controller_messages']:,.0f}",
            f"{row['buffer_s'] * 1e3:,.0f} ms",
            f"{row['worker_s'] * 1e3:,.0f} ms",
            f"{row['push_s'] * 1e3:,.0f}, {row['pull_s'] * 1e3:,.0f} ms",
            f"{row['trainer_busy']:.0%}",
            f"{row['generators_busy']:.0%}",
            row["bottleneck"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def comparison_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparison as a Markdown table."""
    lines = [
        "| generators | step, real | simulated | difference | tokens/s, real | simulated | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        real, simulated = row["real"], row["simulated"]
        lines.append(
            f"| {row['replicas']} | {real['step_s']:.3f} s | {simulated['step_s']:.3f} s "
            f"| {simulated['step_s'] / real['step_s'] - 1:+.0%} | {real['tokens_per_s']:,.0f} "
            f"| {simulated['tokens_per_s']:,.0f} | {simulated['tokens_per_s'] / real['tokens_per_s'] - 1:+.0%} |"
        )
    return "\n".join(lines)
