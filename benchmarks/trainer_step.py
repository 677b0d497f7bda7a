"""Measure the cost of RL over plain training: `python -m benchmarks.trainer_step --json FILE`.

The benchmark compares `forward_backward` and `optim_step` on packed rollouts of uneven length with a bare loop over the same
torchtitan model, which uses torch's cross-entropy on full rows. The steps of both alternate, and both count real tokens per
second. The benchmark also measures packing efficiency, memory of the loss, and the time to read the weights. On a CUDA device
the models have the shapes of Qwen3-0.6B and 1.7B, and the result includes the model FLOPs utilization (MFU).
"""

# ruff: noqa: E402 - the device must be set before torchtitan is imported

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}

from benchmarks.machine import write_result
from titanrl.config.device import DEVICES, missing_for
from titanrl.models.preparation import prepare_torchtitan

DEVICE = DEVICES["cpu" if missing_for("cuda") else "cuda"]
prepare_torchtitan(DEVICE)  # before any other import of torchtitan

import torch
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torchtitan.config import CommConfig
from torchtitan.distributed.utils import clip_grad_norm_, init_distributed
from torchtitan.tools.utils import get_peak_flops

from benchmarks.memory import peak_bytes
from benchmarks.packed_rollouts import ADAM, SMALL, Case, long_tailed, model_of, rl_batches
from titanrl.algorithms.packing import pack
from titanrl.config.algorithm import AlgorithmConfig
from titanrl.config.sections import TrainerConfig
from titanrl.config.sizes import ModelShape
from titanrl.models.directory import published_shapes
from titanrl.trainer import model as policy_model
from titanrl.trainer.learner import Learner, new_optimizer
from titanrl.trainer.model import PolicyModel, ScoringHead

ON_CUDA = TrainerConfig(
    compute_dtype="bfloat16", row_tokens=8192, rows_per_microbatch=1, activation_checkpointing="selective", compile=True
)
ON_CPU = TrainerConfig(row_tokens=256, rows_per_microbatch=8)
CASES = {
    "cpu": {"small": Case(shape=SMALL, trainer=ON_CPU, num_microbatches=2, median_tokens=50)},
    "cuda": {
        name: Case(shape=published_shapes()[name], trainer=ON_CUDA, num_microbatches=4, median_tokens=1000)
        for name in ("Qwen3-0.6B", "Qwen3-1.7B")
    },
}


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainer_step", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--steps", type=int, default=12, help="measured optimizer steps per loop")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="titanrl-bench-") as folder:
        init_distributed(CommConfig(), base_folder=folder)
        result = {
            "device": DEVICE.kind,
            "packing": packing_figures(),
            "loss": loss_figures(),
            "state_dict": state_dict_figures(Path(folder)),
            "steps": {name: step_figures(case, Path(folder), arguments.steps) for name, case in CASES[DEVICE.kind].items()},
        }
    torch.distributed.destroy_process_group()
    write_result(arguments.json, "trainer_step", result)


def step_figures(case: Case, folder: Path, num_steps: int) -> dict[str, Any]:
    """Measure the tokens per second of both loops and their ratio."""
    rows, num_tokens, efficiency = rl_batches(case)
    learner = Learner(model_of(case, folder, DEVICE), AlgorithmConfig(), temperature=1.0)
    bare = BareLoop(model_of(case, folder, DEVICE), case)

    def rl_step() -> None:
        for batch in rows:
            learner.forward_backward(batch)
        learner.optim_step(ADAM)

    seconds = alternate({"rl": rl_step, "bare": bare.step}, num_steps)
    full_tokens = case.num_microbatches * case.trainer.rows_per_microbatch * case.trainer.row_tokens
    rl_rate, bare_rate = num_tokens / seconds["rl"], full_tokens / seconds["bare"]
    figures = {
        "rl_step_s": seconds["rl"],
        "bare_step_s": seconds["bare"],
        "rl_tokens_per_s": rl_rate,
        "bare_tokens_per_s": bare_rate,
        "packing_efficiency": efficiency,
        "relative_throughput": rl_rate / bare_rate,
    }
    if DEVICE.kind == "cuda":
        module = learner.model.module
        _, flops_per_token = module.config.get_nparams_and_flops(module, case.trainer.row_tokens)
        peak = get_peak_flops(torch.cuda.get_device_name())
        figures |= {"mfu": rl_rate * flops_per_token / peak, "bare_mfu": bare_rate * flops_per_token / peak}
    return figures


