"""The `titanrl` command. It imports only the requested subcommand's module, so that help appears without delay."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from titanrl.base import __version__, refuse_hiding, terminal

COMMANDS = {
    "train": ("titanrl.grpo:main", "train a policy, or continue a run"),
    "sft": ("titanrl.sft:main", "fine-tune a model on examples, or continue a fine-tuning run"),
    "distill": ("titanrl.distill:main", "distill a teacher into a policy on the policy's samples"),
    "submit": (
        "titanrl.commands.jobs:submit",
        "submit a configuration as one Slurm job, with the controller on its first node",
    ),
    "manifest": ("titanrl.commands.jobs:manifest", "print the Kubernetes objects of a run, for kubectl apply"),
    "evaluate": ("titanrl.commands.evaluate:main", "evaluate a model on the evaluation sets of a configuration"),
    "board": ("titanrl.commands.runs:board", "see runs in a browser, while they run"),
    "compare": ("titanrl.commands.runs:compare", "compare the scores and configurations of runs"),
    "timeline": ("titanrl.commands.runs:timeline", "show which process of a run worked, and which waited for what"),
    "explain": ("titanrl.commands.runs:explain", "show how the tokens of a recorded group entered the loss"),
    "steer": ("titanrl.commands.runs:steer", "pause a run in progress, or change keys of its configuration"),
    "serve": ("titanrl.commands.serve:main", "serve a policy over HTTP, as OpenAI and Anthropic do"),
    "chat": ("titanrl.commands.serve:chat", "chat with a trained policy"),
    "warm": ("titanrl.commands.warm:main", "keep packages imported, so that runs on this machine start faster"),
    "configs": ("titanrl.config.__main__:configs", "list the configurations shipped with TitanRL, or copy one"),
    "doctor": (
        "titanrl.commands.doctor:main",
        "check this machine or the hosts of a configuration, or install the required packages",
    ),
}
"""Function and help text of each subcommand. The function takes the arguments and `prog`, and raises `SystemExit` if the exit
code is not 0."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    terminal.prepare()
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="titanrl",
        description="Post-train language models with reinforcement learning.",
        epilog="Run `titanrl COMMAND --help` for the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"titanrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    command = parser.parse_args(arguments[:1]).command  # the subcommand's parser handles the other arguments
    # A script has its own folder on `sys.path`. Add the working directory, as `python -m` does, to find user modules.
    sys.path.insert(0, folder := os.getcwd())
    module, _, function = COMMANDS[command][0].partition(":")
    refuse_hiding(folder)
    try:
        imported = import_module(module)
    except Exception as error:  # a module of the user in place of a package may fail in any way; others are raised again
        refuse_hiding(folder, error)
        raise
    getattr(imported, function)(arguments[1:], prog=f"titanrl {command}")


if __name__ == "__main__":
    main()
