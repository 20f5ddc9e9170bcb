"""What a block's own ``forward`` computes, proven by running it.

A class is run once per configuration, in double precision, on small random layers that take the place of its own, with
inputs small and large: a multiplier or a clamp shows, whatever the block's own weights are, quantised, sharded or on
another device. What a forward may depend on besides its layers is part of what a proof is remembered by.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from seqtile.models.find import linear_widths
from seqtile.ops.pointwise import KNOWN, Activation

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


def heard(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward: someone listens to its calls."""
    return any(getattr(module, name) for name in _HOOKS)


def heard_by_others(module: nn.Module) -> bool:
    """The same, but for those who only want to know when it runs: seqtile's own counters."""
    hooks = (hook for name in _HOOKS for hook in getattr(module, name).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("seqtile.") for hook in hooks)


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


_linear: dict[Any, bool] = {}


def is_linear(layer: nn.Module) -> bool:
    """Whether a subclass of ``nn.Linear`` with a forward of its own computes ``x W^T + b``; run once per class."""
    key = (type(layer), type(layer).forward, _plain(vars(layer)))
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


_proven: dict[Any, tuple[Callable[[], object] | None, Formula | str]] = {}


def formula_of(module: nn.Module) -> Formula | str:
    """What the class's ``forward`` computes, proven by a probe; or why that is not known."""
    linears: dict[str, tuple[int, int]] = {}
    functions: list[str] = []
    dropouts: list[str] = []
    for name, child in module._modules.items():
        if child is None:
            continue
        if (widths := linear_widths(child)) is not None:
            linears[name] = widths
        elif heard(child):
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
    functions += [k for k, v in vars(module).items() if callable(v) and k not in ("forward", "extra_repr")]
    drops = tuple(name for name in dropouts if module.training and getattr(module, name).p > 0)
    hidden = next(iter(linears.values()), (0, 0))[0]
    shape = tuple((name, wide[0] == hidden, wide[1] == hidden) for name, wide in linears.items())
    kinds = tuple((name, _identity(getattr(module, name))) for name in functions)
    config = getattr(module, "config", None)
    own = _opaque(module, functions)
    key = (
        type(module),
        type(module).forward,
        _plain(vars(module)),
        drops,
        kinds,
        shape,
        id(config),
        own and id(module),
    )
    try:
        known = _proven.get(key)
    except TypeError:  # an argument bound to an activation cannot be hashed
        return _prove(module, linears, functions, drops)
    if known is None or (known[0] is not None and known[0]() is not (module if own else config)):
        if len(_proven) >= 1024:  # activations made anew for every block
            _proven.clear()
        try:
            alive = weakref.ref(module) if own else None if config is None else weakref.ref(config)
        except TypeError:
            alive = None
        known = _proven[key] = (alive, _prove(module, linears, functions, drops))
    return known[1]


_MODULES_OWN = frozenset(vars(nn.Module())) | {"config", "forward", "extra_repr", "_replicate_for_data_parallel"}


def _opaque(module: nn.Module, functions: Sequence[str] = ()) -> bool:
    """Whether the forward may depend on an attribute that cannot be compared: then one proof holds for one instance.

    What such an attribute holds must not change after the first call.
    """
    attributes = {k: v for k, v in vars(module).items() if k not in _MODULES_OWN and k not in functions}
    if any(not isinstance(v, (int, float, str)) and v is not None for v in attributes.values()):
        return True
    parts = [part for name in functions if isinstance(part := getattr(module, name), nn.Module)]
    # What an activation calls is part of its identity, and so of the key.
    return any(_opaque(part, [k for k, v in vars(part).items() if callable(v)]) for part in parts)


def _plain(values: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers, flags and words among the attributes of an instance."""
    return tuple((k, v) for k, v in values.items() if isinstance(v, (int, float, str)) or v is None)


def _identity(function: Any) -> object:
    """What an activation computes, as far as it can be told: the same for the same activation of another block."""
    if isinstance(function, functools.partial):
        return (_identity(function.func), function.args, *sorted(function.keywords.items()))
    if isinstance(function, nn.Module):
        called = [_identity(v) for k, v in vars(function).items() if callable(v)]
        return (type(function), type(function).forward, _plain(vars(function)), *called)
    code = getattr(function, "__code__", None)
    if code is not None and not function.__closure__ and not function.__defaults__ and not function.__kwdefaults__:
        return code
    return function


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
            if activation is None and not _by_rows(getattr(module, function), runs[0][0]):
                continue
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


def _by_rows(function: Callable[[Tensor], Tensor], rows: Tensor) -> bool:
    """Whether an activation treats each row by itself."""
    rows = rows.reshape(-1, rows.shape[-1])
    try:
        return _agrees(function(rows)[1:3], function(rows[1:3]))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


def _agrees(ours: Tensor | None, theirs: Tensor) -> bool:
    """Equal but for the rounding of double precision, and of constants given with ten digits."""
    return ours is not None and bool((ours - theirs).abs().max() <= 1e-9 * theirs.abs().max())
