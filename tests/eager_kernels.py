"""The operators of norms and rotary embeddings on the CPU, as on an accelerator whose compiler makes no kernel."""

from __future__ import annotations

from typing import Any

from seqtile.ops import norm, rotary


class _Norms(norm.NormKernels):
    def forward(self, *_: Any) -> bool:
        return False

    def backward(self, *_: Any) -> bool:
        return False


class _Rotary(rotary.RotaryKernels):
    def run(self, *_: Any, **__: Any) -> bool:
        return False


def install() -> None:
    """For the rest of this process."""
    norm.BY_DEVICE["cpu"] = _Norms()
    rotary.ROTARY_BY_DEVICE["cpu"] = _Rotary()
