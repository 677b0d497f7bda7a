"""Rows of data sources: read them from JSONL, Parquet and Arrow files, count them by use, and recognize them after a restart.

Errors name file and row. The digests of the files let a resumed run recognize the data that it was trained on.
"""

import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titanrl.base.files import digests_of, replace_text
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError, inline
from titanrl.config.source import ACCEPTS_CHANGED_DATA, data_file

Format = Literal["jsonl", "parquet", "arrow"]
"""Format of data files. `arrow` is a data set saved by `save_to_disk` of Hugging Face datasets, or one Arrow file."""

FORMATS: Mapping[str, Format] = {"jsonl": "jsonl", "parquet": "parquet", "arrow": "arrow"}
"""Formats by name."""
_MAX_NESTING = 100
"""Maximum nesting of a line. Entries are pickled, which fails for values nested a few hundred levels deep."""
_BATCH_ROWS = 1024
_SPLITS, _STATE = "dataset_dict.json", "state.json"  # written by `save_to_disk`: of several splits, and of one
_MAGIC = {
    b"\x1f\x8b": ("is compressed with gzip", "decompress it, for example with gunzip"),
    b"\x28\xb5\x2f\xfd": ("is compressed with zstd", "decompress it, for example with unzstd"),
    b"BZh": ("is compressed with bzip2", "decompress it, for example with bunzip2"),
    b"\xfd7zXZ": ("is compressed with xz", "decompress it, for example with unxz"),
    b"PK\x03\x04": ("is a ZIP archive", "extract it"),
    b"PAR1": ("is a Parquet file", "name it .parquet, and set data.source to parquet for prompts"),
    b"ARROW1": ("is an Arrow file", "name it .arrow, and set data.source to arrow for prompts"),
    b"\xff\xff\xff\xff": ("is an Arrow file", "name it .arrow, and set data.source to arrow for prompts"),
    b"\xff\xfe": ("is encoded as UTF-16", "save it as UTF-8"),
    b"\xfe\xff": ("is encoded as UTF-16", "save it as UTF-8"),
}
"""First bytes of files that are often mistaken for JSONL, with the problem and the fix."""


class BadRow(ValueError):
    """Raised for a row that cannot be used."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix[:1].upper()}{self.fix[1:]}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a data source."""

    content: Any
    """Values by column. A custom source may return anything else."""
    values: Mapping[str, object]
    """Configuration key of the source with its value, for error messages."""
    place: str
    """Place of the row in the source, for error messages."""
    is_blank: bool = False
    """True for a line of a file that has only white space, and no content."""

    def broken(self, error: BadRow) -> BrokenRules:
        """Return the error of this row as a broken rule."""
        return BrokenRules(BrokenRule(self.values, f"{self.place}: {error.problem}", error.fix))


def format_of(path: Path) -> Format:
    """Return the format of a file, a directory or a pattern, by its name or contents. The default is JSONL."""
    if path.is_dir():
        saved = any((path / name).is_file() for name in (_SPLITS, _STATE))
        return "arrow" if saved else "parquet" if next(path.glob("*.parquet"), None) is not None else "jsonl"
    return FORMATS.get(path.suffix.removeprefix("."), "jsonl")


def read_rows(path: Path, key: str, kind: Format) -> Iterator[Row]:
    """Yield the rows of a file, of all files of a directory, or of all files that match a pattern.

    `path` may also be the name of a shipped file; `key` is its configuration key, for error messages. Raise `BrokenRules` if a
    file cannot be read, or a line is invalid.
    """
    for file in data_files(path, key, kind):
        try:
            yield from _read_jsonl(file, key) if kind == "jsonl" else _read_table(file, key, kind)
        except OSError as error:  # Arrow also raises it for a corrupt file
            rule = f"must be readable ({error.strerror or inline(str(error))})"
            raise _broken(file, key, rule, "correct the file or its permissions") from error


