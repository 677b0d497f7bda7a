"""Fuzzing targets. Each creates one hostile input, lets TitanRL read it, and returns the resulting exit code.

Any exception is a failure. A target raises `Failed` if TitanRL's reply is wrong although it raised nothing.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from random import Random

from rich.console import Console

from tests.fuzz.mutations import changed_bytes, json_value, scalar
from tests.recorded import record, record_group, recorded
from titanrl.base.files import COMMIT_FILE, DamagedError, digests_of
from titanrl.carriers.record import FOLDER
from titanrl.carriers.types import StepMetrics
from titanrl.config import Config, ConfigError, load_config
from titanrl.config.dry_run import print_dry_run
from titanrl.config.errors import BrokenRules
from titanrl.config.load import sections, shipped_configs
from titanrl.config.sections import RecipeConfig
from titanrl.data.examples import read_examples
from titanrl.launch.preflight import broken_rules, check_data, policy_tokenizer
from titanrl.metrics.reading import open_run, read_metrics
from titanrl.metrics.report import conclude
from titanrl.metrics.run_directory import RunDirectory
from titanrl.models.directory import model_shape, read_weight_files
from titanrl.models.recipe import create_model
from titanrl.run.checkpoints import RunState, complete_checkpoint, resumable, set_aside

REPO = Path(__file__).parents[2]
KEYS = tuple(f"{section.path}.{key}".lstrip(".") for section in sections() for key in section.keys)
COMMAND_LIMIT_S = 20.0


MORE_OPTIONS = (
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "quantization_config",
    "transformers_weights",
)
"""Options of config.json that the tiny model does not have."""


class Failed(AssertionError):
    """A wrong reply."""


def overrides(rng: Random, folder: Path) -> int:
    """Load a built-in configuration with hostile overrides."""
    runnable = ("quickstart", "sft_quickstart") * 5  # others need accelerators
    return checked(lambda: load_config(rng.choice((*runnable, *shipped_configs())), hostile_overrides(rng)))


def files(rng: Random, folder: Path) -> int:
    """Load a damaged configuration file."""
    path = folder / "run.yaml"
    path.write_bytes(damaged_config(rng))
    return checked(lambda: load_config(path))


def jsonl(rng: Random, folder: Path) -> int:
    """Read hostile prompts or hostile fine-tuning examples."""
    path = folder / "data.jsonl"
    path.write_bytes(hostile_lines(rng, ("prompt", "answer") if (is_rl := rng.random() < 0.5) else ("prompt", "completion")))
    try:
        if is_rl:
            small = ("warm_start=null", "data.source=jsonl", "evaluation.num_prompts=20")
            check_data(load_config("quickstart", [*small, f"data.path={path}"]), {})
        else:
            overlong = rng.choice(("error", "skip", "truncate"))
            config = load_config("sft_quickstart", [f"sft.path={path}", f"sft.overlong={overlong}"])
            read_examples(config, policy_tokenizer(config))
    except ValueError as error:
        if not (is_rl or isinstance(error, BrokenRules)):  # the child that checks prompts reports any ValueError
            raise
        return refused(str(error))
    return 0


def models(rng: Random, folder: Path) -> int:
    """Check a model directory with hostile options, or damaged weight files."""
    model = Path(shutil.copytree(whole_model(folder), folder / "model"))
    if rng.random() < 0.5:
        config = json.loads((model / "config.json").read_text())
        keys = (*config, *MORE_OPTIONS)
        hostile = ", ".join(f"{json.dumps(rng.choice(keys))}: {json_value(rng)}" for _ in range(rng.choice((1, 1, 2, 4))))
        (model / "config.json").write_text(f"{json.dumps(config)[:-1]}, {hostile}}}", errors="replace")
    else:
        damage(rng, rng.choice(sorted(model.iterdir())))
    return checked(lambda: load_config("quickstart", [f"model.path={model}", "warm_start=null"]))


def checkpoints(rng: Random, folder: Path) -> int:
    """Resume from a damaged run directory; a checkpoint that is accepted must have the original bytes."""
    run_dir = folder / "run"
    shutil.copytree(whole_run(folder), run_dir)
    for _ in range(rng.choice((1, 1, 2, 4, 10))):
        with suppress(OSError):  # such as an existing name
            damage(rng, rng.choice([path for path in sorted(run_dir.rglob("*")) if path != run_dir / "checkpoints"]))
    try:
        found = resumable(run_dir)
    except ConfigError as error:
        return refused(str(error))
    finally:
        if not conclude(run_dir, code=1, cause="fuzz", num_steps=9):
            raise Failed("no last lines")
    step = f"checkpoints/step-{found.state.step}"
    if bytes_below(run_dir / step) != bytes_below(whole_run(folder) / step):
        raise Failed(f"{step} was accepted, but its files have changed")
    try:
        with closing(
            RunDirectory(run_dir, resume_step=found.state.step, resume_index=found.state.next_index, warn=str)
        ) as directory:
            directory.log(StepMetrics(step=found.state.step + 1, version=1, values={}))
    except OSError as error:  # such as a folder in place of a file
        return 1 if str(run_dir) in str(error) else refused("")
    set_aside(run_dir / "checkpoints", found.state.step)
    # A link to /dev/null keeps nothing, and one to a missing file lets appending make that file; neither is read.
    written = directory.metrics.is_file() and not directory.metrics.is_symlink()
    steps = [row["step"] for row in read_metrics(directory.metrics)] if written else [found.state.step + 1]
    if max(steps) != found.state.step + 1 or any(index >= found.state.next_index for index in recorded(run_dir, "rollouts")):
        raise Failed("lines of later steps remain")
    return 0


def records(rng: Random, folder: Path) -> int:
    """Read the damaged record of a run."""
    run_dir = folder / "run"
    shutil.copytree(whole_run(folder), run_dir)
    files = sorted((run_dir / FOLDER).iterdir())
    for path in rng.sample(files, rng.randrange(1, len(files) + 1)):
        content = path.read_bytes()
        path.write_bytes(rng.choice((changed_bytes(rng, content), content[: rng.randrange(len(content))], content + b"{")))
    run = open_run(run_dir)
    read: list[object] = [run.evaluations(), run.spans(), run.processes(), run.starts(), run.dropped(), run.advantages()]
    damaged = 0
    for group in run.groups():
        try:
            read.append([run.token_texts(each["token_ids"]) for segments in group.tokens() for each in segments])
        except DamagedError:
            damaged = 1
    for hits in (run.search("1"), run.search(reward=(0, None), step=(0, 1e300)), run.search("1", kind="evaluations")):
        for number in range(len(hits)):
            try:
                read.append(hits[number].completion)
            except DamagedError:
                damaged = 1
    for segment in run.trained():
        try:
            read.append(segment.columns())
        except DamagedError:
            damaged = 1
    return damaged


def commands(rng: Random, folder: Path) -> int:
    """Run the real command on hostile arguments, files, prompts or checkpoints; it must not start a run."""
    match rng.randrange(4):
        case 0:
            return command(
                "train", "--config", rng.choice(("quickstart", "sft_quickstart")), "--dry-run", *hostile_overrides(rng)
            )
        case 1:
            (folder / "run.yaml").write_bytes(damaged_config(rng))
            return command("train", "--config", str(folder / "run.yaml"), "--dry-run")
        case 2:
            path = folder / "data.jsonl"
            path.write_bytes(hostile_lines(rng, ("prompt", "answer")))
            data = ("warm_start=null", "data.source=jsonl", f"data.path={path}")
            return command("train", "--config", "quickstart", "--dry-run", *data)
        case _:
            run_dir = folder / "run"
            shutil.copytree(whole_run(folder), run_dir)
            (run_dir / "config.yaml").write_text((REPO / "configs/quickstart.yaml").read_text())
            for path in run_dir.glob("checkpoints/*/*"):
                path.write_bytes(changed_bytes(rng, path.read_bytes()) + b"x")
            return command("train", "--resume", str(run_dir))


TARGETS: dict[str, Callable[[Random, Path], int]] = {
    function.__name__: function for function in (overrides, files, jsonl, models, checkpoints, records, commands)
}


# Inputs


def hostile_overrides(rng: Random) -> list[str]:
    return [text.replace("\0", "") for text in (hostile_override(rng) for _ in range(rng.choice((1, 1, 2, 4))))]


def hostile_override(rng: Random) -> str:
    key = rng.choice(KEYS)
    match rng.randrange(8):
        case 0:
            key = rng.choice((key + ".more", key[:-1], key + "s", key.partition(".")[2], "", "a" * 50_000, "." * 20))
        case 1:
            key = ".".join(["a"] * rng.choice((2, 49, 51, 3000)))
        case 2:
            key = f"{key}.{scalar(rng)[:2000]}"
    mild = ("1", "2", "4", "8", "0.5", "true", "false", "null", "auto", "[]")
    value = rng.choice(mild) if rng.random() < 0.4 else scalar(rng)
    return f"{key}={value}" if rng.random() < 0.97 else value


def damaged_config(rng: Random) -> bytes:
    text = rng.choice(list(shipped_configs().values())).read_bytes()
    if rng.random() < 0.3:
        key = rng.choice(KEYS).split(".")
        text += b"\n" + b"".join(b"  " * level + name.encode() + b":\n" for level, name in enumerate(key))[:-1]
        text += b" " + scalar(rng).encode("utf-8", "surrogatepass") + b"\n"
    for _ in range(rng.choice((1, 1, 3))):
        text = changed_bytes(rng, text)
    return text


def hostile_lines(rng: Random, keys: Sequence[str]) -> bytes:
    good = "".join(json.dumps({keys[0]: f"{i} + {i} =", keys[1]: f"{2 * i}"}) + "\n" for i in range(400)).encode()
    if rng.random() < 0.03:
        good += json.dumps({keys[0]: "1 " * 5_000_000, keys[1]: "3"}).encode() + b"\n"
    pairs = [f'"{rng.choice((*keys, "messages", "more"))}": {json_value(rng)}' for _ in range(rng.randrange(4))]
    line = rng.choice((json_value(rng), f"{{{', '.join(pairs)}}}")).encode("utf-8", "surrogatepass") + b"\n"
    return rng.choice((good + line, line + good, changed_bytes(rng, good), changed_bytes(rng, line) + good))


@cache
def _whole_run(parent: Path) -> Path:
    run_dir = parent / "whole"
    with closing(RunDirectory(run_dir)) as directory:
        directory.config.write_text((REPO / "configs/quickstart.yaml").read_text())
        for step in range(1, 7):
            directory.log(StepMetrics(step=step, version=step, values={"reward/mean": step / 10}))
            directory.log_advantages(step, [(8 * step, step - 1, (0.5, -0.5))])
            for index in range(8 * step, 8 * step + 2):
                record_group(
                    run_dir,
                    {
                        "index": index,
                        "version": step,
                        "task": "sums",
                        "prompt": "1 =",
                        "completions": [{"text": "1", "reward": 1.0, "num_tokens": 3}],
                    },
                )
            record(run_dir, "evaluations", {"set": "sums", "version": step, "index": 0, "completions": []})
        directory.event("start", step=0)
    for step in (2, 4, 6):
        folder = directory.checkpoints / f"step-{step}"
        folder.mkdir()
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
            (folder / name).write_bytes(Random(name).randbytes(3000) + bytes([step]))
        state = RunState(step=step, version=step, next_index=8 * step)
        complete_checkpoint(directory.checkpoints, state, digests_of(folder, folder.glob("__*")), "name: a\n")
    return run_dir


def whole_run(folder: Path) -> Path:
    """Return a run directory with three checkpoints, created once next to the folder of a case."""
    return _whole_run(folder.parent)


@cache
def _whole_model(parent: Path) -> Path:
    model = parent / "whole-model"
    create_model(model, RecipeConfig(hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1, intermediate_size=32), seed=0)
    sharded = {"weight_map": dict.fromkeys(read_weight_files(model).tensors, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(sharded))
    return model


def whole_model(folder: Path) -> Path:
    """Return a model directory with an index, created once next to the folder of a case."""
    return _whole_model(folder.parent)


def damage(rng: Random, path: Path) -> None:
    """Damage one file or folder of a run."""
    if path.is_dir() and not path.is_symlink():
        if rng.random() < 0.3:
            shutil.rmtree(path)
        elif rng.random() < 0.5:
            path.rename(path.with_name(rng.choice(("step-", "step-9" * 40, "step-\u0663", "step-07", "unusable-4", "x"))))
        return
    match rng.randrange(8):
        case 0:
            path.unlink()
        case 1:
            path.unlink()
            path.mkdir()
        case 2:
            path.unlink()
            path.symlink_to(rng.choice(("nothing", "/dev/null", path.name, "../events.jsonl")))
        case 3 if path.suffix == ".json":
            path.write_text(json_value(rng))
        case _ if path.is_file():
            path.write_bytes(changed_bytes(rng, path.read_bytes()))


# Replies


def checked(load: Callable[[], Config]) -> int:
    """Load a configuration, check it against this machine, and print the report of a dry run."""
    try:
        config = load()
    except ConfigError as error:
        return refused(str(error))
    if broken := list(broken_rules(config)):
        return refused("\n".join(map(str, broken)))
    out = io.StringIO()
    print_dry_run(config, Console(file=out, width=200), shape=model_shape(config))
    out.getvalue().encode()
    return 0


def refused(text: str) -> int:
    """Check an error message, and return exit code 2."""
    if not text or "Traceback" in text or len(text) > 50_000:
        raise Failed(f"no usable message: {text[:300]!r}, {len(text)} characters")
    return 2


def command(*arguments: str) -> int:
    """Run the command, check its output, and return its exit code."""
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-m", "titanrl.commands", *(argument[:100_000] for argument in arguments)],
        capture_output=True,
        timeout=COMMAND_LIMIT_S,
        check=False,
        env=environment,
        cwd=REPO,
    )
    output = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode not in (0, 1, 2) or "Traceback" in output or not output.strip():
        raise Failed(f"exit code {done.returncode}: {output[-2000:]}")
    return done.returncode


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != COMMIT_FILE}
