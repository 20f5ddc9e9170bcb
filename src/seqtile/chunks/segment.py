"""``forward`` of decoder layers over chunks of the sequence, a segment of layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from seqtile._compat import (
    CHECKPOINT_FUNCTION,
    ROUTER_LOGITS,
    backward_pass,
    capture_router_logits,
    captures_by_forward,
    captures_nothing,
    captures_router_logits,
    checkpoints_in_forward,
    forward_pre_hooks_of,
    replaced_attention,
)
from seqtile._errors import UserError
from seqtile.blocks.instance import Installed, inside_a_tile
from seqtile.checkpointing.reentrant import is_reentrant
from seqtile.chunks.chunk_node import run_segment
from seqtile.chunks.chunk_proof import UNKNOWN, ChunkProof, ChunkProofs
from seqtile.chunks.layer_cache import given_mask
from seqtile.chunks.layer_call import ChunkedCall
from seqtile.engines.flat import is_flat_view, named_weights
from seqtile.engines.zero12 import reduces_as_they_arrive
from seqtile.recognise.live_weights import foreign_hooks, seen_inside
from seqtile.state.state_cache import cache_argument
from seqtile.state.tile_call import argument_value
from seqtile.tiling import StateTiles, chunk_sizes, tile_ranges

WHOLE, ALONE, TOGETHER = "whole", "alone", "together"
"""How a call of a layer runs."""


@dataclass(eq=False)
class Segment:
    """Layers that one node of the graph computes; all but the last only record their call.

    Attributes:
        layers: how many.
        recorded: forwards and calls of the layers that were called, in order.
        hidden_states: what they passed on unchanged.
    """

    layers: int
    recorded: list[tuple[ChunkForward, ChunkedCall]] = field(default_factory=list)
    hidden_states: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Segment:
        copied: Segment = memo.setdefault(id(self), Segment(self.layers))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "recorded": [], "hidden_states": None}

    def take(self) -> list[tuple[ChunkForward, ChunkedCall]]:
        """The recorded calls; none are left."""
        recorded, self.recorded, self.hidden_states = self.recorded, [], None
        return recorded


class AllComputed:
    """Forward hook on the module around the layers: raises where layers were recorded and no later one ran them."""

    def __init__(self, proofs: ChunkProofs) -> None:
        self.proofs = proofs

    def __call__(self, *_: Any) -> None:
        segment = self.proofs.recording
        if segment is not None and segment.recorded and not torch.compiler.is_compiling():
            segment.recorded[-1][0].refuse_segment("the layers after it were not called", "behind")


@dataclass(frozen=True)
class ChunkSetting:
    """How one layer runs in chunks.

    Attributes:
        tokens: tokens of each row per chunk, or ``"auto"``.
        name: qualified name of the layer.
        position: its place in the segment.
        attends: whether it has attention.
        has_state: whether it carries a state. A layer may have both, or neither: an MLP alone.
        segment: layers of a full segment.
    """

    tokens: int | str
    name: str
    position: int = 0
    attends: bool = True
    has_state: bool = False
    segment: int = 1

    @property
    def layer(self) -> str:
        """Qualified name of the decoder layer."""
        return self.name


class ChunkForward(Installed):
    """``forward`` of one decoder layer, over chunks of its sequence.

    Args:
        layer: the decoder layer.
        setting: how it runs.
        segment: the layers that it is computed with.
        proofs: what is known of layers like it.

    Attributes:
        chunks: most chunks of any call so far.
        together: whether some call so far shared its chunks with other layers.
        alone_reason: why its last call could not, or "".
    """

    technique = "chunk"

    left_out_compiled = "chunk is ignored under torch.compile: compiled layers run whole"

    def __init__(self, layer: nn.Module, setting: ChunkSetting, segment: Segment, proofs: ChunkProofs) -> None:
        super().__init__(layer, setting)  # type: ignore[arg-type]
        self.chunk, self.segment, self.proofs = setting, segment, proofs
        self.cache = cache_argument(layer)
        self.chunks = 0
        self.together, self.alone_reason = False, ""
        self.hook: Any = None  # of the module around the layers, for the first of them

    def remove(self) -> None:
        if self.hook is not None:
            self.hook.remove()
        super().remove()

    def note(self) -> str:
        of_layers = f", with {self.segment.layers} layers" if self.segment.layers > 1 else ""
        return f"chunk={self.chunk.tokens}{of_layers}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if inside_a_tile():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            self.note_compiled()
            return self.original(*args, **kwargs)
        if not torch.is_grad_enabled() and not module.training:
            return self.original(*args, **kwargs)
        checkpointed = module.training and torch.is_grad_enabled() and getattr(module, "gradient_checkpointing", False)
        cache = None if self.cache is None else argument_value(args, kwargs, self.cache)
        if cache is not None and not torch.is_grad_enabled():
            return self.original(*args, **kwargs)  # generate() on a model in training mode
        segment, position = self.segment, self.chunk.position
        if not position:
            segment.take()  # of a forward that ended in an error
        call = self._call_of(args, kwargs)
        decided = self._decision_of_forward(call) if backward_pass() != -1 else ""
        if decided == WHOLE:
            return self.original(*args, **kwargs)
        before = self.proofs.recording  # the segment that recorded last
        if before not in (None, segment) and before.recorded and before.hidden_states is call.hidden_states:
            before.recorded[-1][0].refuse_segment("the layers after it were not called", "behind")
        reads_cache = (self.chunk.attends or self.chunk.has_state) and not checkpointed
        why = call.why_whole or self._hooked(call) or (_why_not_without(cache, module) if reads_cache else "")
        why = "" if decided else why
        proof = UNKNOWN if why else self.proofs.of(self.module, call, args, kwargs)
        if why := why or proof.why_not:
            return self._whole(why, call, args, kwargs)
        self.check()
        self.refused = ""
        hidden_states = call.hidden_states
        if not decided:
            self.alone_reason = self._why_alone(proof)
        alone = segment.layers == 1 or (decided == ALONE if decided else bool(self.alone_reason))
        if segment.recorded and (alone or hidden_states is not segment.hidden_states):
            self.refuse_segment(self.alone_reason or "hidden states change between them")
        cuts = self._cuts([call])
        if why := _why_not_cut(call, cuts):
            return self._whole(why, call, args, kwargs)
        self._note_decision(call, ALONE if alone else TOGETHER)
        self.called, self.acted = True, self.acted or len(cuts.sizes) > 1
        self.most_tiles = max(self.most_tiles, len(cuts.sizes))
        self.most_tokens = max(self.most_tokens, call.batch * call.tokens)
        if alone and len(cuts.sizes) == 1 and checkpointed and not reduces_as_they_arrive(module.parameters()):
            return self.original(*args, **kwargs)
        if call.segments is not None:  # states reach the segments by the chunks' cache
            call.segments.attended |= {(False, m.layer_idx) for m in module.modules() if hasattr(m, "layer_idx")}
        segment.hidden_states, self.proofs.recording = hidden_states, segment
        segment.recorded.append((self, call))
        if not alone and position < segment.layers - 1:
            assert hidden_states is not None
            return proof.as_returned(hidden_states)
        return self._run(segment.take(), bool(checkpointed))

    def _call_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ChunkedCall:
        flash = self.chunk.attends and self._is_flash()
        return ChunkedCall(
            args,
            kwargs,
            self.cache,
            has_state=self.chunk.has_state,
            reads_starts=flash or self.chunk.has_state,
            reads_positions=flash,
            captures=captures_router_logits(),
        )

    def _is_flash(self) -> bool:
        """Whether its attention keeps packed documents apart by their positions and ends."""
        kinds = {replaced_attention(module) for module in self.module.modules()}
        return any(kind is not None and kind.startswith("flash") for kind in kinds)

    def _cuts(self, calls: Sequence[ChunkedCall]) -> StateTiles:
        """The chunks of a segment; its layers may name the documents in different ways, or not at all."""
        documents = next((call.documents for call in calls if call.documents), ())
        return chunk_sizes(calls[0].tokens, calls[0].batch, self.chunk.tokens, documents)

    def _run(self, recorded: list[tuple[ChunkForward, ChunkedCall]], checkpointed: bool) -> Any:
        """The node of a segment, under the last layer's activation checkpoint."""
        modules, calls = [forward.module for forward, _ in recorded], [call for _, call in recorded]
        cuts, changed = self._cuts(calls), self.settings_of(modules).changed
        if len(calls) > 1 and any(_reaches(call, cuts) for call in calls):
            self.refuse_segment("its attention mask lets tokens see later chunks")
        for forward, _ in recorded:
            forward.chunks = max(forward.chunks, len(cuts.sizes))
            forward.together = forward.together or len(recorded) > 1
        tensors = calls[0].take() + [tensor for call in calls[1:] for tensor in call.take()[1:]]

        captures = calls[0].captures

        def run(*tensors: Tensor) -> Any:
            result, captured = run_segment(modules, calls, tensors, cuts, partial(_weights_of, modules), changed)
            return (result, captured) if captures else result

        run.layers = len(calls)  # type: ignore[attr-defined]
        output = self._under_checkpoint(run, tensors, checkpointed, len(calls))
        if not captures:
            return output
        result, captured = output
        capture_router_logits(captured)  # once for all chunks, and never in a recompute
        return result

    def _under_checkpoint(
        self, run: Callable[..., Any], tensors: Sequence[Tensor], checkpointed: bool, layers: int
    ) -> Any:
        if checkpointed and checkpoints_in_forward(self.module):
            return getattr(self.module, CHECKPOINT_FUNCTION)(run, *tensors)
        # Transformers before 5.24 runs the checkpoint around each layer's call. The last layer's recompute would lack
        # the other layers' calls, so it must see nothing of what the node saves.
        with saved_tensors_hooks(_unchanged, _unchanged) if layers > 1 else nullcontext():
            return run(*tensors)

    def _why_alone(self, proof: ChunkProof) -> str:
        """Why it cannot share its chunks with other layers, or ""."""
        if proof.returns_more:
            return f"{type(self.module).__name__} returns other tensors beside its hidden states"
        if frees_weights(self.module):
            return "weights are on the device for one layer at a time"
        if captures_by_forward(self.module) or not all(map(captures_nothing, foreign_hooks(self.module))):
            return "hooks read a layer's hidden states"
        return "reentrant checkpoints recompute one layer at a time" if is_reentrant(self.module) else ""

    def refuse_segment(self, why: str, side: str = "before") -> None:
        """Raise: the layer cannot share its chunks with the one before it, or behind it."""
        self.segment.take()
        raise UserError(
            "segment.layers-apart",
            f"segment={self.segment.layers}: {self.chunk.name} ({type(self.module).__name__}) cannot be in one "
            f"segment with the layer {side} it: {why}; use segment=1",
        )

    def _hooked(self, call: ChunkedCall) -> str:
        """Why hooks inside the layer keep it whole, or ""."""
        if call.captures and is_reentrant(self.module):
            return "reentrant checkpoints capture router logits without a gradient"
        name = seen_inside(self.module, but=ROUTER_LOGITS)
        return name and f"{name} has hooks, which chunks would call with other tensors"

    def _whole(self, why: str, call: ChunkedCall, args: Any, kwargs: Any) -> Any:
        if self.segment.recorded:
            self.refuse_segment(f"it runs whole, because {why}")
        self._note_decision(call, WHOLE)
        return self.run_whole(why, args, kwargs)

    def _note_decision(self, call: ChunkedCall, decision: str) -> None:
        """Note how this call runs, for the recompute of a checkpoint around the layer."""
        if backward_pass() == -1:
            _decisions_of(call)[self] = decision

    def _decision_of_forward(self, call: ChunkedCall) -> str:
        """How the forward ran that this call computes again: hooks, patches and other calls may differ by now."""
        decision: str = _decisions_of(call).get(self, "")
        return decision or (WHOLE if self.refused else "")


