"""Attention's kernel is named, a slower one than the device has is said, and a wrong one does not run."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqtile
from refusals import refused
from seqtile.ops.attention import backends
from seqtile.ops.attention.backends import (
    FLEX,
    backend_of,
    refuse_wrong,
    slower_than_possible,
    without_wrong_kernel,
)
from seqtile.ops.attention.kernel_calls import names_of_kernels
from zoo import causal_lm, tokens

CUDNN = "aten::_scaled_dot_product_cudnn_attention"
FLASH = "aten::_scaled_dot_product_flash_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
FLASH2, FLASH3 = "flash_attn::_flash_attn_forward", "flash_attn_3::_flash_attn_forward"
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
B200, RTX_5090 = (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("ran", "capability", "flash3", "faster"),
    [
        ({CUDNN}, HOPPER, False, False), ({CUDNN}, HOPPER, True, True), ({FLASH3}, HOPPER, True, False),
        ({FLASH}, HOPPER, False, True), ({FLASH2}, HOPPER, False, True), ({EFFICIENT, CUDNN}, HOPPER, False, True),
        (set(), HOPPER, False, True), ({FLASH}, AMPERE, False, False), ({EFFICIENT}, AMPERE, False, True),
        ({"another::kernel_flash_attn"}, AMPERE, False, False), ({EFFICIENT}, TURING, False, False),
        ({FLASH}, None, False, False), ({CUDNN}, B200, True, False), ({FLASH}, B200, False, True),
        ({FLASH}, RTX_5090, True, False), ({EFFICIENT}, RTX_5090, False, True),
    ],
)  # fmt: skip
def test_a_slower_kernel_than_the_device_has_is_said(
    ran: set[str], capability: Any, flash3: bool, faster: bool
) -> None:
    said = slower_than_possible(ran, capability, flash3=flash3)
    assert bool(said) == faster
    if faster:
        assert said.startswith(f"attention ran on {', '.join(sorted(map(backend_of, ran))) or 'plain products'}, but")
        assert ("cuDNN" in said) == (capability in (HOPPER, B200)) and "attn_implementation=" in said
        assert ("FlashAttention-3" in said) == (capability == HOPPER)
        assert ("'flash_attention_2'" in said) == (capability == AMPERE), "the package is not for newer ones"


def test_the_kernel_that_ran_is_named() -> None:
    query = torch.randn(1, 2, 8, 4)
    with names_of_kernels() as names:
        F.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert {backend_of(name) for name in names} == {"FlashAttention of PyTorch's CPU"}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("sdpa", {}), ("sdpa", {"heads": 1}), ("sdpa", {"checkpoint": "attention-saved"}), ("eager", {}),
     ("eager", {"heads": 1}), ("sdpa", {"checkpoint": "layer"}), ("eager", {"offload": True})],
)  # fmt: skip
def test_every_report_names_it_once_a_step_has_run(kind: str, settings: dict[str, Any]) -> None:
    sentence = "attention ran on " + ("plain products" if kind == "eager" else "FlashAttention of PyTorch's CPU")
    model, ids = causal_lm("llama", use_cache=False, attn_implementation=kind).train(), tokens(2, 12)
    report = seqtile.apply(model, tile=8, **settings)
    with torch.no_grad():
        model(input_ids=ids)
    assert not any(note.startswith("attention ran on") for note in report.notes)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        assert [note for note in report.notes if note.startswith("attention ran on")] == [sentence]


def test_ligers_rotary_is_recommended_where_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_lm("mixtral")  # whose experts are tiled, and no layer with them
    report, by_our_kernel = seqtile.apply(model, tile=8), seqtile.apply(causal_lm("llama"), tile=8)
    advice = "Liger has a kernel for many models"
    assert not any(advice in note for note in report.notes), "on the CPU"
    monkeypatch.setattr(backends, "_has_capability", lambda device: True)
    assert not any(advice in note for note in by_our_kernel.notes)
    assert sum(advice in note and "'rope': True" in note for note in report.notes) == 1

    def liger_rotary_pos_emb(q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return q, k

    liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", liger_rotary_pos_emb)
    assert not any(advice in note for note in report.notes)


def test_a_kernel_that_is_compiled_of_functions_has_a_name() -> None:
    assert backend_of(FLEX) == "FlexAttention"
    assert not slower_than_possible({FLEX}, HOPPER, flash3=True)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands for a device whose kernel is wrong beyond eight tokens."""
    monkeypatch.setattr(backends, "MASKED_TOKENS", 8)
    monkeypatch.setattr(backends, "_is_faulty", lambda device: True)


