import pytest

from titanrl.metrics.reading import count, duration, ends_of, fixed, sparkline
from titanrl.metrics.report import learned


@pytest.mark.parametrize(("seconds", "text"), [(0.04, "0.0 s"), (12.34, "12.3 s"), (62.9, "1:02"), (3723.0, "1:02:03")])
def test_duration_picks_a_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(950, "950"), (2140, "2.1k"), (34_000, "34k"), (1.24e6, "1.2M"), (3e9, "3.0G")])
def test_count_has_a_unit(value: float, text: str) -> None:
    assert count(value) == text


def test_sparkline_spans_lowest_to_highest_value() -> None:
    assert sparkline([0.0, 1.0, 0.5]) == "\u2581\u2588\u2585"
    assert sparkline([0.0, 1.0], ascii_only=True) == "_@"
    assert sparkline([0.7, 0.7]) == "\u2581\u2581"
    assert sparkline([]) == ""


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        ([2.0], (2.0, 2.0, "the only step")),
        ([1.0, 2.0, 4.0], (1.0, 4.0, "first and last step")),
        ([1.0, 2.0, 9.0, 4.0, 6.0], (1.5, 5.0, "means of 2 steps")),
        ([*range(12)], (2.0, 9.0, "means of 5 steps")),
    ],
)
def test_first_and_last_values_do_not_overlap(values: list[float], ends: tuple[float, float, str]) -> None:
    assert ends_of(list(enumerate(values))) == ends


def test_numbers_of_many_digits_have_four_significant_ones() -> None:
    assert [fixed(value) for value in (0.12345, -1234.5, 1e300, -1.23456e9)] == ["0.123", "-1234.500", "1e+300", "-1.235e+09"]
    assert (fixed(1e300, ".1e"), fixed(2.0, ".0f")) == ("1.0e+300", "2")
    rows = [{"step": step, "reward/mean": 1e300, "eval/sums/mean": -1e300} for step in (1, 2)]
    assert learned(rows) == "Mean reward: held-out sums -1e+300 -> -1e+300, training 1e+300 -> 1e+300 over 2 steps"
