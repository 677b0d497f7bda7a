"""The token driver: conversations between a fake policy and scripted environments."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.environments.results import INVALID, INVALID_REWARDS, returned
from titanrl.carriers.supports import supports_of
from titanrl.carriers.types import Completion, GenerationRequest, SamplingParams
from titanrl.data.tokenizer import Tokenizer
from titanrl.environments import Done, Environment, Episode, Limit, Message, Observation, Tool
from titanrl.rollout.driver import Conversation, EpisodeError, Limits
from titanrl.rollout.renderers import PlainRenderer

EPISODE = Episode(task_id="sums/0", question="1+1=", entry={"answer": "2"}, seed=5)
LIMITS = Limits(max_turns=6, max_tokens=400, max_new_tokens=60, step_timeout_s=0.2, episode_timeout_s=0.5)
ADD = Tool(name="add", parameters={"type": "object", "properties": {"sum": {"type": "string"}}})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass
class Scripted:
    """Replies with a list of observations, and records the messages that it received."""

    script: Sequence[Observation | Done]
    first: Observation = field(default_factory=lambda: Observation(messages=[user("1+1=")], tools=[ADD]))
    seen: list[Message] = field(default_factory=list)
    num_closed: int = 0

    async def reset(self, episode: Episode) -> Observation:
        return self.first

    async def step(self, message: Message) -> Observation | Done:
        self.seen.append(message)
        return self.script[len(self.seen) - 1]

    async def close(self) -> None:
        self.num_closed += 1


def sampling(turn: int, max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0, seed=turn)


def conversation(environment: Any, tokenizer: Tokenizer, limits: Limits = LIMITS) -> Conversation:
    make: Callable[[], Environment] = lambda: environment  # noqa: E731
    return Conversation(make, EPISODE, PlainRenderer(tokenizer), limits, sampling)


class Policy:
    """Replies with given texts or random tokens, and records every request and completion."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str] | random.Random, *, is_truncated: bool = False) -> None:
        self._tokenizer, self._texts, self._is_truncated = tokenizer, texts, is_truncated
        self.record: list[tuple[GenerationRequest, Completion]] = []

    def __call__(self, request: GenerationRequest) -> Completion:
        turn, limit = len(self.record), request.sampling.max_new_tokens
        if isinstance(self._texts, random.Random):
            ids = [self._texts.randrange(2, 106) for _ in range(self._texts.randrange(1, 30))]
            ids = ([*ids, 1])[:limit]
        else:
            ids = [*self._tokenizer.encode(self._texts[turn]), 1][:limit]
        completion = Completion(
            token_ids=np.array(ids),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) - turn,
            versions=np.full(len(ids), 10 + turn),
            finish_reason="stop" if ids[-1] == 1 else "length",
            supports=supports_of([np.array([token, 105], np.int32) for token in ids], 200) if self._is_truncated else None,
        )
        self.record.append((request, completion))
        return completion


def play(talk: Conversation, policy: Callable[[GenerationRequest], Completion]) -> Conversation:
    async def generate(requests: Sequence[GenerationRequest]) -> list[Completion]:
        return list(map(policy, requests))

    asyncio.run(talk.play(generate))
    return talk


def test_states_are_names_or_new_messages(tokenizer: Tokenizer) -> None:
    script = [Observation(messages=[user("?")]), Observation(messages=[user("again")], state="1+1="), Done()]
    talk = play(conversation(Scripted(script), tokenizer), Policy(tokenizer, ["1", "3", "2"]))
    states = [turn.state for turn in talk.tree.turns(talk.turn_rewards)]
    script = [Observation(messages=[user("again")]), Observation(messages=[user("?")], state="1+1="), Done()]
    other = play(conversation(Scripted(script), tokenizer), Policy(tokenizer, ["4", "2", "3"]))
    others = [turn.state for turn in other.tree.turns(other.turn_rewards)]
    assert len({*states, *others}) == 4
    assert (states[0], states[2]) == (others[0], others[2]), "the question and the named state do not depend on the replies"
    assert -(2**63) <= min(states) <= max(states) < 2**63


