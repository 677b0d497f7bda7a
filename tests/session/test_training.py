"""Methods of the training client, on two real trainer ranks."""

import asyncio
import gc
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests import custom_objects
from tests.launch import losses
from tests.launch.training_lab import Lab, running_lab
from titanrl.algorithms.contracts import LossInputs, bound_loss, tinker_algorithm
from titanrl.base.errors import PhaseError, RankError
from titanrl.base.files import DamagedError
from titanrl.carriers.tables import SEQUENCE, MicroBatch, RowTable
from titanrl.carriers.types import AdamParams, Datum, ForwardBackwardOutput
from titanrl.config.algorithm import LOSSES, AlgorithmConfig
from titanrl.processes.actors import ask_ranks
from titanrl.session.training import PoisonedError
from titanrl.weights.records import Commit
from titanrl.weights.transport import WeightReader

ADAM = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)


def make_data() -> list[Datum]:
    random = np.random.default_rng(0)
    data = []
    for length in (5, 30, 3, 17, 9, 31, 12):
        tokens = random.integers(1, 100, length + 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": random.uniform(-5.2, -4.2, length).astype(np.float32),
            "advantages": random.normal(size=length).astype(np.float32),
        }
        data.append(Datum(model_input=tokens[:-1], loss_fn_inputs=inputs))
    return data


DATA = make_data()
SUPERVISED = [
    replace(
        datum,
        loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"], "weights": np.float32(datum.model_input % 3)},
    )
    for datum in DATA
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("training")) as lab:
        yield lab


@pytest.fixture
def lab(running: Lab) -> Lab:
    async def start_again() -> None:
        await running.client.zero_grad()
        await running.client.load_state_with_optimizer(running.start)

    running.do(start_again())
    return running


def logprobs(lab: Lab) -> list[np.ndarray]:
    return lab.ask(lambda: lab.client.compute_logprobs(DATA))


def arrays(output: ForwardBackwardOutput) -> list[np.ndarray]:
    return [values["logprobs"] for values in output.loss_fn_outputs]


def all_equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_loss_and_logprobs_follow_the_order_of_the_data(lab: Lab) -> None:
    output = lab.ask(lambda: lab.client.forward(SUPERVISED, "cross_entropy"))
    assert [len(values) for values in arrays(output)] == [len(datum.model_input) for datum in DATA]
    by_hand = -sum(
        float((datum.loss_fn_inputs["weights"] * values).sum())
        for datum, values in zip(SUPERVISED, arrays(output), strict=True)
    )
    assert output.metrics["loss:sum"] == pytest.approx(by_hand, rel=1e-5)
    order = [4, 2, 6, 0, 1, 5, 3]
    shuffled = arrays(lab.ask(lambda: lab.client.forward([SUPERVISED[i] for i in order], "cross_entropy")))
    for place, index in enumerate(order):
        np.testing.assert_allclose(shuffled[place], arrays(output)[index], atol=2e-6)
    twice = lab.ask(lambda: lab.client.forward([*SUPERVISED, *SUPERVISED], "cross_entropy"))
    assert twice.metrics["loss:sum"] == pytest.approx(2 * output.metrics["loss:sum"], rel=1e-5)


def test_requests_submitted_together_equal_awaited_ones(lab: Lab) -> None:
    async def together() -> list[np.ndarray]:
        requests = []
        for _ in range(2):
            requests += [lab.client.forward_backward(DATA, "ppo"), lab.client.optim_step(ADAM)]
        last = lab.client.compute_logprobs(DATA)
        assert [update.version for update in (await requests[1], await requests[3])] == [1, 2]
        return await last

    async def one_by_one() -> list[np.ndarray]:
        await lab.client.load_state_with_optimizer(lab.start)
        for _ in range(2):
            await lab.client.forward_backward(DATA, "ppo")
            await lab.client.optim_step(ADAM)
        return await lab.client.compute_logprobs(DATA)

    assert all_equal(lab.do(together()), lab.do(one_by_one()))


