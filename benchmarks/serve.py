"""Measure the cost of the HTTP endpoint over the engine: `python -m benchmarks.serve --json FILE`.

The same requests run alternately as calls of a session, all in one message or each in a message of its own, and as HTTP
requests of a client in a separate process, plain and streamed. The cost per call is CPU time of the process that serves,
without the client and the engine, and is measured with the tiny model of the quick start. The throughput is measured with a
model of 100 million parameters; the client takes part of the cores then. The weights are random. The same seeds give the same
tokens in all variants.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import write_result
from titanrl import connect
from titanrl.carriers.types import Completion, GenerationRequest, SamplingParams
from titanrl.config import load_config
from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model
from titanrl.serving.app import App
from titanrl.serving.http import listen
from titanrl.session.session import Session

TINY = RecipeConfig()
LARGE = RecipeConfig(hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64, intermediate_size=2560)
PROMPT_TOKENS = 32
VARIANTS = {
    "tokens": ("/inference/v1/generate", False),
    "chat": ("/v1/chat/completions", False),
    "chat stream": ("/v1/chat/completions", True),
}
"""Path of each way to ask through the endpoint, and whether the response is a stream."""


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that is not")
    parser.add_argument("--large", type=int, nargs=2, default=[16, 64], metavar=("CALLS", "TOKENS"), help="large model's load")
    parser.add_argument("--only", choices=["tiny", "large"], help="measure only one model")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        asyncio.run(ask_in_rounds(arguments.client))
        return
    result = {}
    if arguments.only != "large":
        result["tiny"] = asyncio.run(measure(TINY, num_calls=64, num_tokens=16, num_rounds=arguments.rounds))
    calls, tokens = arguments.large
    if arguments.only != "tiny":
        result["large"] = asyncio.run(measure(LARGE, num_calls=calls, num_tokens=tokens, num_rounds=arguments.rounds))
    if arguments.json is not None:
        write_result(arguments.json, "serve", result)
    else:
        print(json.dumps(result, indent=2))


async def measure(recipe: RecipeConfig, *, num_calls: int, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Measure all variants alternately with one model."""
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        model_dir = Path(folder) / "model"
        create_model(model_dir, recipe, seed=0)
        lengths = [f"data.max_prompt_tokens={PROMPT_TOKENS}", f"rollout.max_new_tokens={num_tokens}"]
        overrides = [f"model.path={model_dir}", "warm_start=null", f"output_dir={folder}/runs", "logging.console=off", *lengths]
        async with connect(load_config("configs/quickstart.yaml", overrides), training=False) as session:
            speaker = session.speaker()
            listener = await listen(App(lambda key: speaker, ["policy"]), ("127.0.0.1", 0))
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.serve", "--client", listener.url),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                return await alternate(session, client, num_calls, num_tokens, num_rounds)
            finally:
                client.kill()
                await client.wait()
                await listener.close()


async def alternate(
    session: Session, client: asyncio.subprocess.Process, num_calls: int, num_tokens: int, num_rounds: int
) -> dict[str, Any]:
    """Return the cost and the throughput of each variant, medians over the rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ("engine", "calls", *VARIANTS)}
    cpu_ms: dict[str, list[float]] = {name: [] for name in seconds}
    counts = list[int]()

    async def direct() -> int:
        requests = requests_of(num_calls, num_tokens)
        sampled = await asyncio.gather(*(session.sampling.generate([request]) for request in requests))
        return sum(len(completion.token_ids) for (completion,) in sampled)

    async def one_by_one() -> int:
        calls = list[asyncio.Task[list[Completion]]]()
        for request in requests_of(num_calls, num_tokens):
            calls.append(asyncio.create_task(session.sampling.generate([request])))
            # A call becomes a message three ticks later. The generator gets one for each call, as from independent clients.
            for _ in range(3):
                await asyncio.sleep(0)
        return sum(len(completion.token_ids) for (completion,) in await asyncio.gather(*calls))

    async def asked(path: str, stream: bool) -> int:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write((json.dumps([path, stream, num_calls, num_tokens]) + "\n").encode())
        return int(await client.stdout.readline())

    works: dict[str, Callable[[], Awaitable[int]]] = {"engine": direct, "calls": one_by_one}
    for name, (path, stream) in VARIANTS.items():
        works[name] = lambda path=path, stream=stream: asked(path, stream)  # type: ignore[misc]
    for number in range(num_rounds + 1):
        for name, work in works.items():
            began, cpu = time.perf_counter(), time.process_time()
            counts.append(await work())
            if number:
                seconds[name].append(time.perf_counter() - began)
                cpu_ms[name].append(1000 * (time.process_time() - cpu) / num_calls)
    assert len(set(counts)) == 1, f"all variants must sample the same tokens (got {counts})"
    result: dict[str, Any] = {"num_calls": num_calls, "tokens_per_round": counts[0]}
    for name in seconds:
        result[name] = {
            "tokens_per_s": counts[0] / statistics.median(seconds[name]),
            "relative_throughput": statistics.median(
                engine / own for engine, own in zip(seconds["engine"], seconds[name], strict=True)
            ),
            "cpu_ms_per_call": statistics.median(cpu_ms[name]),
            "added_cpu_ms": [own - calls for calls, own in zip(cpu_ms["calls"], cpu_ms[name], strict=True)],
        }
    return result


def requests_of(count: int, num_tokens: int) -> list[GenerationRequest]:
    """Return requests with different prompts and seeds."""
    return [
        GenerationRequest(
            token_ids=tuple(prompt_of(place)),
            sampling=SamplingParams(max_new_tokens=num_tokens, temperature=1.0, seed=place),
        )
        for place in range(count)
    ]


def prompt_of(place: int) -> list[int]:
    """Return the tokens of a prompt: printable characters, so that it can also be sent as text."""
    return [2 + (7 * place + index) % 90 for index in range(PROMPT_TOKENS - 1)]


async def ask_in_rounds(url: str) -> None:
    """Send requests as standard input says; print the number of sampled tokens of each round."""
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=256)) as client:
        for line in sys.stdin:
            path, stream, count, num_tokens = json.loads(line)
            counts = await asyncio.gather(*(ask(client, path, stream, place, num_tokens) for place in range(count)))
            print(sum(counts), flush=True)


async def ask(client: httpx.AsyncClient, path: str, stream: bool, place: int, num_tokens: int) -> int:
    """Send one request; return the number of sampled tokens."""
    options: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 1.0, "seed": place}
    if path == "/inference/v1/generate":
        response = await client.post(path, json={"token_ids": prompt_of(place), "sampling_params": options})
        return len(response.json()["choices"][0]["token_ids"])
    text = "".join(chr(0x20 + token - 2) for token in prompt_of(place))
    body = {"messages": [{"role": "user", "content": text}], "stream": stream, **options}
    if not stream:
        return int((await client.post(path, json=body)).json()["usage"]["completion_tokens"])
    lines: Sequence[str] = []
    async with client.stream("POST", path, json=body | {"stream_options": {"include_usage": True}}) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    return int(json.loads(lines[-1].removeprefix("data: "))["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
