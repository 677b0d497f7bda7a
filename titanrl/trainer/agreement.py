"""Consistency checks between trainer ranks: errors on every rank name a rank that diverges, is late or fails, or a replicated
tensor that differs between ranks.

A phase is a piece of work that contains collectives, such as a pass or an optimizer step. Before the first collective of a
phase, each rank writes a post to a store: the phase and some facts about it. Rank 0 compares the posts and writes the verdict.
A phase therefore costs each rank two round trips to the store, and rank 0 reads each post once.

Ranks that already wait in a collective are interrupted by an alarm: a thread on each rank waits for an alarm key in the store,
and then aborts the process groups.

Shape suffixes: R ranks, T tensors.
"""

import json
import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError, DistStoreError, ProcessGroup, Store, TCPStore
from torch.distributed.tensor import DTensor

from titanrl.base.errors import DriftError, RankError, TokensLostError, describe
from titanrl.weights.layout import local_part

if TYPE_CHECKING:
    from titanrl.trainer.learner import Learner

Facts = Mapping[str, int | list[str]]
"""Values that must be equal on all ranks, by a plural noun such as `micro-batches`: a count, or a list of names."""

Post = Mapping[str, Any]
"""Post of a rank: `phase`, and either `facts` or, if the rank failed before its first collective, `error`."""
Verdict = tuple[str, bool, bool]
"""A message, empty if the ranks agree; whether the ranks cannot continue; whether a rank failed with a `TokensLostError`.

They can continue after failures before the first collective of the same phase."""

NUM_WAITS = 6
"""Number of waits into which the deadline of a late rank is divided. When the first wait expires, the rank is named in the log.
Waits are counted instead of elapsed time, so ranks that were all suspended (Ctrl-Z) still have most of their time on resume."""
ALARM_LIFETIME = timedelta(days=20)
"""Timeout of the wait for an alarm. `poll` takes the timeout as a 32-bit number of milliseconds, at most 24 days."""
GRACE_S = 2.0
"""Seconds within which all ranks must fail in the collective part of a phase for the failure to be common to all ranks."""
MAX_TEXT = 300
"""Maximum length of the description of an exception, in characters."""

T = TypeVar("T", str, int)

logger = logging.getLogger(__name__)


