"""Mixed precision on one data-parallel rank: copies of the parameters in the dtype of the passes.

FSDP would cast all parameters, and copy and reduce all gradients, in each micro-batch. These copies are cast once per change of
the weights, and each gradient is added to that of its parameter as soon as it is complete.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from titanrl.weights.layout import local_part

ADDED_AT_ONCE = 1 << 20
"""Number of gradient values per addition. An addition of two dtypes converts one operand to a temporary tensor, which thus fits
into the cache of a CPU."""


class CastParameters:
    """Copies of a model's parameters in another dtype, which replace the parameters inside `in_use`.

    Call `weights_changed` after every change of the parameters.

    Example: `with copies.in_use(): module(tokens).sum().backward()` accumulates the gradients of the parameters themselves, in
    their own dtype.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Allocate the copies, without values. Parameters must not be replaced later; their values may change."""
        self._pairs: dict[nn.Parameter, nn.Parameter] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._outdated: Collection[nn.Parameter] = ()
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if parameter not in self._pairs:  # tied parameters share a copy
                    self._pairs[parameter] = _copy_of(parameter, dtype)
                self._places.append((owner, name, parameter))
        self.weights_changed()

    def weights_changed(self, *, trained_only: bool = False) -> None:
        """Cast the parameters, or only those that are trained, again before the copies are used the next time."""
        trained = [parameter for parameter in self._pairs if parameter.requires_grad]
        if not (trained_only and self._outdated):
            self._outdated = trained if trained_only else list(self._pairs)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compute with the copies inside the context. A backward pass must end inside of it, too."""
        with torch.no_grad():
            for parameter in self._outdated:
                local_part(self._pairs[parameter]).copy_(local_part(parameter))
        self._outdated = ()
        for owner, name, parameter in self._places:
            owner.register_parameter(name, self._pairs[parameter])
        try:
            yield
        finally:
            for owner, name, parameter in self._places:
                owner.register_parameter(name, parameter)


def _copy_of(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copy = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=parameter.requires_grad)
    if parameter.requires_grad:
        copy.register_post_accumulate_grad_hook(partial(_move_gradient, parameter))
    return copy


@torch.no_grad()
def _move_gradient(parameter: nn.Parameter, copy: Tensor) -> None:
    """Add the gradient of a copy to that of its parameter, and free it."""
    gradient, copy.grad = copy.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
        return
    total, added = local_part(parameter.grad), local_part(gradient)
    if not total.is_contiguous():  # its flattened form would be a copy
        total.add_(added)
        return
    for total_N, added_N in zip(total.flatten().split(ADDED_AT_ONCE), added.flatten().split(ADDED_AT_ONCE), strict=True):
        total_N.add_(added_N)
