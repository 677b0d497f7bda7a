"""The HTTP endpoint of training: Tinker's REST API, as its official client speaks it, over a host of models.

Requests of one model run in the order of their sequence ids, those of different models side by side. A request answers with a
future, which the client polls; a failed request fails through its future, and alone. Everything belongs to the user whose key
created it: for others it does not exist.
"""

import hashlib
import logging
import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qsl

import prometheus_client as prometheus

from titanrl.serving import tinker_wire as wire
from titanrl.serving.calls import Fields, Refused, load_json, wrong
from titanrl.serving.http import JSON, Endpoint, Headers, Receive, Response, Scope, dump, read_body, unless_disconnected
from titanrl.serving.tinker_sessions import (
    Answer,
    Checkpoints,
    Host,
    ModelSpec,
    NewModel,
    OpenModel,
    Run,
    Sessions,
    TinkerLimits,
    Weights,
    failure,
    json_answer,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
HOLD_S = 30.0
"""Time that a poll waits for a result, in seconds. The client gives up after 45 s."""


class Users:
    """Users by key. A user is the digest of the key, which stays the same when the server restarts."""

    def __init__(self, keys: Collection[str] | None) -> None:
        """Accept some keys; None accepts any, and makes everyone the same user."""
        self._users = None if keys is None else {self._user(key) for key in keys}

    def find(self, key: str) -> str | None:
        """Return the user of a key; None if there is none."""
        if self._users is None:
            return "local"
        user = self._user(key)
        return user if user in self._users else None

    def _user(self, key: str) -> str:
        return hashlib.sha256(f"titanrl:tinker:{key}".encode("utf-8", "surrogatepass")).hexdigest()[:24]


class Tinker(Endpoint):
    """The endpoint for training."""

    def __init__(
        self,
        host: Host,
        checkpoints: Checkpoints,
        users: Users,
        limits: TinkerLimits | None = None,
        *,
        check: Callable[[], str] = str,
        hosts: Collection[str] | None = None,
    ) -> None:
        """Serve the models of a host; see `Endpoint` for the other arguments."""
        super().__init__(check=check, hosts=hosts)
        self._host, self._checkpoints, self._users, self._limits = host, checkpoints, users, limits or TinkerLimits()
        sessions = self._sessions = Sessions(host, checkpoints, self._limits)
        gauge = prometheus.Gauge("titanrl_tinker", "Objects and memory of clients.", ("kind",), registry=self.registry)
        gauge.labels("sessions").set_function(lambda: len(sessions.open))
        gauge.labels("models").set_function(lambda: sum(len(each.models) for each in sessions.open.values()))
        gauge.labels("futures").set_function(lambda: len(sessions.futures))
        gauge.labels("bytes").set_function(lambda: sessions.futures.num_bytes)
        gauge.labels("samples").set_function(sessions.num_samples.total)

    async def close(self) -> None:
        """End all sessions, and wait until what they hold is free."""
        await self._sessions.close()

    def label(self, path: str) -> str | None:
        """Return the route of a path, without ids."""
        return next((name for _, name, _ in ROUTES if re.fullmatch(name, path)), None)

    def authorize(self, key: str) -> bool:
        """Return whether the key has a user."""
        return self._users.find(key) is not None

    async def answer(self, scope: Scope, key: str, headers: Headers, receive: Receive, response: Response) -> None:
        """Answer a request of the client."""
        method, path = scope["method"], scope["path"]
        owner = self._users.find(key)
        assert owner is not None, "the key was checked"
        found = [(verb, match, handle) for verb, name, handle in ROUTES if (match := re.fullmatch(name, path))]
        if not found:
            why = next((text for name, text in UNSUPPORTED if re.fullmatch(name, path)), "is no route of this server")
            raise Refused(f"path: {why} (got {path[:200]!r})", status=404)
        match, handle = next(((match, handle) for verb, match, handle in found if verb == method), (None, None))
        if match is None or handle is None:
            refused, needed = Refused(f"method: must be {found[0][0]} (got {method[:20]!r})"), found[0][0].encode()
            await response.send_json(response.error(refused), 405, (b"allow", needed))
            return
        limits, is_pass = self._limits, path == "/api/v1/forward_backward"
        body = b""
        if method in ("POST", "PUT"):
            kinds = (wire.PROTOBUF,) if is_pass else (JSON,)
            limit = limits.max_pass_bytes if is_pass else limits.max_json_bytes
            body = await read_body(headers, receive, limit=limit, limit_s=limits.body_s, kinds=kinds)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        request = _Request(owner, match.groups(), query, body, headers, receive, response)
        result = await handle(self, request)
        if result is not None:
            await response.send_json(result)
        elif not response.has_started:
            await response.send(b"", [], status=204)

    # Sessions

    async def create_session(self, request: "_Request") -> object:
        """Open a session."""
        fields = request.fields
        metadata, display_name = _metadata(fields), fields.text("display_name")
        fields.skip("tags", "sdk_version", "project_id")
        fields.done()
        session = self._sessions.add(request.owner, metadata, display_name)
        return {"type": "create_session", "session_id": session.session_id, "info_message": self._host.notice or None}

    async def heartbeat(self, request: "_Request") -> object:
        """Note that the client of a session is alive."""
        self._sessions.session(request.fields.needed("session_id"), request.owner, status=410)
        return {"type": "session_heartbeat"}

    async def finish(self, request: "_Request") -> None:
        """End a session."""
        self._sessions.end(self._sessions.session(request.ids[0], request.owner))

    async def list_sessions(self, request: "_Request") -> object:
        """Return the open sessions of the user."""
        found = [each.session_id for each in self._sessions.open.values() if each.owner == request.owner]
        return {"sessions": request.page(found)[0]}

    async def get_session(self, request: "_Request") -> object:
        """Return what a session holds."""
        session = self._sessions.session(request.ids[0], request.owner)
        samplers = [each.sampler_id for each in session.samplings.values()]
        held = {"training_run_ids": list(session.models), "sampler_ids": samplers}
        return held | {"user_metadata": dict(session.user_metadata), "display_name": session.display_name}

    # Models

    async def create_model(self, request: "_Request") -> object:
        """Create a model to train."""
        fields = request.fields
        session = self._sessions.session(fields.needed("session_id"), request.owner)
        number = _needed_count(fields, "model_seq_id")

        def read() -> NewModel:
            self._check_base(fields.needed("base_model"))
            _check_optimizer(fields)
            lora = fields.nested("lora_config") or Fields({}, "lora_config")
            spec = ModelSpec(
                rank=_needed_count(lora, "rank"),
                seed=lora.count("seed", 0, 2**63 - 1),
                train_attn=lora.flag("train_attn", True),
                train_mlp=lora.flag("train_mlp", True),
            )
            lora.skip("train_unembed")  # `Host.notice` says so
            lora.done()
            metadata = _metadata(fields)
            fields.done()
            return NewModel(spec=spec, user_metadata=metadata)

        future = self._sessions.create(session, number, len(request.body), read, {"type": "create_model"})
        return {"request_id": future.request_id}

    async def load_weights(self, request: "_Request") -> object:
        """Load a checkpoint: into a new model, or into one that exists."""
        fields = request.fields
        if (model_id := fields.text("model_id")) is not None:
            return self._submit(request, model_id, _needed_count(fields, "seq_id"), lambda model: self._load(model, fields))
        session = self._sessions.session(fields.needed("session_id"), request.owner)
        number = _needed_count(fields, "model_seq_id")
        reply = {"type": "load_weights"}

        def read() -> NewModel:
            run_path = fields.needed("path")
            run, _, state = self._checkpoints.find(run_path, request.owner, "weights")
            if (base := fields.text("base_model")) is not None:
                self._check_base(base)
            self._check_base(run.base_model)
            _check_optimizer(fields)
            with_optimizer, metadata = fields.flag("optimizer"), _metadata(fields)
            fields.only("weights_access_token")
            fields.done()
            reply["path"] = run_path
            metadata = metadata or dict(run.user_metadata)
            return NewModel(spec=run.spec, user_metadata=metadata, state=state, with_optimizer=with_optimizer)

        return {"request_id": self._sessions.create(session, number, len(request.body), read, reply).request_id}

    async def get_info(self, request: "_Request") -> object:
        """Return what a client must know about a model."""
        model = self._sessions.model(request.fields.needed("model_id"), request.owner)
        model.live()
        data = {"model_name": self._host.base_model, "tokenizer_id": self._host.tokenizer_id}
        is_lora = model.run.spec.rank > 0
        info = {"type": "get_info", "model_id": model.model_id, "model_data": data, "model_name": self._host.base_model}
        return info | {"is_lora": is_lora, "lora_rank": model.run.spec.rank if is_lora else None}

    def _check_base(self, base_model: str) -> None:
        if base_model != self._host.base_model:
            raise wrong("base_model", f"must be {self._host.base_model}, the model of this server", base_model)

    def _submit(
        self,
        request: "_Request",
        model_id: str,
        seq_id: int,
        action: Callable[[OpenModel], Awaitable[Answer]],
        digest: bytes = b"",
    ) -> object:
        model = self._sessions.model(model_id, request.owner)
        future = self._sessions.submit(model, seq_id, len(request.body), digest or wire.digest(request.body), action)
        return {"request_id": future.request_id, "model_id": model_id}

    # Requests of a model

    async def forward_backward(self, request: "_Request") -> object:
        """Queue a pass."""
        body = request.body
        if (encoding := request.headers.get(b"content-encoding", b"")) == b"zstd":
            body = _decompressed(body, self._limits.max_pass_bytes)
        elif encoding:
            raise Refused(f"content-encoding: must be zstd (got {encoding[:40].decode('latin-1')!r})", status=415)
        try:
            message = wire.read_pass(body)
        except wire.Malformed as error:
            raise Refused(str(error)) from None
        request = replace(request, body=body)

        async def run(model: OpenModel) -> Answer:
            handle, asked = model.live(), wire.pass_of(message, self._host.vocab_size)
            output = await handle.run(asked.data, asked.loss_fn, asked.options, backward=asked.backward)
            return Answer(wire.pass_result(asked, output), wire.PROTOBUF)

        digest = wire.digest(message.SerializeToString(deterministic=True))  # a repeated body may be compressed otherwise
        return self._submit(request, message.model_id, message.seq_id, run, digest)

    async def optim_step(self, request: "_Request") -> object:
        """Queue an optimizer step."""
        fields = request.fields

        async def step(model: OpenModel) -> Answer:
            update = await model.live().optim_step(wire.read_adam(fields))
            if update.skipped:  # the reply has it, too, but the official client prints nothing
                logger.warning("%s: optimizer step skipped, because its gradient norm is %s", model.model_id, update.grad_norm)
            metrics = {
                "grad_norm": update.grad_norm,
                "version": update.version,
                "skipped": update.skipped,
                "empty": update.is_empty,
            }
            return json_answer({"metrics": {name: float(value) for name, value in metrics.items() if math.isfinite(value)}})

        return self._submit(request, fields.needed("model_id"), _needed_count(fields, "seq_id"), step)

    async def save_weights(self, request: "_Request") -> object:
        """Queue a save of weights and optimizer state."""
        fields = request.fields
        model_id, seq_id = fields.needed("model_id"), _needed_count(fields, "seq_id")

        async def save(model: OpenModel) -> Answer:
            name, handle = fields.text("path") or f"{seq_id:06d}", model.live()
            overwrite, ttl_s, metadata = fields.flag("overwrite"), _ttl(fields), _metadata(fields)
            fields.done()
            self._checkpoints.check_name(model_id, "weights", name, may_exist=overwrite)
            state = await handle.save()
            saved = await self._checkpoints.add(model_id, "weights", name, state, ttl_s=ttl_s, user_metadata=metadata)
            return json_answer({"path": saved.path, "type": "save_weights"})

        return self._submit(request, model_id, seq_id, save)

    async def save_weights_for_sampler(self, request: "_Request") -> object:
        """Queue a save of weights to sample from: on disk under a name, or only in the generators."""
        fields = request.fields
        model_id, seq_id = fields.needed("model_id"), _needed_count(fields, "seq_id")

        async def save(model: OpenModel) -> Answer:
            name, number = fields.text("path"), fields.count("sampling_session_seq_id", 0, 2**62)
            kind, ttl_s, metadata = fields.text("kind", "snapshot", "inflight"), _ttl(fields), _metadata(fields)
            fields.done()
            handle = model.live()
            if name is None and number is None:
                raise wrong("path", "is required, unless there is a sampling_session_seq_id", None)
            if name is not None:
                self._checkpoints.check_name(model_id, "sampler_weights", name)
                state = await handle.save()
                saved = await self._checkpoints.add(
                    model_id, "sampler_weights", name, state, ttl_s=ttl_s, user_metadata=metadata
                )
                _, _, state = self._checkpoints.find(saved.path, request.owner)
                self._sessions.loaded[saved.path] = Weights.of(await handle.publish(state))
                return json_answer({"path": saved.path, "type": "save_weights_for_sampler"})
            assert number is not None
            sampler = await handle.publish()
            if number in model.session.samplings:
                await sampler.release()
                raise wrong("sampling_session_seq_id", "must not have been used", number)
            weights = Weights.of(sampler)
            if kind == "inflight" and model.following is not None:  # its samplers follow, too
                model.following.exchange(weights)
                self._sessions.free(model.session, weights)
                weights = model.following
            elif kind == "inflight":
                model.following = weights
            opened = self._sessions.add_sampler(model.session, number, None, weights)
            return json_answer({"sampling_session_id": opened.sampler_id, "type": "save_weights_for_sampler"})

        return self._submit(request, model_id, seq_id, save)

    async def _load(self, model: OpenModel, fields: Fields) -> Answer:
        path, with_optimizer = fields.needed("path"), fields.flag("optimizer")
        fields.only("weights_access_token")
        fields.skip("optimizer_config")
        fields.done()
        run, _, state = self._checkpoints.find(path, model.session.owner, "weights")
        if run.spec.rank != model.run.spec.rank:
            raise wrong("path", f"must be of a model of rank {model.run.spec.rank}", f"{path} of rank {run.spec.rank}")
        await model.live().load(state, with_optimizer=with_optimizer)
        return json_answer({"path": path, "model_id": model.model_id, "type": "load_weights"})

    # Sampling

    async def create_sampling_session(self, request: "_Request") -> object:
        """Open a sampling session of the base model, or of saved weights."""
        fields = request.fields
        session = self._sessions.session(fields.needed("session_id"), request.owner)
        number = _needed_count(fields, "sampling_session_seq_id")
        path, base = fields.text("model_path"), fields.text("base_model")
        fields.done()
        if base is not None:
            self._check_base(base)
        if path is None:
            weights = Weights(self._host.base)
        else:
            run, _, state = self._checkpoints.find(path, request.owner, "sampler_weights")
            saved = Weights(partial(self._host.open_sampler, run.spec, state))
            weights = self._sessions.loaded.setdefault(path, saved)
        return {"sampling_session_id": self._sessions.add_sampler(session, number, path, weights).sampler_id}

    async def get_sampler(self, request: "_Request") -> object:
        """Return the model of a sampling session."""
        sampling = self._sessions.sampler(request.ids[0], request.owner)
        return {"sampler_id": sampling.sampler_id, "base_model": self._host.base_model, "model_path": sampling.path}

    async def sample(self, request: "_Request") -> object:
        """Start a request for completions."""
        fields, limits, owner = request.fields, self._limits, request.owner
        sampling = self._sessions.sampler(fields.needed("sampling_session_id"), owner)
        seq_id = _needed_count(fields, "seq_id")
        if seq_id in sampling.seen:
            future, names = sampling.seen[seq_id]
            return {"request_id": future.request_id, "sample_sequence_ids": names}
        try:
            fields.only("base_model")
            fields.only("model_path")
            host = self._host
            asked = wire.read_sample(fields, host.vocab_size, limits.max_samples_per_user, host.max_tokens)
        except (Refused, wire.Malformed) as error:
            future = self._sessions.futures.open(owner, sampling.session.session_id, len(request.body))
            self._sessions.futures.resolve(future, failure(error))
            return {"request_id": future.request_id}

        async def run() -> Answer:
            weights = sampling.weights  # a save can replace them between the two calls
            completions = await (await weights.sampler()).sample(asked)
            logprobs = top = None
            if asked.prompt_logprobs or asked.num_top:
                logprobs, top = await (await weights.sampler()).logprobs(asked.prompt, asked.num_top)
            return Answer(wire.sample_result(completions, logprobs if asked.prompt_logprobs else None, top), wire.PROTOBUF)

        future, names = self._sessions.sample(sampling, seq_id, len(request.body), asked.num_samples, run)
        return {"request_id": future.request_id, "sample_sequence_ids": names}

    # Futures

    async def retrieve_future(self, request: "_Request") -> None:
        """Send the result of a request as soon as there is one, or status 408 after a while."""
        fields, response = request.fields, request.response
        future = self._sessions.futures.find(fields.needed("request_id"), request.owner)
        answer = await unless_disconnected(future.wait(HOLD_S), request.receive)
        if answer is None:
            await response.send_json({"queue_state": "active"}, 408)
        else:
            await response.send(answer.body, [(b"content-type", answer.kind)])
            self._sessions.futures.read(future)

    async def cancel_future(self, request: "_Request") -> None:
        """Cancel a request for completions; other requests run to their end."""
        future = self._sessions.futures.find(request.fields.needed("request_id"), request.owner)
        self._sessions.cancel(future)

    # Facts about the server, and what is on disk

    async def config(self, request: "_Request") -> object:
        """Return the settings of the client."""
        return {"sample_max_concurrent_requests": min(256, self._limits.max_samples_per_user)}

    async def dynamic_config(self, request: "_Request") -> object:
        """Return the settings that the client asks for again and again."""
        return {"sample_cancel_enabled": True}

    async def capabilities(self, request: "_Request") -> object:
        """Return the models that can be trained."""
        model = {"model_name": self._host.base_model, "max_context_length": self._host.max_tokens}
        return {"supported_models": [model | {"trainable": True, "sampleable": True}]}

    async def healthz(self, request: "_Request") -> object:
        """Return whether the endpoint answers; `/health` also checks the policy."""
        return {"status": "ok"}

    async def telemetry(self, request: "_Request") -> object:
        """Accept telemetry of the client, and drop it."""
        return {"status": "accepted"}

    async def list_runs(self, request: "_Request") -> object:
        """Return the models of the user."""
        runs, cursor = request.page(self._checkpoints.runs(request.owner))
        return {"training_runs": [self._run(run) for run in runs], "cursor": cursor}

    async def get_run(self, request: "_Request") -> object:
        """Return a model of the user."""
        return self._run(self._checkpoints.run(request.ids[0], request.owner))

    def _run(self, run: Run) -> dict[str, object]:
        """Return a model with its newest checkpoint of each type."""
        newest = {each.kind: each.wire() for each in reversed(self._checkpoints.all_of(run.owner, run.model_id))}
        own = {"last_checkpoint": newest.get("weights"), "last_sampler_checkpoint": newest.get("sampler_weights")}
        return run.wire() | own

    async def list_checkpoints(self, request: "_Request") -> object:
        """Return the checkpoints of the user, or of one model."""
        found, cursor = request.page(self._checkpoints.all_of(request.owner, *request.ids))
        return {"checkpoints": [each.wire() for each in found], "cursor": cursor}

    async def delete_checkpoint(self, request: "_Request") -> None:
        """Delete a checkpoint."""
        self._checkpoints.delete(f"tinker://{request.ids[0]}/{request.ids[1]}", request.owner)

    async def set_ttl(self, request: "_Request") -> None:
        """Let a checkpoint expire."""
        ttl_s = _ttl(request.fields)
        self._checkpoints.set_ttl(f"tinker://{request.ids[0]}/{request.ids[1]}", request.owner, ttl_s)

    async def weights_info(self, request: "_Request") -> object:
        """Return the model of a checkpoint."""
        run, _, _ = self._checkpoints.find(request.fields.needed("tinker_path"), request.owner)
        spec = run.spec
        info = {"base_model": run.base_model, "is_lora": spec.rank > 0, "lora_rank": spec.rank or None}
        return info | {"train_unembed": False, "train_mlp": spec.train_mlp, "train_attn": spec.train_attn}


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of the client."""

    owner: str
    ids: tuple[str, ...]
    """Parts of the path that differ."""
    query: Mapping[str, str]
    body: bytes
    headers: Headers
    receive: Receive
    response: Response

    @property
    def fields(self) -> Fields:
        """Read the body as JSON; an empty one has no fields. The name of the request, which some have, repeats the path."""
        fields = load_json(self.body or b"{}")
        fields.skip("type")
        return fields

    def page(self, found: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
        """Return the part of a list that the query asks for, by default all of it, and its cursor."""
        cursor = {"offset": 0, "limit": len(found)}
        for name in cursor.keys() & self.query.keys():
            if not re.fullmatch("[0-9]{1,9}", self.query[name]):
                raise wrong(name, "must be an integer from 0 to 999999999", self.query[name])
            cursor[name] = int(self.query[name])
        page = found[cursor["offset"] : cursor["offset"] + cursor["limit"]]
        return page, cursor | {"total_count": len(found)}


_ID = r"([A-Za-z0-9_:.-]{1,160})"
_CHECKPOINT = rf"/api/v1/training_runs/{_ID}/checkpoints/([a-z_]+/[A-Za-z0-9._-]{{1,128}})"
Handler = Callable[[Tinker, _Request], Awaitable[object]]
ROUTES: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/api/v1/client/config", Tinker.config),
    ("POST", "/api/v1/client/dynamic_config", Tinker.dynamic_config),
    ("POST", "/api/v1/create_session", Tinker.create_session),
    ("POST", "/api/v1/session_heartbeat", Tinker.heartbeat),
    ("POST", "/api/v1/telemetry", Tinker.telemetry),
    ("POST", rf"/api/v1/sessions/{_ID}/finish", Tinker.finish),
    ("GET", "/api/v1/sessions", Tinker.list_sessions),
    ("GET", rf"/api/v1/sessions/{_ID}", Tinker.get_session),
    ("GET", "/api/v1/get_server_capabilities", Tinker.capabilities),
    ("GET", "/api/v1/healthz", Tinker.healthz),
    ("POST", "/api/v1/create_model", Tinker.create_model),
    ("POST", "/api/v1/get_info", Tinker.get_info),
    ("POST", "/api/v1/forward_backward", Tinker.forward_backward),
    ("POST", "/api/v1/optim_step", Tinker.optim_step),
    ("POST", "/api/v1/save_weights", Tinker.save_weights),
    ("POST", "/api/v1/save_weights_for_sampler", Tinker.save_weights_for_sampler),
    ("POST", "/api/v1/load_weights", Tinker.load_weights),
    ("POST", "/api/v1/create_sampling_session", Tinker.create_sampling_session),
    ("GET", rf"/api/v1/samplers/{_ID}", Tinker.get_sampler),
    ("POST", "/api/v1/asample", Tinker.sample),
    ("POST", "/api/v1/retrieve_future", Tinker.retrieve_future),
    ("POST", "/api/v1/cancel_future", Tinker.cancel_future),
    ("GET", "/api/v1/training_runs", Tinker.list_runs),
    ("GET", rf"/api/v1/training_runs/{_ID}", Tinker.get_run),
    ("GET", rf"/api/v1/training_runs/{_ID}/checkpoints", Tinker.list_checkpoints),
    ("DELETE", _CHECKPOINT, Tinker.delete_checkpoint),
    ("PUT", rf"{_CHECKPOINT}/ttl", Tinker.set_ttl),
    ("GET", "/api/v1/checkpoints", Tinker.list_checkpoints),
    ("POST", "/api/v1/weights_info", Tinker.weights_info),
)
"""Method, path and handler of each route."""
UNSUPPORTED = (
    (rf"{_CHECKPOINT}/publish", "checkpoints are private here, and cannot be published"),
    (r"/api/v1/(save_weights_external|copy_weights)", "checkpoints stay on this machine"),
    (
        r"/api/v1/(retrieve_futures|join_sampling_session|create_custom_loss|auth/token)",
        "the settings of the client turn it off",
    ),
    (r"/v1/.*", "a server for Tinker does not complete texts; start another without --tinker"),
)
"""Routes of Tinker that are refused, and why."""


def _needed_count(fields: Fields, key: str) -> int:
    value = fields.count(key, 0, 2**63 - 1)
    if value is None:
        raise wrong(fields.name(key), "is required: an integer", value)
    return value


def _metadata(fields: Fields) -> dict[str, str]:
    """Return the user's notes on something: texts by name."""
    found = fields.nested("user_metadata")
    values = {} if found is None else found.rest()
    if not all(isinstance(value, str) for value in values.values()) or len(dump(values)) > 16_384:
        raise wrong("user_metadata", "must be texts by name, at most 16 KiB in all", values)
    return values


def _ttl(fields: Fields) -> int | None:
    return fields.count("ttl_seconds", 1, 10 * 366 * 86_400)


def _check_optimizer(fields: Fields) -> None:
    optimizer = fields.nested("optimizer_config")
    if optimizer is not None:
        optimizer.only("type", "adamw")
        optimizer.done()


def _decompressed(body: bytes, limit: int) -> bytes:
    """Return a body compressed with zstd; raise `Refused` if it is malformed or too long."""
    import zstandard  # a requirement of the package `tinker`

    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body) as reader:
            found: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise Refused(f"body: is not compressed with zstd ({str(error)[:80]})") from None
    if len(found) > limit:
        raise Refused(f"body: must have at most {limit} bytes when decompressed. Send less.", status=413)
    return found
