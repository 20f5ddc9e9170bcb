"""The counters against numbers worked out by hand, exactly."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from seqtile import _compat
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import Product, count_products
from watching import adapter_units

TOKENS, HIDDEN, INTERMEDIATE = 24, 16, 40
UNIT = 2 * TOKENS * HIDDEN * INTERMEDIATE
FLOAT = 4


class GatedMLP(nn.Module):
    def __init__(self, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        else:
            self.gate = nn.Linear(hidden, intermediate, bias=False)
            self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


def hidden_states() -> Tensor:
    return torch.randn(1, TOKENS, HIDDEN, requires_grad=True)


# --- products


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("checkpointed", "reentrant", "units"), [(False, False, 9.0), (True, False, 11.0), (True, True, 12.0)]
)
def test_a_gated_mlp_costs_what_the_design_says(fused: bool, checkpointed: bool, reentrant: bool, units: float) -> None:
    mlp, x = GatedMLP(fused=fused), hidden_states()
    with count_products() as products:
        y = checkpoint(mlp, x, use_reentrant=reentrant) if checkpointed else mlp(x)
        y.sum().backward()
    assert products.units(TOKENS, HIDDEN, INTERMEDIATE) == units
    assert products.flops == units * UNIT


def test_frozen_weights_cost_no_weight_products() -> None:
    mlp = GatedMLP().requires_grad_(False)
    with count_products() as products:
        checkpoint(mlp, hidden_states(), use_reentrant=False).sum().backward()
    assert products.units(TOKENS, HIDDEN, INTERMEDIATE) == 8.0


def test_a_backward_inside_a_backward_is_counted() -> None:
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            with torch.enable_grad():
                y = x @ weight
            return torch.autograd.grad(y, (x, weight), gradient)

    with count_products() as products:
        Nested.apply(torch.randn(3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)).sum().backward()
    assert (products.calls, products.flops) == (4, 4 * 2 * 3 * 5 * 7)


def low_rank(x: Tensor) -> Tensor:
    return x[0] @ torch.randn(HIDDEN, 4) @ torch.randn(4, INTERMEDIATE)


def test_products_can_be_told_apart_by_their_sizes() -> None:
    x = hidden_states().detach()
    with count_products() as products:
        GatedMLP()(x)
        low_rank(x)
        nn.Linear(HIDDEN, HIDDEN)(x)
    assert products.units(TOKENS, HIDDEN, INTERMEDIATE) == 3.0
    assert adapter_units(products, TOKENS, HIDDEN, INTERMEDIATE, rank=4) == (4 * (HIDDEN + INTERMEDIATE)) / (
        HIDDEN * INTERMEDIATE
    )
    assert products.flops_where(lambda product: product.has(HIDDEN, HIDDEN)) == 2 * TOKENS * HIDDEN * HIDDEN
    assert products.flops_where(lambda product: product.op == "bmm") == 0
    assert products.calls == 6
    assert adapter_units(products, TOKENS, HIDDEN, INTERMEDIATE, rank=8) == 0.0


def test_a_tile_as_long_as_an_adapter_is_wide_is_no_adapter() -> None:
    with count_products() as products:
        GatedMLP()(torch.randn(4, HIDDEN))
    assert adapter_units(products, 4, HIDDEN, INTERMEDIATE, rank=4) == 0.0


def test_a_size_must_be_there_as_often_as_it_is_asked_for() -> None:
    assert Product("mm", 8, 16, 16, 1).has(16, 16, 8)
    assert not Product("mm", 8, 16, 4, 1).has(16, 16)


@pytest.mark.parametrize("width", [INTERMEDIATE, 2 * INTERMEDIATE])
def test_tokens_as_many_as_a_width_are_refused(width: int) -> None:
    with count_products() as products:
        GatedMLP()(torch.randn(width, HIDDEN))
    with pytest.raises(ValueError, match=f"tokens={width} equals a width"):
        products.units(width, HIDDEN, INTERMEDIATE)


def test_a_fused_width_can_be_left_out() -> None:
    with count_products() as products:
        GatedMLP()(hidden_states())
        nn.Linear(HIDDEN, 2 * INTERMEDIATE)(hidden_states())  # a vocabulary, say
    assert products.units(TOKENS, HIDDEN, INTERMEDIATE, fused=False) == 3.0
    assert products.units(TOKENS, HIDDEN, INTERMEDIATE) == 5.0


A, B = torch.randn(3, 5), torch.randn(5, 7)
A3, B3 = torch.randn(2, 3, 5), torch.randn(2, 5, 7)
ROWS, GROUPS = torch.randn(6, 8), torch.randn(2, 8, 12)
ENDS = torch.tensor([2, 6], dtype=torch.int32)
ONE = 2 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        pytest.param(lambda: torch.mm(A, B), ONE, id="mm"),
        pytest.param(lambda: torch.mm(A, B, out=torch.empty(3, 7)), ONE, id="mm.out"),
        pytest.param(lambda: torch.addmm(torch.zeros(7), A, B), ONE, id="addmm"),
        pytest.param(lambda: torch.addmm(torch.zeros(7), A, B, out=torch.empty(3, 7)), ONE, id="addmm.out"),
        pytest.param(lambda: torch.zeros(3, 7).addmm_(A, B), ONE, id="addmm_"),
        pytest.param(lambda: torch._addmm_activation(torch.zeros(7), A, B), ONE, id="_addmm_activation"),
        pytest.param(lambda: torch.bmm(A3, B3), 2 * ONE, id="bmm"),
        pytest.param(lambda: torch.baddbmm(torch.zeros(1, 3, 7), A3, B3), 2 * ONE, id="baddbmm"),
        pytest.param(lambda: torch.zeros(2, 3, 7).baddbmm_(A3, B3), 2 * ONE, id="baddbmm_"),
        pytest.param(lambda: torch.einsum("bik,bkj->bij", A3, B3), 2 * ONE, id="einsum"),
        pytest.param(lambda: F.linear(A3, B.T), 2 * ONE, id="linear of three dimensions"),
        pytest.param(lambda: F.linear(A3, B.T, torch.zeros(7)), 2 * ONE, id="linear with bias"),
        pytest.param(
            lambda: torch.ops.mkldnn._linear_pointwise(A3, B.T.contiguous(), None, "none", [], ""),
            2 * ONE,
            id="oneDNN",
            marks=pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="built without oneDNN"),
        ),
        pytest.param(lambda: torch.mm(A.half(), B.half()), ONE, id="half"),
        pytest.param(lambda: torch._int_mm(A.to(torch.int8), B.to(torch.int8)), ONE, id="_int_mm"),
        pytest.param(lambda: F.grouped_mm(ROWS, GROUPS, offs=ENDS), 2 * 6 * 8 * 12, id="grouped"),
        pytest.param(
            lambda: F.grouped_mm(ROWS.T, torch.randn(6, 12), offs=ENDS), 2 * 6 * 8 * 12, id="grouped, split k"
        ),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_every_kind_of_product(run: Callable[[], Tensor], flops: int, inference: bool) -> None:
    with torch.inference_mode(inference), count_products() as products:
        run()
    assert (products.calls, products.flops) == (1, flops)


def test_attention_has_a_count_of_its_own() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    with count_products() as products:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        A @ B
    assert products.attention_calls == 2
    assert products.flops == ONE


def test_a_counter_that_saw_nothing_raises() -> None:
    with count_products() as products, count_live_bytes("cpu") as live:
        pass
    for number in ("calls", "flops", "records"):
        with pytest.raises(RuntimeError, match="counted no matrix product"):
            getattr(products, number)
    for number in ("peak", "now", "written", "phases"):
        with pytest.raises(RuntimeError, match="counted no bytes on device 'cpu'"):
            getattr(live, number)
    with pytest.raises(RuntimeError, match="counted no byte"):
        live.timeline()


def test_units_of_a_model_without_such_products_raise_and_show_what_was_seen() -> None:
    with count_products() as products:
        A @ B
    with pytest.raises(RuntimeError, match=r"no matrix product of hidden 16 with intermediate 40.*\(3, 7, 5\)"):
        products.units(TOKENS, HIDDEN, INTERMEDIATE)


def test_what_a_subclass_runs_inside_is_counted_once() -> None:
    """A wrapper that holds half of its rows, as one of two ranks would."""

    class Wrapper(Tensor):
        @staticmethod
        def __new__(cls, inner):  # type: ignore[no-untyped-def]
            rows, width = inner.shape
            wrapper = Tensor._make_wrapper_subclass(cls, (2 * rows, width), dtype=inner.dtype)
            wrapper.held = inner
            return wrapper

        def __tensor_flatten__(self):  # type: ignore[no-untyped-def]
            return ["held"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, *_):  # type: ignore[no-untyped-def]
            return cls(inner["held"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            with FakeTensorMode():  # as DTensor works out the shape first
                func(*(torch.empty(arg.shape) for arg in args))
            return cls(func(*(getattr(arg, "held", arg) for arg in args)))

    wrapped = Wrapper(A)
    with count_products() as products, count_live_bytes("cpu") as live:
        wrapped @ B
    assert (products.calls, products.flops) == (1, ONE)
    assert live.peak == live.written == 3 * 7 * FLOAT


# --- live bytes


def test_the_peak_of_an_untiled_mlp_is_the_sum_of_its_tensors() -> None:
    """Tokens 2,048, hidden 256, intermediate 704 in fp32: 35.6875 MiB; PyTorch's MemTracker says so too."""
    tokens, hidden, intermediate = 2048, 256, 704
    mlp, x = GatedMLP(hidden, intermediate), torch.randn(tokens, hidden, requires_grad=True)
    upstream = torch.randn(tokens, hidden)
    with count_live_bytes("cpu") as live:
        y = mlp(x)
        y.backward(upstream)
    wide, narrow, weight = (FLOAT * size for size in (tokens * intermediate, tokens * hidden, hidden * intermediate))
    # As gate times up goes backward: gate, silu(gate), up, three gradients; the output, down's gradient.
    assert live.peak == 6 * wide + narrow + weight == 35.6875 * 2**20
    assert live.now == narrow + narrow + 3 * weight  # the output, the input's gradient, the weights' gradients


