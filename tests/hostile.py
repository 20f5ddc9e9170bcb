"""Modules that look like an MLP and are none, or are one only sometimes; and harmless ones that must stay tiled.

Each entry is a small model with one block that a tiler may take for ``down(act(gate(x)) * up(x))`` or
``down(act(up(x)))``. What is hostile about it is said in one line below its name. ``numerics/_judge.py`` runs every
entry untiled and tiled and says what came of it; ``python tests/hostile.py`` prints that as a table.

To add one: subclass :class:`Gated` or :class:`TwoLayers` and decorate the class. A class attribute or a global that the
module changes is reset in its ``__init__``, since every run builds the model again.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import logging
import math
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, INTERMEDIATE = 8, 44  # no product of a batch, a length and the hidden width is 44 or 88

GRADIENTS = "same values, other gradients"
EFFECTS = "side effects"
LENGTH = "training-only or length-only"
NEIGHBOURS = "neighbours without weights"
STALE = "stale proofs"
RARE = "out of range or rare"
COMPLEX = "complex dtypes in tile_module"
FAMILIES = (GRADIENTS, EFFECTS, LENGTH, NEIGHBOURS, STALE, RARE, COMPLEX)
HARMLESS = "harmless"

FORWARD, BACKWARD = "before the next forward", "between forward and backward"
EITHER = "either"


@dataclass(frozen=True)
class Entry:
    """One model of the catalogue, and how it is run.

    Attributes:
        name: what it is, in words.
        family: one of ``FAMILIES``, or ``HARMLESS``.
        build: makes the model, with the global random state as the only input.
        shapes: shape of the input of each training step.
        block: qualified name of the block in question, "" where it is the whole module.
        dim: token dimension for ``seqtile.tile_module``; None: ``seqtile.apply``.
        tile: tokens per tile.
        inputs: makes the inputs of one step from its shape and generator.
        scales: factor on the input of each step.
        upstreams: factor on the gradient of the output of each step.
        seeds: seed of every global random generator, per step.
        change: what happens to the model after it was tiled.
        when: ``FORWARD``: before the forward of the second step; ``BACKWARD``: after it, before the backward.
        path: ``path`` of ``seqtile.apply`` and ``seqtile.tile_module``.
        state: what else than buffers and attributes can be observed.
        judge: ``"exact"``: everything equal to the untiled run; ``"random"``: what does not depend on the numbers drawn
            (which tokens share a draw, mean and spread, the gradient at a fixed seed); ``"sharing"``: the first only.
        tolerance: largest error of a tensor, relative to its largest element.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((1, 7, HIDDEN), (3, 20, HIDDEN))
    block: str = "layers.1.mlp"
    dim: int | None = None
    tile: int = 3
    inputs: Callable[[tuple[int, ...], torch.Generator], tuple[Tensor, ...]] | None = None
    scales: tuple[float, float] = (1.0, 1.0)
    upstreams: tuple[float, float] = (1.0, 1.0)
    seeds: tuple[int, int] = (1, 2)
    change: Callable[[Any], None] | None = None
    when: str = FORWARD
    path: str = "auto"
    state: Callable[[Any], Any] | None = None
    judge: str = "exact"
    tolerance: float = 1e-5


CATALOGUE: list[Entry] = []


def entries(family: str) -> list[Entry]:
    return [entry for entry in CATALOGUE if entry.family == family]


# ---------------------------------------------------------------------------------------------------------------------
# What the models are made of
# ---------------------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A gated MLP; most entries are one with another forward."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=bias)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=bias)

    def hidden(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.hidden(x))


class TwoLayers(nn.Module):
    """A plain MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc1(x))

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.hidden(x))


class Layer(nn.Module):
    """Norm, MLP, residual."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN), mlp

    def forward(self, hidden_states: Tensor) -> Any:
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class LayerWithBefore(nn.Module):
    """A module without weights right before the MLP."""

    def __init__(self, before: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = before, Gated()

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class LayerWithAfter(nn.Module):
    """A module without weights right after the MLP."""

    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.RMSNorm(HIDDEN), Gated(), after

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return residual + hidden_states


class Model(nn.Module):
    """A layer with a plain gated MLP, then the layers in question."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(Gated()), *layers])

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Direct(nn.Module):
    """The block without a norm before it, so that it sees the numbers of the input; beside it a plain gated MLP."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.plain = mlp, Gated()

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x), self.plain(torch.tanh(x))


def in_layer(made: type) -> nn.Module:
    return Model(Layer(made()))


def direct(made: type) -> nn.Module:
    return Direct(made())


def before_mlp(made: type) -> nn.Module:
    return Model(LayerWithBefore(made()))


def after_mlp(made: type) -> nn.Module:
    return Model(LayerWithAfter(made()))


def as_layer(made: type) -> nn.Module:
    return Model(made())


def itself(made: type) -> nn.Module:
    return made()


_EACH_TIME = {
    FORWARD: ((FORWARD, "auto"),),
    BACKWARD: ((BACKWARD, "auto"), (BACKWARD, "generic")),
    EITHER: ((FORWARD, "auto"), (BACKWARD, "auto"), (BACKWARD, "generic")),
}


def entry(
    family: str, build: Callable[[type], nn.Module] = in_layer, when: str = FORWARD, **fields: Any
) -> Callable[[type], type]:
    """Register the decorated class; a change between forward and backward is one for each operator."""

    def register(made: type) -> type:
        block = "mlp" if build is direct else "" if build is itself else "layers.1.mlp"
        words = re.sub(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z0-9])(?=[A-Z][a-z])", " ", made.__name__).lower()
        for time_of_change, path in _EACH_TIME[when]:
            name = f"{words}, {time_of_change}" if fields.get("change") else words
            name += ", generic operator" if path == "generic" else ""
            more = {"block": block, "when": time_of_change, "path": path, **fields}
            CATALOGUE.append(Entry(name, family, functools.partial(build, made), **more))
        return made

    return register


def mlp(model: Any) -> Any:
    """The block in question of a model made by ``in_layer``."""
    return model.layers[1].mlp


LONG = dict(shapes=((1, 7, HIDDEN), (2, 600, HIDDEN)))
VERY_LONG = dict(shapes=((1, 7, HIDDEN), (1, 5100, HIDDEN)), tile=1000)


# ---------------------------------------------------------------------------------------------------------------------
# Same values, other gradients
# ---------------------------------------------------------------------------------------------------------------------


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


class _UnitGradient(torch.autograd.Function):
    """The gradient is divided by its norm over all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class _SiluPassingGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _WholeGated(torch.autograd.Function):
    """The gated MLP with a backward of its own, which leaves the gate out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate, up, down)
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, gate, up, down = ctx.saved_tensors
        share = F.silu(x @ gate.t())
        inner = (grad @ down) * share
        rows = x.flatten(0, -2)
        grad_up = inner.flatten(0, -2).t() @ rows
        grad_down = grad.flatten(0, -2).t() @ (share * (x @ up.t())).flatten(0, -2)
        return inner @ up, torch.zeros_like(gate), grad_up, grad_down


@entry(GRADIENTS)
class DetachedGate(Gated):
    """The gate is a constant in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)).detach() * self.up_proj(x))


@entry(GRADIENTS)
class DataOfUp(Gated):
    """``.data`` instead of ``.detach()``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x).data)


@entry(GRADIENTS)
class DetachedInputOfGate(Gated):
    """The gate's weight is trained, its input gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x.detach())) * self.up_proj(x))


@entry(GRADIENTS)
class DetachedWeight(Gated):
    """A weight that is used without being trained."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * F.linear(x, self.up_proj.weight.detach()))


@entry(GRADIENTS)
class NoGradAroundUp(Gated):
    """``no_grad`` around one projection."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            up = self.up_proj(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * up)


@entry(GRADIENTS)
class NoGradDecorator(TwoLayers):
    """Half of the hidden features come from a method that is decorated with ``no_grad``."""

    @torch.no_grad()
    def frozen(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc1(x))[..., : INTERMEDIATE // 2]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.cat([self.frozen(x), F.gelu(self.fc1(x))[..., INTERMEDIATE // 2 :]], dim=-1))


@entry(GRADIENTS)
class GradientScaledByFunction(Gated):
    """A custom function passes half of the gradient on."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(_ScaledGradient.apply(self.hidden(x), 0.5))


@entry(GRADIENTS)
class GradientScaledByDetach(Gated):
    """A tenth of the gradient, by arithmetic on a detached copy."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(0.1 * h + 0.9 * h.detach())


@entry(GRADIENTS)
class GradientReversed(TwoLayers):
    """Gradient reversal, as in domain adaptation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(_ScaledGradient.apply(self.fc1(x), -1.0)))


