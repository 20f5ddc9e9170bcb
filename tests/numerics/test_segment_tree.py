"""Attention of a tree of segments in one row against a mask over every two tokens, and against one row per sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from numerics._errors import assert_all_no_worse
from seqtile.counting.live import count_live_bytes
from seqtile.ops.attention import piece_kernels, segment_tree
from seqtile.ops.attention.piece_kernels import Plain
from seqtile.ops.attention.prefix import KeyValues, Visible, prefix_attention
from seqtile.ops.attention.segment_tree import SegmentTable, tree_attention

TREES = {
    "one segment": ((0,), (-1,), 37),
    "a group": ((0, 23, 40, 41, 60), (-1, 0, 0, 0, 0), 66),
    "a group of one": ((0, 23), (-1, 0), 37),
    "separate": ((0, 9, 30), (-1, -1, -1), 41),
    "nested": ((0, 17, 30, 33, 47, 52, 61, 70), (-1, 0, 1, 2, 2, 1, 0, 6), 75),
    "two groups": ((0, 11, 20, 34, 55, 56), (-1, 0, 0, -1, 3, 3), 64),
}


def table_of(name: str) -> SegmentTable:
    return SegmentTable(*TREES[name])


def visible(segments: SegmentTable, window: int | None) -> Tensor:
    """The mask ``[T, T]`` of a tree, token by token."""
    seen = torch.zeros(segments.tokens, segments.tokens, dtype=torch.bool, device="cpu")
    for number, (start, end) in enumerate(zip(segments.starts, segments.ends, strict=True)):
        places = [
            place for segment in segments.path(number)
            for place in range(segments.starts[segment], segments.ends[segment])
        ]  # fmt: skip
        for query in range(start, end):
            path = places[: places.index(query) + 1]
            seen[query, path if window is None else path[-window:]] = True
    return seen.to(torch.get_default_device())


def masked(
    q: Tensor, k: Tensor, v: Tensor, segments: SegmentTable, *, scale: float, window: int | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same with all scores at once."""
    per_key = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(per_key, 1).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(segments, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.float().softmax(-1).to(q.dtype) if q.dtype != torch.float64 else scores.softmax(-1)
    return weights[..., : k.shape[2]] @ v.repeat_interleave(per_key, 1)


def operands(tokens: int, dtype: torch.dtype, *, heads: int = 6, keys: int = 2, sinks: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = dict(q=(1, heads, tokens, 16), k=(1, keys, tokens, 16), v=(1, keys, tokens, 12))
    shapes |= dict(sinks=(heads,)) if sinks else {}
    tensors = {name: torch.randn(*shape, generator=generator, device="cpu") for name, shape in shapes.items()}
    return {name: tensor.to(torch.get_default_device(), dtype) for name, tensor in tensors.items()}


def results(function: Any, tensors: dict[str, Tensor], segments: SegmentTable, **settings: Any) -> dict[str, Tensor]:
    """Output and gradients."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    named = dict(leaves)
    q, k, v = (named.pop(name) for name in "qkv")
    output = function(q, k, v, segments, scale=0.3, **named, **settings)
    weight = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device=output.device).sin()
    output.backward(weight.view(output.shape).to(output.dtype))
    return {"output": output.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def compare(tree: str, dtype: torch.dtype, *, sinks: bool = False, factor: float = 2.0, **settings: Any) -> None:
    segments = table_of(tree)
    tensors = operands(segments.tokens, dtype, sinks=sinks)
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    got = results(tree_attention, tensors, segments, **settings)
    expected = results(masked, tensors, segments, **settings)
    assert_all_no_worse(got, expected, results(masked, exact, segments, **settings), factor=factor)


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree", TREES)
def test_tree_is_masked_attention(tree: str, dtype: torch.dtype) -> None:
    compare(tree, dtype)


@pytest.mark.device
@pytest.mark.parametrize("settings", [
    dict(window=3), dict(window=13), dict(window=1000), dict(softcap=0.7), dict(sinks=True),
    dict(window=13, sinks=True),
    dict(window=29, softcap=0.7, sinks=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("tree", ["a group", "nested", "two groups"])
def test_windows_soft_caps_and_sinks(tree: str, settings: dict[str, Any]) -> None:
    compare(tree, torch.float32, **settings)


@pytest.mark.parametrize("tree", ["a group", "nested"])
def test_blocks_of_keys(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_tree, "KEYS_AT_ONCE", 7)
    monkeypatch.setattr(segment_tree, "MASKED_KEYS", 5)
    compare(tree, torch.float32)
    compare(tree, torch.float32, window=13)


@pytest.mark.parametrize("tree", ["a group", "nested"])
def test_plain_products(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_kernels, "_kernel", lambda q, k, piece: Plain)
    compare(tree, torch.float32)
    compare(tree, torch.bfloat16)


@pytest.mark.parametrize("tree", TREES)
def test_tree_is_one_row_per_sample(tree: str) -> None:
    """Summed over the samples: a shared token's gradient is the sum of its gradients in them."""
    segments = table_of(tree)
    tensors = operands(segments.tokens, torch.float64)
    leaves = set(range(len(segments.starts))) - set(segments.parents)
    rows = [
        [place for segment in segments.path(leaf) for place in range(segments.starts[segment], segments.ends[segment])]
        for leaf in leaves
    ]

    def separate(q: Tensor, k: Tensor, v: Tensor, _: SegmentTable, scale: float) -> Tensor:
        outputs = []
        for row in rows:
            alone = SegmentTable((0,), (-1,), len(row))
            outputs.append(masked(q[:, :, row], k[:, :, row], v[:, :, row], alone, scale=scale))
        return torch.cat(outputs, 2)

    def together(q: Tensor, k: Tensor, v: Tensor, segments: SegmentTable, scale: float) -> Tensor:
        output = tree_attention(q, k, v, segments, scale=scale)
        return torch.cat([output[:, :, row] for row in rows], 2)

    torch.testing.assert_close(results(together, tensors, segments), results(separate, tensors, segments))


def test_products_are_those_of_the_seen_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer reads the prompt's keys once, all answers in one call, and no answer another's."""
    prompt, answer, answers = 64, 32, 3
    segments = SegmentTable((0, *range(prompt, prompt + answers * answer, answer)), (-1, *[0] * answers), 160)
    forward, calls = piece_kernels.forward, []

    def counted(q: Tensor, k: Tensor, v: Tensor, piece: Any) -> Any:
        calls.append((q.shape[2], k.shape[2], piece.causal))
        return forward(q, k, v, piece)

    monkeypatch.setattr(piece_kernels, "forward", counted)
    q, k, v = operands(160, torch.float32).values()
    tree_attention(q, k, v, segments, scale=0.3)
    assert sorted(calls) == [*[(answer, answer, True)] * answers, (prompt, prompt, True), (96, prompt, False)]


def test_a_window_is_on_the_device_of_its_queries() -> None:
    """Of chunks too, which have the same pieces: on any device but the CPU a mask of a window was on the CPU."""
    segments = table_of("a group")
    q, k, v = (tensor.to("meta").requires_grad_() for tensor in operands(66, torch.float32).values())
    chunk = prefix_attention(q, k, v, KeyValues(66), Visible(0, 0, 66, 13), scale=0.3)
    for output in (tree_attention(q, k, v, segments, scale=0.3, window=13), chunk):
        output.sum().backward()
        assert output.is_meta and q.grad is not None


def test_no_keys_are_gathered() -> None:
    """Twelve more answers cost memory for their own tokens, in forward and backward, and none for the prompt's keys."""
    prompt, answer, peaks = 2048, 8, []
    for answers in (4, 16):
        size = prompt + answers * answer
        segments = SegmentTable((0, *range(prompt, size, answer)), (-1, *[0] * answers), size)
        q, k, v = (tensor.requires_grad_() for tensor in operands(size, torch.float32).values())
        gradient = torch.ones(1, 6, size, 12)
        with count_live_bytes("cpu") as live:
            tree_attention(q, k, v, segments, scale=0.3).backward(gradient)
        peaks.append(live.peak)
    of_token = 4 * (6 * 16 + 2 * (16 + 12) + 6 * 12)  # its query, keys, values and output
    assert peaks[1] - peaks[0] <= 4 * 12 * answer * of_token < 12 * prompt * 4 * 2 * (16 + 12)


@pytest.mark.parametrize(("starts", "parents"), [((0, 3, 6, 9), (-1, 0, -1, 0)), ((0, 3), (1, -1))])
def test_segments_out_of_order(starts: tuple[int, ...], parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="depth-first"):
        SegmentTable(starts, parents, 12)
