"""Methods that compute features of pictures, run in groups of them: finding, replacing and restoring them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import active_fake_mode, captures_by_forward, captures_nothing
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile._stand_in import StandIn
from seqtile.blocks.instance import inside_a_tile
from seqtile.checkpointing.reentrant import is_reentrant
from seqtile.engines.flat import named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.recognise.decoder_layers import decoder_layers
from seqtile.recognise.live_weights import foreign_hooks
from seqtile.recognise.snapshot import SameSettings
from seqtile.tiling import group_ranges
from seqtile.vision.frozen_layers import FrozenLayers
from seqtile.vision.group_node import GroupedCall, PlannedCall
from seqtile.vision.group_proof import GroupProofs
from seqtile.vision.picture_call import NotCutError, PictureCall

logger = first_rank_logger(__name__)

METHODS = ("get_image_features", "get_video_features", "get_audio_features")
"""Methods by which models of Transformers compute the features of pictures, videos and sounds."""

_PIXELS = ("pixel_values", "input_features")
_ASKED_FOR = ("output_hidden_states", "output_attentions")


class VisionTower(StandIn):
    """Replaces the methods of one module that compute features.

    Args:
        owner: the module.
        name: its qualified name.
        group: units per group, or ``"auto"``.
        language: names of its children that compute no features.

    Attributes:
        most_groups: the most groups of any call so far.
        units: the units that calls were cut into: frames, videos or pictures.
        called: whether some call reached the choice of groups.
        why_whole: why the last call that ran whole did, or "".
        live_bytes: returns the live bytes in a plan's step. Calls on fake tensors then run in groups too, without the
            check of values, and only a few groups run. None outside of plans.
    """

    def __init__(self, owner: nn.Module, name: str, group: int | str, language: Sequence[str]) -> None:
        self.changed = tuple(method for method in METHODS if hasattr(owner, method))  # type: ignore[misc]
        super().__init__(owner)
        self.name, self.group, self.language = name, group, tuple(language)
        self.proofs = GroupProofs()
        self.most_groups, self.units, self.called, self.why_whole = 0, "", False, ""
        self.live_bytes: Callable[[], int] | None = None

    def install(self) -> None:
        self._hook = self.module.register_forward_hook(self._look, with_kwargs=True)
        self.module.__dict__.update({method: MethodInGroups(self, method) for method in self.changed})

    def remove(self) -> None:
        """Put the methods back."""
        self._hook.remove()
        for name in self.changed:
            self.module.__dict__.pop(name, None)
        self.module.__dict__.update(self.before)

    def _look(self, owner: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """After the first training forward with pictures, warn if ``vision`` had no effect."""
        pictures = any(value is not None and name.startswith(_PIXELS) for name, value in kwargs.items())
        if torch.compiler.is_compiling() or not (pictures and owner.training and torch.is_grad_enabled()):
            return
        if active_fake_mode() is not None:  # a plan's step
            return
        self._hook.remove()
        if self.why_idle and self.is_news(self.why_idle):
            logger.warning("vision=%s had no effect in the first training step: %s", self.group, self.why_idle)

    @property
    def effect(self) -> str:
        """A phrase on its groups in the steps so far, or ""."""
        return f"vision tower: {self.units} in up to {self.most_groups:,} groups" if self.most_groups > 1 else ""

    @property
    def why_idle(self) -> str:
        """Why no call ran in groups so far; "" where one did, or where ``"auto"`` found one group enough."""
        if self.most_groups > 1:
            return ""
        if not self.called:
            return self.why_whole or f"{self.name or type(self.module).__name__} computes no features by its methods"
        return "" if self.group == "auto" else f"the batch fits in one group of {self.units}"

    def original(self, method: str) -> Callable[..., Any]:
        module = self.module
        return self.before.get(method) or partial(getattr(type(module), method), module)

    def parts(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of everything that may compute features."""
        return [
            (f"{name}.{inner}".strip("."), module)
            for name, child in self.module.named_children() if name not in self.language
            for inner, module in child.named_modules()
        ]  # fmt: skip

    def computing(self) -> list[nn.Module]:
        """The owner's children that may compute features."""
        return [child for name, child in self.module.named_children() if name not in self.language]

    def weights(self) -> dict[str, Tensor]:
        """The live weights of modules that may compute features, by their names in the owner."""
        skipped = tuple(f"{name}." for name in self.language)
        return {name: weight for name, weight in named_weights(self.module) if not name.startswith(skipped)}

    def run(self, method: str, args: Any, kwargs: Any) -> Any:
        """Run one call of a method, in groups if these are proven to give the same result."""
        original = self.original(method)
        if torch.compiler.is_compiling():
            self._runs_whole(method, "torch.compile traces it")
            return original(*args, **kwargs)
        if inside_a_tile() or (active_fake_mode() is not None and self.live_bytes is None):
            return original(*args, **kwargs)
        try:
            call = PictureCall(original, args, kwargs)
            parts, weights = self.parts(), self.weights()
            modules = [module for _, module in parts]
            self._check(call, parts, weights)
            proof = self.proofs.of(self.module, modules, self.computing(), call, original, weights)
            if proof.units is None:
                raise NotCutError(proof.why_not)
            units = proof.units(call)
        except NotCutError as error:
            self._runs_whole(method, str(error))
            return original(*args, **kwargs)
        groups = group_ranges(units.patches(_patch_size(self.module)), self.group)
        self.called, self.units, self.most_groups = True, units.noun, max(self.most_groups, len(groups))
        if len(groups) < 2:
            return original(*args, **kwargs)

        def live() -> dict[str, Tensor]:
            weights = self.weights()
            return {name: weights[name] for name in proof.trained}

        # A hook that makes inputs of checkpoints require gradients would otherwise record a frozen tower's graph.
        with nullcontext() if proof.trained else torch.no_grad():
            changed = SameSettings(modules).changed if proof.trained else str
            frozen = (FrozenLayers(self.computing(), live().values()) or None) if proof.skips_frozen else None
            make_call = GroupedCall if self.live_bytes is None else partial(PlannedCall, self.live_bytes)
            return make_call(self.module, original, units, groups, proof.form, frozen=frozen).run(live, changed)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _runs_whole(self, method: str, why: str) -> bool:
        """Log the reason once. torch.compile runs this while it traces, and does not record it."""
        self.why_whole = why
        if self.is_news(why):
            logger.warning("%s.%s runs whole: %s", self.name, method, why)
        return True

    def _check(self, call: PictureCall, parts: list[tuple[str, nn.Module]], weights: dict[str, Tensor]) -> None:
        """Raise if a call must run whole, even with a proof."""
        if asked_for := [name for name in _ASKED_FOR if call.arguments.get(name)]:
            raise NotCutError(f"{asked_for[0]} asks for what groups do not keep")
        if call.pixels.requires_grad:
            raise NotCutError("its pixels require a gradient")
        if elsewhere := [name for name, weight in weights.items() if weight.is_meta or not weight.numel()]:
            raise NotCutError(f"the values of {elsewhere[0]} are not in this process")
        try:
            refuse_gathering_inside(parts, block=self.name, layer="")
        except UserError as error:
            raise NotCutError(str(error)) from None
        for name, module in parts:
            if captures_by_forward(module) or any(not _is_harmless(hook) for hook in foreign_hooks(module)):
                raise NotCutError(f"{name} has hooks, which groups would call with other tensors")
            if module.training and torch.is_grad_enabled() and is_reentrant(module):
                raise NotCutError(f"{name} has reentrant activation checkpoints; use use_reentrant=False")
            if module.training and getattr(module, "running_mean", None) is not None:
                raise NotCutError(f"{name} normalises by the pictures of a batch")


