"""More than 2**31 elements: one long input gives the numbers of its two halves."""

from __future__ import annotations

from typing import Any

import torch

from block import Workload, relative_error, repeated
from cell import Cell
from measure_block import start

JOB = f"{__file__}:measure_halves"


def measure_halves(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the block on all tokens, then on each half, cut into the same tiles.

    Args:
        arguments: a row of :class:`cell.Cell`.

    Returns:
        ``elements`` of the input, ``output_equal`` and ``input_gradient_equal`` (every element the same),
        ``weight_gradient_error``, the largest relative difference (L2) to the sum over halves, and ``finite``.
    """
    cell = Cell.of(arguments)
    workload = Workload(cell)
    found = start(workload)
    mlp, x = workload.mlp, workload.x
    upstream = repeated(workload.pattern, cell.tokens).view(x.shape)
    output = mlp(x)
    output.backward(upstream)
    assert x.grad is not None
    whole = {name: weight.grad for name, weight in mlp.named_parameters()}
    workload.layer.zero_grad()
    total: dict[str, torch.Tensor] = {}
    same_output = same_gradient = True
    middle = cell.tokens // 2
    for rows in (slice(0, middle), slice(middle, cell.tokens)):
        half = x.detach()[:, rows].clone().requires_grad_()
        part = mlp(half)
        part.backward(upstream[:, rows])
        assert half.grad is not None
        same_output &= torch.equal(part, output[:, rows])
        same_gradient &= torch.equal(half.grad, x.grad[:, rows])
        for name, weight in mlp.named_parameters():
            assert weight.grad is not None
            total[name] = total[name] + weight.grad.float() if name in total else weight.grad.float()
        workload.layer.zero_grad()
    return {
        **found,
        "elements": x.numel(),
        "output_equal": same_output,
        "input_gradient_equal": same_gradient,
        "weight_gradient_error": max(relative_error(whole[name], total[name]) for name in total),
        "finite": bool(output.isfinite().all() and x.grad.isfinite().all()),
    }
