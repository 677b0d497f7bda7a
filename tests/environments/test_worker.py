"""Environments in real processes: reuse, time limits, crashes, output, other interpreters, and the death of the parent."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
import venv
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.environments.episodes import episode, says
from tests.processes.processes import children, descendants, num_leaked, wait_until_gone
from titanrl.environments import (
    Done,
    Environment,
    EnvironmentDied,
    EnvironmentFailure,
    EnvironmentPool,
    EnvironmentTimeout,
    Message,
    Observation,
    ProcessOptions,
)

SCRIPTED = '''
import os, subprocess, sys, threading, time
from titanrl.environments import Done, Episode, Message, Observation, Tool

class Scripted:
    """Executes the code in each message."""

    def __init__(self, greeting="hello"):
        self.greeting = greeting

    async def reset(self, episode):
        if episode.question == "hang":
            time.sleep(60)
        self.episode = episode
        text = f"{self.greeting} {episode.entry['answer']} {episode.seed} {os.getpid()} {sys.version_info.minor}"
        tool = Tool(name="add", description="Add.", parameters={"type": "object"})
        return Observation(messages=[{"role": "user", "content": text}], tools=[tool], reward=0.5)

    async def step(self, message):
        scope = {"self": self, "result": Done(rewards={"found": 1}, metrics={"steps": 2})}
        exec(message["content"], globals(), scope)
        return scope["result"]

    async def close(self):
        if self.episode.question == "raise at the end":
            raise RuntimeError("cannot close")
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("environments") / "scripted.py"
    path.write_text(SCRIPTED)
    return f"{path}:Scripted"


@asynccontextmanager
async def pool_of(file: object, options: dict[str, Any] | None = None, **processes: Any) -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(file, options or {}, processes=ProcessOptions(**processes))
    try:
        yield pool
    finally:
        await pool.close()


async def start(pool: EnvironmentPool, question: str = "q") -> tuple[Environment, int]:
    """Return an environment and its process."""
    environment = pool.make()
    found = await environment.reset(episode(question, seed=7, answer="9"))
    return environment, int(found.messages[0]["content"].split()[3])


async def test_pool_reuses_its_process(file: str) -> None:
    async with pool_of(file, {"greeting": "hi"}, num_processes=1) as pool:
        await pool.start()
        before = children(os.getpid())
        environment = pool.make()
        assert isinstance(environment, Environment)
        found = await environment.reset(episode(seed=3, answer="9"))
        assert found.messages[0]["content"].startswith("hi 9 3 ")
        assert (found.tools[0].name, found.tools[0].parameters, found.reward) == ("add", {"type": "object"}, 0.5)
        assert await environment.step(says("pass")) == Done(rewards={"found": 1.0}, metrics={"steps": 2.0})
        observation = await environment.step(says("result = Observation(messages=[], metrics={'steps': 1}, state='a')"))
        assert observation == Observation(messages=[], tools=[], metrics={"steps": 1.0}, state="a")
        await environment.close()
        pids = set()
        for _ in range(3):
            environment, pid = await start(pool)
            await environment.close()
            pids.add(pid)
        assert len(pids) == 1
        assert children(os.getpid()) == before


async def test_further_episodes_wait_for_a_process(file: str) -> None:
    async with pool_of(file, num_processes=1) as pool:
        environment, _ = await start(pool)
        waiting = asyncio.create_task(start(pool))
        await environment.step(says("pass"))
        assert not waiting.done()
        await environment.close()
        other, _ = await waiting
        await other.close()


async def test_hanging_reset_and_start_are_killed(file: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    async with pool_of(file, num_processes=1, reset_s=1.5) as pool:
        environment = pool.make()
        with pytest.raises(EnvironmentTimeout, match="reset took longer"):
            await environment.reset(episode("hang", answer=""))
        await environment.close()
        environment, _ = await start(pool)
        await environment.close()
    async with pool_of(f"{tmp_path}/slow.py:A", start_s=0.5) as pool:
        with pytest.raises(EnvironmentTimeout, match="start took longer"):
            await pool.start()


TIMEOUT = r"step took longer than 0\.5 s, so its process was killed"


@pytest.mark.parametrize(
    ("text", "error", "problem"),
    [
        ("time.sleep(60)", EnvironmentTimeout, TIMEOUT),
        ("while True: pass", EnvironmentTimeout, TIMEOUT),
        ("os._exit(3)", EnvironmentDied, "its process died during step .exit code 3."),
        ("os.kill(os.getpid(), 11)", EnvironmentDied, "its process died during step .SIGSEGV."),
        ("os.closerange(3, 1000)", EnvironmentDied, "its process died during step"),
        ("raise KeyError('a')", EnvironmentFailure, "step raised KeyError: 'a'"),
        ("raise SystemExit(1)", EnvironmentFailure, "step raised SystemExit: 1"),
        ("self.greeting.x", EnvironmentFailure, "step raised AttributeError"),
    ],
)
async def test_failed_step_replaces_its_process_unless_it_raised(
    file: str, text: str, error: type[EnvironmentFailure], problem: str
) -> None:
    async with pool_of(file, num_processes=1, step_s=0.5 if error is EnvironmentTimeout else 20.0) as pool:
        environment, pid = await start(pool)
        began_s = time.monotonic()
        with pytest.raises(EnvironmentFailure, match=problem) as raised:
            await environment.step(says(text))
        assert type(raised.value) is error
        assert time.monotonic() - began_s < 5
        await environment.close()
        other, other_pid = await start(pool)
        await other.close()
        assert (other_pid == pid) == (error is EnvironmentFailure)
        assert error is EnvironmentFailure or wait_until_gone({pid}, 5.0) == set()


async def test_idle_process_that_dies_is_replaced(file: str) -> None:
    async with pool_of(file, num_processes=1) as pool:
        environment, pid = await start(pool)
        await environment.close()
        os.kill(pid, signal.SIGKILL)
        assert wait_until_gone({pid}, 30.0) == set()
        other, other_pid = await start(pool)
        await other.close()
        assert other_pid != pid


async def test_timeout_that_an_environment_raises_is_a_timeout(file: str) -> None:
    async with pool_of(file) as pool:
        environment, _ = await start(pool)
        with pytest.raises(EnvironmentTimeout, match="its server is slow"):
            await environment.step(
                says("from titanrl.environments import EnvironmentTimeout as E; raise E('its server is slow')")
            )
        await environment.close()


async def test_failed_close_replaces_the_process(file: str) -> None:
    async with pool_of(file, num_processes=1) as pool:
        environment, pid = await start(pool, "raise at the end")
        with pytest.raises(EnvironmentFailure, match="close raised RuntimeError: cannot close"):
            await environment.close()
        other, other_pid = await start(pool)
        await other.close()
        assert other_pid != pid


def test_output_goes_to_the_log_and_not_into_the_protocol(file: str, tmp_path: Path) -> None:
    log = tmp_path / "environments.log"

    async def main() -> None:
        async with pool_of(file, log=log) as pool:
            environment, _ = await start(pool)
            text = "print('from Python' * 1000); os.write(1, b'from C'); subprocess.run(['echo', 'from a child'])"
            assert await environment.step(says(text)) == Done(rewards={"found": 1.0}, metrics={"steps": 2.0})
            other, _ = await start(pool)
            with pytest.raises(EnvironmentFailure, match=rf"\(output: {log}\)"):
                await other.step(says("raise ValueError('shown')"))
            await environment.close()
            await other.close()

    asyncio.run(main())
    text = log.read_text()
    for expected in ("from Python", "from C", "from a child", "ValueError: shown"):
        assert expected in text


def test_children_of_an_environment_process_die_with_it(file: str) -> None:
    async def main() -> set[int]:
        async with pool_of(file, step_s=1.0) as pool:
            environment, pid = await start(pool)
            with pytest.raises(EnvironmentTimeout):
                await environment.step(says("subprocess.Popen(['sleep', '61']); subprocess.run(['sleep', '61'])"))
            await environment.close()
        return {pid}

    before = descendants(os.getpid())
    asyncio.run(main())
    assert wait_until_gone(descendants(os.getpid()) - before, 30.0) == set()
    sleeping = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    assert ["1", "sleep", "61"] not in map(str.split, sleeping.splitlines())


async def test_cancelled_step_kills_the_process(file: str) -> None:
    async with pool_of(file, num_processes=1) as pool:
        environment, pid = await start(pool)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await environment.step(says("time.sleep(60)"))
        await environment.close()
        assert wait_until_gone({pid}, 30.0) == set()


async def test_closed_pool_fails_its_episodes(file: str) -> None:
    async with pool_of(file) as pool:
        environment, pid = await start(pool)
        step = asyncio.create_task(environment.step(says("time.sleep(60)")))
        await asyncio.sleep(0)
        await pool.close()
        with pytest.raises(EnvironmentDied):
            await step
        await environment.close()
        assert wait_until_gone({pid}, 30.0) == set()
        with pytest.raises(EnvironmentDied, match="is closed"):
            await start(pool)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise RuntimeError('no licence')", "start raised ValueError: .*importing .* raised RuntimeError: no licence"),
        ("class A:\n    async def reset(self): pass", "A has no step and no close"),
        ("class B: pass", "has no attribute 'A'"),
    ],
)
async def test_environment_that_cannot_be_loaded_fails_the_start(source: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(source)
    async with pool_of(f"{tmp_path}/broken.py:A") as pool:
        with pytest.raises(EnvironmentFailure, match=problem):
            await pool.start()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("result = 3", r"step raised EnvironmentFailure: the result must be an Observation or Done \(got 3\)"),
        ("result = Done(rewards={'a': 'b'})", r"step raised InvalidReward: rewards\['a'\]: must be a finite number"),
        ("result = Observation(messages=['a'])", r"step raised EnvironmentFailure: messages\[0\]: must be a mapping"),
        (
            "import struct; os.write(int(sys.argv[2]), struct.pack('!I', (8 << 20) + 1)); time.sleep(60)",
            r"the reply to step is longer than 8 MiB, so its process was killed",
        ),
    ],
)
async def test_invalid_return_values_are_failures(file: str, text: str, problem: str) -> None:
    async with pool_of(file) as pool:
        environment, _ = await start(pool)
        with pytest.raises(EnvironmentFailure, match=problem):
            await environment.step(says(text))
        await environment.close()


async def test_python_object_runs_in_a_process() -> None:
    offset = 4

    class Local:
        async def reset(self, episode: object) -> Observation:
            return Observation(messages=[{"role": "user", "content": str(offset)}], replaces=True)

        async def step(self, message: Message) -> Done:
            return Done(reward=1.0)

        async def close(self) -> None:
            pass

    async with pool_of(Local) as pool:
        environment = pool.make()
        found = await environment.reset(episode())
        assert (found.messages[0]["content"], found.replaces) == ("4", True)
        assert await environment.step(says("")) == Done(reward=1.0)
        await environment.close()
    with pytest.raises(ValueError, match=r"data.environment.python: another interpreter imports the environment itself"):
        EnvironmentPool(Local, processes=ProcessOptions(python="python3"))


async def test_other_interpreter_needs_only_the_environment_module(file: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    packages = next((tmp_path / "venv/lib").glob("python*/site-packages"))
    (packages / "only_here.py").write_text("from scripted_base import *")
    (packages / "scripted_base.py").write_text(SCRIPTED)
    python = tmp_path / "venv/bin/python"
    async with pool_of("only_here:Scripted", python=python) as pool:
        environment, _ = await start(pool)
        await environment.step(says("assert 'only_here' in sys.modules and 'pydantic' not in sys.modules"))
        await environment.close()
    async with pool_of("tic_tac_toe", {"first": "policy"}, python=python) as pool:
        game = pool.make()
        assert "tic-tac-toe" in (await game.reset(episode())).messages[0]["content"]
        await game.close()
    async with pool_of(file, python=tmp_path / "nothing") as pool:
        with pytest.raises(EnvironmentFailure, match=r"data.environment.python: cannot be started: No such file"):
            await pool.start()


def test_processes_die_with_their_parent(file: str) -> None:
    script = textwrap.dedent(f"""
        import asyncio, time
        from titanrl.environments import EnvironmentPool
        async def main():
            pool = EnvironmentPool({file!r})
            await pool.start()
            print("ready", flush=True)
            time.sleep(60)
        asyncio.run(main())
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout.readline() == b"ready\n"
    started = descendants(parent.pid)
    assert len(started) == 1
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(started, 10.0) == set()


async def test_reply_received_while_the_loop_is_busy_is_in_time(file: str) -> None:
    async with pool_of(file, step_s=1.0) as pool:
        environment, _ = await start(pool)
        step = asyncio.create_task(environment.step(says("pass")))
        await asyncio.sleep(0.01)
        time.sleep(1.5)
        assert isinstance(await step, Done)
        await environment.close()


def test_no_file_descriptor_leaks(file: str) -> None:
    assert num_leaked(fail_in_each_way, file) == 0


def fail_in_each_way(file: str) -> None:
    async def main() -> None:
        async with pool_of(file, step_s=0.2) as pool:
            for text in ("pass", "os._exit(1)", "time.sleep(60)"):
                environment, _ = await start(pool)
                with suppress(EnvironmentFailure):
                    await environment.step(says(text))
                await environment.close()

    asyncio.run(main())
