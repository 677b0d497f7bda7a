"""Confinement of a process by the Linux kernel: resource limits, Landlock for files, seccomp for system calls.

Confinement needs no privileges and cannot be undone. The seccomp filter is an allow list of the system calls that Python needs
to compute and to read files; any other call fails with EPERM. A deny list would have to name everything that kernels offer:
sockets, processes and signals, but also chmod, io_uring, F_SETOWN, and whatever the next release adds.
"""

import ctypes
import os
import platform
import resource
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType

from titanrl.base.errors import TitanRLError

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_PTRACER = 0x59616D61
_SECCOMP_MODE_FILTER = 2
_SECCOMP_GET_ACTION_AVAIL = 2
_RET_ALLOW = 0x7FFF0000
_RET_EPERM = 0x00050001
_RET_KILL_PROCESS = 0x80000000

_SYS_CLOSE_RANGE = 436
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1
_LANDLOCK_RULE_NET_PORT = 2
_CONNECT_TCP = 1 << 1
_ABI_OF_SIGNALS = 6
_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE
_FILE_RIGHTS = (13, 14, 15, 15, 16)
"""Number of file-access rights in the Landlock ABIs 1, 2, ...; later ABIs have as many as the last entry."""

_MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class _Machine:
    audit_arch: int
    """AUDIT_ARCH_* constant of linux/audit.h, which identifies the system-call ABI."""
    column: int
    """Column of this machine in the tables below."""
    seccomp: int
    """System-call number of seccomp."""


_MACHINES = {"x86_64": _Machine(0xC000003E, 0, 317), "aarch64": _Machine(0xC00000B7, 1, 277)}

_OPENAT = (257, 56)
_SOCKET, _PTRACE = (41, 198), (101, 117)
_SENDS = {"sendto": ((44, 206), 3), "sendmsg": ((46, 211), 2), "sendmmsg": ((307, 269), 3)}
"""Numbers of system calls on both machines, and the position of the argument with their flags."""
_SYS_IO_URING_SETUP = 425
_FCNTL = (72, 25)
_ALLOWED: dict[str, tuple[int, int | None]] = {
    # Open descriptors and file names. Landlock decides which files can be opened.
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "lseek": (8, 62), "dup": (32, 23), "getdents64": (217, 61), "getcwd": (79, 17), "readlink": (89, None),
    "readlinkat": (267, 78), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439), "stat": (4, None),
    "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    # Memory.
    "mmap": (9, 222), "mremap": (25, 216), "mprotect": (10, 226), "munmap": (11, 215), "madvise": (28, 233), "brk": (12, 214),
    # Locks, and the process's own signal handlers.
    "futex": (202, 98), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "membarrier": (324, 283), "rseq": (334, 293),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    # Clocks and alarms.
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getrusage": (98, 165), "poll": (7, None), "ppoll": (271, 73), "select": (23, None),
    "pselect6": (270, 72),
    # Identity, random numbers, and exit.
    "getrandom": (318, 278), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179),
    "getcpu": (309, 168), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""System calls that are allowed with any arguments, and their numbers on x86_64 and aarch64."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class SandboxUnavailable(TitanRLError):
    """Raised if this machine cannot confine a process. The message names the missing feature. There is no unconfined mode."""


def missing_features() -> list[str]:
    """Return the features required for confinement that this machine lacks; empty if confinement is possible."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return [f"Linux on {' or '.join(_MACHINES)} (this is {sys.platform} on {platform.machine()})"]
    missing = []
    if landlock_abi() < 1:
        missing.append("Landlock (Linux 5.13 or newer with `landlock` among the `lsm=` boot options; in a container, a seccomp "
                       "profile that allows the landlock_* calls)")  # fmt: skip
    action = struct.pack("I", _RET_EPERM & 0xFFFF0000)
    if _syscall(_MACHINES[platform.machine()].seccomp, _SECCOMP_GET_ACTION_AVAIL, 0, action) != 0:
        missing.append("seccomp filters (a kernel with CONFIG_SECCOMP_FILTER; in a container, a profile that allows seccomp)")
    return missing


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock ABI; 0 if Landlock is missing or disabled."""
    return max(0, _syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION))


