"""Records of groups, as the controller gets them."""

from collections.abc import Callable, Sequence

import pytest

from titanrl.types import GroupRecord, Handle


def _make_record(
    index: int, rewards: Sequence[float], num_sampled: Sequence[int], *, prompt_len: int = 2, has_payload: bool = True
) -> GroupRecord:
    return GroupRecord(
        index=index,
        task="toy",
        handle=Handle(shard=0, slot=index, generation=0),
        has_payload=has_payload,
        rewards=tuple(rewards),
        reward_parts={},
        prompt_len=prompt_len,
        lengths=tuple(prompt_len + count for count in num_sampled),
        num_sampled=tuple(num_sampled),
        num_truncated=0,
        num_overlong=0,
        num_nonfinite=0,
        min_version=0,
        max_version=0,
        generate_s=0.0,
        score_s=0.0,
    )


@pytest.fixture(scope="session")
def make_record() -> Callable[..., GroupRecord]:
    """A group with the given rewards and numbers of sampled tokens."""
    return _make_record
