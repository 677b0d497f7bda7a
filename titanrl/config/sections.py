"""The base class of the sections of a configuration with the types of their fields, and the sections themselves.

`algorithm`, `data` and `evaluation` have their own modules. Every field has a type and a short description, and a default where
one is safe. Names include the unit. A section validates itself. Validation never assigns values: derived values are properties.
"""

import ast
import glob
import inspect
import os
import re
import string
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    NonNegativeFloat,
    PositiveFloat,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from titanrl.config.device import Device
from titanrl.config.errors import BrokenRule, BrokenRules, without_credentials

# Sections are strict: a string is not accepted for a number, nor a number for a boolean. YAML has neither paths nor tuples, so
# pydantic converts only these, from strings and lists.
FilePath = Annotated[Path, Field(strict=False)]
"""A file or directory that a run writes, relative to the current directory."""
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]

# The upper bounds are far beyond any real run. They reject a typo such as 1e12 workers before anything starts.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
CountOrZero = Annotated[int, Field(ge=0, le=1_000_000)]
Processes = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=100_000_000)]
StepsOrZero = Annotated[int, Field(ge=0, le=100_000_000)]
Tokens = Annotated[int, Field(ge=1, le=10_000_000)]
Bytes = Annotated[int, Field(ge=1, le=10**15)]
Seconds = Annotated[float, Field(gt=0.0, le=10_000_000.0)]

# Types with a fixed set of values that other modules use, too
Dtype = Literal["float32", "bfloat16"]
FileDtype = Literal["float32", "bfloat16", "float16"]
TransportName = Literal["arena", "rdma", "store"]
Verify = Literal["off", "sampled", "full"]
ConsoleMode = Literal["auto", "live", "plain", "off"]
TrainOn = Literal["assistant", "last", "all"]
LearningRateDecay = Literal["constant", "linear", "cosine"]

LIVE = Field(json_schema_extra={"live": True})
"""Annotation of a key that can be changed during the run (`titanrl.run.steering`)."""

FOR_KEYS = "put the key into an environment variable, and set key_variable to its name"
"""Fix for a URL with credentials."""

FOLDER = Path(__file__).parents[1] / "configs"
"""Directory of the shipped configurations. In a checkout, a link to `configs/`."""
MAX_PATH_BYTES = 3_000
"""Maximum length of a path. Linux allows 4,096 bytes; the rest is for files below the path."""
MAX_NAME_BYTES = 255
"""Maximum length of a file or directory name on Linux."""


@dataclass(frozen=True, slots=True)
class OrImportPath:
    """Annotation of a string that is a built-in name or the import path of a custom object.

    Example: `loss: Annotated[str, OrImportPath(tuple(LOSSES))]`

    A `.py` file in an import path is found as `InputPath` is. Validation makes the path absolute, because other processes
    import it.
    """

    names: tuple[str, ...] = ()
    """Built-in names; empty if only import paths are allowed."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a validator that accepts a built-in name, or a path with a colon before its last name."""
        pattern = "|".join([*map(re.escape, self.names), r".+:[A-Za-z_]\w*"])
        return core_schema.with_info_after_validator_function(
            _with_absolute_file, core_schema.str_schema(pattern=f"^({pattern})$", strict=True)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema: the built-in names, or a string in the format `import-path`."""
        path = {"type": "string", "format": "import-path"}
        return {"anyOf": [{"type": "string", "enum": list(self.names)}, path]} if self.names else path


def _with_absolute_file(path: str, info: ValidationInfo) -> str:
    file, _, name = path.rpartition(":")
    if not file.endswith(".py"):
        return path
    return f"{_found(Path(file), info).absolute()}:{name}"


def _found(path: Path, info: ValidationInfo) -> Path:
    """Return the path of an input: as given, or beside the configuration file; raise `BrokenRules` if two files differ."""
    folder = (info.context or {}).get("folder")
    if folder is None or path.is_absolute():
        return path
    beside = Path(folder, path)
    is_here, is_beside = _exists(path), _exists(beside)
    # A file of the user takes precedence over one that is shipped.
    is_same = is_here and is_beside and os.path.realpath(path) == os.path.realpath(beside)
    if is_here and is_beside and not is_same and Path(folder).resolve() != FOLDER.resolve():
        rule = "a relative path must name one file, but it exists in the current directory and beside the configuration file"
        fix = f"write the absolute path of the one that you mean: {path.absolute()} or {beside.absolute()}"
        raise BrokenRules(BrokenRule({"": str(path)}, rule, fix))
    return beside.absolute() if is_beside and not is_here else path


def _exists(path: Path) -> bool:
    """Return True if a file or a match of a pattern exists."""
    return os.path.exists(path) or (glob.has_magic(str(path)) and any(glob.iglob(str(path))))


InputPath = Annotated[Path, Field(strict=False), AfterValidator(_found)]
"""A file or directory that a run reads, relative to the current directory or, if it does not exist there, to the configuration
file."""


def _path_problem(path: Path) -> str | None:
    """Return the reason why a path cannot be used, such as a limit of Linux; None if it can."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return "a path must be valid UTF-8"
    if b"\0" in encoded:
        return "a path must not contain the character U+0000"
    if len(encoded) > MAX_PATH_BYTES:
        return f"a path must not be longer than {MAX_PATH_BYTES:,} bytes, but has {len(encoded):,}"
    if re.match(r"~|\$", os.fspath(path)) and not os.path.lexists(path):
        return "a path is used as written: ~ and environment variables are not expanded"
    if max(map(len, encoded.split(b"/"))) > MAX_NAME_BYTES:
        return f"a file or directory name must not be longer than {MAX_NAME_BYTES} bytes"
    return None


class Section(BaseModel):
    """A section of the configuration. Unknown keys are errors, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def _broken_rules(self) -> Iterator[BrokenRule]:
        """Yield the rules between several keys of this section that are broken."""
        return iter(())

    def broken(self, keys: str, rule: str, fix: str) -> BrokenRule:
        """Return a broken rule with the values of these keys, which are separated by spaces; the first one is to be changed."""
        return BrokenRule({key: self.value_of(key) for key in keys.split()}, rule, fix)

    def changed(self, *keys: str) -> list[str]:
        """Return those of the keys whose values are not the defaults."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].get_default()]

    def __repr__(self) -> str:
        """Show only the keys that differ from their defaults, as `--dry-run` does."""
        shown = (f"{key}={getattr(self, key)!r}" for key in self.changed(*type(self).model_fields))
        return f"{type(self).__name__}({', '.join(shown)})"

    def value_of(self, key: str) -> Any:
        """Return the value at a dotted key, such as `kl.reference`; sections become mappings."""
        value: Any = self
        for part in key.split("."):
            value = value[part] if isinstance(value, Mapping) else getattr(value, part)
        if isinstance(value, Mapping):
            return {name: child.model_dump() if isinstance(child, BaseModel) else child for name, child in value.items()}
        return value.model_dump() if isinstance(value, BaseModel) else value

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        broken = []
        for name, path in self:
            if isinstance(path, Path) and (problem := _path_problem(path)):
                expanded = os.path.expandvars(os.path.expanduser(path))
                fix = "shorten or correct it" if expanded == str(path) else f"write {expanded}"
                broken.append(BrokenRule({name: str(path)}, problem, fix))
        # Other rules look for files, which would raise for a path that is too long.
        if broken := broken or list(self._broken_rules()):
            raise BrokenRules(*broken)
        return self


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of the fields of a section, by field.

    Only references and messages need them. pydantic would read them in every process that imports the configuration, which
    takes a third of the import.
    """
    found = dict[str, str]()
    for base in reversed(section.__mro__):
        for field, text in pairwise(_classes(base.__module__).get(base.__name__, [])):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = inspect.cleandoc(meaning)
    return {name: meaning for name, meaning in found.items() if name in section.model_fields}


@cache
def _classes(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of the classes of a module, by name; those of other packages have no sections."""
    if module.partition(".")[0] in sys.stdlib_module_names | {"pydantic"}:
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


def fields_of(template: str) -> set[str]:
    """Return the placeholders of a template. Raise `ValueError` if its braces are not paired."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return {re.split(r"[.\[]", name, maxsplit=1)[0] for name in names}


def broken_by_names(section: str, names: Iterable[str], what: str) -> Iterator[BrokenRule]:
    """Yield a rule for each name of a key in a section that has a character other than letters, digits, _ and -."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", name):
            rule = f"the name of a {what} must consist of letters, digits, _ and -, and start with a letter or digit"
            yield BrokenRule({f"{section}.{name}": {}}, rule, "rename it")


