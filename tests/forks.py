"""Processes of tests that are forked from templates, like those of a run."""

from collections.abc import Mapping
from typing import Any

from titanrl.config import Config
from titanrl.config.device import DEVICES
from titanrl.launch.assembly import Fleet, local_host, wait_for_stopped_processes
from titanrl.launch.roles import Roles, needed


def prepare_templates(fleet: Fleet, config: Config, roles: Roles) -> None:
    """Prepare the templates of some roles. The fixture `shared_templates` provides them.

    Turn off torchmonarch's timeouts, as a run on one machine does. Otherwise, actors fail two minutes after their start, which
    the tests of a file may take on a busy machine.
    """
    wait_for_stopped_processes()
    for kind, (environment, load) in needed(config, DEVICES["cpu"], roles).items():
        fleet.prepare(kind, environment, load)


async def fork(
    fleet: Fleet, kind: str, environment: Mapping[str, str], *imports: str, role: str | None = None, num_procs: int = 1
) -> Any:
    """Fork processes from the template of a kind."""
    return fleet.spawn(role or kind, local_host(), num_procs, environment, imports, await fleet.template(kind))
