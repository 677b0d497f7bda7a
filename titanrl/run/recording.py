"""Records of a run: its files and trackers, the figures of its batches, and the threads that send them to other systems."""

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from titanrl.base.errors import TitanRLError
from titanrl.base.files import replace_text
from titanrl.base.plugins import Plugins
from titanrl.carriers.record import HOST, RecordFile
from titanrl.carriers.types import BoolArray, DoubleArray, GroupHandle, IntArray
from titanrl.config.load import recorded_config
from titanrl.config.schema import Config
from titanrl.config.sections import LoggingConfig
from titanrl.data.entries import record_data
from titanrl.metrics import steps as metrics_of
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import RunDirectory
from titanrl.metrics.trackers import Recorder, make_trackers
from titanrl.replay.groups import Batch
from titanrl.run.checkpoints import Resumable, checkpoint_dir, set_aside

if TYPE_CHECKING:
    from titanrl.metrics import otlp
    from titanrl.serving import runs

NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Folder in which the driver lists the GPUs of this machine."""
Kind = Literal["start", "resume", "restart"]
"""`start`: new run; `resume`: run of an earlier process; `restart`: run of this process, from its last checkpoint."""


def open_recorder(config: Config, run_dir: Path, kind: Kind, found: Resumable, console: Console, plugins: Plugins) -> Recorder:
    """Open the run directory and start the trackers, to continue from the state that was found.

    Lines of later steps are dropped from the files, and later checkpoints are renamed (`set_aside`).
    """
    state = found.state
    step = None if kind == "start" else state.step  # 0 without a checkpoint to restart from
    directory = RunDirectory(
        run_dir,
        resume_step=step,
        resume_version=state.version,
        resume_index=state.next_index,
        resume_in_flight=state.in_flight,
        resume_rates=state.num_rates,
        resume_published=state.published[-1] if state.published else state.version + bool(state.step),
        warn=console.warn,
    )
    if step is not None:
        kept = set_aside(directory.checkpoints, step)
        if found.unusable:
            console.warn(
                f"{'--resume' if kind == 'resume' else 'restart'}: continuing from step {step}, the newest intact checkpoint "
                f"({'; '.join(f'{name}: {reason}' for name, reason in found.unusable.items())}). "
                f"Renamed newer ones to {', '.join(kept)}."
            )
        folder = checkpoint_dir(directory.checkpoints, step)
        if folder.exists() and not directory.has_event("checkpoint", step=step):  # the run died before it recorded the event
            directory.event("checkpoint", step=step, path=str(folder))
    replace_text(directory.config, recorded_config(config), durable=True)
    if kind != "restart":  # the restart event is recorded once the processes run
        record_data(run_dir, found.selections)
        directory.event(kind, step=state.step)
        RecordFile(run_dir, "starts", "controller", config.logging.record_bytes // 100).append((start_of(kind), {}))
    trackers = make_trackers(
        config.logging.loggers,
        run_dir,
        config.model_dump(mode="json"),
        warn=console.warn,
        resume_step=step,
        plugins=plugins,
    )
    return Recorder(directory, trackers, console)


def start_of(kind: Kind) -> dict[str, Any]:
    """Return the record of a start: when, how and where this process runs; docs/record.md describes the fields."""
    packages = [path.stem.rpartition("-") for entry in sys.path for path in Path(entry).glob("*.dist-info")]
    models = [re.findall(r"^Model:\s*(.*)", file.read_text(), re.MULTILINE) for file in NVIDIA.glob("*/information")]
    names = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "time": time.time(),
        "kind": kind,
        "command": sys.orig_argv,
        "folder": os.getcwd(),
        "host": HOST,
        "pid": os.getpid(),
        "system": platform.platform(),
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerators": [name for found in models for name in found],
        "python": platform.python_version(),
        "commit": _commit(),
        "packages": {name: version for name, _, version in sorted(packages)},
    }


def _commit() -> str | None:
    """Return the commit of the current directory, with `-dirty` if files have changed; None outside a repository."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def batch_metrics(batch: Batch, ages: Sequence[int], version: int, config: Config) -> dict[str, float]:
    """Return the metrics that depend on the batch alone, which trains `version` and has groups of these ages in versions."""
    values = {}
    if config.rollout.group_filter is not None:
        values["group/filtered_frac"] = batch.drops.get("filtered", 0) / batch.num_tried
    if config.rollout.min_group_size > 1:
        values["group/too_small_frac"] = batch.drops.get("too small", 0) / batch.num_tried
    values |= {
        **metrics_of.rollout_metrics(
            batch.records,
            num_tried=batch.num_tried,
            num_equal_rewards=batch.num_equal_rewards,
            num_tried_rollouts=batch.num_tried_rollouts,
            num_errors=batch.num_errors,
            of_turns=bool(batch.counts),
        ),
        **metrics_of.episode_metrics(batch.counts),
        **(metrics_of.state_metrics(batch.records) if config.algorithm.credit == "state" else {}),
        **metrics_of.environment_metrics(batch.environment, is_mixture=len(config.data.tasks) > 1),
        **metrics_of.task_metrics(batch.records, config.data.tasks, batch.drops_by_task),
        **batch.prompts,
        "staleness/mean": metrics_of.mean(ages),
        "staleness/max": float(max(ages)),
    }
    if (replayed := batch.replayed) is not None:
        counts = {"num_stored": replayed.num_stored, "num_evicted": replayed.num_evicted}
        values |= metrics_of.replay_metrics(replayed.records, version=version, **counts)
    return values | {  # the state of the buffer when the batch was taken
        "buffer/bytes": float(batch.usage.num_bytes),
        "buffer/spilled_bytes": float(batch.usage.num_spilled_bytes),
        "buffer/inflight": float(batch.num_in_flight),
        "buffer/ready": float(batch.num_ready),
        "buffer/waiting": float(batch.num_held),
        "buffer/tried": float(batch.num_tried),
    }


