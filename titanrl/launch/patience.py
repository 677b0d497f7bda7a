"""torchmonarch's timeouts for runs whose hosts hold leases."""

from monarch.config import configure

from titanrl.launch.leases import LOST_S


def match_timeouts_to_leases() -> None:
    """Make torchmonarch report a lost host as early as its lease does, and keep this process alive despite lost messages.

    By default, torchmonarch reports a lost host a minute later, when its roles have already been replaced. It also terminates
    this process 30 s after a message to a dead host, although the run has continued without that host.
    """
    configure(get_proc_state_max_idle=f"{LOST_S}s", get_actor_state_max_idle=f"{LOST_S}s", message_delivery_timeout="30d")
