"""Scores from confined processes: valid and invalid ones, and attempts to break out."""

import asyncio
import gc
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.processes import needs_confinement
from tests.rollout.scoring import FOREVER, HASTY, RIGHT, WRONG, Bench, rewards, started, statuses, together
from titanrl.carriers.rewards import MAX_PARTS, RewardSpec, Score, TokenRewards, encoded_score, parse_scores
from titanrl.config.data import DataConfig
from titanrl.config.schema import Config
from titanrl.processes.sandbox import ScoringProcess
from titanrl.rollout.scoring import reward_specs

pytestmark = [needs_confinement, pytest.mark.usefixtures("careless_verifier")]


@pytest.fixture(scope="module")
def gym() -> Iterator[Bench]:
    tasks = ["chain_sum", "string_insertion", "countdown", "prime_factorization"]
    datasets = [{"name": task, "weight": 1.0, "config": {}} for task in tasks]
    (spec,) = reward_specs(
        Config(name="a", num_steps=1, data=DataConfig(task="composite", task_config={"datasets": datasets})), {}
    )
    bench = Bench(spec, HASTY)
    yield bench
    bench.close()


def entry(task: str, answer: str, **metadata: Any) -> dict[str, Any]:
    return {"question": "", "answer": answer, "metadata": {"source_dataset": task, **metadata}}


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


def test_endless_answer_fails_alone(gym: Bench) -> None:
    puzzle = entry("countdown", "3 + 4", numbers=[3, 4], target=7)
    scores = gym.score(
        ("<answer>3 + 4</answer>", puzzle), ("<answer>9**9**9**9</answer>", puzzle), ("<answer>4 - 3</answer>", puzzle)
    )
    assert statuses(scores) == ["ok", "timeout", "ok"]
    assert rewards(scores) == [1.0, None, 0.05]


def test_exception_in_a_reward_is_an_error_without_a_reward(careless: Bench) -> None:
    (score,) = careless.score(("entry['missing']", {}))
    assert score == Score(parts={}, status="error", detail="KeyError: 'missing' (careless_verifier.py:7)")


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
def test_answer_cannot_break_out(careless: Bench, attempt: str) -> None:
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
            return await pool.score(together(("import os; reward = float('HF_TOKEN' in os.environ)", {})))

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
        ("reward = 1e30", "error"),
    ],
)
def test_bad_answer_fails_alone(careless: Bench, attempt: str, status: str) -> None:
    assert_fails_alone(careless.score(RIGHT, (attempt, {}), WRONG), status)


def assert_fails_alone(scores: list[Score], status: str) -> None:
    assert statuses(scores) == ["ok", status, "ok"]
    assert rewards(scores) == [1.0, None, 0.0]
    assert scores[1].detail


def test_answer_that_loops_fails_alone() -> None:
    deaf = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN); signal.alarm(1)\n"

    async def main() -> list[list[Score]]:
        async with started(HASTY) as pool:
            return await asyncio.gather(*(pool.score(together(RIGHT, (text + FOREVER, {}), WRONG)) for text in ("", deaf)))

    for scores in asyncio.run(main()):
        assert_fails_alone(scores, "timeout")


