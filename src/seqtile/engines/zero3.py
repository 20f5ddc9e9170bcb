"""Mark the modules whose weights DeepSpeed ZeRO-3 has to gather as a whole.

ZeRO-3 gathers the weights of every module when that module runs, so a linear layer inside a tile loop would be gathered
at each tile. A *leaf module* is gathered as a whole before it runs. ``deepspeed.utils.set_z3_leaf_module`` sets the
attribute ``_z3_leaf`` on the instance, which DeepSpeed reads when it takes the model over; setting it here needs no
DeepSpeed and does nothing under any other engine.

Source: DeepSpeed 0.19, ``deepspeed/utils/z3_leaf_module.py`` and ``runtime/zero/parameter_offload.py``.
"""

from __future__ import annotations

from torch import nn

_LEAF = "_z3_leaf"
_OURS = "_seqtile_marked_leaf"


def is_registered(module: nn.Module) -> bool:
    """Whether ZeRO-3 has taken this module over and gathers its weights when it runs."""
    return "ds_recompute_parameters" in module.__dict__ or "post_bwd_fn" in module.__dict__


def mark_leaf(module: nn.Module) -> None:
    """Have ZeRO-3 gather all weights of ``module`` before it runs, if it takes the model over later."""
    if not module.__dict__.get(_LEAF) and not is_registered(module):
        module.__dict__.update({_LEAF: True, _OURS: True})


def unmark_leaf(module: nn.Module) -> None:
    """Take our mark off; it stays where ZeRO-3 already goes by it."""
    if _OURS in module.__dict__ and not is_registered(module):
        del module.__dict__[_OURS], module.__dict__[_LEAF]
