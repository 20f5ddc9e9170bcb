"""Triton's kernels on a CPU, in its interpreter: what it lacks for the kernels of Liger.

The interpreter hands a kernel's float arguments over as Python numbers, which have no ``.to``, and knows nothing of
CUDA's libdevice, whose functions return None there (triton 3.5 to 3.9, Liger 0.6 to 0.8.5).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


def switch_on_without_accelerator() -> None:
    """For this process and those it starts; Triton reads the variable when it is imported."""
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def is_on() -> bool:
    """Whether Triton's kernels are interpreted in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def liger_kernels() -> Iterator[None]:
    """Inside, Liger's norms, rope, losses and activations run on the CPU."""
    import liger_kernel.transformers  # noqa: F401 - the kernels of all of them
    import numpy
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    functions = {"tanh": lambda x: 2 * tl.sigmoid(2 * x) - 1, "rsqrt": lambda x: 1 / tl.sqrt(x)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", with_floats)
        for name, module in list(sys.modules.items()):
            if name.startswith("liger_kernel.ops."):
                for function, stand_in in functions.items():
                    if hasattr(module, function):
                        patch.setattr(module, function, stand_in)
        yield


@contextmanager
def modeling_as_it_was() -> Iterator[None]:
    """What Liger puts into transformers' modules inside is taken out again: every later model would have it."""
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, content in before:
            for name, value in list(vars(module).items()):
                if str(getattr(value, "__module__", "")).startswith("liger_kernel.") and name in content:
                    setattr(module, name, content[name])
