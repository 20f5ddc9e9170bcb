"""A training step on the device, placed there as users place it: no default device hides a tensor that stays behind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import second_device
import seqtile
from numerics._errors import assert_all_no_worse, in_float64
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.ops.rng import RandomState

pytestmark = pytest.mark.device

TOKENS = 40


def model(**config: Any) -> nn.Module:
    """On the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=20, max_position_embeddings=64, **config,
        )
    ).train()  # fmt: skip


def placed(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy on the device."""
    module = copy.deepcopy(module)
    return second_device.moved(module) if device.type == second_device.NAME else module.to(device)


def ids() -> Tensor:
    return torch.randint(0, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def step(module: nn.Module, tokens: Tensor) -> dict[str, Tensor | None]:
    """Loss and gradients of one step, on the CPU."""
    loss = module(input_ids=tokens, labels=tokens).loss
    loss.backward()
    gradients = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().cpu(), **gradients}


def trains(device: torch.device, operator: str | None = None, dtype: torch.dtype | None = None, **settings: Any) -> Any:
    """One tiled step on the device, as near to the truth in float64 as the untiled one there; returns the model."""
    here = model() if dtype is None else model().to(dtype)
    untiled, tiled = placed(here, device), placed(here, device)
    report = seqtile.apply(tiled, **settings)
    assert operator is None or {block.path for block in report.blocks} == {operator}, report
    tokens = ids().to(device)
    truth = step(in_float64(here), ids())
    assert_all_no_worse(step(tiled, tokens), step(untiled, tokens), truth)
    assert all(p.grad.device.type == device.type for p in tiled.parameters())
    return tiled


@pytest.mark.parametrize("keep", [0.0, 1.0])
@pytest.mark.parametrize("operator", ["generic", "fused"])
def test_both_operators(operator: str, keep: float, device: torch.device) -> None:
    trains(device, operator, tile=8, path=operator, keep=keep if operator == "fused" else 0.0)


@pytest.mark.parametrize("operator", ["generic", "fused"])
def test_both_operators_in_bf16(operator: str, device: torch.device) -> None:
    trains(device, operator, torch.bfloat16, tile=8, path=operator)


@pytest.mark.parametrize("rule", [7, "shards:3", "arctic", "memory:200KiB"])
def test_every_rule_for_tiles(rule: int | str, device: torch.device) -> None:
    trains(device, tile=rule)


def test_tiles_are_as_large_as_the_kind_of_device_wants_them(device: torch.device) -> None:
    here, there = str(seqtile.apply(model())), str(seqtile.apply(placed(model(), device)))
    assert (here == there) == (device.type == "cpu") and "1,024 tokens" in here


def test_the_tiled_loss(device: torch.device) -> None:
    trains(device, tile=8, loss="tiled", loss_tile=16)


def test_scores_of_tokens(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (50, 97))
    targets = torch.randint(0, 97, (50,), generator=generator)

    def scored(tiled: bool, where: torch.device, dtype: torch.dtype) -> dict[str, Tensor | None]:
        x, w = (placed(nn.ParameterList([tensor.to(dtype)]), where)[0] for tensor in (hidden, weight))
        labels = targets.to(where)
        if tiled:
            scores = seqtile.token_logprobs(x, w, labels, tile=16, entropy=True)
            log_probs, entropy = scores.log_probs, scores.entropy
            loss = seqtile.linear_cross_entropy(x, w, labels, tile=16)
        else:
            all_log_probs = F.linear(x, w).log_softmax(-1)
            log_probs = all_log_probs.gather(-1, labels[:, None])[:, 0]
            entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
            loss = F.cross_entropy(F.linear(x, w), labels)
        (log_probs.sum() + entropy.sum() + loss).backward()
        results = {"log_probs": log_probs, "entropy": entropy, "loss": loss, "x": x.grad, "w": w.grad}
        return {name: value.detach().cpu() for name, value in results.items()}

    truth = scored(False, torch.device("cpu"), torch.float64)
    assert_all_no_worse(scored(True, device, torch.float32), scored(False, device, torch.float32), truth)


@pytest.mark.parametrize("restores_generator", [True, False])
@pytest.mark.parametrize("operator", ["generic", "fused"])
def test_dropout_draws_the_forwards_masks_again(
    operator: str, restores_generator: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the device's own generator; also where PyTorch's checkpoint does not restore it, as on Apple's devices."""
    from peft import LoraConfig, get_peft_model

    if not restores_generator:
        if device.type != second_device.NAME:
            pytest.skip("only the made-up device can be made to forget its generator")
        monkeypatch.setattr(second_device.Module, "_initialized", False)
    adapted = get_peft_model(model(), LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.02, generator=generator)
    tiled = placed(adapted, device)
    report = seqtile.apply(tiled, tile=8, path=operator)
    assert {block.path for block in report.blocks} == {operator}, report
    before = torch.get_rng_state()
    tokens = ids().to(device)
    verdict = seqtile.verify(tiled, {"input_ids": tokens, "labels": tokens}, reference=None)
    assert verdict.ok and verdict.cut and verdict.with_dropout, verdict
    assert device.type == "cpu" or torch.equal(before, torch.get_rng_state()), "numbers were drawn on the CPU"


def test_random_numbers_are_drawn_again(device: torch.device) -> None:
    state = RandomState(device)
    first = torch.rand(5, device=device)
    after = torch.rand(5, device=device)
    with state.replayed():
        assert torch.equal(torch.rand(5, device=device).cpu(), first.cpu())
    assert not torch.equal(torch.rand(5, device=device).cpu(), after.cpu())


@pytest.mark.parametrize("offload", [False, True])
def test_attention_saved(offload: bool, device: torch.device) -> None:
    """In bf16, which every device has an attention kernel for whose output can be kept."""
    dtype = torch.float32 if device.type == second_device.NAME else torch.bfloat16
    tiled = trains(device, dtype=dtype, tile=8, checkpoint="attention-saved", offload=offload)
    (checkpointing,) = installed_checkpointing(tiled)
    assert checkpointing.attention.saved == 2 and (checkpointing.host is not None) == offload
