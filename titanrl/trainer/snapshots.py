"""Past weights: snapshots, their moving average, and the log-probabilities that were computed with them.

The weights of a snapshot are swapped in inside a context, which restores the live weights bit for bit.

Two hazards shape this module. First, FSDP2 leaves some parameters unsharded (gathered) after a forward pass. A copy of a
gathered parameter does not have the shape of its shard, and a write into it is lost at the next reshard. Therefore all
parameters are resharded first. Second, a write that fails half-way leaves a mixture of two versions. Therefore all tensors are
checked before the first byte is written, and the live weights are restored even after an exception.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from titanrl.base.errors import GatheredParameterError, SnapshotMismatchError
from titanrl.carriers.tables import Row
from titanrl.carriers.types import GroupHandle
from titanrl.trainer.collate import places
from titanrl.weights.layout import local_part


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shapes, dtype and sharding of a tensor. Shards can be copied between tensors of equal layout."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""
    local_shape: tuple[int, ...]
    """Shape of this rank's shard."""
    dtype: torch.dtype
    placements: tuple[Any, ...] | None
    """DTensor placements over `mesh`; None for a plain tensor."""
    mesh: Any
    """Device mesh; None for a plain tensor."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensor of a snapshot."""

    layout: TensorLayout
    data: Tensor
    """Copy of this rank's shard."""


class Snapshots:
    """Snapshots of a model's trainable parameters and persistent buffers, by version.

    Frozen parameters are not copied, so with LoRA a snapshot is as small as the adapters.
    """

    def __init__(self, module: nn.Module, *, on_device: bool = False) -> None:
        """Start without snapshots.

        With `on_device`, snapshots are on the device of the parameters, which makes swaps fast. Otherwise they are in pinned
        host memory.
        """
        self._module = module
        self._on_device = on_device
        self._held: dict[int, Mapping[str, Entry]] = {}
        self.current: int | None = None
        """Version that currently replaces the live weights; None if the live weights are in use."""

    @property
    def held(self) -> tuple[int, ...]:
        """Versions with a snapshot."""
        return tuple(sorted(self._held))

    def take(self, version: int) -> None:
        """Take a snapshot of the live weights under a version. Keep an existing snapshot of that version."""
        assert self.current is None, f"version {self.current} replaces the live weights"
        if version not in self._held:
            self._held[version] = self._copy(on_device=self._on_device)

    def drop(self, version: int) -> None:
        """Discard the snapshot of a version; raise `ValueError` if it has none."""
        del self._held[self._known(version)]

    @contextmanager
    def using(self, version: int, parameters: Mapping[str, Entry] | None = None) -> Iterator[None]:
        """Replace the live weights with those of a version inside the context, and restore them on exit.

        If given, `parameters` are the trainable parameters of the version, which are combined with the live buffers.

        Raises:
            ValueError: The version has no snapshot.
            SnapshotMismatchError: The snapshot does not match the live parameters, which are unchanged.
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
            fix = "Use a version that keep_weights returned."
            raise ValueError(f"at_version: this version is not kept (got {version}; kept: {list(self.held)}). {fix}")
        return version

    def _copy(self, *, on_device: bool) -> Mapping[str, Entry]:
        reshard(self._module)
        return {
            name: Entry(layout_of(tensor), _copy_of(local_part(tensor), on_device=on_device))
            for name, tensor in changing_tensors(self._module).items()
        }


def reshard(module: nn.Module) -> None:
    """Reshard all parameters, because FSDP2 leaves some unsharded after a forward pass."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def trainable_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the detached trainable parameters by name; raise `GatheredParameterError` if `reshard` was not called."""
    parameters = {canonical_fqn(name): value.detach() for name, value in module.named_parameters() if value.requires_grad}
    if isinstance(module, FSDPModule):
        for name, value in parameters.items():
            # `efsdp` is the dimension over which FSDP shards the experts of a rank.
            if not isinstance(value, DTensor) or not {"fsdp", "efsdp"} & {*(value.device_mesh.mesh_dim_names or ())}:
                raise GatheredParameterError(f"{name} is gathered, with shape {tuple(value.shape)}; call reshard first")
    return parameters


def changing_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """Return all tensors that training changes, by name: trainable parameters, as above, and persistent buffers."""
    parameters = trainable_tensors(module)  # first: `state_dict` reshards
    persistent = module.state_dict().keys()
    buffers = {canonical_fqn(name): buffer for name, buffer in module.named_buffers()}
    return parameters | {name: buffer for name, buffer in buffers.items() if name in persistent}


def layout_of(tensor: Tensor) -> TensorLayout:
    """Return the current layout of a parameter or buffer."""
    sharding = (tensor.placements, tensor.device_mesh) if isinstance(tensor, DTensor) else (None, None)
    return TensorLayout(tuple(tensor.shape), tuple(local_part(tensor).shape), tensor.dtype, *sharding)


def _copy_of(tensor: Tensor, *, on_device: bool) -> Tensor:
    """Copy a tensor to new memory: on its device, or in pinned host memory."""
    if on_device or tensor.device.type == "cpu":  # on a CPU, `.cpu()` would return the tensor itself
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor)


