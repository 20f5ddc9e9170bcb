# Made from seqtile/ops/token_tiles.py by `python -m seqtile.integrations.hub_kernel`; do not edit.
"""The rows of each tile, and whole outputs written slice by slice.

Offsets are PyTorch's own 64-bit ones: tiles are cut by ``narrow`` and ``view``, never by an index tensor.
"""

from __future__ import annotations

import torch


def refuse_trace() -> None:
    """Raise inside ``torch.jit.trace``, which would write down the tiles of one length for every length.

    Raises:
        NotImplementedError: a trace runs.
    """
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise NotImplementedError(
            "torch.jit.trace would write down the tiles of this input's length for every length; trace the untiled "
            "model: seqtile.undo(model) first, seqtile.apply again afterwards"
        )


def refuse_second_derivative(
    sentence: str = "a tiled block has first derivatives only, got create_graph=True; undo tiling for this backward, "
    "or run it without create_graph",
) -> None:
    """Raise inside a backward with ``create_graph=True``: its gradients would come out as constants, without a word.

    Raises:
        NotImplementedError: with this sentence; the backward builds a graph of its own.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError(sentence)
