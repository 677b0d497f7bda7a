"""Parts of `benchmarks.gpu`: `python -m benchmarks.gpu_parts KIND FOLDER PART...`. It waits for a line on its standard input.

Every part is a generator of figures. Each figure is printed and stored as soon as it is measured. The model, the learner, the
loss, the packing and the weight sync are those of a run.

Shape suffixes: B rows, L tokens of a row, N heads, H head dimension, D hidden size.
"""

# ruff: noqa: E402 - the device must be set, and missing names added, before torchtitan is imported

import asyncio
import gc
import json
import math
import os
import socket
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

if "TITANRL_GPU_WHEELS" in os.environ:
    sys.path.append(os.environ["TITANRL_GPU_WHEELS"])  # last, so that the machine's own packages are used first

import torch
import torch.distributed.fsdp as fsdp

SHIMS = []
"""Names that this process added because the installed packages lack them; they are in the JSON."""
if not hasattr(fsdp, "DataParallelMeshDims"):  # torch 2.11; only torchtitan's `spmd_types` backend uses it
    fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[misc,assignment]
    SHIMS.append("torch.distributed.fsdp.DataParallelMeshDims")
if not hasattr(fsdp.FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.11; here all parameters are used, on one rank
    fsdp.FSDPModule.set_reduce_scatter_unused_params = lambda self, *_, **__: None  # type: ignore[method-assign]
    SHIMS.append("FSDPModule.set_reduce_scatter_unused_params")
if find_spec("torchdata") is None or find_spec("datasets") is None:
    # `Decoder.Config.update_from_config` imports torchtitan's trainer, with its data loaders, only to compare with its type.
    stub: Any = types.ModuleType("torchtitan.trainer")
    stub.Trainer = type("Trainer", (), {"Config": type("Config", (), {})})
    sys.modules["torchtitan.trainer"] = stub
    SHIMS.append("torchtitan.trainer")

from titanrl.config.device import DEVICES, missing_for
from titanrl.models.preparation import prepare_torchtitan

KIND: Literal["cuda", "cpu"] = "cuda" if __name__ == "__main__" and sys.argv[1] == "cuda" else "cpu"
prepare_torchtitan(DEVICES[KIND])

import numpy as np
from safetensors.numpy import save_file
from torch.nn.attention.flex_attention import flex_attention
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import CommConfig
from torchtitan.distributed.utils import init_distributed
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools.utils import get_peak_flops

from benchmarks.gpu import records_file
from benchmarks.packed_rollouts import ADAM, SMALL, Case, model_of, rl_batches, write_config
from titanrl.algorithms.contracts import bound_loss
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.schema import Config
from titanrl.config.sections import TrainerConfig
from titanrl.config.sizes import ModelShape, derive
from titanrl.models.decoder import packed_mask
from titanrl.models.dense import weight_shapes
from titanrl.models.directory import open_model, published_shapes
from titanrl.trainer.checkpoint import load_model
from titanrl.trainer.collate import PackedRows
from titanrl.trainer.learner import Learner, policy_objective
from titanrl.trainer.model import ScoringHead
from titanrl.weights.layout import first_names, local_part
from titanrl.weights.records import Commit
from titanrl.weights.transport import WeightPublisher, WeightReader

DEVICE = torch.device(KIND)
ON_CUDA = KIND == "cuda"
Figure = dict[str, Any]

AUTOTUNED_ATTENTION = FlexAttention._compiled_flex_attn
"""FlexAttention as torchtitan compiles it outside of compiled blocks: each new shape starts a search for the fastest kernel."""


def main() -> None:
    """Run the named parts in this process, each under its own try."""
    folder, names = Path(sys.argv[2]), sys.argv[3:]
    if not sys.stdin.readline():
        return  # the parent has no time left
    set_up(folder)
    for name in names:
        run_part(name, folder)


def set_up(folder: Path) -> None:
    """Join a process group of one rank, and compile FlexAttention without a search."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if ON_CUDA:
        torch.cuda.set_device(0)
    elif not has_gpu():
        torch.set_num_threads(1)  # tiny models gain nothing from more
    init_distributed(CommConfig(), base_folder=str(folder))
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention)


def run_part(name: str, folder: Path) -> None:
    """Run a part; store its figures as they come, then its status."""
    file = folder / records_file(name)
    function, _, argument = name.partition(":")
    started = time.perf_counter()

    def record(entry: Figure) -> None:
        with file.open("a") as out:
            out.write(json.dumps(entry) + "\n")

    status: Figure = {"status": "ok"}
    try:
        for figure in PARTS[function](folder, argument):
            record({"figure": {"device": KIND, **figure}})
            print(f"{name}: {json.dumps(figure, default=str)}", flush=True)
    except Exception as error:  # any failure of a part is a result of the check
        status = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:2000]}
    record({**status, "seconds": time.perf_counter() - started})
    release()


def has_gpu() -> bool:
    """Return whether this machine has a GPU, also in a process that uses the CPU."""
    return missing_for("cuda") is None


def release() -> None:
    """Free the memory of the last model."""
    gc.collect()
    torch._dynamo.reset()
    if ON_CUDA:
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device."""
    if ON_CUDA:
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], times: int = 5, warm_ups: int = 2) -> float:
    """Return the median seconds of some work, including its kernels. On a CPU, which only tests the program, it runs once."""
    seconds, (times, warm_ups) = [], (times, warm_ups) if ON_CUDA else (1, 0)
    for _ in range(warm_ups + times):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warm_ups:])


