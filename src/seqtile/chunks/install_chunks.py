"""Run a model's decoder layers in chunks."""

from __future__ import annotations

from torch import nn

from seqtile._errors import UserError
from seqtile.blocks.layer import TiledLayer
from seqtile.chunks.chunk_proof import ChunkProofs
from seqtile.chunks.segment import AllComputed, ChunkForward, ChunkSetting, Segment
from seqtile.engines.zero3 import mark_leaf
from seqtile.recognise.candidates import Left
from seqtile.recognise.decoder_layers import DecoderLayer, decoder_layers


def install_chunks(model: nn.Module, chunk: int | str | None, segment: int) -> tuple[str, list[Left]]:
    """Run the decoder layers of ``model`` in chunks of tokens, ``segment`` layers at a time.

    Returns:
        A description, and the layers that are left whole.

    Raises:
        UserError: the model has no decoder layer.
    """
    if chunk is None:
        return "", []
    layers = decoder_layers(model)
    if not layers:
        raise UserError(f"chunk={chunk!r}: {type(model).__name__} has no decoder layers; drop chunk")
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
                setting = ChunkSetting(chunk, layer.name, position, bool(layer.mixers) and not layer.states, segment)
                forward = ChunkForward(module, setting, shared, proofs)
                forward.install()
                mark_leaf(module)
                if segment > 1 and layer is siblings[0]:
                    owner = model.get_submodule(list_name.rpartition(".")[0])
                    forward.hook = owner.register_forward_hook(AllComputed(proofs))
    size = "about 8,192" if chunk == "auto" else f"{chunk:,}"
    of_layers = f", {segment} layers at a time" if segment > 1 else ""
    done = len(layers) - len(left)
    return (
        f"decoder layers in chunks of {size} tokens{of_layers}: {done} of {len(layers)}, verified at their first call",
        left,
    )
