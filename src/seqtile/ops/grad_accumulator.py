"""Weight gradients summed over tiles in fp32, without rounding a tile's part to low precision on the way.

A low-precision product is accumulated in fp32 by the device and rounded once, when it is written. Untiled, that is one
rounding of the whole gradient. Were every tile's product written in low precision and summed in fp32, each of ``n``
parts would be rounded; parts of independent tokens are ``sqrt(n)`` times smaller than their sum, so together those
roundings weigh as much as one of the whole, whatever ``n`` is: the error of a gradient that is otherwise exact grows
by ``sqrt(2)``, that of an MLP's weights, whose operands are rounded too, by 1.09 (measured at 16 and at 64 tiles). So
the product itself adds into the fp32 sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)


_accelerator_meant = False
"""Whether tensors on the CPU stand for those of an accelerator, see :func:`as_on_an_accelerator`."""


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Inside, fake tensors on the CPU stand for those of a device whose products add into fp32: to plan its memory."""
    global _accelerator_meant
    outside, _accelerator_meant = _accelerator_meant, True
    try:
        yield
    finally:
        _accelerator_meant = outside


def accelerator_meant() -> bool:
    """Whether this runs inside of :func:`as_on_an_accelerator`."""
    return _accelerator_meant


def tokens_at_once(left: Tensor, right: Tensor) -> int:
    """Tokens of two operands ``[M, t]`` and ``[t, N]`` that are in fp32 at once on a CPU.

    Enough for a product at full speed (measured), and where that is too much for a small weight as many as take no more
    memory than the low-precision product of its shape, which they replace.
    """
    rows, columns = left.shape[0], right.shape[1]
    return max(64, min(256, rows * columns // (2 * (rows + columns))))


@functools.cache
def products_sum_in_fp32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``torch.addmm`` adds a product of ``dtype`` matrices into an fp32 buffer on this kind of device.

    Probed once per device type and dtype: the overload with ``out_dtype`` came with PyTorch 2.12 and exists for CUDA.
    """
    if dtype not in LOW:
        return False
    try:
        ones = torch.ones(16, 16, device=device_type, dtype=dtype)
        total = torch.full((16, 16), torch.nan, device=device_type)
        torch.addmm(total, ones, ones, beta=0, out_dtype=torch.float32, out=total)
        torch.addmm(total, ones, ones * 2.0**-16, out_dtype=torch.float32, out=total)
        return bool((total == 16 + 2.0**-12).all())
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False


class Sum:
    """The gradient of one tensor, summed over tiles: in fp32 for low precision, else in the tensor's own dtype."""

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._low = tensor.dtype in LOW
        self._total: Tensor | None = None
        self._gradient: Tensor | None = None

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._shape, dtype=dtype, device=self._device)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right``, ``[M, t] @ [t, N]``, rounded nowhere but in the sum.

        A device other than the CPU whose products do not add into fp32 (CUDA before PyTorch 2.12) rounds each tile's
        product to low precision, in the buffer of the final gradient: there a product in fp32 takes ten times as long.

        Cost:
            One product. On a CPU low-precision operands are multiplied in fp32, some tokens at a time: exact, as fp32
            holds every product of two such numbers; four times as fast as a bf16 product, or two and a half times as
            slow where the CPU has AMX (both measured). ``torch.set_float32_matmul_precision("medium")`` lets AMX do the
            latter at the speed of a bf16 product, and loses nothing here, since these operands are bf16 numbers.
        """
        sum_dtype = torch.float32 if self._low else self._dtype
        adds = _accelerator_meant and left.dtype in LOW or products_sum_in_fp32(left.device.type, left.dtype)
        into_sum = adds and sum_dtype == torch.float32
        if left.dtype != sum_dtype and not into_sum and left.device.type != "cpu":
            if self._low and self._gradient is None and left.dtype == self._dtype:
                self._gradient = self._empty(self._dtype)
            product = torch.mm(left, right, out=self._gradient) if self._gradient is not None else torch.mm(left, right)
            self.add(product)
            return
        beta = 1  # 0: what is in the sum is not read
        if self._total is None:
            self._total, beta = self._empty(sum_dtype), 0
        if left.dtype == sum_dtype:
            torch.addmm(self._total, left, right, beta=beta, out=self._total)
        elif into_sum:
            torch.addmm(self._total, left, right, beta=beta, out_dtype=sum_dtype, out=self._total)
        else:
            step = tokens_at_once(left, right)
            for start in range(0, max(1, right.shape[0]), step):
                piece = slice(start, start + step)
                # [M, step] @ [step, N]; no names, which would keep one piece while the next one is made
                torch.addmm(
                    self._total, left[:, piece].to(sum_dtype), right[piece].to(sum_dtype), beta=beta, out=self._total
                )
                beta = 1

    def total(self) -> Tensor:
        """The sum itself, to be added to."""
        if self._total is None:
            self._total = self._empty(torch.float32 if self._low else self._dtype).zero_()
        return self._total

    def add(self, addend: Tensor) -> None:
        """Add ``part``."""
        if self._total is None:
            self._total = addend.to(torch.float32 if self._low else self._dtype, copy=True)
        else:
            self._total.add_(addend)

    def result(self) -> Tensor:
        """The gradient in the tensor's dtype; zero if nothing was added. The sum is used up."""
        total, gradient = self._total, self._gradient
        self._total = self._gradient = None
        if total is None:
            return self._empty(self._dtype).zero_()
        return total.to(self._dtype) if gradient is None else gradient.copy_(total)

    def scaled(self, factor: Tensor, *, keep: bool) -> Tensor:
        """:meth:`result` times a scalar, multiplied before the cast; the sum is used up unless it is to be kept."""
        total = self._total
        if total is None:
            return self.result()
        self._total = total * factor if keep else total.mul_(factor)
        scaled = self.result()
        if keep:
            self._total = total
        return scaled
