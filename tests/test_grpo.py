"""Details of the loop that need no processes."""

import asyncio
import gc
from typing import Any

import pytest

from titanrl.grpo import _before


@pytest.mark.parametrize("cause", [ValueError, asyncio.CancelledError])
def test_nobody_complains_of_what_was_sent_behind_passes_that_did_not_end_well(cause: type[BaseException]) -> None:
    complaints: list[Any] = []

    async def fail() -> Any:
        raise cause

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        sent = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(cause):
            await _before(asyncio.gather(sent), asyncio.gather(fail()))
        await asyncio.wait({sent})

    asyncio.run(scenario())
    gc.collect()
    assert complaints == []