# Limits of the machine


def limits(_: Path, __: str) -> Iterator[Figure]:
    """Measure matmul, memory and PCIe, with which the other parts are compared."""
    packages = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "triton", "torchao", "numpy")}
    name = torch.cuda.get_device_name() if ON_CUDA else "CPU"
    heavy = [package for package in ("monarch", "torchstore", "vllm", "datasets") if package in sys.modules]
    memory = torch.cuda.mem_get_info()[1] if ON_CUDA else None
    yield {"name": name, "memory_bytes": memory, "packages": packages, "added_names": SHIMS, "heavy_imports": heavy}
    yield {"matmul_bf16_tflops": matmul_flops() / 1e12}
    block = torch.empty((1 << 30) if ON_CUDA else (1 << 24), dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(block)
    yield {"device_copy_gb_per_s": 2 * block.nbytes / seconds_of(lambda: other.copy_(block)) / 1e9}
    yield pcie(block)


def matmul_flops() -> float:
    """Return the measured FLOP/s of a large bf16 matmul."""
    size = 8192 if ON_CUDA else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: a @ b, times=20, warm_ups=5)


def pcie(block: torch.Tensor) -> Figure:
    """Measure copies between a block on the device and pinned host memory of the same size."""
    host = torch.empty(block.shape, dtype=block.dtype, pin_memory=ON_CUDA)
    out = seconds_of(lambda: host.copy_(block, non_blocking=True))
    back = seconds_of(lambda: block.copy_(host, non_blocking=True))
    return {"to_pinned_gb_per_s": block.nbytes / out / 1e9, "from_pinned_gb_per_s": block.nbytes / back / 1e9}


# Loss, gradients and log-probabilities against the CPU in float32