def broken_by_url(key: str, url: str, example: str, for_credentials: str) -> Iterator[BrokenRule]:
    """Yield the rules that a URL breaks. `for_credentials` is the fix for a URL with credentials."""
    try:
        parts = urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_host = False
    if not has_host:
        yield BrokenRule({key: url}, f"{key} must contain a host", f"write it like {example}")
    if "@" in url:
        rule = f"{key} must not contain credentials, because the configuration is saved in the run directory"
        yield BrokenRule({key: without_credentials(url)}, rule, for_credentials)


class RecipeConfig(Section):
    """A tiny model with random weights, for runs without a pretrained model, such as the quick start."""

    family: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")] | None = None
    """Model type from docs/howto/model_families.md; null uses the first one."""

    hidden_size: Count = 128
    """Hidden size of the model."""
    num_layers: Count = 2
    """Number of transformer layers."""
    num_heads: Count = 4
    """Number of query heads."""
    num_kv_heads: Count = 2
    """Number of key-value heads; must divide `num_heads`."""
    head_dim: Literal[32, 64, 80, 96, 112, 128, 160, 192, 224, 256] = 32
    """Dimension of an attention head. vLLM's CPU attention supports only these sizes."""
    intermediate_size: Count = 384
    """Hidden size of the feed-forward layers; of each expert, if `family` is a mixture of experts."""
    init_std: PositiveFloat = 0.05
    """Standard deviation of the initial weights."""
    max_positions: Tokens = 512
    """Maximum sequence length in tokens."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_heads % self.num_kv_heads:
            fix = f"set num_kv_heads to {largest_divisor(self.num_heads, self.num_kv_heads)}"
            yield self.broken("num_kv_heads num_heads", "num_kv_heads must divide num_heads", fix)


class ModelConfig(Section):
    """The policy to train."""

    path: InputPath | None = None
    """Directory of a model in Hugging Face format (config.json, tokenizer, safetensors); null builds the model of `recipe`."""
    family: Annotated[str, OrImportPath()] | None = None
    """Import path of a custom model family, as `package.module:name` or `file.py:name`. Null selects the family by the model
    type in config.json."""
    recipe: RecipeConfig = RecipeConfig()
    """The tiny model to build when `path` is null."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.family is not None and self.recipe.family is not None:
            rule = "model.family and model.recipe.family both select the model family"
            yield self.broken("recipe.family family", rule, "remove one of them")


class WarmStartConfig(Section):
    """Supervised training before RL, on demonstrations generated for the task. `cache_dir` stores the result for later runs."""

    num_steps: Steps = 460
    """Number of optimizer steps."""
    num_long_only_steps: StepsOrZero = 400
    """Number of initial steps with worked solutions only. Later steps also contain short answers."""
    short_fraction: Share = 0.75
    """Fraction of answers without a worked solution after the first `num_long_only_steps` steps."""
    batch_size: Count = 64
    """Number of demonstrations per optimizer step."""
    learning_rate: PositiveFloat = 3e-3
    """Peak learning rate, reached after `num_warmup_steps` and then decayed linearly to zero."""
    num_warmup_steps: StepsOrZero = 20
    """Number of linear learning-rate warm-up steps."""
    tool_calls: bool | None = None
    """Let the worked solutions call a tool, with the sum as its only argument. Null enables this if `data.environment` is the
    calculator. Set true for a custom tool that takes such an argument."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.num_long_only_steps > self.num_steps:
            yield self.broken(
                "num_long_only_steps num_steps",
                "num_long_only_steps must not exceed num_steps",
                f"set num_long_only_steps to at most {self.num_steps}",
            )


TokenId = Annotated[int, Field(ge=0, le=100_000_000)]


class RolloutConfig(Section):
    """Sampling of completions."""

    groups_per_step: Count = 8
    """Number of prompts per step. Each prompt yields one group of completions."""
    group_size: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Number of completions per prompt. Most advantages compare the completions of a group, so they need at least two; `gae`,
    `reinforce_pp`, custom advantages and distillation also work with one."""
    min_group_size: Count = 1
    """Minimum number of scored completions a group needs to be trained on. Completions whose reward or environment failed are
    removed from their group. A group with fewer than this is dropped and replaced by another prompt."""
    max_new_tokens: Tokens = 26
    """Maximum completion length in tokens; with `data.environment`, of one turn."""
    temperature: Annotated[float, Field(ge=0.01, le=2.0), LIVE] = 1.0
    """Sampling temperature. The trainer divides its logits by the same value. vLLM does not sample below 0.01."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 disables it. The trainer renormalizes over the same tokens (docs/howto/truncated_sampling.md)."""
    top_k: CountOrZero = 0
    """Top-k sampling; 0 disables it. The trainer renormalizes over the same tokens."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Minimum probability of a token, relative to the most likely one; 0 disables it. The trainer renormalizes over the same
    tokens."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)] | TokenId, ...], Field(strict=False)] = ()
    """Texts and token ids that end a completion, in addition to the end tokens of the model and of its chat template, such as
    `["</answer>", 198]` (docs/howto/model.md). Evaluations and the turns of environments use them, too."""
    keep_stop: bool = False
    """Keep the stop text at the end of the text that rewards, environments and files receive. As in vLLM, the default removes
    it. The tokens to train on always include it."""
    dynamic_sampling: bool = False
    """Discard groups whose rewards are all equal, and sample others until the batch has `groups_per_step` groups (DAPO)."""
    window: Share = 0.0
    """Reordering window, as a fraction of the buffer's slots: groups in it may be trained on before an older, unfinished group,
    so that one slow group does not block the others. The slow group may then exceed `max_staleness`; the run prints the exact
    bound. 0 trains strictly in order."""
    num_spare_completions: CountOrZero = 0
    """Extra completions to start per prompt. The first `group_size` to finish are kept and the others are cancelled. This
    avoids waiting for the longest ones, but biases training toward short completions."""
    group_filter: Annotated[str, OrImportPath()] | None = None
    """Import path of a function that selects the groups to train on (docs/howto/filter.md); null keeps all groups."""
    num_workers: Processes = 1
    """Number of rollout worker processes. Add more if environments or rewards limit throughput."""
    starvation_timeout_s: Seconds = 300.0
    """Maximum time in seconds to wait for a trainable batch, for example when all rewards are equal. The run then ends with an
    error."""
    save: FilePath | None = None
    """Directory for a dump of all rollouts, as Parquet files with tokens, log-probabilities, rewards and messages
    (docs/howto/dump.md); null writes none."""
    replay: InputPath | None = None
    """Directory of a dump to train on, batch by batch in the recorded order, without generators, environments and rewards
    (docs/howto/dump.md). Null samples new rollouts."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts in `stop`."""
        return tuple(value for value in self.stop if isinstance(value, str))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The token ids in `stop`."""
        return tuple(value for value in self.stop if isinstance(value, int))

    @property
    def is_truncated(self) -> bool:
        """True if tokens are sampled from a truncated distribution."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def num_requests(self) -> int:
        """Number of completions started per prompt."""
        return self.group_size + self.num_spare_completions

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.min_group_size > self.group_size:
            fix = f"set min_group_size to at most {self.group_size}"
            yield self.broken("min_group_size group_size", "min_group_size must not exceed group_size", fix)


