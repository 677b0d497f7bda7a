"""The digests of a run's data in its directory, and the check that a resumed run continues on the same data."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanrl.base.files import replace_text
from titanrl.config.errors import ConfigError
from titanrl.data.selection import Selection

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