def tool_result(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call_0", "content": text}


def test_every_turn_extends_the_tokens_of_the_previous_one(tokenizer: Tokenizer) -> None:
    environment = Scripted([Observation(messages=[tool_result("2")], reward=0.5), Done(rewards={"right": 1.0}, reward=0.25)])
    policy = Policy(tokenizer, ["hm<tool_call>1+1</tool_call>", "<answer>2</answer>"])
    talk = play(conversation(environment, tokenizer), policy)
    (segment,) = talk.tree.segments()
    text = "1+1=hm<tool_call>1+1</tool_call><tool_response>2</tool_response><answer>2</answer>"
    assert tokenizer.decode(segment.token_ids.tolist()) == text
    sampled = [completion for _, completion in policy.record]
    assert segment.token_ids[segment.mask].tolist() == [int(i) for c in sampled for i in c.token_ids]
    assert segment.logprobs[segment.mask].tolist() == [float(p) for c in sampled for p in c.logprobs]
    assert segment.versions[segment.mask].tolist() == [int(v) for c in sampled for v in c.versions]
    assert (segment.logprobs[~segment.mask] == 0).all()
    assert (segment.versions[~segment.mask] == -1).all()
    assert policy.record[1][0].token_ids == tuple(segment.token_ids[: -len(sampled[1].token_ids)].tolist())
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"sum": "1+1"}}}
    assert environment.seen[0] == {"role": "assistant", "content": "hm", "tool_calls": [call]}
    assert (talk.turn_rewards, talk.rewards, talk.finish_reason) == ([0.5, 0.25], {"right": 1.0}, "stop")
    assert talk.last_text == "<answer>2</answer>"


@pytest.mark.parametrize(("keep", "content"), [(False, "1"), (True, "1</answer>")])
def test_stop_text_is_in_the_tokens_and_only_if_kept_in_the_message(tokenizer: Tokenizer, keep: bool, content: str) -> None:
    environment, stop = Scripted([Observation(messages=[user("?")]), Done()]), ["</answer>"]

    def stop_text(ids: Sequence[int], more: Sequence[str | int]) -> str:
        return tokenizer.decode_completion(ids)[len(tokenizer.decode_completion(ids, stop, keep_stop=keep)) :]

    policy = Policy(tokenizer, ["1</answer>", "2"])

    def stopped(request: GenerationRequest) -> Completion:
        completion = policy(request)
        if len(policy.record) == 2:
            return completion
        arrays = {name: getattr(completion, name)[:-1] for name in ("token_ids", "logprobs", "versions")}
        return replace(completion, **arrays)

    talk = Conversation(lambda: environment, EPISODE, PlainRenderer(tokenizer), LIMITS, sampling, stop_text)
    (segment,) = play(talk, stopped).tree.segments()
    assert [message["content"] for message in environment.seen] == [content, "2"]
    # The turn ends with an end-of-sequence token, which the policy did not sample.
    assert segment.token_ids[segment.mask].tolist() == [*tokenizer.encode("1</answer>2"), 1]
    assert segment.token_ids.tolist() == [*tokenizer.encode("1+1=1</answer>"), 1, *tokenizer.encode("?2"), 1]


def test_turn_without_tokens_follows_the_previous_turn(tokenizer: Tokenizer) -> None:
    # The second conversation starts a new segment, in which the policy samples no token.
    replaced = Observation(messages=[user("go on")], reward=0.5, replaces=True)
    policy = Policy(tokenizer, ["2", ""])

    def reply(request: GenerationRequest) -> Completion:
        completion = policy(request)
        if len(policy.record) == 1:
            return completion
        empty = {name: getattr(completion, name)[:0] for name in ("token_ids", "logprobs", "versions")}
        return replace(completion, **empty)

    talk = play(conversation(Scripted([replaced, Done(reward=2.0)]), tokenizer), reply)
    (segment,) = talk.tree.segments()
    turns = talk.tree.turns(talk.turn_rewards)
    assert [(turn.segment, turn.end, turn.reward) for turn in turns] == [
        (0, len(segment.mask), reward) for reward in (0.5, 2.0)
    ]


