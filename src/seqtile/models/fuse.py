"""Whether a block is an MLP that the fused operator computes, and its live weights, at each call.

The linear layers must be plain ones, or plain ones with one LoRA adapter: read by structure at every call, since an
adapter may be added, merged or disabled in between. The block's own ``forward`` must be the formula that the operator
computes, which :mod:`seqtile.models.formula` proves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqtile.counting.fake import PLAIN
from seqtile.engines.flat import call_with_weights, named_weights
from seqtile.models.formula import formula_of, heard, is_linear, known_activation
from seqtile.ops.fused import FusedWeights
from seqtile.ops.pointwise import Activation
from seqtile.ops.projection import Adapter, Packed, Projection
from seqtile.ops.replay import RowWise

_ADAPTED = (("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit"))


def fused_weights(module: nn.Module, dtype: torch.dtype | None = None) -> FusedWeights | str:
    """The live weights of ``module`` for :func:`seqtile.ops.fused.fused_mlp`, or why it cannot run there.

    Args:
        module: a block ``[..., D] -> [..., D]``; one that is tiled already is read as it was before.
        dtype: dtype of the input; without it 4-bit layers, which compute in a dtype of their own, are declined.

    Returns:
        The weights and their formula; or a reason, for the report.

    Cost:
        A few dozen attribute lookups; a few milliseconds at the first call of each class and configuration.
    """
    if torch.compiler.is_compiling():
        return "torch.compile traces the generic operator"
    own = module.__dict__.get("forward")
    if own is not None and "forward" in getattr(own, "before", {"forward": own}):
        return "its forward was replaced on the instance"
    formula = formula_of(module)
    if isinstance(formula, str):
        return formula
    first = []
    for name in formula.first:
        projection = projection_of(name, getattr(module, name), dtype)
        if isinstance(projection, str):
            return projection
        first.append(projection)
    down = projection_of(formula.down, getattr(module, formula.down), dtype)
    if isinstance(down, str):
        return down
    dtypes = {weight.dtype for part in (*first, down) if isinstance(weight := part.weight, Tensor)}
    if len(dtypes) > 1:  # T5 casts before its last layer, which stays in float32
        return "its linear layers differ in dtype"
    activation = formula.activation or Activation(formula.function, getattr(module, formula.function))
    dropout = float(getattr(module, formula.dropout).p) if formula.dropout else 0.0
    return FusedWeights(tuple(first), down, activation, formula.gated, formula.up_first, dropout=dropout)


def fused_sequence(up: nn.Module, function: Callable[[Tensor], Tensor], down: nn.Module) -> FusedWeights | str:
    """The same for layers that their caller runs one after another, ``down(function(up(x)))``; see OPT."""
    one, other = projection_of("the first linear layer", up), projection_of("the second linear layer", down)
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else str(other)
    if isinstance(function, nn.Module) and (heard(function) or any(True for _ in function.parameters())):
        return "its activation has hooks or weights"
    return FusedWeights((one,), other, known_activation(function), gated=False)


def row_wise(norm: nn.Module) -> RowWise | str:
    """A norm that runs inside the tile of the fused operator, or why it cannot."""
    if "forward" in norm.__dict__ or heard(norm):
        return f"something listens to {type(norm).__name__}"
    if any(True for _ in norm.children()) or any(weight.dim() > 1 for _, weight in named_weights(norm)):
        return f"{type(norm).__name__} is no row-wise norm"
    live = dict(named_weights(norm))
    if (reason := next((r for w in live.values() if (r := _unusable(w))), "")) != "":
        return f"{type(norm).__name__}: {reason}"
    names = tuple(live)

    def function(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return call_with_weights(norm, dict(zip(names, weights, strict=True)), (rows,))

    return RowWise(function, tuple(live.values()))


def _unusable(weight: Tensor) -> str:
    """Why a weight is no plain live tensor, or ""."""
    if type(weight) not in PLAIN:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its weight is quantised ({str(weight.dtype).removeprefix('torch.')})"
    if weight.numel() == 0:
        return "its weight is not gathered"
    return ""


def projection_of(name: str, layer: nn.Module, dtype: torch.dtype | None = None) -> Projection | str:
    """A plain linear layer, or one with a LoRA adapter, by its live tensors; or why it is neither."""
    if heard(layer) or "forward" in layer.__dict__:
        return f"a hook listens to {name}"
    if hasattr(layer, "base_layer"):
        return _adapted(name, layer, dtype)
    kind = type(layer)
    if kind.__name__ == "Linear4bit" and kind.__module__ == "bitsandbytes.nn.modules":
        return _packed(name, layer, dtype)
    transposed = kind.__name__ == "Conv1D" and hasattr(layer, "nx")
    if not transposed and not isinstance(layer, nn.Linear):
        return f"{name} is a {kind.__name__}"
    weight: Any = layer.weight
    bias: Any = layer.bias
    reason = _unusable(weight) or (_unusable(bias) if bias is not None else "")
    if reason:
        return f"{name}: {reason}"
    if not transposed and kind.forward is not nn.Linear.forward and not is_linear(layer):
        return f"{name} ({kind.__name__}) computes more than a linear layer"
    return Projection(weight, bias, transposed)


def _packed(name: str, layer: Any, dtype: torch.dtype | None) -> Projection | str:
    """A frozen 4-bit layer of bitsandbytes: ``x W^T + b`` with ``W`` made dense as :class:`Packed` says."""
    import bitsandbytes  # type: ignore[import-not-found,unused-ignore]

    weight, bias = layer.weight, layer.bias
    state = getattr(weight, "quant_state", None)
    if type(weight).__name__ != "Params4bit" or state is None or getattr(state, "packing_format_for_cpu", False):
        return f"{name}: its 4-bit weight is sharded or packed for inference"
    if weight.requires_grad or weight.numel() == 0:
        return f"{name}: its 4-bit weight trains or is not gathered"
    computes = layer.compute_dtype if layer.compute_type_is_set else dtype
    casts = dtype is not None and torch.is_autocast_enabled(weight.device.type)
    if dtype is None or computes != dtype or (casts and torch.get_autocast_dtype(weight.device.type) != dtype):
        return f"{name}: its 4-bit weight computes in {computes}, its input is {dtype}"

    def dense() -> Tensor:
        return bitsandbytes.functional.dequantize_4bit(weight.data, state)

    return Projection(Packed(dense, (layer.out_features, layer.in_features)), bias)


def _adapted(name: str, layer: Any, dtype: torch.dtype | None) -> Projection | str:
    """PEFT's LoRA layer: ``base(x) + B(A(dropout(x))) * scaling``."""
    kind = type(layer)
    if (kind.__module__, kind.__name__) not in _ADAPTED:
        return f"{name} is a {kind.__module__}.{kind.__name__}"
    base = projection_of(name, layer.base_layer, dtype)
    if isinstance(base, str):
        return base
    if layer.merged:
        return f"{name}: its adapters are merged"
    active = [] if layer.disable_adapters else [a for a in layer.active_adapters if a in layer.lora_A]
    if not active:
        return base
    if len(active) > 1:
        return f"{name}: {len(active)} adapters are active"
    adapter = active[0]
    if layer.lora_variant.get(adapter) is not None or layer.use_dora.get(adapter):
        return f"{name}: its adapter is a variant of LoRA"
    down, up = (projection_of(f"{name}'s adapter", side[adapter]) for side in (layer.lora_A, layer.lora_B))
    if isinstance(down, str) or isinstance(up, str):
        return down if isinstance(down, str) else str(up)
    if up.bias is not None or down.bias is not None:
        return f"{name}: its adapter has a bias"
    drop = layer.lora_dropout[adapter]
    if type(drop) not in (nn.Dropout, nn.Identity) or heard(drop):
        return f"{name}: its adapter drops by {type(drop).__name__}"
    share = float(drop.p) if isinstance(drop, nn.Dropout) and drop.training else 0.0
    assert isinstance(down.weight, Tensor) and isinstance(up.weight, Tensor)
    lora = Adapter(down.weight, up.weight, float(layer.scaling[adapter]), share)
    return Projection(base.weight, base.bias, base.transposed, lora)
