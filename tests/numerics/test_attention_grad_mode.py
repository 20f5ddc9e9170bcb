"""What a kernel returns, and which kernel runs, depends on the state around it: the backward has the forward's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import attention_stand_in
import seqtile
from numerics.test_attention_saved import attention_calls
from other_thread import backward_elsewhere
from seqtile._compat import allowed_sdpa_kernels
from seqtile.ops.attention.kernel_calls import record
from zoo import assert_same_gradients, causal_lm, exact_dtype, gradients, tokens

LENGTH = 13
SETTINGS: dict[str, dict[str, Any]] = {
    "heads": {"heads": 1},
    "all heads": {"heads": 2},
    "saved": {"checkpoint": "attention-saved"},
    "heads saved": {"heads": 1, "checkpoint": "attention-saved"},
    "saved on the host": {"checkpoint": "attention-saved", "offload": True},
    "heads saved on the host": {"heads": 1, "checkpoint": "attention-saved", "offload": True},
    "heads in a checkpoint": {"heads": 1, "checkpoint": "layer"},
    "heads, whole layer in tiles": {"heads": 1, "checkpoint": "layer", "blocks": "mlp+norm+projections", "tile": 5},
}


def model_with(impl: str, architecture: str = "qwen3") -> nn.Module:
    return causal_lm(architecture, exact_dtype(architecture), use_cache=False, attn_implementation=impl)


def step(model: nn.Module, kernel: SDPBackend | None = None, autocast: bool = False) -> dict[str, Tensor | None]:
    """Gradients, where only the forward is inside ``sdpa_kernel(...)`` and autocast, and the backward elsewhere."""
    model.zero_grad()
    ids = tokens(2, LENGTH)
    with sdpa_kernel(kernel) if kernel else nullcontext(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    backward_elsewhere(loss)
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(params=[False, True], ids=["asked by its argument", "looks at gradient mode"])
def stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    attention_stand_in.register()
    attention_stand_in.plans.clear()
    attention_stand_in.look_at_gradients(request.param)
    yield
    attention_stand_in.look_at_gradients(False)


def test_the_stand_in_returns_garbage_where_no_backward_is_expected(stand_in: None) -> None:
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    with torch.no_grad():
        assert kernel(query, query, query, None, False)[1].isnan().all()
    assert not kernel(query, query, query, None, True)[1].isnan().any()


@pytest.mark.parametrize("how", SETTINGS)
def test_a_log_sum_exp_that_has_to_be_asked_for(how: str, stand_in: None) -> None:
    expected = gradients(model_with("sdpa"), tokens(2, LENGTH))[1]
    model = model_with("stand_in")
    assert_same_gradients(step(model), expected)
    seqtile.apply(model, **{"blocks": "none", **SETTINGS[how]})
    assert_same_gradients(step(model), expected)


def test_a_log_sum_exp_where_projections_run_as_modules(stand_in: None) -> None:
    """The node that Ulysses uses too, between its two exchanges."""
    expected = gradients(model_with("sdpa"), tokens(2, LENGTH))[1]
    model = model_with("stand_in")
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.register_forward_hook(lambda *_: None)
    seqtile.apply(model, blocks="none", heads=1)
    assert_same_gradients(step(model), expected)


def test_output_gradients_have_the_strides_of_a_plan(stand_in: None) -> None:
    """The projections run in the operator first, then as modules: the kernel's plan is the same."""
    expected = gradients(model_with("sdpa"), tokens(2, LENGTH))[1]
    model = model_with("stand_in")
    seqtile.apply(model, blocks="none", heads=1)
    assert_same_gradients(step(model), expected)
    for name, module in model.named_modules():
        if name.endswith("q_proj"):
            module.register_forward_hook(lambda *_: None)
    assert_same_gradients(step(model), expected)