def test_a_view_counts_nothing_and_keeps_its_storage_alive() -> None:
    with count_live_bytes("cpu") as live:
        whole = torch.zeros(100)
        part = whole[:10]
        assert live.now == live.peak == live.written == 400
        del whole
        assert live.now == 400
        del part
        assert live.now == 0
    assert live.peak == 400


def test_what_was_there_before_is_not_counted_and_is_subtracted_when_it_goes() -> None:
    before, unrelated = torch.zeros(100), torch.zeros(7)
    with count_live_bytes("cpu") as live:
        after = before + 1
        assert live.now == 400
        del before
        assert live.now == 0
        del after, unrelated
    assert (live.now, live.peak) == (-400, 400)


def test_a_tensor_kept_by_the_graph_alone_is_live() -> None:
    x = torch.zeros(100, requires_grad=True)
    with count_live_bytes("cpu") as live:
        y = x.exp().sum()
        assert live.now == 400 + FLOAT
        y.backward()
        assert live.now == 400 + FLOAT  # x.grad in its place


def test_tensors_made_from_python_and_numpy_are_counted() -> None:
    with count_live_bytes("cpu") as live:
        ours = torch.tensor([1.0, 2.0, 3.0])
        theirs = torch.from_numpy(ours.numpy().copy())
    assert live.now == ours.nbytes + theirs.nbytes == 24


