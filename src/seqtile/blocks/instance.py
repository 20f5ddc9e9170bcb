"""The tiled forward of one instance: checks at each call that its proof holds, and runs an operator over tiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from seqtile._compat import (
    HOOKED_FORWARD,
    HOOKS_OF_ALL,
    MODULES,
    PARAMETERS,
    PER_SEQUENCE,
    PRE_HOOKS,
    children_of,
    hook_on_every_module,
    in_forward_mode,
    parameters_of,
    transform_level,
)
from seqtile._log import first_rank_logger
from seqtile._stand_in import ForwardStandIn
from seqtile._technique import Technique
from seqtile.blocks.call_arguments import TokenArguments, by_position
from seqtile.engines.flat import ParameterSwap, call_with_weights, named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.engines.zero3 import is_marked, mark_leaf, unmark_leaf
from seqtile.engines.zero12 import reduces_as_they_arrive
from seqtile.ops.fused_norm import fused_norm
from seqtile.ops.mlp import FusedWeights, fused_mlp
from seqtile.ops.rng import RowWise
from seqtile.ops.tile_checkpoint import NO_TENSORS, Changed, Weights, run_in_tiles
from seqtile.ops.token_tiles import refuse_trace
from seqtile.recognise.chain import Chain
from seqtile.recognise.known_kernels import own_forward
from seqtile.recognise.live_weights import row_wise
from seqtile.recognise.packed_experts import is_packed
from seqtile.recognise.proof import Mode, Proof, autocast_dtype, prove
from seqtile.recognise.snapshot import SameSettings, Snapshot
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, KeepRule, TileRule

logger = first_rank_logger(__name__)


@dataclass(frozen=True)
class Setting:
    """How one block is tiled.

    Attributes:
        rule: the sizes of its tiles.
        keep: how many tiles keep gate and up.
        path: ``"auto"``, ``"fused"`` or ``"generic"``.
        hidden: width of the block's input.
        intermediate: width of its widest tensor per token.
        experts: whether it is a group of routed experts.
        name: qualified name of the block.
        layer: qualified name of the decoder layer around it, or "".
        trusted: whether the caller vouches for it where no proof exists.
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
        """The sizes that the tile rule reads, of the block as it is at this call."""
        return BlockShape(
            hidden=self.hidden,
            intermediate=self.intermediate * lanes,
            itemsize=x.element_size(),
            weight_numel=sum([weight.numel() for weight in weights]),
            weight_itemsize=min([weight.element_size() for weight in weights] or [4]),
            device_type=x.device.type,
            live_widths=FUSED_WIDTHS if fused else LIVE_WIDTHS,
        )


class _Thread(threading.local):
    """What this thread runs now.

    Attributes:
        inside: ``"tile"`` or ``"trial"`` of a layer, or "".
        chunk: ``"last"`` for a chunk of a segment's last layer, ``"followed"`` for a chunk of another layer, or "".
    """

    inside = chunk = ""


_thread = _Thread()


def inside_a_tile() -> bool:
    """Whether this thread runs one tile of a layer's sequence: modules inside that layer then run untiled."""
    return bool(_thread.inside)


@contextmanager
def inside(what: str = "tile") -> Iterator[None]:
    """Mark the calls inside as one ``"tile"`` of a layer, or as a ``"trial"``, which is no effect of an option."""
    was_inside, _thread.inside = _thread.inside, what
    try:
        yield
    finally:
        _thread.inside = was_inside


@contextmanager
def inside_a_chunk(*, last: bool) -> Iterator[None]:
    """Mark the calls inside as one chunk of a layer.

    The backward recomputes a chunk, except the output of the segment's ``last`` layer. So the blocks of the other
    layers, whose output the recompute needs, save gate and up in it as untiled blocks do.
    """
    outside, _thread.chunk = _thread.chunk, "last" if last else "followed"
    try:
        yield
    finally:
        _thread.chunk = outside


