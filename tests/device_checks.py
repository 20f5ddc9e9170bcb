"""What runs on the second device type: started in a process of its own by ``test_second_device``."""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import second_device
import seqtile
from seqtile.activation_checkpointing.policies import standing_checkpointing
from seqtile.models.discover import live_weights
from seqtile.ops.rng import RandomState

TOKENS = 40


def model(**config: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, **config,
        )
    ).train()  # fmt: skip


def ids() -> Tensor:
    return torch.randint(0, 97, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def step(one: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Loss and gradients of one step, on the CPU."""
    loss = one(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = {name: p.grad.cpu() for name, p in one.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().cpu(), **found}


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}")


def trains(operator: str | None = None, **settings: Any) -> nn.Module:
    """One tiled step on the device: the loss and gradients of the CPU, untiled."""
    here = model()
    there = second_device.moved(copy.deepcopy(here))
    report = seqtile.apply(there, **settings)
    assert operator is None or {block.path for block in report.blocks} == {operator}, report
    same(step(there, ids().to(second_device.NAME)), step(here, ids()))
    assert all(p.grad.device.type == second_device.NAME for p in there.parameters())
    return there


def trains_in_bf16(path: str) -> None:
    """As near to the truth as the untiled model on the device."""
    here = model().bfloat16()
    untiled, tiled = (second_device.moved(copy.deepcopy(here)) for _ in range(2))
    report = seqtile.apply(tiled, tile=8, path=path)
    assert {block.path for block in report.blocks} == {path}, report
    truth = step(here.float(), ids())
    twin, ours = (step(one, ids().to(second_device.NAME)) for one in (untiled, tiled))
    for name, value in truth.items():
        allowed = 2 * (twin[name].float() - value).norm() + 1e-5 * value.norm()
        assert (ours[name].float() - value).norm() <= allowed, name


def tile_rules() -> None:
    for rule in (7, "shards:3", "arctic", "memory:200KiB"):
        trains(tile=rule)
    # The device is no CPU, where matrix products are at full speed with fewer tokens.
    for where, words in (("cpu", "1,024 tokens"), (second_device.NAME, "8,192 tokens")):
        one = model() if where == "cpu" else second_device.moved(model())
        assert words in str(seqtile.apply(one)).replace("16,384", "8,192"), seqtile.apply(one)


def scores() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (50, 97))
    targets = torch.randint(0, 97, (50,), generator=generator)
    found = []
    for move in (lambda t: t.clone(), lambda t: t.to(second_device.NAME)):
        x, w = (move(t).requires_grad_() for t in (hidden, weight))
        got = seqtile.token_logprobs(x, w, move(targets), tile=16, entropy=True)
        (got.log_probs.sum() + got.entropy.sum()).backward()
        loss = seqtile.linear_cross_entropy(x, w, move(targets), tile=16)
        loss.backward()
        results = {"log_probs": got.log_probs, "entropy": got.entropy, "loss": loss, "x": x.grad, "w": w.grad}
        found.append({name: value.detach().cpu() for name, value in results.items()})
    same(found[1], found[0])


def dropout(path: str) -> None:
    """Recompute and forward draw the same masks, from the device's own generator."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model(), LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear"))
    there = second_device.moved(adapted)
    for name, p in there.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p.held, std=0.02, generator=torch.Generator().manual_seed(3))
    report = seqtile.apply(there, tile=8, path=path)
    assert {block.path for block in report.blocks} == {path}, report
    before = torch.get_rng_state()
    tokens = ids().to(second_device.NAME)
    verdict = seqtile.verify(there, {"input_ids": tokens, "labels": tokens}, reference=None)
    assert verdict.ok and verdict.cut and verdict.with_dropout, verdict
    assert torch.equal(before, torch.get_rng_state()), "numbers were drawn on the CPU"


def random_state() -> None:
    device = torch.device(second_device.NAME)
    state = RandomState(device)
    first = torch.rand(5, device=device)
    after = torch.rand(5, device=device)
    with state.replayed():
        assert torch.equal(torch.rand(5, device=device).cpu(), first.cpu())
    assert not torch.equal(torch.rand(5, device=device).cpu(), after.cpu())


def attention_saved(offload: bool) -> None:
    there = trains(tile=8, checkpoint="attention-saved", offload=offload)
    (one,) = standing_checkpointing(there)
    assert one.attention.saved == 2 and (one.host is not None) == offload, one.attention.saved


def dropout_unknown_to_the_checkpoint() -> None:
    """As on Apple's devices: PyTorch's checkpoint does not restore the generator."""
    second_device.Module._initialized = False
    try:
        dropout("generic")
    finally:
        second_device.Module._initialized = True


CHECKS: dict[str, Callable[[], Any]] = {
    "generic operator": lambda: trains("generic", tile=8, path="generic"),
    "fused operator": lambda: trains("fused", tile=8, path="fused"),
    "fused operator, gate and up kept": lambda: trains("fused", tile=8, keep=1.0),
    "generic operator in bf16": lambda: trains_in_bf16("generic"),
    "fused operator in bf16": lambda: trains_in_bf16("fused"),
    "tile rules": tile_rules,
    "tiled loss": lambda: trains(tile=8, loss="tiled", loss_tile=16),
    "token scores": scores,
    "random state": random_state,
    "dropout, generic operator": lambda: dropout("generic"),
    "dropout, fused operator": lambda: dropout("fused"),
    "dropout where PyTorch's checkpoint keeps no state": dropout_unknown_to_the_checkpoint,
    "attention saved": lambda: attention_saved(offload=False),
    "attention saved, offload to the host": lambda: attention_saved(offload=True),
}


def main(result: Path) -> None:
    warnings.simplefilter("ignore")
    second_device.use()
    # Plain to seqtile, as an accelerator's tensors are.
    live_weights.PLAIN = (*live_weights.PLAIN, second_device.OnDevice)
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
            found[name] = ""
        except Exception:  # noqa: BLE001 - the test shows it
            found[name] = traceback.format_exc()
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
