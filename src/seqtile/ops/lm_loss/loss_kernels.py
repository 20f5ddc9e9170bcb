"""Other libraries' operators for the head's scalar loss.

``"native"`` is PyTorch's own chunked ``linear_cross_entropy`` of PyTorch 2.13 and later, in fp32 and float64: in low
precision it rounds the scalar loss, and what the gradients are multiplied by, to 8 or 11 bits.
``"liger"`` is the first of Liger's fused linear cross-entropies that supports the call: the CuTe-DSL functions for
Hopper and Blackwell, else the Triton function with fp32 sums. ``"cce"`` is Apple's cut cross-entropy without its filter
of small gradients, and with fp32 sums where its version has them. ``"quack"`` is Quack's CuTe-DSL function for Hopper,
which sums the head's gradient in fp32 and supports a frozen head. Its backward runs once, in place.
What a kernel does not compute, or computes less exactly than plain PyTorch would, is a reason not to use it.

Liger's per-token CuTe-DSL function is not here: it returns entropies in bf16 and adds each 1,024 tokens' part of the
head's gradient in bf16.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from seqtile._compat import active_fake_mode
from seqtile.devices import compute_capability
from seqtile.ops.grad_accumulator import LOW
from seqtile.ops.lm_loss.head_nodes import HeadCall
from seqtile.ops.lm_loss.logits_tile import Objective
from seqtile.options import LOSS_KERNELS
from seqtile.tiling import parse_tile

SM90 = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
SM100 = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy"
QUACK = "quack.linear_cross_entropy"
SM90_ROWS, SM90_COLUMNS = 1024, 256
"""Tokens are filled up to a multiple of the first, though 128 would do: the SM90 function compiles its kernels for each
number of tokens. The vocabulary must be a multiple of the second."""
QUACK_ROWS = 128
"""Quack's function takes a multiple of this many tokens at a time, and a vocabulary that it divides."""


@dataclass(frozen=True)
class LossKernel:
    """One candidate.

    Attributes:
        impl: the word of ``impl=`` that stands for it.
        why_not: why it cannot compute a call, or "".
        total: sum of the losses of the tokens that count.
        trial: compare it with plain PyTorch at its first use, since it has not run on a device in our tests.
    """

    impl: str
    why_not: Callable[[HeadCall], str]
    total: Callable[[HeadCall], Tensor]
    trial: bool = False


@dataclass(frozen=True)
class LossChoice:
    """What computes a call, ``"torch"`` or a key of :data:`LOSS_CANDIDATES`, and why the earlier ones do not."""

    name: str = "torch"
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {reason}" for name, reason in self.reasons.items())
        return f"{'seqtile' if self.name == 'torch' else self.name} computes the loss{others}"


_choices: ContextVar[list[LossChoice] | None] = ContextVar("loss kernels", default=None)


@contextmanager
def record_choices() -> Iterator[list[LossChoice]]:
    """Collect the choices that are made inside."""
    made: list[LossChoice] = []
    token = _choices.set(made)
    try:
        yield made
    finally:
        _choices.reset(token)


def choose_kernel(
    impl: str, call: HeadCall, *, weighted: bool, per_token: bool, returns_z_loss: bool = False
) -> LossChoice:
    """Which kernel computes this call: ``"torch"``, or one that is installed and means the same.

    Raises:
        ValueError: an unknown name, or a kernel asked for by name that cannot; with the reason.
    """
    if impl not in LOSS_KERNELS:
        raise ValueError(f"impl={impl!r}: expected one of {', '.join(map(repr, LOSS_KERNELS))}")
    names = AUTO if impl == "auto" else [name for name, kernel in LOSS_CANDIDATES.items() if kernel.impl == impl]
    reasons: dict[str, str] = {}
    for name in names:
        reason = _why_not(name, call, weighted, per_token, returns_z_loss)
        if not reason:
            break
        reasons[name] = reason
    else:
        if reasons and impl != "auto":
            why = "; ".join(reasons.values() if len(reasons) == 1 else map(": ".join, reasons.items()))
            raise ValueError(f"impl={impl!r} cannot compute this: {why}; use impl='torch' or 'auto'")
        name = "torch"
    choice = LossChoice(name, reasons)
    if (made := _choices.get()) is not None:
        made.append(choice)
    return choice


