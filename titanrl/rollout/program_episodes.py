"""Episodes that a program plays: it calls the policy through the endpoint, in the protocols of OpenAI and Anthropic.

In an episode of an environment, the rollout worker asks the environment for the next messages. Here control is inverted: the
program decides when to call the policy, with which messages, and when the episode ends. The calls form a tree
(`titanrl.rollout.driver`).
"""

import asyncio
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from titanrl.base.errors import describe_user_error
from titanrl.carriers.types import Completion, GenerationRequest, OnTokens, Outcome, SamplingParams
from titanrl.config.data import EnvironmentConfig
from titanrl.data.tokenizer import Tokenizer
from titanrl.environments import EnvironmentFailure, Episode, InvalidReward, Message
from titanrl.environments.interface import readable_text
from titanrl.environments.programs import KEY, Command, ProgramResult, ProgramTask, checked_function, direct_access, result_of
from titanrl.processes.confine import SandboxUnavailable, missing_for_programs
from titanrl.processes.temporary import TemporaryFolder, private_folder
from titanrl.rollout.driver import Attempt, Context, DoesNotFit, EpisodeError, Limits, NotRenderable, StopText
from titanrl.rollout.group import GenerateTokens
from titanrl.rollout.renderers import Renderer
from titanrl.serving.app import App
from titanrl.serving.app import Limits as EndpointLimits
from titanrl.serving.calls import Call, Callers, Refused, Reply, after_end
from titanrl.serving.http import Listener, listen

MODEL = "policy"
"""Name of the policy in calls."""
COUNTED = ("overridden_calls", "refused_calls", "abandoned_calls", "nonconforming_replies")
"""Metrics of an episode: calls that asked for other sampling options than those of the run, which decides alone; requests that
got an error; calls whose client hung up before the reply, which are not trained on; and replies in another form than the client
required."""
_CALL_S, _MAX_FILES = 86_400.0, 1 << 16
_CLOSE_S = 10.0


class Programs:
    """The program of a task, and the endpoint of this worker at which all of its episodes call the policy."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Tokenizer,
        *,
        memory_bytes: int,
        stop: tuple[str, ...] = (),
        log: Path | None = None,
    ) -> None:
        """Load the program, and check that its command can be confined if it is to be.

        `memory_bytes` is the address space of a confined process. The texts `stop` end every reply, and are no part of its
        message. `log` gets the error streams of commands.

        Raises:
            SandboxUnavailable: The command is to be confined, which this machine cannot do.
            ValueError: The program cannot be loaded.
        """
        assert config.program is not None
        self.config, self.tokenizer, self.callers, self.stop = config, tokenizer, Callers(), stop
        self._folders: TemporaryFolder | None = None
        self._listener: Listener | None = None
        self._slots = asyncio.Semaphore(config.num_processes) if config.num_processes else None
        self.known_ids = frozenset(tokenizer.vocabulary.values())
        """Tokens of the vocabulary."""
        if isinstance(config.program, str):
            self._function = checked_function(config.program, config.options)
            os.environ.update(direct_access())
            return
        if config.confined and (missing := missing_for_programs()):
            raise SandboxUnavailable(f"data.environment.confined: this machine lacks {', '.join(missing)}")
        self._folders = private_folder()
        self._command = Command(
            arguments=config.program,
            returns=config.returns,
            folders=self._folders,
            confined_memory_bytes=memory_bytes if config.confined else None,
            log=log,
        )

    async def start(self) -> None:
        """Listen on a free port of the loopback interface, for as many calls as there are episodes."""
        current, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each call has a connection
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(current, min(most, _MAX_FILES)), most))
        app = App(self.callers.find, [MODEL], EndpointLimits(max_calls=sys.maxsize, call_s=_CALL_S))
        self._listener = await listen(app, ("127.0.0.1", 0), max_connections=sys.maxsize)

    @property
    def url(self) -> str:
        """Base URL of the endpoint, for OpenAI's clients."""
        assert self._listener is not None, "call start first"
        return f"{self._listener.url}/v1"

    async def run(self, task: ProgramTask, on_start: Callable[[], None]) -> ProgramResult:
        """Run the program on a task, and call `on_start` before; wait while `num_processes` commands run."""
        async with self._slots or nullcontext():
            on_start()
            if self._folders is not None:
                return await self._command.run(task)
            try:
                value = await self._function(task, **task.options)
            except (SystemExit, KeyboardInterrupt) as error:  # it would end the event loop
                raise EnvironmentFailure(f"{KEY}: it raised {describe_user_error(error)}") from error
            return result_of(self.config.returns, value)

    async def close(self) -> None:
        """Stop listening, and delete the folders of the commands."""
        if self._listener is not None:
            await self._listener.close()
        if self._folders is not None:
            self._folders.delete()


