"""The parts of a reward, confined and trusted, with real processes, threads and an HTTP server."""

import asyncio
import http.server
import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import titanrl
from tests.sandbox.processes import needs_confinement
from titanrl.config.data import DataConfig, RewardConfig
from titanrl.config.schema import Config
from titanrl.config.sections import SandboxConfig
from titanrl.extensions import plugins_of, with_objects
from titanrl.rewards import Answers, Reward, Scored, TokenRewards
from titanrl.rollout.scoring import Scoring, reward_specs, weighted
from titanrl.sandbox.scores import RewardSpec, Score, parse_scores

pytestmark = needs_confinement

SANDBOX = SandboxConfig(timeout_s=2.0, num_processes=2)
ANSWERS = Answers(
    entry={"question": "2 + 2 =", "answer": "4", "metadata": {"url": ""}},
    completions=("4", "five"),
    num_tokens=(2, 3),
    finish_reasons=("stop", "length"),
)


def score(
    config: Config,
    objects: Mapping[str, object],
    answers: Answers = ANSWERS,
) -> list[Scored]:
    """Score answers as a rollout worker does."""
    config = with_objects(config, objects)

    async def main() -> list[Scored]:
        scoring = Scoring(config.model_copy(update={"sandbox": SANDBOX}), plugins_of(config, objects))
        await scoring.start()
        try:
            return await scoring.score(answers)
        finally:
            await scoring.close()

    return asyncio.run(main())


def score_with(**rewards: object) -> list[Scored]:
    """Score the answers with rewards given in Python."""
    return score(Config(name="a", num_steps=1), {"rewards": rewards})


def score_with_paths(rewards: Mapping[str, object]) -> list[Scored]:
    """Score the answers with rewards that the configuration names."""
    data = DataConfig.model_validate({"rewards": rewards})
    return score(Config(name="a", num_steps=1, data=data), {})


def values(scores: Sequence[Scored]) -> list[float | None]:
    return [scored.reward for scored in scores]


def right(completion: str, entry: Mapping[str, Any]) -> float:
    return float(completion == entry["answer"])


@titanrl.group_reward
def longest(completions: Sequence[str], entry: Mapping[str, Any], num_tokens: Sequence[int]) -> list[float]:
    return [float(num == max(num_tokens)) for num in num_tokens]


