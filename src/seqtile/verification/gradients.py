"""Find trainable weights inside tiled blocks without a gradient."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from seqtile._compat import is_in_zero12
from seqtile._errors import UserError, expect_module
from seqtile._log import first_rank_logger
from seqtile.blocks.instance import Installed
from seqtile.blocks.layer import TiledLayer

logger = first_rank_logger(__name__)

MOST_NAMED = 5
"""Names in a warning; there may be thousands."""


def check_gradients(model: nn.Module) -> list[str]:
    """Warn of parameters inside tiled blocks that require a gradient and have none.

    Call it once in your training loop, after the first backward and before the optimizer step, as ``seqtile train``
    does. It only reads ``.grad``. An expert that no token reached has no gradient, as untiled; nor has an adapter that
    is trainable but not active.

    Args:
        model: tiled by :func:`seqtile.apply`, wrapped by DDP or FSDP or not.

    Returns:
        The names of the parameters, in order.

    Cost:
        One look at every parameter of the tiled blocks.

    Raises:
        UserError: nothing is tiled; or DeepSpeed holds the gradients, where a missing one reads as zeros
            (call :func:`seqtile.verify` before it wraps the model).
    """
    expect_module(model, "check_gradients")
    inside = {id(weight) for weight in _weights_in_tiles(model)}
    if not inside:
        raise UserError(
            "verify.no-tiled-block", f"{type(model).__name__} has no tiled block with weights; call seqtile.apply first"
        )
    weights = {name: weight for name, weight in model.named_parameters() if id(weight) in inside}
    # ZeRO-1 and ZeRO-2 leave the first mark on a parameter, ZeRO-3 the second.
    if any(is_in_zero12(weight) or hasattr(weight, "ds_id") for weight in weights.values()):
        raise UserError(
            "verify.under-deepspeed",
            "DeepSpeed owns the gradients, and reads missing ones as zeros; call seqtile.verify before wrapping",
        )
    # FSDP1 with use_orig_params leaves an empty parameter, without a gradient, on ranks that hold no part of it.
    without = [n for n, weight in weights.items() if weight.requires_grad and weight.grad is None and weight.numel()]
    if without:
        others = f" and {len(without) - MOST_NAMED} more" if len(without) > MOST_NAMED else ""
        logger.warning(
            "%d trainable parameters inside tiled blocks have no gradient: %s%s; expected for experts that "
                "received no token, otherwise they do not train (is their adapter active?)",
            len(without), ", ".join(without[:MOST_NAMED]), others,
        )  # fmt: skip
    return without


def _weights_in_tiles(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        installed = module.__dict__.get("forward")
        if isinstance(installed, TiledLayer):
            members = [getattr(module, name) for name in installed.names]
            yield from (p for member in members if isinstance(member, nn.Module) for p in member.parameters())
        elif isinstance(installed, Installed):
            yield from module.parameters()