def test_supports_stay_aligned_with_their_tokens(tokenizer: Tokenizer) -> None:
    replaced = Observation(messages=[user("go on")], replaces=True)
    environment = Scripted([Observation(messages=[tool_result("2")]), replaced, Done()])
    policy = Policy(tokenizer, ["<tool_call>1+1</tool_call>", "2", "3"], is_truncated=True)
    segments = play(conversation(environment, tokenizer), policy).tree.segments()
    assert len(segments) == 2
    for segment in segments:
        assert len(segment.supports) == len(segment.token_ids)
        assert (segment.supports.counts_S == np.where(segment.mask, 2, 0)).all()
        for place in np.flatnonzero(segment.mask):
            assert segment.supports.ids(place)[0] == segment.token_ids[place]


def test_replaced_history_starts_a_segment_with_masked_old_turns(tokenizer: Tokenizer) -> None:
    summary = [user("1+1="), {"role": "assistant", "content": "so far 2"}, user("go on")]
    environment = Scripted([Observation(messages=summary, replaces=True), Done()])
    policy = Policy(tokenizer, ["a long thought", "2"])
    talk = play(conversation(environment, tokenizer), policy)
    first, second = talk.tree.segments()
    turns = talk.tree.turns([0.5, 1.0])
    assert [(turn.segment, turn.end, turn.reward) for turn in turns] == [
        (0, len(first.token_ids), 0.5),
        (1, len(second.token_ids), 1.0),
    ]
    assert tokenizer.decode(first.token_ids.tolist()) == "1+1=a long thought"
    assert tokenizer.decode(second.token_ids.tolist()) == "1+1=so far 2go on2"
    assert tokenizer.decode(second.token_ids[second.mask].tolist()) == "2"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "add", "arguments": {"sum": "1+1"}}', {"sum": "1+1"}),
        ('{"name": "add", "arguments": [1]}', "[1]"),
        ('{"name": "add"}', {}),
        ("1+1", {"sum": "1+1"}),
        ('{"name": ', {"sum": '{"name":'}),
    ],
)
def test_tool_calls_are_parsed_or_kept_as_text(tokenizer: Tokenizer, call: str, arguments: object) -> None:
    environment = Scripted([Done()])
    talk = play(conversation(environment, tokenizer), Policy(tokenizer, [f"<tool_call>{call}</tool_call>"]))
    assert environment.seen[0]["tool_calls"][0]["function"]["arguments"] == arguments
    assert talk.num_malformed == isinstance(arguments, str)


