"""The real engine in its actor: weight updates, versions of tokens, and log-probabilities against transformers."""

import asyncio
import functools
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.forks import fork
from tests.generator.lab import IMPLEMENTATIONS, PROMPTS, Lab, requests_of, running_lab, titan_names
from titanrl.carriers.types import Completion, GenerationRequest, SamplingParams
from titanrl.data.tokenizer import load_tokenizer
from titanrl.processes.actors import ask_actor, resolve
from titanrl.processes.variables import worker_environment
from titanrl.rollout.pool import GeneratorPool, InRound
from titanrl.weights.records import Commit, HeldAdapter, adapters_run
from titanrl.weights.store import IMPORTS, WeightSource, spawn_store
from titanrl.weights.transport import WeightPublisher


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(params=IMPLEMENTATIONS)
def impl(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


ONE_OF_EACH = ["titan", "native-tp2"]
"""Both implementations, one on two ranks, for what either does in the same way with and without tensor parallelism."""
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0, seed=None)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.7, seed=5)


@functools.cache
def reference(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@functools.cache
def greedy_completions(model_dir: Path) -> list[list[int]]:
    """Return the completion of each prompt by transformers."""
    found = []
    for prompt in PROMPTS:
        ids, options = torch.tensor([prompt]), {"max_new_tokens": 24, "do_sample": False}
        output = reference(model_dir).generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(output[0, len(prompt) :].tolist())
    return found


def test_generator_refuses_requests_before_its_first_pull_and_after_a_failed_one(lab: Lab, impl: str) -> None:
    with pytest.raises(Exception, match="no valid weights"):
        lab.do(lab.generate(impl, GREEDY))
    with pytest.raises(Exception, match=r"version 9: the manifests of ranks .0. are of another version"):
        lab.do(pull_commit(lab, impl, Commit(9, lab.commits[1].manifests)))
    with pytest.raises(Exception, match="no valid weights: the pull of version 9 failed: version 9: the manifests"):
        lab.do(lab.generate(impl, GREEDY))


async def pull(lab: Lab, impl: str, version: int) -> None:
    await pull_commit(lab, impl, lab.commits[version])


async def pull_commit(lab: Lab, impl: str, commit: Commit) -> None:
    await lab.generators[impl].pull_weights.call(commit)


async def test_concurrent_pulls_each_get_a_reply_and_the_last_one_wins(lab: Lab, impl: str) -> None:
    broken = Commit(9, lab.commits[1].manifests)
    pulls = [pull_commit(lab, impl, commit) for commit in (lab.commits[1], broken, lab.commits[2])]
    replies = await asyncio.gather(*pulls, return_exceptions=True)
    (completion,) = await lab.generate(impl, GREEDY, PROMPTS[:1])
    assert replies[0] is None
    assert "version 9: the manifests" in str(replies[1])
    assert replies[2] is None
    assert set(completion.versions.tolist()) == {2}


async def test_new_requests_wait_for_expected_weights(lab: Lab, impl: str) -> None:
    lab.models[10] = lab.models[2]
    leader = lab.generators[impl].slice(procs=0)
    await pull(lab, impl, 1)
    await leader.expect_weights.call_one(10)
    generating = asyncio.create_task(lab.generate(impl, GREEDY, PROMPTS[:1]))
    await leader.stats.call_one()  # sent after the request, so the request has arrived when this returns
    await lab.publish(10)
    await pull(lab, impl, 10)
    await leader.expect_weights.call_one(10)  # already pulled, so it holds nothing
    assert set((await generating)[0].versions.tolist()) == {10}
    await lab.publish(1)
    await lab.publish(2)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ((), r"1 to 255 tokens \(got 0\)"),
        ((2,) * 256, r"1 to 255 tokens \(got 256\)"),
        ((2, 10**6), r"token ids must be 0 to .* \(got 2 to 1000000\)"),
    ],
    ids=["empty", "too-long", "unknown"],
)
@pytest.mark.parametrize("impl", ONE_OF_EACH)
def test_invalid_prompt_is_refused_and_others_are_served(lab: Lab, impl: str, prompt: tuple[int, ...], reason: str) -> None:
    lab.do(pull(lab, impl, 1))
    with pytest.raises(Exception, match=reason):
        lab.do(lab.generate(impl, GREEDY, [prompt]))
    assert len(lab.do(lab.generate(impl, GREEDY, PROMPTS[:1]))[0].token_ids) == 24


