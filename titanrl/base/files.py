"""Crash-safe files: atomic replacement of files, and folders that are committed with a list of digests.

`commit_folder` writes the list, `commit.json`, atomically as the last file. A folder without it is incomplete. `check_folder`
reads every byte again, and reports the first file that differs.
"""

import hashlib
import json
import os
import shlex
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO

from titanrl.base.errors import TitanRLError
from titanrl.base.ownership import open_regular

COMMIT_FILE = "commit.json"
"""Name of the file that marks a folder as complete."""
FORMAT = 1
"""Version of the layout of a committed folder."""

Digests = Mapping[str, str]
"""Digests by path relative to a folder. A digest is the size in bytes, a colon, and the SHA-256 in hexadecimal."""


class DamagedError(TitanRLError):
    """A file is missing, or its bytes differ from what was written; the message names the file."""


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add the path to an `OSError` without a file name, such as the error of a failed write."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def in_shell(path: Path) -> str:
    """Return a path as an argument of a shell command: quoted if it contains special characters, and never like an option."""
    text = str(path)
    text = f"./{text}" if text.startswith("-") else text
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8, which a terminal cannot show
        plain = (chr(byte) if 32 <= byte < 127 and chr(byte) not in "'\\" else f"\\x{byte:02x}" for byte in os.fsencode(text))
        return f"$'{''.join(plain)}'"
    return shlex.quote(text)


def why_no_folder(path: Path) -> str | None:
    """Return why a path is not a directory that can be read, such as `does not exist`; None if it is one."""
    try:
        with os.scandir(path):
            return None
    except FileNotFoundError:
        return "does not exist"
    except NotADirectoryError:
        return "is not a directory" if os.path.lexists(path) else "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def why_no_file(path: Path) -> str | None:
    """Return why a path is not a regular file that can be read, such as `is a directory`; None if it is one."""
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if stat.S_ISDIR(mode):
        return "is a directory"
    if not stat.S_ISREG(mode):
        return "is not a regular file"
    return None if os.access(path, os.R_OK) else "cannot be read (Permission denied)"


def why_not_writable(folder: Path) -> str | None:
    """Return why a folder cannot be created, or nothing can be created in it; None if both are possible.

    Permissions alone do not tell: a file system can be read-only, full, or, as /proc, without new files. So a temporary file is
    written where the first missing folder would be, and deleted again.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(prefix=".titanrl-", dir=existing, buffering=0) as file:
            file.write(b"\0")
    except OSError as error:
        return f"{existing} is not ({os.strerror(error.errno or 0)})"
    return None


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file atomically, so that readers see either the old or the new text; if `durable`, even after a power failure."""
    replace_lines(path, (text,), durable=durable)


def replace_lines(path: Path, lines: Iterable[str], *, durable: bool = False) -> None:
    """Write a file from an iterable of strings; see `replace_text`."""
    partial = path.with_name(path.name + ".partial")
    with naming(path):
        try:
            with open(partial, "w", encoding="utf-8", newline="", opener=open_regular) as file:  # may lie in a shared folder
                file.writelines(lines)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:  # an interrupt must not leave a partial file either
            with suppress(OSError):
                partial.unlink()
            raise
        if durable:
            sync_folder(path.parent)


@contextmanager
def writing_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file of a folder that is not committed yet; at the end it is on disk. Parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file as `writing_file` does."""
    with writing_file(path) as file:
        file.write(content)


def sync_file(path: Path) -> None:
    """Flush a file's content to disk, if the file exists."""
    with suppress(FileNotFoundError), naming(path), path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digests_of(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    """Return the digests of files below a folder. Threads read them in parallel, because hashing releases the GIL."""
    listed = list(paths)
    with ThreadPoolExecutor(max(1, min(len(listed), os.cpu_count() or 1))) as pool:
        digests = list(pool.map(_digest, listed))
    return {path.relative_to(folder).as_posix(): digest for path, digest in zip(listed, digests, strict=True)}


def _digest(path: Path) -> str:
    with naming(path), path.open("rb") as file:
        hashed = hashlib.file_digest(file, "sha256")  # hardware-accelerated, 2.5 times as fast as BLAKE2b
        return f"{file.tell()}:{hashed.hexdigest()}"


def commit_folder(folder: Path, digests: Digests) -> None:
    """Mark a folder as complete by writing the list of its files, which must all be on disk.

    `digests` are the known ones; those of the folder's other files are computed.
    """
    others = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.relative_to(folder).as_posix() not in digests
    ]
    digests = {**digests, **digests_of(folder, others)}
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)
    replace_text(folder / COMMIT_FILE, json.dumps({"format": FORMAT, "files": digests}, indent=1) + "\n", durable=True)
    sync_folder(folder.parent)


def uncommit_folder(folder: Path) -> None:
    """Mark a folder as incomplete, before its files are rewritten."""
    (folder / COMMIT_FILE).unlink(missing_ok=True)


def check_folder(folder: Path, *, needs: Iterable[str] = ()) -> None:
    """Raise `DamagedError` unless a folder is complete, and every listed file intact, among them the files that it `needs`."""
    listed = _read_commit(folder / COMMIT_FILE)
    for name in needs:
        if name not in listed:
            raise DamagedError(f"{COMMIT_FILE} does not list {name}")
    for name, digest in listed.items():
        expected = digest.partition(":")[0]
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except (OSError, ValueError) as error:
            raise DamagedError(f"{name!a:.80} cannot be read: {error!a:.80}") from error
        if str(size) != expected:
            raise DamagedError(f"{name} has {size} bytes, but {expected:.30} were written")
    try:
        found = digests_of(folder, (folder / name for name in listed))
    except OSError as error:
        raise DamagedError(f"{error.filename} cannot be read: {error.strerror}") from error
    for name, digest in listed.items():
        if found[name] != digest:
            raise DamagedError(f"{name} has other bytes than were written (SHA-256)")


def _read_commit(path: Path) -> dict[str, str]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing, so writing was not finished") from None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise DamagedError(f"{path.name} is not JSON") from None
    match content:
        case {"format": int(version), "files": dict(files)}:
            if version != FORMAT:
                raise DamagedError(f"{path.name} has format {version}, but this version of TitanRL reads format {FORMAT}")
            if all(_is_below(name) and isinstance(digest, str) for name, digest in files.items()):
                return files
    raise DamagedError(f"{path.name} does not list files with digests")


def _is_below(name: str) -> bool:
    """Return True for a normalized relative path that does not leave the folder."""
    path = PurePosixPath(name)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts and path.as_posix() == name
