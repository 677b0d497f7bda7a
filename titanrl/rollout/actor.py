"""The rollout worker: an actor that reserves slots of the buffer, rolls groups out, and commits them."""

import asyncio
import traceback
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from titanrl.actors import Actor, concurrent_endpoint, endpoint
from titanrl.config.schema import Config
from titanrl.loading import loading
from titanrl.metrics.run_directory import append_line
from titanrl.replay.buffer import Reservation, scorer_failed
from titanrl.rollout.group import fit_to_rows, greedy_request, record_of, roll_out, sampling_requests
from titanrl.rollout.outbox import Outbox
from titanrl.rollout.pool import GeneratorPool
from titanrl.types import Completion, EvaluationResult, Group, GroupHandle, GroupRecord, Prompt, Rollout

if TYPE_CHECKING:
    from titanrl.data.demonstrations import Demonstration

T = TypeVar("T")

EVALUATION_BATCH = 128
"""Held-out prompts in flight at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Arguments of a rollout worker."""

    config: Config
    """Configuration of the run."""
    model_dir: Path
    """Hugging Face directory with the tokenizer."""
    run_dir: Path
    """Run directory; sampled rollouts are written to `rollouts.jsonl` in it."""
    buffer: Any
    """Replay buffer, an actor."""
    shards: Any
    """Storage shards, an actor mesh."""
    generators: tuple[Any, ...]
    """Generator actors, one per replica."""