ReplayPriority = Literal["advantage", "variance", "reward", "recency"]
"""Built-in priorities of groups."""


class ReplayConfig(Section):
    """Prioritized replay of groups from earlier batches."""

    fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of replayed groups in each batch, in addition to `rollout.groups_per_step` new groups; 0 disables replay. The
    number of replayed groups is rounded. A batch has fewer while not enough stored groups are recent enough (`max_age`)."""
    capacity: Count = 64
    """Maximum number of stored groups. When it is exceeded, the oldest group is removed."""
    priority: Annotated[str, OrImportPath(get_args(ReplayPriority))] = "advantage"
    """Sampling priority of a group: `advantage` (mean absolute advantage), `variance` of its rewards, mean `reward`, `recency`
    (1 / (1 + age)), or the import path of a custom function (docs/howto/replay_groups.md)."""
    alpha: Annotated[float, Field(ge=0.0, le=10.0)] = 0.6
    """Exponent of the priorities; 0 samples uniformly."""
    beta: Annotated[float, Field(ge=0.0, le=10.0)] = 0.4
    """Exponent of the importance weights at the first step. They multiply the loss weights of replayed groups, to correct for
    the prioritized sampling."""
    beta_end: Annotated[float, Field(ge=0.0, le=10.0)] = 1.0
    """Exponent of the importance weights at the last step; it changes linearly from `beta`."""
    max_uses: Annotated[int, Field(ge=2, le=1_000_000)] | None = None
    """Maximum number of batches that contain a group, including the first one; null sets no limit."""
    max_age: Count = 8
    """Maximum staleness of a replayed token, in steps."""
    shard_memory_bytes: Bytes = 4 << 30
    """Memory in bytes that each rollout worker uses for the groups it stores. Groups beyond it are moved to memory-mapped files
    in the run directory. Also applies without replay."""

    def num_replayed(self, groups_per_step: int) -> int:
        """Return the number of replayed groups per batch of `groups_per_step` new groups."""
        return round(groups_per_step * self.fraction / (1.0 - self.fraction))


class SandboxConfig(Section):
    """Isolated processes that run the reward functions. A reward may execute model output, and a process that hangs is
    killed."""

    timeout_s: Seconds = 5.0
    """Time limit in seconds for one reward to score one group. On timeout the process is killed, and each completion is scored
    separately. For a trusted reward, the limit applies to each call."""
    num_processes: Processes = 8
    """Number of scoring processes per rollout worker. Groups never wait for a process if there are `rollout.groups_per_step` of
    them per reward."""
    groups_per_process: Count = 1
    """Number of groups that a process scores before it is replaced. With 1, a completion that corrupts its process affects only
    its own group. Larger values save forks, and are safe if no reward executes model output."""
    memory_bytes: Bytes = 2 << 30
    """Address-space limit of a scoring process, in bytes."""


class ParallelismConfig(Section):
    """Degrees of parallelism. The product of `dp_replicate`, `dp_shard`, `cp` and `tp` is the number of trainer ranks."""

    dp_replicate: Processes = 1
    """Number of replicas of the sharded model (HSDP)."""
    dp_shard: Processes = 1
    """Number of ranks that parameters, gradients and optimizer state are sharded over (FSDP2)."""
    cp: Processes = 1
    """Context-parallel degree: number of ranks that divide the tokens of each row, for rows whose activations exceed the memory
    of one rank. Parameters are sharded over these ranks, too. `trainer.row_tokens` must be a multiple of 2 x `cp` x `tp`."""
    tp: Processes = 1
    """Tensor-parallel degree, with sequence parallelism; must divide the number of attention heads."""
    ep: Processes = 1
    """Expert-parallel degree: number of ranks that the experts of a layer are distributed over, for a mixture of experts. It
    uses the ranks of `dp_shard`, `cp` and `tp` and adds none, so it must divide their product; it must also divide the number
    of experts. With 1, FSDP shards the experts like other parameters. Tensor parallelism of experts needs more than 1."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """FSDP's policy for parameters gathered in the forward pass: `always` frees them, which saves memory; `never` keeps them
    for the backward pass, which saves communication; `default` is torchtitan's choice. On one rank of data and context
    parallelism, only `always` uses FSDP, if `trainer.dtype` and `trainer.compute_dtype` differ: it casts layer by layer,
    slowly, but saves a copy of the parameters."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.dp_size * self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """Number of ranks that FSDP shards parameters over."""
        return self.dp_shard * self.cp

    @property
    def dp_size(self) -> int:
        """Number of ranks that process different data."""
        return self.dp_replicate * self.dp_shard

    def _broken_rules(self) -> Iterator[BrokenRule]:
        axes = ("dp_shard", "cp", "tp") if self.cp > 1 else ("dp_shard", "tp")
        if self.num_shards * self.tp % self.ep:
            rule = f"ep must divide {' x '.join(axes)}, because it uses their ranks"
            fix = f"set ep to {largest_divisor(self.num_shards * self.tp, self.ep)}"
            yield self.broken(" ".join(["ep", *axes]), rule, fix)


class LoraConfig(Section):
    """Low-rank adapters (LoRA). The base weights stay frozen; `weights.lora` selects what generators receive."""

    rank: Count = 32
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    targets: Annotated[tuple[Literal["attention", "mlp"], ...], Field(strict=False, min_length=1)] = ("attention", "mlp")
    """Layers with adapters on their projections. Embedding and output layer never have adapters."""
    max_models: Count = 8
    """Maximum number of further models that a session creates with `new_model`. Each has an adapter and an optimizer of its own
    on the same base; `--dry-run` prints the memory of one."""
    path: InputPath | None = None
    """Directory of an adapter in the format of the package peft to start from, such as `checkpoints/final/adapter` of another
    run. Null starts with a new one, which changes nothing."""


class TrainerConfig(Section):
    """Trainer ranks (torchtitan)."""

    parallelism: ParallelismConfig = ParallelismConfig()
    """Degrees of parallelism."""
    dtype: Dtype = "float32"
    """Data type of parameters, gradients and optimizer state."""
    compute_dtype: Dtype = "float32"
    """Data type of the parameters in the forward and backward pass."""
    row_tokens: Tokens = 256
    """Length in tokens of a row, into which several sequences are packed. The longest prompt plus completion must fit, unless
    `overlong` allows otherwise."""
    overlong: Literal["error", "truncate", "skip"] = "error"
    """Handling of sequences longer than a row: `error` rejects the configuration, `truncate` cuts their last tokens, `skip`
    leaves the sequences out. Tokens that are cut or left out do not count in the loss weights; `tokens/overlong_frac` reports
    their share."""
    rows_per_microbatch: Count = 16
    """Maximum number of packed rows per micro-batch and rank. Lower it if activations do not fit into memory. On one machine
    without accelerators, a run uses fewer rows if these do not fit, by the estimates that `--dry-run` prints."""
    epochs: Count = 1
    """Number of passes over each batch (docs/howto/epochs.md)."""
    minibatches_per_batch: Count = 1
    """Number of mini-batches per epoch; each takes one optimizer step, with its own loss weights. Every epoch assigns the
    groups to mini-batches in a new order."""
    share_prompts: bool = False
    """Compute tokens with which several sequences of a group begin once per row: its prompt, and what branches of agents have
    in common. Gradients are the same. Helps if groups are large, prompts long, or branches many (docs/trainer.md)."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute some (`selective`) or all (`full`) activations in the backward pass, which saves memory and costs time."""
    compile: bool = False
    """Compile each transformer layer with torch.compile, which saves time and memory in large models. The first step then takes
    longer, in a first run by tens of seconds. On a CPU, it needs a C++ compiler and Python's headers."""
    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """torchao's float8 recipe for the projections: `tensorwise` (one scale per tensor, the fastest), `rowwise` (one per row) or
    `rowwise_with_gw_hp` (one per row, weight gradients in high precision). Null disables it. On CPU it is emulated, which is
    slow and only for tests."""
    deterministic: Literal["off", "warn", "error"] = "off"
    """Use PyTorch's deterministic algorithms, which may be slower. If an operation has none, `error` stops the run and `warn`
    prints a warning."""
    detect_anomaly: bool = False
    """Report the forward operation that caused an error in the backward pass (torch.autograd.detect_anomaly). Slow; for
    debugging."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights; null trains all weights."""
    routing: Literal["own", "compared", "replayed"] = "own"
    """Experts that compute a token in a mixture of experts: `own` uses the choice of the trainer's routers; `replayed` uses the
    generator's choice, weighted by the trainer's routers (R3, arXiv:2510.11370); `compared` uses the trainer's choice and
    reports how often the generator's differs (docs/howto/model_families.md)."""
    expert_bias_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Change of the bias of an expert per optimizer step, which balances the experts of a mixture of experts without an
    auxiliary loss (arXiv:2408.15664). The bias is added to the scores that choose the experts of a token, and rises for experts
    with fewer loss tokens than the mean. DeepSeek-V3 used 0.001; 0 disables it (docs/howto/model_families.md)."""
    snapshots_on_device: bool = False
    """Keep the weight snapshots for proximal and reference log-probabilities in device memory instead of host memory."""

    @property
    def uses_fsdp(self) -> bool:
        """True if FSDP shards, casts and reduces. On one rank of data and context parallelism it would only copy."""
        plan = self.parallelism
        return plan.dp_size * plan.cp > 1 or (self.dtype != self.compute_dtype and plan.fsdp_reshard_after_forward == "always")

    def has_fixed_rows(self, device: Device) -> bool:
        """Return whether all rows have `row_tokens` columns, because each new length would compile again: FlexAttention, and
        layers under tensor parallelism, for which torch 2.13 fails to compile variable sizes."""
        return device.attention == "flex" or (self.compile and self.parallelism.tp > 1)

    @property
    def max_optimizer_steps(self) -> int:
        """Maximum number of optimizer steps per batch; a mini-batch without a gradient takes none."""
        return self.epochs * self.minibatches_per_batch

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.compile and self.parallelism.tp > 1 and self.activation_checkpointing != "none":
            yield self.broken(
                "compile parallelism.tp activation_checkpointing",
                "torch 2.13 cannot compile activation checkpointing with tensor parallelism",
                "set trainer.compile to false, trainer.activation_checkpointing to none, or trainer.parallelism.tp to 1",
            )


class GeneratorConfig(Section):
    """Generator replicas (vLLM)."""

    replicas: Processes = 1
    """Number of independent vLLM engines."""
    tp: Processes = 1
    """Tensor-parallel degree of each replica, with one process and device per rank; must divide the number of attention
    heads."""
    model_impl: Literal["titan", "native"] = "titan"
    """Model implementation: `titan` runs the trainer's model definition inside vLLM, `native` runs vLLM's own model."""
    dtype: Dtype = "float32"
    """Data type of the generator's weights. The trainer casts to it when it publishes weights."""
    on_update: Literal["continue", "restart", "drain"] = "continue"
    """Handling of running requests when new weights arrive: `continue` keeps them and records the weight version of each token,
    `restart` discards their tokens and starts them again, `drain` first finishes them with the old weights."""
    max_num_seqs: Count = 256
    """Maximum number of completions that one engine decodes concurrently."""
    kv_cache_bytes: Bytes = 64 << 20
    """KV-cache size of one replica in bytes, divided among its ranks. CPU only; on accelerators set `gpu_memory_utilization` in
    `vllm`."""
    vllm: dict[str, Any] = {}
    """Additional arguments of `vllm.EngineArgs`."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks over all replicas."""
        return self.replicas * self.tp

    def _broken_rules(self) -> Iterator[BrokenRule]:
        yield from _broken_by_arguments(self)


