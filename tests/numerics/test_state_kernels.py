"""Fast kernels with a state: stand-ins with the signatures of flash-linear-attention 0.6 and mamba-ssm 2.

They compute what transformers' PyTorch code computes, as one autograd node each, as the kernels do. The kernels
themselves need a GPU and have not been run.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

import seqtile
from numerics._states import carrier_of, error, model_of, results, tiled, whole
from seqtile.state.state_cache import CarriedState
from tiny_models import HIDDEN


class _Kernel(torch.autograd.Function):
    """Runs ``function`` as one node: saves its inputs, and computes it again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        with torch.enable_grad():
            inputs = [None if one is None else one.detach().requires_grad_() for one in ctx.saved_tensors]
            outputs = ctx.function(*inputs)
        pairs = [(one, g) for one, g in zip(outputs, gradients, strict=True) if g is not None]
        given = [one for one in inputs if one is not None]
        found = iter(torch.autograd.grad([p[0] for p in pairs], given, [p[1] for p in pairs], allow_unused=True))
        return None, *(None if one is None else next(found) for one in inputs)


def chunk_gated_delta_rule(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``fla.ops.gated_delta_rule.chunk_gated_delta_rule``: states are fp32 whatever the rest is."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
        initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        assert q.dtype == k.dtype == v.dtype and cu_seqlens is None
        assert initial_state is None or initial_state.dtype == torch.float32

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            result: tuple[Tensor, ...] = plain(
                *tensors[:5], initial_state=tensors[5], output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )  # fmt: skip
            return result

        output, final = _Kernel.apply(run, q, k, v, g, beta, initial_state)  # type: ignore[no-untyped-call]
        return output, final if output_final_state else None

    return kernel


def chunk_kda(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``fla.ops.kda.chunk_kda``: the same arguments, with a gate for each channel of the keys."""
    kernel = chunk_gated_delta_rule(plain)

    def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *args: Any, **words: Any) -> Any:
        assert g.shape == k.shape and beta.shape == k.shape[:-1]
        return kernel(q, k, v, g, beta, *args, **words)

    return gated


def mamba_chunk_scan_combined(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``."""

    def kernel(
        x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
        z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
        seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
        return_varlen_states: bool = False,
    ) -> Any:  # fmt: skip
        assert seq_idx is None and cu_seqlens is None and z is None and not return_varlen_states

        def run(*tensors: Any) -> tuple[Tensor, ...]:
            x, dt, A, B, C, D, dt_bias, state = tensors
            result: tuple[Tensor, ...] = plain(
                x, dt, A, B, C, chunk_size=chunk_size, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus,
                initial_states=state, dt_limit=dt_limit, return_final_states=True,
            )  # fmt: skip
            return result

        output, final = _Kernel.apply(run, x, dt, A, B, C, D, dt_bias, initial_states)  # type: ignore[no-untyped-call]
        return (output, final) if return_final_states else output

    return kernel


KERNELS = {
    "qwen3_next": ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
    "qwen3_5": ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
    "kimi_linear": ("chunk_kimi_delta_attention", chunk_kda),
    "bailing_hybrid": ("chunk_kimi_delta_attention", chunk_kda),
    "bamba": ("mamba2_chunk_scan", mamba_chunk_scan_combined),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", KERNELS)
def test_a_kernel_of_its_signature_hands_the_state_on(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, (name, stand_in) = f"transformers.models.{family}", KERNELS[family]
    if importlib.util.find_spec(place) is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    module = importlib.import_module(f"{place}.modeling_{family}")
    if not hasattr(module, name):
        pytest.skip(f"{family} of transformers {transformers.__version__} calls no {name}")
    calls: list[Any] = []
    kernel = stand_in(getattr(module, name))

    def counted(*args: Any, **words: Any) -> Any:
        calls.append(words.get("initial_state", words.get("initial_states")))
        return kernel(*args, **words)

    monkeypatch.setattr(module, name, counted)
    model = model_of(family + "_text" * (family == "qwen3_5"), dtype)
    report = seqtile.apply(model, blocks="none", state=16)
    assert re.match(r"layers with a state in tiles of 16 tokens: (\d) of \1 ", report.done["state"]), report.left
    seqtile.undo(model)
    layer = model.get_submodule(carrier_of(model).whole)
    words = {"position_embeddings": None}
    x = torch.randn(2, 60, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    calls.clear()
    expected = results(layer, x, lambda x: whole(layer, x, **words))
    assert calls == [None]
    calls.clear()
    got = results(layer, x, lambda x: tiled(layer, (20, 20, 20), x, **words))
    assert [one is None for one in calls] == [True, False, False, False, False, True], "three tiles, three recomputes"
    assert all(one is None or one.dtype == torch.float32 for one in calls)
    assert error(got, expected) < (1e-3 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("differentiates", [True, False], ids=["a scan with a gradient of its state", "mamba-ssm's"])
def test_a_scan_that_ignores_the_gradient_of_its_last_state_is_refused(
    differentiates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mamba_ssm``'s ``selective_scan_fn``: the last state is right, and no gradient comes back through it.

    What the state before a tile adds is computed beside the scan, as the scan itself takes none.
    """
    if importlib.util.find_spec("transformers.models.mamba") is None:
        pytest.skip(f"transformers {transformers.__version__} has no mamba")
    module = importlib.import_module("transformers.models.mamba.modeling_mamba")
    if not hasattr(module, "mamba_selective_scan"):
        pytest.skip(f"mamba of transformers {transformers.__version__} calls no mamba_selective_scan")
    scan, former, given = module.mamba_selective_scan, CarriedState.get_recurrent_state, list[Tensor | None]()

    def get(self: CarriedState, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        given[:] = [former(self, layer_idx, state_idx)]
        return given[0]

    def with_state(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
        delta_bias: Tensor | None = None, delta_softplus: bool = False, return_last_state: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        words = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        result = scan(u, delta, A, B, C, **words, return_last_state=return_last_state)
        if not return_last_state:
            return result
        output, last = result
        state = given.pop()
        if state is not None:
            assert z is not None and delta_bias is not None
            steps = functional.softplus(delta + delta_bias[:, None]).cumsum(-1)  # [B, channels, t]
            decay = torch.exp(A[None, :, None] * steps[..., None])  # [B, channels, t, n]
            output = output + functional.silu(z) * torch.einsum("bctn,bnt,bcn->bct", decay, C, state)
            last = last + decay[:, :, -1] * state
        return output, last if differentiates else last.detach()

    monkeypatch.setattr(module, "mamba_selective_scan", with_state)
    monkeypatch.setattr(CarriedState, "get_recurrent_state", get)
    model = model_of("mamba")
    report = seqtile.apply(model, blocks="none", state=16)
    assert (": 0 of " not in report.done["state"]) == differentiates, report.left
    if differentiates:
        return
    assert all("the recurrent state or its gradient is not passed on" in one.why for one in report.left)
