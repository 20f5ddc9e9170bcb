"""The report of :func:`seqtile.apply`: tiled blocks, others, and notes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from seqtile._compat import attention_kind, early_stop
from seqtile._sentences import PrintsAsSentence
from seqtile.blocks.instance import Installed, refusals
from seqtile.blocks.norms_and_projections import adapted_since, norms_by_kernel
from seqtile.checkpointing.keep_attention import wide_heads
from seqtile.checkpointing.reentrant import is_reentrant, shares_keys
from seqtile.chunks.segment import ChunkForward
from seqtile.devices import device_type
from seqtile.headwise.install_heads import rotary_by_kernel
from seqtile.install.loss_and_checkpoints import attention_runs_twice, rest_notes
from seqtile.install.tile_effects import tile_effects
from seqtile.ops import norm, rotary
from seqtile.ops.attention.backends import attention_sentences, rotary_sentences
from seqtile.recognise.candidates import Left
from seqtile.recognise.known_kernels import parts_by_liger
from seqtile.tiling import KeepRule

ATTENTION_COUNTS = 8192
"""Tokens from which a second attention forward is a few percent of a step; the report is silent below."""


@dataclass(frozen=True)
class Block:
    """One tiled block.

    Attributes:
        name: qualified name.
        class_name: class of the module, or of the layer around it for parts that are its children.
        kind: ``"mlp"``, ``"experts"``, ``"inline"`` or ``"pair"`` (see
            :class:`seqtile.recognise.candidates.Candidate`), or ``"module"``, from :func:`seqtile.tile_module`.
        path: operator that runs it: ``"fused"`` or ``"generic"``.
        hidden: width of its input.
        intermediate: width of its widest tensor per token.
        together: children of the layer that run in the same tile, in order.
        tile: description of the tile rule.
        why: what proves that it is position-wise.
        not_fused: why the fused operator does not apply, or "".
        follower: whether a norm or dropout after the block is in the tile.
        beside: name of the argument that its forward takes beside hidden states, or "".
    """

    name: str
    class_name: str
    kind: str
    path: str
    hidden: int
    intermediate: int
    together: tuple[str, ...]
    tile: str
    why: str
    not_fused: str
    follower: bool
    beside: str = ""


@dataclass(frozen=True, repr=False)
class Report(PrintsAsSentence):
    """Result of :func:`seqtile.apply`; ``str(report)`` is one line, and one for each reason of ``fit``.

    Attributes:
        blocks: what was tiled, in module order.
        left: modules that were not tiled, and why.
        found: number of blocks that were found, tiled or not.
        keep: rule for the tiles that keep gate and up.
        heads: what was done to attention, or "".
        loss: what was done to the loss, or "".
        checkpointing: what activation checkpoints keep and where, or "".
        rows: how many norms and projections run in tiles of their own, or "".
        state: what was done to layers that carry a state, or "".
        settings: what :func:`seqtile.fit` chose, as arguments of :func:`seqtile.apply`; empty without it.
        why: the plan that :func:`seqtile.fit` chose by, and the reason for each setting, one sentence each.
    """

    blocks: tuple[Block, ...]
    left: tuple[Left, ...]
    found: int
    keep: KeepRule
    _model: weakref.ref[nn.Module] = field(compare=False)
    heads: str = ""
    loss: str = ""
    checkpointing: str = ""
    rows: str = ""
    state: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)
    why: tuple[str, ...] = ()

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
        """Notes for the user, from the model as it is now: costs of its activation checkpointing,
        and layers with a state that a trial at their first call left whole."""
        model = self._model()
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
        if model is not None and any(is_reentrant(module) for module in model.modules()):
            notes.append(
                "reentrant activation checkpointing runs each block once more (14 GEMM units for a gated MLP "
                "instead of 11, untiled 12); use use_reentrant=False"
            )
            if shares_keys(model):
                notes.append(
                    "layers of this model share keys and values; under reentrant checkpointing the layers that "
                    "compute them lose part of their gradient, tiled or not"
                )
        if model is not None and attention_kind(model) == "sdpa" and (wide_heads_note := wide_heads(model.config)):
            notes.append(wide_heads_note)
        if early_stop() is False:
            notes.append(
                "early stop of activation checkpointing is off, so each block runs once more (14 GEMM units for a "
                "gated MLP, untiled 12)"
            )
        forwards = [] if model is None else [module.__dict__.get("forward") for module in model.modules()]
        left_out = [
            forward.left_out_compiled for forward in forwards if isinstance(forward, Installed) and forward.compiled
        ]
        notes += dict.fromkeys(left_out)
        further = rest_notes(model) if model is not None else []
        further += [] if model is None else [note for effects in tile_effects(model) for note in effects.notes()]
        ran = [seen for forward in forwards if (seen := getattr(forward, "attention_ran", None)) is not None]
        if ran and not any(note.startswith("attention ran on") for note in further):
            further += attention_sentences(frozenset().union(*ran))
        if model is not None:
            further = [*further, *refusals(model)]
            further += [] if rotary_by_kernel(model) else rotary_sentences(model)
            most = max((forward.most_tokens for forward in forwards if isinstance(forward, Installed)), default=0)
            in_chunks = any(isinstance(forward, ChunkForward) for forward in forwards)  # which save no attention
            again = "" if in_chunks else attention_runs_twice(model, most)
            if again and (not most or most >= ATTENTION_COUNTS):
                further.append(again)
            if by_liger := parts_by_liger(model):
                further.append(f"Liger's kernels run the {' and the '.join(by_liger)}")
            if adapted := adapted_since(model):
                further.append(
                    f"adapters were added to {adapted} projections after tiling, and run untiled; call "
                    "seqtile.apply again"
                )
        return (*notes, *further)

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
        rows = self.rows and f"{self.rows} tiled separately"
        device, counts, model = device_type(), list[str](), self._model()
        if self.norms and norm.BY_DEVICE.get(device, norm.NORM_KERNELS) is not None:
            counts.append(f"{self.norms} other norms")
        if model is not None and rotary.ROTARY_BY_DEVICE.get(device, rotary.ROTARY_KERNELS) is not None:
            counts += [f"{count} rotary embeddings"] if (count := rotary_by_kernel(model)) else []
        kernels = f"{' and '.join(counts)} as one kernel each" if counts else ""
        done = [text for text in (kernels, rows, self.heads, self.state, self.loss, self.checkpointing) if text]
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
