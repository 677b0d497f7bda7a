import pytest

from titanrl.algorithms.batch_plan import learning_rate
from titanrl.base.choices import LearningRateDecay


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


@pytest.mark.parametrize(("decay", "rate"), [("constant", 1.0), ("linear", 0.0)])
def test_steps_past_end_keep_last_rate(decay: LearningRateDecay, rate: float) -> None:
    assert learning_rate(9, peak=1.0, num_warmup_steps=4, decay=decay, num_steps=4) == rate
