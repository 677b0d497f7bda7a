"""A pool of confined processes that score completions. `docs/sandbox.md` describes the threat model.

The pool starts one zygote (`titanrl.sandbox.zygote`), which loads the rewards and forks scoring processes in advance. By
default each process scores one group with one reward and is then killed. A completion that tampers with Python can therefore
affect only this reward of its own group. The pool never unpickles bytes from a scoring process.
"""

import asyncio
import pickle
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from titanrl.config.sections import SandboxConfig
from titanrl.rewards import Answers
from titanrl.sandbox.client import FORK_DEADLINE_S, SandboxDied, ZygoteClient
from titanrl.sandbox.confine import SandboxUnavailable, missing_features
from titanrl.sandbox.scores import SEPARATOR, ProcessFailure, RewardSpec, Score, parse_scores
from titanrl.sandbox.zygote import END, STARTED, Request

MAX_TEXT_CHARS = 1 << 20
"""Maximum length of the text that a reward receives. Longer texts lose their start, because the answer is at the end."""

_PARSED_AT_ONCE_BYTES = 1 << 16
"""Longer replies are parsed in a thread. Python switches threads between two results, so the event loop keeps running."""
_MAX_SHARES = 4
"""Maximum divisor of the group's time limit when its answers are scored separately."""


class ScoringPool:
    """Scores groups of answers, several groups at the same time.

    The pool belongs to the event loop that starts it, in any thread. Its processes are killed when that thread exits.
    """

    def __init__(self, specs: Sequence[RewardSpec], config: SandboxConfig) -> None:
        """Keep the settings; `start` starts the processes."""
        self._specs = specs
        self._config = config
        self._zygote: ZygoteClient | None = None
        self._are_groups: tuple[bool, ...] = ()

    async def start(self) -> None:
        """Load the rewards, and check with one process that the confinement works.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            SandboxDied: The first scoring process could not reply.
            ValueError: A reward cannot be loaded.
        """
        assert self._zygote is None, "the pool has already been started"
        if missing := missing_features():
            raise SandboxUnavailable(
                "rewards may eval() model output, so they run only in confined processes, and this machine lacks "
                f"{'; and '.join(missing)}. Use a machine that has it: there is no unconfined mode."
            )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            self._zygote = ZygoteClient(self._specs, self._config)
            await self._zygote.load()
            self._are_groups = self._zygote.are_groups
            nothing = Answers(entry={}, completions=(), num_tokens=(), finish_reasons=())
            if isinstance(failure := await self._attempt(0, nothing, FORK_DEADLINE_S), str):
                raise SandboxDied(f"the first scoring process could not reply: {failure}")
            stack.pop_all()

    async def score(self, answers: Answers, *, reward: int = 0) -> list[Score]:
        """Score the answers to one prompt. Wait while `num_processes` groups are being scored.

        If the group times out or crashes its process, each answer is scored again in a separate process, so that only the
        answer at fault fails. A reward that scores the whole group in one call cannot be split: all of its answers fail.

        Args:
            answers: Completions of one prompt.
            reward: Index of the reward.

        Returns:
            One score per answer, in order.

        Raises:
            SandboxDied: The scoring processes died.
        """
        num = len(answers.completions)
        if num == 0:
            return []
        scores = await self._attempt(reward, answers, self._config.timeout_s)
        if not isinstance(scores, str):
            return scores
        if self._are_groups[reward] or (scores == "timeout" and num == 1):
            return [self._failed(scores)] * num
        share_s = self._config.timeout_s / min(num, _MAX_SHARES)
        alone = await asyncio.gather(*(self._attempt(reward, answers.only(index), share_s) for index in range(num)))
        return [self._failed(scores) if isinstance(scores, str) else scores[0] for scores in alone]

    async def close(self) -> None:
        """Kill all processes and wait until they have exited. Pending calls of `score` raise `SandboxDied`.

        The pool can be started again.
        """
        if self._zygote is not None:
            zygote, self._zygote = self._zygote, None
            await zygote.stop()

    async def _attempt(self, reward: int, answers: Answers, timeout_s: float) -> list[Score] | ProcessFailure:
        """Score the answers in one process. Kill the process afterwards, unless it may score another group."""
        texts = tuple([text[-MAX_TEXT_CHARS:] for text in answers.completions])
        zygote = self._zygote
        if zygote is None:
            raise SandboxDied("the scoring pool is closed or was never started")
        token_ids = answers.token_ids if zygote.take_token_ids[reward] else ()
        request: Request = (reward, answers.entry, texts, answers.num_tokens, answers.finish_reasons, token_ids)
        max_bytes = self._max_reply_bytes(reward, answers)
        reply = await zygote.request(pickle.dumps(request), timeout_s, max_bytes)
        if reply is None:
            return "timeout"
        parse = partial(parse_scores, reply.removeprefix(STARTED).removesuffix(END), self._specs[reward], answers.num_tokens)
        scores = parse() if len(reply) <= _PARSED_AT_ONCE_BYTES else await asyncio.to_thread(parse)
        if scores is None:
            await zygote.check()
            return "crash"
        if texts == answers.completions:
            return scores
        nums_cut = [len(whole) - len(text) for whole, text in zip(answers.completions, texts, strict=True)]
        return [score.moved(num_cut) for score, num_cut in zip(scores, nums_cut, strict=True)]

    def _max_reply_bytes(self, reward: int, answers: Answers) -> int:
        """Return the maximum length of a reply to these answers."""
        spec = self._specs[reward]
        return len(STARTED) + len(END) + sum(spec.max_result_bytes(num) + len(SEPARATOR) for num in answers.num_tokens)

    def _failed(self, status: ProcessFailure) -> Score:
        timeout = (
            f"timeout: the reward did not return in time (sandbox.timeout_s={self._config.timeout_s:g}, for a whole group)"
        )
        crash = "crash: the scoring process exited, was killed by a signal, or sent a reply that is invalid or too long"
        return Score(parts={}, status=status, detail=timeout if status == "timeout" else crash)
