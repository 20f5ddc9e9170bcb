"""Compile functions of buffers with torch.compile, with an eager fallback."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FunctionType
from typing import cast

import torch
from torch import Tensor

from seqtile._compat import active_fake_mode, dispatch_modes
from seqtile._log import first_rank_logger

logger = first_rank_logger(__name__)

Kernel = Callable[..., None]

PIECES = 32
"""Most pieces of a tile in which a function without a formula of its own runs: it makes up to ten tensors of its
input's size on the way, which then are less than half a buffer."""


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors a few rows at a time; a piece must keep the device busy for longer than its calls take."""
    rows, width = tensors[0].shape
    least = 2**12 if tensors[0].device.type == "cpu" else 2**22
    step = max(1, rows // PIECES, least // width)
    for start in range(0, rows, step):
        yield tuple(tensor[start : start + step] for tensor in tensors)


class Kernels:
    """Compiled kernels by variant.

    Where one cannot run, its caller computes the same eagerly in the same buffers: for that call alone under a dispatch
    mode that the compiler does not run under, at its limit of recompiled variants and out of memory; from then on where
    the compiler fails, so that it is not asked at every tile. Each reason is said once.

    Args:
        what: what they are, for messages.

    Attributes:
        failed: the variants that are not tried again.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.failed: set[Hashable] = set()
        self._kernels: dict[Hashable, Kernel] = {}
        self._said: set[str] = set()

    def ran(self, variant: Hashable, build: Callable[[], Kernel], buffers: Sequence[Tensor | None]) -> bool:
        """Run a kernel; whether it did.

        Args:
            variant: what has a kernel of its own, with a limit of recompiled variants of its own.
            build: makes the kernel's body, which calls :func:`only_compiled` first.
            buffers: what it is called with: no views, which would be compiled again for other sizes of what they view.
        """
        if variant in self.failed or active_fake_mode() is not None:
            return False
        hides = next((mode for mode in dispatch_modes() if not mode.ignore_compile_internals()), None)
        if hides is not None:  # the compiler would skip the kernel for good if it were called under this mode
            self._say(_CALL, f"torch.compile does not support the dispatch mode {type(hides).__name__}")
            return False
        if variant not in self._kernels:
            self._kernels[variant] = _compile(build(), len(self._kernels))
        try:
            self._kernels[variant](*buffers)
        except RanEagerlyError:
            del self._kernels[variant]  # what the compiler has skipped once it skips for good
            self._say(_CALL, "torch.compile is disabled or skipped them")
        except Exception as error:  # noqa: BLE001  # whatever a compiler raises; nothing was written
            if _is_out_of_memory(error):
                self._say(_CALL, "out of memory for a kernel")
            elif "RecompileLimit" in type(error).__name__:  # its class is private to the compiler
                self._say(_CALL, "torch.compile reached its recompilation limit")
            else:
                self.failed.add(variant)
                # The first line is often no more than "backend='inductor' raised:".
                self._say(_FAILED, " ".join((str(error) or type(error).__name__).splitlines()[:2]))
        else:
            return True
        return False

    def _say(self, text: str, reason: str) -> None:
        if text % (self.what, reason) not in self._said:
            self._said.add(text % (self.what, reason))
            logger.warning(text, self.what, reason)


_CALL = "%s kernels run eagerly for this call: %s"
_FAILED = "%s kernels run eagerly: torch.compile failed (%s)"


class RanEagerlyError(RuntimeError):
    """A kernel's body was called as Python; it would hold a dozen fp32 buffers."""


def only_compiled() -> None:
    """Raise where the body of a kernel is called as Python."""
    if not torch.compiler.is_dynamo_compiling():
        raise RanEagerlyError


def as_constant(width: int) -> str:
    """A width as a kernel's body compares it by ``int(...)``: an integer would be a symbol to the compiler.

    Rows of a known width are what it reads once, with a maximum and a sum in one pass.
    """
    return str(width)


def _compile(kernel: Kernel, number: int) -> Kernel:
    """The compiled kernel; its code object, by which the compiler counts variants and remembers skips, is its own."""
    function = cast(FunctionType, kernel)
    code = function.__code__.replace(co_name=f"{function.__name__}_{number}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    return torch.compile(copy, dynamic=True, fullgraph=True)


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False


def wide(tensor: Tensor) -> Tensor:
    """Low precision in fp32; others as they are."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
