"""What the fused operator costs, counted: matrix products, live bytes, buffers, nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from numerics._blocks import random, shards
from numerics._fused import Between, Fused, GatedMLP, GateUpMLP, PlainMLP, weights_of
from numerics._layers import HOW, Layer
from seqtile.counting.live import LiveBytes, count_live_bytes
from seqtile.counting.products import Products, count_products
from seqtile.ops import linear, mlp
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.linear import Adapter
from seqtile.ops.mlp import fused_mlp
from seqtile.ops.mlp_tile import Pass

D, F, N = 48, 136, 2048
KINDS: dict[str, Callable[[], nn.Module]] = {
    "gated": lambda: GatedMLP(D, F, bias=False),
    "gate_up": lambda: GateUpMLP(D, F, bias=False),
}


def measure(run: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> tuple[Products, LiveBytes]:
    """One forward and backward; the input and the incoming gradient were there before."""
    x, upstream = random(1, N, D, dtype=dtype), random(1, N, D, dtype=dtype, seed=2, grad=False)
    with count_products() as products, count_live_bytes() as live:
        run(x).backward(upstream)
    return products, live


def units(model: nn.Module, how: str = "none") -> float:
    return measure(Layer(model, D, HOW[how]))[0].units(N, D, F)


def test_units_of_a_plain_mlp() -> None:
    """2 forward, 1 recomputed, 4 backward; frozen 2 + 1 + 2. Untiled under a checkpoint: the same."""
    model = PlainMLP(D, F, bias=False)
    assert units(Fused(model, shards(N, 8)), "checkpoint") == units(model, "checkpoint") == 7.0
    model.requires_grad_(False)
    assert units(Fused(model, shards(N, 8)), "checkpoint") == units(model, "checkpoint") == 5.0


@pytest.mark.parametrize(("frozen", "expected"), [(False, 12.0), (True, 9.0)])
@pytest.mark.parametrize("how", ["none", "checkpoint"])
def test_units_with_a_norm_after(how: str, frozen: bool, expected: float) -> None:
    model = Between(KINDS["gated"](), nn.RMSNorm(D), nn.RMSNorm(D))
    model.mlp.requires_grad_(not frozen)
    assert units(Fused(model, shards(N, 8)), how) == expected


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("keep", "saved"), [(0.0, 0), (0.5, 1), (1.0, 2), (0.49, 0.75), (0.1, 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["none", "checkpoint"])
def test_units_of_kept_tiles(kind: str, how: str, keep: float, saved: float, frozen: bool) -> None:
    """11, 10 and 9 units at 0, 0.5 and 1; 8, 7 and 6 when frozen; a share is rounded down to whole tiles."""
    model = KINDS[kind]().requires_grad_(not frozen)
    assert units(Fused(model, shards(N, 8), keep), how) == (8 if frozen else 11) - saved


def test_a_recompute_that_runs_the_down_projection_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Pass.backward

    def mutated(self: Pass, x: Tensor, dy: Tensor, dx: Any, kept: Any) -> None:
        self.forward(x, torch.empty_like(dy), keep=False)
        backward(self, x, dy, dx, kept)

    monkeypatch.setattr(Pass, "backward", mutated)
    assert units(Fused(KINDS["gated"](), shards(N, 8))) == 14.0


def weight_bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def bound(model: nn.Module, count: int, dtype: torch.dtype) -> int:
    """Output and the input's gradient (the incoming one was there before), four tile buffers, gradients, fp32 sums."""
    size = dtype.itemsize
    sums = 4 * sum(weight.numel() for weight in model.parameters()) if size < 4 else 0
    return 2 * N * D * size + 4 * max(shards(N, count)) * F * size + weight_bytes(model) + sums + 65536


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [4, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_peak(kind: str, count: int, dtype: torch.dtype) -> None:
    model = KINDS[kind]().to(dtype)
    live = measure(Fused(model, shards(N, count)), dtype)[1]
    assert live.peak <= bound(model, count, dtype)
    assert live.now <= weight_bytes(model) + N * D * dtype.itemsize + 4096  # gradients, nothing else


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_buffer_more_is_noticed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, init = KINDS["gated"]().to(dtype), Pass.__init__

    def mutated(self: Pass, *args: Any) -> None:
        init(self, *args)
        self._buffer("another", 1, F)

    monkeypatch.setattr(Pass, "__init__", mutated)
    assert measure(Fused(model, shards(N, 4)), dtype)[1].peak > bound(model, 4, dtype)


def test_output_that_is_dropped_before_the_backward_is_not_counted_twice() -> None:
    """As behind a residual add: two tensors of the hidden state's shape at the peak, not three."""
    model = KINDS["gated"]()
    x, upstream = random(1, N, D), random(1, N, D, seed=2, grad=False)
    with count_live_bytes() as live:
        (x + Fused(model, shards(N, 16))(x)).backward(upstream)
    assert live.peak <= bound(model, 16, torch.float32) + N * D * 4  # the sum itself


class Widest(TorchDispatchMode):
    """The most rows of any tensor as wide as the MLP, and the most bytes of such tensors alive at once.

    Weights and their gradients, which are as wide but have ``D`` rows, are left out.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows, self.most = width, 0, 0
        self.alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.shape[-1:].numel() % self.width == 0 and tensor.shape[0] != D:
                storage = tensor.untyped_storage()
                self.rows = max(self.rows, tensor.shape[:-1].numel())
                self.alive[storage._cdata] = weakref.ref(storage)
        self.alive = {key: ref for key, ref in self.alive.items() if ref() is not None}
        self.most = max(self.most, sum(ref().nbytes() for ref in self.alive.values()))  # type: ignore[union-attr]
        return result


@pytest.mark.parametrize("kind", [*KINDS, "norms"])
def test_at_most_four_tile_buffers_and_never_a_whole_one(kind: str) -> None:
    norms = lambda: Between(KINDS["gated"](), nn.RMSNorm(D), nn.RMSNorm(D))  # noqa: E731
    model = KINDS.get(kind, norms)()
    tile = N // 16
    with Widest(F) as seen:
        measure(Layer(Fused(model, shards(N, 16)), D, HOW["checkpoint"]))
    assert (seen.rows, seen.most) == (tile, 4 * tile * F * 4)
    with Widest(F) as seen:
        measure(model)
    assert seen.rows == N, "the counter sees the untiled block's tensors"


@pytest.mark.parametrize("kind", [GatedMLP, PlainMLP])
def test_an_activation_without_a_formula_takes_less_than_half_a_buffer(kind: Callable[..., nn.Module]) -> None:
    """Its derivative comes from autograd, which makes several tensors of its input's size: some rows at a time."""
    model = Fused(kind(D, F, bias=False, act=lambda z: z * torch.sigmoid(1.702 * z)), shards(N, 4))
    with Widest(F) as seen:
        measure(model)
    assert seen.most <= 4.5 * (N // 4) * F * 4


def test_tile_buffers_are_gone_when_the_sums_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """In low precision the final gradients come on top of the sums, not on top of the buffers."""
    result, left = Sum.result, []
    with Widest(F) as seen:

        def noting(self: Sum) -> Tensor:
            left.append(sum(ref() is not None for ref in seen.alive.values()))
            return result(self)

        monkeypatch.setattr(Sum, "result", noting)
        measure(Fused(KINDS["gated"](), shards(N, 16)))
    assert left == [0, 0, 0] and seen.most > 0


def test_an_adapter_in_fp32_makes_no_wide_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of a low-precision base with fp32 adapters: the adapters' own products run in pieces."""
    wide = Fused(KINDS["gated"]().bfloat16().requires_grad_(False), (N,))
    x, upstream = random(1, N, D, dtype=torch.bfloat16), random(1, N, D, dtype=torch.bfloat16, seed=2, grad=False)
    weights = weights_of(wide.block)
    sides = [
        (torch.randn(4, D), torch.randn(F, 4)),
        (torch.randn(4, D), torch.randn(F, 4)),
        (torch.randn(4, F), torch.randn(D, 4)),
    ]
    parts = [
        dataclasses.replace(part, adapter=Adapter(a.requires_grad_(), b.requires_grad_(), 1.0))
        for part, (a, b) in zip((*weights.first, weights.down), sides, strict=True)
    ]
    weights = dataclasses.replace(weights, first=tuple(parts[:2]), down=parts[2])
    monkeypatch.setattr(linear, "WIDE_ROWS", 512)
    with count_live_bytes() as live:
        fused_mlp(x, weights, (N,)).backward(upstream)
    pieces = 2 * 512 * F * 4 + 4 * N * 4 * 4  # of 512 rows in fp32, and [N, rank]
    assert live.peak <= 2 * N * D * 2 + 4 * N * F * 2 + pieces + 65536
    assert pieces < N * F * 4


def test_a_forward_without_gradients_keeps_no_tile() -> None:
    model, x = GatedMLP(24, 240), random(96, 24, grad=False)
    peaks = []
    for keep in (0.0, 1.0):
        block = Fused(model, [24] * 4, keep=keep)
        with torch.no_grad(), count_live_bytes("cpu") as live:
            block(x)
        peaks.append(live.peak)
    assert peaks[0] == peaks[1] > 0


def peers() -> Iterator[tuple[str, Callable[[nn.Module, int], Callable[[Tensor], Tensor]]]]:
    """Other tiled MLPs, each as a function of the block and the number of tiles."""

    def per_tile(model: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.cat([checkpoint(model, t, use_reentrant=False) for t in x.split(N // count, 1)], 1)

    def liger(model: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
        pytest.importorskip("liger_kernel", reason="Liger Kernel is not installed")
        from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

        return lambda x: apply_tiled_mlp(lambda m, t: m(t), model, x, num_shards=count, compute_params=None)

    def deepspeed(model: nn.Module, count: int) -> Callable[[Tensor], Tensor]:
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip("DeepSpeed is not installed")
        from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

        return lambda x: TiledMLP.apply(lambda m, t: m(t), model, x, count, list(model.parameters()))

    yield "PyTorch's checkpoint per tile", per_tile
    yield "Liger", liger
    yield "DeepSpeed", deepspeed


@pytest.mark.filterwarnings("ignore")  # the peers' own
@pytest.mark.parametrize(("name", "peer"), list(peers()), ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("count", [4, 16, 64])
def test_peak_against_peers(name: str, peer: Callable[..., Any], count: int) -> None:
    """Alone below every peer; in a checkpointed layer not above any, and below where the norm is in the tile."""
    model = KINDS["gated"]()
    theirs = peer(model, count)
    ours, norm_in_tile = Fused(model, shards(N, count)), Fused(Between(model, nn.RMSNorm(D), None), shards(N, count))

    def layer(run: Callable[[Tensor], Tensor], norm: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: checkpoint(lambda x: x + run(norm(x)), x, use_reentrant=False)

    def peak(run: Callable[[Tensor], Tensor]) -> int:
        model.zero_grad(set_to_none=True)
        return measure(run)[1].peak

    norm = nn.RMSNorm(D).requires_grad_(False)
    assert peak(ours) < peak(theirs)
    under = peak(layer(theirs, norm))
    assert peak(layer(ours, norm)) <= under
    assert peak(layer(norm_in_tile, nn.Identity())) < under


def test_kept_tiles_hold_gate_and_up_alone_until_their_backward() -> None:
    model, x = KINDS["gated"](), random(1, N, D)
    with count_live_bytes() as live:
        output = Fused(model, shards(N, 8), keep=0.5)(x)
        kept = live.now - N * D * 4
        assert kept <= 2 * (N // 2) * F * 4 + 4096
        assert kept >= 2 * (N // 2) * F * 4
        output.sum().backward(retain_graph=True)
        assert live.now <= N * D * 4 * 2 + weight_bytes(model) + 4096, "freed although the graph is kept"


def test_kept_tiles_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, refs, backward = [], [], Pass.backward
    model, x = KINDS["gated"](), random(1, N, D)
    output = Fused(model, shards(N, 4), keep=1.0)(x)
    refs = [weakref.ref(t) for values in output.grad_fn.kept.values() for t in values]
    assert len(refs) == 8

    def noting(self: Pass, *args: Any) -> None:
        backward(self, *args)
        alive.append(sum(ref() is not None for ref in refs))

    monkeypatch.setattr(Pass, "backward", noting)
    output.sum().backward()
    assert alive == [8, 6, 4, 2]  # the tile at hand included


def test_the_node_does_not_hold_the_input() -> None:
    """Under a layer checkpoint the block's input is gone after the forward, kept tiles or not."""
    x, seen = random(1, N, D), []

    def layer(x: Tensor) -> Tensor:
        hidden = x * 2
        seen.append(weakref.ref(hidden))
        return Fused(KINDS["gated"](), shards(N, 4), keep=1.0)(hidden)

    output = checkpoint(layer, x, use_reentrant=False)
    assert seen[0]() is None
    output.sum().backward()
    assert len(seen) == 2 and seen[1]() is None


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["none", "checkpoint"])
@pytest.mark.parametrize("keep", [0.0, 1.0])
@pytest.mark.parametrize("where", ["never", "forward", "backward"])
def test_nothing_survives(where: str, keep: float, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a backward, and after an exception in forward or backward, nothing is alive, without garbage collection."""
    refs: list[weakref.ref[torch.UntypedStorage]] = []
    original = {"forward": Pass.forward, "backward": Pass.backward}

    def noting(name: str) -> Callable[..., Any]:
        def mutated(self: Pass, x: Tensor, out: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original[name](self, x, out, *args, **kwargs)
            refs.extend(weakref.ref(t.untyped_storage()) for t in (x, out, *self._buffers.values(), *(result or ())))
            if where == name and len(refs) > 12:
                raise KeyError("stop")
            return result

        return mutated

    def step() -> None:
        layer = Layer(Fused(KINDS["gated"](), shards(N, 4), keep), D, HOW[how])
        output = layer(random(1, N, D) * 1)
        refs.append(weakref.ref(output.untyped_storage()))
        output.sum().backward()

    for name in original:
        monkeypatch.setattr(Pass, name, noting(name))
    with nullcontext() if where == "never" else pytest.raises(KeyError):
        step()
    assert refs and all(ref() is None for ref in refs)


@pytest.mark.usefixtures("no_collector")
def test_something_that_survives_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    forward = mlp._run_tiles

    def mutated(*args: Any) -> Tensor:
        held.append(args)
        return forward(*args)

    monkeypatch.setattr(mlp, "_run_tiles", mutated)
    with pytest.raises(AssertionError):
        test_nothing_survives("never", 0.0, "none", monkeypatch)
