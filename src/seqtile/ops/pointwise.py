"""The pointwise part of an MLP, ``act(gate) * up`` and its backward, on buffers that are reused in place.

Two ways to compute the same numbers stand behind one switch, :func:`pointwise_on`: eager ATen calls that write into
given buffers, and one kernel forward and one backward built by ``torch.compile`` on accelerators. The order of the
products around them differs, so the backward takes them as functions. Every tensor here is ``[t, F]``: ``t`` tokens of
a tile, ``F`` features of the MLP's inner tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile.ops.kernels import Kernel, Kernels, only_compiled, pieces, wide

aten = torch.ops.aten

UseHidden = Callable[[Tensor], None]
WriteGradient = Callable[[Tensor], None]


@dataclass(frozen=True)
class Activation:
    """An elementwise function and how to write it and its gradient into a buffer.

    Attributes:
        name: what reports call it.
        function: ``a = f(z)``, the plain twin.
        write: ``out = f(z)``, where ``out`` may be ``z``; without it the twin is called and copied, some rows at a
            time, so that what it makes on the way is small beside a tile.
        write_gradient: ``out = grad * f'(z)``, where ``out`` may be ``z`` or ``grad``; without it autograd runs on the
            twin, in the same pieces.
        derivative: ``f'(z)`` in plain operations that fuse into one kernel; without it nothing is compiled.
        spellings: how models write it, each with an operator that its trace then holds.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Tensor], object] | None = None
    write_gradient: Callable[[Tensor, Tensor, Tensor], object] | None = None
    derivative: Callable[[Tensor], Tensor] | None = None
    spellings: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = ()

    def into(self, z: Tensor, out: Tensor) -> None:
        """``out = f(z)``; ``out`` may be ``z``."""
        if self.write is not None:
            self.write(z, out)
            return
        for zs, place in pieces(z, out):
            place.copy_(self.function(zs))

    def gradient_into(self, grad: Tensor, z: Tensor, out: Tensor) -> None:
        """``out = grad * f'(z)``; ``out`` may be ``z`` or ``grad``."""
        if self.write_gradient is not None:
            self.write_gradient(grad, z, out)
            return
        for grads, zs, place in pieces(grad, z, out):
            with torch.enable_grad():
                leaf = zs.detach().requires_grad_()
                (result,) = torch.autograd.grad(self.function(leaf), leaf, grads)
            place.copy_(result)


def _relu2(z: Tensor) -> Tensor:
    return torch.square(F.relu(z))


def _relu2_into(z: Tensor, out: Tensor) -> Tensor:
    return torch.clamp_min(z, 0, out=out).square_()


def _relu2_gradient_into(grad: Tensor, z: Tensor, out: Tensor) -> Tensor:
    if out is grad:
        return out.mul_(2 * F.relu(z))
    return torch.clamp_min(z, 0, out=out).mul_(2).mul_(grad)


def _silu_derivative(z: Tensor) -> Tensor:
    share = torch.sigmoid(z)
    return share * (1 + z * (1 - share))


def _gelu_derivative(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _gelu_tanh_derivative(z: Tensor) -> Tensor:
    scale = math.sqrt(2 / math.pi)
    t = torch.tanh(scale * (z + 0.044715 * z * z * z))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * scale * (1 + 3 * 0.044715 * z * z)


def _gelu_tanh_by_power(z: Tensor) -> Tensor:
    """As GPT-2 writes it."""
    return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))


def _gelu_tanh_by_products(z: Tensor) -> Tensor:
    """As GPT-J writes it."""
    return 0.5 * z * (1.0 + torch.tanh(z * 0.7978845608 * (1.0 + 0.044715 * z * z)))


_tanh_of_torch = functools.partial(F.gelu, approximate="tanh")