def data_files(path: Path, key: str, kind: Format) -> list[Path]:
    """Return the files that a path refers to, in reading order. Raise `BrokenRules` if there is no such file."""
    path = data_file(path)
    if os.path.isfile(path):  # unlike Path.is_file, does not raise for a name that is too long
        return [path]
    if os.path.isdir(path):
        return _files_in(path, key, kind)
    files = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(name)]
    if not files:
        rule = "file not found" if glob.escape(str(path)) == str(path) else "no file matches the pattern"
        others = f"a directory of .{kind} files or a pattern such as data/train-*.{kind} also works"
        fix = f"correct the path, which is relative to the current directory; {others}"
        raise _broken(path, key, rule, fix)
    return files


def _files_in(folder: Path, key: str, kind: Format) -> list[Path]:
    if (folder / _SPLITS).is_file():
        splits = _read_json(folder / _SPLITS, key).get("splits", [])
        rule = f"is a saved data set with the splits {', '.join(map(str, splits))}"
        raise _broken(folder, key, rule, f"name one of them, such as {folder}/{splits[0] if splits else 'train'}")
    found = format_of(folder)
    if found == "arrow" and kind == "arrow":
        try:
            return [folder / entry["filename"] for entry in _read_json(folder / _STATE, key)["_data_files"]]
        except (LookupError, TypeError):
            raise _broken(folder, key, f"{_STATE} lists no data files", "save the data set again") from None
    files = sorted(file for file in folder.glob(f"*.{kind}") if file.is_file())
    if not files:
        holds = f", but it holds {found} data" if found != kind else ""
        rule = f"a directory must contain .{kind} files{holds}"
        raise _broken(folder, key, rule, f"set data.source to one of {', '.join(FORMATS)}, or give another path")
    return files


def data_digest(path: Path, key: str, kind: Format) -> str:
    """Return a digest of the contents of the files that a path refers to. Raise `BrokenRules` if one cannot be read."""
    files = data_files(path, key, kind)
    try:
        digests = digests_of(Path("/"), [file.absolute() for file in files])
    except OSError as error:
        raise _broken(path, key, f"must be readable ({error.strerror})", "correct the permissions") from None
    return hashlib.sha256("\n".join(digests[file.absolute().as_posix().lstrip("/")] for file in files).encode()).hexdigest()


def check_unicode(content: Any) -> None:
    """Raise `BadRow` for a string with a lone surrogate, which no encoding and no tokenizer accepts."""
    try:
        json.dumps(content, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(error.object[error.start]):04X}"
        raise BadRow(f"must be valid Unicode, but contains the lone surrogate {found}", "remove or replace it") from None


def _read_jsonl(path: Path, key: str) -> Iterator[Row]:
    with path.open("rb") as file:
        start = file.read(6)
        for magic, (problem, fix) in _MAGIC.items():
            if start.startswith(magic):
                raise _broken(path, key, f"must be a JSONL file, but {problem}", fix)
        file.seek(0)
        for number, line in enumerate(file, start=1):
            blank = Row(content={}, values={key: str(path)}, place=f"{path}:{number}", is_blank=True)
            try:
                yield replace(blank, content=_parse(line), is_blank=False) if line.strip() else blank
            except BadRow as error:
                raise blank.broken(error) from error


