"""Carriers: immutable values that processes send to each other, and the training data of custom loops with its helpers.

Shape suffixes: G completions of a group, K segments of a group, P prompt tokens, T completion tokens, S tokens of a sequence
(prompt and completion), U turns of a group in segment order, E token rewards of a group. A loss token is a sampled token that
counts in the loss. Arrays are numpy, so that no reader needs torch.
"""

import copyreg
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from titanrl.base.arguments import check_count, check_list, check_number, check_type, checked_numbers, checked_tokens
from titanrl.base.pickling import float32_bytes, int32_bytes, pickle_fast
from titanrl.carriers.supports import ExpertIds, Supports, experts_bytes, experts_from, placed

if TYPE_CHECKING:
    from titanrl.config.algorithm import AlgorithmConfig
    from titanrl.config.sections import LearningRateDecay, SFTConfig

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
FinishReason = Literal["stop", "length", "abort"]
Outcome = Literal["environment_error", "timeout", "reward_error", "generation_error"]
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
    """Name of the task, as used in metric names."""
    text: str
    """The question, before the chat template is applied."""
    token_ids: tuple[int, ...] = field(repr=False)
    """Input tokens of the generator, `[P]`."""
    entry: Mapping[str, Any]
    """Data for the rewards: `question`, `answer`, `metadata`."""


TOLERANCE = 1e-9
"""Bound on the rounding error of a weighted sum of rewards, and of a mean of them."""


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
    """Minimum probability of a token relative to the most likely token; 0 disables the limit."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the completion, in addition to the model's stop tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion, which includes the token that completes the text. Special tokens count as their text."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return at each prompt token, beside the log-probability of the token itself; None returns
    neither."""
    supports: bool = False
    """True to also return the vocabulary entries that `top_p`, `top_k` and `min_p` keep for each token."""
    experts: bool = False
    """True to also return the experts that a mixture of experts chose for each token of prompt and completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for one completion."""

    token_ids: tuple[int, ...]
    """The prompt, `[P]`."""
    sampling: SamplingParams
    """Sampling options."""
    adapter: int | None = None
    """Number of a held LoRA adapter that samples, `BASE` for the model without one; None for the policy."""