def end_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when the thread that started it exits.

    `parent_pid` is the id that the parent passed on. If the parent exited before this call, this process is killed at once.
    """
    _check(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # the parent exited before the call
        os.kill(os.getpid(), signal.SIGKILL)


def allow_tracing(pid: int) -> None:
    """Let a process and its children trace this one, even if Yama restricts tracing to parents (`ptrace_scope` 1)."""
    _prctl(_PR_SET_PTRACER, pid)  # fails on kernels without Yama, where no permission is needed


def python_paths() -> list[Path]:
    """Return the paths that this interpreter must be able to read: its libraries and the packages it has loaded."""
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache"]
    packages: list[str] = []
    modules: dict[str, object] = dict(sys.modules)  # a few values, such as typing.io, are classes
    for name, module in modules.items():
        spec = module.__spec__ if isinstance(module, ModuleType) and "." not in name else None
        if spec is not None and spec.submodule_search_locations is not None:
            packages += spec.submodule_search_locations
        elif spec is not None and spec.has_location and spec.origin is not None:
            packages.append(spec.origin)
    paths: list[Path] = []
    for path in map(Path, chain(libraries, [f"{sys.base_prefix}/lib", "/dev/null", "/dev/urandom"], system, packages)):
        if path.exists() and not any(path.is_relative_to(known) for known in paths):
            paths.append(path)
    return paths


class Confinement:
    """Confinement rules, prepared once and applied in many forked processes."""

    def __init__(self, readable: Iterable[Path], memory_bytes: int, cpu_s: int) -> None:
        """Prepare the rules; `apply` enforces them. A process may read only `readable`, files or whole folders."""
        machine = _MACHINES[platform.machine()]
        self._limits = {
            resource.RLIMIT_AS: memory_bytes,
            resource.RLIMIT_CPU: cpu_s,
            resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
            resource.RLIMIT_FSIZE: 0,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 0,
        }
        self._ruleset = _make_ruleset([(readable, _READ_FILE | _READ_DIR)])
        filters = _make_filter(machine)
        self._filters = ctypes.create_string_buffer(filters, len(filters))
        self._program = struct.pack("HL", len(filters) // 8, ctypes.addressof(self._filters))

    def apply(self, keep: int) -> None:
        """Confine the calling process permanently, and close its descriptors except the standard ones and `keep`.

        Raise `OSError` if the kernel rejects a rule. The process may then be partly confined.
        """
        _set_limits(self._limits)
        _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(PR_SET_NO_NEW_PRIVS)")
        _check(_syscall(_SYS_LANDLOCK_RESTRICT_SELF, self._ruleset, 0), "landlock_restrict_self")
        for first, last in ((3, keep - 1), (keep + 1, 0xFFFFFFFF)):
            if first <= last:
                _check(_syscall(_SYS_CLOSE_RANGE, first, last, 0), "close_range")
        _check(_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._program), "prctl(PR_SET_SECCOMP)")


def missing_for_programs() -> list[str]:
    """Return the features required by `confine_program` that this machine lacks; empty if there are none."""
    missing = missing_features()
    if not missing and landlock_abi() < _ABI_OF_SIGNALS:
        missing.append(f"Landlock ABI {_ABI_OF_SIGNALS} (Linux 6.12 or newer), which restricts connections and signals")
    return missing


def confine_program(readable: Iterable[str], writable: Iterable[str], port: int, memory_bytes: int) -> None:
    """Confine the calling process and what it starts, permanently. Unlike `Confinement`, it may start processes.

    It may execute and read only what is below `readable` and exists, change only what is below the folders `writable`, connect
    only to a TCP port (of any host), and signal only processes that it has started. It can make no sockets except TCP sockets
    and pairs. Each process has an address space of `memory_bytes`.

    Raise `OSError` if the kernel rejects a rule. The process may then be partly confined.
    """
    existing = [path for path in readable if os.path.exists(path)]
    ruleset = _make_ruleset([(existing, _EXECUTE | _READ_FILE | _READ_DIR), (writable, _all_rights())])
    _add_rule(ruleset, _LANDLOCK_RULE_NET_PORT, struct.pack("=QQ", _CONNECT_TCP, port))
    _set_limits({resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CORE: 0})
    filters = _make_socket_filter(_MACHINES[platform.machine()])
    buffer = ctypes.create_string_buffer(filters, len(filters))
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "prctl(PR_SET_NO_NEW_PRIVS)")
    _check(_syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    program = struct.pack("HL", len(filters) // 8, ctypes.addressof(buffer))
    _check(_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program), "prctl(PR_SET_SECCOMP)")


def _make_socket_filter(machine: _Machine) -> bytes:
    """Compile a filter that denies all sockets but TCP ones, and the system calls that would get around it.

    Landlock checks `connect` of TCP sockets only: not that of MPTCP, and not MSG_FASTOPEN, which connects when it sends.
    """
    load, equal, at_least, any_bit, mask, result = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    number, arch, args = 0, 4, 16
    socket_call, ptrace = _SOCKET[machine.column], _PTRACE[machine.column]
    program = [
        (load, 0, 0, arch), (equal, 1, 0, machine.audit_arch), (result, 0, 0, _RET_KILL_PROCESS),
        (load, 0, 0, number), (at_least, 0, 1, 1 << 30), (result, 0, 0, _RET_EPERM),
        (equal, 0, 1, ptrace), (result, 0, 0, _RET_EPERM),
        (equal, 0, 1, _SYS_IO_URING_SETUP), (result, 0, 0, _RET_EPERM),
        *chain.from_iterable([
            (equal, 0, 4, calls[machine.column]), (load, 0, 0, args + 8 * position),
            (any_bit, 0, 1, socket.MSG_FASTOPEN), (result, 0, 0, _RET_EPERM), (result, 0, 0, _RET_ALLOW),
        ] for calls, position in _SENDS.values()),
        (equal, 1, 0, socket_call), (result, 0, 0, _RET_ALLOW),
        (load, 0, 0, args), (equal, 2, 0, socket.AF_INET), (equal, 1, 0, socket.AF_INET6), (result, 0, 0, _RET_EPERM),
        (load, 0, 0, args + 8), (mask, 0, 0, 0xF), (equal, 1, 0, socket.SOCK_STREAM), (result, 0, 0, _RET_EPERM),
        (load, 0, 0, args + 16), (equal, 1, 0, 0), (equal, 0, 1, socket.IPPROTO_TCP), (result, 0, 0, _RET_ALLOW),
        (result, 0, 0, _RET_EPERM),
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def leaks() -> list[str]:
    """Try the actions that confinement must prevent; return the names of those that succeed."""
    attempts: dict[str, Callable[[], object]] = {
        "reading files": lambda: os.open("/", os.O_RDONLY),
        "making sockets": socket.socket,
        "sending signals": lambda: os.kill(os.getppid(), 0),
    }
    found = []
    for name, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            continue
        found.append(name)
    return found


def _set_limits(limits: Mapping[int, int]) -> None:
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _all_rights() -> int:
    """Return the rights to files and folders that this kernel's Landlock knows."""
    return (1 << _FILE_RIGHTS[min(landlock_abi(), len(_FILE_RIGHTS)) - 1]) - 1