def _why_not(name: str, call: HeadCall, weighted: bool, per_token: bool, returns_z_loss: bool) -> str:
    scaling = call.plan.objective.scaling
    if per_token or weighted:
        return "it returns a sum only, without token weights"
    if returns_z_loss:
        return "it does not return the z-loss"
    if scaling.scale != 1.0 or scaling.temperature != 1.0:
        return "it does not scale logits"
    if active_fake_mode() is not None:
        return "a plan's step runs no kernel"
    kernel = LOSS_CANDIDATES[name]
    return kernel.why_not(call) or (_failed_trial(name, call) if kernel.trial else "")


def missing_kernel(impl: str) -> str:
    """What ``impl=`` lacks on this machine, whatever the call, or ""."""
    if impl == "native" and not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return f"PyTorch {torch.__version__} has no chunked linear_cross_entropy (2.13 does)"
    package = {"cce": "cut_cross_entropy", "liger": "liger_kernel", "quack": "quack"}.get(impl)
    return f"{package} is not installed" if package is not None and find_spec(package) is None else ""


# ---- PyTorch's ----


def _not_native(call: HeadCall) -> str:
    aim = call.plan.objective
    if missing := missing_kernel("native"):
        return missing
    if aim.scaling.softcap is not None or aim.label_smoothing or aim.z_loss:
        return "it does not support soft-cap, label smoothing and z-loss"
    return f"it rounds the loss and its upstream gradient to {call.plan.dtype}" if call.plan.dtype in LOW else ""


def _native(call: HeadCall) -> Tensor:
    aim, (hidden, weight, labels, bias) = call.plan.objective, _operands(call)
    weights = aim.class_weights
    return F.linear_cross_entropy(
        hidden, weight, labels, linear_bias=bias, weight=None if weights is None else weights.detach().to(hidden.dtype),
        reduction="sum", ignore_index=aim.ignore_index,
        options=torch.nn.LinearCrossEntropyOptions(allow_retain_graph=True, acc_policy="accurate"),
    ).to(torch.promote_types(hidden.dtype, torch.float32))  # fmt: skip


# ---- Triton ----


def _not_triton(impl: str, call: HeadCall) -> str:
    if missing := missing_kernel(impl):
        return missing
    if not _has_triton(call.hidden.device):
        return f"it needs Triton and a GPU, and the hidden states are on {call.hidden.device.type!r}"
    if call.plan.objective.class_weights is not None:
        return "it does not support class weights"
    return "it computes in fp32" if call.plan.dtype == torch.float64 else ""


def _has_triton(device: torch.device) -> bool:
    return device.type != "cpu" and find_spec("triton") is not None


def _not_cce(call: HeadCall) -> str:
    aim = call.plan.objective
    if reason := _not_triton("cce", call):
        return reason
    if call.bias is not None or aim.label_smoothing or aim.z_loss:
        return "it does not support bias, label smoothing and z-loss"
    if call.plan.dtype not in LOW:
        return "it supports bf16 and fp16 only"
    trains = call.weight.requires_grad or call.hidden.requires_grad
    if trains and "accum_c_fp32" not in inspect.signature(_cce_function()).parameters:
        return "this version sums gradients in low precision"
    return ""


def _cce(call: HeadCall) -> Tensor:
    aim, (hidden, weight, labels, _), function = call.plan.objective, _operands(call), _cce_function()
    parameters = inspect.signature(function).parameters
    exact = {key: True for key in ("accum_e_fp32", "accum_c_fp32") if key in parameters}
    return function(  # type: ignore[no-any-return]
        hidden, weight, labels, ignore_index=aim.ignore_index, softcap=aim.scaling.softcap, reduction="sum",
        filter_eps=None, **exact,
    ).float()  # fmt: skip


def _cce_function() -> Any:
    return import_module("cut_cross_entropy").linear_cross_entropy


def _not_liger(call: HeadCall) -> str:
    return _not_triton("liger", call)