@pytest.mark.parametrize("versions", [(1, 2), (2, 1)])
@pytest.mark.parametrize("impl", ["titan", "native"])
def test_pulled_weights_reproduce_greedy_completions_of_transformers(lab: Lab, impl: str, versions: tuple[int, ...]) -> None:
    for version in versions:
        lab.do(pull(lab, impl, version))
    expected = greedy_completions(lab.models[version])
    for tokens, completion in zip(expected, lab.do(lab.generate(impl, GREEDY)), strict=True):
        assert completion.token_ids.tolist() == tokens
        assert set(completion.versions.tolist()) == {version}


@pytest.mark.parametrize("impl", ONE_OF_EACH)
def test_log_probabilities_include_the_temperature(lab: Lab, impl: str) -> None:
    lab.do(pull(lab, impl, 1))
    policy = reference(lab.models[1])
    for prompt, completion in zip(PROMPTS, lab.do(lab.generate(impl, SAMPLED)), strict=True):
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = policy(tokens).logits[0, len(prompt) - 1 : -1] / SAMPLED.temperature
        expected = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)


TRUNCATED = {
    "top_k": SamplingParams(max_new_tokens=24, temperature=0.7, seed=5, top_k=20, supports=True),
    "top_p": SamplingParams(max_new_tokens=24, temperature=2.0, seed=5, top_p=0.9, supports=True),
    "min_p": SamplingParams(max_new_tokens=24, temperature=1.0, seed=5, min_p=0.05, supports=True),
    "all": SamplingParams(max_new_tokens=24, temperature=1.3, seed=5, top_k=30, top_p=0.95, min_p=0.01, supports=True),
}


def kept_by(p_V: torch.Tensor, sampling: SamplingParams, *, slack: float) -> set[int]:
    """Return the tokens that remain after truncation in vLLM's order: min-p, then top-k, then top-p of the rest.

    With `slack`, each bound is this much stricter, or laxer if it is negative.
    """
    p_V = torch.where(p_V >= (sampling.min_p + slack) * p_V.max(), p_V, 0.0)
    if sampling.top_k:
        last = sampling.top_k if slack > 0 else sampling.top_k - 1  # the first one left out, or the last one kept
        p_V = torch.where(p_V >= p_V.sort(descending=True).values[last] * (1 + slack), p_V, 0.0)
    ordered, order = (p_V / p_V.sum()).sort(descending=True)
    needed = ordered.cumsum(0) - ordered < sampling.top_p - slack
    return set(order[needed & (ordered > 0)].tolist()) | {int(p_V.argmax())}


@pytest.mark.parametrize(
    ("impl", "limits"),
    [("titan", "top_k"), ("titan", "top_p"), ("titan", "min_p"), *((impl, "all") for impl in ONE_OF_EACH)],
)
async def test_recorded_supports_match_the_truncation(lab: Lab, impl: str, limits: str) -> None:
    """The exact set lies between the sets of slightly moved bounds, which differ only in tokens at the bound."""
    sampling = TRUNCATED[limits]
    await pull(lab, impl, 1)
    plain = SamplingParams(max_new_tokens=24, temperature=0.7, seed=1)
    truncated, others = await asyncio.gather(lab.generate(impl, sampling), lab.generate(impl, plain))
    assert all(completion.supports is None for completion in others)
    policy, num_exact, sizes = reference(lab.models[1]), 0, set()
    for prompt, completion in zip(PROMPTS, truncated, strict=True):
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = policy(tokens).logits[0, len(prompt) - 1 : -1].double() / sampling.temperature
        assert len(completion.supports) == len(completion.token_ids)
        for number, p_V in enumerate(logits.softmax(-1)):
            support, token = completion.supports.ids(number), completion.token_ids[number]
            strict, lax = kept_by(p_V, sampling, slack=1e-5), kept_by(p_V, sampling, slack=-1e-5)
            assert strict <= set(support.tolist()) <= lax
            num_exact += strict == lax
            assert token in support
            expected = p_V[token].log() - p_V[support].sum().log()
            assert completion.logprobs[number] == pytest.approx(expected.item(), abs=2e-5)
            sizes.add(len(support))
    assert num_exact > 0.95 * sum(len(completion.token_ids) for completion in truncated)
    assert max(sizes) < len(p_V)


