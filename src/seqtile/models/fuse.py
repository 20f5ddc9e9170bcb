"""Whether a block is an MLP that the fused operator computes, read from what the block is at this call.

Two things are asked. The linear layers must be plain ones, or plain ones with one LoRA adapter: read by structure at
every call, since an adapter may be added, merged or disabled in between. And the block's own ``forward`` must be the
formula that the operator computes: proven once per class and configuration, by running it in double precision on
small random layers that take the place of the block's own, with inputs small and large, so that a multiplier or a
clamp shows whatever the weights are, quantised, sharded or on another device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from seqtile.models.find import linear_widths
from seqtile.ops.fused import FusedWeights
from seqtile.ops.pointwise import KNOWN, Activation
from seqtile.ops.projection import Adapter, Projection
from seqtile.ops.replay import RowWise

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Formula:
    """Which of its children a class calls, and how: ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))``.

    Attributes:
        first: names of gate and up, of gate_up, or of up.
        down: name of the down projection.
        activation: a known one, or None: the child or attribute ``function``.
        function: name of the activation on the module, where it is no known one.
        gated: whether there is a gate.
        up_first: order of the halves of gate_up.
        dropout: name of the dropout on the output that drops now, or "".
    """

    first: tuple[str, ...]
    down: str
    activation: Activation | None
    function: str
    gated: bool
    up_first: bool
    dropout: str


def fused_weights(module: nn.Module) -> FusedWeights | str:
    """The live weights of ``module`` for :func:`seqtile.ops.fused.fused_mlp`, or why it cannot run there.

    Args:
        module: a block ``[..., D] -> [..., D]``; one that is tiled already is read as it was before.

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
    formula = _formula(module)
    if isinstance(formula, str):
        return formula
    first = []
    for name in formula.first:
        projection = _projection(name, getattr(module, name))
        if isinstance(projection, str):
            return projection
        first.append(projection)
    down = _projection(formula.down, getattr(module, formula.down))
    if isinstance(down, str):
        return down
    activation = formula.activation or Activation(formula.function, getattr(module, formula.function))
    dropout = float(getattr(module, formula.dropout).p) if formula.dropout else 0.0
    return FusedWeights(tuple(first), down, activation, formula.gated, formula.up_first, dropout=dropout)


def fused_sequence(up: nn.Module, function: Callable[[Tensor], Tensor], down: nn.Module) -> FusedWeights | str:
    """The same for layers that their caller runs one after another, ``down(function(up(x)))``; see OPT."""
    one, other = _projection("the first linear layer", up), _projection("the second linear layer", down)
    if isinstance(one, str) or isinstance(other, str):
        return one if isinstance(one, str) else str(other)
    if isinstance(function, nn.Module) and (_heard(function) or any(True for _ in function.parameters())):
        return "its activation has hooks or weights"
    return FusedWeights((one,), other, known_activation(function), gated=False)


