"""On-policy distillation: the training loop, and the command `titanrl distill --config FILE`.

The policy samples completions, and approaches a teacher at their tokens, in one of two ways. Another model, in an engine of its
own or behind an endpoint, computes the log-probabilities of the tokens. The advantage of a token is then the teacher's
log-probability minus the policy's, so training lowers the policy's reverse KL divergence from the teacher; or the trainer
computes the forward KL divergence over the tokens that the teacher finds most likely. With the policy itself as the teacher,
which reads a hint that the policy does not see, the trainer computes a divergence between both distributions over the whole
vocabulary. Tasks of a mixture can have teachers of their own, and learn from their rewards in the same pass.

Sources: Thinking Machines, On-Policy Distillation (https://thinkingmachines.ai/blog/on-policy-distillation/), and the recipe
`distillation` of tinker-cookbook; GKD (arXiv:2306.13649) for the divergences.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from titanrl.base.errors import TitanRLError
from titanrl.carriers.rewards import Scored
from titanrl.carriers.types import (
    AdamParams,
    Completion,
    EvaluationResult,
    FloatArray,
    Group,
    Prompt,
    ScorerFailure,
    StepMetrics,
    TopTokens,
)
from titanrl.config.algorithm import INITIAL
from titanrl.config.data import Distillation
from titanrl.config.sections import DistillConfig
from titanrl.launch.roles import Roles
from titanrl.metrics import steps as metrics_of
from titanrl.metrics.reading import fixed
from titanrl.rollout.group import GroupRecorder, derive_seed, newest_version, rollouts_of
from titanrl.run import command
from titanrl.run.run import Run

if TYPE_CHECKING:
    from titanrl.carriers.types import Datum
    from titanrl.rollout.remote import RemoteTeacher
    from titanrl.session.sampling import Sample, SamplingClient
    from titanrl.session.session import Task

KL = "policy/kl_teacher"
"""Name of the divergence in metrics."""


class Teacher(Protocol):
    """A teacher that is not the policy."""

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]], /) -> list[FloatArray]:
        """Compute the log-probability of each token given the preceding tokens, `[S]` for each sequence; the first is NaN."""

    async def compute_top(self, sequences: Sequence[Sequence[int]], num: int, /) -> list[TopTokens]:
        """Compute the `num` most likely tokens at each token but the first, `[S - 1, num]` for each sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step with their scores and divergences from the teacher."""

    prompts: Sequence[Prompt]
    """Prompts of the step."""
    groups: "Sequence[Sequence[Sample]]"
    """Samples of each prompt."""
    scores: Sequence[Sequence[Scored]]
    """Scores of the samples of each prompt."""
    found: Sequence[FloatArray | TopTokens | None]
    """Log-probability of the policy minus the teacher's for each token, `[T]` for each sample, or the tokens that the teacher
    finds most likely, `[T, K]`; None if no other model was asked."""
    teacher_prompts: Sequence[Sequence[int] | None]
    """Prompt of the teacher for each sample; None if prompt and sample are too long for the teacher."""
    tasks: Sequence[Distillation]
    """Teacher and weights of each prompt's task."""