@pytest.mark.parametrize("impl", ONE_OF_EACH)
def test_seed_determines_the_completion(lab: Lab, impl: str) -> None:
    lab.do(pull(lab, impl, 1))
    first, again = (lab.do(lab.generate(impl, SAMPLED)) for _ in range(2))
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in again]
    other = lab.do(lab.generate(impl, SamplingParams(max_new_tokens=24, temperature=0.7, seed=6)))
    assert [c.token_ids.tolist() for c in first] != [c.token_ids.tolist() for c in other]


@pytest.mark.parametrize("impl", ["titan", "native"])
def test_tensor_parallel_replica_matches_a_single_rank(lab: Lab, impl: str) -> None:
    for version in (1, 2):
        completions = []
        for name in (impl, f"{impl}-tp2"):
            lab.do(pull(lab, name, version))
            completions.append(lab.do(lab.generate(name, GREEDY)))
        for single, parallel in zip(*completions, strict=True):
            assert parallel.token_ids.tolist() == single.token_ids.tolist()
            np.testing.assert_allclose(parallel.logprobs, single.logprobs, atol=1e-5)


def test_pull_that_fails_on_one_rank_fails_on_all(lab: Lab) -> None:
    leader, follower = (lab.generators["titan-tp2"].slice(procs=rank) for rank in (0, 1))
    broken = Commit(9, lab.commits[2].manifests)

    async def scenario() -> list[Any]:
        pulls = [rank.pull_weights.call_one(commit) for rank, commit in ((leader, lab.commits[2]), (follower, broken))]
        return await asyncio.gather(*map(resolve, pulls), return_exceptions=True)

    lab.do(pull(lab, "titan-tp2", 1))
    cause = "version 9: the manifests of ranks .0. are of another version"
    for reply, text in zip(lab.do(scenario()), (f"rank 1: {cause}", cause), strict=True):
        assert re.search(text, str(reply))
    with pytest.raises(Exception, match=f"no valid weights: the pull of version 2 failed: rank 1: {cause}"):
        lab.do(lab.generate("titan-tp2", GREEDY))
    lab.do(pull(lab, "titan-tp2", 2))
    assert set(lab.do(lab.generate("titan-tp2", GREEDY))[0].versions.tolist()) == {2}


def test_adapter_that_one_rank_cannot_fetch_fails_on_all(lab: Lab) -> None:
    leader, follower = (lab.generators["titan-tp2"].slice(procs=rank) for rank in (0, 1))

    async def scenario() -> list[Any]:
        publisher = WeightPublisher(adapters_run("lab"), 0, lab.store, torch.float32, ["arena"])
        commit = Commit(1, (await publisher.publish(1, titan_names(load_file(lab.models[2] / "model.safetensors"))),))
        held = [HeldAdapter(number=1, version=2, commit=each) for each in (commit, Commit(9, commit.manifests))]
        holds = [rank.hold_adapter.call_one(each) for rank, each in zip((leader, follower), held, strict=True)]
        return await asyncio.gather(*map(resolve, holds), return_exceptions=True)

    lab.do(pull(lab, "titan-tp2", 2))
    reply, failed = lab.do(scenario())
    assert "WeightMismatchError" in str(reply)  # it took part in the swap, which fails on every rank
    assert re.search("the manifests of ranks .0. are of another version", str(failed))
    assert set(lab.do(lab.generate("titan-tp2", GREEDY))[0].versions.tolist()) == {2}


