"""Agreement and replica checks: ranks that diverge, are late or fail, and replicas that drift, are named on every rank."""

import json
import pickle
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from torch.distributed import Store, TCPStore

from tests.trainer import apart
from tests.trainer.ranks import World
from titanrl.base.errors import RankError, TokensLostError
from titanrl.trainer.agreement import Agreement, Drift, disagreement, drift_text, drifted, lateness

Worlds = Callable[[int], World]
FSDP_4, HSDP, REPLICAS = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_replicate": 4}
FSDP_TP = {"dp_shard": 2, "tp": 2}
SOON_S = 15.0
"""Half of the deadline of a late rank; without load it takes one or two seconds at most."""


def posts(*facts: dict[str, object], phase: str = "run_data") -> list[dict[str, object]]:
    return [{"phase": phase, "facts": each} for each in facts]


def test_equal_posts_agree() -> None:
    assert disagreement(posts(*[{"rows": 3, "names": ["a"]}] * 3)) == ""


def test_rank_with_another_count_is_named() -> None:
    four, three = {"data": 7, "micro-batches": 4}, {"data": 7, "micro-batches": 3}
    assert disagreement(posts(four, four, three, four)) == "run_data: rank 2: 3 micro-batches, others 4"
    text = "run_data: rank 0: 5 micro-batches; rank 2: 3 micro-batches, others 4"
    assert disagreement(posts({**four, "micro-batches": 5}, four, three, four)) == text


def test_rank_in_another_phase_is_named_with_its_counts() -> None:
    behind, ahead = {"micro-batches": 4}, {"micro-batches": 3, "parameters without gradient": []}
    found = posts(behind, behind, phase="forward_backward") + posts(ahead, phase="optim_step")
    assert disagreement(found) == "rank 2 is in optim_step (3 micro-batches), others in forward_backward (4 micro-batches)"


def test_parameters_unused_on_one_rank_are_named() -> None:
    key = "parameters without gradient"
    found = posts({key: []}, {key: ["aux.weight", "aux.bias"]}, {key: []}, phase="optim_step")
    assert disagreement(found) == f"optim_step: rank 1: 2 {key} (aux.bias, aux.weight), others 0"
    many = [f"layers.{layer}" for layer in range(9)]
    assert "(layers.0, layers.1, layers.2, and 6 more)" in disagreement(posts({key: []}, {key: many}, {key: []}))


def test_failure_is_named_unless_all_ranks_fail() -> None:
    failed = {"phase": "run_data", "error": "ValueError: no"}
    assert disagreement([*posts({}), failed]) == "rank 1 failed in run_data: ValueError: no"
    assert disagreement([failed, failed]) == ""


def test_late_rank_is_named_with_its_phase() -> None:
    text = "rank 2 has not reached optim_step; it is in forward_backward"
    assert lateness("optim_step", {2: "in forward_backward"}) == text


