"""Cross-entropy of a linear head over tiles of the tokens that are not ignored.

The nodes are in :mod:`seqtile.ops.lm_loss.head_nodes`, other libraries' operators for the same in
:mod:`seqtile.ops.lm_loss.loss_kernels`.
"""

from __future__ import annotations

import sys
from typing import Literal, TypedDict, Unpack, overload

from torch import Tensor

from seqtile._errors import expect_number, expect_tensors
from seqtile.ops.lm_loss.head_nodes import HeadCall, as_divisor
from seqtile.ops.lm_loss.logits_tile import LogitScaling, Objective
from seqtile.ops.lm_loss.loss_kernels import LOSS_CANDIDATES, choose_kernel
from seqtile.tiling import TileRule, parse_tile

REDUCTIONS = ("mean", "sum", "none")


class LossOptions(TypedDict, total=False):
    """Every option of :func:`linear_cross_entropy` but ``return_z_loss``, for type checkers."""

    bias: Tensor | None
    scaling: LogitScaling | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    class_weights: Tensor | None
    token_weights: Tensor | None
    reduction: str
    num_items: Tensor | int | float | None
    tile: int | str | TileRule
    impl: str


@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_z_loss: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, return_z_loss: Literal[True], **options: Unpack[LossOptions]
) -> tuple[Tensor, Tensor]: ...
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scaling: LogitScaling | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weights: Tensor | None = None,
    token_weights: Tensor | None = None,
    reduction: str = "mean",
    num_items: Tensor | int | float | None = None,
    return_z_loss: bool = False,
    tile: int | str | TileRule = "auto",
    impl: str = "torch",
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross-entropy of a linear head, one tile of tokens at a time.

    Replaces ``F.cross_entropy(scaling.on(F.linear(hidden, weight, bias)).float(), labels)``. Labels are the targets of
    their own positions: shift them before.

    Args:
        hidden: ``[..., D]``, ``N`` tokens, ``n`` of them not ignored.
        weight: ``[V, D]``.
        labels: ``[...]``, the target of each token.
        bias: ``[V]``.
        scaling: scale, soft-cap and temperature of the logits.
        ignore_index: label of ignored tokens; nothing is computed for them.
        label_smoothing: as in :func:`torch.nn.functional.cross_entropy`.
        z_loss: weight of ``logsumexp(logits)**2`` in each token's loss.
        class_weights: ``[V]``, a constant factor for each target, as ``weight=`` of
            :func:`torch.nn.functional.cross_entropy`; it does not weight the z-loss.
        token_weights: ``[...]``, a constant factor for each token's loss.
        reduction: ``"mean"`` over the tokens that are not ignored (weighted: over the weights of tokens and of their
            targets), ``"sum"`` or ``"none"``.
        num_items: divides the sum instead of this batch's count: the tokens of a whole optimizer step, over all
            micro-batches and ranks. With ``"mean"`` only. A tensor of one element is not read on the host.
        return_z_loss: also return the z-loss, reduced as the loss is, without a gradient.
        tile: tokens per tile, or a rule of :func:`seqtile.apply`; tiles have equally many tokens that
            are not ignored.
        impl: ``"torch"``: seqtile's operator, described here; ``"native"``: PyTorch's chunked operator, fp32 and
            float64, from 2.13 on; ``"liger"``, ``"cce"`` or ``"quack"``: that package's fastest kernel for the
            arguments, or an error with the reasons; ``"auto"``: an installed kernel that is faster than ``"torch"`` and
            supports the arguments, else ``"torch"``. Memory and tile size of other operators are their own.

    Returns:
        A scalar in fp32 (float64 for float64 states), or ``[...]`` for ``"none"``; with ``return_z_loss`` a pair.

    Cost:
        Matrix products in units of ``2 * n * D * V``: 3 for a scalar (2 if either the head or the states need no
        gradient), 4 for ``"none"``; without a gradient 1. On an accelerator also three passes over the logits: two
        reads and a write. Memory: one tile of logits in the compute dtype (on a CPU also a few of its rows in fp32);
        the gradients of states and head (fp32 sums for low precision), from the forward on. One synchronisation with
        the host, for ``n``.

    Raises:
        ValueError: a wrong type, dtype or shape, labels outside the vocabulary, an unknown reduction, weights that
            require a gradient (use ``"none"``), or an ``impl`` that does not support the arguments.
        NotImplementedError: ``create_graph=True``.
    """
    aim = Objective(scaling or LogitScaling(), ignore_index, label_smoothing, z_loss, class_weights)
    call = HeadCall(hidden, weight, bias, labels, aim, parse_tile(tile))
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(map(repr, REDUCTIONS))}")
    check_num_items(num_items, reduction)
    factors = None
    if token_weights is not None:
        expect_tensors(token_weights=token_weights)
        if token_weights.shape != labels.shape:
            raise ValueError(
                f"token_weights have shape {tuple(token_weights.shape)}, expected that of the labels, "
                f"{tuple(labels.shape)}"
            )
        if token_weights.requires_grad and reduction != "none":
            raise ValueError("token_weights need a gradient; use reduction='none' and multiply by them yourself")
        # Their sum, the divisor of a mean, would overflow in fp16 and lose digits in bf16.
        factors = call.kept.take(token_weights.reshape(-1).to(call.hidden.device, call.score_dtype))
    kernel = choose_kernel(
        impl, call, weighted=factors is not None, per_token=reduction == "none", returns_z_loss=return_z_loss
    )
    if reduction == "none":
        scores = call.per_token()
        factor = 1 if factors is None else call.kept.spread(factors)
        loss, squares = ((each * factor).view(labels.shape) for each in (scores.loss, scores.squares))
        return (loss, z_loss * squares) if return_z_loss else loss
    divisor = 1 if reduction == "sum" else call.count(factors) if num_items is None else num_items
    if kernel.name == "torch" or not len(call.kept):
        loss, squares = call.total(factors, divisor)
        return (loss, z_loss * squares) if return_z_loss else loss
    return LOSS_CANDIDATES[kernel.name].total(call) / as_divisor(divisor, call.hidden)


def check_num_items(num_items: Tensor | int | float | None, reduction: str) -> None:
    """Refuse an invalid divisor, or one that another reduction would ignore.

    Raises:
        ValueError: with what it is.
    """
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f"num_items needs reduction='mean', got reduction={reduction!r}")
    if not isinstance(num_items, Tensor):
        expect_number("num_items", num_items, 0, sys.float_info.max, "a number of tokens, or a tensor of one element")
    elif num_items.numel() != 1:
        raise ValueError(f"num_items has shape {tuple(num_items.shape)}, expected a number or a tensor of one element")
