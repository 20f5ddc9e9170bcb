"""Check that a layer gives the same outputs and gradients in tiles that pass its state on.

Kernels and caches differ in how they treat an incoming state: some use it, some use it without a gradient, some drop
it. So the layer itself runs a trial on a few tokens, in its present mode: whole, in two tiles and in three. If a layer
has several states, the loss of one may change the output by less than its rounding. So each state is also checked by
itself: a tile must read it and leave it with a gradient, and the final state and its gradient must be those of the
whole run, up to a third of the error that dropping the state would cause.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from seqtile._compat import CACHE_ARGUMENTS, FakeTensor, tree_leaves
from seqtile.blocks.instance import inside
from seqtile.devices import is_out_of_memory
from seqtile.engines.flat import ParameterSwap, call_with_weights, named_weights
from seqtile.ops.grad_accumulator import LOW
from seqtile.ops.rng import Autocast
from seqtile.ops.tile_checkpoint import State
from seqtile.state.state_cache import CarriedState, cache_argument
from seqtile.state.tile_call import TileCall, forward_of, in_tiles
from seqtile.tiling import StateTiles

TOKENS, PADDING = 23, 3
TILES = (2, 21), (9, 8, 6)
"""Tile sizes of the trial; its first tile has the fewest tokens that a tile may have."""

LAST_SHORT = (12, 9, 2)
"""Tile sizes for the comparison of final states; the last is short, as some layers forget within ten tokens."""

TOLERANCE = {True: 3e-2, False: 1e-3}
"""Largest error of an output or a gradient, relative to its norm, by whether the precision is low. Kernels compute in
fp32 whatever the weights' dtype."""

TELLS = 3.0
"""Dropping a state must change the final states by at least this many times their error."""

LEAST = 0.1
"""Fraction of the tolerance by which a final state may always be off, however small the effect of dropping it."""

SMALL = 1e-3
"""Gradients below this fraction of the largest one are compared relative to that fraction."""


