"""Threads of the controller that send metrics to Prometheus, and spans and metrics to OpenTelemetry, while a run works."""

from pathlib import Path
from typing import TYPE_CHECKING

from titanrl.config.sections import LoggingConfig
from titanrl.metrics.console import Console

if TYPE_CHECKING:
    from titanrl.serving import run_metrics


class Telemetry:
    """The threads of the controller that read the files of a run for other systems. Without keys for them, there are none."""

    def __init__(self, logging: LoggingConfig, run_dir: Path, console: Console) -> None:
        """Start the threads that the configuration asks for.

        Raises:
            TitanRLError: The port of the metrics cannot be used.
        """
        self._server: run_metrics.MetricsServer | None = None
        if logging.metrics_port is not None:
            from titanrl.serving.run_metrics import MetricsServer  # imports uvicorn, which other runs do not need

            self._server = MetricsServer(run_dir, logging.metrics_host, logging.metrics_port)
            console.note(f"metrics for Prometheus: {self._server.url}/metrics")

    def close(self) -> None:
        """End the threads, after they have sent everything. A second call does nothing."""
        if self._server is not None:
            self._server.close()
