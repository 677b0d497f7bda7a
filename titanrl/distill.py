"""On-policy distillation: the training loop, and the command `titanrl distill --config FILE`.

The policy samples completions, and approaches a teacher at their tokens, in one of two ways. A teacher in an engine of its own
computes the log-probabilities of the tokens. The advantage of a token is then the teacher's log-probability minus the policy's,
so training lowers the policy's reverse KL divergence from the teacher. With the policy itself as the teacher, which reads a
hint that the policy does not see, the trainer computes a divergence between both distributions over the whole vocabulary.

Sources: Thinking Machines, On-Policy Distillation (https://thinkingmachines.ai/blog/on-policy-distillation/), and the recipe
`distillation` of tinker-cookbook; GKD (arXiv:2306.13649) for the divergences.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from titanrl.algorithms.batch_plan import adam_params
from titanrl.base.errors import TitanRLError
from titanrl.carriers.rewards import Scored
from titanrl.carriers.types import Completion, EvaluationResult, FloatArray, Group, Prompt, ScorerFailure, StepMetrics
from titanrl.config.algorithm import INITIAL
from titanrl.config.errors import BrokenRule, ConfigError
from titanrl.config.load import explain_rule
from titanrl.config.sections import DistillConfig
from titanrl.data.rows import BadRow
from titanrl.launch.roles import Roles
from titanrl.metrics import steps as metrics_of
from titanrl.rollout.group import derive_seed, rollouts_of
from titanrl.rollout.recorded import GroupRecorder, newest_version
from titanrl.run import command
from titanrl.run.run import Run

if TYPE_CHECKING:
    from titanrl.carriers.datums import Datum
    from titanrl.session.sampling import Sample, SamplingClient
    from titanrl.session.session import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step with their scores and divergences from the teacher."""

    prompts: Sequence[Prompt]
    """Prompts of the step."""
    groups: "Sequence[Sequence[Sample]]"
    """Samples of each prompt."""
    scores: Sequence[Sequence[Scored]]
    """Scores of the samples of each prompt."""
    divergences: Sequence[FloatArray | None]
    """Log-probability of the policy minus the teacher's for each token, `[T]` for each sample; None if the sample is not
    trained on, or if the trainer computes the divergence."""
    teacher_prompts: Sequence[Sequence[int] | None]
    """Prompt of the teacher for each sample; None if prompt and sample are too long for the teacher."""