@torch.no_grad()
def write(module: nn.Module, entries: Mapping[str, Entry]) -> None:
    """Copy a snapshot into the live parameters after all of its tensors are checked.

    Raises:
        SnapshotMismatchError: A name, shape, dtype or placement differs. No weights were changed.
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
    """Run a forward pass and check that `reshard` restores the sharded parameters with the installed torch version.

    Raises:
        RuntimeError: The layout or memory of a parameter has changed, so snapshots would be wrong.
    """
    reshard(module)
    before = {name: Entry(layout_of(value), value) for name, value in changing_tensors(module).items()}
    forward()
    reshard(module)
    for name, value in changing_tensors(module).items():
        entry = before[name]
        if layout_of(value) != entry.layout or local_part(value).data_ptr() != local_part(entry.data).data_ptr():
            raise RuntimeError(
                f"torch: FSDP does not restore sharded parameters after a forward pass: {name} was {entry.layout}, now it is "
                f"{layout_of(value)} (got torch {torch.__version__}). Install the version in requirements/."
            )


class MovingAverage(Stateful):
    """Exponential moving averages (EMA) of this rank's shards, in float32.

    After each optimizer step, `average = decay * average + (1 - decay) * weights`. As the reference policy of the KL penalty,
    the average is the dynamic anchor of WARP (arXiv:2406.16768).

    Updates need no communication, and ranks with equal shards compute equal averages.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        """Initialize the averages with detached, sharded weights by name. Their storage must not be replaced later."""
        self._weights, self._decay = weights, decay
        self.tensors = {name: torch.empty_like(value, dtype=torch.float32) for name, value in weights.items()}
        """The averages, sharded like the weights."""
        self.restart()

    def update(self) -> None:
        """Update the averages with the current weights. A weight that never changes keeps its average bit for bit."""
        weights = [local_part(value).to(torch.float32) for value in self._weights.values()]
        torch._foreach_lerp_(self._local(), weights, 1.0 - self._decay)

    def restart(self) -> None:
        """Set the averages to the current weights, with which a phase of training starts."""
        for average, weight in zip(self._local(), self._weights.values(), strict=True):
            average.copy_(local_part(weight))

    def entries(self) -> Mapping[str, Entry]:
        """Return the averages as snapshot entries. Writing them into the parameters rounds them to the parameter dtype."""
        return {name: Entry(layout_of(self._weights[name]), local_part(value)) for name, value in self.tensors.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by name."""
        return dict(self.tensors)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the averages in place."""
        for name, average in self.tensors.items():
            local_part(average).copy_(local_part(state_dict[name]))

    def _local(self) -> list[Tensor]:
        return [local_part(average) for average in self.tensors.values()]


class KeptLogprobs:
    """Log-probabilities by version and sequence. If a location is reused, the values of the new group replace the old."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, int, int, int], tuple[int, Tensor]] = {}

    def put(self, version: int, rows: Sequence[Row], logprobs_BL: Tensor) -> None:
        """Store a copy of the log-probabilities, `[B, L]`, that the weights of `version` give the sequences of some rows."""
        for row, handle, segment, tokens in _sequences(rows):
            key = (version, handle.shard, handle.location, segment)
            self._values[key] = (handle.serial, logprobs_BL[row, tokens].clone())

    def get(self, version: int, rows: Sequence[Row], row_tokens: int) -> Tensor:
        """Return the stored values of the sequences of some rows in the layout of these rows, 0 elsewhere, `[B, L]`.

        The rows may share prompts differently than those of `put`, because only the start of a sequence can be shared.

        Raises:
            KeyError: A sequence has no stored values for this version.
        """
        kept_BL = torch.zeros(max(1, len(rows)), row_tokens)
        for row, handle, segment, tokens in _sequences(rows):
            serial, values_S = self._values.get((version, handle.shard, handle.location, segment), (None, None))
            if values_S is None or serial != handle.serial:
                raise KeyError(f"no log-probabilities of version {version} are kept for segment {segment} of {handle}")
            num_tokens = min(len(values_S), tokens.stop - tokens.start)
            kept_BL[row, tokens.stop - num_tokens : tokens.stop] = values_S[len(values_S) - num_tokens :]
        return kept_BL

    def drop(self, version: int) -> None:
        """Discard all values of a version."""
        self._values = {key: value for key, value in self._values.items() if key[0] != version}

    def drop_all_but(self, versions: Collection[int]) -> None:
        """Discard the values of all other versions."""
        self._values = {key: value for key, value in self._values.items() if key[0] in versions}

    def of(self, version: int) -> dict[tuple[int, int, int, int], tuple[int, Tensor]]:
        """Return all values of a version, to be passed to `add` on another rank."""
        return {key: value for key, value in self._values.items() if key[0] == version}

    def add(self, values: dict[tuple[int, int, int, int], tuple[int, Tensor]]) -> None:
        """Add values from another rank."""
        self._values |= values


def _sequences(rows: Sequence[Row]) -> Iterator[tuple[int, GroupHandle, int, slice]]:
    """Yield row index, group handle, segment and tokens of each sequence."""
    for index, row in enumerate(rows):
        for sequence, tokens in zip(row, places(row), strict=True):
            yield index, sequence.handle, sequence.segment, tokens
