"""Helpers that build the package and install it in environments outside the repository."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


def repository_files() -> list[str]:
    """Return the files that git tracks or would track; a symbolic link is one file."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted(name for name in set(names) if (ROOT / name).exists())


def copy_repository(folder: Path) -> Path:
    """Copy the files that git tracks or would track, preserving symbolic links; return the folder."""
    names = "\n".join(repository_files()).encode()
    archive = subprocess.run(["tar", "cf", "-", "-T", "-"], cwd=ROOT, input=names, check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "xf", "-"], cwd=folder, input=archive, check=True)
    return folder


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build an `sdist` or a `wheel` as pip does, with this environment's setuptools; return the file."""
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    built = subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True, text=True)
    return folder / built.stdout.splitlines()[-1]


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack a source distribution; return the folder of the project."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


@dataclass(frozen=True)
class Environment:
    """A virtual environment outside the repository."""

    folder: Path

    @property
    def packages(self) -> Path:
        """Folder of its packages."""
        (folder,) = self.folder.glob("lib/python*/site-packages")
        return folder

    def run(self, *command: str, cwd: Path, timeout_s: float = 120, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run one of its programs, without this process's environment variables that point into the repository."""
        inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [f"{self.folder}/bin/{command[0]}", *command[1:]],
            cwd=cwd,
            env={**inherited, "PATH": f"{self.folder}/bin{os.pathsep}{inherited['PATH']}"},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def linked_environment(folder: Path, *, without: Sequence[str]) -> Environment:
    """Create an environment linked to this environment's packages, except TitanRL and the named distributions."""
    venv.create(folder, symlinks=True)
    environment = Environment(folder)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        name = entry.name.split("-")[0].lower()
        if "titanrl" not in name and name not in without:
            (environment.packages / entry.name).symlink_to(entry)
    return environment


def install_wheel(wheel: Path, environment: Environment) -> None:
    """Install a wheel with this environment's pip, without its dependencies."""
    python = f"{environment.folder}/bin/python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True)