def _liger(call: HeadCall) -> Tensor:
    aim, (hidden, weight, labels, bias) = call.plan.objective, _operands(call)
    function = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    return function(  # type: ignore[no-any-return]
        hidden, weight, labels, bias=bias, ignore_index=aim.ignore_index,
        lse_square_scale=aim.z_loss, label_smoothing=aim.label_smoothing, reduction="sum",
        softcap=aim.scaling.softcap, accum_dtype=torch.float32,
    ).float()  # fmt: skip


# ---- CuTe DSL ----


def _not_cutedsl(module: str, needed: tuple[int, int], call: HeadCall) -> str:
    aim, dtype, device = call.plan.objective, call.plan.dtype, call.hidden.device
    if (capability := compute_capability(device)) != needed:
        has = f"compute capability {'.'.join(map(str, capability))}" if capability else f"{device.type!r}"
        return f"it needs compute capability {'.'.join(map(str, needed))}, the device has {has}"
    if dtype != torch.bfloat16:
        return f"it does not support {dtype}"
    if call.bias is not None or aim.label_smoothing or aim.z_loss or aim.scaling.softcap is not None:
        return "it does not support bias, soft-cap, label smoothing and z-loss"
    if aim.class_weights is not None:
        return "it does not support class weights"
    if module != QUACK and not (torch.is_grad_enabled() and call.weight.requires_grad):
        return "it computes the gradient of a frozen head too"
    return _why_no_import(module)


@functools.cache
def _why_no_import(module: str) -> str:
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001  # a driver that CuTe DSL does not find is an OSError
        return f"{'quack' if module == QUACK else 'liger_kernel[cutedsl]'} does not import: {error}"
    return ""


def _not_sm90(call: HeadCall) -> str:
    tokens, (vocabulary, hidden) = len(call.kept), call.weight.shape
    if reason := _not_cutedsl(SM90, (9, 0), call):
        return reason
    if vocabulary % SM90_COLUMNS:
        return f"it needs a vocabulary that {SM90_COLUMNS} divides"
    # 2 bytes for each logit until the backward. Our operator keeps the head's fp32 gradient from the forward on, 4
    # bytes for each weight, where this one has it in bf16, and not before the backward.
    if tokens > 2 * hidden or tokens * vocabulary >= 2**31:
        return f"it saves all {tokens:,} x {vocabulary:,} logits for the backward"
    if -tokens % SM90_ROWS > tokens // 20:
        return f"{tokens:,} tokens are not within 5 % of a multiple of {SM90_ROWS:,}, the sizes that it is compiled for"
    return ""


def _sm90(call: HeadCall) -> Tensor:
    hidden, weight, labels, _ = _operands(call)
    fill = -len(labels) % SM90_ROWS
    function = import_module(SM90).liger_fused_linear_cross_entropy_sm90
    hidden, labels = F.pad(hidden, (0, 0, 0, fill)), F.pad(labels, (0, fill), value=-100)
    return function(hidden, weight, labels, ignore_index=-100, reduction="sum")  # type: ignore[no-any-return]


def _not_sm100(call: HeadCall) -> str:
    # Gradients come back in the operands' dtype before they are divided by the count: fp16 ends at 65,504.
    return _not_cutedsl(SM100, (10, 0), call)


def _sm100(call: HeadCall) -> Tensor:
    hidden, weight, labels, _ = _operands(call)
    function = import_module(SM100).LigerFusedLinearCrossEntropyFunction
    # bias, class weights; ignored index, z-loss, smoothing, reduction, soft-cap, whether to return the z-loss; sums
    return function.apply(  # type: ignore[no-any-return]
        hidden, weight, labels, None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32
    )[0]  # fmt: skip


def _not_quack(call: HeadCall) -> str:
    vocabulary, width = call.weight.shape
    if reason := missing_kernel("quack") or _not_cutedsl(QUACK, (9, 0), call):
        return reason
    if vocabulary % QUACK_ROWS or width % 8:
        return f"it needs a vocabulary that {QUACK_ROWS} divides and a width that 8 divides"
    return ""