@entry(GRADIENTS)
class StraightThroughRelu(TwoLayers):
    """A relu whose gradient is the identity's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        return self.fc2(h + (torch.relu(h) - h).detach())


class SiluPassing(nn.Module):
    """silu forward, identity backward."""

    def forward(self, x: Tensor) -> Tensor:
        return _SiluPassingGradients.apply(x)


@entry(GRADIENTS)
class ActivationOfACustomFunction(Gated):
    """The activation is a child with the values of silu and a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = SiluPassing()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@entry(GRADIENTS)
class FunctionAroundTheBlock(Gated):
    """The whole block is one custom function that leaves the gate's gradient out."""

    def forward(self, x: Tensor) -> Tensor:
        return _WholeGated.apply(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)


@entry(GRADIENTS)
class GradientNormalisedOverTokens(Gated):
    """A custom function after the block divides the gradient by its norm over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return _UnitGradient.apply(super().forward(x))


@entry(GRADIENTS)
class HookHalvesTheGradient(Gated):
    """A hook on an inner tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return self.down_proj(h)


@entry(GRADIENTS)
class HookClipsByTheNormOverTokens(Gated):
    """A hook on an inner tensor that clips by the norm over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * (0.1 / grad.norm()).clamp(max=1.0))
        return self.down_proj(h)


@entry(GRADIENTS)
class HookAveragesTheGradient(TwoLayers):
    """A hook on the output that gives every token the mean gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad.flatten(0, -2).mean(0).expand_as(grad))
        return y


@entry(GRADIENTS)
class BackwardHookOnTheActivation(Gated):
    """A full backward hook of a child replaces the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.act_fn.register_full_backward_hook(lambda module, given, got: (given[0] * 0.25,))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@entry(GRADIENTS)
class BackwardHookOnTheBlock(Gated):
    """A full backward hook of the block itself divides by the norm over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda module, given, got: (given[0] / given[0].norm(),))


@entry(GRADIENTS)
class OtherValuesWithoutGradients(TwoLayers):
    """Computes something else where gradients are off, as a tiled forward's may be."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if torch.is_grad_enabled() else 0.5)


@entry(GRADIENTS)
class OtherValuesForALeaf(Gated):
    """Computes something else where its input is no intermediate of a graph."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.grad_fn is not None else 0.5)


@entry(GRADIENTS)
class GradientInsideTheForward(Gated):
    """Adds the gradient of its own hidden features, differentiable once more."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if not x.requires_grad:
            return self.down_proj(h)
        (slope,) = torch.autograd.grad(h.pow(2).sum(), x, create_graph=True)
        return self.down_proj(h) + 0.1 * slope


@entry(GRADIENTS)
class WeightWithAScaledGradient(Gated):
    """A weight learns at a tenth of the rate, by a custom function on the weight."""

    def forward(self, x: Tensor) -> Tensor:
        up = F.linear(x, _ScaledGradient.apply(self.up_proj.weight, 0.1))
        return self.down_proj(F.silu(self.gate_proj(x)) * up)


@entry(GRADIENTS)
class EverySecondTokenIsDetached(TwoLayers):
    """Tokens at odd places get no gradient; the values are the plain MLP's."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        odd = (torch.arange(h.shape[-2]) % 2 == 1)[:, None]
        return self.fc2(torch.where(odd, h.detach(), h))


@entry(GRADIENTS)
class DetachedMaximum(Gated):
    """A scale from all tokens that has the value one and a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        peak = h.abs().max() + 1.0
        return self.down_proj(h * (peak / peak.detach()))


# ---------------------------------------------------------------------------------------------------------------------
# Side effects
# ---------------------------------------------------------------------------------------------------------------------

CALLS = 0
LOSSES: list[Tensor] = []


class ModelWithLoss(Model):
    """Returns what the block left in ``aux`` besides the hidden states."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, mlp(self).aux


class ModelThatCollects(Model):
    """Returns the sum of what the blocks left in a global list."""

    def forward(self, x: Tensor) -> Any:
        LOSSES.clear()
        y = super().forward(x)
        return (y, torch.stack(LOSSES).sum()) if LOSSES else y


def with_loss(made: type) -> nn.Module:
    return ModelWithLoss(Layer(made()))


def that_collects(made: type) -> nn.Module:
    return ModelThatCollects(Layer(made()))


@entry(EFFECTS, with_loss)
class AuxiliaryLossInAnAttribute(Gated):
    """An auxiliary loss over all tokens, read by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        self.aux = h.pow(2).mean()
        return self.down_proj(h)


@entry(EFFECTS, that_collects)
class AuxiliaryLossInAGlobalList(Gated):
    """An auxiliary loss appended to a list of the module's file."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        LOSSES.append(h.abs().mean())
        return self.down_proj(h)


@entry(EFFECTS)
class CounterInAnAttribute(Gated):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@entry(EFFECTS)
class ShapesInAList(TwoLayers):
    """Notes the shapes that it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return super().forward(x)


@entry(EFFECTS)
class CounterInADict(Gated):
    """Counts tokens in a nested dict."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = {"tokens": {"seen": 0, "calls": 0}}

    def forward(self, x: Tensor) -> Tensor:
        self.statistics["tokens"]["calls"] += 1
        self.statistics["tokens"]["seen"] += x.shape[:-1].numel()
        return super().forward(x)


@entry(EFFECTS)
class LastNormsInADeque(Gated):
    """Keeps the norms of the last outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: collections.deque[float] = collections.deque(maxlen=4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.norms.append(float(y.detach().norm()))
        return y


@entry(EFFECTS)
class CounterInABuffer(Gated):
    """Counts its calls in a buffer that is saved with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return super().forward(x)


@entry(EFFECTS, state=lambda model: CALLS)
class CounterInAGlobal(Gated):
    """Counts its calls in a global of its file."""

    def __init__(self) -> None:
        global CALLS
        super().__init__()
        CALLS = 0

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().forward(x)


@entry(EFFECTS)
class CounterOfTheClass(Gated):
    """Counts the calls of every instance."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x)


def counting_activation() -> tuple[Callable[[Tensor], Tensor], Callable[[], int]]:
    calls = 0

    def activation(h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.silu(h)

    return activation, lambda: calls


@entry(EFFECTS, state=lambda model: mlp(model).count())
class CounterInAClosure(Gated):
    """The activation is a closure that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn, self.count = counting_activation()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@entry(EFFECTS)
class CounterOfAnIterator(Gated):
    """Takes the next number of an iterator at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        next(self.numbers)
        return super().forward(x)


@entry(EFFECTS, state=lambda model: random.getstate())
class DrawsANumberItDoesNotUse(Gated):
    """Moves Python's random generator."""

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        return super().forward(x)


@entry(EFFECTS)
class MovingAverageInABuffer(Gated):
    """An exponential moving average of the activations over all tokens, not used in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(INTERMEDIATE))

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            self.average.mul_(0.9).add_(h.detach().flatten(0, -2).mean(0), alpha=0.1)
        return self.down_proj(h)


@entry(EFFECTS)
class MovingAverageThatIsUsed(TwoLayers):
    """Subtracts a running mean that each training step moves; a plain attribute, no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x) - self.mean
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * float(h.detach().mean())
        return self.fc2(h)


@entry(EFFECTS)
class LastOutputKept(Gated):
    """Keeps its last output, for distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = y.detach()
        return y


@entry(EFFECTS)
class SpectralNormByHook(Gated):
    """One power iteration in each training forward, by a hook of ``torch.nn.utils``."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still everywhere
            self.up_proj = nn.utils.spectral_norm(self.up_proj)


@entry(EFFECTS)
class SpectralNormParametrized(Gated):
    """One power iteration each time that the weight is read in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.utils.parametrizations.spectral_norm(self.up_proj)


@entry(EFFECTS)
class WeightNormByHook(TwoLayers):
    """A hook computes the weight from two parameters before each call."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.fc1 = nn.utils.weight_norm(self.fc1)


@entry(EFFECTS)
class WeightShrinksAtEachCall(Gated):
    """Each training forward multiplies a weight by 0.9."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.up_proj.weight.data.mul_(0.9)
        return super().forward(x)


class LayerThatReadsTheNorm(Layer):
    """The residual is the norm's output, which the block was given too."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = self.norm(hidden_states)
        output = self.mlp(normed)
        return normed + output


@entry(EFFECTS, lambda made: Model(LayerThatReadsTheNorm(made())))
class WritesIntoItsInput(TwoLayers):
    """Doubles its input in place; the layer reads it afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        return super().forward(x)


@entry(EFFECTS, as_layer)
class ParentSetsTheScale(nn.Module):
    """One block is called three times with a scale that the layer sets as an attribute before each call."""

    class Scaled(Gated):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.hidden(x) * self.scale)

    def __init__(self) -> None:
        super().__init__()
        self.mlp = self.Scaled()

    def forward(self, x: Tensor) -> Tensor:
        for scale in (1.0, 0.5, -0.25):
            self.mlp.scale = scale
            x = x + self.mlp(x)
        return x


@entry(EFFECTS)
class HookThatNotesShapes(Gated):
    """A hook on an inner layer appends to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []
        self.up_proj.register_forward_hook(lambda module, args, output: self.seen.append(tuple(output.shape)))


