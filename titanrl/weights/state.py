"""A module's tensors by name, without the cost of `state_dict` at every look."""

from collections.abc import Collection, Iterable, Mapping
from operator import is_

import torch
from torch import nn

from titanrl.weights.layout import local_part


class LiveState:
    """The tensors of `module.state_dict(keep_vars=True)`, made anew only when the module holds others than at the last look.

    Its modules stay the ones they are; its hooks may rename tensors, but make none.
    """

    def __init__(self, module: nn.Module) -> None:
        """Nothing is read yet."""
        self._module = module
        self._slots = [slot for part in module.modules() for slot in (part._parameters, part._buffers)]
        self._held: list[torch.Tensor | None] = []
        self._tensors: Mapping[str, torch.Tensor] = {}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Parameters and persistent buffers: the module's own, to be read only."""
        held = [value for slot in self._slots for value in slot.values()]
        if not self._tensors or not identical(held, self._held):
            state = self._module.state_dict(keep_vars=True)
            self._tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            assert {*map(id, self._tensors.values())} <= {*map(id, held)}, "state_dict() makes tensors that the module has not"
            self._held = held
        return self._tensors


class Whereabouts:
    """Which tensors a state dict held and where their local parts lay: while that is so, views of them stay right."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        """Note what is there now."""
        self._names, self._tensors = list(state), list(state.values())
        self._addresses = addresses(self._tensors)

    def are_those_of(self, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether a state dict holds these very tensors, in the same memory."""
        tensors = state.values()
        return list(state) == self._names and identical(tensors, self._tensors) and addresses(tensors) == self._addresses


def identical(some: Collection[object], others: Collection[object]) -> bool:
    """Whether two collections hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Where the local part of each tensor begins."""
    return [local_part(tensor).data_ptr() for tensor in tensors]
