"""Processes, actors and messages on a virtual clock: torchmonarch's interface, as far as TitanRL uses it, in one thread.

Each virtual process has its own asyncio event loop and clock. A scheduler always runs the process whose next callback is due
first, measures the CPU time of the callbacks, and adds it to the clock of that process. Waiting takes no time: the scheduler
jumps to the next timer. Messages are pickled as in a real run, and arrive after the latency of the `MessageCosts`.

A process that replaces a device (`is_free`) is not charged for its CPU time; it sets timers instead.
"""

import asyncio
import errno
import heapq
import itertools
import pickle
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import titanrl.launch.generators as rollouts
import titanrl.processes.actors as actors
from titanrl.processes.actors import Answer, Asked

T = TypeVar("T")

_thread_time = time.thread_time
_ONE_RANK = SimpleNamespace(rank=0, extent=SimpleNamespace(nelements=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCosts:
    """Costs of a message between two processes that the simulation does not execute."""

    send_s: float
    """CPU seconds of the sender, without pickling."""
    receive_s: float
    """CPU seconds of the receiver, without unpickling."""
    others_s: float
    """CPU seconds of torchmonarch's threads in both processes, which delay others only if all processes share the cores."""
    latency_s: float
    """Seconds on the way."""
    bytes_per_s: float
    """Bandwidth of a connection."""


class Cores:
    """CPU cores that jobs share. A job demands a number of cores; if all demand more than there are, all slow down alike."""

    def __init__(self, world: "World", count: float) -> None:
        self._world, self._count = world, count
        self._jobs: dict[Job, None] = {}
        self._since, self._timer = 0.0, 0

    @property
    def rate(self) -> float:
        """Speed of each job, as a fraction of its speed alone."""
        demand = sum(job.demand for job in self._jobs)
        return 1.0 if demand <= self._count else self._count / demand

    def start(self, job: "Job") -> None:
        """Run a job; its `done` is called when its work is finished."""
        self._advance()
        self._jobs[job] = None
        self._set_timer()

    def stop(self, job: "Job") -> None:
        """Interrupt a job; its `left_s` is what remains of its work. Do nothing if it has finished."""
        if job in self._jobs:
            self._advance()
            del self._jobs[job]
            self._set_timer()

    def _advance(self) -> None:
        now, rate = self._world.time, self.rate
        for job in self._jobs:
            job.left_s -= (now - self._since) * rate
        self._since = now

    def _set_timer(self) -> None:
        self._timer += 1
        if self._jobs:
            due = self._world.time + max(0.0, min(job.left_s for job in self._jobs)) / self.rate
            self._world.free.post(due, self._finish, self._timer)

    def _finish(self, timer: int) -> None:
        if timer != self._timer:
            return
        self._advance()
        finished = [job for job in self._jobs if job.left_s <= 1e-9]
        for job in finished:
            del self._jobs[job]
        self._set_timer()
        for job in finished:
            job.done()


@dataclass(eq=False, slots=True)
class Job:
    """Work on shared cores."""

    left_s: float
    """Seconds of work that remain, at full speed."""
    demand: float
    """Cores that the job keeps busy at full speed."""
    done: Callable[[], None]


class World:
    """All virtual processes and their scheduler.

    `callback_s` replaces the measured CPU time by a constant per callback, so that a simulation is repeatable.
    """

    def __init__(self, costs: MessageCosts, callback_s: float | None = None) -> None:
        self.costs, self.callback_s = costs, callback_s
        self.time = 0.0
        """Start of the batch of callbacks that runs, in virtual seconds."""
        self.running: Process | None = None
        self.processes: dict[str, Process] = {}
        self.objects: list[Any] = []  # what a pickle refers to by its index
        self.failure: BaseException | None = None
        self._queue: list[tuple[float, int, Process]] = []
        self._numbers = itertools.count()
        self.free = self.process("free", is_free=True)
        """Process of everything that is not charged."""

    def process(self, name: str, cores: Cores | None = None, *, is_free: bool = False) -> "Process":
        """Create a process. `cores` are those that it shares with others; None gives it a core of its own."""
        process = self.processes[name] = Process(self, name, cores, is_free=is_free)
        return process

    def now(self) -> float:
        """Return the time on the clock of the running process."""
        return self.time if self.running is None else self.running.now()

    def schedule(self, process: "Process") -> None:
        """Queue a process for its next callback, if it has one that is earlier than its place in the queue."""
        due = process.next_due()
        if due is not None and due < process.queued_at:
            process.queued_at = due
            heapq.heappush(self._queue, (due, next(self._numbers), process))

    def run(self, process: "Process", main: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Run a coroutine in a process to its end; fail after `limit_s` virtual seconds."""
        with _patched(self):
            task: asyncio.Task[T] = process.loop.create_task(main)
            while not task.done():
                assert self._queue, "deadlock: every process waits, and no timer is set"
                due, _, next_process = heapq.heappop(self._queue)
                if due != next_process.queued_at:
                    continue  # queued again for an earlier callback
                next_process.queued_at = float("inf")
                self.time = max(self.time, due)
                if self.time > limit_s:
                    raise TimeoutError(f"the simulation has not ended after {limit_s:g} virtual seconds")
                next_process.run_batch()
                if self.failure is not None:
                    raise self.failure
                self.schedule(next_process)
            return task.result()

    def close(self) -> None:
        """Cancel what the processes were doing."""
        with _patched(self):
            for process in self.processes.values():
                process.cancel_all()


class Process:
    """A virtual process: an event loop, a clock, and the CPU time that it has used."""

    def __init__(self, world: World, name: str, cores: Cores | None, *, is_free: bool) -> None:
        self.world, self.name, self.is_free = world, name, is_free
        self.loop = _Loop(self)  # type: ignore[abstract]  # it has only what actors use
        self.busy_s = 0.0
        """CPU time of the callbacks and messages so far."""
        self.num_messages = 0
        """Messages received so far."""
        self.queued_at = float("inf")
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.Handle]] = []
        self._numbers = itertools.count()
        self._free_at, self._cores = 0.0, cores
        self._added_s, self._started, self._last_arrival, self._others_s = 0.0, 0.0, 0.0, 0.0
        self.num_cancelled = 0

    def now(self) -> float:
        """Return the time on the clock of this process."""
        if self.world.running is not self:
            return self.world.time
        return self.world.time + self._elapsed()

    def charge(self, seconds: float) -> None:
        """Add CPU time of something that the simulation does not execute."""
        if not self.is_free:
            self._added_s += seconds

    def post(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback in this process at a time. Any process may call this."""
        self.add_timer(when, asyncio.Handle(callback, args, self.loop))

    def deliver(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback for a message that arrives at a time, after earlier messages."""
        self._last_arrival = max(self._last_arrival, when)
        self.num_messages += 1
        self._others_s += self.world.costs.others_s
        self.post(self._last_arrival, callback, *args)

    def add_timer(self, when: float, handle: asyncio.Handle) -> None:
        """Run a handle at a time."""
        heapq.heappush(self.timers, (when, next(self._numbers), handle))
        self.world.schedule(self)

    def next_due(self) -> float | None:
        """Return the time of the next callback; None if there is none."""
        if self.ready:
            return self._free_at
        return max(self._free_at, self.timers[0][0]) if self.timers else None

    def run_batch(self) -> None:
        """Run all callbacks that are due, and add their CPU time to the clock."""
        world, timers, ready = self.world, self.timers, self.ready
        while timers and timers[0][0] <= world.time:
            ready.append(heapq.heappop(timers)[2])
        asyncio._set_running_loop(self.loop)
        world.running, self._added_s = self, 0.0
        self._started = _thread_time()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                if world.callback_s is not None:
                    self.charge(world.callback_s)
                handle._run()
        elapsed = self._elapsed()
        world.running = None
        asyncio._set_running_loop(None)
        self.busy_s += elapsed
        self._free_at = world.time + elapsed
        if elapsed and self._cores is not None:
            self._free_at = float("inf")
            self._cores.start(Job(elapsed, 1.0, self._release))
            if self._others_s:
                self._cores.start(Job(self._others_s, 1.0, lambda: None))
        self._others_s = 0.0

    def cancel_all(self) -> None:
        """Cancel all tasks."""
        asyncio._set_running_loop(self.loop)
        self.timers.clear()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        for _ in range(1000):
            if not self.ready:
                break
            self.ready.popleft()._run()
        asyncio._set_running_loop(None)

    def _release(self) -> None:
        self._free_at = self.world.time
        self.world.schedule(self)

    def _elapsed(self) -> float:
        if self.is_free:
            return 0.0
        measured = _thread_time() - self._started if self.world.callback_s is None else 0.0
        return measured + self._added_s


class _Loop(asyncio.AbstractEventLoop):
    """The event loop of a virtual process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def time(self) -> float:
        return self._process.now()

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._process.ready.append(handle)
        if self._process.world.running is not self._process:
            self._process.world.schedule(self._process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    async def create_server(self, *args: Any, **options: Any) -> Any:
        raise OSError(errno.EOPNOTSUPP, "a virtual process has no sockets")

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._process.add_timer(when, handle)
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> "asyncio.Task[Any]":
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # as in a thread
            future.set_exception(error)
        return future

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Ignore signals."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._process.world.failure = context.get("exception") or RuntimeError(context["message"])

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Forget cancelled timers once they are the majority, because deadlines of hours would stay for hours."""
        process = self._process
        process.num_cancelled += 1
        if process.num_cancelled > 100 and process.num_cancelled > len(process.timers) // 2:
            process.timers = [entry for entry in process.timers if not entry[2].cancelled()]
            heapq.heapify(process.timers)
            process.num_cancelled = 0


@contextmanager
def _patched(world: World) -> Iterator[None]:
    """Replace torchmonarch's ports, and the clock with which durations are measured."""

    class Channel:
        """`monarch.actor.Channel` on virtual processes."""

        def __class_getitem__(cls, kind: Any) -> type["Channel"]:
            return cls

        @staticmethod
        def open() -> "tuple[_Port, _Receiver]":
            assert world.running is not None
            receiver = _Receiver(world.running)
            return _Port(world, receiver), receiver

    before = (vars(actors)["Channel"], vars(actors)["current_rank"], vars(rollouts)["Channel"], time.perf_counter)
    vars(actors).update(Channel=Channel, current_rank=lambda: _ONE_RANK)
    vars(rollouts).update(Channel=Channel)
    time.perf_counter = world.now
    try:
        yield
    finally:
        time.perf_counter = before[3]
        vars(actors).update(Channel=before[0], current_rank=before[1])
        vars(rollouts).update(Channel=before[2])


class _Shared:
    """An object that a pickle refers to, as actors and ports are."""

    def __init__(self, world: World) -> None:
        self._key = len(world.objects)
        world.objects.append(self)
        self._world = world

    def __reduce__(self) -> Any:
        return _find, (id(self._world), self._key)


_worlds: dict[int, World] = {}


def _find(world: int, key: int) -> Any:
    return _worlds[world].objects[key]


class _Receiver:
    """Receiving end of a port."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, payload: bytes) -> None:
        """Take a message that has arrived."""
        self._queue.put_nowait(payload)

    async def recv(self) -> Any:
        """Wait for the next message."""
        payload = await self._queue.get()
        self.process.charge(self.process.world.costs.receive_s)
        return pickle.loads(payload)


class _Port(_Shared):
    """Sending end of a port."""

    def __init__(self, world: World, receiver: _Receiver) -> None:
        super().__init__(world)
        self._receiver = receiver

    def send(self, value: object) -> None:
        """Send a message."""
        payload = pickle.dumps(value, -1)
        _deliver(self._world, self._receiver.process, payload, self._receiver.put, payload)


def _deliver(world: World, target: Process, payload: bytes, callback: Callable[..., object], *args: Any) -> None:
    sender, costs = world.running, world.costs
    assert sender is not None
    sender.charge(costs.send_s)
    target.deliver(sender.now() + costs.latency_s + len(payload) / costs.bytes_per_s, callback, *args)


class Actors(_Shared):
    """An actor, or one object for many ranks, with torchmonarch's interface of a mesh."""

    def __init__(self, process: Process, actor: Any, num_ranks: int) -> None:
        super().__init__(process.world)
        _worlds[id(process.world)] = process.world
        self.process, self.actor, self._num_ranks = process, actor, num_ranks
        self._queue: asyncio.Queue[tuple[Any, Asked, tuple[Any, ...], dict[str, Any]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dispatching = process.loop.create_task(self._dispatch())

    def __getattr__(self, name: str) -> "_Endpoint":
        """Return an endpoint."""
        if name.startswith("_"):
            raise AttributeError(name)
        endpoint = self.__dict__[name] = _Endpoint(self, name)
        return endpoint

    def size(self) -> int:
        """Return the number of ranks."""
        return self._num_ranks

    def slice(self, **ranks: int) -> "Actors":
        """Return this mesh: it includes each of its ranks."""
        return self

    def take(self, message: tuple[str, Asked, tuple[Any, ...], dict[str, Any]] | bytes) -> None:
        """Queue a request that has arrived."""
        if isinstance(message, bytes):
            self.process.charge(self._world.costs.receive_s)
        name, asked, args, kwargs = pickle.loads(message) if isinstance(message, bytes) else message
        self._queue.put_nowait((getattr(type(self.actor), name), asked, args, kwargs))

    async def _dispatch(self) -> None:
        while True:
            endpoint, asked, args, kwargs = await self._queue.get()
            work = self._reply(endpoint, asked, args, kwargs)
            if endpoint._explicit_response_port:  # a concurrent endpoint
                task = self.process.loop.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                await work

    async def _reply(self, endpoint: Any, asked: Asked, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        method: Any = endpoint._method
        while hasattr(method, "__wrapped__"):
            method = method.__wrapped__
        if self._num_ranks == 1:
            await method(self.actor, asked, *args, **kwargs)
            return
        result = _Result()  # ranks of a crowd reply with the same value, or each with its own
        await method(self.actor, Asked(result), *args, **kwargs)  # type: ignore[arg-type]
        values = result.answer.value if isinstance(result.answer.value, ByRank) else None
        for rank in range(self._num_ranks):
            value = result.answer.value if values is None else values.values[rank]
            asked.replies.send(Answer(rank, self._num_ranks, value, result.answer.error))


@dataclass(slots=True)
class _Result:
    """Address that keeps a reply."""

    answer: Answer = field(init=False)

    def send(self, answer: Answer) -> None:
        """Keep a reply."""
        self.answer = answer


@dataclass(frozen=True, slots=True)
class ByRank:
    """Result of an endpoint of a crowd, by rank."""

    values: Sequence[Any]


class _Endpoint:
    """An endpoint of virtual actors."""

    def __init__(self, mesh: Actors, name: str) -> None:
        self._mesh, self._name = mesh, name

    def broadcast(self, asked: Asked, *args: Any, **kwargs: Any) -> None:
        """Send a request. It is pickled also for a stand-in, which gets the objects themselves."""
        mesh = self._mesh
        message = (self._name, asked, args, kwargs)
        payload = pickle.dumps(message, -1)
        _deliver(mesh.process.world, mesh.process, payload, mesh.take, message if mesh.process.is_free else payload)

    def call_one(self, *args: Any, **kwargs: Any) -> "asyncio.Future[Any]":
        """Send a request to one actor; return a future of its reply."""
        return actors.ask_actor(self, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> "asyncio.Future[list[Any]]":
        """Send a request to all ranks; return a future of their replies."""
        return actors.ask_ranks(self, *args, **kwargs)


class Procs:
    """Processes of one role, in which actors are spawned."""

    def __init__(self, process: Process, *, num_ranks: int = 1) -> None:
        self.process, self._num_ranks = process, num_ranks

    def spawn(self, name: str, kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Actors:
        """Create an actor in the process."""
        return Actors(self.process, kind(*args, **kwargs), self._num_ranks)