class Distill(Run):
    """A distillation run, which calls generators, teacher and trainer in order.

    Example:
        async with Distill(load_config("distill_quickstart")) as run:
            metrics = await run.step()
    """

    program = "distill"
    purpose = "Distill a teacher into a policy on the policy's samples."
    with_data = True
    _engines: "Mapping[str, SamplingClient]" = MappingProxyType({})
    """Teachers in engines, by the path of their section."""
    _remote: "Mapping[str, RemoteTeacher]" = MappingProxyType({})
    """Teachers behind endpoints, by the path of their section."""
    _task: "Task"
    _record: GroupRecorder

    async def train_step(self) -> StepMetrics:
        """Sample, compute the teacher's log-probabilities, train, publish the weights, and report."""
        started, config = time.perf_counter(), self.config
        batch = await self._sample()
        aligned = distillation_data(batch, self._distill)
        data = [datum for datum in aligned if datum is not None]
        if not data:
            raise TitanRLError(
                "distill.hint: no sample of a step fits together with the teacher's prompt. Shorten the hint, or raise "
                "trainer.row_tokens (or data.max_prompt_tokens for a teacher that is not the policy)."
            )
        params = AdamParams.at_step(config.algorithm, self.training.version, config.num_steps, rate=self.state.learning_rate)
        share = taught_share(data)
        with self.timer.phase("train"):
            passes = self.training.forward_backward(data, *loss_of_step(self._distill, share))
            stepping = self.training.optim_step(params)
            output = await passes
        with self.timer.phase("optim"):
            update = await stepping
            generated = await self.session.generators.take_stats()
        self.count_skipped(update)
        with self.timer.phase("sync"):
            if not update.skipped:
                await self.training.publish()
                self.recorder.directory.event("publication", version=update.version)
        samples = list(chain(*batch.groups))
        num_tokens, pairs = sum(len(sample.tokens) for sample in samples), zip(samples, aligned, strict=True)
        counts = self.state.counts.plus(
            prompts=len(batch.prompts),
            rollouts=len(samples),
            generated_tokens=num_tokens,
            trained_tokens=0 if update.skipped else sum(len(each.tokens) for each, datum in pairs if datum is not None),
        )
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            version=update.version,
            next_index=self.state.next_index + len(batch.prompts),
            counts=counts,
        )
        reported = {name.rpartition(":")[0]: value for name, value in output.metrics.items()}
        values = {
            **batch_metrics(batch),
            **metrics_of.optimizer_metrics([update], params.learning_rate),
            **{name: value for name, value in reported.items() if "/" in name},
            **({KL: reported[KL] / share} if KL in reported else {}),
            **({"teacher/retries": float(sum(each.take_retries() for each in self._remote.values()))} if self._remote else {}),
            "loss/policy": reported["loss"],
            **metrics_of.speed_metrics(
                trained_tokens=sum(len(datum.model_input) for datum in data),
                generated=generated,
                trainer_busy_s=update.busy_s,
                step_s=time.perf_counter() - started,
            ),
            **self.session.weights.take_metrics(),
            **self.timer.take(),
            **self.steering.metrics(),
            **counts.metrics(),
        }
        return self._report(batch, aligned, values)

    async def take_steps(self, num_steps: int) -> None:
        """Evaluate the teachers with an engine on the held-out prompts of their tasks, then train; see `Run.train`."""
        if self.state.step == 0 and not self.recorder.directory.has_event("teacher"):
            for name, task in self._learned.items():
                if task.teacher in self._engines and task.weight:
                    with self.timer.phase("evaluate"):
                        result = await self._task.evaluate(self._engines[task.teacher], name=name)
                    values = {"mean": result.mean, "response_len_mean": result.response_len_mean}
                    self.recorder.directory.event("teacher", task=result.task, **values)
                    self.console.note(f"teacher: mean reward {fixed(result.mean)} on held-out {result.task}")
        await super().take_steps(num_steps)

    async def evaluate(self, name: str | None = None) -> EvaluationResult:
        """Evaluate the newest weights, and record the result; see `Evaluations.measure`."""
        record = self._record.evaluation
        return await self.evaluations.measure(name, lambda name: self._task.evaluate(self.sampling, name=name, record=record))

    def roles(self) -> Roles:
        """Return trainer and generators."""
        return Roles()

    async def begin(self) -> None:
        """Publish the policy to the generators, and start the teacher and the reward processes."""
        self._record = GroupRecorder(self.run_dir, "controller", self.config, self.session.tokenizer)
        if self._distill.teacher.policy == "initial":  # before a checkpoint replaces the weights
            await self.training.keep_weights()
        await self.load_checkpoint()
        self._task, _, _ = await asyncio.gather(self.session.task(), self._start_teachers(), self.training.publish())

    async def _start_teachers(self) -> None:
        """Start the engines of teachers, and the clients of those behind endpoints."""
        from titanrl.rollout.remote import RemoteTeacher  # imports httpx

        engines: dict[str, SamplingClient] = {}
        remote: dict[str, RemoteTeacher] = {}
        self._engines, self._remote = engines, remote
        for key, teacher in self._distill.by_key.items():
            if teacher.url is not None:
                remote[key] = RemoteTeacher(teacher, key=key)
            elif teacher.path is not None:
                self.console.phase("start", f"teacher x{teacher.tp}")
                options = teacher.model_dump(include={"tp", "dtype", "max_num_seqs", "kv_cache_bytes", "vllm"})
                engine = self.config.generator.model_copy(update={"replicas": 1, **options})
                engines[key] = await self.session.teacher(teacher.path, engine)

    async def _close_session(self, *, keeps_generators: bool = False) -> None:
        remote, self._remote = self._remote, MappingProxyType({})
        for teacher in remote.values():
            await teacher.close()
        await super()._close_session(keeps_generators=keeps_generators)

    # Details of a step

    async def _sample(self) -> Batch:
        """Sample completions of the next prompts, then compute their scores and the teacher's log-probabilities."""
        rollout, start = self.config.rollout, self.state.next_index
        with self.timer.phase("rollout"):
            prompts = self._task.prompts(rollout.groups_per_step, start=start)
            seed = derive_seed(self.config.seed, start)
            groups = await self.sampling.sample(prompts, num_samples=rollout.group_size, seed=seed)
        samples, published = list(chain(*groups)), self.session.weights.versions[-1]
        assert all((sample.versions == published).all() for sample in samples), "distillation is on-policy"
        distill, tasks = self._distill, [self._learned[prompt.task] for prompt in prompts]
        asked = [
            prompt.token_ids if distill.hint is None or not task.weight else self._task.hinted([prompt], distill.hint)[0]
            for prompt, task in zip(prompts, tasks, strict=True)
        ]
        is_policy = distill.teacher.policy is not None
        limit = self.config.trainer.row_tokens if is_policy else self.config.max_sequence_tokens
        by_sample = [prompt for prompt, group in zip(asked, groups, strict=True) for _ in group]
        teacher_prompts = [
            prompt if len(prompt) + len(sample.tokens) <= limit else None
            for prompt, sample in zip(by_sample, samples, strict=True)
        ]
        task_of = [task for task, group in zip(tasks, groups, strict=True) for _ in group]
        num_top = distill.top_k if distill.reads_top else 0
        teachers: dict[str, Teacher] = {**self._engines, **self._remote}
        with self.timer.phase("teacher"):
            found, scores = await asyncio.gather(
                ask_teachers(teachers, samples, teacher_prompts, task_of, num_top), self._task.score(prompts, groups)
            )
        return Batch(prompts=prompts, groups=groups, scores=scores, found=found, teacher_prompts=teacher_prompts, tasks=tasks)

    @property
    def _distill(self) -> DistillConfig:
        assert self.config.distill is not None
        return self.config.distill

    @property
    def _learned(self) -> dict[str, Distillation]:
        """Teacher and weights of each task."""
        return {name: task.distillation(self._distill) for name, task in self.config.data.tasks.items()}

    def _report(self, batch: Batch, data: "Sequence[Datum | None]", values: dict[str, float]) -> StepMetrics:
        """Record metrics, scorer errors and rollouts of a step."""
        metrics = StepMetrics(step=self.state.step, version=self.state.version, values=values)
        self.recorder.step(metrics)
        errors = [score.error for group in batch.scores for score in group if score.reward is None]
        if errors:
            self.recorder.scorer_errors(self.state.step, len(errors), sum(map(len, batch.scores)), errors[0])
        # The first groups of a step, and the mean advantage of each of their completions.
        rollout = self.config.rollout
        decode = partial(self.session.tokenizer.decode_completion, stop=rollout.stop, keep_stop=rollout.keep_stop)
        weights = [task.weight for task, group in zip(batch.tasks, batch.groups, strict=True) for _ in group]
        means = iter(
            0.0 if datum is None else mean_advantage(datum, len(sample.prompt), weight)
            for datum, sample, weight in zip(data, chain(*batch.groups), weights, strict=True)
        )
        shown = list(zip(batch.prompts, batch.groups, batch.scores, strict=True))[: self.config.logging.rollouts_per_step]
        rows = []
        for prompt, group, scores in shown:
            recorded = recorded_group(prompt, group, scores)
            version = newest_version(recorded)
            self._record.rollouts(recorded, decode, status="kept", version=version)
            advantages = [
                mean for mean, score in zip(islice(means, len(group)), scores, strict=True) if score.reward is not None
            ]
            rows.append((prompt.index, version, advantages))
        self.recorder.directory.log_advantages(self.state.step, rows)
        return metrics