REFERENCE = Case(
    shape=ModelShape(
        hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=768, vocab_size=4096,
        tied_embeddings=True, max_positions=4096, qk_norm=True,
    ),
    trainer=TrainerConfig(row_tokens=1024, rows_per_microbatch=2),
    num_microbatches=2,
    median_tokens=150,
)  # fmt: skip
SMALL_REFERENCE = replace(
    REFERENCE,
    shape=replace(REFERENCE.shape, hidden_size=64, num_layers=2, head_dim=16, intermediate_size=192, vocab_size=512),
    trainer=TrainerConfig(row_tokens=128, rows_per_microbatch=2),
    median_tokens=40,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest accepted differences from float32 on the CPU."""

    logprobs: float
    """Of any log-probability, absolute."""
    logprobs_mean: float
    """Of the log-probabilities, mean of the absolute values."""
    gradient: float
    """Of the whole gradient: norm of the difference, divided by the norm."""


TOLERANCES = {  # bfloat16: about three times the differences of bfloat16 on a CPU
    "float32": Tolerance(logprobs=2e-4, logprobs_mean=2e-5, gradient=1e-3),
    "bfloat16": Tolerance(logprobs=0.2, logprobs_mean=0.03, gradient=0.08),
}


def reference_case() -> Case:
    """Return the model and batch of the comparison; `reference` and `numerics` must agree on it."""
    return REFERENCE if has_gpu() else SMALL_REFERENCE


def write_model(folder: Path, shape: ModelShape) -> Path:
    """Write a Hugging Face model directory with random weights, the same in every process."""
    path, random = folder / "model", np.random.default_rng(7)
    if path.exists():
        return path
    part = folder / f"model.{os.getpid()}"
    part.mkdir()
    write_config(shape, part)
    tensors = {
        name: (np.ones(size) if "norm" in name else random.normal(0.0, 0.05, size)).astype(np.float32)
        for name, size in weight_shapes(shape).items()
    }
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    part.rename(path)
    return path


def learner_of(folder: Path, trainer: TrainerConfig, attention: Literal["dense", "flex"]) -> Learner:
    """Load the model of the comparison as a run does."""
    model = open_model(write_model(folder, reference_case().shape))
    device = replace(DEVICES[KIND], attention=attention)
    return Learner(load_model(model, trainer, device), AlgorithmConfig(), temperature=1.0)


def measure(learner: Learner, batches: list[PackedRows]) -> dict[str, Any]:
    """Return log-probabilities, loss and gradients of some rows, on the CPU."""
    algorithm = AlgorithmConfig()
    objective = partial(policy_objective, algorithm=algorithm, loss=bound_loss(algorithm, None))
    passes = [learner.run(batch, objective) for batch in batches]  # `forward_backward` keeps no log-probabilities
    learner.model.reshard()
    gradients = {
        canonical_fqn(name): local_part(value.grad).detach().float().cpu()
        for name, value in learner.model.module.named_parameters()
        if value.grad is not None
    }
    learner.zero_grad()
    return {
        "logprobs": [done.logprobs_BL.float().cpu() for done in passes],
        "loss": sum(done.sums.sums["loss/policy"] for done in passes),
        "gradients": gradients,
    }


def reference(folder: Path, _: str) -> Iterator[Figure]:
    """Compute the reference on the CPU. The sampled tokens get its own log-probabilities, so that all ratios are near 1."""
    learner = learner_of(folder, reference_case().trainer, "dense")
    batches, num_tokens = rl_batches(reference_case())[:2]
    batches = [replace(batch, logprobs_BL=learner.logprobs(batch) * batch.mask_BL) for batch in batches]
    found = measure(learner, batches)
    torch.save({"batches": batches, **found}, folder / "reference.pt")
    norm = math.sqrt(sum(float(value.square().sum()) for value in found["gradients"].values()))
    yield {"tokens": num_tokens, "loss": found["loss"], "gradient_norm": norm, "threads": torch.get_num_threads()}


def numerics(folder: Path, _: str) -> Iterator[Figure]:
    """Compare dtypes and attentions with the reference."""
    expected = torch.load(folder / "reference.pt", weights_only=False)  # written by `reference`
    row = {"row_tokens": reference_case().trainer.row_tokens, "rows_per_microbatch": 2}
    mixed = {"compute_dtype": "bfloat16"}
    variants: list[tuple[Literal["dense", "flex"], Figure]] = [("dense", {}), ("dense", mixed)]
    if ON_CUDA:  # FlexAttention has no backward pass on the CPU
        variants += [("flex", {}), ("flex", mixed), ("flex", mixed | {"compile": True})]
    else:
        yield {"not_run": "FlexAttention and compilation, because the device is a CPU"}
    for attention, settings in variants:
        trainer = TrainerConfig.model_validate(row | settings)
        named: Figure = {"attention": attention, "compute_dtype": trainer.compute_dtype, "compile": trainer.compile}
        try:
            learner = learner_of(folder, trainer, attention)
            found = measure(learner, expected["batches"])
            yield named | differences(found, expected, TOLERANCES[trainer.compute_dtype])
        except Exception as error:  # the other variants still run
            yield named | {"within_tolerance": False, "failed": f"{type(error).__name__}: {error}"[:1000]}
        learner = found = None  # type: ignore[assignment]
        release()


def differences(found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: Tolerance) -> Figure:
    """Compare a result with the reference."""
    masks = [batch.mask_BL for batch in expected["batches"]]
    pairs = zip(found["logprobs"], expected["logprobs"], masks, strict=True)
    apart = torch.cat([(value - other)[mask] for value, other, mask in pairs]).abs()
    names = expected["gradients"].keys()
    squares = {name: float((found["gradients"][name] - expected["gradients"][name]).square().sum()) for name in names}
    norms = {name: float(expected["gradients"][name].square().sum()) for name in names}
    relative = {name: math.sqrt(squares[name] / norms[name]) for name in names if norms[name] > 0}
    worst = max(relative, key=lambda name: relative[name])
    gradient = math.sqrt(sum(squares.values()) / sum(norms.values()))
    within = (
        float(apart.max()) <= tolerance.logprobs
        and float(apart.mean()) <= tolerance.logprobs_mean
        and gradient <= tolerance.gradient
    )
    return {
        "logprobs_max": float(apart.max()),
        "logprobs_mean": float(apart.mean()),
        "loss": found["loss"],
        "loss_difference": found["loss"] - expected["loss"],
        "gradient": gradient,
        "gradient_worst": relative[worst],
        "gradient_worst_name": worst,
        "within_tolerance": within,
    }


# Trainer step


def step_case(text: str) -> Case:
    """Return the case that words describe, such as `4B compile, full checkpointing, bf16 weights, float8`."""
    settings: Figure = {"row_tokens": 8192, "rows_per_microbatch": 1, "compute_dtype": "bfloat16"}
    settings |= {"compile": True} if "compile" in text else {}
    settings |= {"float8": "tensorwise"} if "float8" in text else {}
    settings |= {"dtype": "bfloat16"} if "bf16 weights" in text else {}
    kinds = [kind for kind in ("full", "selective") if f"{kind} checkpointing" in text]
    settings |= {"activation_checkpointing": kinds[0]} if kinds else {}
    if text.startswith("small"):
        small = TrainerConfig.model_validate(settings | {"row_tokens": 128})
        return Case(shape=SMALL, trainer=small, num_microbatches=1, median_tokens=50)
    shape = published_shapes()[f"Qwen3-{text.split()[0]}"]
    return Case(shape=shape, trainer=TrainerConfig.model_validate(settings), num_microbatches=2, median_tokens=1000)


def step(folder: Path, text: str) -> Iterator[Figure]:
    """Measure steps of two micro-batches: tokens per second, FLOP/s, and peak memory by the estimate."""
    case = step_case(text)
    estimate = estimated(case)
    yield {"estimate_bytes": estimate}
    if "autotuned" in text:
        FlexAttention._compiled_flex_attn = AUTOTUNED_ATTENTION
    batches, num_tokens, efficiency = rl_batches(case)
    matmul = matmul_flops()
    try:
        started = time.perf_counter()
        learner = Learner(model_of(case, folder, DEVICES[KIND]), AlgorithmConfig(), temperature=1.0)
        synchronize()
        yield {"build_s": time.perf_counter() - started}

        def one_step() -> None:
            for batch in batches:
                learner.forward_backward(batch)
            learner.optim_step(ADAM)

        first = seconds_of(one_step, times=1, warm_ups=0)
        yield {"first_step_s": first}
        if ON_CUDA:
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(one_step, times=5, warm_ups=1)
    except torch.OutOfMemoryError as error:
        yield {"out_of_memory": str(error)[:500], **peak_memory(estimate["total"])}
        return
    flops = step_flops(case.shape, batches)
    figures = {
        "step_s": seconds,
        "tokens": num_tokens,
        "packing_efficiency": efficiency,
        "tokens_per_s": num_tokens / seconds,
        "tflops": flops / seconds / 1e12,
        **peak_memory(estimate["total"]),
    }
    if ON_CUDA:
        peak = get_peak_flops(torch.cuda.get_device_name())
        figures |= {"mfu": flops / seconds / peak, "of_measured_matmul": flops / seconds / matmul}
    yield figures


def estimated(case: Case) -> dict[str, int]:
    """Return the dry run's estimate of a trainer rank with this model, in bytes."""
    trainer = case.trainer
    config = Config.model_validate(
        {"name": "gpu", "num_steps": 1, "trainer": trainer.model_dump(exclude_defaults=True), "data": {"max_prompt_tokens": 8}}
        | {"rollout": {"max_new_tokens": trainer.row_tokens - 8}}
    )
    memory = derive(config, case.shape).memory
    assert memory is not None
    parts = ("parameters", "gradients", "optimizer", "gathered", "activations", "unreduced", "total")
    return {name: getattr(memory.trainer, name) for name in parts}


def peak_memory(estimate: int) -> Figure:
    """Return the peak memory of the device since it was reset, and its ratio to the estimate."""
    if not ON_CUDA:
        return {}
    peak = torch.cuda.max_memory_allocated()
    return {"peak_bytes": peak, "peak_reserved_bytes": torch.cuda.max_memory_reserved(), "peak_over_estimate": peak / estimate}


def step_flops(shape: ModelShape, batches: list[PackedRows]) -> float:
    """Return the FLOPs of a step on the sampled sequences: 6 per weight of a matmul and token, and causal attention.

    Neither padding nor recomputation counts.
    """
    weights = shape.num_layers * (shape.layer_parameters - shape.layer_norms) + shape.vocab_size * shape.hidden_size
    total = 0.0
    for batch in batches:
        lengths = torch.bincount(batch.sequence_N)
        lengths = lengths[torch.bincount(batch.sequence_N, weights=batch.mask_BL.flatten().double()) > 0].double()
        attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * float(lengths.square().sum())
        total += 6 * weights * float(lengths.sum()) + attention
    return total


# Weights from the device to shared memory and back


class MemoryStore:
    """Objects by key in this process, instead of torchstore. With arenas, only the layout is stored."""

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[str, Any] = {}

    async def exists(self, key: str) -> bool:
        """Return whether the key has a value."""
        return key in self._values

    async def put(self, key: str, value: Any) -> None:
        """Store a value."""
        self._values[key] = value

    async def get(self, key: str) -> Any:
        """Return the value of a key."""
        return self._values[key]


def weights(folder: Path, _: str) -> Iterator[Figure]:
    """Publish a model's weights and read them back, as trainer and generator do, but in one process."""
    for dtype in ("bfloat16", "float32"):
        case = step_case("0.6B" if ON_CUDA else "small")
        case = replace(case, trainer=TrainerConfig.model_validate({"dtype": dtype, "compute_dtype": "bfloat16"}))
        learner = Learner(model_of(case, folder, DEVICES[KIND]), AlgorithmConfig(), temperature=1.0)
        yield {"trainer_dtype": dtype, **asyncio.run(round_trip(learner))}
        learner = None  # type: ignore[assignment]
        release()


async def round_trip(learner: Learner) -> Figure:
    """Measure push and pull of a learner's weights in bf16, and compare with copies of one pinned block of that size."""
    store: Any = MemoryStore()
    publisher = WeightPublisher("gpu", 0, store, torch.bfloat16, ["arena"], "sampled")
    reader = WeightReader("gpu", store)
    state, keep = learner.weights(), learner.buffer_names
    dtypes = {name: value.dtype if name in keep else torch.bfloat16 for name, value in state.items()}
    names = first_names(state)
    targets = {name: torch.empty(state[name].shape, dtype=dtypes[name], device=DEVICE) for name in names}
    pushes, pulls = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.perf_counter()
        await publisher.prepare(state, keep)
        prepare_s = time.perf_counter() - started
        for version in range(8):
            synchronize()
            started = time.perf_counter()
            manifest = await publisher.publish(version, state, keep)
            pushed = time.perf_counter()
            fetched = await reader.fetch(Commit(version, (manifest,)))
            fetched.copy_into(targets)
            pushes.append(pushed - started)
            pulls.append(time.perf_counter() - pushed)
    equal = all(torch.equal(targets[name], local_part(state[name]).to(dtypes[name])) for name in names)
    del fetched
    reader.close()
    block = torch.empty(manifest.num_bytes, dtype=torch.uint8, device=DEVICE)
    push_s, pull_s, limit = statistics.median(pushes[3:]), statistics.median(pulls[3:]), pcie(block)
    return {
        "bytes": manifest.num_bytes,
        "tensors": len(names),
        "prepare_s": prepare_s,
        "first_push_s": pushes[0],
        "first_pull_s": pulls[0],
        "push_s": push_s,
        "pull_s": pull_s,
        "push_gb_per_s": manifest.num_bytes / push_s / 1e9,
        "pull_gb_per_s": manifest.num_bytes / pull_s / 1e9,
        **limit,
        "push_of_limit": manifest.num_bytes / push_s / 1e9 / limit["to_pinned_gb_per_s"],
        "pull_of_limit": manifest.num_bytes / pull_s / 1e9 / limit["from_pinned_gb_per_s"],
        "equal": equal,
        "warnings": sorted({str(warning.message)[:200] for warning in caught if "pin" in str(warning.message)}),
    }


# Batch invariance of the log-probabilities


def invariance(folder: Path, _: str) -> Iterator[Figure]:
    """Compare a sequence's log-probabilities among others with those after a change of the others, and alone."""
    case = reference_case()
    row = {"row_tokens": case.trainer.row_tokens, "rows_per_microbatch": 2, "compute_dtype": "bfloat16"}
    batch = rl_batches(case)[0][0]
    vocab = case.shape.vocab_size
    attentions: tuple[Literal["dense", "flex"], ...] = ("dense", "flex") if ON_CUDA else ("dense",)
    for attention in attentions:
        learner = learner_of(folder, TrainerConfig.model_validate(row), attention)
        sequence_BL = batch.sequence_N.view(batch.mask_BL.shape)
        chosen = int(torch.bincount(sequence_BL[0]).argmax())
        if chosen == 0 and int(sequence_BL[0].max()) > 1:
            chosen = 1  # not the first of its row, so that its offset changes when it is alone
        place = sequence_BL == chosen
        start, length = int(place[0].nonzero()[0]), int(place.sum())
        packed = learner.logprobs(batch)[0, start : start + length - 1]
        others = torch.where(place, batch.tokens_BL, (batch.tokens_BL + 1) % vocab)
        changed = learner.logprobs(replace(batch, tokens_BL=others))[0, start : start + length - 1]
        tokens_BL, positions_BL, targets_BL = (torch.zeros_like(batch.tokens_BL) for _ in range(3))
        tokens_BL[0, :length], targets_BL[0, :length] = batch.tokens_BL[place], batch.targets_BL[place]
        positions_BL[:] = torch.arange(positions_BL.shape[1])
        positions_BL[0, length:] = torch.arange(positions_BL.shape[1] - length)
        alone = replace(batch, tokens_BL=tokens_BL, positions_BL=positions_BL, targets_BL=targets_BL)
        at_start = learner.logprobs(alone)[0, : length - 1]
        one_row = learner.logprobs(first_row(alone))[0, : length - 1]
        yield {"attention": attention, "tokens": length - 1, "offset": start} | {
            name: apart(packed, other)
            for name, other in (("others_changed", changed), ("alone", at_start), ("alone_in_one_row", one_row))
        }
        learner = None  # type: ignore[assignment]
        release()


def first_row(batch: PackedRows) -> PackedRows:
    """Return the first row, with the tensors that a pass without gradient reads."""
    required = [field.name for field in fields(PackedRows) if field.default is MISSING]
    return PackedRows(**{name: getattr(batch, name)[:1] for name in required})


def apart(some: torch.Tensor, others: torch.Tensor) -> Figure:
    """Compare log-probabilities of the same tokens."""
    difference = (some.float() - others.float()).abs()
    equal = float((difference == 0).float().mean())
    return {"max": float(difference.max()), "mean": float(difference.mean()), "equal_share": equal}


# Shares of a step


def shares(folder: Path, _: str) -> Iterator[Figure]:
    """Measure optimizer, head and attention apart, and list the kernels of a step."""
    case = step_case("0.6B compile" if ON_CUDA else "small")
    learner = Learner(model_of(case, folder, DEVICES[KIND]), AlgorithmConfig(), temperature=1.0)
    batch, shape = rl_batches(case)[0][0].to(DEVICE), case.shape
    pass_s = seconds_of(lambda: learner.forward_backward(batch), times=4)
    optim_s = []
    for _repetition in range(4 if ON_CUDA else 1):
        learner.forward_backward(batch)
        optim_s.append(seconds_of(lambda: learner.optim_step(ADAM), times=1, warm_ups=0))
    yield {"pass_s": pass_s, "optimizer_s": statistics.median(optim_s)}
    yield kernels(lambda: (learner.forward_backward(batch), learner.optim_step(ADAM)))
    module = learner.model.module
    is_flex = DEVICES[KIND].attention == "flex"
    mask = module.get_attention_masks(batch.positions_BL) if is_flex else packed_mask(batch.positions_BL)
    inner = module.layers["0"].attention.inner_attention
    learner = None  # type: ignore[assignment]
    release()
    like: Figure = {"device": DEVICE, "dtype": torch.bfloat16, "requires_grad": True}
    num_rows = batch.tokens_BL.shape[0]
    q_BLNH = torch.randn(num_rows, batch.length, shape.num_heads, shape.head_dim, **like)
    k_BLNH, v_BLNH = (torch.randn(num_rows, batch.length, shape.num_kv_heads, shape.head_dim, **like) for _ in range(2))

    def attend() -> None:
        inner(q_BLNH, k_BLNH, v_BLNH, attention_masks=mask, enable_gqa=True).sum().backward()

    attention_s = seconds_of(attend, times=4) * shape.num_layers
    yield {"attention_s": attention_s, "attention_share": attention_s / pass_s}
    lm_head = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, device=DEVICE, dtype=torch.bfloat16)
    scorer = ScoringHead(lm_head, shape.vocab_size)
    hidden_BLD = torch.randn(num_rows, batch.length, shape.hidden_size, **like)

    def score() -> None:
        with scorer.scoring(batch.targets_BL, 1.0):
            logprobs_BL, _ = lm_head(hidden_BLD)
        logprobs_BL.sum().backward()

    head_s = seconds_of(score, times=4)
    yield {"head_s": head_s, "head_share": head_s / pass_s}


