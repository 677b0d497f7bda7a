"""Temporary folders, including those of killed processes."""

import subprocess
import sys
from pathlib import Path

from titanrl.temporary import TemporaryFolder

HOLD = (
    "import sys; from titanrl.temporary import TemporaryFolder; "
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
