"""Stand-ins of `benchmarks.scale` for what a simulation does not execute: engines, trainer ranks, copies, processes.

They keep the interfaces of the real ones, compute nothing, and take the time that a `Costs` says.
"""

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.virtual_actors import ByRank, Cores, Job, MessageCosts, Process, Procs, World
from titanrl.carriers.tables import MicroBatch
from titanrl.carriers.types import (
    AdamParams,
    Completion,
    EngineLoad,
    GenerationRequest,
    GenerationStats,
    GroupHandle,
    LossSums,
    OptimUpdate,
)
from titanrl.generator.actor import Generator, GeneratorSetup, OnSampled
from titanrl.processes.actors import Actor, concurrent_endpoint, endpoint
from titanrl.replay.groups import ShardUsage
from titanrl.trainer.rank import TrainerSetup
from titanrl.weights.records import Commit, RdmaHandle, WeightManifest

_TEXT = np.random.default_rng(0).integers(2, 95, 1 << 16)
_LOGPROBS = np.full(1 << 16, -0.5, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of a machine, or of a cluster of equal hosts, and the model on it."""

    source: str
    """Origin of the costs."""
    decode_s: float
    """Seconds of a decoding step, without its sequences."""
    decode_sequence_s: float
    """Additional seconds of a decoding step per sequence."""
    prefill_token_s: float
    """Seconds per token of a prompt, which a group's completions share."""
    generator_cores: float = 1.0
    """Cores that a decoding generator keeps busy."""
    pass_s: float
    """Seconds of a forward and backward pass over a micro-batch, without its tokens."""
    train_token_s: float
    """Additional seconds per token of a rank's rows, with their padding."""
    optim_s: float
    """Seconds of an optimizer step."""
    trainer_cores: float = 1.0
    """Cores that a computing trainer rank keeps busy."""
    weight_bytes: float
    """Bytes of a version of the weights."""
    push_s: float = 0.0
    """Seconds of a push, without its bytes."""
    push_bytes_per_s: float
    """Rate at which a trainer rank copies its part of a version."""
    pull_s: float = 0.0
    """Seconds of a pull, without its bytes."""
    pull_bytes_per_s: float
    """Rate at which a host of generators receives a version, alone."""
    serve_bytes_per_s: float
    """Rate at which the host of a trainer rank sends its part of a version, divided among the receivers."""
    replicas_per_host: int = 8
    """Generators on a host, which receives a version once."""
    ranks_per_host: int = 8
    """Trainer ranks on a host."""
    agree_s: float = 0.0
    """Seconds per rank until the ranks have agreed on a phase, on rank 0."""
    stop_probability: float
    """Probability that a sampled token ends its completion."""
    cores: float | None = None
    """Cores of the only machine, which all processes share; None if each process has its own."""
    messages: MessageCosts


@dataclass(slots=True)
class Machinery:
    """State that the stand-ins of a simulation share."""

    world: World
    costs: Costs
    num_ranks: int
    cores: Cores | None = field(init=False)
    """The cores that all processes share, if they do."""
    links: Cores = field(init=False)
    """The links of the trainer's hosts: as many bytes per second as they send together."""
    train_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    num_tokens: int = 0
    arrivals: dict[tuple[int, int], "asyncio.Future[None]"] = field(default_factory=dict)
    """Receptions by host and version."""

    def __post_init__(self) -> None:
        self.cores = None if self.costs.cores is None else Cores(self.world, self.costs.cores)
        num_hosts = math.ceil(self.num_ranks / self.costs.ranks_per_host)
        self.links = Cores(self.world, num_hosts * self.costs.serve_bytes_per_s)

    def own_cores(self) -> Cores:
        """Return the shared cores, or cores of a process's own."""
        return self.cores or Cores(self.world, math.inf)

    async def work(self, seconds: float, demand: float) -> None:
        """Compute on the shared cores, or on a separate device."""
        if self.cores is None:
            await asyncio.sleep(seconds)
        else:
            await run_job(self.cores, seconds, demand)

    async def receive(self, replica: int, version: int) -> None:
        """Wait until a replica's host has received a version over the trainer's links; the host's first replica starts it."""
        costs = self.costs
        if self.cores is not None:
            await run_job(self.cores, costs.pull_s + costs.weight_bytes / costs.pull_bytes_per_s, 1.0)
            return
        key = (replica // costs.replicas_per_host, version)
        if key not in self.arrivals:
            arrival = self.arrivals[key] = asyncio.get_running_loop().create_future()
            await asyncio.sleep(costs.pull_s)
            await run_job(self.links, costs.weight_bytes / costs.pull_bytes_per_s, costs.pull_bytes_per_s)
            arrival.set_result(None)
            self.arrivals = {each: when for each, when in self.arrivals.items() if each[1] >= version - 2}
        else:
            await self.arrivals[key]


async def run_job(cores: Cores, seconds: float, demand: float) -> None:
    """Run a job to its end."""
    finished = asyncio.get_running_loop().create_future()

    def finish() -> None:
        if not finished.done():
            finished.set_result(None)

    cores.start(Job(seconds, demand, finish))
    await finished


@dataclass(slots=True)
class _Group:
    result: Future[list[Completion]]
    completions: list[Completion | None]
    num_missing: int
    tickets: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Running:
    """A sequence in the batch."""

    start: float
    """Value of the engine's count of decoding steps when it joined."""
    num_tokens: int
    is_truncated: bool
    group: _Group
    index: int


class TimedEngine:
    """The interface of `EngineLoop`, with an engine that batches continuously and decodes in the time of the costs.

    A sequence joins the batch when it has room, and ends after a random number of tokens, which depends on its seed alone.
    """

    def __init__(self, machinery: Machinery, max_num_seqs: int) -> None:
        self.load = EngineLoad(num_requests=0, num_queued=0)
        self._machinery, self._max_num_seqs = machinery, max_num_seqs
        self._cores = machinery.own_cores()
        self._commands: deque[tuple[Callable[[Any], Any], Future[Any], bool]] = deque()
        self._queued: deque[tuple[int, GenerationRequest, _Group, int]] = deque()
        self._running: dict[int, _Running] = {}
        self._ends: list[tuple[float, int]] = []  # of the sequences in the batch: count of steps, ticket
        self._tickets = itertools.count()
        self._num_steps = 0.0  # decoding steps so far, with the part of the current one
        self._other_s = 0.0  # work besides decoding, before the next step
        self._job: Job | None = None
        self._job_other_s = self._step_s = 0.0
        self._started, self._since, self._busy_s, self._num_tokens = 0.0, machinery.world.now(), 0.0, 0
        self._swaps: list[tuple[float, int]] = [(0.0, -1)]  # count of steps from which a version samples

    async def submit(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        num_kept: Sequence[int],
        *,
        when_drained: bool = False,
        on_sampled: OnSampled | None = None,
    ) -> list[Future[list[Completion]]]:
        """Add requests; return one future per group. No simulated client asks for partial completions."""
        added: list[Future[list[Completion]]]
        added = await self.call(lambda engine: self._add(groups, num_kept), when_drained=when_drained)
        return added

    async def call(self, run: Callable[[Any], Any], *, when_drained: bool = False) -> Any:
        """Run a function between two steps."""
        result: Future[Any] = Future()
        self._commands.append((run, result, when_drained))
        self._pump()
        return await asyncio.wrap_future(result)

    def take_stats(self) -> GenerationStats:
        """Return the work since the previous call."""
        now = self._machinery.world.now()
        stats = GenerationStats(num_tokens=self._num_tokens, busy_s=self._busy_s, wall_s=now - self._since, num_replicas=1)
        self._num_tokens, self._busy_s, self._since = 0, 0.0, now
        return stats

    def update_weights(self, version: int, fill: Callable[[Any], None]) -> None:
        """Sample with a version from now on."""
        self._swaps = [*self._swaps[-8:], (self._num_steps, version)]

    def restart(self) -> None:
        """Start the running sequences again."""
        for running in self._running.values():
            running.start = self._num_steps
        self._ends = [(self._num_steps + running.num_tokens, ticket) for ticket, running in self._running.items()]
        heapq.heapify(self._ends)

    def invalidate(self, reason: str) -> None:
        """Do nothing."""

    def _pump(self) -> None:
        """Run the commands that may run, and decode."""
        self._pause()
        while self._commands:
            run, result, when_drained = self._commands[0]
            if when_drained and (self._running or self._queued):
                break
            self._commands.popleft()
            try:
                result.set_result(run(self))
            except Exception as error:  # belongs to the caller
                result.set_exception(error)
        self._resume()

    def _add(self, groups: Sequence[Sequence[GenerationRequest]], num_kept: Sequence[int]) -> list[Future[list[Completion]]]:
        results = []
        for requests, num_missing in zip(groups, num_kept, strict=True):
            group = _Group(Future(), [None] * len(requests), num_missing)
            if not requests:
                group.result.set_result([])
            for index, request in enumerate(requests):
                ticket = next(self._tickets)
                group.tickets.add(ticket)
                self._queued.append((ticket, request, group, index))
            if requests:
                self._other_s += len(requests[0].token_ids) * self._machinery.costs.prefill_token_s
            results.append(group.result)
        return results

    def _pause(self) -> None:
        """Interrupt the decoding, and count the steps that it has made."""
        if self._job is None:
            return
        job, self._job = self._job, None
        self._cores.stop(job)
        now = self._machinery.world.now()
        self._busy_s += now - self._started
        self._machinery.decode_busy_s += now - self._started
        total = self._job_other_s + (self._ends[0][0] - self._num_steps) * self._step_s
        done_s = total - max(0.0, job.left_s)
        self._other_s = max(0.0, self._job_other_s - done_s)
        self._num_steps += max(0.0, done_s - self._job_other_s) / self._step_s

    def _resume(self) -> None:
        """Fill the batch and decode until the next sequence ends."""
        while self._queued and len(self._running) < self._max_num_seqs:
            ticket, request, group, index = self._queued.popleft()
            if ticket not in group.tickets:
                continue
            limit = request.sampling.max_new_tokens
            draw = ((request.sampling.seed or 0) + 0.5) / 2**63  # seeds are hashes of 63 bits
            length = limit + 1 if not self._stop else 1 + int(math.log(draw) / math.log1p(-self._stop))
            self._running[ticket] = _Running(self._num_steps, min(length, limit), length > limit, group, index)
            heapq.heappush(self._ends, (self._num_steps + min(length, limit), ticket))
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        num = len(self._running) + len(self._queued)
        self.load = EngineLoad(num_requests=num, num_queued=len(self._queued), admits=not self._commands)
        if not self._running:
            return
        costs = self._machinery.costs
        self._step_s = costs.decode_s + costs.decode_sequence_s * len(self._running)
        self._job_other_s = self._other_s
        seconds = self._job_other_s + (self._ends[0][0] - self._num_steps) * self._step_s
        self._started = self._machinery.world.now()
        self._job = Job(seconds, costs.generator_cores, self._finish)
        self._cores.start(self._job)

    @property
    def _stop(self) -> float:
        return self._machinery.costs.stop_probability

    def _finish(self) -> None:
        self._pause()
        while self._ends and self._ends[0][0] <= self._num_steps + 1e-6:
            _, ticket = heapq.heappop(self._ends)
            if (running := self._running.pop(ticket, None)) is not None:
                self._deliver(ticket, running)
        self._pump()

    def _deliver(self, ticket: int, running: _Running) -> None:
        group = running.group
        group.tickets.discard(ticket)
        start = ticket % (len(_TEXT) - running.num_tokens)
        tokens = slice(start, start + running.num_tokens)
        versions = np.full(running.num_tokens, self._swaps[0][1])
        for count, version in self._swaps:
            versions[max(0, math.ceil(count - running.start)) :] = version
        group.completions[running.index] = Completion(
            token_ids=_TEXT[tokens],
            logprobs=_LOGPROBS[tokens],
            versions=versions,
            finish_reason="length" if running.is_truncated else "stop",
        )
        self._num_tokens += running.num_tokens
        self._machinery.num_tokens += running.num_tokens
        group.num_missing -= 1
        if group.num_missing == 0:
            for other in group.tickets:
                self._running.pop(other, None)
            group.tickets = set()
            group.result.set_result([completion for completion in group.completions if completion is not None])


class _Puller:
    """The methods of a `Puller` that a generator calls."""

    def take_received(self) -> int:
        return 0

    def close(self) -> None:
        """Do nothing."""


class TimedGenerator(Generator):
    """The real actor, with a timed engine and timed copies."""

    def __init__(self, machinery: Machinery, numbers: "itertools.count[int]", setup: GeneratorSetup) -> None:
        super().__init__(setup)
        self._puller = _Puller()  # type: ignore[assignment]
        self._machinery, self._replica = machinery, next(numbers)

    @endpoint
    async def start(self) -> None:
        """Build the timed engine."""
        self._loop = TimedEngine(self._machinery, self._setup.config.max_num_seqs)  # type: ignore[assignment]

    async def _fetch(self, commit: Commit, puller: Any) -> tuple[Callable[[Any], None], bool]:
        await self._machinery.receive(self._replica, commit.version)
        return lambda engine: None, True


class TimedTrainer(Actor):
    """All trainer ranks."""

    def __init__(self, machinery: Machinery, setup: TrainerSetup) -> None:
        self._machinery, self._row_tokens = machinery, setup.config.trainer.row_tokens
        self._version, self._busy_s = 0, 0.0

    @endpoint
    async def start(self) -> None:
        """Do nothing."""

    @endpoint
    async def load_model(self, model_dir: Path) -> None:
        """Do nothing."""

    @endpoint
    async def forward_backward(
        self, microbatch: MicroBatch, proximal_version: int | None, reference_version: int | None
    ) -> LossSums:
        """Take the time of the rank with the most rows, which are padded to their full length."""
        costs = self._machinery.costs
        num_rows = max(1, *map(len, microbatch.rows))
        await self._compute(costs.pass_s + num_rows * self._row_tokens * costs.train_token_s)
        num_sequences = sum(len(rows.sequences) for rows in microbatch.rows)
        return LossSums(
            sums={"num_tokens": float(num_sequences), "loss/policy": 0.0, "lag/0": 0.0, "lag/0/logprob_abs": 0.0}, maxima={}
        )

    @endpoint
    async def optim_step(self, params: AdamParams, completes: bool) -> OptimUpdate:
        """Increase the version."""
        await self._compute(self._machinery.costs.optim_s)
        self._version += 1
        busy_s, self._busy_s = self._busy_s, 0.0
        return OptimUpdate(version=self._version, grad_norm=1.0, skipped=False, busy_s=busy_s)

    @endpoint
    async def push_weights(self, version: int) -> ByRank | WeightManifest:
        """Copy the parts of a version, and return a manifest per rank."""
        costs, num_ranks = self._machinery.costs, self._machinery.num_ranks
        part = int(costs.weight_bytes) // num_ranks
        await self._machinery.work(costs.push_s + part / costs.push_bytes_per_s, costs.trainer_cores * num_ranks)
        handles = [
            RdmaHandle(b"%300d" % rank, b"%301d" % rank, part) for rank in range(num_ranks)
        ]  # as large as pickled buffers
        manifests = [WeightManifest(version, n, f"{n:016x}", part, None, version, (handles[n],)) for n in range(num_ranks)]
        return ByRank(manifests) if num_ranks > 1 else manifests[0]

    async def _compute(self, seconds: float) -> None:
        machinery = self._machinery
        started = machinery.world.now()
        costs, num_ranks = machinery.costs, machinery.num_ranks
        await machinery.work(seconds + costs.agree_s * num_ranks, costs.trainer_cores * num_ranks)
        self._busy_s += machinery.world.now() - started
        machinery.train_busy_s += machinery.world.now() - started

    @endpoint
    async def close(self) -> None:
        """Do nothing."""


class TimedNews(Actor):
    """The trainer's list of shards, as one rank."""

    @concurrent_endpoint
    async def use(self, number: int, shard: Any | None) -> None:
        """Do nothing."""


class SizedPayloads:
    """`Payloads` that keeps the sizes of groups instead of their tokens."""

    def __init__(self) -> None:
        self._sizes: dict[int, tuple[GroupHandle, int]] = {}
        self._num_bytes = 0

    @property
    def usage(self) -> ShardUsage:
        """Size of all stored groups."""
        return ShardUsage(num_bytes=self._num_bytes, num_spilled_bytes=0)

    def has_room(self, parts: Sequence[bytes]) -> bool:
        """Return True: sizes need no disk."""
        return True

    def put(self, handle: GroupHandle, parts: Sequence[bytes]) -> None:
        """Count a group."""
        size = sum(map(len, parts))
        self._num_bytes += size - self._sizes.get(handle.location, (handle, 0))[1]
        self._sizes[handle.location] = handle, size

    def drop(self, handles: Sequence[GroupHandle]) -> None:
        """Forget groups."""
        for handle in handles:
            if handle.location in self._sizes and self._sizes[handle.location][0] == handle:
                self._num_bytes -= self._sizes.pop(handle.location)[1]


class TimedFleet:
    """`Fleet` of virtual processes."""

    def __init__(self, machinery: Machinery) -> None:
        self._machinery = machinery

    def prepare(self, kind: str, environment: Mapping[str, str], load: Callable[[], None]) -> None:
        """Start no template."""

    async def template(self, kind: str) -> None:
        """Return no template."""

    async def retire(self, role: str) -> None:
        """Fail: no virtual process dies, so none is replaced."""
        raise AssertionError(f"{role} died")

    async def join_process_group(self, *arguments: Any, **options: Any) -> None:
        """Do nothing."""

    def spawn(self, role: str, *arguments: Any) -> Procs:
        """Create the processes of a role; the trainer's ranks and the generators are free."""
        machinery = self._machinery
        world: World = machinery.world
        if role == "trainer":
            return _TrainerProcs(world.free, num_ranks=machinery.num_ranks)
        process: Process = world.free if role.startswith("generator") else world.process(role, machinery.cores)
        return Procs(process)


class _TrainerProcs(Procs):
    def spawn(self, name: str, kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name != "trainer":
            return Procs(self.process).spawn(name, kind, *args, **kwargs)
        return super().spawn(name, kind, *args, **kwargs)


def parts_without_hosts(config: Any) -> Any:
    """Return the hosts of a run that has only virtual ones."""
    return SimpleNamespace(
        config=config,
        store=None,
        trainer=None,
        of_generator=lambda replica: None,
        of_worker=lambda worker: None,
        are_alive=lambda: True,
    )