async def test_requests_keep_their_order_and_stop_when_a_waiting_one_is_cancelled(lab: Lab) -> None:
    before, ended = await lab.client.compute_logprobs(DATA), list[str]()
    requests = {
        "running": lab.client.forward_backward(DATA, "ppo"),
        "earlier": lab.client.forward_backward(DATA, "ppo"),
        "cancelled": lab.client.forward_backward(DATA, "ppo"),
        "step": lab.client.optim_step(ADAM),
    }
    for name, request in requests.items():
        request.add_done_callback(lambda request, name=name: ended.append(name))  # type: ignore[misc]
    await asyncio.sleep(0)
    requests["cancelled"].cancel()
    with pytest.raises(PoisonedError, match="CancelledError"):
        await requests["step"]
    assert ended == ["cancelled", "running", "earlier", "step"]
    assert not any(request.cancelled() or request.exception() for request in (requests["running"], requests["earlier"]))
    await lab.client.zero_grad()
    lab.client.forward_backward(DATA, "ppo").cancel()  # before it starts
    with pytest.raises(PoisonedError):
        await lab.client.optim_step(ADAM)
    lab.client.recover()
    assert (await lab.client.optim_step(ADAM)).is_empty
    assert all_equal(await lab.client.compute_logprobs(DATA), before)


async def test_data_are_those_of_the_call(lab: Lab) -> None:
    data, options = list(DATA), {"clip_low_threshold": 0.8}
    request, reading = lab.client.forward_backward(data, "ppo", options), lab.client.compute_logprobs(data)
    data.clear()
    options["clip_low_threshold"] = -1.0
    assert len((await request).loss_fn_outputs) == len(await reading) == len(DATA)


def test_trainer_refuses_a_step_queued_behind_a_failed_pass(lab: Lab) -> None:
    nowhere = RowTable(np.array([((0, 0, 0), 0, 0, 8, 1.0, 1.0, 0, 0)], SEQUENCE), np.array([1]))  # this trainer has no shards
    before = logprobs(lab)

    async def both() -> tuple[Any, Any]:
        await lab.trainer.run_data(DATA, "ppo", {}, backward=True)
        passing = lab.trainer.forward_backward([MicroBatch(rows=(nowhere, nowhere))])
        stepping = lab.trainer.supervisor.ask("optim_step", ask_ranks(lab.trainer.mesh.optim_step, ADAM), 60)
        return tuple(await asyncio.gather(passing, stepping, return_exceptions=True))

    failed, refused = lab.do(both())
    assert isinstance(failed, KeyError)
    assert isinstance(refused, PhaseError)
    assert "a backward pass since the last step failed" in str(refused)
    assert all_equal(logprobs(lab), before)
    lab.ask(lambda: lab.client.forward_backward(DATA, "ppo"))
    after_failure = lab.ask(lambda: lab.client.optim_step(ADAM))
    lab.ask(lambda: lab.client.load_state_with_optimizer(lab.start))
    lab.ask(lambda: lab.client.forward_backward(DATA, "ppo"))
    assert lab.ask(lambda: lab.client.optim_step(ADAM)) == after_failure


def test_optimizer_options_apply_to_one_step(lab: Lab) -> None:
    before = logprobs(lab)

    async def step(**options: float) -> Any:
        await lab.client.forward_backward(DATA, "ppo")
        return await lab.client.optim_step(replace(ADAM, **options))

    lab.do(step(learning_rate=0.0))
    assert all_equal(logprobs(lab), before)
    unclipped = lab.do(step(learning_rate=0.0, max_grad_norm=0.0))
    assert unclipped.grad_norm > 1.0
    lab.do(step(learning_rate=1e-3))
    assert not all_equal(logprobs(lab), before)


