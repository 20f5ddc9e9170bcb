"""The CPU runs Liger's own kernels: what other tests compare with them is compared with what runs on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from numerics._blocks import random

pytestmark = pytest.mark.usefixtures("liger_on_cpu")
D, INTERMEDIATE_SIZE = 32, 96


def test_its_gated_mlps() -> None:
    from liger_kernel.transformers import LigerGEGLUMLP, LigerSwiGLUMLP
    from transformers import GemmaConfig, LlamaConfig

    sizes = {"hidden_size": D, "intermediate_size": INTERMEDIATE_SIZE}
    activations = {
        LigerSwiGLUMLP(LlamaConfig(**sizes)): F.silu,
        LigerGEGLUMLP(GemmaConfig(**sizes)): lambda gate: F.gelu(gate, approximate="tanh"),
    }
    for mlp, activation in activations.items():
        x = random(2, 5, D)
        wanted = [x, *mlp.parameters()]
        expected = mlp.down_proj(activation(mlp.gate_proj(x)) * mlp.up_proj(x))
        expected_gradients = torch.autograd.grad(expected.square().sum(), wanted)
        output = mlp(x)
        torch.testing.assert_close(output, expected)
        for got, true in zip(torch.autograd.grad(output.square().sum(), wanted), expected_gradients, strict=True):
            torch.testing.assert_close(got, true)


def test_its_norms() -> None:
    from liger_kernel.transformers import LigerLayerNorm, LigerRMSNorm

    norms: dict[nn.Module, Any] = {
        LigerRMSNorm(D, eps=1e-6): lambda x: F.rms_norm(x, (D,), eps=1e-6),
        LigerLayerNorm(D, eps=1e-5): lambda x: F.layer_norm(x, (D,), eps=1e-5),
    }
    for norm, expected in norms.items():
        x = random(2, 5, D)
        torch.testing.assert_close(norm(x), expected(x))
        got = torch.autograd.grad(norm(x).square().sum(), x)[0]
        torch.testing.assert_close(got, torch.autograd.grad(expected(x).square().sum(), x)[0])


def test_its_fused_loss() -> None:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden, weight, labels = random(20, D), random(97, D, seed=2), torch.arange(20) * 4
    got = torch.autograd.grad(LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels), [hidden, weight])
    expected = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), labels), [hidden, weight])
    for ours, true in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, true)
