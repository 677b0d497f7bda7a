"""Groups of episodes, with a random policy and environments that fail at planned turns."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from titanrl.carriers.dumps import rows_of, table_of
from titanrl.carriers.rewards import Answers, Scored
from titanrl.carriers.tables import RecordTable
from titanrl.carriers.types import Completion, GenerationRequest, Group, GroupHandle, GroupTokens, GroupTurns, Prompt
from titanrl.config import Config
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.data import DataConfig
from titanrl.config.sections import RolloutConfig, TrainerConfig
from titanrl.data.tokenizer import Tokenizer
from titanrl.environments import Done, Environments, Episode, JudgesTruncated, Limit, Message, Observation, make_environment
from titanrl.metrics.steps import episode_metrics, evaluation_metrics, part_means
from titanrl.rollout.episodes import Episodes, start_episodes
from titanrl.rollout.group import credited_values_differ, fit_to_rows, record_of
from titanrl.rollout.open_tasks import evaluation_result
from titanrl.rollout.renderers import PlainRenderer
from titanrl.rollout.workers import RolloutWorker

PROMPT = Prompt(index=3, task="sums", text="1+1=", token_ids=(7, 8), entry={"answer": "2"})


class Guess:
    """Ends after a number of turns; an attempt may raise, hang or return an invalid message at a given turn."""

    plan: list[str] = []  # noqa: RUF012  # of the attempts, in the order of their start
    seeds: list[int] = []  # noqa: RUF012

    async def reset(self, episode: Episode) -> Observation:
        Guess.seeds.append(episode.seed)
        self.fate = Guess.plan.pop(0) if Guess.plan else "3"
        self.turns = 0
        return Observation(messages=[{"role": "user", "content": episode.question}])

    async def step(self, message: Message) -> Observation | Done:
        self.turns += 1
        if self.fate == "raises":
            raise RuntimeError("boom")
        if self.fate == "bytes":
            return Observation(messages=[{"role": "user", "content": b"more"}])
        if self.fate == "hangs":
            await asyncio.sleep(60)
        numbers = {"guesses": self.turns}
        if self.turns < int(self.fate):
            return Observation(messages=[{"role": "user", "content": "more"}], reward=0.25, metrics=numbers)
        return Done(rewards={"found": 1.0}, metrics=numbers)

    async def close(self) -> None:
        pass


class Policy:
    """Replies to each request with two tokens, and records the sizes of the calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.seeds: list[int | None] = []

    async def __call__(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.calls.append(len(requests))
        self.seeds += [request.sampling.seed for request in requests]
        await asyncio.sleep(0)
        return [
            Completion(
                token_ids=np.array([20 + len(self.calls) % 50, 1]),
                logprobs=np.array([-0.5, -0.25], np.float32),
                versions=np.array([4, 4]),
                finish_reason="stop",
            )
            for _ in requests
        ]


def play(
    tokenizer: Tokenizer,
    plan: Sequence[str],
    *,
    in_round: bool,
    scores: Sequence[float | None] = (),
    token_rewards: Sequence[tuple[float, ...] | None] = (None,) * 4,
    game: type[Guess] = Guess,
    part: str = "answer",
    **data: Any,
) -> tuple[Group, Policy]:
    """Play a group of four episodes; `scores` and `token_rewards` are the rewards of the configuration."""
    Guess.plan, Guess.seeds = list(plan), []
    environment = {
        "function": "guess.py:Guess",
        "max_turns": 4,
        "step_timeout_s": 0.2,
        "retries": 1,
        **data.pop("environment", {}),
    }
    config = Config.model_validate(
        {"name": "guess", "num_steps": 1, "data": {"environment": environment, **data}, "rollout": {"group_size": 4}}
    )

    async def score(answers: Answers) -> list[Scored]:
        values = list(scores) or [0.0] * len(answers.completions)
        return [
            Scored(reward=None, parts={}, error="answer: broken")
            if value is None
            else Scored(reward=value, parts={part: value}, token_rewards=tokens)
            for value, tokens in zip(values, token_rewards, strict=False)
        ]

    policy = Policy()
    episodes = Episodes(config=config, renderer=PlainRenderer(tokenizer), environments=Environments(game), score=score)
    return asyncio.run(episodes.roll_out(PROMPT, policy, in_round=in_round)), policy


@pytest.mark.parametrize("in_round", [True, False])
def test_group_has_segments_rewards_and_counts(tokenizer: Tokenizer, in_round: bool) -> None:
    group, policy = play(tokenizer, ["1", "2", "3", "4"], in_round=in_round)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.25, 1.5, 1.75]
    assert group.rollouts[2].reward_parts == {"found": 1.0, "turns": 0.5}
    assert group.counts["slowest_ms"] <= group.counts["environment_ms"] < 10_000
    assert {name: count for name, count in group.counts.items() if not name.endswith("_ms")} == {
        "episodes": 4,
        "turns": 10,
        "malformed_calls": 0,
        "truncated": 0,
        "unjudged": 0,
        "environment_error": 0,
        "timeout": 0,
        "reward_error": 0,
        "generation_error": 0,
    }
    record = record_of(group, GroupHandle(shard=0, location=0, serial=0), has_payload=True, num_overlong=0)
    assert record.metrics == {"guesses": (10.0, 4)}
    assert sum(policy.calls) == 10
    if in_round:  # one call per turn, and calls without requests to the end of the round
        assert policy.calls == [4, 3, 2, 1, 0, 0, 0, 0]
    assert len(set(policy.seeds)) == 10
    assert len(set(Guess.seeds)) == 1
    record = record_of(group, GroupHandle(shard=0, location=0, serial=0), has_payload=True, num_overlong=0)
    assert (record.prompt_len, record.num_segments, record.num_sampled) == (4, (1, 1, 1, 1), (2, 4, 6, 8))
    assert [message["content"] for message in group.conversations[1]][::2] == ["1+1=", "more"]
    assert [[turn.reward for turn in rollout.turns] for rollout in group.rollouts] == [
        [1.0],
        [0.25, 1.0],
        [0.25, 0.25, 1.0],
        [0.25, 0.25, 0.25, 1.0],
    ]
    first, more = group.rollouts[1].turns[0].state, group.rollouts[1].turns[1].state
    assert 0 not in (first, more)
    assert first != more
    assert record.turns == GroupTurns(
        num_turns=(1, 2, 3, 4),
        rewards=(1.0, 0.25, 1.0, 0.25, 0.25, 1.0, 0.25, 0.25, 0.25, 1.0),
        num_sampled=(2,) * 10,
        states=(first, first, more, first, more, more, first, more, more, more),
    )


