"""Liger's rotary kernels in Triton's interpreter (``TRITON_INTERPRET=1``), against their twins and under ``heads=``.

Run in a process of its own, because Triton reads the switch when Liger is imported; prints the error of each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import seqtile
from seqtile.recognise.known_functions import TWINS
from zoo import causal_lm, gradients, tokens

HEAD = 8


def relative_error(got: Iterable[Any], expected: Iterable[Any]) -> float:
    pairs = [(a.detach(), b.detach()) for a, b in zip(got, expected, strict=True) if b is not None]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def rotated(function: Callable[..., Any], width: int, repeats: int, batch: int, dtype: torch.dtype) -> list[Tensor]:
    """Both outputs of a rotary function and the gradients of its inputs."""
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 5, HEAD, dtype=dtype, requires_grad=True) for heads in (4, 2))
    angles = torch.randn(batch, 5, width // repeats, dtype=dtype).repeat(1, 1, repeats)
    outputs = function(q.clone(), k.clone(), angles.cos(), angles.sin())
    grads = [torch.randn(output.shape, dtype=dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [q, k], grads)]


def twins() -> Iterator[tuple[str, float]]:
    for path, twin in TWINS.items():
        kernel = resolve_name(path)
        for width, repeats in [(HEAD // 2, 1)] if path.endswith("gpt_oss") else [(HEAD, 2), (HEAD // 2, 2)]:
            for batch in (1, 2):
                for dtype in (torch.float32, torch.float16):  # the interpreter does not compute in bfloat16
                    values = [rotated(function, width, repeats, batch, dtype) for function in (twin, kernel)]
                    yield f"{kernel.__name__}, {width} of {HEAD}, batch {batch}, {dtype}", relative_error(*values)


def head_wise() -> Iterator[tuple[str, float]]:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    settings: list[dict[str, Any]] = [{"heads": 1}, {"heads": 2}, {"heads": 1, "checkpoint": "attention-saved"}]
    plain, *models = [causal_lm("llama", use_cache=False, attn_implementation="sdpa") for _ in range(4)]
    expected = gradients(plain, tokens(2, 5))[1].values()
    others = ("rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
    apply_liger_kernel_to_llama(rope=True, **dict.fromkeys(others, False))
    for model, options in zip(models, settings, strict=True):
        report = str(seqtile.apply(model, blocks="none", **options))
        assert "head-wise attention in 2 of 2" in report, report
        yield str(options), relative_error(gradients(model, tokens(2, 5))[1].values(), expected)


if __name__ == "__main__":
    print(json.dumps(dict([*twins(), *head_wise()])))
