"""The section of a configuration that says how faults are found, and how a run reacts to them."""

from typing import Annotated, Literal

from pydantic import Field

from titanrl.config.section import CountOrZero, Seconds, Section, StepsOrZero


class FaultsConfig(Section):
    """Checks that find faults, and the reaction to them (docs/faults.md)."""

    on_stall: Literal["respawn", "abort", "wait"] = "respawn"
    """`respawn`: processes that hang are replaced like dead ones. `abort`: a stall ends the run with the name of the process
    and the file of its stacks. `wait`: a stall is reported, and the run waits on, until the deadline in `timeouts`."""
    stall_factor: Annotated[float, Field(ge=1.0, le=1_000_000.0)] = 10.0
    """A request stalls when it takes this many times as long as the slowest of the last hundred of its kind."""
    min_stall_s: Seconds = 30.0
    """Shortest wait that counts as a stall. A process that is stopped (SIGSTOP) counts as stalled after this time, too."""
    max_respawns: CountOrZero = 5
    """Replacements of dead processes within `respawn_window_s`; one more death ends the run. 0 replaces nothing."""
    respawn_window_s: Seconds = 600.0
    """Seconds in which `max_respawns` replacements are allowed."""
    rank_wait_s: Seconds = 25.0
    """Seconds that trainer ranks wait for a rank that does not reach a collective phase. The log names it after a sixth."""
    check_replicas_every: StepsOrZero = 50
    """Number of optimizer steps between comparisons of the trainer's replicas: parameters, buffers, moving averages and
    optimizer state that several ranks hold must be equal bit for bit. They are also compared after every load; 0 never compares
    them."""
