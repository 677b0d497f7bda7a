"""The carriers: what moves between processes, complete at birth and never changed.

Shape suffixes: G completions of a group, P prompt tokens, T completion tokens, S tokens of a whole sequence (prompt and
completion). Arrays are numpy, so that reading a carrier needs no torch.
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
    """A question put to the policy.

    Example: `Prompt(index=17, task="chain_sum", text="... 7 + 5 - 3 =", token_ids=[97, 22, ...], entry={"answer": "9", ...})`
    """

    index: int
    """Position in the prompt stream."""
    task: str
    """Name of the task, as metrics carry it."""
    text: str
    """The question, before any chat template."""
    token_ids: tuple[int, ...]
    """What the generator is given, `[P]`."""
    entry: Mapping[str, Any]
    """What the task's verifier needs: `question`, `answer`, `metadata`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one completion is drawn."""

    max_new_tokens: int
    """Longest completion, in tokens."""
    temperature: float
    """0 is greedy."""
    seed: int | None
    """Seed of this completion; None with greedy sampling."""
    top_p: float = 1.0
    """Only the likeliest tokens with this much probability together are drawn; 1 is all."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn; 0 is all."""
    min_p: float = 0.0
    """Only tokens with this share of the likeliest token's probability are drawn; 0 is all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion asked of a generator."""

    token_ids: tuple[int, ...]
    """The prompt, `[P]`."""
    sampling: SamplingParams
    """How to draw it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy a generator is."""

    num_requests: int
    """Requests it has not finished."""
    num_queued: int
    """Those of them that wait for a place in its batch or its KV cache."""
    admits: bool = True
    """Whether requests that come now join its batch; else they wait for weights that are on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the generator answers.

    Example: `Completion(token_ids=[31, 7, 1], logprobs=[-0.1, -0.7, -0.0], versions=[4, 4, 4], finish_reason="stop")`
    """

    token_ids: IntArray
    """Sampled tokens, the end-of-sequence token included, `[T]`."""
    logprobs: FloatArray
    """Log-probability of each token under the sampling distribution, temperature included, in nats, `[T]`."""
    versions: IntArray
    """Policy version that made each token, `[T]`."""
    finish_reason: FinishReason
    """`stop`: the policy ended it; `length`: cut at the limit; `abort`: taken back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One finished trajectory as the trainer sees it: a sequence of tokens, some of them sampled by the policy.

    Example: prompt `[5, 6]`, completion `[7, 1]`: `token_ids=[5, 6, 7, 1]`, `mask=[F, F, T, T]`, `versions=[-1, -1, 4, 4]`.
    """

    token_ids: IntArray
    """Prompt and completion, `[S]`."""
    mask: BoolArray
    """True at tokens the policy sampled; only these are trained on, `[S]`."""
    logprobs: FloatArray
    """Generator's log-probability where `mask` is true, 0 elsewhere, `[S]`."""
    versions: IntArray
    """Policy version of each sampled token, -1 elsewhere, `[S]`."""
    reward: float
    """What the verifier says, all parts summed."""
    reward_parts: Mapping[str, float]
    """The reward by part, as metrics carry it: `reward/<part>`."""
    finish_reason: FinishReason
    """How the last completion ended."""


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
    """Where the payload of a group lies; stale once the slot has been used again."""

    shard: int
    """Rank of the storage shard."""
    slot: int
    """Slot of the buffer."""
    serial: int
    """Number of times the slot had been reserved, this reservation included; tells its tenants apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What the controller knows of a group: numbers, no tokens. Lists are aligned with the group's rollouts, `[G]`."""

    index: int
    """Position of its prompt in the stream."""
    task: str
    """Name of the task."""
    handle: GroupHandle
    """Slot it holds, and payload if it has one."""
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
    """Tokens that count in the loss (sampled, with a finite log-probability)."""
    num_truncated: int
    """Rollouts cut at the length limit."""
    num_overlong: int
    """Rollouts longer than a packed row, which were cut to it or left out of training."""
    num_nonfinite: int
    """Sampled tokens without a finite log-probability, which count nowhere."""
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
    """One rollout's place in the optimizer step."""

    handle: GroupHandle
    """Where its group lies."""
    rollout: int
    """Which of the group's rollouts."""
    length: int
    """Tokens of the sequence."""
    advantage: float
    """A_i, the same for every token of the rollout."""
    weight: float
    """w_i, the loss weight of each of its sampled tokens, from the step's global counts."""
    num_shared: int = 0
    """Tokens at its start that stand only once in its row, in the sequence of the same group before it."""

    @property
    def num_placed(self) -> int:
        """Tokens that it takes up in its row."""
        return self.length - self.num_shared