MODULE = """
import asyncio, titanrl
from beside_rewards import BONUS

def right(completion, entry):
    return BONUS + (completion == entry["answer"])

async def parts(completion, entry, finish_reason):
    await asyncio.sleep(0)
    return {"short": len(completion) < 2, "ended": finish_reason == "stop"}

@titanrl.group_reward
def rank(completions, entry):
    return [float(sorted(completions).index(text)) for text in completions]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with rewards, in a folder from which modules can be imported."""
    (tmp_path / "beside_rewards.py").write_text("BONUS = 2.0\n")
    (tmp_path / "file_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "file_rewards.py"


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("by_file", [False, True])
def test_rewards_named_by_import_path_and_by_file(module: Path, by_file: bool, trusted: bool) -> None:
    where = str(module) if by_file else "file_rewards"
    rewards = {
        name: {"function": f"{where}:{name}", "trusted": trusted, "weight": weight}
        for name, weight in {"right": 1.0, "parts": 0.5, "rank": 10.0}.items()
    }
    first, second = score_with_paths(rewards)
    assert first.parts == {"right": 3.0, "parts/short": 1.0, "parts/ended": 1.0, "rank": 0.0}
    assert second.parts == {"right": 2.0, "parts/short": 0.0, "parts/ended": 0.0, "rank": 1.0}
    assert (first.reward, second.reward) == (3.0 + 0.5 * 2.0, 2.0 + 10.0)


def test_file_is_relative_to_the_configuration_file(module: Path) -> None:
    (module.parent / "run.yaml").write_text("name: a\nnum_steps: 1\ndata: {rewards: {answer: file_rewards.py:right}}\n")
    config = titanrl.load_config(module.parent / "run.yaml")
    assert config.data.rewards["answer"].function == f"{module}:right"
    assert values(score(config, {})) == [3.0, 2.0]


@pytest.mark.parametrize("trusted", [False, True])
def test_objects_of_every_kind_are_scored_together(trusted: bool) -> None:
    factor = 3.0  # a closure

    class Judge:
        def __call__(self, completion: str, entry: Mapping[str, Any]) -> float:
            return factor

    async def waits(completion: str, entry: Mapping[str, Any]) -> float:
        return len(completion)

    @titanrl.group_reward
    async def distinct(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
        return [float(len(set(completions)))] * len(completions)

    first, second = score_with(
        right=right,
        judge=Reward(Judge(), weight=0.5, trusted=trusted),
        waits=Reward(waits, weight=-1.0, trusted=not trusted),
        distinct=Reward(distinct, trusted=trusted),
        longest=longest,
        exact="exact",
    )
    assert first.parts == {"right": 1.0, "judge": 3.0, "waits": 1.0, "distinct": 2.0, "longest": 0.0, "exact": 1.0}
    assert second.parts == {"right": 0.0, "judge": 3.0, "waits": 4.0, "distinct": 2.0, "longest": 1.0, "exact": 0.0}
    assert (first.reward, second.reward) == (1.0 + 1.5 - 1.0 + 2.0 + 0.0 + 1.0, 0.0 + 1.5 - 4.0 + 2.0 + 1.0 + 0.0)


def test_single_reward_of_python_is_the_answer() -> None:
    scores = score(Config(name="a", num_steps=1), {"rewards": right})
    assert [scored.parts for scored in scores] == [{"answer": 1.0}, {"answer": 0.0}]


def test_failure_of_one_part_leaves_the_completion_without_reward_and_names_the_part() -> None:
    def fussy(completion: str, entry: Mapping[str, Any]) -> float:
        return 1 / (len(completion) - 1)

    first, second = score_with(right=right, fussy=fussy, also=Reward(fussy, trusted=True))
    error = "ZeroDivisionError: division by zero"
    assert first == Scored(reward=None, parts={}, error=f"fussy: {error}; also: {error}")
    assert second.parts == {"right": 0.0, "fussy": 1 / 3, "also": 1 / 3}


@pytest.mark.parametrize("trusted", [False, True])
def test_group_reward_fails_as_a_whole_or_for_one_value(trusted: bool) -> None:
    @titanrl.group_reward
    def wrong(completions: Sequence[str], entry: Mapping[str, Any]) -> list[object]:
        return {"short": [1.0], "odd": [1.0, "two"]}[entry["answer"]]  # type: ignore[list-item,return-value]

    def scored(answer: str) -> list[Scored]:
        answers = Answers(entry={"answer": answer}, completions=("a", "b"), num_tokens=(1, 1), finish_reasons=("stop",) * 2)
        return score(Config(name="a", num_steps=1), {"rewards": {"wrong": Reward(wrong, trusted=trusted)}}, answers)

    assert [s.error for s in scored("short")] == [
        "wrong: TypeError: the reward returned 1 of 2 values. Expected one per completion."
    ] * 2
    first, second = scored("odd")
    assert first.reward == 1.0
    assert second.error.startswith("wrong: TypeError: the reward returned 'two'. Expected a finite number: `def reward(")
    assert [s.error for s in scored("none")] == ["wrong: KeyError: 'none'"] * 2


# Network


class _Judge(http.server.BaseHTTPRequestHandler):
    """A judge that grades a completion by its length."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(request)  # type: ignore[attr-defined]
        body = json.dumps({"grade": len(request["completion"]) / 10}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[http.server.ThreadingHTTPServer]:
    """An HTTP server on this machine; `asked` has the requests."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asking(port: int) -> Callable[[str, Mapping[str, Any]], float]:
    def grade(completion: str, entry: Mapping[str, Any]) -> float:
        body = json.dumps({"question": entry["question"], "completion": completion}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}", body) as reply:
            return float(json.load(reply)["grade"])

    return grade


def asking_async(port: int) -> Callable[..., Any]:
    async def grade(completion: str, entry: Mapping[str, Any]) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"question": entry["question"], "completion": completion})
        writer.write(f"POST / HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        reply = await reader.read()
        writer.close()
        return float(json.loads(reply.partition(b"\r\n\r\n")[2])["grade"])

    return grade


@pytest.mark.parametrize("make", [asking, asking_async])
def test_trusted_judge_is_asked_over_http(
    make: Callable[[int], Callable[..., Any]], judge: http.server.ThreadingHTTPServer
) -> None:
    scores = score_with(right=right, judge=Reward(make(judge.server_port), weight=2.0, trusted=True))
    assert [scored.parts["judge"] for scored in scores] == [0.1, 0.4]
    assert values(scores) == [1.0 + 2 * 0.1, 2 * 0.4]
    asked = judge.asked  # type: ignore[attr-defined]
    assert sorted(request["completion"] for request in asked) == ["4", "five"]


REMEDY = "set data.rewards.judge.trusted to true if it does not execute model output"


def swallowing(port: int) -> Callable[..., float]:
    ask = asking(port)

    def grade(completion: str, entry: Mapping[str, Any]) -> float:
        try:
            return ask(completion, entry)
        except OSError:
            return 0.0

    return grade


@pytest.mark.parametrize(
    ("make", "needs"), [(asking, "the network"), (asking_async, "an event loop"), (swallowing, "the network")]
)
def test_confined_judge_fails_with_the_remedy_instead_of_zeros(
    make: Callable[[int], Callable[..., Any]], needs: str, judge: http.server.ThreadingHTTPServer
) -> None:
    for scored in score_with(judge=make(judge.server_port)):
        assert scored.reward is None
        assert f"the reward needs {needs}, which the sandbox denies; {REMEDY}" in scored.error
    assert judge.asked == []  # type: ignore[attr-defined]


def test_other_denials_name_the_remedy_and_ordinary_errors_do_not() -> None:
    def reads(completion: str, entry: Mapping[str, Any]) -> float:
        return len(Path("/etc/passwd").read_text())

    def threads(completion: str, entry: Mapping[str, Any]) -> float:
        thread = threading.Thread(target=print)
        thread.start()
        return 1.0

    def fails(completion: str, entry: Mapping[str, Any]) -> float:
        raise RuntimeError("no such word")

    errors = [s.error for reward in (reads, threads, fails) for s in score_with(judge=reward)[:1]]
    assert [REMEDY in error for error in errors] == [True, True, False]
    assert errors[2] == "judge: RuntimeError: no such word"


# Time limits


@pytest.mark.parametrize(("trusted", "what"), [(False, "a whole group"), (True, "one completion")])
def test_slow_reward_names_its_time_limit(trusted: bool, what: str) -> None:
    def slow(completion: str, entry: Mapping[str, Any]) -> float:
        time.sleep(0.0 if completion == "4" else 30.0)
        return 1.0

    started = time.monotonic()
    first, second = score_with(slow=Reward(slow, trusted=trusted))
    assert time.monotonic() - started < 15.0
    assert first.reward == 1.0
    assert second.error == f"slow: timeout: the reward did not return in time (sandbox.timeout_s=2, for {what})"


def test_slow_async_and_group_rewards_are_stopped() -> None:
    async def slow(completion: str, entry: Mapping[str, Any]) -> float:
        await asyncio.sleep(30.0)
        return 1.0

    @titanrl.group_reward
    def slow_group(completions: Sequence[str], entry: Mapping[str, Any]) -> list[float]:
        time.sleep(30.0)
        return []

    def times_out(completion: str, entry: Mapping[str, Any]) -> float:
        raise TimeoutError("the judge is busy")

    trusted = {
        "slow": Reward(slow, trusted=True),
        "group": Reward(slow_group, trusted=True),
        "busy": Reward(times_out, trusted=True),
    }
    first, second = score_with(**trusted, confined=slow_group)
    assert first.error == second.error
    limit = "timeout: the reward did not return in time (sandbox.timeout_s=2, for"
    assert first.error.split("; ") == [
        f"slow: {limit} one completion)",
        f"group: {limit} the whole group)",
        "busy: TimeoutError: the judge is busy",
        f"confined: {limit} a whole group)",
    ]


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), KeyboardInterrupt()])
def test_trusted_reward_may_raise_anything(error: BaseException) -> None:
    def raises(completion: str, entry: Mapping[str, Any]) -> float:
        raise error

    (first, _) = score_with(judge=Reward(raises, trusted=True))
    assert first.error.startswith("judge: ")
    assert type(error).__name__ in first.error


