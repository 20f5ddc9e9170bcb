"""Reentrant activation checkpoints: what they cost, and where their gradients are wrong."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from seqtile._compat import CHECKPOINT_FUNCTION


def is_reentrant(module: nn.Module) -> bool:
    """Whether ``module`` is run under a reentrant checkpoint, as Transformers sets it."""
    function = getattr(module, CHECKPOINT_FUNCTION, None)
    if function is None or not getattr(module, "gradient_checkpointing", False):
        return False
    return bool(getattr(function, "keywords", {}).get("use_reentrant", False))


def shares_keys(model: nn.Module) -> bool:
    """Whether layers of ``model`` attend to another layer's keys and values (Gemma 3n, Gemma 4).

    These reach the later layers in a dictionary, beside the arguments of a checkpoint. A reentrant one returns detached
    tensors there: the layers that compute them get no gradient from those that share them.
    """
    return any(getattr(module, "is_kv_shared_layer", False) for module in model.modules())


@contextmanager
def non_reentrant(model: nn.Module) -> Iterator[bool]:
    """Run reentrant checkpoints of ``model`` as non-reentrant ones; yields whether there were any."""
    reentrant = [(module, module.__dict__[CHECKPOINT_FUNCTION]) for module in model.modules() if is_reentrant(module)]
    for module, function in reentrant:
        keywords = {**function.keywords, "use_reentrant": False}
        setattr(module, CHECKPOINT_FUNCTION, functools.partial(function.func, *function.args, **keywords))
    try:
        yield bool(reentrant)
    finally:
        for module, function in reentrant:
            setattr(module, CHECKPOINT_FUNCTION, function)
