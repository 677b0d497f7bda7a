"""Execute the Python blocks of pages: `python -m tests.docs.run_blocks OVERRIDES PAGE ...`, in a folder like a checkout.

All blocks of a page share one namespace and may await, as in a notebook. `load_config` gets the overrides, a JSON list, on top
of those in the block, so that the run is small. A start takes a while, so every page after the first gets the run of the first.
"""

import ast
import asyncio
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import titanrl.config
from tests.docs.blocks import Block, blocks_of


async def run_page(page: Path) -> None:
    """Execute the blocks of a page in order."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for block in blocks_of(page):
        if block.language == "python" and block.is_run and not block.title:
            await run_block(block, namespace)


async def run_block(block: Block, namespace: dict[str, Any]) -> None:
    """Execute one block; a traceback names the line of the page."""
    source = "\n" * block.line + block.text
    code = compile(source, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)
    if inspect.isawaitable(result):
        await result
    print(f"ran {block}", flush=True)


async def run_pages(pages: Sequence[Path]) -> None:
    """Execute the pages one after another, with one run for all of them."""
    from titanrl.grpo import GRPO

    start, close = GRPO.start, GRPO.close
    started: list[GRPO] = []

    async def start_once(self: GRPO) -> GRPO:
        if not started:
            started.append(await start(self))
        return started[0]

    async def close_later(self: GRPO) -> None:
        pass

    GRPO.start, GRPO.close = start_once, close_later
    for page in pages:
        await run_page(page)
    await close(started[0])


def main(extra: Sequence[str], pages: Sequence[Path]) -> None:
    """Execute the pages with small runs."""
    load = titanrl.config.load_config
    titanrl.config.load_config = lambda path, overrides=(): load(path, [*overrides, *extra])
    sys.path.insert(0, str(Path.cwd()))
    asyncio.run(run_pages(pages))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
    sys.stdout.flush()
    os._exit(0)  # torchmonarch's clean-up at the interpreter's end takes seconds
