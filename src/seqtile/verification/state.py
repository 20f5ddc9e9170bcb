"""Save and restore a model's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from seqtile._compat import has_gradient_step
from seqtile._errors import UserError
from seqtile.blocks.instance import installed_forwards
from seqtile.install.apply import apply, take_off
from seqtile.install.attribute_snapshot import AttributeSnapshot
from seqtile.install.report import Report
from seqtile.lm_loss.tiled_loss import installed_losses
from seqtile.options import Only

Tiled = list[tuple[nn.Module, dict[str, Any]]]
"""Tiled modules with the attributes that make them so."""


def refuse_what_cannot_be_compared(model: nn.Module) -> None:
    """Raise ``UserError`` if two backwards would compare nothing, fail, or change the model."""
    weights = dict(model.named_parameters())
    if not any(weight.requires_grad for weight in weights.values()):
        raise UserError("verify.nothing-trains", f"{type(model).__name__} has no trainable parameter; unfreeze some")
    for name, weight in weights.items():
        if weight.is_meta:
            raise UserError("verify.meta-weights", f"{name} is on the meta device; load the weights before verify")
        if has_gradient_step(weight):
            raise UserError(
                "verify.gradient-hook", f"{name} has a gradient hook (an optimizer step?); call verify before adding it"
            )


@contextmanager
def kept(model: nn.Module, seed: int) -> Iterator[None]:
    """Take the gradients off; put them, buffers, training modes and random state back at the end."""
    device = next(model.parameters()).device
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    random_state = (
        torch.random.fork_rng([]) if device.type == "cpu" else torch.random.fork_rng([device], device_type=device.type)
    )
    with random_state:
        try:
            torch.manual_seed(seed)
            model.zero_grad(set_to_none=True)
            yield
        finally:
            with torch.no_grad():
                for buffer, value_before in buffers:
                    buffer.copy_(value_before)
            for weight, gradient in gradients:
                weight.grad = gradient
            for module, training in modes:
                module.training = training


@contextmanager
def without_tiling(model: nn.Module) -> Iterator[Tiled]:
    """Take the tiling off; yields what stood, and puts exactly that back at the end.

    Weights that wait on the host stay there: the device may lack room for them.
    """
    losses, forwards = installed_losses(model), installed_forwards(model)
    tiled: Tiled = [(module, dict(module.__dict__)) for module in dict.fromkeys(one.module for one in forwards)]
    for loss in losses:
        attributes = loss.module.__dict__
        tiled.append((loss.module, {name: attributes[name] for name in loss.changed if name in attributes}))
    befores = [(forward, forward.before) for forward in forwards]
    snapshot = AttributeSnapshot(model)
    take_off(model, leave="weights")
    changes = snapshot.changed()
    for forward, before in befores:  # which accelerate's hooks over a forward have changed
        forward.before = before
    try:
        yield tiled
    finally:
        changes.undo()


@contextmanager
def tiled_for_comparison(model: nn.Module, *, tile: int | str, only: Only | None) -> Iterator[Report]:
    """Blocks in tiles inside the ``with`` block; weights that wait on the host stay there."""
    report = apply(model, tile=tile, only=only)
    try:
        yield report
    finally:
        take_off(model, leave="weights")


@contextmanager
def without_dropout(model: nn.Module, *, off: bool = True) -> Iterator[int]:
    """Set dropout probabilities to 0: those of modules, and the attributes that functional dropouts read.

    Yields how many there were; with ``off=False`` they are only counted.
    """
    places = []
    for module in model.modules():
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and ("drop" in name or (is_dropout and name == "p")):
                places.append((module, name, value))
    for module, name, _ in places if off else ():
        setattr(module, name, 0.0)
    try:
        yield len(places)
    finally:
        for module, name, value in places:
            setattr(module, name, value)
