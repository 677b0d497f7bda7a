"""First program of every process of a run: tie it to its parent, announce it to the controller, then become Monarch's program.

Importing Monarch takes up to seconds on a busy machine. A process whose parent is killed meanwhile would remain until Monarch
gives up, after most of a minute; and nothing would notice that the process itself was killed.
"""

import contextlib
import os
import runpy
import socket

from titanrl.sandbox.confine import allow_tracing, end_with_parent

PARENT = "TITANRL_PARENT_PID"
"""Variable with the process that the new process must not outlive; unset if another machine starts it."""
NAME = "TITANRL_PROCESS"
"""Variable with the role and rank of the process."""
BIRTHS = "TITANRL_BIRTHS"
"""Variable with the controller's socket for announcements."""
MONARCH = "monarch._src.actor.bootstrap_main"
"""Program that Monarch itself would start."""


def main() -> None:
    """Run the process."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        end_with_parent(int(parent))
        allow_tracing(int(parent))
    announce(os.environ.pop(NAME), os.environ.pop(BIRTHS))
    runpy.run_module(MONARCH, run_name="__main__", alter_sys=True)


def announce(name: str, controller: str) -> None:
    """Send the name and the id of this process to the controller. On another machine there is no such socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messages, contextlib.suppress(OSError):
        messages.sendto(f"{os.getpid()} {name}".encode(), controller)