def recorded_group(prompt: Prompt, samples: "Sequence[Sample]", scores: Sequence[Scored]) -> Group:
    """Return the samples of a prompt as a group, those without a reward as failures."""
    completions = [
        Completion(token_ids=s.tokens, logprobs=s.logprobs, versions=s.versions, finish_reason=s.finish_reason) for s in samples
    ]
    pairs = zip(completions, scores, strict=True)
    return Group(
        prompt=prompt,
        rollouts=rollouts_of(prompt, completions, scores),
        failures=tuple(ScorerFailure(completion=each, error=score.error) for each, score in pairs if score.reward is None),
        generate_s=0.0,
        score_s=0.0,
    )


async def ask_teachers(
    teachers: Mapping[str, Teacher],
    samples: "Sequence[Sample]",
    prompts: Sequence[Sequence[int] | None],
    tasks: Sequence[Distillation],
    num_top: int,
) -> list[FloatArray | TopTokens | None]:
    """Ask the teacher of each sample's task; return what `Batch.found` has.

    Args:
        teachers: Teachers by the path of their section.
        samples: Samples of a step.
        prompts: Prompt of the teacher for each sample; None asks no teacher.
        tasks: Teacher and weights of each sample's task.
        num_top: Number of most likely tokens at each token; 0 compares the log-probabilities of the sampled tokens.
    """
    found: list[FloatArray | TopTokens | None] = [None] * len(samples)

    async def ask(key: str, teacher: Teacher) -> None:
        asked = {
            index: prompt
            for index, (prompt, task) in enumerate(zip(prompts, tasks, strict=True))
            if prompt is not None and task.teacher == key and task.weight
        }
        if not asked:
            return
        sequences = [[*prompt, *samples[index].tokens.tolist()] for index, prompt in asked.items()]
        if num_top:
            for index, top in zip(asked, await teacher.compute_top(sequences, num_top), strict=True):
                first = -len(samples[index].tokens)
                found[index] = TopTokens(token_ids=top.token_ids[first:], logprobs=top.logprobs[first:])
        else:
            for index, logprobs in zip(asked, await teacher.compute_logprobs(sequences), strict=True):
                found[index] = samples[index].logprobs - logprobs[len(asked[index]) :]

    await asyncio.gather(*(ask(key, teacher) for key, teacher in teachers.items()))
    return found