def kernels(work: Callable[[], object]) -> Figure:
    """Profile some work; return its longest kernels and the share of the time in which the device is busy."""
    from torch.profiler import ProfilerActivity, profile

    work()
    synchronize()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_CUDA else [])]) as profiled:
        started = time.perf_counter()
        work()
        synchronize()
        wall_s = time.perf_counter() - started
    events = profiled.key_averages()
    busy = {event.key: (event.self_device_time_total if ON_CUDA else event.self_cpu_time_total) / 1e6 for event in events}
    if ON_CUDA:  # entries of the host repeat the time of the kernels that they launch
        busy = {event.key: busy[event.key] for event in events if "CUDA" in str(event.device_type)}
    total = sum(busy.values())
    longest = sorted(busy, key=lambda key: -busy[key])[:15]
    groups = {
        name: sum(value for key, value in busy.items() if any(word in key.lower() for word in words))
        for name, words in GROUPS.items()
    }
    return {
        "profiled_wall_s": wall_s,
        "busy_share": total / wall_s,
        "kernel_shares": {key[:80]: busy[key] / total for key in longest},
        "group_shares": {name: value / total for name, value in groups.items()},
    }


GROUPS = {
    "attention": ("flex", "attention", "sdpa"),
    "matmul": ("gemm", "nvjet", "cutlass", "matmul", "::mm", "addmm"),
    "optimizer": ("adam", "multi_tensor"),
    "copies": ("memcpy", "memset", "copy_"),
    "communication": ("nccl",),
}
"""Words in the names of kernels, by group. A kernel without any of them is in no group."""

PARTS: Mapping[str, Callable[[Path, str], Iterator[Figure]]] = {
    "limits": limits,
    "reference": reference,
    "numerics": numerics,
    "step": step,
    "weights": weights,
    "invariance": invariance,
    "shares": shares,
}

if __name__ == "__main__":
    main()