def _broken_by_arguments(section: "GeneratorConfig | TeacherConfig") -> Iterator[BrokenRule]:
    for key in ("tensor_parallel_size", "distributed_executor_backend", "pipeline_parallel_size", "data_parallel_size"):
        if key in section.vllm:
            rule = "TitanRL sets this argument: it starts one process per tensor-parallel rank"
            yield section.broken(f"vllm.{key}", rule, "remove it, and set tp")


class WeightsConfig(Section):
    """Weight transfer from the trainer to the generators."""

    transport: Literal["auto", TransportName] = "auto"
    """Transport of the weights: `arena` is shared memory within one host; `rdma` and `store` (torchstore) also work between
    hosts. `auto` uses `arena` for generators on the trainer's host and `rdma` for others. Without InfiniBand, Monarch runs RDMA
    over TCP."""
    verify: Verify = "sampled"
    """Checksum of received weights: `off`, `full`, or `sampled`, which covers one page in 64 and other pages every time.
    Versions, names, shapes, data types and overwrites are always checked."""
    lora: Literal["merged", "adapters"] = "merged"
    """Weights that generators receive with `trainer.lora`: `merged` sends all weights with every publication; `adapters` sends
    the base once and then only the adapters, which vLLM's own model computes beside its layers."""
    held_adapters: CountOrZero = 0
    """Number of earlier adapters that generators can hold for sampling clients, with `lora: adapters`: those that
    `publish(keep=True)` returned and that have not been released."""


