"""The tiled head in the trainer's place of TRL's own."""

from __future__ import annotations

from typing import Any

from seqtile._compat import PREPARED_FORWARD
from seqtile.models.lm_loss.tiled_loss import TiledLoss
from seqtile.tiling import TileRule


def tile_head(model: Any, tile: int) -> None:
    """Answer TRL's calls of its fused head, which the trainer put on ``model``, in tiles of ``tile`` tokens.

    TRL never builds the whole logits, but scores 4,096 tokens by up to 32,768 vocabulary entries at a time. Where the
    model is small against that (a small hidden size on a CPU), this one buffer is the step's peak and hides
    everything else. The head belongs to the run and not to its tiling: :func:`seqtile.undo` leaves it, so that a
    comparison with the untiled model compares the blocks. A second call changes the size.
    """
    rule = TileRule("tokens", tile)
    for forward in (model.__dict__.get("forward"), model.__dict__.get(PREPARED_FORWARD)):  # below accelerate's
        if isinstance(forward, TiledLoss):
            forward.rule = rule
            return
    TiledLoss(model, rule).install(marked=False)