@pytest.mark.parametrize("way", ["imported by the trainer", "computed by the caller"])
def test_custom_loss_has_the_gradient_of_the_built_in_one(lab: Lab, way: str) -> None:
    async def train(custom: bool) -> tuple[ForwardBackwardOutput, float, list[np.ndarray]]:
        await lab.client.load_state_with_optimizer(lab.start)
        if not custom:
            output = await lab.client.forward_backward(DATA, "ppo")
        elif way == "computed by the caller":
            output = await lab.client.forward_backward_custom(DATA, losses.ppo)
        else:
            output = await lab.client.forward_backward(DATA, "tests.launch.losses:ppo")
        # The state starts at zero, so a step of Adam says little about the size of a gradient: its norm does.
        update = await lab.client.optim_step(replace(ADAM, eps=1.0))
        return output, update.grad_norm, await lab.client.compute_logprobs(DATA)

    built_in, norm, after = lab.do(train(custom=False))
    own, own_norm, own_after = lab.do(train(custom=True))
    assert own.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], abs=1e-5)
    assert own.metrics["num_data:sum"] == len(DATA)
    assert own_norm == pytest.approx(norm, rel=1e-6)
    for one, other in zip(own_after, after, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


async def test_step_without_a_gradient_changes_no_weight(lab: Lab) -> None:
    decayed = replace(ADAM, weight_decay=0.1)

    def without(name: str) -> list[Datum]:
        zeros = [{name: np.zeros(len(datum.model_input), np.float32)} for datum in DATA]
        return [
            replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, **zero}) for datum, zero in zip(DATA, zeros, strict=True)
        ]

    client = lab.client
    await client.forward_backward(DATA, "ppo")
    taken = await client.optim_step(decayed)  # from now on, there is momentum
    assert not taken.is_empty
    before = await client.compute_logprobs(DATA)
    for data in (None, without("weights"), without("advantages")):
        if data is not None:
            await client.forward_backward(data, "ppo")
        update = await client.optim_step(decayed)
        assert (update.is_empty, update.skipped, update.grad_norm) == (True, False, 0.0)
        assert all_equal(await client.compute_logprobs(DATA), before)
    assert update.version == taken.version + 3
    await client.forward_backward(DATA, "ppo")
    assert not (await client.optim_step(decayed)).is_empty
    assert not all_equal(await client.compute_logprobs(DATA), before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda client: client.forward_backward([{"a": 1}], "ppo"), r"data\[0\]: must be a Datum \(got dict \{'a': 1\}\)"),
        (lambda client: client.forward_backward(None, "ppo"), r"data: must be a list of Datum \(got NoneType None\)"),
        (lambda client: client.forward(DATA, 3), r"loss_fn: must be the name of a loss or a function \(got 3\)"),
        (lambda client: client.forward_backward(DATA, "ppo", [1]), r"loss_fn_config: must be a mapping"),
        (
            lambda client: client.forward([replace(DATA[0], model_input=["a"])], "ppo"),
            r"data\[0\].model_input: must be",
        ),
        (
            lambda client: client.forward([replace(DATA[0], loss_fn_inputs=3)], "ppo"),
            "loss_fn_inputs: must be a mapping",
        ),
        (lambda client: client.forward_backward_custom(DATA, "ppo"), "loss: must be a function"),
        (lambda client: client.compute_logprobs(DATA, at_version="best"), "at_version: must be an integer >= 0"),
        (lambda client: client.optim_step(1e-4), "adam_params: must be AdamParams"),
        (lambda client: client.save_state("../state"), "name: must be the name of a folder"),
        (lambda client: client.export(7), r"name: must be a text \(got 7\)"),
        (lambda client: client.load_state(None), "path: must be a path"),
    ],
)
async def test_wrong_arguments_are_refused_without_damage(lab: Lab, call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        await call(lab.client)
    assert len(await lab.client.compute_logprobs(DATA)) == len(DATA)


def test_gradients_accumulate_until_the_step(lab: Lab) -> None:
    async def norm(*parts: list[Datum]) -> float:
        for part in parts:
            await lab.client.forward_backward(part, "ppo")
        return float((await lab.client.optim_step(replace(ADAM, learning_rate=0.0))).grad_norm)

    whole = lab.do(norm(DATA))
    assert lab.do(norm(DATA[:3], DATA[3:])) == pytest.approx(whole, rel=1e-6)
    assert lab.do(norm(DATA, DATA)) == pytest.approx(2 * whole, rel=1e-6)


async def test_state_is_restored_with_and_without_optimizer(lab: Lab) -> None:
    async def step() -> list[np.ndarray]:
        await lab.client.forward_backward(DATA, "ppo")
        await lab.client.optim_step(ADAM)
        return await lab.client.compute_logprobs(DATA)

    first = await step()
    path = await lab.client.save_state("one")
    with pytest.raises(ValueError, match=r"^name: there is a state of this name \(got 'one'\)\. Give another name, or over"):
        lab.client.save_state("one")
    assert await lab.client.save_state("one", overwrite=True) == path
    second = await step()
    assert await lab.client.load_state_with_optimizer(path) == 1
    assert all_equal(await lab.client.compute_logprobs(DATA), first)
    assert all_equal(await step(), second)
    await lab.client.load_state(path)
    assert all_equal(await lab.client.compute_logprobs(DATA), first)
    assert not all_equal(await step(), second)  # the moments start at zero again


async def test_saving_before_the_first_step_changes_nothing(lab: Lab) -> None:
    async def step() -> list[np.ndarray]:
        await lab.client.forward_backward(DATA, "ppo")
        await lab.client.optim_step(ADAM)
        return await lab.client.compute_logprobs(DATA)

    await lab.trainer.start_over()  # an optimizer without any state
    plain = await step()
    await lab.client.load_state_with_optimizer(lab.start)
    await lab.trainer.start_over()
    await lab.client.save_state("early")
    assert all_equal(await step(), plain)


async def test_logprobs_of_the_moving_average_follow_the_weights(lab: Lab) -> None:
    def distance(some: list[np.ndarray], others: list[np.ndarray]) -> float:
        return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))

    start = await lab.client.compute_logprobs(DATA)
    assert all_equal(await lab.client.compute_logprobs(DATA, at_version="ema"), start)
    await lab.client.forward_backward(DATA, "ppo")
    await lab.client.optim_step(ADAM)
    after, average = await lab.client.compute_logprobs(DATA), await lab.client.compute_logprobs(DATA, at_version="ema")
    assert 0.0 < distance(average, start) < distance(after, start)
    assert 0.0 < distance(average, after) < distance(after, start)
    await lab.client.load_state(await lab.client.save_state("moved"))  # which starts the average again
    assert all_equal(await lab.client.compute_logprobs(DATA, at_version="ema"), after)


