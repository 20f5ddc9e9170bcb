"""Kernels of norms: exact to the module's own error, run for what a trace shows and nothing else, eager in pieces else.

On the CPU, which runs the module's own operators otherwise, with the compiler's own backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING

import seqtile
import zoo
from numerics._blocks import random
from numerics._compiled import BACKENDS, compiling, graphs
from numerics._errors import assert_no_worse, in_float64
from numerics._fused import GatedMLP
from seqtile.blocks.norms_and_projections import TiledRows
from seqtile.counting.live import count_live_bytes
from seqtile.ops import kernels as kernels_module
from seqtile.ops import norm as norms
from seqtile.ops.fused_norm import fused_norm
from seqtile.recognise.chain import Chain
from seqtile.recognise.live_weights import row_wise
from seqtile.recognise.proof import Mode, prove

D = 48
BF16 = torch.bfloat16


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[norms.NormKernels]:
    """What accelerators get, on the CPU."""
    ours = norms.NormKernels()
    monkeypatch.setitem(norms.BY_DEVICE, "cpu", ours)
    with compiling(request.param, monkeypatch):
        yield ours


class Written(nn.Module):
    """A norm as ``written``, with weights of its own."""

    def __init__(self, number: int, weights: int, epsilon: float = 1e-3, width: int = D) -> None:
        super().__init__()
        self.written, self.flags = norms.KNOWN_NORMS[number]
        self.number, self.epsilon = number, epsilon
        names = ("weight", "bias")[:weights]
        for seed, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(random(width, seed=seed, grad=False)))
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (*(getattr(self, name) for name in self.names), None, None)[:2]
        return self.written(x, weight, bias, self.epsilon)


class Truth(nn.Module):
    """The formula itself, in float64."""

    def __init__(self, norm: Written) -> None:
        super().__init__()
        self.inner = in_float64(norm)

    def forward(self, x: Tensor) -> Tensor:
        norm = self.inner
        h = x - x.mean(-1, keepdim=True) if norm.flags.get("centred") else x
        n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + norm.epsilon)
        if "weight" in norm.names:
            n = n * (norm.weight + 1 if norm.flags.get("plus_one") else norm.weight)
        return n + norm.bias if "bias" in norm.names else n


def proved(norm: nn.Module, dtype: torch.dtype, width: int = D) -> norms.NormFormula | None:
    mode = Mode(((("bs", width), dtype),), torch.device("cpu"))
    return prove(Chain((("norm", norm),)), mode, trusted=True).norm


def run(norm: nn.Module, call: Any, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    norm.zero_grad()
    x = x.detach().requires_grad_()
    y = call(x)
    y.backward(upstream.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, **{name: weight.grad for name, weight in norm.named_parameters()}}


def through_the_operator(norm: nn.Module, formula: norms.NormFormula, sizes: tuple[int, ...]) -> Any:
    found = row_wise(norm, formula)
    assert not isinstance(found, str)
    return lambda x: fused_norm(x, found, norm(x[:1]).dtype, sizes)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_every_way_to_write_one_is_known(dtype: torch.dtype) -> None:
    for number, (_, flags) in enumerate(norms.KNOWN_NORMS):
        for weights in (0, 1, 2):
            formula = proved(Written(number, weights).to(dtype), dtype)
            assert formula is not None, (number, weights)
            assert (formula.epsilon, formula.weights) == (1e-3, weights)
            assert formula.centred == flags.get("centred", False)
            assert formula.plus_one == flags.get("plus_one", False) or weights == 0


CASES = [(0, 1, BF16), (0, 2, BF16), (2, 1, BF16), (4, 0, BF16), (7, 0, BF16), (7, 2, BF16), (0, 1, torch.float32),
         (7, 2, torch.float32)]  # fmt: skip
"""One of each kernel: what is the same formula has the same one, however it is written."""


@pytest.mark.parametrize(("number", "weights", "dtype"), CASES)
def test_exact_to_the_modules_own_error(
    number: int, weights: int, dtype: torch.dtype, kernels: norms.NormKernels
) -> None:
    norm = Written(number, weights).to(dtype)
    x, upstream = (random(3, 70, D, seed=seed, grad=False, dtype=dtype) for seed in (5, 6))
    formula = proved(norm, dtype)
    assert formula is not None
    got = run(norm, through_the_operator(norm, formula, (110, 100)), x, upstream)
    assert graphs() == 2, "one forward and one backward"
    expected = run(norm, norm, x, upstream)
    truth = Truth(norm)
    true = run(truth.inner, truth, x.double(), upstream.double())
    for name, one in expected.items():
        # A weight's gradient is a sum over tokens: in fp32 its error depends on the order, here of two compilers.
        factor = 4.0 if dtype == torch.float32 and name in norm.names else 1.5
        assert_no_worse(got[name], one, true[name], factor=factor, name=name)


class OwnStatistics(Written):
    """Its statistics are in the dtype of its input: no kernel of fp32 statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