@entry(EFFECTS)
class HookThatNotesItsActivation(Gated):
    """A hook on the activation keeps the share of zeros over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn, self.shares = nn.ReLU(), []
        self.act_fn.register_forward_hook(lambda module, args, output: self.shares.append(float((output == 0).sum())))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@entry(EFFECTS)
class HookThatChangesValues(Gated):
    """A hook on an inner layer replaces its output in training."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj.register_forward_hook(lambda module, args, output: output * (1.5 if module.training else 1.0))


@entry(EFFECTS)
class HookThatMixesTokens(Gated):
    """A hook before an inner layer subtracts the mean over tokens in training."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj.register_forward_pre_hook(
            lambda module, args: (args[0] - args[0].mean(-2, keepdim=True) if module.training else args[0],)
        )


@entry(EFFECTS)
class WritesIntoASharedConfig(Gated):
    """Tells other modules about its last call through an object that they share."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_act="silu", last=SimpleNamespace(tokens=0, calls=0))

    def forward(self, x: Tensor) -> Tensor:
        self.config.last.tokens = x.shape[:-1].numel()
        self.config.last.calls += 1
        return super().forward(x)


# ---------------------------------------------------------------------------------------------------------------------
# Training-only or length-only behaviour
# ---------------------------------------------------------------------------------------------------------------------


@entry(LENGTH)
class BatchStatisticsInTraining(Gated):
    """Centres its hidden features over the batch in training."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            h = h - h.flatten(0, -2).mean(0)
        return self.down_proj(h)


@entry(LENGTH)
class RunningStatisticsInTraining(TwoLayers):
    """Batch norm by hand, with running statistics in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.running = [torch.zeros(INTERMEDIATE), torch.ones(INTERMEDIATE)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            rows = h.flatten(0, -2)
            mean, spread = rows.mean(0), rows.var(0, unbiased=False)
            self.running = [0.9 * self.running[0] + 0.1 * mean.detach(), 0.9 * self.running[1] + 0.1 * spread.detach()]
        else:
            mean, spread = self.running
        return self.fc2((h - mean) * (spread + 1e-5).rsqrt())


@entry(LENGTH)
class BatchNormInside(Gated):
    """``nn.BatchNorm1d`` between the linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(INTERMEDIATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.batch_norm(self.hidden(x).transpose(1, 2)).transpose(1, 2))


@entry(LENGTH)
class BatchNormWithoutStatistics(Gated):
    """``nn.BatchNorm1d`` without weights or buffers, used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(INTERMEDIATE, affine=False, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.training:
            h = self.batch_norm(h.reshape(-1, INTERMEDIATE)).reshape(h.shape)
        return self.down_proj(h)


@entry(LENGTH)
class CapacityInTraining(Gated):
    """In training only half of the tokens pass, those with the largest score of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            return y
        score = x.sum(-1).flatten()
        capacity = math.ceil(0.5 * score.numel())
        chosen = torch.zeros_like(score).scatter(0, score.topk(capacity).indices, 1.0)
        return y * chosen.reshape(*x.shape[:-1], 1)


@entry(LENGTH)
class CapacityByPosition(TwoLayers):
    """Tokens beyond the capacity, which grows with the number of tokens, are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, HIDDEN)
        capacity = max(8, int(1.25 * len(rows) / 2))
        kept = torch.arange(len(rows)) < capacity
        return (super().forward(rows) * kept[:, None]).reshape(x.shape)


@entry(LENGTH, judge="random")
class NoisePerToken(Gated):
    """Noise of each token's own in training; may be tiled."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h + 0.5 * torch.randn_like(h) if self.training else h)


@entry(LENGTH, judge="random")
class NoiseSharedByAllTokens(Gated):
    """One draw for all tokens in training."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h + 0.5 * torch.randn(INTERMEDIATE, dtype=h.dtype) if self.training else h)


@entry(LENGTH, judge="random")
class NoisePerSample(Gated):
    """One draw for each sequence in training."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h + 0.5 * torch.randn_like(h[:, :1]) if self.training else h)


@entry(LENGTH, judge="random")
class NoisePerPosition(TwoLayers):
    """One draw for each position, the same in every sequence."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.fc2(h * torch.rand_like(h[:1]).add(0.5) if self.training else h)


@entry(LENGTH, judge="random")
class ScaleDrawnByPython(Gated):
    """One number of Python's generator for all tokens in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (random.uniform(0.5, 1.5) if self.training else 1.0)


@entry(LENGTH)
class DetachedInTraining(Gated):
    """The gate is detached in training only."""

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate_proj(x))
        return self.down_proj((gate.detach() if self.training else gate) * self.up_proj(x))


@entry(LENGTH)
class ShiftedInTraining(TwoLayers):
    """Each token sees the one before it, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.5 * x.roll(1, dims=-2) if self.training else x)


@entry(LENGTH)
class ModeOfAChild(Gated):
    """Behaviour that depends on the mode of a child without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.switch = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h.cumsum(-2) if self.switch.training else h)


@entry(LENGTH)
class WindowPast16(Gated):
    """Subtracts a mean over tokens from 17 tokens on."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h - h.mean(-2, keepdim=True) if x.shape[-2] > 16 else h)


@entry(LENGTH, **LONG)
class WindowPast512(Gated):
    """Adds the first token from 513 tokens on."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h + h[:, :1] if h.shape[1] > 512 else h)


@entry(LENGTH, **VERY_LONG)
class WindowPast5000(Gated):
    """Divides by the number of tokens from 5001 on."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (5000 / x.shape[-2]) if x.shape[-2] > 5000 else y


@entry(LENGTH, **LONG)
class WindowBySlicing(Gated):
    """Tokens from the 513th on are halved; no branch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(torch.cat([h[:, :512], h[:, 512:] * 0.5], dim=1))


@entry(LENGTH, **LONG)
class WindowByAddingASlice(TwoLayers):
    """Each token sees the one 512 places before it; no branch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.fc2(h + F.pad(h, (0, 0, 512, 0))[:, : h.shape[1]])


@entry(LENGTH)
class WindowsByPadding(Gated):
    """Pads to whole windows of 16 tokens and adds the sum of the windows before."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        count = h.shape[1]
        windows = F.pad(h, (0, 0, 0, -count % 16)).unflatten(1, (-1, 16))
        windows = windows + 0.1 * (windows.cumsum(1) - windows)
        return self.down_proj(windows.flatten(1, 2)[:, :count])


@entry(LENGTH)
class WindowsByUnfold(TwoLayers):
    """A maximum over windows of 16 tokens, which one window of 8 tokens does not fill."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if h.shape[-2] < 16:
            return self.fc2(h)
        peaks = h.unfold(-2, 16, 4).amax((-1, -3))
        return self.fc2(h / (1.0 + peaks.abs().unsqueeze(-2)))


@entry(LENGTH, **LONG)
class BandMatrixPast512(Gated):
    """A triangular matrix that is zero up to 512 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        far = torch.ones(h.shape[-2], h.shape[-2]).tril(-512)
        return self.down_proj(h + 0.1 * far @ h)


@entry(LENGTH, **LONG)
class NumberOfWindows(Gated):
    """Divides by ``ceil(tokens / 512)``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / math.ceil(x.shape[-2] / 512)


@entry(LENGTH)
class LengthAsAnInt(Gated):
    """Compares ``int(tokens)`` with a number."""

    def forward(self, x: Tensor) -> Tensor:
        length = int(x.shape[-2])
        return super().forward(x) * (0.5 if length >= 18 else 1.0)


@entry(LENGTH)
class LengthModuloEight(Gated):
    """Another scale where the length is 4 modulo 8."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.shape[-2] % 8 == 4 else 1.0)


@entry(LENGTH)
class ExactLength(TwoLayers):
    """A special case for 20 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(-2) if x.shape[-2] == 20 else super().forward(x)


@entry(LENGTH, **LONG)
class PositionsPastTheTable(Gated):
    """Scales by a position that is clamped to zero for the first 512 tokens."""

    def forward(self, x: Tensor) -> Tensor:
        far = (torch.arange(x.shape[-2]) - 512).clamp(min=0)
        return super().forward(x) * (1.0 + 0.01 * far[:, None])


@entry(LENGTH, **LONG)
class ChunksOf512(TwoLayers):
    """Works in chunks of 512 tokens and hands the last token of each to the next."""

    def forward(self, x: Tensor) -> Tensor:
        carried, outputs = torch.zeros_like(x[:, :1]), []
        for chunk in x.split(512, dim=1):
            outputs.append(super().forward(chunk + carried))
            carried = chunk[:, -1:]
        return torch.cat(outputs, dim=1)


