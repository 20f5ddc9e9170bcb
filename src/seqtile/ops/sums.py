"""Weight gradients summed over tiles in fp32, by the product itself where the device offers it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

LOW = (torch.bfloat16, torch.float16)


@functools.cache
def products_sum_in_fp32(device_type: str, dtype: torch.dtype) -> bool:
    """Whether ``torch.addmm`` adds a product of ``dtype`` matrices into an fp32 buffer on this kind of device.

    Probed once per device type and dtype: the overload with ``out_dtype`` came with PyTorch 2.12 and exists for CUDA.
    """
    if dtype not in LOW:
        return False
    try:
        ones = torch.ones(16, 16, device=device_type, dtype=dtype)
        total = torch.full((16, 16), 2.0**-12, device=device_type)
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
        return bool((total == 16 + 2.0**-12).all())
    except (RuntimeError, TypeError):  # NotImplementedError is a RuntimeError
        return False


class Sum:
    """The gradient of one tensor, summed over tiles: in fp32 for low precision, else in the tensor's own dtype.

    Where the device cannot add a low-precision product into fp32, the product goes through the buffer of the final
    gradient, so that nothing is alive but that gradient and its fp32 sum.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device
        self._low = tensor.dtype in LOW
        self._total: Tensor | None = None
        self._gradient: Tensor | None = None

    def _empty(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._shape, dtype=dtype, device=self._device)

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add ``left @ right``."""
        wide = torch.float32 if self._low else self._dtype
        if left.dtype == wide:
            beta = 0 if self._total is None else 1
            if self._total is None:
                self._total = self._empty(wide)
            torch.addmm(self._total, left, right, beta=beta, out=self._total)
            return
        if products_sum_in_fp32(left.device.type, left.dtype) and wide == torch.float32:
            if self._total is None:
                self._total = self._empty(wide).zero_()
            torch.addmm(self._total, left, right, out_dtype=torch.float32, out=self._total)
            return
        if self._low and self._gradient is None and left.dtype == self._dtype:
            self._gradient = self._empty(self._dtype)
        product = torch.mm(left, right, out=self._gradient) if self._gradient is not None else torch.mm(left, right)
        self.add(product)

    def add(self, part: Tensor) -> None:
        """Add ``part``."""
        if self._total is None:
            self._total = self._empty(torch.float32 if self._low else self._dtype).copy_(part)
        else:
            self._total.add_(part)

    def result(self) -> Tensor:
        """The gradient in the tensor's dtype; zero if nothing was added."""
        total, gradient = self._total, self._gradient
        if total is None:
            return self._empty(self._dtype).zero_()
        if gradient is not None:
            return gradient.copy_(total)
        return total.to(self._dtype)

    def scaled(self, factor: Tensor, *, keep: bool) -> Tensor:
        """:meth:`result` times a scalar, multiplied before the cast; the sum is used up unless it is to be kept."""
        if self._total is None:
            return self.result()
        total = self._total
        self._total = total * factor if keep else total.mul_(factor)
        scaled = self.result()
        self._total = total
        if keep and scaled is self._gradient:
            self._gradient = None  # handed out; the next one needs a buffer of its own
        return scaled
