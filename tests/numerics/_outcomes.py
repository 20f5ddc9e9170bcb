"""Layers of a class of their own, and what came of tiling them: equal, left, refused, or wrong."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import seqtile

HIDDEN, INTERMEDIATE = 8, 44


def _plain_layer(self: Any, x: Tensor) -> Tensor:
    return x + self.mlp(self.norm(x))


class _Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp, self.flag, self.dropout = nn.RMSNorm(HIDDEN), mlp, False, 0.4


def Layer(mlp: nn.Module, forward: Callable[[Any, Tensor], Tensor] = _plain_layer, module: str = __name__) -> nn.Module:
    """A norm and an MLP in a class of their own with this forward, of a library whose layers' code is not read."""
    if module.startswith("transformers."):
        forward = as_in_transformers(forward)
    return type("Layer", (_Layer,), {"forward": forward, "__module__": module})(mlp)  # type: ignore[no-any-return]


def as_in_transformers(function: Any) -> Any:
    """A copy of a function that was written in a file of transformers, whose code is not read."""
    code = function.__code__.replace(co_filename=transformers.modeling_utils.__file__)
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def center(h: Tensor) -> Tensor:
    return h - h.mean(1, keepdim=True)


def gradients(model: nn.Module, shape: tuple[int, ...], scale: float) -> dict[str, Tensor | None]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(scale).requires_grad_()
    y = model(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype))
    return {"output": y.detach(), "x": x.grad, **{name: weight.grad for name, weight in model.named_parameters()}}


def outcome(
    build: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture, shape: tuple[int, ...] = (3, 20, HIDDEN),
    scale: float = 1.0, later: Callable[[Any], Any] = lambda model: None,
) -> str:  # fmt: skip
    """``"equal"``, ``"left"``, ``"refused"``, or what is wrong. Applied in evaluation mode, then trained."""
    torch.manual_seed(0)
    untiled = build().eval().train()
    later(untiled)
    expected = gradients(untiled, shape, scale)
    torch.manual_seed(0)
    model = build().eval()
    try:
        with caplog.at_level(logging.WARNING):
            seqtile.apply(model, tile=3)
            model.train()
            later(model)
            got = gradients(model, shape, scale)
    except (seqtile.UserError, RuntimeError) as error:
        assert "\n" not in str(error) and "seqtile" in str(error) or "found" in str(error), error
        return "refused"
    for name, value in expected.items():
        if (value is None) != (got[name] is None):
            return f"wrong: {name} is {'not ' if value is None else ''}None"
        if value is not None:
            error = (got[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)
            if not error < 1e-5:
                return f"wrong: {name} is {error:.1e} off"
    return "left" if "untiled" in caplog.text or "nothing to tile" in caplog.text else "equal"
