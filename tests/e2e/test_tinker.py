"""`titanrl serve --tinker` with the real stack and the official client: losses, resuming, sampling, and a killed server."""

import asyncio
import concurrent.futures
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from examples.agents.byte_model import create_byte_model
from tests.docs.blocks import ROOT, blocks_of
from tests.e2e.conftest import SMALL, serving
from titanrl.config.sections import RecipeConfig

NAME = "tiny/bytes"
KEY = "tml-0123456789abcdef"
SETTINGS = ("data.max_prompt_tokens=96", "rollout.max_new_tokens=32", "trainer.row_tokens=128")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tinker") / "model"
    create_byte_model(folder, RecipeConfig(), seed=3)
    return folder


@pytest.fixture(autouse=True)
def tinker() -> Any:
    return pytest.importorskip("tinker")


def arrays(seed: int, *, is_policy: bool) -> list[dict[str, Any]]:
    """Return the tokens and inputs of some data."""
    rng = np.random.default_rng(seed)
    found = list[dict[str, Any]]()
    for length in (5, 17, 40):
        tokens = rng.integers(8, 200, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if is_policy:
            inputs["logprobs"] = rng.normal(-5.5, 0.1, length).astype(np.float32)
            inputs["advantages"] = rng.normal(0, 0.01, length).astype(np.float32)
        else:
            inputs["weights"] = rng.random(length, np.float32)
        found.append({"tokens": tokens[:-1], "inputs": inputs})
    return found


STEPS = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {"clip_low_threshold": 0.9}),
    ("cispo", {}),
    ("dro", {"beta": 0.1}),
]


