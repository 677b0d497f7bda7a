"""Copies of the policy's weights, and the way to compute with one of them for a while and come back bit for bit.

Two dangers are met here. After a forward pass FSDP2 leaves some parameters gathered: a copy of those would have another
shape than the shard it is written back to, and what is written into a gathered parameter is lost at its next reshard. And a
write that stops half-way would leave a mixture of two versions. So everything is sharded first, everything is checked
against the live parameters before the first byte is written, and the live weights come back however the use ends.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from titanrl.weights.layout import local_part


class SnapshotMismatchError(Exception):
    """A snapshot does not fit the live parameters; nothing was written. The text names the tensor."""


class GatheredParameterError(Exception):
    """A parameter that FSDP manages is not in its sharded form; the text names it."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What must be equal for the bytes of one tensor to be the bytes of another."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    local_shape: tuple[int, ...]
    """Shape of this rank's part."""
    dtype: torch.dtype
    """Type of its elements."""
    placements: tuple[Any, ...] | None
    """How it is spread over `mesh`; None for a plain tensor."""
    mesh: Any
    """Device mesh; None for a plain tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a snapshot."""

    layout: TensorLayout
    """TensorLayout at the time of the copy."""
    data: Tensor
    """This rank's part, in memory of its own."""


class Snapshots:
    """The held versions of a model's trainable parameters and persistent buffers.

    What is frozen never changes, so it is not copied: with LoRA a snapshot is as small as the adapters.
    """

    def __init__(self, module: nn.Module, *, on_device: bool = False) -> None:
        """Hold nothing yet.

        Args:
            module: the parallelized model.
            on_device: keep copies where the parameters are, which makes swaps fast; otherwise in (pinned) host memory.
        """
        self._module = module
        self._on_device = on_device
        self._held: dict[int, Mapping[str, Entry]] = {}
        self.current: int | None = None
        """Version that stands in for the live weights right now."""

    @property
    def held(self) -> tuple[int, ...]:
        """Versions that can be used."""
        return tuple(sorted(self._held))

    def take(self, version: int) -> None:
        """Keep a copy of the live weights as a version; one that is held already stays as it is."""
        assert self.current is None, f"the live weights are away while version {self.current} is in use"
        if version not in self._held:
            self._held[version] = self._copy(on_device=self._on_device)

    def drop(self, version: int) -> None:
        """Forget a version.

        Raises:
            KeyError: it is not held.
        """
        del self._held[self._known(version)]

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Put a version in place of the live weights, which come back at the end, also after an exception.

        Raises:
            KeyError: it is not held.
            SnapshotMismatchError: it does not fit the live parameters, which are unchanged.
        """
        entries = self._held[self._known(version)]
        live = self._copy(on_device=True)
        write(self._module, entries)
        self.current = version
        try:
            yield
        finally:
            self.current = None
            write(self._module, live)

    def _known(self, version: int) -> int:
        if version not in self._held:
            raise KeyError(f"no snapshot of version {version}; held are {list(self.held)}")
        return version

    def _copy(self, *, on_device: bool) -> Mapping[str, Entry]:
        reshard(self._module)
        return {
            name: Entry(layout_of(tensor), copy_of(local_part(tensor), on_device=on_device))
            for name, tensor in changing_tensors(self._module).items()
        }


def reshard(module: nn.Module) -> None:
    """Put every parameter back to its sharded form; FSDP2 leaves some gathered after a forward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def changing_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Everything training changes, by name: trainable parameters and persistent buffers.

    Raises:
        GatheredParameterError: a parameter is gathered; see `reshard`.
    """
    parameters = {canonical_fqn(name): value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if isinstance(module, FSDPModule):
        for name, value in parameters.items():
            if not isinstance(value, DTensor) or "fsdp" not in (value.device_mesh.mesh_dim_names or ()):
                raise GatheredParameterError(f"{name} is gathered, with shape {tuple(value.shape)}; reshard before any access")
    kept = module.state_dict().keys()
    buffers = {canonical_fqn(name): buffer for name, buffer in module.named_buffers()}
    return parameters | {name: buffer for name, buffer in buffers.items() if name in kept}


def layout_of(tensor: Tensor) -> TensorLayout:
    """TensorLayout of a parameter or buffer as it is now."""
    spread = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else (None, None)
    return TensorLayout(tuple(tensor.shape), tuple(local_part(tensor).shape), tensor.dtype, *spread)


def copy_of(tensor: Tensor, *, on_device: bool) -> Tensor:
    """A copy that shares no memory with the tensor; `.cpu()` would not be one on a CPU."""
    if on_device or tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor)


@torch.no_grad()
def write(module: nn.Module, entries: Mapping[str, Entry]) -> None:
    """Put a snapshot into the live parameters: first every check, then every copy.

    Raises:
        SnapshotMismatchError: a name, shape, type or placement differs; nothing was written.
    """
    reshard(module)
    live = changing_tensors(module)
    if live.keys() != entries.keys():
        odd = sorted(live.keys() ^ entries.keys())
        raise SnapshotMismatchError(f"{odd[0]} is {'not in the snapshot' if odd[0] in live else 'only in the snapshot'}")
    for name, entry in entries.items():
        found = layout_of(live[name])
        if found != entry.layout:
            raise SnapshotMismatchError(f"{name}: saved as {entry.layout}, now {found}")
    for name, entry in entries.items():
        local_part(live[name]).copy_(entry.data)


def check_recoverable(module: nn.Module, forward: Callable[[], object]) -> None:
    """Try at set-up, rather than trust a version number, that parameters can be brought back after a forward pass.

    Raises:
        RuntimeError: a parameter is not what it was; snapshots would be wrong with this torch.
    """
    reshard(module)
    before = {name: Entry(layout_of(value), value) for name, value in changing_tensors(module).items()}
    forward()
    reshard(module)
    for name, value in changing_tensors(module).items():
        entry = before[name]
        if layout_of(value) != entry.layout or local_part(value).data_ptr() != local_part(entry.data).data_ptr():
            raise RuntimeError(
                f"after a forward pass {name} is {layout_of(value)}, before it was {entry.layout}: FSDP of torch "
                f"{torch.__version__} does not bring back sharded parameters; use the version in requirements/"
            )
