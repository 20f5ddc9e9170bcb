"""Mark the modules whose weights DeepSpeed ZeRO-3 has to gather as a whole.

ZeRO-3 gathers the weights of every module when that module runs, so a linear layer inside a tile loop would be gathered
at each tile. A *leaf module* is gathered as a whole before it runs. ``deepspeed.utils.set_z3_leaf_module`` sets the
attribute ``_z3_leaf`` on the instance, which DeepSpeed reads when it takes the model over; setting it here needs no
DeepSpeed and does nothing under any other engine.

DeepSpeed reduces a leaf module's gradients in the module's full backward hook. PyTorch runs that hook when the gradient
of a positional input is there; if none requires one, it runs before the module's own backward, and the weights'
gradients are lost. So a pre-hook makes such an input require a gradient, as in a LoRA model's first layer.

Source: DeepSpeed 0.19, ``deepspeed/utils/z3_leaf_module.py`` and ``runtime/zero/parameter_offload.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import LEAF, ZERO3_MARKS, forward_pre_hooks_of
from seqtile._errors import UserError
from seqtile.ops.token_tiles import is_differentiable

_OURS = "_seqtile_marked_leaf"


def is_registered(module: nn.Module) -> bool:
    """Whether ZeRO-3 manages this module, and gathers its weights when it runs."""
    return not ZERO3_MARKS.isdisjoint(module.__dict__)


def whole_shape(weight: Tensor) -> torch.Size:
    """Shape of a weight, before sharding if ZeRO-3 has replaced it by an empty tensor (``zero.Init``)."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


def gathered(weights: Iterable[Tensor]) -> AbstractContextManager[Any]:
    """Gather, inside a ``with`` that every rank must enter, the weights that ``zero.Init`` has sharded.

    Cost:
        One gather of the weights that are in shards; nothing without any.
    """
    sharded = [weight for weight in weights if hasattr(weight, "ds_shape") and weight.numel() == 0]
    if not sharded:
        return nullcontext()
    gather: AbstractContextManager[Any] = sys.modules["deepspeed"].zero.GatheredParameters(sharded)
    return gather


def is_marked(module: nn.Module) -> bool:
    """Whether :func:`mark_leaf` marked this module."""
    return _OURS in module.__dict__


def mark_leaf(module: nn.Module) -> None:
    """Have ZeRO-3 gather all weights of ``module`` before it runs, if it takes the model over later."""
    if not module.__dict__.get(LEAF) and not is_registered(module):
        module.__dict__.update({LEAF: True, _OURS: True})
        module.register_forward_pre_hook(end_gradients_here)


def unmark_leaf(module: nn.Module) -> None:
    """Remove our mark, unless ZeRO-3 already relies on it."""
    if not is_marked(module) or is_registered(module):
        return
    del module.__dict__[_OURS], module.__dict__[LEAF]
    hooks = forward_pre_hooks_of(module)
    for number, hook in list(hooks.items()):
        if hook is end_gradients_here:
            del hooks[number]


def end_gradients_here(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a leaf module: its first input requires a gradient if its weights do and no input does.

    Does nothing until ZeRO-3 has taken the module over.

    Raises:
        UserError: no tensor was passed by position, so the gradients would be reduced before they are computed.
    """
    if ZERO3_MARKS.isdisjoint(module.__dict__) or not torch.is_grad_enabled():
        return None
    tensors = [value for value in inputs if isinstance(value, Tensor) and is_differentiable(value)]
    if any(tensor.requires_grad for tensor in tensors) or not any(p.requires_grad for p in module.parameters()):
        return None
    if not tensors:
        raise UserError(
            "engine.zero3-keyword-arguments",
            f"{type(module).__name__} was called with keyword arguments only; DeepSpeed ZeRO-3 would reduce its "
            "gradients before they are computed; pass the hidden states by position",
        )
    return tuple(value.detach().requires_grad_() if value is tensors[0] else value for value in inputs)
