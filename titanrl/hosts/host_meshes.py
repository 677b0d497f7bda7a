"""Host meshes: named ranges of an allocation's hosts, in rank order."""

from collections.abc import Mapping, Sequence

from monarch.actor import HostMesh, attach_to_workers


def first_rank(counts: Mapping[str, int], mesh: str) -> int:
    """Return the rank of a mesh's first host, given the number of hosts per mesh."""
    names = list(counts)
    return sum(counts[name] for name in names[: names.index(mesh)])


def attach_meshes(counts: Mapping[str, int], addresses: Sequence[str]) -> dict[str, HostMesh]:
    """Attach to Monarch's hosts at these addresses, in rank order; return the meshes by name."""
    meshes = {}
    for name, count in counts.items():
        first = first_rank(counts, name)
        meshes[name] = attach_to_workers(name=name, ca="trust_all_connections", workers=list(addresses[first : first + count]))
    return meshes
