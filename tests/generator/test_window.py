"""Decode windows give the tokens and log-probabilities of vLLM's own steps, bit for bit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engines import Engines
from tests.generator.window_cases import completions_of_all
from titanrl.carriers.types import Completion, SamplingParams
from titanrl.generator.compat import decoding_of, seeds_of

CASES = ("together", "temperatures", "greedy", "joining", "new_weights", "full_cache", "short_windows")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> dict[str, Any]:
    found: dict[str, Any] = engines.run(completions_of_all, tmp_path_factory.mktemp("window") / "model")
    return found


@pytest.mark.parametrize("case", CASES)
def test_windows_change_no_bit_of_any_completion(results: dict[str, Any], case: str) -> None:
    (*without, cached_without), (*within, cached_within), num_steps, num_full = results[case]
    assert num_steps > 0
    assert (num_full > 0) == (case in ("full_cache", "short_windows"))
    assert len(without) == len(within) > 0
    for theirs, ours in zip(without, within, strict=True):
        assert_equal(theirs, ours)
    assert cached_within == cached_without, "the prefix cache differs"


def assert_equal(theirs: Completion, ours: Completion) -> None:
    assert theirs.finish_reason == ours.finish_reason
    for name in ("token_ids", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(theirs, name), getattr(ours, name))


def test_cases_end_in_both_ways_and_mix_versions(results: dict[str, Any]) -> None:
    reasons = {completion.finish_reason for completion in results["temperatures"][1][:-1]}
    assert reasons == {"stop", "length"}
    assert {1, 2} <= set(np.concatenate([completion.versions for completion in results["new_weights"][1][:-1]]).tolist())


def test_requests_that_only_vllm_can_sample_open_no_window(results: dict[str, Any]) -> None:
    assert results["truncated"][2] == 0


def test_decoding_needs_plain_sampling_with_a_seed() -> None:
    plain = SamplingParams(max_new_tokens=3, temperature=1.0, seed=4)
    assert decoding_of(plain, [1]) is not None
    assert decoding_of(replace(plain, temperature=0.0, seed=None), [1]) is not None
    others: list[dict[str, Any]] = [
        {"seed": None},
        {"top_k": 2},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"stop": ("x",)},
        {"supports": True},
    ]
    assert [decoding_of(replace(plain, **options), [1]) for options in others] == [None] * len(others)


def test_seeds_continue_where_the_previous_window_ended() -> None:
    sampling = SamplingParams(max_new_tokens=9, temperature=1.0, seed=4)
    assert seeds_of(sampling, 4, 5).tolist() == seeds_of(sampling, 0, 9)[4:].tolist()
    assert not seeds_of(replace(sampling, temperature=0.0), 0, 9).any()
