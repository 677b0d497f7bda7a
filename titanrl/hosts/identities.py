"""Identities of Monarch hosts, allocated the same way as in Monarch's job classes."""

from monarch._src.job.service_identity import allocate_service_proc_ids  # importing monarch.job would load a web server


def new_identities(count: int) -> list[str]:
    """Return identities for hosts that start together."""
    return [str(identity) for identity in allocate_service_proc_ids(count)]
