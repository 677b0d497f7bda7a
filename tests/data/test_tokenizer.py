import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from titanrl.config.sizes import RECIPE_VOCAB_SIZE
from titanrl.data.tokenizer import ALPHABET, EOS_ID, PHRASES, Tokenizer, load_tokenizer, write_tokenizer


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def test_encoding_uses_characters_and_phrases(tokenizer: Tokenizer) -> None:
    # '7' is 0x37, so its id is 2 + 0x37 - 0x20 = 25; ids 98 to 101 are <think> </think> <answer> </answer>.
    assert tokenizer.encode("<think>7</think> <answer>7</answer>") == [98, 25, 99, 2, 100, 25, 101]
    assert tokenizer.encode("") == []


def test_decoding_omits_special_tokens_and_unused_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([98, 25, 108, 99, 2, 100, EOS_ID, 0]) == "<think>7</think> <answer>"


def test_raw_text_contains_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode_raw([98, 25, 99, EOS_ID]) == "<think>7</think><eos>"


def test_every_token_id_has_a_readable_text(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(i) for i in (0, 1, 2, 25, 98, 108)] == ["<pad>", "<eos>", " ", "7", "<think>", "<id 108>"]


@pytest.mark.parametrize("text", ["two\nlines", "caf\u00e9"])
def test_text_without_a_token_is_rejected(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(ValueError, match="no token for some characters"):
        tokenizer.encode(text)


def test_tokens_that_the_model_lacks_are_rejected(directory: Path) -> None:
    (directory / "config.json").write_text('{"vocab_size": 100, "eos_token_id": 1}')
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("<think>7</think>") == [98, 25, 99]
    for encode in (tokenizer.encode, tokenizer.encode_start, tokenizer.encode_chat):
        with pytest.raises(ValueError, match=r"vocabulary ends before 100 \(got '<answer>', token 100\)"):
            encode("7<answer>")
    (directory / "config.json").write_text('{"vocab_size": 100, "eos_token_id": 101}')
    with pytest.raises(ValueError, match=r"got '</answer>', token 101"):
        load_tokenizer(directory)


def test_end_of_sequence_tokens_come_from_all_files_in_order(directory: Path) -> None:
    assert load_tokenizer(directory).eos_ids == (1,)
    (directory / "config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(directory).eos_ids == (7, 1)
    (directory / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_tokenizer(directory).eos_ids == (9, 7, 1)


@pytest.mark.parametrize("ids", ["<eos>", [1, -1], [1, [2]], True, 1.5], ids=str)
def test_ends_must_be_token_ids(ids: object, directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match="eos_token_id must be a token id or a list of them"):
        load_tokenizer(directory)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("text", ["{bad", "[]", "[" * 100_000], ids=["no JSON", "no object", "deep"])
def test_broken_file_is_named(name: str, text: str, directory: Path) -> None:
    (directory / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        load_tokenizer(directory)


def test_tokenizer_without_end_of_sequence_is_rejected(directory: Path) -> None:
    edit_config(directory, eos_token=None)
    with pytest.raises(ValueError, match=r"Set eos_token_id in generation_config\.json"):
        load_tokenizer(directory)


def test_special_tokens_may_be_given_as_objects(directory: Path) -> None:
    edit_config(directory, eos_token={"content": "<eos>"})
    assert load_tokenizer(directory).eos_ids == (1,)


def test_directory_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer found\. Use a directory with tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_loading_a_tokenizer_imports_no_heavy_library(recipe_dir: Path) -> None:
    program = f"""
import sys
from pathlib import Path
import titanrl.data.examples, titanrl.data.tokenizer, titanrl.data.streams
from titanrl.data.tokenizer import load_tokenizer
assert load_tokenizer(Path({str(recipe_dir)!r})).encode("<think>") == [98]
print({{"torch", "transformers", "reasoning_gym"}} & sys.modules.keys())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


def test_vocabulary_padded_to_16_has_the_size_of_the_model(tokenizer: Tokenizer) -> None:
    assert -(-len(tokenizer.vocabulary) // 16) * 16 == RECIPE_VOCAB_SIZE


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
