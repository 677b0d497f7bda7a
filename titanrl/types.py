"""The carriers: immutable values that processes send to each other.

Shape suffixes: G completions of a group, P prompt tokens, T completion tokens, S tokens of a whole sequence (prompt and
completion). Arrays are numpy, so reading a carrier does not need torch.
"""

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort"]


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
    """Data for the task's scorer: `question`, `answer`, `metadata`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion."""

    token_ids: tuple[int, ...]
    """The prompt, `[P]`."""
    sampling: SamplingParams
    """Sampling options."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished trajectory for the trainer: a sequence of tokens, some of them sampled by the policy.

    Example: prompt `[5, 6]`, completion `[7, 1]`: `token_ids=[5, 6, 7, 1]`, `mask=[F, F, T, T]`, `versions=[-1, -1, 4, 4]`.
    """

    token_ids: IntArray
    """Prompt and completion, `[S]`."""
    mask: BoolArray
    """True at tokens the policy sampled, the only ones to train on, `[S]`."""
    logprobs: FloatArray
    """Log-probability from the generator where `mask` is true, 0 elsewhere, `[S]`."""
    versions: IntArray
    """Policy version of each sampled token, -1 elsewhere, `[S]`."""
    reward: float
    """Sum of all parts of the reward."""
    reward_parts: Mapping[str, float]
    """Reward by part, reported as `reward/<part>`."""
    finish_reason: FinishReason
    """Reason why the last completion ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFailure:
    """A completion whose scorer raised, timed out or crashed."""

    completion: Completion
    """The completion that has no reward."""
    error: str
    """Exception type and message, or the reason why the scoring process ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt."""

    prompt: Prompt
    """The question."""
    rollouts: tuple[Rollout, ...]
    """Scored rollouts, `[G]`; empty if the scorer failed on every completion."""
    generate_s: float
    """Seconds from the first request to the last completion."""
    score_s: float
    """Seconds spent scoring."""
    failures: tuple["ScorerFailure", ...] = ()
    """Completions without a reward. They are left out of the group: they enter neither advantages nor the loss."""

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
    """The controller's view of a group: numbers, no tokens. Lists are aligned with the group's rollouts, `[G]`."""

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
    """Reward by part."""
    prompt_len: int
    """Prompt tokens."""
    lengths: tuple[int, ...]
    """Tokens of each whole sequence."""
    num_sampled: tuple[int, ...]
    """Tokens that count in the loss: sampled, with a finite log-probability."""
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
    """Rollouts left out of the group because their scorer failed (exception, timeout or crash)."""
    first_error: str = ""
    """Error of the first of these rollouts; empty if there is none."""

    @property
    def has_signal(self) -> bool:
        """True if rewards differ."""
        return len(set(self.rewards)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlan:
    """One rollout's part in the optimizer step."""

    handle: GroupHandle
    """Location of its group."""
    rollout: int
    """Index in the group."""
    length: int
    """Tokens of the sequence."""
    advantage: float
    """A_i, the same for every token of the rollout."""
    weight: float
    """w_i, the loss weight of each of its sampled tokens, from the step's global counts."""
    num_shared: int = 0
    """Tokens at its start that its row stores only once, in the preceding sequence of the same group."""

    @property
    def num_placed(self) -> int:
        """Tokens that it occupies in its row."""
        return self.length - self.num_shared