def scored_by(model_dir: Path, prompt: tuple[int, ...], completion: Completion, temperature: float) -> np.ndarray:
    """Return the log-probability of each token of a completion given all tokens before it."""
    tokens = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = reference(model_dir)(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    scores: np.ndarray = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].numpy()
    return scores


def update_during_generation(lab: Lab, impl: str, sampling: SamplingParams) -> list[Completion]:
    """Pull version 2 while version 1 generates long completions; return the completions."""

    async def scenario() -> list[Completion]:
        await pull(lab, impl, 1)
        generating = asyncio.create_task(lab.generate(impl, sampling, PROMPTS))
        await asyncio.sleep(0)
        # Requests decode in the same steps, so the long ones are running when a short one that came later has finished.
        await lab.generate(impl, SamplingParams(max_new_tokens=8, temperature=1.0, seed=9), PROMPTS[:1])
        await pull(lab, impl, 2)
        return await generating

    is_in_time = all if impl.startswith("native") else any  # a restart replaces all completions
    for _ in range(10):  # if this process pauses, the engine finishes the completions before the update
        completions: list[Completion] = lab.do(scenario())
        if is_in_time(completion.versions[-1] == 2 for completion in completions):
            break
    return completions


@pytest.mark.parametrize("impl", ["titan", "titan-tp2"])
def test_update_during_generation_keeps_the_log_probabilities_of_each_version(lab: Lab, impl: str) -> None:
    sampling = SamplingParams(max_new_tokens=100, temperature=0.7, seed=3)
    completions = update_during_generation(lab, impl, sampling)
    assert any(set(completion.versions.tolist()) == {1, 2} for completion in completions)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.versions) == len(completion.token_ids) == len(completion.logprobs)
        assert (np.diff(completion.versions) >= 0).all()
        for version, model_dir in lab.models.items():
            made = completion.versions == version
            expected = scored_by(model_dir, prompt, completion, sampling.temperature)
            np.testing.assert_allclose(completion.logprobs[made], expected[made], atol=5e-5)


@pytest.mark.parametrize("impl", ["native", "native-tp2"])
def test_restarted_completions_have_only_tokens_of_the_new_version(lab: Lab, impl: str) -> None:
    sampling = SamplingParams(max_new_tokens=100, temperature=0.7, seed=3)
    restarted = update_during_generation(lab, impl, sampling)
    fresh = lab.do(lab.generate(impl, sampling))
    assert [set(completion.versions.tolist()) for completion in restarted] == [{2}] * len(PROMPTS)
    assert [completion.token_ids.tolist() for completion in restarted] == [c.token_ids.tolist() for c in fresh]


def test_restarted_completion_with_a_stop_text_is_that_of_the_new_version(lab: Lab) -> None:
    impl, sampling = "native", SamplingParams(max_new_tokens=100, temperature=0.7, seed=3)
    lab.do(pull(lab, impl, 2))
    fresh = lab.do(lab.generate(impl, sampling))
    tokenizer = load_tokenizer(lab.models[2])
    longest = max(range(len(fresh)), key=lambda i: len(fresh[i].token_ids))
    stop = "".join(tokenizer.token_text(token) for token in fresh[longest].token_ids[60:64].tolist())
    stopping = replace(sampling, stop=(stop,))
    restarted, fresh = update_during_generation(lab, impl, stopping), lab.do(lab.generate(impl, stopping))
    assert stop
    assert fresh[longest].finish_reason == "stop"
    assert len(fresh[longest].token_ids) <= 64
    assert [completion.token_ids.tolist() for completion in restarted] == [c.token_ids.tolist() for c in fresh]
    assert [completion.finish_reason for completion in restarted] == [c.finish_reason for c in fresh]


