"""`TrainingClient`: the trainer's primitives for custom training loops, data and losses.

The interface follows Tinker (https://tinker-docs.thinkingmachines.ai). Each method returns a task immediately. Tasks run in the
order of the calls, so `forward_backward` and `optim_step` can be submitted together and awaited later.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from titanrl.algorithms.contracts import checked_custom_loss
from titanrl.base.arguments import check_count, check_type, shown
from titanrl.base.errors import TitanRLError
from titanrl.base.files import COMMIT_FILE
from titanrl.base.plugins import Plugin, plugin_of
from titanrl.carriers.types import AdamParams, Datum, FloatArray, ForwardBackwardOutput, OptimUpdate, check_data
from titanrl.config.algorithm import AVERAGE
from titanrl.launch.generators import WeightSync
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.session.sampling import AdapterLimitError, Sampler, SamplingClient

if TYPE_CHECKING:
    from torch import Tensor

    from titanrl.algorithms.contracts import PolicyLoss

    CustomLoss = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]
    LossFunction = str | PolicyLoss | CustomLoss

T = TypeVar("T")


class PoisonedError(TitanRLError):
    """An earlier request failed, so gradients may be incomplete; see `TrainingClient.zero_grad`."""


class TrainingClient:
    """Runs forward and backward passes, optimizer steps, saves and publications in the order of the calls.

    Example:
        loss = client.forward_backward(data, "ppo")
        update = client.optim_step(AdamParams(learning_rate=1e-4))
        print((await loss).metrics["loss:sum"], (await update).version)
    """

    def __init__(
        self, trainer: TrainerMesh, folder: Path, weights: WeightSync | None = None, sampler: Sampler | None = None
    ) -> None:
        """Use a trainer that has loaded its model. States and exported models are written into `folder`."""
        self._trainer = trainer
        self._folder = folder
        self._weights, self._sampler = weights, sampler
        self._order = asyncio.Lock()  # the first to wait is the first to run
        self._last: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None
        self._is_freed = False

    @property
    def version(self) -> int:
        """Version of the weights: the number of optimizer steps taken."""
        return self._trainer.version

    def forward(
        self, data: Sequence[Datum], loss_fn: "LossFunction", loss_fn_config: Mapping[str, Any] | None = None
    ) -> asyncio.Task[ForwardBackwardOutput]:
        """Compute the loss and its metrics without a gradient; the arguments are those of `forward_backward`."""
        data, loss, options = _checked_pass(data, loss_fn, loss_fn_config)
        return self._submit(lambda: self._trainer.run_data(data, loss, options, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: "LossFunction", loss_fn_config: Mapping[str, Any] | None = None
    ) -> asyncio.Task[ForwardBackwardOutput]:
        """Compute the loss, summed over all tokens of the data, and accumulate its gradient for the next optimizer step.

        Args:
            data: sequences; the result does not depend on packing or on the number of ranks.
            loss_fn: `cross_entropy`, the name of an `algorithm.loss`, or a custom loss (a function or its import path). This is
                either a policy loss declared with `titanrl.policy_loss`, or a function of data and log-probabilities as in
                `forward_backward_custom`, which each trainer rank calls with its share of the data.
            loss_fn_config: options of the loss.

        Raises:
            TypeError: An argument has another type. Like `ValueError`, it is raised before anything is sent.
            ValueError: An array of a datum has another length than the input.
        """
        data, loss, options = _checked_pass(data, loss_fn, loss_fn_config)
        return self._submit(lambda: self._trainer.run_data(data, loss, options, backward=True))

    def forward_backward_custom(self, data: Sequence[Datum], loss: "CustomLoss") -> asyncio.Task[ForwardBackwardOutput]:
        """Compute a custom loss in this process from the log-probabilities of all data, and accumulate its gradient.

        A first pass computes the log-probabilities. With C, the gradient of the loss with respect to them, a second pass runs
        the linear loss sum(C * logprobs), which has the same gradient and is reported as `surrogate_loss:sum`.
        """
        data = _copied(data)
        if not callable(loss):
            raise TypeError(f"loss: must be a function of data and log-probabilities (got {shown(loss)}). Pass the function.")
        return self._submit(lambda: self._custom(data, loss))

    def compute_logprobs(
        self, data: Sequence[Datum], at_version: int | Literal["ema"] | None = None
    ) -> asyncio.Task[list[FloatArray]]:
        """Compute log-probabilities of the targets, one array per datum.

        Args:
            data: sequences.
            at_version: version kept by `keep_weights`, or `ema` for the moving average that `algorithm.ema_decay` maintains;
                None uses the current weights.
        """
        data = _copied(data)
        if at_version is not None and at_version != "ema":
            check_count("at_version", at_version, 'Give a version from keep_weights, "ema" or None.', least=0)

        async def compute() -> list[FloatArray]:
            if at_version is None:
                output = await self._trainer.run_data(data, None, {}, backward=False)
            else:
                version = AVERAGE if at_version == "ema" else at_version
                output = await self._trainer.compute_data_logprobs(data, at_version=version)
            return [values["logprobs"] for values in output.loss_fn_outputs]

        return self._submit(compute)

    def optim_step(self, adam_params: AdamParams) -> asyncio.Task[OptimUpdate]:
        """Take an optimizer step with the accumulated gradient, then clear it. The options apply to this step only.

        If the gradient is 0, for example without an earlier `forward_backward`, weights and optimizer state stay as they are,
        because momentum alone would move the weights. The version increases, and `OptimUpdate.is_empty` is true.
        """
        check_type("adam_params", adam_params, AdamParams, "AdamParams", "Use optim_step(AdamParams(learning_rate=1e-5)).")
        after = None if self._weights is None else self._weights.pushed  # the last push reads the weights
        return self._submit(lambda: self._trainer.optim_step(adam_params, after))

    def keep_weights(self) -> asyncio.Task[int]:
        """Keep a copy of the current weights; the task returns their version."""
        return self._submit(self._trainer.keep_weights)

    def save_state(self, name: str, *, overwrite: bool = False) -> asyncio.Task[Path]:
        """Save model and optimizer under a name; the task returns the path for `load_state` or `load_state_with_optimizer`.

        Raises:
            ValueError: There is a state of this name, and `overwrite` is False.
        """
        check_name(name)
        folder = self._folder / "states" / name
        if not overwrite and (folder / COMMIT_FILE).exists():
            raise ValueError(f"name: there is a state of this name (got {name!r}). Give another name, or overwrite=True.")
        return self._submit(lambda: self._written(self._trainer.save_state, folder))

    def load_state(self, path: Path) -> asyncio.Task[int]:
        """Load the weights of a state and reset the optimizer; the task returns the version.

        This is the state's version, or a newer one if needed to exceed every published version, so that a version never refers
        to two different sets of weights.
        """
        check_type("path", path, str | Path, "a path", "Give the path that save_state returned.")  # type: ignore[arg-type]
        return self._submit(lambda: self._load(Path(path), with_optimizer=False))

    def load_state_with_optimizer(self, path: Path) -> asyncio.Task[int]:
        """Load weights and optimizer of a state; the task returns the version, like `load_state`."""
        check_type("path", path, str | Path, "a path", "Give the path that save_state returned.")  # type: ignore[arg-type]
        return self._submit(lambda: self._load(Path(path), with_optimizer=True))

    def export(self, name: str = "final") -> asyncio.Task[Path]:
        """Write the policy as a Hugging Face directory, with adapters merged; the task returns its path."""
        check_name(name)
        return self._submit(lambda: self._written(self._trainer.export_model, self._folder / "checkpoints" / name))

    def publish(self, *, keep: bool = False) -> asyncio.Task[SamplingClient]:
        """Send the weights to the generators; the task returns a client that samples with exactly this version.

        Publication waits until the running requests of clients pinned to older versions have finished. The task completes when
        all generators use the new version.

        Args:
            keep: True to return a client that stays valid after later publications, until `SamplingClient.release`. Only LoRA
                adapters can be kept (`weights.lora: adapters`), at most `weights.held_adapters` at a time. The version that
                `session.sampling` uses does not change. Publications of a model of `Session.new_model` are always kept.

        Raises:
            TitanRLError: The session has no generators, or cannot keep the version.
        """
        if keep or self._trainer.model is not None:
            return self._submit(self._keep)
        return self._submit(self._publish, uses_trainer=False)

    def recover(self) -> None:
        """Accept requests again after a failed one, and keep the gradient of the passes that succeeded.

        If a pass failed after it had added to the gradient, the next optimizer step fails, and discards the gradient.
        """
        self._failure = self._last = None

    def zero_grad(self) -> asyncio.Task[None]:
        """Discard the accumulated gradient. After a failed request, this makes the client accept requests again."""
        return self._submit(self._trainer.zero_grad, recovers=True)

    def free(self) -> asyncio.Task[None]:
        """Discard a model of `Session.new_model`: its adapter, gradient, optimizer state and kept versions.

        The request that is running finishes first. Requests that have not started, and later ones, raise `TitanRLError`.

        Raises:
            TitanRLError: This is the client of the session's own policy, which lives as long as the session.
        """
        if self._trainer.model is None:
            raise TitanRLError("free: the session's own policy cannot be freed. Close the session.")
        self._check_not_freed()
        self._is_freed = True
        return self._submit(self._trainer.free_model, recovers=True, frees=True)

    def _submit(
        self,
        request: Callable[[], Awaitable[T]],
        *,
        recovers: bool = False,
        uses_trainer: bool = True,
        frees: bool = False,
    ) -> asyncio.Task[T]:
        turn: AbstractAsyncContextManager[object] = self._trainer.turns if uses_trainer else contextlib.nullcontext()
        task = asyncio.create_task(self._in_order(self._last, request, turn, recovers=recovers, frees=frees))
        self._last = task
        return task

    async def _in_order(
        self,
        previous: asyncio.Task[Any] | None,
        request: Callable[[], Awaitable[T]],
        turn: AbstractAsyncContextManager[object],
        *,
        recovers: bool,
        frees: bool,
    ) -> T:
        async with self._order, turn:
            if not frees:
                self._check_not_freed()
            if previous is not None and previous.cancelled():  # perhaps before it ran
                self._failure = asyncio.CancelledError()
            if recovers:  # only now, because requests submitted earlier must still fail
                self._failure = None
            if self._failure is not None:
                # Its caller may never await it, because the request that failed has raised already.
                asyncio.current_task().add_done_callback(lambda task: task.exception())  # type: ignore[union-attr]
                raise PoisonedError(f"request cancelled: an earlier one failed ({self._failure!r}). Call zero_grad() first.")
            try:
                return await request()
            except AdapterLimitError:  # nothing was sent
                raise
            except BaseException as error:  # including cancellation: the gradient may be incomplete
                self._failure = error
                raise

    async def _custom(self, data: Sequence[Datum], loss: "CustomLoss") -> ForwardBackwardOutput:
        import torch

        forward = await self._trainer.run_data(data, None, {}, backward=False)
        logprobs = [torch.from_numpy(output["logprobs"]).requires_grad_() for output in forward.loss_fn_outputs]
        value, metrics = checked_custom_loss(loss(data, logprobs))
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

    async def _written(self, write: Callable[[Path], Awaitable[None]], folder: Path) -> Path:
        await write(folder)
        return folder

    async def _load(self, path: Path, *, with_optimizer: bool) -> int:
        min_version = 0
        if self._weights is not None:
            await self._weights.pushed()  # a pending push still reads the weights
            min_version = max(self._weights.versions, default=-1) + 1  # no version is published twice
        return await self._trainer.load_state(path, with_optimizer=with_optimizer, min_version=min_version)

    def _check_not_freed(self) -> None:
        if self._is_freed:
            raise TitanRLError(f"model: it has been freed (got {self._trainer.model!r}). Create another with new_model.")

    async def _publish(self) -> SamplingClient:
        if self._weights is None or self._sampler is None:
            raise TitanRLError("publish: this session has no generators. Connect with sampling=True.")
        version = self._trainer.version
        await self._weights.pushed()
        if self._weights.versions[-1:] != [version]:
            await self._sampler.advance(version)
            self._weights.publish(version, then=_nothing)
        await self._weights.ready()
        return SamplingClient(self._sampler, version)

    async def _keep(self) -> SamplingClient:
        if self._sampler is None:
            raise TitanRLError("publish: this session has no generators. Connect with sampling=True.")
        config = self._sampler.config
        if not config.publishes_adapters:
            raise TitanRLError(
                "publish(keep=True): only LoRA adapters can be kept beside newer versions. Set trainer.lora, "
                "weights.lora to adapters, and weights.held_adapters."
            )
        trainer = self._trainer
        number = await self._sampler.hold(trainer.push_adapter, trainer.forget_adapter, trainer.version)
        return SamplingClient(self._sampler, trainer.version, number)


async def _nothing() -> None:
    """Free no slots, because custom loops have none."""


def _checked_pass(
    data: object, loss_fn: "LossFunction", loss_fn_config: Mapping[str, Any] | None
) -> tuple[Sequence[Datum], str | Plugin, Mapping[str, Any]]:
    """Check the arguments of a pass; return its data, its loss, and the options of the loss."""
    data = _copied(data)
    if not (isinstance(loss_fn, str) or callable(loss_fn)):
        raise TypeError(f"loss_fn: must be the name of a loss or a function (got {shown(loss_fn)}). Use a name such as ppo.")
    options = {} if loss_fn_config is None else loss_fn_config
    check_type("loss_fn_config", options, Mapping, "a mapping of option names to values", 'Use {"clip_low": 0.2} or None.')
    return data, plugin_of("loss_fn", loss_fn) or str(loss_fn), dict(options)


def _copied(data: object) -> Sequence[Datum]:
    """Check data, and return those of now: the caller may change the list before the request runs."""
    check_data(data)
    return tuple(data)  # type: ignore[arg-type]


def check_name(name: object) -> None:
    """Raise unless the name of a folder is one part of a path, so that the folder lies in the run directory."""
    fix = "Give a name such as step-10."
    check_type("name", name, str, "a text", fix)
    if name != Path(str(name)).name or name in ("", ".", "..") or "\0" in str(name):
        raise ValueError(f"name: must be the name of a folder, without / (got {name!r}). {fix}")
