"""The section `faults`: fault detection, and how a run responds."""

from typing import Annotated, Literal

from pydantic import Field

from titanrl.config.section import CountOrZero, Seconds, Section, StepsOrZero


class FaultsConfig(Section):
    """Fault detection and response (docs/faults.md)."""

    on_stall: Literal["respawn", "abort", "wait"] = "respawn"
    """Response to a process that hangs. `respawn` replaces it like one that died. `abort` ends the run with an error that names
    the process and the file with its stack traces. `wait` only reports it, and the run waits until the limit in `timeouts`."""
    stall_factor: Annotated[float, Field(ge=1.0, le=1_000_000.0)] = 10.0
    """A request counts as stalled when it takes this many times as long as the slowest of the last hundred of its kind. Raise
    it if request times vary a lot."""
    min_stall_s: Seconds = 30.0
    """Minimum time in seconds before a request counts as stalled. A suspended process (SIGSTOP) also counts as stalled after
    this time."""
    max_respawns: CountOrZero = 5
    """Maximum number of replaced processes within `respawn_window_s`; one more failure ends the run. 0 disables replacement."""
    respawn_window_s: Seconds = 600.0
    """Time window in seconds for `max_respawns`."""
    rank_wait_s: Seconds = 25.0
    """Time in seconds that trainer ranks wait for a rank that does not reach the same phase of a step, such as the optimizer
    step. The log names the missing rank after a sixth of it."""
    check_replicas_every: StepsOrZero = 50
    """Number of optimizer steps between consistency checks of the trainer. Parameters, buffers, moving averages and optimizer
    state that several ranks hold must be bitwise equal. They are also checked after every checkpoint load; 0 disables all
    checks."""
