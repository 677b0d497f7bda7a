"""Supports of truncated sampling recorded from vLLM's sampler, and checks of the private API used for it."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from titanrl.carriers.supports import Supports, supports_of
from titanrl.generator import compat
from titanrl.generator.compat import SupportRecording, encoded, support_words, with_supports

VOCAB_SIZE = 100


def decoded(tensors: LogprobsTensors) -> Supports:
    """Return the supports that each of several requests receives from one step."""
    lists = tensors.tolists()
    rows = [lists.slice_request(row, 1) for row in range(len(lists.logprobs))]
    outputs = [EngineCoreOutput(request_id="0", new_token_ids=[0], new_logprobs=row) for row in rows]
    return supports_of([words for output in outputs for words in support_words(output, VOCAB_SIZE)], VOCAB_SIZE)


@pytest.mark.parametrize("vocab_size", [7, 32, 33, VOCAB_SIZE])
def test_encoded_rows_are_the_kept_ids(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shares_N = torch.tensor([0.0, 0.02, 0.5, 1.0] * 5)
    is_kept = torch.rand(20, vocab_size, generator=generator) < shares_N[:, None]
    is_kept[:, 3] = True
    counts, words = encoded(is_kept)
    found = supports_of([row[:count].numpy() for row, (count,) in zip(words, counts.tolist(), strict=True)], vocab_size)
    assert [found.ids(row).tolist() for row in range(20)] == [row.nonzero()[:, 0].tolist() for row in is_kept]


def metadata(num_requests: int, **limits: Tensor | None) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=torch.full((num_requests,), 0.7),
        all_greedy=False,
        all_random=True,
        top_p=limits.get("top_p"),
        top_k=limits.get("top_k"),
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0),
        repetition_penalties=torch.empty(0),
        output_token_ids=[[] for _ in range(num_requests)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Sampler, SupportRecording]]:
    """vLLM's sampler with a recording, but without an engine. It compiles nothing, like a generator on a CPU."""
    made = Sampler(logprobs_mode="processed_logprobs")
    core = SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=SimpleNamespace(model_runner=SimpleNamespace())))
    )
    core.model_executor.driver_worker.worker.model_runner.sampler = made
    monkeypatch.setattr(compat, "engine_core", lambda engine: core)
    engine: Any = None
    with torch.compiler.set_stance("force_eager"):
        yield made, SupportRecording(engine, VOCAB_SIZE)


def test_support_of_top_k_includes_ties(sampler: tuple[Sampler, SupportRecording]) -> None:
    run, recording = sampler
    recording.switch(True)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 5], logits[:, 6], logits[1, [7, 8]] = 3.0, 2.0, 2.0
    output = run(logits, metadata(3, top_k=torch.tensor([2, 2, VOCAB_SIZE], dtype=torch.int32)))
    found = decoded(output.logprobs_tensors)
    assert [found.ids(row).tolist() for row in range(3)] == [[5, 6], [5, 6, 7, 8], list(range(VOCAB_SIZE))]
    assert found.counts_S[2] == 0


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_support_of_top_p_is_the_smallest_set_with_its_probability(
    sampler: tuple[Sampler, SupportRecording], top_p: float
) -> None:
    run, recording = sampler
    recording.switch(True)
    logits = 2 * torch.randn(16, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    output = run(logits.clone(), metadata(16, top_p=torch.full((16,), top_p)))
    found, tensors = decoded(output.logprobs_tensors), output.logprobs_tensors
    for row, p_V in enumerate((logits.double() / 0.7).softmax(-1)):
        ordered, order = p_V.sort(descending=True)
        num_kept = int((ordered.cumsum(0) < top_p).sum()) + 1
        kept = order[:num_kept].sort().values
        assert found.ids(row).tolist() == kept.tolist()
        token = int(output.sampled_token_ids[row, 0])
        assert token in kept
        expected = (p_V[token] / p_V[kept].sum()).log()
        assert tensors.logprobs[row, 0].item() == pytest.approx(expected.item(), abs=1e-5)


def test_sampler_returns_the_same_tensors_while_the_recording_is_off(sampler: tuple[Sampler, SupportRecording]) -> None:
    run, recording = sampler
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    for is_on, width in ((False, 1), (True, 6), (False, 1)):
        recording.switch(is_on)
        torch.manual_seed(3)
        output = run(logits.clone(), metadata(4, top_k=torch.full((4,), 4, dtype=torch.int32)))
        assert output.logprobs_tensors.logprob_token_ids.shape == (4, width if is_on else 1)
        if is_on:
            assert (output.logprobs_tensors.logprob_token_ids[:, 1] == 4).all()


def test_masks_of_model_runner_v2_become_the_same_words() -> None:
    mask = SamplingMaskLists(np.array([4, 9], np.int32))
    assert [words.tolist() for words in support_words(EngineCoreOutput("0", [4], new_sampling_mask=mask), 70)] == [[4, 9]]
    several = SamplingMaskLists(np.array([4, 9, 0, 1, 2, 69], np.int32), np.array([0, 2, 6]))
    output = EngineCoreOutput("0", [4, 1], new_sampling_mask=several)
    assert [words.tolist() for words in support_words(output, 70)] == [[4, 9], [7, 0, 32]]


def test_output_without_supports_names_the_option_to_remove() -> None:
    alone = LogprobsLists(np.array([[7]], np.int32), np.zeros((1, 1), np.float32), np.zeros(1, np.int32))
    with pytest.raises(RuntimeError, match=r"^generator\.vllm: .*Remove options"):
        support_words(EngineCoreOutput("0", [7], new_logprobs=alone), 70)


def test_log_probabilities_of_other_tokens_are_not_overwritten() -> None:
    tensors = LogprobsTensors(torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3), torch.zeros(1))
    with pytest.raises(AssertionError, match="more than the sampled token"):
        with_supports(tensors, torch.zeros(1, 5))


def test_vllm_has_the_attributes_that_recording_sets() -> None:
    assert {"sample", "forward"} <= vars(Sampler).keys()
    assert "new_sampling_mask" in EngineCoreOutput.__struct_fields__
    package = find_spec("vllm")
    assert package.origin is not None
    for file, switch in (("worker/gpu/sample/sampler.py", "Sampler"), ("core/sched/scheduler.py", "Scheduler")):
        tree = ast.parse((Path(package.origin).parent / "v1" / file).read_text())
        (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == switch)
        reads = [node for node in ast.walk(owner) if isinstance(node, ast.Attribute) and node.attr == "return_sampling_mask"]
        assert any(isinstance(node.ctx, ast.Load) and ast.unparse(node) == "self.return_sampling_mask" for node in reads)
