"""The carriers: immutable values that processes send to each other.

Shape suffixes: G completions of a group, P prompt tokens, T completion tokens, S tokens of a whole sequence (prompt and
completion). Arrays are numpy, so reading a carrier does not need torch.
"""

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from titanrl.pickling import float32_bytes, int32_bytes, pickle_fast
from titanrl.supports import Supports
from titanrl.turns import GroupTokens, GroupTurns, Turn, Values

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
FinishReason = Literal["stop", "length", "abort"]
Outcome = Literal["environment_error", "timeout", "reward_error"]
"""Reason why a rollout has no reward."""
Rejection = Literal["filtered", "too small"]
"""Reason why a group with rewards is discarded: `rollout.group_filter` or `rollout.min_group_size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A question for the policy.

    Example: `Prompt(index=17, task="chain_sum", text="... 7 + 5 - 3 =", token_ids=[97, 22, ...], entry={"answer": "9", ...})`
    """

    index: int
    """Position in the prompt stream."""
    task: str
    """Name of the task, as in the names of metrics."""
    text: str
    """The question, without chat template."""
    token_ids: tuple[int, ...]
    """Input tokens of the generator, `[P]`."""
    entry: Mapping[str, Any]
    """Data for the rewards: `question`, `answer`, `metadata`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling options of one completion."""

    max_new_tokens: int
    """Longest completion, in tokens."""
    temperature: float
    """Divisor of the logits; 0 is greedy."""
    seed: int | None
    """Seed of this completion; None with greedy sampling."""
    top_p: float = 1.0
    """Probability mass of nucleus sampling; 1 disables it."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 disables the limit."""
    min_p: float = 0.0
    """Lowest probability to sample, as a share of the most likely token's; 0 disables the limit."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the completion, in addition to the model's own."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion. The completion includes the token that completes one."""
    prompt_logprobs: bool = False
    """Return the log-probabilities of the prompt's tokens, too."""
    supports: bool = False
    """Return the entries of the vocabulary that `top_p`, `top_k` and `min_p` left for each token, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion."""

    token_ids: tuple[int, ...]
    """The prompt, `[P]`."""
    sampling: SamplingParams
    """Sampling options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Condition under which the groups of a call join a generator's batch; all of them join at the same step."""

    indices: tuple[int, ...] = ()
    """Prompt position of each group, if they are part of a round; the groups of a round join together and in prompt order."""
    round_size: int = 0
    """Groups of the round at this generator, from all callers; 0 if the call is no part of a round."""
    when_drained: bool = False
    """True if the groups wait until all earlier requests have finished; later requests wait behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of a generator."""

    num_requests: int
    """Unfinished requests."""
    num_queued: int
    """Requests waiting for batch or KV-cache space."""
    admits: bool = True
    """True if new requests join the batch; False if they wait for new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A reply of the generator.

    Example: `Completion(token_ids=[31, 7, 1], logprobs=[-0.1, -0.7, -0.0], versions=[4, 4, 4], finish_reason="stop")`
    """

    token_ids: IntArray
    """Sampled tokens, including the end-of-sequence token, `[T]`."""
    logprobs: FloatArray
    """Log-probability of each token under the sampling distribution (with temperature), in nats, `[T]`."""
    versions: IntArray
    """Policy version that sampled each token, `[T]`."""
    finish_reason: FinishReason
    """`stop`: the policy ended it; `length`: cut at the limit; `abort`: cancelled."""
    prompt_logprobs: FloatArray | None = None
    """Log-probability of each prompt token but the first, at temperature 1, if requested, `[P - 1]`."""
    supports: Supports | None = None
    """Support of each token's distribution, over which `logprobs` are normalized, if requested, `[T]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A sequence for the trainer: tokens that were only ever extended, some of them sampled by the policy.

    Example: prompt `[5, 6]`, completion `[7, 1]`: `token_ids=[5, 6, 7, 1]`, `mask=[F, F, T, T]`, `versions=[-1, -1, 4, 4]`.
    """

    token_ids: IntArray
    """Prompt, completion and the turns that follow, `[S]`."""
    mask: BoolArray
    """True at tokens the policy sampled, the only ones to train on, `[S]`."""
    logprobs: FloatArray
    """Log-probability from the generator where `mask` is true, 0 elsewhere, `[S]`."""
    versions: IntArray
    """Policy version of each sampled token, -1 elsewhere, `[S]`."""
    supports: Supports | None = None
    """Support of each sampled token's distribution, the whole vocabulary elsewhere, `[S]`; None without truncated sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished episode: one segment, or several if the conversation could not always be extended, and one reward."""

    segments: tuple[Segment, ...]
    """Segments in the order of time. Each sampled token is under the mask of one of them."""
    reward: float
    """Sum of all parts of the reward."""
    reward_parts: Mapping[str, float]
    """Reward by part, reported as `reward/<part>`."""
    finish_reason: FinishReason
    """Reason why the last completion ended."""
    turns: tuple[Turn, ...] = ()
    """Turns of the policy in the order of time; empty if each segment is one turn."""
    token_rewards: Values | None = None
    """Reward of each sampled token of all segments, the last one of a turn with that of the turn; they add up to `reward`. None
    if no reward is one of tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the environment reported, by name."""

    @property
    def sampled(self) -> Completion:
        """Tokens of all segments that the policy sampled."""
        token_ids = np.concatenate([segment.token_ids[segment.mask] for segment in self.segments])
        logprobs = np.concatenate([segment.logprobs[segment.mask] for segment in self.segments])
        versions = np.concatenate([segment.versions[segment.mask] for segment in self.segments])
        return Completion(token_ids=token_ids, logprobs=logprobs, versions=versions, finish_reason=self.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFailure:
    """A rollout without a reward: its reward raised, timed out or crashed, or its environment did."""

    completion: Completion
    """Tokens that the policy sampled."""
    error: str
    """Exception type and message, or the reason why the scoring process ended."""
    outcome: Outcome = "reward_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt."""

    prompt: Prompt
    """The question."""
    rollouts: tuple[Rollout, ...]
    """Scored rollouts, `[G]`; empty if the reward failed on every completion."""
    generate_s: float
    """Seconds from the first request to the last completion."""
    score_s: float
    """Seconds spent scoring."""
    failures: tuple["ScorerFailure", ...] = ()
    """Rollouts without a reward. They are left out of the group: they enter neither advantages nor the loss."""
    conversations: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Chat messages of each rollout, if an environment was used."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the group's episodes, if an environment was used; `titanrl.rollout.episodes` names them."""

    @property
    def has_signal(self) -> bool:
        """True if rewards differ. Otherwise every advantage is zero, and so is the gradient."""
        return len({rollout.reward for rollout in self.rollouts}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandle:
    """Location of a group's payload; stale once the slot is reserved again."""

    shard: int
    """Rank of the storage shard."""
    slot: int
    """Slot of the buffer."""
    serial: int
    """Number of times the slot has been reserved, including this time; it distinguishes successive groups in a slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The controller's view of a group: numbers, no tokens. Lists are aligned with its rollouts, `[G]`, or with the segments of
    all of them, `[K]`.
    """

    index: int
    """Position of its prompt in the stream."""
    task: str
    """Name of the task."""
    handle: GroupHandle
    """Location of the slot, and of the payload if there is one."""
    has_payload: bool
    """False for a group without signal, whose tokens were never stored."""
    rewards: tuple[float, ...]
    """Summed reward of each rollout."""
    reward_parts: Mapping[str, tuple[float, ...]]
    """Reward by part; NaN where a rollout does not have the part."""
    prompt_len: int
    """Tokens with which the first segment of every rollout begins."""
    lengths: tuple[int, ...]
    """Tokens of each segment, `[K]`."""
    num_sampled: tuple[int, ...]
    """Tokens of each segment that count in the loss: sampled, with a finite log-probability, `[K]`."""
    num_truncated: int
    """Rollouts cut at the length limit."""
    num_overlong: int
    """Rollouts longer than a packed row; they were truncated or left out of training."""
    num_nonfinite: int
    """Sampled tokens without a finite log-probability; they are in no count."""
    min_version: int
    """Oldest policy version among the sampled tokens."""
    max_version: int
    """Newest policy version among the sampled tokens."""
    generate_s: float
    """Seconds of generation."""
    score_s: float
    """Seconds of scoring."""
    num_errors: int = 0
    """Rollouts left out of the group because their reward failed (exception, timeout or crash)."""
    first_error: str = ""
    """Error of the first of these rollouts; empty if there is none."""
    rejection: Rejection | None = None
    """Reason why the group must not be trained on, although it has rewards."""
    parts_differ: bool = False
    """True if the advantage compares the parts of the reward, or returns of turns or tokens, and one of them differs."""
    num_generated: int = 0
    """Tokens that the generators sampled for it, also those of completions without a reward or cut to fit a row."""
    num_segments: tuple[int, ...] = ()
    """Segments of each rollout; empty if each has one."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of its episodes, if an environment was used."""
    turns: GroupTurns | None = None
    """Its turns; None if each segment is one turn."""
    tokens: GroupTokens | None = None
    """Rewards of its tokens; None if no reward is one of tokens."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum of the numbers that the environment reported, and of how many rollouts, by name."""

    @property
    def has_signal(self) -> bool:
        """True if rewards differ, or parts of them or returns of turns or tokens that the advantage compares."""
        return self.parts_differ or len(set(self.rewards)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTotals:
    """Effect of an off-policy correction on a whole step, over all ranks and micro-batches."""

    mean_weight: float = 1.0
    """Mean of its weights."""
    kept_tokens_frac: float = 1.0
    """Share of the tokens that are not rejected."""
    kept_sequences_frac: float = 1.0
    """Share of the sequences with at least one token that is not rejected."""


NOT_MEASURED = CorrectionTotals()
"""Totals of a step whose correction needs none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Numerators of the loss metrics of one micro-batch; `num_tokens` among the sums is the denominator of the means."""

    sums: Mapping[str, float]
    """Weighted or counted sums, by metric name."""
    maxima: Mapping[str, float]
    """Maxima, by metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW options of one optimizer step. The defaults are Tinker's."""

    learning_rate: float = 1e-4
    """Step size."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-12
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 0.0
    """Largest global gradient norm; 0 disables clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimUpdate:
    """Result of an optimizer step."""

    version: int
    """Policy version after the step: the number of steps, each on one batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if a loss or the gradient was not finite. Weights and version are then unchanged."""
    busy_s: float = field(default=0.0, compare=False)
    """Seconds the trainer computed since the last optimizer step, including this one, without any waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Work of all generator replicas since the previous call."""

    num_tokens: int
    """Tokens of the completions that ended."""
    busy_s: float
    """Seconds of decoding, summed over replicas."""
    wall_s: float
    """Seconds elapsed, summed over replicas."""
    num_replicas: int
    """Generator replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Result of an evaluation."""

    task: str
    """Name of the evaluation set; the default set has that of the task."""
    version: int
    """Policy version that was evaluated."""
    mean: float
    """Mean over the prompts of their mean rewards."""
    num_prompts: int
    """Prompts in the evaluation."""
    response_len_mean: float
    """Mean length of the scored completions, in tokens."""
    num_errors: int = 0
    """Completions left out of both means because their reward failed."""
    first_error: str = ""
    """Error of the first of these completions; empty if there is none."""
    num_samples: int = 1
    """Completions per prompt."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Mean, avg@k and pass@k with the half-widths of their confidence intervals, by name in metrics."""
    is_pinned: bool = True
    """True if the same policy version sampled all tokens."""
    environment: Mapping[str, float] = field(default_factory=dict)
    """Means of the numbers that the environment reported, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step of the loop."""

    step: int
    """Steps taken in the run, including this one."""
    version: int
    """Policy version after the step."""
    values: Mapping[str, float]
    """Flat metrics; names in `docs/metrics.md`."""


for _carrier in (SamplingParams, GenerationRequest, GroupHandle, GroupRecord):
    pickle_fast(_carrier)


def _completion(token_ids: bytes, logprobs: bytes, versions: bytes, finish_reason: FinishReason, *optional: Any) -> Completion:
    prompt_logprobs, supports = optional
    return Completion(
        token_ids=np.frombuffer(token_ids, np.int32).astype(np.int64),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32).astype(np.int64),
        finish_reason=finish_reason,
        prompt_logprobs=prompt_logprobs,
        supports=supports,
    )


def _segment(token_ids: bytes, mask: bytes, logprobs: bytes, versions: bytes, supports: Supports | None = None) -> Segment:
    return Segment(
        token_ids=np.frombuffer(token_ids, np.int32).astype(np.int64),
        mask=np.frombuffer(mask, np.bool_),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32).astype(np.int64),
        supports=supports,
    )


def _reduce_completion(made: Completion) -> tuple[Any, ...]:
    arrays = int32_bytes(made.token_ids), float32_bytes(made.logprobs), int32_bytes(made.versions)
    return _completion, (*arrays, made.finish_reason, made.prompt_logprobs, made.supports)


def _reduce_segment(made: Segment) -> tuple[Any, ...]:
    mask = np.asarray(made.mask, np.bool_).tobytes()
    arrays = int32_bytes(made.token_ids), mask, float32_bytes(made.logprobs), int32_bytes(made.versions)
    return _segment, arrays if made.supports is None else (*arrays, made.supports)


# Pickling bytes is several times faster than pickling arrays.
copyreg.pickle(Completion, _reduce_completion)
copyreg.pickle(Segment, _reduce_segment)