def record_drops(recorder: Recorder, batch: Batch, step: int) -> None:
    """Record the groups dropped since the previous batch, and failed rewards."""
    for reason, num_dropped in batch.drops.items():
        recorder.directory.event("drop", step=step, groups=num_dropped, reason=reason)
    if batch.num_errors:
        recorder.scorer_errors(step, batch.num_errors, batch.num_tried_rollouts, batch.first_error)


def recorded_groups(batch: Batch, config: Config) -> dict[GroupHandle, int]:
    """Return the index of each group of a batch that is recorded with its tokens, by the location of its payload."""
    groups = batch.all_records.groups
    chosen = groups[_is_recorded(groups["index"], config) & (groups["has_payload"] > 0)]
    return {
        GroupHandle(shard=shard, location=location, serial=serial): index
        for index, (shard, location, serial) in zip(chosen["index"].tolist(), chosen["handle"].tolist(), strict=True)
    }


def _is_recorded(indices: IntArray, config: Config) -> BoolArray:
    """Return True for each prompt whose group is recorded with its tokens."""
    is_recorded: BoolArray = indices % config.rollout.groups_per_step < config.logging.rollouts_per_step
    return is_recorded


def record_advantages(directory: RunDirectory, batch: Batch, advantages_N: DoubleArray, step: int, config: Config) -> None:
    """Record the advantages of the groups that are recorded with their tokens."""
    if not config.logging.rollouts_per_step:
        return
    groups = batch.all_records.groups
    groups = groups[np.argsort(groups["index"], kind="stable")]  # the order of the advantages
    ends = np.cumsum(groups["num_rollouts"])
    starts = ends - groups["num_rollouts"]
    indices, new = groups["index"].tolist(), set(batch.records.groups["index"].tolist())
    rows = [
        (indices[i], int(groups["max_version"][i]), advantages_N[starts[i] : ends[i]].tolist())
        for i in np.flatnonzero(_is_recorded(groups["index"], config)).tolist()
        if indices[i] in new
    ]
    if rows:
        directory.log_advantages(step, rows)


class Telemetry:
    """The threads of the controller that read the files of a run for other systems. Without keys for them, there are none."""

    def __init__(self, logging: LoggingConfig, run_dir: Path, console: Console, *, since: float) -> None:
        """Start the threads that the configuration asks for. Spans from before a time are of an earlier process of the run."""
        self._server: runs.MetricsServer | None = None
        if logging.metrics_port is not None:
            from titanrl.serving.runs import MetricsServer  # imports uvicorn, which other runs do not need

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
