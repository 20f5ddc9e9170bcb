"""Run a model's decoder layers in chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from seqtile._errors import UserError
from seqtile._technique import Left, TechniqueResult
from seqtile.blocks.instance import NO_EFFECT, ForwardsTechnique, idle_sentences
from seqtile.blocks.layer import TiledLayer
from seqtile.chunks.chunk_proof import ChunkProofs
from seqtile.chunks.segment import AllComputed, ChunkForward, ChunkSetting, Segment
from seqtile.engines.zero3 import mark_leaf
from seqtile.options import TilingOptions
from seqtile.recognise.decoder_layers import DecoderLayer, decoder_layers


class ChunksTechnique(ForwardsTechnique):
    """``chunk`` and ``segment``: the decoder layers run on one chunk of the sequence after another."""

    name = "chunk"

    def check(self) -> None:
        """Refuse a model without decoder layers.

        Raises:
            UserError: there are none.
        """
        if not decoder_layers(self.model):
            raise UserError(
                "chunk.no-layers",
                f"chunk={self.options.chunk!r}: {type(self.model).__name__} has no decoder layers; drop chunk",
            )

    def install(self, inside: Collection[str]) -> TechniqueResult:
        return _install_chunks(self.model, self.options.chunk or "auto", self.options.segment)

    @classmethod
    def with_earlier_settings(cls, model: nn.Module, options: TilingOptions) -> TilingOptions:
        if options.chunk is not None:
            return options
        setting = cls.installed(model)[0].chunk
        return replace(options, chunk=setting.tokens, segment=setting.segment)

    @classmethod
    def without_effect(cls, forwards: Sequence[ChunkForward]) -> list[str]:
        tokens = forwards[0].chunk.tokens
        return idle_sentences(f"chunk={tokens}", forwards, decides=tokens == "auto") or _idle_segment(forwards)


def _idle_segment(forwards: Sequence[ChunkForward]) -> list[str]:
    """A sentence if no layers shared their chunks although ``segment`` asks for it."""
    reasons = dict.fromkeys(forward.alone_reason for forward in forwards if forward.alone_reason)
    segment = forwards[0].chunk.segment
    if segment == 1 or not reasons or any(forward.together for forward in forwards):
        return []
    return [f"segment={segment} {NO_EFFECT}: {'; '.join(reasons)}"]


def _install_chunks(model: nn.Module, chunk: int | str, segment: int) -> TechniqueResult:
    layers = decoder_layers(model)
    left, lists = list[Left](), dict[str, list[DecoderLayer]]()
    for layer in layers:
        forward = model.get_submodule(layer.name).__dict__.get("forward")
        if forward is not None and not isinstance(forward, TiledLayer):
            left.append(Left(layer.name, layer.class_name, "its forward was replaced"))
        else:
            lists.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    proofs = ChunkProofs()
    for list_name, siblings in lists.items():
        for first in range(0, len(siblings), segment):
            together = siblings[first : first + segment]
            shared = Segment(len(together))
            for position, layer in enumerate(together):
                module = model.get_submodule(layer.name)
                attends = any(not mixer.has_state for mixer in layer.mixers)
                setting = ChunkSetting(chunk, layer.name, position, attends, bool(layer.states), segment)
                forward = ChunkForward(module, setting, shared, proofs)
                forward.install()
                mark_leaf(module)
                if segment > 1 and layer is siblings[0]:
                    owner = model.get_submodule(list_name.rpartition(".")[0])
                    forward.hook = owner.register_forward_hook(AllComputed(proofs))
    size = "about 8,192" if chunk == "auto" else f"{chunk:,}"
    of_layers = f", {segment} layers at a time" if segment > 1 else ""
    done = len(layers) - len(left)
    return TechniqueResult(
        f"decoder layers in chunks of {size} tokens{of_layers}: {done} of {len(layers)}, verified at their first call",
        left,
    )