@entry(LENGTH, shapes=((1, 7, HIDDEN), (1, 120, HIDDEN)))
class LoopPast100(Gated):
    """A recurrence over the tokens after the first hundred."""

    def forward(self, x: Tensor) -> Tensor:
        steps = list(super().forward(x).unbind(-2))
        for position in range(100, len(steps)):
            steps[position] = steps[position] + 0.5 * steps[position - 1]
        return torch.stack(steps, dim=-2)


@entry(LENGTH)
class NumberOfElements(Gated):
    """Compares ``numel()`` with a number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.numel() > 20 * HIDDEN else 1.0)


@entry(LENGTH)
class BatchAboveOne(Gated):
    """Subtracts the mean over the batch where there is more than one sequence."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h - h.mean(0, keepdim=True) if x.dim() == 3 and x.shape[0] > 1 else h)


@entry(LENGTH, tile=1, path="generic")
class OneTokenIsDecoding(Gated):
    """A single token is taken for a step of decoding; a tile may be one token long."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h * 2.0 if x.shape[-2] == 1 else h)


@entry(LENGTH)
class LengthUnderASquareRoot(TwoLayers):
    """Divides by the square root of the length in training."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (math.sqrt(x.shape[-2]) if self.training else 1.0)


@entry(LENGTH, itself, dim=1, shapes=((1, 7, HIDDEN), (2, 60, HIDDEN)))
class DilatedConvolution(nn.Module):
    """A causal convolution over tokens with steps of 16, between linear layers, in ``tile_module``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.conv = nn.Conv1d(INTERMEDIATE, INTERMEDIATE, 2, dilation=16, groups=INTERMEDIATE)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).transpose(1, 2)
        return self.down(self.conv(F.pad(h, (16, 0))).transpose(1, 2))


@entry(LENGTH, itself, dim=-1, shapes=((1, HIDDEN, 7), (1, HIDDEN, 900)))
class ConvolutionOverTokens(nn.Module):
    """Features first, steps of 700 tokens, padded on both sides, in ``tile_module``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, dilation=700, padding=700)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x))


@entry(LENGTH, itself, dim=1)
class CenteredInTrainingInTileModule(nn.Sequential):
    """A norm over tokens that is the identity in evaluation mode, in ``tile_module``."""

    class Centre(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(1, keepdim=True) if self.training else x

    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, INTERMEDIATE), nn.GELU(), self.Centre(), nn.Linear(INTERMEDIATE, HIDDEN))


@entry(LENGTH, itself, dim=1, shapes=((1, 7, HIDDEN), (2, 60, HIDDEN)))
class PoolingOverTokens(nn.Module):
    """An average over 32 tokens where there are as many, in ``tile_module``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        coarse = F.avg_pool1d(F.pad(y, (0, 0, 31, 0)).transpose(1, 2), 32, 1).transpose(1, 2)
        return y + coarse * (torch.arange(x.shape[1]) >= 31)[:, None]


# ---------------------------------------------------------------------------------------------------------------------
# Neighbours without weights
# ---------------------------------------------------------------------------------------------------------------------


def drop_path(x: Tensor, probability: float, training: bool) -> Tensor:
    """timm's: a whole sequence is dropped, or none of it."""
    if probability == 0.0 or not training:
        return x
    keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - probability)
    return x * keep / (1 - probability)


@entry(NEIGHBOURS, after_mlp, judge="random")
class StochasticDepth(nn.Module):
    """Drops whole sequences."""

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, 0.5, self.training)


@entry(NEIGHBOURS, after_mlp, judge="random")
class StochasticDepthOfTheBatch(nn.Module):
    """Drops the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 * float(torch.rand(()) < 0.5) if self.training else x


@entry(NEIGHBOURS, as_layer, judge="random")
class StochasticDepthByFunction(nn.Module):
    """A function with a probability and a mode, called like a functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.dropout = nn.RMSNorm(HIDDEN), Gated(), 0.5

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = drop_path(hidden_states, self.dropout, self.training)
        return residual + hidden_states


@entry(NEIGHBOURS, after_mlp, judge="random")
class SpatialDropout(nn.Module):
    """Drops features of a whole sequence, as ``nn.Dropout2d`` does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout1d(x.transpose(1, 2), 0.5, self.training).transpose(1, 2)


@entry(NEIGHBOURS, after_mlp, judge="random")
class DropoutWithOneMask(nn.Dropout):
    """A subclass of ``nn.Dropout`` that uses one mask for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(x.new_ones(x.shape[-1]), self.p, self.training)


@entry(NEIGHBOURS, after_mlp, judge="random")
class NoisePerSequence(nn.Module):
    """Multiplies each sequence by a number of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + torch.randn_like(x[..., :1, :1])) if self.training else x


class _BatchNorm(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(HIDDEN, affine=False, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, HIDDEN)).reshape(x.shape)


@entry(NEIGHBOURS, before_mlp)
class BatchNormWithoutWeightsBefore(_BatchNorm):
    """Batch norm without weights before the MLP."""


@entry(NEIGHBOURS, after_mlp)
class BatchNormWithoutWeightsAfter(_BatchNorm):
    """Batch norm without weights after the MLP."""


@entry(NEIGHBOURS, after_mlp)
class BatchNormInAModuleAfter(nn.Module):
    """A module without weights that holds a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _BatchNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@entry(NEIGHBOURS, before_mlp)
class BatchNormWithStatisticsBefore(nn.BatchNorm1d):
    """A subclass of ``nn.BatchNorm1d`` without weights, with running statistics."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view(x.shape)


class _TokenNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-2, keepdim=True)) / (x.var(-2, keepdim=True, unbiased=False) + 0.1).sqrt()


@entry(NEIGHBOURS, before_mlp)
class NormOverTokensBefore(_TokenNorm):
    """A norm over tokens without weights before the MLP."""


@entry(NEIGHBOURS, after_mlp)
class NormOverTokensAfter(_TokenNorm):
    """A norm over tokens without weights after the MLP."""


@entry(NEIGHBOURS, before_mlp)
class InstanceNormBefore(nn.Module):
    """Instance norm: over the tokens of each sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(x.transpose(1, 2)).transpose(1, 2)


@entry(NEIGHBOURS, after_mlp)
class GroupNormAfter(nn.Module):
    """Group norm over features and tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.transpose(1, 2), 2).transpose(1, 2)


@entry(NEIGHBOURS, before_mlp, shapes=((2, 7, HIDDEN), (3, 7, HIDDEN)))
class LayerNormOverTokensToo(nn.LayerNorm):
    """``nn.LayerNorm`` over tokens and features."""

    def __init__(self) -> None:
        super().__init__((7, HIDDEN), elementwise_affine=False)


@entry(NEIGHBOURS, before_mlp)
class NormOfTheWholeBatch(nn.Module):
    """Divides by the root mean square of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.pow(2).mean().sqrt()


@entry(NEIGHBOURS, before_mlp)
class NormOverTokensInTraining(nn.Module):
    """A norm over features in evaluation mode, over tokens too in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean((-2, -1) if self.training else -1, keepdim=True) + 1e-6).rsqrt()


@entry(NEIGHBOURS, after_mlp)
class CumulativeMeanAfter(nn.Module):
    """The mean of the tokens so far."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(-2) / torch.arange(1, x.shape[-2] + 1)[:, None]


@entry(NEIGHBOURS, after_mlp)
class SoftmaxOverTokensAfter(nn.Module):
    """A softmax over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-2)


@entry(NEIGHBOURS, after_mlp)
class DividedByTheLengthAfter(nn.Module):
    """Divides by the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.shape[-2]


@entry(NEIGHBOURS, after_mlp)
class CounterAfter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@entry(NEIGHBOURS, after_mlp)
class GradientReversalAfter(nn.Module):
    """Reverses the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return _ScaledGradient.apply(x, -1.0)


@entry(NEIGHBOURS, after_mlp)
class GradientNormalisationAfter(nn.Module):
    """Divides the gradient by its norm over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return _UnitGradient.apply(x)


@entry(NEIGHBOURS, after_mlp)
class StopsGradientsAfter(nn.Module):
    """Detaches in training."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() if self.training else x


# ---------------------------------------------------------------------------------------------------------------------
# Stale proofs
# ---------------------------------------------------------------------------------------------------------------------

FACTOR = 1.0
SETTINGS: dict[str, Any] = {"scales": [1.0, 1.0]}
TABLE = np.ones(2)


class _Scaled(Gated):
    """Multiplied by ``self.factor()``."""

    def factor(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x) * self.factor())


@entry(STALE, change=lambda model: setattr(mlp(model), "scale", 3.0), when=EITHER)
class NumberInAnAttribute(_Scaled):
    """A number on the instance."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def factor(self) -> float:
        return self.scale


