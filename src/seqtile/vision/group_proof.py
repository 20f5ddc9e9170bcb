"""Check that pictures do not depend on each other: compute the features of a few, whole and in groups.

The check runs at the first call. Another first or last picture must not change one bit of the others' features, and
groups must give the same features and weight gradients. If frames of one video depend on each other, the check is
repeated with whole videos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import active_fake_mode, attention_kind
from seqtile.blocks.instance import inside
from seqtile.devices import is_out_of_memory
from seqtile.engines.flat import ParameterSwap, call_with_weights
from seqtile.ops.grad_accumulator import LOW
from seqtile.ops.rng import Autocast
from seqtile.state.state_proof import TOLERANCE, distance
from seqtile.vision.feature_form import FeatureTensor, Form, GroupShapes, form_of, rows_of
from seqtile.vision.frozen_layers import FrozenLayers
from seqtile.vision.group_node import GroupedCall
from seqtile.vision.picture_call import NotCutError, PictureCall, Units, has_videos, ways_to_cut


@dataclass(frozen=True)
class GroupProof:
    """The result of the check for calls of one kind.

    Attributes:
        units: the units that a call is cut into; None if it runs whole.
        form: the form of its result.
        trained: names of the weights that get a gradient.
        skips_frozen: whether a recompute skips the frozen layers before the trained modules.
        why_not: why calls run whole, or why their units are larger than frames, or "".
    """

    units: type[Units] | None = None
    form: Form = FeatureTensor(False)
    trained: tuple[str, ...] = ()
    skips_frozen: bool = False
    why_not: str = ""


class GroupProofs:
    """Proofs of one model's methods, by the mode in which they run."""

    def __init__(self) -> None:
        self._known: dict[Any, GroupProof] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_known": {}}  # a copy is verified again

    def of(
        self, owner: nn.Module, modules: Sequence[nn.Module], computing: Sequence[nn.Module], call: PictureCall,
        method: Callable[..., Any], weights: Mapping[str, Tensor],
    ) -> GroupProof:  # fmt: skip
        """The proof for calls like this one.

        Args:
            owner: the module whose method is called.
            modules: the modules that compute features.
            computing: the owner's children that contain them.
            call: the call.
            method: the method.
            weights: weights of the modules, by their name in the owner.

        Cost:
            About 10 µs per weight; the first call of a kind takes six forwards and two backwards of two pictures, or
            of about 130 patches where pictures may have any size.
        """
        pixels = call.pixels
        shape = (pixels.shape[-1], has_videos(call)) if call.grid_name else pixels.shape[1:]
        settings = [(name, value) for name, value in call.arguments.items() if isinstance(value, int | str | float)]
        kinds = [(type(module), module.training, attention_kind(module)) for module in modules]
        shapes = [(name, tuple(w.shape), w.dtype, w.requires_grad) for name, w in weights.items()]
        key = (
            call.name, call.grid_name, shape, pixels.dtype, pixels.device, Autocast.of(pixels),
            torch.is_grad_enabled(), *call.others(), *map(str, settings), *kinds, *shapes,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = _try_ways(owner, modules, computing, call, method, weights)
        return self._known[key]


def _try_ways(
    owner: nn.Module, modules: Sequence[nn.Module], computing: Sequence[nn.Module], call: PictureCall,
    method: Callable[..., Any], weights: Mapping[str, Tensor],
) -> GroupProof:  # fmt: skip
    reasons = list[str]()
    for units in ways_to_cut(call):
        try:
            with _in_evaluation(modules), inside("trial"):
                trial = _GroupTrial(owner, units, call, method, weights)
                if not (why := trial.differs()):
                    skips_frozen = trial.skips_frozen(computing)
                    return GroupProof(units, trial.form, trial.trained, skips_frozen, "; ".join(reasons))
        except Exception as error:
            if is_out_of_memory(error):  # not the model's fault
                raise
            first = (str(error).splitlines() or [""])[0][:200]
            why = first if isinstance(error, NotCutError) else f"it raises {type(error).__name__}: {first}"
        reasons.append(f"in groups of {units.noun} {why}")
    return GroupProof(why_not="; ".join(reasons) or f"its {call.name} has shape {tuple(call.pixels.shape)}")


class _GroupTrial:
    def __init__(
        self, owner: nn.Module, units: type[Units], call: PictureCall, method: Callable[..., Any],
        weights: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        self.sample, self.groups = units.sample(call, _merged_side(owner))
        self.units, self.owner, self.method, self.live = units(self.sample), owner, method, weights
        self.weights = {
            name: weight.detach().requires_grad_() for name, weight in weights.items()
            if weight.requires_grad and torch.is_grad_enabled()
        }  # fmt: skip
        pixels = call.pixels
        cast = Autocast.of(pixels)
        dtypes = {pixels.dtype, cast.dtype, *(weight.dtype for weight in weights.values())}
        self.low = not dtypes.isdisjoint(LOW)
        self.trained: tuple[str, ...] = ()
        self.whole: dict[str, Tensor] = {}
        with torch.no_grad():
            part = method(**self.units.arguments(self._slices(0), *self.groups[0]))
            self.form = form_of(method(**self.sample.arguments), part, len(self.units.owners))

    def _slices(self, index: int) -> list[Tensor]:
        return [tensor.narrow(0, *self.units.slices(*self.groups[index])) for tensor in self.units.tensors]

    def _rows(self, result: Any) -> list[Tensor]:
        return [*rows_of(self.form, result, GroupShapes())]

    def differs(self) -> str:
        """Why features or gradients differ in groups, or ""."""
        in_plan = active_fake_mode() is not None  # shapes suffice to find the weights that get a gradient
        if not in_plan and (why := self._one_moves_others()):
            return why
        whole = self._with_gradients(lambda: self._with_weights(lambda: self.method(**self.sample.arguments)))
        self.trained = tuple(name for name in self.weights if name in whole)
        self.whole = whole
        if in_plan:
            return ""
        grouped = self._with_gradients(self._grouped)
        error, name = distance(grouped, whole)
        return "" if error <= TOLERANCE[self.low] else f"{name} is off by {error:.1g}"

    def skips_frozen(self, computing: Sequence[nn.Module]) -> bool:
        """Whether groups give the same gradients without frozen layers in their recompute."""
        frozen = FrozenLayers(computing, [self.live[name] for name in self.trained])
        if not (self.trained and frozen):
            return False
        if active_fake_mode() is not None:
            return True
        try:
            error, _ = distance(self._with_gradients(lambda: self._grouped(frozen)), self.whole)
        except Exception as raised:
            if is_out_of_memory(raised):
                raise
            return False
        return error <= TOLERANCE[self.low]

    def _one_moves_others(self) -> str:
        with torch.no_grad():
            sizes = [len(self._rows(self.method(**self.units.arguments(self._slices(index), *group)))[0])
                     for index, group in enumerate(self.groups)]  # fmt: skip
            before = self._rows(self.method(**self.sample.arguments))
            for index, others in ((0, slice(sizes[0], None)), (len(sizes) - 1, slice(0, sum(sizes[:-1])))):
                pixels = self.units.pixels_of(*self.groups[index])
                unchanged = pixels.clone()
                pixels.neg_().add_(0.5)
                after = self._rows(self.method(**self.sample.arguments))
                pixels.copy_(unchanged)
                if not all(torch.equal(old[others], new[others]) for old, new in zip(before, after, strict=True)):
                    return "one changes the features of others"
        return ""

    def _with_weights(self, run: Callable[[], Any]) -> Any:
        named = {f"0.{name}": weight for name, weight in self.weights.items()}
        return call_with_weights(ParameterSwap((self.owner,)), named, (run,))

    def _grouped(self, frozen: FrozenLayers | None = None) -> Any:
        call = GroupedCall(self.owner, self.method, self.units, self.groups, self.form, frozen=frozen)
        return call.run(lambda: {name: self.weights[name] for name in self.trained})

    def _with_gradients(self, run: Callable[[], Any]) -> dict[str, Tensor]:
        rows = self._rows(run())
        output = {"its output": torch.cat([row.detach().flatten() for row in rows])}
        trained = [row for row in rows if row.requires_grad]
        if not (self.weights and trained):
            return output
        generator = torch.Generator("cpu").manual_seed(1)
        upstream = [
            torch.randn(row.shape, generator=generator, device="cpu").to(row.device, row.dtype) for row in trained
        ]
        gradients = torch.autograd.grad(trained, [*self.weights.values()], upstream, allow_unused=True)
        return output | {name: grad for name, grad in zip(self.weights, gradients, strict=True) if grad is not None}


def _merged_side(owner: nn.Module) -> int:
    """Number of patches, along one side, that are merged into one feature."""
    config: Any = getattr(owner, "config", None)
    return int(getattr(getattr(config, "vision_config", config), "spatial_merge_size", None) or 1)


@contextmanager
def _in_evaluation(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode: without random numbers and activation checkpoints."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
