"""Tile and keep rules: pure arithmetic."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import seqtile
from seqtile.blocks.instance import installed_forwards
from seqtile.blocks.norms_and_projections import ROWS_AUTO
from seqtile.tiling import FUSED_WIDTHS, LIVE_WIDTHS, BlockShape, even_sizes, parse_keep, parse_tile, tile_ranges
from zoo import causal_lm

D, F = 4096, 14336
LENGTHS = range(500, 200_000, 1_237)


def shape(weight_numel: int, device: str = "cuda", itemsize: int = 2, intermediate: int = F) -> BlockShape:
    return BlockShape(D, intermediate, itemsize, weight_numel, itemsize, device, FUSED_WIDTHS)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("weights", [3 * D * F, 0])
def test_auto_cuts_equal_multiples_of_128(weights: int, device: str) -> None:
    block, tilings = shape(weights, device), 0
    for tokens in LENGTHS:
        sizes = parse_tile("auto").tile_sizes(tokens, block)
        tilings += bool(sizes)
        assert not sizes or sum(sizes) == tokens
        assert all(size % 128 == 0 for size in sizes[:-1])
        assert not sizes or max(sizes) - min(sizes) < 256
    assert tilings > len(LENGTHS) // 2


@pytest.mark.parametrize(
    ("weights", "intermediate", "tokens"),
    [
        (3 * D * F, F, 8192),
        (3 * 4096 * 4096, 4096, 16384),
        (0, F, 4096),
        (3 * 16 * (D + F), F, 4096),  # adapters of rank 16
        (D * F, F, 8192),  # one matrix of three
    ],
)
def test_auto_takes_large_tiles_where_whole_matrices_train(weights: int, intermediate: int, tokens: int) -> None:
    block = shape(weights, intermediate=intermediate)
    assert parse_tile("auto").tokens_per_tile(2**20, block) == tokens


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("hidden", "intermediate"), [(512, 1408), (1024, 3072), (2048, 8192), (4096, 14336)])
def test_auto_fills_the_device(hidden: int, intermediate: int, trains: bool) -> None:
    """A tile works 20 times as long as its 32 kernels take to start and 16 times as long as reading its weights."""
    numel = 3 * hidden * intermediate if trains else 0
    block = BlockShape(hidden, intermediate, 2, numel, 2, "cuda", FUSED_WIDTHS)
    for tokens in (50_000, 100_000, 200_000, 1_000_000):
        for tile in parse_tile("auto").tile_sizes(tokens, block)[:-1]:
            work = (11 if trains else 8) * 2 * tile * hidden * intermediate / 700e12
            near_a_gib = 2 * tile * block.bytes_per_token > 2**30
            reads = (11 if trains else 8) * 2 * hidden * intermediate / 3e12
            # Tiles are equalised: at worst two of a little more than half the limit.
            assert work >= 0.5 * max(20 * 32 * 6.6e-6, 16 * reads) or near_a_gib, (tokens, tile, work)
    assert parse_tile("auto").tokens_per_tile(0, block) * block.bytes_per_token <= 2**30 or hidden > 1024


def test_auto_takes_larger_tiles_where_a_tile_starts_more_kernels() -> None:
    """The generic operator starts three times as many: 1.55 of untiled's time in tiles of 2,048 tokens."""
    fused = shape(0)
    generic = replace(fused, live_widths=LIVE_WIDTHS)
    assert parse_tile("auto").tokens_per_tile(0, generic) == 6144
    assert 6144 * generic.bytes_per_token <= 2**30 < 6400 * generic.bytes_per_token


def test_norms_and_projections_of_narrow_models_run_in_few_tiles() -> None:
    """2 layers of width 1,024 in 12 tiles took 400 ms on an H100, 25 untiled."""
    narrow, wide = (BlockShape(width, width, 2, 0, 2, "cuda") for width in (1024, 4096))
    for part in ("norm", "projection"):
        rule = replace(ROWS_AUTO, part=part)
        assert rule.tokens_per_tile(0, wide) == 4 * 2048, "as before"
        assert rule.tokens_per_tile(0, narrow) > 2 * 4 * 2048
        assert len(rule.tile_sizes(32_768, narrow)) <= 2
    assert replace(ROWS_AUTO, part="norm").tokens_per_tile(0, replace(narrow, device_type="cpu")) == 4 * 512


def test_each_kind_of_module_has_its_own_floor() -> None:
    model = causal_lm("llama")
    seqtile.apply(model, blocks="mlp+norm+projections")
    rules = {one.setting.name.rpartition(".")[2]: one.setting.rule for one in installed_forwards(model)}
    assert rules["input_layernorm"] == replace(ROWS_AUTO, part="norm")
    assert rules["o_proj"] == replace(ROWS_AUTO, part="projection")
    assert rules["mlp"] == parse_tile("auto") and rules["mlp"].part == "block"


def test_kept_bytes_never_exceed_the_budget() -> None:
    block = shape(0, "cpu", intermediate=256)
    kept = []
    for tokens in (2000, 2176, 5000, 9001):
        for tile in ("auto", "1024", "shards:2", "shards:3"):
            sizes = parse_tile(tile).tile_sizes(tokens, block)
            for budget in range(0, 1024 * tokens + 100_000, 50_000):
                share = parse_keep(f"memory:{budget + 1}", 1).share(sizes, block)
                rows = [0, *accumulate(sizes)][int(share * len(sizes) + 1e-9)]
                assert 2 * 256 * 2 * rows <= budget + 1, (tokens, tile, budget)
                kept.append(share)
    assert 0.0 in kept and 1.0 in kept


@pytest.mark.parametrize("sizes", [(), (0,), (7,), (5, 1, 8), (3, 0, 2)], ids=str)
def test_ranges_follow_one_another_and_hold_every_token_once(sizes: tuple[int, ...]) -> None:
    ranges = list(tile_ranges(sizes))
    assert [size for _, size in ranges] == list(sizes)
    assert [token for start, size in ranges for token in range(start, start + size)] == list(range(sum(sizes)))


def test_even_sizes_differ_by_one_at_most_and_the_larger_come_first() -> None:
    for total in range(1, 40):
        for count in range(1, total + 1):
            sizes = even_sizes(total, count)
            assert (len(sizes), sum(sizes)) == (count, total)
            assert list(sizes) == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("tile", [90, 128, "auto", "shards:3", "arctic", "memory:1GiB"])
def test_torch_compile_reads_a_rule_for_a_length_that_it_knows_as_a_symbol(tile: int | str) -> None:
    """``fullgraph`` refuses whatever the compiler has no operator for, such as ``divmod`` of a symbol."""
    rule, block = parse_tile(tile), BlockShape(8, 12, 8, 300, 8, "cpu")

    def in_tiles(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([2 * part for part in x.split(rule.tile_sizes(len(x), block) or len(x))])

    compiled = torch.compile(in_tiles, backend="eager", dynamic=True, fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=64):  # which counts what all these rules compile
        for tokens in (13, 16, 23, 1300):
            x = torch.arange(float(tokens))
            assert torch.equal(compiled(x), 2 * x)