class RolloutWorker(Actor):
    """Turns prompts into scored groups."""

    def __init__(self, setup: WorkerSetup) -> None:
        """Keep the arguments; `start` loads tokenizer and prompts."""
        self._setup = setup
        self._pool = GeneratorPool(setup.generators, setup.config.generator.max_num_seqs)
        self._tasks: set[asyncio.Task[Any]] = set()
        config = setup.config
        # Dynamic sampling frees slots as soon as groups finish, so groups must not wait for older ones.
        in_order = config.window_groups == 1 and not config.rollout.dynamic_sampling
        self._outbox = Outbox(setup.shards, in_order=in_order)
        # In synchronous training, rollouts and evaluations never overlap. Otherwise they would change each other's decoding
        # batches, and a run would not be reproducible.
        self._turn = asyncio.Lock()

    @endpoint
    async def start(self) -> None:
        """Load tokenizer and prompts, and start the scoring processes."""
        with loading():
            from titanrl.data.streams import make_stream
            from titanrl.data.tokenizer import load_tokenizer
            from titanrl.sandbox.pool import ScoringPool
            from titanrl.sandbox.scores import scorer_spec

        config = self._setup.config
        self._scoring = ScoringPool(scorer_spec(config.data), config.sandbox)
        await self._scoring.start()
        self._tokenizer = load_tokenizer(self._setup.model_dir)
        self._stream = make_stream(config.data, self._tokenizer, config.seed)
        self._demonstrations: Iterator[list[Demonstration]] | None = None

    @endpoint
    async def run(self) -> None:
        """Start to roll out in the background. A failure is reported to the buffer, which raises it in the controller."""
        self._start_task(self._run_and_report_failure(), "roll out")

    @concurrent_endpoint
    async def evaluate(self, num_prompts: int) -> EvaluationResult:
        """Answer held-out prompts greedily. `close` cancels the evaluation.

        Raises:
            ScorerError: The scorer failed on every completion.
        """
        return await self._start_task(self._evaluate(num_prompts), "evaluate")

    async def _evaluate(self, num_prompts: int) -> EvaluationResult:
        prompts = self._stream.heldout(num_prompts)
        async with self._turn:  # never held by rollouts in asynchronous training
            groups = [
                group
                for start in range(0, num_prompts, EVALUATION_BATCH)
                for group in await asyncio.gather(*map(self._answer, prompts[start : start + EVALUATION_BATCH]))
            ]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        errors = [failure.error for group in groups for failure in group.failures]
        if not rollouts:
            raise scorer_failed(f"all {num_prompts} completions of the evaluation", errors[0])
        return EvaluationResult(
            task=self._setup.config.data.task,
            version=int(min(rollout.versions.max() for rollout in rollouts)),
            mean=float(np.mean([rollout.reward for rollout in rollouts])),
            num_prompts=num_prompts,
            response_len_mean=float(np.mean([rollout.mask.sum() for rollout in rollouts])),
            num_errors=len(errors),
            first_error=errors[0] if errors else "",
        )

    @endpoint
    async def demonstrate(self, handle: GroupHandle) -> GroupRecord:
        """Store the next batch of demonstrations in the shard of `handle`; return its record."""
        if self._demonstrations is None:
            from titanrl.data.demonstrations import chain_sum_demonstrations

            config = self._setup.config
            assert config.warm_start is not None
            self._demonstrations = chain_sum_demonstrations(self._stream, self._tokenizer, config.warm_start, config.seed)
        batch = next(self._demonstrations)
        await self._outbox.store(handle, tuple(map(rollout_of_demonstration, batch)))
        return record_of_demonstrations(batch, handle, self._setup.config.data.task)

    @endpoint
    async def close(self) -> None:
        """Cancel the background tasks, and stop the scoring processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._scoring.close()

    def _start_task(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a background task that `close` cancels."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self) -> None:
        """Reserve slots and roll groups out until cancelled.

        In synchronous training the next groups start when all groups of a round are finished, which makes a run reproducible.
        Otherwise a group starts as soon as the buffer has a free slot and a generator has room.
        """
        config = self._setup.config
        share = -(-config.num_slots // config.rollout.num_workers)
        synchronous = config.max_staleness == 0
        async with asyncio.TaskGroup() as groups:
            while True:
                limit = share if synchronous else min(share, await self._pool.room(config.rollout.num_requests))
                reservations = await self._setup.buffer.reserve.call_one(limit)
                async with self._turn if synchronous else nullcontext():
                    rolling = [groups.create_task(self._roll_out(reservation)) for reservation in reservations]
                    if synchronous:
                        await asyncio.gather(*rolling)

    async def _roll_out(self, reservation: Reservation) -> None:
        """Generate, score and commit one group."""
        config = self._setup.config
        self._outbox.begin(reservation.index)
        prompt = self._stream[reservation.index]
        requests = sampling_requests(prompt, config.rollout, config.seed)
        with self._pool.session() as session:
            generate = partial(session.generate, num_kept=config.rollout.group_size)
            group = await roll_out(prompt, requests, generate, self._scoring.score, self._tokenizer.decode)
        trained, num_overlong = fit_to_rows(group, config.trainer)
        has_payload = group.has_signal or (config.trains_on_equal_rewards and bool(group.rollouts))
        record = record_of(trained, reservation.handle, has_payload=has_payload, num_overlong=num_overlong)
        await self._outbox.deliver(record, trained.rollouts)
        if reservation.index % config.rollout.groups_per_step < config.logging.rollouts_per_step:
            append_line(self._setup.run_dir / "rollouts.jsonl", self._readable(group, record))

    async def _answer(self, prompt: Prompt) -> Group:
        requests = [greedy_request(prompt, self._setup.config.rollout.max_new_tokens)]
        return await roll_out(prompt, requests, self._pool.generate, self._scoring.score, self._tokenizer.decode)

    async def _run_and_report_failure(self) -> None:
        try:
            await self._run()
        except* Exception as errors:  # the edge of a background task: any failure must reach the controller
            first = next(leaves(errors))
            await self._setup.buffer.fail.call_one("".join(traceback.format_exception_only(first)).strip())
            raise

    def _readable(self, group: Group, record: GroupRecord) -> dict[str, Any]:
        """Convert a group to a line of `rollouts.jsonl`.

        The completions with a reward come first, in the order of the group's record. Those whose scorer failed come last. The
        version is the record's, so that `index` and `version` identify the group's line in `advantages.jsonl`.
        """
        version = record.max_version if group.rollouts else int(group.failures[0].completion.versions.max())
        completions = [
            {**self._readable_completion(sampled_part(rollout)), "reward": rollout.reward} for rollout in group.rollouts
        ]
        completions += [
            {**self._readable_completion(failure.completion), "reward": None, "error": failure.error}
            for failure in group.failures
        ]
        return {
            "version": version,
            "index": group.prompt.index,
            "task": group.prompt.task,
            "prompt": group.prompt.text,
            "answer": group.prompt.entry.get("answer"),
            "completions": completions,
        }

    def _readable_completion(self, completion: Completion) -> dict[str, Any]:
        token_ids = completion.token_ids.tolist()
        return {
            "text": self._tokenizer.decode(token_ids),
            "num_tokens": len(token_ids),
            "finish_reason": completion.finish_reason,
            "tokens": [self._tokenizer.token_text(token_id) for token_id in token_ids],
            "logprobs": [round(float(logprob), 4) for logprob in completion.logprobs],
        }


def sampled_part(rollout: Rollout) -> Completion:
    """Return the tokens of a rollout that the policy sampled."""
    return Completion(
        token_ids=rollout.token_ids[rollout.mask],
        logprobs=rollout.logprobs[rollout.mask],
        versions=rollout.versions[rollout.mask],
        finish_reason=rollout.finish_reason,
    )


def leaves(errors: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """Yield the single exceptions of an exception group."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


def rollout_of_demonstration(demonstration: "Demonstration") -> Rollout:
    """Convert a demonstration to a training sequence. No policy sampled it: log-probabilities are 0 and versions -1."""
    length = len(demonstration.token_ids)
    return Rollout(
        token_ids=demonstration.token_ids,
        mask=demonstration.mask,
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int64),
        reward=0.0,
        reward_parts={},
        finish_reason="stop",
    )


def record_of_demonstrations(batch: Sequence["Demonstration"], handle: GroupHandle, task: str) -> GroupRecord:
    """Summarize a batch of demonstrations for the controller, as one group."""
    return GroupRecord(
        index=0,
        task=task,
        handle=handle,
        has_payload=True,
        rewards=(0.0,) * len(batch),
        reward_parts={},
        prompt_len=0,
        lengths=tuple(len(demonstration.token_ids) for demonstration in batch),
        num_sampled=tuple(int(demonstration.mask.sum()) for demonstration in batch),
        num_truncated=0,
        num_overlong=0,
        num_nonfinite=0,
        min_version=-1,
        max_version=-1,
        generate_s=0.0,
        score_s=0.0,
    )
