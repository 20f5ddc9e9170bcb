"""Where ``"auto"`` starts to tile, against counted bytes of the block's forward and backward."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import seqtile
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, TileRule, lowers_peak

HIDDEN, INTERMEDIATE = 128, 448  # Llama-8B's proportions
LENGTHS = (64, 128, 256, 384, 512, 768, 1024)


def _peak(tokens: int, dtype: torch.dtype, path: str | None) -> int:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE)
    model = nn.ModuleDict({"mlp": LlamaMLP(config)}).to(dtype)
    if path is not None:
        seqtile.apply(model, tile="shards:2", path=path)
    x = torch.randn(1, tokens, HIDDEN, dtype=dtype, requires_grad=True)
    gradient = torch.randn(1, tokens, HIDDEN, dtype=dtype)
    with seqtile.count_live_bytes("cpu") as live:
        model["mlp"](x).backward(gradient)
    return live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("path", "widths"), [("fused", FUSED_WIDTHS), ("generic", LIVE_WIDTHS)])
def test_break_even(path: str, widths: int, dtype: torch.dtype) -> None:
    size = torch.finfo(dtype).bits // 8
    weights = 3 * HIDDEN * INTERMEDIATE
    shape = BlockShape(HIDDEN, INTERMEDIATE, size, weights, size, "cpu", widths)
    verdicts = []
    for tokens in LENGTHS:
        untiled, tiled = _peak(tokens, dtype, None), _peak(tokens, dtype, path)
        pays = lowers_peak(tokens, tokens // 2, shape)
        verdicts.append(pays)
        if pays:
            assert tiled < untiled, f"{tokens} tokens: tiled {tiled:,} bytes, untiled {untiled:,}"
        else:
            assert tiled > untiled * 3 / 4, f"{tokens} tokens: tiled {tiled:,} bytes, untiled {untiled:,}"
    assert {True, False} <= set(verdicts), "the lengths do not reach both sides of break-even"


def test_auto_asks_it() -> None:
    shape = BlockShape(HIDDEN, INTERMEDIATE, 2, 3 * HIDDEN * INTERMEDIATE, 2, "cpu", FUSED_WIDTHS)
    assert TileRule("auto").tile_sizes(1024, shape) == ()
    assert TileRule("auto").tile_sizes(2048, shape) == (1024, 1024)
    huge = BlockShape(8192, 28672, 2, 3 * 8192 * 28672, 2, "cuda", FUSED_WIDTHS)
    assert TileRule("auto").tile_sizes(9000, huge) == ()  # two tiles of 4,608 free less than the fp32 sums add
    assert len(TileRule("auto").tile_sizes(65536, huge)) == 8