def _quack(call: HeadCall) -> Tensor:
    hidden, weight, labels, _ = _operands(call)
    rows = -(-max(call.plan.sizes, default=1) // QUACK_ROWS) * QUACK_ROWS
    function = import_module(QUACK).scaled_exp_linear_cross_entropy
    return function(hidden, weight, labels, chunk_size=rows, ignore_index=-100, reduction="sum")  # type: ignore[no-any-return]


LOSS_CANDIDATES = {
    "Liger's SM100 kernel": LossKernel("liger", _not_sm100, _sm100, trial=True),
    "Liger's SM90 kernel": LossKernel("liger", _not_sm90, _sm90, trial=True),
    "Quack's kernel": LossKernel("quack", _not_quack, _quack, trial=True),
    "Liger's Triton kernel": LossKernel("liger", _not_liger, _liger),
    "CCE": LossKernel("cce", _not_cce, _cce),
    "PyTorch's linear_cross_entropy": LossKernel("native", _not_native, _native),
}
"""Fastest first. By their authors' figures: 1,475 TFLOP/s on a B200 (Liger#1339), 704 on an H200 (Liger#1369)."""

AUTO = ("Liger's SM100 kernel", "Liger's SM90 kernel")
"""Those faster than our own operator, which takes 86 ms on an H100 where Liger's Triton function takes 129 (16,384
tokens x 2,048 x 248,320) and CCE, by TRL's figures (trl#6858), 93."""


def _operands(call: HeadCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """States of the tokens that count, weight, targets and bias, in the dtype of the products."""
    dtype, bias = call.plan.dtype, call.bias
    hidden, weight = call.kept.take(call.hidden).to(dtype), call.weight.to(dtype)
    return hidden, weight, call.kept.targets, None if bias is None else bias.to(dtype)


# ---- trial ----

_trials: dict[tuple[str, torch.device, torch.dtype, torch.Size], str] = {}

TRIAL_TOKENS = 128
TRIAL_ERROR = 2**-6
"""Largest difference from plain PyTorch, as a share of the norm. A gradient of either is rounded to bf16 (2**-9) up to
three times; one token of :data:`TRIAL_TOKENS` that is lost is 2**-3.5 of it."""


def _failed_trial(name: str, call: HeadCall) -> str:
    """Why a kernel is not to be trusted with this device, dtype and weight, by a run on random tokens; or ""."""
    key = (name, call.hidden.device, call.plan.dtype, call.weight.shape)
    if key not in _trials:
        try:
            _trials[key] = _trial(LOSS_CANDIDATES[name].total, call)
        except Exception as error:  # noqa: BLE001  # whatever it raises, another kernel computes the loss
            _trials[key] = f"{type(error).__name__} in a trial: {' '.join(str(error).split())[:200]}"
    return _trials[key]


def _trial(total: Callable[[HeadCall], Tensor], call: HeadCall) -> str:
    device, (vocabulary, width) = call.hidden.device, call.weight.shape
    generator = torch.Generator(device).manual_seed(0)
    labels = torch.randint(vocabulary, (TRIAL_TOKENS,), generator=generator, device=device)
    hidden = torch.randn(TRIAL_TOKENS, width, generator=generator, device=device, dtype=call.plan.dtype)
    weight = call.weight.detach().to(call.plan.dtype).requires_grad_()
    inputs = (hidden.requires_grad_(), weight)
    with call.plan.casts.off():
        expected = F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
        loss = total(HeadCall(hidden, weight, None, labels, Objective(), parse_tile("auto")))
        upstream = torch.full_like(expected, 0.375)
        pairs = [(loss.detach(), expected.detach())]
        pairs += zip(torch.autograd.grad(loss, inputs, upstream), torch.autograd.grad(expected, inputs, upstream),
                     strict=True)  # fmt: skip
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    errors = [float(norm(value - true) / norm(true)) for value, true in pairs]
    if all(error <= TRIAL_ERROR for error in errors):  # not max(), which passes over NaN
        return ""
    differences = ", ".join(f"{error:.1e}" for error in errors)
    return f"loss and gradients differ by {differences} from plain PyTorch's in a trial"
