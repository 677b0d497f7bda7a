"""The scoring pool, with real confined processes: many groups, faults, and pools that cannot start."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tests.processes.processes import (
    children,
    descendants,
    kill_all,
    needs_confinement,
    num_descriptors,
    num_leaked,
    parents,
    wait_until_gone,
)
from tests.rollout.scoring import (
    CARELESS,
    CONFIG,
    FOREVER,
    HASTY,
    RIGHT,
    WRONG,
    Answer,
    Bench,
    own,
    rewards,
    started,
    statuses,
    together,
)
from titanrl.carriers.rewards import RewardSpec, Score
from titanrl.config.sections import FaultsConfig, SandboxConfig
from titanrl.processes.children import RespawnLimitError
from titanrl.processes.confine import SandboxUnavailable
from titanrl.processes.sandbox import SandboxDied
from titanrl.rollout.scoring import ScoringPool

pytestmark = [needs_confinement, pytest.mark.usefixtures("careless_verifier")]


def test_two_hundred_groups_leak_no_file_descriptor(careless: Bench) -> None:
    async def main() -> list[list[Score]]:
        return await asyncio.gather(*(careless.pool.score(together(RIGHT, (f"reward = {i} / 200", {}))) for i in range(200)))

    before = num_descriptors(os.getpid()) + num_descriptors(careless.zygote)
    assert [rewards(scores) for scores in careless.runner.run(main())] == [[1.0, i / 200] for i in range(200)]
    transient = 2 * 3 * CONFIG.num_processes  # both sides hold a few for each process that is starting or ending
    assert num_descriptors(os.getpid()) + num_descriptors(careless.zygote) <= before + transient


def test_reply_received_while_the_loop_is_busy_is_in_time() -> None:
    async def main() -> list[Score]:
        async with started(HASTY) as pool:
            scoring = asyncio.create_task(pool.score(together(RIGHT)))
            await asyncio.sleep(0.01)
            time.sleep(HASTY.timeout_s + 0.2)
            return await scoring

    assert statuses(asyncio.run(main())) == ["ok"]


def test_cancelled_group_frees_its_process(careless: Bench) -> None:
    async def main() -> list[Score]:
        hanging = [asyncio.create_task(careless.pool.score(together((FOREVER, {})))) for _ in range(CONFIG.num_processes)]
        await asyncio.sleep(0.1)
        for task in hanging:
            task.cancel()
        return await careless.pool.score(together(RIGHT))

    started_s = time.monotonic()
    assert statuses(careless.runner.run(main())) == ["ok"]
    assert time.monotonic() - started_s < CONFIG.timeout_s


def test_killed_idle_processes_are_replaced(careless: Bench) -> None:
    kill_all(children(careless.zygote))
    assert rewards(careless.score(RIGHT, WRONG)) == [1.0, 0.0]


def test_group_is_scored_again_after_its_process_is_killed() -> None:
    async def main() -> list[Score]:
        before = children(os.getpid())
        async with started() as pool:
            (zygote,) = children(os.getpid()) - before
            nap: Answer = (f"import os, time; time.sleep(60 * (os.getpid() in {children(zygote)}))", {})
            scoring = asyncio.create_task(pool.score(together(nap, WRONG)))
            await asyncio.sleep(0.1)
            kill_all(children(zygote))
            return await scoring

    assert rewards(asyncio.run(main())) == [1.0, 0.0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_groups_of_a_dead_or_stopped_zygote_are_scored_by_its_replacement(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("titanrl.processes.sandbox._LOOK_S", 0.2)
    seen: list[tuple[str, float]] = []
    before = children(os.getpid())
    pool = ScoringPool([CARELESS], CONFIG, on_respawn=lambda cause, seconds: seen.append((cause, seconds)))
    await pool.start()
    (zygote,) = children(os.getpid()) - before
    nap: Answer = (f"import os, time; time.sleep(1.5 * (os.getppid() == {zygote})); reward = 0.5", {})
    groups = [asyncio.create_task(pool.score(together(nap, WRONG))) for _ in range(6)]  # of which two run
    await asyncio.sleep(0.1)
    family = {zygote, *children(zygote)}
    os.kill(zygote, number)
    scores = await asyncio.gather(*groups)
    assert wait_until_gone(family, 20.0) == set()
    await pool.close()
    assert children(os.getpid()) == before
    assert [rewards(scores) for scores in scores] == [[0.5, 0.0]] * 6
    ((cause, seconds),) = seen
    assert ("exited with status -9" if number == signal.SIGKILL else "was stopped by a signal") in cause
    assert 0 < seconds < 20


async def test_zygote_that_keeps_dying_ends_with_its_cause() -> None:
    before = children(os.getpid())
    pool = ScoringPool([CARELESS], CONFIG, FaultsConfig(max_respawns=1))
    await pool.start()
    hanging = asyncio.create_task(pool.score(together((FOREVER, {}))))
    for _ in range(2):
        while not (family := children(os.getpid()) - before) or not children(next(iter(family))):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        kill_all(family)
        assert await asyncio.to_thread(wait_until_gone, family, 20.0) == set()
    with pytest.raises(RespawnLimitError, match=r"the sandbox ended after 1 replacements.*exited with status -9"):
        await hanging
    with pytest.raises(SandboxDied):
        await pool.score(together(RIGHT))
    await pool.close()
    assert children(os.getpid()) == before
    await pool.start()
    assert statuses(await pool.score(together(RIGHT))) == ["ok"]
    await pool.close()


def test_close_fails_pending_groups_and_leaves_nothing() -> None:
    assert num_leaked(close_while_five_groups_wait) == 0


def close_while_five_groups_wait() -> None:
    async def main() -> None:
        pool = ScoringPool([CARELESS], CONFIG)
        await pool.start()
        groups = [asyncio.create_task(pool.score(together((FOREVER, {})))) for _ in range(5)]
        await asyncio.sleep(0.1)
        while len(family := descendants(os.getpid()) - before) <= CONFIG.num_processes:
            await asyncio.sleep(0.01)
        await pool.close()
        assert parents().keys() & family == set()
        outcomes = await asyncio.gather(*groups, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [SandboxDied] * 5
        await pool.close()

    before = descendants(os.getpid())
    asyncio.run(main())


def test_all_processes_exit_when_the_parent_is_killed() -> None:
    script = """
        import asyncio
        from titanrl.config.sections import SandboxConfig
        from titanrl.rollout.scoring import ScoringPool
        from titanrl.carriers.rewards import RewardSpec

        async def main():
            spec = RewardSpec(name="answer", factory="titanrl.rollout.scorers:exact")
            pool = ScoringPool([spec], SandboxConfig(timeout_s=60))
            await pool.start()
            print("started", flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"started\n"
        family = descendants(parent.pid)
        parent.kill()
    assert len(family) >= 2
    assert wait_until_gone(family, 20.0) == set()


def test_pool_works_in_another_thread() -> None:
    async def main() -> None:
        async with started() as pool:
            outcome.extend(await pool.score(together(RIGHT, WRONG)))

    outcome: list[Score] = []
    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join(30.0)
    assert rewards(outcome) == [1.0, 0.0]


# Pools that cannot start


def refused(spec: RewardSpec, config: SandboxConfig, error: type[Exception], match: str) -> None:
    async def main() -> None:
        with pytest.raises(error, match=match):
            await ScoringPool([spec], config).start()

    before = children(os.getpid())
    asyncio.run(main())
    assert children(os.getpid()) == before


@pytest.mark.parametrize(
    ("leaks", "error", "match"),
    [
        ("['sending signals']", SandboxUnavailable, "confinement failed: sending signals"),
        ("os._exit(1)", SandboxDied, "11 scoring processes in a row died before they were confined"),
    ],
)
def test_pool_does_not_start_if_confinement_fails(
    leaks: str, error: type[Exception], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = "import os\nfrom titanrl.processes import zygote\n"
    module = f"{imports}def make():\n    zygote.leaks = lambda: {leaks}\n    return print"
    (tmp_path / "leaky.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    refused(RewardSpec(name="answer", factory="leaky:make"), CONFIG, error, match)


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("nowhere:run", "No module named 'nowhere'"),
        ("careless_verifier:walk", "module careless_verifier has no attribute 'walk'"),
        ("careless_verifier", "Write it as `package.module:name`"),
    ],
)
def test_error_names_why_a_reward_cannot_be_loaded(path: str, match: str) -> None:
    refused(own(path), CONFIG, ValueError, f"data.rewards: answer cannot be loaded: .*{match}")


def test_memory_limit_below_the_loaded_rewards_is_rejected() -> None:
    config = SandboxConfig(memory_bytes=1 << 20)
    refused(CARELESS, config, ValueError, "sandbox.memory_bytes: too small for the loaded rewards")


WHO = ("import os; reward = (os.getpid() % 9999) / 9999", {})
"""An answer whose score identifies its process."""


def test_process_scores_groups_per_process_groups() -> None:
    async def scenario() -> list[float | None]:
        config = CONFIG.model_copy(update={"num_processes": 1, "groups_per_process": 3})
        async with started(config) as pool:  # the start itself scores one empty group
            return [rewards(await pool.score(together(WHO)))[0] for _ in range(6)]

    who = asyncio.run(scenario())
    assert [who[0] == who[1], who[1] == who[2], len(set(who[2:5])), who[4] == who[5]] == [True, False, 1, False]


def test_process_without_a_reply_is_not_reused() -> None:
    async def scenario() -> list[list[Score]]:
        async with started(HASTY.model_copy(update={"num_processes": 1, "groups_per_process": 100})) as pool:
            return [
                await pool.score(together(answer, RIGHT))
                for answer in (RIGHT, (FOREVER, {}), ("import os; os._exit(0)", {}), RIGHT)
            ]

    groups = asyncio.run(scenario())
    assert [statuses(scores) for scores in groups] == [["ok", "ok"], ["timeout", "ok"], ["crash", "ok"], ["ok", "ok"]]