Row = tuple[SequencePlan, ...]
"""Sequences packed one after another into one row of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTotals:
    """What an off-policy correction does over a whole step, all ranks and micro-batches; by default nothing."""

    mean_weight: float = 1.0
    """Mean of its weights."""
    kept_tokens_frac: float = 1.0
    """Share of the tokens that are not rejected."""
    kept_sequences_frac: float = 1.0
    """Share of the sequences that keep a token."""


NOT_MEASURED = CorrectionTotals()
"""Of a step whose correction needs no totals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Numerators of the loss metrics of one micro-batch; `num_tokens` among the sums is what means are divided by."""

    sums: Mapping[str, float]
    """Weighted or counted sums, by metric name."""
    maxima: Mapping[str, float]
    """Maxima, by metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence of a caller's own, as Tinker has it: targets are shifted already, all arrays are `[S]`.

    Example: tokens `[5, 6, 7, 1]` with the last two sampled: `model_input=[5, 6, 7]`, `loss_fn_inputs={"target_tokens":
    [6, 7, 1], "logprobs": [0, -0.1, -0.7], "advantages": [0, 1.5, 1.5]}`; for `cross_entropy` `{"target_tokens": [6, 7, 1],
    "weights": [0, 1, 1]}`.
    """

    model_input: IntArray
    """What the model reads."""
    loss_fn_inputs: Mapping[str, IntArray | FloatArray]
    """`target_tokens`, the token that follows each place, and what the loss needs: `weights` (each token's loss weight, 1 if
    not given), `logprobs` (the sampler's) and `advantages`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """What a pass over data answers."""

    loss_fn_outputs: tuple[Mapping[str, FloatArray], ...]
    """For each datum, in the order given: `logprobs` of its targets, `[S]`."""
    metrics: Mapping[str, float]
    """Named after how they combine, `loss:sum` and the like."""
    version: int
    """Policy version that computed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """What the optimizer uses for one step."""

    learning_rate: float
    """Step size."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the denominator."""
    weight_decay: float
    """Decoupled decay."""
    max_grad_norm: float
    """Global norm that gradients are clipped to; 0 switches clipping off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimUpdate:
    """Result of an optimizer step."""

    version: int
    """Policy version now: the number of steps taken."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if the gradient was not finite: weights and version are unchanged."""
    busy_s: float = field(default=0.0, compare=False)
    """Seconds the trainer computed since the last optimizer step, this one included; waiting is not counted."""


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
    """Greedy answers to held-out prompts."""

    task: str
    """Name of the task."""
    version: int
    """Policy version that answered."""
    mean: float
    """Mean reward."""
    num_prompts: int
    """Prompts answered."""
    response_len_mean: float
    """Mean length of the scored completions, in tokens."""
    num_errors: int = 0
    """Completions left out of both means because their scorer failed."""
    first_error: str = ""
    """Error of the first of these completions; empty if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one step of the loop reports."""

    step: int
    """Steps taken in the run, this one included."""
    version: int
    """Policy version after the step."""
    values: Mapping[str, float]
    """Flat metrics; names in `docs/metrics.md`."""


def _filled(carrier: type[Any], *values: object) -> Any:
    """A carrier with its fields in order, without its constructor."""
    made = object.__new__(carrier)
    for name, value in zip(carrier.__slots__, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _pickle_fast(carrier: type[Any]) -> None:
    """Pickle a carrier by a C-level look at its slots: what dataclasses do instead takes twice as long, for each object."""
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
    """Token ids and versions stay far below 2^31, and half as many bytes are sent and kept."""
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


# Bytes are pickled several times faster than arrays.
copyreg.pickle(Completion, _reduce_completion)
copyreg.pickle(Rollout, _reduce_rollout)