@pytest.mark.parametrize(
    "reply",
    [b"not json", b"[" * 10_000, b"{}\x1e{}\x1e{}", b"{}\x1e", b"", b"\xff", b"1" * 5000, b" " * (5 << 20)],
    ids=["text", "deep", "three", "short", "empty", "bytes", "digits", "flood"],
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
    tamper = f"import titanrl.processes.zygote as zygote; zygote._score = lambda *_: {result!r}"
    assert statuses(careless.score((tamper, {}), RIGHT)) == ["ok", "error"]


@pytest.mark.parametrize(
    ("reply", "num_tokens", "is_custom", "is_valid"),
    [
        (b'{"parts": {"a": 1.0}}', [0], False, True),
        (b'{"parts": {"a": 1.0}}\x1e{"parts": {"a": 1.0}}', [0, 0], False, True),
        (b'{"parts": {"a": 1.0}}\x1e{"parts": {"a": 1.0}}', [0], False, False),
        (b'{"parts": {"a": 1.0}}', [0, 0], False, False),
        (b'{"parts": {"a": 1.0}}' + b" " * 16_363, [0], False, True),  # 16 KiB
        (b'{"parts": {"a": 1.0}}' + b" " * 16_364, [0], False, False),
        (b'{"parts": {"a": 1.0}}' + b" " * 16_364, [1], False, False),
        (b'{"parts": {"a": 1.0}}' + b" " * 16_427, [1], True, True),  # 64 bytes more
        (b'{"parts": {"a": 1.0}}' + b" " * 16_428, [1], True, False),
        (b"", [], True, True),
        (b"1", [], True, False),
    ],
)
def test_reply_is_limited_per_answer_and_token(reply: bytes, num_tokens: list[int], is_custom: bool, is_valid: bool) -> None:
    scores = parse_scores(reply, RewardSpec(name="a", factory="", is_custom=is_custom), num_tokens)
    assert scores == ([Score(parts={"a": 1.0}, status="ok")] * len(num_tokens) if is_valid else None)


def test_huge_reply_is_refused_before_it_is_received(careless: Bench) -> None:
    flood = """
        import os
        for fd in range(3, 64):
            try:
                for _ in range(31): os.write(fd, b"{}," * (1 << 20))
            except OSError: pass
    """

    async def main() -> tuple[list[Score], int]:
        scoring = asyncio.create_task(careless.pool.score(together((textwrap.dedent(flood), {}))))
        most = 0
        while not scoring.done():
            await asyncio.sleep(0)
            held = [value for value in gc.get_objects() if type(value) is ScoringProcess]
            most = max([most, *(len(process._received) for process in held)])
        return scoring.result(), most

    scores, most = careless.runner.run(main())
    assert statuses(scores) == ["crash"]
    assert most <= 2 + 16_384 + 64 + 1


def test_longest_names_and_errors_fit_into_a_reply() -> None:
    names = [f"{'a' * 64}/{i:0>64}" for i in range(MAX_PARTS)]
    spec = RewardSpec(name="a" * 64, factory="")
    assert len(json.dumps(encoded_score(dict.fromkeys(names, -1.2345678901234567e-300)))) <= spec.max_result_bytes(0)
    assert len(json.dumps({"error": "\U0001f600" * 1000})) <= spec.max_result_bytes(0)
    tokens = TokenRewards(tokens=[-1.2345678901234567e-300] * 1000, steps=[(10_000, -1.2345678901234567e-300)] * 1000)
    custom = RewardSpec(name="a", factory="", is_custom=True)
    assert len(json.dumps(encoded_score({"a": tokens}))) <= custom.max_result_bytes(1000)


def test_tampering_with_a_reward_affects_only_its_own_group(careless: Bench) -> None:
    tamper = "import titanrl.processes.zygote as zygote; zygote._score = lambda *_: {'parts': {'answer': 1.0}}"
    assert rewards(careless.score((tamper, {}), WRONG)) == [1.0, 1.0]  # the attack works
    assert rewards(careless.score(WRONG, RIGHT)) == [0.0, 1.0]


def test_error_detail_is_printable_ascii(careless: Bench) -> None:
    (score,) = careless.score((r"raise ValueError('\x1b[2J\ud800\n' + 'x' * 10_000)", {}))
    assert score.detail.startswith(r"ValueError: \x1b[2J\ud800\nxxx")
    assert len(score.detail) < 300


# Arguments of a reward


def test_entry_arrives_unchanged(careless: Bench) -> None:
    given = {"answer": None, "metadata": {1: (2, {3})}}
    assert rewards(careless.score((f"reward = float(entry == {given!r})", given))) == [1.0]


def test_long_completion_keeps_its_end(careless: Bench) -> None:
    text = "#" * (3 << 20) + "\nreward = float(len(text) == 1 << 20)"
    assert rewards(careless.score((text, {}))) == [1.0]


def test_empty_group_has_no_scores(careless: Bench) -> None:
    assert careless.score() == []
