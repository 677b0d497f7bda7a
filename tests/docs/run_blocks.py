"""Execute the Python code of pages: `python -m tests.docs.run_blocks FOLDER OVERRIDES PAGE ...`.

The blocks of Markdown files are executed in FOLDER, which is laid out like a checkout, notebooks in their own folder, and
scripts, like the processes of runs, in this checkout, whose shared templates they can use.

A page is a Markdown file, a notebook or a script of `examples/`. Its blocks or cells share one namespace and may use top-level
await. A script is imported, and its `main` receives overrides. `load_config` adds OVERRIDES, a JSON list, to those in the code,
to keep the run small. Starting a run takes a while, so all pages share the run or session of the first.
"""

import ast
import asyncio
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import nbformat

import titanrl.config
from tests.docs.blocks import ROOT, Block, blocks_of
from titanrl.config import Config

SMALLER = {"num_prompts=32": "num_prompts=4", "range(19)": "range(1)"}
"""Replacements in the code of notebooks that make their steps small."""
SCRIPTS = {
    "reinforce": ("num_steps=2", "rollout.groups_per_step=4"),
    "dpo": ("num_steps=2", "rollout.groups_per_step=4"),
    "distillation": ("num_steps=2", "rollout.groups_per_step=4", "distill.teacher.path={model}"),
    "sft_then_grpo": ("num_steps=2", "checkpoint.every_steps=0"),
}
"""Overrides that make the scripts small."""


async def run_page(page: Path, model: str) -> None:
    """Execute the code of a page in order; `model` is the directory of a model."""
    if page.suffix == ".py":
        with chdir(ROOT):
            await run_script(page, [override.format(model=model) for override in SCRIPTS[page.stem]])
        return
    namespace: dict[str, Any] = {"__name__": page.stem}
    with chdir(page.parent if page.suffix == ".ipynb" else "."):
        for block in code_of(page):
            await run_block(block, namespace)


async def run_script(path: Path, overrides: Sequence[str]) -> None:
    """Import a script and run its `main`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    await module.main(overrides)
    print(f"ran {path.relative_to(ROOT)}", flush=True)


def code_of(page: Path) -> Iterator[Block]:
    """Yield the executed blocks of a page, or the code cells of a notebook."""
    if page.suffix == ".md":
        yield from (block for block in blocks_of(page) if block.language == "python" and block.is_run and not block.title)
        return
    cells = [cell for cell in nbformat.read(page, as_version=4).cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells, start=1):
        text = cell.source
        for large, small in SMALLER.items():
            text = text.replace(large, small)
        yield Block(page=page, line=number, language="python", title="", text=text, is_run=True)


async def run_block(block: Block, namespace: dict[str, Any]) -> None:
    """Execute one block; a traceback names the line of the page."""
    source = "\n" * block.line + block.text
    code = compile(source, str(block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, namespace)
    if inspect.isawaitable(result):
        await result
    print(f"ran {block}", flush=True)


async def run_pages(pages: Sequence[Path], model: str) -> None:
    """Execute the pages one after another, with one run for all."""
    import titanrl.session.session
    from titanrl.grpo import GRPO
    from titanrl.session.session import Session

    start, close, open_session, close_session = GRPO.start, GRPO.close, titanrl.session.session._start, Session.close
    started: list[GRPO] = []

    async def start_once(self: GRPO) -> GRPO:
        if not started:
            with chdir(ROOT):
                started.append(await start(self))
        return started[0]

    async def connect_once(config: Config, *options: Any) -> Session:
        if config.trainer.lora is not None:  # adapters need a trainer of their own
            with chdir(ROOT):
                return await open_session(config, *options)
        return (started[0] if started else await GRPO(config).start()).session

    async def step_once(self: GRPO, num_steps: int | None = None) -> None:
        await self.step()

    async def close_later(self: GRPO, error: BaseException | None = None) -> None:
        pass

    async def close_another(self: Session) -> None:
        if not started or self is not started[0].session:
            await close_session(self)

    GRPO.start, GRPO.train, titanrl.session.session._start = start_once, step_once, connect_once
    GRPO.close, Session.close = close_later, close_another
    for page in pages:
        await run_page(page, model)
    Session.close = close_session
    await close(started[0])


def main(folder: str, extra: Sequence[str], pages: Sequence[Path]) -> None:
    """Execute the pages with small runs."""
    os.chdir(folder)
    load = titanrl.config.load_config
    titanrl.config.load_config = lambda path, overrides=(): load(path, [*overrides, *extra])
    sys.path.insert(0, folder)
    model = next(override for override in extra if override.startswith("model.path="))
    asyncio.run(run_pages(pages, model.removeprefix("model.path=")))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]])
    sys.stdout.flush()
    os._exit(0)  # torchmonarch's clean-up at interpreter exit takes seconds
