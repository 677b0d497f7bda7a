"""Several LoRA adapters on one frozen base: each is trained by a learner of its own, and one at a time is in the model.

An adapter outside of the model consists of copies of its A and B, its gradient, and the state of its learner: optimizer,
version, moving average and snapshots. `Adapters.use` exchanges the live adapter for another one: it copies A and B, and moves
references to the rest. A model trains bit for bit as if it were alone, because everything that a pass or a step reads or
writes is exchanged.

The model has adapters of one rank, `trainer.lora.rank`. In an adapter of a lower rank, the other rows of A and columns of B
are zero. So are A and B of layers that are not trained. Both factors are zero there, so their gradients are zero, and AdamW
keeps them at zero.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpointer.utils import canonical_fqn

from titanrl.base.files import Digests, uncommit_folder
from titanrl.carriers.types import AdapterSpec
from titanrl.trainer.checkpoint import own_digests, storage_errors
from titanrl.trainer.learner import Learner
from titanrl.trainer.model import A, B, initial_adapter, local_block
from titanrl.weights.layout import local_part

FACTS = "adapter.facts"
"""Name of the tensor in a saved state with version, rank, alpha, and whether attention and MLP layers are trained, float64."""


@dataclass(slots=True)
class _Held:
    """An adapter. Its weights and gradients are here unless it is the live one."""

    spec: AdapterSpec
    learner: Learner
    weights: list[Tensor]
    """This rank's shards, in the order of the model's parameters. The memory stays allocated while the adapter is live."""
    gradients: list[Tensor | None] = field(default_factory=list)


class Adapters:
    """The adapters of a trainer rank, by the name of their model. None is the session's own policy, which also has one.

    Without other models, it costs nothing.
    """

    def __init__(self, own: Learner, mlp_layers: Collection[str], *, seed: int) -> None:
        """Start with the session's own policy.

        Args:
            own: Its learner, whose adapter is in the model.
            mlp_layers: Last parts of the names of the feed-forward layers. The other adapted layers are those of attention.
            seed: Seed of adapters that state none.
        """
        self.own = own
        """Learner of the session's own policy."""
        self.live: str | None = None
        """Name of the model whose adapter is in the model."""
        self._mlp_layers, self._seed = frozenset(mlp_layers), seed
        self._held: dict[str | None, _Held] = {}

    @property
    def num_models(self) -> int:
        """Number of models besides the session's own policy."""
        return max(0, len(self._held) - 1)

    def add(self, name: str, spec: AdapterSpec) -> None:
        """Create an adapter at version 0, and make it the live one.

        Raises:
            ValueError: The session has no adapters, too many models, one of this name, or the adapter does not fit.
        """
        lora = self.own.model.lora
        if lora is None:
            raise ValueError("new_model: the trainer trains all weights (got trainer.lora=null). Set trainer.lora.")
        if name in self._held:
            raise ValueError(f"new_model: there is already a model of this name (got {name!r}). Choose another, or free it.")
        if self.num_models >= lora.max_models:
            fix = "Free a model, or raise trainer.lora.max_models."
            raise ValueError(f"new_model: too many models (got trainer.lora.max_models={lora.max_models}). {fix}")
        if spec.rank > lora.rank:
            fix = f"Use at most {lora.rank}, or raise trainer.lora.rank."
            raise ValueError(f"rank: more than that of the trainer's adapters (got {spec.rank}). {fix}")
        for target in spec.targets:
            if target not in lora.targets:
                option = "train_attn" if target == "attention" else "train_mlp"
                fix = f"Pass {option}=False, or add {target} to trainer.lora.targets."
                raise ValueError(f"{option}: the {target} layers have no adapters (got True). {fix}")
        self.use(None)
        if not self._held:
            own = AdapterSpec(rank=lora.rank, alpha=lora.alpha)
            self._held[None] = _Held(own, self.own, [torch.empty_like(local_part(value)) for value in self._parameters()])
        seed = self._seed if spec.seed is None else spec.seed
        initial = initial_adapter(self.own.model.module, seed, rank=spec.rank, trains=partial(self._is_trained, spec))
        gradients: list[Tensor | None] = [None] * len(initial)
        self._held[name] = _Held(spec, self.own.for_adapter(), list(initial.values()), gradients)
        self.use(name).reset_optimizer()  # the moving average starts with the weights that are live now

    def free(self, name: str) -> None:
        """Discard an adapter with its gradient, optimizer state and snapshots."""
        self._known(name)
        self.use(None)
        del self._held[name]

    @torch.no_grad()
    def use(self, name: str | None) -> Learner:
        """Make the adapter of a model the live one, unless it is; return the learner of the model.

        Raises:
            ValueError: There is no such model.
        """
        if name == self.live:
            return self._held[name].learner if self._held else self.own
        new, old = self._known(name), self._held[self.live]
        assert old.learner.snapshots.current is None, "a snapshot replaces the live weights"
        model = self.own.model
        model.reshard()
        parameters = list(self._parameters())
        shards = [local_part(parameter.detach()) for parameter in parameters]
        old.gradients = [parameter.grad for parameter in parameters]
        for shard, kept, loaded in zip(shards, old.weights, new.weights, strict=True):
            kept.copy_(shard)
            shard.copy_(loaded)
        for parameter, gradient in zip(parameters, new.gradients, strict=True):
            parameter.grad = gradient
        new.gradients = []
        if new.spec.scale != old.spec.scale:
            model.set_adapter_scale(new.spec.scale)
        model.weights_changed(trained_only=True)
        self.live = name
        return new.learner

    def save(self, name: str, folder: Path) -> Digests:
        """Save adapter, optimizer state, moving average and version to a folder; return the digests of this rank's files.

        This is a collective.
        """
        learner, spec = self.use(name), self._held[name].spec
        learner.prepare_state("save_state")
        with storage_errors("save a state", folder):
            if dist.get_rank() == 0:
                uncommit_folder(folder)
            dcp.save({FACTS: _facts(learner.version, spec), **self._state(learner)}, checkpoint_id=str(folder))
            return own_digests(folder)

    @torch.no_grad()
    def load(self, name: str, folder: Path, *, with_optimizer: bool) -> None:
        """Restore a state that `save` wrote; without the optimizer, reset it and the moving average. This is a collective.

        The state may be that of another layout, and of a trainer with another `trainer.lora.rank`. Each rank reads it
        completely, and it is checked before anything is changed.

        Raises:
            ValueError: The folder has no state of an adapter, or that of another kind of adapter.
        """
        learner, spec = self.use(name), self._held[name].spec
        learner.prepare_state("load_state")
        own = self._state(learner) if with_optimizer else {f"adapter.{key}": value for key, value in self._named()}
        with storage_errors("load a state", folder):
            saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            if FACTS not in saved:
                fix = "Give a path from save_state of a model that new_model returned."
                raise ValueError(f"load_state: no state of an adapter (got {folder}). {fix}")
            for key in own:
                if key not in saved:
                    raise ValueError(f"load_state: {key} is not in the state (got {folder}). Give a state of the same model.")
            found = {}
            for key in (FACTS, *own):
                stored = saved[key]
                assert isinstance(stored, TensorStorageMetadata)
                found[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
            dcp.load(found, checkpoint_id=str(folder))
        version = int(found[FACTS][0])
        if not torch.equal(found[FACTS], _facts(version, spec)):
            _, rank, alpha, *trained = found[FACTS].tolist()
            kind = f"rank={rank:g}, alpha={alpha:g}, train_attn={bool(trained[0])}, train_mlp={bool(trained[1])}"
            raise ValueError(f"load_state: the state is of an adapter with {kind} (got {folder}). Create the model with these.")
        fitted = {key: _fitted(found[key], value, key, folder) for key, value in own.items()}
        for key, value in own.items():
            local_part(value.detach()).copy_(fitted[key])
        learner.version = version
        learner.drop_snapshots()
        if not with_optimizer:
            learner.reset_optimizer()
        learner.weights_changed(trained_only=True)

    def _known(self, name: str | None) -> _Held:
        if name is not None and name not in self._held:
            raise ValueError(f"model: there is no such model (got {name!r}). Create it with new_model; it may have been freed.")
        return self._held[name]

    def _is_trained(self, spec: AdapterSpec, layer: str) -> bool:
        return spec.train_mlp if layer.rpartition(".")[2] in self._mlp_layers else spec.train_attn

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the adapter parameters of the model by name."""
        for wrapped, parameter in self.own.model.module.named_parameters():
            if (name := canonical_fqn(wrapped)).endswith((A, B)):
                yield name, parameter

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._named())

    def _state(self, learner: Learner) -> dict[str, Tensor]:
        """Return the tensors of the live adapter, its optimizer state and its moving average, by the names of saved states."""
        state: dict[str, Tensor] = {}
        for name, parameter in self._named():
            state[f"adapter.{name}"] = parameter.detach()
            for optimizer in learner.optimizers:
                state |= {f"{key}.{name}": value for key, value in optimizer.state[parameter].items()}
        if learner.average is not None:
            state |= {f"average.{name}": value for name, value in learner.average.tensors.items()}
        return state


def _facts(version: int, spec: AdapterSpec) -> Tensor:
    return torch.tensor([version, spec.rank, spec.alpha, spec.train_attn, spec.train_mlp], dtype=torch.float64)


def _fitted(saved: Tensor, own: Tensor, key: str, folder: Path) -> Tensor:
    """Return this rank's shard of a saved tensor, whose padding with zeros may be longer or shorter than that of `own`.

    Raises:
        ValueError: It belongs to another base model.
    """
    if saved.shape == own.shape == ():
        return saved
    fixed = 1 if key.endswith(A) else 0
    if saved.dim() != 2 or saved.shape[fixed] != own.shape[fixed]:
        raise ValueError(f"load_state: {key} has another shape (got {list(saved.shape)} in {folder}). Load it on its own base.")
    padded = torch.zeros(own.shape, dtype=saved.dtype)
    rows, columns = (min(sizes) for sizes in zip(saved.shape, own.shape, strict=True))
    padded[:rows, :columns] = saved[:rows, :columns]
    return padded[local_block(own)]
