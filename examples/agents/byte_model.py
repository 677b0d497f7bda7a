"""A tiny model with a tokenizer that encodes any text, a chat template and tools, for agent frameworks.

The tokenizer of the quick start knows 104 characters and phrases; the system prompts of frameworks have others.
"""

import json
from dataclasses import replace
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from titanrl.config.errors import BrokenRule
from titanrl.config.sections import ModelConfig, RecipeConfig
from titanrl.models.directory import recipe_model
from titanrl.models.recipe import write_model

PAD_TOKEN, END_TOKEN, START_TOKEN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
NUM_SPECIAL = 3 + len(TAGS)
MAX_MERGED_CHARS = 128
"""Longest token from a corpus, in characters; see `titanrl.data.tokenizer.MAX_TOKEN_CHARS`."""
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools' }}
{%- for tool in tools %}{{ '\\n' + (tool.function | tojson) }}{% endfor %}{{ '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{ '<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{ message.content or '' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def write_byte_tokenizer(directory: Path, corpus: str = "", num_merges: int = 0) -> int:
    """Write the files of the tokenizer, and return the size of its vocabulary, a multiple of 16 for the embedding.

    Without a corpus, each byte is a token. With one, the most frequent sequences of bytes in it become at most `num_merges`
    further tokens, so that a long prompt that is known in advance has few tokens. The special tokens come first; 0 is padding,
    and 1 ends a turn. The renderer `template` supports the chat template.
    """
    special = (PAD_TOKEN, END_TOKEN, START_TOKEN)
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_SPECIAL + 256 + num_merges,
        special_tokens=[*special, *TAGS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_MERGED_CHARS,
        show_progress=False,
    )
    backend.train_from_iterator([corpus] if num_merges else [], trainer)
    backend.add_special_tokens(list(special))
    # Tags are text: parsing a reply needs them.
    content = json.loads(backend.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in special
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD_TOKEN,
        "eos_token": END_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return -(-backend.get_vocab_size() // 16) * 16


def create_byte_model(directory: Path, recipe: RecipeConfig, seed: int, corpus: str = "", num_merges: int = 0) -> None:
    """Write a new model directory with random weights; see `write_byte_tokenizer` for the last two arguments."""
    model = recipe_model(ModelConfig(recipe=recipe), directory)
    assert not isinstance(model, BrokenRule), "the recipe must be valid"
    assert model.family.recipe is not None
    directory.mkdir(parents=True)
    hf = {**model.family.recipe(recipe), "vocab_size": write_byte_tokenizer(directory, corpus, num_merges)}
    write_model(directory, replace(model, hf=model.family.completed(hf)), hf, recipe.init_std, seed)