class StateProofs:
    """Cached proofs of one model's layers, by their structure and settings."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": {}}  # a copy is verified again

    def why_not(self, module: nn.Module, x: Tensor) -> str:
        """Why ``module`` cannot run in tiles on hidden states such as ``x``, or "".

        Cost:
            About 10 µs per weight; the first layer of a kind takes nine forwards and backwards of 46 tokens, and
            memory for one gradient of each of its weights.
        """
        cast = Autocast.of(x)
        shapes = [(name, tuple(w.shape), w.dtype, w.requires_grad) for name, w in named_weights(module)]
        key = (type(module), module.training, x.shape[-1], x.dtype, x.device, cast, *shapes)
        if key not in self._known:
            self._known[key] = _try(module, x)
        return self._known[key]


def is_here(module: nn.Module) -> bool:
    """Whether no weight of ``module`` is in shards; otherwise its trial runs at its first call."""
    return all(weight.numel() for weight in module.parameters())


def has_values(module: nn.Module) -> bool:
    """Whether the weights have values; fake tensors and those on the meta device have shapes alone."""
    return not any(weight.is_meta or isinstance(weight, FakeTensor) for weight in module.parameters())


def _try(module: nn.Module, x: Tensor) -> str:
    try:
        # The hooks hide the trial's saved tensors from a checkpoint around the layer, which counts them. They detach:
        # a node that saves its own output would form a cycle and leak the trial's graph.
        with without_dropouts(module), torch.enable_grad(), saved_tensors_hooks(Tensor.detach, lambda saved: saved):
            return (_compare_tiles if has_values(module) else _connect)(_Trial(module, x))
    except Exception as error:
        if is_out_of_memory(error):  # not the layer's fault
            raise
        if isinstance(error, AttributeError) and isinstance(error.obj, CarriedState):
            return f"it uses its cache in an unsupported way ({error.name})"
        first = (str(error).splitlines() or [""])[0][:200]
        return f"in tiles it raises {type(error).__name__}: {first}"


def _compare_tiles(trial: _Trial) -> str:
    if why := _connect(trial, values=True) or trial.ends_elsewhere():
        return why
    whole = trial.gradients(trial.whole)
    for sizes in TILES:
        if why := trial.differs(trial.gradients(partial(trial.tiled, sizes)), whole, f"{len(sizes)} tiles"):
            return why
    if trial.masks:
        whole_masked = trial.gradients(partial(trial.whole, padded=True))
        got = trial.gradients(partial(trial.tiled, TILES[0], padded=True))
        if why := trial.differs(got, whole_masked, "tiles with padding"):
            return why
    return ""


def _connect(trial: _Trial, values: bool = False) -> str:
    """Why a tile does not leave or read some state with a gradient, or ""; without ``values`` only graphs count."""
    x = trial.x.detach().requires_grad_()
    first, second = x.split(TILES[0], dim=1)
    call = trial.call(x)
    _, left = trial.step(call, first, ())
    taken = tuple(state.detach().requires_grad_(state.is_floating_point()) for state in left)
    result, _ = trial.step(call, second, taken)
    if not left:
        return _not_handed_on("state")
    for name, state, before_tile in zip(call.states, left, taken, strict=True):
        for value, by in ((state, x), (_output_of(result), before_tile)):
            if not _has_gradient(value, by, values):
                return _not_handed_on(name)
    return ""


def _has_gradient(value: Tensor, by: Tensor, values: bool) -> bool:
    if not (value.requires_grad and by.requires_grad):
        return False
    weighted = (value * _random_like(value)).sum()
    gradient = torch.autograd.grad(weighted, by, retain_graph=True, allow_unused=True)[0]
    return gradient is not None and not (values and not bool(gradient.any()))


def _not_handed_on(state: str) -> str:
    return f"the {state} or its gradient is not passed on"


def _random_like(value: Tensor) -> Tensor:
    random = torch.randn(value.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu")
    return random.to(value.device, value.dtype)


def _output_of(result: Any) -> Tensor:
    return next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))


class _Trial:
    """A layer with detached weights to differentiate by, and random inputs."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        shape, random = (2, TOKENS, x.shape[-1]), torch.Generator("cpu").manual_seed(0)
        self.x = torch.randn(shape, generator=random, device="cpu").to(x.device, x.dtype)
        self.upstream = torch.randn(shape, generator=random, device="cpu").to(x.device, x.dtype)
        self.mask = torch.ones(2, TOKENS, dtype=torch.long, device=x.device)
        self.mask[1, :PADDING] = 0
        self.module, self.cache = module, cache_argument(module)
        self.weights = {
            name: weight.detach().requires_grad_() for name, weight in named_weights(module) if weight.requires_grad
        }
        low = LOW.__contains__
        self.tolerance = TOLERANCE[low(x.dtype) or (Autocast.of(x).enabled and low(Autocast.of(x).dtype))]
        parameters = inspect.signature(type(module).forward).parameters
        self.masks = "attention_mask" in parameters
        required = [
            name for name, parameter in [*parameters.items()][2:]
            if parameter.default is parameter.empty and parameter.kind != parameter.VAR_KEYWORD
        ]  # fmt: skip
        self.others = dict.fromkeys(name for name in required if name not in CACHE_ARGUMENTS)

    def _kwargs(self, padded: bool) -> dict[str, Any]:
        return {**self.others, "attention_mask": self.mask} if padded else dict(self.others)

    def whole(self, x: Tensor, padded: bool = False) -> Any:
        return self._with_weights(lambda: forward_of(self.module)(x, **self._kwargs(padded)))

    def _with_weights(self, run: Callable[[], Any]) -> Any:
        named = {f"0.{name}": weight for name, weight in self.weights.items()}
        with inside("trial"):
            return call_with_weights(ParameterSwap((self.module,)), named, (run,))

    def call(self, x: Tensor, padded: bool = False) -> TileCall:
        """The call that is cut into tiles."""
        assert self.cache is not None
        return TileCall((x,), self._kwargs(padded), self.cache)

    def step(self, call: TileCall, x: Tensor, state: State) -> tuple[Any, State]:
        """Run one tile; return its result, and the state after it."""
        result: tuple[Any, State] = self._with_weights(lambda: call.run(self.module, [x], state))
        return result

    def _ends(self, sizes: Sequence[int], without: int | None = None) -> dict[str, Tensor]:
        """The states after tiles of these sizes, with gradients; state ``without`` is zeroed before each tile."""
        x = self.x.detach().requires_grad_()
        call, state = self.call(x), State()
        for tile in x.split([*sizes], dim=1):
            tile_state = [
                torch.zeros_like(tensor) if number == without else tensor for number, tensor in enumerate(state)
            ]
            _, state = self.step(call, tile, tuple(tile_state))
        ends = dict[str, Tensor]()
        for name, tensor in zip(call.states, state, strict=True):
            gradient = torch.autograd.grad((tensor * _random_like(tensor)).sum(), x, retain_graph=True)[0]
            ends |= {name: tensor.detach(), f"{name}'s gradient": gradient}
        return ends

    def ends_elsewhere(self) -> str:
        """Why some final state or its gradient differs between three tiles and one, or ""."""
        whole, tiled = self._ends((TOKENS,)), self._ends(LAST_SHORT)
        for number, state in enumerate([*whole][::2]):
            without = self._ends(LAST_SHORT, number)
            for name in (state, f"{state}'s gradient"):
                error, effect = (_relative(ends[name], whole[name]) for ends in (tiled, without))
                if not error <= max(self.tolerance * LEAST, min(self.tolerance, effect / TELLS)):
                    return f"after three tiles the {name} is off by {error:.1g} from one tile's"
        return ""

    def tiled(self, sizes: Sequence[int], x: Tensor, padded: bool = False) -> Any:
        call = self.call(x, padded)
        return in_tiles(self.module, call, call.tensors, StateTiles(tuple(sizes), frozenset()), lambda: self.weights)

    def gradients(self, run: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        """The output, and the gradients of the input and of every weight that trains."""
        x = self.x.detach().requires_grad_()
        y = _output_of(run(x))
        computed = torch.autograd.grad(y, [x, *self.weights.values()], self.upstream.to(y.dtype), allow_unused=True)
        names = ["its input's gradient", *(f"the gradient of {name}" for name in self.weights)]
        gradients = {name: gradient for name, gradient in zip(names, computed, strict=True) if gradient is not None}
        return {"its output": y.detach(), **gradients}

    def differs(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], how: str) -> str:
        """Why outputs or gradients differ, or ""."""
        error, name = distance(got, expected)
        if error <= self.tolerance:
            return ""
        return f"in {how} {name} is off by {error:.1g}: the state or its gradient is not passed on"


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


def distance(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative error (L2) and the name of its tensor; infinite for one that is missing or not finite."""
    if got.keys() != expected.keys():
        return float("inf"), sorted(got.keys() ^ expected.keys())[0]
    norms = {name: float(tensor.float().norm()) for name, tensor in expected.items()}
    largest = max((norm for name, norm in norms.items() if name != "its output"), default=0.0)
    worst = 0.0, ""
    for name, tensor in expected.items():
        error = float((got[name].float() - tensor.float()).norm()) / max(norms[name], SMALL * largest, 1e-30)
        if not error <= worst[0]:
            worst = error if error == error else float("inf"), name
    return worst


@contextmanager
def without_dropouts(module: nn.Module) -> Iterator[None]:
    dropouts = [dropout for dropout in module.modules() if isinstance(dropout, nn.Dropout) and dropout.training]
    for dropout in dropouts:
        dropout.training = False
    try:
        yield
    finally:
        for dropout in dropouts:
            dropout.training = True
