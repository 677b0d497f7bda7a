"""Functions on checkpoints that tests run on all ranks; see `variants`."""

from pathlib import Path

import torch.distributed as dist

from tests.trainer import checks
from tests.trainer.variants import Plan
from titanrl.base.errors import StorageError
from titanrl.trainer.checkpoint import Checkpoints, export_hf


def save_until_full(model_dir: Path, plan: Plan, folder: Path, in_background: bool) -> tuple[dict[str, str], list[str]]:
    """Save step 1; then save step 2, a state and a model while a rank's file is a full device, and load a missing checkpoint.

    Return the digests of step 1 and the errors of the others.
    """
    learner = checks.make_learner(model_dir, parallelism=plan)
    checkpoints = Checkpoints(learner, folder / "checkpoints", 2, in_background=in_background)
    checkpoints.save(1)
    digests = dict(checkpoints.finish(1))
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        for full in (folder / "checkpoints/step-2", folder / "state"):
            full.mkdir(parents=True)
            (full / f"__{last}_0.distcp").symlink_to("/dev/full")
        (folder / "final.partial").symlink_to("/dev/full")
    dist.barrier()

    def save_checkpoint() -> None:
        checkpoints.save(2)
        checkpoints.finish(2)

    errors = []
    for act in (
        save_checkpoint,
        lambda: checkpoints.save_state(folder / "state"),
        lambda: export_hf(learner.model, model_dir, folder / "final", "float32"),
        lambda: checkpoints.load(7),
    ):
        try:
            act()
        except StorageError as error:
            errors.append(str(error))
    return digests, errors