@pytest.mark.parametrize(
    ("properties", "required", "arguments"),
    [(("sum", "base"), ["sum"], {"sum": "1+1"}), (("sum", "base"), [], "1+1"), (("sum", "base"), ["sum", "base"], "1+1")],
)
def test_text_of_a_call_is_the_only_required_argument(
    tokenizer: Tokenizer, properties: tuple[str, ...], required: list[str], arguments: object
) -> None:
    tool = Tool(name="add", parameters={"properties": {name: {} for name in properties}, "required": required})
    environment = Scripted([Done()], Observation(messages=[user("1+1=")], tools=[tool]))
    play(conversation(environment, tokenizer), Policy(tokenizer, ["<tool_call>1+1</tool_call>"]))
    assert environment.seen[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_truncated_turn_ends_the_episode_unseen_by_the_environment(tokenizer: Tokenizer) -> None:
    environment = Scripted([Done()])
    talk = play(conversation(environment, tokenizer), Policy(tokenizer, ["x" * 90]))
    assert (talk.finish_reason, talk.is_judged, talk.rewards, talk.turn_rewards) == ("length", False, {}, [0.0])
    assert environment.seen == []
    assert len(talk.tree.segments()[0].token_ids) == 4 + LIMITS.max_new_tokens


@dataclass
class Judging(Scripted):
    """Judges episodes that a limit ends, and records the calls."""

    verdict: Any = field(default_factory=lambda: Done(rewards={"right": 0.25}, reward=0.5, metrics={"late": 1}))
    judged: list[tuple[Message | None, str]] = field(default_factory=list)

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Any:
        self.judged.append((message, limit))
        return self.verdict


AGAIN = [Observation(messages=[user("again ")], reward=0.125, metrics={"late": 0})] * 20
LONG = Observation(messages=[user("again " * 80)], reward=0.125)


@pytest.mark.parametrize(
    ("texts", "script", "limits", "message", "limit"),
    [
        (["x" * 90], AGAIN, LIMITS, {"role": "assistant", "content": "x" * 60}, "turn_tokens"),
        (["x" * 90], AGAIN, replace(LIMITS, max_tokens=30), {"role": "assistant", "content": "x" * 26}, "conversation_tokens"),
        (["ok"], [LONG], LIMITS, None, "conversation_tokens"),
        (["ok"], [replace(LONG, replaces=True)], LIMITS, None, "conversation_tokens"),
        (["ok"], [Observation(messages=[user("again" * 100_000)], reward=0.125)], LIMITS, None, "conversation_tokens"),
        (["ok"] * 6, AGAIN, LIMITS, None, "turns"),
    ],
)
def test_environment_judges_an_episode_that_a_limit_ends(
    tokenizer: Tokenizer, texts: list[str], script: list[Observation], limits: Limits, message: Message | None, limit: str
) -> None:
    environment = Judging(script)
    talk = play(conversation(environment, tokenizer, limits), Policy(tokenizer, texts))
    assert environment.judged == [(message, limit)]
    assert (talk.finish_reason, talk.is_judged, talk.rewards, talk.metrics) == ("length", True, {"right": 0.25}, {"late": 1.0})
    assert talk.turn_rewards == [0.125] * (len(texts) - 1) + [0.5 if message else 0.625]
    assert talk.last_text == texts[-1][: len(message["content"]) if message else None]


def test_environment_may_leave_a_truncated_episode_unjudged(tokenizer: Tokenizer) -> None:
    talk = play(conversation(Judging(AGAIN, verdict=None), tokenizer), Policy(tokenizer, ["ok"] * 6))
    assert (talk.finish_reason, talk.is_judged, talk.rewards, talk.metrics) == ("length", False, {}, {"late": 0.0})


def test_invalid_verdict_is_a_failure(tokenizer: Tokenizer) -> None:
    for verdict, outcome in (
        (AGAIN[0], "environment_error"),
        (2, "environment_error"),
        (Done(reward=float("nan")), "reward_error"),
    ):
        talk = conversation(Judging(AGAIN, verdict=verdict), tokenizer)
        with pytest.raises(EpisodeError, match="judge_truncated") as caught:
            play(talk, Policy(tokenizer, ["ok"] * 6))
        assert caught.value.outcome == outcome
        assert not talk.is_done


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("name", [*INVALID, *INVALID_REWARDS])
def test_invalid_result_fails_the_episode(tokenizer: Tokenizer, name: str, method: str) -> None:
    result = returned({**INVALID, **INVALID_REWARDS}[name])
    environment = Scripted([result]) if method == "step" else Scripted([Done()], first=result)
    with pytest.raises(EpisodeError) as caught:
        play(conversation(environment, tokenizer), Policy(tokenizer, ["2"]))
    assert caught.value.outcome == ("reward_error" if name in INVALID_REWARDS else "environment_error")
    assert str(caught.value).startswith(method)


def test_text_without_tokens_fails_the_episode(tokenizer: Tokenizer) -> None:
    for message in (user("\U0001f600"), tool_result("é"), {"role": "assistant", "content": "ß"}):
        with pytest.raises(EpisodeError, match="the messages cannot be rendered: ValueError") as caught:
            play(conversation(Scripted([Observation(messages=[message])]), tokenizer), Policy(tokenizer, ["2"]))
        assert caught.value.outcome == "environment_error"


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (Observation(messages=[]), "there is no message to start the conversation with"),
        (Observation(messages=[user("")]), "the messages have no tokens"),
        (Observation(messages=[user("1")], reward=0.5), "reset must not return a reward"),
        (Observation(messages=[user("1" * 500)]), "the first messages have 500 tokens, which leaves no room"),
        (Observation(messages=[user("1" * 300_000)]), "the first messages have 300000 characters, which leaves no room"),
        (Done(), r"reset must return an Observation \(got Done"),
    ],
)
def test_unusable_start_fails_the_episode(tokenizer: Tokenizer, first: Any, problem: str) -> None:
    with pytest.raises(EpisodeError, match=problem) as caught:
        play(conversation(Scripted([Done()], first=first), tokenizer), Policy(tokenizer, ["2"]))
    assert caught.value.outcome == "environment_error"