@pytest.mark.parametrize("impl", ONE_OF_EACH)
def test_stop_texts_end_completions_after_the_token_that_completes_them(lab: Lab, impl: str) -> None:
    lab.do(pull(lab, impl, 1))
    tokenizer = load_tokenizer(lab.models[1])
    free = lab.do(lab.generate(impl, SAMPLED, PROMPTS[:1]))[0]
    ids = free.token_ids.tolist()
    texts = [tokenizer.token_text(token) for token in ids]
    # A text over three tokens; none of the tokens is special, and the text does not occur earlier.
    end, wanted = next(
        (end, wanted) for end in range(3, 20) if (wanted := "".join(texts[end - 3 : end])) not in "".join(texts[:end])[:-1]
    )
    for limit in (24, end):  # the last allowed token may complete the text
        sampling = replace(SAMPLED, stop=("never", wanted), max_new_tokens=limit)
        stopped, _ = lab.do(lab.generate(impl, sampling, [PROMPTS[0], PROMPTS[1]]))
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids.tolist() == ids[:end]
        np.testing.assert_allclose(stopped.logprobs, free.logprobs[:end], atol=1e-5)
        assert tokenizer.decode_completion(stopped.token_ids.tolist(), sampling.stop) == "".join(texts[: end - 3])
    cut = lab.do(lab.generate(impl, replace(sampling, max_new_tokens=end - 1), PROMPTS[:1]))[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", end - 1)


@pytest.mark.parametrize("impl", ["titan", "native"])
def test_stop_text_may_be_a_special_token(lab: Lab, impl: str) -> None:
    lab.do(pull(lab, impl, 1))
    sampling = SamplingParams(max_new_tokens=200, temperature=2.0, seed=0)
    ids, sampling = next(
        (ids, sampled)
        for seed in range(20)
        if 0 in (ids := lab.do(lab.generate(impl, sampled := replace(sampling, seed=seed), PROMPTS[:1]))[0].token_ids.tolist())
    )
    stopped = lab.do(lab.generate(impl, replace(sampling, stop=("<pad>",)), PROMPTS[:1]))[0]
    assert stopped.token_ids.tolist() == ids[: ids.index(0) + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("other", "stop"), [("titan", ("never said",)), ("titan-tp2", ())], ids=["by vLLM", "in a window of two ranks"]
)
async def test_tokens_arrive_while_they_are_sampled(lab: Lab, other: str, stop: tuple[str, ...]) -> None:
    sampling = SamplingParams(max_new_tokens=100, temperature=1.0, seed=5, stop=stop)
    await pull(lab, other, 1)
    pieces = list[tuple[list[int], list[float]]]()
    pool = lab.pool(other)
    (request,) = requests_of(PROMPTS[:1], sampling)
    streamed = pool.generate([request], on_tokens=lambda *piece: pieces.append((list(piece[0]), list(piece[1]))))
    completions = await asyncio.gather(streamed, pool.generate(requests_of(PROMPTS[1:2], sampling)))
    (completion,) = completions[0]
    token_ids = [token for ids, _ in pieces for token in ids]
    assert len(pieces) >= 2
    assert token_ids == completion.token_ids.tolist()[: len(token_ids)]
    logprobs = [value for _, values in pieces for value in values]
    assert logprobs == completion.logprobs.tolist()[: len(token_ids)]


async def test_cancelled_call_leaves_the_batch(lab: Lab) -> None:
    long = SamplingParams(max_new_tokens=240, temperature=1.0, seed=5)
    many = 2000  # takes half a minute
    await pull(lab, "titan", 1)
    pool, started = lab.pool("titan"), asyncio.Event()
    leader = lab.generators["titan"].slice(procs=0)
    await ask_actor(leader.stats)
    one = pool.generate(requests_of(PROMPTS[:1], long), on_tokens=lambda *piece: started.set())
    calls = [asyncio.create_task(call) for call in (one, pool.generate(requests_of(PROMPTS[:1] * many, long)))]
    await started.wait()
    for call in calls:
        call.cancel()
    await pool.generate(requests_of(PROMPTS[1:2], replace(long, max_new_tokens=3)), when_drained=True)
    assert (await ask_actor(leader.stats)).num_tokens < many * 240 / 2


def test_only_the_first_completions_to_finish_are_kept(lab: Lab, impl: str) -> None:
    async def scenario() -> list[Completion]:
        await pull(lab, impl, 1)
        lengths = (40, 3, 60, 5)
        requests = [
            GenerationRequest(
                token_ids=PROMPTS[0], sampling=SamplingParams(max_new_tokens=length, temperature=1.0, seed=length)
            )
            for length in lengths
        ]
        return await lab.pool(impl).generate(requests, num_kept=2)

    assert all(len(completion.token_ids) <= 5 for completion in lab.do(scenario()))


def test_round_of_several_callers_equals_that_of_one_caller_bit_for_bit(lab: Lab) -> None:
    """Each caller sends half of the groups, one of them late, while an earlier request of another caller is decoding."""

    def group(index: int) -> list[GenerationRequest]:
        sampling = SamplingParams(max_new_tokens=24, temperature=0.7, seed=index)
        return [GenerationRequest(token_ids=PROMPTS[index], sampling=sampling)] * 2

    async def scenario(members: Sequence[Sequence[int]]) -> list[Completion]:
        await pull(lab, "titan", 1)
        completions: dict[int, list[Completion]] = {}

        async def send(pool: GeneratorPool, index: int) -> None:
            with pool.session() as session:
                completions[index] = await session.generate(group(index), place=InRound(index, range(8)))

        sent = []
        for indices in members:
            pool = lab.pool("titan")
            sent += [asyncio.create_task(send(pool, index)) for index in indices]
            await asyncio.sleep(0.2)
        await asyncio.gather(*sent)
        return [completion for index in range(8) for completion in completions[index]]

    alone = lab.do(scenario([range(8)]))
    shared = lab.do(scenario([(5, 1, 7), (0, 2, 3, 4), (6,)]))
    for one, other in zip(alone, shared, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


def test_call_that_waits_for_a_drain_decodes_alone(lab: Lab) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion]]:
        await pull(lab, "titan", 1)
        alone = await lab.pool("titan").generate(requests_of(PROMPTS[:2], SAMPLED))
        running = asyncio.create_task(lab.pool("titan").generate(requests_of(PROMPTS[2:6], SAMPLED)))
        await asyncio.sleep(0.02)
        drained = await lab.pool("titan").generate(requests_of(PROMPTS[:2], SAMPLED), when_drained=True)
        assert running.done()
        return alone, drained

    for one, other in zip(*lab.do(scenario()), strict=True):
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


