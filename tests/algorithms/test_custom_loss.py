"""User-defined losses in the objective: inputs, options, traits and metrics."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.test_policy_loss import ALGORITHMS, example
from titanrl.algorithms.contracts import (
    LossInputs,
    bound_loss,
    check_loss,
    checked_custom_loss,
    declared_traits,
    option_names,
    policy_loss,
    tinker_algorithm,
)
from titanrl.algorithms.objective import ObjectiveInputs
from titanrl.algorithms.objective import policy_loss as objective
from titanrl.base.plugins import import_object
from titanrl.config.algorithm import KEYS_OF_LOSSES, LOSS_KEYS, LOSSES, AlgorithmConfig, LossTraits
from titanrl.config.errors import BrokenRules
from titanrl.config.schema import Config

OWN = "own.py:loss"


def test_unknown_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio must be one of sampler, proximal, none \(got 'smapler'\)"):
        policy_loss(ratio="smapler")  # type: ignore[arg-type]


@policy_loss(ratio="proximal", zero_without_advantage=True)
def copied_ppo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Mapping[str, Tensor]]:
    unclipped_N = -inputs.ratio_N * inputs.advantages_N
    clipped_N = -inputs.ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * inputs.advantages_N
    return torch.maximum(unclipped_N, clipped_N), {"clip": clipped_N > unclipped_N}


def custom_algorithm(loss: Any, **keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig(loss=OWN, **keys).with_loss_traits(declared_traits(loss) or LossTraits())


@pytest.mark.parametrize("name", ["ppo", "decoupled", "kl, entropy", "geometric"])
def test_custom_copy_of_ppo_is_bitwise_equal(name: str) -> None:
    keys = {key: value for key, value in ALGORITHMS[name].items() if key != "loss"}
    inputs = example(dtype=torch.float32)
    total, metrics = objective(inputs, AlgorithmConfig(**keys))
    algorithm = custom_algorithm(copied_ppo, **keys)
    own_total, own_metrics = objective(inputs, algorithm, bound_loss(algorithm, copied_ppo))
    gradients = [torch.autograd.grad(value, inputs.logprobs_N)[0] for value in (total, own_total)]
    assert torch.equal(total, own_total)
    assert torch.equal(*gradients)
    assert own_metrics == metrics


def test_inputs_are_zero_outside_mask() -> None:
    seen: list[LossInputs] = []

    def record(inputs: LossInputs) -> Tensor:
        seen.append(inputs)
        return inputs.logprobs_N

    clean = example(dtype=torch.float32)
    names = ("logprobs_N", "generator_logprobs_N", "advantages_N", "entropy_N")
    spoilt = {name: torch.where(clean.mask_N, getattr(clean, name).detach(), math.nan) for name in names}
    inputs = replace(clean, **spoilt | {"logprobs_N": spoilt["logprobs_N"].requires_grad_()})
    algorithm = custom_algorithm(record)
    total, _ = objective(inputs, algorithm, bound_loss(algorithm, record))
    total.backward()
    (tokens,) = seen
    assert torch.equal(tokens.mask_N, inputs.mask_N)
    for name in (*names, "old_logprobs_N"):
        assert not getattr(tokens, name)[~inputs.mask_N].any(), name
    assert tokens.ratio_N[~inputs.mask_N].tolist() == [1.0] * int((~inputs.mask_N).sum())
    assert not tokens.entropy_N.requires_grad
    assert torch.equal(inputs.logprobs_N.grad, torch.where(inputs.mask_N, inputs.weights_N, 0.0))


@pytest.mark.parametrize(
    ("ratio", "proximal", "expected"),
    [
        ("proximal", "sampler", "generator_logprobs_N"),
        ("proximal", "step_start", "proximal_logprobs_N"),
        ("sampler", "step_start", "generator_logprobs_N"),
        ("none", "step_start", "generator_logprobs_N"),
    ],
)
def test_declared_ratio_selects_the_old_policy(ratio: Any, proximal: Any, expected: str) -> None:
    @policy_loss(ratio=ratio)
    def squared(inputs: LossInputs) -> Tensor:
        return inputs.log_ratio_N.square()

    inputs = example()
    algorithm = custom_algorithm(squared, proximal=proximal)
    total, _ = objective(inputs, algorithm, bound_loss(algorithm, squared))
    by_hand = inputs.weights_N * (inputs.logprobs_N - getattr(inputs, expected)).square()
    assert total.item() == pytest.approx(by_hand[inputs.mask_N].sum().item(), rel=1e-12)


def test_options_come_from_algorithm_keys_and_loss_options() -> None:
    def options(inputs: LossInputs, *, clip_high: float, beta: float = 0.5, scale: float = 2.0) -> Tensor:
        return torch.full_like(inputs.logprobs_N, clip_high + 10 * beta + 100 * scale)

    algorithm = custom_algorithm(options, clip_high=0.25, loss_options={"beta": 3.0})
    assert bound_loss(algorithm, options)(LossInputs.of(*torch.zeros(3, 1))).tolist() == [0.25 + 30.0 + 200.0]


def test_partial_keeps_traits_of_its_function() -> None:
    @policy_loss(ratio="proximal", zero_without_advantage=True)
    def scaled(inputs: LossInputs, *, scale: float) -> Tensor:
        return -scale * inputs.ratio_N * inputs.advantages_N

    doubled = partial(scaled, scale=2.0)
    assert declared_traits(doubled) == declared_traits(scaled) == LossTraits(ratio="proximal", zero_without_advantage=True)
    inputs, algorithm = example(), custom_algorithm(doubled, proximal="step_start")
    total, _ = objective(inputs, algorithm, bound_loss(algorithm, doubled))
    once, _ = objective(inputs, algorithm, bound_loss(algorithm, partial(scaled, scale=1.0)))
    assert total.item() == pytest.approx(2 * once.item(), rel=1e-12) != 0.0


def test_additional_values_become_metrics() -> None:
    def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        values = {"surprise": -inputs.logprobs_N, "positive": inputs.advantages_N > 0}
        return -inputs.logprobs_N * inputs.advantages_N, values

    inputs, algorithm = example(), custom_algorithm(loss)
    _, metrics = objective(inputs, algorithm, bound_loss(algorithm, loss))
    mask, logprobs = inputs.mask_N, inputs.logprobs_N.detach()
    assert metrics.sums["policy/surprise_mean"].item() == pytest.approx(-logprobs[mask].sum().item(), rel=1e-12)
    assert metrics.sums["policy/positive_frac"].item() == (inputs.advantages_N[mask] > 0).sum().item()
    ratio = (logprobs - inputs.generator_logprobs_N).exp()[mask]
    assert metrics.sums["policy/ratio_mean"].item() == pytest.approx(ratio.sum().item(), rel=1e-12)
    assert metrics.maxima["policy/ratio_max"].item() == pytest.approx(ratio.max().item(), rel=1e-12)
    assert metrics.sums["policy/clip_frac"].item() == 0.0


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (lambda inputs: inputs.logprobs_N.mean(), r"got \(\) for it"),
        (lambda inputs: None, r"got NoneType for it"),
        (lambda inputs: (inputs.logprobs_N, {"ratio": inputs.logprobs_N.sum()}), r"got \(\) for ratio"),
        (lambda inputs: (inputs.logprobs_N.sum(), {"it": inputs.logprobs_N}), r"got \(\) for it"),
        (lambda inputs: (inputs.logprobs_N, 0.5), r"got tuple for it"),
    ],
    ids=["mean", "none", "metric", "hidden", "pair"],
)
def test_error_names_loss_without_one_value_per_token(loss: Any, found: str) -> None:
    algorithm = custom_algorithm(loss)
    with pytest.raises(
        ValueError, match=rf"^algorithm\.loss: \S*own\.py:loss must return one value per token, .* \({found}\)\. "
    ):
        objective(example(), algorithm, bound_loss(algorithm, loss))


@pytest.mark.parametrize("value", ["my/value", "kl ref", "", 3])
def test_name_of_a_value_must_be_part_of_a_metric(value: Any) -> None:
    algorithm = custom_algorithm(lambda inputs: inputs.logprobs_N)
    bound = bound_loss(algorithm, lambda inputs: (inputs.logprobs_N, {value: inputs.logprobs_N}))
    with pytest.raises(ValueError, match=rf"^algorithm\.loss: \S*own\.py:loss must name .* \(got '{value}'\)\. Rename it"):
        objective(example(), algorithm, bound)


def test_metrics_of_a_custom_loss_do_not_replace_those_of_the_session() -> None:
    loss = torch.ones(1, requires_grad=True)
    assert checked_custom_loss((loss, {"right": 1.0})) == (loss, {"right": 1.0})
    with pytest.raises(TypeError, match=r"metrics of the session's own names \(got num_tokens\)"):
        checked_custom_loss((loss, {"num_tokens": 1.0}))


def test_error_names_loss_without_gradient() -> None:
    algorithm = custom_algorithm(lambda inputs: inputs.advantages_N)
    bound = bound_loss(algorithm, lambda inputs: -inputs.logprobs_N.detach() * inputs.advantages_N)
    with pytest.raises(
        ValueError, match=r"^algorithm\.loss: \S*own\.py:loss must depend on logprobs_N .* \(got a constant\)\."
    ):
        objective(example(), algorithm, bound)
    with torch.no_grad():  # a pass without gradient only measures
        objective(example(), algorithm, bound)
    with_bonus = algorithm.model_copy(update={"entropy_coef": 0.1})
    assert objective(example(), with_bonus, bound)[0].requires_grad


def test_error_names_loss_that_raises() -> None:
    def loss(inputs: LossInputs) -> Tensor:
        return {"logprobs": inputs.logprobs_N}["advantages"]

    algorithm = custom_algorithm(loss)
    with pytest.raises(ValueError, match=r"^algorithm\.loss: \S*own\.py:loss raised KeyError: 'advantages'\. Correct the loss"):
        objective(example(), algorithm, bound_loss(algorithm, loss))


def test_undeclared_loss_runs_on_zero_advantages() -> None:
    assert custom_algorithm(lambda inputs: inputs.logprobs_N).runs_without_advantage
    assert not custom_algorithm(copied_ppo).runs_without_advantage
    assert AlgorithmConfig(loss=OWN).runs_without_advantage  # not loaded yet


@pytest.mark.parametrize(
    ("loss", "keys", "problem"),
    [
        (lambda: 0, {}, r"^algorithm\.loss: wrong signature: too many positional arguments"),
        (
            lambda inputs, advantages: 0,
            {},
            r"argument: 'advantages' .* Write it as `def loss\(inputs: LossInputs",
        ),
        (lambda inputs, *, beta: 0, {}, r"missing a required argument: 'beta'"),
        (7, {}, r"not callable \(got mine, of type int\)"),
        (
            copied_ppo,
            {"beta": 1.0},
            r"loss_options\.beta=1\.0, .*no such option\. Choose one of .* clip_low, clip_high",
        ),
        (lambda inputs: 0, {"beta": 1.0}, r"no such option\. Remove it"),
    ],
    ids=["no-inputs", "two-inputs", "option-without-value", "number", "unknown-option", "no-options"],
)
def test_wrong_signature_is_rejected_before_start(loss: Any, keys: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_loss(loss, name="mine", algorithm=AlgorithmConfig(loss=OWN, loss_options=keys))


UNDECLARED, RATIO, NO_RATIO = LossTraits(), LossTraits(ratio="proximal"), LossTraits(ratio="none")


@pytest.mark.parametrize(
    ("keys", "traits", "problem"),
    [
        ({"max_staleness": 1}, UNDECLARED, "this loss declares none. Decorate the loss with titanrl.policy_loss"),
        ({"max_staleness": 1}, NO_RATIO, "a loss with the ratio to the sampling policy, or a correction"),
        ({"max_staleness": 1}, RATIO, None),
        ({"rollout": {"top_p": 0.9}}, UNDECLARED, None),
        ({"rollout": {"top_p": 0.9}}, RATIO, None),
        ({"algorithm": {"correction": {"preset": "token_tis"}}}, UNDECLARED, "this loss declares none"),
        ({"algorithm": {"correction": {"preset": "token_tis"}}}, NO_RATIO, None),
        ({"algorithm": {"correction": {"preset": "token_tis"}}}, RATIO, "would apply it twice"),
        ({"algorithm": {"correction": {"preset": "token_tis"}, "proximal": "step_start"}}, RATIO, None),
        ({}, UNDECLARED, None),
    ],
)
def test_config_rules_depend_on_declared_ratio(keys: dict[str, Any], traits: LossTraits, problem: str | None) -> None:
    algorithm = {**keys.get("algorithm", {}), "loss": OWN}
    config = Config.model_validate({"name": "a", "num_steps": 1, **keys, "algorithm": algorithm})  # not loaded: no rule applies
    if problem is None:
        assert config.with_loss_traits(traits).algorithm.loss_traits == traits
    else:
        with pytest.raises(BrokenRules, match=problem):
            config.with_loss_traits(traits)


@pytest.mark.parametrize("name", LOSSES)
def test_registered_loss_follows_policy_loss_protocol(name: str) -> None:
    loss = import_object(LOSSES[name].path, key="algorithm.loss")
    assert set(option_names(loss) or ()) - set(LOSS_KEYS) == set(LOSSES[name].options)
    algorithm = AlgorithmConfig(loss=name)
    check_loss(loss, name=name, algorithm=algorithm)
    inputs: ObjectiveInputs = replace(example(), advantages_N=torch.zeros(len(example().advantages_N), dtype=torch.float64))
    total, _ = objective(inputs, algorithm)
    (gradient,) = torch.autograd.grad(total, inputs.logprobs_N)
    # The covariance of clip_cov depends on the tokens without advantage, so it must see them, although they have no gradient.
    assert bool(gradient.any()) == (not LOSSES[name].traits.zero_without_advantage and name != "clip_cov")


@pytest.mark.parametrize("key", KEYS_OF_LOSSES)
def test_key_of_some_losses_is_an_option_of_these(key: str) -> None:
    takers = [name for name in LOSSES if key in (option_names(import_object(LOSSES[name].path, key="algorithm.loss")) or ())]
    assert tuple(takers) == KEYS_OF_LOSSES[key]


def test_thresholds_are_bounds_of_ratio() -> None:
    ppo = tinker_algorithm("ppo", {"clip_low_threshold": 0.9})
    assert (ppo.loss, ppo.clip_low, ppo.clip_high) == ("ppo", pytest.approx(0.1), pytest.approx(0.2))
    cispo = tinker_algorithm("cispo", {})
    assert (cispo.loss, cispo.clip_low, cispo.clip_high) == ("cispo", 1.0, 3.0)
    assert tinker_algorithm("dro", {"beta": 0.3}).dro_beta == 0.3
    assert tinker_algorithm("importance_sampling", {}).loss == "importance_sampling"
    for loss, options, problem in (
        ("ppo", {"clip_low_threshold": 1.8}, "clip_low_threshold: Input should be greater than 0 for clip_low, its distance"),
        ("cispo", {"clip_high_threshold": "x"}, "clip_high_threshold: must be a number (got 'x')"),
        ("dro", {"beta": -1}, "beta: Input should be greater than 0 (got -1)"),
    ):
        with pytest.raises(ValueError, match=rf"^loss_fn_config\.{re.escape(problem)}"):
            tinker_algorithm(loss, options)


@pytest.mark.parametrize("name", LOSSES)
def test_every_registered_loss_is_available_by_name(name: str) -> None:
    assert tinker_algorithm(name, {}).loss == name


def test_options_without_tinker_name_use_algorithm_keys() -> None:
    assert tinker_algorithm("ppo", {"dual_clip": 3.0}).dual_clip == 3.0
    assert tinker_algorithm("sapo", {"sapo_temperatures": [1.0, 2.0]}).sapo_temperatures == (1.0, 2.0)


@pytest.mark.parametrize(
    ("loss_fn", "options", "text"),
    [
        (
            "pppo",
            {},
            "loss_fn: unknown loss \\(got 'pppo'\\)\\. Choose one of cispo, .*cross_entropy, .*, sapo, or an import path",
        ),
        ("dro", {"clip": 1.0}, "loss_fn_config.clip: dro has no such option \\(got 1.0\\)\\. Its options: beta"),
        ("importance_sampling", {"beta": 1.0}, "Its options: none"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low"),
    ],
)
def test_unknown_losses_and_options_raise(loss_fn: str, options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tinker_algorithm(loss_fn, options)