def _parse(line: bytes) -> dict[str, Any]:
    nesting = BadRow(f"must not be nested deeper than {_MAX_NESTING} levels", "flatten the object")
    fix, for_lists = "write one JSON object per line", ", for example with: jq -c '.[]' FILE"
    try:
        content = json.loads(line, object_pairs_hook=_object)
    except RecursionError:
        raise nesting from None
    except BadRow:
        raise
    except UnicodeDecodeError as error:
        raise BadRow(f"must be UTF-8 text ({error})", "save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        fix += for_lists if line.lstrip().startswith(b"[") else ""
        if b"\r" in line.rstrip():
            fix = "end lines with a line feed, not with a carriage return alone"
        raise BadRow(f"must be valid JSON ({error})", fix) from error
    except ValueError as error:  # Python converts no longer ones
        raise BadRow(
            f"must not have an integer of more than {sys.get_int_max_str_digits():,} digits", "write it as text"
        ) from error
    if not isinstance(content, dict):
        fix += for_lists if isinstance(content, list) else ""
        raise BadRow(f"must be a JSON object, got {type(content).__name__}", fix)
    if _is_nested(content, _MAX_NESTING):
        raise nesting
    check_unicode(content)
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRow(f"the key {inline(twice)} occurs more than once in an object", "rename or remove one of them")
    return content


def _is_nested(value: Any, levels: int) -> bool:
    """Return True if a JSON value is nested deeper than `levels`."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_nested(child, levels - 1) for child in children)


def _read_table(file: Path, key: str, kind: Format) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise _broken(file, key, f"the package {error.name} must be installed to read it", "pip install pyarrow") from error
    try:
        for number, content in enumerate(_table_rows(file, kind)):
            yield Row(content=content, values={key: str(file)}, place=f"row {number}")
    except pyarrow.ArrowException as error:
        what = "a Parquet file" if kind == "parquet" else "an Arrow file"
        source = f"correct {key}" + (" or data.source" if key == "data.path" else "")
        raise _broken(file, key, f"must be {what} ({inline(str(error))})", source) from error


def _table_rows(file: Path, kind: Format) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet

    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(_BATCH_ROWS):
                yield from batch.to_pylist()
        return
    with pyarrow.memory_map(str(file)) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        batches: Any = pyarrow.ipc.open_file(mapped) if is_file else pyarrow.ipc.open_stream(mapped)
        if is_file:
            batches = map(batches.get_batch, range(batches.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                yield from batch.slice(start, _BATCH_ROWS).to_pylist()


def _read_json(file: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(file, key, f"must be a readable JSON file ({error})", "save the data set again") from None
    return content if isinstance(content, dict) else {}


def _broken(path: Path, key: str, rule: str, fix: str) -> BrokenRules:
    return BrokenRules(BrokenRule({key: str(path)}, rule, fix))


# Rows by use

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


RECORD = "data.json"
"""File in the run directory with source and digest of each data key."""


def record_data(run_dir: Path, selections: Sequence[Selection]) -> None:
    """Write the digests of a run's data. Generated tasks have none."""
    found = {found.key: {"source": found.source, "digest": found.digest} for found in selections if found.digest is not None}
    if found:
        replace_text(run_dir / RECORD, json.dumps(found, indent=2) + "\n")


def check_recorded(run_dir: Path, selections: Sequence[Selection], *, accepts_changes: bool) -> list[str]:
    """Compare the data of a resumed run with the recorded digests; return remarks about changes that are accepted.

    A change is accepted if the configuration now names another source, which is a request for it, or with `accepts_changes`.
    Data that moved without a change are the same. Raise `ConfigError` if the contents of a source have changed, or the record
    cannot be read.
    """
    recorded = _recorded(run_dir / RECORD)
    remarks, refused = [], []
    for found in selections:
        before = recorded.get(found.key)
        if found.digest is None or before is None or before["digest"] == found.digest:
            continue
        changed = f"{found.key}: the data differ from those that the run was trained on"
        if before["source"] != found.source:
            remarks.append(f"{changed}: now {found.source}, before {before['source']}")
        elif accepts_changes:
            remarks.append(f"{changed} ({found.source}; {ACCEPTS_CHANGED_DATA})")
        else:
            refused.append(
                f"{changed} (got {found.source}). Restore them, or continue on the changed data with {ACCEPTS_CHANGED_DATA}, "
                "which takes prompts and examples in another order."
            )
    if refused:
        raise ConfigError(*(f"--resume: {text}" for text in refused))
    return remarks


def _recorded(file: Path) -> dict[str, dict[str, Any]]:
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
