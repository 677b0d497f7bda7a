"""Functions on models of all families that tests run on all ranks; see `checks`."""

from pathlib import Path

import numpy as np
import torch

from tests.trainer import checks
from titanrl.models.attention import packed_mask


def logits(model_dir: Path, token_ids: np.ndarray, family: str | None = None) -> np.ndarray:
    """Return the logits of one sequence, `[L, V]`."""
    module = checks.make_learner(model_dir, family=family, row_tokens=len(token_ids)).model.module
    tokens, positions = torch.from_numpy(token_ids)[None], torch.arange(len(token_ids))[None]
    with torch.no_grad():
        found: np.ndarray = module(tokens, positions=positions, attention_masks=packed_mask(positions))[0].numpy()
    return found
