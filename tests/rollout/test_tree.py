"""The tree of calls: random trees against flat sequences built by hand, and what clients change in messages."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from examples.agents.byte_model import write_byte_tokenizer
from tests.records import plan_rewards
from titanrl.carriers.tables import RecordTable
from titanrl.carriers.types import Completion, Group, GroupHandle, Prompt, Rollout
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.data.tokenizer import EOS_ID, Tokenizer, load_tokenizer
from titanrl.environments import Message, Tool
from titanrl.models.decoder import packed_mask
from titanrl.rollout.driver import CallTree, Context, DoesNotFit, NotRenderable, canonical
from titanrl.rollout.group import branch_points, num_equal, record_of
from titanrl.rollout.renderers import Renderer, make_renderer
from titanrl.trainer.collate import collate

ADD = Tool(name="add", parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
NUM_EPISODES = 200


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> Renderer:
    return make_renderer(tokenizer, "template", {})


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def calling(arguments: object) -> Message:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def sampled(ids: Sequence[int], version: int = 0, rng: random.Random | None = None) -> Completion:
    rng = rng or random.Random(0)
    return Completion(
        token_ids=np.array(ids, np.int64),
        logprobs=np.array([-rng.random() for _ in ids], np.float32),
        versions=np.full(len(ids), version),
        finish_reason="stop",
    )


def reply(tree: CallTree, renderer: Renderer, context: Context, completion: Completion) -> Message:
    message = renderer.parse(completion.token_ids.tolist(), context.tools)
    tree.add(context, completion, message, message)
    return message


def sent_back(message: Message, rng: random.Random) -> Message:
    """Return a message of the policy as some client might send it: other keys, order and spelling, the same meaning."""
    changed: dict[str, Any] = {"refusal": None, "annotations": [], **message}
    if not message["content"] and rng.random() < 0.5:
        changed["content"] = None
    elif rng.random() < 0.5:
        changed["content"] = [{"type": "text", "text": message["content"]}] if message["content"] else ""
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [
            call | {"function": {"arguments": _respelled(call["function"]["arguments"]), "name": call["function"]["name"]}}
            for call in calls
        ]
    return changed


def _respelled(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(dict(reversed(arguments.items())), indent=1)


@dataclass
class Played:
    """An episode with random calls: its tree, and each call as the engine saw it."""

    tree: CallTree
    flat: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)
    continued: set[int] = field(default_factory=set)
    """Calls that a later call continues in the same segment."""
    num_once: int = 0
    """Tokens of these calls, which only a flat sequence of the later call computes again."""
    num_branches: int = 0
    """Calls that continue a call which another one has continued before."""


def played(renderer: Renderer, tokenizer: Tokenizer, rng: random.Random) -> Played:
    """Extend, branch, rewrite and compact conversations in random order; some calls overlap, and some are aborted."""
    episode = Played(CallTree(renderer, max_tokens=4000))
    ends: list[list[Message]] = [[user("q" * rng.randint(1, 8))]]  # conversations that the policy has replied to, or the first
    waiting: list[tuple[Context, list[Message]]] = []

    def ask(messages: list[Message]) -> None:
        waiting.append((episode.tree.context(messages, [ADD]), messages))

    def answer() -> None:
        context, messages = waiting.pop(rng.randrange(len(waiting)))
        call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        said = [tokenizer.encode("thus"), tokenizer.encode(call)]
        # Sampled bytes are seldom the tokens that their text encodes to, and may be no text at all.
        ids = [*rng.choice([*said, [rng.randrange(7, 263) for _ in range(rng.randint(1, 9))]]), EOS_ID]
        completion = sampled(ids, rng.randrange(5), rng)
        message = reply(episode.tree, renderer, context, completion)
        episode.flat.append((context.token_ids, completion))
        if context.parent in episode.continued:
            episode.num_branches += 1
        elif context.parent is not None:
            before, reply_before = episode.flat[context.parent]
            assert context.token_ids[: len(before) + len(reply_before.token_ids)] == (*before, *reply_before.token_ids.tolist())
            episode.num_once += len(before) + len(reply_before.token_ids)
            episode.continued.add(context.parent)
        ends.append([*messages, sent_back(message, rng)])

    ask(ends[0])
    answer()
    for _ in range(rng.randint(1, 7)):
        before = rng.choice(ends[1:])
        new = [rng.choice([user("more"), {"role": "tool", "tool_call_id": "call_0", "content": "3"}])]
        match rng.choice(["extend", "extend", "branch", "rewrite", "compact", "abort"]):
            case "branch":
                ask([*before[: rng.randrange(len(before))], *new])
            case "rewrite":
                ask([*before[:-1], {"role": "assistant", "content": "rewritten"}, *new])
            case "compact":
                ask([ends[0][0], user(f"{len(before)} messages ago"), *new])
            case "abort":
                episode.tree.context([*before, *new], [ADD])
                continue
            case _:
                ask([*before, *new])
        while waiting and rng.random() < 0.7:
            answer()
    while waiting:
        answer()
    return episode


class TinyModel(torch.nn.Module):
    """A model whose prediction depends on all tokens that it sees and their order, in fp64."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(272, 6, dtype=torch.float64))
        self.out = torch.nn.Parameter(torch.randn(6, 272, dtype=torch.float64))

    def loss(
        self, tokens_L: torch.Tensor, positions_L: torch.Tensor, targets_L: torch.Tensor, scale_L: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of negative log-probabilities of the targets, each times its scale."""
        used = scale_L.nonzero()[:, 0]
        age = (positions_L[used, None] - positions_L).double()
        decay = torch.where(packed_mask(positions_L[None])[0, 0, used], torch.exp(-0.3 * age), 0.0)
        logits = torch.tanh(decay @ self.embed[tokens_L]) @ self.out
        return -(logits.log_softmax(-1).gather(1, targets_L[used, None])[:, 0] * scale_L[used].double()).sum()


def gradients(model: TinyModel, losses: Iterator[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_random_trees_have_the_gradients_of_flat_sequences(renderer: Renderer, tokenizer: Tokenizer) -> None:
    rng, model = random.Random(1), TinyModel()
    num_flat = num_tree = num_once = num_segments = num_calls = num_branches = num_sampled = num_placed = num_different = 0
    for index in range(NUM_EPISODES // 2):
        episodes = [played(renderer, tokenizer, rng) for _ in range(2)]
        rewards = [rng.random() for _ in episodes]
        rollouts = tuple(
            Rollout(segments=episode.tree.segments(), reward=reward, reward_parts={}, finish_reason="stop")
            for episode, reward in zip(episodes, rewards, strict=True)
        )
        group = Group(
            prompt=Prompt(index=index, task="t", text="", token_ids=(), entry={}), rollouts=rollouts, generate_s=0, score_s=0
        )
        handle = GroupHandle(shard=0, location=0, serial=0)
        record = record_of(group, handle, has_payload=True, num_overlong=0)
        plan = plan_rewards(
            RecordTable.of([record]),
            algorithm=AlgorithmConfig(advantage="dr_grpo", reduction="sequence_mean"),
            constant_length=1,
            row_tokens=4000,
            rows_per_microbatch=100,
            dp_size=1,
            share_prompts=True,
        )
        rows = [row for microbatch in plan.microbatches for rank in microbatch.rows for row in rank]
        known = sorted(segment.token_ids.tolist() for rollout in rollouts for segment in rollout.segments)
        payload = {handle: dict(enumerate(segment for rollout in rollouts for segment in rollout.segments))}
        packed = collate(rows, payload, 4000)

        def of_rows(packed: Any = packed) -> Iterator[torch.Tensor]:
            scale_BL = packed.weights_BL * packed.advantages_BL * packed.mask_BL
            for columns in zip(packed.tokens_BL, packed.positions_BL, packed.targets_BL, scale_BL, strict=True):
                yield model.loss(*columns)

        def of_calls(episodes: Any = episodes, rewards: Any = rewards) -> Iterator[torch.Tensor]:
            for episode, reward in zip(episodes, rewards, strict=True):
                num_sampled = sum(len(completion.token_ids) for _, completion in episode.flat)
                scale = (reward - sum(rewards) / 2) / num_sampled / 2
                for before, completion in episode.flat:
                    scales = torch.zeros(len(before) + len(completion.token_ids) - 1, dtype=torch.float64)
                    scales[len(before) - 1 :] = scale
                    ids = torch.tensor([*before, *completion.token_ids])
                    yield model.loss(ids[:-1], torch.arange(len(scales)), ids[1:], scales)

        for got, expected in zip(gradients(model, of_rows()), gradients(model, of_calls()), strict=True):
            error = (got - expected).abs().max()
            assert error < 1e-6
            assert error < 1e-5 * expected.abs().max()  # advantages and weights are fp32
        num_placed += plan.num_placed
        num_different += sum(map(len, known)) - sum(num_equal(*map(np.array, pair)) for pair in pairwise(known))
        for episode in episodes:
            segments = episode.tree.segments()
            trained = [Rollout(segments=segments, reward=0.0, reward_parts={}, finish_reason="stop").sampled]
            # Each sampled token once, with its log-probability and version.
            assert sorted(_rows(trained)) == sorted(_rows([completion for _, completion in episode.flat]))
            assert episode.tree.sampled_ids == [token for token, _, _ in _rows(trained)]
            num_flat += sum(len(before) + len(completion.token_ids) for before, completion in episode.flat)
            num_tree += sum(len(segment.token_ids) for segment in segments)
            num_segments, num_calls = num_segments + len(segments), num_calls + len(episode.flat)
            num_once, num_branches = num_once + episode.num_once, num_branches + episode.num_branches
            num_sampled += sum(len(completion.token_ids) for _, completion in episode.flat)
    assert num_tree == num_flat - num_once, "the tokens of a continued call are computed once"
    assert (num_calls, num_segments, num_branches, num_sampled) == (892, 677, 90, 17_917)
    assert (num_flat, num_tree) == (193_482, 150_011)
    # A row computes a token once for all segments that begin with it, but the last one before a sampled token.
    assert num_different <= num_placed <= num_different + num_segments
    assert (num_placed, num_different) == (52_163, 51_711)


def _rows(completions: Sequence[Completion]) -> list[tuple[int, float, int]]:
    columns = [(each.token_ids.tolist(), each.logprobs.tolist(), each.versions.tolist()) for each in completions]
    return [row for column in columns for row in zip(*column, strict=True)]


def test_continued_call_renders_only_what_is_new(renderer: Renderer, tokenizer: Tokenizer) -> None:
    tree = CallTree(renderer, max_tokens=1000)
    first = tree.context([user("1+2?")], [ADD])
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    # The same text, in tokens that encoding it would not give.
    completion = sampled([*tokenizer.encode(call)[1:-1], 66, EOS_ID])
    message = reply(tree, renderer, first, completion)
    rng = random.Random(0)
    second = tree.context([user("1+2?"), sent_back(message, rng), user("so?")], [ADD])
    assert (second.parent, second.num_known) == (0, 2)
    known = [*first.token_ids, *completion.token_ids]
    assert list(second.token_ids[: len(known)]) == known
    reply(tree, renderer, second, sampled([20, EOS_ID], version=3))
    (segment,) = tree.segments()
    assert segment.versions[segment.mask].tolist() == [0] * len(completion.token_ids) + [3, 3]
    turns = tree.turns([0.0, 1.0])
    assert [(turn.segment, turn.end, turn.reward) for turn in turns] == [
        (0, len(known), 0.0),
        (0, len(segment.token_ids), 1.0),
    ]


def test_turn_without_tokens_ends_with_its_segment(renderer: Renderer) -> None:
    tree = CallTree(renderer, max_tokens=1000)
    message = reply(tree, renderer, tree.context([user("a")]), sampled([40, EOS_ID]))
    reply(tree, renderer, tree.context([user("a"), message, user("b")]), sampled([]))
    (segment,) = tree.segments()
    assert [turn.end for turn in tree.turns([0.0, 1.0])] == [len(segment.token_ids)] * 2


def test_second_continuation_of_a_call_is_a_branch(renderer: Renderer) -> None:
    tree = CallTree(renderer, max_tokens=1000)
    message = reply(tree, renderer, tree.context([user("a")]), sampled([40, EOS_ID]))
    both = [tree.context([user("a"), message, user(text)]) for text in ("b", "c")]
    assert [context.parent for context in both] == [0, 0]
    for context in reversed(both):  # the second call is answered first
        reply(tree, renderer, context, sampled([41, EOS_ID]))
    branch, whole = sorted(tree.segments(), key=lambda segment: segment.mask.sum())
    assert (branch.mask.sum(), whole.mask.sum()) == (2, 4)
    assert branch.token_ids[: len(both[0].token_ids)].tolist() == list(both[0].token_ids)
    assert tree.chains() == [[0, 1], [2]]


def test_record_has_the_branch_points(renderer: Renderer) -> None:
    tree = CallTree(renderer, max_tokens=1000)
    message = reply(tree, renderer, tree.context([user("a")]), sampled([40, EOS_ID]))
    for text in ("b", "c"):
        reply(tree, renderer, tree.context([user("a"), message, user(text)]), sampled([41, EOS_ID]))
    whole, branch = tree.segments()
    first, second = branch_points([whole, branch])
    assert (first, second["parent"]) == ({}, 0)
    shared = second["num_shared"]
    assert (whole.token_ids[:shared] == branch.token_ids[:shared]).all()
    assert whole.token_ids[shared] != branch.token_ids[shared]


def test_tokens_keep_the_experts_with_which_the_next_token_was_sampled(renderer: Renderer) -> None:
    tree = CallTree(renderer, 1000)

    def with_experts(context: Context, ids: Sequence[int], expert: int) -> Completion:
        experts = np.full((len(context.token_ids) + len(ids), 2, 1), expert, np.uint8)
        experts[-1] = 255
        return replace(sampled(ids), experts=experts)

    first = tree.context([user("a")])
    message = reply(tree, renderer, first, with_experts(first, [70, EOS_ID], 3))
    second = tree.context([user("a"), message, user("b")])
    reply(tree, renderer, second, with_experts(second, [71, EOS_ID], 5))
    (segment,) = tree.segments()
    num_first = len(first.token_ids) + 1  # the last token of the first reply was computed only for the second
    expected = [3] * num_first + [5] * (len(segment.token_ids) - num_first - 1) + [255]
    assert segment.experts[:, 0, 0].tolist() == expected


def test_other_tools_are_another_conversation(renderer: Renderer) -> None:
    tree = CallTree(renderer, max_tokens=1000)
    message = reply(tree, renderer, tree.context([user("a")], [ADD]), sampled([40, EOS_ID]))
    context = tree.context([user("a"), message, user("b")], [])
    assert context.parent is None
    reply(tree, renderer, context, sampled([41, EOS_ID]))
    assert len(tree.segments()) == 2


def test_text_that_renders_to_the_same_tokens_continues(renderer: Renderer, tokenizer: Tokenizer) -> None:
    tree = CallTree(renderer, max_tokens=1000)
    reply(tree, renderer, tree.context([user("a")]), sampled([*tokenizer.encode("yes"), EOS_ID]))
    # Another identifier, which this template does not render.
    context = tree.context([user("a"), {"role": "assistant", "content": "yes", "name": "me"}, user("b")])
    assert context.parent == 0
    tokens = tree.of_tokens((*context.token_ids, 50))
    assert tokens.parent == 0


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": "", "refusal": None}, True),
        ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a "}, False),
        ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}, True),
        ({"role": "user", "content": "a"}, {"role": "system", "content": "a"}, False),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, {"role": "tool", "content": "a", "tool_call_id": "2"}, False),
        ({"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a", "reasoning_content": "b"}, False),
        (calling("{"), calling({"arguments": "{"}), True),  # as Anthropic's protocol has it
        (calling(""), calling({}), True),
        (calling("{"), calling("["), False),
    ],
)
def test_canonical_messages(first: Message, second: Message, equal: bool) -> None:
    assert (canonical(first) == canonical(second)) is equal


def test_reasoning_that_a_client_drops_does_not_branch(renderer: Renderer) -> None:
    tree = CallTree(renderer, max_tokens=1000)
    completion, context = sampled([40, EOS_ID]), tree.context([user("a")])
    message = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    tree.add(context, completion, message, message)
    assert tree.context([user("a"), {"role": "assistant", "content": "b"}, user("c")]).parent == 0
    assert tree.context([user("a"), message, user("c")]).parent == 0
    changed = message | {"reasoning_content": "changed"}
    assert tree.context([user("a"), changed, user("c")]).num_known == 0


def test_conversation_without_room_is_refused(renderer: Renderer) -> None:
    tree = CallTree(renderer, max_tokens=20)
    with pytest.raises(DoesNotFit, match="tokens"):
        tree.context([user("a" * 30)])
    with pytest.raises(DoesNotFit, match="characters"):
        tree.context([user("a" * 100_000)])
    with pytest.raises(NotRenderable):
        CallTree(make_renderer_that_fails(), 100).context([user("a")])


def make_renderer_that_fails() -> Any:
    class Fails:
        stop_ids = (1,)

        def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
            raise ValueError("no")

    return Fails()