class Hostile(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("method", ["reset", "step", "make"])
@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        Hostile(),
        ValueError("\ud800\0" + "x" * 10**6),
        TimeoutError(),
        StopIteration(),
    ],
)
def test_any_exception_is_a_failure_with_short_readable_text(tokenizer: Tokenizer, method: str, error: BaseException) -> None:
    async def fail(self: object, argument: object) -> Any:
        raise error

    def make() -> Any:
        if method == "make":
            raise error
        return type("Raising", (Scripted,), {method: fail})([Done()])

    if method == "make" and isinstance(error, asyncio.CancelledError):
        return  # a constructor awaits nothing that could be cancelled
    talk = conversation(None, tokenizer)
    talk._make = make
    with pytest.raises(EpisodeError) as caught:
        play(talk, Policy(tokenizer, ["2"]))
    assert caught.value.outcome == "environment_error"
    text = str(caught.value)
    assert len(text) <= 2000
    assert text == text.encode().decode()
    assert "\0" not in text


async def test_cancelling_an_episode_is_not_a_failure_of_its_environment(tokenizer: Tokenizer) -> None:
    environment = Failing([Done()])
    environment.method, environment.seconds = "reset", 9.0
    task = asyncio.create_task(conversation(environment, tokenizer, replace(LIMITS, step_timeout_s=9)).start())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_episode_without_a_sampled_token_is_a_failure(tokenizer: Tokenizer) -> None:
    policy = Policy(tokenizer, ["", ""])

    def nothing(request: GenerationRequest) -> Completion:
        completion = policy(request)
        return replace(completion, **{name: getattr(completion, name)[:0] for name in ("token_ids", "logprobs", "versions")})

    with pytest.raises(EpisodeError, match="the policy sampled no token") as caught:
        play(conversation(Scripted([AGAIN[0], Done(reward=1.0)]), tokenizer), nothing)
    assert caught.value.outcome == "generation_error"


def test_cancelled_completion_is_a_failure(tokenizer: Tokenizer) -> None:
    policy, environment = Policy(tokenizer, ["2"]), Scripted([Done(reward=1.0)])
    with pytest.raises(EpisodeError, match="the completion was cancelled") as caught:
        play(conversation(environment, tokenizer), lambda request: replace(policy(request), finish_reason="abort"))
    assert (caught.value.outcome, environment.seen) == ("generation_error", [])


def test_last_text_is_the_policys_and_not_the_environments(tokenizer: Tokenizer) -> None:
    answer = Observation(messages=[{"role": "assistant", "content": "wrong"}, user("so")])
    talk = play(
        conversation(Scripted([answer] * 2), tokenizer, replace(LIMITS, max_turns=2)), Policy(tokenizer, ["a", "right"])
    )
    assert talk.last_text == "right"


class Failing(Scripted):
    """Fails in a given method."""

    method = "step"
    seconds = 0.0

    async def reset(self, episode: Episode) -> Observation:
        return await self._fail("reset") or await super().reset(episode)

    async def step(self, message: Message) -> Observation | Done:
        return await self._fail("step") or await super().step(message)

    async def _fail(self, method: str) -> Any:
        if method != self.method:
            return None
        if self.seconds:
            await asyncio.sleep(self.seconds)
        raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    ("method", "seconds", "outcome", "text"),
    [
        ("reset", 0.0, "environment_error", "reset raised ZeroDivisionError: boom"),
        ("step", 0.0, "environment_error", "step raised ZeroDivisionError: boom"),
        ("step", 9.0, "timeout", r"step of the environment took longer than 0\.2 s"),
    ],
)
def test_failure_of_the_environment_has_an_outcome(
    tokenizer: Tokenizer, method: str, seconds: float, outcome: str, text: str
) -> None:
    environment = Failing([Done()])
    environment.method, environment.seconds = method, seconds
    with pytest.raises(EpisodeError, match=text) as caught:
        play(conversation(environment, tokenizer), Policy(tokenizer, ["a"]))
    assert caught.value.outcome == outcome


