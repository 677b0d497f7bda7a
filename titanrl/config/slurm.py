"""The section `hosts.slurm`: the Slurm job of a run."""

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Processes, Seconds, Section

_TIME_LIMIT = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}")
"""Time limits that sbatch accepts: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
_RESERVED = (
    "--nodes",
    "-N",
    "--job-name",
    "-J",
    "--ntasks-per-node",
    "--ntasks",
    "-n",
    "--output",
    "-o",
    "--wrap",
    "--array",
    "-a",
)
"""Options of sbatch that the run itself sets."""


class SlurmConfig(Section):
    """Slurm job of a run with `hosts.kind: slurm`, with one task per trainer and generator host."""

    partition: str | None = None
    """Partition; null uses the cluster's default."""
    account: str | None = None
    """Account to charge; null uses your default account."""
    qos: str | None = None
    """Quality of service; null uses the default."""
    time_limit: str | None = None
    """Time limit, such as "24:00:00" or "2-12" (days-hours); null uses the partition's default."""
    exclusive: bool = True
    """Request exclusive nodes, which no other job shares."""
    cpus_per_host: Processes | None = None
    """CPU cores to request on each host; needed only on shared nodes."""
    memory_per_host: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory to request on each host, such as "200G"; "0" requests all memory."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 22222
    """TCP port of Monarch on each host. The processes of the run use other ports, which the kernel chooses."""
    queue_limit_s: Seconds | None = None
    """Maximum time in seconds to wait in the queue; null sets no limit."""
    notice_s: Annotated[float, Field(ge=30.0, le=86_400.0)] = 120.0
    """Time in seconds before the time limit at which the run shuts down as after SIGTERM. With `checkpoint.on_interrupt` it
    first saves a checkpoint."""
    requeue: bool = False
    """Requeue a job of `titanrl submit` at its time limit or when Slurm preempts it. It then resumes."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Additional options of sbatch, such as "--constraint=h100"."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.time_limit is not None and not _TIME_LIMIT.fullmatch(self.time_limit):
            yield BrokenRule(
                values={"time_limit": self.time_limit},
                rule="must be a time limit in sbatch format",
                fix='write hours:minutes:seconds, such as "24:00:00", or days-hours, such as "2-12"',
            )
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                yield BrokenRule(
                    values={"options": option}, rule="each item must be one option of sbatch", fix='write it as "--name=value"'
                )
            elif option.partition("=")[0].split()[0] in _RESERVED:
                yield BrokenRule(
                    values={"options": option},
                    rule="the run sets this option itself",
                    fix="remove it; hosts.trainer_hosts and hosts.generator_hosts set the number of nodes",
                )
