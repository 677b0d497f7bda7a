"""Environment variables of a run's processes, set before the interpreter starts: devices, CPU cores, and safe caches.

The caches are those that libraries import or unpickle, such as compiled kernels: only this user and root may be able to write
them. Most libraries create them below the home folder, and torch in the system's temporary folder, under a name that another
user can take first. `secure_caches` runs before the packages are imported, and sets variables that a run's processes inherit.
"""

import getpass
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from titanrl.base.ownership import ALLOW, claim_folder, flaw, is_only_user, is_private
from titanrl.config.device import Device, num_threads
from titanrl.config.errors import BrokenRule, ConfigError
from titanrl.config.schema import Config
from titanrl.config.sizes import replica_hosts, replica_slot, worker_hosts
from titanrl.processes.machine import THREADS, Cores, numbers
from titanrl.processes.templates import SHARED
from titanrl.processes.temporary import TemporaryFolder

logger = logging.getLogger(__name__)

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
    secure_caches()
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


def broken_by_cores(config: Config) -> Iterator[BrokenRule]:
    """Yield a rule for each role that is bound to cores this machine does not have. Other machines are not checked."""
    if config.hosts.across_machines:
        return
    usable = os.sched_getaffinity(0)
    for role, choice in config.placement.cpus:
        if choice is None or choice in ("split", "numa") or numbers(choice) & usable:
            continue
        rule = f"the run may use none of these cores on this machine; it may use {_text(usable)}"
        yield BrokenRule({f"placement.cpus.{role}": choice}, rule, "choose from these cores, or set it to split or null")


def _text(cores: set[int]) -> str:
    """Return core numbers as a Linux CPU list, such as `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


# Caches


INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
"""Variable of torch's compile cache, whose entries are pickles and libraries."""
CACHES: Mapping[str, str] = {
    "XDG_CACHE_HOME": "{HOME}/.cache",
    "XDG_CONFIG_HOME": "{HOME}/.config",
    INDUCTOR: "{TMPDIR}/torchinductor_{USER}",
    "TRITON_CACHE_DIR": "{TRITON_HOME}/.triton/cache",
    "TORCH_EXTENSIONS_DIR": "{XDG_CACHE_HOME}/torch_extensions",
    "TORCH_HOME": "{XDG_CACHE_HOME}/torch",
    "PYTORCH_KERNEL_CACHE_PATH": "{XDG_CACHE_HOME}/torch/kernels",
    "VLLM_CACHE_ROOT": "{XDG_CACHE_HOME}/vllm",
    "VLLM_CONFIG_ROOT": "{XDG_CONFIG_HOME}/vllm",
    "HF_MODULES_CACHE": "{HF_HOME}/modules",
    "FLASHINFER_WORKSPACE_BASE": "{HOME}/.cache/flashinfer",
    "TVM_FFI_CACHE_DIR": "{HOME}/.cache/tvm-ffi",
    "NUMBA_CACHE_DIR": "{XDG_CACHE_HOME}/numba",
    "MPLCONFIGDIR": "{XDG_CONFIG_HOME}/matplotlib",
    "CUDA_CACHE_PATH": "{HOME}/.nv/ComputeCache",
    "PYTHONPYCACHEPREFIX": "",
}
"""Variables of the caches, and the library's default; empty if it has none. Defaults name variables and their defaults.

`HF_HOME` itself is not among them: models and data in it are read as safetensors, Arrow and JSON.
"""
_BASES = {"HF_HOME": "{XDG_CACHE_HOME}/huggingface", "TRITON_HOME": "{HOME}"}


def secure_caches() -> None:
    """Make this process and those that inherit its environment use only caches that no other user can write.

    A cache that the environment names must be safe, and so must the temporary folder. The default of a library is replaced
    where it is not, by a folder that is deleted when this process exits. Modules are not imported from a working directory that
    others can write, unless it is on this process's path.
    """
    if is_only_user():
        os.environ.setdefault(INDUCTOR, str(_default(INDUCTOR)))
        return
    if broken := list(broken_by_caches()):
        raise ConfigError(*map(str, broken))  # environment variables have no line in the configuration
    replaced, folder = list[str](), None
    for name in CACHES:
        path = _default(name)
        if os.environ.get(name) or path is None:
            continue
        if found := _flaw(path):
            folder = folder or TemporaryFolder()
            own = folder.path / name.lower()
            own.mkdir(mode=0o700)
            os.environ[name] = str(own)
            replaced.append(f"{name}: {found}")
        elif name == INDUCTOR:  # its default would follow TMPDIR, which is another folder in each run
            os.environ[name] = str(path)
    if replaced:
        logger.warning("These caches are deleted at the end, because other users could change their usual folders: %s. To keep "
                       "them, set the variables to folders that only you can write.", "; ".join(replaced))  # fmt: skip
    with suppress(FileNotFoundError):  # the working directory was deleted
        if flaw(Path.cwd()) and not {"", os.getcwd()} & set(sys.path):
            os.environ.setdefault("PYTHONSAFEPATH", "1")


def broken_by_caches() -> Iterator[BrokenRule]:
    """Yield the variables whose folder another user could change."""
    fix = f"; if you are the only user of this machine or container, set {ALLOW}=1"
    temporary = tempfile.gettempdir()
    if found := flaw(Path(temporary), is_shared=True):
        rule = f"other users must not be able to replace files in the temporary folder ({found})"
        yield BrokenRule({"TMPDIR": temporary}, rule, f"set TMPDIR to a folder that only you can write{fix}")
    for name in CACHES:
        value, folder = os.environ.get(name), cache_folder(name)
        if value and folder is not None and (found := _flaw(folder)):
            rule = f"only you may be able to write this cache, because programs are loaded from it ({found})"
            yield BrokenRule({name: value}, rule, f"unset {name}, or set it to a folder of yours{fix}")


def broken_by_templates() -> Iterator[BrokenRule]:
    """Check that no other user has created the folder of the shared templates, for example after they ended.

    Templates receive the environment of a run, with its keys, and its output.
    """
    folder = os.environ.get(SHARED)
    if folder and os.path.lexists(folder) and not is_private(Path(folder)):
        rule = "must be a folder of mode 0700 that belongs to you, and no link, because templates in it receive your keys"
        yield BrokenRule({SHARED: folder}, rule, "unset the variable, or start `titanrl warm` and export what it prints")


def cache_folder(name: str) -> Path | None:
    """Return the folder of a cache in this environment; None if it is neither set nor has a default."""
    value = os.environ.get(name)
    return Path(value).expanduser() if value else _default(name)


def _flaw(path: Path) -> str:
    """Return the flaw of a folder. If it does not exist and another user could create it, create it first."""
    return flaw(path) and claim_folder(path)


def _default(name: str) -> Path | None:
    """Return the folder that a library uses if the variable is not set; None if it has no default."""
    default = CACHES[name]
    return Path(_expanded(default)) if default else None


def _expanded(text: str) -> str:
    """Return the text with the values of the variables that it names."""

    def value(match: re.Match[str]) -> str:
        match name := match[1]:
            case "HOME":
                return os.path.expanduser("~")
            case "TMPDIR":
                return tempfile.gettempdir()
            case "USER":  # as torch names its cache
                try:
                    user = getpass.getuser()
                except (KeyError, OSError):  # the user id has no name, as in some containers
                    user = f"uid_{os.getuid()}"
                return re.sub(r'[\\/:*?"<>|]', "_", user)
        return os.path.expanduser(os.environ.get(name) or _expanded({**CACHES, **_BASES}[name]))

    return re.sub(r"\{(\w+)\}", value, text)
