"""Log-probability mismatch by lag of the token, worked out by hand."""

import pytest
import torch

from titanrl.algorithms.objective import lag_metrics
from titanrl.carriers.types import LossSums
from titanrl.metrics.steps import staleness_metrics


def sums_and_maxima() -> LossSums:
    logprobs = torch.tensor([-1.0, -1.0, -2.0, -3.0, -1.0, -9.0], requires_grad=True)
    generator = torch.tensor([-1.1, -1.0, -2.5, -4.0, -1.3, 0.0])
    lags = torch.tensor([0, 0, 1, 7, 4, 1])
    mask = torch.tensor([True, True, True, True, True, False])
    sums, maxima = lag_metrics(logprobs, generator, lags, mask)
    return LossSums(
        sums={name: value.item() for name, value in sums.items()},
        maxima={name: value.item() for name, value in maxima.items()},
    )


def test_differences_of_unmasked_tokens_are_summed_by_lag() -> None:
    losses = sums_and_maxima()
    assert [losses.sums[f"lag/{age}"] for age in range(5)] == [2, 1, 0, 0, 2]
    assert [losses.sums[f"lag/{age}/logprob_abs"] for age in range(5)] == pytest.approx([0.1, 0.5, 0.0, 0.0, 1.3])
    assert losses.maxima["mismatch/numeric/logprob_abs_max"] == pytest.approx(0.1)
    assert losses.maxima["mismatch/stale/logprob_abs_max"] == pytest.approx(1.0)


def test_mismatch_is_split_into_numerics_and_staleness() -> None:
    values = staleness_metrics(sums_and_maxima())
    assert values["staleness/lag_0_frac"] == pytest.approx(0.4)
    assert values["mismatch/numeric/logprob_abs_mean"] == pytest.approx(0.05)
    assert values["mismatch/stale/logprob_abs_mean"] == pytest.approx(0.6)
    assert values["mismatch/stale/logprob_abs_mean_lag_4"] == pytest.approx(0.65)
    assert "mismatch/stale/logprob_abs_mean_lag_2" not in values


def test_fresh_batch_has_no_stale_metrics() -> None:
    fresh = LossSums(sums={"lag/0": 4.0, "lag/0/logprob_abs": 0.4, "lag/1": 0.0, "lag/1/logprob_abs": 0.0}, maxima={})
    values = staleness_metrics(fresh)
    assert values["mismatch/numeric/logprob_abs_mean"] == pytest.approx(0.1)
    assert not any(name.startswith("mismatch/stale") for name in values)
