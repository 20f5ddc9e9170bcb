"""The core in one file: a gated MLP over tiles of tokens, with the gradients of the untiled one.

``down(silu(gate(x)) * up(x))`` needs four [T, F] tensors for its backward, where T is the number of tokens and F the
width of the MLP, some four times the width D of the model. Each token is computed by itself, so the operator goes from
tile to tile, keeps none of those tensors, and computes gate and up again in the backward. This file leaves out what
makes seqtile's own operator (``seqtile/ops/mlp.py``) longer: norms in the tile, biases, adapters, quantised weights,
autocast, dropout, kept tiles, buffers that all tiles share, and other activations. A test holds it to the same
outputs, the same gradients and the same number of matrix products (``tests/numerics/test_core.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def tiled_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, tile: int) -> Tensor:
    """``F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)``, ``tile`` tokens at a time.

    Args:
        x: hidden states, [T, D].
        gate: weight, [F, D].
        up: weight, [F, D].
        down: weight, [D, F].
        tile: tokens per tile.

    Returns:
        [T, D].

    Cost:
        11 GEMMs of 2 * T * D * F FLOPs: 3 forward; backward 2 again and 6 for the gradients. Untiled: 9.
    """
    token = Save.apply(x, gate, up, down)
    return Tiles.apply(tile, token.grad_fn, token, x, gate, up, down)


class Save(torch.autograd.Function):
    """Saves what the backward needs, *before* anything is computed.

    PyTorch packs what a function saves when its forward is over. A checkpoint around the decoder layer ends its
    recompute as soon as the last saved tensor is back, so with a node of their own the layer's recompute ends here,
    before the MLP; if ``Tiles`` saved its own input, the whole MLP would run once more.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(0)  # stands for the saved tensors; nobody reads it

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, None, None, None  # Tiles hands every gradient over, once


class Tiles(torch.autograd.Function):
    """The MLP. The weights are its inputs, so each parameter receives one gradient per backward, through autograd."""

    @staticmethod
    def forward(
        ctx: Any, tile: int, save: Any, token: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor
    ) -> Tensor:
        ctx.tile, ctx.save = tile, save
        y = torch.empty_like(x)  # [T, D]
        for rows, out in zip(x.split(tile), y.split(tile), strict=True):  # [t, D], views: nothing is copied
            hidden = F.silu(rows @ gate.t()) * (rows @ up.t())  # [t, F], two GEMMs
            torch.mm(hidden, down.t(), out=out)  # one GEMM, straight into its place
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():  # the gradients below would come out as constants, without a word
            raise NotImplementedError("first derivatives only, got create_graph=True; call backward without it")
        x, gate, up, down = ctx.save.saved_tensors  # under a checkpoint, this is what runs the layer again
        dx = torch.empty_like(x)  # [T, D]
        # Sums over tiles: in fp32 for bf16 weights, so that they round once, at the end, as the untiled gradient does.
        wide = torch.promote_types(x.dtype, torch.float32)
        d_gate, d_up, d_down = (torch.zeros_like(weight, dtype=wide) for weight in (gate, up, down))
        for rows, dy_rows, dx_rows in zip(*(whole.split(ctx.tile) for whole in (x, dy, dx)), strict=True):
            a, b = rows @ gate.t(), rows @ up.t()  # [t, F], two GEMMs: computed again; the down projection is not
            s = torch.sigmoid(a)  # [t, F]
            d_down.addmm_(dy_rows.t().to(wide), (a * s * b).to(wide))  # [D, F]
            dh = dy_rows @ down  # [t, F], the gradient of silu(a) * b
            da = dh * b * s * (1 + a * (1 - s))  # [t, F]
            db = dh * a * s  # [t, F]
            d_gate.addmm_(da.t().to(wide), rows.to(wide))  # [F, D]
            d_up.addmm_(db.t().to(wide), rows.to(wide))  # [F, D]
            torch.mm(da, gate, out=dx_rows).addmm_(db, up)  # [t, D], two GEMMs
        return None, None, None, dx, d_gate.to(gate.dtype), d_up.to(up.dtype), d_down.to(down.dtype)