def _make_ruleset(allowed: Iterable[tuple[Iterable[str | Path], int]]) -> int:
    """Create a Landlock ruleset and return its file descriptor.

    The ruleset allows paths and everything below them with the given rights, and denies all other file access. On newer kernels
    it also denies TCP (ABI 4) and signals to other processes (ABI 6).
    """
    abi = landlock_abi()
    attributes = struct.pack("QQQ", _all_rights(), 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0)
    ruleset = _check(_syscall(_SYS_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0), "landlock_create_ruleset")
    for paths, rights in allowed:
        for path in paths:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _OF_A_FILE, descriptor)
            _add_rule(ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule)
            os.close(descriptor)
    return ruleset


def _add_rule(ruleset: int, kind: int, rule: bytes) -> None:
    _check(_syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, kind, rule, 0), "landlock_add_rule")


def _make_filter(machine: _Machine) -> bytes:
    """Compile the seccomp filter to classic BPF. An instruction has 8 bytes: code, jump if true, jump if false, operand."""
    load, equal, greater, any_bit, result = 0x20, 0x15, 0x25, 0x45, 0x06
    number, arch, args = 0, 4, 16  # offsets in struct seccomp_data; arguments are 8 bytes, low half first
    # O_RDONLY with O_TRUNC would truncate a readable file. Landlock denies that only from ABI 3 on.
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    f_getfl = 3  # allows F_DUPFD, F_GETFD, F_SETFD and F_GETFL; a higher command, F_SETOWN, sends signals
    allowed = [numbers[machine.column] for numbers in _ALLOWED.values()]
    program = [
        # 32-bit code uses another ABI with other numbers. The x32 ABI has the same AUDIT_ARCH, but its numbers are not allowed.
        (load, 0, 0, arch), (equal, 1, 0, machine.audit_arch), (result, 0, 0, _RET_KILL_PROCESS),
        (load, 0, 0, number),
        *chain.from_iterable([(equal, 0, 1, call), (result, 0, 0, _RET_ALLOW)] for call in allowed if call is not None),
        (equal, 0, 4, _OPENAT[machine.column]),
        (load, 0, 0, args + 8 * 2), (any_bit, 0, 1, writing), (result, 0, 0, _RET_EPERM), (result, 0, 0, _RET_ALLOW),
        (equal, 0, 4, _FCNTL[machine.column]),
        (load, 0, 0, args + 8 * 1), (greater, 0, 1, f_getfl), (result, 0, 0, _RET_EPERM), (result, 0, 0, _RET_ALLOW),
        (result, 0, 0, _RET_EPERM),
    ]  # fmt: skip
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _prctl(option: int, *arguments: int | bytes) -> int:
    return int(_libc.prctl(option, *_words(*arguments, *[0] * (4 - len(arguments)))))


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    return int(_libc.syscall(*_words(number, *arguments)))


def _words(*arguments: int | bytes | None) -> list[ctypes.c_long | bytes | None]:
    """Widen integers to machine words, because the upper half of a C int is undefined. Bytes are passed by address."""
    return [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result
