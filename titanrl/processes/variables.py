"""Environment variables, devices and CPU cores of each role's processes, set before the interpreter starts."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from titanrl.config.device import Device, num_threads
from titanrl.config.schema import Config
from titanrl.config.sizes import replica_hosts, replica_slot, worker_hosts
from titanrl.processes import caches
from titanrl.processes.machine import THREADS, Cores
from titanrl.processes.temporary import TemporaryFolder

# Without these, glibc maps and unmaps memory for each short-lived tensor: about a thousand page faults in a tiny step.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Spinning OpenMP threads make a step tens of times slower when another process uses one of the cores."""
_COMMON = {
    "HF_HUB_OFFLINE": "1",  # all files are local; a library that queries a hub would wait for the network
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's import would start a thread, which a fork would lack
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@contextmanager
def temporary_folder() -> Iterator[None]:
    """Redirect the temporary files of this process, and of processes started in the body, to a folder that is deleted on exit.

    It collects Monarch's sockets, which would remain because the run's processes exit without the teardown that deletes them.
    Caches stay in their usual locations, where other runs find them.
    """
    caches.secure()
    before = os.environ.get("TMPDIR")
    folder = TemporaryFolder()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder.path)
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        if before is not None:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None
        folder.delete()


def trainer_environment(config: Config, device: Device) -> dict[str, str]:
    """Return the variables of a trainer rank. All ranks of a host see the same devices; `LOCAL_RANK` selects one."""
    ranks_per_host = config.trainer.parallelism.world_size // config.hosts.trainer_hosts
    # Generators of one thread each decode while the trainer trains, except in synchronous training.
    decoding = (
        config.generator.replicas * config.generator.tp if config.max_staleness and not config.hosts.across_machines else 0
    )
    threads = num_threads(ranks_per_host, num_taken=decoding) if device.kind == "cpu" else 1
    openmp = {"OMP_NUM_THREADS": str(threads), **PASSIVE_THREADS}
    return {**_COMMON, **_KEEP_MEMORY, **openmp, THREADS: str(threads), **visible(device, range(ranks_per_host))}


def generator_environment(config: Config, device: Device, replica: int) -> dict[str, str]:
    """Return the variables of a replica's ranks. They see the replica's devices; `LOCAL_RANK` selects one.

    vLLM runs in the rank's process.
    """
    environment = {
        **_COMMON,
        **_KEEP_MEMORY,
        "OMP_NUM_THREADS": "1",  # large models use more
        "OMP_WAIT_POLICY": "PASSIVE",
        THREADS: str(generator_threads(config, replica)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device.kind == "cpu":
        # Even with enforce_eager, vLLM compiles a sampler helper at the first request, which takes 10 s and gains nothing here.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    first, tp = generator_device(config, replica), config.generator.tp
    return environment | visible(device, range(first, first + tp))


def generator_threads(config: Config, replica: int) -> int:
    """Return the number of cores that each rank of a replica can use.

    The ranks of a host share its cores in synchronous training, in which trainer and generators wait for each other, and on a
    host without a trainer. Otherwise each rank has one core, which `trainer_environment` leaves to it.
    """
    is_beside_trainer = not config.hosts.across_machines or config.placement.generator == "trainers"
    if config.max_staleness and is_beside_trainer:
        return 1
    replicas = replica_hosts(config)
    return num_threads(replicas.count(replicas[replica % len(replicas)]) * config.generator.tp)


def worker_environment() -> dict[str, str]:
    """Return the variables of the rollout workers, buffer and store, which use no device and one thread."""
    return {**_COMMON, "OMP_NUM_THREADS": "1"}


def generator_device(config: Config, replica: int) -> int:
    """Return the index of a replica's first device on its host: after the trainer's devices if both are on the host."""
    hosts, tp = config.hosts, config.generator.tp
    if hosts.across_machines:
        is_behind = config.placement.generator == "trainers" and not hosts.share_devices
        return (config.num_trainer_ranks // hosts.trainer_hosts if is_behind else 0) + replica_slot(config, replica) * tp
    return replica * tp if hosts.share_devices else config.num_trainer_ranks + replica * tp


def role_cores(choice: str | None, first: int, count: int) -> Cores | None:
    """Return the CPU cores of a role's processes; None if they are not bound."""
    return None if choice is None else Cores(choice, first, count)


def generator_cores(config: Config, replica: int) -> Cores | None:
    """Return the CPU cores of a replica's ranks; the evaluator and teachers use the cores of replica 0."""
    tp, replicas = config.generator.tp, replica_hosts(config)
    return role_cores(
        config.placement.cpus.generator, replica_slot(config, replica) * tp, replicas.count(replicas[replica]) * tp
    )


def worker_cores(config: Config, worker: int) -> Cores | None:
    """Return the CPU cores of a rollout worker."""
    hosts = worker_hosts(config)
    return role_cores(config.placement.cpus.rollout, hosts[:worker].count(hosts[worker]), hosts.count(hosts[worker]))


def visible(device: Device, indices: Iterable[int]) -> dict[str, str]:
    """Return the variable that limits a process to some devices; empty on CPU."""
    if device.visible_devices is None:
        return {}
    return {device.visible_devices: ",".join(map(str, indices))}
