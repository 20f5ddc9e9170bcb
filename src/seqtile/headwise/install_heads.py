"""Head-wise attention on one instance: its forward runs one group of key-value heads after another.

Nothing of the model's attention is written down here: its own forward runs on a view of the module with fewer heads
(:mod:`seqtile.headwise.attention_modules`). Where the decoder layer shows that nothing else reads the norm
before attention, the norm runs in the same node, so that no copy of the whole hidden states is made in its precision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import CACHE_ARGUMENTS, HOOKS_OF_ALL, attention_kind, hook_on_every_module, ulysses_around
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile._technique import Left, TechniqueResult
from seqtile.blocks.instance import ForwardsTechnique, Installed, idle_sentences, installed_forwards
from seqtile.blocks.layer import NormedAttention, TiledLayer
from seqtile.blocks.norms_and_projections import KernelNorm, TiledRows
from seqtile.engines.flat import ParameterSwap, call_with_weights
from seqtile.engines.zero3 import mark_leaf
from seqtile.engines.zero12 import reduces_as_they_arrive
from seqtile.headwise.attention_modules import (
    Attention,
    HeadShape,
    View,
    between_weights,
    find_attention,
    nothing_like,
)
from seqtile.ops.attention.group_core import Groups, HeadGroup, cut_heads, in_groups
from seqtile.ops.attention.head_groups import HeadWeights, head_wise
from seqtile.ops.linear import Projection
from seqtile.ops.rng import Autocast, RowWise
from seqtile.options import TilingOptions
from seqtile.recognise.decoder_layers import states_of
from seqtile.recognise.known_functions import twins_for, with_rotary
from seqtile.recognise.live_weights import differ_in_dtype, projection_of, row_wise
from seqtile.tiling import head_passes, projection_sizes

logger = first_rank_logger(__name__)

Heads = int | str
"""Key-value heads per pass, or ``"auto"``."""


@dataclass(frozen=True)
class HeadSetting:
    """How one attention runs.

    Attributes:
        per_pass: key-value heads per pass, or ``"auto"``.
        shape: its heads.
        name: qualified name of the module.
        layer: qualified name of the decoder layer around it, or "".
    """

    per_pass: Heads
    shape: HeadShape
    name: str
    layer: str


class HeadWise(Installed):
    """``forward`` of one attention module, a group of key-value heads at a time."""

    def __init__(self, module: nn.Module, setting: HeadSetting) -> None:
        super().__init__(module, setting)  # type: ignore[arg-type]
        self.heads = setting

    left_out_compiled = "heads is ignored under torch.compile: attention of a compiled layer runs all heads at once"

    technique = "heads"

    takes_norm = True

    @property
    def rotary_kernels(self) -> int:  # type: ignore[override]
        forward = type(self.module).forward
        return int(with_rotary(forward) is not forward)

    def note(self) -> str:
        return f"heads={self.heads.per_pass} of {self.heads.shape.groups} per pass"

    def __call__(self, *args: Any, norm_before: nn.Module | None = None, **kwargs: Any) -> Any:
        norm, named = norm_before, dict(kwargs)
        hidden_states = args[0] if args else named.pop("hidden_states", None)
        positional = args[1:]
        if not isinstance(hidden_states, Tensor):
            return self.original(*args, **kwargs)
        cuts: tuple[HeadGroup, ...] = ()
        if hidden_states.dim() == 3 and hidden_states.numel():
            cuts = self._passes(hidden_states, norm, (*positional, *named.values()), named)
        if not cuts:
            normed = norm(hidden_states) if norm is not None else hidden_states
            ulysses = None if torch.compiler.is_compiling() else ulysses_around(attention_kind(self.module))
            if ulysses is None:
                return self.original(normed, *positional, **named)
            attention, ulysses.attn = ulysses.attn, _AfterExchange(ulysses.attn)
            try:
                return self.original(normed, *positional, **named)
            finally:
                ulysses.attn = attention  # DeepSpeed's object outlives the model
        return self._in_passes(hidden_states, norm, positional, named, cuts)

    def _passes(
        self, hidden_states: Tensor, norm: nn.Module | None, values: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[HeadGroup, ...]:
        """The passes of a call; empty where it runs untouched, which is said once where passes were asked for."""
        if torch.compiler.is_compiling():
            self.note_compiled()
            return ()
        module = self.module
        attention = attention_kind(module) or ""
        cached = differentiated = False
        for name in CACHE_ARGUMENTS:
            cached |= named.get(name) is not None
        for value in values:
            cached |= hasattr(value, "get_seq_length")
            differentiated |= isinstance(value, Tensor) and value.requires_grad
        reason = ""
        if cached:
            if torch.is_grad_enabled():
                self._tell("it was called with a key-value cache; pass use_cache=False")
            return ()
        if named.get("output_attentions"):
            reason = "attention weights were requested"
        elif differentiated:
            reason = "it was called with another tensor that requires a gradient"
        elif any(HOOKS_OF_ALL) and (hook := hook_on_every_module()):
            reason = f"a hook on every module ({hook}) would see some of the heads"
        elif attention == "flex_attention":
            reason = "flex_attention compiles its kernel for all heads"
        elif not isinstance(nn.functional.scaled_dot_product_attention, BuiltinFunctionType):
            reason = "context parallelism has replaced PyTorch's attention, and would exchange keys once per group"
        if reason:
            self._tell(reason)
            return ()
        self.check(*(() if norm is None else [("the norm before it", norm)]))
        if ulysses_around(attention):
            return ()
        shape, per_pass = self.heads.shape, self.heads.per_pass
        if isinstance(per_pass, str):
            tokens = hidden_states.shape[:-1].numel()
            per_pass = head_passes(tokens, shape.query // shape.groups, shape.groups)
        cuts = cut_heads(shape.groups, per_pass)
        self.called, self.acted = True, self.acted or len(cuts) > 1
        if len(cuts) == 1 and self.heads.per_pass == "auto" and not reduces_as_they_arrive(module.parameters()):
            return ()
        return cuts

    def _tell(self, why: str) -> None:
        self.idle_reason = why
        if self.is_news(why):
            logger.warning("%s runs all heads at once: %s", self.heads.name, why)

    def _in_passes(
        self,
        x: Tensor,
        norm: nn.Module | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        cuts: tuple[HeadGroup, ...],
    ) -> Any:
        module: Any = self.module
        shape = self.heads.shape
        others = dict(between_weights(module))
        names = tuple(others)
        nothing = nothing_like(x.detach())

        def between(cut: HeadGroup, qkv: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Any]:
            if any(tensor.is_contiguous() for tensor in qkv) and twins_for(type(module).forward):
                qkv = [tensor.clone() for tensor in qkv]  # a known kernel would rotate what the backward reads again

            def call() -> tuple[Tensor, Any]:
                view = View(module, shape, cut, qkv)
                output = view.run(nothing, [_sliced(a, cut, shape) for a in args],
                                  {name: _sliced(value, cut, shape) for name, value in kwargs.items()})  # fmt: skip
                if not view.is_plain:
                    raise RuntimeError(
                        f"{self.heads.name}: its forward now does more to its input or output than when seqtile "
                        "traced it; drop heads"
                    )
                return output, view.beside

            aliases = {f"0.{name}": weight for name, weight in zip(names, weights, strict=True)}
            return call_with_weights(ParameterSwap((module,)), aliases, (call,)) if aliases else call()

        groups = Groups(between, cuts, 2, 2, Autocast.of(x), _draws(module))
        weights = self._weights(x, norm, tuple(others.values()))
        if isinstance(weights, str):
            self._tell_modules(weights)
            normed = norm(x) if norm is not None else x
            qkv = [getattr(module, name)(normed) for name in shape.projections[:3]]
            whole, beside = in_groups(qkv, list(others.values()), groups)
            y = getattr(module, shape.output)(whole)
        else:
            y, beside = head_wise(x, weights, groups, projection_sizes(x.shape[:-1].numel()))
        return y if beside is None else (y, *beside)

    def _weights(self, x: Tensor, norm: nn.Module | None, others: tuple[Tensor, ...]) -> HeadWeights | str:
        """The live weights for the operator, or why the projections have to run as modules."""
        projections: list[Projection] = []
        module = self.module
        for name in self.heads.shape.projections:
            projection = projection_of(name, getattr(module, name), x.dtype)
            if isinstance(projection, str):
                return projection
            projections.append(projection)
        norm_rows: RowWise | str | None = None
        if norm is not None:
            stand_in = norm.__dict__.get("forward")
            operands = stand_in.operands(x) if isinstance(stand_in, KernelNorm) else None
            norm_rows = row_wise(norm) if operands is None else operands[0]
        if isinstance(norm_rows, str):
            return norm_rows
        if differ_in_dtype(projections):
            return "its linear layers differ in dtype"
        return HeadWeights((projections[0], projections[1], projections[2]), projections[3], norm_rows, others)

    def _tell_modules(self, why: str) -> None:
        news = f"its projections run as modules, which needs two more copies of the hidden states: {why}"
        if self.is_news(news):
            logger.warning("%s: %s", self.heads.name, news)


def _draws(module: nn.Module) -> bool:
    """Whether something in the module drops at random now: an attribute with a probability, or a dropout module."""
    if not module.training:
        return False
    for name, value in module.__dict__.items():
        if "drop" in name and isinstance(value, float) and value > 0:
            return True
    for child in module.modules():
        if isinstance(child, nn.Dropout) and child.training and child.p > 0:
            return True
    return False


def _sliced(value: Any, cut: HeadGroup, shape: HeadShape) -> Any:
    """A mask with a plane per query head, cut; anything else as it is."""
    if isinstance(value, Tensor) and value.dim() == 4 and value.shape[1] == shape.query > 1:
        return cut.of(value, 1)
    return value


class _AfterExchange:
    """The attention function between the two exchanges: the heads that this rank then has, group by group."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        forward = module.__dict__.get("forward")
        if not isinstance(forward, HeadWise):
            return self.function(module, query, key, value, mask, *args, **kwargs)
        shape = HeadShape(query.shape[1], key.shape[1], query.shape[-1], query.shape[-1], "")
        per_pass = forward.heads.per_pass
        if isinstance(per_pass, str):
            tokens = query.shape[0] * query.shape[2]
            per_pass = head_passes(tokens, shape.query // shape.groups, shape.groups)
        cuts = cut_heads(shape.groups, per_pass)
        forward.called, forward.acted = True, forward.acted or len(cuts) > 1
        sinks = kwargs.pop("s_aux", None)
        if len(cuts) == 1 or sinks is not None:
            if sinks is not None:
                kwargs["s_aux"] = sinks
            return self.function(module, query, key, value, mask, *args, **kwargs)

        def between(cut: HeadGroup, qkv: Sequence[Tensor], _: Sequence[Tensor]) -> tuple[Tensor, None]:
            return self.function(module, *qkv, _sliced(mask, cut, shape), *args, **kwargs)[0], None

        drops = bool(kwargs.get("dropout"))
        return in_groups([query, key, value], [], Groups(between, cuts, 1, 2, Autocast.of(query), drops))


class HeadLayer(Installed):
    """``forward`` of a decoder layer of which only attention is changed: its norm runs inside."""

    def __init__(self, layer: nn.Module, setting: HeadSetting, normed: NormedAttention) -> None:
        super().__init__(layer, setting)  # type: ignore[arg-type]
        self.near = normed

    technique = "heads"

    def note(self) -> str:
        return f"{self.near.norm} inside {self.near.attention}" if self.near.norm else ""

    def check(self, *besides: tuple[str, nn.Module]) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        view = self.near.view(self.module)
        return self.original(*args, **kwargs) if view is None else type(view).forward(view, *args, **kwargs)


class HeadsTechnique(ForwardsTechnique):
    """``heads``: attention of the known form runs for a group of key-value heads at a time."""

    name = "heads"

    def check(self) -> None:
        self._modules, self._left = _find_for(self.model, self.options.heads or "auto")
        norms = [f"{module.layer}.{module.norm}".strip(".") for module in self._modules if module.norm]
        self.inside = [*(module.name for module in self._modules), *norms]

    def install(self, inside: Collection[str]) -> TechniqueResult:
        for name in self.inside:
            for module in self.model.get_submodule(name).modules():
                forward = module.__dict__.get("forward")
                if type(forward) is TiledRows and forward.owner == "apply":
                    forward.remove()
        return TechniqueResult(
            _install_heads(self.model, self.options.heads or "auto", self._modules, self._left), self._left
        )

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        super().remove(model)
        for forward in installed_forwards(model):
            if isinstance(forward, TiledLayer):
                forward.attention = None

    @classmethod
    def with_earlier_settings(cls, model: nn.Module, options: TilingOptions) -> TilingOptions:
        return replace(options, heads=options.heads or cls.installed(model)[0].setting.per_pass)

    @classmethod
    def without_effect(cls, forwards: Sequence[Installed]) -> list[str]:
        head_wise = [forward for forward in forwards if isinstance(forward, HeadWise)]
        per_pass = head_wise[0].heads.per_pass
        return idle_sentences(f"heads={per_pass}", head_wise, decides=per_pass == "auto")


def _find_for(model: nn.Module, heads: Heads) -> tuple[list[Attention], list[Left]]:
    """Find the attention modules that run head-wise.

    Raises:
        UserError: no attention of the model is of the known form, or none has so many key-value heads.
    """
    modules, left = find_attention(model)
    if not modules:
        states = ", ".join(states_of(model))
        none = f"no attention module, but layers with a state ({states})" if states else "no attention module"
        seen = "; ".join(f"{module}: {module.why}" for module in left[:3]) or none
        raise UserError(
            "heads.no-attention",
            f"heads={heads!r}: no attention in {type(model).__name__} supports it ({seen}); drop heads",
        )
    most = max(module.shape.groups for module in modules)
    if isinstance(heads, int) and heads > most:
        raise UserError(
            "heads.too-many",
            f"got heads={heads}, expected at most the {most} key-value heads of {type(model).__name__}; drop heads "
            "to run all at once",
        )
    return modules, left


def runs_on_some_heads(model: nn.Module) -> bool:
    """Whether ``heads`` could change some attention of ``model``."""
    return bool(find_attention(model)[0])


def _install_heads(model: nn.Module, heads: Heads, modules: Sequence[Attention], left: Sequence[Left]) -> str:
    """Have every attention module run head-wise; what was done, in a sentence."""
    for attention in modules:
        setting = HeadSetting(heads, attention.shape, attention.name, attention.layer)
        forward = HeadWise(attention.module, setting)
        forward.install()
        forward.check()
        layer = model.get_submodule(attention.layer) if attention.layer else attention.module
        installed = layer.__dict__.get("forward")
        normed = NormedAttention(attention.norm, attention.name.rpartition(".")[2])
        if isinstance(installed, TiledLayer):
            installed.attention = normed
        elif installed is None:
            HeadLayer(layer, setting, normed).install()
        mark_leaf(layer)  # which the layer's stand-in takes off again
    shapes = dict.fromkeys(
        f"{type(module.module).__name__}, {module.shape.query} query heads on {module.shape.groups}"
        for module in modules
    )
    passes = (
        "heads per pass chosen by length" if heads == "auto" else f"{heads} key-value head{'s' * (heads != 1)} per pass"
    )
    untouched = f", {len(left)} left alone" if left else ""
    for state, layers in states_of(model).items():
        untouched += f"; {len(layers)} layers with a state ({state}) run untiled"
    tiled = f"{len(modules)} of {len(modules) + len(left)} ({'; '.join(shapes)})"
    return f"head-wise attention in {tiled}, {passes}{untouched}"
