"""Rows of a data source by use, and the digests by which a resumed run recognizes the data that it was trained on."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanrl.base.files import replace_text
from titanrl.config.errors import ConfigError

TOO_LONG = "longer than data.max_prompt_tokens"
DUPLICATE = "duplicates"
OTHER_ANSWER = "duplicates with another answer"
BLANK = "blank lines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Rows of a source by use.

    Example: `Selection(key="data.path", source="/data/train.jsonl", num_training=10, num_heldout=2, left_out={TOO_LONG: 60})`
    """

    key: str
    """Configuration key of the source."""
    source: str
    """Value of the key. Paths are absolute."""
    num_training: int
    """Number of rows to train on; for a generated task, of those that were tried."""
    num_heldout: int = 0
    """Number of rows held out for evaluation."""
    num_other: int = 0
    """Number of usable rows that an evaluation set does not take, because they are in the other split."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Number of rows left out, by reason."""
    notes: tuple[str, ...] = ()
    """Other facts about the rows."""
    digest: str | None = None
    """Digest of the contents; None for a generated task."""

    @property
    def num_left_out(self) -> int:
        """Number of rows left out."""
        return sum(self.left_out.values())

    @property
    def num_rows_used(self) -> int:
        """Number of rows that are not left out."""
        return self.num_training + self.num_heldout + self.num_other

    @property
    def num_rows(self) -> int:
        """Number of rows of the source."""
        return self.num_rows_used + self.num_left_out

    @property
    def is_mostly_left_out(self) -> bool:
        """True if more than half of the rows are left out."""
        return 2 * self.num_left_out > self.num_rows

    def reasons(self) -> str:
        """Return the rows left out, such as `60 of 72 rows left out: 58 longer than ..., 2 duplicates`; empty if none is."""
        if not self.num_left_out:
            return ""
        listed = ", ".join(f"{number:,} {reason}" for reason, number in self.left_out.items() if number)
        what = "tried items" if self.digest is None else "rows"
        return f"{self.num_left_out:,} of {self.num_rows:,} {what} left out: {listed}"

    def row(self) -> tuple[str, ...]:
        """Return the row of the dry run's table: key, rows, to train on, held out, left out.

        A generated task has no number of rows: its items are generated when they are needed.
        """
        if self.digest is None:
            return self.key, "generated", "", "", self.reasons() or f"0 of {self.num_rows:,} tried items"
        numbers = (self.num_rows, self.num_training, self.num_heldout)
        return (self.key, *(f"{number:,}" for number in numbers), self.reasons() or "0")

    def messages(self) -> list[str]:
        """Return the lines for the console of a run. `is_mostly_left_out` says whether the first is a warning."""
        return [f"{self.key}: {text}" for text in (self.reasons(), *self.notes) if text]


FILE = "data.json"
"""File in the run directory with source and digest of each data key."""
FLAG = "--accept-changed-data"
"""Flag of the command line that lets a resumed run continue on changed data."""


def record_data(run_dir: Path, selections: Sequence[Selection]) -> None:
    """Write the digests of a run's data. Generated tasks have none."""
    found = {found.key: {"source": found.source, "digest": found.digest} for found in selections if found.digest is not None}
    if found:
        replace_text(run_dir / FILE, json.dumps(found, indent=2) + "\n")


def check_recorded(run_dir: Path, selections: Sequence[Selection], *, accepts_changes: bool) -> list[str]:
    """Compare the data of a resumed run with the recorded digests; return remarks about changes that are accepted.

    A change is accepted if the configuration now names another source, which is a request for it, or with `accepts_changes`.
    Data that moved without a change are the same.

    Raises:
        ConfigError: The contents of a source have changed, or the record cannot be read.
    """
    recorded = _read(run_dir / FILE)
    remarks, refused = [], []
    for found in selections:
        before = recorded.get(found.key)
        if found.digest is None or before is None or before["digest"] == found.digest:
            continue
        changed = f"{found.key}: the data differ from those that the run was trained on"
        if before["source"] != found.source:
            remarks.append(f"{changed}: now {found.source}, before {before['source']}")
        elif accepts_changes:
            remarks.append(f"{changed} ({found.source}; {FLAG})")
        else:
            refused.append(
                f"{changed} (got {found.source}). Restore them, or continue on the changed data with {FLAG}, which takes "
                "prompts and examples in another order."
            )
    if refused:
        raise ConfigError(*(f"--resume: {text}" for text in refused))
    return remarks


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the record of a run; empty for a run without one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {str(key): {"source": str(value["source"]), "digest": str(value["digest"])} for key, value in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--resume: the record of the data cannot be read: {error} (got {file}). Restore or delete it."
        ) from None
