"""The buffer of a run, and its actor: reserves slots, collects finished groups and selects the next batch.

The prompts of a run have *positions* (`index` in code), from 0. A rollout worker admits the prompt of a position by reserving a
slot, and keeps the finished group's tokens (its *payload*) in its *shard*; only the record of the group comes here. A slot is
freed once no new request can get weights older than those trained on its group (`WeightSync`, stage 4). In synchronous runs,
the workers run *rounds*: once all of them have finished the previous round, one fills all free slots (`reserve_round`).

With B = (max_staleness + 1) P slots, P groups trained on between two publications and a reordering window of W groups, no token
is trained on more than (B + W - 2) // P publications after it was sampled; docs/async.md proves it. Unless `discard` is called,
or a group of a checkpoint would exceed the bound, no group is dropped because of its age, so long completions are as likely to
be trained on as short ones.

With a replay memory, a trained group moves there when its slot is released, and keeps its storage location. Replayed groups are
added to the new groups of a batch, so the bound does not depend on them.
"""

import asyncio
import pickle
from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from titanrl.base.errors import StoppedError
from titanrl.base.files import write_bytes
from titanrl.base.pickling import read_saved
from titanrl.carriers.record import span
from titanrl.carriers.rewards import RolloutError, scorer_failed
from titanrl.carriers.tables import PackedRecord, RecordTable, Table, pack_record
from titanrl.carriers.types import DoubleArray, GroupHandle, GroupRecord
from titanrl.config.sections import ReplayConfig
from titanrl.data.mixture import Mixture
from titanrl.processes.actors import Actor, Gathering, concurrent_endpoint
from titanrl.replay.groups import (
    Batch,
    BufferState,
    DropReason,
    Finished,
    Freshness,
    Replayed,
    Reservation,
    Restored,
    Saved,
    ShardUsage,
    TrainedBatch,
    handles_of,
    moved_batch,
    split_by_freshness,
)
from titanrl.replay.prioritized import ReplayIndex

RECORDS_FILE = "records.pkl"
"""File with the buffer's state in a checkpoint."""
PROMPTS_FILE = "prompts.pkl"
"""File next to it with the state of prompt selection; only with a mixture or a curriculum."""
EPS = 1e-6
"""Term added to priorities, so that a group with priority 0 can be drawn."""

V = TypeVar("V")


class Slots:
    """A limited number of slots, and additional payload locations for groups that were moved out of their slot.

    `reserve` claims a location and uses up a slot; `leave` frees the slot, `recycle` the location, `free` both.
    """

    def __init__(self, num_slots: int, num_others: int = 0) -> None:
        """Create free slots and `num_others` additional locations."""
        self._num_slots = num_slots
        self._free = deque(range(num_slots + num_others))
        self._serials = [0] * len(self._free)
        self._reserved: dict[int, GroupHandle] = {}  # by location
        self._dropped: dict[int, list[GroupHandle]] = defaultdict(list)  # by shard

    def room(self) -> int:
        """Return the number of free slots."""
        return max(0, self._num_slots - len(self._reserved))

    def claim(self, shard: int) -> GroupHandle:
        """Return a location for a payload in a shard, without using up a slot."""
        if not self._free:  # a resumed run can have fewer slots than groups that it must hold initially
            self._free.append(len(self._serials))
            self._serials.append(0)
        location = self._free.popleft()
        self._serials[location] += 1
        return GroupHandle(shard=shard, location=location, serial=self._serials[location])

    def reserve(self, shard: int) -> GroupHandle:
        """Reserve a slot for a payload in a shard."""
        handle = self.claim(shard)
        self._reserved[handle.location] = handle
        return handle

    def leave(self, handle: GroupHandle) -> None:
        """Free the slot of a group that keeps its payload."""
        reserved = self._reserved.pop(handle.location, None)
        assert reserved == handle, "slot freed twice, or after being reserved again"

    def recycle(self, handle: GroupHandle) -> None:
        """Let another group use the location of a group without a slot, and let the shard delete the payload."""
        self._free.append(handle.location)
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


class ByPosition(MutableMapping[int, V]):
    """A mapping from positions of the prompt stream, in ascending order."""

    def __init__(self, values: Iterable[tuple[int, V]] = ()) -> None:
        self._values = dict(values)
        self._order = sorted(self._values)

    def __getitem__(self, position: int) -> V:
        return self._values[position]

    def __setitem__(self, position: int, value: V) -> None:
        if position not in self._values:
            insort(self._order, position)
        self._values[position] = value

    def __delitem__(self, position: int) -> None:
        del self._values[position]
        del self._order[bisect_left(self._order, position)]

    def __contains__(self, position: object) -> bool:
        return position in self._values

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def first(self, default: int) -> int:
        """Return the first position, or `default` if there is none."""
        return self._order[0] if self._order else default

    def num_before(self, position: int) -> int:
        """Return the number of positions before another one."""
        return bisect_left(self._order, position)

    def take(self, count: int) -> list[V]:
        """Remove the first `count` positions, and return their values."""
        taken, self._order = self._order[:count], self._order[count:]
        return [self._values.pop(position) for position in taken]