@entry(STALE, change=lambda model: setattr(type(mlp(model)), "scale", 3.0), when=EITHER)
class NumberInAClassAttribute(_Scaled):
    """A number on the class."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        type(self).scale = 1.0

    def factor(self) -> float:
        return self.scale


class ScaledBase(_Scaled):
    scale = 1.0


@entry(STALE, change=lambda model: setattr(ScaledBase, "scale", 3.0), when=EITHER)
class NumberInABaseClass(ScaledBase):
    """A number on a class that the block's class is derived from."""

    def __init__(self) -> None:
        super().__init__()
        ScaledBase.scale = 1.0

    def factor(self) -> float:
        return self.scale


@entry(STALE, change=lambda model: mlp(model).options.update(scale=3.0), when=EITHER)
class EntryOfADict(_Scaled):
    """A dict on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.options = {"scale": 1.0}

    def factor(self) -> float:
        return self.options["scale"]


@entry(STALE, change=lambda model: mlp(model).scales.__setitem__(1, 3.0), when=EITHER)
class EntryOfAList(_Scaled):
    """A list on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = [1.0, 1.0]

    def factor(self) -> float:
        return self.scales[1]


@entry(STALE, change=lambda model: globals().update(FACTOR=3.0), when=EITHER)
class GlobalOfTheFile(_Scaled):
    """A number in the file of the class."""

    def __init__(self) -> None:
        global FACTOR
        super().__init__()
        FACTOR = 1.0

    def factor(self) -> float:
        return FACTOR


@entry(STALE, change=lambda model: SETTINGS["scales"].__setitem__(0, 3.0), when=EITHER)
class NestedInAGlobal(_Scaled):
    """A list in a dict in the file of the class."""

    def __init__(self) -> None:
        super().__init__()
        SETTINGS["scales"] = [1.0, 1.0]

    def factor(self) -> float:
        return SETTINGS["scales"][0]


@entry(STALE, change=lambda model: TABLE.__setitem__(1, 3.0), when=EITHER)
class EntryOfAnArray(_Scaled):
    """An array of NumPy's in the file of the class."""

    def __init__(self) -> None:
        super().__init__()
        TABLE[:] = 1.0

    def factor(self) -> float:
        return float(TABLE[1])


def scale_in_a_closure() -> tuple[Callable[[], float], Callable[[float], None]]:
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda: scale, change


@entry(STALE, change=lambda model: mlp(model).rescale(3.0), when=EITHER)
class CellOfAClosure(_Scaled):
    """A variable of a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.rescale = scale_in_a_closure()  # type: ignore[method-assign]


def scaled_by_default(h: Tensor, scale: float = 1.0) -> Tensor:
    return h * scale


@entry(STALE, change=lambda model: setattr(scaled_by_default, "__defaults__", (3.0,)), when=EITHER)
class DefaultOfAFunction(Gated):
    """The default of a function that it calls."""

    def __init__(self) -> None:
        super().__init__()
        scaled_by_default.__defaults__ = (1.0,)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(scaled_by_default(self.hidden(x)))


@entry(STALE, change=lambda model: setattr(mlp(model).config.inner, "scale", 3.0), when=EITHER)
class NestedConfig(_Scaled):
    """A number in an object in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_act="silu", inner=SimpleNamespace(scale=1.0))

    def factor(self) -> float:
        return self.config.inner.scale


@entry(STALE, change=lambda model: setattr(mlp(model), "scale", torch.tensor(3.0)), when=EITHER)
class TensorInAnAttribute(_Scaled):
    """A tensor that is no buffer, replaced by another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.tensor(1.0)

    def factor(self) -> Tensor:
        return self.scale


@entry(STALE, change=lambda model: mlp(model).scale.fill_(3.0))
class BufferFilled(_Scaled):
    """A buffer that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def factor(self) -> Tensor:
        return self.scale


class Beta(nn.Module):
    """swish with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


class _WithActivation(Gated):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@entry(STALE, change=lambda model: setattr(mlp(model).act_fn, "beta", 3.0), when=EITHER)
class AttributeOfAChild(_WithActivation):
    """A number on the activation."""

    def __init__(self) -> None:
        super().__init__(Beta())


@entry(STALE, change=lambda model: setattr(mlp(model), "act_fn", nn.Tanh()), when=EITHER)
class ActivationSwapped(_WithActivation):
    """Another activation in its place."""

    def __init__(self) -> None:
        super().__init__(nn.SiLU())


@entry(STALE, change=lambda model: mlp(model).act_fn.keywords.update(negative_slope=0.9), when=EITHER)
class KeywordOfAPartial(_WithActivation):
    """A keyword of a ``functools.partial``."""

    def __init__(self) -> None:
        super().__init__(functools.partial(F.leaky_relu, negative_slope=0.1))


@entry(STALE, change=lambda model: setattr(mlp(model).act_fn, "negative_slope", 0.9), when=EITHER)
class SlopeOfTorchsOwnActivation(_WithActivation):
    """An attribute of ``nn.LeakyReLU``."""

    def __init__(self) -> None:
        super().__init__(nn.LeakyReLU(0.1))


def _replace_down(model: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    layer = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
    layer.weight.data.copy_(torch.randn(HIDDEN, INTERMEDIATE, generator=generator))
    mlp(model).down_proj = layer


@entry(STALE, change=_replace_down, when=EITHER)
class ChildReplaced(Gated):
    """Another linear layer in the place of one."""


class ScaledLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def _reclass_up(model: Any) -> None:
    mlp(model).up_proj.__class__ = ScaledLinear


@entry(STALE, change=_reclass_up, when=EITHER)
class ClassOfAChild(Gated):
    """A linear layer becomes one of another class, with the same weights."""


def _repeat_instead_of_up(model: Any) -> None:
    mlp(model).up_proj.forward = lambda x: torch.cat([x] * 6, -1)[..., :INTERMEDIATE]


@entry(STALE, change=_repeat_instead_of_up, when=EITHER)
class ForwardOfAChild(Gated):
    """A linear layer gets a forward of its own."""


@entry(STALE, change=lambda model: setattr(type(mlp(model)), "factor", lambda self: 3.0), when=EITHER)
class MethodOfTheClass(_Scaled):
    """A method of the class is patched."""

    def __init__(self) -> None:
        super().__init__()
        type(self).factor = lambda self: 1.0  # type: ignore[method-assign]


@entry(STALE, change=lambda model: setattr(mlp(model), "mix", True), when=EITHER)
class FlagThatMixesTokens(TwoLayers):
    """A flag turns a cumulative sum on."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.fc2(h.cumsum(1) if self.mix else h)


@entry(STALE, change=lambda model: mlp(model).up_proj.register_forward_hook(lambda m, a, y: y * 3.0), when=EITHER)
class HookAddedLater(Gated):
    """A hook on an inner layer."""


@entry(STALE, change=lambda model: model.eval(), when=EITHER)
class ModeSwitched(Gated):
    """Something is on in training only, and the mode changes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x) * (2.0 if self.training else 1.0))


@entry(STALE, change=lambda model: os.environ.update(SEQTILE_TEST_SCALE="3"), when=EITHER)
class EnvironmentVariable(_Scaled):
    """A variable of the environment."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["SEQTILE_TEST_SCALE"] = "1"

    def factor(self) -> float:
        return float(os.environ["SEQTILE_TEST_SCALE"])