def test_turns_of_a_truncated_segment_have_the_remaining_tokens(tokenizer: Tokenizer) -> None:
    group, _ = play(tokenizer, ["2"] * 4, in_round=True)
    (whole,) = group.rollouts[0].segments
    assert [turn.end for turn in group.rollouts[0].turns] == [6, len(whole.token_ids)]
    cut, num_overlong = fit_to_rows(group, TrainerConfig(row_tokens=len(whole.token_ids) - 1, overlong="truncate"))
    record = record_of(cut, GroupHandle(shard=0, location=0, serial=0), has_payload=True, num_overlong=num_overlong)
    assert (num_overlong, record.turns.num_sampled) == (4, (2, 1) * 4)
    assert record.num_sampled == (3,) * 4


def test_turns_differ_where_sums_of_rewards_are_equal(tokenizer: Tokenizer) -> None:
    group, _ = play(tokenizer, ["1", "2", "1", "1"], in_round=True, environment={"weights": {"turns": 0.0}})
    assert not group.rewards_differ
    algorithm, data = AlgorithmConfig(credit="turn"), DataConfig()
    assert not credited_values_differ(group, group, algorithm, data)
    discounted = algorithm.model_copy(update={"turn_discount": 0.5})
    assert credited_values_differ(group, group, discounted, data)  # the reward is one turn later
    by_state = discounted.model_copy(update={"credit": "state"})
    assert credited_values_differ(group, group, by_state, data)
    assert not credited_values_differ(group, group, by_state.model_copy(update={"turn_discount": 1.0}), data)