class CheckpointConfig(Section):
    """Checkpoints, from which a run can be resumed."""

    every_steps: Annotated[StepsOrZero, LIVE] = 50
    """Number of steps between checkpoints; 0 saves only at the end."""
    keep_last: Annotated[int, Field(ge=2, le=1_000_000)] = 2
    """Number of checkpoints to keep; older ones are deleted."""
    export_dtype: Literal["base", "float32", "bfloat16", "float16"] = "base"
    """Dtype of the weights in exported models, such as `checkpoints/final`. `base` uses that of the weights in `model.path`."""
    on_interrupt: Annotated[bool, LIVE] = False
    """Save a checkpoint when a signal interrupts the run, after the current step, if that takes at most 10 seconds."""


class TimeoutsConfig(Section):
    """Time limits. Every wait has one; when it expires, the run ends with an error that names the wait."""

    start_s: Seconds = 600.0
    """Time limit in seconds for all processes to start and load their model or data. Raise it for large models on slow
    storage."""
    step_s: Seconds = 1800.0
    """Time limit in seconds for one trainer call, and for one batch of rollouts. Raise it for long completions or large
    batches."""
    sync_s: Seconds = 600.0
    """Time limit in seconds for one push or pull of the weights."""
    close_s: Seconds = 16.0
    """Time limit in seconds for an orderly shutdown, half of it for actors and half for their processes. Processes that remain
    are killed."""


class FaultsConfig(Section):
    """Fault detection and response (docs/faults.md)."""

    on_stall: Literal["respawn", "abort", "wait"] = "respawn"
    """Response to a process that hangs. `respawn` replaces it like one that died. `abort` ends the run with an error that names
    the process and the file with its stack traces. `wait` only reports it, and the run waits until the limit in `timeouts`."""
    stall_factor: Annotated[float, Field(ge=1.0, le=1_000_000.0)] = 10.0
    """A request counts as stalled when it takes this many times as long as the slowest of the last hundred of its kind. Raise
    it if request times vary a lot."""
    min_stall_s: Seconds = 30.0
    """Minimum time in seconds before a request counts as stalled. A suspended process (SIGSTOP) also counts as stalled after
    this time."""
    max_respawns: CountOrZero = 5
    """Maximum number of replaced processes within `respawn_window_s`; one more failure ends the run. 0 disables replacement."""
    respawn_window_s: Seconds = 600.0
    """Time window in seconds for `max_respawns`."""
    rank_wait_s: Seconds = 25.0
    """Time in seconds that trainer ranks wait for a rank that does not reach the same phase of a step, such as the optimizer
    step. The log names the missing rank after a sixth of it."""
    check_replicas_every: StepsOrZero = 50
    """Number of optimizer steps between consistency checks of the trainer. Parameters, buffers, moving averages and optimizer
    state that several ranks hold must be bitwise equal. They are also checked after every checkpoint load; 0 disables all
    checks."""


TRACKERS: Mapping[str, str] = {
    "tensorboard": "titanrl.metrics.trackers:TensorBoardTracker",
    "wandb": "titanrl.metrics.trackers:WandbTracker",
    "trackio": "titanrl.metrics.trackers:TrackioTracker",
    "mlflow": "titanrl.metrics.trackers:MlflowTracker",
}
"""Values of `logging.loggers`: the name, which is also the name of the package to install, and the import path of the class."""
SMALLEST_PACKAGES: Mapping[str, str] = {"mlflow": "mlflow-skinny"}
"""Packages that suffice for a tracker and that its own package requires."""


class LoggingConfig(Section):
    """Console output, rollout records and experiment trackers."""

    console: ConsoleMode = "auto"
    """Console output: `live` table, `plain` lines or `off`. `auto` uses `live` on a terminal and `plain` elsewhere."""
    rollouts_per_step: Annotated[CountOrZero, LIVE] = 2
    """Number of groups per step to record with all their tokens (docs/record.md)."""
    evaluation_prompts: CountOrZero = 64
    """Number of prompts per evaluation to record with their completions: the first ones of the set."""
    record_bytes: Annotated[int, Field(ge=1_000_000, le=10**15)] = 2_000_000_000
    """Size limit of the folder `record`, in bytes. When it is reached, the records of the middle of the run are deleted, and
    those of its start and of the newest steps stay."""
    loggers: Annotated[tuple[Annotated[str, OrImportPath(tuple(TRACKERS))], ...], Field(strict=False)] = ()
    """Experiment trackers, in addition to `metrics.jsonl`. Each built-in tracker requires the package of the same name. Or
    import paths of custom trackers (docs/howto/tracker.md)."""
    metrics_port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    """TCP port at which the controller serves the metrics of the run to Prometheus; null serves none
    (docs/howto/telemetry.md)."""
    metrics_host: str = "127.0.0.1"
    """IP address to listen at; `0.0.0.0` listens at all addresses of this machine. Everyone who can reach it can read the
    metrics."""

    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector, such as `http://localhost:4318`, or a file that ends in `.jsonl`, to which the
    controller sends the run's spans and metrics as OTLP; null sends none (docs/howto/telemetry.md)."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        to = self.otlp_endpoint
        if to is not None and not re.fullmatch(r"https?://[^/@\s]+(/[^@\s]*)?|[^\s:]+\.jsonl", to):
            fix = 'write "http://HOST:4318" or "FILE.jsonl"; the variable OTEL_EXPORTER_OTLP_HEADERS may contain a key'
            yield self.broken("otlp_endpoint", "must be a URL without a user, or a file that ends in .jsonl", fix)
        try:
            ip_address(self.metrics_host)
        except ValueError:
            yield self.broken("metrics_host", "must be an IP address", 'write "127.0.0.1" or, for all interfaces, "0.0.0.0"')


_TIME_LIMIT = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}")
"""Time limits that sbatch accepts: minutes, minutes:seconds, hours:minutes:seconds, days-hours and so on."""
_RESERVED_OPTIONS = frozenset(
    "--nodes -N --job-name -J --ntasks-per-node --ntasks -n --output -o --wrap --array -a".split()  # noqa: SIM905
)
"""Options of sbatch that the run itself sets."""


