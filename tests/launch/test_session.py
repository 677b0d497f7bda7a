"""Sessions without a loop: a real trainer and a real generator, their clients, a teacher, and the order of versions."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.models.tiny import add_changed_weights
from tests.workers import Looped
from titanrl import AdamParams, Config, TitanRLError, connect, load_config, sampled_datum
from titanrl.carriers.types import FloatArray
from titanrl.config.sections import TeacherConfig
from titanrl.models.directory import open_model
from titanrl.rollout.remote import RemoteTeacher
from titanrl.serving.app import App
from titanrl.serving.http import listen
from titanrl.session.sampling import Sample, SamplingClient, VersionGoneError
from titanrl.session.session import Session

PROMPTS = ["What is 1 + 2?", "3 + 4 ="]
LARGE_STEP = AdamParams(learning_rate=1e-2)


@dataclass
class Lab(Looped):
    """A session shared by all tests of this file; each test makes its own versions."""

    session: Session


def config_in(folder: Path, *overrides: str) -> Config:
    small = ("warm_start=null", "model.recipe.num_layers=1", "logging.console=off")
    return load_config(
        "configs/quickstart.yaml", [f"output_dir={folder}/runs", f"cache_dir={folder}/cache", *small, *overrides]
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Iterator[Lab]:
    before = set(psutil.Process().children())
    with asyncio.Runner() as runner:

        async def start() -> Session:
            return await connect(config_in(tmp_path_factory.mktemp("session")))

        lab = Lab(runner, runner.run(start()))
        yield lab
        runner.run(lab.session.close())
        _, alive = psutil.wait_procs(set(psutil.Process().children()) - before, timeout=10)
        assert alive == []


def whole(sample: Sample) -> list[int]:
    return [*sample.prompt.tolist(), *sample.tokens.tolist()]


def sampled_part(logprobs: FloatArray, sample: Sample) -> FloatArray:
    return logprobs[len(sample.prompt) :]


async def train(session: Session, samples: list[Sample], advantage: float = 1.0) -> None:
    data = [sampled_datum(sample.prompt, sample.tokens, sample.logprobs, advantage) for sample in samples]
    passes = session.training.forward_backward(data, "importance_sampling")
    await session.training.optim_step(LARGE_STEP)
    await passes


async def sample_some(client: SamplingClient, **options: Any) -> list[Sample]:
    groups = await client.sample(PROMPTS, num_samples=3, max_tokens=12, **options)
    assert [len(group) for group in groups] == [3, 3]
    return [sample for group in groups for sample in group]


async def test_samples_repeat_with_a_seed_and_carry_log_probabilities_and_versions(lab: Lab) -> None:
    client = await lab.session.training.publish()
    samples, again = await sample_some(client, seed=1), await sample_some(client, seed=1)
    for sample, same in zip(samples, again, strict=True):
        assert sample.tokens.tolist() == same.tokens.tolist()
        assert set(sample.versions.tolist()) == {client.version}
        assert len(sample.logprobs) == len(sample.versions) == len(sample.tokens) <= 12
        assert sample.text == lab.session.tokenizer.decode(sample.tokens.tolist())
    other = await sample_some(client, seed=2)
    assert [sample.tokens.tolist() for sample in samples] != [sample.tokens.tolist() for sample in other]


async def test_generator_and_trainer_compute_equal_log_probabilities_of_sequences(lab: Lab) -> None:
    samples = await sample_some(lab.session.sampling, seed=3)
    by_generator = await lab.session.sampling.compute_logprobs([whole(sample) for sample in samples])
    data = [sampled_datum(sample.prompt, sample.tokens, sample.logprobs, 0.0) for sample in samples]
    by_trainer = await lab.session.training.compute_logprobs(data)
    for sample, generated, trained in zip(samples, by_generator, by_trainer, strict=True):
        assert np.isnan(generated[0])
        np.testing.assert_allclose(generated[1:], trained, atol=1e-4)
        np.testing.assert_allclose(sampled_part(generated, sample), sample.logprobs, atol=1e-4)


async def test_published_client_is_pinned_and_refuses_when_its_version_is_gone(lab: Lab) -> None:
    session = lab.session
    pinned = await session.training.publish()
    samples = await sample_some(pinned)
    await train(session, samples)
    running = asyncio.create_task(sample_some(pinned))  # publish waits for it
    await asyncio.sleep(0)
    newer = await session.training.publish()
    assert newer.version == session.training.version > pinned.version
    assert {version for sample in await running for version in sample.versions.tolist()} == {pinned.version}
    with pytest.raises(VersionGoneError, match=f"version {pinned.version} is no longer served"):
        await sample_some(pinned)
    followed = await sample_some(session.sampling)
    assert {version for sample in followed for version in sample.versions.tolist()} == {newer.version}


async def test_training_raises_the_probability_of_rewarded_samples(lab: Lab) -> None:
    session = lab.session
    samples = await sample_some(session.sampling, seed=5)
    before = sum(float(sample.logprobs.sum()) for sample in samples)
    await train(session, samples)
    client = await session.training.publish()
    after = await client.compute_logprobs([whole(sample) for sample in samples])
    assert sum(float(sampled_part(values, sample).sum()) for values, sample in zip(after, samples, strict=True)) > before


async def test_loaded_state_gets_a_version_newer_than_every_published_one(lab: Lab) -> None:
    session = lab.session
    samples = await sample_some(session.sampling, seed=6)
    sequences = [whole(sample) for sample in samples]
    before = await session.sampling.compute_logprobs(sequences)
    state = await session.training.save_state("before")
    await train(session, samples)
    published = await session.training.publish()
    assert await session.training.load_state(state) == published.version + 1
    restored = await session.training.publish()
    assert restored.version == published.version + 1
    for old, new in zip(before, await restored.compute_logprobs(sequences), strict=True):
        np.testing.assert_allclose(old, new, atol=1e-6)


async def test_teacher_serves_an_exported_model_with_frozen_weights(lab: Lab) -> None:
    session = lab.session
    samples = await sample_some(session.sampling, seed=7)
    sequences = [whole(sample) for sample in samples]
    expected = await session.sampling.compute_logprobs(sequences)
    exported = await session.training.export("teacher")
    (exported / "model.safetensors.index.json").unlink()
    (exported / "model-00001-of-00001.safetensors").rename(exported / "model.safetensors")
    add_changed_weights(exported, "model-old.safetensors")  # vLLM's own loader would load this file, too
    teacher = await session.teacher(exported)
    await train(session, samples)
    await session.training.publish()
    for wanted, found in zip(expected, await teacher.compute_logprobs(sequences), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    with pytest.raises(TitanRLError, match=r'teacher="nowhere": must be a directory'):
        await session.teacher("nowhere")


async def test_served_policy_is_a_teacher_with_the_log_probabilities_of_the_engine(lab: Lab) -> None:
    session = lab.session
    await session.training.publish()
    sequences = [whole(sample)[:-1] for sample in await sample_some(session.sampling, seed=11)]
    speaker = session.speaker()
    listener = await listen(App(lambda key: speaker, ["policy"]), ("127.0.0.1", 0))
    teacher = RemoteTeacher(TeacherConfig.model_validate({"url": f"{listener.url}/v1"}), key="distill.teacher")
    try:
        found = await teacher.compute_logprobs(sequences)
        tops = await teacher.compute_top(sequences, 5)
        await teacher.check(session.tokenizer, 30, 5)
    finally:
        await teacher.close()
        await listener.close()
    local, local_tops = await session.sampling.compute_logprobs(sequences), await session.sampling.compute_top(sequences, 5)
    for wanted, logprobs in zip(local, found, strict=True):
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)
    for wanted_top, top in zip(local_tops, tops, strict=True):
        assert top.token_ids.shape[1] == 5
        np.testing.assert_allclose(top.logprobs, wanted_top.logprobs, atol=1e-4)
        assert (np.diff(top.logprobs) <= 0).all()
        sums = np.exp(top.logprobs).sum(1)
        assert (sums <= 1.0 + 1e-5).all()
    # The trainer gives the same tokens the same log-probabilities.
    data = [sampled_datum(tokens[:1], tokens[1:], [0.0] * (len(tokens) - 1), 0.0) for tokens in sequences]
    own = (await session.training.forward(data, "importance_sampling")).loss_fn_outputs
    for output, logprobs in zip(own, found, strict=True):
        np.testing.assert_allclose(logprobs[1:], output["logprobs"], atol=1e-4)


async def test_task_offers_prompts_and_scores_samples_in_the_sandbox(lab: Lab) -> None:
    session = lab.session
    task = await session.task()
    first, second = task.prompts(2), task.prompts(2, start=2)
    assert [prompt.index for prompt in first + second] == [0, 1, 2, 3]
    assert not {prompt.text for prompt in first + second} & {prompt.text for prompt in task.heldout(8)}
    groups = await session.sampling.sample(first, num_samples=2, max_tokens=4)
    assert [sample.prompt.tolist() for group in groups for sample in group] == [
        list(prompt.token_ids) for prompt in first for _ in range(2)
    ]
    right = [
        [replace(sample, text=f"<answer>{prompt.entry['answer']}</answer>") for sample in group]
        for prompt, group in zip(first, groups, strict=True)
    ]
    assert await task.rewards(first, right) == [[1.0, 1.0], [1.0, 1.0]]
    assert await task.rewards(second, right) != [[1.0, 1.0], [1.0, 1.0]]
    (failed, *_), *_ = await task.score(first, [[replace(sample, text="1" * 10) for sample in group] for group in groups])
    assert failed.reward == 0.0
    with pytest.raises(ValueError, match=r"groups: must be one per prompt, 1 \(got 2\)"):
        await task.rewards(first[:1], groups)
    with pytest.raises(TypeError, match=r"prompts\[0\]: must be a prompt of a task \(got str '1 \+ 2 ='\)"):
        await task.rewards(["1 + 2 ="], groups[:1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"groups\[0\]: must be a list of samples"):
        await task.rewards(first, groups[0])  # type: ignore[arg-type]
    for call in (lambda: task.prompts(-1), lambda: task.heldout(0), lambda: task.prompts("2")):  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError), match="num: must be an integer"):
            call()
    with pytest.raises(ValueError, match="num_prompts: must be an integer >= 1"):
        await task.evaluate(session.sampling, 0)
    result = await task.evaluate(session.sampling, num_prompts=3)
    assert (result.task, result.num_prompts, result.num_errors) == ("chain_sum", 3, 0)
    assert result.version == session.training.version


def test_sample_becomes_a_datum_with_its_weight(lab: Lab) -> None:
    [[sample]] = lab.do(lab.session.sampling.sample(PROMPTS[:1], max_tokens=4, seed=9))
    assert sample.sequence.tolist() == whole(sample)
    datum = sample.datum(1.5, weight=0.5)
    num_prompt = len(sample.prompt)
    assert datum.model_input.tolist() == whole(sample)[:-1]
    assert datum.loss_fn_inputs["target_tokens"].tolist() == whole(sample)[1:]
    assert datum.loss_fn_inputs["weights"].tolist() == [0.0] * (num_prompt - 1) + [0.5] * len(sample.tokens)
    assert set(datum.loss_fn_inputs["advantages"][num_prompt - 1 :].tolist()) == {1.5}


async def test_stop_texts_and_stop_tokens_end_completions(lab: Lab) -> None:
    client = lab.session.sampling
    # Some completions of the weights that the tests above trained end after a character.
    for seed in range(8, 40):
        [[free]] = await client.sample(PROMPTS[:1], max_tokens=12, temperature=1.0, seed=seed)
        if len(free.text) > 3:
            break
    character = free.text[3]
    [[by_text]] = await client.sample(PROMPTS[:1], max_tokens=12, temperature=1.0, seed=seed, stop=[character])
    length = len(by_text.tokens)
    assert by_text.finish_reason == "stop"
    assert character not in by_text.text
    assert free.text.startswith(by_text.text + character)
    assert by_text.tokens.tolist() == free.tokens[:length].tolist()
    [[kept]] = await client.sample(PROMPTS[:1], max_tokens=length, temperature=1.0, seed=seed, stop=[character], keep_stop=True)
    assert (kept.text, kept.finish_reason) == (by_text.text + character, "stop"), "the last allowed token completes it"
    [[by_token]] = await client.sample(PROMPTS[:1], max_tokens=12, temperature=1.0, seed=seed, stop=[int(by_text.tokens[-1])])
    assert by_token.tokens.tolist() == by_text.tokens.tolist()


async def test_greedy_samples_are_equal_and_wrong_prompts_are_refused(lab: Lab) -> None:
    client = lab.session.sampling
    [[one, other]] = await client.sample(PROMPTS[:1], num_samples=2, max_tokens=6, temperature=0.0)
    assert one.tokens.tolist() == other.tokens.tolist()
    with pytest.raises(ValueError, match=r"prompt: length must be 1 to 58 tokens \(got 500\)\. Shorten the prompt"):
        await client.sample([[5] * 500])
    with pytest.raises(ValueError, match=r"prompt: length must be 1 to \d+ tokens \(got 0\)"):
        await client.compute_logprobs([[]])
    vocab_size = lab.session.model.shape.vocab_size
    with pytest.raises(ValueError, match=f"num: must be at most {vocab_size}, the size of the vocabulary"):
        await client.compute_top(PROMPTS[:1], vocab_size + 1)
    assert len((await client.compute_top(PROMPTS[:1], vocab_size))[0].token_ids[0]) == vocab_size  # the engine still runs
    for wrong in ({"top_p": 0.0}, {"stop": [""]}, {"stop": [-1]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            await client.sample(PROMPTS[:1], **wrong)  # type: ignore[arg-type]
    for temperature in (0.0, -1.0, 3.0):
        with pytest.raises(ValueError, match="temperature: must be a finite number"):
            await lab.session.use_temperature(temperature)


async def test_session_without_trainer_serves_the_model_and_says_what_is_missing(lab: Lab, tmp_path: Path) -> None:
    model = await export(lab.session)
    async with connect(config_in(tmp_path, f"model.path={model}"), training=False) as session:
        [[sample]] = await session.sampling.sample(PROMPTS[:1], max_tokens=4, temperature=0.0)
        [[expected]] = await lab.session.sampling.sample(PROMPTS[:1], max_tokens=4, temperature=0.0)
        assert sample.tokens.tolist() == expected.tokens.tolist()
        with pytest.raises(TitanRLError, match=r"training: this session has no trainer\. Connect with training=True\."):
            session.training.optim_step(LARGE_STEP)
    with pytest.raises(TypeError, match=r"^connect: must be a Config \(got str 'quickstart'\)\. Load it: connect\(load_config"):
        connect("quickstart")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^teacher: must be the directory of a model \(got 5\)"):
        await lab.session.teacher(5)  # type: ignore[arg-type]
    with pytest.raises(TitanRLError, match="nothing to start"):
        async with connect(config_in(tmp_path), training=False, sampling=False):
            pass


async def export(session: Session) -> Path:
    await session.training.publish()
    return await session.training.export("served")


async def test_session_without_generators_trains_and_cannot_publish(tmp_path: Path) -> None:
    async with connect(config_in(tmp_path, "checkpoint.export_dtype=bfloat16"), sampling=False) as session:
        prompt, tokens = [5, 6, 7], [8, 9]
        data = [sampled_datum(prompt, tokens, [-1.0, -1.0], 1.0)]
        passes = session.training.forward_backward(data, "ppo")
        assert (await session.training.optim_step(AdamParams())).version == 1
        assert (await passes).metrics["num_tokens:sum"] == 2
        assert open_model(await session.training.export("rounded")).weight_files().dtype == "bfloat16"
        with pytest.raises(TitanRLError, match=r"publish: this session has no generators\."):
            await session.training.publish()
        with pytest.raises(TitanRLError, match=r"sampling: this session has no generators\."):
            await session.sampling.sample(PROMPTS)
