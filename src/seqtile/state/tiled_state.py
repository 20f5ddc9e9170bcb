"""``forward`` of a layer with a state, or of its mixer alone, over tiles of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import CHECKPOINT_FUNCTION, HOOKS_OF_ALL, checkpoints_in_forward, hook_on_every_module
from seqtile.blocks.instance import Installed, inside_a_tile
from seqtile.engines.flat import named_weights
from seqtile.engines.zero12 import reduces_as_they_arrive
from seqtile.recognise.live_weights import seen_inside
from seqtile.state.state_cache import cache_argument
from seqtile.state.state_proof import StateProofs
from seqtile.state.tile_call import ReadWholeError, TileCall, argument_value, in_tiles
from seqtile.tiling import state_tiles


@dataclass(frozen=True)
class StateSetting:
    """How one layer with a state is tiled.

    Attributes:
        tile: tokens of the sequence per tile, or ``"auto"``.
        name: qualified name of the layer or the mixer.
        layer: qualified name of the decoder layer around it.
        runs: whether the module runs in tiles; else only a mixer inside it does.
    """

    tile: int | str
    name: str
    layer: str
    runs: bool = True


class StateForward(Installed):
    """``forward`` of one layer or mixer, over tiles of its sequence that pass a state on.

    Args:
        module: the layer or the mixer.
        setting: how it is tiled.
        proofs: cached proofs of the model's layers.
    """

    def __init__(self, module: nn.Module, setting: StateSetting, proofs: StateProofs) -> None:
        super().__init__(module, setting)  # type: ignore[arg-type]
        self.state = setting
        self.proofs = proofs
        self.cache = cache_argument(module)

    technique = "state"

    left_out_compiled = "state is ignored under torch.compile: compiled layers run untiled"

    def note(self) -> str:
        return f"state={self.state.tile}" if self.state.runs else ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, cache = self.module, self.cache
        if not self.state.runs or cache is None or inside_a_tile():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            self.note_compiled()
            return self.original(*args, **kwargs)
        if not torch.is_grad_enabled() and not module.training:
            return self.original(*args, **kwargs)
        # Without gradients a layer keeps its cache: generate() on a model in training mode.
        checkpointed = module.training and torch.is_grad_enabled() and getattr(module, "gradient_checkpointing", False)
        if argument_value(args, kwargs, cache) is not None and not checkpointed:
            return self.run_whole("it was called with a cache; pass use_cache=False", args, kwargs)
        if any(HOOKS_OF_ALL) and (hook := hook_on_every_module()):
            return self.run_whole(f"a hook on every module ({hook}) would see tiles", args, kwargs)
        if hooked := seen_inside(module):
            return self.run_whole(f"{hooked} has hooks, which tiles would call with other tensors", args, kwargs)
        call = TileCall(args, kwargs, cache)
        if call.why_whole:
            return self.run_whole(call.why_whole, args, kwargs)
        cuts = state_tiles(call.tokens, call.batch, self.state.tile, call.documents)
        self.called = True
        if len(cuts.sizes) == 1 and not cuts.documents and not reduces_as_they_arrive(module.parameters()):
            return self.original(*args, **kwargs)
        self.check()
        if why := self.proofs.why_not(module, call.tensors[0]):
            return self.run_whole(why, args, kwargs)
        self.refused, self.acted = "", True
        changed = self.settings_of((module,)).changed

        def tiled(*tensors: Tensor) -> Any:
            return in_tiles(module, call, tensors, cuts, lambda: dict(named_weights(module)), changed)

        tensors, call.tensors = call.tensors, []  # so that the call keeps no tensor alive that a checkpoint offloads
        try:
            if checkpointed and checkpoints_in_forward(module):
                return getattr(module, CHECKPOINT_FUNCTION)(tiled, *tensors)
            return tiled(*tensors)
        except ReadWholeError as error:
            return self.run_whole(str(error), args, kwargs)
