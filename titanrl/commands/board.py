"""See runs while they run: `titanrl board [FOLDER]`."""

import argparse
import asyncio
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console

from titanrl.base import terminal
from titanrl.base.errors import describe
from titanrl.base.files import why_no_folder
from titanrl.config.errors import ConfigError, refusing
from titanrl.metrics.reading import RunRecord
from titanrl.run import command


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl board") -> None:
    """Serve until a signal ends it."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show the runs of a folder in a browser, while they run: curves, rollouts, evaluations and timelines. Only "
        "this machine can reach the page, and its address contains a key.",
    )
    help_text = "folder of runs, or the directory of a run (default: runs)"
    parser.add_argument("folder", nargs="?", type=terminal.path, default=Path("runs"), metavar="FOLDER", help=help_text)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: 0, which selects a free one)")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.port < 65536:
        parser.error(f"--port: must be 0 to 65535 (got {arguments.port}). Give one such as 8080.")
    with refusing():
        if found := why_no_folder(arguments.folder):
            raise ConfigError(f"FOLDER: it {found} (got {arguments.folder}). Give a folder of runs, or the directory of a run.")
    with command.original_stderr() as stderr:
        err = rich.console.Console(file=stderr, soft_wrap=True)
        try:
            _, code = asyncio.run(command.until_signal(serve(arguments.folder, arguments.port)))
        except OSError as error:
            err.print(f"error: --port {arguments.port}: {describe(error)}", markup=False, highlight=False)
            code = 1
    raise SystemExit(0 if code in (0, 130) else code)


async def serve(folder: Path, port: int) -> None:
    """Listen, print the address, and pass on changes of files until the task is cancelled.

    Raises:
        OSError: The port cannot be used.
    """
    from titanrl.serving.http import LOCAL
    from titanrl.serving.listening import listen
    from titanrl.serving.runs import Board

    board = Board(folder, secrets.token_urlsafe(32), explained)
    listener = await listen(board, (LOCAL[0], port))
    port = int(listener.url.rpartition(":")[2])
    try:
        print(f"board of {folder} at {listener.url}/#key={board.key}", flush=True)
        print(
            f"From another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then open the same address.",
            flush=True,
        )
        await board.watch()
    finally:
        board.close()
        await listener.close()


def explained(run: RunRecord, step: int, index: int) -> list[dict[str, Any]]:
    """Return how the tokens of a group entered the loss of a step. A custom loss is not imported."""
    from titanrl.run.explanation import explain  # imports torch, which the other pages do not need

    return [segment.as_dict() for segment in explain(run, step, index)]
