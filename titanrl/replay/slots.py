"""Slot allocation for a buffer: free and reserved slots, and the payloads that storage shards may delete."""

from collections import defaultdict, deque

from titanrl.carriers.types import GroupHandle


class Slots:
    """A limited number of slots, and additional payload locations for groups that were moved out of their slot."""

    def __init__(self, num_slots: int, num_others: int = 0) -> None:
        """Create free slots and `num_others` additional locations."""
        self._num_slots = num_slots
        self._free = deque(range(num_slots + num_others))
        self._serials = [0] * len(self._free)
        self._reserved: dict[int, GroupHandle] = {}  # by slot
        self._dropped: dict[int, list[GroupHandle]] = defaultdict(list)  # by shard

    @property
    def num_reserved(self) -> int:
        """Number of reserved slots."""
        return len(self._reserved)

    def room(self) -> int:
        """Return the number of free slots."""
        return max(0, self._num_slots - len(self._reserved))

    def claim(self, shard: int) -> GroupHandle:
        """Return a location for a payload in a shard, without using up a slot."""
        if not self._free:  # a resumed run can have fewer slots than groups that it must hold initially
            self._free.append(len(self._serials))
            self._serials.append(0)
        slot = self._free.popleft()
        self._serials[slot] += 1
        return GroupHandle(shard=shard, slot=slot, serial=self._serials[slot])

    def reserve(self, shard: int) -> GroupHandle:
        """Reserve a slot for a payload in a shard."""
        handle = self.claim(shard)
        self._reserved[handle.slot] = handle
        return handle

    def leave(self, handle: GroupHandle) -> None:
        """Free the slot of a group that keeps its payload."""
        assert self._reserved.pop(handle.slot, None) == handle, "slot freed twice, or after being reserved again"

    def recycle(self, handle: GroupHandle) -> None:
        """Let another group use the location of a group without a slot, and let the shard delete the payload."""
        self._free.append(handle.slot)
        self.drop(handle)

    def free(self, handle: GroupHandle) -> None:
        """Free the slot of a group and let the shard delete its payload."""
        self.leave(handle)
        self.recycle(handle)

    def drop(self, handle: GroupHandle) -> None:
        """Let the shard delete a payload."""
        self._dropped[handle.shard].append(handle)

    def take_dropped(self, shard: int) -> list[GroupHandle]:
        """Return the payloads that a shard may delete; each is returned once."""
        return self._dropped.pop(shard, [])
