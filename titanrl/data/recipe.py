"""The tokenizer of the quick start's tiny model, with 106 tokens. `titanrl.models.recipe` creates the model.

The vocabulary contains the 95 printable ASCII characters and, as single tokens, five phrases of the chain_sum task and the tags
of tool calls. A question therefore has only 12 to 16 tokens.
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD_TOKEN, PAD_ID = "<pad>", 0
EOS_TOKEN, EOS_ID = "<eos>", 1
ALPHABET = "".join(map(chr, range(0x20, 0x7F)))
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": PAD_TOKEN,
    "eos_token": EOS_TOKEN,
    "unk_token": PAD_TOKEN,
    "clean_up_tokenization_spaces": False,
}
"""`tokenizer_config.json`."""
VOCAB_SIZE = 112
"""Rows of the embedding: 106 tokens, padded to a multiple of 16."""


def write_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: `<pad>` 0, `<eos>` 1, the alphabet 2 to 96, the phrases 97 to 105."""
    (directory / "tokenizer.json").write_text(_serialized(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(_SETTINGS, indent=2) + "\n", encoding="utf-8")


def is_recipe(directory: Path) -> bool:
    """Return True if the directory's tokenizer is the one that `write_tokenizer` writes, up to its chat template."""
    file, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not (file.is_file() and settings.is_file()) or file.stat().st_size != len(_serialized().encode()):
        return False
    changed = json.loads(settings.read_text(encoding="utf-8")).keys() - _SETTINGS.keys() - {"chat_template"}
    return not changed and file.read_text(encoding="utf-8") == _serialized()


@cache
def _serialized() -> str:
    vocab = {token: index for index, token in enumerate((PAD_TOKEN, EOS_TOKEN, *ALPHABET))}
    # Characters outside the alphabet become <pad>, which titanrl's Tokenizer.encode rejects, so no text changes silently.
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=PAD_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in PHRASES])
    text: str = tokenizer.to_str(pretty=True)
    return text