# Weights, and the configuration


def parts(**values: float) -> Score:
    return Score(parts={name.replace("__", "/"): value for name, value in values.items()}, status="ok")


def test_weights_of_rewards_and_of_their_parts_multiply() -> None:
    rewards = {
        "right": RewardConfig(function="exact"),
        "judge": RewardConfig(function="exact", weight=0.5, weights={"style": 0.1}),
    }
    scored = weighted({"right": parts(right=1.0), "judge": parts(judge__style=2.0, judge__facts=3.0)}, rewards, ANSWERS, 0)
    assert scored.reward == pytest.approx(1.0 + 0.5 * 0.1 * 2.0 + 0.5 * 3.0)
    assert scored.parts == {"right": 1.0, "judge/style": 2.0, "judge/facts": 3.0}


def test_weight_of_a_part_that_is_not_returned_is_an_error() -> None:
    rewards = {"judge": RewardConfig(function="exact", weights={"stile": 0.1})}
    scored = weighted({"judge": parts(judge__style=2.0, judge__facts=3.0)}, rewards, ANSWERS, 0)
    assert scored.error == "judge: it returned facts, style, but data.rewards.judge.weights names stile"
    scored = weighted({"judge": parts(judge=2.0)}, rewards, ANSWERS, 0)
    assert scored.error == "judge: it returned a number, but data.rewards.judge.weights names stile"


