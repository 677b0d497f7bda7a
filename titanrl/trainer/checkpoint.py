"""Files of the trainer: checkpoints to resume from, and Hugging Face directories. Each rank reads and writes only its shards.

Checkpoints hold model, optimizer, moving average, critic, policy version and random-number state. They are written with
`torch.distributed.checkpoint` (DCP), so a run with any other parallel layout can load them.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpoint import CheckpointManager, ModelWrapper

from titanrl.base.errors import StorageError, describe
from titanrl.base.files import Digests, digests_of, uncommit_folder
from titanrl.config.device import Device
from titanrl.config.sections import FileDtype, TrainerConfig
from titanrl.data.tokenizer import export_stop_ids
from titanrl.models.decoder import biased_layers, routers_of
from titanrl.models.directory import (
    ADAPTER_CONFIG,
    ADAPTER_ENDS,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    ModelDirectory,
    adapter_config,
)
from titanrl.trainer.learner import Learner, return_freed_memory
from titanrl.trainer.model import (
    HEAD,
    MARKS,
    PolicyModel,
    adapters_of,
    build_model,
    checkpoint_state,
    local_block,
    torch_dtype,
    unwritten,
)
from titanrl.weights.layout import local_part

AVERAGE_KEY = "average"
"""Prefix of the names of the moving averages in a checkpoint."""
CRITIC_KEY = "critic"
"""Prefix of the names of the critic's tensors in a checkpoint."""
LACKS = {
    AVERAGE_KEY: ("algorithm.ema_decay", "a moving average of the weights", "Set algorithm.ema_decay to null"),
    CRITIC_KEY: ("algorithm.advantage", "a critic", "Set algorithm.advantage to one without a critic"),
}
"""Configuration key, description and fix in the error message, by component that a checkpoint lacks."""
NEARLY_FULL = 64 << 20
"""Free space in bytes below which an error message mentions the free space."""
MAX_TEXT = 300
"""Maximum length of the description of the cause, in characters."""
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Files of the base that an export contains, as glob patterns: tokenizer, generation defaults, chat templates, code."""

logger = logging.getLogger(__name__)


@contextmanager
def storage_errors(what: str, folder: Path) -> Iterator[None]:
    """Convert I/O errors and torch's `CheckpointException` in the body to `StorageError`.

    torch raises `CheckpointException` on all ranks if any rank fails. It is not a subclass of `Exception`, so it would kill the
    actor, and its message begins with a traceback. `what` is the action for the message, such as `save a checkpoint`.
    """
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if missing := re.match(r"Missing key in checkpoint state_dict: (.+)\.$", str(cause)):
            fix = "Resume with the model, the adapters, the optimizer, the moving average and the critic that it was saved with"
            raise StorageError(f"cannot {what} in {folder}: it has no {missing[1]}. {fix}.") from error
        raise StorageError(f"cannot {what} in {folder}: {describe(cause)[:MAX_TEXT]} on rank {rank}{_free(folder)}") from error
    except (OSError, RuntimeError) as error:  # torch's archive writer raises RuntimeError
        raise StorageError(f"cannot {what} in {folder}: {describe(error)[:MAX_TEXT]}{_free(folder)}") from error


def on_first_rank(what: str, folder: Path, action: Callable[[], None]) -> None:
    """Run an action on the first rank. If it fails as `storage_errors` describes, raise `StorageError` on every rank.

    This is a collective: the other ranks return when the action has ended. See `storage_errors` for `what` and `folder`.
    """
    failed: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            with storage_errors(what, folder):
                action()
        except StorageError as error:
            failed = [str(error)]
    dist.broadcast_object_list(failed)
    if failed[0] is not None:
        raise StorageError(failed[0])


def _free(folder: Path) -> str:
    """Return a remark on the free space of the folder's file system if it is nearly full, else an empty string."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = NEARLY_FULL if existing is None else shutil.disk_usage(existing).free
    return f" ({free:,} bytes are free there)" if free < NEARLY_FULL else ""


