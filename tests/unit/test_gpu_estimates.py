"""The recorder behind the page "What a GPU will show": launches, bytes and FLOPs of a layer on fake tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gpu_estimates
import one_mlp
from gpu_estimates import HIDDEN, INTERMEDIATE, METHODS, RATES, TILE, record_layer, row, step_row

PAGE = Path(__file__).parents[2] / "docs" / "gpu-estimates.md"
UNIT = 2 * 512 * 64 * 256
"""FLOPs of one product of the small layer."""


def small(method: str, tiles: int = 4) -> gpu_estimates.Record:
    return record_layer(method, 512, 64, 256, 512 // tiles)


@pytest.mark.parametrize(("method", "units"), [("untiled", 11), ("fused", 11), ("generic", 11)])
def test_products(method: str, units: int) -> None:
    assert small(method).flops == units * UNIT


def test_a_small_layer() -> None:
    """One row is 512 x 64 in bf16, a buffer 512 x 256: what the fused layer's operations read and write."""
    found = small("fused")
    pointwise = {name: tuple(value) for name, value in found.operations.items() if name.startswith("pointwise")}
    buffer, rows = 2 * 512 * 256, 2 * 512 * 64
    assert pointwise == {"pointwise forward": (4, 3 * buffer), "pointwise backward": (4, 6 * buffer)}
    norm = {name: tuple(value) for name, value in found.operations.items() if name.startswith("norm")}
    assert norm == {
        "norm forward": (8, 2 * (2 * rows) + 8 * 2 * 64), "norm backward": (4, 3 * rows),
        "norm weight gradient": (4, 2 * rows), "norm weight sum": (4, 4 * 2 * 4 * 64),
    }  # fmt: skip
    assert found.operations["aten::mm"][0] + found.operations["aten::addmm"][0] == 11 * 4
    launches = [small("fused", tiles).launches for tiles in (1, 2, 4)]
    assert launches[2] - launches[1] == 2 * (launches[1] - launches[0]), "each tile costs the same"
    assert launches == [25, 43, 79]
    assert found.launches == launches[2] and found.nbytes == sum(nbytes for _, nbytes in found.operations.values())


def test_times_are_the_longer_of_products_and_memory() -> None:
    found = gpu_estimates.Record()
    found.add("a", 0)
    assert found.seconds == RATES.launch
    found.add("b", int(4.3e12))
    found.add("c", 1, int(720e12))
    assert found.seconds == pytest.approx(RATES.launch + 2)


def test_what_is_expanded_is_read_once() -> None:
    """A mean's gradient, ``[rows, 1]``, is expanded to the row before it is divided."""
    found = gpu_estimates.Record()
    column = torch.ones(512, 1).expand(512, 64)
    with gpu_estimates.Watch(found.see):
        column / 64
        torch.ones(8, 8).t() + 1
    assert {name: tuple(value) for name, value in found.operations.items()} == {
        "aten::div": (1, 4 * 512 + 4 * 512 * 64), "aten::ones": (1, 4 * 64), "aten::add": (1, 2 * 4 * 64),
    }  # fmt: skip


def test_without_the_kernels_of_norms() -> None:
    found = record_layer("fused", 512, 64, 256, 128, norms=False)
    assert found.launches == 222
    assert found.nbytes > small("fused").nbytes


@pytest.mark.parametrize(("tokens", "launches", "gigabytes"), [(32768, 263, 63.0), (131072, 1019, 246.6)])
def test_the_page_says_what_the_command_prints(tokens: int, launches: int, gigabytes: float) -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = record_layer("fused", tokens, HIDDEN, INTERMEDIATE, TILE)
    assert row(tokens, "fused", found) in page
    assert all(step_row(tokens, kernel, found) in page for kernel in gpu_estimates.ATTENTION)
    assert found.launches <= launches
    assert found.nbytes <= gigabytes * 1e9


@pytest.mark.parametrize("tile", [0, one_mlp.TILE])
def test_one_mlp_as_the_page_says(tile: int) -> None:
    hidden, intermediate = one_mlp.SHAPES["qwen3-8b"]
    shape = {"hidden": hidden, "intermediate": intermediate, "tokens": one_mlp.TOKENS, "tile": tile, "device": "fake"}
    found = [one_mlp.measure_one_mlp({**shape, "upstream": upstream})["peak_gb"] for upstream in one_mlp.UPSTREAM]
    name = f"tiles of {tile:,}" if tile else "untiled"
    assert f"| {name} | {found[0]:.2f} | {found[1]:.2f} |" in PAGE.read_text(encoding="utf-8")
    assert not tile or max(found) < 7.97


@pytest.mark.parametrize("tokens", gpu_estimates.TOKENS)
@pytest.mark.parametrize("method", METHODS)
def test_every_row_is_counted_again(method: str, tokens: int) -> None:
    found = row(tokens, method, record_layer(method, tokens, HIDDEN, INTERMEDIATE, TILE))
    assert found in PAGE.read_text(encoding="utf-8").splitlines()
