"""The section of a configuration that says how a run gets its hosts from Slurm."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Processes, Seconds, Section

_TIME_LIMIT = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}")
"""Time limits that sbatch accepts: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
_OWN = ("--nodes", "-N", "--job-name", "-J", "--ntasks-per-node", "--ntasks", "-n", "--output", "-o", "--wrap", "--array", "-a")
"""Options of sbatch that the run itself sets."""


class SlurmConfig(Section):
    """Slurm job of a run with `hosts.kind: slurm`: one task on each trainer and generator host."""

    partition: str | None = None
    """Partition; the cluster's default if null."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    time_limit: str | None = None
    """Time limit, such as "24:00:00" or "2-12" (days-hours); the partition's default if null."""
    exclusive: bool = True
    """Request whole nodes, which no other job shares."""
    cpus_per_host: Processes | None = None
    """CPU cores to request on each host; needed only if nodes are shared."""
    memory_per_host: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory to request on each host, such as "200G"; "0" is all of it."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 22222
    """TCP port of Monarch on each host. The processes of the run take further ports, which the kernel chooses."""
    queue_limit_s: Seconds | None = None
    """Longest wait in the queue; null sets no limit."""
    notice_s: Annotated[float, Field(ge=30.0, le=86_400.0)] = 120.0
    """Seconds before the time limit at which the run ends as after SIGTERM. With `checkpoint.on_interrupt` it saves first."""
    requeue: bool = False
    """Put a job of `titanrl submit` back into the queue at its time limit, and when Slurm preempts it; it then resumes."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further options of sbatch, such as "--constraint=h100"."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.time_limit is not None and not _TIME_LIMIT.fullmatch(self.time_limit):
            yield BrokenRule(
                values={"time_limit": self.time_limit},
                rule="must be a time limit of sbatch",
                fix='write hours:minutes:seconds, such as "24:00:00", or days-hours, such as "2-12"',
            )
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                yield BrokenRule(
                    values={"options": option}, rule="each must be one option of sbatch", fix='write it as "--name=value"'
                )
            elif option.partition("=")[0].split()[0] in _OWN:
                yield BrokenRule(
                    values={"options": option},
                    rule="the run sets this option itself",
                    fix="remove it; hosts.trainer_hosts and hosts.generator_hosts are the numbers of nodes",
                )