def client_curve(tinker: Any, client: Any, steps: "list[tuple[str, dict[str, float]]]", first: int) -> list[float]:
    """Return the losses of some steps with the official client."""
    losses = []
    for index, (loss_fn, config) in enumerate(steps, first):
        data = [
            tinker.types.Datum(
                model_input=tinker.types.ModelInput.from_ints(each["tokens"].tolist()), loss_fn_inputs=each["inputs"]
            )
            for each in arrays(index, is_policy=loss_fn != "cross_entropy")
        ]
        passed = client.forward_backward(data, loss_fn, config or None)
        update = client.optim_step(tinker.types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        losses.append(passed.result().metrics["loss:sum"])
        assert update.result().metrics["skipped"] == 0.0
    return losses


async def session_curve(model: Path, folder: Path) -> list[float]:
    """Return the losses of the same steps with a session."""
    from titanrl import AdamParams, Datum, connect, load_config

    settings = [*SETTINGS, f"model.path={model}", "warm_start=null", f"output_dir={folder}", "logging.console=plain"]
    losses = []
    async with connect(load_config("quickstart", settings), sampling=False) as session:
        for index, (loss_fn, config) in enumerate(STEPS):
            data = [
                Datum(model_input=each["tokens"], loss_fn_inputs=each["inputs"])
                for each in arrays(index, is_policy=loss_fn != "cross_entropy")
            ]
            passed = session.training.forward_backward(data, loss_fn, config)
            update = session.training.optim_step(AdamParams(learning_rate=1e-3, max_grad_norm=1.0))
            losses.append((await passed).metrics["loss:sum"])
            await update
    return losses


def test_client_trains_like_the_session_and_survives_a_kill(tinker: Any, model: Path, tmp_path: Path) -> None:
    types, checkpoints = tinker.types, tmp_path / "checkpoints"
    prompt = types.ModelInput.from_ints([10, 20, 30])
    with serving(model, "--tinker", "--checkpoints", str(checkpoints), "--name", NAME, *SETTINGS) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        base = service.create_sampling_client(base_model=NAME)
        before = base.compute_logprobs(prompt).result()
        with pytest.raises(tinker.RequestFailedError, match=r"trains all weights \(got 32\). Create the client with rank=0"):
            service.create_lora_training_client(base_model=NAME).result()
        client = service.create_lora_training_client(base_model=NAME, rank=0).result()
        assert client.get_tokenizer().encode("a b") == [client.get_tokenizer().encode(each)[0] for each in "a b"]
        losses = client_curve(tinker, client, STEPS[:2], 0)
        saved = client.save_state("two").result().path
        with pytest.raises(tinker.RequestFailedError, match="requires logprobs"):
            client.forward_backward([simple(types)], "ppo").result()
        with pytest.raises(tinker.RequestFailedError, match="clip_lower"):
            client.forward_backward([policy(types)], "ppo", {"clip_lower": 0.9}).result()
        with pytest.raises(tinker.RequestFailedError, match="does not fit a row"):
            client.forward_backward([simple(types, 200)], "cross_entropy").result()
        rest = client_curve(tinker, client, STEPS[2:], 2)  # the failed requests have left nothing
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=12, seed=7)
        reply = sampler.sample(prompt, 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=4).result()
        assert len({tuple(each.tokens) for each in reply.sequences}) == 3
        again = sampler.sample(prompt, 3, params).result()
        assert [list(each.tokens) for each in again.sequences] == [list(each.tokens) for each in reply.sequences]
        first = reply.sequences[0]
        whole = [10, 20, 30, *first.tokens]
        trained = client.forward(
            [
                types.Datum(
                    model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs={"target_tokens": np.array(whole[1:])}
                )
            ],
            "cross_entropy",
        ).result()
        logprobs = trained.loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(logprobs, [*reply.prompt_logprobs[1:], *first.logprobs], atol=1e-5)
        assert reply.topk_prompt_logprobs[0] is None
        top = np.array(reply.topk_prompt_logprobs[1:])  # [S, K, 2]
        likely = types.Datum(
            model_input=types.ModelInput.from_ints([10, 20]), loss_fn_inputs={"target_tokens": top[:, :, 0].astype(np.int64)}
        )
        likely_logprobs = client.forward([likely], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(likely_logprobs, top[:, :, 1], atol=1e-5)
        assert (np.diff(top[:, :, 1]) <= 0).all()
        with pytest.raises(tinker.RequestFailedError, match="replaced by a later save"):
            base.compute_logprobs(prompt).result()
        with pytest.raises(tinker.RequestFailedError, match="one model at a time"):
            service.create_lora_training_client(base_model=NAME, rank=0).result()
        named = client.save_weights_for_sampler("best").result().path
        descendants = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        server.process.wait(10)
        psutil.wait_procs(descendants, timeout=30)
    assert sorted(path.name for path in checkpoints.glob("*/*/*/*.json")) == ["best.json", "two.json"]
    with serving(model, "--tinker", "--checkpoints", str(checkpoints), "--name", NAME, *SETTINGS) as server:
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        np.testing.assert_allclose(
            service.create_sampling_client(base_model=NAME).compute_logprobs(prompt).result()[1:], before[1:], atol=1e-6
        )
        restored = service.create_sampling_client(model_path=named)
        same = restored.sample(prompt, 3, params).result()
        assert [list(each.tokens) for each in same.sequences] == [list(each.tokens) for each in reply.sequences]
        resumed = service.create_training_client_from_state_with_optimizer(saved).result()
        assert client_curve(tinker, resumed, STEPS[2:], 2) == rest
    assert [*losses, *rest] == pytest.approx(asyncio.run(session_curve(model, tmp_path)), rel=1e-6)


def simple(types: Any, length: int = 2) -> Any:
    inputs = {"target_tokens": np.arange(10, 10 + length) % 200, "weights": np.ones(length, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints([10] * length), loss_fn_inputs=inputs)


def policy(types: Any) -> Any:
    ones = np.ones(2, np.float32)
    inputs = {"target_tokens": np.array([10, 11]), "logprobs": -ones, "advantages": ones}
    return types.Datum(model_input=types.ModelInput.from_ints([10, 11]), loss_fn_inputs=inputs)


@pytest.mark.slow
def test_documented_example_trains(tinker: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks_of(ROOT / "docs/howto/tinker.md") if block.language == "python")
    with serving("quickstart", "--tinker", "--checkpoints", str(tmp_path / "checkpoints"), *SMALL) as server:
        code = block.text.replace("http://127.0.0.1:8000", server.url)
        exec(compile(code, str(block), "exec"), {})
    *steps, path = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]
    assert path.endswith("/weights/three-steps")


def test_two_users_train_and_sample_adapters_at_once(tinker: Any, model: Path, tmp_path: Path) -> None:
    types, keys = tinker.types, tmp_path / "keys"
    users = {KEY: 1, "tml-fedcba9876543210": 2}
    keys.write_text("\n".join(users))
    keys.chmod(0o600)
    prompt, params = types.ModelInput.from_ints([10, 20, 30]), types.SamplingParams(max_tokens=8, seed=7)
    adapters = ("trainer.lora.rank=8", "weights.held_adapters=2", "--keys", str(keys))
    with serving(
        model, "--tinker", "--checkpoints", str(tmp_path / "checkpoints"), "--name", NAME, *SETTINGS, *adapters
    ) as server:

        def train(key: str) -> tuple[list[float], Any, list[Any]]:
            """Return losses, the sampler of the trained adapter, and its tokens and log-probabilities."""
            service = tinker.ServiceClient(base_url=server.url, api_key=key)
            client = service.create_lora_training_client(base_model=NAME, rank=4 * users[key], seed=users[key]).result()
            losses = client_curve(tinker, client, STEPS[:3], users[key])
            sampler = client.save_weights_and_get_sampling_client().result()
            return losses, sampler, drawn(sampler)

        def drawn(sampler: Any) -> list[Any]:
            reply = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
            return [(list(each.tokens), list(each.logprobs)) for each in reply.sequences] + [list(reply.prompt_logprobs[1:])]

        alone = {key: train(key) for key in users}
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            together = dict(zip(users, threads.map(train, users), strict=True))
        for key in users:
            assert together[key][0] == alone[key][0]
            same_draws(together[key][2], alone[key][2])
            same_draws(drawn(alone[key][1]), alone[key][2])  # after later saves, and dropped by the generators in between
        assert alone[KEY][0] != together["tml-fedcba9876543210"][0]
        service = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        with pytest.raises(tinker.RequestFailedError, match="rank"):
            service.create_lora_training_client(base_model=NAME, rank=16).result()
        with pytest.raises(tinker.RequestFailedError, match=r"trains adapters \(got 0\)"):
            service.create_lora_training_client(base_model=NAME, rank=0).result()
        base = service.create_sampling_client(base_model=NAME).result()
        expected = [drawn(base), alone[KEY][2]]
        assert expected[0][0] != expected[1][0]

        def drawn_by_another(number: int) -> list[Any]:
            return drawn(alone[KEY][1] if number % 2 else service.create_sampling_client(base_model=NAME).result())

        with concurrent.futures.ThreadPoolExecutor(40) as threads:
            for number, draws in enumerate(threads.map(drawn_by_another, range(40))):
                same_draws(draws, expected[number % 2])


def same_draws(found: list[Any], expected: list[Any]) -> None:
    """Check that tokens are the same, and log-probabilities nearly."""
    assert [each[0] for each in found[:-1]] == [each[0] for each in expected[:-1]]
    for (_, logprobs), (_, others) in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_allclose(logprobs, others, atol=1e-5)
    np.testing.assert_allclose(found[-1], expected[-1], atol=1e-5)