class SlurmConfig(Section):
    """Slurm job of a run with `hosts.kind: slurm`, with one task per trainer and generator host."""

    partition: str | None = None
    """Partition; null uses the cluster's default."""
    account: str | None = None
    """Account to charge; null uses your default account."""
    qos: str | None = None
    """Quality of service; null uses the default."""
    time_limit: str | None = None
    """Time limit, such as "24:00:00" or "2-12" (days-hours); null uses the partition's default."""
    exclusive: bool = True
    """Request exclusive nodes, which no other job shares."""
    cpus_per_host: Processes | None = None
    """CPU cores to request on each host; needed only on shared nodes."""
    memory_per_host: Annotated[str, Field(pattern=r"^\d+[KMGT]?$")] | None = None
    """Memory to request on each host, such as "200G"; "0" requests all memory."""
    port: Annotated[int, Field(ge=1024, le=65535)] = 22222
    """TCP port of Monarch on each host. The processes of the run use other ports, which the kernel chooses."""
    queue_limit_s: Seconds | None = None
    """Maximum time in seconds to wait in the queue; null sets no limit."""
    notice_s: Annotated[float, Field(ge=30.0, le=86_400.0)] = 120.0
    """Time in seconds before the time limit at which the run shuts down as after SIGTERM. With `checkpoint.on_interrupt` it
    first saves a checkpoint."""
    requeue: bool = False
    """Requeue a job of `titanrl submit` at its time limit or when Slurm preempts it. It then resumes."""
    options: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Additional options of sbatch, such as "--constraint=h100"."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.time_limit is not None and not _TIME_LIMIT.fullmatch(self.time_limit):
            fix = 'write hours:minutes:seconds, such as "24:00:00", or days-hours, such as "2-12"'
            yield self.broken("time_limit", "must be a time limit in sbatch format", fix)
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                yield BrokenRule({"options": option}, "each item must be one option of sbatch", 'write it as "--name=value"')
            elif option.partition("=")[0].split()[0] in _RESERVED_OPTIONS:
                fix = "remove it; hosts.trainer_hosts and hosts.generator_hosts set the number of nodes"
                yield BrokenRule({"options": option}, "the run sets this option itself", fix)


Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|[kKMGTP]i?)?$")]
"""Amount of a resource in Kubernetes notation: "8", "500m", "64Gi"."""
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9][-.a-z0-9]*$", max_length=253)]
_RESERVED_FIELDS = ("containers", "volumes", "nodeSelector", "tolerations", "restartPolicy")
"""Pod fields that other keys or the run itself set."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Toleration(Section):
    """A node taint that the pods tolerate."""

    key: str | None = None
    """Key of the taint; null matches every key."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """`Equal` tolerates only `value`, `Exists` any value."""
    value: str | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; null matches every effect."""


class VolumeConfig(Section):
    """A volume that every pod of the run mounts."""

    claim: DnsName
    """Name of the persistent volume claim. All pods write to it, so its access mode must be ReadWriteMany."""
    mount_path: str
    """Absolute path of the volume in the pods."""
    read_only: bool = False
    """Mount the volume read-only."""


class KubernetesConfig(Section):
    """Pods of a run with `hosts.kind: kubernetes`: one per trainer and generator host, and one for the controller."""

    image: str | None = None
    """Container image of all pods, with TitanRL and its dependencies. Required."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Pull policy of the image: `Always`, only if the node does not have it (`IfNotPresent`), or `Never`."""
    python: str = "python"
    """Python interpreter in the image."""
    namespace: DnsName | None = None
    """Namespace of the pods. Null uses the namespace of the controller's pod, else of the kubeconfig context, else
    `default`."""
    context: str | None = None
    """Kubeconfig context, for a controller outside the cluster; null uses the current context."""
    service_account: DnsName | None = None
    """Service account of the controller's pod. If null, `titanrl manifest` creates one with the permissions it needs."""
    node_selector: dict[str, str] = {}
    """Node labels that trainer and generator pods require."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False)] = ()
    """Node taints that trainer and generator pods tolerate, each with `key`, `operator`, `value` and `effect`."""
    volumes: Annotated[tuple[VolumeConfig, ...], Field(strict=False)] = ()
    """Volumes of all pods, each with `claim` (a persistent volume claim), `mount_path` and `read_only`. The first volume is the
    working directory of the run, so `output_dir` and `cache_dir` are on it."""
    labels: dict[str, str] = {}
    """Additional labels of the resources and pods, for example of a queue."""
    env: dict[str, str] = {}
    """Additional environment variables of all pods."""
    cpu: Quantity | None = None
    """CPU cores that each trainer or generator pod requests; null requests none."""
    memory: Quantity | None = None
    """Memory that each trainer or generator pod requests, including `/dev/shm`; null requests none."""
    shared_memory: Quantity | None = None
    """Size limit of `/dev/shm` in each pod, which must hold two versions of the weights. Null limits it only by the pod's
    memory."""
    gpu_resource: str = "nvidia.com/gpu"
    """Accelerator resource, of which each pod requests `hosts.devices_per_host`. Not requested on CPU."""
    controller_cpu: Quantity | None = None
    """CPU cores that the controller's pod requests. It also runs the buffer and the weight store. Null requests none."""
    controller_memory: Quantity | None = None
    """Memory that the controller's pod requests; null requests none."""
    pod_spec: dict[str, Any] = {}
    """Additional fields in the spec of trainer and generator pods, such as `affinity` or `priorityClassName`. The controller's
    pod uses only `imagePullSecrets` and `securityContext` of them."""
    port: Annotated[int, Field(ge=1024, le=65534)] = 26600
    """TCP port of Monarch in each pod; the next port is used for its lease. The processes of the run use other ports, which the
    kernel chooses."""
    start_limit_s: Seconds = 3600.0
    """Maximum time in seconds until all pods are ready, including waiting for nodes and pulling the image."""
    keep: bool = False
    """Do not delete MonarchMesh resources that existed before the run, so that the next run finds their pods running."""
    keep_finished_s: Annotated[int, Field(ge=0, le=604_800)] = 300
    """Time in seconds before the Job of a finished controller is deleted. Pods of a killed controller are deleted with it."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        paths = [volume.mount_path for volume in self.volumes]
        for path in paths:
            if not path.startswith("/") or ".." in PurePosixPath(path).parts or paths.count(path) > 1 or path == "/dev/shm":
                rule = "each mount_path must be a unique absolute path without .., other than /dev/shm"
                yield BrokenRule({"volumes": path}, rule, "correct mount_path")
        for field in _RESERVED_FIELDS:
            if field in self.pod_spec:
                fix = "remove it, and use image, volumes, env, node_selector or tolerations of hosts.kubernetes"
                yield BrokenRule({"pod_spec": field}, "the run sets this pod field itself", fix)
        for name in self.env:
            if not _VARIABLE.fullmatch(name) or name.startswith("TITANRL_"):
                rule = "each name must consist of letters, digits and _, and must not start with a digit or TITANRL_"
                yield BrokenRule({"env": name}, rule, "rename it")
        for toleration in self.tolerations:
            if toleration.operator == "Exists" and toleration.value is not None:
                fix = "remove the value, or set operator to Equal"
                yield BrokenRule({"tolerations": toleration.value}, "the operator Exists does not take a value", fix)


HostGroup = Literal["controller", "trainers", "generators"]
"""The controller's host, the trainer hosts, or the hosts of the generator replicas."""


