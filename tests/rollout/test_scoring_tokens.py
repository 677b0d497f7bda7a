"""Token rewards, confined and trusted, with real processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import titanrl
from tests.processes.processes import needs_confinement
from tests.rollout.scored import right, score
from titanrl.carriers.rewards import Answers, Reward, RewardSpec, Score, Scored, TokenRewards, parse_scores
from titanrl.config.schema import Config

pytestmark = needs_confinement


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
def test_token_rewards_are_weighted_and_summed_per_token(trusted: bool) -> None:
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
def test_rewards_can_read_special_tokens(trusted: bool) -> None:
    def ended(completion: str, entry: Mapping[str, Any], raw_completion: str) -> float:
        assert "<eos>" not in completion
        return float(raw_completion == "abc d<eos>")

    @titanrl.group_reward
    def all_ended(completions: Sequence[str], entry: Mapping[str, Any], raw_completions: Sequence[str]) -> list[float]:
        return [float(text.endswith("<eos>")) + len(raw_completions) for text in raw_completions]

    answers = replace(CREDITED, decode_raw=lambda ids: "".join(TEXTS[token] or "<eos>" for token in ids))
    rewards = {"ended": Reward(ended, trusted=trusted), "all": Reward(all_ended, trusted=trusted)}
    scored = score(Config(name="a", num_steps=1), {"rewards": rewards}, answers)
    assert [one.parts for one in scored] == [{"ended": 1.0, "all": 3.0}, {"ended": 0.0, "all": 3.0}]
    assert [one.parts["all"] for one in score(Config(name="a", num_steps=1), {"rewards": rewards}, CREDITED)] == [2.0, 2.0]


@pytest.mark.parametrize("trusted", [False, True])
def test_group_reward_may_return_token_rewards(trusted: bool) -> None:
    @titanrl.group_reward
    def last(completions: Sequence[str], entry: Mapping[str, Any], token_ids: Sequence[Sequence[int]]) -> list[Any]:
        return [titanrl.TokenRewards(tokens=list(range(len(ids)))) for ids in token_ids[:1]] + [1.0]

    first, second = score(Config(name="a", num_steps=1), {"rewards": {"last": Reward(last, trusted=trusted)}}, CREDITED)
    assert (first.reward, first.token_rewards) == (6.0, (0.0, 1.0, 2.0, 3.0))
    assert (second.reward, second.token_rewards) == (1.0, None)


@pytest.mark.parametrize("trusted", [False, True])
def test_invalid_token_rewards_fail_their_completion(trusted: bool) -> None:
    def wrong(completion: str, entry: Mapping[str, Any]) -> titanrl.TokenRewards:
        return titanrl.TokenRewards(tokens=[1.0, 2.0]) if completion == "c" else titanrl.TokenRewards(tokens=[1.0])

    def beyond(completion: str, entry: Mapping[str, Any]) -> titanrl.TokenRewards:
        return titanrl.TokenRewards(tokens=[float("nan")] * 2, steps=[(2, 1.0)])

    def scored(function: Callable[..., object]) -> list[Scored]:
        return score(Config(name="a", num_steps=1), {"rewards": {"wrong": Reward(function, trusted=trusted)}}, CREDITED)

    first, second = scored(wrong)
    assert first.reward is None
    assert first.error == (
        "wrong: it returned 1 token rewards for a completion of 4 tokens. "
        "Return one per sampled token, including the end-of-sequence token."
    )
    assert second.token_rewards == (1.0, 2.0)
    assert all("the reward returned nan. Expected a finite number" in each.error for each in scored(beyond))


def test_steps_of_a_truncated_text_keep_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.rollout.scoring.MAX_TEXT_CHARS", 3)

    def seen(completion: str, entry: Mapping[str, Any]) -> titanrl.TokenRewards:
        return titanrl.TokenRewards(steps=[(1, float(completion == "c d"))])

    first, _ = score(Config(name="a", num_steps=1), {"rewards": {"seen": Reward(seen)}}, CREDITED)
    assert first.token_rewards == (0.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "tokens",
    ["1", "[0.0, [1.0], 3]", "[0.0, [1.0], [[0, 1.0]]]", "[0.0, [1], []]", "[0.0, [NaN], []]", "[0.0, [], [[1, 1.0, 2]]]"],
)
def test_forged_token_rewards_are_an_error(tokens: str) -> None:
    own = RewardSpec(name="a", factory="", is_custom=True)
    valid, forged = (f'{{"parts": {{"a": 1.0}}, "tokens": {{"a": {value}}}}}' for value in ("[0.5, [1.0], [[2, 1.0]]]", tokens))
    assert parse_scores(valid.encode(), own, [1]) == [Score.of({"a": TokenRewards(tokens=[1.0], steps=[(2, 1.0)], whole=0.5)})]
    assert parse_scores(valid.encode(), RewardSpec(name="a", factory="", bounds=(0.0, 1.0)), [1])[0].status == "error"  # type: ignore[index]
    assert parse_scores(forged.encode(), own, [1])[0].status == "error"  # type: ignore[index]


@pytest.mark.parametrize(("tokens", "high"), [("[1.0, 1.0]", 1.0), ("[1e308, 1e308]", float("inf"))])
def test_sum_of_token_rewards_stays_within_the_bounds(tokens: str, high: float) -> None:
    own = RewardSpec(name="a", factory="", bounds=(0.0, high), is_custom=True)
    reply = f'{{"parts": {{"a": 1.0}}, "tokens": {{"a": [0.0, {tokens}, []]}}}}'
    assert parse_scores(reply.encode(), own, [1])[0].status == "error"  # type: ignore[index]