SILU = Activation(
    "silu",
    F.silu,
    lambda z, out: aten.silu.out(z, out=out),
    lambda grad, z, out: aten.silu_backward.grad_input(grad, z, grad_input=out),
    _silu_derivative,
    spellings=(("silu", F.silu),),
)
GELU = Activation(
    "gelu",
    F.gelu,
    lambda z, out: aten.gelu.out(z, out=out),
    lambda grad, z, out: aten.gelu_backward.grad_input(grad, z, grad_input=out),
    _gelu_derivative,
    spellings=(("gelu", F.gelu),),
)
GELU_TANH = Activation(
    "gelu_tanh",
    _tanh_of_torch,
    lambda z, out: aten.gelu.out(z, approximate="tanh", out=out),
    lambda grad, z, out: aten.gelu_backward.grad_input(grad, z, approximate="tanh", grad_input=out),
    _gelu_tanh_derivative,
    spellings=(("gelu", _tanh_of_torch), ("tanh", _gelu_tanh_by_power), ("tanh", _gelu_tanh_by_products)),
)
RELU = Activation(
    "relu",
    F.relu,
    lambda z, out: torch.clamp_min(z, 0, out=out),
    lambda grad, z, out: aten.threshold_backward.grad_input(grad, z, 0, grad_input=out),
    lambda z: (z > 0).to(z.dtype),
    spellings=(("relu", F.relu), ("relu", torch.relu)),
)
RELU2 = Activation(
    "relu2",
    _relu2,
    _relu2_into,
    _relu2_gradient_into,
    lambda z: 2 * F.relu(z),
    spellings=(("relu", _relu2),),
)

ACTIVATIONS = (SILU, GELU, GELU_TANH, RELU, RELU2)
"""Every activation that the fused operator knows; the recogniser and the hub kernel read their spellings.

To add one, write its entry here. A block with another function runs fused too, by autograd on that function."""


class Eager:
    """ATen calls, one pass over the buffers each; rounds to the buffers' dtype after each, as untiled eager does."""

    def forward(self, act: Activation, gate: Tensor, up: Tensor | None, out: Tensor) -> None:
        """``out = act(gate) * up``, or ``act(gate)`` where there is no ``up``; ``out`` may be ``gate``."""
        act.into(gate, out)
        if up is not None:
            out.mul_(up)

    def backward(
        self,
        act: Activation,
        gate: Tensor,
        up: Tensor | None,
        spare: Callable[[int], Tensor],
        use_hidden: UseHidden | None,
        write_gradient: WriteGradient | None,
    ) -> None:
        """Replace ``gate`` and ``up`` by their gradients.

        Args:
            act: the activation.
            gate: pre-activation ``[t, F]``; overwritten.
            up: ``[t, F]`` or None; overwritten.
            spare: gives the spare ``[t, F]`` buffers 0 and 1; without ``up`` only the first is asked for.
            use_hidden: told ``h = act(gate) * up`` while it exists (it may overwrite it); None when nothing needs it.
            write_gradient: writes the gradient of ``h`` into the buffer it is given; None when nothing needs it.
        """
        if up is None:
            hidden = spare(0)
            if use_hidden is not None:
                act.into(gate, hidden)
                use_hidden(hidden)
            if write_gradient is not None:
                write_gradient(hidden)
                act.gradient_into(hidden, gate, gate)
            return
        activated, hidden = spare(0), spare(1)
        act.into(gate, activated)
        if use_hidden is not None:
            torch.mul(activated, up, out=hidden)
            use_hidden(hidden)
        if write_gradient is not None:
            write_gradient(hidden)
            up.mul_(hidden)
            act.gradient_into(up, gate, gate)
            torch.mul(hidden, activated, out=up)


