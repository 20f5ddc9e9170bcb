"""What the generic operator costs: an early stop of checkpoints that is switched off, and bytes written by backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from numerics import test_contract as contract
from numerics._blocks import Gated, Tiled, block, random, shards
from numerics._layers import HOW, Layer
from numerics.test_contract import GATED, D, N, units
from seqtile.counting.live import count_live_bytes
from seqtile.ops import tile_checkpoint

HIDDEN, INTERMEDIATE = 16, 40
WEIGHT_BYTES = 3 * HIDDEN * INTERMEDIATE * 4


def mlp(frozen: bool) -> Gated:
    return block(hidden=HIDDEN, intermediate=INTERMEDIATE, bias=False).requires_grad_(not frozen)


def test_early_stop_switched_off_for_all() -> None:
    """The process-wide switch costs the layer its early stop, not the tiles, and is left as it was found."""
    model = GATED["gated"]()
    untiled, tiled = (Layer(net, D, HOW["checkpoint"]) for net in (model, Tiled(model, shards(N, 8))))
    with set_checkpoint_early_stop(False):
        assert (units(untiled), units(tiled), units(untiled)) == (12, 14, 12)
    assert units(untiled) == 11


def test_bookkeeping_seen_by_the_layers_checkpoint_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the identity hooks the layer's recompute runs the tiles again, all but the last."""
    monkeypatch.setattr(tile_checkpoint, "saved_tensors_hooks", lambda *_: nullcontext())
    with pytest.raises(AssertionError):
        contract.test_products("checkpoint", False, 11, 11, "gated", Tiled)


def test_a_recompute_that_does_not_stop_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last product of each tile is run for nothing."""
    monkeypatch.setattr(
        tile_checkpoint, "checkpoint", lambda *args, **how: checkpoint(*args, **how | {"early_stop": False})
    )
    with pytest.raises(AssertionError):
        contract.test_products("none", False, 9, 11, "gated", Tiled)


class Sliced(nn.Module):
    """What not to do: a slice per tile, whose backward fills a full-size zero tensor."""

    def __init__(self, inner: nn.Module, count: int) -> None:
        super().__init__()
        self.block = inner
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        tile = x.shape[0] // self.count
        tiles = [x[i * tile : (i + 1) * tile] for i in range(self.count)]
        return torch.cat([checkpoint(self.block, t, use_reentrant=False) for t in tiles])


def written(net: nn.Module, tokens: int) -> int:
    """Bytes that one backward writes."""
    net.zero_grad()
    output = net(random(tokens, HIDDEN))
    upstream = torch.ones_like(output)
    with count_live_bytes("cpu") as live:
        output.backward(upstream)
    return live.written


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_bytes_written_do_not_grow_with_the_number_of_tiles(how: dict[str, Any]) -> None:
    model = mlp(frozen=True)
    first, *others = (written(Layer(Tiled(model, shards(512, n)), HIDDEN, how), 512) for n in (1, 4, 16, 256))
    assert others == [first] * 3


def test_slices_per_tile_are_noticed() -> None:
    model = mlp(frozen=True)
    assert written(Sliced(model, 256), 512) > 5 * written(Sliced(model, 4), 512)


def test_bytes_written_for_weights_that_train() -> None:
    """Each tile after the first costs its weights' gradients twice, once computed and once added: no activation."""
    model = mlp(frozen=False)
    for tokens in (512, 1024):
        counts = (1, 4, 16, 256)
        found = [written(Tiled(model, shards(tokens, count)), tokens) for count in counts]
        assert [more - found[0] for more in found] == [2 * WEIGHT_BYTES * (count - 1) for count in counts]