@dataclass(slots=True, kw_only=True)
class Stored:
    """A group in the memory."""

    handle: GroupHandle
    """Location of its tokens."""
    record: PackedRecord
    min_version: int
    """Oldest policy version among its sampled tokens."""
    priority: float
    num_uses: int = 1
    """Number of batches that contained it."""


class ReplayMemory:
    """Groups that were trained on, oldest first, of which some are drawn for the next batch.

    They are drawn without replacement from a `ReplayIndex` of the groups that are neither too old nor used too often. The draws
    depend only on the order of the groups, not on the storage shards that hold their tokens.
    """

    def __init__(self, config: ReplayConfig, num_replayed: int, seed: int) -> None:
        """Create an empty memory, from which each batch draws up to `num_replayed` groups."""
        self._config, self._num_replayed = config, num_replayed
        self.capacity = config.capacity
        """Maximum number of groups."""
        self._groups: dict[int, Stored] = {}  # by location
        self._in_use: Counter[int] = Counter()  # locations of groups in unreleased batches
        self._lost: set[int] = set()  # locations of such groups whose tokens are lost
        self._rng = np.random.default_rng(seed)
        self._before_draw = self._rng.bit_generator.state
        self.num_evicted = 0
        """Groups that were removed to make room for newer ones."""

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, handle: GroupHandle) -> bool:
        stored = self._groups.get(handle.location)
        return stored is not None and stored.handle == handle

    def draw(self, version: int, beta: float) -> list[PackedRecord]:
        """Draw up to `num_replayed` eligible groups for a batch that trains the weights of `version`.

        Each returned record has its importance weight, with the exponent `beta`.
        """
        config, self._before_draw = self._config, self._rng.bit_generator.state
        oldest, most_uses = version - config.max_age, config.max_uses or np.inf
        eligible = [
            group
            for location, group in self._groups.items()
            if group.min_version >= oldest and group.num_uses < most_uses and location not in self._lost
        ]
        if not eligible:
            return []
        if config.priority == "recency":  # computed now, because it depends on the version
            priorities = [1.0 / (1.0 + version - group.min_version) for group in eligible]
        else:
            priorities = [group.priority for group in eligible]
        index = ReplayIndex(len(eligible), alpha=config.alpha, beta=beta, eps=EPS, seed=self._rng)
        index.append(len(eligible), priorities, versions=None, store=lambda slots, part: None)  # `eligible` has the items
        drawn = []
        for number, weight in zip(*(values.tolist() for values in index.draw_distinct(self._num_replayed)), strict=True):
            group = eligible[number]
            group.num_uses += 1
            self._in_use[group.handle.location] += 1
            drawn.append(group.record.with_weight(weight))
        return drawn

    def release(self, handle: GroupHandle, priority: float | None) -> None:
        """Record that a batch no longer uses a drawn group; store the group's new priority, if given."""
        assert self._in_use[handle.location] > 0, "a group was released that no batch contains"
        self._in_use[handle.location] -= 1
        if priority is not None:
            self._groups[handle.location].priority = priority

    def undo_draw(self, handles: Sequence[GroupHandle]) -> None:
        """Release the groups of the last draw, whose batch could not be trained on, as if it had not been made."""
        for handle in handles:
            self.release(handle, None)
            self._groups[handle.location].num_uses -= 1
        if handles:  # else it drew nothing
            self._rng.bit_generator.state = self._before_draw

    def add(self, groups: Iterable[Stored]) -> list[GroupHandle]:
        """Store groups; return the removed groups: lost ones, then the oldest ones. Groups in unreleased batches stay."""
        self._groups |= {group.handle.location: group for group in groups}
        gone = [location for location in self._lost if not self._in_use[location]]
        self._lost.difference_update(gone)
        lost = [self._groups.pop(location).handle for location in gone]
        excess = len(self._groups) - self.capacity
        evicted = [group.handle for location, group in self._groups.items() if not self._in_use[location]][: max(excess, 0)]
        for handle in evicted:
            del self._groups[handle.location]
        self.num_evicted += len(evicted)
        return [*lost, *evicted]

    def lose_shard(self, shard: int) -> list[GroupHandle]:
        """Remove the groups whose tokens a lost shard held; return them. A later `add` removes those in unreleased batches."""
        self._lost |= {location for location, group in self._groups.items() if group.handle.shard == shard}
        return self.add(())

    def state_dict(self) -> dict[str, Any]:
        """Return everything that determines the next draws."""
        kept = [group for location, group in self._groups.items() if location not in self._lost]
        return {"groups": kept, "rng": self._rng.bit_generator.state, "num_evicted": self.num_evicted}

    def load_state_dict(self, state: Mapping[str, Any], batches: Iterable[GroupHandle] = ()) -> None:
        """Replace the contents with a state from `state_dict` that has at most `capacity` groups.

        Groups among `batches`, the groups of unreleased batches, are in use.
        """
        self._groups = {group.handle.location: group for group in state["groups"]}
        assert len(self._groups) <= self.capacity, "more groups than fit"
        self._in_use = Counter(handle.location for handle in batches if handle in self)
        self._lost.clear()
        self._rng.bit_generator.state, self.num_evicted = state["rng"], state["num_evicted"]


