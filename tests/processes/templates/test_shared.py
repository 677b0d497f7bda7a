"""Templates shared by several runs: when they are used, what their forks get, and the command `titanrl warm`."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes.templates import template_loads
from tests.processes.templates.test_template import Scribe, ended, with_fleet
from titanrl.launch.fleet import Fleet
from titanrl.launch.hosts import local_host
from titanrl.launch.supervision import ActorDiedError, Supervisor
from titanrl.processes.actors import concurrent_endpoint
from titanrl.processes.private_sockets import private_folder
from titanrl.processes.templates.shared import SHARED, digest_of_imports, shared_template
from titanrl.processes.templates.template import Template


def test_digest_changes_with_whatever_imports_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digest = partial(digest_of_imports, {"HF_HUB_OFFLINE": "1"}, template_loads.note)
    usual = digest()
    for name in ("TMPDIR", "XDG_RUNTIME_DIR", "MONARCH_CLIENT_TRACE_ID", SHARED):
        monkeypatch.setenv(name, str(tmp_path))
    assert digest() == usual
    assert digest_of_imports({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "4"}, template_loads.note) == usual
    others = [
        digest_of_imports({"HF_HUB_OFFLINE": "0"}, template_loads.note),
        digest_of_imports({"HF_HUB_OFFLINE": "1"}, template_loads.fail),
    ]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    others.append(digest())
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(tmp_path)
    others.append(digest())
    assert len({usual, *others}) == 5


def test_digest_changes_with_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr("titanrl.processes.templates.shared.PACKAGE", tmp_path)
    before = digest_of_imports({}, template_loads.note)
    os.utime(tmp_path / "__init__.py", ns=(1, 1))
    assert digest_of_imports({}, template_loads.note) != before


def test_run_without_matching_template_imports_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert shared_template({}, template_loads.note) is None
    monkeypatch.setenv(SHARED, str(tmp_path))
    assert shared_template({}, template_loads.note) is None
    (tmp_path / digest_of_imports({}, template_loads.note)).touch()  # not a socket
    assert shared_template({}, template_loads.note) is None


class Tourist(Scribe):
    """Also reports the folder of temporary files."""

    @concurrent_endpoint
    async def place(self) -> tuple[int, str]:
        return os.getppid(), tempfile.gettempdir()


def test_fleet_forks_from_shared_template_and_survives_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = private_folder()
    monkeypatch.setenv(SHARED, str(folder.path))
    (tmp_path / "mine").mkdir()

    async def spawn(fleet: Fleet) -> Any:
        fleet.prepare("scribe", {}, template_loads.read_temporary_folder)
        template = await fleet.template("scribe")
        environment = {"TMPDIR": str(tmp_path / "mine")}
        return fleet.spawn("scribe_0", local_host(), 1, environment, (), template).spawn("scribe", Tourist)

    async def work(fleet: Fleet, supervisor: Supervisor) -> None:
        load = template_loads.read_temporary_folder
        shared = Template({}, load, tmp_path / "shared.log", folder.path / digest_of_imports({}, load))
        parent, place = await supervisor.ask("scribe.place", (await spawn(fleet)).place.call_one(), 60)
        assert parent not in (os.getpid(), 0)
        assert place == str(tmp_path / "mine")
        assert not (tmp_path / "template_scribe.log").exists(), "the fleet started no template"
        shared.close()
        assert await asyncio.to_thread(wait_until, lambda: ended(parent))
        with pytest.raises(ActorDiedError, match="scribe_0_0"):
            await supervisor.ask("scribe.wait", asyncio.Event().wait(), 30)
        await supervisor.start_over([])
        await fleet.retire_all_but([])
        parent, _ = await supervisor.ask("scribe.place", (await spawn(fleet)).place.call_one(), 60)
        assert parent == os.getpid(), "the socket remains, but nothing listens: the process imports itself"

    with_fleet(tmp_path, work)
    folder.delete()


def wait_until(is_true: Callable[[], bool]) -> bool:
    """Poll for 30 seconds; return True once the condition holds."""
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        if is_true():
            return True
        time.sleep(0.01)
    return False


def test_warm_rejects_wrong_config_and_ends_in_order() -> None:
    command = [sys.executable, "-m", "titanrl.commands.warm", "--config", "quickstart"]
    wrong = subprocess.run([*command, "num_stepps=3"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "did you mean num_steps" in wrong.stderr
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a path short enough for sockets
        environment = os.environ | {"TMPDIR": folder}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as warm:
            assert wait_until(lambda: len(psutil.Process(warm.pid).children()) >= 4)
            assert len(list(Path(folder).glob("titanrl-*/*.log"))) == 4
            templates = psutil.Process(warm.pid).children()
            warm.terminate()  # during the imports
            assert warm.communicate()[1] == ""
        assert warm.returncode == 143
        assert psutil.wait_procs(templates, timeout=10)[1] == []
        assert [path.name for path in Path(folder).iterdir() if not path.name.startswith("torchinductor")] == []
