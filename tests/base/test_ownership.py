"""Paths that another user could have made or could change, and files and sockets of other users."""

import ast
import grp
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.foreign import GROUP, NOBODY, ROOT_ONLY, USER, as_nobody, nobody_does, shared_folder
from titanrl.base.ownership import (
    NO_LOG,
    SUFFIX,
    _is_own_group,
    claim_folder,
    flaw,
    is_own_peer,
    is_private,
    open_regular,
    own_flaw,
    protect_monarch_log,
)


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_folder_that_only_its_owner_can_write_has_no_flaw(mode: int, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(mode)
    (tmp_path / "link").symlink_to(own)
    assert [flaw(path) for path in (own, tmp_path / "link", own / "missing" / "deeper", own / ".." / "own")] == [""] * 4


def test_path_that_ends_above_or_in_a_link_to_there_has_the_flaw_of_that_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "up").symlink_to("..")
    (tmp_path / "inner" / "here").symlink_to(".")
    (tmp_path / "inner" / "root").symlink_to("/")
    tmp_path.chmod(0o1777)
    rule = f"{tmp_path} can be written by every user"
    assert flaw(tmp_path / "inner" / "..") == flaw(tmp_path / "inner" / "up") == rule
    assert flaw(tmp_path / "inner" / "here" / "up") == flaw(tmp_path / "inner" / "up" / "missing") == rule
    assert flaw(tmp_path / "inner" / "up" / "inner") == flaw(tmp_path / "inner" / "root") == flaw(Path("/")) == ""


def test_folder_that_disappears_while_it_is_examined_has_a_flaw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, examine = tmp_path / "folder", os.lstat
    folder.mkdir()

    def remove_after(path: Path) -> os.stat_result:
        status = examine(path)
        if path == folder and folder.exists():
            folder.rmdir()
        return status

    monkeypatch.setattr(os, "lstat", remove_after)
    assert flaw(folder) == f"{folder} cannot be examined (No such file or directory)"


def test_claimed_path_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    for name in ("file", "dangling"):
        assert claim_folder(tmp_path / name) == f"{tmp_path / name} is not a folder"


def test_group_of_root_with_other_members_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(0o770)
    group = own.stat().st_gid if os.geteuid() else 0
    name = grp.getgrgid(group).gr_name
    for members, found in (["root"], ""), (["alice"], f"{own} can be written by the group {name}"):
        entry = grp.struct_group((name, "x", group, members))
        monkeypatch.setattr(grp, "getgrgid", lambda number, entry=entry: entry)
        _is_own_group.cache_clear()
        assert flaw(own) == found
    monkeypatch.undo()
    _is_own_group.cache_clear()