_OF_LEAVES = WeakTensorKeyDictionary()
"""Decisions of the calls whose hidden states no node computed, such as a first layer's behind frozen embeddings."""


def _decisions_of(call: ChunkedCall) -> Any:
    """How each layer ran with a call's hidden states, by its forward; only these does a recompute have too.

    Saved-tensor hooks give a recompute other tensors, but of the same node.
    """
    hidden_states = call.hidden_states
    if hidden_states is None:
        return {}
    node: Any = hidden_states.grad_fn
    return _OF_LEAVES.setdefault(hidden_states, {}) if node is None else node.metadata


def _reaches(call: ChunkedCall, cuts: StateTiles) -> bool:
    """Whether some token sees one of a later chunk."""
    ranges = [(start, start + size) for start, size in tile_ranges(cuts.sizes)]
    return any(given_mask(mask).reaches(*queries) for mask in call.masks for queries in ranges)


def _why_not_cut(call: ChunkedCall, cuts: StateTiles) -> str:
    """Why these chunks would change the layer's result, or ""."""
    if _reaches(call, cuts):
        return "its attention mask lets tokens see later chunks"
    if any(given_mask(mask).hides_all for mask in call.masks):
        return "its attention mask has rows without a visible token"
    if call.segments is not None and call.documents:
        parents = dict(zip(call.segments.starts, call.segments.parents, strict=True))
        if any(size == 1 and parents[start] != -1 for start, size in tile_ranges(cuts.sizes)):
            return "a segment of one token begins with a state, as a decoding step does"
    return ""