class Agreement:
    """Consistency check of this rank with all other ranks. In a world of one rank it does nothing.

    Example:
        with agreement.phase("optim_step") as agree:
            agree(lambda: {"micro-batches": 4})
            learner.optim_step(params)
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connect: Callable[[], Store],
        *,
        wait_s: float,
        interrupt: Callable[[], None] = lambda: None,
        name: str = "trainer",
    ) -> None:
        """Connect to the store and start to listen for alarms.

        Args:
            rank: This rank.
            size: Number of ranks.
            connect: Function that opens a connection to the store. The alarm listener uses a separate connection.
            wait_s: Seconds to wait for a late rank before all ranks fail.
            interrupt: Function that interrupts the collectives this rank waits in; see `break_groups`.
            name: Prefix of the keys, unique among the agreements that share a store.
        """
        self._rank, self._size, self._name = rank, size, name
        self.num_phases = 0
        """Number of phases so far, which is the same on all ranks."""
        self._alarm: str | None = None
        self._awaited: list[str] = []
        self._interrupt = interrupt
        if size == 1:
            return
        self._wait = timedelta(seconds=wait_s / NUM_WAITS)
        self._store = connect()
        self._store.set_timeout(self._wait)
        self._store.set(self._key("at", rank), "in start")
        self._listener = threading.Thread(target=self._listen, args=(connect(),), name="alarm of the ranks", daemon=True)
        self._listener.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[Callable[[], Facts]], None]]:
        """Enter a phase as a context manager, which yields a function `agree(facts)`.

        The body must call `agree` exactly once, before its first collective. If the body raises before that call, the exception
        is posted instead of facts, so that all ranks fail together. If it raises after that call, an alarm interrupts the other
        ranks, unless all of them fail as well.

        Raises:
            RankError: A rank is in a different phase, has different facts, is late, or failed.
        """
        if self._size == 1:
            yield lambda facts: None
            return
        if self._alarm is not None:
            raise RankError(self._alarm)
        self.num_phases += 1
        self._store.set(self._key("at", self._rank), f"in {name}")
        agreed = False

        def agree(facts: Callable[[], Facts]) -> None:
            nonlocal agreed
            assert not agreed, f"{name}: the body of the phase called agree twice"
            post = {"phase": name, "facts": facts()}
            agreed = True
            self._exchange(post)

        try:
            yield agree
            assert agreed, f"{name}: the body of the phase did not call agree"
        except RankError:
            raise
        except Exception as error:  # any exception: the other ranks would wait for this one
            if agreed:
                self._report_failure(name, error)
            else:
                agreed = True
                failure = {"error": describe(error)[:MAX_TEXT], "has_lost_tokens": isinstance(error, TokensLostError)}
                self._exchange({"phase": name, **failure}, error=error)
            raise
        self._store.set(self._key("at", self._rank), f"waiting for a request since {name}")

    def close(self) -> None:
        """Stop listening for alarms."""
        if self._size > 1 and self._listener.is_alive():
            with suppress(DistNetworkError, DistStoreError):  # the store may already be closed
                self._store.set(self._key("alarm", self._rank), "")
            self._listener.join(1.0)

    def _exchange(self, post: Post, error: Exception | None = None) -> None:
        """Write a post; return when all ranks have written an equal one.

        Raises:
            RankError: The posts differ or a rank is late. If `error` is given, which is this rank's exception, it is raised
                instead.
        """
        if self._alarm is not None:
            raise (error or RankError(self._alarm))
        number = self.num_phases
        self._store.set(self._key(number, self._rank), json.dumps(post))
        text, is_fatal, has_lost_tokens = self._verdict(post["phase"])
        if is_fatal:
            self._alarm = text
        else:
            self._store.delete_key(self._key(number, self._rank))  # rank 0 has read it
            if self._rank == 0 and number > 1:
                self._store.delete_key(self._key(number - 1, "verdict"))  # all ranks have posted again, so they have read it
        if text:
            failure = RankError(text)
            failure.has_lost_tokens = has_lost_tokens
            raise (error or failure) from None

    def _verdict(self, phase: str) -> Verdict:
        """Return the verdict: rank 0 compares the posts of all ranks and writes it, the others wait for it one wait longer."""
        number, decides = self.num_phases, self._rank == 0
        keys = [self._key(number, rank) for rank in range(self._size)] if decides else [self._key(number, "verdict")]
        values = self._read(keys, NUM_WAITS if decides else NUM_WAITS + 1, phase)
        if values is None:
            return self._raise_alarm(self._describe_late(phase)), True, False
        if not decides:
            text, is_fatal, has_lost_tokens = json.loads(values[0])
            return text, is_fatal, has_lost_tokens
        posts = [json.loads(value) for value in values] if len(set(values)) > 1 else []
        text = disagreement(posts) if posts else ""
        is_fatal = bool(text) and (len({each["phase"] for each in posts}) > 1 or not any("error" in each for each in posts))
        verdict = text, is_fatal, any(each.get("has_lost_tokens") for each in posts)
        self._store.set(self._key(number, "verdict"), json.dumps(verdict))
        return verdict

    def _read(self, keys: list[str], num_waits: int, phase: str) -> list[bytes] | None:
        """Wait for keys and return their values; return None after an alarm or after `num_waits` waits."""
        self._awaited = keys
        for attempt in range(num_waits):
            try:
                values = self._store.multi_get(keys)
                return values if self._alarm is None else None
            except DistStoreError:  # the wait timed out
                if attempt == 0:
                    logger.warning("waiting: %s", self._describe_late(phase))
        return None

    def _describe_late(self, phase: str) -> str:
        """Describe the ranks that have not posted, with the last activity of each; after an alarm, return its message."""
        if self._alarm is not None:
            return self._alarm
        late = [rank for rank in range(self._size) if not self._store.check([self._key(self.num_phases, rank)])]
        return lateness(phase, {rank: self._store.get(self._key("at", rank)).decode() for rank in late})

    def _report_failure(self, phase: str, error: Exception) -> None:
        """Report a failure in the collective part of a phase; raise the alarm unless all ranks fail within `GRACE_S`.

        Raises:
            RankError: The failure is the consequence of an alarm.
        """
        if self._store.check([self._key("alarm", self._rank)]):
            raise RankError(self._store.get(self._key("alarm", self._rank)).decode()) from error
        self._store.set(self._key(self.num_phases, f"failed/{self._rank}"), "")
        keys = [self._key(self.num_phases, f"failed/{rank}") for rank in range(self._size)]
        self._store.set_timeout(timedelta(seconds=GRACE_S))
        try:
            self._store.multi_get(keys)
        except DistStoreError:
            if self._alarm is not None:
                raise RankError(self._alarm) from error
            self._raise_alarm(f"rank {self._rank} failed in {phase}: {describe(error)[:MAX_TEXT]}")
        finally:
            self._store.set_timeout(self._wait)

    def _raise_alarm(self, text: str) -> str:
        """Send an alarm to all ranks. Return its message, or that of an earlier alarm, which takes precedence."""
        self._alarm = text = self._store.compare_set(self._key("alarm"), "", text).decode()
        for rank in range(self._size):
            self._store.set(self._key("alarm", rank), text)
        return text

    def _listen(self, store: Store) -> None:
        """Wait for an alarm in a thread, then interrupt the collectives and store reads that this rank waits in."""
        with suppress(DistNetworkError, DistStoreError):  # the store was closed at the end of the run
            store.wait([self._key("alarm", self._rank)], ALARM_LIFETIME)
            text = store.get(self._key("alarm", self._rank)).decode()
            if text:
                logger.error("%s", text)
                self._alarm = text
                for key in self._awaited:
                    store.set(key, json.dumps((text, True, False)))
                self._interrupt()

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("agreement", self._name, *parts)))


def agreement_of(wait_s: float, groups: Collection[ProcessGroup]) -> Agreement:
    """Return the `Agreement` of this rank in the default process group, over the store that the ranks used for rendezvous.

    An alarm breaks the process groups in `groups`, including those added after this call.
    """

    def connect() -> Store:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(address, port, is_master=False, wait_for_workers=False)

    return Agreement(
        dist.get_rank(),
        dist.get_world_size(),
        connect,
        wait_s=wait_s,
        interrupt=lambda: break_groups(groups),
    )


def break_groups(groups: Iterable[ProcessGroup]) -> None:
    """Make collectives that other threads of this process wait in raise an exception. The process groups become unusable.

    gloo has no abort. With gloo, a receive that times out closes the connections of its group, and all operations that wait on
    them fail.
    """
    for group in groups:
        if dist.get_backend(group) != "gloo":
            group.abort()
            continue
        neighbor = (dist.get_rank(group) + 1) % dist.get_world_size(group)
        with suppress(RuntimeError):
            receiving = dist.irecv(torch.empty(1), group=group, group_src=neighbor)
            if receiving is not None:
                receiving.wait(timedelta(milliseconds=1))


def disagreement(posts: Sequence[Post]) -> str:
    """Describe the ranks whose posts differ from the majority; return an empty string if all are equal or all ranks failed.

    Example: `run_data: rank 2: 3 micro-batches, others 4`
    """
    failed = {rank: post["error"] for rank, post in enumerate(posts) if "error" in post}
    if failed:
        texts = [f"rank {rank} failed in {posts[rank]['phase']}: {text}" for rank, text in failed.items()]
        return "; ".join(texts) if len(failed) < len(posts) else ""
    usual, odd = split([post["phase"] for post in posts])
    if odd:
        texts = [f"rank {rank} is in {posts[rank]['phase']}{_counts(posts[rank])}" for rank in odd]
        example = next(post for rank, post in enumerate(posts) if rank not in odd)
        return f"{'; '.join(texts)}, others in {usual}{_counts(example)}"
    texts = [text for key in sorted({key for post in posts for key in post["facts"]}) if (text := _difference(posts, key))]
    return f"{usual}: {'; '.join(texts)}" if texts else ""


def split(values: Sequence[T]) -> tuple[T, list[int]]:
    """Return the most frequent value (the first one in a tie) and the places of the values that differ from it."""
    usual = Counter(values).most_common(1)[0][0]
    return usual, [rank for rank, value in enumerate(values) if value != usual]


def lateness(phase: str, activities: Mapping[int, str]) -> str:
    """Describe the ranks that did not reach a phase in time, by their current activity."""
    if not activities:
        return f"all ranks have reached {phase}, but rank 0 did not compare them"
    return "; ".join(f"rank {rank} has not reached {phase}; it is {activity}" for rank, activity in activities.items())


def _difference(posts: Sequence[Post], key: str) -> str:
    """Describe the ranks whose value of a fact differs from the majority; return an empty string if there are none."""
    values = [post["facts"].get(key) for post in posts]
    usual, odd = split([json.dumps(value) for value in values])
    expected = json.loads(usual)
    if not odd:
        return ""
    if not isinstance(expected, list):
        return f"{'; '.join(f'rank {rank}: {values[rank]} {key}' for rank in odd)}, others {expected}"
    texts = [f"rank {rank}: {len(values[rank])} {key} ({_some(set(values[rank]) ^ set(expected))})" for rank in odd]
    return f"{'; '.join(texts)}, others {len(expected)}"


def _some(names: Collection[str]) -> str:
    """Return the first three names in sorted order, and the number of the others."""
    shown = sorted(names)[:3]
    return ", ".join([*shown, f"and {len(names) - 3} more"] if len(names) > 3 else shown)


def _counts(post: Post) -> str:
    """Return the counts among the facts of a post, in parentheses."""
    counts = [f"{value} {key}" for key, value in post["facts"].items() if isinstance(value, int)]
    return f" ({', '.join(counts)})" if counts else ""


_BLOCK = 1 << 13
"""Number of words in a block, whose sum is one term of a digest."""
_WORD = 8
"""Size of a word in bytes."""


@dataclass(frozen=True, slots=True)
class Drift:
    """Index of a tensor that differs between ranks that hold the same shard, and these ranks."""

    tensor: int
    ranks: tuple[int, ...]
    """Ranks that differ from the majority. In a tie, the value of the lowest rank is taken as that of the majority."""
    others: tuple[int, ...]


def check_replicas(learner: "Learner") -> None:
    """Compare all replicated tensors. This is a collective; either all ranks return or all ranks raise.

    Raises:
        DriftError: A tensor differs between two ranks.
    """
    if dist.get_world_size() == 1:
        return
    named = dict(named_tensors(learner))
    shards = torch.tensor([shard_of(tensor) for tensor in named.values()], device=learner.model.device)
    digests = torch.stack([digest(tensor).to(shards.device) for tensor in named.values()])
    local_2T = torch.stack([digests, shards])
    all_R2T = [torch.empty_like(local_2T) for _ in range(dist.get_world_size())]
    dist.all_gather(all_R2T, local_2T)
    digests_RT, shards_RT = torch.stack(all_R2T).unbind(dim=1)
    found = drifted(digests_RT.tolist(), shards_RT.tolist())
    if found:
        raise DriftError(drift_text(found, list(named), learner.version))


def named_tensors(learner: "Learner") -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, persistent buffers, optimizer state and moving averages by name, in the same order on all ranks."""
    from torchtitan.components.checkpointer.utils import canonical_fqn

    learner.model.reshard()
    module = learner.model.module
    names = {parameter: canonical_fqn(name) for name, parameter in module.named_parameters()}
    yield from ((name, parameter.detach()) for parameter, name in names.items())
    persistent = module.state_dict().keys()
    buffers = ((canonical_fqn(name), buffer) for name, buffer in module.named_buffers())
    yield from ((name, buffer) for name, buffer in buffers if name in persistent)
    for optimizer in learner.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names[parameter]} ({key})", value
    if learner.average is not None:
        yield from ((f"{name} (moving average)", value) for name, value in learner.average.tensors.items())


