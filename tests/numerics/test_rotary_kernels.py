"""Rotary embeddings by our kernel: no worse than the model's function, run where that is known, once a forward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
import zoo
from numerics._compiled import BACKENDS, compiling, graphs
from numerics._errors import assert_no_worse
from seqtile.ops import rotary as rotary_module
from seqtile.ops.rotary import rotary
from seqtile.recognise.known_functions import CASTS_BACK, PROMOTES, rotates_halves, with_rotary
from seqtile.verification import verify

BATCH, TOKENS = 2, 24


class Counted(rotary_module.RotaryKernels):
    """Counts the rows that a kernel rotated, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[bool] = Counter()

    def run(self, *tensors: Tensor, backward: bool) -> bool:
        ran = super().run(*tensors, backward=backward)
        self.calls[backward] += ran
        return ran


@pytest.fixture(params=["aot_eager"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted = Counted()
    monkeypatch.setitem(rotary_module.ROTARY_BY_DEVICE, "cpu", counted)
    with compiling(request.param, monkeypatch):
        yield counted


def function_of(architecture: str) -> Callable[..., Any]:
    source = sys.modules[type(zoo.causal_lm(architecture)).__module__]
    function: Callable[..., Any] = source.apply_rotary_pos_emb  # type: ignore[attr-defined]
    return function


def results(function: Callable[..., Any], tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Both rotated, and the gradients of both."""
    q, k, cos, sin = (tensor.to(dtype) for tensor in tensors[:4])
    leaves = [tensor.requires_grad_() for tensor in (q.clone(), k.clone())]
    rotated = function(*(leaf.transpose(1, 2) for leaf in leaves), cos, sin)
    upstream = [tensor.to(tensor_out.dtype) for tensor, tensor_out in zip(tensors[4:], rotated, strict=True)]
    return [*rotated, *torch.autograd.grad(rotated, leaves, upstream)]


@pytest.mark.parametrize("kernels", BACKENDS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2])
def test_no_worse_than_the_models_function(rows: int, dtype: torch.dtype, kernels: Counted) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 37, 4, 16), (2, 37, 2, 16), (rows, 37, 16), (rows, 37, 16), (2, 4, 37, 16), (2, 2, 37, 16)
    tensors = [torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes]
    theirs = function_of("llama")
    ours, expected, truth = (
        results(function, tensors, kind)
        for function, kind in ((rotary, dtype), (theirs, dtype), (theirs, torch.float64))
    )
    for name, got, untiled, true in zip(("q", "k", "dq", "dk"), ours, expected, truth, strict=True):
        assert_no_worse(got, untiled, true, name=name)
    assert kernels.calls == {False: 2, True: 2} and graphs() > 0


@pytest.mark.parametrize("architecture", ["llama", "olmo2"])
def test_tables_in_fp32_beside_queries_in_bf16(architecture: str, kernels: Counted) -> None:
    """OLMo casts the result back to the queries' dtype, which the values beside it have; Llama does not."""
    model = zoo.causal_lm(architecture)
    attention = next(module for name, module in model.named_modules() if name.endswith("self_attn"))
    theirs, forward = function_of(architecture), with_rotary(type(attention).forward)
    ours = forward.__globals__["apply_rotary_pos_emb"]  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 37, 16, generator=generator).bfloat16() for heads in (4, 2))
    cos, sin = (torch.randn(1, 37, 16, generator=generator) for _ in range(2))
    for got, expected in zip(ours(q, k, cos, sin), theirs(q, k, cos, sin), strict=True):
        torch.testing.assert_close(got, expected)  # their dtypes too
    assert kernels.calls == {False: 2}


def test_which_functions_are_known() -> None:
    known = {name: rotates_halves(function_of(name)) for name in ("llama", "qwen3", "gemma3_text", "mistral", "olmo2")}
    assert all(known.values()), known
    assert {name: known[name] for name in ("llama", "olmo2")} == {"llama": PROMOTES, "olmo2": CASTS_BACK}
    assert not any(rotates_halves(function_of(name)) for name in ("cohere", "glm4", "gpt_oss"))
    assert not rotates_halves(lambda q, k, cos, sin: function_of("llama")(q, k, cos, sin)), "custom code"


@pytest.mark.parametrize("setting", ["plain", "checkpoints", "attention-saved"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "mistral"])
def test_once_a_forward_in_a_tiled_layer(architecture: str, setting: str, kernels: Counted) -> None:
    model = zoo.causal_lm(architecture, use_cache=False)
    function = function_of(architecture)
    report = seqtile.apply(model, tile=16, checkpoint={"checkpoints": "layer", "plain": None}.get(setting, setting))
    assert "2 rotary embeddings" in str(report)
    ids = zoo.tokens(BATCH, TOKENS)
    loss = model(input_ids=ids, labels=ids).loss
    assert kernels.calls == {False: 2 * 2}, "queries and keys of two layers"
    loss.backward()
    assert kernels.calls == {False: 2 * 2 * (1 if setting == "plain" else 2), True: 2 * 2}
    assert function_of(architecture) is function, "the library's module is as it was"
    result = verify(model, {"input_ids": ids})
    assert result.ok, str(result)


def test_by_heads(kernels: Counted) -> None:
    model = zoo.causal_lm("qwen3", use_cache=False)
    report = seqtile.apply(model, tile=16, heads=1)
    assert "2 rotary embeddings" in str(report)
    result = verify(model, {"input_ids": zoo.tokens(BATCH, TOKENS)})
    assert result.ok and kernels.calls[False] and kernels.calls[True], str(result)


def test_hooks_of_attention_run(kernels: Counted) -> None:
    model = zoo.causal_lm("llama", use_cache=False)
    seqtile.apply(model, tile=16)
    seen: list[nn.Module] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, *_: seen.append(module))
    model(input_ids=zoo.tokens(BATCH, TOKENS))
    assert seen == [model.model.layers[0].self_attn] and kernels.calls == {False: 2}, "of the other layer"


@pytest.mark.parametrize("options", [{"path": "generic"}, {"blocks": "none", "loss": "tiled"}])
def test_left_alone_where_no_kernel_is_wanted(options: dict[str, Any], kernels: Counted) -> None:
    model = zoo.causal_lm("llama", use_cache=False)
    report = seqtile.apply(model, **options)
    model(input_ids=zoo.tokens(BATCH, TOKENS))
    assert not kernels.calls and "rotary" not in str(report)