def specs_of(data: DataConfig) -> list[RewardSpec]:
    return reward_specs(Config(name="a", num_steps=1, data=data), {})


def test_source_selects_the_reward_without_others() -> None:
    (gym,) = specs_of(DataConfig(task="countdown", task_config={"min_numbers": 2}))
    assert (gym.name, gym.factory, gym.bounds) == ("answer", "titanrl.rollout.scorers:reasoning_gym", (0.0, 1.0))
    assert gym.kwargs == {"task": "countdown", "config": {"min_numbers": 2}}
    (exact,) = specs_of(DataConfig(source="jsonl", path=Path("prompts.jsonl")))
    assert (exact.name, exact.factory, exact.is_own) == ("answer", "titanrl.rollout.scorers:exact", False)
    (own,) = specs_of(DataConfig(rewards={"short": RewardConfig(function="a.b:c")}))
    assert (own.name, own.factory, own.kwargs["plugin"].name, own.is_own) == (
        "short",
        "titanrl.rollout.scorers:own",
        "a.b:c",
        True,
    )
    assert specs_of(DataConfig(rewards={"short": RewardConfig(function="a.b:c", trusted=True)})) == []


# Built-in rewards with options


def test_built_in_rewards_run_in_the_sandbox_with_weights_and_options() -> None:
    first, second = score_with_paths(
        {
            "right": "exact",
            "short": {"function": "overlong", "weight": 0.5, "options": {"cache_tokens": 2, "max_tokens": 4}},
            "default": {"function": "overlong", "options": {"cache_tokens": 25}},  # of rollout.max_new_tokens, 26
            "again": {"function": "repetition", "options": {"ngram_size": 1, "unit": "character"}},
            "digits": {"function": "regex", "weight": 2.0, "options": {"pattern": r"\d"}},
        }
    )
    assert first.parts == {"right": 1.0, "short": 0.0, "default": -0.04, "again": 0.0, "digits": 1.0}
    assert first.reward == 1.0 - 0.04 + 2.0
    assert second.parts == {"right": 0.0, "short": -0.5, "default": -0.08, "again": 0.0, "digits": 0.0}
    assert second.reward == -0.25 - 0.08