def test_resizing_is_seen() -> None:
    with count_live_bytes("cpu") as live:
        tensor = torch.zeros(10)
        tensor.resize_(100)
        assert live.now == 400
        tensor.untyped_storage().resize_(0)  # no operator: noticed where it would make a wrong peak
        torch.zeros(50)
        assert live.peak == 400
        torch.zeros(101)
    assert live.peak == 404


@pytest.mark.parametrize(
    ("run", "written"),
    [
        pytest.param(lambda x: x + 1, 400, id="new"),
        pytest.param(lambda x: x.add_(1), 400, id="in place"),
        pytest.param(lambda x: x[:10].add_(1), 40, id="in place, a part"),
        pytest.param(lambda x: torch.add(x, 1, out=torch.empty(100)), 400, id="out"),
        pytest.param(lambda x: x.view(10, 10).t(), 0, id="view"),
        pytest.param(lambda x: torch.empty_like(x), 0, id="empty"),
        pytest.param(lambda x: torch._foreach_add_([x, x[:10]], 1), 440, id="list"),
        pytest.param(lambda x: x.index_add_(0, torch.arange(5), torch.ones(5)), 40 + 20 + 20, id="scattered"),
        pytest.param(lambda x: x.sort(), 400 + 800, id="several"),
    ],
)  # fmt: skip
def test_bytes_written(run: Callable[[Tensor], object], written: int) -> None:
    x = torch.zeros(100)
    with count_live_bytes("cpu") as live:
        run(x)
    assert live.written == written