def row_wise(norm: nn.Module) -> RowWise | str:
    """A norm that runs inside the tile of the fused operator, or why it cannot."""
    if "forward" in norm.__dict__ or _heard(norm):
        return f"something listens to {type(norm).__name__}"
    if any(True for _ in norm.children()) or any(weight.dim() > 1 for weight in norm.parameters()):
        return f"{type(norm).__name__} is no row-wise norm"
    live = dict(norm.named_parameters())
    if (reason := next((r for w in live.values() if (r := _unusable(w))), "")) != "":
        return f"{type(norm).__name__}: {reason}"
    names = tuple(live)

    def function(rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return functional_call(norm, dict(zip(names, weights, strict=True)), (rows,))

    return RowWise(function, tuple(live.values()))


def known_activation(function: Callable[[Tensor], Tensor]) -> Activation:
    """The analytic twin of ``function`` if it has one, else ``function`` with autograd's derivative."""
    with torch.no_grad(), _disable_current_modes():
        z = torch.linspace(-12, 12, 97, dtype=torch.float64, device="cpu").reshape(1, -1)
        try:
            values = function(z)
        except (RuntimeError, TypeError, ValueError):
            return Activation(_name(function), function)
        for known in KNOWN:
            if torch.allclose(known.function(z), values, rtol=1e-9, atol=1e-9):
                return known
    return Activation(_name(function), function)


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _heard(module: nn.Module) -> bool:
    return any(getattr(module, name) for name in _HOOKS)


def _unusable(weight: Tensor) -> str:
    """Why a weight is no plain live tensor, or ""."""
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its weight is quantised ({str(weight.dtype).removeprefix('torch.')})"
    if weight.numel() == 0:
        return "its weight is not gathered"
    return ""


def _projection(name: str, layer: nn.Module) -> Projection | str:
    """A plain linear layer, or one with a LoRA adapter, by its live tensors; or why it is neither."""
    if _heard(layer) or "forward" in layer.__dict__:
        return f"a hook listens to {name}"
    if hasattr(layer, "base_layer"):
        return _adapted(name, layer)
    kind = type(layer)
    transposed = kind.__name__ == "Conv1D" and hasattr(layer, "nx")
    if not transposed and not isinstance(layer, nn.Linear):
        return f"{name} is a {kind.__name__}"
    weight: Any = layer.weight
    bias: Any = layer.bias
    reason = _unusable(weight) or (_unusable(bias) if bias is not None else "")
    if reason:
        return f"{name}: {reason}"
    if not transposed and kind.forward is not nn.Linear.forward and not _is_linear(layer):
        return f"{name} ({kind.__name__}) computes more than a linear layer"
    return Projection(weight, bias, transposed)


_linear: dict[Any, bool] = {}


def _is_linear(layer: nn.Module) -> bool:
    """Whether a subclass of ``nn.Linear`` with a forward of its own computes ``x W^T + b``; run once per class."""
    key = (type(layer), type(layer).forward, *_plain_of(layer))
    if key not in _linear:
        with torch.no_grad(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
            small = nn.Linear(6, 10, device="cpu", dtype=torch.float64)
            view: nn.Module = object.__new__(type(layer))
            view.__dict__.update(layer.__dict__, _parameters=small._parameters)
            x = torch.linspace(-20, 20, 30, device="cpu", dtype=torch.float64).view(1, 5, 6)
            try:
                _linear[key] = _agrees(type(layer).forward(view, x), small(x))
            except Exception:  # noqa: BLE001  # whatever it wants, it is no plain linear layer
                _linear[key] = False
    return _linear[key]


def _adapted(name: str, layer: Any) -> Projection | str:
    """PEFT's LoRA layer: ``base(x) + B(A(dropout(x))) * scaling``."""
    kind = type(layer)
    if kind.__name__ != "Linear" or kind.__module__ != "peft.tuners.lora.layer":
        return f"{name} is a {kind.__module__}.{kind.__name__}"
    base = _projection(name, layer.base_layer)
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
    down, up = (_projection(f"{name}'s adapter", side[adapter]) for side in (layer.lora_A, layer.lora_B))
    if isinstance(down, str) or isinstance(up, str):
        return down if isinstance(down, str) else str(up)
    if up.bias is not None or down.bias is not None:
        return f"{name}: its adapter has a bias"
    drop = layer.lora_dropout[adapter]
    if type(drop) not in (nn.Dropout, nn.Identity) or _heard(drop):
        return f"{name}: its adapter drops by {type(drop).__name__}"
    share = float(drop.p) if isinstance(drop, nn.Dropout) and drop.training else 0.0
    assert isinstance(down.weight, Tensor) and isinstance(up.weight, Tensor)
    lora = Adapter(down.weight, up.weight, float(layer.scaling[adapter]), share)
    return Projection(base.weight, base.bias, base.transposed, lora)


_proven: dict[Any, tuple[Callable[[], object] | None, Formula | str]] = {}


def _formula(module: nn.Module) -> Formula | str:
    """What the class's ``forward`` computes, proven by a probe; or why that is not known."""
    linears: dict[str, tuple[int, int]] = {}
    functions: list[str] = []
    dropouts: list[str] = []
    for name, child in module._modules.items():
        if child is None:
            continue
        if (widths := linear_widths(child)) is not None:
            linears[name] = widths
        elif _heard(child):
            return f"a hook listens to {name}"
        elif type(child) is nn.Dropout:
            dropouts.append(name)
        elif child._modules or any(True for _ in child.parameters()):
            return f"{name} ({type(child).__name__}) is neither a linear layer nor an activation"
        else:
            functions.append(name)
    if any(p is not None for p in module._parameters.values()) or any(True for _ in module.buffers(recurse=False)):
        return "it has weights or buffers of its own"
    # What a forward may read besides its children: every number, flag and function on the instance.
    plain = [(k, v) for k, v in vars(module).items() if isinstance(v, (int, float, str)) or v is None]
    functions += [k for k, v in vars(module).items() if callable(v) and k not in ("forward", "extra_repr")]
    drops = tuple(name for name in dropouts if module.training and getattr(module, name).p > 0)
    config = getattr(module, "config", None)
    kinds = tuple((name, type(f), getattr(f, "__qualname__", None), *_plain_of(f))
                  for name in functions for f in [getattr(module, name)])  # fmt: skip
    hidden = next(iter(linears.values()), (0, 0))[0]
    shape = tuple((name, wide[0] == hidden, wide[1] == hidden) for name, wide in linears.items())
    key = (type(module), type(module).forward, tuple(plain), drops, kinds, shape, id(config))
    known = _proven.get(key)
    if known is None or (known[0] is not None and known[0]() is not config):
        try:
            alive = None if config is None else weakref.ref(config)
        except TypeError:
            alive = None
        known = _proven[key] = (alive, _prove(module, linears, functions, drops))
    return known[1]


def _plain_of(function: object) -> tuple[Any, ...]:
    """Numbers and flags of an activation module."""
    values = getattr(function, "__dict__", {})
    return tuple((k, v) for k, v in values.items() if isinstance(v, (int, float, str)) and k != "training")


def _prove(
    module: nn.Module, linears: dict[str, tuple[int, int]], functions: list[str], drops: tuple[str, ...]
) -> Formula | str:
    if len(linears) not in (2, 3):
        return f"{len(linears)} linear layers where 2 or 3 were expected"
    if len(drops) > 1:
        return f"{len(drops)} dropouts"
    *before, down = linears
    hidden, inner = linears[down][1], linears[down][0]
    double = len(before) == 1 and linears[before[0]][1] == 2 * inner
    if any(linears[name] != (hidden, 2 * inner if double else inner) for name in before):
        return "its linear layers are not D -> F and F -> D"
    with torch.no_grad(), _disable_current_modes(), torch.random.fork_rng(devices=[]):
        generator = torch.Generator("cpu").manual_seed(0)
        small = _small_layers(before, down, double, generator)
        runs = []
        for tokens, scale in (((1, 5, 6), 0.1), ((1, 5, 6), 1.0), ((5, 6), 30.0)):
            x = scale * torch.randn(tokens, dtype=torch.float64, device="cpu", generator=generator)
            try:
                got = type(module).forward(_view(module, small, drops), x)
            except Exception as error:  # noqa: BLE001  # its forward wants something else, whatever it is
                return f"its forward cannot be probed ({type(error).__name__}: {error})"
            if not isinstance(got, Tensor) or got.shape != x.shape:
                return "its forward does not return one tensor like its input"
            runs.append((x, got / (_MARK if drops else 1)))
        for activation, function in _activations(module, functions):
            for first, gated, up_first in _orders(before, double):
                formula = Formula(first, down, activation, function, gated, up_first, drops[0] if drops else "")
                call = activation.function if activation else getattr(module, function)
                if all(_agrees(_compute(formula, small, call, x), got) for x, got in runs):
                    return formula
    return "its forward is another formula than down(act(gate(x)) * up(x)) or down(act(up(x)))"


_MARK = 3.0


class _Marked(nn.Module):
    """Stands for a dropout that drops: multiplies by a number, so that the result shows where it is applied."""

    def forward(self, x: Tensor) -> Tensor:
        return _MARK * x


def _small_layers(before: Sequence[str], down: str, double: bool, generator: torch.Generator) -> dict[str, nn.Linear]:
    small = {}
    for name in (*before, down):
        wide = (10, 6) if name == down else (6, 20 if double else 10)
        layer = nn.Linear(*wide, device="cpu", dtype=torch.float64)
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, dtype=torch.float64, device="cpu", generator=generator))
        small[name] = layer
    return small


