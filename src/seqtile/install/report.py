"""The report of :func:`seqtile.apply`: tiled blocks, others, and notes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from seqtile._sentences import PrintsAsSentence
from seqtile._technique import Left, TechniqueResult
from seqtile.blocks.install_blocks import Block, BlocksResult
from seqtile.blocks.instance import rotary_by_kernel
from seqtile.blocks.norms_and_projections import norms_by_kernel
from seqtile.devices import device_type
from seqtile.ops import norm, rotary
from seqtile.tiling import KeepRule


@dataclass(frozen=True, repr=False)
class Report(PrintsAsSentence):
    """Result of :func:`seqtile.apply`; ``str(report)`` is one line, and one for each reason of ``fit``.

    Attributes:
        blocks: what was tiled, in module order.
        left: modules that were not changed, and why.
        found: number of blocks that were found, tiled or not.
        keep: rule for the tiles that keep gate and up.
        done: a phrase for each technique beside the blocks' tiles: ``"blocks"`` (norms and projections in tiles of
            their own), ``"heads"``, ``"state"``, ``"chunk"``, ``"weights"``, ``"checkpoint"`` and ``"loss"``.
        settings: what :func:`seqtile.fit` chose, as arguments of :func:`seqtile.apply`; empty without it.
        why: the plan that :func:`seqtile.fit` chose by, and the reason for each setting, one sentence each.
    """

    blocks: tuple[Block, ...]
    left: tuple[Left, ...]
    found: int
    keep: KeepRule
    _model: Callable[[], nn.Module | None] = field(compare=False)
    done: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    why: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module, done: Mapping[str, TechniqueResult]) -> Report:
        """The report on what each technique did in one call."""
        tiled = done.get("blocks")
        tiled = tiled if isinstance(tiled, BlocksResult) else BlocksResult()
        left = dict.fromkeys(module for one in done.values() for module in one.left)  # a prediction head once
        phrases = {name: one.what for name, one in done.items() if one.what}
        return cls(tiled.blocks, tuple(left), tiled.found, tiled.keep, weakref.ref(model), phrases)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": type(None)}  # another process has no such model

    @property
    def tiled(self) -> int:
        """Number of tiled blocks."""
        return len(self.blocks)

    @property
    def norms(self) -> int:
        """Number of norms outside the tiles that now run as one kernel where the device has one."""
        model = self._model()
        return 0 if model is None else norms_by_kernel(model)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user, from the model as it is now: what its steps so far did, and what costs time."""
        notes = []
        for names in sorted({block.together for block in self.blocks if block.follower}):
            notes.append(f"{', '.join(names)} share a tile")
        for class_name, beside in sorted({(block.class_name, block.beside) for block in self.blocks if block.beside}):
            notes.append(
                f"{class_name} takes {beside!r} beside hidden states; calls with one row per sequence, [B, 1, D], "
                "run untiled: pass one row per token, or one for the whole batch"
            )
        if self.keep.kind != "share" or self.keep.value > 0:
            generic = sum(block.path == "generic" for block in self.blocks)
            but = f" (except {generic} blocks in the generic operator)" if generic else ""
            notes.append(f"gate and up saved: {self.keep}{but}")
        model = self._model()
        if model is not None:
            from seqtile.install.notes import notes_on  # it reads what checkpoints and attention do, installed or not

            notes += notes_on(model)
        return tuple(notes)

    def __str__(self) -> str:
        return "\n".join(["; ".join(sentence for sentence in (self.summary, *self.notes) if sentence), *self.why])

    @property
    def summary(self) -> str:
        """What was changed, without :attr:`notes` and :attr:`why`."""
        kinds = Counter((block.class_name, block.kind) for block in self.blocks)
        plurals = {"mlp": "MLPs", "experts": "experts", "inline": "MLPs", "pair": "MLPs", "module": "modules"}
        names = ", ".join(dict.fromkeys(class_name for class_name, _ in kinds))
        what = " and ".join(dict.fromkeys(plurals[block_kind] for _, block_kind in kinds))
        tiles = " or ".join(dict.fromkeys(block.tile for block in self.blocks))
        paths = " and ".join(dict.fromkeys(block.path for block in self.blocks))
        device, counts, model = device_type(), list[str](), self._model()
        if self.norms and norm.BY_DEVICE.get(device, norm.NORM_KERNELS) is not None:
            counts.append(f"{self.norms} other norms")
        if model is not None and rotary.ROTARY_BY_DEVICE.get(device, rotary.ROTARY_KERNELS) is not None:
            counts += [f"{count} rotary embeddings"] if (count := rotary_by_kernel(model)) else []
        kernels = f"{' and '.join(counts)} as one kernel each" if counts else ""
        done = [text for text in (kernels, *self.done.values()) if text]
        if not self.blocks and not done and self.left:
            first, others = self.left[0], len(self.left) - 1
            done = [f"tiled nothing: {first}: {first.why}"]
            done += [f"{others} more in report.left"] if others else []
        if not self.blocks:
            return "; ".join(done)
        custom = [str(module) for module in self.left if module.custom]
        if custom:
            further = f" and {len(custom) - 1} more" if custom[1:] else ""
            done.append(f"custom code left untiled: {custom[0]}{further}, see report.left")
        tiled = f"tiled {self.tiled} of {self.found} {what} ({names}), {tiles}, {paths}"
        return "; ".join([tiled, *done])
