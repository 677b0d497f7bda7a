"""Arguments of public functions: what is accepted, and the message otherwise."""

import math
from typing import Any

import numpy as np
import pytest

from titanrl.carriers.types import AdamParams, Datum, batches, check_data, sampled_datum, supervised_datum


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": "fast"}, r"AdamParams.learning_rate: must be a finite number >= 0 \(got str 'fast'\)"),
        ({"learning_rate": -1.0}, r"AdamParams.learning_rate: must be a finite number >= 0 \(got -1.0\)"),
        ({"weight_decay": math.nan}, "AdamParams.weight_decay: must be a finite number >= 0"),
        ({"beta1": 1.0}, r"AdamParams.beta1: must be a finite number >= 0 and < 1 \(got 1.0\)"),
        ({"max_grad_norm": None}, r"AdamParams.max_grad_norm: must be a finite number >= 0 \(got NoneType None\)"),
        ({"eps": True}, r"AdamParams.eps: must be a finite number >= 0 \(got True\)"),
    ],
)
def test_optimizer_options_are_finite_numbers_in_range(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        AdamParams(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    assert AdamParams(learning_rate=np.float32(0.5), max_grad_norm=1).learning_rate == 0.5  # type: ignore[arg-type]


GOOD: dict[str, Any] = {"prompt": [1, 2], "tokens": [3, 4], "logprobs": [-1.0, -2.0], "advantage": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "text"}, r"prompt: must be a list of token ids \(got str 'text'\)"),
        ({"prompt": [1.5]}, r"prompt: must be a list of token ids \(got list \[1.5\]\)"),
        ({"tokens": [[3], [4]]}, "tokens: must be a flat list of token ids"),
        ({"tokens": [3, -1]}, r"tokens: token ids must not be negative \(got -1\)"),
        ({"tokens": None}, "tokens: must be a list of token ids"),
        ({"logprobs": [-1.0]}, r"logprobs: must have one value per token, 2 \(got 1\)"),
        ({"logprobs": ["a", "b"]}, "logprobs: must be a list of numbers"),
        ({"advantage": "high"}, "advantage: must be a list of numbers"),
        ({"advantage": [1.0, 2.0, 3.0]}, r"advantage.*: must have one value per token, 2 \(got 3\)"),
        ({"advantage": math.inf}, "advantage: must be a finite number"),
        ({"weight": None}, "weight: must be a finite number"),
        ({"prompt": []}, "prompt, tokens: must not be empty"),
    ],
)
def test_sampled_datum_names_a_wrong_argument(change: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        sampled_datum(**(GOOD | change))
    if change.keys() <= {"prompt", "tokens", "weight"}:
        with pytest.raises((TypeError, ValueError), match=message):
            supervised_datum(**({"prompt": [1, 2], "tokens": [3, 4]} | change))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("text", 1), "items: must be a list of data"),
        (([1, 2], 0), r"size: must be an integer >= 1 \(got 0\)"),
        (([1, 2], "2"), "size: must be an integer >= 1"),
        (([1, 2], 3), "size: must not exceed the number of items"),
    ],
)
def test_batches_refuses_wrong_arguments_when_called(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        batches(*arguments)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"target_tokens": [2.5, 1.0]}, r"data\[0\].loss_fn_inputs\['target_tokens'\]: must be a list of token ids"),
        ({"target_tokens": [2]}, r"data\[0\].loss_fn_inputs\['target_tokens'\]: wrong shape \(got \(1,\)\)"),
        ({"weights": [1.0, None]}, r"data\[0\].loss_fn_inputs\['weights'\]: must be a list of numbers"),
    ],
)
def test_data_are_checked_before_they_are_sent(inputs: Any, message: str) -> None:
    datum = Datum(model_input=np.array([1, 2]), loss_fn_inputs={"target_tokens": np.array([2, 3]), **inputs})
    with pytest.raises((TypeError, ValueError), match=message):
        check_data([datum])
    check_data([Datum(model_input=np.array([1, 2]), loss_fn_inputs={"target_tokens": [2, 3], "logprobs": [0.0, -math.inf]})])  # type: ignore[dict-item]