@pytest.fixture(scope="module")
def stores() -> list[Store]:
    """A store, and two connections of each of four ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [store, *(TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False) for _ in range(8))]


class Ranks:
    """Four ranks on threads."""

    def __init__(self, stores: Sequence[Store], wait_s: float = 30.0) -> None:
        self.interrupted = [threading.Event() for _ in range(4)]
        connect, name = iter(stores[1:]).__next__, uuid.uuid4().hex
        self.agreements = [
            Agreement(rank, 4, connect, wait_s=wait_s, interrupt=self.interrupted[rank].set, name=name) for rank in range(4)
        ]

    def run(self, work: Callable[[int, Agreement], None]) -> tuple[list[str], float]:
        """Run a function on all ranks; return the error of each rank and the longest duration."""

        def result(rank: int) -> str:
            try:
                work(rank, self.agreements[rank])
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return ""

        started = time.perf_counter()
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(result, range(4))), time.perf_counter() - started

    def close(self) -> None:
        for agreement in self.agreements:
            agreement.close()


def agree(agreement: Agreement, phase: str, **facts: int) -> None:
    with agreement.phase(phase) as together:
        together(lambda: facts)


def test_late_rank_is_named_everywhere_and_interrupts_collectives(
    stores: list[Store], caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(stores, wait_s=1.2)
    woken = threading.Event()

    def work(rank: int, agreement: Agreement) -> None:
        agree(agreement, "start_over")
        with agreement.phase("forward_backward") as together:
            together(dict)
            if rank == 2:
                woken.wait(20)
        try:
            agree(agreement, "optim_step")
        finally:
            woken.set()

    errors, seconds = ranks.run(work)
    text = "rank 2 has not reached optim_step; it is in forward_backward"
    assert errors == [f"RankError: {text}"] * 4
    assert 1.2 <= seconds < SOON_S
    assert f"waiting: {text}" in caplog.messages
    assert all(event.wait(5) for event in ranks.interrupted)
    errors, seconds = ranks.run(lambda rank, agreement: agree(agreement, "optim_step"))
    assert errors == [f"RankError: {text}"] * 4
    assert seconds < SOON_S
    ranks.close()


@pytest.mark.parametrize("late", [0, 3])
def test_rank_without_request_is_named(late: int, stores: list[Store]) -> None:
    ranks = Ranks(stores, wait_s=0.6)

    def work(rank: int, agreement: Agreement) -> None:
        agree(agreement, "forward_backward")
        if rank != late:
            agree(agreement, "optim_step")

    errors, _ = ranks.run(work)
    text = f"RankError: rank {late} has not reached optim_step; it is waiting for a request since forward_backward"
    assert errors == ["" if rank == late else text for rank in range(4)]
    ranks.close()


@pytest.mark.parametrize("failure", [ValueError, TokensLostError])
def test_ranks_continue_after_a_failure_before_the_first_collective(stores: list[Store], failure: type[Exception]) -> None:
    ranks = Ranks(stores)
    lost = []

    def work(rank: int, agreement: Agreement) -> None:
        try:
            with agreement.phase("forward_backward") as together:
                if rank == 2:
                    raise failure("no such rollout")
                together(dict)
        except RankError as error:
            lost.append(pickle.loads(pickle.dumps(error)).has_lost_tokens)
            raise

    errors, seconds = ranks.run(work)
    own = f"{failure.__name__}: no such rollout"
    assert errors == [own if rank == 2 else f"RankError: rank 2 failed in forward_backward: {own}" for rank in range(4)]
    assert lost == [failure is TokensLostError] * 3
    assert seconds < SOON_S
    assert ranks.run(lambda rank, agreement: agree(agreement, "optim_step"))[0] == [""] * 4
    ranks.close()


@pytest.mark.parametrize("agreed", [False, True], ids=["before", "after"])
def test_failure_of_all_ranks_is_raised_unchanged_and_ranks_continue(agreed: bool, stores: list[Store]) -> None:
    ranks = Ranks(stores)

    def work(rank: int, agreement: Agreement) -> None:
        with agreement.phase("run_data") as together:
            if agreed:
                together(dict)
            raise ValueError(f"data[{rank}]")

    assert ranks.run(work)[0] == [f"ValueError: data[{rank}]" for rank in range(4)]
    assert ranks.run(lambda rank, agreement: agree(agreement, "run_data"))[0] == [""] * 4
    assert not any(event.is_set() for event in ranks.interrupted)
    ranks.close()


def test_store_deletes_posts_of_earlier_phases(stores: list[Store]) -> None:
    num_keys = stores[0].num_keys()
    ranks = Ranks(stores)

    def work(rank: int, agreement: Agreement) -> None:
        for _ in range(50):
            agree(agreement, "forward_backward", rows=3)

    assert ranks.run(work)[0] == [""] * 4
    assert stores[0].num_keys() - num_keys < 16
    ranks.close()


def test_one_rank_needs_no_store() -> None:
    def connect() -> Store:
        raise AssertionError("one rank needs no store")

    agreement = Agreement(0, 1, connect, wait_s=1.0)
    with agreement.phase("optim_step") as together:
        together(lambda: json.loads("not even computed"))
    with pytest.raises(ValueError, match="as it is"), agreement.phase("optim_step"):
        raise ValueError("as it is")
    agreement.close()


def test_rank_with_fewer_micro_batches_is_named_on_every_rank(world: Worlds, tiny_model: Path) -> None:
    text = "rank 2 is in optim_step (3 micro-batches, 1 steps taken), "
    text += "others in forward_backward (4 micro-batches, 1 steps taken)"
    for num_phases, error, seconds in world(4).run(apart.one_pass_fewer, tiny_model, FSDP_4):
        assert (num_phases, error) == (9, text)
        assert seconds < SOON_S


def test_exception_in_pass_interrupts_collectives_of_other_ranks(tiny_model: Path, tmp_path: Path) -> None:
    with World(2, tmp_path) as doomed:  # its process groups are lost
        (*waiting, seconds), (*failing, _) = doomed.run(apart.failing_pass, tiny_model, {"dp_shard": 2})
    assert waiting == ["RankError", "rank 1 failed in forward_backward: MemoryError: no memory for this rank"]
    assert failing == ["MemoryError", "no memory for this rank"]
    assert seconds < SOON_S


def test_replayed_step_has_the_same_phases(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    numbers = world(4).run(apart.phases_of_replayed_steps, tiny_model, HSDP, tmp_path / "checkpoints")
    assert len(set(numbers[0])) == 1
    assert numbers == [numbers[0]] * 4


@pytest.mark.parametrize(
    ("trainer", "name", "others"),
    [
        ({"parallelism": REPLICAS, "lora": {"rank": 4}}, "layers.1.attention.qkv_linear.wq.weight", "ranks 0, 1, 3"),
        ({"parallelism": HSDP}, "norm.weight (exp_avg_sq)", "rank 0"),
        ({"parallelism": FSDP_TP}, "layers.0.ffn_norm.weight", "rank 3"),
        ({"parallelism": HSDP, "ema_decay": 0.9}, "layers.1.feed_forward.w2.weight (moving average)", "rank 0"),
    ],
    ids=["frozen weight", "optimizer state", "norm of tensor-parallel ranks", "moving average"],
)
def test_replica_that_drifted_is_named(trainer: dict, name: str, others: str, world: Worlds, tiny_model: Path) -> None:
    for num_tensors, error in world(4).run(apart.drift, tiny_model, trainer, name):
        assert num_tensors > 20
        odd = "rank 3 differs from rank 2" if others == "rank 3" else f"rank 2 differs from {others}"
        assert error.startswith(f"the trainer's replicas differ at version 1: {name} on {odd}."), error


def test_rank_with_other_weights_is_named_before_training(world: Worlds, tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    for error in world(4).run(apart.load_other_weights, tiny_model, other, REPLICAS):
        assert error.startswith("the trainer's replicas differ at version 0: layers.1.feed_forward.w3.weight on rank 2"), error


def test_different_shards_are_not_compared() -> None:
    assert drifted([[7, 1], [8, 1], [7, 1]], [[0, 0], [1, 0], [0, 0]]) == []
    found = drifted([[7, 1], [8, 1], [9, 2]], [[0, 0], [1, 0], [0, 0]])
    assert found == [Drift(0, (2,), (0,)), Drift(1, (2,), (0, 1))]
    text = drift_text(found, ["head", "norm"], 5)
    assert text.startswith("the trainer's replicas differ at version 5: head on rank 2 differs from rank 0 and 1 more.")


@pytest.mark.parametrize("plan", [{"dp_shard": 2}, {"dp_replicate": 2}, HSDP], ids=["fsdp", "replicas", "hsdp"])
def test_parameter_used_on_one_rank_trains_as_without_parallelism(plan: dict, world: Worlds, tiny_model: Path) -> None:
    head = "aux.lora_a.weight"
    without, using, trained = world(1).run(apart.train_with_head, tiny_model, {})[0]
    found = world(4 if plan == HSDP else 2).run(apart.train_with_head, tiny_model, plan)[0]
    assert head not in without
    assert not found[0].pop(head, np.zeros(1)).any()
    assert np.abs(using[head]).max() > 1e-2
    # Where a gradient is almost 0, the step of AdamW is as large as elsewhere, and its rounding, too.
    for expected, values, atol in zip((without, using, trained), found, (1e-5, 1e-5, 5e-5), strict=True):
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(values[name], value, atol=atol, err_msg=name)
