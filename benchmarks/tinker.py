"""Measure training through Tinker's protocol over a session: `python -m benchmarks.tinker --json FILE`.

The same steps, a forward-backward pass and an optimizer step submitted together, run in turns as calls of a session, and
through HTTP with Tinker's official client in a separate process. Both use the same trainer, a model of 10 million parameters,
and the same data, so that the ratio of their speeds is the cost of the protocol.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import write_result
from titanrl import connect
from titanrl.carriers.types import AdamParams, Datum
from titanrl.config import load_config
from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model
from titanrl.serving.http import listen
from titanrl.serving.tinker import Tinker, Users
from titanrl.serving.tinker_sessions import Checkpoints
from titanrl.session.session import Session
from titanrl.session.tinkering import SessionHost

MODEL = RecipeConfig(hidden_size=384, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=64, intermediate_size=1088)
NUM_DATA, NUM_TOKENS = 16, 128


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one that is not")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client is not None:
        train_in_rounds(arguments.client)
        return
    result = asyncio.run(measure(arguments.rounds, arguments.steps))
    if arguments.json is not None:
        write_result(arguments.json, "tinker", result)
    else:
        print(json.dumps(result, indent=2))


async def measure(num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Measure both ways in turns."""
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        model_dir = Path(folder) / "model"
        create_model(model_dir, MODEL, seed=0)
        overrides = [f"model.path={model_dir}", "warm_start=null", f"output_dir={folder}/runs", "logging.console=off"]
        overrides += ["data.max_prompt_tokens=96", "rollout.max_new_tokens=32"]
        async with connect(load_config("configs/quickstart.yaml", overrides)) as session:
            host = SessionHost(session, "model", shares_files=True)
            await host.start()
            app = Tinker(host, Checkpoints(Path(folder)), Users(None))
            listener = await listen(app, ("127.0.0.1", 0))
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.tinker", "--client", listener.url),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                return await alternate(session, client, num_rounds, num_steps)
            finally:
                client.kill()
                await client.wait()
                await listener.close()
                await app.close()


async def alternate(session: Session, client: asyncio.subprocess.Process, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Return the steps per second of both ways, and their ratio, medians over the rounds."""
    assert client.stdin is not None
    assert client.stdout is not None
    seconds: dict[str, list[float]] = {"session": [], "client": []}
    data = [Datum(model_input=tokens, loss_fn_inputs=inputs) for tokens, inputs in arrays()]
    for number in range(num_rounds + 1):
        began = time.perf_counter()
        for _ in range(num_steps):
            passed = session.training.forward_backward(data, "cross_entropy")
            update = session.training.optim_step(AdamParams(learning_rate=1e-4))
            await passed
            await update
        direct = time.perf_counter() - began
        client.stdin.write(f"{num_steps}\n".encode())
        through = float(await client.stdout.readline())
        if number:
            seconds["session"].append(direct)
            seconds["client"].append(through)
    ratios = [direct / through for direct, through in zip(seconds["session"], seconds["client"], strict=True)]
    return {
        "num_data": NUM_DATA,
        "num_tokens": NUM_TOKENS,
        "steps_per_s": {name: num_steps / statistics.median(values) for name, values in seconds.items()},
        "relative": statistics.median(ratios),
        "ratios": ratios,
    }


def arrays() -> list[tuple[Any, dict[str, Any]]]:
    """Return tokens and inputs of each datum."""
    rng = np.random.default_rng(0)
    sequences = rng.integers(2, 90, (NUM_DATA, NUM_TOKENS + 1))
    weights = np.ones(NUM_TOKENS, np.float32)
    return [(each[:-1], {"target_tokens": each[1:], "weights": weights}) for each in sequences]


def train_in_rounds(url: str) -> None:
    """Take steps with the official client as standard input says; print the seconds of each round."""
    import tinker

    service = tinker.ServiceClient(base_url=url, api_key="tml-benchmark")
    model = service.create_lora_training_client(base_model="model", rank=0).result()
    data = [
        tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs)
        for tokens, inputs in arrays()
    ]
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            passed = model.forward_backward(data, "cross_entropy")
            update = model.optim_step(tinker.AdamParams(learning_rate=1e-4))
            passed.result()
            update.result()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