@pytest.mark.parametrize("in_round", [True, False])
def test_failed_episode_is_retried_and_then_left_out(tokenizer: Tokenizer, in_round: bool) -> None:
    group, _ = play(tokenizer, ["raises", "1", "hangs", "1", "raises", "2"], in_round=in_round)
    assert len(group.rollouts) + len(group.failures) == 4
    assert group.counts["episodes"] == 6
    assert (group.counts["environment_error"], group.counts["timeout"]) == (2, 1)
    assert 200 <= group.counts["slowest_ms"] <= group.counts["environment_ms"] < 10_000  # the call that hung had 0.2 s
    outcomes = Counter(failure.outcome for failure in group.failures)
    assert set(outcomes) <= {"environment_error", "timeout"}
    assert len(group.rollouts) == 4 - outcomes.total() >= 3
    if group.failures:
        assert group.failures[0].error.startswith("data.environment: step")


def test_episode_cannot_change_the_entry_of_others(tokenizer: Tokenizer) -> None:
    class Consumes(Guess):
        async def reset(self, episode: Episode) -> Observation:
            episode.entry.pop("answer")  # type: ignore[attr-defined]
            return await super().reset(episode)

    group, _ = play(tokenizer, [], in_round=False, game=Consumes)
    assert len(group.rollouts) == 4
    assert PROMPT.entry == {"answer": "2"}


def test_configured_rewards_apply_if_explicit_or_if_the_environment_returns_none(tokenizer: Tokenizer) -> None:
    scores = [0.0, 1.0, 1.0, 0.0]
    group, _ = play(tokenizer, ["1"] * 4, in_round=True, scores=scores)
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 4
    group, _ = play(tokenizer, ["1"] * 4, in_round=True, scores=scores, rewards={"answer": "exact"})
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 2.0, 2.0, 1.0]
    group, _ = play(
        tokenizer, ["1"] * 4, in_round=True, scores=scores, rewards={"answer": "exact"}, environment={"weights": {"found": 0.5}}
    )
    assert [rollout.reward for rollout in group.rollouts] == [0.5, 1.5, 1.5, 0.5]


def test_failed_reward_is_counted(tokenizer: Tokenizer) -> None:
    group, _ = play(tokenizer, ["1"] * 4, in_round=True, scores=[0.0, None, 1.0, None], rewards={"answer": "exact"})
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 2.0]
    assert group.counts["reward_error"] == 2
    assert {failure.outcome for failure in group.failures} == {"reward_error"}


@pytest.mark.parametrize(("least", "rejection"), [(1, None), (2, None), (3, "too small")])
def test_group_below_the_minimum_size_is_rejected(tokenizer: Tokenizer, least: int, rejection: str | None) -> None:
    group, _ = play(tokenizer, ["1"] * 4, in_round=True, scores=[0.0, None, 1.0, None], rewards={"answer": "exact"})
    worker = object.__new__(RolloutWorker)
    config = SimpleNamespace(rollout=RolloutConfig(min_group_size=least))
    worker._tasks_of_run = [SimpleNamespace(config=config)]  # type: ignore[list-item]
    worker._filter = None
    assert worker._rejection(group, task=0) == rejection
    assert worker._rejection(replace(group, rollouts=()), task=0) is None  # it has a reason of its own


def test_minimum_size_above_the_group_size_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"Set min_group_size to at most 4\."):
        RolloutConfig(group_size=4, min_group_size=5)