def test_built_in_rewards_are_named_from_python() -> None:
    short = Reward("overlong", weight=2.0, options={"cache_tokens": 2, "max_tokens": 4})
    assert values(score_with(right="exact", short=short)) == [1.0, -1.0]


def test_pattern_that_backtracks_forever_is_a_failure_of_its_completion_only() -> None:
    answers = Answers(
        entry={"question": "", "answer": "", "metadata": {}},
        completions=("a" * 40 + "b", "aaa"),
        num_tokens=(41, 3),
        finish_reasons=("stop", "stop"),
    )
    reward = Reward("regex", options={"pattern": "(a+)+"})
    first, second = score(Config(name="a", num_steps=1), {"rewards": {"r": reward}}, answers)
    assert (first.reward, second.reward) == (None, 1.0)
    assert first.error.startswith("r: timeout: the reward did not return in time (sandbox.timeout_s=2")


def test_math_verify_uses_its_time_limit_in_the_sandbox() -> None:
    pytest.importorskip("math_verify")
    answers = Answers(
        entry={"question": "", "answer": r"\frac{1}{2}", "metadata": {}},
        completions=(r"\boxed{0.5}", r"\boxed{9^{9^{9^{9}}}}", "3"),
        num_tokens=(5, 9, 2),
        finish_reasons=("stop",) * 3,
    )
    reward = Reward("math_verify", options={"timeout_s": 1})
    first, second, third = score(Config(name="a", num_steps=1), {"rewards": {"right": reward}}, answers)
    assert (first.parts, third.parts) == ({"right": 1.0}, {"right": 0.0})
    assert second.error == "right: TimeoutError: two expressions were not compared in 1 s"


# Rewards of tokens

TEXTS = {1: "", 2: "ab", 3: "c", 4: " d"}
CREDITED = Answers(
    entry={"question": "", "answer": "4", "metadata": {}},
    completions=("abc d", "c"),
    num_tokens=(4, 2),
    finish_reasons=("stop", "stop"),
    token_ids=((2, 3, 4, 1), (3, 1)),
    decode=lambda ids: "".join(TEXTS[token] for token in ids),
)


