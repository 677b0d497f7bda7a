"""Distillation without processes: its data and metrics, and the checks of its configuration."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titanrl import ConfigError, load_config
from titanrl.carriers.rewards import Scored
from titanrl.carriers.types import FinishReason, FloatArray, Prompt, TopTokens
from titanrl.config.data import Distillation
from titanrl.config.errors import BrokenRules
from titanrl.config.load import check_program
from titanrl.config.sections import DistillConfig, RecipeConfig
from titanrl.data.entries import BadRow, hinted_entry
from titanrl.distill import (
    Batch,
    ask_teachers,
    batch_metrics,
    discounted,
    distillation_data,
    loss_of_step,
    main,
    mean_advantage,
    taught_share,
)
from titanrl.launch.preflight import broken_rules, check_data
from titanrl.models.recipe import create_model
from titanrl.session.sampling import Sample

TEACHER = "distill.teacher.path"
LEARNED = Distillation("distill.teacher", 1.0, 0.0)


def sample(logprobs: list[float], finish_reason: FinishReason = "stop") -> Sample:
    """A sample with the prompt [5, 6] and one token per log-probability."""
    return Sample(
        prompt=np.array([5, 6]),
        tokens=np.arange(7, 7 + len(logprobs)),
        logprobs=np.array(logprobs, np.float32),
        versions=np.zeros(len(logprobs), np.int64),
        text="",
        finish_reason=finish_reason,
    )


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def batch_of(
    samples: list[Sample], found: Sequence[FloatArray | TopTokens | None], rewards: list[float | None], **others: Any
) -> Batch:
    """A step with one prompt."""
    prompt = Prompt(index=0, task="sums", text="1 + 1 =", token_ids=(5, 6), entry={})
    scores = [Scored(reward=reward, parts={}, error="" if reward is not None else "timeout") for reward in rewards]
    prompts = others.get("teacher_prompts", [(5, 6)] * len(samples))
    tasks = [others.get("task", LEARNED)]
    return Batch(prompts=[prompt], groups=[samples], scores=[scores], found=found, teacher_prompts=prompts, tasks=tasks)


def distill_config(**values: Any) -> DistillConfig:
    return DistillConfig.model_validate({"teacher": {"path": "x"}, **values})


SELF = {"teacher": {"policy": "initial"}, "hint": "{question}", "loss": "jsd"}


def test_advantage_of_a_token_is_teacher_minus_policy() -> None:
    batch = batch_of([sample([-0.1, -0.7]), sample([-2.0])], [floats(0.4, -0.1), floats(1.5)], [1.0, 0.0])
    first, second = distillation_data(batch, distill_config())
    assert first.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, -0.4, 0.1])
    assert second.loss_fn_inputs["advantages"].tolist() == pytest.approx([0, -1.5])
    for datum in (first, second):  # the sum of the losses is their mean over three tokens
        assert datum.loss_fn_inputs["weights"].tolist() == pytest.approx([0] + [1 / 3] * (len(datum.model_input) - 1))


def test_weighted_rewards_minus_their_mean_are_added_to_advantages() -> None:
    samples, task = [sample([-0.1]), sample([-2.0]), sample([-1.0])], Distillation("distill.teacher", 1.0, 2.0)
    batch = batch_of(samples, [floats(0.25)] * 3, [1.0, 0.0, None], task=task)
    found = [float(datum.loss_fn_inputs["advantages"][-1]) for datum in distillation_data(batch, distill_config()) if datum]
    assert found == pytest.approx([2 * 0.5 - 0.25, -2 * 0.5 - 0.25, -0.25])


class Constant:
    """A teacher that gives every token the same log-probability, and keeps what it was asked."""

    def __init__(self, logprob: float) -> None:
        self.logprob, self.asked = logprob, list[list[int]]()

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]], /) -> list[FloatArray]:
        self.asked += map(list, sequences)
        return [np.array([np.nan, *[self.logprob] * (len(tokens) - 1)], np.float32) for tokens in sequences]

    async def compute_top(self, sequences: Sequence[Sequence[int]], num: int, /) -> list[TopTokens]:
        self.asked += map(list, sequences)
        ids = [np.tile(np.arange(num), (len(tokens) - 1, 1)) for tokens in sequences]
        return [TopTokens(token_ids=each, logprobs=np.full(each.shape, self.logprob, np.float32)) for each in ids]


MATH, CODE = Distillation("distill.teacher", 1.0, 0.0), Distillation("distill.teachers.coder", 0.5, 3.0)
PLAY = Distillation("distill.teacher", 0.0, 2.0)


def three_tasks(found: Sequence[FloatArray | TopTokens | None]) -> Batch:
    """A step with a prompt of each of three tasks, and two samples of one token each."""
    prompt = Prompt(index=0, task="sums", text="", token_ids=(5, 6), entry={})
    groups = [[sample([-0.5]), sample([-1.5])] for _ in range(3)]
    scores = [[Scored(reward=reward, parts={}) for reward in (1.0, 0.0)] for _ in range(3)]
    tasks = [MATH, CODE, PLAY]
    return Batch(prompts=[prompt] * 3, groups=groups, scores=scores, found=found, teacher_prompts=[(5, 6)] * 6, tasks=tasks)


def asked_teachers(num_top: int) -> tuple[list[FloatArray | TopTokens | None], Constant, Constant]:
    first, coder = Constant(-1.0), Constant(-3.0)
    teachers = {"distill.teacher": first, "distill.teachers.coder": coder}
    batch = three_tasks([])
    samples, tasks = [each for group in batch.groups for each in group], [MATH, MATH, CODE, CODE, PLAY, PLAY]
    return asyncio.run(ask_teachers(teachers, samples, batch.teacher_prompts, tasks, num_top)), first, coder


def test_each_task_learns_from_its_own_teacher_and_rewards() -> None:
    found, first, coder = asked_teachers(0)
    assert first.asked == coder.asked == [[5, 6, 7], [5, 6, 7]]  # not of the task that learns only from rewards
    assert found[4:] == [None, None]
    data = distillation_data(three_tasks(found), distill_config())
    # teacher - policy, with weight 0.5 for the second task; rewards differ from their mean by 0.5.
    expected = [-1 + 0.5, -1 + 1.5, 0.5 * (-3 + 0.5) + 3 * 0.5, 0.5 * (-3 + 1.5) - 3 * 0.5, 2 * 0.5, -2 * 0.5]
    assert [float(datum.loss_fn_inputs["advantages"][-1]) for datum in data if datum] == pytest.approx(expected)
    assert [float(datum.loss_fn_inputs["weights"][-1]) for datum in data if datum] == pytest.approx([1 / 6] * 6)
    assert batch_metrics(three_tasks(found))["policy/kl_teacher"] == pytest.approx(np.mean([0.5, -0.5, 2.5, 1.5]))


def test_divergence_of_each_task_has_its_weight_beside_the_rewards() -> None:
    found, _, coder = asked_teachers(2)
    assert coder.asked == [[5, 6, 7], [5, 6, 7]]
    data = [datum for datum in distillation_data(three_tasks(found), distill_config(loss="forward_kl")) if datum]
    # The loss of a token is weight * (divergence - ratio * advantage).
    weights = [float(datum.loss_fn_inputs["weights"][-1]) for datum in data]
    assert weights == pytest.approx([1 / 6, 1 / 6, 0.5 / 6, 0.5 / 6, 1 / 6, 1 / 6])
    products = [float(datum.loss_fn_inputs["advantages"][-1]) * weight for datum, weight in zip(data, weights, strict=True)]
    assert products == pytest.approx([0, 0, 3 * 0.5 / 6, -3 * 0.5 / 6, 2 * 0.5 / 6, -2 * 0.5 / 6])
    assert [datum.teacher_top is None for datum in data] == [False] * 4 + [True] * 2
    assert data[2].teacher_top.token_ids.tolist() == [[0, 1]]
    assert taught_share(data) == pytest.approx(4 / 6)
    metrics = batch_metrics(three_tasks(found))
    assert metrics["teacher/outside_top_frac"] == pytest.approx(1 - (2 * np.exp(-1) + 2 * np.exp(-3)) / 2)
    assert "policy/kl_teacher" not in metrics


def test_recorded_advantage_is_that_of_the_reward_whatever_the_weight_of_the_divergence() -> None:
    samples = [sample([-1.0, -2.0]), sample([-1.0])]
    half = Distillation("distill.teacher", 0.5, 1.0)
    for distill, found in ((distill_config(**SELF), None), (distill_config(), floats(0.0, 0.0))):
        batch = batch_of(samples, [found, None if found is None else found[:1]], [1.0, 0.0], task=half)
        first, _ = distillation_data(batch, distill)
        assert first is not None
        assert mean_advantage(first, 2, half.weight) == 0.5


def test_teacher_reads_its_own_prompt_and_the_same_completion() -> None:
    samples = [sample([-0.1, -0.7, -0.2]), sample([-2.0]), sample([-1.0])]
    batch = batch_of(samples, [None] * 3, [1.0, 0.0, 0.0], teacher_prompts=[(1, 2, 3), (4,), None])
    first, second, dropped = distillation_data(batch, distill_config(**SELF))
    assert dropped is None
    assert first is not None and first.teacher_input is not None  # noqa: PT018
    assert second is not None and second.teacher_input is not None  # noqa: PT018
    assert (first.model_input.tolist(), first.teacher_input.tolist()) == ([5, 6, 7, 8], [1, 2, 3, 7, 8])
    assert (second.model_input.tolist(), second.teacher_input.tolist()) == ([5, 6], [4])
    assert first.loss_fn_inputs["weights"].tolist() == pytest.approx([0, 0.25, 0.25, 0.25])
    assert batch_metrics(batch)["tokens/teacher_too_long_frac"] == pytest.approx(1 / 3)
    assert "policy/kl_teacher" not in batch_metrics(batch)


def test_options_of_the_loss_name_weights_and_mixture() -> None:
    assert loss_of_step(distill_config(), 0.0) == ("importance_sampling", {})
    assert loss_of_step(distill_config(**SELF, beta=0.2), 1.0) == ("jsd", {"at_version": 0, "beta": 0.2})
    current = {**SELF, "teacher": {"policy": "current"}, "loss": "reverse_kl"}
    assert loss_of_step(distill_config(**current), 1.0) == ("reverse_kl", {})


def test_step_whose_tasks_have_only_rewards_has_no_divergence() -> None:
    found, _, _ = asked_teachers(2)
    only_rewards = [datum for datum in distillation_data(three_tasks(found), distill_config(loss="forward_kl")) if datum][4:]
    assert taught_share(only_rewards) == 0.0
    assert loss_of_step(distill_config(loss="forward_kl"), 0.0) == ("importance_sampling", {})
    assert loss_of_step(distill_config(loss="forward_kl"), 0.5) == ("forward_kl", {})


def test_hint_replaces_the_question_by_columns_of_the_row() -> None:
    entry = {"question": "2 + 2 =", "answer": "4", "metadata": {"level": 3, "empty": None}}
    assert hinted_entry(entry, "{level}: {question} {answer}!") == {**entry, "question": "3: 2 + 2 = 4!"}
    for hint, problem in (
        ("{empty}", "must not be empty in column 'empty'"),
        ("{other}", "no value for 'other' of distill.hint; there are level, empty, question, answer"),
        ("{answer:d}", "does not fit distill.hint (Unknown format code 'd'"),
    ):
        with pytest.raises(BadRow, match=re.escape(problem)):
            hinted_entry(entry, hint)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
    hinted = hinted_entry({**entry, "messages": messages}, "{question} It is {answer}.")
    assert hinted["messages"] == [messages[0], {"role": "user", "content": "2 + 2? It is 4."}]


def test_discount_adds_the_divergence_of_later_tokens() -> None:
    values = floats(1.0, 2.0, 4.0)
    assert discounted(values, 0.0).tolist() == [1.0, 2.0, 4.0]
    assert discounted(values, 0.5).tolist() == [1.0 + 0.5 * 2.0 + 0.25 * 4.0, 2.0 + 0.5 * 4.0, 4.0]
    assert values.tolist() == [1.0, 2.0, 4.0]


def test_metrics_average_over_tokens_and_exclude_failed_rewards() -> None:
    prompt = Prompt(index=0, task="sums", text="1 + 1 =", token_ids=(5, 6), entry={})
    right, wrong = (Scored(reward=reward, parts={"answer": reward}) for reward in (1.0, 0.0))
    metrics = batch_metrics(
        Batch(
            prompts=[prompt],
            groups=[[sample([-0.1, -0.7]), sample([-2.0], "length"), sample([-1.0])]],
            scores=[[right, wrong, Scored(reward=None, parts={}, error="timeout")]],
            found=[floats(0.5, 0.25), floats(1.0), floats(0.25)],
            teacher_prompts=[(5, 6)] * 3,
            tasks=[LEARNED],
        )
    )
    assert metrics["policy/kl_teacher"] == pytest.approx(0.5)
    assert (metrics["reward/mean"], metrics["reward/answer"], metrics["reward/error_frac"]) == (0.5, 0.5, pytest.approx(1 / 3))
    assert (metrics["tokens/response_len_mean"], metrics["tokens/response_len_max"]) == (pytest.approx(4 / 3), 2.0)
    assert metrics["tokens/truncated_frac"] == pytest.approx(1 / 3)


# Configuration


def test_each_command_rejects_configurations_of_others() -> None:
    plain, distillation = load_config("quickstart"), load_config("distill_quickstart")
    check_program(plain, "train")
    check_program(distillation, "distill")
    with pytest.raises(ConfigError, match="only `titanrl distill` uses this section"):
        check_program(distillation, "train")
    with pytest.raises(ConfigError, match="`titanrl distill` requires this section"):
        check_program(plain, "distill")


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("rollout.temperature=0.8", "set rollout.temperature to 1"),
        ("max_staleness=1", "set max_staleness to 0"),
        ("algorithm.loss=cispo", "remove algorithm.loss"),
        ("algorithm.kl={coef: 0.1}", "remove algorithm.kl"),
        ("rollout.top_p=0.9", "remove rollout.top_p"),
        ("rollout.group_filter=some.module:keeps", "remove rollout.group_filter"),
        ("rollout.min_group_size=2", "remove rollout.min_group_size"),
        ("rollout.num_workers=2", "remove rollout.num_workers"),
        ("trainer.overlong=truncate", "remove trainer.overlong"),
        ("trainer.share_prompts=true", "remove trainer.share_prompts"),
        ("distill.teacher={path: x, vllm: {tensor_parallel_size: 2}}", "remove it, and set tp"),
        ("distill.discount=1.0", "must be a number"),
        ("distill.teacher={tp: 2}", "set exactly one of path, url and policy"),
        ("distill.teacher={path: x, url: 'http://a/v1'}", "set exactly one of path, url and policy"),
        ("distill.teacher={url: 'http://a/v1', tp: 2}", "remove tp"),
        ("distill.teacher={path: x, num_retries: 1}", "remove num_retries"),
        ("distill.teacher={url: 'http://:0/v1'}", "must contain a host"),
        ("distill.teacher={url: 'http://a/v1', key_variable: A, key_file: b}", "the API key has one source"),
        ("distill.teachers={coder: {path: x}}", "no task learns from this teacher"),
        ("distill.teachers={'a.b': {path: x}}", "the name of a teacher must consist of"),
        (
            "distill={teacher: {policy: initial}, loss: jsd, hint: '{question}', teachers: {a: {path: x}}}",
            "none can be the policy",
        ),
        ("distill.top_k=5", "remove top_k"),
        ("data.mixture={a: {task: chain_sum, teacher: coder}}", "must be the name of a teacher in distill.teachers"),
        ("data.mixture={a: {task: chain_sum, distill_weight: 0.0}}", "the task would not be trained on"),
        ("data.mixture={a: {task: chain_sum, group_size: 4}}", "distillation does not use this key"),
        ("distill.teacher={policy: initial}", "set loss to forward_kl, reverse_kl or jsd"),
        ("distill.loss=jsd", "set loss to importance_sampling, ppo or forward_kl"),
        ("distill.beta=0.3", "only jsd has a mixture"),
        ("distill.hint='{question'", "must be a format string"),
        ("distill.hint=think", "must contain a column in braces"),
        ("distill={teacher: {policy: initial}, loss: jsd}", "set hint"),
        ("distill={teacher: {policy: initial, tp: 2}, loss: jsd, hint: '{question}'}", "remove tp"),
        ("distill={teacher: {policy: initial}, loss: jsd, hint: '{question}', discount: 0.5}", "remove discount"),
    ],
)
def test_keys_without_effect_are_rejected(override: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load_config("distill_quickstart", [override])


def test_teacher_needs_separate_accelerator() -> None:
    options = ["device=cuda", "hosts.devices_per_host=2", "distill.teacher.tp=2"]
    with pytest.raises(ConfigError, match="teacher rank, which is 4") as raised:
        load_config("distill_quickstart", options)
    assert "distill.teacher.tp=2" in str(raised.value)


# The teacher


def teacher_problems(*overrides: str) -> list[str]:
    return [str(rule) for rule in broken_rules(load_config("distill_quickstart", overrides)) if TEACHER in rule.values]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """A model with random weights and the vocabulary of the recipe."""
    create_model(tmp_path / "teacher", RecipeConfig(num_layers=1, max_positions=58), seed=0)
    return tmp_path / "teacher"


def edit(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_teacher_with_policy_vocabulary_is_accepted(teacher: Path) -> None:
    assert teacher_problems(f"{TEACHER}={teacher}") == []


def test_teacher_with_different_vocabulary_is_rejected(teacher: Path) -> None:
    edit(teacher / "tokenizer.json", '"="', '"\u2603"')
    (problem,) = teacher_problems(f"{TEACHER}={teacher}")
    assert "the teacher must have the vocabulary of the policy" in problem
    assert "2 tokens differ, such as '='" in problem


def test_missing_incomplete_or_short_teacher_is_rejected(teacher: Path) -> None:
    (missing,) = teacher_problems(f"{TEACHER}=nowhere")
    assert missing.startswith('distill.teacher.path="nowhere": must be a directory')
    (short,) = teacher_problems(f"{TEACHER}={teacher}", "rollout.max_new_tokens=27")
    assert "59 tokens must not be longer than the teacher's 58 positions" in short
    (teacher / "model.safetensors").unlink()
    (incomplete,) = teacher_problems(f"{TEACHER}={teacher}")
    assert "but it has no weights" in incomplete


@pytest.mark.parametrize(
    ("option", "key", "problem"),
    [
        ("tp=3", "tp", "tp must divide the teacher's 4 query heads, 2 key-value heads"),
        ("kv_cache_bytes=1000", "kv_cache_bytes", "too small for one sequence of"),
        ("vllm={nonsense: 1}", "vllm.nonsense", "no such vLLM option"),
        ("vllm={max_num_batched_tokens: many}", "vllm.max_num_batched_tokens", "vLLM expects"),
    ],
)
def test_options_of_a_teachers_engine_are_checked_like_the_generators(
    teacher: Path, option: str, key: str, problem: str
) -> None:
    config = load_config("distill_quickstart", [f"{TEACHER}={teacher}", f"distill.teacher.{option}"])
    (found,) = (rule for rule in broken_rules(config) if f"distill.teacher.{key}" in rule.values)
    assert problem in str(found)


def test_kv_cache_of_a_teacher_must_fit_this_machine(teacher: Path) -> None:
    config = load_config("distill_quickstart", [f"{TEACHER}={teacher}", "distill.teacher.kv_cache_bytes=20000000000000"])
    assert [rule for rule in broken_rules(config) if "but this machine has" in str(rule)]


def test_head_size_of_a_teacher_needs_a_kernel(teacher: Path) -> None:
    edit(teacher / "config.json", '"head_dim": 32', '"head_dim": 24')
    problems = teacher_problems(f"{TEACHER}={teacher}")
    assert any("vLLM has no CPU attention kernel for this head size (got 24)" in problem for problem in problems)


def test_hint_is_checked_for_every_prompt_before_the_start(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1), "clue": "add one" if n % 5 else None} for n in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = load_config(
        "distill_quickstart",
        [
            *("data.source=jsonl", f"data.path={tmp_path / 'sums.jsonl'}", "warm_start=null", "data.heldout_fraction=0.05"),
            "distill={teacher: {policy: current}, loss: jsd, hint: '{clue}: {question}'}",
        ],
    )
    with pytest.raises(BrokenRules, match=r"the prompt \"\d*[05] \+ 1 =\" must not be empty in column 'clue'"):
        check_data(config, {})
    with pytest.raises(BrokenRules, match="has no value for 'nosuch'"):
        check_data(config.model_copy(update={"distill": distill_config(**SELF | {"hint": "{nosuch}"})}), {})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("num_retries: 0", "the teacher cannot be reached"),
        ("key_variable: NO_SUCH_VARIABLE", "the environment variable must hold the API key"),
    ],
)
def test_unusable_endpoint_of_a_teacher_is_rejected(options: str, problem: str) -> None:
    config = load_config("distill_quickstart", [f"distill.teacher={{url: 'http://127.0.0.1:9/v1', {options}}}"])
    assert [rule for rule in broken_rules(config) if problem in str(rule)]


def test_dry_run_shows_teacher_keys(teacher: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(teacher.parent)  # a long path would be shortened
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--config", "distill_quickstart", f"{TEACHER}={teacher.name}", "--dry-run"])
    output: Any = capsys.readouterr().out
    assert any(line.split()[:2] == [TEACHER, f'"{teacher.name}"'] for line in output.splitlines())
    assert "Ready to start." in output


@pytest.mark.parametrize(
    "override", ["replay.fraction=0.5", "max_staleness=2", "trainer.overlong=skip", "trainer.share_prompts=true"]
)
def test_keys_that_fine_tuning_does_not_use_are_rejected(override: str) -> None:
    with pytest.raises(ConfigError, match="supervised fine-tuning does not use this key"):
        load_config("sft_quickstart", [override])