class HostsConfig(Section):
    """Hosts and accelerators of the run."""

    kind: Annotated[str, OrImportPath(("local", "process", "slurm", "kubernetes", "launcher"))] = "local"
    """Type of hosts. `local`: this machine only. `process`: several hosts emulated on this machine, for tests. `slurm`: nodes
    of a Slurm job. `kubernetes`: pods of a Kubernetes cluster. `launcher`: hosts on which torchrun, srun, mpirun or a platform
    starts this command, once on each. Or the import path of a function that returns the command for a host, such as ssh."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function that `kind` names."""
    trainer_hosts: Processes = 1
    """Number of hosts for the trainer ranks."""
    generator_hosts: Processes = 1
    """Number of hosts for the generator replicas."""
    devices_per_host: Processes = 8
    """Number of accelerators per host; ignored on CPU."""
    share_devices: bool = False
    """Place generator ranks on the trainer's accelerators, starting with the first. `false` gives each rank its own
    accelerator."""
    trusted_network: bool = False
    """Allow the hosts of a cluster to listen on the network. They do not authenticate connections: any program that can connect
    to them can execute code as you (docs/security.md). Required for all kinds but `local` and `process`."""
    slurm: SlurmConfig = SlurmConfig()
    """Slurm job."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """Kubernetes pods."""

    @property
    def is_custom(self) -> bool:
        """True if a function of the user starts the hosts."""
        return ":" in self.kind

    @property
    def across_machines(self) -> bool:
        """True if trainers and generators run on different machines, connected by a network."""
        return self.kind not in ("local", "process")

    def count(self, group: HostGroup) -> int:
        """Return the number of hosts in a group."""
        return {"controller": 1, "trainers": self.trainer_hosts, "generators": self.generator_hosts}[group]


Cpus = Annotated[str, Field(pattern=r"^(numa|split|\d+(-\d+)?(,\d+(-\d+)?)*)$")]
"""CPU cores of a role on each of its hosts: `numa`, `split`, or core numbers such as `0-7,16`."""
PerHost = Annotated[tuple[Processes, ...], Field(strict=False)]


class CpusConfig(Section):
    """CPU affinity of the processes of each role, on each host. `split` gives each process an equal share of the host's
    cores, `numa` the cores of one NUMA node. Core numbers such as `0-7,16` apply to all processes of the role. Null sets no
    affinity."""

    trainer: Cpus | None = None
    """Trainer ranks."""
    generator: Cpus | None = None
    """Generator ranks, including background evaluators and teachers."""
    rollout: Cpus | None = None
    """Rollout workers, with their storage shards and scoring processes."""
    store: Cpus | None = None
    """Process of the weight store and the buffer."""


class PlacementConfig(Section):
    """Hosts of each role. With `hosts.kind: local`, every role runs on this machine."""

    generator: Literal["generators", "trainers"] = "generators"
    """`generators`: replicas run on their own hosts. `trainers`: they run on the first `hosts.generator_hosts` trainer hosts,
    on the devices after those of the trainer ranks."""
    rollout: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Hosts of the rollout workers. A worker's storage shard and scoring processes run on the same host. `auto` uses
    `generators`, or `controller` if the run has no generators."""
    store: Literal["auto", "controller", "trainers", "generators"] = "auto"
    """Host of the buffer and the weight store, which hold no tokens: the first host of a group. `auto` uses `controller`, or
    `trainers` with `weights.transport: store`."""
    replicas_per_host: PerHost | None = None
    """Number of generator replicas on each of their hosts; null distributes them evenly."""
    workers_per_host: PerHost | None = None
    """Number of rollout workers on each of their hosts; null distributes them evenly."""
    cpus: CpusConfig = CpusConfig()
    """CPU cores of each role."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")] | None = None
    """Network interface, such as `eth0`, for collectives between ranks on several hosts (gloo and NCCL). Null lets each library
    choose."""


class ExampleSet(Section):
    """Examples to train on, and the tokens of each that count."""

    path: InputPath
    """Examples with `messages`, or with `prompt` and `completion` (docs/howto/sft.md): a JSONL or Parquet file, a directory of
    such files, a pattern such as `data/train-*.parquet`, or the directory of a data set saved by Hugging Face datasets."""
    columns: dict[Literal["prompt", "completion", "messages", "tools"], str] = {}
    """Names of the columns, if they are not `prompt`, `completion`, `messages` and `tools`. A dot selects a nested field."""
    heldout_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Fraction of the examples in `path` that is held out. A hash of the prompt, or of the first user message, assigns each
    example, as for `data.heldout_fraction`."""
    train_on: TrainOn = "assistant"
    """Tokens to train on: of every assistant message (`assistant`), of the last one only (`last`), or of the whole example
    (`all`). A `completion` counts as an assistant message."""
    max_example_tokens: Tokens | None = None
    """Maximum example length in tokens; null uses `trainer.row_tokens`."""
    overlong: Literal["error", "truncate", "skip"] = "error"
    """Handling of longer examples: `error` ends the command before training, `truncate` cuts their last tokens, `skip` leaves
    them out."""
    batch_size: Count = 32
    """Number of examples per optimizer step."""


class ExamplesConfig(ExampleSet):
    """Examples that each optimizer step of `titanrl train` also trains on (docs/howto/sft.md). The objective is that of the
    rollouts plus `weight` times the cross-entropy, averaged over the trained tokens of the step's examples. The loss on
    held-out examples is measured every `evaluation.every_steps` steps and at the end. The examples are rendered with the chat
    template and system prompt of `data`."""

    weight: Annotated[PositiveFloat, LIVE] = 1.0
    """Weight of the mean cross-entropy of the examples in the objective."""


class SFTConfig(ExampleSet):
    """Supervised fine-tuning on examples (`titanrl sft`), for `num_steps` steps. `evaluation.every_steps` is the number of
    steps between evaluations of the loss on held-out examples. Of the section `data`, only `chat_template`,
    `chat_template_kwargs`, `system_prompt` and `control_tokens` are used."""

    validation_path: InputPath | None = None
    """Held-out examples, in the formats of `path`; null uses `heldout_fraction`."""
    learning_rate: Annotated[PositiveFloat, LIVE] = 1e-5
    """Peak learning rate."""
    num_warmup_steps: Annotated[StepsOrZero, LIVE] = 0
    """Number of linear learning-rate warm-up steps."""
    lr_decay: Annotated[LearningRateDecay, LIVE] = "linear"
    """Learning-rate schedule after the warm-up: `constant`, or `linear` or `cosine` decay to zero at the last step."""
    num_decay_steps: Annotated[Steps | None, LIVE] = None
    """Number of last steps in which the rate decays, after a constant phase (warmup-stable-decay); null decays from the end of
    the warm-up."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[NonNegativeFloat, LIVE] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Annotated[PositiveFloat, LIVE] = 1.0
    """Maximum global gradient norm; larger gradients are scaled down to it."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.validation_path is not None and self.heldout_fraction > 0:
            rule = "held-out examples come either from validation_path or from path"
            yield self.broken("heldout_fraction validation_path", rule, "remove one of them")
        if self.num_decay_steps is not None and self.lr_decay == "constant":
            rule = "a constant rate does not decay"
            yield self.broken("num_decay_steps lr_decay", rule, "set lr_decay to linear or cosine, or remove num_decay_steps")


