"""Confinement: the seccomp program interpreted in Python, and real confined processes."""

import asyncio
import os
import platform
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.processes.processes import needs_confinement
from titanrl.carriers.rewards import RewardSpec
from titanrl.config.sections import SandboxConfig
from titanrl.processes import confine
from titanrl.processes.confine import SandboxUnavailable
from titanrl.rollout.scoring import ScoringPool

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}
"""Kernel headers with system-call numbers. The generic header is installed everywhere, the one for x86_64 only on x86_64."""


def run_confined(body: str, setup: str = "", cpu_s: int = 5) -> subprocess.CompletedProcess[str]:
    """Run `body` in a process confined to 512 MiB."""
    apply = f"confine.Confinement(confine.python_paths(), {1 << 29}, {cpu_s}).apply(keep=2)"
    script = "\n".join(["import os, sys", "from titanrl.processes import confine", setup, apply, textwrap.dedent(body)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30)


def confined(body: str, setup: str = "") -> str:
    """Return the output of `body`, run in a confined process."""
    done = run_confined(body, setup)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def decide(machine: str, call: int, *arguments: int, arch: int | None = None, make: Any = confine._make_filter) -> str:
    """Interpret the BPF program of a machine's seccomp filter for one call; return the filter's decision."""
    tables = confine._MACHINES[machine]
    data = struct.pack("<iIQ6Q", call, tables.audit_arch if arch is None else arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = list(struct.iter_unpack("HBBI", make(tables)))
    place, value = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, operand)
            case 0x15:
                place += if_true if value == operand else if_false
            case 0x25:
                place += if_true if value > operand else if_false
            case 0x35:
                place += if_true if value >= operand else if_false
            case 0x54:
                value &= operand
            case 0x45:
                place += if_true if value & operand else if_false
            case 0x06:
                return {0x7FFF0000: "allow", 0x00050001: "EPERM", 0x80000000: "kill"}[operand]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_allows_reading_but_not_writing_forking_or_signals(machine: str) -> None:
    column = confine._MACHINES[machine].column
    openat, fcntl = confine._OPENAT[column], confine._FCNTL[column]
    calls = {numbers[column] for numbers in confine._ALLOWED.values()}
    assert {decide(machine, call) for call in calls if call is not None} == {"allow"}
    assert decide(machine, openat, 0, 0, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY) == "allow"
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_RDONLY | os.O_CREAT, os.O_TMPFILE | os.O_RDWR):
        assert decide(machine, openat, 0, 0, flags) == "EPERM"
    assert [decide(machine, fcntl, 1, command) for command in (1, 3, 4, 8, 10)] == ["allow", "allow", *["EPERM"] * 3]
    assert decide(machine, 0 if column == 0 else 63, arch=0x40000003) == "kill"  # 32-bit x86
    assert decide(machine, 0x40000000) == "EPERM"  # x32's read


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_programs_may_make_tcp_sockets_and_connect_only_by_connect(machine: str) -> None:
    def of_program(call: int, *arguments: int) -> str:
        return decide(machine, call, *arguments, make=confine._make_socket_filter)

    column = confine._MACHINES[machine].column
    stream, tcp, mptcp = socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP, 262
    sockets = [(socket.AF_INET, stream, 0), (socket.AF_INET6, stream, tcp)]
    sockets += [(socket.AF_INET, stream, mptcp), (socket.AF_INET, socket.SOCK_DGRAM, 0), (socket.AF_UNIX, stream, 0)]
    assert [of_program(confine._SOCKET[column], *each) for each in sockets] == ["allow"] * 2 + ["EPERM"] * 3
    for numbers, position in confine._SENDS.values():
        for flags, decision in ((socket.MSG_NOSIGNAL, "allow"), (socket.MSG_NOSIGNAL | socket.MSG_FASTOPEN, "EPERM")):
            assert of_program(numbers[column], *[0] * position, flags) == decision
    calls = (confine._PTRACE[column], confine._SYS_IO_URING_SETUP, 0x40000000, 435)
    assert [of_program(call) for call in calls] == ["EPERM"] * 3 + ["allow"]


