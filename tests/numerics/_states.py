"""Layers with a state, whole and in tiles: tiny ones of every family, and a mode that computes in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqtile.engines.flat import named_weights
from seqtile.state import tile_call
from seqtile.state.state_cache import cache_argument
from seqtile.state.state_layers import Carrier, find_carriers
from seqtile.state.tile_call import TileCall, in_tiles
from seqtile.tiling import StateTiles
from tiny_models import build, tiny_config

FAMILIES = {
    "Gated DeltaNet": ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"],
    "KDA": ["kimi_linear", "bailing_hybrid"],
    "Mamba-2": ["mamba2", "bamba", "nemotron_h", "falcon_h1", "granitemoehybrid", "zamba2"],
    "short convolution": ["lfm2_moe", "lfm2"],
}
"""The families whose layers with a state run in tiles, by kind."""

WHOLE = {"mamba": "Mamba", "jamba": "Mamba", "minimax": "lightning attention", "recurrent_gemma": "RG-LRU"}
"""Those that take no state in their forward, or give its gradient away: they stay whole."""


@functools.cache
def _config(family: str) -> Any:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if transformers.__version__.startswith("5.0."):
        pytest.skip("the layers of transformers 5.0 take their state in another way: seqtile.apply leaves them whole")
    config = tiny_config(family, random=False)
    config.use_cache = False
    if family == "lfm2":
        config.layer_types, config.num_hidden_layers = ["conv", "full_attention"], 2
    for name in ("mamba_chunk_size", "chunk_size"):
        if getattr(config, name, None):
            setattr(config, name, 16)  # a short sequence is padded to a chunk
    return config


def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny model, its experts one after another."""
    torch.manual_seed(0)
    try:
        model: Any = build(transformers.AutoModelForCausalLM, _config(family)).to(dtype)
    except ImportError as error:
        pytest.skip(f"{family} needs a package: {error}")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def carrier_of(model: nn.Module) -> Carrier:
    """The first layer with a state."""
    return next(iter(find_carriers(model)))


class InFloat64(TorchFunctionMode):
    """Inside, what a layer computes in fp32 whatever its weights are is computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def whole(module: nn.Module, x: Tensor, **words: Any) -> Tensor:
    """The output of a layer or a mixer, as it runs without tiles."""
    return _first(tile_call.forward_of(module)(x, **words))


def tiled(module: nn.Module, cuts: Sequence[int] | StateTiles, x: Tensor, **words: Any) -> Tensor:
    """The same in these tiles, or in tiles of these sizes."""
    cache = cache_argument(module)
    assert cache is not None
    call = TileCall((x,), words, cache)
    cuts = cuts if isinstance(cuts, StateTiles) else StateTiles(tuple(cuts))
    return _first(in_tiles(module, call, call.tensors, cuts, lambda: dict(named_weights(module))))


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def results(module: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Output and gradients under an upstream gradient that is another one for each element."""
    module.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = run(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), device="cpu")
    y.backward(upstream.to(y.device, y.dtype))
    assert x.grad is not None
    found = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    return {"output": y.detach(), "input": x.grad, **found}


def error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error (L2) relative to the tensor, or to a thousandth of the largest gradient."""
    assert got.keys() == expected.keys()
    least = 1e-3 * max(float(value.norm()) for value in expected.values())
    return max(float((got[name] - one).norm()) / max(float(one.norm()), least) for name, one in expected.items())


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Inside, layers compute everything in float64 if that is ``dtype``."""
    if dtype != torch.float64:
        yield
        return
    former = tile_call.forward_of

    def forward_of(module: nn.Module) -> Any:
        def forward(*args: Any, **words: Any) -> Any:
            with InFloat64():
                return former(module)(*args, **words)

        return forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_call, "forward_of", forward_of)
        yield
