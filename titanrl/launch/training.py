"""Tinker's `TrainingClient` on the trainer mesh: the caller's own loop, data and losses.

Interface: https://tinker-docs.thinkingmachines.ai. Methods return a task at once. Tasks run in the order of their requests,
so `forward_backward` and `optim_step` can be requested together and awaited later.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from titanrl.launch.meshes import TrainerMesh
from titanrl.types import AdamParams, Datum, FloatArray, ForwardBackwardOutput, OptimUpdate

if TYPE_CHECKING:
    from torch import Tensor

    CustomLoss = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]

T = TypeVar("T")


class PoisonedError(Exception):
    """An earlier request failed, so gradients may be incomplete; see `TrainingClient.recover`."""


class TrainingClient:
    """Forward and backward passes, optimizer steps and saved states, in the order of their requests.

    Example:
        loss = client.forward_backward(data, "ppo")
        update = client.optim_step(AdamParams(learning_rate=1e-4, ...))
        print((await loss).metrics["loss:sum"], (await update).version)
    """

    def __init__(self, trainer: TrainerMesh, state_dir: Path) -> None:
        """Use a trainer that has loaded its model.

        Args:
            trainer: the mesh.
            state_dir: absolute path under which `save_state` makes its folders.
        """
        self._trainer = trainer
        self._state_dir = state_dir
        self._last: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> asyncio.Task[ForwardBackwardOutput]:
        """Compute the loss and its metrics without a gradient."""
        return self._submit(lambda: self._trainer.run_data(data, loss_fn, loss_fn_config or {}, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> asyncio.Task[ForwardBackwardOutput]:
        """Add up the gradient of the loss, summed over all tokens of the data, for the next optimizer step.

        Args:
            data: sequences; the result does not depend on packing or on the number of ranks.
            loss_fn: `cross_entropy`, `ppo`, or `package.module:function` of a loss that the trainer can import.
            loss_fn_config: options of the loss.
        """
        return self._submit(lambda: self._trainer.run_data(data, loss_fn, loss_fn_config or {}, backward=True))

    def forward_backward_custom(self, data: Sequence[Datum], loss: "CustomLoss") -> asyncio.Task[ForwardBackwardOutput]:
        """Add up the gradient of a loss that the caller computes from the log-probabilities of all data.

        One pass fetches the log-probabilities. The gradient C of the loss with respect to them becomes the linear loss
        sum(C * logprobs), which has the same gradient and is reported as `surrogate_loss:sum`.
        """
        return self._submit(lambda: self._custom(data, loss))

    def compute_logprobs(self, data: Sequence[Datum], at_version: int | None = None) -> asyncio.Task[list[FloatArray]]:
        """Compute log-probabilities of the targets, one array per datum; `at_version` selects weights that were kept."""
        return self._submit(lambda: self._logprobs(data, at_version))

    def optim_step(self, adam_params: AdamParams) -> asyncio.Task[OptimUpdate]:
        """Take an optimizer step with the accumulated gradient and clear it; the options hold for this step only."""
        return self._submit(lambda: self._trainer.optim_step(adam_params))

    def keep_weights(self) -> asyncio.Task[int]:
        """Keep a copy of the current weights; the task returns their version."""
        return self._submit(self._trainer.keep_weights)

    def save_state(self, name: str) -> asyncio.Task[Path]:
        """Write model and optimizer under a name; the task returns the path, which both ways to load take."""
        return self._submit(lambda: self._save(self._state_dir / name))

    def load_state(self, path: Path) -> asyncio.Task[int]:
        """Load the weights of a state and reset the optimizer; the task returns the version."""
        return self._submit(lambda: self._trainer.load_state(path, with_optimizer=False))

    def load_state_with_optimizer(self, path: Path) -> asyncio.Task[int]:
        """Load weights and optimizer of a state; the task returns the version."""
        return self._submit(lambda: self._trainer.load_state(path, with_optimizer=True))

    def recover(self) -> asyncio.Task[None]:
        """Discard the accumulated gradient after a failed request, and accept requests again."""
        return self._submit(self._trainer.zero_grad, recovers=True)

    def _submit(self, request: Callable[[], Awaitable[T]], *, recovers: bool = False) -> asyncio.Task[T]:
        task = asyncio.create_task(self._in_order(self._last, request, recovers=recovers))
        self._last = task
        return task

    async def _in_order(self, previous: asyncio.Task[Any] | None, request: Callable[[], Awaitable[T]], *, recovers: bool) -> T:
        if previous is not None:
            await asyncio.wait({previous})
        if recovers:  # only now: requests made before it still fail
            self._failure = None
        if self._failure is not None:
            raise PoisonedError(f"request cancelled: an earlier one failed ({self._failure!r}). Call recover() first.")
        try:
            return await request()
        except BaseException as error:  # a cancellation, too: the gradient may be incomplete
            self._failure = error
            raise

    async def _custom(self, data: Sequence[Datum], loss: "CustomLoss") -> ForwardBackwardOutput:
        import torch

        forward = await self._trainer.run_data(data, None, {}, backward=False)
        logprobs = [torch.from_numpy(output["logprobs"]).requires_grad_() for output in forward.loss_fn_outputs]
        value, metrics = loss(data, logprobs)
        gradients = torch.autograd.grad(value, logprobs, materialize_grads=True)
        linear = [
            replace(
                datum, loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": -gradient.numpy()}
            )
            for datum, gradient in zip(data, gradients, strict=True)
        ]
        output = await self._trainer.run_data(linear, "cross_entropy", {}, backward=True)
        surrogate = output.metrics["loss:sum"]
        return replace(output, metrics={"loss:sum": value.item(), "surrogate_loss:sum": surrogate, **metrics})

    async def _logprobs(self, data: Sequence[Datum], at_version: int | None) -> list[FloatArray]:
        if at_version is None:
            output = await self._trainer.run_data(data, None, {}, backward=False)
        else:
            output = await self._trainer.compute_data_logprobs(data, at_version=at_version)
        return [values["logprobs"] for values in output.loss_fn_outputs]

    async def _save(self, folder: Path) -> Path:
        await self._trainer.save_state(folder)
        return folder