async def test_generator_starts_over_with_the_weights_of_another_trainer(lab: Lab) -> None:
    impl = "titan-tp2"
    await pull(lab, impl, 2)
    before = await lab.generate(impl, GREEDY, PROMPTS[:2])
    longest = SamplingParams(max_new_tokens=240, temperature=0.0, seed=None)
    running = asyncio.create_task(lab.generate(impl, longest, PROMPTS[:1] * 2000))  # takes half a minute
    await lab.generate(impl, SamplingParams(max_new_tokens=1, temperature=0.0, seed=None), PROMPTS[2:3])
    await lab.generators[impl].start_over.call(WeightSource("other", lab.store))
    with pytest.raises(Exception, match="the run restarts"):
        await running
    with pytest.raises(Exception, match="no valid weights: the run restarts"):
        await lab.generate(impl, GREEDY, PROMPTS[:2])
    publisher = WeightPublisher("other", 0, lab.store, torch.float32, ["arena"])
    state = titan_names(load_file(lab.models[2] / "model.safetensors"))
    await pull_commit(lab, impl, Commit(0, (await publisher.publish(0, state),)))  # an older version than before
    for one, other in zip(before, await lab.generate(impl, GREEDY, PROMPTS[:2]), strict=True):
        assert other.logprobs.tobytes() == one.logprobs.tobytes()
        assert set(other.versions.tolist()) == {0}
    await lab.generators[impl].start_over.call(WeightSource("lab", lab.store))


