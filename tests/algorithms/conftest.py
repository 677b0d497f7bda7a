"""Records of groups, as the controller gets them."""

from collections.abc import Callable

import pytest

from tests import records
from titanrl.types import GroupRecord


@pytest.fixture(scope="session")
def make_record() -> Callable[..., GroupRecord]:
    """A group with the given rewards and numbers of sampled tokens."""
    return records.make_record
