"""The trainer as Tinker's `TrainingClient`: the caller's own loop, data and losses, over the same actors.

Interface: https://tinker-docs.thinkingmachines.ai. Methods return at once with a task; tasks run in the order they were
asked for, so `forward_backward` and `optim_step` can be asked for together and awaited later.
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
    """An earlier request failed, so gradients or weights may not be what the caller thinks; see `TrainingClient.recover`."""


class TrainingClient:
    """Forward, backward, optimizer steps and states, in the order they are asked for.

    Example:
        loss = client.forward_backward(data, "ppo")
        update = client.optim_step(AdamParams(learning_rate=1e-4, ...))
        print((await loss).metrics["loss:sum"], (await update).version)
    """

    def __init__(self, trainer: TrainerMesh, state_dir: Path) -> None:
        """Drive a trainer that has loaded its model.

        Args:
            trainer: the mesh.
            state_dir: where `save_state` makes its folders; absolute.
        """
        self._trainer = trainer
        self._state_dir = state_dir
        self._last: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> asyncio.Task[ForwardBackwardOutput]:
        """The loss and its metrics, without a gradient."""
        return self._submit(lambda: self._trainer.run_data(data, loss_fn, loss_fn_config or {}, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
    ) -> asyncio.Task[ForwardBackwardOutput]:
        """Add the gradient of the loss, summed over all tokens of the data, to what the next optimizer step uses.

        Args:
            data: sequences; nothing about them depends on how they are packed or spread.
            loss_fn: `cross_entropy`, `ppo`, or `package.module:function` of a loss that the trainer can import.
            loss_fn_config: options of the loss.
        """
        return self._submit(lambda: self._trainer.run_data(data, loss_fn, loss_fn_config or {}, backward=True))

    def forward_backward_custom(self, data: Sequence[Datum], loss: "CustomLoss") -> asyncio.Task[ForwardBackwardOutput]:
        """The same for a loss that is computed here, over all data at once, from their log-probabilities.

        One pass fetches the log-probabilities; the gradient C of the loss with respect to them comes back as the linear loss
        sum(C * logprobs), which has the same gradient and is reported as `surrogate_loss:sum`.
        """
        return self._submit(lambda: self._custom(data, loss))

    def compute_logprobs(self, data: Sequence[Datum], at_version: int | None = None) -> asyncio.Task[list[FloatArray]]:
        """Log-probabilities of the targets, one array for each datum; `at_version`: of weights that `keep_weights` held."""
        return self._submit(lambda: self._logprobs(data, at_version))

    def optim_step(self, adam_params: AdamParams) -> asyncio.Task[OptimUpdate]:
        """Step with the gradient added since the last one, and clear it; all options are those of this step alone."""
        return self._submit(lambda: self._trainer.optim_step(adam_params))

    def keep_weights(self) -> asyncio.Task[int]:
        """Hold a copy of the weights as they are; its version is the answer."""
        return self._submit(self._trainer.keep_weights)

    def save_state(self, name: str) -> asyncio.Task[Path]:
        """Write model and optimizer under a name; both ways to load take the path that is the answer."""
        return self._submit(lambda: self._save(self._state_dir / name))

    def load_state(self, path: Path) -> asyncio.Task[int]:
        """Take up the weights of a state and start the optimizer afresh; the answer is the version."""
        return self._submit(lambda: self._trainer.load_state(path, with_optimizer=False))

    def load_state_with_optimizer(self, path: Path) -> asyncio.Task[int]:
        """Take up a state as it was; the answer is the version."""
        return self._submit(lambda: self._trainer.load_state(path, with_optimizer=True))

    def recover(self) -> asyncio.Task[None]:
        """After a failed request: throw away the gradient added so far and accept requests again."""
        return self._submit(self._trainer.zero_grad, recovers=True)

    def _submit(self, request: Callable[[], Awaitable[T]], *, recovers: bool = False) -> asyncio.Task[T]:
        task = asyncio.create_task(self._in_order(self._last, request, recovers=recovers))
        self._last = task
        return task

    async def _in_order(self, previous: asyncio.Task[Any] | None, request: Callable[[], Awaitable[T]], *, recovers: bool) -> T:
        if previous is not None:
            await asyncio.wait({previous})
        if recovers:  # only now: what was asked for before it still fails
            self._failure = None
        if self._failure is not None:
            raise PoisonedError(f"not done, because an earlier request failed: {self._failure!r}; call recover() first")
        try:
            return await request()
        except BaseException as error:  # whatever it is, a cancellation too, the gradient may be half of what was meant
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