@pytest.mark.parametrize("in_round", [True, False])
def test_invalid_message_is_retried_and_then_left_out(tokenizer: Tokenizer, in_round: bool) -> None:
    group, _ = play(tokenizer, ["bytes"] * 5 + ["1"] * 3, in_round=in_round)
    assert (len(group.rollouts), len(group.failures)) == (3, 1)
    assert (group.counts["episodes"], group.counts["environment_error"]) == (8, 5)
    assert {failure.outcome for failure in group.failures} == {"environment_error"}
    assert group.failures[0].error == (
        "data.environment: step returned an invalid result. "
        "messages[0].content: must be text or another JSON value (got b'more'). Convert it to text."
    )
    assert episode_metrics(group.counts)["episode/environment_error_frac"] == 5 / 8


@pytest.mark.parametrize(("truncated_reward", "weight"), [(0.0, 1.0), (-1.0, 1.0), (-1.0, 0.5)])
def test_unjudged_episode_gets_the_configured_reward(tokenizer: Tokenizer, truncated_reward: float, weight: float) -> None:
    environment = {"max_turns": 2, "truncated_reward": truncated_reward, "weights": {"truncated": weight}}
    group, _ = play(tokenizer, ["1", "3", "2", "3"], in_round=True, environment=environment)
    unjudged = 0.5 + weight * truncated_reward  # two turns of reward 1/4
    assert [rollout.reward for rollout in group.rollouts] == [1.0, unjudged, 1.25, unjudged]
    assert group.rollouts[1].reward_parts == {"turns": 0.5, "truncated": truncated_reward}
    assert [rollout.finish_reason for rollout in group.rollouts] == ["stop", "length", "stop", "length"]
    assert [turn.reward for turn in group.rollouts[1].turns] == [0.25, 0.25 + weight * truncated_reward]
    assert (group.counts["truncated"], group.counts["unjudged"]) == (2, 2)
    shares = episode_metrics(group.counts)
    assert (shares["episode/truncated_frac"], shares["episode/unjudged_frac"]) == (0.5, 0.5)
    record = record_of(group, GroupHandle(shard=0, location=0, serial=0), has_payload=True, num_overlong=0)
    means = part_means(RecordTable.of([record]))
    assert means == {"found": 0.5, "turns": 0.3125, "truncated": truncated_reward / 2}
    assert means["found"] + means["turns"] + weight * means["truncated"] == sum(record.rewards) / 4


def test_source_does_not_score_what_the_environment_did_not_judge(tokenizer: Tokenizer) -> None:
    environment = {"max_turns": 1, "truncated_reward": -1.0}
    group, _ = play(tokenizer, ["3"] * 4, in_round=True, scores=[1.0] * 4, environment=environment)
    assert [rollout.reward_parts for rollout in group.rollouts] == [{"turns": 0.25, "truncated": -1.0}] * 4
    group, _ = play(tokenizer, ["3"] * 4, in_round=True, scores=[1.0] * 4, environment=environment, rewards={"answer": "exact"})
    assert [rollout.reward_parts for rollout in group.rollouts] == [{"answer": 1.0, "turns": 0.25, "truncated": -1.0}] * 4
    assert [rollout.reward for rollout in group.rollouts] == [0.25] * 4


class Judged(Guess):
    """Also judges episodes that a limit ends."""

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done | None:
        return Done(rewards={"found": 0.5}, reward=0.125, metrics={"guesses": self.turns})


def test_judged_episode_has_the_rewards_of_its_environment(tokenizer: Tokenizer) -> None:
    environment = {"max_turns": 2, "truncated_reward": -1.0}
    group, _ = play(tokenizer, ["1", "3", "2", "3"], in_round=False, environment=environment, game=Judged)
    rewards = {(rollout.finish_reason, rollout.reward, tuple(rollout.reward_parts.items())) for rollout in group.rollouts}
    assert rewards == {
        ("stop", 1.0, (("found", 1.0),)),
        ("stop", 1.25, (("found", 1.0), ("turns", 0.25))),
        ("length", 1.125, (("found", 0.5), ("turns", 0.625))),
    }
    assert (group.counts["truncated"], group.counts["unjudged"]) == (2, 0)