class BareLoop:
    """Training loop over torchtitan's model with torch's cross-entropy, on full rows of one sequence each."""

    def __init__(self, model: PolicyModel, case: Case) -> None:
        self._model, self._case = model, case
        self._optimizers = new_optimizer(model, AlgorithmConfig())
        config = case.trainer
        shape = (config.rows_per_microbatch, config.row_tokens + 1)
        self._tokens_BL = torch.randint(0, case.shape.vocab_size, shape, device=model.device)
        self._positions_BL = torch.arange(config.row_tokens, device=model.device).repeat(shape[0], 1)

    def step(self) -> None:
        """Take one optimizer step."""
        module, tokens_BL = self._model.module, self._tokens_BL
        num_tokens = self._case.num_microbatches * self._positions_BL.numel()
        for _ in range(self._case.num_microbatches):
            mask = module.get_attention_masks(self._positions_BL) if DEVICE.attention == "flex" else self._dense_mask()
            logits_BLV = module(tokens_BL[:, :-1], positions=self._positions_BL, attention_masks=mask)
            loss = F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BL[:, 1:].flatten(), reduction="sum") / num_tokens
            loss.backward()
        clip_grad_norm_(list(module.parameters()), 1.0, foreach=True).item()
        self._optimizers.step()
        self._optimizers.zero_grad()

    def _dense_mask(self) -> torch.Tensor:
        from titanrl.models.decoder import packed_mask

        return packed_mask(self._positions_BL)


def packing_figures() -> dict[str, Mapping[str, float]]:
    """Compute the packing efficiency of `pack` and of next-fit, by median length and row length."""
    figures: dict[str, Mapping[str, float]] = {}
    for median, row_tokens in ((300, 2048), (1000, 8192), (1500, 4096)):
        lengths = long_tailed(256 * median, median, row_tokens, seed=0)
        rows = {"packing_efficiency": len(pack(lengths, row_tokens)), "next_fit": next_fit(lengths, row_tokens)}
        figures[f"median {median} in rows of {row_tokens}"] = {
            name: sum(lengths) / (count * row_tokens) for name, count in rows.items()
        }
    return figures


def next_fit(lengths: Sequence[int], row_tokens: int) -> int:
    """Count the rows of next-fit packing: each sequence goes into the last row or into a new one."""
    rows, free = 0, 0
    for length in lengths:
        if length > free:
            rows, free = rows + 1, row_tokens
        free -= length
    return rows


def loss_figures() -> dict[str, float]:
    """Measure the peak memory of output layer and loss, forward and backward, with and without chunks."""
    num_tokens, dim, vocab = 4096, 64, 32_768
    device = torch.device(DEVICE.kind)
    lm_head = torch.nn.Linear(dim, vocab, bias=False, device=device)
    scorer = ScoringHead(lm_head, vocab)
    hidden_BLD = torch.randn(1, num_tokens, dim, device=device)
    targets_BL = torch.randint(0, vocab, (1, num_tokens), device=device)

    def score() -> None:
        with scorer.scoring(targets_BL, 1.0):
            logprobs_BL, _ = lm_head(hidden_BLD.requires_grad_())
        logprobs_BL.sum().backward()
        lm_head.weight.grad = hidden_BLD.grad = None

    def plain() -> None:
        logits_NV = F.linear(hidden_BLD.requires_grad_(), lm_head.weight)[0]
        logits_NV.float().log_softmax(-1).gather(-1, targets_BL[0, :, None]).sum().backward()
        lm_head.weight.grad = hidden_BLD.grad = None

    limit = policy_model.LOGITS_BYTES
    policy_model.LOGITS_BYTES = num_tokens * vocab * 4 // 8
    chunked = peak_bytes(score, device)
    policy_model.LOGITS_BYTES = num_tokens * vocab * 4
    at_once = peak_bytes(score, device)
    policy_model.LOGITS_BYTES = limit
    return {
        "chunked_peak_bytes": chunked,
        "unchunked_peak_bytes": at_once,
        "log_softmax_peak_bytes": peak_bytes(plain, device),
        "loss_peak_ratio": chunked / at_once,
    }


def state_dict_figures(folder: Path) -> dict[str, float]:
    """Measure the time to read the weights of 28 sharded layers, with `PolicyModel.weights` and with torch's helper."""
    shape = ModelShape(
        hidden_size=64, num_layers=28, num_heads=2, num_kv_heads=2, head_dim=32, intermediate_size=96, vocab_size=256,
        tied_embeddings=True, max_positions=512,
    )  # fmt: skip
    plan = {"fsdp_reshard_after_forward": "always"}  # with mixed precision, this uses FSDP even on one rank
    trainer = TrainerConfig.model_validate({"compute_dtype": "bfloat16", "parallelism": plan})
    model = model_of(Case(shape=shape, trainer=trainer, num_microbatches=1, median_tokens=1), folder, DEVICE)
    seconds = alternate({"state_dict": model.weights, "get_model_state_dict": lambda: get_model_state_dict(model.module)}, 20)
    return {f"{name}_s": value for name, value in seconds.items()} | {
        "ratio": seconds["state_dict"] / seconds["get_model_state_dict"]
    }


def alternate(works: Mapping[str, Callable[[], object]], num_times: int) -> dict[str, float]:
    """Return the median seconds of each function, called in alternation after two warm-up rounds.

    Alternation exposes all functions to the same machine load.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_times + 2):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            if DEVICE.kind == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values[2:]) for name, values in seconds.items()}


if __name__ == "__main__":
    main()
