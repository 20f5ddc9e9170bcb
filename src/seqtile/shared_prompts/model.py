"""Let a model of Transformers run rows in which each common prefix is there once.

The model passes the row's segments to its layers and their attention as a keyword argument, as it passes Transformers'
own arguments about packed documents. So a recompute of a layer, in any thread, gets them too, and no global state says
which row is running.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile._compat import HOOK_CONTAINERS, HOOKS, OtherAttention, attention_kind
from seqtile._errors import UserError
from seqtile._stand_in import ForwardStandIn
from seqtile.blocks.instance import installed_forwards
from seqtile.ops.attention.piece_kernels import score_arguments
from seqtile.ops.attention.segment_tree import ARGUMENT, SegmentTable, tree_attention
from seqtile.recognise.decoder_layers import ATTENTION_MIXER, decoder_layers
from seqtile.recognise.known_code import is_known
from seqtile.state.state_cache import cache_argument
from seqtile.state.state_layers import hidden_states_for
from seqtile.state.state_proof import StateProofs
from seqtile.state.tile_call import TileCall

TREE_ATTENTION = "seqtile_shared_prompts"
"""Name of the attention function in Transformers' registry."""

LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "hybrid"}
"""Kinds of layers, as a configuration names them, that :func:`share_prompts` accepts; each state is proven besides."""


def share_prompts(model: nn.Module) -> SharedPrompts:
    """Let ``model`` run the rows of :func:`seqtile.shared_prompts.tree_row`, with its own weights.

    ``model(**row.inputs)``, or its trunk called so, returns hidden states or logits ``[1, T, ...]`` of the row's
    different tokens, equal to those of one row per sample; so are gradients. Every other call runs as before, on the
    attention that the model's configuration names. Works in any order with :func:`seqtile.apply`: tiles, tiled loss,
    activation checkpoints of every kind, offload, ``heads`` and ``chunk``; ``state`` is refused at the first row. Where
    frequencies of rotary embeddings follow the longest sequence of a call (longrope, dynamic), the longest sample sets
    those of all, as in a padded batch.

    Args:
        model: a language model of Transformers, PEFT's wrapper or not; changed in place.

    Returns:
        How many tokens were computed, and of how many; :meth:`SharedPrompts.remove` puts everything back.

    Cost:
        Each different token is computed once. Attention costs the scores that are seen, each once. Dropout is drawn
        once for a token, whatever samples share it. A layer with a state runs segment by segment, each from the state
        at the end of the one that it continues.

    Raises:
        UserError: a layer without attention, attention of custom code, a model that takes no ``position_ids``, or a
            state that cannot be handed on.
    """
    from transformers import AttentionInterface

    remove_sharing(model, OwnHooks)
    layers = decoder_layers(model)
    trunks: dict[nn.Module, TreeCalls] = {}
    around: dict[nn.Module, None] = {}
    attentions: list[nn.Module] = []
    states: list[TreeState] = []
    proofs = StateProofs()
    for layer in layers:
        *path, trunk = _path(model, layer.name.rpartition(".")[0].rpartition(".")[0])
        around |= dict.fromkeys(path)
        calls = trunks.setdefault(trunk, TreeCalls())
        takes_positions = any("position_ids" in inspect.signature(type(m).forward).parameters for m in (*path, trunk))
        for mixer in layer.mixers:
            name = ".".join(part for part in (layer.name, mixer.name) if part)
            module = model.get_submodule(name)
            number: Any = getattr(module, "layer_idx", None)
            if why := _why_not_shared(model, module, mixer.has_state, proofs) or (
                "it has no layer_idx" * (number is None)
                or "its model takes no position_ids" * (not mixer.has_state and not takes_positions)
            ):
                raise UserError(
                    "shared-prompts.mixer-unsupported",
                    f"shared prompts: {name} ({type(module).__name__}) does not support them: {why}",
                )
            calls.mixers[mixer.kind == ATTENTION_MIXER, number] = name
            states.append(TreeState(module)) if mixer.has_state else attentions.append(module)
    if not trunks:
        raise UserError(
            "shared-prompts.no-attention-layers",
            f"shared prompts: {type(model).__name__} has no decoder layers with attention",
        )
    if TREE_ATTENTION not in AttentionInterface():
        AttentionInterface.register(TREE_ATTENTION, attend_tree)
    for module in attentions:
        module.__dict__["config"] = OtherAttention(module.config, TREE_ATTENTION)
    for state in states:
        state.install()
    hooks: dict[nn.Module, AroundTrunk | TreeCalls] = {**dict.fromkeys(around, AroundTrunk()), **trunks}
    for module, hook in hooks.items():
        module.register_forward_pre_hook(hook.before, with_kwargs=True)
        module.register_forward_hook(hook.after, with_kwargs=True)
    return SharedPrompts(weakref.ref(model), tuple(trunks.values()))