@pytest.mark.parametrize(("blocked_s", "slept_s"), [(0.0, 9.0), (0.15, 0.0)])
def test_calls_of_the_environment_share_the_time_of_the_episode(tokenizer: Tokenizer, blocked_s: float, slept_s: float) -> None:
    class Slow(Scripted):
        async def reset(self, episode: Episode) -> Observation:
            time.sleep(blocked_s)  # blocks the event loop, so no limit ends it
            return await super().reset(episode)

        async def step(self, message: Message) -> Observation | Done:
            await asyncio.sleep(slept_s)
            raise AssertionError("the episode has no time left")

    talk = conversation(Slow([]), tokenizer, replace(LIMITS, episode_timeout_s=0.1))
    with pytest.raises(EpisodeError, match=r"episode_timeout_s: the calls .* took longer than 0\.1 s together \(in step\)"):
        play(talk, Policy(tokenizer, ["a"]))


def test_latest_environment_metrics_are_kept(tokenizer: Tokenizer) -> None:
    script = [
        Observation(messages=[tool_result("2")], metrics={"calls": 1}),
        Done(metrics={"calls": np.float64(2.0), "late": True}),
    ]
    talk = play(conversation(Scripted(script), tokenizer), Policy(tokenizer, ["a", "b"]))
    assert talk.metrics == {"calls": 2.0, "late": 1.0}
    cut = play(conversation(Scripted(script), tokenizer, replace(LIMITS, max_turns=1)), Policy(tokenizer, ["a", "b"]))
    assert (cut.finish_reason, cut.metrics) == ("length", {"calls": 1.0})


@pytest.mark.parametrize(
    "metrics", [{"calls": float("nan")}, {"calls": "many"}, {"a b": 1.0}, {3: 1.0}, [1.0], {f"a{i}": 1 for i in range(33)}]
)
def test_invalid_environment_metrics_are_a_failure(tokenizer: Tokenizer, metrics: Any) -> None:
    with pytest.raises(EpisodeError, match="metrics") as caught:
        play(conversation(Scripted([Done(metrics=metrics)]), tokenizer), Policy(tokenizer, ["a"]))
    assert caught.value.outcome == "environment_error"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9))
def test_random_conversations_keep_what_the_engine_recorded(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)

    def observation() -> Observation:
        messages: list[Message] = [
            draw.choice([user("and "), tool_result("7"), user("<think>")]) for _ in range(draw.randrange(3))
        ]
        return Observation(messages=messages, replaces=draw.random() < 0.2 and bool(messages), tools=[ADD])

    script = [observation() for _ in range(8)] + [Done()] * 20
    policy = Policy(tokenizer, draw)
    limits = Limits(
        max_turns=draw.randrange(1, 12),
        max_tokens=draw.randrange(40, 300),
        max_new_tokens=20,
        step_timeout_s=9,
        episode_timeout_s=9,
    )
    talk = play(conversation(Scripted(script), tokenizer, limits), policy)
    segments = talk.tree.segments()
    sampled = [completion for _, completion in policy.record]
    for column in ("token_ids", "logprobs", "versions"):
        got = [value for segment in segments for value in getattr(segment, column)[segment.mask].tolist()]
        assert got == [value for completion in sampled for value in getattr(completion, column).tolist()]
    turn = 0
    for segment in segments:  # every request of a segment is a prefix of it, so its tokens were only ever extended
        starts = np.flatnonzero(np.diff(segment.versions, prepend=-1) * segment.mask)
        for start in starts.tolist():
            request, completion = policy.record[turn]
            assert request.token_ids == tuple(segment.token_ids[:start].tolist())
            assert segment.token_ids[start : start + len(completion.token_ids)].tolist() == completion.token_ids.tolist()
            turn += 1
        assert len(segment.token_ids) <= limits.max_tokens
        assert segment.mask[-1]
        assert not segment.mask[0]
    assert turn == len(policy.record) <= limits.max_turns