class _ChosenFiles(FileSystem):
    """File system that lists only the chosen weight files; torch's reader merges every safetensors file that it lists."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: object) -> list[str]:
        """Return the chosen files."""
        return [str(file) for file in self._files]


def load_model(
    source: ModelDirectory, config: TrainerConfig, device: Device, *, seed: int = 0, is_critic: bool = False
) -> PolicyModel:
    """Build the model and load the weights of its directory, without random initialization. `seed` is that of LoRA adapters.

    The output layer of a critic is not loaded; it has a single output and is zero. All parameters of a critic are trained, also
    with LoRA.

    Raises:
        ValueError: As in `load_hf`.
    """
    if is_critic:
        config = config.model_copy(update={"lora": None})
    model = build_model(source, config, device, seed=seed, random_weights=False, is_critic=is_critic)
    for router in routers_of(model.module):
        router.mode = "own" if is_critic else config.routing  # the generator chose experts for the policy
    load_hf(model, source, without=(HEAD,) if is_critic else ())
    if config.lora is not None and config.lora.path is not None:
        load_adapter(model, config.lora.path)
    return model


def load_hf(model: PolicyModel, source: ModelDirectory, *, without: Collection[str] = ()) -> None:
    """Load the weights of a directory into the parameters, except those named in `without`. Adapters are not changed.

    Raises:
        ValueError: The weight files cannot be read, or do not fit the model.
    """
    model.reshard()
    state = {name: value for name, value in checkpoint_state(model.module).items() if name not in without}
    hf_state = model.adapter.to_hf(state)
    # This rank may hold only some of the experts.
    found = source.weight_files({**(source.tensors or {}), **{name: tuple(value.shape) for name, value in hf_state.items()}})
    reader = model.adapter.get_hf_storage_reader(str(source.path))
    reader.fs = _ChosenFiles(found.files)
    with storage_errors("load the model", source.path):
        dcp.load(hf_state, storage_reader=reader)
    loaded = model.adapter.from_hf(hf_state)
    model.module.load_state_dict(loaded, strict=False)
    unnamed = [name for name, value in state.items() if value.dtype not in MARKS and name not in loaded]
    if left := unwritten(checkpoint_state(model.module)) + unnamed:
        raise ValueError(
            f"model.path: {len(left)} tensors were not loaded completely, such as {left[0]} (got {source.path}). "
            "Give a directory whose config.json and weights belong together."
        )


def peft_names(model: PolicyModel) -> dict[str, str]:
    """Return peft's name of each tensor of the adapters by torchtitan's name.

    Raises:
        ValueError: The family stores a weight in another form than torchtitan computes with, so its adapter has no such name.
    """
    state = model.module.state_dict()
    names = {}
    for name in adapters_of(state):
        end = next(end for end in ADAPTER_ENDS if name.endswith(end))
        weight = name.removesuffix(end) + ".weight"
        ((theirs, value),) = model.adapter.to_hf({weight: state[weight]}).items()
        if value is not state[weight]:
            raise ValueError(f"{weight}: has another form in {theirs}, so its adapter cannot be written for peft")
        names[name] = ADAPTER_PREFIX + theirs.removesuffix(".weight") + ADAPTER_ENDS[end]
    return names


@torch.no_grad()
def load_adapter(model: PolicyModel, folder: Path) -> None:
    """Copy the adapters in a directory in the format of peft into the model's; every rank copies its part.

    Raises:
        ValueError: Names or shapes of the tensors are not those of the model's adapters.
        StorageError: The directory cannot be read.
    """
    model.reshard()
    state, names = adapters_of(model.module.state_dict()), peft_names(model)
    with storage_errors("load the adapter", folder), safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        wanted = {names[name]: tuple(value.shape) for name, value in state.items()}
        if odd := sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name)):
            raise ValueError(
                f"trainer.lora.path: {len(odd)} tensors do not fit, such as {odd[0]}: the model needs {wanted.get(odd[0])}, "
                f"the file has {shapes.get(odd[0])} (got {folder}). Give an adapter of this model with trainer.lora.targets."
            )
        for name, value in state.items():
            local_part(value).copy_(file.get_tensor(names[name])[local_block(value)])


def export_hf(model: PolicyModel, model_dir: Path, target: Path, dtype: FileDtype, *, is_base: bool = True) -> None:
    """Export the policy as a Hugging Face directory: safetensors with merged adapters, config.json, and the files of `COPIED`.

    With LoRA, the subfolder `adapter` has the adapters by themselves, in the format of peft. They name `model_dir` as their
    base, unless `is_base` is False because weights with another base were loaded.

    `model_dir` is the directory of the base, whose config.json and tokenizer the export gets. `generation_config.json` names
    the token that ends a turn, so that other programs stop where the policy does. `target` appears only when it is complete.
    This is a collective.
    """
    partial, what = target.with_name(target.name + ".partial"), "export the model"

    def begin() -> None:
        if partial.exists():
            shutil.rmtree(partial)  # torch would merge the shards of an earlier attempt into the model

    def complete() -> None:
        shutil.rmtree(partial / "sharded", ignore_errors=True)
        copied = {path for pattern in COPIED for path in model_dir.glob(pattern) if path.is_file()}
        for path in copied:
            place = partial / path.relative_to(model_dir)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
        if biased := biased_layers(model.module):
            largest = max(float(local_part(layer.expert_bias_E).abs().max()) for layer in biased)
            logger.warning(
                "export: the bias of the experts in %d layers, %d numbers up to %.3g, is not part of the exported model: its "
                "routers choose without it (trainer.expert_bias_rate)",
                len(biased),
                len(biased) * biased[0].router.num_experts,
                largest,
            )
        left = sorted(path.name for path in model_dir.iterdir() if path.is_file() and path not in copied)
        logger.info("export: %d files of %s are not part of the exported model: %s", len(left), model_dir, ", ".join(left))
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key not in ("torch_dtype", "transformers_weights")}
        text = json.dumps(kept | {"dtype": dtype}, indent=2, ensure_ascii=False)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        export_stop_ids(partial)
        if model.lora is not None:
            if not is_base:
                logger.warning(
                    "export: the adapter names no base, because weights on another base than %s were loaded", model_dir
                )
            folder = partial / "adapter"
            folder.mkdir()
            modules = sorted({name.split(".")[-3] for name in adapters})
            # The product has this factor also if the adapters are padded with zeros to the rank of the configuration.
            alpha = round(model.adapter_scale * model.lora.rank, 9)
            options = adapter_config(model.lora, alpha, modules, model_dir if is_base else None)
            (folder / ADAPTER_CONFIG).write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
            save_file(adapters, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    return_freed_memory()
    on_first_rank(what, target, begin)
    with storage_errors(what, target):
        writer = HuggingFaceStorageWriter(path=str(partial), save_distributed=True, enable_consolidation=True)
        weights = {name: value.to(torch_dtype(dtype)) for name, value in model.adapter.to_hf(model.weights()).items()}
        if infinite := [name for name, value in weights.items() if dtype == "float16" and local_part(value).isinf().any()]:
            logger.warning(
                "export: %s: values beyond float16 are infinite now; see checkpoint.export_dtype", ", ".join(infinite)
            )
        dcp.save(weights, storage_writer=writer)
        if model.lora is not None:
            names, state = peft_names(model), adapters_of(model.module.state_dict())
            full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
            adapters = {names[name]: value.to(torch_dtype(dtype)).cpu().contiguous() for name, value in full.items()}
    on_first_rank(what, target, complete)


class _Progress(Stateful):
    """Version and random-number state of a learner."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        random = {"cpu": torch.get_rng_state()}
        kind = self._learner.model.device.type
        if kind != "cpu":
            random[kind] = torch.get_device_module(kind).get_rng_state()
        return {"version": self._learner.version, "random": random}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._learner.version = state_dict["version"]
        for kind, state in state_dict["random"].items():
            (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(state)


class Checkpoints:
    """Checkpoints of a run: `step-<n>` folders, of which only the latest are kept, and states in folders of any name.

    All methods except `finish` must be called on all ranks. Methods that read or replace the state raise `PhaseError` if
    gradients are pending, or if a snapshot replaces the live weights.
    """

    def __init__(
        self,
        learner: Learner,
        folder: Path,
        keep_last: int,
        *,
        in_background: bool = False,
        critic: Stateful | None = None,
    ) -> None:
        """Build torchtitan's checkpoint manager.

        `folder` is the absolute path of the parent of the `step-<n>` folders, of which the last `keep_last` are kept. With
        `in_background`, `save` returns after the state is copied, and training continues while it is written to disk. The state
        of the `critic`, if there is one, is part of each checkpoint.
        """
        self._learner, self._folder = learner, folder
        average = {} if learner.average is None else {AVERAGE_KEY: learner.average}
        self._further: dict[str, Stateful] = {**average, **({} if critic is None else {CRITIC_KEY: critic})}
        self._kept: tuple[int, ...] = (0,)  # versions whose snapshots stay valid when a checkpoint is loaded
        config = CheckpointManager.Config(
            enable=True,
            folder=folder.name,
            interval=1,
            keep_latest_k=keep_last,
            async_mode="async" if in_background else "disabled",
        )
        self._progress = _Progress(learner)
        self._manager = config.build(
            dataloader=None,
            model_parts=[learner.model.module],
            optimizers=learner.optimizers,
            lr_schedulers=None,
            states={"train_state": self._progress, **self._further},
            sd_adapter=learner.model.adapter,
            base_folder=str(folder.parent),
        )

    def save(self, step: int, published: int | None = None) -> None:
        """Save the state of a step. `.metadata` appears in its folder when the checkpoint is complete.

        The weights of the snapshot `published` are also written, always before this method returns.
        """
        self._learner.prepare_state("save_checkpoint")
        with storage_errors("save a checkpoint", self._folder):
            if published is not None:
                with self._learner.weights_at(published):
                    dcp.save(self._weights(), checkpoint_id=str(self._published(step)))
            self._manager.save(step)

    def finish(self, step: int) -> Digests:
        """Wait until the files of a step are on disk; return the digests of this rank's files. Any thread may call this.

        Computing the digests takes 0.7 s per gigabyte on each rank if the files are in the page cache.
        """
        saving = self._manager.save_future
        with storage_errors("save a checkpoint", self._folder):
            if saving is not None:
                saving.result()
            return own_digests(self._folder / f"step-{step}")

    def load_published(self, step: int, version: int) -> None:
        """Load the weights of the snapshot that `save` wrote, and keep them as a snapshot that `load` does not drop."""
        self._learner.prepare_state("load_published")
        with storage_errors("load a checkpoint", self._folder):
            dcp.load(self._weights(), checkpoint_id=str(self._published(step)))
        self._learner.version = version
        self._learner.weights_loaded()
        self._learner.keep_weights()
        self._kept = (*self._kept, version)

    def load(self, step: int) -> None:
        """Restore the state of a step.

        Raises:
            ValueError: The checkpoint does not exist, or it has no moving average or critic although one is configured.
        """
        self._learner.prepare_state("load_checkpoint")
        with storage_errors("load a checkpoint", self._folder):
            self._manager.maybe_wait_for_saving()
            self._require_further(self._folder / f"step-{step}")
            is_loaded = self._manager.load(step)
        if not is_loaded:
            raise ValueError(f"step: no such checkpoint in {self._folder} (got {step}). Choose the step of an existing folder.")
        self._learner.drop_snapshots(keep=self._kept)
        self._learner.weights_loaded()

    def save_state(self, folder: Path) -> Digests:
        """Save the state to a folder; return the digests of this rank's files."""
        self._learner.prepare_state("save_state")
        with storage_errors("save a state", folder):
            if dist.get_rank() == 0:
                uncommit_folder(folder)
            dcp.save(self._components(with_optimizer=True), checkpoint_id=str(folder))
            return own_digests(folder)

    def load_state(self, folder: Path, *, with_optimizer: bool) -> None:
        """Restore a state that `save_state` wrote. If `with_optimizer` is False, reset the optimizer and the moving average.

        Without the optimizer, the folder may also be a checkpoint of a run.

        Raises:
            ValueError: The folder has no complete state, or the state has no moving average or critic although one is
                configured.
        """
        if not (folder / ".metadata").is_file():
            raise ValueError(f"load_state: no complete state in this folder (got {folder}). Give the path from save_state.")
        self._learner.prepare_state("load_state")
        with storage_errors("load a state", folder):
            if with_optimizer:
                self._require_further(folder)
            if with_optimizer or _has(folder, "model"):
                dcp.load(self._components(with_optimizer=with_optimizer), checkpoint_id=str(folder))
            else:  # torchtitan's checkpoint manager writes the weights under their own names
                model = ModelWrapper(self._learner.model.module)
                weights = model.state_dict()
                dcp.load({**weights, "train_state": self._progress}, checkpoint_id=str(folder))
                model.load_state_dict(weights)
        self._learner.drop_snapshots(keep=self._kept)
        if not with_optimizer:
            self._learner.reset_optimizer()
        self._learner.weights_loaded()

    def close(self) -> None:
        """Wait until all checkpoints are on disk."""
        with storage_errors("save a checkpoint", self._folder):
            self._manager.maybe_wait_for_saving()
        self._manager.close()

    def _require_further(self, folder: Path) -> None:
        """Check that a checkpoint has a moving average of the weights, and a critic, if this run has them."""
        if not self._further or not (folder / ".metadata").is_file():  # loading reports an incomplete checkpoint
            return
        for component in self._further:
            if not _has(folder, component):
                key, what, fix = LACKS[component]
                raise ValueError(
                    f"{key}: {folder.name} was saved without {what} (got {folder}). {fix}, or start a new run from an exported "
                    "model."
                )

    def _published(self, step: int) -> Path:
        return self._folder / f"step-{step}" / "published"

    def _weights(self) -> dict[str, Any]:
        return {"model": ModelWrapper(self._learner.model.module)}

    def _components(self, *, with_optimizer: bool) -> dict[str, Any]:
        learner = self._learner
        optimizer = {"optimizer": learner.optimizers, **self._further} if with_optimizer else {}
        return {**self._weights(), "train_state": self._progress, **optimizer}


def _has(folder: Path, component: str) -> bool:
    """Return True if a component was saved to a folder under its name."""
    return any(name.startswith(f"{component}.") for name in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def own_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the checkpoint files that this rank wrote. Rank 0 also writes `.metadata`."""
    rank = dist.get_rank()
    return digests_of(folder, [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])])