def _view(module: nn.Module, small: dict[str, nn.Linear], drops: tuple[str, ...]) -> nn.Module:
    """The block with small layers in place of its own; the block itself is not touched."""
    view: nn.Module = object.__new__(type(module))
    view.__dict__.update(module.__dict__)
    view.__dict__.pop("forward", None)
    view.__dict__["_modules"] = {**module._modules, **small, **{name: _Marked() for name in drops}}
    return view


def _activations(module: nn.Module, functions: list[str]) -> list[tuple[Activation | None, str]]:
    return [(known, "") for known in KNOWN] + [(None, name) for name in functions]


def _orders(before: list[str], double: bool) -> list[tuple[tuple[str, ...], bool, bool]]:
    """(first projections, gated, up_first) that the widths allow."""
    if len(before) == 2:
        return [((before[0], before[1]), True, False), ((before[1], before[0]), True, False)]
    if double:
        return [((before[0],), True, False), ((before[0],), True, True)]
    return [((before[0],), False, False)]


def _compute(
    formula: Formula, small: dict[str, nn.Linear], function: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor | None:
    values = [F.linear(x, small[name].weight, small[name].bias) for name in formula.first]
    if len(values) == 1 and formula.gated:
        values = list(values[0].chunk(2, dim=-1))[:: -1 if formula.up_first else 1]
    try:
        hidden = function(values[0])
    except (RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(hidden, Tensor) or hidden.shape != values[0].shape:
        return None
    down = small[formula.down]
    return F.linear(hidden * values[1] if formula.gated else hidden, down.weight, down.bias)


def _agrees(ours: Tensor | None, theirs: Tensor) -> bool:
    """Equal but for the rounding of double precision, and of constants given with ten digits."""
    return ours is not None and bool((ours - theirs).abs().max() <= 1e-9 * theirs.abs().max())