@ROOT_ONLY
def test_in_a_user_namespace_names_of_others_are_not_trusted_where_all_can_create_them(shared: Path) -> None:
    """The kernel shows the same id for all users outside, so that a folder of theirs looks like one of root."""
    unshare = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine permits no user namespace")
    for name in ("usual", "usual/evil"):
        (shared / name).mkdir()
        (shared / name / "mine").mkdir()
    (shared / "link").symlink_to(shared / "usual" / "mine")
    for path in (shared / "usual" / "evil", shared / "link"):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    os.rename(shared / "usual" / "evil", shared / "evil")
    (shared / "usual" / "outside").mkdir()
    (shared / "usual" / "outside" / "mine").mkdir()
    os.chown(shared / "usual" / "outside", 12345, 12345)
    paths = [shared / "usual" / "mine", shared / "usual" / "outside" / "mine", shared / "evil" / "mine", shared / "link"]
    program = """
import sys
from pathlib import Path
from titanrl.base.ownership import flaw
print([flaw(Path(path)) for path in sys.argv[1:]])
"""
    result = subprocess.run([*unshare, sys.executable, "-c", program, *map(str, paths)], capture_output=True, text=True)
    trusted = ["", ""]
    refused = [f"{shared}/evil belongs to the user {USER}", f"{shared}/link is a link of the user {USER}"]
    assert ast.literal_eval(result.stdout) == trusted + refused, result.stderr


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o1777])
def test_folder_that_every_user_can_write_has_a_flaw(mode: int, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    own.chmod(mode)
    assert flaw(own) == own_flaw(own) == flaw(own / "missing") == f"{own} can be written by every user"
    assert (flaw(own, is_shared=True) == "") == bool(mode & 0o1000)
    (own / "inside").mkdir()
    assert (flaw(own / "inside") == "") == bool(mode & 0o1000), "only in a sticky folder does a name stay"


def test_loop_of_links_ends_with_a_flaw(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert flaw(tmp_path / "a").endswith("is a loop of links")


@ROOT_ONLY
def test_everything_that_another_user_made_has_a_flaw(shared: Path) -> None:
    own = shared / "own"
    own.mkdir()

    def make() -> None:
        (shared / "folder").mkdir()
        (shared / "folder" / "inner").mkdir()
        (shared / "link").symlink_to(own)

    nobody_does(make)
    os.chown(shared / "folder" / "inner", 0, 0)
    assert flaw(shared / "folder") == own_flaw(shared / "folder") == f"{shared}/folder belongs to the user {USER}"
    assert flaw(shared / "folder" / "inner") == f"{shared}/folder belongs to the user {USER}", "it can be renamed"
    assert flaw(shared / "link") == f"{shared}/link is a link of the user {USER}"
    (shared / "mine").symlink_to(shared / "folder")
    assert flaw(shared / "mine") == f"{shared}/folder belongs to the user {USER}"
    os.chown(own, 0, NOBODY)
    own.chmod(0o770)
    assert flaw(own) == f"{own} can be written by the group {GROUP}"


@ROOT_ONLY
def test_claimed_folder_cannot_be_taken_by_another_user(shared: Path) -> None:
    assert flaw(shared / "a" / "b") == f"{shared} can be written by every user"
    assert claim_folder(shared / "a" / "b") == ""
    assert [path.stat().st_mode & 0o777 for path in (shared / "a", shared / "a" / "b")] == [0o700] * 2
    nobody_does(lambda: (shared / "a" / "b" / "x").touch())
    assert list((shared / "a" / "b").iterdir()) == []
    nobody_does(lambda: (shared / "taken").mkdir())
    assert claim_folder(shared / "taken" / "b") == f"{shared}/taken belongs to the user {USER}"


def test_folder_is_private_only_with_mode_0700_and_without_link(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(own)
    assert [is_private(path) for path in (own, tmp_path / "link", tmp_path / "missing")] == [True, False, False]
    own.chmod(0o750)
    assert not is_private(own)


def test_only_regular_files_are_opened_and_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path)  # the path of a socket must be short
        listener.bind("socket")
        for name in ("fifo", "link", "socket", "."):
            for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
                with pytest.raises(OSError, match=str(tmp_path)):
                    open_regular(tmp_path / name, flags)
    with open(open_regular(tmp_path / "file", os.O_RDONLY)) as file:
        assert file.read() == "content"


@ROOT_ONLY
def test_peer_of_another_user_is_recognized(shared: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(shared / "s"))
        (shared / "s").chmod(0o777)
        listener.listen()

        def connect() -> bytes:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(shared / "s"))
                client.recv(1)
            return b""

        with as_nobody(connect), listener.accept()[0] as served:
            assert not is_own_peer(served)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(shared / "s"))
            assert is_own_peer(client)
            with listener.accept()[0] as served:
                assert is_own_peer(served)


def test_monarch_log_goes_to_a_folder_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(SUFFIX, raising=False)
    protect_monarch_log(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert SUFFIX not in os.environ


@ROOT_ONLY
def test_monarch_opens_no_log_in_a_folder_of_another_user(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    monkeypatch.setenv(SUFFIX, "")
    monkeypatch.delenv(SUFFIX)
    nobody_does(lambda: (shared / "root").mkdir())
    protect_monarch_log(shared)
    assert os.environ[SUFFIX] == NO_LOG


@pytest.mark.parametrize("opens_log", [True, False])
def test_monarch_uses_the_suffix_of_its_log(opens_log: bool) -> None:
    """Fails if a later Monarch moves its log; `protect_monarch_log` then has to follow."""
    program = """
import os
from monarch import _rust_bindings
for entry in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{entry}") and "monarch_log" in (link := os.readlink(f"/proc/self/fd/{entry}")):
        print(link, flush=True)
        os.unlink(link)
os._exit(0)
"""
    suffix = f"test{os.getpid()}" if opens_log else NO_LOG
    result = subprocess.run([sys.executable, "-c", program], env=os.environ | {SUFFIX: suffix}, capture_output=True, text=True)
    path = f"/tmp/{pwd.getpwuid(os.geteuid()).pw_name}/monarch_log_{suffix}.log"
    assert result.stdout.strip() == (path if opens_log else ""), result.stderr
    assert ("Falling back to stderr" in result.stderr) is not opens_log
