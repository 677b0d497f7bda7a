"""Models that are built without random initial values, because their weights follow.

Drawing 0.6 billion values in bfloat16 takes 8 s on two cores of a CPU, minutes on a busy one, and the weights overwrite them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

DRAWS = frozenset({"bernoulli_", "exponential_", "kaiming_uniform_", "log_normal_", "normal_", "random_", "uniform_"})
"""Operations that fill a tensor with random numbers, by the names under which torch offers them to a function mode."""


class WithoutDraws(TorchFunctionMode):
    """Context in which a parameter gets zeros in place of random numbers, so that its memory is initialized in any case.

    Buffers and constant values, such as those of norms, are set as without it. The state of the random generators stays the
    same, so what is drawn later does not depend on the size of the model.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch, unless it draws the values of a parameter."""
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, nn.Parameter) and func.__name__ in DRAWS:
            with torch.no_grad():
                return target.zero_()
        return func(*args, **kwargs)
