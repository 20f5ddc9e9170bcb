"""The tiled forward of one instance: asks at each call whether its proof still holds, cuts, and runs an operator."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from seqtile._compat import (
    GLOBAL_HOOKS,
    HOOKED_FORWARD,
    KEEPS_WEIGHTS,
    MODULES,
    PARAMETERS,
    PARAMETRIZE,
    PER_SEQUENCE,
    PRE_HOOKS,
    children_of,
    dispatch_mode_count,
    dispatch_modes,
    function_mode_count,
    function_modes,
    in_forward_mode,
    parameters_of,
    transform_level,
    version_of,
)
from seqtile._log import first_rank_logger
from seqtile._stand_in import ForwardStandIn
from seqtile.engines.flat import ParameterSwap, call_with_weights, named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.engines.zero3 import unmark_leaf
from seqtile.engines.zero12 import reduces_as_they_arrive
from seqtile.models.call_arguments import Places, by_position, why_opaque
from seqtile.models.discover.chain import Chain
from seqtile.models.discover.facts import Facts
from seqtile.models.discover.known_kernels import own_forward
from seqtile.models.discover.live_weights import row_wise
from seqtile.models.discover.proof import Mode, Proof, autocast_dtype, process_switches, prove
from seqtile.models.discover.sizes import Untraceable
from seqtile.models.discover.trace import is_tracing
from seqtile.models.discover.views import is_known_kind
from seqtile.ops.fused_norm import fused_norm
from seqtile.ops.linear import Packed
from seqtile.ops.mlp import FusedWeights, fused_mlp
from seqtile.ops.rng import RowWise
from seqtile.ops.tile_checkpoint import run_in_tiles
from seqtile.ops.token_tiles import refuse_trace
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, KeepRule, TileRule

logger = first_rank_logger(__name__)
_NONE: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class Setting:
    """How one block is tiled.

    Attributes:
        rule: where the cuts are.
        keep: how many tiles keep gate and up.
        path: ``"auto"``, ``"fused"`` or ``"generic"``.
        hidden: width of the block's input.
        intermediate: width of its widest tensor per token.
        experts: whether it is a group of routed experts.
        name: qualified name of the block.
        layer: qualified name of the decoder layer around it, or "".
        trusted: whether its caller vouches for it, where nothing is known of it.
    """

    rule: TileRule
    keep: KeepRule
    path: str
    hidden: int
    intermediate: int
    experts: bool = False
    name: str = ""
    layer: str = ""
    trusted: bool = False

    def shape(self, x: Tensor, weights: Sequence[Tensor], fused: bool, lanes: int = 1) -> BlockShape:
        """What the tile rule needs to know, from what the block is at this call."""
        return BlockShape(
            hidden=self.hidden,
            intermediate=self.intermediate * lanes,
            itemsize=x.element_size(),
            weight_numel=sum([weight.numel() for weight in weights]),
            weight_itemsize=min([weight.element_size() for weight in weights] or [4]),
            device_type=x.device.type,
            live_widths=FUSED_WIDTHS if fused else LIVE_WIDTHS,
        )


_thread = threading.local()


def inside_a_tile() -> bool:
    """Whether a layer runs a tile of its sequence in this thread: what is tiled inside it then runs whole."""
    return getattr(_thread, "inside", False)


@contextmanager
def inside() -> Iterator[None]:
    """Around one tile of a layer."""
    before, _thread.inside = inside_a_tile(), True
    try:
        yield
    finally:
        _thread.inside = before


class Installed(ForwardStandIn):
    """Base of the tiled forwards: puts itself into an instance, remembers what was there, and restores it."""

    most_tiles = most_tokens = 0
    """Of any call: how many tiles it was cut into, and how many tokens it had."""

    compiled = False
    """Whether torch.compile has compiled it without what :attr:`left_out_compiled` says."""

    left_out_compiled = (
        "where torch.compile compiles a tiled block, PyTorch's checkpoint per tile runs in place of the fused operator"
    )
    """For the report."""

    owner = "apply"
    """Which call put it there: another :func:`seqtile.apply` leaves ``"tile_module"``'s."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        super().__init__(module)
        self.setting = setting
        self._proofs: dict[Any, tuple[Chain, Proof, Facts | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_proofs": {}, "_view": None}  # which are of this very module

    def remove(self) -> None:
        """Put every attribute back as it was."""
        unmark_leaf(self.module)
        own = self.module.__dict__
        if own.get(HOOKED_FORWARD) is self:  # accelerate's hooks were put around it
            own[HOOKED_FORWARD] = self.original
            self.before["forward"] = own["forward"]
        for name in self.changed:
            own.pop(name, None)
        own.update(self.before)

    takes_norm = False
    """Whether it can be called with ``norm_before=``, the norm of its input, which then runs inside."""

    def inside(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of everything that runs inside a tile, without the block itself."""
        return [(name, part) for name, part in self.module.named_modules() if name]

    def check(self, *besides: tuple[str, nn.Module]) -> None:
        """Raise where an engine would gather weights at every tile, or where a trace would fix the tiles.

        Args:
            *besides: (name, module) of what runs inside in this call alone.
        """
        if not torch.compiler.is_compiling():
            self.refuse_copies()
            if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                refuse_trace()
            inner = [*self.inside(), *besides]
            refuse_gathering_inside(inner, block=self.setting.name, layer=self.setting.layer)

    def proof(self, chain: Chain, mode: Mode) -> Proof:
        """What is known of ``chain`` in this mode: what was known at its last call, if all of it still holds.

        Cost:
            Where it does, some 30 µs for a plain MLP with its norm, 60 µs with adapters (21 and 27 Python calls); where
            it does not, see :func:`seqtile.models.discover.proof.prove`.
        """
        known = self._proofs.get(mode)
        if known is not None and known[0] == chain and (known[2] is None or known[2].hold()):
            return known[1]  # without facts it is untiled, and stays so
        if len(self._proofs) > 8:
            self._proofs.clear()
        proof, facts = prove(chain, mode)
        self._proofs[mode] = (chain, proof, facts)
        return proof

    def facts(self, mode: Mode) -> Facts | None:
        """What the proof of the last call in this mode rests on."""
        return self._proofs[mode][2]

    def run(
        self,
        chain: Chain,
        tensors: Sequence[Tensor],
        call: Callable[[list[Tensor]], Any],
        constants: Sequence[Tensor] = (),
        lanes: int = 1,
        mode: Mode | None = None,
        computed: Mapping[str, Tensor] = _NONE,
    ) -> Any:
        """Run ``call``, which is ``chain``, on tiles of ``tensors``.

        Args:
            chain: what runs.
            tensors: what is split.
            call: ``chain`` on tiles.
            constants: other tensors that it is called with.
            lanes: rows per token.
            mode: how it runs, where that is not to be read from ``tensors``.
            computed: weights that were computed for this call, in place of the modules' own of these names.
        """
        parts, computed_names = chain.modules, frozenset(computed)

        def weights() -> dict[str, Tensor]:
            found = {}
            for number, part in enumerate(parts):
                for name, weight in named_weights(part):
                    found[f"{number}.{name}"] = weight
            for name in computed_names:
                del found[name]
            return found

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Any:
            if not aliases:
                return call(list(tiles))
            return call_with_weights(ParameterSwap(parts), aliases, (call, list(tiles)))

        def whole() -> Any:
            return run(tensors, computed)

        if inside_a_tile():
            return whole()
        if any(one.is_nested for one in tensors):
            self._tell_untiled("it was called with a nested tensor, which has no rows to cut")
            return whole()
        if handed := _handed_per_sequence(parts):
            self._tell_untiled(f"PEFT hands its adapters one entry per sequence ({handed}), which tiles do not keep")
            return whole()
        if why := _why_watched(parts):
            self._tell_untiled(why)
            return whole()
        x, setting = tensors[0], self.setting
        mlp: FusedWeights | None = None
        norm: tuple[RowWise, torch.dtype] | None = None
        check: Callable[[], None] | None = None
        if not setting.trusted and torch.compiler.is_compiling():
            if self.falls_back:
                self.note_compiled()
            kinds = [(one.dim(), one.dtype) for one in tensors]
            if not self._is_proven_for_compiler(kinds, len(constants), chain.call, x.device, torch.is_grad_enabled()):
                return whole()
        elif not setting.trusted:
            mode = mode or mode_of(tensors, constants)
            proof = self.proof(chain, mode)
            if proof.why_not:
                self._tell_untiled(proof.why_untiled(setting.name))
                return whole()
            facts = self.facts(mode)
            for one in (*tensors, *constants):
                if not is_known_kind(type(one)):
                    self._tell_untiled(f"it is called with a {type(one).__name__}, a tensor that may do anything")
                    return whole()
                if one.__dict__ and facts is not None and (names := facts.reads_of(one)):
                    why = f"a tensor that it is called with has an attribute {names[0]!r}, which it may read"
                    self._tell_untiled(why)
                    return whole()
            mlp = self._fused_now(proof, chain, x.dtype)
            check = _Unchanged(self, chain, mode, proof, constants)
            if self.fuses_norms and proof.norm is not None and proof.graph is not None:
                live_norm = row_wise(parts[0], proof.norm)
                norm = None if isinstance(live_norm, str) else (live_norm, proof.graph.outputs[2][2])
        dense = _dense_numel(mlp) * x.element_size() if mlp is not None else 0
        tokens = x.shape[:-1].numel()
        live = [weight for weight in (*weights().values(), *computed.values()) if weight.requires_grad]
        # With gradients PyTorch itself refuses forward-mode derivatives of a custom function; without, they are lost.
        with_graph = torch.is_grad_enabled() and any([one.requires_grad for one in (*tensors, *live)])
        if not with_graph and not torch.compiler.is_compiling() and in_forward_mode():
            self._tell_untiled("forward-mode derivatives are computed, which tiles do not carry")
            return whole()
        shape = setting.shape(x, live, mlp is not None, lanes)
        sizes = setting.rule.tile_sizes(tokens, shape)
        if not torch.compiler.is_compiling():
            self.most_tiles, self.most_tokens = max(self.most_tiles, len(sizes)), max(self.most_tokens, tokens)
        if not sizes and tokens and reduces_as_they_arrive(live):
            sizes = (tokens,)  # one tile, not none: another rank's batch may be tiled
        if not sizes:
            return whole()
        if self.plainly is not None:
            plain = (lambda tiles, aliases: run(tiles, {**computed, **aliases})) if computed else run
            return self.plainly(plain, tensors, sizes, mlp is not None)
        if norm is not None:
            return fused_norm(x, *norm, sizes, check=check)
        if mlp is None:
            return run_in_tiles(run, tensors, sizes, weights, check, computed)
        keep = setting.keep
        kept = keep.share(sizes, shape, dense)
        return fused_mlp(x, mlp, sizes, keep=kept, holds_dense=keep.holds_dense(dense), check=check)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_compiled(self) -> bool:
        """Note, outside the graph that the compiler writes, that :attr:`left_out_compiled` is so.

        An attribute that is set while a checkpointed layer is compiled leaves all of the layer uncompiled.
        """
        self.compiled = True
        return True

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _is_proven_for_compiler(
        self, kinds: Sequence[tuple[int, torch.dtype]], constants: int, told: tuple[Any, ...], device: torch.device,
        gradients: bool,
    ) -> bool:  # fmt: skip
        """Whether the block is proven as it is now; asked when the compiler writes down a call, outside its graph.

        The compiler guards what the block's own code reads, so that a change leads here again.
        """
        setting = self.setting
        known = [one for mode, one in self._proofs.items() if mode.gradients == gradients]
        if setting.experts and any(not proof.why_not and (not facts or facts.hold()) for _, proof, facts in known):
            return True
        if len(kinds) > 1 or constants or told or setting.experts:
            self._tell_untiled("torch.compile calls it with more than hidden states, for which it is not proven")
            return False
        [(dim, dtype)] = kinds
        axes = _AXES.get(dim) or ("b",) * (dim - 1)
        mode = Mode((((*axes, setting.hidden), dtype),), device, autocast_dtype(device.type), gradients)
        proof = self.proof(Chain(((setting.name, self.module),)), mode)
        if proof.why_not:
            self._tell_untiled(proof.why_not)
        return not proof.why_not

    def _fused_now(self, proof: Proof, chain: Chain, dtype: torch.dtype) -> FusedWeights | None:
        """The fused operator's weights if it can run this call; says so, once, if it was asked for and cannot."""
        if self.setting.path == "generic" or self.setting.experts:
            return None
        mlp = proof.formula if isinstance(proof.formula, str) else chain.weights(proof.formula, dtype)
        if isinstance(mlp, FusedWeights):
            return mlp
        if self.falls_back and self.is_news(mlp):
            logger.warning("%s now runs the generic operator: %s", self.setting.name, mlp)
        return None

    def _tell_untiled(self, why: str) -> None:
        if self.is_news(why):
            logger.warning("%s runs untiled: %s", self.setting.name, why)

    fuses_norms = False
    """Whether a block that is a norm and nothing else runs by the norm's own operator."""

    plainly: Callable[..., Any] | None = None
    """Runs the tiles in the operators' place, as (run, tensors, sizes, whether they would be fused): for ``verify``."""

    falls_back = False
    """Whether the report said "fused", so that running the generic operator is news."""

    def note(self) -> str:
        return f"tile={self.setting.rule}"

    @property
    def __code__(self) -> Any:
        raise AttributeError(_NO_SOURCE)

    __globals__ = __code__


def installed_forwards(model: nn.Module) -> list[Installed]:
    """The tiled forwards of a model, also where accelerate put a hook's forward around one; the outer one first."""
    found = []
    for module in model.modules():
        for name in ("forward", HOOKED_FORWARD):
            one = module.__dict__.get(name)
            while isinstance(one, Installed):
                found.append(one)
                one = one.before.get("forward")
    return found


_NO_SOURCE = (
    "torch.export and torch.jit.script read a block's source, and a tiled block has none of its own; give them the "
    "untiled model, seqtile.undo(model) first and seqtile.apply again afterwards, or export a module around the block"
)


def _why_watched(parts: Iterable[nn.Module]) -> str:
    """Why a call would run once per tile, or keep of one, what its caller does around modules and functions, or ""."""
    if torch.compiler.is_compiling():
        return ""
    if transform_level() is not None:
        return "a transform of torch.func runs, which tiles do not carry"
    if PARAMETRIZE.get(KEEPS_WEIGHTS) and any(
        hasattr(one, "parametrizations") for part in parts for one in part.modules()
    ):
        return "torch.nn.utils.parametrize.cached keeps weights that one tile computes, without a graph, for others"
    if any(GLOBAL_HOOKS) and any(_is_foreign(hook) for hooks in GLOBAL_HOOKS for hook in hooks.values()):
        return "a hook is registered for all modules (torch.nn.modules.module), which tiles would run on other tensors"
    modes = [*(function_modes() if function_mode_count() else ()), *(dispatch_modes() if dispatch_mode_count() else ())]
    for mode in modes:
        if _is_foreign(type(mode)) and not getattr(mode, "observes_only", False):
            return (
                f"{type(mode).__name__} is active around the call, which tiles would run on other tensors (a mode that "
                "changes no result says so with observes_only = True)"
            )
    return ""


def _is_foreign(value: Any) -> bool:
    return not str(getattr(value, "__module__", "")).startswith(("torch.", "seqtile."))


_AXES: dict[int, tuple[str, ...]] = {2: ("bs",), 3: ("b", "s"), 4: ("b", "m", "s")}
"""The token axes in each leading dimension, by dimensions; more than three are more than a trace tells apart."""


def _dense_numel(mlp: FusedWeights) -> int:
    """Elements of the quantised weights, once they are dense."""
    numel = 0
    for part in (*mlp.first, mlp.down):
        numel += math.prod(part.weight.shape) if isinstance(part.weight, Packed) else 0
    return numel


def mode_of(tensors: Sequence[Tensor], constants: Sequence[Tensor] = ()) -> Mode:
    """How a call with these tensors runs; the first ones are split along all but the last dimension."""
    x = tensors[0]
    inputs: list[Any] = []
    for one in tensors:
        axes = _AXES.get(one.dim()) or ("b",) * (one.dim() - 1)
        inputs.append(((*axes, one.shape[-1]), one.dtype))
    for one in constants:
        inputs.append((tuple(one.shape), one.dtype))
    return Mode(tuple(inputs), x.device, autocast_dtype(x.device.type), torch.is_grad_enabled())


class _Unchanged:
    """Asked before a backward recomputes: is everything that the forward read as it was?

    Not its weights: the fused operator has them from autograd, the generic one compares them itself.
    """

    def __init__(
        self, installed: Installed, chain: Chain, mode: Mode, proof: Proof, constants: Sequence[Tensor] = ()
    ) -> None:
        self._installed, self._chain, self._mode, self._proof = installed, chain, mode, proof
        self._tensors = self._read(mode)
        self._constants = [(one, _version(one)) for one in constants]

    def _read(self, mode: Mode) -> list[tuple[str, Tensor, int]]:
        facts = self._installed.facts(mode)
        return facts.tensors() if facts is not None else []

    def __call__(self) -> None:
        mode = replace(self._mode, switches=process_switches())
        now = self._installed.proof(self._chain, mode)
        changed = now is not self._proof and (now.graph is None or now.graph != self._proof.graph)
        what = "something that its forward reads (an attribute, a global, train or eval)" if changed else ""
        for (name, tensor, version), (_, other, later) in zip(self._tensors, self._read(mode), strict=False):
            if version != later or tensor is not other:
                what = f"its {name}"
        if any(_version(one) != version for one, version in self._constants):
            what = "a tensor that every tile is called with"
        if why := _why_watched(self._chain.modules):
            raise RuntimeError(
                f"{self._installed.setting.name}: in its backward {why}; enter it around the forward too"
            )
        if what:
            raise RuntimeError(
                f"{self._installed.setting.name}: {what} was changed between forward and backward, so a tile would be "
                "recomputed as something else; change it before the forward or after the backward"
            )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


class TiledForward(Installed):
    """``forward`` of one position-wise module, over tiles of tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            raise Untraceable("its forward is called by another that was put over it; call seqtile.apply after that")
        self.check()
        module, original, computed = self.module, self.original, _NONE
        if hasattr(module, "parametrizations") and not torch.compiler.is_compiling():
            module, original, computed = self._outside_parametrizations()
        if kwargs and not args:
            args, kwargs = by_position(original, kwargs)
        places = Places(args, kwargs)
        why = places.why_whole or ("" if self.setting.trusted else why_opaque(places.arguments))
        if why:
            self._tell_untiled(why)
        if not places.names or why:
            return self.original(*args, **kwargs)
        tensors = places.take()

        def call(tiles: list[Tensor]) -> Any:
            filled, words = places.fill(tiles)
            return original(*filled, **words)

        kind = "experts" if self.setting.experts else "block"
        arguments = places if kind == "block" and (len(args) > 1 or kwargs) else None
        told = arguments.key if arguments is not None else ()
        chain = Chain(((self.setting.name, module),), kind, arguments=arguments, call=told)
        return self.run(chain, tensors, call, places.constants(), computed=computed)

    def _outside_parametrizations(self) -> tuple[nn.Module, Callable[..., Any], dict[str, Tensor]]:
        """A view of the module without its parametrisations, its forward, and the weights that they compute.

        PEFT's ``target_parameters`` puts them on experts for the length of a call, and a recompute comes later.
        """
        module = self.module
        if self._view is None:
            self._view = object.__new__(type_before_parametrizations(module))
        view, own = self._view, self._view.__dict__
        own.clear()
        own.update(module.__dict__)
        own.pop("forward")
        own[MODULES] = {name: part for name, part in children_of(module).items() if name != "parametrizations"}
        originals = {name: one.original for name, one in module.parametrizations.items()}
        own[PARAMETERS] = {**parameters_of(module), **originals}
        forward = getattr(own_forward(module), "__func__", type(view).forward)
        return view, partial(forward, view), {f"0.{name}": getattr(module, name) for name in originals}

    _view: nn.Module | None = None
    """The module as it is outside its parametrisations; the same at every call, as a proof rests on it."""


def _handed_per_sequence(parts: Iterable[nn.Module]) -> str:
    """The argument of that kind which a hook of PEFT's adds to the adapters' calls, or ""."""
    for part in parts:
        for module in part.modules():
            for hook in module.__dict__[PRE_HOOKS].values():
                for word in hook.keywords if isinstance(hook, partial) else ():
                    if word in PER_SEQUENCE:
                        return str(word)
    return ""