@entry(STALE, change=lambda model: mlp(model).flag.touch(), when=EITHER)
class FileThatAppears(_Scaled):
    """A file that is there or not."""

    def __init__(self) -> None:
        super().__init__()
        folder = tempfile.mkdtemp(prefix="seqtile-tests-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.flag = Path(folder, "flag")

    def factor(self) -> float:
        return 3.0 if self.flag.exists() else 1.0


class Options:
    """A config whose defaults are on the class."""

    scale = 1.0


@entry(STALE, change=lambda model: setattr(Options, "scale", 3.0), when=EITHER)
class ClassAttributeOfAConfig(_Scaled):
    """A number on the class of an object."""

    def __init__(self) -> None:
        super().__init__()
        Options.scale, self.options = 1.0, Options()

    def factor(self) -> float:
        return self.options.scale


@entry(STALE, change=lambda model: setattr(mlp(model).options, "scale", 3.0), when=EITHER)
class AttributeThatHidesADefault(ClassAttributeOfAConfig):
    """The object gets a number of its own."""


@entry(STALE, change=lambda model: setattr(mlp(model).state, "training", True), when=EITHER)
class FlagCalledTraining(_Scaled):
    """An attribute of an object with a name that modules have too."""

    def __init__(self) -> None:
        super().__init__()
        self.state = SimpleNamespace(training=False)

    def factor(self) -> float:
        return 3.0 if self.state.training else 1.0


@entry(STALE, change=lambda model: globals().update(FACTOR=3.0), when=EITHER)
class GlobalBesideGetattr(GlobalOfTheFile):
    """It looks a name up at run time."""

    def factor(self) -> float:
        return FACTOR * getattr(self, "missing", 1.0)


def scaled_by_attribute() -> float:
    return scaled_by_attribute.scale  # type: ignore[attr-defined]


@entry(STALE, change=lambda model: setattr(scaled_by_attribute, "scale", 3.0), when=EITHER)
class AttributeOfAFunction(_Scaled):
    """A number on a function."""

    def __init__(self) -> None:
        super().__init__()
        scaled_by_attribute.scale = 1.0  # type: ignore[attr-defined]

    def factor(self) -> float:
        return scaled_by_attribute()


class Table(dict[str, float]):
    scale: float


@entry(STALE, change=lambda model: setattr(mlp(model).table, "scale", 3.0), when=EITHER)
class AttributeOfADict(_Scaled):
    """A number on a dict of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.table.scale = 1.0

    def factor(self) -> float:
        return self.table.scale


@dataclass(slots=True)
class Slotted:
    scale: float = 1.0


@entry(STALE, change=lambda model: setattr(mlp(model).slotted, "scale", 3.0), when=EITHER)
class NumberInASlot(_Scaled):
    """An object without a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.slotted = Slotted()

    def factor(self) -> float:
        return self.slotted.scale


@entry(STALE, change=lambda model: setattr(mlp(model).tree.a.a.a.a.a, "scale", 3.0), when=EITHER)
class SixObjectsDeep(_Scaled):
    """Objects in objects."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = SimpleNamespace(scale=1.0)
        for _ in range(5):
            self.tree = SimpleNamespace(a=self.tree)

    def factor(self) -> float:
        return self.tree.a.a.a.a.a.scale


@entry(STALE, change=lambda model: setattr(OPTIONS, "scale", 3.0), when=EITHER)
class ThroughAWeakReference(_Scaled):
    """A number on an object that is reached by ``weakref.ref``."""

    def __init__(self) -> None:
        super().__init__()
        OPTIONS.scale = 1.0
        self.reference = weakref.ref(OPTIONS)

    def factor(self) -> float:
        options = self.reference()
        return options.scale if options is not None else 0.0


OPTIONS = Options()


@entry(STALE, change=lambda model: SETTINGS.update(scale=3.0), when=EITHER)
class MethodOfADict(_Scaled):
    """The ``get`` of a dict, kept by itself."""

    def __init__(self) -> None:
        super().__init__()
        SETTINGS["scale"] = 1.0
        self.factor = functools.partial(SETTINGS.get, "scale")  # type: ignore[assignment]


@entry(STALE, change=lambda model: setattr(sys.modules["hostile_settings"], "scale", 3.0), when=EITHER)
class ImportInside(_Scaled):
    """A module that is imported when it runs."""

    def __init__(self) -> None:
        super().__init__()
        settings = sys.modules.setdefault("hostile_settings", ModuleType("hostile_settings"))
        settings.scale = 1.0  # type: ignore[attr-defined]

    def factor(self) -> float:
        import hostile_settings  # type: ignore[import-not-found]

        return hostile_settings.scale  # type: ignore[no-any-return]


@entry(STALE, change=lambda model: setattr(mlp(model).up_proj.weight, "gain", 3.0), when=EITHER)
class AttributeOfAWeight(_Scaled):
    """A number on a parameter."""

    def factor(self) -> float:
        return getattr(self.up_proj.weight, "gain", 1.0)


LOCAL = threading.local()


class _MixingWhen(Gated):
    """Centred over tokens where ``self.asks(x)``."""

    def asks(self, x: Tensor) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down_proj(h - h.mean(1, keepdim=True) if self.asks(x) else h)


@entry(STALE)
class ThreadsOwn(_MixingWhen):
    """A value that only the thread of the training has."""

    def __init__(self) -> None:
        super().__init__()
        LOCAL.mixes = True

    def asks(self, x: Tensor) -> bool:
        return getattr(LOCAL, "mixes", False)


@entry(STALE)
class AsksForTheThread(_MixingWhen):
    """Another result in the main thread."""

    def asks(self, x: Tensor) -> bool:
        return "seqtile" not in threading.current_thread().name


@entry(STALE)
class AsksForTheType(_MixingWhen):
    """Another result for a plain tensor."""

    def asks(self, x: Tensor) -> bool:
        return type(x) is Tensor


def centred_in_script(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True) if x.size(1) > 10 else x


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated, and still in use
    centred_in_script = torch.jit.script(centred_in_script)


@entry(LENGTH)
class Scripted(Gated):
    """A branch on the length inside TorchScript."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(centred_in_script(self.hidden(x)))


AUX: list[Tensor] = []
COUNTED = np.zeros(1)


@entry(EFFECTS, state=lambda model: len(AUX))
class TensorsInAGlobalList(Gated):
    """A loss is put aside for others."""

    def __init__(self) -> None:
        super().__init__()
        AUX[:] = [torch.ones(())]

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        AUX.append(h.detach().mean())
        return self.down_proj(h)


@entry(EFFECTS, state=lambda model: COUNTED)
class CountsInAnArray(Gated):
    """A counter in an array of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        COUNTED[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        COUNTED[0] += 1
        return self.down_proj(self.hidden(x))


@entry(EFFECTS, state=lambda model: model.layers[1].mlp.track.__dict__)
class CountsOnAnObject(Gated):
    """An attribute that its first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.track = SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        self.track.calls = vars(self.track).get("calls", 0) + 1
        return self.down_proj(self.hidden(x))


def counting(h: Tensor) -> Tensor:
    counting.calls += 1  # type: ignore[attr-defined]
    return h


@entry(EFFECTS, state=lambda model: counting.calls)  # type: ignore[attr-defined]
class CountsOnAFunction(Gated):
    """A counter on a function."""

    def __init__(self) -> None:
        super().__init__()
        counting.calls = 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(counting(self.hidden(x)))


@entry(EFFECTS, state=lambda model: next(copy.copy(model.layers[1].mlp.counter)))
class TakesFromAnIterator(Gated):
    """An iterator's method, kept by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)
        self.draw = self.counter.__next__

    def forward(self, x: Tensor) -> Tensor:
        self.draw()
        return self.down_proj(self.hidden(x))


@entry(STALE, as_layer, change=lambda model: setattr(model.layers[1].context, "mixes", True), when=EITHER)
class ObjectAsAnArgument(nn.Module):
    """The layer hands the MLP an object whose attributes change."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.context = _WithContext(), SimpleNamespace(mixes=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x, self.context)


class _WithContext(Gated):
    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        h = self.hidden(x)
        mixes = context is not None and context.mixes
        return self.down_proj(h - h.mean(1, keepdim=True) if mixes else h)


class _OfTwo(_Scaled):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.options = SimpleNamespace(inner={"scale": scale})

    def factor(self) -> float:
        return self.options.inner["scale"]


@entry(STALE, lambda made: Model(Layer(made(1.0)), Layer(made(3.0)), Layer(made(0.5))))
class ThreeOfOneClass(_OfTwo):
    """Blocks of one class that differ in a nested number: a proof of one is none of the others."""


@entry(STALE, lambda made: Model(Layer(made(0)), Layer(made(1)), Layer(made(2))))
class ActivationsInAClosure(Gated):
    """Blocks of one class whose activations are closures of one function."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.act_fn = lambda z: (F.silu, F.gelu, torch.tanh)[number](z)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


# ---------------------------------------------------------------------------------------------------------------------
# Out of range or rare
# ---------------------------------------------------------------------------------------------------------------------


def _seeds(draw: Callable[[int], float]) -> tuple[int, int]:
    """A seed whose first number takes the common branch, and one whose first takes the rare one."""
    return 1, next(seed for seed in range(10_000) if draw(seed) < 0.02)


@entry(RARE, direct, scales=(1.0, 1e6))
class ClampAt100000(TwoLayers):
    """Hidden features are clamped at 1e5."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)).clamp(max=1e5))


@entry(RARE, direct, upstreams=(1.0, 1e7))
class GradientClampedAt100000(TwoLayers):
    """Gradients are clamped at 1e5 by a hook."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad.clamp(-1e5, 1e5))
        return self.fc2(h)


@entry(RARE, direct, scales=(1.0, 1e5))
class DividedByALargeMaximum(TwoLayers):
    """Above 1e4 everything is divided by the maximum over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e4:
            x = x / x.abs().max()
        return super().forward(x)


@entry(RARE, direct, scales=(1.0, 1e5))
class LargeValuesBecomeTheMean(TwoLayers):
    """Values above 1e4 become the mean of all tokens; no branch in Python."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        return self.fc2(torch.where(h > 1e4, h.mean(), h))


@entry(RARE, direct, scales=(1.0, 1.5e19), upstreams=(1.0, 1e-8))
class OverflowsBecomeZero(TwoLayers):
    """The square overflows at large values, and ``nan_to_num`` puts zeros there: more than relu squared."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.nan_to_num(torch.relu(self.fc1(x)).square(), posinf=0.0))


@entry(RARE, direct, scales=(1.0, 60.0))
class BatchSkippedWhenNotFinite(TwoLayers):
    """One infinity anywhere, and the whole batch gives zeros."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.exp(self.fc1(x))
        if not bool(torch.isfinite(h).all()):
            h = torch.zeros_like(h) * self.fc1.weight.sum()
        return self.fc2(h)


@entry(RARE, direct, scales=(1.0, 1e4))
class RoundedByTheLargest(TwoLayers):
    """Above 100 the activations are quantised with one scale for all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.fc1(x))
        step = (h.detach().abs().amax() / 7).clamp(min=100 / 7)
        rounded = torch.round(h / step) * step
        return self.fc2(torch.where(h.detach().amax() > 100, h + (rounded - h).detach(), h))


