"""The objects that stand in for ``forward`` on one instance, and how they come off again.

They live in the instance's ``__dict__``: the class is untouched, no parameter is renamed, nothing enters
``state_dict``. They refer to their module weakly and find it again after ``copy.deepcopy`` and pickling.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._log import first_rank_logger
from seqtile.engines.flat import call_with_weights, named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.engines.zero3 import unmark_leaf
from seqtile.engines.zero12 import reduces_as_they_arrive
from seqtile.models.fuse import fused_weights
from seqtile.ops.fused import FusedWeights, fused_mlp
from seqtile.ops.generic import run_in_tiles
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, KeepRule, TileRule

logger = first_rank_logger(__name__)


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
    """

    rule: TileRule
    keep: KeepRule
    path: str
    hidden: int
    intermediate: int
    experts: bool = False
    name: str = ""
    layer: str = ""

    def shape(self, x: Tensor, weights: Sequence[Tensor], fused: bool, lanes: int = 1) -> BlockShape:
        """What the tile rule needs to know, from what the block is at this call."""
        return BlockShape(
            hidden=self.hidden,
            intermediate=self.intermediate * lanes,
            itemsize=x.element_size(),
            weight_numel=sum(weight.numel() for weight in weights),
            weight_itemsize=min([weight.element_size() for weight in weights] or [4]),
            device_type=x.device.type,
            live_widths=FUSED_WIDTHS if fused else LIVE_WIDTHS,
        )


_CHANGED = ("forward", "extra_repr", "_replicate_for_data_parallel")


class Installed:
    """Base of the stand-ins: puts itself into an instance, remembers what was there, and restores it."""

    def __init__(self, module: nn.Module, setting: Setting) -> None:
        self._module = weakref.ref(module)
        self.setting = setting
        self.told: set[str] = set()
        self.before: dict[str, Any] = {name: module.__dict__[name] for name in _CHANGED if name in module.__dict__}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module = weakref.ref(state["_module"])

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a tiled forward outlived its module"
        return module

    def install(self) -> None:
        replicate = _RefuseReplicas()
        self.module.__dict__.update(forward=self, extra_repr=_Note(self), _replicate_for_data_parallel=replicate)

    def remove(self) -> None:
        """Put every attribute back as it was."""
        unmark_leaf(self.module)
        own = self.module.__dict__
        if own.get("_old_forward") is self:  # accelerate's hooks were put around it
            own["_old_forward"] = self.original
            self.before["forward"] = own["forward"]
        for name in _CHANGED:
            own.pop(name, None)
        own.update(self.before)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the instance had: its own if one was set before, else its class's.

        A bound method would do, but ``torch.compile`` writes one down as ``module.forward``, which is ours.
        """
        return self.before.get("forward") or partial(type(self.module).forward, self.module)

    def inside(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) of everything that runs inside a tile, without the block itself."""
        return ((name, part) for name, part in self.module.named_modules() if name)

    def check(self) -> None:
        """Raise where an engine would gather weights at every tile."""
        if not torch.compiler.is_compiling():
            refuse_gathering_inside(self.inside(), block=self.setting.name, layer=self.setting.layer)

    def fused(self, dtype: torch.dtype) -> FusedWeights | str:
        """The block's live weights for the fused operator on inputs of ``dtype``, or why it runs the generic one."""
        raise NotImplementedError(f"{type(self).__name__} names no block; it is a base class")

    def run(
        self,
        parts: Sequence[nn.Module],
        tensors: Sequence[Tensor],
        call: Callable[[list[Tensor]], Any],
        other_arguments: bool = False,
        lanes: int = 1,
    ) -> Any:
        """Run ``call`` on tiles of ``tensors``; ``parts`` hold the block's weights; a token has ``lanes`` rows."""

        def weights() -> dict[str, Tensor]:
            return {
                f"{number}.{name}": weight
                for number, part in enumerate(parts)
                for name, weight in named_weights(part)
                if weight.requires_grad
            }

        def run(tiles: Sequence[Tensor], aliases: Mapping[str, Tensor]) -> Any:
            if not aliases:
                return call(list(tiles))
            return call_with_weights(_Bare(parts), aliases, (call, list(tiles)))

        if handed := _handed_per_sequence(parts):
            self._tell_untiled(f"PEFT hands its adapters one entry per sequence ({handed}), which tiles do not keep")
            return call(list(tensors))
        x, setting = tensors[0], self.setting
        mlp = self._choose(x.dtype, other_arguments)
        tokens = x.shape[:-1].numel()
        live = list(weights().values())
        shape = setting.shape(x, live, mlp is not None, lanes)
        sizes = setting.rule.tile_sizes(tokens, shape)
        if not sizes and tokens and reduces_as_they_arrive(live):
            sizes = (tokens,)  # one tile, not none: another rank's batch may be tiled
        if not sizes:
            return call(list(tensors))
        if self.plainly is not None:
            return self.plainly(run, tensors, sizes, mlp is not None)
        if mlp is None:
            return run_in_tiles(run, tensors, sizes, weights)
        dense, keep = mlp.dense_numel() * x.element_size(), setting.keep
        return fused_mlp(x, mlp, sizes, keep=keep.share(sizes, shape, dense), holds_dense=keep.holds_dense(dense))

    def _choose(self, dtype: torch.dtype, other_arguments: bool) -> FusedWeights | None:
        """The fused operator's weights if it can run this call; says so, once, if it was asked for and cannot."""
        setting = self.setting
        if setting.path == "generic" or setting.experts or torch.compiler.is_compiling():
            return None
        mlp = "it was called with more than hidden states" if other_arguments else self.fused(dtype)
        if isinstance(mlp, FusedWeights):
            return mlp
        if self.falls_back and mlp not in self.told:
            self.told.add(mlp)
            logger.warning("%s now runs the generic operator: %s", type(self.module).__name__, mlp)
        return None

    def _tell_untiled(self, why: str) -> None:
        if why not in self.told:
            self.told.add(why)
            logger.warning("%s runs untiled: %s", self.setting.name, why)

    plainly: Callable[..., Any] | None = None
    """Runs the tiles in the operators' place, as (run, tensors, sizes, whether they would be fused): for ``verify``."""

    falls_back = False
    """Whether the report said "fused", so that running the generic operator is news."""

    def note(self) -> str:
        return f"tile={self.setting.rule}"


