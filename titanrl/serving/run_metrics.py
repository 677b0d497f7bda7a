"""The metrics of a run for Prometheus: an endpoint in a thread of the controller, which reads the run's files when it is asked.

So a run pays nothing for a step, and the numbers are those of `metrics.jsonl` and `events.jsonl`.
"""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from titanrl.base.errors import TitanRLError
from titanrl.carriers.record import HOST
from titanrl.metrics.reading import Followed, phase_seconds
from titanrl.processes.machine import process_state
from titanrl.serving.calls import Refused
from titanrl.serving.http import LOCAL, Endpoint, Headers, Receive, listen

FAULTS = ("fault", "host_lost", "respawn", "restart", "stall")
"""Events that are counted from 0, so that an alert sees the first one."""

START_S = 30.0
"""Time limit for the start and for the end of the endpoint, in seconds."""
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
        yield gauge("process_up", "1 for each process of the run on this host that is alive, else 0.", self._alive(), "process")

    def _read(self) -> None:
        for row in self._rows.objects(self._forget_rows):
            self._add(row)
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

    def _add(self, row: Mapping[str, Any]) -> None:
        values = {name: float(value) for name, value in row.items() if name not in _HEAD and isinstance(value, int | float)}
        self._newest |= values
        if "time/step_s" in values:
            self._num_steps += 1
            self._head = {name: float(row.get(name, 0)) for name in ("step", "version")}
            self._head["step_timestamp_seconds"] = float(row.get("time", 0))
            for phase, seconds in phase_seconds(values).items():
                self._seconds[phase] += seconds

    def _alive(self) -> dict[str, float]:
        """Return 1 for each process on this host that is alive, else 0."""
        alive = {}
        for file in (self._run_dir / "logs").glob("*.pid"):
            pid, _, host = file.read_text().partition(" ")
            if host == HOST and pid.isdecimal():
                alive[file.stem] = float(process_state(int(pid)) not in ("", "Z", "X"))
        return alive


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

    async def answer(self, method: str, path: str, key: str, headers: Headers, receive: Receive, response: Any) -> None:
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
