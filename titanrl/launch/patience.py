"""Timeouts of torchmonarch for runs whose hosts hold leases."""

from monarch.config import configure

from titanrl.launch.leases import LOST_S


def leave_lost_hosts_to_leases() -> None:
    """Let torchmonarch report a lost host no later than its lease does, and let this process outlive messages to it.

    By default the report comes a minute later, when its parts have been replaced, and torchmonarch ends this process 30 s after
    a message to a dead host, although the run has gone on without that host.
    """
    configure(get_proc_state_max_idle=f"{LOST_S}s", get_actor_state_max_idle=f"{LOST_S}s", message_delivery_timeout="30d")