async def test_logprobs_of_a_kept_version_are_reproduced(lab: Lab) -> None:
    before = await lab.client.compute_logprobs(DATA)
    held = await lab.client.keep_weights()
    await lab.client.forward_backward(DATA, "ppo")
    await lab.client.optim_step(ADAM)
    assert not all_equal(await lab.client.compute_logprobs(DATA), before)
    assert all_equal(await lab.client.compute_logprobs(DATA, held), before)


async def test_failed_request_cancels_later_ones_until_zero_grad(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    failing = lab.client.forward_backward_custom(DATA, losses.broken)
    behind = lab.client.optim_step(ADAM)
    with pytest.raises(RuntimeError, match="the loss itself is broken"):
        await failing
    lab.client.optim_step(ADAM)  # never awaited
    recovered = lab.client.zero_grad()
    with pytest.raises(PoisonedError, match="the loss itself is broken"):
        await behind
    await recovered
    gc.collect()
    assert "never retrieved" not in caplog.text
    for returned, text in (
        (1.0, "loss: must return a pair of loss and metrics"),
        ((torch.ones(()), {}), "loss: must return a scalar tensor with gradient"),
        ((torch.ones(2, requires_grad=True), {}), "loss: must return a scalar tensor with gradient"),
    ):
        with pytest.raises(TypeError, match=text):
            await lab.client.forward_backward_custom(DATA, lambda data, logprobs, it=returned: it)  # type: ignore[misc]
        await lab.client.zero_grad()
    for loss, config, text in (
        ("nonsense", {}, "loss_fn: unknown loss"),
        ("ppo", {"clip": 0.2}, "loss_fn_config.clip: ppo has no such option"),
        ("tests.launch.losses:absent", {}, "has no attribute 'absent'"),
        ("tests.launch.losses:broken", {}, "the loss itself is broken"),
        (custom_objects.clipped, {"clip": 0.2}, "loss_fn_config.clip=0.2, .* no such option"),
        (lambda inputs: inputs.logprobs_N, {}, r"loss_fn, without titanrl.policy_loss: wrong signature"),
        (lambda data, logprobs: logprobs[0].sum(), {}, "loss: must return a pair of loss and metrics"),
        (custom_objects.one_sided, {}, r"one_sided raised KeyError: .advantage.|the loss raised on trainer rank 0"),
    ):
        with pytest.raises(Exception, match=text):
            await lab.client.forward_backward(DATA, loss, config)
        await lab.client.zero_grad()
    with pytest.raises(ValueError, match=r"at_version: this version is not kept \(got 77; kept: \["):
        await lab.client.compute_logprobs(DATA, at_version=77)
    await lab.client.zero_grad()
    with pytest.raises(DamagedError, match=r"load_state: the folder does not exist \(got absent\)"):
        await lab.client.load_state("absent")
    await lab.client.zero_grad()
    with pytest.raises(ValueError, match=r"data\[0\].loss_fn_inputs: 'logprobs' is missing"):
        await lab.client.forward_backward(SUPERVISED, "ppo")
    await lab.client.zero_grad()
    inputs = SUPERVISED[0].loss_fn_inputs
    masked = replace(SUPERVISED[0], loss_fn_inputs={**inputs, "mask": np.zeros(len(SUPERVISED[0].model_input))})
    with pytest.raises(ValueError, match=r"data\[0\].loss_fn_inputs: loss 'cross_entropy' has no such input \(got 'mask'\)"):
        await lab.client.forward_backward([masked], "cross_entropy")
    await lab.client.zero_grad()
    assert (await lab.client.forward([masked], lambda data, logprobs: (logprobs[0].sum(), {}))).loss_fn_outputs
    assert (await lab.client.optim_step(ADAM)).grad_norm == 0.0


def by_hand(output: ForwardBackwardOutput, algorithm: AlgorithmConfig) -> float:
    """Sum a loss over the data, from the log-probabilities of a pass."""
    total = 0.0
    for datum, logprobs in zip(DATA, arrays(output), strict=True):
        inputs = [torch.from_numpy(values) for values in (logprobs, *map(datum.loss_fn_inputs.get, ("logprobs", "advantages")))]
        result = bound_loss(algorithm)(LossInputs.of(*inputs))
        total += float((result[0] if isinstance(result, tuple) else result).sum())
    return total


def test_every_loss_of_the_configuration_can_be_named(lab: Lab) -> None:
    for name in LOSSES:
        output = lab.ask(lambda name=name: lab.client.forward(DATA, name))
        expected = by_hand(output, tinker_algorithm(name, {}))
        if name == "kl_cov":  # penalizes a token of each micro-batch, by hand of each datum
            assert 0.0 < output.metrics["policy/selected_frac:mean"] < 1.0
            continue
        assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-4, abs=1e-4), name