def _why_not_without(cache: Any, layer: nn.Module) -> str:
    """Why a layer that was called with a cache cannot run without it: the cache holds something already."""
    if cache is None:
        return ""
    try:
        number = next((module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")), 0)
        empty = not cache.get_seq_length(number)
    except ValueError:  # of a layer that keeps a state
        empty = not cache.has_previous_state(number)
    except (AttributeError, NotImplementedError, TypeError):
        empty = False
    return "" if empty else "it was called with a cache; pass use_cache=False"


def frees_weights(layer: nn.Module) -> bool:
    """Whether an engine, or weights on the host, take a layer's weights away as soon as it has run."""
    if type(layer).__name__.startswith("FSDP"):
        return True
    weights = [weight for _, weight in named_weights(layer)]
    on_host = any(type(hook).__module__ == "seqtile.host_weights" for hook in forward_pre_hooks_of(layer).values())
    return on_host or any(hasattr(weight, "ds_shape") or is_flat_view(weight) for weight in weights)


def _weights_of(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The live weights of a segment, each name after its layer's number; one that layers share is there once."""
    names: dict[Tensor, str] = {}
    for number, module in enumerate(modules):
        for name, weight in named_weights(module):
            names.setdefault(weight, f"{number}.{name}")
    return {name: weight for weight, name in names.items()}


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
