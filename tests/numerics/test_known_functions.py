"""Kernels of other libraries in a model's source: known by a plain twin, never replaced, and run at run time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

import seqtile
from refusals import refused
from seqtile.recognise.known_functions import TWINS
from zoo import HEAD_DIM, assert_same_gradients, causal_lm, gradients, tokens


class _InPlace(torch.autograd.Function):
    """Liger's rotary kernel: writes into its arguments where they are contiguous, without a word to autograd."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        outputs = []
        for x in (q, k):
            x = x.transpose(1, 2).contiguous()
            x.data.copy_(_rotate(x, cos, sin))
            outputs.append(x.transpose(1, 2))
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *(_rotate(x.transpose(1, 2), cos, -sin).transpose(1, 2) for x in (dq, dk)), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos[:, :, None] + modeling_llama.rotate_half(x) * sin[:, :, None]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for Liger's function, which raises where ``runs`` is False as Triton does on a CPU."""
    state: dict[str, Any] = {"runs": False, "calls": 0}

    def liger_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        if not state["runs"]:
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        state["calls"] += 1
        return _InPlace.apply(q, k, cos, sin)

    liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
    liger_rotary_pos_emb.__qualname__ = "liger_rotary_pos_emb"
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", liger_rotary_pos_emb)
    return state


@pytest.mark.parametrize("settings", [{}, {"checkpoint": "attention-saved"}, {"checkpoint": "layer"}], ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_heads_with_ligers_rotary(heads: int, settings: dict[str, Any], kernel: dict[str, Any]) -> None:
    model = causal_lm("llama", torch.float64, use_cache=False, attn_implementation="sdpa")
    before = dict(vars(modeling_llama)), modeling_llama.LlamaAttention.forward
    report = seqtile.apply(model, blocks="none", heads=heads, **settings)
    assert "head-wise attention in 2 of 2" in str(report)
    assert (dict(vars(modeling_llama)), modeling_llama.LlamaAttention.forward) == before
    kernel["runs"] = True
    got = gradients(model, tokens(2, 13))[1]
    assert kernel["calls"] >= 2 * 2 * (2 // heads), "in forward and backward of two layers"
    seqtile.undo(model)
    assert_same_gradients(got, gradients(model, tokens(2, 13))[1])


def test_a_rotary_that_arrives_after_apply_is_seen(kernel: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as plain:
        plain.setattr(modeling_llama, "apply_rotary_pos_emb", _plain_rotary)
        model = causal_lm("llama", torch.float64, use_cache=False, attn_implementation="sdpa")
        expected = gradients(model, tokens(2, 13))[1]
        seqtile.apply(model, blocks="none", heads=2)
    kernel["runs"] = True
    assert_same_gradients(gradients(model, tokens(2, 13))[1], expected)
    assert kernel["calls"]


def _plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return TWINS["liger_kernel.transformers.rope.liger_rotary_pos_emb"](q, k, cos, sin)


@pytest.mark.usefixtures("liger_on_cpu")
def test_ligers_norms_of_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import rms_norm

    model = causal_lm("qwen3", use_cache=False, attn_implementation="sdpa")
    for layer in model.model.layers:
        for name in ("q_norm", "k_norm"):
            norm = rms_norm.LigerRMSNorm(HEAD_DIM)
            norm.weight.data.uniform_(0.5, 1.5)
            setattr(layer.self_attn, name, norm)
    expected = gradients(model, tokens(2, 13))[1]

    class OnlyOnTheDevice:
        @staticmethod
        def apply(*_: Any) -> Tensor:
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    with monkeypatch.context() as while_proving:
        while_proving.setattr(rms_norm, "LigerRMSNormFunction", OnlyOnTheDevice)
        report = str(seqtile.apply(model, blocks="none", heads=1))
    assert "head-wise attention in 2 of 2" in report
    assert_same_gradients(gradients(model, tokens(2, 13))[1], expected)


def test_an_unknown_kernel_is_named(kernel: dict[str, Any]) -> None:
    modeling_llama.apply_rotary_pos_emb.__qualname__ = "another_rotary"
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    with refused("heads.no-attention", "Triton"):
        seqtile.apply(model, blocks="none", heads=1)


def test_twins_compute_what_ligers_kernels_do() -> None:
    if not (importlib.util.find_spec("liger_kernel") and importlib.util.find_spec("triton")):
        pytest.skip("needs liger-kernel and triton: pip install liger-kernel triton")
    script = Path(__file__).with_name("_liger_rotary.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    errors = json.loads(run.stdout.splitlines()[-1])
    assert len(errors) == 15
    for case, error in errors.items():
        # A sum that another order of additions rounds otherwise, in float16 and float32.
        assert error <= (2e-3 if "float16" in case else 2e-6), case
