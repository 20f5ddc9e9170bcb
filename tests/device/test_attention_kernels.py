"""Head-wise attention on every attention kernel of the device, in bf16, as exact as the untiled layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import seqtile
from numerics._errors import assert_as_exact_in_bf16
from zoo import causal_lm, gradients, tokens

pytestmark = pytest.mark.device

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
           "memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "chosen by PyTorch": None}  # fmt: skip
SIZES = {"hidden_size": 160, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 512}
BATCH, LENGTH = 2, 192
NO_KERNEL = ("No available kernel", "No viable backend")


@contextmanager
def kernel(backend: SDPBackend | None) -> Iterator[None]:
    """Attention by this kernel alone, the backward too."""
    if backend is None:
        yield
        return
    with sdpa_kernel(backend):
        yield


def bf16_model(groups: int, checkpoints: bool) -> nn.Module:
    model = causal_lm("llama", torch.bfloat16, use_cache=False, attn_implementation="sdpa",
                      **{**SIZES, "num_key_value_heads": groups})  # fmt: skip
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def with_loss(result: tuple[Tensor, dict[str, Tensor | None]]) -> dict[str, Tensor | None]:
    return {"loss": result[0], **result[1]}


@pytest.mark.filterwarnings("ignore")  # PyTorch's, on why a kernel cannot run
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"checkpoint": "layer"},
        {"checkpoint": "attention-saved"},
        {"checkpoint": "attention-saved", "offload": True},
    ],
    ids=["no checkpoint", "checkpoint", "attention saved", "attention saved, offload"],
)
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "grouped heads"])
@pytest.mark.parametrize("backend", KERNELS.values(), ids=KERNELS)
def test_a_pass_per_head(backend: SDPBackend | None, groups: int, how: dict[str, Any]) -> None:
    batch = tokens(BATCH, LENGTH)
    untiled = bf16_model(groups, checkpoints=bool(how))
    truth = with_loss(gradients(copy.deepcopy(untiled).float(), batch))
    with kernel(backend):
        try:
            expected = with_loss(gradients(untiled, batch))
        except RuntimeError as error:
            if any(words in str(error) for words in NO_KERNEL):
                pytest.skip(f"the untiled layer has no such kernel here: {error}")
            raise
        tiled = bf16_model(groups, checkpoints=bool(how))
        report = seqtile.apply(tiled, blocks="none", heads=1, **how)
        assert "in 2 of 2" in report.done["heads"], report
        assert_as_exact_in_bf16(with_loss(gradients(tiled, batch)), expected, truth)
