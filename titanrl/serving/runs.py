"""Runs over HTTP, as their files have them: the page of `titanrl board` with its data, and the metrics of a run for Prometheus.

The data of the board need a key, which the printed address contains. Requests have the key in a header, which a page of another
origin cannot set; a browser would send a cookie to every port of the host.

The metrics have an endpoint in a thread of the controller, which reads the run's files when it is asked. So a run pays nothing
for a step, and the numbers are those of `metrics.jsonl` and `events.jsonl`.
"""

import asyncio
import hmac
import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from titanrl.base.control import Action, SteeringError, steer
from titanrl.base.errors import TitanRLError, describe
from titanrl.carriers.record import FOLDER, HOST, encode
from titanrl.metrics.reading import Filters, Followed, Kind, RunRecord, phase_seconds
from titanrl.metrics.report import compared, page_file
from titanrl.metrics.views import RunView, find_runs
from titanrl.processes.children import stacks_of
from titanrl.processes.machine import process_state
from titanrl.serving.calls import Refused
from titanrl.serving.http import (
    JSON,
    LOCAL,
    Endpoint,
    Headers,
    Receive,
    Response,
    Scope,
    dump,
    listen,
    read_body,
    unless_disconnected,
)

logger = logging.getLogger(__name__)

Explain = Callable[[RunRecord, int, int], Sequence[Mapping[str, Any]]]
"""Returns the segments of a group, from the record of a run, a step and the index of a prompt."""
PAGES = {
    "/": ("board.html", b"text/html"),
    "/board.css": ("board.css", b"text/css"),
    "/board.js": ("board.js", b"text/javascript"),
}
"""Files of the page, by path. They contain no data, so they need no key."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
SETTLE_MS = 500
"""Milliseconds between two looks at the changes that the system reports. Pages hear of them at the second one, so a run that
always writes causes one message per second."""
MAX_NAMES = 500
"""Metrics in one request."""
MAX_COMPARED = 20
"""Runs that are compared at once."""
MAX_BODY_BYTES, BODY_S = 1 << 18, 10.0
"""Longest body of a request, and time limit for it in seconds."""


class Board(Endpoint):
    """The page and its data."""

    def __init__(self, folder: Path, key: str, explain: Explain) -> None:
        """Serve the runs of a folder to who has the key; `explain` returns how the tokens of a group entered the loss."""
        super().__init__(hosts=LOCAL)
        self.folder, self.key, self.explain = folder.resolve(), key, explain
        self._views: dict[str, RunView] = {}
        self._listeners: set[asyncio.Queue[set[str] | None]] = set()
        self._stop = asyncio.Event()

    def close(self) -> None:
        """End the streams of changes."""
        self._stop.set()
        for queue in self._listeners:
            queue.put_nowait(None)

    async def watch(self, warn: Callable[[str], None] = logger.warning) -> None:
        """Report changed runs to the pages, until `close`. If the system cannot report changes, only warn."""
        import watchfiles  # only the board needs it

        try:
            async for changes in watchfiles.awatch(
                self.folder,
                stop_event=self._stop,
                debounce=1,
                step=SETTLE_MS,
                watch_filter=_is_shown,
                ignore_permission_denied=True,
            ):
                known = {view.record.path: name for name, view in self._views.items()}
                folders = map(Path, {os.path.dirname(path) for _, path in changes})
                # The name of a run is empty if no run is known there
                names = {next((known[each] for each in (at, *at.parents) if each in known), "") for at in folders}
                for queue in self._listeners:
                    queue.put_nowait(names)
        except* (OSError, RuntimeError) as errors:  # the limit of watches is reached, or a name below is not UTF-8
            warn(f"changes are not noticed any more, reload the page to see them ({describe(errors.exceptions[0])})")
            await self._stop.wait()

    def authorize(self, key: str) -> bool:
        """Return whether it is the key of this board."""
        return hmac.compare_digest(key.encode("latin-1", "replace"), self.key.encode())

    async def _respond(self, scope: Scope, receive: Receive, response: Response) -> None:
        if scope["method"] == "GET" and scope["path"] in PAGES:
            name, kind = PAGES[scope["path"]]
            await response.send(page_file(name).encode(), [(b"content-type", kind + b"; charset=utf-8"), *HEADERS])
        else:
            await super()._respond(scope, receive, response)

    async def answer(self, scope: Scope, key: str, headers: Headers, receive: Receive, response: Response) -> None:
        """Answer a request for data: JSON in, JSON out."""
        method, path = scope["method"], scope["path"]
        origin = headers.get(b"origin", b"http://" + headers[b"host"])
        if origin != b"http://" + headers[b"host"]:
            raise Refused(f"origin: must be that of the board (got {origin[:80].decode('latin-1')!r})", status=403)
        if path == "/api/changes":
            await unless_disconnected(self._stream(response), receive)
            return
        name = path.removeprefix("/api/")
        if name not in ROUTES and name not in REQUESTS:
            raise Refused(f"path: must be /api/ and one of {', '.join([*ROUTES, *REQUESTS])} (got {path[:200]!r})", status=404)
        if method != "POST":
            raise Refused(f"method: must be POST (got {method[:20]!r})", status=405)
        body = await read_body(headers, receive, limit=MAX_BODY_BYTES, limit_s=BODY_S)
        try:
            asked = Asked.model_validate_json(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise Refused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", status=400) from error
        if name in REQUESTS:
            text = encode(await REQUESTS[name](self, asked))
        else:
            text = await asyncio.to_thread(lambda: encode(ROUTES[name](self, asked)))
        await response.send(text.encode(), [(b"content-type", JSON), *HEADERS])

    async def _stream(self, response: Response) -> None:
        """Send the names of runs whose files have changed, until the board closes."""
        queue: asyncio.Queue[set[str] | None] = asyncio.Queue()
        self._listeners.add(queue)
        try:
            await response.start_stream([(b"content-type", b"text/event-stream"), *HEADERS])
            await response.send_part(b": open\n\n")
            while (names := await queue.get()) is not None:
                await response.send_part(f"data: {dump({'runs': sorted(names)})}\n\n".encode())
            await response.send_part(b"", is_last=True)
        finally:
            self._listeners.discard(queue)

    def view(self, name: str | None) -> RunView:
        """Return the view of a run; raise `Refused` if there is none."""
        if name not in self._views:
            self.find()
        view = self._views.get(name or "")
        if view is None:
            raise Refused(f"run: there is no run {name!r} in {self.folder}. It may have been deleted.", status=404)
        return view

    def find(self) -> list[RunView]:
        """Return the views of all runs in the folder."""
        found = find_runs(self.folder)
        self._views = {name: self._views.get(name) or RunView(path, name) for name, path in found.items()}
        return list(self._views.values())


class Asked(BaseModel):
    """The body of a request. Each route uses some of the fields."""

    model_config = ConfigDict(extra="forbid")

    run: str | list[str] = ""
    name: list[str] = Field(default=[], max_length=MAX_NAMES)
    since: str = ""
    kind: Kind = "rollouts"
    text: str = Field(default="", max_length=1000)
    order: Literal["newest", "oldest", ""] = "newest"
    at: NonNegativeInt = 0
    index: int | None = None
    version: int | None = None
    set: str | None = None
    steps: int = Field(default=3, ge=1, le=100)
    step: int | None = None
    action: Action = "status"
    values: dict[str, Any] = {}
    status: str | None = None
    outcome: str | None = None
    environment: str | None = None
    task: str | None = None
    part: str | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    part_from: float | None = None
    part_to: float | None = None
    version_from: float | None = None
    version_to: float | None = None
    step_from: float | None = None
    step_to: float | None = None

    def filters(self) -> Filters:
        """Return the conditions of a search."""
        given = self.model_dump(exclude_none=True)
        filters: dict[str, Any] = {
            name: given[name] for name in ("set", "status", "outcome", "environment", "task") if given.get(name)
        }
        for name in ("reward", "version", "step"):
            limits = given.get(f"{name}_from"), given.get(f"{name}_to")
            if limits != (None, None):
                filters[name] = limits
        if self.part and (self.part_from, self.part_to) != (None, None):
            filters["parts"] = {self.part: (self.part_from, self.part_to)}
        return cast(Filters, filters)


def _view(board: Board, asked: Asked) -> RunView:
    return board.view(asked.run if isinstance(asked.run, str) else None)


def _group(board: Board, asked: Asked) -> Any:
    filters: Filters = {} if asked.version is None else {"version": (asked.version, asked.version)}
    if asked.set is not None:
        filters["set"] = asked.set
    return _view(board, asked).group(asked.index or 0, filters, asked.kind)


def _compare(board: Board, asked: Asked) -> Any:
    names = [asked.run] if isinstance(asked.run, str) else asked.run
    try:
        return compared([board.view(name) for name in names[:MAX_COMPARED]])
    except TitanRLError as error:
        raise Refused(str(error), status=400) from error


async def _steer(board: Board, asked: Asked) -> Any:
    """Send a request to a run; see `titanrl.base.control.steer`."""
    try:
        return await steer(_view(board, asked).record.path, asked.action, asked.values)
    except SteeringError as error:
        raise Refused(str(error), status=409) from error


async def _stacks(board: Board, asked: Asked) -> Any:
    """Return the stacks of the processes of a run on this host."""
    try:
        return {"text": await stacks_of(_view(board, asked).record.path)}
    except TitanRLError as error:
        raise Refused(str(error), status=409) from error


def _explain(board: Board, asked: Asked) -> Any:
    try:
        return {"segments": board.explain(_view(board, asked).record, asked.step or 0, asked.index or 0)}
    except TitanRLError as error:
        raise Refused(str(error), status=400) from error


ROUTES: Mapping[str, Callable[[Board, Asked], Any]] = {
    "runs": lambda board, asked: {"folder": str(board.folder), "runs": [view.summary() for view in board.find()]},
    "run": lambda board, asked: _view(board, asked).overview(),
    "charts": lambda board, asked: _view(board, asked).charts(asked.name, since=asked.since),
    "search": lambda board, asked: _view(board, asked).search(
        asked.text, kind=asked.kind, order=asked.order or "newest", at=asked.at, **asked.filters()
    ),
    "group": _group,
    "evaluations": lambda board, asked: _view(board, asked).evaluations(asked.set),
    "answers": lambda board, asked: _view(board, asked).answers(asked.set or "", asked.index or 0),
    "timeline": lambda board, asked: _view(board, asked).timeline(asked.steps, asked.step),
    "events": lambda board, asked: _view(board, asked).recent_events(),
    "config": lambda board, asked: _view(board, asked).configuration(),
    "compare": _compare,
    "explain": _explain,
}
"""Functions that read files to answer a request, by path below `/api/`."""
REQUESTS: Mapping[str, Callable[[Board, Asked], Awaitable[Any]]] = {"steer": _steer, "stacks": _stacks}
"""Functions that ask other processes to answer a request."""


def _is_shown(change: object, path: str) -> bool:
    """Return whether a page shows a file; checkpoints and logs change often, and are not shown."""
    folder, name = os.path.split(path)
    return folder.endswith(f"/{FOLDER}") or os.path.splitext(name)[1] in (".jsonl", ".yaml", "")


FAULTS = ("fault", "host_lost", "respawn", "restart", "stall")
"""Events that are counted from 0, so that an alert sees the first one."""
START_S = 30.0
"""Time limit for the start and for the end of the endpoint of metrics, in seconds."""
_HEAD = frozenset({"step", "version", "time"})
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class RunMetrics(Collector):
    """Reads the files of a run, and returns its metrics."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._rows, self._events = Followed(run_dir / "metrics.jsonl"), Followed(run_dir / "events.jsonl")
        self._newest: dict[str, float] = {}  # by name
        self._head: dict[str, float] = {}
        self._seconds: dict[str, float] = defaultdict(float)  # by phase
        self._num_steps = 0
        self._num_events: Counter[str] = Counter()  # by kind
        self._num_dropped: Counter[str] = Counter()  # groups by reason

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of the files as they are now."""
        self._read()
        run = self._run_dir.name

        def family(of: _Family, name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
            """Return a metric with a value for each value of a label, or without one with the only value."""
            found = of(f"titanrl_{name}", text, labels=["run"] if label is None else ["run", label])
            for key, value in sorted(values.items()):
                found.add_metric([run] if label is None else [run, key], value)
            return found

        gauge, counter = partial(family, GaugeMetricFamily), partial(family, CounterMetricFamily)
        for name, text in (
            ("step", "Newest step."),
            ("version", "Policy version of the newest step."),
            ("step_timestamp_seconds", "End of the newest step, in Unix seconds."),
        ):
            if name in self._head:
                yield gauge(name, text, {"": self._head[name]})
        yield counter("steps", "Steps taken since the run began.", {"": self._num_steps})
        counts = {name.removeprefix("count/"): value for name, value in self._newest.items() if name.startswith("count/")}
        metrics = {name: value for name, value in self._newest.items() if not name.startswith("count/")}
        yield gauge("metric", "Newest value of a metric of metrics.jsonl.", metrics, "name")
        yield counter("count", "Prompts, rollouts and tokens since the run began.", counts, "name")
        yield counter("phase_seconds", "Time of the controller by phase.", self._seconds, "phase")
        yield counter("events", "Events of events.jsonl.", dict.fromkeys(FAULTS, 0) | self._num_events, "kind")
        yield counter("dropped_groups", "Groups that no batch used.", self._num_dropped, "reason")
        alive = {}
        for file in (self._run_dir / "logs").glob("*.pid"):
            pid, _, host = file.read_text().partition(" ")
            if host == HOST and pid.isdecimal():
                alive[file.stem] = float(process_state(int(pid)) not in ("", "Z", "X"))
        yield gauge("process_up", "1 for each process of the run on this host that is alive, else 0.", alive, "process")

    def _read(self) -> None:
        for row in self._rows.objects(self._forget_rows):
            values = {name: float(value) for name, value in row.items() if name not in _HEAD and isinstance(value, int | float)}
            self._newest |= values
            if "time/step_s" in values:
                self._num_steps += 1
                self._head = {name: float(row.get(name, 0)) for name in ("step", "version")}
                self._head["step_timestamp_seconds"] = float(row.get("time", 0))
                for phase, seconds in phase_seconds(values).items():
                    self._seconds[phase] += seconds
        for event in self._events.objects(self._forget_events):
            self._num_events[str(event.get("kind"))] += 1
            if event.get("kind") == "drop" and isinstance(groups := event.get("groups"), int):
                self._num_dropped[str(event.get("reason"))] += groups

    def _forget_rows(self) -> None:
        self._newest, self._head, self._num_steps = {}, {}, 0
        self._seconds.clear()

    def _forget_events(self) -> None:
        self._num_events.clear()
        self._num_dropped.clear()


class MetricsEndpoint(Endpoint):
    """Answers `/metrics` and `/health`."""

    def __init__(self, run_dir: Path, host: str) -> None:
        """Serve the metrics of a run. On loopback, requests must be addressed to this machine, as those of Prometheus are."""
        super().__init__(hosts={*LOCAL, host} if host in LOCAL else None)
        self.registry.register(RunMetrics(run_dir))

    def label(self, path: str) -> str | None:
        """Count requests of metrics."""
        return path if path == "/metrics" else None

    def authorize(self, key: str) -> bool:
        """Return True: metrics are numbers, without prompts or completions."""
        return True

    async def answer(self, scope: Scope, key: str, headers: Headers, receive: Receive, response: Any) -> None:
        """Refuse other paths."""
        raise Refused("not found. This endpoint has /metrics and /health.", status=404)


class MetricsServer:
    """The endpoint of a run, in a thread with an event loop of its own."""

    def __init__(self, run_dir: Path, host: str, port: int) -> None:
        """Start listening; raise `TitanRLError` if the port cannot be used."""
        self.url = ""
        self._error: OSError | None = None
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(run_dir, host, port), name="metrics", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_S) or self._error is not None:
            raise TitanRLError(
                f"logging.metrics_port: cannot listen on {host} port {port}: {self._error}. Choose another port."
            )

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_S)

    def _run(self, run_dir: Path, host: str, port: int) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve(run_dir, host, port))

    async def _serve(self, run_dir: Path, host: str, port: int) -> None:
        try:
            listener = await listen(MetricsEndpoint(run_dir, host), (host, port))
            self.url = listener.url
        except OSError as error:
            self._error = error
            return
        finally:
            self._ready.set()
        await self._stop.wait()
        await listener.close()