async def test_generator_starts_over_during_pulls_from_a_stopped_store(lab: Lab) -> None:
    impl = "titan-tp2"
    await pull(lab, impl, 2)
    before = await lab.generate(impl, GREEDY, PROMPTS[:2])
    role = f"stopped-{impl}"
    store = await spawn_store(await fork(lab.fleet, "store", worker_environment(), *IMPORTS, role=role))
    pid = int((lab.models[1].parent / f"{role}_0.pid").read_text().split()[0])
    publisher = WeightPublisher("stopped", 0, store, torch.float32, ["arena"])
    commit = Commit(0, (await publisher.publish(0, titan_names(load_file(lab.models[2] / "model.safetensors"))),))
    await lab.generators[impl].start_over.call(WeightSource("stopped", store))
    os.kill(pid, signal.SIGSTOP)  # the first pull waits for the layout, the second one for the first
    pulls = [asyncio.ensure_future(resolve(lab.generators[impl].pull_weights.call(commit))) for _ in range(2)]
    await lab.generators[impl].probe.call()
    await asyncio.wait_for(resolve(lab.generators[impl].start_over.call(WeightSource("lab", lab.store))), 30)
    for failed in await asyncio.gather(*pulls, return_exceptions=True):
        assert "the run restarts" in str(failed)
    os.kill(pid, signal.SIGCONT)
    await pull(lab, impl, 2)
    for one, other in zip(before, await lab.generate(impl, GREEDY, PROMPTS[:2]), strict=True):
        assert other.logprobs.tobytes() == one.logprobs.tobytes()


@pytest.mark.parametrize("impl", ["native", "titan-tp2"])
def test_update_discards_cached_prompts(lab: Lab, impl: str) -> None:
    prompt = tuple(2 + i % 90 for i in range(100))  # longer than a cache block of 32
    for version in (1, 2):
        lab.do(pull(lab, impl, version))
        completions = [lab.do(lab.generate(impl, GREEDY, [prompt]))[0].token_ids.tolist() for _ in range(2)]
        policy = reference(lab.models[version])
        output = policy.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, 100, dtype=torch.long), max_new_tokens=24, do_sample=False
        )
        assert completions == [output[0, 100:].tolist()] * 2
    log = (lab.models[1].parent / f"{impl}_0.log").read_text()
    assert "Using max model len" in log, "messages of vLLM"
    assert not re.search("set_num_threads|reset prefix cache", log), "messages of each pull"


def test_session_continues_at_the_replica_of_its_last_turn(lab: Lab) -> None:
    leaders = [lab.generators[impl].slice(procs=0) for impl in ("titan", "native-tp2")]
    pool = GeneratorPool(leaders, max_num_seqs=256)
    half = SamplingParams(max_new_tokens=12, temperature=0.0, seed=None)

    async def converse(prompt: tuple[int, ...]) -> list[int]:
        said = prompt
        with pool.session() as session:
            for _ in range(2):
                (completion,) = await session.generate([GenerationRequest(token_ids=said, sampling=half)])
                said += tuple(completion.token_ids.tolist())
        return list(said[len(prompt) :])

    async def scenario() -> tuple[list[list[int]], list[list[int]], list[int]]:
        await asyncio.gather(*(pull(lab, impl, 1) for impl in ("titan", "native-tp2")))
        completions = [completion.token_ids.tolist() for completion in await lab.generate("titan", GREEDY)]
        whole = {prompt: tokens for prompt, tokens in zip(PROMPTS, completions, strict=True) if len(tokens) == 24}
        await asyncio.gather(*(resolve(leader.stats.call_one()) for leader in leaders))
        spoken = await asyncio.gather(*map(converse, list(whole)[:2]))
        stats = await asyncio.gather(*(resolve(leader.stats.call_one()) for leader in leaders))
        return spoken, list(whole.values())[:2], [stat.num_tokens for stat in stats]

    spoken, expected, num_tokens = lab.do(scenario())
    assert spoken == expected
    assert num_tokens == [24, 24]


async def test_mismatched_weights_are_refused_by_name(lab: Lab, impl: str) -> None:
    odd = WeightPublisher("lab", 0, lab.store, torch.float32, ["store"])
    manifest = await odd.publish(7, {"norm.weight": torch.ones(128)})
    with pytest.raises(Exception, match=r"tensors not published: .*tok_embeddings"):
        await pull_commit(lab, impl, Commit(7, (manifest,)))
    with pytest.raises(Exception, match="no valid weights"):
        await lab.generate(impl, GREEDY)