@entry(RARE, direct)
class RareTokenHalvesTheBatch(TwoLayers):
    """If any number of the batch is above 2.6, all tokens are halved."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if (x > 2.6).any() else 1.0)


def _padded(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    x = torch.randn(shape, generator=generator)
    x[:, 10:14] = 0.0
    return (x,)


@entry(RARE, direct, inputs=_padded)
class PaddingIsCounted(TwoLayers):
    """Tokens of zeros count as padding, and the rest is scaled by how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        there = (x.abs().sum(-1, keepdim=True) > 0).to(x.dtype)
        return super().forward(x) * there / there.mean()


@entry(RARE, seeds=_seeds(lambda seed: float(torch.rand((), generator=torch.Generator().manual_seed(seed)))))
class BranchByTorch(Gated):
    """One call in fifty does something else, by torch's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if torch.rand(()) < 0.02 else 1.0)


@entry(RARE, seeds=_seeds(lambda seed: random.Random(seed).random()))
class BranchByPython(Gated):
    """The same by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if random.random() < 0.02 else 1.0)


@entry(RARE, seeds=_seeds(lambda seed: np.random.RandomState(seed).random_sample()))
class BranchByNumpy(TwoLayers):
    """The same by NumPy's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1) if np.random.random() < 0.02 else super().forward(x)


@entry(RARE, shapes=((1, 7, HIDDEN), (1, 300, HIDDEN)))
class BranchByItsOwnGenerator(Gated):
    """The same by a ``random.Random`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if self.random.random() < 0.02 else 1.0)


@entry(RARE, shapes=((1, 7, HIDDEN), (1, 300, HIDDEN)))
class BranchByATorchGenerator(Gated):
    """The same by a ``torch.Generator`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if torch.rand((), generator=self.generator) < 0.02 else 1.0)


@entry(RARE, judge="sharing")
class BranchByTheClock(Gated):
    """The same by the last digits of the clock."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if time.perf_counter_ns() // 100 % 50 == 0 else 1.0)


@entry(RARE, judge="sharing")
class BranchByTheSystem(Gated):
    """The same by the random bytes of the operating system."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (3.0 if os.urandom(1)[0] < 5 else 1.0)


@entry(RARE)
class EverySecondCall(TwoLayers):
    """Every second call does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if next(self.numbers) % 2 else 3.0)


# ---------------------------------------------------------------------------------------------------------------------
# Complex dtypes in tile_module
# ---------------------------------------------------------------------------------------------------------------------


def _complex(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(shape, generator=generator, dtype=torch.complex64),)


def _complex_twice(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    return _complex(shape, generator) + _complex(shape, generator)


def _conjugated(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    return (_complex(shape, generator)[0].conj(),)


def _complex128(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(shape, generator=generator, dtype=torch.complex128),)


class _ComplexLayers(nn.Module):
    dtype = torch.complex64

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INTERMEDIATE, dtype=self.dtype)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, dtype=self.dtype)

    def forward(self, x: Tensor) -> Any:
        h = self.up(x)
        return self.down(h * torch.sigmoid(h.abs()))


@entry(COMPLEX, itself, dim=-2, inputs=_complex)
class ComplexLayersFromTheEnd(_ComplexLayers):
    """Two complex linear layers, ``dim=-2``."""


@entry(COMPLEX, itself, dim=1, inputs=_complex)
class ComplexLayersAlongOne(_ComplexLayers):
    """The same, ``dim=1``."""


@entry(COMPLEX, itself, dim=0, inputs=_complex, shapes=((7, 2, HIDDEN), (20, 3, HIDDEN)))
class ComplexLayersAlongZero(_ComplexLayers):
    """The same, ``dim=0``."""


@entry(COMPLEX, itself, dim=-2, inputs=_complex)
class ComplexSequential(nn.Sequential):
    """An ``nn.Sequential`` of complex linear layers and ``tanh``, which a fused MLP could be."""

    def __init__(self) -> None:
        layers = (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)
        up, down = (nn.Linear(*widths, bias=False, dtype=torch.complex64) for widths in layers)
        super().__init__(up, nn.Tanh(), down)


@entry(COMPLEX, itself, dim=1, inputs=_complex128)
class DoubleComplex(_ComplexLayers):
    """complex128."""

    dtype = torch.complex128


@entry(COMPLEX, itself, dim=1)
class RealInputComplexWeights(_ComplexLayers):
    """Real input, complex inside, real output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.complex64)).real


@entry(COMPLEX, itself, dim=1, inputs=_complex)
class ComplexInputRealOutput(_ComplexLayers):
    """Complex input, the modulus of the output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


@entry(COMPLEX, itself, dim=1, inputs=_complex)
class ComplexInputRealWeights(nn.Module):
    """Real linear layers on the real view of a complex input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2 * HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, 2 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(torch.view_as_real(x).flatten(-2))))
        return torch.view_as_complex(y.unflatten(-1, (HIDDEN, 2)).contiguous())


@entry(COMPLEX, itself, dim=-1, inputs=_complex, shapes=((1, HIDDEN, 7), (3, HIDDEN, 20)))
class ComplexFeaturesFirst(nn.Module):
    """Features first, ``dim=-1``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("oi,...it->...ot", self.weight, x)
        return y / (1.0 + y.abs())


@entry(COMPLEX, itself, dim=1)
class FourierFilterOverFeatures(nn.Module):
    """A Fourier transform over features with complex weights between."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(HIDDEN // 2 + 1, dtype=torch.complex64))
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=HIDDEN))


@entry(COMPLEX, itself, dim=1, inputs=_complex_twice)
class TwoComplexInputs(_ComplexLayers):
    """A complex input and a complex gate, both with a gradient."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate.conj()


@entry(COMPLEX, itself, dim=1, inputs=_complex)
class ComplexAndRealOutputs(_ComplexLayers):
    """A complex output and a real one."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, y.angle()


@entry(COMPLEX, itself, dim=-2, inputs=_conjugated)
class ConjugatedInput(_ComplexLayers):
    """The input is a conjugated view."""


@entry(COMPLEX, itself, dim=1, inputs=_complex)
class FrozenComplexWeights(_ComplexLayers):
    """Only the input has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


# ---------------------------------------------------------------------------------------------------------------------
# Harmless: these must stay tiled
# ---------------------------------------------------------------------------------------------------------------------


def _activated(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda self, x: self.down_proj(function(self.gate_proj(x)) * self.up_proj(x))


def _gated_controls() -> None:
    known = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu by tanh": functools.partial(F.gelu, approximate="tanh"),
        "squared relu": lambda z: torch.relu(z).square(),
        "quick gelu": lambda z: z * torch.sigmoid(1.702 * z),
        "sigmoid": torch.sigmoid,
    }
    for name, function in known.items():
        made = type("GatedControl", (Gated,), {"forward": _activated(function), "__module__": __name__})
        CATALOGUE.append(Entry(f"gated, {name}", HARMLESS, functools.partial(in_layer, made)))


_gated_controls()


@entry(HARMLESS)
class PlainMLP(TwoLayers):
    """fc1, gelu, fc2."""


@entry(HARMLESS)
class Biases(Gated):
    """All linear layers with biases."""

    def __init__(self) -> None:
        super().__init__(bias=True)


class _GateUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)


@entry(HARMLESS)
class GateUpByChunk(_GateUp):
    """Gate first, by ``chunk``."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


@entry(HARMLESS)
class UpGateBySplit(_GateUp):
    """Up first, by ``split``."""

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.gate_up_proj(x).split([INTERMEDIATE, INTERMEDIATE], dim=-1)
        return self.down_proj(up * F.silu(gate))


@entry(HARMLESS)
class GateUpByUnbind(_GateUp):
    """By ``unflatten`` and ``unbind``."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).unflatten(-1, (2, INTERMEDIATE)).unbind(-2)
        return self.down_proj(F.silu(gate) * up)


@entry(HARMLESS)
class GateUpInterleaved(_GateUp):
    """Gate and up in turns."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(F.silu(both[..., ::2]) * both[..., 1::2])


