"""torchmonarch's timeouts for runs whose hosts hold leases."""

import os

from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch.config import configure

from titanrl.hosts.leases import LOST_S

POLL = "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"
"""Environment variable with the interval of torchmonarch's polls; `configure` does not know it."""
POLL_S = 5
"""Interval of the polls in seconds. A shorter one notices a dead process earlier, but each poll leaves 10 kB per mesh in the
controller's memory."""


def match_timeouts_to_leases() -> None:
    """Make torchmonarch report a lost host as early as its lease does, and keep this process alive despite lost messages.

    By default, torchmonarch reports a lost host a minute later, when its roles have already been replaced. It also terminates
    this process 30 s after a message to a dead host, although the run has continued without that host.

    Only torchmonarch notices the death of a process on another host, so it polls these processes.
    """
    configure(get_proc_state_max_idle=f"{LOST_S}s", get_actor_state_max_idle=f"{LOST_S}s", message_delivery_timeout="30d")
    if os.environ.get(POLL) == "1h":  # the user has not set another interval than `titanrl` does
        os.environ[POLL] = f"{POLL_S}s"
        reload_config_from_env()