class Compiled(Eager):
    """One kernel forward and one backward, in fp32 inside; eager in the same buffers where they cannot run."""

    def __init__(self) -> None:
        self._kernels = Kernels("pointwise")

    @property
    def failed(self) -> bool:
        """Whether the compiler has failed on a kernel, which is not tried again."""
        return bool(self._kernels.failed)

    def forward(self, act: Activation, gate: Tensor, up: Tensor | None, out: Tensor) -> None:
        """See :meth:`Eager.forward`."""
        if not self._ran(act, _forward_kernel, gate, up, out):
            super().forward(act, gate, up, out)

    def backward(
        self,
        act: Activation,
        gate: Tensor,
        up: Tensor | None,
        spare: Callable[[int], Tensor],
        use_hidden: UseHidden | None,
        write_gradient: WriteGradient | None,
    ) -> None:
        """See :meth:`Eager.backward`; the gradient of ``h`` is computed first, so that one kernel does the rest."""
        if (
            act.derivative is None
            or write_gradient is None
            or _variant(act, _backward_kernel, gate, up) in self._kernels.failed
        ):
            super().backward(act, gate, up, spare, use_hidden, write_gradient)
            return
        gradient = spare(0)
        write_gradient(gradient)
        hidden = gradient if up is None else spare(1)
        if not self._ran(act, _backward_kernel, gate, up, gradient, hidden):
            _backward_in_pieces(act, gate, up, gradient, hidden)
        if use_hidden is not None:
            use_hidden(hidden)

    def _ran(self, act: Activation, build: Build, gate: Tensor, up: Tensor | None, *buffers: Tensor) -> bool:
        if act.derivative is None:
            return False
        variant = _variant(act, build, gate, up)
        return self._kernels.ran(variant, lambda: build(act), _as_bases(variant, (gate, up, *buffers)))


Build = Callable[[Activation], Kernel]


@dataclass(frozen=True)
class Variant:
    """A function with its own kernel, and its own limit of recompiled variants.

    Attributes:
        build: makes the kernel's body.
        act: the activation.
        gated: whether there is an ``up``.
        dtype: dtype of the buffers.
        contiguous: whether the buffers are whole, not halves of a fused ``gate_up``.
    """

    build: Build
    act: Activation
    gated: bool
    dtype: torch.dtype
    contiguous: bool


def _variant(act: Activation, build: Build, gate: Tensor, up: Tensor | None) -> Variant:
    whole = gate.is_contiguous() and (up is None or up.is_contiguous())
    return Variant(build, act, up is not None, gate.dtype, whole)


def _as_bases(variant: Variant, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors' memory as tensors that are no views: a view is compiled again where its base has another size.

    Where they are whole, one dimension leaves no number of rows that is a case of its own. One tensor stays one.
    """
    known: dict[int, Tensor | None] = {id(None): None}
    for tensor in tensors:
        if tensor is not None and id(tensor) not in known:
            known[id(tensor)] = (tensor.view(-1) if variant.contiguous else tensor).data
    return [known[id(tensor)] for tensor in tensors]


def _forward_kernel(act: Activation) -> Kernel:
    def pointwise_forward(gate: Tensor, up: Tensor | None, out: Tensor) -> None:
        only_compiled()
        activated = act.function(wide(gate))
        out.copy_(activated if up is None else activated * wide(up))

    return pointwise_forward


def _backward_kernel(act: Activation) -> Kernel:
    assert act.derivative is not None
    derivative = act.derivative

    def pointwise_backward(gate: Tensor, up: Tensor | None, gradient: Tensor, hidden: Tensor) -> None:
        only_compiled()
        z, dh = wide(gate), wide(gradient)
        activated, slope = act.function(z), derivative(z)
        if up is None:  # hidden and gradient share a buffer: read it first
            gate.copy_(dh * slope)
            hidden.copy_(activated)
            return
        u = wide(up)
        hidden.copy_(activated * u)
        gate.copy_(dh * u * slope)
        up.copy_(dh * activated)

    return pointwise_backward


def _backward_in_pieces(act: Activation, gate: Tensor, up: Tensor | None, gradient: Tensor, hidden: Tensor) -> None:
    """The backward kernel's computation, eagerly, in the same buffers and a piece of one; overwrites ``gradient``."""
    if up is None:
        for zs, dhs in pieces(gate, gradient):
            activated = act.function(zs)
            act.gradient_into(dhs, zs, zs)
            dhs.copy_(activated)
        return
    for zs, us, dhs, hs in pieces(gate, up, gradient, hidden):
        activated = act.function(zs)
        torch.mul(activated, us, out=hs)
        act.gradient_into(us.mul_(dhs), zs, zs)
        torch.mul(dhs, activated, out=us)


EAGER = Eager()
COMPILED = Compiled()


def pointwise_on(device: torch.device) -> Eager:
    """The one switch: eager on the CPU and on meta tensors, compiled on accelerators."""
    return EAGER if device.type in ("cpu", "meta") else COMPILED
