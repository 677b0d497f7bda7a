"""Copies of the policy's weights, and a context that computes with one of them and restores the live weights bit for bit.

Two hazards shape this module. First, FSDP2 leaves some parameters gathered after a forward pass. A copy of a gathered
parameter does not have the shape of its shard, and a write into it is lost at the next reshard. Second, a write that stops
half-way leaves a mixture of two versions. So all parameters are resharded first, all tensors are checked before the first byte
is written, and the live weights are restored in any case.
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

from titanrl.errors import TitanRLError
from titanrl.weights.layout import local_part


class SnapshotMismatchError(TitanRLError):
    """A snapshot does not fit the live parameters. Nothing was written; the message names the tensor."""


class GatheredParameterError(TitanRLError):
    """A parameter that FSDP manages is not resharded; the message names it."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shapes, dtype and sharding of a tensor. Bytes may be copied between tensors of equal layout."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    local_shape: tuple[int, ...]
    """Shape of this rank's shard."""
    dtype: torch.dtype
    """Type of its elements."""
    placements: tuple[Any, ...] | None
    """Sharding over `mesh`; None for a plain tensor."""
    mesh: Any
    """Device mesh; None for a plain tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a snapshot."""

    layout: TensorLayout
    """Layout at the time of the copy."""
    data: Tensor
    """Copy of this rank's shard."""


class Snapshots:
    """Copies of a model's trainable parameters and persistent buffers, by version.

    Frozen parameters are not copied: with LoRA a snapshot is as small as the adapters.
    """

    def __init__(self, module: nn.Module, *, on_device: bool = False) -> None:
        """Start without snapshots.

        Args:
            module: Parallelized model.
            on_device: Keep copies on the device of the parameters, which makes swaps fast; otherwise in pinned host memory.
        """
        self._module = module
        self._on_device = on_device
        self._held: dict[int, Mapping[str, Entry]] = {}
        self.current: int | None = None
        """Version that replaces the live weights at the moment; None if the live weights are in use."""

    @property
    def held(self) -> tuple[int, ...]:
        """Versions with a snapshot."""
        return tuple(sorted(self._held))

    def take(self, version: int) -> None:
        """Copy the live weights as a version; an existing snapshot of the version is kept."""
        assert self.current is None, f"the live weights are not in place while version {self.current} is in use"
        if version not in self._held:
            self._held[version] = self._copy(on_device=self._on_device)

    def drop(self, version: int) -> None:
        """Discard the snapshot of a version.

        Raises:
            KeyError: There is no snapshot of the version.
        """
        del self._held[self._known(version)]

    @contextmanager
    def using(self, version: int, parameters: Mapping[str, Entry] | None = None) -> Iterator[None]:
        """Replace the live weights by a version inside the context, and restore them at its end, even after an exception.

        Args:
            version: Version.
            parameters: Its trainable parameters, which are used with the live buffers; None takes its snapshot.

        Raises:
            KeyError: There is no snapshot of the version.
            SnapshotMismatchError: The snapshot does not fit the live parameters, which are unchanged.
        """
        held = self._held[self._known(version)] if parameters is None else {}
        live = self._copy(on_device=True)
        write(self._module, held if parameters is None else {**live, **parameters})
        self.current = version
        try:
            yield
        finally:
            self.current = None
            write(self._module, live)

    def _known(self, version: int) -> int:
        if version not in self._held:
            raise KeyError(f"no snapshot of version {version}; there are snapshots of {list(self.held)}")
        return version

    def _copy(self, *, on_device: bool) -> Mapping[str, Entry]:
        reshard(self._module)
        return {
            name: Entry(layout_of(tensor), copy_of(local_part(tensor), on_device=on_device))
            for name, tensor in changing_tensors(self._module).items()
        }


def reshard(module: nn.Module) -> None:
    """Reshard every parameter; FSDP2 leaves some gathered after a forward pass."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def trainable_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the trainable parameters by name, without gradient.

    Raises:
        GatheredParameterError: A parameter is gathered; call `reshard` first.
    """
    parameters = {canonical_fqn(name): value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if isinstance(module, FSDPModule):
        for name, value in parameters.items():
            if not isinstance(value, DTensor) or "fsdp" not in (value.device_mesh.mesh_dim_names or ()):
                raise GatheredParameterError(f"{name} is gathered, with shape {tuple(value.shape)}; call reshard before")
    return parameters


def changing_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Return all tensors that training changes, by name: trainable parameters and persistent buffers.

    Raises:
        GatheredParameterError: A parameter is gathered; call `reshard` first.
    """
    parameters = trainable_tensors(module)  # first: `state_dict` reshards
    kept = module.state_dict().keys()
    buffers = {canonical_fqn(name): buffer for name, buffer in module.named_buffers()}
    return parameters | {name: buffer for name, buffer in buffers.items() if name in kept}


def layout_of(tensor: Tensor) -> TensorLayout:
    """Return the current layout of a parameter or buffer."""
    sharding = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else (None, None)
    return TensorLayout(tuple(tensor.shape), tuple(local_part(tensor).shape), tensor.dtype, *sharding)


def copy_of(tensor: Tensor, *, on_device: bool) -> Tensor:
    """Copy a tensor into new memory; on a CPU `.cpu()` would return the tensor itself."""
    if on_device or tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor)


@torch.no_grad()
def write(module: nn.Module, entries: Mapping[str, Entry]) -> None:
    """Copy a snapshot into the live parameters, after checking all of its tensors.

    Raises:
        SnapshotMismatchError: A name, shape, dtype or placement differs. Nothing was written.
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
    """Check that `reshard` restores parameters after a forward pass, by trying it with the installed torch.

    Raises:
        RuntimeError: A parameter differs afterwards, so snapshots would be wrong.
    """
    reshard(module)
    before = {name: Entry(layout_of(value), value) for name, value in changing_tensors(module).items()}
    forward()
    reshard(module)
    for name, value in changing_tensors(module).items():
        entry = before[name]
        if layout_of(value) != entry.layout or local_part(value).data_ptr() != local_part(entry.data).data_ptr():
            raise RuntimeError(
                f"torch: FSDP does not restore sharded parameters after a forward pass: {name} is {layout_of(value)}, it was "
                f"{entry.layout} (got torch {torch.__version__}). Install the version in requirements/."
            )
