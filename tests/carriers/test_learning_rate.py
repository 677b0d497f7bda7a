from functools import partial

import pytest

from titanrl.carriers.types import learning_rate
from titanrl.config.sections import LearningRateDecay


def rates(decay: LearningRateDecay, *, num_warmup_steps: int, num_steps: int) -> list[float]:
    return [
        learning_rate(step, peak=1.0, num_warmup_steps=num_warmup_steps, decay=decay, num_steps=num_steps)
        for step in range(num_steps)
    ]


def test_rate_rises_linearly_and_then_stays_constant() -> None:
    assert rates("constant", num_warmup_steps=4, num_steps=6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_zero_one_step_after_last() -> None:
    assert rates("linear", num_warmup_steps=2, num_steps=6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_first_step_without_warm_up_is_at_peak() -> None:
    assert rates("linear", num_warmup_steps=0, num_steps=2) == [1.0, 0.5]


def test_run_shorter_than_warm_up_never_reaches_peak() -> None:
    assert rates("linear", num_warmup_steps=4, num_steps=2) == [0.25, 0.5]


def test_cosine_decay_is_half_a_period_from_the_end_of_the_warm_up() -> None:
    # (1 + cos(pi progress)) / 2 at progress 0, 1/4, 1/2, 3/4.
    expected = [0.5, 1.0, 1.0, 0.5 + 0.5**0.5 / 2, 0.5, 0.5 - 0.5**0.5 / 2]
    assert rates("cosine", num_warmup_steps=2, num_steps=6) == pytest.approx(expected)


def test_rate_is_constant_before_the_decay_steps() -> None:
    rate = partial(learning_rate, peak=1.0, num_warmup_steps=2, num_steps=8)
    linear = [rate(step, decay="linear", num_decay_steps=4) for step in range(8)]
    assert linear == [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = [rate(step, decay="cosine", num_decay_steps=2) for step in range(8)]
    assert cosine == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5])
    assert [rate(step, decay="linear", num_decay_steps=20) for step in range(8)] == rates(
        "linear", num_warmup_steps=2, num_steps=8
    )


@pytest.mark.parametrize(("decay", "rate"), [("constant", 1.0), ("linear", 0.0), ("cosine", 0.0)])
def test_steps_past_end_keep_last_rate(decay: LearningRateDecay, rate: float) -> None:
    assert learning_rate(9, peak=1.0, num_warmup_steps=4, decay=decay, num_steps=4) == rate
