"""Packed documents never mix: changing one changes neither another's logits nor its gradients, tiled as untiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
from zoo import FALCON_READS_POSITIONS, assert_same_gradients, causal_lm, tokens

LENGTHS = (6, 9, 5)  # no boundary is a tile's
TILE = 4
SECOND = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
TILED: dict[str, dict[str, Any] | None] = {
    "untiled": None, "fused": {"tile": TILE}, "generic": {"tile": TILE, "path": "generic"},
}  # fmt: skip


def packed() -> dict[str, Tensor]:
    """Three documents side by side, as TRL's collator and a hand-written one say it."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return {
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }


def changed(ids: Tensor, document: slice) -> Tensor:
    other = ids.clone()
    other[:, document] = 3 + (ids[:, document] - 3 + 17) % 61
    return other


def build(architecture: str, attention: str, how: str) -> nn.Module:
    model = causal_lm(architecture, torch.float32, attn_implementation=attention, use_cache=False)
    assert model.config._attn_implementation == attention
    if TILED[how] is not None:
        assert seqtile.apply(model, **TILED[how]).tiled
    return model


def second_documents_loss(model: nn.Module, ids: Tensor, **boundaries: Any) -> Tensor:
    logits = model(input_ids=ids, **boundaries).logits[0, SECOND]
    return nn.functional.cross_entropy(logits[:-1], ids[0, SECOND][1:])


@pytest.mark.parametrize("how", TILED)
@pytest.mark.parametrize(
    ("architecture", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("gemma2", "eager"), ("gemma3_text", "sdpa"), ("gpt2", "sdpa"),
     ("mixtral", "sdpa")],
)  # fmt: skip
def test_a_packed_document_trains_as_if_it_were_alone(architecture: str, attention: str, how: str) -> None:
    ids = tokens(1, sum(LENGTHS))
    model = build(architecture, attention, how)
    losses, found = [], []
    for text in (ids, changed(ids, slice(0, LENGTHS[0])), changed(ids, slice(-LENGTHS[2], None))):
        model.zero_grad()
        loss = second_documents_loss(model, text, **packed())
        loss.backward()
        losses.append(loss.detach())
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for loss, gradients in zip(losses[1:], found[1:], strict=True):
        torch.testing.assert_close(loss, losses[0])
        assert_same_gradients(gradients, found[0])

    alone = build(architecture, attention, "untiled")
    loss = alone(input_ids=ids[:, SECOND], labels=ids[:, SECOND]).loss
    loss.backward()
    torch.testing.assert_close(losses[0], loss.detach())
    assert_same_gradients(found[0], {name: p.grad for name, p in alone.named_parameters() if p.grad is not None})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Transformers' way of compiling the mask, PyTorch's of flex
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")  # as it is meant here
@pytest.mark.parametrize("how", TILED)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_flex_attention_keeps_documents_apart(architecture: str, how: str) -> None:
    """Its logits; PyTorch has no backward of it on the CPU."""
    ids = tokens(1, sum(LENGTHS))
    model = build(architecture, "flex_attention", how)
    torch.compiler.set_stance("force_eager")  # compiling it takes a minute, and decides nothing here
    try:
        with torch.no_grad():
            logits, others = (
                model(input_ids=text, position_ids=packed()["position_ids"]).logits
                for text in (ids, changed(ids, slice(0, LENGTHS[0])))
            )
    finally:
        torch.compiler.set_stance("default")
    torch.testing.assert_close(others[0, SECOND], logits[0, SECOND])
    assert not torch.allclose(others[0, : LENGTHS[0]], logits[0, : LENGTHS[0]])


def test_flash_attention_keeps_documents_apart() -> None:
    if not torch.cuda.is_available():
        pytest.skip("flash_attention_2 and 3 run on CUDA alone; torch finds no CUDA here")
    pytest.importorskip("flash_attn", reason="needs the package flash-attn")
    ids = tokens(1, sum(LENGTHS)).cuda()
    model = build("llama", "flash_attention_2", "fused").to("cuda", torch.bfloat16)
    boundaries = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in packed().items()}
    with torch.no_grad():
        logits, others = (
            model(input_ids=text, **boundaries).logits for text in (ids, changed(ids, slice(0, LENGTHS[0])))
        )
    assert torch.equal(others[0, SECOND], logits[0, SECOND])


@pytest.mark.parametrize(
    ("architecture", "attention", "what"),
    [
        ("opt", "sdpa", {}),
        ("falcon", "sdpa", {}),
        ("gpt_oss", "eager", {}),
        ("llama", "sdpa", {"attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long)}),
        ("llama", "sdpa", {"use_cache": True}),
        ("llama", "sdpa", {"position_ids": None}),
    ],
    ids=["OPT", "Falcon", "gpt-oss", "a mask of ones beside position_ids", "use_cache", "cu_seq_lens alone"],
)
def test_what_mixes_documents_untiled_still_does(architecture: str, attention: str, what: dict[str, Any]) -> None:
    """Transformers' own; docs/multi-gpu.md names these, and `seqtile train` refuses the models among them."""
    if architecture == "falcon" and FALCON_READS_POSITIONS:
        pytest.skip("Falcon keeps documents apart from transformers 5.24 on")
    ids = tokens(1, sum(LENGTHS))
    model = build(architecture, attention, "untiled")
    with torch.no_grad():
        losses = [
            second_documents_loss(model, text, **{**packed(), **what})
            for text in (ids, changed(ids, slice(0, LENGTHS[0])))
        ]
    assert not torch.isclose(*losses), "Transformers keeps these apart now: take it off the page, and the refusal"