@dataclass(frozen=True)
class Operands:
    """The operands of one or more calls with the same weights.

    Attributes:
        fused: operands of the MLP's or the norm's operator; None where the generic operator runs.
        not_fused: why the requested fused operator cannot run now, or "".
        trained: the weights that train.
        shape: the sizes that the tile rule reads.
        dense_bytes: bytes of the packed weights once they are dense.
        sizes: tile sizes, by the number of tokens in a batch.
    """

    fused: FusedWeights | RowWise | None
    not_fused: str
    trained: tuple[Tensor, ...]
    shape: BlockShape
    dense_bytes: int
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Verdict:
    """The proof of a chain in one mode, and the operands of its last call.

    Attributes:
        chain: the modules that run.
        proof: the proof that they are position-wise, or why there is none.
        snapshot: the objects that the proof depends on.
        refusal: why the chain must not be tiled, or "".
    """

    def __init__(self, chain: Chain, proof: Proof, snapshot: Snapshot, refusal: str) -> None:
        self.chain, self.proof, self.snapshot, self.refusal = chain, proof, snapshot, refusal
        self._tensors: list[Tensor] = []
        self._operands: Operands | None = None

    @cached_property
    def settings(self) -> SameSettings:
        """The settings that a recompute compares; read while the snapshot still holds."""
        return SameSettings(self.chain.modules, self.snapshot)

    def forget_weights(self) -> None:
        self._tensors, self._operands = [], None

    def operands(
        self, tensors: list[Tensor], setting: Setting, x: Tensor, lanes: int, computed: Mapping[str, Tensor],
        fuses_norms: bool,
    ) -> Operands:  # fmt: skip
        """The operands of a call from the live weights; the last call's while the tensors are the same objects.

        Engines replace a module's tensors, empty them, or hide them behind attributes.
        """
        unchanged = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        if unchanged and self._operands is not None and all(map(Tensor.numel, tensors)):
            return self._operands
        self.forget_weights()
        fused: FusedWeights | RowWise | str | None = None
        if fuses_norms and self.proof.norm is not None:
            fused = row_wise(self.chain.modules[0], self.proof.norm)
        elif setting.path != "generic" and not setting.experts:
            formula = self.proof.formula
            fused = formula if isinstance(formula, str) else formula.weights(self.chain, x.dtype)
        mlp = fused if isinstance(fused, FusedWeights) else None
        trained = trained_weights(self.chain, computed)
        operands = Operands(
            fused=None if isinstance(fused, str) else fused,
            not_fused=fused if isinstance(fused, str) and not fuses_norms else "",
            trained=trained,
            shape=setting.shape(x, trained, mlp is not None, lanes),
            dense_bytes=mlp.packed_numel * x.element_size() if mlp is not None else 0,
        )
        if mlp is not None and not operands.dense_bytes:
            leaves = {id(tensor) for tensor in tensors if tensor.is_leaf}  # others would keep a graph alive
            if all(id(weight) in leaves for weight in mlp.split[0]):  # no views of FSDP1's flat parameter
                self._tensors, self._operands = tensors, operands
        return operands


