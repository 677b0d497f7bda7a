"""The scoring pool, with real confined processes and a scorer that executes completions."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.processes import (
    children,
    descendants,
    kill_all,
    needs_confinement,
    num_descriptors,
    parents,
    wait_until_gone,
)
from titanrl.config.sections import DataConfig, SandboxConfig
from titanrl.sandbox.client import SandboxDied
from titanrl.sandbox.confine import SandboxUnavailable
from titanrl.sandbox.pool import ScoringPool
from titanrl.sandbox.scores import Score, ScorerSpec, scorer_spec
from titanrl.sandbox.zygote import Answer

pytestmark = needs_confinement

CONFIG = SandboxConfig(timeout_s=1.0, num_processes=2, memory_bytes=1 << 29)
PATIENT = SandboxConfig(timeout_s=20.0, num_processes=2)
CARELESS = ScorerSpec(factory="titanrl.rollout.scorers:imported", kwargs={"path": "careless_verifier:run"}, bounds=(0.0, 1.0))
CARELESS_VERIFIER = '''
import os, sys

def run(text, entry):
    """Execute the completion, which may set `reward`; return 1 if nothing stops it."""
    scope = {"entry": entry, "text": text}
    exec(text, scope)
    return scope.get("reward", 1.0)
'''
RIGHT: Answer = ("reward = 1.0", {})
WRONG: Answer = ("reward = 0.0", {})
FOREVER = "while True: pass"


class Bench:
    """A started pool with its event loop, for tests that are plain functions."""

    def __init__(self, spec: ScorerSpec) -> None:
        before = children(os.getpid())
        self.runner = asyncio.Runner()
        self.pool = ScoringPool(spec, CONFIG)
        self.runner.run(self.pool.start())
        (self.zygote,) = children(os.getpid()) - before

    def score(self, *answers: Answer) -> list[Score]:
        return self.runner.run(self.pool.score(answers))

    def close(self) -> None:
        self.runner.run(self.pool.close())
        self.runner.close()


@pytest.fixture(scope="module", autouse=True)
def _careless_verifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("scorers")
    (folder / "careless_verifier.py").write_text(CARELESS_VERIFIER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def careless(_careless_verifier: None) -> Iterator[Bench]:
    bench = Bench(CARELESS)
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def gym() -> Iterator[Bench]:
    tasks = ["chain_sum", "string_insertion", "countdown", "prime_factorization"]
    datasets = [{"name": task, "weight": 1.0, "config": {}} for task in tasks]
    bench = Bench(scorer_spec(DataConfig(task="composite", task_config={"datasets": datasets})))
    yield bench
    bench.close()


@asynccontextmanager
async def started(config: SandboxConfig = CONFIG) -> AsyncIterator[ScoringPool]:
    pool = ScoringPool(CARELESS, config)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def entry(task: str, answer: str, **metadata: Any) -> dict[str, Any]:
    return {"question": "", "answer": answer, "metadata": {"source_dataset": task, **metadata}}


def rewards(scores: list[Score]) -> list[float | None]:
    """Return the reward of each score; None for those that failed."""
    return [score.parts.get("answer") for score in scores]


def statuses(scores: list[Score]) -> list[str]:
    return [score.status for score in scores]


def test_chain_sum_scores_the_last_answer_tags(gym: Bench) -> None:
    right = entry("chain_sum", "7")
    texts = ["4 + 3 <answer>7</answer>", "<answer>8</answer>", "7", "<answer>8</answer> no, <answer> 7.0 </answer>"]
    scores = gym.score(*((text, right) for text in texts))
    assert scores[0] == Score(parts={"answer": 1.0}, status="ok")
    assert rewards(scores)[1] < 1.0
    assert rewards(scores)[2:] == [0.0, 1.0]


def test_evaluated_answer_cannot_write_a_file(gym: Bench, tmp_path: Path) -> None:
    target = tmp_path / "written"
    payload = f"[__import__('pathlib').Path({str(target)!r}).write_text('x') and 'ABC']"
    assert eval(payload) == ["ABC"]  # the payload does write
    target.unlink()
    scores = gym.score((f"<answer>{payload}</answer>", entry("string_insertion", "ABC")))
    assert (rewards(scores), target.exists()) == ([0.0], False)


def test_answer_that_never_ends_fails_alone(gym: Bench) -> None:
    puzzle = entry("countdown", "3 + 4", numbers=[3, 4], target=7)
    scores = gym.score(
        ("<answer>3 + 4</answer>", puzzle), ("<answer>9**9**9**9</answer>", puzzle), ("<answer>4 - 3</answer>", puzzle)
    )
    assert statuses(scores) == ["ok", "timeout", "ok"]
    assert rewards(scores) == [1.0, None, 0.05]


def test_exception_of_a_scorer_is_an_error_without_reward(careless: Bench) -> None:
    (score,) = careless.score(("entry['missing']", {}))
    assert score == Score(parts={}, status="error", detail="KeyError: 'missing'")


@pytest.mark.parametrize("value", ["'1.5'", "None", "float('nan')", "float('-inf')", "[1.0]", "1j"])
def test_reward_that_is_no_finite_number_is_an_error(careless: Bench, value: str) -> None:
    (score,) = careless.score((f"reward = {value}", {}))
    assert (score.parts, score.status) == ({}, "error")
    assert score.detail.startswith("TypeError: the scorer returned ")
    assert score.detail.endswith("Expected a finite number: `def scorer(completion: str, entry: dict) -> float`.")


@pytest.mark.parametrize("value", ["True", "1", "__import__('numpy').float32(1)", "__import__('numpy').bool_(True)"])
def test_numbers_of_every_type_are_rewards(careless: Bench, value: str) -> None:
    assert careless.score((f"reward = {value}", {})) == [Score(parts={"answer": 1.0}, status="ok")]


# Attempts of an answer to break out


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/tmp/written_by_an_answer', 'w')",
        "open('/dev/shm/written_by_an_answer', 'w')",
        "open(os.__file__, 'a')",
        "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
        "os.chmod('/tmp', 0o777)",
        "os.mkdir('/tmp/made_by_an_answer')",
        "open('/etc/passwd')",
        "open('/proc/self/environ')",
        "open(f'/proc/{os.getppid()}/environ')",
        "os.listdir(os.path.expanduser('~'))",
        "os.listdir('/')",
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "os.fork()",
        "import threading; threading.Thread(target=print).start()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "os.kill(os.getppid(), 9)",
        "os.kill(os.getpid(), 9)",
        "os.killpg(0, 9)",
        "import fcntl; fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "os.setpriority(os.PRIO_PROCESS, 0, 0)",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); c.ptrace(16, 1, 0, 0); raise OSError(ctypes.get_errno(), 1)",
        "import ctypes; c = ctypes.CDLL(None, use_errno=True); c.syscall(425, 8, None); raise OSError(ctypes.get_errno(), 2)",
    ],
)  # fmt: skip
def test_answer_is_denied(careless: Bench, attempt: str) -> None:
    (score,) = careless.score((f"import os; {attempt}", {}))
    assert (score.parts, score.status) == ({}, "error")
    assert score.detail.startswith(
        ("PermissionError", "RuntimeError: can't start new thread", "ValueError: not allowed to raise")
    )


def test_answer_may_import_and_compute(careless: Bench) -> None:
    assert careless.score(("import decimal, sqlite3, calendar; reward = float(decimal.Decimal('0.25'))", {}))[0] == Score(
        parts={"answer": 0.25}, status="ok"
    )


def test_answer_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[Score]:
        async with started() as pool:
            return await pool.score([("import os; reward = float('HF_TOKEN' in os.environ)", {})])

    monkeypatch.setenv("HF_TOKEN", "secret")
    assert asyncio.run(main()) == [Score(parts={"answer": 0.0}, status="ok")]


@pytest.mark.parametrize("hoard", ["[0] * (1 << 30)", "import mmap; x = [mmap.mmap(-1, 1 << 26) for _ in range(1000)]"])
def test_answer_that_allocates_all_memory_is_stopped(careless: Bench, hoard: str) -> None:
    assert statuses(careless.score((hoard, {}), RIGHT)) == ["error", "ok"]


@pytest.mark.parametrize(
    ("attempt", "status"),
    [
        ("import os; os._exit(0)", "crash"),
        ("import ctypes; ctypes.string_at(0)", "crash"),
        ("exit()", "error"),
        (FOREVER, "timeout"),
        ("import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(1)\n" + FOREVER, "timeout"),
        ("reward = 1e30", "error"),
    ],
)
def test_bad_answer_fails_alone(careless: Bench, attempt: str, status: str) -> None:
    scores = careless.score(RIGHT, (attempt, {}), WRONG)
    assert statuses(scores) == ["ok", status, "ok"]
    assert rewards(scores) == [1.0, None, 0.0]
    assert scores[1].detail


@pytest.mark.parametrize(
    "reply",
    [b"not json", b"[" * 100_000, b"{}", b"[]", b"null", b"\xff", b"1" * 5000, b" " * (5 << 20)],
    ids=["text", "deep", "object", "short", "null", "bytes", "digits", "flood"],
)
def test_forged_reply_fails_only_its_answer(careless: Bench, reply: bytes) -> None:
    forge = textwrap.dedent(f"""
        import os
        for fd in range(3, 64):
            try: os.write(fd, eval({repr(reply) if len(reply) < 100 else f"{reply[:1]!r} * {len(reply)}"!r}))
            except OSError: pass
        os._exit(0)
    """)
    scores = careless.score(RIGHT, (forge, {}))
    assert (statuses(scores), rewards(scores)) == (["ok", "crash"], [1.0, None])


@pytest.mark.parametrize("result", [{"parts": {"other": 1.0}}, {"parts": {"answer": True}}, {"parts": {"answer": 2.0}}, 1, {}])
def test_forged_score_is_an_error(careless: Bench, result: object) -> None:
    tamper = f"import titanrl.sandbox.zygote as zygote; zygote._score = lambda *_: {result!r}"
    assert statuses(careless.score((tamper, {}), RIGHT)) == ["ok", "error"]


def test_tampering_with_the_scorer_reaches_only_its_own_group(careless: Bench) -> None:
    tamper = "import titanrl.sandbox.zygote as zygote; zygote._score = lambda *_: {'parts': {'answer': 1.0}}"
    assert rewards(careless.score((tamper, {}), WRONG)) == [1.0, 1.0]  # the attack works
    assert rewards(careless.score(WRONG, RIGHT)) == [0.0, 1.0]


def test_error_detail_is_printable_ascii(careless: Bench) -> None:
    (score,) = careless.score((r"raise ValueError('\x1b[2J\ud800\n' + 'x' * 10_000)", {}))
    assert score.detail.startswith(r"ValueError: \x1b[2J\ud800\nxxx")
    assert len(score.detail) < 300


# Arguments of a scorer


def test_entry_arrives_unchanged(careless: Bench) -> None:
    given = {"answer": None, "metadata": {1: (2, {3})}}
    assert rewards(careless.score((f"reward = float(entry == {given!r})", given))) == [1.0]


def test_long_completion_keeps_its_end(careless: Bench) -> None:
    text = "#" * (3 << 20) + "\nreward = float(len(text) == 1 << 20)"
    assert rewards(careless.score((text, {}))) == [1.0]


def test_no_answers_have_no_scores(careless: Bench) -> None:
    assert careless.score() == []


# Many groups, and faults


def test_two_hundred_groups_leave_no_descriptor_open(careless: Bench) -> None:
    async def main() -> list[list[Score]]:
        return await asyncio.gather(*(careless.pool.score([RIGHT, (f"reward = {i} / 200", {})]) for i in range(200)))

    before = num_descriptors(os.getpid()) + num_descriptors(careless.zygote)
    assert [rewards(scores) for scores in careless.runner.run(main())] == [[1.0, i / 200] for i in range(200)]
    transient = 2 * 3 * CONFIG.num_processes  # both sides hold a few for each process that is starting or ending
    assert num_descriptors(os.getpid()) + num_descriptors(careless.zygote) <= before + transient


def test_reply_that_arrives_while_the_loop_is_busy_is_in_time(careless: Bench) -> None:
    async def main() -> list[Score]:
        scoring = asyncio.create_task(careless.pool.score([RIGHT]))
        await asyncio.sleep(0.01)
        time.sleep(CONFIG.timeout_s + 0.2)
        return await scoring

    assert statuses(careless.runner.run(main())) == ["ok"]


def test_cancelled_group_frees_its_process(careless: Bench) -> None:
    async def main() -> list[Score]:
        hanging = [asyncio.create_task(careless.pool.score([(FOREVER, {})])) for _ in range(CONFIG.num_processes)]
        await asyncio.sleep(0.1)
        for task in hanging:
            task.cancel()
        return await careless.pool.score([RIGHT])

    started_s = time.monotonic()
    assert statuses(careless.runner.run(main())) == ["ok"]
    assert time.monotonic() - started_s < CONFIG.timeout_s


def test_killed_idle_processes_are_replaced(careless: Bench) -> None:
    kill_all(children(careless.zygote))
    assert rewards(careless.score(RIGHT, WRONG)) == [1.0, 0.0]


def test_group_is_scored_again_after_its_process_is_killed() -> None:
    nap: Answer = ("import time; time.sleep(0.2)", {})

    async def main() -> list[Score]:
        before = children(os.getpid())
        async with started(PATIENT) as pool:
            scoring = asyncio.create_task(pool.score([nap, WRONG]))
            await asyncio.sleep(0.1)
            (zygote,) = children(os.getpid()) - before
            kill_all(children(zygote))
            return await scoring

    assert rewards(asyncio.run(main())) == [1.0, 0.0]


def test_dead_zygote_is_reported_and_the_pool_restarts() -> None:
    async def main() -> list[Score]:
        before = children(os.getpid())
        async with started(PATIENT) as pool:
            hanging = asyncio.create_task(pool.score([(FOREVER, {})]))
            await asyncio.sleep(0.1)
            (zygote,) = children(os.getpid()) - before
            family = {zygote, *children(zygote)}
            os.kill(zygote, signal.SIGKILL)
            with pytest.raises(SandboxDied, match="status -9"):
                await hanging
            with pytest.raises(SandboxDied, match="status -9"):
                await pool.score([RIGHT])
            assert wait_until_gone(family, 2.0) == set()
            await pool.close()
            assert children(os.getpid()) == before
            await pool.start()
            return await pool.score([RIGHT])

    assert statuses(asyncio.run(main())) == ["ok"]


def test_close_fails_pending_groups_and_leaves_no_process() -> None:
    async def main() -> None:
        pool = ScoringPool(CARELESS, PATIENT)
        await pool.start()
        groups = [asyncio.create_task(pool.score([(FOREVER, {})])) for _ in range(5)]
        await asyncio.sleep(0.1)
        family = descendants(os.getpid()) - before
        assert len(family) == 1 + PATIENT.num_processes
        await pool.close()
        assert parents().keys() & family == set()
        outcomes = await asyncio.gather(*groups, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [SandboxDied] * 5
        await pool.close()

    before = descendants(os.getpid())
    descriptors = num_descriptors(os.getpid())
    asyncio.run(main())
    assert num_descriptors(os.getpid()) == descriptors


def test_all_processes_end_with_a_killed_parent() -> None:
    script = """
        import asyncio
        from titanrl.config.sections import SandboxConfig
        from titanrl.sandbox.pool import ScoringPool
        from titanrl.sandbox.scores import ScorerSpec

        async def main():
            pool = ScoringPool(ScorerSpec(factory="titanrl.rollout.scorers:exact"), SandboxConfig(timeout_s=60))
            await pool.start()
            print("started", flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        family = descendants(parent.pid)
        parent.kill()
    assert len(family) >= 2
    assert wait_until_gone(family, 2.0) == set()


def test_pool_works_in_another_thread() -> None:
    async def main() -> None:
        async with started() as pool:
            outcome.extend(await pool.score([RIGHT, WRONG]))

    outcome: list[Score] = []
    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    thread.join(30.0)
    assert rewards(outcome) == [1.0, 0.0]


# Pools that cannot start


def refused(spec: ScorerSpec, config: SandboxConfig, error: type[Exception], match: str) -> None:
    async def main() -> None:
        with pytest.raises(error, match=match):
            await ScoringPool(spec, config).start()

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
def test_failed_confinement_is_refused(
    leaks: str, error: type[Exception], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"import os\nfrom titanrl.sandbox import zygote\ndef make():\n    zygote.leaks = lambda: {leaks}\n    return print"
    (tmp_path / "leaky.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    refused(ScorerSpec(factory="leaky:make"), CONFIG, error, match)


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("nowhere:run", "No module named 'nowhere'"),
        ("careless_verifier:walk", "module careless_verifier has no attribute 'walk'"),
        ("careless_verifier", "Write it as `package.module:name`"),
    ],
)
def test_scorer_that_does_not_load_is_refused_with_the_reason(path: str, match: str) -> None:
    spec = ScorerSpec(factory="titanrl.rollout.scorers:imported", kwargs={"path": path})
    refused(spec, CONFIG, ValueError, f"does not load: .*{match}")


def test_memory_limit_below_the_loaded_scorer_is_refused() -> None:
    config = SandboxConfig(memory_bytes=1 << 20)
    refused(CARELESS, config, ValueError, "sandbox.memory_bytes: too small for the loaded scorer")


WHO = ("import os; reward = (os.getpid() % 9999) / 9999", {})
"""An answer whose score identifies its process."""


def test_process_serves_groups_per_process_groups() -> None:
    async def scenario() -> list[float | None]:
        config = CONFIG.model_copy(update={"num_processes": 1, "groups_per_process": 3})
        async with started(config) as pool:  # the start itself scores one empty group
            return [rewards(await pool.score([WHO]))[0] for _ in range(6)]

    who = asyncio.run(scenario())
    assert [who[0] == who[1], who[1] == who[2], len(set(who[2:5])), who[4] == who[5]] == [True, False, 1, False]


def test_process_that_did_not_reply_serves_no_other_group() -> None:
    async def scenario() -> list[list[Score]]:
        async with started(CONFIG.model_copy(update={"num_processes": 1, "groups_per_process": 100})) as pool:
            return [
                await pool.score([answer, RIGHT]) for answer in (RIGHT, (FOREVER, {}), ("import os; os._exit(0)", {}), RIGHT)
            ]

    groups = asyncio.run(scenario())
    assert [statuses(scores) for scores in groups] == [["ok", "ok"], ["timeout", "ok"], ["crash", "ok"], ["ok", "ok"]]