@dataclass(eq=False, slots=True)
class _Waiting:
    """A call that waits for its completion."""

    request: GenerationRequest
    completion: "asyncio.Future[Completion]"
    on_tokens: OnTokens | None = None
    """Gets the tokens while they are sampled."""
    streamed_ids: list[int] = field(default_factory=list)
    """Tokens that the client has, `[T]`."""

    def stream(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Pass sampled tokens on to the client, unless it has hung up."""
        if self.on_tokens is not None and not self.completion.done():
            self.streamed_ids += token_ids
            self.on_tokens(token_ids, logprobs)


class ProgramEpisode(Attempt):
    """An episode that a program plays. It is the caller of the episode's key."""

    def __init__(
        self,
        programs: Programs,
        episode: Episode,
        renderer: Renderer,
        limits: Limits,
        sampling: Callable[[int, int], SamplingParams],
        stop_text: StopText = lambda ids, more: "",
    ) -> None:
        """Prepare an episode, whose program `start` starts; see `Attempt` for the other arguments."""
        super().__init__(renderer, limits, sampling, stop_text)
        self._programs, self._episode, self.stop = programs, episode, programs.stop
        self._key: str | None = None
        self._program: asyncio.Task[ProgramResult] | None = None
        self._new: list[_Waiting] = []
        self._wave: list[_Waiting] = []
        self._waiting: set[_Waiting] = set()
        self._news = asyncio.Event()
        self._num_asked = 0
        self._repeats = Counter[bytes]()  # of equal conversations, whose seeds differ
        self._num_open, self._counts, self._refusal = 0, dict.fromkeys(COUNTED, 0), ""
        self._is_limited = self._is_cut = False
        self._left_s, self._since = limits.episode_timeout_s, 0.0

    async def start(self) -> None:
        """Start the program."""
        config, episode = self._programs.config, self._episode
        entry = {name: value for name, value in episode.entry.items() if config.shows_answer or name != "answer"}
        self._key = self._programs.callers.open(self)
        task = ProgramTask(
            url=self._programs.url,
            key=self._key,
            model=MODEL,
            task_id=episode.task_id,
            question=episode.question,
            entry=entry,
            seed=episode.seed,
            timeout_s=self._limits.episode_timeout_s,
            options=config.options,
        )
        self._num_open = 1  # the clock of the program runs from its start
        self._program = asyncio.create_task(self._programs.run(task, lambda: self._open(-1)), name="program")

    async def requests(self) -> Sequence[GenerationRequest]:
        """Wait for calls, and return their requests; none if the program has ended."""
        if self.is_done:
            return []
        self._wave = await self._next(set())
        return [call.request for call in self._wave]

    async def take(self, completions: Sequence[Completion]) -> None:
        """Reply to the calls of the last requests."""
        for call, completion in zip(self._wave, completions, strict=True):
            _reply(call, completion)

    async def play(self, generate: GenerateTokens) -> None:
        """Play the episode; each call is sent to the generators at once."""
        turns: set[asyncio.Task[None]] = set()

        async def turn(call: _Waiting) -> None:
            (completion,) = await generate([call.request], on_tokens=None if call.on_tokens is None else call.stream)
            _reply(call, completion)

        await self.start()
        try:
            while calls := await self._next(turns):
                turns |= {asyncio.create_task(turn(call), name="turn of a program") for call in calls}
        finally:
            for running in turns:
                running.cancel()
            await asyncio.gather(*turns, return_exceptions=True)

    async def close(self) -> None:
        """End the program and all its processes, and refuse its later calls."""
        key, self._key = self._key, None
        if key is not None:
            self._programs.callers.close(key)
        for call in self._waiting:
            if not call.completion.done():
                call.completion.set_exception(after_end())
                call.completion.exception()  # its client may have hung up
        program, self._program = self._program, None
        if program is not None and not program.done():
            program.cancel()
            await asyncio.wait([program], timeout=_CLOSE_S)

    async def call(self, call: Call, on_tokens: OnTokens | None = None) -> Reply:
        """Reply to a call of the program; see `titanrl.serving.calls.Caller`."""
        if self._key is None:
            raise after_end()
        if self._num_asked >= self._limits.max_turns:
            self._is_limited = True
            rule = f"the episode has no call left (data.environment.max_turns={self._limits.max_turns})"
            raise Refused(f"{rule}. End the episode.")
        context = self._context(call)
        self._num_asked += 1
        request = GenerationRequest(token_ids=context.token_ids, sampling=self._sampling_of(call, context))
        waiting = _Waiting(request, asyncio.get_running_loop().create_future(), on_tokens)
        self._new.append(waiting)
        self._waiting.add(waiting)
        self._open(1)
        try:
            completion = await waiting.completion
        except asyncio.CancelledError:
            self._counts["abandoned_calls"] += 1
            raise
        finally:
            self._waiting.discard(waiting)
            self._open(-1)
        num_streamed = len(waiting.streamed_ids)  # a reply is sampled again if its replica dies
        if completion.finish_reason == "abort" or completion.token_ids[:num_streamed].tolist() != waiting.streamed_ids:
            raise Refused("the completion was cancelled. Call again.", status=503)
        if call.messages is not None:
            self.messages += call.messages[context.num_known :]
        self.turn_rewards.append(0.0)
        self._is_cut = completion.finish_reason == "length" and len(completion.token_ids) == self._room(context)
        parsed = self._parsed(call, completion.token_ids.tolist())
        for number, each in enumerate(parsed.get("tool_calls", ())):
            each["id"] = f"call_{self.num_turns}_{number}"  # clients expect different ids in a conversation
        message = self._add(context, completion, parsed, (*call.stop, *call.stop_ids))
        reply = Reply(prompt_ids=context.token_ids, completion=completion, message=message)
        self._counts["nonconforming_replies"] += reply.differs_in_form(call)
        return reply

    def refused(self, refused: Refused) -> None:
        """Count an error that the program got."""
        self._counts["refused_calls"] += 1
        self._refusal = f" that was answered; the last error was: {refused}"

    def read(self, call: Call, token_ids: Sequence[int]) -> Message:
        """Return the message that the first tokens of a reply are read as."""
        message = self._parsed(call, list(token_ids))
        return message | {"content": self._without_stop(message["content"], token_ids, (*call.stop, *call.stop_ids))}

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, including special tokens."""
        return self._programs.tokenizer.token_text(token_id)

    def _context(self, call: Call) -> Context:
        tokenizer = self._programs.tokenizer
        try:
            if call.messages is not None:
                return self.tree.context(call.messages, call.tools)
            if call.prompt_ids is None:
                return self.tree.of_tokens(tuple(tokenizer.encode_start(call.text or "")))
            if unknown := set(call.prompt_ids) - self._programs.known_ids:
                raise Refused(f"prompt: the tokenizer has no token {min(unknown)}. Send tokens of its vocabulary.")
            return self.tree.of_tokens(call.prompt_ids)
        except DoesNotFit as size:
            self._is_limited = True
            limit = f"data.environment.max_conversation_tokens={self._limits.max_tokens}"
            raise Refused(f"the conversation has {size}, which leaves no room for a reply ({limit}). Shorten it.") from None
        except (NotRenderable, ValueError) as error:
            raise Refused(f"messages: {error}") from error

    def _room(self, context: Context) -> int:
        return min(self._limits.max_new_tokens, self._limits.max_tokens - len(context.token_ids))

    def _sampling_of(self, call: Call, context: Context) -> SamplingParams:
        """Return the sampling options of a call. Its seed depends on its tokens, and not on the order of parallel calls."""
        digest = blake2b(np.array(context.token_ids, np.int64).tobytes(), digest_size=7).digest()
        turn = int.from_bytes(digest, "big") + self._repeats[digest]
        self._repeats[digest] += 1
        room = self._room(context)
        sampling = self._sampling(turn, room if call.max_tokens is None else min(room, call.max_tokens))
        wanted = (call.temperature, call.top_p, call.top_k, call.min_p)
        decided = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        differs = any(value not in (None, own) for value, own in zip(wanted, decided, strict=True))
        self._counts["overridden_calls"] += differs or call.seed is not None
        return replace(
            sampling,
            stop=(*sampling.stop, *call.stop),
            stop_ids=(*sampling.stop_ids, *call.stop_ids),
            prompt_logprobs=call.prompt_logprobs,
        )

    def _parsed(self, call: Call, token_ids: list[int]) -> dict[str, Any]:
        """Return the message of a reply with all of its text. Without tools in the call, tool calls remain text."""
        if call.messages is not None:
            parsed = self._renderer.parse(token_ids, call.tools)
            if call.tools or "tool_calls" not in parsed:
                return parsed
        return {"role": "assistant", "content": readable_text(self._programs.tokenizer.decode_completion(token_ids))}

    async def _next(self, turns: "set[asyncio.Task[None]]") -> list[_Waiting]:
        """Wait for calls, and return them; none if the program has ended. Raise the exception of a failed turn."""
        program = self._program
        assert program is not None, "call start first"
        while True:
            for turn in [turn for turn in turns if turn.done()]:
                turns.discard(turn)
                turn.result()
            if program.done():
                self._finish(program)
                return []
            calls, self._new = [call for call in self._new if not call.completion.done()], []
            if calls:
                return calls
            self._news.clear()
            news = asyncio.ensure_future(self._news.wait())
            events: set[asyncio.Future[Any]] = {news, program, *turns}
            left_s = None if self._num_open else self._left_s - (self._now() - self._since)
            try:
                done, _ = await asyncio.wait(events, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                news.cancel()
            if not done:
                self._open(0)  # the program has run until now
                limit = f"data.environment.episode_timeout_s={self._limits.episode_timeout_s:g}"
                raise EpisodeError("timeout", f"the program did not end in time ({limit})")

    def _finish(self, program: "asyncio.Task[ProgramResult]") -> None:
        """End the episode with what the program returned."""
        metrics = {"calls": self.num_turns, "segments": len(self.tree.chains()), **self._counts}
        self._open(0)  # the program has run until now
        error = asyncio.CancelledError() if program.cancelled() else program.exception()
        is_short = self._is_limited or self._is_cut  # agents raise exceptions if a call is refused or a reply is cut
        if error is not None and not (is_short and self.num_turns and not isinstance(error, InvalidReward)):
            outcome: Outcome = "reward_error" if isinstance(error, InvalidReward) else "environment_error"
            is_ours = isinstance(error, EnvironmentFailure)
            raise EpisodeError(outcome, str(error) if is_ours else f"{KEY}: it raised {describe_user_error(error)}") from error
        if not self.num_turns:
            which = self._refusal or (" for whose reply it waited" if self._num_asked else "")
            raise EpisodeError("environment_error", f"{KEY}: it made no call of the policy{which}")
        self.metrics = metrics
        if error is None:
            result = program.result()
            self.rewards, self.metrics, self.is_judged = result.done.rewards, metrics | dict(result.done.metrics), True
            self.last_text = self.last_text if result.answer is None else result.answer
        self._end("length" if is_short else "stop")

    def _open(self, change: int) -> None:
        """Count the calls that wait for the policy. The clock of the program runs only while there is none."""
        if self._num_open == 0:
            self._left_s -= self._now() - self._since
            self.environment_s += self._now() - self._since
        self._num_open += change
        self._since = self._now()
        self._news.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _reply(call: _Waiting, completion: Completion) -> None:
    if not call.completion.done():  # its client may have hung up
        call.completion.set_result(completion)