def distillation_data(batch: Batch, distill: DistillConfig) -> "list[Datum | None]":
    """Build the training data of a step; None for samples that are too long for the teacher.

    Loss weights make the summed loss a mean over all sampled tokens. The advantage of a token is that of the reward, minus the
    weighted and discounted divergence. If the trainer computes the divergence, the loss weight contains its weight, by which
    the advantage is divided; the datum has what the teacher found most likely, or the input of the policy as the teacher.
    """
    samples = list(chain(*batch.groups))
    tasks = [task for task, group in zip(batch.tasks, batch.groups, strict=True) for _ in group]
    by_prompt = zip(batch.scores, batch.tasks, strict=True)
    rewards = chain.from_iterable(reward_advantages(scores, task.reward_weight) for scores, task in by_prompt)
    fitting = [sample for sample, prompt in zip(samples, batch.teacher_prompts, strict=True) if prompt is not None]
    weight = 1.0 / max(sum(len(sample.tokens) for sample in fitting), 1)
    data: list[Datum | None] = []
    for sample, prompt, found, reward, task in zip(samples, batch.teacher_prompts, batch.found, rewards, tasks, strict=True):
        if prompt is None:
            data.append(None)
        elif not task.weight:
            data.append(sample.datum(reward, weight))
        elif isinstance(found, np.ndarray):
            data.append(sample.datum(reward - task.weight * discounted(found, distill.discount), weight))
        else:
            datum = sample.datum(reward / task.weight, weight * task.weight)
            tokens = np.concatenate([np.asarray(prompt, np.int64), sample.tokens[:-1]]) if found is None else None
            data.append(replace(datum, teacher_input=tokens, teacher_top=found))
    return data