class _RefuseReplicas:
    """``nn.DataParallel`` copies a module's attributes, and the copies would run the original's weights."""

    def __call__(self) -> nn.Module:
        raise NotImplementedError(
            "nn.DataParallel (several devices in one process) does not run tiled models; start one process per device "
            "with torchrun or accelerate launch, or make one device visible"
        )


class _Note:
    """``extra_repr`` of a changed instance: what ``print(model)`` shows."""

    def __init__(self, installed: Any) -> None:
        self.installed = installed

    def __call__(self) -> str:
        module = self.installed.module
        former = self.installed.before.get("extra_repr") or type(module).extra_repr.__get__(module)
        return ", ".join(part for part in (former(), self.installed.note()) if part)


class TiledForward(Installed):
    """``forward`` of one position-wise module, over tiles of tokens."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check()
        original = self.original
        if hasattr(self.module, "parametrizations"):
            # PEFT's target_parameters sets weights for the length of a call: a recompute would miss them.
            self._tell_untiled("its weights are parametrised around it; call seqtile.apply after get_peft_model")
            return original(*args, **kwargs)
        place = _Places(args, kwargs)
        if not place.names:
            return original(*args, **kwargs)
        tensors = place.take()

        def call(tiles: list[Tensor]) -> Any:
            filled, words = place.fill(tiles)
            return original(*filled, **words)

        return self.run([self.module], tensors, call, len(args) + len(kwargs) > 1)

    def fused(self, dtype: torch.dtype) -> FusedWeights | str:
        return fused_weights(self.module, dtype)


def _handed_per_sequence(parts: Iterable[nn.Module]) -> str:
    """The argument of that kind which a hook of PEFT's adds to the adapters' calls, or ""."""
    hooks = (hook for part in parts for module in part.modules() for hook in module._forward_pre_hooks.values())
    words = (word for hook in hooks if isinstance(hook, partial) for word in hook.keywords)
    return next((word for word in words if word in ("adapter_names", "alora_offsets")), "")


class _Bare(nn.Module):
    """The parts of a block under one roof, so that a call replaces their weights and runs no hook."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules.update({str(number): part for number, part in enumerate(parts)})

    def forward(self, call: Callable[[list[Tensor]], Any], tiles: list[Tensor]) -> Any:
        return call(tiles)


class _Places:
    """Which arguments are split along tokens: the first tensor, and every other with the same leading dimensions.

    A tensor of exactly the leading shape (one number per token) is split too, unless it could as well be one number
    per feature; all else is passed through.

    Raises:
        ValueError: a tensor has one row per element of the batch, which flattened tiles cannot pass on.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.names: list[int | str] = []
        self.tensors: list[Tensor] = []
        self.flat: list[bool] = []
        self.arguments: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        x: Tensor | None = None
        for name, value in self.arguments.items():
            if not isinstance(value, Tensor) or (x is None and value.dim() < 2):
                continue
            if x is None:
                x = value
            leading = x.shape[:-1]
            flat = value.shape == leading and (value.dim() > 1 or value.shape[0] != x.shape[-1])
            if flat or (value.dim() > 1 and value.shape[:-1] == leading):
                self.names.append(name)
                self.flat.append(flat)
                self.tensors.append(value.unsqueeze(-1) if flat else value)
            elif value.dim() > 1 and len(leading) > 1 and value.shape[0] == leading[0] > 1:
                raise ValueError(
                    f"cannot tile: argument {name!r} has shape {tuple(value.shape)} beside hidden states "
                    f"{tuple(x.shape)}: neither one row per token nor the same for the whole batch; leave the block "
                    "out with only=, or call it with batch 1"
                )

    def take(self) -> list[Tensor]:
        """The tensors to split; nothing here holds them any longer, since what runs a tile lives until backward."""
        tensors, self.tensors = self.tensors, []
        for name in self.names:
            self.arguments[name] = None
        return tensors

    def fill(self, tiles: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments, with tiles in place of the whole tensors."""
        filled = dict(self.arguments)
        for name, tile, flat in zip(self.names, tiles, self.flat, strict=True):
            filled[name] = tile.squeeze(-1) if flat else tile
        words = {name: value for name, value in filled.items() if isinstance(name, str)}
        return [value for name, value in filled.items() if not isinstance(name, str)], words
