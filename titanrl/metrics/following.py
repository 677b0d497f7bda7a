"""Follow the files of a run while it writes them: read only what was appended, without parsing the rest again."""

import os
from pathlib import Path
from typing import Any

from titanrl.carriers.record import decode

READ_BYTES = 1 << 24
"""Bytes that are read at once."""


class Follower:
    """Reads a file of JSON lines, also one that does not exist yet or that a restart of the run replaces by a shorter one."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self.path = path
        self._at = 0  # end of the last whole line that was read
        self._inode: int | None = None

    def take(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the objects appended since the last call, at most `READ_BYTES` of them, and whether the file was replaced.

        If it was, the objects are those of the whole file. Lines that are no JSON objects are left out.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return [], False
        with file:
            found = os.fstat(file.fileno())
            is_replaced = self._inode not in (None, found.st_ino) or found.st_size < self._at
            if is_replaced:
                self._at = 0
            self._inode = found.st_ino
            file.seek(self._at)
            text = file.read(READ_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        rows = map(decode, whole.splitlines())
        return [row for row in rows if row is not None], is_replaced
