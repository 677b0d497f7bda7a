import pytest

from titanrl.metrics.phases import PhaseTimer


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_phase_lasts_as_long_as_its_body(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 2.0
    clock.now += 5.0  # outside of any phase: nobody's
    assert timer.take() == {"time/train_s": 2.0}


def test_a_repeated_phase_adds_up(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    for seconds in (1.0, 2.0, 4.0):
        with timer.phase("sync"):
            clock.now += seconds
    assert timer.take() == {"time/sync_s": 7.0}


def test_phases_inside_each_other_add_up_to_the_wall_time(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 1.0
        with timer.phase("sync"):
            clock.now += 10.0
        clock.now += 2.0
    assert timer.take() == {"time/train_s": 3.0, "time/sync_s": 10.0}


def test_taking_starts_from_zero_also_inside_a_phase(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 1.0
        assert timer.take() == {"time/train_s": 1.0}
        clock.now += 4.0
    assert timer.take() == {"time/train_s": 4.0}
    assert timer.take() == {}


def test_a_phase_that_raises_is_still_charged_and_closed(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)

    def fail() -> None:
        with timer.phase("train"):
            clock.now += 1.0
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert timer.current is None
    assert timer.take() == {"time/train_s": 1.0}


def test_whoever_listens_hears_every_change_of_phase(clock: Clock) -> None:
    heard: list[str | None] = []
    timer = PhaseTimer(on_change=heard.append, clock=clock)
    with timer.phase("train"), timer.phase("sync"):
        assert timer.current == "sync"
    assert heard == ["train", "sync", "train", None]


def test_without_a_fake_clock_time_passes() -> None:
    timer = PhaseTimer()
    with timer.phase("train"):
        sum(range(1000))
    assert 0.0 < timer.take()["time/train_s"] < 10.0
