"""Sessions of Tinker's clients: their ends, and the weights that their samplers share."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.serving.tinker_hosts import NumberHost
from titanrl.serving.calls import Refused
from titanrl.serving.tinker_checkpoints import Checkpoints, ModelSpec
from titanrl.serving.tinker_queue import Answer, Future
from titanrl.serving.tinker_sessions import (
    NewModel,
    OpenModel,
    OpenSession,
    Sessions,
    TinkerLimits,
    Weights,
    json_answer,
)

NEW = NewModel(spec=ModelSpec(rank=0), user_metadata={})


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def sessions_of(host: NumberHost, **limits: Any) -> Sessions:
    return Sessions(host, Checkpoints(host.folder), TinkerLimits(**limits))


def create(sessions: Sessions, session: OpenSession, number: int = 0) -> Future:
    return sessions.create(session, number, 0, lambda: NEW, {})


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_session_can_end_while_it_waits_for_a_place(tmp_path: Path, num_waiting: int) -> None:
    async def end() -> None:
        host = NumberHost(tmp_path, max_models=1)
        sessions = sessions_of(host, silent_s=0.1)
        await create(sessions, sessions.add("ann", {}, None)).wait(5)
        waiting = [sessions.add("bob", {}, None) for _ in range(num_waiting)]
        for session in waiting:
            create(sessions, session)
        await asyncio.sleep(0)  # they find no place
        for session in waiting:
            sessions.end(session)
        await sessions.close()
        assert host.models == []

    run(end())


def test_models_of_a_session_are_limited(tmp_path: Path) -> None:
    async def flood() -> None:
        sessions = sessions_of(NumberHost(tmp_path), max_models=2)
        session = sessions.add("ann", {}, None)
        futures = [create(sessions, session, number) for number in range(2)]
        with pytest.raises(Refused, match="2 models") as raised:
            create(sessions, session, 2)
        assert raised.value.status == 429
        assert [create(sessions, session, number) for number in range(2)] == futures  # repeated
        await sessions.close()

    run(flood())


def test_weights_of_a_path_are_opened_once_and_freed_with_their_last_session(tmp_path: Path) -> None:
    async def share() -> None:
        host = NumberHost(tmp_path)
        sessions = sessions_of(host)
        num_opened, paths = 0, [f"tinker://a:train:{number}/sampler_weights/x" for number in range(3)]

        async def opening() -> Any:
            nonlocal num_opened
            num_opened += 1
            await asyncio.sleep(0.01)
            return await host.base()

        users = [sessions.add(name, {}, None) for name in ("ann", "bob")]
        samplers = [
            sessions.add_sampler(session, number, path, sessions.loaded.setdefault(path, Weights(opening)))
            for session in users
            for number, path in enumerate(paths)
        ]
        await asyncio.gather(*(each.weights.sampler() for each in samplers * 2))
        assert (num_opened, host.num_samplers) == (3, 3)
        sessions.end(users[0])
        await asyncio.sleep(0.01)
        assert host.num_samplers == 3
        users += [sessions.add("cleo", {}, None)]
        sessions.add_sampler(users[2], 0, None, Weights(host.base))  # never used
        for session in users:
            sessions.end(session)
        await sessions.close()
        assert (host.num_samplers, sessions.loaded) == (0, {})

    run(share())


def test_later_requests_do_not_extend_the_wait_for_a_missing_one(tmp_path: Path) -> None:
    async def arrive() -> None:
        host = NumberHost(tmp_path)
        sessions = sessions_of(host, gap_s=0.3)
        session = sessions.add("ann", {}, None)
        await create(sessions, session).wait(5)
        (model,) = session.models.values()

        async def done(model: OpenModel) -> Answer:
            return json_answer({})

        first = sessions.submit(model, 2, 0, b"2", done)  # 1 never arrives
        for seq_id in range(3, 100):
            sessions.submit(model, seq_id, 0, b"", done)
            if await first.wait(0.1) is not None:
                break
        assert seq_id < 50
        await sessions.close()

    run(arrive())


def test_model_is_freed_if_its_session_ends_when_the_wait_for_a_missing_request_does(tmp_path: Path) -> None:
    async def end() -> None:
        host = NumberHost(tmp_path)
        sessions = sessions_of(host, gap_s=0.1)
        session = sessions.add("ann", {}, None)
        await create(sessions, session).wait(5)
        (model,) = session.models.values()

        async def done() -> Answer:
            return json_answer({})

        sessions.submit(model, 2, 0, b"2", lambda _: done())  # 1 never arrives
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.1, sessions.end, session)
        time.sleep(0.2)
        await asyncio.sleep(0.01)  # both times are over when the event loop continues
        await sessions.close()
        assert host.models == []

    run(end())
