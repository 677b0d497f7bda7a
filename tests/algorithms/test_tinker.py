import pytest

from titanrl.algorithms.contracts import tinker_algorithm
from titanrl.config.algorithm import LOSSES


def test_thresholds_are_bounds_of_ratio() -> None:
    ppo = tinker_algorithm("ppo", {"clip_low_threshold": 0.9})
    assert (ppo.loss, ppo.clip_low, ppo.clip_high) == ("ppo", pytest.approx(0.1), pytest.approx(0.2))
    cispo = tinker_algorithm("cispo", {})
    assert (cispo.loss, cispo.clip_low, cispo.clip_high) == ("cispo", 1.0, 3.0)
    assert tinker_algorithm("dro", {"beta": 0.3}).dro_beta == 0.3
    assert tinker_algorithm("importance_sampling", {}).loss == "importance_sampling"


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
            "loss_fn: unknown loss \\(got 'pppo'\\)\\. Choose one of cispo, cross_entropy, .*, sapo, or an import path",
        ),
        ("dro", {"clip": 1.0}, "loss_fn_config.clip: dro has no such option \\(got 1.0\\)\\. Its options: beta"),
        ("importance_sampling", {"beta": 1.0}, "Its options: none"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low"),
    ],
)
def test_unknown_losses_and_options_raise(loss_fn: str, options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tinker_algorithm(loss_fn, options)
