"""Threads of the controller that send metrics to Prometheus, and spans and metrics to OpenTelemetry, while a run works."""

from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.base.errors import TitanRLError
from titanrl.config.sections import LoggingConfig
from titanrl.metrics.console import Console

if TYPE_CHECKING:
    from titanrl.metrics import otlp
    from titanrl.serving import run_metrics


class Telemetry:
    """The threads of the controller that read the files of a run for other systems. Without keys for them, there are none."""

    def __init__(self, logging: LoggingConfig, run_dir: Path, console: Console, *, since: float) -> None:
        """Start the threads that the configuration asks for. Spans from before a time are of an earlier process of the run.

        Raises:
            TitanRLError: The port of the metrics cannot be used, or the file of OpenTelemetry.
        """
        self._server: run_metrics.MetricsServer | None = None
        if logging.metrics_port is not None:
            from titanrl.serving.run_metrics import MetricsServer  # imports uvicorn, which other runs do not need

            self._server = MetricsServer(run_dir, logging.metrics_host, logging.metrics_port)
            console.note(f"metrics for Prometheus: {self._server.url}/metrics")
        self._exporter: otlp.Exporter | None = None
        if logging.otlp_endpoint is not None:
            from titanrl.metrics.otlp import Exporter, open_sink  # needs packages of an extra

            try:
                sink = open_sink(logging.otlp_endpoint)
            except OSError as error:
                raise TitanRLError(f"logging.otlp_endpoint: cannot be written ({error}). Name another file.") from error
            self._exporter = Exporter(run_dir, sink, since=since, warn=console.warn)

    def flush(self) -> None:
        """Send what is recorded, when the other processes have ended, and stop serving."""
        if self._server is not None:
            self._server.close()
        if self._exporter is not None:
            self._exporter.flush()

    def close(self) -> None:
        """Send the last spans of this process, and end the threads. A second call does nothing."""
        if self._exporter is not None:
            self._exporter.close()