@pytest.mark.parametrize("machine", sorted({"aarch64", platform.machine()}))
def test_system_call_numbers_match_the_kernel_headers(machine: str) -> None:
    headers = [Path(path) for path in HEADERS[machine] if Path(path).exists()]
    assert headers, f"none of {HEADERS[machine]} exists; install the kernel headers (linux-libc-dev)"
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", headers[0].read_text(), re.MULTILINE)
    numbers = {{"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in defined}
    column = confine._MACHINES[machine].column
    tables = {**confine._ALLOWED, "openat": confine._OPENAT, "fcntl": confine._FCNTL}
    tables |= {
        "socket": confine._SOCKET,
        "ptrace": confine._PTRACE,
        **{name: pair for name, (pair, _) in confine._SENDS.items()},
    }
    assert {name: pair[column] for name, pair in tables.items()} == {name: numbers.get(name) for name in tables}
    denied = [
        "clone",
        "clone3",
        "execve",
        "execveat",
        "socket",
        "connect",
        "kill",
        "tgkill",
        "tkill",
        "pidfd_send_signal",
        "ptrace",
    ]
    denied += ["process_vm_readv", "process_vm_writev", "mount", "open_by_handle_at", "bpf", "userfaultfd", "io_uring_setup"]
    denied += ["keyctl", "prctl", "seccomp", "ioctl", "openat2", "unlinkat", "fchmodat", "setxattr", "sendmsg", "prlimit64"]
    assert {decide(machine, numbers[name]) for name in denied} == {"EPERM"}


@needs_confinement
def test_confined_process_leaks_nothing_and_still_imports() -> None:
    assert confined("import email.message, wave; print(confine.leaks(), wave.__name__)") == "[] wave"


@needs_confinement
def test_leaks_lists_the_abilities_of_an_unconfined_process() -> None:
    unconfined = "confine.Confinement.apply = lambda self, keep: None"
    assert confined("print(confine.leaks())", setup=unconfined) == "['reading files', 'making sockets', 'sending signals']"


@needs_confinement
@pytest.mark.parametrize("abi", range(1, max(confine.landlock_abi(), 1) + 1))
def test_every_landlock_version_denies_reading_and_writing(abi: int, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    body = f"""
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDONLY | os.O_TRUNC):
            try: print(os.open({str(secret)!r}, flags))
            except PermissionError: print("denied")
    """
    assert confined(body, setup=f"confine.landlock_abi = lambda: {abi}").split() == ["denied"] * 3
    assert secret.read_text() == "secret"


@needs_confinement
def test_landlock_denies_files_and_seccomp_denies_the_rest() -> None:
    without_landlock = "syscall = confine._syscall; confine._syscall = lambda n, *a: 0 if n == 446 else syscall(n, *a)"
    without_seccomp = "prctl = confine._prctl; confine._prctl = lambda n, *a: 0 if n == 22 else prctl(n, *a)"
    assert confined("print(confine.leaks())", setup=without_landlock) == "['reading files']"
    assert "making sockets" in confined("print(confine.leaks())", setup=without_seccomp)
    assert "reading files" not in confined("print(confine.leaks())", setup=without_seccomp)


@needs_confinement
def test_memory_and_open_files_are_limited() -> None:
    body = """
        for attempt in (lambda: bytearray(1 << 29), lambda: [os.open(os.__file__, os.O_RDONLY) for _ in range(100)]):
            try: attempt()
            except (MemoryError, OSError) as error: print(type(error).__name__, error)
    """
    assert confined(body).splitlines() == ["MemoryError ", f"OSError [Errno 24] Too many open files: {os.__file__!r}"]


@needs_confinement
def test_cpu_time_is_limited() -> None:
    assert run_confined("while True: pass", cpu_s=1).returncode == -signal.SIGKILL


@needs_confinement
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86 machine code")
def test_filter_denies_32_bit_calls() -> None:
    body = r"""
        import ctypes, mmap
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid); int 0x80; ret
        ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
    """
    # SIGSEGV where the kernel has no 32-bit calls at all.
    assert run_confined(body).returncode in (-signal.SIGSYS, -signal.SIGSEGV)


def test_other_operating_systems_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert confine.missing_features()[0].startswith("Linux on x86_64 or aarch64 (this is darwin on ")


@needs_confinement
def test_each_missing_feature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "_syscall", lambda *_: -1)
    assert [feature.split()[0] for feature in confine.missing_features()] == ["Landlock", "seccomp"]


@pytest.mark.parametrize(("name", "value"), [("landlock_abi", lambda: 0), ("_SECCOMP_GET_ACTION_AVAIL", 99)])
def test_pool_refuses_to_start_without_landlock_or_seccomp(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, name, value)
    pool = ScoringPool([RewardSpec(name="answer", factory="nowhere:run")], SandboxConfig())
    with pytest.raises(SandboxUnavailable, match=r"lacks (Landlock|seccomp) .*there is no unconfined mode"):
        asyncio.run(pool.start())


def test_readable_paths_exclude_the_home_folder() -> None:
    readable = confine.python_paths()
    for file in (os.__file__, confine.__file__, pytest.__file__):
        assert any(Path(file).is_relative_to(known) for known in readable), file
    for path in (Path.home(), Path.cwd(), Path("/etc"), Path("/tmp"), Path("/proc")):
        assert not any(path.is_relative_to(known) for known in readable), path
