"""Several models of a session, each an adapter on the same base, on two real trainer ranks."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.launch import losses
from titanrl import AdamParams, Datum, connect, load_config
from titanrl.base.errors import TitanRLError
from titanrl.base.files import DamagedError
from titanrl.carriers.types import ForwardBackwardOutput
from titanrl.session.session import Session
from titanrl.session.training import PoisonedError, TrainingClient

ADAM = AdamParams(learning_rate=1e-2, eps=1e-8)
OPTIONS = {"a": {"seed": 1}, "b": {"seed": 2, "rank": 3, "alpha": 6.0, "train_attn": False}}


def make_data(seed: int, num_data: int = 6) -> list[Datum]:
    random, data = np.random.default_rng(seed), []
    for length in random.integers(3, 30, num_data):
        tokens = random.integers(1, 100, length + 1)
        weights = random.uniform(0.0, 1.0, length).astype(np.float32)
        data.append(Datum(model_input=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights}))
    return data


DATA = {"a": make_data(1), "b": make_data(2), "own": make_data(3)}


@dataclass
class Running:
    runner: asyncio.Runner
    session: Session

    def do(self, scenario: Callable[[Session], Coroutine[Any, Any, Any]]) -> Any:
        return self.runner.run(asyncio.wait_for(scenario(self.session), 200))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[Running]:
    """A session with two trainer ranks and no generators."""
    lora = ("trainer.lora.rank=8", "trainer.lora.alpha=16", "trainer.lora.max_models=3", "trainer.parallelism.dp_shard=2")
    places = (f"output_dir={tmp_path_factory.mktemp('models')}", "logging.console=off", "warm_start=null")
    with asyncio.Runner() as runner:

        async def start() -> Session:
            return await connect(load_config("configs/quickstart.yaml", [*lora, *places]), sampling=False)

        session = runner.run(start())
        yield Running(runner, session)
        runner.run(session.close())


def values(output: ForwardBackwardOutput) -> tuple[object, ...]:
    return output.metrics, output.version, [values["logprobs"].tobytes() for values in output.loss_fn_outputs]


async def curve(client: TrainingClient, name: str, num_steps: int = 3) -> list[object]:
    """Request some steps at once; return what they returned."""
    requests = []
    for _ in range(num_steps):
        for part in (DATA[name][:3], DATA[name][3:]):
            requests.append(client.forward_backward(part, "cross_entropy"))
        requests.append(client.optim_step(ADAM))
    found = []
    for request in requests:
        result = await request
        if isinstance(result, ForwardBackwardOutput):
            found.append(values(result))
        else:
            found.append((result.version, result.grad_norm, result.skipped))
    return found


def test_clients_at_once_train_bitwise_as_each_alone(running: Running) -> None:
    async def scenario(session: Session) -> None:
        start = await session.training.save_state("start")
        alone: dict[str, list[object]] = {"own": await curve(session.training, "own")}
        await session.training.load_state_with_optimizer(start)
        for name, options in OPTIONS.items():
            client = await session.new_model(name, **options)
            alone[name] = await curve(client, name)
            await client.free()
        clients = {"own": session.training}
        for name, options in OPTIONS.items():
            clients[name] = await session.new_model(name, **options)
            assert clients[name].version == 0
        found = await asyncio.gather(*(curve(client, name) for name, client in clients.items()))
        assert dict(zip(clients, found, strict=True)) == alone
        assert [client.version for client in clients.values()] == [3, 3, 3]
        for name in OPTIONS:
            await clients[name].free()

    running.do(scenario)


def test_flooding_client_delays_another_by_one_request_each(running: Running) -> None:
    async def scenario(session: Session) -> None:
        flooding, other = await session.new_model("a"), await session.new_model("b")
        finished: list[str] = []

        def submit(client: TrainingClient, name: str) -> asyncio.Task[Any]:
            task = client.forward_backward(DATA[name], "cross_entropy")
            task.add_done_callback(lambda _: finished.append(name))
            return task

        requests = [submit(flooding, "a") for _ in range(20)]
        await requests[0]
        requests += [submit(other, "b") for _ in range(4)]
        await asyncio.gather(*requests)
        last = len(finished) - finished[::-1].index("b")
        assert last <= 1 + 2 * 4 + 2
        await asyncio.gather(flooding.free(), other.free())

    running.do(scenario)


def test_failed_request_affects_only_its_model(running: Running) -> None:
    async def scenario(session: Session) -> None:
        alone = await session.new_model("b", **OPTIONS["b"])
        expected = await curve(alone, "b")
        await alone.free()
        failing, client = await session.new_model("a", **OPTIONS["a"]), await session.new_model("b", **OPTIONS["b"])
        training = asyncio.ensure_future(curve(client, "b"))
        requests = [failing.forward_backward(DATA["a"], "cross_entropy") for _ in range(2)]
        requests += [failing.forward_backward_custom(DATA["a"], losses.broken), failing.optim_step(ADAM)]
        *passed, broken, refused = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(output, ForwardBackwardOutput) for output in passed)
        assert str(broken) == "the loss itself is broken"
        assert isinstance(refused, PoisonedError)
        with pytest.raises(PoisonedError):
            await failing.forward_backward(DATA["a"], "tests.launch.losses:broken")
        await failing.zero_grad()
        assert await training == expected
        assert (await failing.optim_step(ADAM)).is_empty
        await asyncio.gather(failing.free(), client.free())

    running.do(scenario)


def test_saved_model_is_committed_and_continues_exactly_in_another(running: Running, tmp_path: Path) -> None:
    async def scenario(session: Session) -> None:
        client = await session.new_model("session:train:0", **OPTIONS["b"])
        await curve(client, "b", 2)
        path = await client.save_state("two")
        assert path == session.run_dir / "models" / "session:train:0" / "states" / "two"
        rest = await curve(client, "b", 2)
        await client.load_state_with_optimizer(path)
        assert await curve(client, "b", 2) == rest
        await client.free()
        other = await session.new_model("other", **OPTIONS["b"])
        assert await other.load_state_with_optimizer(path) == 2
        assert await curve(other, "b", 2) == rest
        assert await other.load_state(path) == 2
        assert await curve(other, "b", 2) != rest
        wide = await session.new_model("wide", rank=4)
        with pytest.raises(ValueError, match=r"an adapter with rank=3, .*Create the model with these"):
            await wide.load_state(path)
        await wide.zero_grad()
        with pytest.raises(ValueError, match="no state of an adapter"):
            await wide.load_state(await session.training.save_state("own"))
        await wide.zero_grad()
        (file, *_) = path.glob("__0_*")
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(DamagedError, match="load_state"):
            await wide.load_state(path)
        await asyncio.gather(other.free(), wide.free())

    running.do(scenario)


def test_exported_model_has_its_own_adapter_merged(running: Running, tmp_path: Path) -> None:
    async def scenario(session: Session) -> None:
        import torch
        import transformers

        client = await session.new_model("b", **OPTIONS["b"])
        await curve(client, "b")
        folder, expected = await client.export(), await client.compute_logprobs(DATA["b"])
        policy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for datum, logprobs in zip(DATA["b"], expected, strict=True):
            with torch.no_grad():
                found = policy(torch.from_numpy(datum.model_input)[None]).logits[0].log_softmax(-1)
            targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])
            np.testing.assert_allclose(found.gather(-1, targets[:, None])[:, 0].numpy(), logprobs, atol=1e-5)
        base = await session.training.compute_logprobs(DATA["b"])
        assert max(float(np.abs(one - other).max()) for one, other in zip(base, expected, strict=True)) > 1e-2
        await client.free()

    running.do(scenario)


def test_freed_model_refuses_requests_and_makes_room(running: Running) -> None:
    async def scenario(session: Session) -> None:
        clients = [await session.new_model(str(number)) for number in range(3)]
        with pytest.raises(ValueError, match=r"too many models \(got trainer.lora.max_models=3\). Free a model"):
            await session.new_model("one more")
        queued = [clients[0].forward_backward(DATA["a"], "cross_entropy") for _ in range(3)]
        await asyncio.sleep(0)  # the first one starts
        freed = clients[0].free()
        first, *others = await asyncio.gather(*queued, return_exceptions=True)
        assert isinstance(first, ForwardBackwardOutput)
        assert [str(error) for error in others] == ["model: it has been freed (got '0'). Create another with new_model."] * 2
        await freed
        with pytest.raises(TitanRLError, match="it has been freed"):
            await clients[0].optim_step(ADAM)
        with pytest.raises(TitanRLError, match="it has been freed"):
            clients[0].free()
        clients[0] = await session.new_model("one more")
        await asyncio.gather(*(client.free() for client in clients))
        with pytest.raises(TitanRLError, match="own policy cannot be freed"):
            session.training.free()

    running.do(scenario)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a/b", {}, "name: must be the name of a folder"),
        (7, {}, "name: must be a text"),
        ("a", {"rank": 0}, r"rank: must be an integer >= 1 \(got 0\). Give a rank from 1 to 8"),
        ("a", {"rank": 9}, r"rank: more than that of the trainer's adapters \(got 9\)"),
        ("a", {"alpha": 0.0}, "alpha: must be above 0"),
        ("a", {"alpha": float("nan")}, "alpha: must be a finite number"),
        ("a", {"seed": "x"}, "seed: must be an integer"),
        ("a", {"train_unembed": True}, "train_unembed: the output layer has no adapter"),
        ("a", {"train_attn": False, "train_mlp": False}, "train_attn, train_mlp: nothing to train"),
        ("taken", {}, "there is already a model of this name"),
    ],
)
def test_wrong_models_are_refused(running: Running, name: Any, options: dict[str, Any], message: str) -> None:
    async def scenario(session: Session) -> None:
        taken = await session.new_model("taken")
        with pytest.raises((TypeError, ValueError), match=message):
            await session.new_model(name, **options)
        await taken.free()

    running.do(scenario)


def test_publication_without_generators_is_refused(running: Running) -> None:
    async def scenario(session: Session) -> None:
        client = await session.new_model("a")
        with pytest.raises(TitanRLError, match="publish: this session has no generators"):
            await client.publish()
        await client.free()

    running.do(scenario)