def test_custom_policy_loss_by_path_file_and_object_equals_ppo(lab: Lab) -> None:
    async def loss_and_norm(loss: Any, config: dict[str, float]) -> tuple[float, float]:
        await lab.client.load_state_with_optimizer(lab.start)
        output = await lab.client.forward_backward(DATA, loss, config)
        return output.metrics["loss:sum"], (await lab.client.optim_step(ADAM)).grad_norm

    expected = lab.do(loss_and_norm("ppo", {"clip_low_threshold": 0.9}))
    for loss in ("tests.custom_objects:clipped", "tests/custom_objects.py:clipped", custom_objects.clipped):
        assert lab.do(loss_and_norm(loss, {"clip_low": 1.0 - 0.9})) == expected, loss
    assert lab.do(loss_and_norm(custom_objects.clipped, {"clip_low": 1.0 - 0.9, "bonus": 1.0}))[0] < expected[0]


async def read_weights(lab: Lab, commit: Commit) -> dict[str, torch.Tensor]:
    fetched = await WeightReader("lab", lab.store).fetch(commit)
    targets = {entry.name: torch.zeros(entry.global_shape) for layout in fetched.layouts for entry in layout.entries}
    fetched.copy_into(targets)
    return targets


async def test_push_during_the_next_pass_sends_the_current_version(lab: Lab) -> None:
    await lab.client.forward_backward(DATA, "ppo")
    version = (await lab.client.optim_step(ADAM)).version
    alone = await read_weights(lab, Commit(version, tuple(await lab.trainer.push_weights(version))))
    beside, _ = await asyncio.gather(lab.trainer.push_weights(version), lab.client.forward_backward(DATA, "ppo"))
    await lab.client.optim_step(ADAM)
    overlapped = await read_weights(lab, Commit(version, tuple(beside)))
    later = await read_weights(lab, Commit(version + 1, tuple(await lab.trainer.push_weights(version + 1))))
    assert all(torch.equal(alone[name], overlapped[name]) for name in alone)
    assert not any(torch.equal(alone[name], later[name]) for name in alone)


