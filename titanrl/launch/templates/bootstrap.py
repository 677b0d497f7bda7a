"""First program of every process of a run: tie it to its parent, announce it to the controller, then become Monarch's program.

Importing Monarch takes up to seconds on a busy machine. A process whose parent is killed meanwhile would remain until Monarch
gives up, after most of a minute; and nothing would notice that the process itself was killed.

If the process has a template (`titanrl.launch.templates.template`), a fork of the template does all that instead. This process
remains for Monarch, which watches the process that it has started: it ends when the fork ends, in the same way, and so does the
fork.
"""

import contextlib
import os
import runpy
import signal
import socket
from typing import NoReturn

from titanrl.launch.cores import CORES, bind
from titanrl.launch.templates.messages import Order, receive_number, send_order
from titanrl.sandbox.confine import allow_tracing, end_with_parent

PARENT = "TITANRL_PARENT_PID"
"""Variable with the process that the new process must not outlive; unset if another machine starts it."""
NAME = "TITANRL_PROCESS"
"""Variable with the role and rank of the process."""
BIRTHS = "TITANRL_BIRTHS"
"""Variable with the controller's socket for announcements."""
TEMPLATE = "TITANRL_TEMPLATE"
"""Variable with the socket of the template that forks the process; unset if it has none."""
MONARCH = "monarch._src.actor.bootstrap_main"
"""Program that Monarch itself would start."""


def main() -> None:
    """Run the process."""
    parent = os.environ.pop(PARENT, None)
    if parent is not None:
        end_with_parent(int(parent))
        allow_tracing(int(parent))
    template = os.environ.pop(TEMPLATE, None)
    if template is not None:
        stand_in(template)
    run(os.environ.pop(NAME), os.environ.pop(BIRTHS))


def run(name: str, births: str) -> None:
    """Bind this process to its cores, announce it, and become Monarch's program."""
    cores = os.environ.pop(CORES, None)
    if cores is not None:
        bind(cores)
    announce(name, births)
    runpy.run_module(MONARCH, run_name="__main__", alter_sys=True)


def announce(name: str, controller: str) -> None:
    """Send host, name and id of this process to the controller. On another machine there is usually no such socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messages, contextlib.suppress(OSError):
        messages.sendto(f"{os.getpid()} {socket.gethostname()} {name}".encode(), controller)


def stand_in(template: str) -> None:
    """Let a template fork, and end as the fork ends. Return if there will be no fork, because the template has failed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(template)
            send_order(connection, Order(environment=dict(os.environ), folder=os.getcwd()))
            fork = receive_number(connection)
        except OSError:
            return
        if fork is None:
            return
        for number in (signal.SIGINT, signal.SIGHUP):  # of a terminal, which sends them to the fork, too
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(fork, number))
        end_as(receive_number(connection))


def end_as(status: int | None) -> NoReturn:
    """End this process as another has ended.

    Args:
        status: the other's wait status; None if it was killed with its template.
    """
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    with contextlib.suppress(OSError):  # of SIGKILL
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
