"""Experts that a real generator recorded, in the trainer: log-probabilities, gradients of every layout, and metrics."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines import Engines
from tests.generator.route_cases import NUM, requests, samples
from tests.models.tiny import change_weights, write_model
from tests.trainer import checks
from tests.trainer.ranks import World
from titanrl.carriers.supports import has_ids_S
from titanrl.carriers.tables import SequencePlan
from titanrl.carriers.types import Completion, GroupHandle, Segment
from titanrl.trainer.collate import collate

Worlds = Callable[[int], World]
LENGTH = 256
Case = Sequence[Completion]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are exact in bfloat16, so that a generator in bfloat16 differs only in its arithmetic."""
    path = tmp_path_factory.mktemp("routing")
    write_model("qwen3_moe", path / "model", std=0.08)

    def rounded(weights: dict[str, torch.Tensor]) -> None:
        for weight in weights.values():
            weight.copy_(weight.bfloat16())

    change_weights(path / "model", rounded)
    return path


@pytest.fixture(scope="module")
def sampled(folder: Path, engines: Engines) -> Callable[[str, str], Mapping[str, Case]]:
    """Samples of engines, by implementation and dtype."""
    return functools.cache(functools.partial(engines.run, samples, folder))


def segments_of(completions: Case) -> list[Segment]:
    """Return each completion after its prompt."""
    segments = []
    for request, completion in zip(requests(len(completions)), completions, strict=True):
        num_prompt, num = len(request.token_ids), len(request.token_ids) + len(completion.token_ids)
        mask, logprobs = np.arange(num) >= num_prompt, np.zeros(num, np.float32)
        logprobs[mask] = completion.logprobs
        ids = np.concatenate([np.array(request.token_ids), completion.token_ids])
        segments.append(
            Segment(token_ids=ids, mask=mask, logprobs=logprobs, versions=np.where(mask, 1, -1), experts=completion.experts)
        )
    return segments


def planned(segments: Sequence[Segment], rows: Sequence[Sequence[int]], shared: int = 0) -> tuple[list[Any], Any]:
    """Return rows with the segments of these indices, all but the first of which share `shared` tokens of the prompt."""
    random, payload, plans = np.random.default_rng(0), {}, []
    for index, segment in enumerate(segments):
        handle = GroupHandle(shard=0, location=index, serial=1)
        payload[handle] = {0: segment}
        length, advantage = len(segment.token_ids), float(random.normal())
        plans.append(SequencePlan(handle=handle, segment=0, length=length, advantage=advantage, weight=0.004))
    return [
        tuple(plans[i] if n == 0 or not shared else replace(plans[i], num_shared=shared) for n, i in enumerate(row))
        for row in rows
    ], payload


def difference(model_dir: Path, segments: Sequence[Segment], routing: str) -> tuple[float, float, dict[str, float]]:
    """Return largest and mean difference to the log-probabilities of the generator, and the metrics of experts."""
    learner = checks.make_learner(model_dir, row_tokens=LENGTH, routing=routing)
    rows = collate(*planned(segments, [[i] for i in range(len(segments))]), LENGTH)
    result = learner.run(rows, checks.everything)
    gap = (result.logprobs_BL - rows.logprobs_BL)[rows.mask_BL].abs()
    return float(gap.max()), float(gap.mean()), dict(learner.optim_step(checks.ADAM).experts)


@pytest.mark.parametrize("impl", ["titan", pytest.param("native", marks=pytest.mark.slow)])
def test_replay_removes_the_mismatch_of_bfloat16(impl: str, world: Worlds, folder: Path, sampled: Any) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        segments = segments_of(sampled(impl, dtype)["windows"])
        for routing in ("compared", "replayed"):
            found[dtype, routing] = world(1).run(difference, folder / "model", segments, routing)[0]
            largest, mean, experts = found[dtype, routing]
            print(f"{impl} {dtype} {routing}: max {largest:.2e} mean {mean:.2e} differ {experts['experts/differ_frac']:.3f}")
    assert found["float32", "compared"][0] < 1e-4
    assert found["float32", "replayed"][0] < 1e-4
    assert found["float32", "replayed"][2]["experts/differ_frac"] == 0.0
    assert found["bfloat16", "compared"][0] > 0.2
    assert found["bfloat16", "replayed"][0] < 0.05
    for routing in ("compared", "replayed"):
        experts = found["bfloat16", routing][2]
        assert 0.0 < experts["experts/differ_frac"] < 0.2
        assert experts["experts/no_ids_frac"] == 0.0
        assert experts["experts/id_bytes"] == 2 * 2


@pytest.mark.parametrize("impl", ["titan", "native"])
@pytest.mark.parametrize("case", ["windows", "steps", "continued", "restarted"])
def test_all_tokens_but_the_last_have_ids(case: str, impl: str, world: Worlds, folder: Path, sampled: Any) -> None:
    completions = sampled(impl, "float32")[case]
    assert len(completions) == NUM
    for segment in segments_of(completions):
        assert segment.experts.dtype == np.uint8
        assert segment.experts.shape == (len(segment.token_ids), 2, 2)
        assert has_ids_S(segment.experts).tolist() == [True] * (len(segment.token_ids) - 1) + [False]
    largest, _, experts = world(1).run(difference, folder / "model", segments_of(completions), "replayed")[0]
    assert largest < 1e-4
    assert experts["experts/differ_frac"] == 0.0