async def test_push_during_a_pass_with_kept_weights_sends_the_live_ones(lab: Lab) -> None:
    held = await lab.client.keep_weights()
    await lab.client.forward_backward(DATA, "ppo")
    version = (await lab.client.optim_step(ADAM)).version
    alone = await read_weights(lab, Commit(version, tuple(await lab.trainer.push_weights(version))))
    passes = [lab.client.compute_logprobs(DATA, held) for _ in range(3)]
    beside, *_ = await asyncio.gather(lab.trainer.push_weights(version), *passes)
    overlapped = await read_weights(lab, Commit(version, tuple(beside)))
    assert all(torch.equal(alone[name], overlapped[name]) for name in alone)


async def test_busy_time_counts_computing_and_not_waiting(lab: Lab) -> None:
    await lab.trainer.optim_step(ADAM)
    started = time.perf_counter()
    await lab.trainer.run_data(DATA, "tests.launch.losses:slow", {}, backward=True)
    limit_s = time.perf_counter() - started
    await asyncio.sleep(0.5)
    started = time.perf_counter()
    update = await lab.trainer.optim_step(ADAM)
    limit_s += time.perf_counter() - started
    assert 0.3 <= update.busy_s <= limit_s
    started = time.perf_counter()
    assert (await lab.trainer.optim_step(ADAM)).busy_s <= time.perf_counter() - started, "the others are not counted again"


def test_rank_with_another_request_is_named_and_the_trainer_refuses_to_continue(running: Lab) -> None:
    """This test must be the last one, because the trainer cannot be used afterwards."""

    async def scenario() -> tuple[Any, Any, Any]:
        await running.client.zero_grad()
        await running.client.forward_backward(DATA, "ppo")
        first, second = (running.trainer.mesh.slice(procs=rank) for rank in range(2))
        ask = running.trainer.supervisor.ask
        apart = ask("optim_step", first.optim_step.call_one(ADAM), 60), ask("start_over", second.start_over.call_one(), 60)
        found = await asyncio.gather(*apart, return_exceptions=True)
        return *found, await asyncio.gather(running.client.optim_step(ADAM), return_exceptions=True)

    stepping, starting_over, (later,) = running.do(scenario())
    for error in (stepping, starting_over, later):
        assert isinstance(error, RankError)
        assert re.fullmatch(r"rank 1 is in start_over \(.*\), others in optim_step \(.*\)", str(error))
