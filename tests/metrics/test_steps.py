"""Metrics of a step from sums over micro-batches and ranks, by hand."""

import pytest

from titanrl.metrics.steps import loss_metrics
from titanrl.types import LossSums


def test_terms_of_the_loss_are_complete_and_the_rest_are_means_over_tokens() -> None:
    sums = {"num_tokens": 4.0, "loss/policy": -3.0, "loss/kl": 0.5, "loss/total": -2.5, "policy/entropy": 6.0}
    assert loss_metrics(LossSums(sums=sums, maxima={"policy/ratio_max": 1.5})) == {
        "loss/policy": -3.0,
        "loss/kl": 0.5,
        "loss/total": -2.5,
        "policy/entropy": 1.5,
        "policy/ratio_max": 1.5,
    }


def test_the_effective_sample_size_is_the_squared_mean_weight_over_the_mean_squared_one() -> None:
    # Weights 1, 1, 2 and 0: mean 1, mean square 1.5.
    sums = {"num_tokens": 4.0, "correction_weight": 4.0, "correction_weight_squared": 6.0, "correction/clip_frac": 1.0}
    assert loss_metrics(LossSums(sums=sums, maxima={})) == pytest.approx(
        {"correction/ess": 1 / 1.5, "correction/clip_frac": 0.25}
    )


def test_a_step_without_tokens_has_metrics_of_zero() -> None:
    sums = {"num_tokens": 0.0, "loss/total": 0.0, "correction_weight": 0.0, "correction_weight_squared": 0.0}
    assert loss_metrics(LossSums(sums=sums, maxima={})) == {"loss/total": 0.0, "correction/ess": 0.0}
