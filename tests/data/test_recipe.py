import random
from pathlib import Path

from titanrl.config.sizes import RECIPE_VOCAB_SIZE
from titanrl.data import recipe
from titanrl.data.recipe import ALPHABET, PHRASES
from titanrl.data.tokenizer import Tokenizer


def test_vocabulary_has_the_size_that_the_model_is_made_with() -> None:
    assert recipe.VOCAB_SIZE == RECIPE_VOCAB_SIZE


def test_tokenizer_agrees_with_autotokenizer(recipe_dir: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(recipe_dir)
    assert (len(reference), reference.pad_token_id, reference.eos_token_id) == (106, 0, 1)
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices([*ALPHABET, *PHRASES], k=rng.randint(0, 40)))
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        assert tokenizer.decode(ids) == reference.decode(ids) == text


def test_question_of_three_terms_has_twelve_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("State the final answer to the following arithmetic problem: 7 + 5 - 3 =")
    assert (ids[0], len(ids)) == (97, 12)
