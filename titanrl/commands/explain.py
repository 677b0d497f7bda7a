"""Explain the loss of recorded tokens: `titanrl explain RUN STEP INDEX`."""

import argparse
import json
from collections.abc import Sequence

from titanrl.base import terminal
from titanrl.base.plugins import loading
from titanrl.config.dry_run import print_table, table_console
from titanrl.config.errors import inline, refusing
from titanrl.metrics.reading import open_run

COLUMNS = {
    "generator_logprob": ("lp_gen", ".4f"),
    "proximal_logprob": ("lp_prox", ".4f"),
    "logprob": ("lp", ".4f"),
    "ratio": ("ratio", ".4f"),
    "clip": ("clip", ""),
    "correction": ("corr", ".4g"),
    "advantage": ("adv", ".4g"),
    "weight": ("weight", ".3e"),
    "loss": ("loss", ".3e"),
    "gradient": ("gradient", ".3e"),
    "share": ("share", ".1%"),
}
"""Heading and format of the printed columns."""


def main(argv: Sequence[str] | None = None, *, prog: str = "titanrl explain") -> None:
    """Print how the tokens of a group entered the loss of a step."""
    terminal.prepare()
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show how each token of a recorded group entered the loss of a step: log-probabilities of generator, "
        "proximal and current policy, ratio, clipping, correction, advantage, loss weight, loss, and share of the gradient.",
    )
    parser.add_argument("run", type=terminal.path, metavar="RUN", help="directory of a run")
    parser.add_argument("step", type=int, metavar="STEP", help="step, from 1")
    parser.add_argument("index", type=int, metavar="INDEX", help="prompt of the group: its index in the record")
    parser.add_argument("--json", action="store_true", help="print the columns as JSON")
    parser.add_argument(
        "--load-loss", action="store_true", help="import the custom loss of the run, which executes its code with your rights"
    )
    arguments = parser.parse_args(argv)
    with loading():
        from titanrl.run.explanation import explain  # imports torch, which help does not need
    with refusing():
        run = open_run(arguments.run)
        segments = explain(run, arguments.step, arguments.index, loads_loss=arguments.load_loss)
    if arguments.json:
        print(json.dumps([segment.as_dict() for segment in segments], indent=1))
        return
    console = table_console()
    for segment in segments:
        columns = segment.columns
        texts = run.token_texts(columns["token_id"]) if segment.completion is not None else [""] * len(columns["position"])
        rows = [
            [str(position), inline(text, 24), *(format(columns[name][i], spec) for name, (_, spec) in COLUMNS.items())]
            for i, (position, text) in enumerate(zip(columns["position"].tolist(), texts, strict=True))
        ]
        completion = "" if segment.completion is None else f", completion {segment.completion}"
        title = f"step {segment.step}, update {segment.update}, group {segment.index}{completion}, sequence {segment.segment}"
        print_table(console, title, ("token", "text", *(heading for heading, _ in COLUMNS.values())), rows)
    if left_out := segments[0].left_out:
        console.print(f"not included: {', '.join(left_out)}", markup=False, highlight=False)
