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

    Its keys: `command`; `parent`, the process id of the parent; `stdin`, a file; `package`, the folder of this package, and
    `confinement`, the arguments of `confine_program`, or null.
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
    status = 0
    while (number := signal.sigwait(ended)) == signal.SIGCHLD:
        exited = dict(_reaped())
        if command in exited:
            status = exited[command]
            break
    _kill_children()
    os._exit(os.waitstatus_to_exitcode(status) % 256 if number == signal.SIGCHLD else 143)


def _run(given: dict[str, object]) -> None:
    """Replace this process with the command, in a session of its own."""
    try:
        os.setsid()
        os.dup2(os.open(str(given["stdin"]), os.O_RDONLY), 0)
        command = [str(part) for part in given["command"]]  # type: ignore[attr-defined]
        if given["confinement"] is not None:
            sys.path.insert(0, str(given["package"]))
            from titanrl.processes.confine import confine_program

            confine_program(**given["confinement"])  # type: ignore[arg-type]
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except BaseException as error:
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
    """Kill all descendants. They are stopped first, so that none can start another one meanwhile."""
    while True:
        stopped: set[int] = set()
        while new := _descendants() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _descendants() -> set[int]:
    """Return the ids of all processes below this one that have not exited."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:  # it has exited
                continue
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(name))
    found, unseen = set(), [os.getpid()]
    while unseen:
        below = children.get(unseen.pop(), [])
        found.update(below)
        unseen += below
    return found


if __name__ == "__main__":
    main(sys.argv[1])
