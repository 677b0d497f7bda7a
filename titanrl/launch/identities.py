"""Identities of Monarch's hosts, as its own jobs make them."""

from monarch._src.job.service_identity import allocate_service_proc_ids  # monarch.job would import a web server, too


def new_identities(count: int) -> list[str]:
    """Return identities for hosts that start together."""
    return [str(identity) for identity in allocate_service_proc_ids(count)]