BASE = 0
"""Number of no adapter, in requests to generators that hold adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Condition for adding the groups of a call to a generator's batch; all groups are added at the same engine step."""

    indices: tuple[int, ...] = ()
    """Prompt position of each group, if the groups belong to a round; a round's groups join together, in prompt order."""
    round_size: int = 0
    """Number of groups in the round at this generator, from all callers; 0 if the call does not belong to a round."""
    when_drained: bool = False
    """True if the groups wait until all earlier requests have finished; later requests queue behind them."""
    name: str = ""
    """Name of the call, by which its groups can be cancelled; empty if they cannot be."""
    streams: bool = False
    """True to get the tokens of groups with one request while they are sampled; never in a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of a generator."""

    num_requests: int
    """Unfinished requests."""
    num_queued: int
    """Requests waiting for batch or KV-cache space."""
    admits: bool = True
    """True if new requests can join the batch; False if they wait for new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """Most likely tokens at each position of a sequence, S positions with K tokens each."""

    token_ids: IntArray
    """Tokens, `[S, K]`."""
    logprobs: FloatArray
    """Log-probabilities of the tokens in nats, at temperature 1, `[S, K]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sampled completion, as returned by a generator.

    Example: `Completion(token_ids=[31, 7, 1], logprobs=[-0.1, -0.7, -0.0], versions=[4, 4, 4], finish_reason="stop")`
    """

    token_ids: IntArray
    """Sampled tokens, including the end-of-sequence token, `[T]`."""
    logprobs: FloatArray
    """Log-probability of each token under the sampling distribution (with temperature), in nats, `[T]`."""
    versions: IntArray
    """Policy version that sampled each token, `[T]`."""
    finish_reason: FinishReason
    """`stop`: ended by the policy; `length`: truncated at the length limit; `abort`: cancelled."""
    prompt_logprobs: FloatArray | None = None
    """Log-probability of each prompt token except the first, at temperature 1, if requested, `[P - 1]`."""
    prompt_top: TopTokens | None = None
    """Most likely tokens at each prompt token except the first, if requested."""
    supports: Supports | None = None
    """Support of each token's sampling distribution, over which `logprobs` are normalized, if requested, `[T]`."""
    experts: ExpertIds | None = None
    """Experts of the tokens of prompt and completion, if requested, `[P + T, layers, experts of a token]`. The last token has
    none, because the model did not compute it."""


OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Function that gets the next tokens of a completion, and their log-probabilities in nats, `[T]` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A training sequence that grew only by appending tokens, some of which the policy sampled.

    Example: prompt `[5, 6]`, completion `[7, 1]`: `token_ids=[5, 6, 7, 1]`, `mask=[F, F, T, T]`, `versions=[-1, -1, 4, 4]`.
    """

    token_ids: IntArray
    """Prompt, completion and later turns, `[S]`."""
    mask: BoolArray
    """True at tokens sampled by the policy, the only tokens to train on, `[S]`."""
    logprobs: FloatArray
    """Log-probability from the generator where `mask` is True, 0 elsewhere, `[S]`."""
    versions: IntArray
    """Policy version of each sampled token, -1 elsewhere, `[S]`."""
    supports: Supports | None = None
    """Support of each sampled token's distribution, the whole vocabulary elsewhere, `[S]`; None without truncated sampling."""
    experts: ExpertIds | None = None
    """Experts that the generator chose for each token, `[S, layers, experts of a token]`; None if they were not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy in a rollout; all its tokens are in one segment."""

    segment: int
    """Index of the segment in the rollout."""
    end: int
    """Index after the turn's last token in the segment."""
    reward: float
    """Reward of the turn. The last turn includes the reward of the whole episode, so turns add up to the rollout's reward."""
    state: int = 0
    """Hash of the environment's state in which the turn was taken, a signed integer of 64 bits; 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A finished episode with one reward. It has several segments if a turn did not only append to the previous tokens."""

    segments: tuple[Segment, ...]
    """Segments in temporal order. Each sampled token is in the mask of exactly one segment."""
    reward: float
    """Sum of all reward parts."""
    reward_parts: Mapping[str, float]
    """Reward by part, reported as `reward/<part>`."""
    finish_reason: FinishReason
    """Finish reason of the last completion."""
    turns: tuple[Turn, ...] = ()
    """Turns of the policy in temporal order; empty if each segment is one turn."""
    token_rewards: DoubleArray | None = None
    """Reward of each sampled token of all segments, which add up to `reward`; a turn's last token includes the turn's reward.
    None if no reward returned token rewards."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics reported by the environment, by name."""

    @property
    def sampled(self) -> Completion:
        """Tokens of all segments that the policy sampled, as one completion."""
        token_ids = np.concatenate([segment.token_ids[segment.mask] for segment in self.segments])
        logprobs = np.concatenate([segment.logprobs[segment.mask] for segment in self.segments])
        versions = np.concatenate([segment.versions[segment.mask] for segment in self.segments])
        return Completion(token_ids=token_ids, logprobs=logprobs, versions=versions, finish_reason=self.finish_reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFailure:
    """A rollout without a reward: reward or environment failed or timed out, or the completion was cancelled or is empty."""

    completion: Completion
    """Tokens that the policy sampled."""
    error: str
    """Exception type and message, or the reason why the scoring process died."""
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
    """Rollouts without a reward, which are excluded from advantages and loss."""
    conversations: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Chat messages of each rollout, if an environment was used."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counters of the group's episodes, if an environment was used; named in `titanrl.rollout.episodes`."""

    @property
    def rewards_differ(self) -> bool:
        """True if the rewards of the rollouts differ."""
        return len({rollout.reward for rollout in self.rollouts}) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHandle:
    """Location of a group's payload; stale once the location is claimed again."""

    shard: int
    """Rank of the storage shard."""
    location: int
    """Number of the location, unique over all shards. A group keeps it when its slot is freed for replay."""
    serial: int
    """Number of claims of the location, including this one, which distinguishes successive groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTurns:
    """Rewards and token counts of a group's turns.

    Example: two rollouts of one segment each, the first with two turns, the second with one: `GroupTurns(num_turns=(2, 1),
    rewards=(0.0, 1.0, 0.5), num_sampled=(3, 4, 6), states=(7, 9, 7))`
    """

    num_turns: tuple[int, ...]
    """Turns per segment, `[K]`."""
    rewards: tuple[float, ...]
    """Reward of each turn, `[U]`."""
    num_sampled: tuple[int, ...]
    """Loss tokens per turn, `[U]`."""
    states: tuple[int, ...]
    """State of each turn, `[U]`; see `Turn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTokens:
    """Token rewards of a group, in a sparse format without tokens that have no reward.

    Example: a rollout of five tokens with rewards at the second and the last, and a rollout of four tokens with a reward at the
    last: `GroupTokens(num_rewards=(2, 1), positions=(1, 4, 3), rewards=(0.5, 1.0, 0.25))`
    """

    num_rewards: tuple[int, ...]
    """Rewarded tokens per rollout, `[G]`."""
    positions: tuple[int, ...]
    """Index of each rewarded token among the loss tokens of its rollout, `[E]`."""
    rewards: tuple[float, ...]
    """Reward of each of these tokens, including the reward of its turn or of the rollout, `[E]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """The controller's record of a group, without tokens. Tuples have one entry per rollout, `[G]`, or per segment, `[K]`."""

    index: int
    """Position of the prompt in the stream."""
    task: str
    """Name of the task."""
    handle: GroupHandle
    """Location that was claimed for the payload, also if there is none."""
    has_payload: bool
    """False for a group without signal, whose tokens were never stored."""
    rewards: tuple[float, ...]
    """Summed reward of each rollout, `[G]`."""
    reward_parts: Mapping[str, tuple[float, ...]]
    """Rewards by part, `[G]`; NaN where a rollout lacks the part."""
    prompt_len: int
    """Length of the prompt, with which the first segment of every rollout starts, in tokens."""
    lengths: tuple[int, ...]
    """Tokens per segment, `[K]`."""
    num_sampled: tuple[int, ...]
    """Loss tokens per segment, which are sampled and have a finite log-probability, `[K]`."""
    num_truncated: int
    """Rollouts truncated at the length limit; `truncated` has their indices."""
    num_overlong: int
    """Rollouts longer than a packed row, which were truncated or excluded from training."""
    num_nonfinite: int
    """Sampled tokens without a finite log-probability; they are excluded from all counts."""
    min_version: int
    """Oldest policy version among the sampled tokens; -1 if there are none."""
    max_version: int
    """Newest policy version among the sampled tokens."""
    generate_s: float
    """Seconds of generation."""
    score_s: float
    """Seconds of scoring."""
    num_errors: int = 0
    """Rollouts excluded because they have no reward: it failed (exception, timeout, crash), or nothing was sampled."""
    first_error: str = ""
    """Error of the first of these rollouts; empty if there is none."""
    rejection: Rejection | None = None
    """Reason why the group must not be trained on, although it has rewards."""
    parts_differ: bool = False
    """True if the advantage compares reward parts, or returns of turns or tokens, and at least one of them differs."""
    num_generated: int = 0
    """Tokens sampled for the group, including completions without a reward and tokens cut to fit a row."""
    num_segments: tuple[int, ...] = ()
    """Segments per rollout, `[G]`; empty if each rollout has one."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counters of the group's episodes, if an environment was used."""
    turns: GroupTurns | None = None
    """Turns of the group; None if each segment is one turn."""
    tokens: GroupTokens | None = None
    """Token rewards of the group; None if no reward returned any."""
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum over rollouts and number of rollouts of each metric that the environment reported, by name."""
    truncated: tuple[int, ...] = ()
    """Indices of the rollouts truncated at the length limit."""
    prefixes: tuple[tuple[int, int], ...] = ()
    """Place of each segment in an order of the group's segments in which it shares most tokens with the one before it, and the
    number of its first tokens that it shares, none of them sampled, `[K, 2]`. With an earlier segment, it shares the least
    number of those between the two. Empty if the first segments of rollouts share the prompt, and nothing else is shared."""

    @property
    def rewards_differ(self) -> bool:
        """True if rewards differ, or reward parts or returns that the advantage compares (see `parts_differ`)."""
        return self.parts_differ or len(set(self.rewards)) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCorrection:
    """Effect of an off-policy correction on one rank's rows of a micro-batch."""

    dp_rank: int
    """Data-parallel rank."""
    weight: float
    """Sum of the correction weights of the kept tokens, or with sequence weights of the sequences with a kept token."""
    num_weights: int
    """Number of these weights."""
    counts: IntArray
    """Loss tokens of each sequence before and after rejection, in the order of the rows, `[S, 2]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValues:
    """The critic's values of the sequences of one rank's rows of a micro-batch, in the order of the rows."""

    dp_rank: int
    values: FloatArray
    """Value before each loss token, concatenated over sequences, float32."""
    last: FloatArray
    """Value after the last token of each sequence, float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Numerators of one micro-batch's loss metrics; the sum `num_tokens` is the denominator of the means."""

    sums: Mapping[str, float]
    """Weighted or counted sums, by metric name."""
    maxima: Mapping[str, float]
    """Maxima, by metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamParams:
    """AdamW options of one optimizer step, with Tinker's defaults."""

    learning_rate: float = 1e-4
    """Learning rate."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-12
    """Term added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 0.0
    """Global gradient norm to clip to; 0 disables clipping."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            TypeError: One is not a number.
            ValueError: One is not finite, or out of range.
        """
        for name in ("learning_rate", "eps", "weight_decay", "max_grad_norm"):
            check_number(f"AdamParams.{name}", getattr(self, name), "AdamParams() has the defaults.", least=0.0)
        for name in ("beta1", "beta2"):
            check_number(f"AdamParams.{name}", getattr(self, name), "AdamParams() has the defaults.", least=0.0, below=1.0)

    @classmethod
    def at_step(
        cls, options: "AlgorithmConfig | SFTConfig", step: int, num_steps: int, *, rate: float | None = None
    ) -> "AdamParams":
        """Return the options of training step `step` of `num_steps`, counted from 0, by a section of the configuration.

        `rate` replaces the learning rate of the schedule.
        """
        if rate is None:
            rate = learning_rate(
                step,
                peak=options.learning_rate,
                num_warmup_steps=options.num_warmup_steps,
                decay=options.lr_decay,
                num_steps=num_steps,
                num_decay_steps=options.num_decay_steps,
            )
        return cls(
            learning_rate=rate,
            beta1=options.betas[0],
            beta2=options.betas[1],
            eps=options.eps,
            weight_decay=options.weight_decay,
            max_grad_norm=options.max_grad_norm,
        )


