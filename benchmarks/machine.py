"""What the machine does at best, a job of `gpu.py`: products, memory, the link to the host, pinning, attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqtile.devices import synchronize
from seqtile.ops.attention.kernel_calls import names_of_kernels
from seqtile.ops.grad_accumulator import products_sum_in_fp32

JOB = f"{__file__}:measure_machine"
REPEATS = 5
SHOWN = (
    "gemm_tflops", "gemm_into_fp32_tflops", "memory_gb_s", "launch_us", "pinning_gb_s", "to_host_gb_s",
    "from_host_gb_s", "attention", "error",
)  # fmt: skip
BACKENDS = {
    "chosen": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def measure_machine(arguments: dict[str, Any]) -> dict[str, Any]:
    """Everything about the machine; what it cannot do is missing.

    Args:
        arguments: ``device``, and ``scale``: 1 for an accelerator, more for sizes that a CPU can do.

    Returns:
        ``gemm_tflops`` and ``gemm_into_fp32_tflops`` of square bf16 products, ``memory_gb_s`` (read and written),
        ``to_host_gb_s`` and ``from_host_gb_s`` of pinned memory, ``pinning_gb_s``, ``launch_us``, and ``attention``:
        for each backend the operators that ran and TFLOP/s forward and backward, causal.
    """
    device, scale = torch.device(arguments["device"]), arguments["scale"]
    found: dict[str, Any] = dict(arguments)
    size = 8192 // scale
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    flops = 2 * size**3
    found["gemm_tflops"] = flops / _seconds(lambda: torch.mm(left, right, out=out)) / 1e12
    found["products_sum_in_fp32"] = products_sum_in_fp32(device.type, torch.bfloat16)
    if found["products_sum_in_fp32"]:
        total = torch.zeros(size, size, device=device)
        seconds = _seconds(lambda: torch.addmm(total, left, right, out_dtype=torch.float32, out=total))
        found["gemm_into_fp32_tflops"] = flops / seconds / 1e12
    nbytes = 2**31 // scale**2
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    found["memory_gb_s"] = 2 * nbytes / _seconds(lambda: target.copy_(source)) / 1e9
    one = torch.zeros(1, device=device)
    found["launch_us"] = _seconds(lambda: [one.add_(1) for _ in range(1000)]) * 1e3
    if device.type != "cpu":
        found.update(_host_link(source[: 2**28]))
    found["attention"] = {name: _attention(device, scale, name) for name in BACKENDS}
    return found


def _seconds(run: Callable[[], object]) -> float:
    """Median, after a warm-up."""
    taken = []
    for _ in range(1 + REPEATS):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def _host_link(here: Tensor) -> dict[str, float]:
    begin = time.perf_counter()
    host = torch.empty(here.shape, dtype=here.dtype, pin_memory=True)
    pinning = time.perf_counter() - begin
    return {
        "pinning_gb_s": host.nbytes / pinning / 1e9,
        "to_host_gb_s": host.nbytes / _seconds(lambda: host.copy_(here, non_blocking=True)) / 1e9,
        "from_host_gb_s": host.nbytes / _seconds(lambda: here.copy_(host, non_blocking=True)) / 1e9,
    }


def _attention(device: torch.device, scale: int, name: str) -> dict[str, Any]:
    """Causal attention of Llama-8B's shape over 16,384 tokens."""
    tokens, heads, keys = max(64, 16384 // scale), max(2, 32 // scale), max(1, 8 // scale)
    query, key, value = (
        torch.randn(1, count, tokens, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, keys, keys)
    )
    backend = BACKENDS[name]

    def forward() -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    try:
        with names_of_kernels() as names:
            output = forward()
        upstream = torch.ones_like(output)
        there = _seconds(forward)
        both = _seconds(lambda: forward().backward(upstream))
    except RuntimeError as error:
        return {"error": str(error).splitlines()[0][:200]}
    flops = 4 * heads * 128 * tokens**2 / 2
    return {
        "operators": sorted(names), "forward_tflops": flops / there / 1e12,
        "backward_tflops": 2.5 * flops / max(both - there, 1e-9) / 1e12,
    }  # fmt: skip