def _path(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules from ``model`` down to the one of that name."""
    parts = name.split(".") if name else []
    return [model.get_submodule(".".join(parts[:length])) for length in range(len(parts) + 1)]


def shares_prompts(model: nn.Module) -> bool:
    """Whether :func:`share_prompts` was called on ``model``."""
    hooks = [hook for module in model.modules() for name in HOOKS for hook in module.__dict__[name].values()]
    return any(isinstance(getattr(hook, "__self__", None), TreeHooks) for hook in hooks)


def remove_sharing(model: nn.Module, kind: type[TreeHooks] | None = None) -> None:
    """Undo :func:`share_prompts` on ``model``, and remove hooks of ``kind``, by default all."""
    kind = kind or TreeHooks
    for module in model.modules():
        attributes = module.__dict__
        config = attributes.get("config")
        if isinstance(config, OtherAttention) and attention_kind(config) == TREE_ATTENTION:
            attributes["config"] = config.original
        for forward in [*_stand_ins(module)]:
            if isinstance(forward, TreeState):
                forward.remove()
        for name in HOOKS:
            for key, hook in [*attributes[name].items()]:
                if isinstance(getattr(hook, "__self__", None), kind):
                    for container in HOOK_CONTAINERS:
                        attributes[container].pop(key, None)


@dataclass(frozen=True)
class SharedPrompts:
    """Result of :func:`share_prompts`; ``str()`` of it is a sentence.

    Attributes:
        calls: counters of each trunk of the model.
    """

    _model: weakref.ref[nn.Module]
    calls: tuple[TreeCalls, ...]

    @property
    def tokens(self) -> int:
        """Tokens that went through the model in rows with shared prompts."""
        return sum(calls.tokens for calls in self.calls)

    @property
    def tokens_apart(self) -> int:
        """Tokens that one row per sample would have had."""
        return sum(calls.tokens_apart for calls in self.calls)

    def remove(self) -> None:
        """Put everything back as it was."""
        if (model := self._model()) is not None:
            remove_sharing(model)

    def __str__(self) -> str:
        return f"prompts shared: {self.tokens:,} tokens computed instead of {self.tokens_apart:,}"


class TreeHooks:
    """Base of hooks that :func:`remove_sharing` takes off."""


class OwnHooks(TreeHooks):
    """Base of the hooks that another call of :func:`share_prompts` replaces."""


class AroundTrunk(OwnHooks):
    """Hooks on a module around the decoder layers, such as a head: it must pass the segments on to them."""

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forget which mixers have read the segments."""
        if (segments := kwargs.get(ARGUMENT)) is not None:
            segments.attended.clear()

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Raise if no mixer has read the segments."""
        if (segments := kwargs.get(ARGUMENT)) is not None and not segments.attended:
            raise UserError(
                "shared-prompts.arguments-not-passed-on",
                f"shared prompts: {type(module).__name__} does not pass keyword arguments on to its layers, so its "
                "samples were not kept apart",
            )


@dataclass(eq=False)
class TreeCalls(OwnHooks):
    """Hooks on the module with the decoder layers: check that every mixer reads the segments, and count tokens.

    Attributes:
        mixers: names of attentions and states, by whether it is attention and the layer's number.
        tokens: tokens of all rows so far.
        tokens_apart: tokens of their samples, a shared prefix counted once for each.
    """

    mixers: dict[tuple[bool, int], str] = field(default_factory=dict)
    tokens: int = 0
    tokens_apart: int = 0

    def before(self, trunk: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forget which mixers have read the segments, and refuse ``state``."""
        segments: SegmentTable | None = kwargs.get(ARGUMENT)
        if segments is None:
            return
        segments.attended.clear()
        for forward in installed_forwards(trunk):
            if forward.technique == "state":
                raise UserError("shared-prompts.with-state", "shared prompts do not run with state=; drop state")

    def after(self, trunk: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Raise if a mixer has not read the segments, and count the row's tokens."""
        segments: SegmentTable | None = kwargs.get(ARGUMENT)
        if segments is None:
            return
        missing = [name for key, name in self.mixers.items() if key not in segments.attended]
        if missing:
            others = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise UserError(
                "shared-prompts.arguments-not-passed-on",
                f"shared prompts: {type(trunk).__name__} does not pass keyword arguments on to {missing[0]}{others}, "
                "so its samples were not kept apart",
            )
        self.tokens += segments.tokens
        self.tokens_apart += segments.tokens_apart


def _why_not_shared(model: nn.Module, module: nn.Module, has_state: bool, proofs: StateProofs) -> str:
    """Why a mixer cannot run a row of segments, or ""."""
    if not is_known(type(module).forward):
        return "its forward is custom code"
    if has_state:
        if cache_argument(module) is None:
            return "it accepts no cache, so no segment can begin with the state of another"
        return proofs.why_not(module, hidden_states_for(model, module))
    kind = attention_kind(module)
    if kind is None or "config" not in module.__dict__:
        return "its attention cannot be exchanged"
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
        return "attn_temperature_tuning scales queries by their place in the row; set it to False in the configuration"
    types = {*(getattr(module.config, "layer_types", None) or ())} - LAYER_TYPES
    return f"the model has layers of type {', '.join(sorted(types))}" if types else ""


def attend_tree(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
    shared_prompts: SegmentTable | None = None, **kwargs: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Attention for Transformers, ``[1, H, T, E]`` to ``[1, T, H, V]``; without segments it calls the model's own."""
    replaced: Any = module.config.replaced  # type: ignore[union-attr]
    if shared_prompts is None:
        return _attend_as_before(module, query, key, value, attention_mask, replaced, **kwargs)
    why, is_causal = "", kwargs.get("is_causal")
    if kwargs.get("dropout"):
        why = "attention dropout is on"
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        why = "its attention is not causal"
    elif kwargs.get("position_bias") is not None:
        why = "its attention adds a position bias"
    elif attention_mask is not None and tuple(attention_mask.shape) != (1, 1, 1, 1):
        why = "its attention has a mask of its own"
    elif query.shape[0] != 1 or query.shape[2] != shared_prompts.tokens or key.shape[2] != shared_prompts.tokens:
        shapes = f"{query.shape[0]} rows of {query.shape[2]} queries and {key.shape[2]} keys"
        why = f"got {shapes}, expected one row of {shared_prompts.tokens} tokens"
    if why:
        raise UserError("shared-prompts.call-unsupported", f"shared prompts: {type(module).__name__}: {why}")
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    output = tree_attention(
        query, key, value, shared_prompts, window=kwargs.get("sliding_window"),
        **score_arguments(kwargs, query.shape[-1], replaced),
    )  # fmt: skip
    shared_prompts.attended.add((True, module.layer_idx))
    return output.transpose(1, 2), None


def _attend_as_before(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, replaced: str, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Call the attention function that the model's configuration names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Any
    if replaced == "eager":
        function = sys.modules[type(module).__module__].eager_attention_forward
    else:
        function = ALL_ATTENTION_FUNCTIONS[replaced]
    width = value.shape[-1]
    if "flash" in replaced and width < query.shape[-1]:  # latent attention pads under the name of flash attention
        output, weights = function(module, query, key, F.pad(value, (0, query.shape[-1] - width)), mask, **kwargs)
        return output[..., :width], weights
    return function(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]


def _stand_ins(module: nn.Module) -> Iterator[ForwardStandIn]:
    """The replacements of a module's forward, the outer one first."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, ForwardStandIn):
        yield forward
        forward = forward.before.get("forward")


class TreeState(ForwardStandIn):
    """``forward`` of a mixer with a state: a segment begins with the final state of the segment that it continues."""

    def note(self) -> str:
        return "shared prompts"

    def remove(self) -> None:
        self.take_out()

    def __call__(self, *args: Any, shared_prompts: SegmentTable | None = None, **kwargs: Any) -> Any:
        if shared_prompts is None:
            return self.original(*args, **kwargs)
        module = self.module
        cache = cache_argument(module)
        assert cache is not None
        call = TileCall(args, kwargs, cache)
        if call.why_whole:
            raise UserError(
                "shared-prompts.call-unsupported", f"shared prompts: {type(module).__name__}: {call.why_whole}"
            )
        shared_prompts.attended.add((False, module.layer_idx))
        ends: list[tuple[Any, list[Tensor]]] = []  # per segment: its state, and its tokens that the state has not read
        outputs: list[Any] = []
        for start, end, parent in _segments(shared_prompts):
            state, unread = ((), []) if parent == -1 else ends[parent]
            tensors = [tensor[:, start:end] for tensor in call.tensors]
            if unread:
                tensors = [torch.cat(pair, 1) for pair in zip(unread, tensors, strict=True)]
            tokens = tensors[0].shape[1]
            if state and tokens == 1:
                # Transformers treats a single token as a decoding step, and writes into the state: run it twice, keep
                # the first output, and run it once more in the segments that continue this one.
                output, _ = call.run(module, [torch.cat([tensor, tensor], 1) for tensor in tensors], state)
                ends.append((state, tensors))
            else:
                output, after = call.run(module, tensors, state)
                ends.append((after, []))
            outputs.append(output[:, tokens - (end - start) : tokens])
        return torch.cat(outputs, 1)


def _segments(segments: SegmentTable) -> Iterator[tuple[int, int, int]]:
    return zip(segments.starts, segments.ends, segments.parents, strict=True)