def mean_advantage(datum: "Datum", prompt_len: int, weight: float) -> float:
    """Return the mean advantage of a sample's tokens, by which data with a divergence of this weight have it divided."""
    mean = float(datum.loss_fn_inputs["advantages"][prompt_len - 1 :].mean())
    return mean if datum.teacher_input is None and datum.teacher_top is None else weight * mean


def reward_advantages(scores: Sequence[Scored], weight: float) -> list[float]:
    """Return the weighted difference of each reward of a group from the group's mean; 0 where the reward failed."""
    mean = metrics_of.mean([score.reward for score in scores if score.reward is not None])
    return [0.0 if score.reward is None or not weight else weight * (score.reward - mean) for score in scores]


def loss_of_step(distill: DistillConfig, share: float) -> tuple[str, dict[str, float | int]]:
    """Return the trainer's loss and its options: the teacher's weights and the mixture of a divergence.

    A step without a token that has a teacher, because its tasks have only rewards, has no divergence. `share` is that of
    `taught_share`.
    """
    if distill.is_divergence and not share:
        return "importance_sampling", {}
    options: dict[str, float | int] = {"at_version": INITIAL} if distill.teacher.policy == "initial" else {}
    return distill.loss, options | ({"beta": distill.beta} if distill.loss == "jsd" else {})


def taught_share(data: "Sequence[Datum]") -> float:
    """Return the share of the loss tokens at which the trainer computes a divergence from a teacher."""
    counts = [(np.count_nonzero(datum.loss_fn_inputs["weights"]), datum) for datum in data]
    taught = sum(num for num, datum in counts if datum.teacher_input is not None or datum.teacher_top is not None)
    return taught / max(sum(num for num, _ in counts), 1)


def discounted(values: FloatArray, discount: float) -> FloatArray:
    """Return the discounted sum over k of `discount**k * values[t + k]` for each t, `[T]`."""
    sums = np.array(values, np.float32)
    if discount:
        for t in range(len(sums) - 2, -1, -1):
            sums[t] += discount * sums[t + 1]
    return sums


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a batch's samples: divergence from the teacher, rewards and lengths."""
    samples, scores = list(chain(*batch.groups)), list(chain(*batch.scores))
    scored = [score for score in scores if score.reward is not None]
    lengths = [len(sample.tokens) for sample in samples]
    known = [found for found in batch.found if isinstance(found, np.ndarray)]
    tops = [found.logprobs for found in batch.found if isinstance(found, TopTokens)]
    prompt_lengths = [len(prompt.token_ids) for prompt in batch.prompts]
    parts = dict.fromkeys(part for score in scored for part in score.parts)
    return {
        **({KL: metrics_of.mean(np.concatenate(known).tolist())} if known else {}),
        **({"teacher/outside_top_frac": float(1.0 - np.exp(np.concatenate(tops)).sum(1).mean())} if tops else {}),
        "tokens/teacher_too_long_frac": metrics_of.mean([prompt is None for prompt in batch.teacher_prompts]),
        "reward/mean": metrics_of.mean([score.reward for score in scored if score.reward is not None]),
        **metrics_of.error_metrics(len(scores) - len(scored), len(scores)),
        **{f"reward/{part}": metrics_of.mean([s.parts[part] for s in scored if part in s.parts]) for part in parts},
        "tokens/prompt_len_mean": metrics_of.mean(prompt_lengths),
        "tokens/prompt_len_max": float(max(prompt_lengths)),
        "tokens/response_len_mean": metrics_of.mean(lengths),
        "tokens/response_len_max": float(max(lengths)),
        "tokens/truncated_frac": metrics_of.mean([sample.finish_reason == "length" for sample in samples]),
    }


main = partial(command.main, Distill, prog="titanrl distill")
"""Entry point of `titanrl distill`, called as `main(argv, prog=...)`."""


if __name__ == "__main__":
    main()
