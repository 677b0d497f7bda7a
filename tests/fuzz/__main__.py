"""Fuzz TitanRL for some minutes: `python -m tests.fuzz --minutes 5`. Exits with 1 if an input broke something."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from tests.fuzz.targets import TARGETS

LIMIT_S = 20
"""Time limit of one input in seconds."""
SHARE_OF_COMMANDS = 0.4
"""Largest share of the time that `commands`, which starts real processes, may take."""


class TooSlow(BaseException):
    """An input exceeded the time limit. A BaseException, so that no code under test catches it."""


@dataclass
class Tally:
    """Results of one target."""

    codes: Counter[int] = field(default_factory=Counter)
    longest_s: float = 0.0
    total_s: float = 0.0


def attempt(target: str, seed: str, parent: Path, tally: Tally) -> str | None:
    """Try one input; return the traceback if it fails, else None."""
    folder = parent / "case"
    folder.mkdir()
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        tally.codes[TARGETS[target](Random(f"{target} {seed}"), folder)] += 1
    except (Exception, SystemExit, TooSlow):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = time.monotonic() - started
        tally.longest_s, tally.total_s = max(tally.longest_s, seconds), tally.total_s + seconds
        shutil.rmtree(folder)
    return None


def stop_slow(number: int, frame: FrameType | None) -> None:
    """Interrupt an input that takes too long."""
    raise TooSlow(f"longer than {LIMIT_S} s")


def main() -> int:
    """Fuzz all targets; print every failure and the totals."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Feed hostile inputs to all code that reads files."
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="time to spend")
    parser.add_argument("--seed", default="0", help="seed of the inputs")
    parser.add_argument("--only", choices=TARGETS, help="fuzz only this target")
    parser.add_argument("--case", help="repeat one failure, given as the printed TARGET:SEED")
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, stop_slow)
    tallies = {name: Tally() for name in TARGETS if arguments.only in (None, name)}
    failures = 0
    with tempfile.TemporaryDirectory(prefix="titanrl-fuzz-") as scratch:
        if arguments.case:
            target, _, seed = arguments.case.partition(":")
            print(attempt(target, seed, Path(scratch), Tally()) or "no failure")
            return 0
        deadline, number = time.monotonic() + 60 * arguments.minutes, 0
        while time.monotonic() < deadline:
            number += 1
            seed = f"{arguments.seed}.{number}"
            spent = sum(tally.total_s for tally in tallies.values())
            for target, tally in tallies.items():
                if target == "commands" and len(tallies) > 1 and tally.total_s > SHARE_OF_COMMANDS * spent:
                    continue
                failure = attempt(target, seed, Path(scratch), tally)
                if failure is not None:
                    failures += 1
                    print(f"--- {target}:{seed}\n{failure}", flush=True)
    for target, tally in tallies.items():
        codes = ", ".join(f"exit {code}: {count:,}" for code, count in sorted(tally.codes.items()))
        print(f"{target:12} {tally.codes.total():7,} inputs  {codes:45} longest {tally.longest_s:.1f} s")
    print(f"{failures} failures in {sum(tally.codes.total() for tally in tallies.values()) + failures:,} inputs")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
