"""Checks of `placement.cpus` on this machine. This module must not import Monarch."""

import os
from collections.abc import Iterator

from titanrl.config.errors import BrokenRule
from titanrl.config.schema import Config
from titanrl.processes.machine import numbers


def broken_by_cores(config: Config) -> Iterator[BrokenRule]:
    """Yield a rule for each role that is bound to cores this machine does not have. Other machines are not checked."""
    if config.hosts.across_machines:
        return
    usable = os.sched_getaffinity(0)
    for role, choice in config.placement.cpus:
        if choice is None or choice in ("split", "numa") or numbers(choice) & usable:
            continue
        rule = f"the run may use none of these cores on this machine; it may use {_text(usable)}"
        yield BrokenRule({f"placement.cpus.{role}": choice}, rule, "choose from these cores, or set it to split or null")


def _text(cores: set[int]) -> str:
    """Return core numbers as a Linux CPU list, such as `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
