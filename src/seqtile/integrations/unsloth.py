"""Unsloth's line ``patch_tiled_mlp(model, "target:1")``, run by seqtile; nothing of Unsloth is imported."""

from __future__ import annotations

import re

from torch import nn

from seqtile.install.apply import apply


def patch_tiled_mlp(model: nn.Module, patch_options_str: str = "arctic") -> nn.Module:
    """Tile the MLPs of ``model``, in place.

    Args:
        model: any model, before or after adapters, before an engine wraps it.
        patch_options_str: ``"target:1"`` or ``"target:1GB"``, the largest tile whose working set takes at most 1 GiB;
            or a rule that :func:`seqtile.apply` knows, such as ``"arctic"``.

    Returns:
        nn.Module: ``model``. What was tiled is logged by ``seqtile``, and :func:`seqtile.undo` takes it off.

    Raises:
        UserError: the option is none of these, nothing can be tiled, or Unsloth has tiled the model already.
    """
    target = re.fullmatch(r"target:(\d*\.?\d+)(gb)?", patch_options_str.lower())
    apply(model, tile=f"memory:{target[1]}GiB" if target else patch_options_str)
    return model