class GroupBuffer:
    """Slots and records of groups. All methods run on one event loop.

    A group has a *signal* if it has tokens to train on (`GroupRecord.has_payload`).
    """

    def __init__(
        self,
        *,
        num_slots: int,
        dynamic_sampling: bool | None,
        window: int = 1,
        first_index: int = 0,
        memory: ReplayMemory | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Create an empty buffer.

        Args:
            num_slots: Maximum number of groups that are in flight, finished or not yet released.
            dynamic_sampling: Discard groups without a signal and free their slots immediately for other prompts. None keeps
                them, also in a batch without others: those of a dump.
            window: W, the limit on reordering: at most W - 1 younger groups may overtake a group in flight. 1 preserves
                prompt order.
            first_index: First position of the prompt stream; greater than 0 after a resume.
            memory: Memory for replayed groups; None disables replay.
            mixture: Source of prompts; None takes the prompts of one task in order.
        """
        self.mixture = mixture or Mixture()
        self._num_slots = num_slots
        self._slots = Slots(num_slots, 0 if memory is None else memory.capacity)
        self._usage: dict[int, ShardUsage] = {}  # by shard
        self._memory = memory
        self._taken: dict[int, Finished] = {}  # new groups of unreleased batches, by location
        self._discarded_before_batch: tuple[Sequence[Finished], Counter[DropReason]] = ((), Counter())
        """Groups discarded before the last batch, and their number by reason, kept in case the batch is returned."""
        self._dynamic_sampling = dynamic_sampling
        self._window = window
        self._next_index = first_index  # first position that was not admitted
        self._again: deque[int] = deque()  # earlier positions to sample again, ascending; reserved first
        self._in_flight: ByPosition[GroupHandle] = ByPosition()
        self._ready: ByPosition[Finished] = ByPosition()
        self._overtakers: set[int] = set()  # taken while an older group was in flight
        self._overtaken = -1  # the position for which they were last counted
        self._discarded: list[Finished] = []  # since the last batch
        self._drops: Counter[DropReason] = Counter()  # of the discarded groups
        self._has_scored = False  # True after the first group with a reward
        self._oldest_version = -1  # groups with an older token are discarded
        self._abandoned: set[GroupHandle] = set()  # groups whose commit is ignored
        self._lost: set[GroupHandle] = set()  # groups of unreleased batches whose tokens are gone
        self._dead: dict[int, int] = {}  # life of the last worker that died, by shard
        self._failure: str | None = None
        lock = asyncio.Lock()
        self._changed, self._has_room = asyncio.Condition(lock), asyncio.Condition(lock)

    async def reserve(self, limit: int, shard: int = 0, life: int = 0) -> list[Reservation]:
        """Wait until a slot is free, then reserve up to `limit` slots for groups whose payloads a shard will store.

        `life` is the number of workers that the shard had before this one. A worker that died in the meantime gets no slots.
        """
        async with self._has_room:
            with span("wait for a free slot", "wait"):
                await self._has_room.wait_for(lambda: self._slots.room() or self.has_died(shard, life))
            room = 0 if self.has_died(shard, life) else self._slots.room()
            reserved = [self._reserve(shard) for _ in range(min(limit, room))]
            self._has_room.notify(self._slots.room())  # what this call did not take
            return reserved

    async def reserve_round(self, num_shards: int) -> list[Reservation]:
        """Wait until a slot is free, then reserve all free slots, distributed evenly over the shards."""
        async with self._has_room:
            await self._has_room.wait_for(self._slots.room)
            room = self._slots.room()
            return [self._reserve(i * num_shards // room) for i in range(room)]

    def has_died(self, shard: int, life: int) -> bool:
        """Return True if `lose_shard` was called for this worker of a shard, or for a later one."""
        return life <= self._dead.get(shard, -1)

    async def commit(self, records: Sequence[GroupRecord], usage: ShardUsage | None = None) -> None:
        """Add finished groups of one shard, and record its memory usage."""
        async with self._changed:
            for record in records:
                self._add(record)
                if usage is not None:
                    self._usage[record.handle.shard] = usage
            self._notify()

    async def fail(self, error: str) -> None:
        """Make `take_batch`, and all that wait for the buffer, raise the error of a failed worker from now on."""
        async with self._changed:
            self._failure = error
            self._changed.notify_all()

    async def wait_until_failed(self) -> None:
        """Wait until a worker has failed, then raise its error as a `RolloutError`."""
        async with self._changed:
            with span("watch for failures", "wait"):
                await self._changed.wait_for(lambda: self._failure is not None)
        raise RolloutError(str(self._failure))

    async def take_batch(self, num_groups: int) -> Batch:
        """Wait for `num_groups` finished groups and take the first ones in prompt order. At least one has a signal.

        An older group that is not finished is waited for, unless the window lets the others overtake it.

        Raise `RolloutError` if a worker failed, and `ScorerError` if the scorer failed on every rollout of the first groups.
        """
        async with self._changed:
            while len(picked := self._pick(num_groups)) < num_groups and self._failure is None:
                if not self._has_scored and len(self._discarded) >= num_groups:
                    failed = [group.record for group in self._discarded]
                    num_rollouts = sum(record.num_errors for record in failed)
                    what = f"all {num_rollouts} completions of the first {len(failed)} groups"
                    raise scorer_failed(what, failed[0].first_error)
                with span("wait for groups", "wait"):
                    await self._changed.wait()
        if self._failure is not None:
            raise RolloutError(self._failure)
        return self._take(picked)

    async def replay(self, version: int, beta: float) -> Replayed:
        """Draw groups from the memory for a batch; see `ReplayMemory.draw`."""
        assert self._memory is not None, "there is no memory"
        drawn = RecordTable.join(self._memory.draw(version, beta))
        return Replayed(drawn, num_stored=len(self._memory), num_evicted=self._memory.num_evicted)

    async def wait_until_full(self) -> None:
        """Wait until every slot holds a finished group, taken or not, so that the workers are idle, or a worker failed."""
        async with self._changed:
            with span("wait for groups", "wait"):
                await self._changed.wait_for(lambda: not (self._slots.room() or self._in_flight) or self._failure is not None)

    async def why_starved(self, num_groups: int, waited_s: float) -> str:
        """Explain why no batch of `num_groups` groups was complete after `waited_s` seconds."""
        tried = [group.record for group in (*self._ready.values(), *self._discarded)]
        in_flight = f"groups in flight: {len(self._in_flight)}"
        if self._in_flight:
            in_flight += f", the oldest for prompt {self._in_flight.first(0)}"
        if not tried:
            return (
                f"rollout.starvation_timeout_s: no group finished in {waited_s:g} s; {in_flight}. "
                "See logs/rollout_0_0.log and logs/generator_0_0.log, or raise the timeout."
            )
        with_signal = sum(record.has_payload for record in tried)
        silent = [record for record in tried if record.rewards and not (record.has_payload or record.rejection)]
        equal = Counter(record.rewards[0] for record in silent if not record.rewards_differ)
        reasons = [f"{count} with every reward {reward:g}" for reward, count in equal.most_common(3)]
        if num_masked := sum(record.rewards_differ for record in silent):
            reasons.append(f"{num_masked} without a token to train on (algorithm.mask_truncated, trainer.overlong)")
        if unscored := [record for record in tried if not record.rewards]:
            reasons.append(f"{len(unscored)} whose episodes or rewards always failed ({unscored[0].first_error})")
        rejected = Counter(record.rejection for record in tried)
        if rejected["filtered"]:
            reasons.append(f"{rejected['filtered']} rejected by rollout.group_filter")
        if rejected["too small"]:
            error = next(record.first_error for record in tried if record.rejection == "too small")
            reasons.append(f"{rejected['too small']} with fewer rewards than rollout.min_group_size (first error: {error})")
        if len(tasks := Counter(record.task for record in tried)) > 1:
            signals = Counter(record.task for record in tried if record.has_payload)
            reasons.append(
                f"with a signal by task: {', '.join(f'{task} {signals[task]} of {num}' for task, num in tasks.items())}"
            )
        others = ", ".join(reasons) or "none"
        return (
            f"rollout.starvation_timeout_s: no batch of {num_groups} groups with a signal in {waited_s:g} s. "
            f"{len(tried)} groups finished, {with_signal} with a signal; the others: {others}; {in_flight}. "
            "If rewards are all low, the task is too hard for the policy: use warm_start, an easier data.task_config or "
            "a larger rollout.group_size. If they are all high, the task is solved."
        )

    async def release(self, handles: Table, priorities: DoubleArray | None = None) -> None:
        """Free the slots of groups of batches that were trained on, or move the groups to the memory.

        `priorities` has the replay priority of each group, NaN for a group without one. None moves no group to the memory, and
        a replayed group keeps its priority.
        """
        async with self._changed:
            self._release(handles, priorities)
            self._notify()

    async def lose_shard(self, shard: int, life: int = 0) -> list[int]:
        """Schedule resampling of the groups that a dead shard held or was going to hold; return their positions, ascending.

        `life` is that of the worker that died; see `reserve`. Groups in batches stay, because the trainer may already have
        their tokens. If not, `return_batch` resamples them.
        """
        async with self._changed:
            self._dead[shard] = life
            in_flight = [index for index, handle in self._in_flight.items() if handle.shard == shard]
            held = [index for index, group in self._ready.items() if group.has_tokens_in(shard)]
            self._sample_again([*in_flight, *held])
            self._lost |= {group.record.handle for group in self._taken.values() if group.has_tokens_in(shard)}
            self._usage.pop(shard, None)
            if self._memory is not None:
                for handle in self._memory.lose_shard(shard):
                    self._slots.recycle(handle)
            self._slots.take_dropped(shard)  # last: the worker's replacement never had these payloads
            self._notify()
            self._has_room.notify_all()  # the calls of the dead worker also return
        return sorted([*in_flight, *held])

    async def return_batch(self, handles: Table) -> list[int]:
        """Make the groups of a batch that cannot be trained on ready again.

        Resample those whose tokens are lost, and return their positions, ascending.
        """
        async with self._changed:
            lost = self._return_batch(handles)
            self._sample_again(lost)
            self._notify()
        return sorted(lost)

    async def rewind(self, handles: Table | None = None) -> list[int]:
        """Schedule resampling of everything after the last trained batch; return the positions, ascending.

        Synchronous runs do so after a fault (`hold_rounds`). The rounds, and therefore the results, are then the same as in a
        run without faults. `handles` are the groups of a batch that cannot be trained on.
        """
        async with self._changed:
            lost = [] if handles is None else self._return_batch(handles)
            discarded = [group.record.index for group in self._discarded]
            again = sorted([*self._in_flight, *self._ready, *lost, *discarded])
            self._discarded, self._drops = [], Counter()
            self._sample_again(again)
            self._notify()
        return again

    async def reweigh(self, weights: Sequence[float]) -> None:
        """Change the weights of the tasks, in their order, for the prompts that are admitted from now on."""
        self.mixture.reweigh(weights)

    def state(self, trained: Sequence[TrainedBatch] = (), from_index: int | None = None) -> BufferState:
        """Return the state from which a resumed run continues.

        `trained` are the batches trained on since the last publication. Everything from the position `from_index` is sampled
        again; None continues with the finished groups.
        """
        memory = None if self._memory is None else self._memory.state_dict()
        if from_index is not None:
            return BufferState(next_index=from_index, drops={}, has_scored=self._has_scored, memory=memory)
        used = {handle for handles, _ in trained for handle in handles_of(handles)}
        held = [group for group in self._taken.values() if group.record.handle in used]
        waiting = [group for group in self._taken.values() if group.record.handle not in used]
        discarded, drops = self._discarded_before_batch if waiting else ((), Counter[DropReason]())
        indices = {group.record.index for group in waiting}
        lost = [group.record.index for group in waiting if group.record.handle in self._lost]
        ready = [*self._ready.values(), *(group for group in waiting if group.record.handle not in self._lost)]
        return BufferState(
            next_index=self._next_index,
            in_flight=(*self._in_flight, *lost, *self._again),
            ready=tuple(sorted(ready, key=lambda group: group.record.index)),
            held=tuple(group.without_tokens() if group.record.handle in self._lost else group for group in held),
            trained=tuple(trained),
            overtakers=frozenset(index for index in self._overtakers - indices if index > self._oldest_unfinished),
            discarded=(*discarded, *self._discarded),
            drops=dict(drops + self._drops),
            has_scored=self._has_scored,
            memory=memory,
        )

    def prompts_state(self, trained: Sequence[TrainedBatch], from_index: int | None) -> dict[str, Any] | None:
        """Return the state of the mixture that matches `state`."""
        used = {handle for handles, _ in trained for handle in handles_of(handles)}
        untrained = [group.record.index for group in self._taken.values() if group.record.handle not in used]
        return self.mixture.state_dict(untrained=untrained, from_index=from_index)

    def restore(self, state: BufferState, freshness: Freshness, num_shards: int) -> Restored:
        """Restore a state, for shards 0 to `num_shards - 1`. Call this after restoring the mixture, before any reservation."""
        kept, again = split_by_freshness(state, freshness, self._num_slots)
        memory = None if self._memory is None else state.memory
        held = state.held if memory is not None else [group.without_tokens() for group in state.held]
        self.mixture.count_restored(group.record.index for group in kept)
        moves = {group.record.handle: self._slots.reserve(group.record.handle.shard % num_shards) for group in (*kept, *held)}
        with_tokens = [group.record.handle for group in (*kept, *held) if group.record.has_payload]
        stored = [] if self._memory is None or memory is None else memory["groups"][-self._memory.capacity :]
        moves |= {group.handle: self._slots.claim(group.handle.shard % num_shards) for group in stored}
        with_tokens += [group.handle for group in stored]
        trained = [moved_batch(batch, moves) for batch in state.trained]
        if self._memory is not None and memory is not None:
            moved = [replace(each, handle=moves[each.handle], record=each.record.at(moves[each.handle])) for each in stored]
            batches = (handle for handles, _ in trained for handle in handles_of(handles))
            self._memory.load_state_dict({**memory, "groups": moved}, batches)
        self._next_index, self._again, self._has_scored = state.next_index, deque(again), state.has_scored
        self._ready = ByPosition((group.record.index, group.at(moves[group.record.handle])) for group in kept)
        self._taken = {moves[group.record.handle].location: group.at(moves[group.record.handle]) for group in held}
        self._overtakers, self._discarded, self._drops = set(state.overtakers), list(state.discarded), Counter(state.drops)
        return Restored(
            moves=[(handle, moves[handle]) for handle in with_tokens],
            trained=trained,
            num_ready=len(kept),
            num_in_flight=len(state.in_flight),
            too_old=tuple(sorted(set(again) - set(state.in_flight))),
        )

    async def discard(self, handles: Table, before_version: int) -> None:
        """Free the slots of the groups of a batch that is too old to be trained on.

        Also discard groups with a token older than `before_version`, now and when they finish.
        """
        async with self._changed:
            self._oldest_version = before_version
            indices = [self._taken[handle.location].record.index for handle in handles_of(handles)]
            self.mixture.uncount_trained(indices, is_dropped=True)
            self._release(handles, None)
            for index in [index for index, group in self._ready.items() if self._is_too_old(group.record)]:
                self._discard(self._ready.pop(index), "too old")
            self._notify()

    def _is_too_old(self, record: GroupRecord) -> bool:
        return record.min_version < self._oldest_version

    @property
    def _oldest_unfinished(self) -> int:
        unadmitted = self._again[0] if self._again else self._next_index
        return min(self._in_flight.first(unadmitted), unadmitted)

    def _notify(self) -> None:
        """Notify the calls that a change may concern. Of the workers that wait for a slot, notify one per free slot."""
        self._changed.notify_all()
        self._has_room.notify(self._slots.room())

    def _reserve(self, shard: int) -> Reservation:
        if self._again:
            index = self._again.popleft()
        else:
            index = self._next_index
            self._next_index += 1
        handle = self._in_flight[index] = self._slots.reserve(shard)
        return Reservation(index, handle, self.mixture.draw(index))

    def _sample_again(self, indices: Collection[int]) -> None:
        """Free the slots of positions in flight or ready, and queue the positions before all later ones."""
        self.mixture.withdraw(index for index in indices if index in self._in_flight or index in self._ready)
        for index in indices:
            if index in self._in_flight:
                handle = self._in_flight.pop(index)
                self._abandoned.add(handle)
                self._free(handle)
            elif index in self._ready:
                self._free(self._ready.pop(index).record.handle)
        self._again = deque(sorted({*self._again, *indices}))

    def _return_batch(self, handles: Table) -> list[int]:
        """Make the groups of a batch ready again, unless their tokens are lost; return the positions of the lost groups."""
        lost, keys = [], handles_of(handles)
        if self._memory is not None:
            replayed = [handle for handle in keys if handle in self._memory]
            self._memory.undo_draw(replayed)
            keys = [handle for handle in keys if handle not in self._memory]
        for handle in keys:
            group = self._taken.pop(handle.location)
            self._overtakers.discard(group.record.index)
            self.mixture.uncount_trained([group.record.index], is_dropped=handle in self._lost)
            if handle in self._lost:
                lost.append(group.record.index)
                self._free(handle)
            else:
                self._ready[group.record.index] = group
        discarded, drops = self._discarded_before_batch
        self._discarded, self._drops = [*discarded, *self._discarded], drops + self._drops
        self._discarded_before_batch = ((), Counter())
        return lost

    def _release(self, handles: Table, priorities: DoubleArray | None) -> None:
        keys = handles_of(handles)
        pairs = [] if priorities is None else zip(keys, priorities.tolist(), strict=True)
        values = {handle: priority for handle, priority in pairs if not isnan(priority)}
        if self._memory is None:
            for handle in keys:
                self._taken.pop(handle.location, None)
                self._free(handle)
            return
        trained = []
        for handle in keys:
            if handle in self._memory:
                self._memory.release(handle, values.get(handle))
                continue
            group = self._taken.pop(handle.location)
            if handle in values and group.record.has_payload and handle not in self._lost:
                self._slots.leave(handle)
                version, priority = group.record.min_version, values[handle]
                trained.append(Stored(handle=handle, record=group.packed, min_version=version, priority=priority))
            else:
                self._free(handle)
        for handle in self._memory.add(trained):
            self._slots.recycle(handle)

    def _free(self, handle: GroupHandle) -> None:
        self._slots.free(handle)
        self._lost.discard(handle)

    def _add(self, record: GroupRecord) -> None:
        if record.handle in self._abandoned:  # its position is sampled again
            self._abandoned.remove(record.handle)
            self._slots.drop(record.handle)
            return
        if self._in_flight.get(record.index) != record.handle:
            raise RuntimeError(f"group {record.index} was committed without a reservation, or twice")
        del self._in_flight[record.index]
        self._has_scored |= bool(record.rewards)
        self.mixture.observe(record.index, record.rewards)
        group = Finished(record, pack_record(record, self.mixture.number_of(record.task)), record.rewards_differ)
        if not record.rewards:
            self._discard(group, "no reward")
        elif record.rejection is not None:
            self._discard(group, record.rejection)
        elif self._is_too_old(record):
            self._discard(group, "too old")
        elif self._dynamic_sampling and not record.has_payload:
            self._discard(group, "no signal")
        else:
            self._ready[record.index] = group

    def _discard(self, group: Finished, reason: DropReason) -> None:
        self._discarded.append(group)
        self._drops[reason] += 1
        self.mixture.withdraw([group.record.index])
        self._free(group.record.handle)

    def _pick(self, num_groups: int) -> list[int]:
        """Return the positions of the next batch, oldest first; none if the batch is not complete.

        A complete batch without any signal is discarded, because there is nothing to train on.
        """
        while len(self._ready) >= num_groups:
            oldest_in_flight = self._oldest_unfinished
            if oldest_in_flight != self._overtaken:
                self._overtaken = oldest_in_flight
                self._overtakers = {index for index in self._overtakers if index > oldest_in_flight}
            num_overtaking = max(0, self._window - 1 - len(self._overtakers))
            if self._ready.num_before(oldest_in_flight) + num_overtaking < num_groups:
                return []
            picked = list(islice(self._ready, num_groups))
            if self._dynamic_sampling is None or any(self._ready[index].record.has_payload for index in picked):
                return picked
            for group in self._ready.take(num_groups):
                self._discard(group, "no signal")
            self._notify()
        return []

    def _take(self, picked: Sequence[int]) -> Batch:
        oldest_in_flight = self._oldest_unfinished
        self._overtakers |= {index for index in picked if index > oldest_in_flight}
        groups = self._ready.take(len(picked))
        self._taken |= {group.record.handle.location: group for group in groups}
        self._discarded_before_batch = discarded, drops = self._discarded, self._drops
        self.mixture.count_trained(picked)
        settled = (group.record.index for group in (*self._taken.values(), *self._discarded))
        self.mixture.forget_others(self._in_flight, self._ready, self._again, settled)
        self._discarded, self._drops = [], Counter()
        tried = [group.record for group in (*groups, *discarded)]
        environment: dict[str, dict[str, tuple[float, int]]] = {}
        for record in sorted(tried, key=lambda record: record.index):  # so that the sums are reproducible
            for name, (total, num) in record.metrics.items():
                of_task = environment.setdefault(record.task, {})
                earlier = of_task.get(name, (0.0, 0))
                of_task[name] = earlier[0] + total, earlier[1] + num
        failed = [record for record in tried if record.num_errors]
        if counts := sum((Counter(record.counts) for record in tried), Counter[str]()):  # else there is no environment
            counts["slowest_ms"] = max(record.counts.get("slowest_ms", 0) for record in tried)
        return Batch(
            records=RecordTable.join([group.packed for group in groups]),
            num_tried=len(tried),
            num_equal_rewards=sum(bool(group.record.rewards) and not group.rewards_differ for group in (*groups, *discarded)),
            num_tried_rollouts=sum(len(record.rewards) + record.num_errors for record in tried),
            num_tried_tokens=sum(record.num_generated for record in tried),
            num_errors=sum(record.num_errors for record in failed),
            first_error=min(failed, key=lambda record: record.index).first_error if failed else "",
            drops=dict(drops),
            counts=counts,
            usage=ShardUsage(
                num_bytes=sum(usage.num_bytes for usage in self._usage.values()),
                num_spilled_bytes=sum(usage.num_spilled_bytes for usage in self._usage.values()),
            ),
            drops_by_task=Counter(group.record.task for group in discarded),
            environment=environment,
            first_untaken=min(oldest_in_flight, self._ready.first(oldest_in_flight)),
            num_in_flight=len(self._in_flight),
            num_ready=len(self._ready),
            num_unreleased=len(self._taken) - len(groups),
            prompts=self.mixture.metrics(),
        )


class BufferActor(GroupBuffer, Actor):
    """Actor of the run's buffer, with or without a replay memory. Tokens never pass through it."""

    def __init__(self, prompts: Callable[[], Mixture], **settings: Any) -> None:
        """Create an empty buffer. `prompts` is called in this process, and returns the `mixture` of a `GroupBuffer`."""
        super().__init__(mixture=prompts(), **settings)
        reserve_round = super().reserve_round  # not the endpoint of this name, which waits for all workers
        self._rounds: Gathering[None, list[Reservation]] = Gathering(lambda workers: reserve_round(len(workers)))
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    @concurrent_endpoint
    async def reserve(self, limit: int, shard: int, life: int) -> tuple[list[Reservation], list[GroupHandle]]:
        """Reserve slots as `GroupBuffer.reserve` does. Also return the groups whose payloads the shard may delete."""
        reserved = await super().reserve(limit, shard, life)
        return reserved, [] if self.has_died(shard, life) else self._slots.take_dropped(shard)

    @concurrent_endpoint
    async def reserve_round(self, shard: int, num_shards: int, life: int) -> tuple[list[Reservation], list[GroupHandle]]:
        """Wait until the workers of all shards have called and a slot is free, then reserve all free slots.

        Return the reservations for all shards in prompt order, and the groups whose payloads the caller's shard may delete.
        Raise `StoppedError` if a worker or generator died; the caller then calls again.
        """
        with span("wait for a free slot", "wait"):
            await self._may_begin.wait()
            if self.has_died(shard, life):
                return [], []
            reserved = await self._rounds.add({shard: None}, num_shards)
            return reserved, [] if self.has_died(shard, life) else self._slots.take_dropped(shard)

    @concurrent_endpoint
    async def hold_rounds(self) -> None:
        """Prevent new rounds until `rewind`."""
        self._may_begin.clear()
        self._rounds.reset(StoppedError("a worker or generator died"))

    @concurrent_endpoint
    async def rewind(self, handles: Table | None) -> list[int]:
        """Schedule resampling of everything after the last batch, in new rounds."""
        again = await super().rewind(handles)
        self._may_begin.set()
        return again

    commit = concurrent_endpoint(GroupBuffer.commit)
    reweigh = concurrent_endpoint(GroupBuffer.reweigh)
    fail = concurrent_endpoint(GroupBuffer.fail)
    wait_until_failed = concurrent_endpoint(GroupBuffer.wait_until_failed)
    take_batch = concurrent_endpoint(GroupBuffer.take_batch)
    wait_until_full = concurrent_endpoint(GroupBuffer.wait_until_full)
    release = concurrent_endpoint(GroupBuffer.release)
    discard = concurrent_endpoint(GroupBuffer.discard)
    lose_shard = concurrent_endpoint(GroupBuffer.lose_shard)
    return_batch = concurrent_endpoint(GroupBuffer.return_batch)
    replay = concurrent_endpoint(GroupBuffer.replay)
    why_starved = concurrent_endpoint(GroupBuffer.why_starved)

    @concurrent_endpoint
    async def probe(self) -> None:
        """Return immediately, which shows that the event loop is running."""

    @concurrent_endpoint
    async def save(self, path: Path, trained: Sequence[TrainedBatch], from_index: int | None) -> Saved:
        """Write the state, and that of prompt selection; return what the controller needs. See `GroupBuffer.state`."""
        state = self.state(trained, from_index)
        prompts = self.prompts_state(trained, from_index)
        # Pickle before the first await, because later calls change the objects that the state refers to.
        files = {path: pickle.dumps(state, pickle.HIGHEST_PROTOCOL)}
        if prompts is not None:
            files[path.with_name(PROMPTS_FILE)] = pickle.dumps(prompts, pickle.HIGHEST_PROTOCOL)
        saved = Saved(next_index=state.next_index, in_flight=state.in_flight, num_held=len(state.held), payloads=state.payloads)
        for file, content in files.items():
            await asyncio.to_thread(write_bytes, file, content)
        return saved

    @concurrent_endpoint
    async def load(self, path: Path, freshness: Freshness, num_shards: int) -> Restored:
        """Restore a saved state; see `GroupBuffer.restore`."""
        state = read_saved(await asyncio.to_thread(path.read_bytes))
        assert isinstance(state, BufferState), f"{path} is not the state of a buffer"
        file = path.with_name(PROMPTS_FILE)
        prompts = read_saved(await asyncio.to_thread(file.read_bytes)) if file.exists() else None
        if self.mixture.load_state_dict(prompts):
            return self.restore(state, freshness, num_shards)
        # The tasks or their levels have changed, so the positions get other prompts.
        restored = self.restore(state.without_groups(), freshness, num_shards)
        return replace(restored, too_old=tuple(group.record.index for group in state.ready))