class HalfTheWidth(Written):
    def forward(self, x: Tensor) -> Tensor:
        h, half = x.float(), D // 2
        return self.weight * (h * torch.rsqrt(h[..., :half].pow(2).mean(-1, keepdim=True) + self.epsilon)).to(x.dtype)


class Detached(Written):
    """Its forward is Llama's; its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon).detach()).to(x.dtype)


class Hidden(Written):
    """Its epsilon is no attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return self.written(x, self.weight, None, 1e-5)


@pytest.mark.parametrize("kind", [OwnStatistics, HalfTheWidth, Detached, Hidden])
def test_what_a_trace_does_not_show_has_no_kernel(kind: type[Written]) -> None:
    assert proved(kind(0, 1).to(BF16), BF16) is None
    assert proved(Written(0, 1).to(BF16), BF16) is not None


class Decoder(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, GatedMLP(D, 96)

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


def assert_as_untiled(layer: Decoder, x: Tensor) -> None:
    tiled = run(layer, layer, x, random(*x.shape, seed=9, grad=False))
    seqtile.undo(layer)
    untiled = run(layer, layer, x, random(*x.shape, seed=9, grad=False))
    for name, one in untiled.items():
        torch.testing.assert_close(tiled[name], one, rtol=2e-5, atol=2e-5, msg=name)
    seqtile.apply(layer, only=["mlp"], tile=16, trust="*")


def test_inside_the_tile_and_never_under_a_changed_module(kernels: norms.NormKernels) -> None:
    """One kernel forward and one backward for every length and one epsilon; another library's norm runs none."""
    layer = Decoder(Written(0, 1))
    seqtile.apply(layer, only=["mlp"], tile=16, trust="*")
    for tokens in (64, 40, 90):
        assert_as_untiled(layer, random(2, tokens, D, grad=False))
        assert graphs() == 2
    layer.norm.epsilon = 0.5
    assert_as_untiled(layer, random(2, 40, D, grad=False))
    assert graphs() == 4
    layer.norm.written = lambda x, weight, bias, epsilon: F.rms_norm(x, x.shape[-1:], weight, epsilon) * 2
    assert_as_untiled(layer, random(2, 40, D, grad=False))
    handle = layer.norm.register_forward_hook(lambda module, args, output: output * 3)
    assert_as_untiled(layer, random(2, 40, D, grad=False))
    handle.remove()
    assert graphs() == 4


@pytest.mark.parametrize("kernels", ["aot_eager"], indirect=True)
@pytest.mark.backward_here  # torch.compile is switched off in this thread alone
def test_without_a_kernel_in_pieces_of_the_tile(kernels: norms.NormKernels, caplog: pytest.LogCaptureFixture) -> None:
    """In the same buffers and a piece of one, said once; the whole function holds several in fp32."""
    tokens, width = 4096, 64
    norm = Written(0, 1, width=width).to(BF16)
    formula = proved(norm, BF16, width)
    assert formula is not None
    x, upstream = (random(tokens, width, seed=seed, grad=False, dtype=BF16) for seed in (5, 6))
    call = through_the_operator(norm, formula, (tokens,))
    with torch._dynamo.config.patch(disable=True), count_live_bytes("cpu") as live:
        got = run(norm, call, x, upstream)
    assert graphs() == 0
    (message,) = {record.message for record in caplog.records if record.name == kernels_module.logger.name}
    assert message.startswith("norm kernels run eagerly for this call: torch.compile is disabled")
    buffer = 2 * tokens * width
    assert live.peak < 2 * buffer + 0.75 * buffer, "output and input's gradient, and a piece of what is made on the way"
    expected, truth = run(norm, norm, x, upstream), Truth(norm)
    true = run(truth.inner, truth, x.double(), upstream.double())
    for name, one in expected.items():
        assert_no_worse(got[name], one, true[name], name=name)
    assert graphs() == 0
    run(norm, call, x, upstream)
    assert graphs() == 2, "the next call is compiled"


@pytest.mark.parametrize("kernels", ["aot_eager"], indirect=True)
def test_other_layouts_are_for_the_kernel_too(kernels: norms.NormKernels) -> None:
    norm = Written(0, 1)
    formula = proved(norm, torch.float32)
    assert formula is not None
    x, upstream = (random(D, 40, seed=seed, grad=False).T for seed in (5, 6))  # [40, D], its columns contiguous
    got = run(norm, through_the_operator(norm, formula, (40,)), x, upstream)
    assert graphs() == 2, "one kernel forward and one backward"
    for name, one in run(norm, norm, x, upstream).items():
        torch.testing.assert_close(got[name], one, msg=name)


def gradients_of_a_model(*, tiled: bool) -> dict[str, Tensor | None]:
    ids = zoo.tokens(2, 24)
    model = zoo.causal_lm("llama", use_cache=False)
    if tiled:
        seqtile.apply(model, tile=16, blocks="mlp+norm+projections")
        rows = [m.forward for m in model.modules() if isinstance(m.__dict__.get("forward"), TiledRows)]
        assert sum(one.fuses_norms and one.setting.name.endswith("norm") for one in rows) >= 3
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("kernels", ["aot_eager"], indirect=True)
def test_outside_the_tile(kernels: norms.NormKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other norms of a model, the one before its head included, by kernels or by their own operators."""
    untiled = gradients_of_a_model(tiled=False)
    assert graphs() == 0
    compiled = gradients_of_a_model(tiled=True)
    assert graphs() == 2, "all of them by one kernel forward and one backward"
    monkeypatch.setitem(norms.BY_DEVICE, "cpu", None)
    plainly = gradients_of_a_model(tiled=True)
    assert graphs() == 2
    for name, one in untiled.items():
        torch.testing.assert_close(compiled[name], one, rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(plainly[name], one, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("architecture", "before", "after"),
    [("llama", 0, None), ("gemma2", 2, 2), ("gpt2", 7, None), ("olmo2", None, 0), ("gemma4_text", 3, 3)],
)
def test_norms_of_known_models(
    architecture: str, before: int | None, after: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {architecture}")
    seen: list[Any] = []

    class Noted(norms.NormKernels):
        def forward(self, norm: norms.NormFormula, *args: Any) -> bool:
            seen.append(next(i for i, (written, _) in enumerate(norms.KNOWN_NORMS) if written is norm.written))
            return False

    monkeypatch.setitem(norms.BY_DEVICE, "cpu", Noted())
    model = zoo.causal_lm(architecture, use_cache=False)
    seqtile.apply(model, tile=16)
    with torch.no_grad():
        model(input_ids=zoo.tokens(1, 24))
    assert set(seen) == {number for number in (before, after) if number is not None}