@pytest.mark.parametrize("trusted", [False, True])
def test_rewards_of_tokens_are_weighted_and_added_by_token(trusted: bool) -> None:
    def steps(completion: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        ends = titanrl.TokenRewards(steps=[(completion.index("c") + 1, 0.5)], whole=0.25)
        return {"ends": ends, "short": float(len(completion) < 2)}

    def ids(completion: str, entry: Mapping[str, Any], token_ids: Sequence[int]) -> titanrl.TokenRewards:
        return titanrl.TokenRewards(tokens=[0.1 * token for token in token_ids])

    rewards = {"steps": Reward(steps, weight=2.0, weights={"short": 0.5}, trusted=trusted), "ids": Reward(ids, trusted=trusted)}
    first, second = score(Config(name="a", num_steps=1), {"rewards": {**rewards, "one": Reward(right, weight=4.0)}}, CREDITED)
    # 2 * 1/2 where "abc" ends, 2 * 1/4 at the end, and for "short" 2 * 1/2 at the end of the second one.
    assert first.token_rewards == (0.0 + 0.1 * 2, 1.0 + 0.1 * 3, 0.1 * 4, 0.5 + 0.1 * 1)
    assert second.token_rewards == (1.0 + 0.1 * 3, 0.5 + 0.1 * 1 + 1.0)
    assert first.reward == pytest.approx(sum(first.token_rewards))
    assert second.parts == {"steps/ends": 0.75, "steps/short": 1.0, "ids": pytest.approx(0.4), "one": 0.0}


@pytest.mark.parametrize("trusted", [False, True])
def test_group_reward_may_return_rewards_of_tokens(trusted: bool) -> None:
    @titanrl.group_reward
    def last(completions: Sequence[str], entry: Mapping[str, Any], token_ids: Sequence[Sequence[int]]) -> list[Any]:
        return [titanrl.TokenRewards(tokens=list(range(len(ids)))) for ids in token_ids[:1]] + [1.0]

    first, second = score(Config(name="a", num_steps=1), {"rewards": {"last": Reward(last, trusted=trusted)}}, CREDITED)
    assert (first.reward, first.token_rewards) == (6.0, (0.0, 1.0, 2.0, 3.0))
    assert (second.reward, second.token_rewards) == (1.0, None)


@pytest.mark.parametrize("trusted", [False, True])
def test_wrong_rewards_of_tokens_fail_their_completion(trusted: bool) -> None:
    def wrong(completion: str, entry: Mapping[str, Any]) -> titanrl.TokenRewards:
        return titanrl.TokenRewards(tokens=[1.0, 2.0]) if completion == "c" else titanrl.TokenRewards(tokens=[1.0])

    def beyond(completion: str, entry: Mapping[str, Any]) -> titanrl.TokenRewards:
        return titanrl.TokenRewards(tokens=[float("nan")] * 2, steps=[(2, 1.0)])

    def scored(function: Callable[..., object]) -> list[Scored]:
        return score(Config(name="a", num_steps=1), {"rewards": {"wrong": Reward(function, trusted=trusted)}}, CREDITED)

    first, second = scored(wrong)
    assert first.reward is None
    assert first.error == (
        "wrong: it returned 1 rewards of tokens for a completion of 4. "
        "Return one per sampled token, with the end-of-sequence token."
    )
    assert second.token_rewards == (1.0, 2.0)
    assert all("the reward returned nan. Expected a finite number" in each.error for each in scored(beyond))


def test_steps_of_a_text_that_was_cut_keep_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.sandbox.pool.MAX_TEXT_CHARS", 3)

    def seen(completion: str, entry: Mapping[str, Any]) -> titanrl.TokenRewards:
        return titanrl.TokenRewards(steps=[(1, float(completion == "c d"))])

    first, _ = score(Config(name="a", num_steps=1), {"rewards": {"seen": Reward(seen)}}, CREDITED)
    assert first.token_rewards == (0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "tokens",
    ["1", "[0.0, [1.0], 3]", "[0.0, [1.0], [[0, 1.0]]]", "[0.0, [1], []]", "[0.0, [NaN], []]", "[0.0, [], [[1, 1.0, 2]]]"],
)
def test_forged_rewards_of_tokens_are_an_error(tokens: str) -> None:
    own = RewardSpec(name="a", factory="", is_own=True)
    valid, forged = (
        f'[{{"parts": {{"a": 1.0}}, "tokens": {{"a": {value}}}}}]' for value in ("[0.5, [1.0], [[2, 1.0]]]", tokens)
    )
    assert parse_scores(valid.encode(), own, 1) == [Score.of({"a": TokenRewards(tokens=[1.0], steps=[(2, 1.0)], whole=0.5)})]
    assert parse_scores(valid.encode(), RewardSpec(name="a", factory="", bounds=(0.0, 1.0)), 1)[0].status == "error"  # type: ignore[index]
    assert parse_scores(forged.encode(), own, 1)[0].status == "error"  # type: ignore[index]


@pytest.mark.parametrize(("tokens", "high"), [("[1.0, 1.0]", 1.0), ("[1e308, 1e308]", float("inf"))])
def test_sum_of_the_rewards_of_tokens_stays_within_the_bounds(tokens: str, high: float) -> None:
    own = RewardSpec(name="a", factory="", bounds=(0.0, high), is_own=True)
    reply = f'[{{"parts": {{"a": 1.0}}, "tokens": {{"a": [0.0, {tokens}, []]}}}}]'
    assert parse_scores(reply.encode(), own, 1)[0].status == "error"  # type: ignore[index]
