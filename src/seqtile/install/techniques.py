"""The techniques of :func:`seqtile.apply`: when each is wanted, and in which order they change a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from seqtile._technique import Technique
from seqtile.options import TilingOptions


class _Entry(NamedTuple):
    """Where a technique is.

    Attributes:
        wanted: whether options ask for it.
        home: its module, imported when it is first asked for.
        class_name: its class there.
        defines: the module that defines what it puts on a model; where it is not imported, no model has any.
    """

    wanted: Callable[[TilingOptions], bool]
    home: str
    class_name: str
    defines: str


_ENTRIES = (
    _Entry(lambda options: options.tiled, "blocks.install_blocks", "BlocksTechnique", "blocks.instance"),
    _Entry(
        lambda options: options.heads is not None, "headwise.install_heads", "HeadsTechnique", "headwise.install_heads"
    ),
    _Entry(lambda options: options.state is not None, "state.state_layers", "StateTechnique", "state.tiled_state"),
    _Entry(lambda options: options.chunk is not None, "chunks.install_chunks", "ChunksTechnique", "chunks.segment"),
    _Entry(
        lambda options: options.checkpoint is not None or bool(options.offload_room), "install.checkpoints",
        "CheckpointTechnique", "checkpointing.policies",
    ),
    _Entry(lambda options: options.loss is not None, "lm_loss.tiled_loss", "LossTechnique", "lm_loss.tiled_loss"),
    _Entry(lambda options: options.vision is not None, "vision.install_vision", "VisionTechnique", "vision.tower"),
    # Last, since a call that fails puts back attributes and hooks, and no weights that have moved.
    _Entry(lambda options: options.weights_on_host, "host_weights", "HostWeightsTechnique", "host_weights"),
)  # fmt: skip
"""In the order of installation: a replaced forward of a layer is put over those of the techniques above it."""

NOTHING_REPLACED = len(_ENTRIES)
"""A place behind every technique's."""

EXCLUDES = {"chunk": ("heads", "state"), "heads": ("chunk",), "state": ("chunk",)}
"""Techniques that come off where one is asked for, since it does the same in another way."""


def wanted_techniques(options: TilingOptions) -> list[type[Technique]]:
    """The techniques that ``options`` ask for, in their order."""
    return [_class_of(entry) for entry in _ENTRIES if entry.wanted(options)]


def known_techniques() -> list[type[Technique]]:
    """The techniques that this process has used so far, in their order; no model has anything of another one."""
    return [_class_of(entry) for entry in _ENTRIES if f"seqtile.{entry.defines}" in sys.modules]


def order_of(technique: type[Technique]) -> int:
    """Its place in the order of installation."""
    return [entry.class_name for entry in _ENTRIES].index(technique.__name__)


def _class_of(entry: _Entry) -> type[Technique]:
    technique: type[Technique] = getattr(import_module(f"seqtile.{entry.home}"), entry.class_name)
    return technique
