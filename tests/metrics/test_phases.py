import pytest

from titanrl.metrics.phases import PhaseTimer


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_phase_counts_the_seconds_of_its_body(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 2.0
    clock.now += 5.0  # outside any phase
    assert timer.take() == {"time/train_s": 2.0}


def test_repeated_phase_adds_up(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    for seconds in (1.0, 2.0, 4.0):
        with timer.phase("sync"):
            clock.now += seconds
    assert timer.take() == {"time/sync_s": 7.0}


def test_nested_phases_add_up_to_wall_time(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 1.0
        with timer.phase("sync"):
            clock.now += 10.0
        clock.now += 2.0
    assert timer.take() == {"time/train_s": 3.0, "time/sync_s": 10.0}


def test_take_resets_an_open_phase(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)
    with timer.phase("train"):
        clock.now += 1.0
        assert timer.take() == {"time/train_s": 1.0}
        clock.now += 4.0
    assert timer.take() == {"time/train_s": 4.0}
    assert timer.take() == {}


def test_phase_that_raises_is_counted_and_closed(clock: Clock) -> None:
    timer = PhaseTimer(clock=clock)

    def fail() -> None:
        with timer.phase("train"):
            clock.now += 1.0
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert timer.current is None
    assert timer.take() == {"time/train_s": 1.0}


def test_callback_receives_every_phase_change(clock: Clock) -> None:
    heard: list[str | None] = []
    timer = PhaseTimer(on_change=heard.append, clock=clock)
    with timer.phase("train"), timer.phase("sync"):
        assert timer.current == "sync"
    assert heard == ["train", "sync", "train", None]


def test_default_clock_measures_real_time() -> None:
    timer = PhaseTimer()
    with timer.phase("train"):
        sum(range(1000))
    assert 0.0 < timer.take()["time/train_s"] < 10.0
