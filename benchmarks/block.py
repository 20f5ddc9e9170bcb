"""The block under test: a gated MLP, alone or in a residual layer behind a norm, with its input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cell import LORA_RANK, Cell

PERIOD = 1024
"""Rows after which the upstream gradient repeats: it is made when the backward starts, by one copy."""

ADAPTER_SEED = 1


class Mlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, as in Llama."""

    def __init__(self, hidden: int, intermediate: int, **where: Any) -> None:
        super().__init__()
        self.hidden, self.intermediate = hidden, intermediate
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, **where)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, **where)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, **where)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 at least, as in Llama."""

    def __init__(self, hidden: int, **where: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = nn.Parameter(torch.ones(hidden, **where)), 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (x * scale).to(hidden_states.dtype)


class ResidualLayer(nn.Module):
    """``x + mlp(norm(x))``, in the statements of Hugging Face's decoder layers, which :func:`seqtile.apply` reads."""

    def __init__(self, hidden: int, intermediate: int, **where: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, **where)
        self.mlp = Mlp(hidden, intermediate, **where)

    def forward(self, hidden_states: Tensor) -> Tensor:
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class Upstream(torch.autograd.Function):
    """Stands for the rest of the model: takes the output, and makes its gradient when the backward comes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, pattern: Tensor) -> Tensor:
        ctx.shape, ctx.pattern = output.shape, pattern
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Tensor, None]:
        return repeated(ctx.pattern, ctx.shape[-2]).view(ctx.shape), None


def repeated(pattern: Tensor, rows: int) -> Tensor:
    """``[rows, D]``: the rows of ``pattern`` over and over, in new memory."""
    result = pattern.new_empty(rows, pattern.shape[1])
    for start in range(0, rows, len(pattern)):
        piece = result[start : start + len(pattern)]
        piece.copy_(pattern[: len(piece)])
    return result


class Workload:
    """A cell's layer, input and upstream gradient, the same for every method of one seed.

    Attributes:
        layer: norm and MLP; the norm takes part under a checkpoint only.
        x: ``[1, T, D]``, requires a gradient.
        pattern: ``[<= 1024, D]``, what the upstream gradient repeats.
        reference: the gradients to compare with, once computed, where they are small enough to keep.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.reference: Reference | None = None
        self.dtype, self.device = getattr(torch, cell.dtype), torch.device(cell.device)
        with torch.device(self.device):
            generator = torch.Generator(self.device).manual_seed(cell.seed)
            self.layer = ResidualLayer(cell.hidden, cell.intermediate, dtype=self.dtype)
            with torch.no_grad():
                for weight in self.layer.parameters():
                    if weight.dim() == 2:
                        weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
                self.x = torch.empty(1, cell.tokens, cell.hidden, dtype=self.dtype).normal_(generator=generator)
                rows = min(PERIOD, cell.tokens)
                self.pattern = torch.empty(rows, cell.hidden, dtype=self.dtype).normal_(generator=generator)
        self._freeze()
        self.x.requires_grad_()

    def _freeze(self) -> None:
        if self.cell.train == "full":
            return
        self.layer.requires_grad_(False)
        if self.cell.train == "lora":
            add_adapters(self.layer, LORA_RANK)

    @property
    def mlp(self) -> nn.Module:
        return self.layer.mlp

    def step(self) -> Tensor | None:
        """One forward and backward; returns the output where the cell's caller holds it."""
        loss, output = self.forward()
        loss.backward()
        return output

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """The forward; what starts the backward, and the output where the caller holds it."""
        if self.cell.checkpoint:
            output = checkpoint(self.layer, self.x, use_reentrant=False)
        else:
            output = self.layer.mlp(self.x)
        loss = Upstream.apply(output, self.pattern)  # type: ignore[no-untyped-call]
        return loss, output if self.cell.hold_output else None

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """The input and every weight that should get a gradient."""
        yield "input", self.x
        module = self.layer if self.cell.checkpoint else self.mlp
        for name, weight in module.named_parameters():
            if weight.requires_grad:
                yield name, weight

    def clear(self) -> None:
        """Forget every gradient."""
        for tensor in (self.x, *self.layer.parameters()):
            tensor.grad = None


def add_adapters(layer: nn.Module, rank: int) -> None:
    """PEFT's LoRA on gate, up and down, with both factors random, so that every gradient is more than zero."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = ["gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), layer)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if "lora_" in name and not weight.is_meta:
                generator = torch.Generator(weight.device).manual_seed(ADAPTER_SEED)
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)


def reference_errors(workload: Workload, rows: int) -> dict[str, float]:
    """Relative error (L2) of each gradient of ``workload`` against the untiled block in fp32.

    The reference runs on the same rounded weights and input, on slices of ``rows`` tokens (one, if that holds all):
    a position-wise block's weight gradient is the sum over slices. Products are exact fp32, without TF32. A reference
    that runs whole is kept for the workload's other methods.
    """
    reference = workload.reference or Reference(workload)
    if rows >= workload.cell.tokens:
        workload.reference = reference
    assert workload.x.grad is not None
    wrong = total = 0.0
    for start, expected in reference.slices(rows):
        got = workload.x.grad[0, start : start + len(expected)].float()
        wrong += (got - expected).square().sum(dtype=torch.float64).item()
        total += expected.square().sum(dtype=torch.float64).item()
    errors = {"input": _finite((wrong / total) ** 0.5)}
    for name, weight in workload.trained():
        if name != "input":
            errors[name] = relative_error(weight.grad, reference.gradients[name])
    return errors


class Reference:
    """Gradients of the untiled block in fp32.

    Attributes:
        gradients: of the weights by name, once every slice has run.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.gradients: dict[str, Tensor | None] = {}
        self._whole: Tensor | None = None

    def slices(self, rows: int) -> Iterator[tuple[int, Tensor]]:
        """First token and input gradient of each slice."""
        workload, cell = self._workload, self._workload.cell
        if self._whole is not None:
            yield 0, self._whole
            return
        layer = ResidualLayer(cell.hidden, cell.intermediate, device=workload.device, dtype=torch.float32)
        if cell.train != "full":
            layer.requires_grad_(False)
        if cell.train == "lora":
            add_adapters(layer, LORA_RANK)
        layer.load_state_dict(workload.layer.state_dict())
        module: nn.Module = layer if cell.checkpoint else layer.mlp
        allowed = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        for start in range(0, cell.tokens, rows):
            x = workload.x.detach()[0, start : start + rows].float().requires_grad_()
            # Slices start at multiples of the period, so the upstream gradient of each starts with its first row.
            module(x).backward(repeated(workload.pattern.float(), len(x)))
            assert x.grad is not None
            if len(x) == cell.tokens:
                self._whole = x.grad
            yield start, x.grad
        torch.set_float32_matmul_precision(allowed)
        self.gradients = {name: weight.grad for name, weight in module.named_parameters()}


def relative_error(got: Tensor | None, expected: Tensor | None) -> float:
    """``|got - expected| / |expected|`` in L2; infinite where a gradient is missing or not finite."""
    if got is None or expected is None:
        return float("inf")
    return _finite(((got.double() - expected.double()).norm() / expected.double().norm()).item())


def _finite(error: float) -> float:
    return error if math.isfinite(error) else float("inf")
