"""Kernels that the compiler makes, on the CPU: its backends, and how many graphs it has made."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

BACKENDS = ("aot_eager", pytest.param("inductor", marks=pytest.mark.slow))


@contextmanager
def compiling(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.compile`` with this backend, and nothing compiled before."""
    with warnings.catch_warnings():  # the compiler's own imports warn, which would be an error in a kernel's first call
        warnings.simplefilter("ignore")
        torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(2))
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield
    torch.compiler.reset()


def graphs() -> int:
    """Compiled so far."""
    return counters["stats"]["unique_graphs"]