Row = tuple[SequencePlan, ...]
"""Sequences packed one after another into one row of tokens."""


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
class Datum:
    """A sequence from the user, in Tinker's format: targets are already shifted, all arrays are `[S]`.

    Example: tokens `[5, 6, 7, 1]` with the last two sampled: `model_input=[5, 6, 7]`, `loss_fn_inputs={"target_tokens":
    [6, 7, 1], "logprobs": [0, -0.1, -0.7], "advantages": [0, 1.5, 1.5]}`; for `cross_entropy` `{"target_tokens": [6, 7, 1],
    "weights": [0, 1, 1]}`.
    """

    model_input: IntArray
    """Input tokens of the model."""
    loss_fn_inputs: Mapping[str, IntArray | FloatArray]
    """`target_tokens`, the token that follows each input token, and the inputs of the loss: `weights` (loss weights, 1 by
    default), `logprobs` (of the sampler) and `advantages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of a pass over data."""

    loss_fn_outputs: tuple[Mapping[str, FloatArray], ...]
    """Outputs of each datum, in the order of the data: `logprobs` of its targets, `[S]`."""
    metrics: Mapping[str, float]
    """Metrics; the suffix of a name is its reduction, as in `loss:sum`."""
    version: int
    """Policy version that computed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW options of one optimizer step."""

    learning_rate: float
    """Step size."""
    beta1: float
    """Decay rate of the first moment."""
    beta2: float
    """Decay rate of the second moment."""
    eps: float
    """Term added to the denominator."""
    weight_decay: float
    """Decoupled weight decay."""
    max_grad_norm: float
    """Largest global gradient norm; 0 disables clipping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimUpdate:
    """Result of an optimizer step."""

    version: int
    """Policy version after the step: the number of steps taken."""
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
    """Mean reward of greedy completions of held-out prompts."""

    task: str
    """Name of the task."""
    version: int
    """Policy version that was evaluated."""
    mean: float
    """Mean reward."""
    num_prompts: int
    """Prompts in the evaluation."""
    response_len_mean: float
    """Mean length of the scored completions, in tokens."""
    num_errors: int = 0
    """Completions left out of both means because their scorer failed."""
    first_error: str = ""
    """Error of the first of these completions; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step of the loop."""

    step: int
    """Steps taken in the run, including this one."""
    version: int
    """Policy version after the step."""
    values: Mapping[str, float]
    """Flat metrics; names in `docs/metrics.md`."""


def _filled(carrier: type[Any], *values: object) -> Any:
    """Make a carrier from its fields in order, without calling its constructor."""
    made = object.__new__(carrier)
    for name, value in zip(carrier.__slots__, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _pickle_fast(carrier: type[Any]) -> None:
    """Register a C-level reduction of a carrier's slots, which takes half the time of the one that dataclasses generate."""
    fields = attrgetter(*carrier.__slots__)

    def reduced(made: Any) -> tuple[Any, ...]:
        return _filled, (carrier, *fields(made))

    copyreg.pickle(carrier, reduced)


for _carrier in (SamplingParams, GenerationRequest, GroupHandle, GroupRecord, SequencePlan):
    _pickle_fast(_carrier)


def _completion(token_ids: bytes, logprobs: bytes, versions: bytes, finish_reason: FinishReason) -> Completion:
    return Completion(
        token_ids=np.frombuffer(token_ids, np.int32).astype(np.int64),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32).astype(np.int64),
        finish_reason=finish_reason,
    )


def _rollout(
    token_ids: bytes,
    mask: bytes,
    logprobs: bytes,
    versions: bytes,
    reward: float,
    reward_parts: Mapping[str, float],
    finish_reason: FinishReason,
) -> Rollout:
    return Rollout(
        token_ids=np.frombuffer(token_ids, np.int32).astype(np.int64),
        mask=np.frombuffer(mask, np.bool_),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32).astype(np.int64),
        reward=reward,
        reward_parts=reward_parts,
        finish_reason=finish_reason,
    )


def _narrow(values: IntArray) -> bytes:
    """Return int32 bytes. Token ids and versions are far below 2^31, so this halves the bytes sent and stored."""
    return values.astype(np.int32).tobytes()


def _float_bytes(values: FloatArray) -> bytes:
    return np.asarray(values, np.float32).tobytes()


def _reduce_completion(made: Completion) -> tuple[Any, ...]:
    arrays = _narrow(made.token_ids), _float_bytes(made.logprobs), _narrow(made.versions)
    return _completion, (*arrays, made.finish_reason)


def _reduce_rollout(made: Rollout) -> tuple[Any, ...]:
    mask = np.asarray(made.mask, np.bool_).tobytes()
    arrays = _narrow(made.token_ids), mask, _float_bytes(made.logprobs), _narrow(made.versions)
    return _rollout, (*arrays, made.reward, made.reward_parts, made.finish_reason)


# Pickling bytes is several times faster than pickling arrays.
copyreg.pickle(Completion, _reduce_completion)
copyreg.pickle(Rollout, _reduce_rollout)
