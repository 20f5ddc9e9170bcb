"""Kernels that PyTorch's compiler makes: compiled wherever they are first called, and eager in the same buffers else.

On the CPU, which runs eagerly otherwise, with the compiler's own backends.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import seqtile
import zoo
from numerics._blocks import HIDDEN, random, shards
from numerics._compiled import BACKENDS, compiling, graphs
from numerics._fused import Fused, GatedMLP, GateUpMLP, PlainMLP, assert_fused_is_untiled
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import count_products
from seqtile.ops import kernels as kernels_module
from seqtile.ops import mlp_tile, pointwise
from seqtile.verification import verify

KINDS: dict[str, Callable[..., nn.Module]] = {"gated": GatedMLP, "gate_up": GateUpMLP, "plain": PlainMLP}
ACTIVATIONS = (F.silu, F.gelu, F.relu)


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[pointwise.Compiled]:
    """What accelerators get, on the CPU."""
    ours = pointwise.Compiled()
    monkeypatch.setattr(mlp_tile, "pointwise_on", lambda device: ours)
    with compiling(request.param, monkeypatch):
        yield ours


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == kernels_module.logger.name]


def check(kind: str = "gated", **how: Any) -> None:
    torch.manual_seed(0)
    model = KINDS[kind](**how)
    assert_fused_is_untiled(model, [random(3, 5, HIDDEN)], random(3, 5, HIDDEN, seed=2, grad=False), 4)


def test_nine_variants_in_one_process(kernels: pointwise.Compiled, caplog: pytest.LogCaptureFixture) -> None:
    for number, (kind, function) in enumerate(itertools.product(("gated", "plain"), ACTIVATIONS)):
        check(kind, act=function)
        assert graphs() == 2 * (number + 1), "one forward and one backward for each"
    for number, up_first in enumerate((False, True)):
        check("gate_up", up_first=up_first)
        assert graphs() == 2 * (number + 7)
    for tokens in (64, 128, 320):
        run_wide(tokens, [tokens // 2] * 2)
    assert not kernels.failed
    assert not messages(caplog)


def run_wide(tokens: int, sizes: list[int]) -> tuple[float, int]:
    """Units and peak of a block wide enough that a piece of a tile is small beside it."""
    torch.manual_seed(0)
    model = Fused(GatedMLP(48, 512), sizes)
    x, upstream = random(tokens, 48), random(tokens, 48, seed=2, grad=False)
    with count_products() as products, count_live_bytes("cpu") as live:
        model(x).backward(upstream)
    return products.units(tokens, 48, 512), live.peak


def live_bytes(folder: Path) -> None:
    with count_live_bytes("cpu"):
        check()


def verified(folder: Path) -> None:
    ids = torch.randint(0, zoo.VOCABULARY, (2, 50), generator=torch.Generator().manual_seed(3))
    assert verify(zoo.causal_lm("llama"), {"input_ids": ids}, tile=16).ok


def selectively(folder: Path) -> None:
    model = zoo.causal_lm("llama", use_cache=False, attn_implementation="sdpa", attention_dropout=0.1).train()
    seqtile.apply(model, tile=8, checkpoint="attention-saved")
    ids = zoo.tokens(2, 24)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    "first",
    [live_bytes, verified, selectively],
    ids=lambda run: run.__name__,
)
def test_wherever_a_kernel_is_called_first(
    first: Callable[[Path], None], kernels: pointwise.Compiled, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first(tmp_path)
    assert graphs() >= 2
    assert not kernels.failed
    assert not messages(caplog)


class Others(TorchDispatchMode):
    """A mode that knows nothing of compiled code."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def compiler(run: Callable[..., Any]) -> Iterator[None]:
    former, now = torch.compile, [run]

    def compile_(kernel: Callable[..., None], **how: Any) -> Callable[..., Any]:
        whole = former(kernel, **how)
        return lambda *buffers: (now or [whole])[0](*buffers)

    torch.compile = compile_
    try:
        yield
    finally:
        torch.compile = former
        now.clear()


