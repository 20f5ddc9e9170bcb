"""The tiled forward of one instance: asks at each call whether its proof still holds, cuts, and runs an operator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from seqtile._compat import (
    HOOKED_FORWARD,
    MODULES,
    PARAMETERS,
    PER_SEQUENCE,
    PRE_HOOKS,
    children_of,
    in_forward_mode,
    parameters_of,
    transform_level,
)
from seqtile._log import first_rank_logger
from seqtile._stand_in import ForwardStandIn
from seqtile.engines.flat import ParameterSwap, call_with_weights, named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.engines.zero3 import unmark_leaf
from seqtile.engines.zero12 import reduces_as_they_arrive
from seqtile.models.call_arguments import Places, by_position
from seqtile.models.discover.chain import Chain
from seqtile.models.discover.known_kernels import own_forward
from seqtile.models.discover.live_weights import row_wise
from seqtile.models.discover.proof import Mode, Proof, autocast_dtype, prove
from seqtile.models.discover.snapshot import Snapshot
from seqtile.ops.fused_norm import fused_norm
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


class Known:
    """What is known of a chain in one mode, and the weights of its last call."""

    def __init__(self, chain: Chain, proof: Proof, snapshot: Snapshot) -> None:
        self.chain, self.proof, self.snapshot = chain, proof, snapshot
        self._tensors: list[Tensor] = []
        self._weights: FusedWeights | None = None

    def forget_weights(self) -> None:
        self._tensors, self._weights = [], None

    def weights(self, dtype: torch.dtype) -> FusedWeights | str:
        """The live weights for the fused operator, or why it cannot run now.

        While the snapshot holds and the modules' tensors are the same objects, the weights are those of the last call.
        Engines put others in their places, empty them, or hide them behind attributes.
        """
        formula = self.proof.formula
        if isinstance(formula, str):
            return formula
        tensors = self.snapshot.tensors()
        same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        if same and self._weights is not None and all(map(Tensor.numel, tensors)):
            return self._weights
        mlp = self.chain.weights(formula, dtype)
        self.forget_weights()
        if isinstance(mlp, FusedWeights) and not mlp.packed_numel:
            leaves = {id(tensor) for tensor in tensors if tensor.is_leaf}  # others would keep a graph alive
            if all(id(weight) in leaves for weight in mlp.split[0]):  # no views of FSDP1's flat parameter
                self._tensors, self._weights = tensors, mlp
        return mlp


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
        self._proofs: dict[Mode, Known] = {}
        self._last: Known | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_proofs": {}, "_last": None, "_view": None}  # which are of this very module

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

    def known(self, chain: Chain, mode: Mode) -> Known:
        """What is known of ``chain`` in this mode: what was known at its last call, while the modules are the same.

        Cost:
            Where they are, some 10 µs; where they are not, see :func:`seqtile.models.discover.proof.prove`.
        """
        known = self._proofs.get(mode)
        if known is None or known.chain != chain or not known.snapshot.holds():
            if len(self._proofs) > 8 or (known is not None and not known.snapshot.holds()):
                self._proofs.clear()  # the other modes' weights may be gone too
            snapshot = Snapshot(chain.modules)
            known = self._proofs[mode] = Known(chain, prove(chain, mode, trusted=self.setting.trusted), snapshot)
        if known is not self._last:
            if self._last is not None:
                self._last.forget_weights()  # which may be replaced before that mode runs again
            self._last = known
        return known

    def run(
        self,
        chain: Chain,
        tensors: Sequence[Tensor],
        call: Callable[[list[Tensor]], Any],
        untiled: Callable[[], Any],
        lanes: int = 1,
        mode: Mode | None = None,
        computed: Mapping[str, Tensor] = _NONE,
    ) -> Any:
        """Run ``call``, which is ``chain``, on tiles of ``tensors``.

        Args:
            chain: what runs.
            tensors: what is split.
            call: ``chain`` on tiles.
            untiled: the call as its caller made it.
            lanes: rows per token.
            mode: how it runs, where that is not to be read from ``tensors``.
            computed: weights that were computed for this call, in place of the modules' own of these names.
        """
        if inside_a_tile():
            return untiled()
        compiling = torch.compiler.is_compiling()
        if not compiling and (why := self._cannot_cut(chain, tensors)):
            self._tell_untiled(why)
            return untiled()
        x, setting = tensors[0], self.setting
        weights: FusedWeights | RowWise | None = None
        if compiling:
            if self.falls_back:
                self.note_compiled()
            kinds = [(tensor.dim(), tensor.dtype) for tensor in tensors]
            if not self._is_proven(kinds, bool(chain.call), x.device, torch.is_grad_enabled()):
                return untiled()
        else:
            known = self.known(chain, mode or mode_of(tensors))
            if known.proof.why_not and (known.proof.refuted or not setting.trusted):
                self._tell_untiled(known.proof.why_untiled(setting.name))
                return untiled()
            weights = self._fused_now(known, x.dtype)
        mlp = weights if isinstance(weights, FusedWeights) else None
        dense = mlp.packed_numel * x.element_size() if mlp is not None else 0
        live = [weight for part in chain.modules for _, weight in named_weights(part)]
        trained = [weight for weight in (*live, *computed.values()) if weight.requires_grad]
        tokens, shape = x.shape[:-1].numel(), setting.shape(x, trained, mlp is not None, lanes)
        sizes = setting.rule.tile_sizes(tokens, shape)
        if not compiling:
            self.most_tiles, self.most_tokens = max(self.most_tiles, len(sizes)), max(self.most_tokens, tokens)
        if not sizes and tokens and reduces_as_they_arrive(trained):
            sizes = (tokens,)  # one tile, not none: another rank's batch may be tiled
        if not sizes:
            return untiled()
        if self.plainly is None and mlp is not None:
            kept = setting.keep.share(sizes, shape, dense)
            return fused_mlp(x, mlp, sizes, keep=kept, holds_dense=setting.keep.holds_dense(dense))
        if self.plainly is None and isinstance(weights, RowWise):
            graph = known.proof.graph
            assert graph is not None
            return fused_norm(x, weights, graph.outputs[2][2], sizes)
        return self._in_tiles(chain.modules, tensors, call, sizes, computed, mlp is not None)

    def _in_tiles(
        self, parts: Sequence[nn.Module], tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any],
        sizes: tuple[int, ...], computed: Mapping[str, Tensor], fused: bool,
    ) -> Any:  # fmt: skip
        """The generic operator; where :attr:`plainly` is set, that in its place."""
        computed_names = frozenset(computed)  # a closure over the tensors would keep them until the backward

        def live_weights() -> dict[str, Tensor]:
            live = {f"{n}.{name}": weight for n, part in enumerate(parts) for name, weight in named_weights(part)}
            return {name: weight for name, weight in live.items() if name not in computed_names}

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Any:
            if not aliases:
                return call(list(tiles))
            return call_with_weights(ParameterSwap(parts), aliases, (call, list(tiles)))

        if self.plainly is not None:
            plain = (lambda tiles, aliases: run(tiles, {**computed, **aliases})) if computed else run
            return self.plainly(plain, tensors, sizes, fused)
        return run_in_tiles(run, tensors, sizes, live_weights, computed)

    def _cannot_cut(self, chain: Chain, tensors: Sequence[Tensor]) -> str:
        """Why tiles would not compute what the call does, by how it is made, or ""."""
        if tensors[0].is_nested:
            return "it was called with a nested tensor, which has no rows to cut"
        if transform_level() is not None or in_forward_mode():
            return "a transform of torch.func or forward-mode derivatives run, which tiles do not carry"
        if handed := _handed_per_sequence(chain.modules):
            return f"PEFT hands its adapters one entry per sequence ({handed}), which tiles do not keep"
        return ""

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_compiled(self) -> bool:
        """Note, outside the graph that the compiler writes, that :attr:`left_out_compiled` is so.

        An attribute that is set while a checkpointed layer is compiled leaves all of the layer uncompiled.
        """
        self.compiled = True
        return True

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _is_proven(
        self, kinds: Sequence[tuple[int, torch.dtype]], more: bool, device: torch.device, gradients: bool
    ) -> bool:
        """Whether the block is proven as it is now; asked when the compiler writes down a call, outside its graph.

        The compiler guards what the block's own code reads, so that a change leads here again.
        """
        setting = self.setting
        if not setting.experts and (len(kinds) > 1 or more):
            self._tell_untiled("torch.compile calls it with more than hidden states, for which it is not proven")
            return False
        (dim, dtype), *_ = kinds
        axes: tuple[int | str, ...] = _AXES.get(dim) or ("b",) * (dim - 1)
        mode = Mode((((*axes, setting.hidden), dtype),), device, autocast_dtype(device.type), gradients)
        kind = "experts" if setting.experts else "block"
        proof = self.known(Chain(((setting.name, self.module),), kind), mode).proof
        if proof.why_not and (proof.refuted or not setting.trusted):
            self._tell_untiled(proof.why_untiled(setting.name))
            return False
        return True

    def _fused_now(self, known: Known, dtype: torch.dtype) -> FusedWeights | RowWise | None:
        """The weights of a fused operator if one can run this call; logs once if one was asked for and cannot."""
        setting, proof = self.setting, known.proof
        if self.fuses_norms and proof.norm is not None:
            norm = row_wise(known.chain.modules[0], proof.norm)
            return norm if isinstance(norm, RowWise) else None
        if setting.path == "generic" or setting.experts:
            return None
        mlp = known.weights(dtype)
        if isinstance(mlp, FusedWeights):
            return mlp
        if self.falls_back and self.is_news(mlp):
            logger.warning("%s now runs the generic operator: %s", setting.name, mlp)
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


_AXES: dict[int, tuple[str, ...]] = {2: ("bs",), 3: ("b", "s"), 4: ("b", "m", "s")}
"""The token axes in each leading dimension, by dimensions; more than three are more than a trace tells apart."""


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


class TiledForward(Installed):
    """``forward`` of one position-wise module, over tiles of tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        module, original, computed = self.module, self.original, _NONE
        if hasattr(module, "parametrizations") and not torch.compiler.is_compiling():
            module, original, computed = self._outside_parametrizations()
        if kwargs and not args:
            args, kwargs = by_position(original, kwargs)
        places = Places(args, kwargs)
        if places.why_whole:
            self._tell_untiled(places.why_whole)
        if places.why_whole or not places.names:
            return self.original(*args, **kwargs)
        tensors = places.take()

        def call(tiles: list[Tensor]) -> Any:
            filled, words = places.fill(tiles)
            return original(*filled, **words)

        kind = "experts" if self.setting.experts else "block"
        arguments = places if kind == "block" and (len(args) > 1 or kwargs) else None
        told = arguments.key if arguments is not None else ()
        chain = Chain(((self.setting.name, module),), kind, arguments=arguments, call=told)
        mode = mode_of(tensors, places.constants()) if places.whole else None
        return self.run(chain, tensors, call, lambda: self.original(*args, **kwargs), mode=mode, computed=computed)

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
