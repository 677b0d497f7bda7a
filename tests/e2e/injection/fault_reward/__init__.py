"""Inject faults on command, also in a scoring process by a reward function. See `sitecustomize`."""

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
"""Folder of the commands. A scoring process may read it, because it contains this package."""
COMMAND, HIT = FOLDER / "command.json", FOLDER / "hit.json"
SIGNALS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "segfault": signal.SIGSEGV}
done: set[int] = set()


class HasLock(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("this exception holds a lock")
        self.lock = threading.Lock()


def cause(fault: str) -> None:
    """Cause the fault in this process, on this thread."""
    match fault:
        case "segfault":
            ctypes.string_at(0)
        case "busy loop":
            while True:
                pass
        case "os._exit":
            os._exit(3)
        case "unpicklable exception":
            raise HasLock
        case "out of memory":
            bytearray(1 << 50)
        case _:
            os.kill(os.getpid(), SIGNALS[fault])


def log() -> Path:
    """Return the log of this process, which is named after its role."""
    return Path(os.readlink("/proc/self/fd/1"))


def at(point: str) -> None:
    """Cause a fault if one was requested for this point."""
    try:
        command = json.loads(COMMAND.read_text())
        if command["point"] != point or not log().name.startswith(command["role"]):
            return
        COMMAND.rename(FOLDER / "taken.json")
    except FileNotFoundError:  # no command, or another process was faster
        return
    victim = command["pid"] or os.getpid()
    if command["delay_s"]:  # in the middle of the work
        threading.Timer(command["delay_s"], strike, [command, victim]).start()
    else:
        strike(command, victim)


def strike(command: Mapping[str, Any], victim: int) -> None:
    """Record the time, then cause the fault in this process or send the signal to the victim."""
    hit = FOLDER / "hit.tmp"
    hit.write_text(json.dumps({"id": command["id"], "time": time.time(), "pid": victim, "log": str(log())}))
    hit.rename(HIT)
    if victim == os.getpid():
        cause(command["fault"])
    else:
        os.kill(victim, SIGNALS[command["fault"]])


def score(completion: str, entry: Mapping[str, Any]) -> float:
    """Cause a fault once if it was requested for this scoring process, which can only read the command."""
    try:
        command = json.loads(COMMAND.read_text())
    except FileNotFoundError:
        return 0.0
    if command["point"] == "reward" and command["pid"] == os.getpid() and command["id"] not in done:
        done.add(command["id"])
        cause(command["fault"])
    return 0.0
