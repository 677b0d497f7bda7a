import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from titanrl.config.sections import RecipeConfig
from titanrl.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer
from titanrl.models.recipe import create_model

TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos> {% endfor %}"
REPLY = "{% if add_generation_prompt %}[assistant] {% endif %}"


@pytest.fixture(scope="session")
def recipe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start's model directory."""
    directory = tmp_path_factory.mktemp("recipe") / "model"
    create_model(directory, RecipeConfig(), seed=0)
    return directory


@pytest.fixture(scope="session")
def tokenizer(recipe_dir: Path) -> Tokenizer:
    """The quick start's tokenizer."""
    return load_tokenizer(recipe_dir)


def with_template(directory: Path, template: str) -> Tokenizer:
    """Write the quick start's tokenizer with a chat template."""
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The quick start's tokenizer with a chat template whose turns end with <eos> and a space."""
    return with_template(tmp_path_factory.mktemp("chat"), TURNS + REPLY)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level(
    specials: Sequence[str] = CHATML_TOKENS, *, bos: str | None = None, plain: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer, whose post-processor adds `bos`. The added tokens `plain` are not special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["How much is 12 plus 34? system user assistant"] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if bos is not None:
        ids = [(bos, tokenizer.token_to_id(bos))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    return tokenizer


def write_model_dir(directory: Path, backend: tokenizers.Tokenizer, *, eos: str, **settings: Any) -> Path:
    """Write the tokenizer files of a model directory; `settings` are added to `tokenizer_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
