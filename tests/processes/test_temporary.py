"""Temporary folders, including those of killed processes."""

import os
import subprocess
import sys
from pathlib import Path

from tests.foreign import ROOT_ONLY, nobody_does, shared_folder
from titanrl.processes.temporary import TemporaryFolder

HOLD = (
    "import sys; from titanrl.processes.temporary import TemporaryFolder; "
    "folder = TemporaryFolder(sys.argv[1]); print(folder.path, flush=True); sys.stdin.read()"
)


def test_folder_is_private_and_deleted_with_its_content(tmp_path: Path) -> None:
    folder = TemporaryFolder(str(tmp_path))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    folder.delete()
    folder.delete()
    assert list(tmp_path.iterdir()) == []


def test_new_folder_deletes_only_folders_of_killed_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout is not None]
    unrelated = tmp_path / "titanrl-other"
    unrelated.mkdir()
    holders[0].kill()
    holders[0].communicate()
    folder = TemporaryFolder(str(tmp_path))
    assert [path.exists() for path in paths] == [False, True]
    assert unrelated.exists()
    folder.delete()
    holders[1].communicate("")
    assert not paths[1].exists(), "a process that exits deletes its folder"


@ROOT_ONLY
def test_names_of_another_user_neither_block_nor_lead_to_deletion(tmp_path: Path) -> None:
    own = tmp_path / "titanrl-own"
    own.mkdir(mode=0o700)
    (own / "owner.lock").touch()
    (own / "file").touch()
    with shared_folder() as shared:

        def trap() -> None:
            for name in ("fifo", "link", "folder"):
                (shared / f"titanrl-{name}").mkdir()
            os.mkfifo(shared / "titanrl-fifo" / "owner.lock")
            (shared / "titanrl-link" / "owner.lock").symlink_to(own / "owner.lock")
            (shared / "titanrl-folder" / "owner.lock").mkdir()
            (shared / "titanrl-x").symlink_to(own)

        nobody_does(trap)
        folder = TemporaryFolder(str(shared))
        assert sorted(path.name.removeprefix("titanrl-") for path in shared.iterdir() if path != folder.path) == [
            "fifo", "folder", "link", "x"]  # fmt: skip
        assert (own / "file").exists()
        folder.delete()


def test_fifo_in_own_abandoned_folder_does_not_block(tmp_path: Path) -> None:
    abandoned = tmp_path / "titanrl-own"
    abandoned.mkdir(mode=0o700)
    os.mkfifo(abandoned / "owner.lock")
    TemporaryFolder(str(tmp_path)).delete()
    assert abandoned.exists(), "it is no folder of this program"