class TeacherConfig(Section):
    """The teacher: another model, in a separate vLLM engine or behind an endpoint, or the policy itself with a hint
    (`distill.hint`)."""

    path: InputPath | None = None
    """Directory of the teacher in Hugging Face format, for an engine of its own. Its vocabulary must be the policy's. `tp`,
    `dtype`, `max_num_seqs`, `kv_cache_bytes` and `vllm` are options of the engine."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] | None = None
    """Base URL of an OpenAI-compatible endpoint that serves the teacher and supports `prompt_logprobs`, such as
    `http://127.0.0.1:8000/v1`: vLLM, or `titanrl serve`. Its vocabulary must be the policy's."""
    policy: Literal["initial", "current"] | None = None
    """Use the policy itself, computed by the trainer, instead of `path`: its weights before the first step, or the current
    ones."""
    tp: Processes = 1
    """Tensor-parallel degree of the teacher's engine."""
    dtype: Dtype = "float32"
    """Data type of the teacher's weights."""
    max_num_seqs: Count = 256
    """Maximum number of sequences that the engine processes, or the endpoint receives, concurrently."""
    kv_cache_bytes: Bytes = 64 << 20
    """KV-cache size in bytes. CPU only; on accelerators set `gpu_memory_utilization` in `vllm`."""
    vllm: dict[str, Any] = {}
    """Additional arguments of `vllm.EngineArgs`."""
    model: str | None = None
    """Name of the model in the requests to `url`; null sends none."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Environment variable with the API key of `url`; null sends no key."""
    key_file: InputPath | None = None
    """File whose first line is the API key of `url`, instead of `key_variable`."""
    timeout_s: Seconds = 60.0
    """Time limit in seconds for one request to `url`."""
    num_retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Number of retries of a request to `url` after a timeout, a lost connection, or the status codes 408, 429 and 5xx. If all
    fail, the run ends with an error."""

    def _broken_rules(self) -> Iterator[BrokenRule]:
        kinds = {"path": _OF_ENGINE, "url": _OF_ENDPOINT, "policy": ()}
        given = [kind for kind in kinds if self.value_of(kind) is not None]
        if len(given) != 1:
            rule = "a teacher is either a model, in an engine or behind an endpoint, or the policy itself"
            yield self.broken(" ".join(given or kinds), rule, "set exactly one of path, url and policy")
            return
        for key in self.changed(*_OF_ENGINE, *_OF_ENDPOINT):
            if key not in kinds[given[0]]:
                yield self.broken(f"{key} {given[0]}", f"a teacher by {given[0]} does not use this key", f"remove {key}")
        yield from _broken_by_arguments(self)
        if self.url is not None:
            yield from broken_by_url("url", self.url, "http://host:8000/v1", FOR_KEYS)
        if self.key_variable is not None and self.key_file is not None:
            yield self.broken("key_variable key_file", "the API key has one source", "remove one of them")


_OF_ENGINE = ("tp", "dtype", "max_num_seqs", "kv_cache_bytes", "vllm")
_OF_ENDPOINT = ("max_num_seqs", "model", "key_variable", "key_file", "timeout_s", "num_retries")


class DistillConfig(Section):
    """On-policy distillation (`titanrl distill`). The policy samples completions and approaches a teacher at their tokens."""

    teacher: TeacherConfig
    """The teacher."""
    teachers: dict[str, TeacherConfig] = {}
    """Further teachers by name, for the tasks of `data.mixture` that name one (`data.mixture.<task>.teacher`)."""
    hint: Annotated[str, Field(min_length=1)] | None = None
    """Question that the teacher gets instead of the policy's, such as `{question} Hint: the answer is {answer}`. The names in
    braces are `question`, `answer` and the other columns of the data."""
    loss: Literal["importance_sampling", "ppo", "forward_kl", "reverse_kl", "jsd"] = "importance_sampling"
    """`importance_sampling` and `ppo` are policy losses whose advantage is the teacher's log-probability of a token minus the
    policy's; `ppo` clips the ratio of the policy to the sampling policy to 1 +- 0.2. `forward_kl`, `reverse_kl` and `jsd` are
    divergences at each token: over the whole vocabulary with `teacher.policy`, and with another teacher, only `forward_kl`,
    over the `top_k` tokens that it finds most likely, and all others as one."""
    top_k: Annotated[int, Field(ge=1, le=20)] = 20
    """Number of most likely tokens that the teacher returns at each token, with `loss: forward_kl` and a teacher that is not
    the policy."""
    beta: Fraction = 0.5
    """Weight of the teacher's distribution in the mixture of `jsd`."""
    reward_weight: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the reward, minus its mean over the completions of the prompt, in the advantage of a completion's tokens. With
    0, rewards are only measured."""
    discount: Decay = 0.0
    """Discount factor per token for the log-probability differences of later tokens in a token's advantage. With 0, only the
    token's own difference counts."""

    @property
    def is_divergence(self) -> bool:
        """True if the loss is a divergence over the whole vocabulary."""
        return self.loss in ("forward_kl", "reverse_kl", "jsd")

    @property
    def reads_top(self) -> bool:
        """True if the loss compares with the most likely tokens of a teacher that is not the policy."""
        return self.loss == "forward_kl" and self.teacher.policy is None

    @property
    def num_teacher_ranks(self) -> int:
        """Number of ranks of the teachers' engines."""
        return sum(teacher.tp for teacher in self.by_key.values() if teacher.path is not None)

    @property
    def by_key(self) -> Mapping[str, TeacherConfig]:
        """All teachers by the path of their section."""
        others = {f"distill.teachers.{name}": teacher for name, teacher in self.teachers.items()}
        return {"distill.teacher": self.teacher, **others}

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.teacher.policy is not None and not self.is_divergence:
            fix = "set loss to forward_kl, reverse_kl or jsd"
            yield self.broken("loss teacher.policy", "the trainer computes divergences from the policy's own weights", fix)
        if self.teacher.policy is not None and self.hint is None:
            rule = "without a hint, the teacher is the policy that training starts from"
            yield self.broken("hint teacher.policy", rule, "set hint, such as '{question} Hint: {answer}'")
        if self.teacher.policy is None and self.loss in ("reverse_kl", "jsd"):
            rule = "another model returns only the log-probabilities of the sampled tokens, or of its most likely tokens"
            kind = "teacher.url" if self.teacher.path is None else "teacher.path"
            fix = "set loss to importance_sampling, ppo or forward_kl, or use teacher.policy"
            yield self.broken(f"loss {kind}", rule, fix)
        if not self.reads_top and self.changed("top_k"):
            rule = "only forward_kl with a teacher by path or url reads the most likely tokens"
            yield self.broken("top_k loss", rule, "remove top_k")
        yield from broken_by_names("teachers", self.teachers, "teacher")
        for name, teacher in self.teachers.items():
            if teacher.policy is not None or self.teacher.policy is not None:
                rule = "of several teachers, none can be the policy, because all have the same loss"
                values = {f"teachers.{name}.policy": teacher.policy, "teacher.policy": self.teacher.policy}
                yield BrokenRule(values, rule, "use path or url for all of them, or remove teachers")
        if self.loss != "jsd" and self.changed("beta"):
            yield self.broken("beta loss", "only jsd has a mixture", "remove beta")
        if self.is_divergence and self.discount:
            yield self.broken("discount loss", "a divergence has no later tokens to discount", "remove discount")
        if self.hint is not None:
            try:
                names = fields_of(self.hint)
            except ValueError as error:
                yield self.broken("hint", f"must be a format string, but {error}", "write {{ and }} for braces")
                return
            if not names:
                rule = "must contain a column in braces; otherwise all prompts of the teacher are equal"
                yield self.broken("hint", rule, "add {question}")


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is at most `at_most`."""
    return max(divisor for divisor in range(1, min(number, at_most) + 1) if number % divisor == 0)
