"""Tinker's endpoint with the official client, over models that are numbers."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.serving.servers import Server, until
from tests.serving.servers import serving as serving_app
from tests.serving.tinker_hosts import NumberHost
from titanrl.serving import tinker_wire as wire
from titanrl.serving.tinker import Tinker, Users
from titanrl.serving.tinker_sessions import Checkpoints, TinkerLimits

tinker = pytest.importorskip("tinker")
types = tinker.types
ANN, BOB = "tml-" + "a" * 20, "tml-" + "b" * 20


@dataclass
class Running:
    """An endpoint for Ann and Bob."""

    server: Server
    host: NumberHost

    def client(self, key: str = ANN) -> Any:
        return tinker.ServiceClient(base_url=self.server.url, api_key=key)

    def http(self, key: str = ANN) -> httpx.Client:
        return httpx.Client(base_url=f"{self.server.url}/api/v1", headers={"x-api-key": key}, timeout=60, verify=False)

    def result(self, http: httpx.Client, submitted: httpx.Response) -> Any:
        """Return the JSON result of a request."""
        reply = http.post("/retrieve_future", json={"request_id": submitted.json()["request_id"]})
        return reply.json()


@contextmanager
def serving(app: Tinker, at: tuple[str, int] = ("127.0.0.1", 0)) -> Iterator[Server]:
    with serving_app(app, at) as server:
        yield server
        server.run(app.close())


def start(folder: Path, limits: TinkerLimits | None = None, host: NumberHost | None = None) -> Tinker:
    root = folder / "root"
    root.mkdir(exist_ok=True)
    return Tinker(host or NumberHost(folder / "new"), Checkpoints(root), Users([ANN, BOB]), limits)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    host = NumberHost(tmp_path / "new")
    with serving(start(tmp_path, host=host)) as server:
        yield Running(server, host)


def datum(tokens: list[int], targets: Any, **inputs: Any) -> Any:
    arrays = {"target_tokens": np.asarray(targets), **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=arrays)


PLAIN = {"tokens": [1, 2], "targets": [2, 3]}


def step(client: Any, rate: float = 0.1) -> float:
    """Train one step; return the loss before it."""
    passed = client.forward_backward([datum(**PLAIN)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=rate)).result()
    loss: float = passed.result().metrics["loss:sum"]
    return loss


def test_client_trains_saves_and_continues_exactly(running: Running) -> None:
    service = running.client()
    (model,) = service.create_rest_client().get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == ("base/number", 64)
    client = service.create_lora_training_client(base_model="base/number", rank=0, user_metadata={"renderer": "r"}).result()
    info = client.get_info()
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == ("base/number", False, None)
    losses = [step(client) for _ in range(3)]
    assert losses == pytest.approx([0.05, -0.35, -0.95])
    saved = client.save_state("mid").result().path
    assert saved == f"tinker://{info.model_id}/weights/mid"
    expected = [step(client) for _ in range(2)]
    again = service.create_training_client_from_state_with_optimizer(saved).result()
    assert [step(again) for _ in range(2)] == expected
    reset = service.create_training_client_from_state(saved).result()
    assert step(reset) == expected[0]
    assert step(reset) != expected[1]  # without momentum
    rest = service.create_rest_client()
    found = rest.get_training_run(info.model_id).result()
    assert (found.user_metadata, found.last_sampler_checkpoint) == ({"renderer": "r"}, None)
    assert found.last_checkpoint.tinker_path == saved
    assert [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints] == [saved]
    assert rest.get_weights_info_by_tinker_path(saved).result().base_model == "base/number"
    rest.set_checkpoint_ttl_from_tinker_path(saved, 3600).result()
    (checkpoint,) = rest.list_checkpoints(info.model_id).result().checkpoints
    assert checkpoint.expires_at is not None
    rest.delete_checkpoint_from_tinker_path(saved).result()
    assert rest.list_checkpoints(info.model_id).result().checkpoints == []


def test_runs_and_sessions_are_listed(running: Running) -> None:
    service = running.client()
    model_id = service.create_lora_training_client(base_model="base/number", rank=0).result().get_info().model_id
    rest = service.create_rest_client()
    assert [run.training_run_id for run in rest.list_training_runs().result().training_runs] == [model_id]
    (session_id,) = rest.list_sessions().result().sessions
    assert rest.get_session(session_id).result().training_run_ids == [model_id]
    other = service.create_lora_training_client(base_model="base/number", rank=0).result().get_info().model_id
    pages = [rest.list_training_runs(limit=1, offset=offset).result() for offset in range(3)]
    assert [[run.training_run_id for run in page.training_runs] for page in pages] == [[other], [model_id], []]
    assert (pages[1].cursor.offset, pages[1].cursor.limit, pages[1].cursor.total_count) == (1, 1, 2)
    assert rest.list_sessions(offset=1).result().sessions == []
    with pytest.raises(tinker.BadRequestError, match="offset: must be an integer"):
        rest.list_user_checkpoints(offset=-1).result()
    with running.http() as http:
        assert http.get("/healthz").json() == {"status": "ok"}
        assert http.post("/telemetry", json={"events": []}).json() == {"status": "accepted"}


def test_forward_and_custom_losses_have_the_same_gradient(running: Running) -> None:
    client = running.client().create_lora_training_client(base_model="base/number", rank=0).result()
    found = client.forward([datum(**PLAIN)], "cross_entropy").result()
    assert found.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx([-0.02, -0.03])

    def loss(data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {"mine": 2.0}

    output = client.forward_backward_custom([datum(**PLAIN)], loss).result()
    assert output.metrics["mine"] == 2.0
    update = client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert update.metrics["grad_norm"] == 2.0
    assert running.host.models[0].value == pytest.approx(0.2)


def test_skipped_step_is_in_the_reply_and_in_the_log(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    client = running.client().create_lora_training_client(base_model="base/number", rank=0).result()
    client.forward_backward([datum(**PLAIN)], "cross_entropy").result()
    running.host.models[0].gradient = math.inf
    metrics = client.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics
    assert (metrics["skipped"], metrics["version"]) == (1.0, 0.0)
    assert "optimizer step skipped, because its gradient norm is inf" in caplog.text


def test_several_targets_per_token(running: Running) -> None:
    client = running.client().create_lora_training_client(base_model="base/number", rank=0).result()
    targets, weights = [[1, 2], [3, 4]], np.array([[0.5, 0.5], [1.0, 0.0]], np.float32)
    output = client.forward_backward([datum([1, 2], targets, weights=weights)], "cross_entropy").result()
    assert output.loss_fn_outputs[0]["logprobs"].shape == [2, 2]
    assert output.loss_fn_outputs[0]["logprobs"].to_numpy() == pytest.approx(-np.array(targets) / 100)
    assert output.metrics["loss:sum"] == pytest.approx(0.5 * 0.01 + 0.5 * 0.02 + 0.03)


def test_large_batch_is_split_and_accumulates(running: Running) -> None:
    client = running.client().create_lora_training_client(base_model="base/number", rank=0).result()
    output = client.forward_backward([datum(**PLAIN)] * 2500, "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(0.05 * 2500, rel=1e-6)
    assert len(output.loss_fn_outputs) == 2500
    assert client.optim_step(types.AdamParams(learning_rate=0.1)).result().metrics["grad_norm"] == 5000
    assert running.host.calls == ["forward_backward 1024", "forward_backward 1024", "forward_backward 452", "optim_step"]


def test_failed_request_fails_alone(running: Running) -> None:
    client = running.client().create_lora_training_client(base_model="base/number", rank=0).result()
    passes = [
        client.forward_backward([datum(**PLAIN)], "cross_entropy"),
        client.forward_backward([datum(**PLAIN)], "stable_reinforce"),
        client.forward_backward([datum([13, 2], [2, 3])], "cross_entropy"),
    ]
    update = client.optim_step(types.AdamParams(learning_rate=0.1))
    assert passes[0].result().metrics["loss:sum"] == pytest.approx(0.05)
    with pytest.raises(tinker.RequestFailedError, match="Use importance_sampling") as raised:
        passes[1].result()
    assert raised.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match=r"internal error \(RuntimeError\)") as raised:
        passes[2].result()
    assert "secret" not in str(raised.value)
    assert update.result().metrics["grad_norm"] == 2.0  # of the first pass
    assert step(client) == pytest.approx(-0.35)


def test_saved_samplers_keep_their_weights(running: Running) -> None:
    service = running.client()
    client = service.create_lora_training_client(base_model="base/number", rank=0).result()
    step(client)
    first = client.save_weights_and_get_sampling_client()
    path = client.save_weights_for_sampler("named").result().path
    inflight = client.save_weights_and_get_sampling_client(kind="inflight")
    step(client)
    client.save_weights_and_get_sampling_client(kind="inflight")
    named, base = service.create_sampling_client(model_path=path), service.create_sampling_client(base_model="base/number")
    params = types.SamplingParams(max_tokens=3, seed=5, temperature=0.5)
    for sampler, value in ((first, 0.2), (named, 0.2), (base, 0.0), (inflight, 0.5)):
        wanted = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
        reply = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params, **wanted).result()
        assert [list(each.tokens) for each in reply.sequences] == [[5, 6, 7], [6, 7, 8]]
        assert reply.sequences[0].logprobs == pytest.approx([value - 0.05, value - 0.06, value - 0.07])
        assert reply.sequences[0].stop_reason == "length"
        assert reply.prompt_logprobs[0] is None
        assert reply.prompt_logprobs[1] == pytest.approx(value - 0.02)
        unknown, likely = reply.topk_prompt_logprobs
        assert unknown is None
        assert likely == [(0, pytest.approx(value)), (1, pytest.approx(value - 0.01))]
    assert named.compute_logprobs(types.ModelInput.from_ints([1, 2])).result()[1] == pytest.approx(0.18)
    assert service.create_sampling_client(model_path=path).get_base_model() == "base/number"
    with pytest.raises(tinker.RequestFailedError, match="at most 64 tokens"):
        first.sample(types.ModelInput.from_ints([1] * 64), 1, params).result()


def test_user_cannot_reach_what_another_has(running: Running) -> None:
    ann, bob = running.client(), running.client(BOB)
    client = ann.create_lora_training_client(base_model="base/number", rank=0).result()
    path, sampled = client.save_state("a").result().path, client.save_weights_for_sampler("b").result().path
    model_id = client.get_info().model_id
    for attempt in (
        lambda: bob.create_training_client_from_state(path).result(),
        lambda: bob.create_sampling_client(model_path=sampled).sample(prompt_of([1]), 1, types.SamplingParams()).result(),
        lambda: bob.create_rest_client().get_training_run(model_id).result(),
        lambda: bob.create_rest_client().delete_checkpoint_from_tinker_path(path).result(),
    ):
        with pytest.raises((tinker.TinkerError, ValueError), match="you have no such"):
            attempt()
    assert bob.create_rest_client().list_user_checkpoints().result().checkpoints == []
    with running.http() as own, running.http(BOB) as other:
        submitted = own.post("/optim_step", json={"model_id": model_id, "seq_id": 3, "adam_params": {}})
        request_id = submitted.json()["request_id"]
        session_id = model_id.partition(":")[0]
        for route, body in (
            ("optim_step", {"model_id": model_id, "seq_id": 4}),
            ("get_info", {"model_id": model_id}),
            ("retrieve_future", {"request_id": request_id}),
            ("create_model", {"session_id": session_id, "model_seq_id": 9, "base_model": "base/number"}),
            (f"sessions/{session_id}/finish", {}),
        ):
            reply = other.post(f"/{route}", json=body)
            assert reply.status_code == 404, (route, reply.text)
        assert other.post("/session_heartbeat", json={"session_id": session_id}).status_code == 410
        assert own.post("/retrieve_future", json={"request_id": request_id}).status_code == 200
        wrong = httpx.post(f"{running.server.url}/api/v1/create_session", json={}, headers={"x-api-key": "tml-" + "c" * 20})
        assert wrong.status_code == 401


def prompt_of(tokens: list[int]) -> Any:
    return types.ModelInput.from_ints(tokens)


def new_model(http: httpx.Client) -> str:
    """Create a model without the client; return its id."""
    session_id = http.post("/create_session", json={}).json()["session_id"]
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "base/number", "lora_config": {"rank": 0}}
    submitted = http.post("/create_model", json=body).json()
    assert http.post("/create_model", json=body).json() == submitted  # repeated
    created = http.post("/retrieve_future", json={"request_id": submitted["request_id"]}).json()
    assert created == {"model_id": f"{session_id}:train:0", "type": "create_model"}
    return str(created["model_id"])


def test_repeated_and_disordered_requests_run_once_in_order(running: Running) -> None:
    with running.http() as http:
        model_id = new_model(http)
        bodies = {seq: {"model_id": model_id, "seq_id": seq, "adam_params": {"learning_rate": seq / 10}} for seq in (1, 2, 3)}
        sent = {seq: http.post("/optim_step", json=bodies[seq]).json() for seq in (3, 2, 3)}
        assert http.post("/optim_step", json=bodies[3]).json() == sent[3]
        assert running.host.calls == []
        sent[1] = http.post("/optim_step", json=bodies[1]).json()
        for seq in (1, 2, 3):
            for _ in range(2):
                reply = http.post("/retrieve_future", json={"request_id": sent[seq]["request_id"]}).json()
                assert reply["metrics"]["version"] == seq
        assert running.host.calls == ["optim_step"] * 3
        assert http.post("/optim_step", json=bodies[1]).json() == sent[1]
        other = running.result(http, http.post("/optim_step", json={**bodies[1], "adam_params": {}}))
        assert (other["category"], "has already been used" in other["error"]) == ("user", True)
        far = running.result(http, http.post("/optim_step", json={**bodies[1], "seq_id": 10**9}))
        assert "must be at most" in far["error"]


def test_missing_request_is_shown_and_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host, limits = NumberHost(tmp_path / "new"), TinkerLimits(gap_s=0.3)
    with serving(start(tmp_path, limits, host)) as server, Running(server, host).http() as http:
        model_id = new_model(http)
        submitted = http.post("/optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {}})
        assert "metrics" in Running(server, host).result(http, submitted)
        assert f"{model_id}: request 1 has not arrived" in caplog.text
        late = http.post("/optim_step", json={"model_id": model_id, "seq_id": 1, "adam_params": {}})
        assert "has already been used" in Running(server, host).result(http, late)["error"]


def test_hostile_bodies_are_refused_without_traceback(running: Running) -> None:
    protobuf = {"content-type": "application/x-protobuf"}
    with running.http() as http:
        model_id = new_model(http)
        rng = np.random.default_rng(0)
        valid = wire.schema().ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="cross_entropy")
        valid.data.add().model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
        bodies = [b"", b"\xff" * 100, rng.bytes(10_000), valid.SerializeToString()[:-3]]
        for body in bodies:
            reply = http.post("/forward_backward", content=body, headers=protobuf)
            assert reply.status_code == 400, reply.text
            assert "Traceback" not in reply.text
        assert http.post("/forward_backward", json={}).status_code == 415
        assert http.post("/forward_backward", content=bytes(65 << 20), headers=protobuf).status_code == 413
        assert http.post("/asample", content=b"[" * 100_000, headers={"content-type": "application/json"}).status_code == 400
        assert http.post("/asample", json={"prompt": "x" * (9 << 20)}).status_code == 413
        for body in ("1", "[]", '{"session_id": 1}', '{"session_id": NaN}'):
            reply = http.post("/create_model", content=body, headers={"content-type": "application/json"})
            assert reply.status_code == 400
        session_id = model_id.partition(":")[0]
        body = {"session_id": session_id, "model_seq_id": 1, "base_model": "base/number"}
        no_flag = http.post("/create_model", json=body | {"lora_config": {"rank": 0, "train_attn": "no"}})
        assert "train_attn: must be true or false" in running.result(http, no_flag)["error"]
        assert http.post("/save_weights_external", json={}).json()["error"].startswith("path: checkpoints stay")
        for reply, needed in ((http.get("/create_model"), "POST"), (http.post("/training_runs"), "GET")):
            assert (reply.status_code, reply.headers["allow"]) == (405, needed)
        assert http.post("/nothing", json={}).status_code == 404
        parsed = http.post("/forward_backward", content=valid.SerializeToString(), headers=protobuf)
        assert "requires target_tokens" in running.result(http, parsed)["error"]  # through the future
        step_2 = http.post("/optim_step", json={"model_id": model_id, "seq_id": 2, "adam_params": {"beta1": 7}})
        assert "beta1" in running.result(http, step_2)["error"]
        unknown = http.post("/optim_step", json={"model_id": model_id, "seq_id": 3, "adam_params": {"momentum": 1}})
        assert "momentum" in running.result(http, unknown)["error"]
        assert "metrics" in running.result(http, http.post("/optim_step", json={"model_id": model_id, "seq_id": 4}))


def test_compressed_pass_is_bounded(running: Running) -> None:
    zstandard = pytest.importorskip("zstandard")
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    with running.http() as http:
        message = wire.schema().ForwardBackwardRequest(model_id=new_model(http), seq_id=1, loss_fn="cross_entropy")
        data = message.data.add()
        data.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
        tensor = data.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = np.array([2, 3]).tobytes(), 2
        body = zstandard.compress(message.SerializeToString())
        submitted = http.post("/forward_backward", content=body, headers=headers).json()
        reply = http.post("/retrieve_future", json={"request_id": submitted["request_id"]})
        assert reply.headers["content-type"] == "application/x-protobuf"
        bomb = zstandard.compress(bytes(1 << 30))
        assert len(bomb) < 1 << 20
        assert http.post("/forward_backward", content=bomb, headers=headers).status_code == 413
        assert http.post("/forward_backward", content=b"no", headers=headers).status_code == 400
        headers["content-encoding"] = "gzip"
        assert http.post("/forward_backward", content=b"no", headers=headers).status_code == 415


def test_vanished_client_frees_what_it_held(tmp_path: Path) -> None:
    host = NumberHost(tmp_path / "new", max_models=1)
    app = start(tmp_path, TinkerLimits(idle_s=0.5), host)
    with serving(app) as server, Running(server, host).http() as http:
        model_id = new_model(http)
        for seq in (1, 5):  # the second waits for others, which never come
            body = {"model_id": model_id, "seq_id": seq, "sampling_session_seq_id": seq}
            http.post("/save_weights_for_sampler", json=body)
        until(lambda: not host.models and host.num_samplers == 0)
        reply = http.post("/optim_step", json={"model_id": model_id, "seq_id": 2})
        assert reply.status_code == 404
        assert "session has ended" in reply.json()["error"]
        assert server.app.registry.get_sample_value("titanrl_tinker", {"kind": "bytes"}) == 0
        new_model(http)


def test_second_model_fails_through_its_future(tmp_path: Path) -> None:
    host = NumberHost(tmp_path / "new", max_models=1)
    with serving(start(tmp_path, TinkerLimits(silent_s=12), host)) as server:  # the client sends a sign of life every 10 s
        running = Running(server, host)
        service = running.client()
        first = service.create_lora_training_client(base_model="base/number", rank=0).result()
        second = running.client(BOB).create_lora_training_client(base_model="base/number", rank=0)
        step(first)  # a sign of life, for which the refusal waits
        with pytest.raises(tinker.RequestFailedError, match="1 models at a time"):
            second.result()
        with pytest.raises(tinker.RequestFailedError, match="must be base/number"):
            service.create_lora_training_client(base_model="other/model", rank=0).result()
        step(first)


def test_model_of_an_exited_client_makes_room(tmp_path: Path) -> None:
    host = NumberHost(tmp_path / "new", max_models=1)
    with serving(start(tmp_path, TinkerLimits(silent_s=0.3), host)) as server, Running(server, host).http() as http:
        first = new_model(http)
        second = new_model(http)
        assert len(host.models) == 1
        assert http.post("/get_info", json={"model_id": first}).status_code == 404
        assert http.post("/get_info", json={"model_id": second}).status_code == 200


def test_limits_of_sampling_are_status_429(tmp_path: Path) -> None:
    host = NumberHost(tmp_path / "new")
    limits = TinkerLimits(max_samples=5, max_samples_per_user=4, max_sessions=2)
    with serving(start(tmp_path, limits, host)) as server, Running(server, host).http() as http:
        server.run(pause(host))
        session_id = http.post("/create_session", json={}).json()["session_id"]
        asked = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "base/number"}
        sampler = http.post("/create_sampling_session", json=asked).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
        submitted = http.post("/asample", json={**body, "seq_id": 0, "num_samples": 3})
        assert http.post("/asample", json={**body, "seq_id": 0, "num_samples": 3}).json() == submitted.json()
        until(lambda: host.num_samples == 1)
        assert http.post("/asample", json={**body, "seq_id": 1, "num_samples": 2}).status_code == 429
        too_many = http.post("/asample", json={**body, "seq_id": 2, "num_samples": 5})
        assert "num_samples" in Running(server, host).result(http, too_many)["error"]
        assert http.post("/cancel_future", json={"request_id": submitted.json()["request_id"]}).status_code == 204
        assert "cancelled" in Running(server, host).result(http, submitted)["error"]
        assert host.calls == ["cancelled"]
        http.post("/create_session", json={})
        assert http.post("/create_session", json={}).status_code == 429


def test_silent_session_makes_room(tmp_path: Path) -> None:
    limits = TinkerLimits(max_sessions=1, silent_s=0.5)
    with serving(start(tmp_path, limits)) as server, Running(server, NumberHost(tmp_path)).http() as http:
        assert http.post("/create_session", json={}).status_code == 200
        assert http.post("/create_session", json={}).status_code == 429
        until(lambda: http.post("/create_session", json={}).status_code == 200)


async def pause(host: NumberHost) -> None:
    host.pause = asyncio.Event()


def test_training_does_not_wait_for_requests_of_replaced_weights(running: Running) -> None:
    client = running.client().create_lora_training_client(base_model="base/number", rank=0).result()
    running.server.run(pause(running.host))
    sampler = client.save_weights_and_get_sampling_client(kind="inflight").result()
    reply = sampler.sample(prompt_of([1]), 1, types.SamplingParams(max_tokens=1))
    until(lambda: running.host.num_samples == 1)
    client.save_weights_and_get_sampling_client(kind="inflight").result(timeout=60)
    step(client)
    assert (running.host.num_samplers, running.host.pause is not None) == (2, True)
    running.server.loop.call_soon_threadsafe(running.host.pause.set)
    reply.result(timeout=60)
    until(lambda: running.host.num_samplers == 1)


def test_two_hundred_samplers_at_once(running: Running) -> None:
    service = running.client()
    client = service.create_lora_training_client(base_model="base/number", rank=0).result()
    step(client)
    samplers = [client.save_weights_and_get_sampling_client() for _ in range(200)]
    futures = [each.sample(prompt_of([1]), 1, types.SamplingParams(max_tokens=2, seed=3)) for each in samplers]
    assert {tuple(each.result(timeout=60).sequences[0].tokens) for each in futures} == {(3, 4)}
    assert running.host.num_samplers == 200


def test_checkpoints_survive_a_restart_and_clients_get_a_clear_error(tmp_path: Path) -> None:
    with serving(start(tmp_path)) as server:
        client = (
            Running(server, NumberHost(tmp_path))
            .client()
            .create_lora_training_client(base_model="base/number", rank=0)
            .result()
        )
        step(client)
        path, sampled = client.save_state("a").result().path, client.save_weights_for_sampler("b").result().path
        expected, port = step(client), server.port
    with serving(start(tmp_path), ("127.0.0.1", port)) as server:
        with pytest.raises((tinker.TinkerError, ValueError), match="the server was restarted"):
            client.optim_step(types.AdamParams()).result()
        service = Running(server, NumberHost(tmp_path)).client()
        assert step(service.create_training_client_from_state_with_optimizer(path).result()) == expected
        reply = service.create_sampling_client(model_path=sampled).sample(prompt_of([1]), 1, types.SamplingParams(max_tokens=1))
        assert reply.result().sequences[0].logprobs == pytest.approx([0.2])


def test_metrics_name_routes_without_ids(running: Running) -> None:
    running.client().create_lora_training_client(base_model="base/number", rank=0).result()
    text = running.http().get(f"{running.server.url}/metrics").text
    assert 'titanrl_requests_total{path="/api/v1/create_model",status="200"} 1.0' in text
    assert 'titanrl_tinker{kind="models"} 1.0' in text
    assert httpx.get(f"{running.server.url}/health").json() == {"status": "ok"}


def test_finished_session_leaves_nothing(running: Running) -> None:
    with running.client() as service:
        step(service.create_lora_training_client(base_model="base/number", rank=0).result())
    until(lambda: not running.host.models)
    sizes = {
        kind: running.server.app.registry.get_sample_value("titanrl_tinker", {"kind": kind}) for kind in ("sessions", "bytes")
    }
    assert sizes == {"sessions": 0, "bytes": 0}