def _is_harmless(hook: Any) -> bool:
    """Whether a hook is one of transformers': one that makes outputs require gradients, or captures nothing now."""
    return captures_nothing(hook) or getattr(hook, "__module__", "") == "transformers.modeling_utils"


def _patch_size(owner: nn.Module) -> int:
    """Pixels along one side of a patch; 1 where it is not known, which puts each picture in a group of its own."""
    config: Any = getattr(owner, "config", None)
    size = getattr(getattr(config, "vision_config", None), "patch_size", 1)
    return int(size[0] if isinstance(size, list | tuple) else size or 1)


class MethodInGroups:
    """The replacement of one method."""

    def __init__(self, tower: VisionTower, method: str) -> None:
        self.tower, self.method = tower, method

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's: ``generate`` reads from it which inputs a method takes."""
        return inspect.signature(self.tower.original(self.method))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tower.run(self.method, args, kwargs)


def find_towers(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """(name, module, its children that compute no features) of the innermost modules that compute features."""
    layers = [layer.name for layer in decoder_layers(model)]
    having = {module: name for name, module in model.named_modules() if any(hasattr(module, m) for m in METHODS)}
    for module, name in having.items():
        if not any(inner in having for inner in module.modules() if inner is not module):
            prefix = f"{name}." if name else ""
            inside = {layer.removeprefix(prefix).partition(".")[0] for layer in layers if layer.startswith(prefix)}
            yield name, module, sorted(inside)
