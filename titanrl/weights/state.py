"""Detection of changes to a model's tensors, which is cheaper than calling `state_dict` for every version."""

from collections.abc import Collection, Mapping
from operator import is_

import torch
from torch import nn

from titanrl.weights.layout import PartOf, local_part


class LiveState:
    """Cache of `module.state_dict(keep_vars=True)`, refreshed only after the module has replaced a tensor.

    The set of submodules must not change. State-dict hooks may rename tensors but not create them.
    """

    def __init__(self, module: nn.Module) -> None:
        """Store the module; `tensors` reads it later."""
        self._module = module
        self._slots = [slot for part in module.modules() for slot in (part._parameters, part._buffers)]
        self._held: list[torch.Tensor | None] = []
        self._tensors: Mapping[str, torch.Tensor] = {}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the module's own parameters and persistent buffers, by name. Callers must not write to them."""
        held = [value for slot in self._slots for value in slot.values()]
        if not self._tensors or not identical(held, self._held):
            state = self._module.state_dict(keep_vars=True)
            self._tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            assert {*map(id, self._tensors.values())} <= {*map(id, held)}, "a state-dict hook created a tensor"
            self._held = held
        return self._tensors


class TensorFingerprint:
    """Record of the identity and memory of named tensors. While it matches, their views and addresses stay valid."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | PartOf]) -> None:
        """Record the current state of the tensors."""
        self._names, self._tensors = list(tensors), list(tensors.values())
        self._locals = [local_part(tensor) for tensor in self._tensors]
        self._wrappers = [pair for pair in zip(self._tensors, self._locals, strict=True) if pair[0] is not pair[1]]
        # Aliases keep the current memory, shapes and strides. `is_set_to` compares them without allocating. Publications run
        # with cold caches, where Python objects for every shape and stride of every tensor would cost half a millisecond.
        self._aliases = [local.detach() for local in self._locals]
        self._dtypes = [local.dtype for local in self._locals]

    def matches(self, tensors: Mapping[str, torch.Tensor | PartOf]) -> bool:
        """Return whether these are the recorded tensors, with the same memory, shapes, strides and dtypes."""
        return (
            list(tensors) == self._names
            and identical(tensors.values(), self._tensors)
            and all(local_part(value) is local for value, local in self._wrappers)
            and all(map(torch.Tensor.is_set_to, self._locals, self._aliases))
            and [local.dtype for local in self._locals] == self._dtypes
        )


def identical(some: Collection[object], others: Collection[object]) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))