def trained_weights(chain: Chain, computed: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """The trainable weights of a chain, including those computed for this call."""
    live = [weight for module in chain.modules for _, weight in named_weights(module)]
    return tuple([weight for weight in (*live, *computed.values()) if weight.requires_grad])


class Installed(ForwardStandIn):
    """Base of the tiled forwards: replaces an instance's forward, and restores the original."""

    most_tiles = most_tokens = 0
    """Maximum tiles and tokens of any call so far."""

    acted = False
    """Whether some call so far ran in parts: in more than one tile, or in passes."""

    called = False
    """Whether some call so far reached the choice of its parts."""

    idle_reason = ""
    """Why the most recent call that could not run in parts could not, or ""."""

    refused = ""
    """Why the last call of a layer in tiles of the sequence ran whole, or ""."""

    kept = fused = False
    """``kept``: some call so far saved gate and up. ``fused``: some call so far ran the fused operator."""

    compiled = False
    """Whether torch.compile has compiled it, without the parts in :attr:`left_out_compiled`."""

    left_out_compiled = (
        "under torch.compile, tiled blocks use PyTorch's checkpoint per tile instead of the fused operator"
    )
    """What a compiled call leaves out, as a sentence for the report."""

    technique = "blocks"
    """Name of the technique that installed it."""

    rotary_kernels = 0
    """Number of rotary embeddings that it runs by a kernel where the device has one."""

    owner = "apply"
    """Which call put it there: another :func:`seqtile.apply` leaves ``"tile_module"``'s."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        super().__init__(module)
        self.setting = setting
        self._verdicts: dict[Mode, Verdict] = {}
        self._last: Verdict | None = None
        self._settings: SameSettings | None = None

    def run_whole(self, why: str, args: Any, kwargs: Any) -> Any:
        """Run a layer untiled that cannot run in tiles of the sequence now, and log why."""
        if torch.is_grad_enabled():
            self.refused = self.idle_reason = why
            if self.is_news(why):
                logger.warning("%s runs whole: %s", self.title, why)
        return self.original(*args, **kwargs)

    @property
    def title(self) -> str:
        """Its name for messages; a root module has none in its model."""
        return self.setting.name or type(self.module).__name__

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_verdicts": {},
            "_last": None,
            "_settings": None,
            "_view": None,
        }  # a proof is valid for one instance

    def settings_of(self, modules: Sequence[nn.Module]) -> SameSettings:
        """The settings of ``modules`` that a recompute compares; the previous call's while they are unchanged."""
        if self._settings is None or self._settings.modules != modules or not self._settings.holds():
            self._settings = SameSettings(modules)
        return self._settings

    def remove(self) -> None:
        """Put every attribute back as it was."""
        module = self.module
        attributes = module.__dict__
        if attributes.get(HOOKED_FORWARD) is self:  # accelerate's hooks were put around it
            attributes[HOOKED_FORWARD] = self.original
            self.before = {**self.before, "forward": attributes["forward"]}
        self.take_out()
        marked = is_marked(module)
        unmark_leaf(module)
        if marked and isinstance(attributes.get("forward"), Installed):  # another technique's: it needs the mark
            mark_leaf(module)

    takes_norm = False
    """Whether it can be called with ``norm_before=``, the norm of its input, which then runs inside."""

    def inside(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of everything that runs inside a tile, without the block itself."""
        return [(name, module) for name, module in self.module.named_modules() if name]

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

    def run(
        self,
        chain: Chain,
        tensors: Sequence[Tensor],
        call: Callable[[list[Tensor]], Any],
        untiled: Callable[[], Any],
        lanes: int = 1,
        mode: Mode | None = None,
        computed: Mapping[str, Tensor] = NO_TENSORS,
        unpacked: Weights | None = None,
    ) -> Any:
        """Run ``chain`` on tiles of ``tensors``.

        Args:
            chain: the modules that run.
            tensors: the inputs that are split.
            call: computes ``chain`` on tiles of ``tensors``.
            untiled: the call as its caller made it.
            lanes: rows per token.
            mode: mode of the call; None derives it from ``tensors``.
            computed: weights that were computed for this call, by the names of the modules' weights that they replace.
            unpacked: computes frozen weights from packed ones, by the names of the weights that they replace.
        """
        if _thread.inside:
            self.acted = self.acted or _thread.inside == "tile"
            return untiled()
        if torch.compiler.is_compiling():
            return self._run_compiled(chain, tensors, call, untiled, lanes, computed)
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            refuse_trace()
        x, keep = tensors[0], self.setting.keep
        if any(HOOKS_OF_ALL) and (hook := hook_on_every_module()):
            return self._run_untiled(f"a hook on every module ({hook}) would see tiles", untiled)
        if x.is_nested:
            return self._run_untiled("its input is a nested tensor, which cannot be cut into tiles", untiled)
        if transform_level() is not None or in_forward_mode():
            return self._run_untiled("torch.func transforms and forward-mode derivatives do not support tiles", untiled)
        verdict, weights = self.verdict(chain, mode or mode_of(tensors))
        if verdict.refusal:
            return self._run_untiled(verdict.refusal, untiled)
        operands = verdict.operands(weights, self.setting, x, lanes, computed, self.fuses_norms)
        if operands.not_fused and self.falls_back and self.is_news(operands.not_fused):
            logger.warning("%s switched to the generic operator: %s", self.title, operands.not_fused)
        fused, chunk = operands.fused, _thread.chunk
        sizes = self._tile_sizes(operands, x.shape[:-1].numel(), chunk)
        if not sizes:
            return untiled()
        if fused is None or self.plainly is not None:
            fuses, changed = isinstance(fused, FusedWeights), verdict.settings.changed
            return self._in_tiles(chain.modules, tensors, call, sizes, computed, fuses, unpacked, changed)
        if isinstance(fused, RowWise):
            assert verdict.proof.graph is not None
            return fused_norm(x, fused, verdict.proof.graph.outputs[2][2], sizes)
        holds_dense = not operands.dense_bytes or keep.holds_dense(operands.dense_bytes)
        if chunk == "followed":
            self.fused = True
            return fused_mlp(x, fused, sizes, keep=1.0, holds_dense=holds_dense, under_checkpoint=True)
        kept_share = keep.share(sizes, operands.shape, operands.dense_bytes) if keep.value else 0.0
        self.fused, self.kept = True, self.kept or kept_share * len(sizes) >= 1
        return fused_mlp(x, fused, sizes, keep=kept_share, holds_dense=holds_dense)

    def _tile_sizes(self, operands: Operands, tokens: int, chunk: str) -> tuple[int, ...]:
        """Compute the tile sizes of a call, and record them for the report; empty if it runs whole."""
        fused, sizes = operands.fused, operands.sizes.get(tokens)
        if sizes is None:
            sizes = operands.sizes[tokens] = self.setting.rule.tile_sizes(tokens, operands.shape)
        if chunk and fused is None:
            sizes = ()  # the generic operator compares weights, and each chunk has its own aliases of them
            if self.setting.rule.kind != "auto":
                self.idle_reason = "in chunks, blocks without the fused operator run whole"
        self.most_tiles, self.most_tokens = max(self.most_tiles, len(sizes)), max(self.most_tokens, tokens)
        self.called, self.acted = True, self.acted or len(sizes) > 1 or bool(chunk and fused)
        # A single tile runs by the operator if another rank's batch may be tiled, and in a chunk, to save memory.
        if (
            not sizes
            and tokens
            and ((chunk and isinstance(fused, FusedWeights)) or reduces_as_they_arrive(operands.trained))
        ):
            return (tokens,)
        return sizes

    def verdict(self, chain: Chain, mode: Mode) -> tuple[Verdict, list[Tensor]]:
        """The verdict on ``chain`` in this mode, unchanged while its snapshot holds, and the live tensors.

        Cost:
            About 10 µs if they have not changed; else see :func:`seqtile.recognise.proof.prove`.
        """
        verdict = self._verdicts.get(mode)
        tensors = [] if verdict is None else verdict.snapshot.tensors()
        if verdict is None or verdict.chain != chain or not verdict.snapshot.holds(tensors):
            verdict = self._judge(chain, mode)
            tensors = verdict.snapshot.tensors()
        if verdict is not self._last:
            if self._last is not None:
                self._last.forget_weights()  # they may be replaced before that mode runs again
            self._last = verdict
        return verdict, tensors

    def _judge(self, chain: Chain, mode: Mode) -> Verdict:
        """Prove modules that are new or have changed."""
        self.check()  # not at every call: an engine that gathers inside has changed a class, a child or an attribute
        previous = self._verdicts.get(mode)
        if len(self._verdicts) > 8 or (previous is not None and not previous.snapshot.holds()):
            self._verdicts.clear()  # the other modes' weights may be gone too
        setting, modules = self.setting, chain.modules
        snapshot, proof, refusal = Snapshot(modules), prove(chain, mode, trusted=setting.trusted), ""
        if proof.why_not and (proof.refuted or not setting.trusted):
            refusal = proof.why_untiled(setting.name)
        if argument := _argument_per_sequence(modules):
            refusal = f"PEFT passes its adapters one entry per sequence ({argument}), which tiles do not support"
        verdict = self._verdicts[mode] = Verdict(chain, proof, snapshot, refusal)
        return verdict

    def _run_compiled(
        self, chain: Chain, tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any],
        untiled: Callable[[], Any], lanes: int, computed: Mapping[str, Tensor],
    ) -> Any:  # fmt: skip
        """:meth:`run` while torch.compile traces the call; it uses the generic operator alone."""
        if self.falls_back:
            self.note_compiled()
        x = tensors[0]
        kinds = [(tensor.dim(), tensor.dtype) for tensor in tensors]
        if not self._is_proven(kinds, bool(chain.call), x.device, torch.is_grad_enabled()):
            return untiled()
        trained, tokens = trained_weights(chain, computed), x.shape[:-1].numel()
        sizes = self.setting.rule.tile_sizes(tokens, self.setting.shape(x, trained, False, lanes))
        self.note_cut(len(sizes) > 1)
        if not sizes and tokens and reduces_as_they_arrive(trained):
            sizes = (tokens,)
        return self._in_tiles(chain.modules, tensors, call, sizes, computed, False) if sizes else untiled()

    def _in_tiles(
        self, modules: Sequence[nn.Module], tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any],
        sizes: tuple[int, ...], computed: Mapping[str, Tensor], fused: bool, unpacked: Weights | None = None,
        changed: Changed = str,
    ) -> Any:  # fmt: skip
        """Run the generic operator, or :attr:`plainly` if that is set."""
        computed_names = frozenset(computed)  # a closure over the tensors would keep them until the backward

        def live_weights() -> dict[str, Tensor]:
            live = {}
            for number, module in enumerate(modules):
                live.update({f"{number}.{name}": weight for name, weight in named_weights(module)})
            return {name: weight for name, weight in live.items() if name not in computed_names}

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Any:
            if not aliases:
                return call(list(tiles))
            return call_with_weights(ParameterSwap(modules), aliases, (call, list(tiles)))

        if self.plainly is not None:
            replaced = computed if unpacked is None else {**computed, **unpacked()}
            plain = (lambda tiles, aliases: run(tiles, {**replaced, **aliases})) if replaced else run
            return self.plainly(plain, tensors, sizes, fused)
        return run_in_tiles(run, tensors, sizes, live_weights, computed, unpacked, changed)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_compiled(self) -> bool:
        """Record, outside the compiled graph, that a compiled call left out :attr:`left_out_compiled`.

        Inside the graph, setting an attribute would leave all of a checkpointed layer uncompiled.
        """
        self.compiled, self.idle_reason = True, self.left_out_compiled
        return True

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_cut(self, cut: bool) -> bool:
        """Record, outside the compiled graph, whether a call runs in more than one tile."""
        self.called, self.acted = True, self.acted or cut
        return True

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _is_proven(
        self, kinds: Sequence[tuple[int, torch.dtype]], has_settings: bool, device: torch.device, gradients: bool
    ) -> bool:
        """Whether the block is proven in its present state; runs outside the graph, when a call is compiled."""
        # The compiler guards everything that the block's code reads, so a change there recompiles and runs this again.
        setting = self.setting
        if not setting.experts and (len(kinds) > 1 or has_settings):
            refusal = "torch.compile calls it with more than hidden states, which its trace does not cover"
        else:
            (dim, dtype), *_ = kinds
            axes: tuple[int | str, ...] = _AXES.get(dim) or ("b",) * (dim - 1)
            mode = Mode((((*axes, setting.hidden), dtype),), device, autocast_dtype(device.type), gradients)
            chain = Chain(((setting.name, self.module),), "experts" if setting.experts else "block")
            refusal = self.verdict(chain, mode)[0].refusal
        if refusal:
            self._log_untiled(refusal)
        return not refusal

    def _run_untiled(self, reason: str, untiled: Callable[[], Any]) -> Any:
        self._log_untiled(reason)
        return untiled()

    def _log_untiled(self, reason: str) -> None:
        self.idle_reason = reason
        if self.is_news(reason):
            logger.warning("%s runs untiled: %s", self.title, reason)

    fuses_norms = False
    """Whether a block that is a norm and nothing else runs by the norm's own operator."""

    plainly: Callable[..., Any] | None = None
    """Replaces the operators for ``verify``; called with (run, tensors, sizes, whether the fused one would run)."""

    falls_back = False
    """Whether the report names the fused operator, so that a switch to the generic one is logged."""

    def note(self) -> str:
        return f"tile={self.setting.rule}"

    @property
    def __code__(self) -> Any:
        raise AttributeError(_NO_SOURCE)

    __globals__ = __code__


def installed_forwards(model: nn.Module) -> list[Installed]:
    """The tiled forwards of a model, also where accelerate put a hook's forward around one; the outer one first."""
    installed = []
    for module in model.modules():
        for name in ("forward", HOOKED_FORWARD):
            forward = module.__dict__.get(name)
            while isinstance(forward, ForwardStandIn):
                installed += [forward] if isinstance(forward, Installed) else []
                forward = forward.before.get("forward")
    return installed


def rotary_by_kernel(model: nn.Module) -> int:
    """Count the rotary embeddings that run by a kernel where the device has one."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    return sum(forward.rotary_kernels for forward in forwards if isinstance(forward, Installed))


class ForwardsTechnique(Technique):
    """A technique that replaces forwards, of blocks or of layers."""

    on_forwards = True

    @classmethod
    def installed(cls, model: nn.Module) -> list[Any]:
        return [
            forward for forward in installed_forwards(model)
            if forward.technique == cls.name and forward.owner == "apply"
        ]  # fmt: skip


NO_EFFECT = "had no effect in the first training step"


def idle_sentences(option: str, forwards: Sequence[Installed], *, decides: bool) -> list[str]:
    """One sentence if none of ``forwards`` ran in parts.

    Args:
        option: the option as the user wrote it.
        forwards: the forwards that it replaced.
        decides: whether the option's rule may leave a short batch in one part.
    """
    if any(forward.acted for forward in forwards):
        return []
    if reasons := dict.fromkeys(forward.idle_reason for forward in forwards if forward.idle_reason):
        return [f"{option} {NO_EFFECT}: {'; '.join(reasons)}"]
    if not any(forward.called for forward in forwards):
        return [f"{option} {NO_EFFECT}: no forward that it changed was called"]
    return [] if decides else [f"{option} {NO_EFFECT}: the batch fits in one part"]


def refusals(model: nn.Module) -> list[str]:
    """One sentence per reason for which layers ran whole at their last call."""
    names_by_refusal: dict[str, list[str]] = {}
    for forward in installed_forwards(model):
        if forward.refused:
            names_by_refusal.setdefault(forward.refused, []).append(forward.title)
    return [f"{', '.join(names)} run whole: {why}" for why, names in names_by_refusal.items()]


_NO_SOURCE = (
    "torch.export and torch.jit.script read a module's source, which a tiled block does not have; call "
    "seqtile.undo(model) first and seqtile.apply afterwards, or export a module around the block"
)


_AXES: dict[int, tuple[str, ...]] = {2: ("bs",), 3: ("b", "s"), 4: ("b", "m", "s")}
"""Token axes of each leading dimension, by a tensor's number of dimensions; a trace distinguishes at most three."""


def mode_of(tensors: Sequence[Tensor], constants: Sequence[Tensor] = ()) -> Mode:
    """The mode of a call with these tensors, which are split along all but the last dimension."""
    x = tensors[0]
    inputs: list[Any] = []
    for tensor in tensors:
        axes = _AXES.get(tensor.dim()) or ("b",) * (tensor.dim() - 1)
        inputs.append(((*axes, tensor.shape[-1]), tensor.dtype))
    for constant in constants:
        inputs.append((tuple(constant.shape), constant.dtype))
    return Mode(tuple(inputs), x.device, autocast_dtype(x.device.type), torch.is_grad_enabled())


class TiledForward(Installed):
    """``forward`` of one position-wise module, over tiles of tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, original, computed = self.module, self.original, NO_TENSORS
        unpacked: Weights | None = None
        if not torch.compiler.is_compiling():
            self.refuse_copies()
            if hasattr(module, "parametrizations"):
                module, original, computed, unpacked = self._outside_parametrizations()
        if kwargs and not args:
            args, kwargs = by_position(original, kwargs)
        arguments = TokenArguments(args, kwargs)
        if arguments.why_whole:
            self._log_untiled(arguments.why_whole)
        if arguments.why_whole or not arguments.names:
            return self.original(*args, **kwargs)
        tensors = arguments.take()

        def call(tiles: list[Tensor]) -> Any:
            tile_args, tile_kwargs = arguments.fill(tiles)
            return original(*tile_args, **tile_kwargs)

        if self.setting.experts:
            chain = Chain(((self.setting.name, module),), "experts")
        elif len(args) > 1 or kwargs:
            chain = Chain(((self.setting.name, module),), arguments=arguments, call=arguments.key)
        else:
            chain = Chain(((self.setting.name, module),))
        mode = mode_of(tensors, arguments.constants()) if arguments.whole else None
        return self.run(
            chain, tensors, call, lambda: self.original(*args, **kwargs), mode=mode, computed=computed,
            unpacked=unpacked,
        )  # fmt: skip

    def _outside_parametrizations(
        self,
    ) -> tuple[nn.Module, Callable[..., Any], dict[str, Tensor], Weights | None]:
        """(view without parametrisations, its forward, the weights that they compute, how to compute packed ones)."""
        # PEFT's target_parameters registers the parametrisations for one call only; the recompute runs after it.
        module = self.module
        if self._view is None:
            self._view = object.__new__(type_before_parametrizations(module))
        view, attributes = self._view, self._view.__dict__
        attributes.clear()
        attributes.update(module.__dict__)
        attributes.pop("forward")
        attributes[MODULES] = {name: child for name, child in children_of(module).items() if name != "parametrizations"}
        originals = {name: parametrization.original for name, parametrization in module.parametrizations.items()}
        attributes[PARAMETERS] = {**parameters_of(module), **originals}
        forward = getattr(own_forward(module), "__func__", type(view).forward)
        # Without a checkpoint, dense weights that are saved as inputs would stay in memory for all layers at once.
        packed = {f"0.{name}": by for name, by in module.parametrizations.items() if is_packed(by)}
        computed = {f"0.{name}": getattr(module, name) for name in originals if f"0.{name}" not in packed}

        def unpacked() -> dict[str, Tensor]:
            return {name: parametrization() for name, parametrization in packed.items()}

        return view, partial(forward, view), computed, unpacked if packed else None

    _view: nn.Module | None = None
    """A view of the module without parametrisations; one object for all calls, since proofs compare it."""


def _argument_per_sequence(modules: Iterable[nn.Module]) -> str:
    """The argument with one entry per sequence that a hook of PEFT's adds to the adapters' calls, or ""."""
    for outer in modules:
        for module in outer.modules():
            for hook in module.__dict__[PRE_HOOKS].values():
                for name in hook.keywords if isinstance(hook, partial) else ():
                    if name in PER_SEQUENCE:
                        return str(name)
    return ""
