"""A pool of confined processes that score completions. `docs/sandbox.md` describes the threat model.

The pool starts one zygote (`titanrl.processes.zygote`), which loads the rewards and forks scoring processes in advance. By
default each process scores one group with one reward and is then killed. A completion that tampers with Python can therefore
affect only this reward of its own group. The pool never unpickles bytes from a scoring process.
"""

import asyncio
import pickle
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from titanrl.carriers.rewards import Answers
from titanrl.carriers.scores import SEPARATOR, ProcessFailure, RewardSpec, Score, parse_scores
from titanrl.config.faults import FaultsConfig
from titanrl.config.sections import SandboxConfig
from titanrl.processes.confine import SandboxUnavailable, missing_features
from titanrl.processes.sandbox import FORK_DEADLINE_S, OnRespawn, SandboxDied, Zygotes, log_respawn
from titanrl.processes.zygote import END, STARTED, Request

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

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        config: SandboxConfig,
        faults: FaultsConfig | None = None,
        on_respawn: OnRespawn = log_respawn,
    ) -> None:
        """Keep the settings; `start` starts the processes.

        Args:
            specs: Rewards.
            config: Limits of the scoring processes.
            faults: Limit on replacements of the zygote.
            on_respawn: Called after each replacement.
        """
        self._specs, self._config = specs, config
        self._faults, self._on_respawn = faults or FaultsConfig(), on_respawn
        self._zygotes: Zygotes | None = None

    async def start(self) -> None:
        """Load the rewards, and check with one process that the confinement works.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            SandboxDied: The first scoring process could not reply.
            ValueError: A reward cannot be loaded.
        """
        assert self._zygotes is None, "the pool has already been started"
        if missing := missing_features():
            raise SandboxUnavailable(
                "rewards may eval() model output, so they run only in confined processes, and this machine lacks "
                f"{'; and '.join(missing)}. Use a machine that has it: there is no unconfined mode."
            )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            self._zygotes = Zygotes(self._specs, self._config, self._faults, self._on_respawn)
            await self._zygotes.start()
            nothing = Answers(entry={}, completions=(), num_tokens=(), finish_reasons=())
            if isinstance(failure := await self._attempt(0, nothing, FORK_DEADLINE_S), str):
                raise SandboxDied(f"the first scoring process could not reply: {failure}")
            stack.pop_all()

    async def score(self, answers: Answers, *, reward: int = 0) -> list[Score]:
        """Score the answers to one prompt. Wait while `num_processes` groups are being scored.

        If the group times out or crashes its process, each answer is scored again in a separate process, so that only the
        answer at fault fails. A reward that scores the whole group in one call cannot be split: all of its answers fail. If the
        zygote dies, it is replaced, and the answers are scored again.

        Args:
            answers: Completions of one prompt.
            reward: Index of the reward.

        Returns:
            One score per answer, in order.

        Raises:
            SandboxDied: The pool is closed.
            RespawnLimitError: The zygote died too often.
        """
        num = len(answers.completions)
        if num == 0:
            return []
        scores = await self._attempt(reward, answers, self._config.timeout_s)
        if not isinstance(scores, str):
            return scores
        if self._opened().are_groups[reward] or (scores == "timeout" and num == 1):
            return [self._failed(scores)] * num
        share_s = self._config.timeout_s / min(num, _MAX_SHARES)
        alone = await asyncio.gather(*(self._attempt(reward, answers.only(index), share_s) for index in range(num)))
        return [self._failed(scores) if isinstance(scores, str) else scores[0] for scores in alone]

    async def close(self) -> None:
        """Kill all processes and wait until they have exited. Pending calls of `score` raise `SandboxDied`.

        The pool can be started again.
        """
        zygotes, self._zygotes = self._zygotes, None
        if zygotes is not None:
            await zygotes.stop()

    def _opened(self) -> Zygotes:
        if self._zygotes is None:
            raise SandboxDied("the scoring pool is closed or was never started")
        return self._zygotes

    async def _attempt(self, reward: int, answers: Answers, timeout_s: float) -> list[Score] | ProcessFailure:
        """Score the answers in one process. Kill the process afterwards, unless it may score another group."""
        texts = tuple([text[-MAX_TEXT_CHARS:] for text in answers.completions])
        zygotes = self._opened()
        token_ids = answers.token_ids if zygotes.take_token_ids[reward] else ()
        raw = answers.with_raw().raw_completions if zygotes.take_raw[reward] else ()
        raw = tuple([text[-MAX_TEXT_CHARS:] for text in raw])
        request: Request = (reward, answers.entry, texts, answers.num_tokens, answers.finish_reasons, token_ids, raw)
        max_bytes = self._max_reply_bytes(reward, answers)

        async def parse(reply: bytes) -> list[Score] | None:
            body = reply.removeprefix(STARTED).removesuffix(END)
            parsed = partial(parse_scores, body, self._specs[reward], answers.num_tokens)
            return parsed() if len(reply) <= _PARSED_AT_ONCE_BYTES else await asyncio.to_thread(parsed)

        scores = await zygotes.request(pickle.dumps(request), timeout_s, max_bytes, parse)
        if isinstance(scores, str) or texts == answers.completions:
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