def test_evaluation_counts_truncated_and_unjudged_episodes(tokenizer: Tokenizer) -> None:
    environment = {"max_turns": 2, "truncated_reward": -1.0}
    group, _ = play(tokenizer, ["1", "3", "1", "raises", "raises"], in_round=True, environment={**environment, "retries": 0})
    config = Config.model_validate(
        {
            "name": "a",
            "num_steps": 1,
            "evaluation": {"sets": {"hard": {"num_samples": 4, "temperature": 1.0, "num_prompts": 1}}},
        }
    )
    result = evaluation_result(config.evaluation_set("hard"), [group])
    assert (result.num_truncated, result.num_unjudged, result.num_errors) == (1, 1, 1)
    assert result.mean == (1.0 - 0.5 + 1.0) / 3
    metrics = evaluation_metrics(result)
    task = result.task
    shares = [metrics[f"eval/{task}/{name}_frac"] for name in ("truncated", "unjudged", "error")]
    assert shares == [1 / 3, 1 / 3, 0.25]


def test_unjudged_episode_survives_a_dump(tokenizer: Tokenizer) -> None:
    group, _ = play(
        tokenizer, ["1", "3", "bytes", "bytes", "1"], in_round=True, environment={"max_turns": 2, "truncated_reward": -1}
    )
    rows = table_of(list(rows_of(group, "trained", 0, 0))).to_pylist()
    parts = [json.loads(row["reward_parts"]) for row in rows]
    assert parts == [dict(rollout.reward_parts) for rollout in group.rollouts] + [{}] * len(group.failures)
    assert [row["finish_reason"] for row in rows if row["outcome"] == "ok"].count(
        "length"
    ) == 2  # one of them is a second attempt
    assert json.loads(rows[0]["counts"]) == group.counts


def test_reward_with_a_name_of_the_configuration_is_a_failure(tokenizer: Tokenizer) -> None:
    group, _ = play(tokenizer, ["1"] * 4, in_round=True, scores=[1.0] * 4, rewards={"found": "exact"}, part="found")
    assert not group.rollouts
    assert group.failures[0].error.endswith("its reward found has the name of a reward in data.rewards. Rename one of them.")


def test_infinite_sum_of_rewards_is_a_failure(tokenizer: Tokenizer) -> None:
    weights = {"found": 1e308, "turns": 1e308}
    group, _ = play(tokenizer, ["8"] * 4, in_round=True, environment={"weights": weights, "max_turns": 8}, game=Judged)
    assert not group.rollouts
    assert {failure.outcome for failure in group.failures} == {"reward_error"}


@pytest.mark.parametrize("environment", ["calculator", "tic_tac_toe", "single_turn"])
async def test_built_in_environments_judge_truncated_episodes(tokenizer: Tokenizer, environment: str) -> None:
    made = make_environment(environment)
    assert isinstance(made, JudgesTruncated)
    episode = Episode(task_id="sums/0", question="1+1=", entry={}, seed=0)
    await made.reset(episode)
    done = await made.judge_truncated(None, "turns")
    assert done.rewards == ({"game": 0.0} if environment == "tic_tac_toe" else {})


def test_group_is_empty_if_every_episode_fails(tokenizer: Tokenizer) -> None:
    group, _ = play(tokenizer, ["raises"] * 8, in_round=False)
    assert not group.rollouts
    assert len(group.failures) == 4
    record = record_of(group, GroupHandle(shard=0, location=0, serial=0), has_payload=False, num_overlong=0)
    assert (record.num_errors, record.rewards) == (4, ())
    assert record.first_error.startswith("data.environment: step raised RuntimeError: boom (")