def test_a_sliced_backward_writes_more_for_every_tile_and_a_split_does_not() -> None:
    """What the number is for: the backward of ``x[a:b]`` fills a tensor as large as x, once per tile."""

    def written(cut: Callable[[Tensor, int], list[Tensor]], tiles: int) -> int:
        x = torch.zeros(64, 8, requires_grad=True)
        y = torch.cat([tile * 2 for tile in cut(x, 64 // tiles)])
        with count_live_bytes("cpu") as live:
            y.sum().backward()
        return live.written

    def slices(x: Tensor, size: int) -> list[Tensor]:
        return [x[start : start + size] for start in range(0, 64, size)]

    assert written(lambda x, size: list(x.split(size)), 16) == written(lambda x, size: list(x.split(size)), 4)
    assert written(slices, 16) > 3 * written(slices, 4)


def test_phases_have_peaks_of_their_own() -> None:
    mlp, x = GatedMLP(), hidden_states()
    with count_live_bytes("cpu") as live:
        with live.phase("forward"):
            y = checkpoint(mlp, x, use_reentrant=False)
        with live.phase("backward"):
            y.sum().backward()
        torch.zeros(1)
    assert list(live.phases) == ["forward", "backward"]
    assert live.phases["forward"].peak < live.phases["backward"].peak == live.peak
    assert sum(phase.written for phase in live.phases.values()) == live.written - FLOAT


def test_the_timeline_reaches_the_peak_in_order() -> None:
    mlp = GatedMLP()
    with count_live_bytes("cpu") as live:
        with live.phase("forward"):
            y = mlp(hidden_states())
        with live.phase("backward"):
            y.sum().backward()
    samples = live.timeline()
    assert max(sample.live for sample in samples) == live.peak
    assert [sample.op for sample in samples] == sorted({sample.op for sample in samples})
    assert list(dict.fromkeys(sample.phase for sample in samples)) == ["forward", "backward"]


def step(mlp: nn.Module) -> None:
    mlp.zero_grad(set_to_none=True)
    checkpoint(mlp, hidden_states(), use_reentrant=False).sum().backward()


def test_both_counters_agree_with_themselves_alone_and_in_either_order() -> None:
    mlp = GatedMLP()
    mlp.zero_grad()
    with count_products() as alone:
        step(mlp)
    mlp.zero_grad()
    with count_live_bytes("cpu") as bytes_alone:
        step(mlp)
    mlp.zero_grad()
    with count_products() as outer, count_live_bytes("cpu") as inner_bytes:
        step(mlp)
    mlp.zero_grad()
    with count_live_bytes("cpu") as outer_bytes, count_products() as inner:
        step(mlp)
    assert alone.records == outer.records == inner.records
    assert bytes_alone.peak == inner_bytes.peak == outer_bytes.peak
    assert bytes_alone.written == inner_bytes.written == outer_bytes.written


def test_fake_tensors_cost_what_real_ones_do() -> None:
    def measure() -> tuple[int, int, int]:
        with count_products() as products, count_live_bytes("cpu") as live:
            step(GatedMLP())
        return products.flops, live.peak, live.written

    real = measure()
    with FakeTensorMode():
        assert measure() == real


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_alive_and_no_cycle_is_made(fails: bool) -> None:
    mlp = GatedMLP()
    with no_collector():
        try:
            with count_products() as products, count_live_bytes("cpu") as live:
                with live.phase("all"):
                    x = torch.randn(4, HIDDEN)
                    tensor = weakref.ref(x)
                    mlp(x)
                    del x
                    assert tensor() is None
                    if fails:
                        raise KeyError
        except KeyError:
            pass
        counters = weakref.ref(products), weakref.ref(live)
        del products, live
        assert [counter() for counter in counters] == [None, None]
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_after_the_with_the_numbers_stand() -> None:
    with count_live_bytes("cpu") as live:
        tensor = torch.zeros(100)
    del tensor
    torch.zeros(1000)
    assert (live.now, live.peak, live.written) == (400, 400, 400)


def test_on_an_accelerator_peaks_come_from_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended allocator that had 100 bytes before and peaks at 1,000 in one phase and 600 in the next."""
    peak = 100

    def reset(index: int) -> None:
        nonlocal peak
        peak = 100

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda index: 100 if index == 3 else 0)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda index: peak)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    with count_live_bytes() as live:
        with live.phase("forward"):
            torch.zeros(1)
            peak = 1000
        with live.phase("backward"):
            peak = 600
        assert live.peak == 900
    with FakeTensorMode(), count_live_bytes() as fake:
        torch.zeros(1)
    assert fake.peak == FLOAT  # no allocator knows about it
    peak = 5000  # what happens afterwards is not ours
    assert live.peak == 900
    assert {name: phase.peak for name, phase in live.phases.items()} == {"forward": 900, "backward": 500}


def test_tensors_of_another_device_are_not_counted() -> None:
    with count_live_bytes("meta") as live:
        torch.zeros(100, device="meta") + 1
        torch.zeros(1000).add_(1)
    assert (live.peak, live.written) == (800, 800)


def test_inference_mode_takes_apart_only_what_has_no_kernel() -> None:
    x = torch.zeros(100)
    with torch.inference_mode(), count_live_bytes("cpu") as live:
        torch.ops.aten.silu_backward(x, x)  # has a decomposition too, of six tensors
    assert live.written == live.peak == 400


def test_memory_tracker_of_pytorch_agrees() -> None:
    from torch.distributed._tools.mem_tracker import MemTracker

    mlp, x, upstream = GatedMLP(), hidden_states(), torch.randn(1, TOKENS, HIDDEN)
    with count_live_bytes("cpu") as live:
        y = mlp(x)
        y.backward(upstream)
    del y
    mlp.zero_grad()
    x.grad = None
    tracker = MemTracker()
    tracker.track_external(mlp, x, upstream)
    with tracker:
        y = mlp(x)
        y.backward(upstream)
    before = sum(tensor.nbytes for tensor in (*mlp.parameters(), x, upstream))
    total = SimpleNamespace(**tracker.get_tracker_snapshot("peak")[torch.device("cpu")])
    assert live.peak == total.Total - before


@pytest.mark.parametrize("name", ["_tensor_use_count", "_storage_use_count"])
def test_where_pytorch_does_not_count_holders_a_sum_is_a_new_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, name, _compat._find("torch.of_no_version"))
    with torch.no_grad():
        assert not _compat.sums_gradients_in_place(torch.ones(2))