def learning_rate(
    step: int,
    *,
    peak: float,
    num_warmup_steps: int,
    decay: "LearningRateDecay",
    num_steps: int,
    num_decay_steps: int | None = None,
) -> float:
    """Return the learning rate of training step `step`, counted from 0; it may take several optimizer steps.

    During warm-up the rate increases linearly to `peak`. Then it stays constant or decreases to 0 at step `num_steps`, linearly
    or as half a period of the cosine (SGDR, arXiv:1608.03983). With `num_decay_steps`, it is constant before these last steps
    (warmup-stable-decay, arXiv:2404.06395).
    """
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    first = num_warmup_steps if num_decay_steps is None else max(num_steps - num_decay_steps, num_warmup_steps)
    if decay == "constant" or step < first:
        return peak
    num_left, num_all = max(num_steps - step, 0), max(num_steps - first, 1)
    return peak * num_left / num_all if decay == "linear" else peak * (1.0 - math.cos(math.pi * num_left / num_all)) / 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """LoRA adapter of a model that shares its base with others."""

    rank: int
    """Rank, at most `trainer.lora.rank`."""
    alpha: float
    seed: int | None = None
    """Seed of the initial values; None uses that of the run."""
    train_attn: bool = True
    """True if the projections of attention are trained."""
    train_mlp: bool = True
    """True if the projections of the feed-forward layers are trained."""

    @property
    def scale(self) -> float:
        """Factor of the adapter's output."""
        return self.alpha / self.rank

    @property
    def targets(self) -> tuple[Literal["attention", "mlp"], ...]:
        """Trained layers, named as in `trainer.lora.targets`."""
        return (*(("attention",) if self.train_attn else ()), *(("mlp",) if self.train_mlp else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimUpdate:
    """Result of an optimizer step."""

    version: int
    """Policy version after the step: the number of steps, each on one batch, without the skipped ones."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if a loss or the gradient was not finite. The weights are then unchanged. The version still increases if this step
    completes a batch of which an earlier step was not skipped."""
    is_empty: bool = False
    """True if the gradient was 0. Weights and optimizer state are then unchanged, but the step counts."""
    experts: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the load of the experts over the passes since the previous step; empty for a dense model."""
    critic: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the critic's optimizer step; empty without a critic."""
    busy_s: float = field(default=0.0, compare=False)
    """Seconds of trainer computation since the previous optimizer step, including this step, excluding waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Work of all generator replicas since the previous call."""

    num_tokens: int
    """Tokens in finished completions."""
    busy_s: float
    """Seconds of decoding, summed over replicas."""
    wall_s: float
    """Elapsed seconds, summed over replicas."""
    num_replicas: int
    """Number of generator replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Result of an evaluation."""

    task: str
    """Name of the evaluation set; the default set is named after the task."""
    version: int
    """Evaluated policy version."""
    mean: float
    """Mean over prompts of each prompt's mean reward."""
    num_prompts: int
    """Number of evaluated prompts."""
    response_len_mean: float
    """Mean length of the scored completions, in tokens."""
    num_errors: int = 0
    """Completions excluded from both means because their reward failed."""
    first_error: str = ""
    """Error of the first of these completions; empty if there is none."""
    num_truncated: int = 0
    """Completions or episodes that a limit ended."""
    num_unjudged: int = 0
    """Truncated episodes with `data.environment.truncated_reward`, because their environment did not judge them."""
    num_samples: int = 1
    """Completions per prompt."""
    num_unscored_prompts: int = 0
    """Prompts excluded from the means because the reward of all their completions failed."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Mean, avg@k and pass@k, with the half-widths of their confidence intervals, by metric name."""
    is_pinned: bool = True
    """True if the same policy version sampled all tokens."""
    environment: Mapping[str, float] = field(default_factory=dict)
    """Means of the metrics that the environment reported, by name."""

    @property
    def num_completions(self) -> int:
        """Number of sampled completions, including those whose reward failed."""
        return self.num_prompts * self.num_samples

    @property
    def failures(self) -> str:
        """Description of the completions and prompts that are missing from the means; empty if none are."""
        if not self.num_errors:
            return ""
        scored = self.num_prompts - self.num_unscored_prompts
        of = f"mean over {scored} of {self.num_prompts} prompts"
        return f"{self.num_errors} of {self.num_completions} completions have no reward; {of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step of the loop."""

    step: int
    """Number of steps taken in the run, including this one."""
    version: int
    """Policy version after the step."""
    values: Mapping[str, float]
    """Values by metric name; docs/metrics.md lists the names."""

    def __repr__(self) -> str:
        main = ("reward/mean", "loss/train", "policy/kl_teacher", "time/step_s")
        shown = [f"{name}={self.values[name]:.4g}" for name in main if name in self.values]
        text = ", ".join([*shown, f"{len(self.values) - len(shown)} more values"])
        return f"<StepMetrics step={self.step} version={self.version}: {text}>"


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """A training sequence in Tinker's format. Targets are already shifted, and all arrays are `[S]`.

    Example: for tokens `[5, 6, 7, 1]`, the last two of which were sampled, `model_input=[5, 6, 7]` and
    `loss_fn_inputs={"target_tokens": [6, 7, 1], "logprobs": [0, -0.1, -0.7], "advantages": [0, 1.5, 1.5]}`; with the loss
    `cross_entropy`, `loss_fn_inputs={"target_tokens": [6, 7, 1], "weights": [0, 1, 1]}`.
    """

    model_input: IntArray
    """Input tokens of the model."""
    loss_fn_inputs: Mapping[str, IntArray | FloatArray]
    """Inputs of the loss: `target_tokens` (the token after each input token), `weights` (loss weights, 1 by default),
    `logprobs` (from the sampler) and `advantages`."""
    supports: Supports | None = None
    """Supports of the sampling distributions, if sampling was truncated; the trainer normalizes over the same tokens."""
    experts: ExpertIds | None = None
    """Experts that the generator of a mixture of experts chose for the input tokens, `[S, layers, experts of a token]`; used
    with `trainer.routing: compared` or `replayed`."""
    teacher_input: IntArray | None = None
    """Input tokens of the teacher, for a loss that compares with it: another prompt, and the same completion at the end."""
    teacher_top: TopTokens | None = None
    """Most likely tokens of another model at the last targets, `[T, K]`, for the loss `forward_kl`. If any datum has them, no
    other teacher is computed, and data without them have no divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataResult:
    """Results of one rank's share of the data. Only one of the ranks with the same share reports them."""

    logprobs: Mapping[int, FloatArray]
    """Log-probabilities of the targets by index of the datum, `[S]` each."""
    sums: tuple[LossSums, ...]
    version: int
    """Policy version of the weights that were used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardOutput:
    """Result of a forward or forward-backward pass."""

    loss_fn_outputs: tuple[Mapping[str, FloatArray], ...] = field(repr=False)
    """Outputs of each datum, in input order: `logprobs` of its targets, `[S]`."""
    metrics: Mapping[str, float]
    """Metrics; the suffix of a name is the reduction, as in `loss:sum`."""
    version: int
    """Policy version that computed them."""


def sampled_datum(
    prompt: Sequence[int] | IntArray,
    tokens: Sequence[int] | IntArray,
    logprobs: Sequence[float] | FloatArray,
    advantage: float | Sequence[float] | FloatArray,
    weight: float = 1.0,
    supports: Supports | None = None,
    experts: ExpertIds | None = None,
) -> Datum:
    """Build the datum of a sampled completion for a policy loss such as `ppo` or `importance_sampling`.

    Args:
        prompt: Prompt tokens, `[P]`; their loss weight is 0.
        tokens: Sampled tokens, `[T]`.
        logprobs: Log-probability of each sampled token under the policy that sampled it, `[T]`.
        advantage: Advantage of the completion, or of each of its tokens, `[T]`.
        weight: Loss weight of each sampled token, such as 1 / number of tokens in the batch for a mean.
        supports: Support of each sampled token, `[T]`, if sampling was truncated.
        experts: Experts of the tokens of prompt and completion, `[P + T, ...]`, if they were recorded.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are no tokens, or another number of values than tokens.
    """
    prompt, tokens = checked_tokens("prompt", prompt), checked_tokens("tokens", tokens)
    fix = "Give one number per sampled token."
    by_token = {"logprobs": checked_numbers("logprobs", logprobs, fix)}
    if isinstance(advantage, Real):
        check_number("advantage", advantage, "Check the rewards.")
        by_token["advantages"] = np.full(len(tokens), advantage)
    else:
        by_token["advantages"] = checked_numbers("advantage", advantage, "Give one number, or one per sampled token.")
    check_number("weight", weight, "Give a number such as 1.")
    for name, values in by_token.items():
        if len(values) != len(tokens):
            raise ValueError(f"{name}: must have one value per token, {len(tokens)} (got {len(values)}). {fix}")
    inputs = {name: values.astype(np.float32) for name, values in by_token.items()}
    datum = _datum(prompt, tokens, {**inputs, "weights": np.full(len(tokens), weight, np.float32)})
    if supports is not None:
        datum = replace(datum, supports=placed([(len(prompt) - 1, supports)], len(prompt) - 1 + len(supports)))
    return datum if experts is None else replace(datum, experts=experts[: len(datum.model_input)])


def supervised_datum(prompt: Sequence[int] | IntArray, tokens: Sequence[int] | IntArray, weight: float = 1.0) -> Datum:
    """Build the datum of a prompt and the answer to learn, for the loss `cross_entropy`.

    Args:
        prompt: Prompt tokens, `[P]`; their loss weight is 0.
        tokens: Answer tokens, `[T]`.
        weight: Loss weight of each answer token.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are no tokens.
    """
    prompt, tokens = checked_tokens("prompt", prompt), checked_tokens("tokens", tokens)
    check_number("weight", weight, "Give a number such as 1.")
    return _datum(prompt, tokens, {"weights": np.full(len(tokens), weight, np.float32)})


def batches(items: Sequence[T], size: int, *, seed: int = 0, num_epochs: int | None = None) -> Iterator[list[T]]:
    """Yield batches of `size` items, reshuffled every epoch. An incomplete last batch of an epoch is dropped.

    Args:
        items: Items to batch.
        size: Number of items per batch.
        seed: Seed of the order.
        num_epochs: Number of epochs; None repeats forever.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are fewer than `size` items.
    """
    check_list("items", items, "data", "Give a list.")
    check_count("size", size, "Give the number of items per batch.")
    check_count("seed", seed, "Give an integer such as 0.", least=0)
    if num_epochs is not None:
        check_count("num_epochs", num_epochs, "None repeats forever.", least=0)
    if len(items) < size:
        raise ValueError(f"size: must not exceed the number of items (got {size} of {len(items)}). Lower size, or add items.")
    return _batches(items, size, seed, num_epochs)


def check_data(data: object, name: str = "data") -> None:
    """Check that data can be trained on, as far as that does not depend on the model and the loss.

    Raises:
        TypeError: It is not a list of `Datum`, or a datum has an array of another type.
        ValueError: An array has another length than the input.
    """
    fix = "Build data with titanrl.sampled_datum or titanrl.supervised_datum."
    for index, datum in enumerate(check_list(name, data, "Datum", fix)):
        check_type(f"{name}[{index}]", datum, Datum, "a Datum", fix)
        length = len(checked_tokens(f"{name}[{index}].model_input", datum.model_input))
        where = f"{name}[{index}].loss_fn_inputs"
        check_type(where, datum.loss_fn_inputs, Mapping, "a mapping of names to arrays", fix)
        for key, values in datum.loss_fn_inputs.items():
            if key == "target_tokens":
                num_values = len(checked_tokens(f"{where}[{key!r}]", values))
            else:
                num_values = len(checked_numbers(f"{where}[{key!r}]", values, "Give one number per input token."))
            if num_values != length:
                fix_length = f"Give one value per input token: ({length},)."
                raise ValueError(f"{where}[{key!r}]: wrong shape (got ({num_values},)). {fix_length}")


def _batches(items: Sequence[T], size: int, seed: int, num_epochs: int | None) -> Iterator[list[T]]:
    epoch = 0
    while num_epochs is None or epoch < num_epochs:
        order = np.random.default_rng((seed, epoch)).permutation(len(items))
        for start in range(0, len(items) - size + 1, size):
            yield [items[index] for index in order[start : start + size]]
        epoch += 1


def _datum(prompt: Sequence[int] | IntArray, tokens: Sequence[int] | IntArray, after_prompt: Mapping[str, FloatArray]) -> Datum:
    """Build a datum: shift prompt and tokens by one, and pad the per-token inputs with zeros at the prompt."""
    if not (len(prompt) and len(tokens)):
        raise ValueError(
            f"prompt, tokens: must not be empty (got {len(prompt)} and {len(tokens)} tokens). Leave the datum out."
        )
    sequence = np.concatenate([np.asarray(prompt, np.int64), np.asarray(tokens, np.int64)])
    zeros = np.zeros(len(prompt) - 1, np.float32)
    inputs = {name: np.concatenate([zeros, values]) for name, values in after_prompt.items()}
    return Datum(model_input=sequence[:-1], loss_fn_inputs={"target_tokens": sequence[1:], **inputs})


for _carrier in (SamplingParams, GenerationRequest, GroupHandle, GroupRecord):
    pickle_fast(_carrier)


def _completion(token_ids: bytes, logprobs: bytes, versions: bytes, finish_reason: FinishReason, *optional: Any) -> Completion:
    prompt_logprobs, prompt_top, supports, experts = optional
    return Completion(
        token_ids=np.frombuffer(token_ids, np.int32).astype(np.int64),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32).astype(np.int64),
        finish_reason=finish_reason,
        prompt_logprobs=prompt_logprobs,
        prompt_top=prompt_top,
        supports=supports,
        experts=None if experts is None else experts_from(*experts),
    )


def _segment(
    token_ids: bytes,
    mask: bytes,
    logprobs: bytes,
    versions: bytes,
    supports: Supports | None = None,
    experts: tuple[Any, ...] | None = None,
) -> Segment:
    return Segment(
        token_ids=np.frombuffer(token_ids, np.int32).astype(np.int64),
        mask=np.frombuffer(mask, np.bool_),
        logprobs=np.frombuffer(logprobs, np.float32),
        versions=np.frombuffer(versions, np.int32).astype(np.int64),
        supports=supports,
        experts=None if experts is None else experts_from(*experts),
    )


def _reduce_completion(value: Completion) -> tuple[Any, ...]:
    arrays = int32_bytes(value.token_ids), float32_bytes(value.logprobs), int32_bytes(value.versions)
    optional = value.prompt_logprobs, value.prompt_top, value.supports, experts_bytes(value.experts)
    return _completion, (*arrays, value.finish_reason, *optional)


def _reduce_segment(value: Segment) -> tuple[Any, ...]:
    mask = np.asarray(value.mask, np.bool_).tobytes()
    arrays = int32_bytes(value.token_ids), mask, float32_bytes(value.logprobs), int32_bytes(value.versions)
    if value.experts is not None:
        return _segment, (*arrays, value.supports, experts_bytes(value.experts))
    return _segment, arrays if value.supports is None else (*arrays, value.supports)


# Pickling bytes is several times faster than pickling arrays.
copyreg.pickle(Completion, _reduce_completion)
copyreg.pickle(Segment, _reduce_segment)