@entry(HARMLESS, judge="random")
class DropoutInside(Gated):
    """``nn.Dropout`` between the linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(self.hidden(x)))


@entry(HARMLESS, judge="random")
class DropoutAtTheEnd(TwoLayers):
    """``nn.Dropout`` on the output."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


@entry(HARMLESS, judge="random")
class FunctionalDropout(Gated):
    """``F.dropout`` with the module's mode."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.dropout(self.hidden(x), 0.4, self.training))


CATALOGUE.append(
    Entry("dropout after, in the layer", HARMLESS, lambda: Model(LayerWithAfter(nn.Dropout(0.4))), judge="random")
)
CATALOGUE.append(
    Entry("a norm without weights before", HARMLESS, lambda: Model(
        LayerWithBefore(nn.RMSNorm(HIDDEN, elementwise_affine=False))
    ))
)  # fmt: skip
CATALOGUE.append(Entry("a norm with weights after", HARMLESS, lambda: Model(LayerWithAfter(nn.LayerNorm(HIDDEN)))))


@entry(HARMLESS)
class LayerNormInside(TwoLayers):
    """A LayerNorm between the linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(INTERMEDIATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.norm(self.hidden(x)))


@entry(HARMLESS)
class RMSNormInside(Gated):
    """An RMSNorm of the input inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@entry(HARMLESS)
class ScaleAttribute(Gated):
    """A constant that nobody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.multipliers = [0.5, 2.5]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.hidden(x) * self.multipliers[0]) * self.multipliers[1]


@entry(HARMLESS)
class ResidualInside(Gated):
    """Adds its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


@entry(HARMLESS)
class TimesOne(Gated):
    """Multiplies by one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.0


@entry(HARMLESS)
class LambdaActivation(_WithActivation):
    """The activation is a lambda."""

    def __init__(self) -> None:
        super().__init__(lambda z: torch.tanh(z) * z)


@entry(HARMLESS)
class PartialActivation(_WithActivation):
    """The activation is a partial."""

    def __init__(self) -> None:
        super().__init__(functools.partial(F.leaky_relu, negative_slope=0.1))


@entry(HARMLESS)
class ModuleActivation(_WithActivation):
    """The activation is a module with a number."""

    def __init__(self) -> None:
        super().__init__(Beta())


@entry(HARMLESS)
class ClampedAtSeven(Gated):
    """Clamps that every batch may meet, as gpt-oss has them."""

    def forward(self, x: Tensor) -> Tensor:
        gate = (4 * self.gate_proj(x)).clamp(max=1.0)
        return self.down_proj(gate * torch.sigmoid(gate) * (self.up_proj(x).clamp(-0.5, 0.5) + 1))


@entry(HARMLESS)
class Functional(Gated):
    """``F.linear`` on the children's weights."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_proj.weight), F.linear(x, self.up_proj.weight)
        return F.linear(F.silu(gate).mul(up), self.down_proj.weight, bias=None)


CATALOGUE.append(
    Entry("an nn.Sequential", HARMLESS, lambda: Model(Layer(
        nn.Sequential(nn.Linear(HIDDEN, INTERMEDIATE), nn.GELU(), nn.Linear(INTERMEDIATE, HIDDEN))
    )))
)  # fmt: skip


@entry(HARMLESS, as_layer)
class TupleOutput(nn.Module):
    """The block returns a tuple, both parts one row per token."""

    class Scored(Gated):
        def forward(self, x: Tensor) -> Any:
            h = self.hidden(x)
            return self.down_proj(h), h.mean(-1, keepdim=True)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN), self.Scored()

    def forward(self, hidden_states: Tensor) -> Tensor:
        output, score = self.mlp(self.norm(hidden_states))
        return hidden_states + output * torch.sigmoid(score)


@entry(HARMLESS, as_layer)
class ArgumentPerToken(nn.Module):
    """The block is called with one number per token besides."""

    class Weighed(Gated):
        def forward(self, x: Tensor, share: Tensor | None = None) -> Tensor:
            return self.down_proj(self.hidden(x) if share is None else self.hidden(x) * share)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN), self.Weighed()

    def forward(self, hidden_states: Tensor) -> Tensor:
        share = torch.sigmoid(hidden_states[..., :1])
        return hidden_states + self.mlp(self.norm(hidden_states), share)


@entry(HARMLESS, as_layer)
class ResidualAsAnArgument(nn.Module):
    """The block adds the residual that it is called with, as BLOOM's and MPT's do."""

    class Added(TwoLayers):
        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            return residual + self.fc2(self.hidden(x))

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), self.Added()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.mlp(self.norm(hidden_states), hidden_states)


@entry(HARMLESS, as_layer)
class CalledByKeyword(nn.Module):
    """``self.mlp(x=...)``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(HIDDEN), Gated()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.mlp(x=self.norm(hidden_states))


@entry(HARMLESS)
class ReshapedToRows(Gated):
    """To two dimensions and back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


@entry(HARMLESS)
class Einsum(Gated):
    """Linear layers by ``einsum``."""

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.einsum("...d,fd->...f", x, self.gate_proj.weight)
        up = torch.einsum("...d,fd->...f", x, self.up_proj.weight)
        return torch.einsum("...f,df->...d", F.silu(gate) * up, self.down_proj.weight)


@entry(HARMLESS)
class TiedWeights(Gated):
    """Gate and up share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj.weight = self.gate_proj.weight


@entry(HARMLESS)
class FrozenWeights(Gated):
    """Two of three weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj.requires_grad_(False)
        self.down_proj.requires_grad_(False)


@entry(HARMLESS, change=lambda model: mlp(model).up_proj.requires_grad_(False))
class FrozenLater(Gated):
    """A weight is frozen after tiling."""


@entry(HARMLESS)
class WeightNormParametrized(Gated):
    """``parametrizations.weight_norm`` on one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.utils.parametrizations.weight_norm(self.up_proj)


class PropertyLinear(nn.Module):
    """A linear layer whose weight is a property."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inside, outside
        self.raw = nn.Parameter(torch.randn(outside, inside))

    @property
    def weight(self) -> Tensor:
        return self.raw / self.in_features**0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@entry(HARMLESS)
class WeightByProperty(Gated):
    """A linear layer whose weight is a property."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = PropertyLinear(HIDDEN, INTERMEDIATE)


@entry(HARMLESS)
class ClippedParameterGradient(Gated):
    """A hook on a parameter, which sees the one gradient of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj.weight.register_hook(lambda grad: grad * (0.1 / grad.norm()).clamp(max=1.0))


def _lora(dropout: float) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    targets = ["gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=2, lora_dropout=dropout, target_modules=targets, init_lora_weights=False)
    return inject_adapter_in_model(config, Model(Layer(Gated())))


CATALOGUE.append(Entry("LoRA", HARMLESS, functools.partial(_lora, 0.0)))
CATALOGUE.append(Entry("LoRA with dropout", HARMLESS, functools.partial(_lora, 0.3), judge="random"))


@entry(HARMLESS)
class DoublePrecisionInside(Gated):
    """The product is computed in float64."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate_proj(x).double()) * self.up_proj(x).double()
        return self.down_proj(h.to(x.dtype))


def _bf16(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randn(shape, generator=generator).bfloat16(),)


# Sums over tokens in another order differ by one or two units in the last of bfloat16's eight bits.
@entry(HARMLESS, lambda made: in_layer(made).bfloat16(), inputs=_bf16, tolerance=2**-6)
class HalfPrecisionWithFloatInside(Gated):
    """bfloat16, with the activation in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x).float()).to(x.dtype) * self.up_proj(x))


@entry(HARMLESS, itself, dim=-2)
class OtherWidthInTileModule(nn.Module):
    """An output of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@entry(HARMLESS, itself, dim=-1, shapes=((1, HIDDEN, 7), (3, HIDDEN, 20)))
class KernelOneConvolution(nn.Module):
    """Convolutions of kernel 1, features first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(HIDDEN, INTERMEDIATE, 1), nn.Conv1d(INTERMEDIATE, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@entry(HARMLESS, itself, dim=0, shapes=((7, 2, HIDDEN), (20, 3, HIDDEN)))
class TokensFirst(Gated):
    """``dim=0``."""


if __name__ == "__main__":
    from numerics._judge import print_table

    print_table()


@dataclass(frozen=True, slots=True)
class FrozenOptions:
    scale: float = 2.0


LOGGER = logging.getLogger("seqtile.tests.hostile")


@entry(HARMLESS)
class FrozenConfigAndLogger(_Scaled):
    """A config in slots, and a logger that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.options = FrozenOptions()

    def factor(self) -> float:
        LOGGER.debug("scaled")
        return self.options.scale
