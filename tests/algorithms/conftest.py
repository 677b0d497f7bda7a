"""Fixtures of the algorithm tests."""

from collections.abc import Callable

import pytest

from tests import records
from titanrl.carriers.types import GroupRecord


@pytest.fixture(scope="session")
def make_record() -> Callable[..., GroupRecord]:
    """Factory of group records."""
    return records.make_record