class Distill(Run):
    """A distillation run, which calls generators, teacher and trainer in order.

    Example:
        async with Distill(load_config("distill_quickstart")) as run:
            metrics = await run.step()
    """

    program = "distill"
    purpose = "Distill a teacher into a policy on the policy's samples."
    with_data = True
    _teacher: "SamplingClient | None" = None
    """Client of the teacher's engine; None if the trainer holds the teacher."""
    _task: "Task"
    _record: GroupRecorder

    async def train_step(self) -> StepMetrics:
        """Sample, compute the teacher's log-probabilities, train, publish the weights, and report."""
        started, config = time.perf_counter(), self.config
        assert config.distill is not None
        batch = await self._sample()
        aligned = self._data(batch)
        data = [datum for datum in aligned if datum is not None]
        if not data:
            raise TitanRLError(
                "distill.hint: no sample of a step fits together with the teacher's prompt. Shorten the hint, or raise "
                "trainer.row_tokens (or data.max_prompt_tokens for a teacher in an engine)."
            )
        params = adam_params(config.algorithm, self.training.version, config.num_steps, rate=self.state.learning_rate)
        with self.timer.phase("train"):
            passes = self.training.forward_backward(data, config.distill.loss, loss_options(config.distill))
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
        num_tokens = sum(len(sample.tokens) for sample in samples)
        counts = self.state.counts.plus(
            prompts=len(batch.prompts),
            rollouts=len(samples),
            generated_tokens=num_tokens,
            trained_tokens=0 if update.skipped else num_tokens,
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
        """Evaluate the teacher, then train; see `Run.train`."""
        if self._teacher is not None and self.state.step == 0 and not self.recorder.directory.has_event("teacher"):
            await self.evaluate_teacher()
        await super().take_steps(num_steps)

    async def evaluate(self, name: str | None = None) -> EvaluationResult:
        """Evaluate the newest weights, and record the result; see `Evaluations.measure`."""
        record = self._record.evaluation
        return await self.evaluations.measure(name, lambda name: self._task.evaluate(self.sampling, name=name, record=record))

    async def evaluate_teacher(self) -> EvaluationResult:
        """Sample greedy completions of held-out prompts from the teacher, and score them."""
        assert self._teacher is not None, "the trainer holds the teacher"
        with self.timer.phase("evaluate"):
            result = await self._task.evaluate(self._teacher)
        self.recorder.directory.event("teacher", mean=result.mean, response_len_mean=result.response_len_mean)
        self.console.note(f"teacher: mean reward {result.mean:.3f} on held-out {result.task}")
        return result

    def roles(self) -> Roles:
        """Return trainer and generators."""
        return Roles()

    async def begin(self) -> None:
        """Publish the policy to the generators, and start the teacher and the reward processes."""
        assert self.config.distill is not None
        teacher = self.config.distill.teacher
        self._record = GroupRecorder(self.run_dir, "controller", self.config, self.session.tokenizer)
        if teacher.policy == "initial":  # before a checkpoint replaces the weights
            await self.training.keep_weights()
        await self.load_checkpoint()
        self._task, self._teacher, _ = await asyncio.gather(self._open_task(), self._start_teacher(), self.training.publish())

    async def _start_teacher(self) -> "SamplingClient | None":
        """Start the teacher's engine, unless the trainer holds the teacher."""
        assert self.config.distill is not None
        teacher = self.config.distill.teacher
        if teacher.path is None:
            return None
        self.console.phase("start", f"teacher x{teacher.tp}")
        engine = self.config.generator.model_copy(update={"replicas": 1, **teacher.model_dump(exclude={"path", "policy"})})
        return await self.session.teacher(teacher.path, engine)

    async def _open_task(self) -> "Task":
        """Open prompts and rewards, and check the hint on the first prompt of each task.

        Raises:
            ConfigError: The data has no column of a name in the hint.
        """
        task = await self.session.task()
        assert self.config.distill is not None
        hint = self.config.distill.hint
        if hint is not None:
            first = {prompt.task: prompt for prompt in reversed(task.prompts(8 * len(self.config.data.tasks)))}
            try:
                task.hinted(list(first.values()), hint)
            except BadRow as error:
                rule = BrokenRule(values={"distill.hint": hint}, rule=f"a prompt {error.problem}", fix=error.fix)
                raise ConfigError(explain_rule(rule, None)) from error
        return task

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
        assert self.config.distill is not None
        distill = self.config.distill
        asked = [prompt.token_ids for prompt in prompts] if distill.hint is None else self._task.hinted(prompts, distill.hint)
        limit = self.config.trainer.row_tokens if self._teacher is None else self.config.max_sequence_tokens
        by_sample = [prompt for prompt, group in zip(asked, groups, strict=True) for _ in group]
        teacher_prompts = [
            prompt if len(prompt) + len(sample.tokens) <= limit else None
            for prompt, sample in zip(by_sample, samples, strict=True)
        ]
        with self.timer.phase("teacher"):
            divergences, scores = await asyncio.gather(
                self._divergences(samples, teacher_prompts), self._task.score(prompts, groups)
            )
        return Batch(prompts=prompts, groups=groups, scores=scores, divergences=divergences, teacher_prompts=teacher_prompts)

    async def _divergences(
        self, samples: "Sequence[Sample]", teacher_prompts: Sequence[Sequence[int] | None]
    ) -> Sequence[FloatArray | None]:
        """Return the difference of the log-probabilities of each sample that fits the teacher's engine."""
        if self._teacher is None:
            return [None] * len(samples)
        fitting = [(sample, prompt) for sample, prompt in zip(samples, teacher_prompts, strict=True) if prompt is not None]
        logprobs = await self._teacher.compute_logprobs([[*prompt, *sample.tokens.tolist()] for sample, prompt in fitting])
        found = iter(
            sample.logprobs - values[len(prompt) :] for (sample, prompt), values in zip(fitting, logprobs, strict=True)
        )
        return [None if prompt is None else next(found) for prompt in teacher_prompts]

    def _data(self, batch: Batch) -> "list[Datum | None]":
        """Build the training data of a step; None for samples that are not trained on."""
        assert self.config.distill is not None
        return distillation_data(batch, self.config.distill)

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
        means = iter(
            0.0 if datum is None else float(datum.loss_fn_inputs["advantages"][len(sample.prompt) - 1 :].mean())
            for datum, sample in zip(data, chain(*batch.groups), strict=True)
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
    pairs = [
        (Completion(token_ids=s.tokens, logprobs=s.logprobs, versions=s.versions, finish_reason=s.finish_reason), score)
        for s, score in zip(samples, scores, strict=True)
    ]
    scored = [(completion, score) for completion, score in pairs if score.reward is not None]
    return Group(
        prompt=prompt,
        rollouts=rollouts_of(prompt, [completion for completion, _ in scored], [score for _, score in scored]),
        failures=tuple(ScorerFailure(completion=each, error=score.error) for each, score in pairs if score.reward is None),
        generate_s=0.0,
        score_s=0.0,
    )


def distillation_data(batch: Batch, distill: DistillConfig) -> "list[Datum | None]":
    """Build the training data of a step; None for samples that are too long for the teacher.

    Loss weights make the summed loss a mean over all sampled tokens. The advantage of a token is that of the reward, minus the
    discounted divergence, unless the trainer computes the divergence; the teacher's input then ends with the sample's tokens.
    """
    samples = list(chain(*batch.groups))
    rewards = chain.from_iterable(reward_advantages(scores, distill.reward_weight) for scores in batch.scores)
    fitting = [sample for sample, prompt in zip(samples, batch.teacher_prompts, strict=True) if prompt is not None]
    weight = 1.0 / max(sum(len(sample.tokens) for sample in fitting), 1)
    data: list[Datum | None] = []
    for sample, prompt, divergence, reward in zip(samples, batch.teacher_prompts, batch.divergences, rewards, strict=True):
        if prompt is None:
            data.append(None)
        elif divergence is None:
            tokens = np.concatenate([np.asarray(prompt, np.int64), sample.tokens[:-1]])
            data.append(replace(sample.datum(reward, weight), teacher_input=tokens))
        else:
            data.append(sample.datum(reward - discounted(divergence, distill.discount), weight))
    return data


def reward_advantages(scores: Sequence[Scored], weight: float) -> list[float]:
    """Return the weighted difference of each reward of a group from the group's mean; 0 where the reward failed."""
    mean = metrics_of.mean([score.reward for score in scores if score.reward is not None])
    return [0.0 if score.reward is None or not weight else weight * (score.reward - mean) for score in scores]


def loss_options(distill: DistillConfig) -> dict[str, float | int]:
    """Return the options of the trainer's loss: the teacher's weights and the mixture of a divergence."""
    options: dict[str, float | int] = {"at_version": INITIAL} if distill.teacher.policy == "initial" else {}
    return options | ({"beta": distill.beta} if distill.loss == "jsd" else {})


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
    known = [divergence for divergence in batch.divergences if divergence is not None]
    prompt_lengths = [len(prompt.token_ids) for prompt in batch.prompts]
    parts = dict.fromkeys(part for score in scored for part in score.parts)
    return {
        **({"policy/kl_teacher": metrics_of.mean(np.concatenate(known).tolist())} if known else {}),
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