def test_without_a_backward_no_log_sum_exp_is_asked_for(stand_in: None) -> None:
    model = model_with("stand_in")
    seqtile.apply(model, blocks="none", heads=1)
    attention_stand_in.requests.clear()
    with torch.no_grad():
        model(input_ids=tokens(2, LENGTH))
    assert attention_stand_in.requests == [False] * 4, "two layers, two groups"


def test_recording_builds_no_graph_that_holds_memory() -> None:
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    alive = []

    def run() -> tuple[Tensor, None]:
        turned = query.exp()  # whose backward would read it
        alive.append(weakref.ref(turned.untyped_storage()))
        turned = turned * 2
        alive.append(alive[0]())
        return F.scaled_dot_product_attention(turned, turned, turned) + 1, None

    output, _, recorded, tensors = record(run, for_backward=True)
    assert len(recorded.calls) == 1 and alive[1] is None
    assert not any(tensor.requires_grad for tensor in (output, *tensors))


KERNELS = {"plain products": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


@pytest.mark.parametrize("inside", KERNELS)
@pytest.mark.parametrize("how", [how for how, settings in SETTINGS.items() if settings.get("checkpoint") != "layer"])
def test_kernels_that_are_chosen_around_the_forward_alone(how: str, inside: str) -> None:
    """As PyTorch's documentation shows ``sdpa_kernel``; PyTorch's own checkpoint, tiled or not, raises then."""
    expected = gradients(model_with("sdpa"), tokens(2, LENGTH))[1]
    model = model_with("sdpa")
    seqtile.apply(model, **{"blocks": "none", **SETTINGS[how]})
    for outside in KERNELS.values():
        with sdpa_kernel(outside):
            before = chosen()
            with attention_calls() as calls:
                got = step(model, kernel=KERNELS[inside])
            assert chosen() == before
        assert_same_gradients(got, expected)
        groups = 2 if SETTINGS[how].get("heads") == 1 else 1
        assert calls.forward == (2 * groups if inside == "flash" else 0)


@pytest.mark.parametrize("how", SETTINGS)
def test_an_order_that_the_first_call_sets(how: str) -> None:
    """On Hopper PyTorch puts cuDNN first at the first call of a process: the backward keeps that order."""
    before, orders = torch._C._get_sdp_priority_order(), list[list[int]]()

    def first_call_sets_order(*args: Any, **kwargs: Any) -> Any:
        if not orders:
            torch._C._set_sdp_priority_order(before[::-1])
        orders.append(torch._C._get_sdp_priority_order())
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sets_order", first_call_sets_order)
    expected = gradients(model_with("sdpa"), tokens(2, LENGTH))[1]
    model = model_with("sets_order")
    seqtile.apply(model, **{"blocks": "none", **SETTINGS[how]})
    try:
        assert_same_gradients(step(model), expected)
    finally:
        torch._C._set_sdp_priority_order(before)
    assert len(orders) >= 4 and all(order == before[::-1] for order in orders)


def chosen() -> list[SDPBackend]:
    return allowed_sdpa_kernels(with_priority=True)


def test_another_kernel_in_the_backward_is_refused(stand_in: None) -> None:
    """What no setting of ``sdpa_kernel`` brings back, such as another attention implementation."""
    model = model_with("sdpa")
    seqtile.apply(model, blocks="none", heads=1)
    ids = tokens(2, LENGTH)
    loss = model(input_ids=ids, labels=ids).loss
    model.set_attn_implementation("stand_in")
    with pytest.raises(RuntimeError, match="CPU in forward.*memory-efficient"):
        loss.backward()


@pytest.mark.parametrize("how", SETTINGS)
def test_a_backward_in_another_thread_outside_autocast(how: str) -> None:
    model = model_with("sdpa").float()
    expected = step(model, autocast=True)
    seqtile.apply(model, **{"blocks": "none", **SETTINGS[how]})
    got = step(model, autocast=True)
    for name, gradient in expected.items():
        assert gradient is not None and got[name] is not None
        torch.testing.assert_close(got[name], gradient, rtol=0.02, atol=0.02 * float(gradient.abs().max()))