def shard_of(tensor: Tensor) -> int:
    """Return the index of this rank's shard of a tensor; ranks with the same index hold equal bytes."""
    index = 0
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is not part of the tensor's device mesh"
        for i, size, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
            index = index if placement.is_replicate() else index * size + i
    return index


def digest(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of this rank's shard of a tensor, 0-dim, on the device of the tensor.

    The digest is the sum of block sums, each multiplied by a different odd weight. A block sum is the sum of the words of a
    block, so any single changed bit changes the digest.
    """
    data = local_part(tensor).detach().contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % _WORD:
        data = data.clone()
    num_words = data.numel() // _WORD
    num_blocks = num_words // _BLOCK
    words = data[: num_words * _WORD].view(torch.int64)
    sums = torch.cat(
        [
            words[: num_blocks * _BLOCK].view(num_blocks, _BLOCK).sum(dim=1),
            words[num_blocks * _BLOCK :].sum(dim=0, keepdim=True),
            data[num_words * _WORD :].to(torch.int64),
        ]
    )
    return (sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum()


def drifted(digests_RT: Sequence[Sequence[int]], shards_RT: Sequence[Sequence[int]]) -> list[Drift]:
    """Return the tensors whose digests differ between ranks with the same shard."""
    found = []
    for tensor, (digests_R, shards_R) in enumerate(
        zip(zip(*digests_RT, strict=True), zip(*shards_RT, strict=True), strict=True)
    ):
        replicas = defaultdict(list)  # ranks by shard
        for rank, shard in enumerate(shards_R):
            replicas[shard].append(rank)
        for ranks in replicas.values():
            _, places = split([digests_R[rank] for rank in ranks])
            if places:
                odd = tuple(ranks[place] for place in places)
                found.append(Drift(tensor, odd, tuple(rank for rank in ranks if rank not in odd)))
    return found


def drift_text(found: Sequence[Drift], names: Sequence[str], version: int) -> str:
    """Return an error message with the first tensor, its ranks, and the number of other tensors that differ."""
    first = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    odd, others = (f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in (first.ranks, first.others))
    return (
        f"the trainer's replicas differ at version {version}: {names[first.tensor]} on {odd} differs from {others}{more}. Look "
        "for code that changes weights on one rank; continue from the last checkpoint."
    )
