"""Past 2^31 elements: offsets into hidden states do not fit 32 bits from 524,288 tokens of width 4,096 on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, LlamaConfig

import seqtile
from numerics._fused import GatedMLP
from seqtile.counting.fake import fake_tensors, make_fake

LIMIT = 2**31


class Offsets(TorchDispatchMode):
    """The furthest element that any operator touched, and the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.furthest: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, result)):
            if isinstance(leaf, Tensor) and leaf.numel():
                name = func.overloadpacket.__name__
                reach = leaf.storage_offset() + sum(
                    (size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True)
                )
                self.furthest[name] = max(self.furthest.get(name, 0), reach)
        return result


def test_a_whole_step_by_its_shapes() -> None:
    """Every tile, group of heads and slice of a step with 2^32 hidden-state elements, on fake tensors."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False, max_position_embeddings=2**40,
    )  # fmt: skip
    tokens = 2**20 + 77
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    seqtile.apply(
        model, tile="shards:3", blocks="mlp+norm+projections", heads=1, loss="tiled", loss_tile="shards:3",
        checkpoint="attention-saved",
    )  # fmt: skip
    with fake_tensors(), Offsets() as seen:
        make_fake(model)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in model.parameters())
    for name in ("mm", "addmm", "copy_", "mul", "_scaled_dot_product_flash_attention_for_cpu"):
        assert seen.furthest.get(name, 0) > LIMIT, (name, seen.furthest)


@pytest.mark.slow
@pytest.mark.alone
def test_real_numbers_past_the_limit() -> None:
    """The last rows of 2^31 + 2^20 elements, forward and backward, in real memory (13 GiB)."""
    torch.manual_seed(0)
    width, rows = 1024, 2**21 + 1024
    mlp = GatedMLP(width, 8).to(torch.bfloat16)
    x = torch.full((1, rows, width), 0.25, dtype=torch.bfloat16)
    x[0, -3:] = torch.randn(3, width).bfloat16()
    assert x.numel() > LIMIT
    x.requires_grad_()
    seqtile.tile_module(mlp, tile=2**17)
    output = mlp(x)
    last = output[0, -3:].detach().clone()
    total = output[..., ::512].float().sum()
    del output
    total.backward()
    gradient = x.grad[0, -3:].clone()
    middle = x.grad[0, 0].clone()
    seqtile.undo(mlp)
    small = torch.cat([x.detach()[0, :1], x.detach()[0, -3:]])[None].requires_grad_()
    expected = mlp(small)
    expected[..., ::512].float().sum().backward()
    # bf16 products of other shapes: a rounding of the last bit, 2^-8.
    torch.testing.assert_close(last, expected[0, -3:].detach(), rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(gradient, small.grad[0, -3:], rtol=2**-6, atol=2**-8)
    torch.testing.assert_close(middle, small.grad[0, 0], rtol=2**-6, atol=2**-8)
    assert nn.utils.parameters_to_vector(mlp.parameters()).isfinite().all()