def out_of_memory(*buffers: Tensor) -> None:
    raise RuntimeError("while compiling") from torch.OutOfMemoryError("CUDA out of memory")


def no_compiler(*buffers: Tensor) -> None:
    raise RuntimeError("no compiler\nhere\nand a long trace")


CALL = "pointwise kernels run eagerly for this call: "
REASONS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "mode": (Others, f"{CALL}torch.compile does not support the dispatch mode Others"),
    "switched off": (
        lambda: torch._dynamo.config.patch(disable=True), f"{CALL}torch.compile is disabled or skipped them"
    ),
    "limit": (
        lambda: torch._dynamo.config.patch(recompile_limit=0),
        f"{CALL}torch.compile reached its recompilation limit",
    ),
    "memory": (lambda: compiler(out_of_memory), f"{CALL}out of memory for a kernel"),
    "no compiler": (
        lambda: compiler(no_compiler), "pointwise kernels run eagerly: torch.compile failed (no compiler here)"
    ),
}  # fmt: skip


@pytest.mark.backward_here  # the compiler's settings are of this thread
@pytest.mark.parametrize("kernels", ["aot_eager"], indirect=True)
@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_run_is_eager_in_the_same_buffers(
    reason: str, kernels: pointwise.Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, sizes = 640, shards(640, 2)
    stands, message = REASONS[reason]
    with stands():
        for kind in KINDS:
            check(kind)
        units, peak = run_wide(tokens, sizes)
    assert units == 11.0, "no product is computed a second time"
    assert graphs() == 0
    assert messages(caplog) == [message]
    with monkeypatch.context() as eager:
        eager.setattr(mlp_tile, "pointwise_on", lambda device: pointwise.EAGER)
        _, least = run_wide(tokens, sizes)
    buffer = sizes[0] * 512 * 4
    assert peak <= least + buffer / 16
    check()
    assert (graphs() == 0) == (reason == "no compiler") == kernels.failed, "tried again, but for a compiler that failed"


@pytest.mark.parametrize("kernels", ["aot_eager"], indirect=True)
def test_the_body_of_a_kernel_never_runs_as_python(kernels: pointwise.Compiled) -> None:
    body = pointwise._backward_kernel(pointwise.SILU)
    with pytest.raises(kernels_module.RanEagerlyError):
        body(*[torch.zeros(2, 2)] * 4)
    check()
    assert graphs() == 2


@pytest.mark.parametrize("act", pointwise.ACTIVATIONS, ids=lambda act: act.name)
@pytest.mark.parametrize("gated", [True, False])
def test_the_eager_backward_is_the_kernels(act: pointwise.Activation, gated: bool) -> None:
    gate, up, gradient = (random(200, 64, seed=seed, grad=False, dtype=torch.float64) for seed in range(3))
    leaf, other = gate.clone().requires_grad_(), up.clone().requires_grad_()
    hidden = act.function(leaf) * other if gated else act.function(leaf)
    expected = torch.autograd.grad(hidden, (leaf, other) if gated else leaf, gradient)
    found = torch.empty_like(gradient) if gated else gradient
    pointwise._backward_in_pieces(act, gate, up if gated else None, gradient, found)
    torch.testing.assert_close(found, hidden.detach())
    torch.testing.assert_close((gate, up) if gated else (gate,), expected)


def test_which_device_gets_which_kernels() -> None:
    assert pointwise.pointwise_on(torch.device("cpu")) is pointwise.EAGER
    assert pointwise.pointwise_on(torch.device("cuda")) is pointwise.COMPILED


def test_chunks_compile_each_kernel_once(kernels: pointwise.Compiled, caplog: pytest.LogCaptureFixture) -> None:
    """No chunk compiles anew, though each runs under a mode of PyTorch functions and on weights of its own."""
    model = zoo.causal_lm("llama", dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seqtile.apply(model, chunk=64, segment=2, tile=16)
    ids = torch.randint(0, zoo.VOCABULARY, (1, 200), generator=torch.Generator().manual_seed(3))
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        assert graphs() == 3, "a backward, and a forward that keeps gate and up, or not"
    assert not kernels.failed and not messages(caplog)
