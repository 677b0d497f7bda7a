"""Loading leaves the search for garbage to its end."""

import gc

import pytest

from titanrl.loading import loading


@pytest.fixture(autouse=True)
def thaw() -> object:
    yield
    gc.unfreeze()


def test_nothing_is_searched_while_loading_and_what_stays_is_not_searched_again() -> None:
    with loading():
        assert not gc.isenabled()
        kept = [[] for _ in range(5000)]  # enough to set off a search otherwise
    assert gc.isenabled()
    assert gc.get_freeze_count() >= len(kept)
    assert not any(item is kept[0] for item in gc.get_objects())


def test_searching_goes_on_after_a_failure() -> None:
    with pytest.raises(RuntimeError, match="no model"), loading():
        raise RuntimeError("no model")
    assert gc.isenabled()