def test_the_wrong_kernel_is_refused(faulty: None) -> None:
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    long, short = torch.empty(1, 1, 9, 4, device="meta"), torch.empty(1, 1, 8, 4, device="meta")
    mask = torch.empty(1, 1, 9, 9, device="meta")
    refuse_wrong(efficient, (short, short, short, mask[..., :8, :8]))
    refuse_wrong(efficient, (long, long, long, None))
    refuse_wrong(torch.ops.aten._scaled_dot_product_cudnn_attention.default, (long, long, long, mask))
    with refused("attention.kernel-wrong-with-mask", "got 9 "):
        refuse_wrong(efficient, (long, long, long, mask))


def test_no_kernel_is_left(faulty: None) -> None:
    query, mask = torch.randn(1, 2, 9, 4), torch.zeros(1, 1, 9, 9)

    def attention(query: Tensor, mask: Tensor, dropout: float = 0.0) -> Tensor:
        return F.scaled_dot_product_attention(query, query, query, attn_mask=mask, dropout_p=dropout)

    torch.testing.assert_close(without_wrong_kernel(attention, query, mask), attention(query, mask))
    with refused("attention.kernel-wrong-with-mask", "got 9 "):
        without_wrong_kernel(attention, query, mask, dropout=0.5)  # the CPU's kernel takes no dropout
    with pytest.raises(RuntimeError, match="another"):
        without_wrong_kernel(lambda: (_ for _ in ()).throw(RuntimeError("another")))


@pytest.mark.parametrize(
    ("settings", "checkpointed"),
    [({"blocks": "none", "checkpoint": "layer"}, True), ({"tile": 4}, True), ({"tile": 4}, False)],
    ids=["our checkpoint", "tiled layers, their checkpoint", "tiled layers"],
)
@pytest.mark.parametrize("length", [8, 9])
def test_masked_layers_run_without_it_in_forward_and_recompute(
    settings: dict[str, Any], checkpointed: bool, length: int, faulty: None
) -> None:
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0

    def step(model: nn.Module) -> list[Tensor]:
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = step(causal_lm("llama", use_cache=False, attn_implementation="sdpa"))
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    seqtile.apply(model, **settings)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    allowed: list[bool] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda *_: allowed.append(torch.backends.cuda.mem_efficient_sdp_enabled())
    )
    torch.testing.assert_close(step(model), expected)
    assert allowed == [length == 8] * (2 if checkpointed else 1)
    assert torch.backends.cuda.mem_efficient_sdp_enabled()


def test_what_a_compiled_layer_leaves_out_is_said() -> None:
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    report = seqtile.apply(model, blocks="none", heads=1)
    ids = tokens(1, 8)
    model(input_ids=ids)
    assert not any("torch.compile" in note for note in report.notes)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    model(input_ids=ids)
    torch.compiler.reset()
    assert any(note.startswith("heads is ignored under torch.compile") for note in report.notes)


@pytest.mark.parametrize("settings", [{}, {"blocks": "mlp"}, {"heads": 1}], ids=["norm in the tile", "mlp", "heads"])
def test_looking_at_the_first_call_leaves_checkpointed_layers_compiled(settings: dict[str, Any]) -> None:
    """Counted: the products that the compiled graphs hold, which run at every step."""
    products: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            parts = [one for one in graph.modules() if isinstance(one, torch.fx.GraphModule)]
            products.append(sum("linear" in str(node.target) for one in parts for node in one.graph.nodes))
            return graph(*args)

        return run

    ids = tokens(1, 12)
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa")
    report = seqtile.apply(model, tile=8, **settings)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        layer.compile(backend=backend)
    steps = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for _ in range(2):
            products.clear()
            model(input_ids=ids, labels=ids).loss.backward()
            steps.append(sum(products))
    assert steps[0] == steps[1] >= 2 * 4, "attention's four in each layer"
    assert any(note.startswith("under torch.compile, tiled blocks") for note in report.notes)
    assert any(note.startswith("under torch.compile, norms") for note in report.notes) == ("blocks" not in settings)
    assert any(note.startswith("heads is ignored") for note in report.notes) == ("heads" in settings)
