"""Counts of the rows of a data source that are used, and of those that are left out, by reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        """Return the row of the dry run's table: key, rows, to train on, held out, left out."""
        numbers = (self.num_rows, self.num_training, self.num_heldout)
        return (self.key, *(f"{number:,}" for number in numbers), self.reasons() or "0")

    def messages(self) -> list[str]:
        """Return the lines for the console of a run. `is_mostly_left_out` says whether the first is a warning."""
        return [f"{self.key}: {text}" for text in (self.reasons(), *self.notes) if text]
