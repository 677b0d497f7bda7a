import pytest

from titanrl.metrics.outcome import advice, balance_line


def rows(trainer: float, generator: float, staleness: float) -> list[dict[str, float]]:
    first = {"step": 1, "perf/trainer_idle_frac": 1.0, "perf/generator_idle_frac": 1.0, "staleness/max": 0.0}
    values = {"perf/trainer_idle_frac": trainer, "perf/generator_idle_frac": generator, "staleness/max": staleness}
    return [first, *({"step": step, **values} for step in range(2, 6))]


@pytest.mark.parametrize(
    ("trainer", "generator", "expected"),
    [
        (0.60, 0.05, "generation is the bottleneck"),
        (0.05, 0.60, "training is the bottleneck"),
        (0.40, 0.45, "raise max_staleness"),
        (0.08, 0.12, "well balanced"),
    ],
)
def test_advice_gives_devices_to_the_bottleneck(trainer: float, generator: float, expected: str) -> None:
    assert expected in advice(trainer, generator, synchronous=False)


def test_line_shows_medians_and_ignores_the_first_steps() -> None:
    line = balance_line(rows(0.62, 0.04, 1.0), 1)
    assert line.startswith("trainer 62%, generators 4% of the time (median); generation is the bottleneck: give the ")


def test_synchronous_run_is_advised_to_raise_max_staleness() -> None:
    assert "max_staleness is 0" in balance_line(rows(0.5, 0.5, 0.0), 0)


def test_asynchronous_run_without_a_stale_token_is_not_called_synchronous() -> None:
    assert "each waits for the other: raise max_staleness" in balance_line(rows(0.5, 0.5, 0.0), 1)


def test_run_without_steps_has_no_line() -> None:
    assert balance_line([], 0) == ""