def test_recording_does_not_change_samples(sampled: Any) -> None:
    found = sampled("titan", "float32")
    for other, recorded in zip(found["unrecorded"], found["windows"], strict=True):
        assert other.experts is None
        assert other.token_ids.tolist() == recorded.token_ids.tolist()
    assert [completion.experts is None for completion in found["mixed"]] == [False, False, True, True]


def gradient(
    model_dir: Path, segments: Sequence[Segment], rows: Sequence[Sequence[int]], shared: int, section: dict[str, Any]
) -> tuple[Any, dict[str, float]]:
    """Return the gradient of the rows, in two micro-batches, with replayed experts, and the metrics."""
    learner = checks.make_learner(model_dir, row_tokens=LENGTH, routing="replayed", **section)
    all_rows, payload = planned(segments, rows, shared)
    own = all_rows[learner.model.dp_rank :: learner.model.dp_size]
    for half in (own[: len(own) // 2], own[len(own) // 2 :]):
        learner.run(collate(half, payload, LENGTH), checks.everything)
    return checks.gradients(learner), dict(learner.optim_step(checks.ADAM).experts)


def other_experts(segments: Sequence[Segment]) -> list[Segment]:
    """Return segments whose recorded experts no router would choose, the same for a common prefix; some tokens have none."""
    changed = []
    for segment in segments:
        experts = (segment.experts + 3) % 8
        experts[:, :, 1] = (experts[:, :, 0] + 1 + experts[:, :, 1] % 7) % 8
        experts[-1], experts[10:14] = 255, 255
        changed.append(replace(segment, experts=experts))
    return changed


@pytest.fixture(scope="module")
def replayed(world: Worlds, folder: Path, sampled: Any) -> tuple[list[Segment], Any, dict[str, float]]:
    """Segments with other experts, and their gradient and metrics on one rank, without packing."""
    segments, alone = other_experts(segments_of(sampled("titan", "float32")["windows"])), [[i] for i in range(NUM)]
    expected, metrics = world(1).run(gradient, folder / "model", segments, alone, 0, {})[0]
    assert metrics["experts/no_ids_frac"] > 0.0
    without = [replace(segment, experts=None) for segment in segments]
    own, own_metrics = world(1).run(gradient, folder / "model", without, alone, 0, {})[0]
    assert own_metrics["experts/no_ids_frac"] == 1.0
    largest = max(float(np.abs(value).max()) for value in expected.values())
    assert max(float(np.abs(own[name] - value).max()) for name, value in expected.items()) > 1e-3 * largest
    return segments, expected, metrics


PACKED = [[0, 1], [2, 3], [4, 5], [6, 7]]
EP, TP = {"dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}
LAYOUTS: dict[str, tuple[int, Sequence[Sequence[int]], int, dict[str, Any]]] = {
    "packed": (1, PACKED, 0, {}),
    "shared prompts": (1, [[0, 1, 2], [3, 4, 5], [6, 7]], 40, {}),
    "recomputed": (1, PACKED, 0, {"activation_checkpointing": "full"}),
    "ep": (2, PACKED, 0, {"parallelism": EP}),
    "cp": (2, PACKED, 0, {"parallelism": {"cp": 2}, "activation_checkpointing": "full"}),
    "ep and cp": (2, PACKED, 0, {"parallelism": {"cp": 2, "ep": 2}}),
    "ep and tp": (2, PACKED, 0, {"parallelism": TP, "activation_checkpointing": "selective"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_with_replay_equals_that_of_unpacked_rows_on_one_rank(
    layout: str, world: Worlds, folder: Path, replayed: tuple[list[Segment], Any, dict[str, float]]
) -> None:
    size, rows, shared, section = LAYOUTS[layout]
    segments, expected, metrics = replayed
    if shared:  # the first sequence of a row computes the prompt
        segments = [with_prefix_of(segments[0], segment, shared) for segment in segments]
        expected, _ = world(1).run(gradient, folder / "model", segments, [[i] for i in range(NUM)], 0, {})[0]
    found, same = world(size).run(gradient, folder / "model", segments, rows, shared, section)[0]
    largest = max(float(np.abs(value).max()) for value in expected.values())
    worst = max(float(np.abs(found[name] - value).max()) for name, value in expected.items()) / largest
    print(f"{layout}: worst gradient {worst:.1e}")
    assert worst <= (5e-6 if layout == "ep and tp" else 1e-6)  # tensor parallelism adds partial sums of each product
    if not shared:
        assert same == pytest.approx(metrics)


def with_prefix_of(first: Segment, segment: Segment, num_tokens: int) -> Segment:
    """Return a segment with the experts of another one for their common tokens."""
    return replace(segment, experts=np.concatenate([first.experts[:num_tokens], segment.experts[num_tokens:]]))
