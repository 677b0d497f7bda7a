"""Deadlines learned from earlier replies."""

import pytest

from titanrl.launch.deadlines import WARM_UP, WINDOW, ReplyTimes, size_class


def learned(*seconds: float) -> ReplyTimes:
    times = ReplyTimes(factor=10, floor_s=30)
    for value in seconds:
        times.add("trainer.optim_step", value)
    return times


def test_first_requests_have_the_configured_deadline() -> None:
    times = learned(*[0.1] * (WARM_UP - 1))
    assert times.limit("trainer.optim_step", 1800) == 1800
    times.add("trainer.optim_step", 0.1)
    assert times.limit("trainer.optim_step", 1800) == 30


@pytest.mark.parametrize(
    ("slowest", "hard_s", "min_s", "expected"),
    [
        (0.4, 1800, 0, 30),
        (7.0, 1800, 0, 70),
        (7.0, 60, 0, 60),
        (0.4, 4, 0, 4),
        (0.4, 1800, 300, 300),
        (0.4, 100, 300, 100),
    ],
)
def test_deadline_is_ten_times_the_slowest_reply_within_bounds(
    slowest: float, hard_s: float, min_s: float, expected: float
) -> None:
    assert learned(0.2, slowest, 0.1).limit("trainer.optim_step", hard_s, min_s) == pytest.approx(expected)


def test_slow_reply_is_forgotten_after_a_hundred_others() -> None:
    times = learned(60.0, *[0.1] * (WINDOW - 1))
    assert times.limit("trainer.optim_step", 1800) == 600
    times.add("trainer.optim_step", 0.1)
    assert times.limit("trainer.optim_step", 1800) == 30


def test_kinds_of_requests_do_not_share_their_times() -> None:
    times = learned(60.0, 60.0, 60.0)
    assert times.limit("trainer.push_weights", 600) == 600
    assert times.describe("trainer.optim_step") == "the slowest of the last 3 took 60 s"
    assert times.describe("trainer.push_weights") == ""


def test_amounts_of_a_size_class_differ_by_less_than_a_factor_of_two() -> None:
    assert [size_class(amount) for amount in (0, 1, 2, 3, 4, 7, 8, 1023, 1024)] == [0, 1, 2, 2, 3, 3, 4, 10, 11]
