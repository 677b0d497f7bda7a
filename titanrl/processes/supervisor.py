"""Main program of the process that runs one command, and ends with everything that the command has started.

It imports only the standard library, so that it starts within milliseconds. Processes that a command leaves behind, even in a
session of their own, become children of this one (`PR_SET_CHILD_SUBREAPER`). When the command exits, when this process gets
SIGTERM, or when its parent dies, it kills them all.
"""

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(settings: str) -> None:
    """Run the command of the settings, a JSON object, and exit with its status.

    Its keys: `command`; `parent`, the process id of the parent; `package`, the folder of this package; and `confinement`, the
    arguments of `confine_program`, or null.
    """
    given = json.loads(settings)
    ended = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ended)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != given["parent"]:
        return
    command = os.fork()
    if command == 0:
        _run(given)
    code = -signal.SIGTERM
    while signal.sigwait(ended) == signal.SIGCHLD:
        exited = dict(_reaped())
        if command in exited:
            code = os.waitstatus_to_exitcode(exited[command])
            break
    _kill_children()
    os._exit(code if code >= 0 else 128 - code)  # like a shell


def _run(given: dict[str, object]) -> None:
    """Replace this process with the command, in a session of its own."""
    try:
        os.setsid()
        command = [str(part) for part in given["command"]]  # type: ignore[attr-defined]
        if given["confinement"] is not None:
            sys.path.insert(0, str(given["package"]))
            from titanrl.processes.confine import confine_program

            confine_program(**given["confinement"])  # type: ignore[arg-type]
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and then also by the command
            signal.signal(ignored, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except Exception as error:  # edge of the process: the parent shows what it prints
        print(f"cannot be started: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _reaped() -> list[tuple[int, int]]:
    """Reap children that have exited; return their ids and wait statuses."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, status))


def _kill_children() -> None:
    """Kill all descendants, and wait for their exit. They are stopped first, so that none can start another one meanwhile."""
    while True:
        stopped: set[int] = set()
        while new := _descendants() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
        _reaped()  # look again: a process may have been starting while its parent was stopped


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _descendants() -> set[int]:
    """Return the ids of all processes below this one. The main thread of one that seems to be a zombie may have left others."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it has exited
                continue
            children.setdefault(parent, []).append(int(name))
    found, unseen = set(), [os.getpid()]
    while unseen:
        below = children.get(unseen.pop(), [])
        found.update(below)
        unseen += below
    return found


if __name__ == "__main__":
    main(sys.argv[1])