def test_held_out_episodes_are_played_turn_by_turn(tokenizer: Tokenizer) -> None:
    Guess.plan, Guess.seeds = ["1", "3", "2", "raises", "1"], []
    config = Config.model_validate(
        {"name": "guess", "num_steps": 1, "data": {"environment": {"function": "guess.py:Guess", "max_turns": 3, "retries": 1}}}
    )

    async def score(answers: Answers) -> list[Scored]:
        return [Scored(reward=0.0, parts={}) for _ in answers.completions]

    policy = Policy()
    episodes = Episodes(config=config, renderer=PlainRenderer(tokenizer), environments=Environments(Guess), score=score)
    prompts = [replace(PROMPT, index=index) for index in range(4)]
    playing = episodes.answer(prompts, policy, num_samples=1, max_new_tokens=5, temperature=0.0, seed=1)
    groups = asyncio.run(playing)
    assert [len(group.rollouts) for group in groups] == [1, 1, 1, 1]
    assert [group.rollouts[0].reward for group in groups] == [1.0, 1.5, 1.25, 1.0]
    assert policy.calls == [1] * 4 + [1] * 3 + [1]
    assert set(policy.seeds) == {None}
    assert len(set(Guess.seeds)) == 4


TWO_TURNS = """
from titanrl.environments import Done, Observation


class TwoTurns:
    async def reset(self, episode):
        self.turns = 0
        return Observation(messages=[{"role": "user", "content": episode.question}])

    async def step(self, message):
        self.turns += 1
        return Done(rewards={"found": 1.0}) if self.turns == 2 else Observation(messages=[])

    async def close(self):
        pass
"""


@pytest.mark.parametrize("num_processes", [1, 3])
def test_fewer_processes_than_episodes_suffice(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    (tmp_path / "two_turns.py").write_text(TWO_TURNS)
    environment = {"function": f"{tmp_path}/two_turns.py:TwoTurns", "num_processes": num_processes}
    config = Config.model_validate(
        {"name": "a", "num_steps": 1, "max_staleness": 1, "data": {"environment": environment}, "rollout": {"group_size": 4}}
    )

    async def score(answers: Answers) -> list[Scored]:
        raise AssertionError("the environment returns the reward")

    async def main() -> list[Group]:
        episodes = await start_episodes(config, tokenizer, score, {})
        prompts = [replace(PROMPT, index=index) for index in range(3)]
        options: dict[str, Any] = {"num_samples": 2, "max_new_tokens": 5, "temperature": 1.0, "seed": 1}
        try:
            async with asyncio.timeout(60):
                group, *evaluations = await asyncio.gather(
                    episodes.roll_out(PROMPT, Policy(), in_round=False),
                    *(episodes.answer(prompts, Policy(), **options) for _ in range(2)),
                )
        finally:
            await episodes.environments.close()
        return [group, *evaluations[0], *evaluations[1]]

    groups = asyncio.run(main())
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[1.0] * 4] + [[1.0] * 2] * 6


def test_token_rewards_are_included_in_their_turns(tokenizer: Tokenizer) -> None:
    # Turns of two tokens each. The second episode has a turn of reward 1/4, and the end is worth 1.
    by_token = [(0.5, 0.0), (0.5, -0.25, 0.0, 2.0), None, None]
    group, _ = play(
        tokenizer,
        ["1", "2", "1", "1"],
        in_round=True,
        scores=[0.5, 2.25, 0.0, 0.0],
        token_rewards=by_token,
        rewards={"answer": "exact"},
    )
    first, second, third, _ = group.rollouts
    assert (first.reward, second.reward, third.token_rewards) == (1.5, 3.5, None)
    assert first.token_rewards.tolist() == [0.5, 1.0]
    assert second.token_rewards.tolist() == [0.5, 0.0, 0.0, 3.0]
    assert [turn.reward for turn in first.turns] == [1.5]
    assert [turn.reward for turn in second.turns] == [0.5, 3.0]
    record = record_of(group, GroupHandle(shard=0, location=0, serial=0), has_payload=True, num_overlong=0)
    expected = GroupTokens(num_rewards=(2, 2, 1, 1), positions=(0, 1, 0, 3, 1, 1), rewards=(0.5, 1.0, 0.5, 3.0, 1.0, 1.0))
    assert record.tokens == expected
