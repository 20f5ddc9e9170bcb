"""The live weights of linear layers, adapters and norms, read by structure at each call.

An adapter may be added, merged or disabled between calls. The trace proves that a block computes with its weights what
the operator computes (:mod:`seqtile.recognise.formula`); weights that a trace cannot check are refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import HOOKS, PLAIN, captured_by, captures_by_forward
from seqtile._shallow import view_of
from seqtile.engines.flat import named_weights
from seqtile.ops.linear import Adapter, Packed, Projection
from seqtile.ops.norm import NormFormula
from seqtile.ops.rng import RowWise
from seqtile.recognise.known_kernels import DenseLinear, has_twin, own_forward

hooks_of = attrgetter(*HOOKS)
_ADAPTED = (
    ("peft.tuners.lora.layer", "Linear"),
    ("peft.tuners.lora.bnb", "Linear4bit"),
    ("peft.tuners.lora.bnb", "Linear8bitLt"),
)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks besides its forward."""
    return any(hooks_of(module))


def has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks besides its forward and seqtile's own hooks."""
    return any(True for _ in foreign_hooks(module))


def foreign_hooks(module: nn.Module) -> Iterator[Any]:
    """The hooks of a module that are not seqtile's own."""
    for name in HOOKS:
        for hook in getattr(module, name).values():
            if not str(getattr(hook, "__module__", "")).startswith("seqtile."):
                yield hook


def seen_inside(module: nn.Module, but: str = "") -> str:
    """The name of a submodule whose calls a hook or a recorder observes, or "": it would observe every tile.

    Args:
        module: the module.
        but: an output whose capture by transformers' hooks is allowed.
    """
    name: str
    for name, submodule in module.named_modules():
        if not name:
            continue
        if captures_by_forward(submodule) or {*map(captured_by, foreign_hooks(submodule))} - {"", but}:
            return name
    return ""


def row_wise(
    norm: nn.Module, formula: NormFormula | None = None, *, runs_hooks: bool = False, names: Sequence[str] = ()
) -> RowWise | str:
    """The function and live weights of a norm, for the operators that run one; or why no operator can.

    Args:
        norm: the module.
        formula: its proven formula, if known.
        runs_hooks: whether the norm's own call runs its hooks, around the operator (ZeRO-3 gathers weights there).
        names: attributes that its forward reads its weights from, if known. Under FSDP1 such an attribute may be no
            parameter, and inside head-wise attention no view of one either.
    """
    own = own_forward(norm)
    if (has_hooks(norm) and not runs_hooks) or not (own is None or (has_twin(norm) and hasattr(own, "__func__"))):
        return f"{type(norm).__name__} has hooks"
    live = {name: getattr(norm, name) for name in names} or dict(named_weights(norm))
    if next(norm.children(), None) is not None:
        return f"{type(norm).__name__} is no row-wise norm"
    for weight in live.values():
        if weight.dim() > 1:
            return f"{type(norm).__name__} is no row-wise norm"
        if reason := _unusable(weight):
            return f"{type(norm).__name__}: {reason}"
    attributes = tuple(live)
    # Not seqtile's replacement: where the kernel has failed, it would call this function again without end.
    forward = getattr(own, "__func__", type(norm).forward)

    def function(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        view = view_of(norm)
        view.__dict__.update(zip(attributes, weights, strict=True))  # an attribute hides the parameter
        return forward(view, rows)  # type: ignore[no-any-return]

    return RowWise(function, tuple(live.values()), formula)


def _unusable(weight: Tensor) -> str:
    """Why a weight is not a plain live tensor, or ""."""
    if type(weight) not in PLAIN:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its weight is quantised ({str(weight.dtype).removeprefix('torch.')})"
    if weight.numel() == 0:
        return "its weight is not gathered"
    return ""


def projection_of(
    name: str, layer: nn.Module, dtype: torch.dtype | None = None, *, traced: bool = False
) -> Projection | str:
    """A plain linear layer, or one with a LoRA adapter, by its live tensors; or why it is neither.

    Args:
        name: what messages call it.
        layer: the layer.
        dtype: dtype of its input; without it 4-bit layers, which compute in a dtype of their own, are declined.
        traced: whether a trace shows that the layer computes what the result says, a forward of its own included.
    """
    if has_hooks(layer) or ("forward" in layer.__dict__ and own_forward(layer) is not None):
        return f"{name} has hooks"
    if hasattr(layer, "base_layer"):
        return _adapted(name, layer, dtype, traced)
    layer_class = type(layer)
    if layer_class.__name__ == "Linear4bit" and layer_class.__module__ == "bitsandbytes.nn.modules":
        return _four_bit_projection(name, layer, dtype)
    if isinstance(layer, DenseLinear) and layer.compute_dtype not in (None, dtype):
        return f"{name}: its quantised weight computes in {layer.compute_dtype}, its input is {dtype}"
    transposed = layer_class.__name__ == "Conv1D" and hasattr(layer, "nx")
    if not transposed and not isinstance(layer, nn.Linear):
        return f"{name} is a {layer_class.__name__}"
    weight: Any = layer.weight
    bias: Any = layer.bias
    reason = _unusable(weight) or (_unusable(bias) if bias is not None else "")
    if reason:
        return f"{name}: {reason}"
    if not transposed and layer_class.forward is not nn.Linear.forward and not traced:
        return f"{name} ({layer_class.__name__}) may compute more than a linear layer"
    return Projection(weight, bias, transposed)


def differ_in_dtype(projections: Iterable[Projection]) -> bool:
    """Whether their weights are of more than one dtype; quantised ones have none of their own."""
    dtypes = set()
    for projection in projections:
        if isinstance(projection.weight, Tensor):
            dtypes.add(projection.weight.dtype)
    return len(dtypes) > 1


def _four_bit_projection(name: str, layer: Any, dtype: torch.dtype | None) -> Projection | str:
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
        return bitsandbytes.functional.dequantize_4bit(weight.data, state)  # type: ignore[no-any-return,unused-ignore]

    return Projection(Packed(dense, (layer.out_features, layer.in_features)), bias)


def _adapted(name: str, layer: Any, dtype: torch.dtype | None, traced: bool) -> Projection | str:
    """PEFT's LoRA layer: ``base(x) + B(A(dropout(x))) * scaling``."""
    layer_class = type(layer)
    if (layer_class.__module__, layer_class.__name__) not in _ADAPTED:
        return f"{name} is a {layer_class.__module__}.{layer_class.__name__}"
    base = projection_of(name, layer.base_layer, dtype, traced=traced)
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
    if type(drop) not in (nn.Dropout, nn.Identity) or has_hooks(drop):
        return f"{name}: its adapter drops by {type(drop).__name__}"
    probability = float(drop.p) if isinstance(drop, nn.Dropout) and drop.training else 0.0
    assert isinstance(down.weight, Tensor) and isinstance(up.weight, Tensor)
    lora = Adapter(down.weight, up.weight, float(layer.scaling[adapter]), probability)
    return Projection(base.weight, base.bias, base.transposed, lora)
