"""Steer a running run, or show the stacks of its processes: `titanrl steer RUN status|pause|resume|set|stacks`."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any

from titanrl.base import terminal
from titanrl.base.control import steer
from titanrl.config.errors import inline, refusing
from titanrl.config.source import parse_overrides
from titanrl.processes.stacks import stacks_of


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl steer") -> None:
    """Send a request to a run, and print its reply."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Steer a run in progress, on the host of its controller: pause it, let it continue, or change keys of its "
        "configuration. `status` lists the keys that can be changed. A change takes effect from the next step on. `stacks` "
        "prints the states and stacks of its processes on this host, also of a controller that does not answer.",
    )
    parser.add_argument("run", type=terminal.path, metavar="RUN", help="directory of the run")
    parser.add_argument("action", choices=("status", "pause", "resume", "set", "stacks"), help="what to do")
    parser.add_argument("values", nargs="*", metavar="key=value", help="new values, for set")
    parser.add_argument("--json", action="store_true", help="print the reply as JSON")
    arguments = parser.parse_args(argv)
    with refusing():
        values = {".".join(override.path): override.value for override in parse_overrides(arguments.values)}
    if bool(values) != (arguments.action == "set"):
        parser.error(
            "set needs values such as algorithm.learning_rate=2e-5" if arguments.action == "set" else "only set has values"
        )
    with refusing():
        if arguments.action == "stacks":
            reply: dict[str, Any] = {"text": asyncio.run(stacks_of(arguments.run))}
        else:
            reply = asyncio.run(steer(arguments.run, arguments.action, values))
    if arguments.json:
        print(json.dumps(reply, indent=2))
        return
    print(reply["text"])
    for key, value in reply["keys"].items() if arguments.action == "status" else ():
        print(f"  {key} = {inline(value)}")
