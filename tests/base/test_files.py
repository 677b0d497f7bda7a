"""Atomic files, and folders committed with digests."""

import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from titanrl.base.files import (
    COMMIT_FILE,
    DamagedError,
    check_folder,
    commit_folder,
    digests_of,
    in_shell,
    replace_text,
    uncommit_folder,
    why_no_file,
    why_no_folder,
)


def write_folder(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"abc" * 1000)
    (folder / "inner" / "groups").write_bytes(b"")
    commit_folder(folder, digests_of(folder, [folder / "weights"]))
    return folder


def test_commit_lists_every_file_with_size_and_digest(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step-1")
    content = json.loads((folder / COMMIT_FILE).read_text())
    assert content["format"] == 1
    assert content["files"] == {
        "weights": f"3000:{hashlib.sha256(b'abc' * 1000).hexdigest()}",
        "inner/groups": f"0:{hashlib.sha256(b'').hexdigest()}",
    }
    check_folder(folder, needs=("weights",))


def flip(folder: Path) -> None:
    with (folder / "weights").open("r+b") as file:
        file.seek(1500)
        file.write(b"X")


def edit_commit(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / COMMIT_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "weights has other bytes than were written"),
        (lambda folder: os.truncate(folder / "weights", 2999), "weights has 2999 bytes, but 3000 were written"),
        (lambda folder: (folder / "weights").unlink(), "weights is missing"),
        (lambda folder: (folder / "inner" / "groups").unlink(), "inner/groups is missing"),
        (lambda folder: (folder / COMMIT_FILE).unlink(), "commit.json is missing, so writing was not finished"),
        (lambda folder: (folder / COMMIT_FILE).write_bytes(b""), "commit.json is not JSON"),
        (lambda folder: (folder / COMMIT_FILE).write_bytes(b"\0" * 400), "commit.json is not JSON"),
        (lambda folder: (folder / COMMIT_FILE).write_bytes(b"[" * 100_000), "commit.json is not JSON"),
        (lambda folder: (folder / COMMIT_FILE).write_bytes(b"9" * 5000), "commit.json is not JSON"),
        (lambda folder: os.truncate(folder / COMMIT_FILE, 90), "commit.json is not JSON"),
        (edit_commit(format=2), "commit.json has format 2, but this version of TitanRL reads format 1"),
        (edit_commit(files=[]), "commit.json does not list files with digests"),
        (edit_commit(files={"../weights": "1:a"}), "commit.json does not list files with digests"),
        (edit_commit(files={"weights": "3000:a", "a\0b": "1:a"}), "cannot be read"),
        (edit_commit(files={}), "commit.json does not list weights"),
    ],
)
def test_damaged_file_is_reported_by_name(damage: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step-1")
    damage(folder)
    with pytest.raises(DamagedError) as raised:
        check_folder(folder, needs=("weights",))
    assert reason in str(raised.value)


def test_rewritten_folder_is_incomplete(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "step-1")
    uncommit_folder(folder)
    uncommit_folder(folder)
    with pytest.raises(DamagedError, match="not finished"):
        check_folder(folder)


def test_failed_replacement_keeps_old_text_and_names_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_text(path, "old", durable=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # which would end this process
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        with pytest.raises(OSError, match=r"File too large: '.*state\.json'") as raised:
            replace_text(path, "new", durable=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert raised.value.errno == errno.EFBIG
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "name", ["plain", "two words", "it's", "-dash", "$HOME", "a;b", "new\nline", os.fsdecode(b"caf\xe9 'x\\")]
)
def test_path_in_a_printed_command_is_one_argument_for_a_shell(name: str) -> None:
    shown = subprocess.run(["bash", "-c", f"printf %s {in_shell(Path(name))}"], capture_output=True, check=True).stdout
    assert Path(os.fsdecode(shown)) == Path(name)
    assert not in_shell(Path(name)).startswith("-")


def test_reasons_why_a_path_is_no_file_or_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    reasons = [
        (why_no_file(tmp_path / name), why_no_folder(tmp_path / name)) for name in ("none", "file", "file/x", "pipe", ".")
    ]
    assert reasons == [
        ("does not exist", "does not exist"),
        (None, "is not a directory"),
        ("does not exist", "does not exist"),
        ("is not a regular file", "is not a directory"),
        ("is a directory", None),
    ]
    long = tmp_path / ("a" * 300)
    assert why_no_file(long) == why_no_folder(long) == "cannot be read (File name too long)"
