"""Helpers that build training data for custom loops."""

import numpy as np
import pytest

from titanrl import batches, sampled_datum, supervised_datum


def test_sampled_datum_shifts_tokens_and_weights_only_sampled_ones() -> None:
    datum = sampled_datum([5, 6], [7, 1], [-0.1, -0.7], 1.5)
    assert datum.model_input.tolist() == [5, 6, 7]
    inputs = {name: values.tolist() for name, values in datum.loss_fn_inputs.items()}
    assert inputs == {
        "target_tokens": [6, 7, 1],
        "weights": [0, 1, 1],
        "advantages": [0, 1.5, 1.5],
        "logprobs": pytest.approx([0, -0.1, -0.7]),
    }


def test_advantages_can_differ_by_token() -> None:
    datum = sampled_datum([5], [7, 1], [-0.1, -0.7], [2.0, -3.0])
    assert datum.loss_fn_inputs["advantages"].tolist() == [2.0, -3.0]


def test_supervised_datum_weights_only_the_answer() -> None:
    datum = supervised_datum([5, 6], [7, 1], weight=0.25)
    assert datum.loss_fn_inputs["target_tokens"].tolist() == [6, 7, 1]
    assert datum.loss_fn_inputs["weights"].tolist() == [0, 0.25, 0.25]


@pytest.mark.parametrize(("prompt", "tokens"), [([], [1]), ([1], [])])
def test_empty_prompt_or_answer_is_rejected(prompt: list[int], tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        supervised_datum(prompt, tokens)


def test_batches_cover_each_epoch_once_in_seeded_order() -> None:
    epochs = list(batches(range(10), 3, seed=4, num_epochs=2))
    assert [len(batch) for batch in epochs] == [3] * 6
    first, second = np.concatenate(epochs[:3]), np.concatenate(epochs[3:])
    assert len(set(first.tolist())) == len(set(second.tolist())) == 9
    assert first.tolist() != second.tolist()
    assert epochs == list(batches(range(10), 3, seed=4, num_epochs=2))
    with pytest.raises(ValueError, match=r"size: must not exceed the number of items \(got 3 of 2\)"):
        next(batches([1, 2], 3))
