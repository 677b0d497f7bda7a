"""Each cache that is imported or unpickled, in a folder that another user made or could write."""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.foreign import ROOT_ONLY, USER, nobody_does, shared_folder
from titanrl.base.ownership import ALLOW, flaw
from titanrl.config.errors import ConfigError
from titanrl.processes.variables import CACHES, INDUCTOR, cache_folder, secure_caches

DEFAULTS = [name for name, default in CACHES.items() if default]
OTHERS = ("HF_HOME", "TRITON_HOME", ALLOW, "PYTHONSAFEPATH")


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:  # `tmp_path` must not follow TMPDIR
    """A folder like /tmp that is the home folder and TMPDIR, in an environment without variables of caches."""
    with shared_folder() as folder, patch.dict(os.environ):
        for name in (*CACHES, *OTHERS):
            os.environ.pop(name, None)
        os.environ["HOME"] = str(folder)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder


def test_safe_caches_keep_their_usual_folders(shared: Path, tmp_path: Path) -> None:
    os.environ |= {"HOME": str(tmp_path), "TORCH_HOME": str(tmp_path / "mine")}
    before = dict(os.environ)
    secure_caches()
    assert os.environ.pop(INDUCTOR).startswith(f"{shared}/torchinductor_")
    assert os.environ == before
    assert [path.stat().st_mode & 0o777 for path in shared.iterdir()] == [0o700]
    assert list(tmp_path.iterdir()) == []


@ROOT_ONLY
@pytest.mark.parametrize("name", CACHES)
def test_cache_set_to_a_folder_of_another_user_is_refused(name: str, shared: Path) -> None:
    os.environ["HOME"] = "/root"
    nobody_does(lambda: (shared / "evil").mkdir())
    os.environ[name] = str(shared / "evil" / "deeper")
    expected = rf'^{name}="{shared}/evil/deeper": only you .* belongs to the user {USER}\). Unset {name}'
    with pytest.raises(ConfigError, match=expected):
        secure_caches()
    os.environ[ALLOW] = "1"
    secure_caches()


@ROOT_ONLY
@pytest.mark.parametrize("name", DEFAULTS)
def test_default_cache_taken_by_another_user_is_replaced(name: str, shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    usual = cache_folder(name)
    assert usual.is_relative_to(shared)
    nobody_does(lambda: usual.mkdir(parents=True))
    assert USER in flaw(usual)
    with caplog.at_level(logging.WARNING):
        secure_caches()
    used = cache_folder(name)
    assert used is not None
    assert used != usual
    assert flaw(used) == ""
    assert f"{name}: " in caplog.text or "XDG_C" in caplog.text
    assert USER in caplog.text


def test_temporary_folder_in_which_others_can_replace_files_is_refused(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=r"^TMPDIR=.*must not be able to replace files.*can be written by every user"):
        secure_caches()


def test_modules_are_not_imported_from_a_working_directory_of_others(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["/usr/lib"])
    monkeypatch.chdir(tmp_path)
    secure_caches()
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.chdir(shared)
    secure_caches()
    (shared / "pickle.py").write_text("print('imported')")
    assert subprocess.run([sys.executable, "-c", "import pickle"], capture_output=True, text=True, check=True).stdout == ""


def test_defaults_are_those_of_the_libraries(shared: Path) -> None:
    """Fails if a library moves its cache; the table then has to follow."""
    import torch.hub
    import torch.utils.cpp_extension
    import triton.knobs
    import vllm.envs
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    os.environ["TRITON_HOME"] = str(shared)  # Triton reads the home folder when it is imported
    found = {
        INDUCTOR: default_cache_dir(),
        "TRITON_CACHE_DIR": triton.knobs.cache.dir,
        "TORCH_EXTENSIONS_DIR": torch.utils.cpp_extension.get_default_build_root(),
        "TORCH_HOME": torch.hub._get_torch_home(),
        "VLLM_CACHE_ROOT": vllm.envs.VLLM_CACHE_ROOT,
        "VLLM_CONFIG_ROOT": vllm.envs.VLLM_CONFIG_ROOT,
    }
    assert found == {name: str(cache_folder(name)) for name in found}
