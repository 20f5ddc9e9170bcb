"""What ``seqtile doctor`` runs on the machine at hand: a step of a tiny model per technique, beside the untiled one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import seqtile
from seqtile.activation_checkpointing.policies import standing_checkpointing
from seqtile.verification.judge import difference

BATCH, TOKENS, LAYERS = 2, 192, 2
CHECKS: dict[str, dict[str, Any]] = {
    "tiled MLP": {"tile": 64},
    "head-wise attention": {"blocks": "none", "heads": 1},
    "offload": {"blocks": "none", "offload": True},
    "compiled block": {"tile": 64},
}
"""Arguments of :func:`seqtile.apply` for each technique."""


@dataclass(frozen=True)
class TechniqueCheck:
    """What came of one technique.

    Attributes:
        name: one of :data:`CHECKS`.
        problem: what is wrong, or "".
        effect: what it did, in words.
    """

    name: str
    problem: str
    effect: str = ""

    def __str__(self) -> str:
        return self.problem or f"right: {self.effect}, gradients as exact as untiled"


def checks(device: torch.device) -> Iterator[TechniqueCheck]:
    """Run every technique on ``device``: in bf16, and in fp32 on a CPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (BATCH, TOKENS)).to(device)
    with torch.device(device):
        plain = _tiny_llama().to(dtype)
    expected = _step(copy.deepcopy(plain), ids)[0]
    truth = _step(copy.deepcopy(plain).to(torch.float64 if dtype == torch.float32 else torch.float32), ids)[0]
    for name, settings in CHECKS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, and of transformers on its own names
            try:
                yield _check(name, settings, copy.deepcopy(plain), ids, expected, truth)
            except Exception as error:  # noqa: BLE001 - whatever a machine lacks, the other checks still run
                first_line = next(iter(str(error).strip().splitlines()), "")
                yield TechniqueCheck(name, f"failed: {type(error).__name__}: {first_line[:200]}")


def _tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=TOKENS, use_cache=False,
        )
    ).train()  # fmt: skip


def _check(
    name: str, settings: dict[str, Any], model: Any, ids: Tensor, expected: dict[str, Tensor], truth: dict[str, Tensor]
) -> TechniqueCheck:
    report = seqtile.apply(model, **settings)
    if name == "compiled block":
        model.model.layers[0].mlp.compile()
    gradients, parked = _step(model, ids)
    effect = {
        "tiled MLP": f"{report.tiled} MLPs in tiles of 64 tokens" if report.tiled == LAYERS else "",
        "head-wise attention": "a pass per head" if report.heads else "",
        "offload": f"{parked / 1024:,.0f} KiB on the host" if parked else "",
        "compiled block": "an MLP in tiles, compiled" if report.tiled == LAYERS else "",
    }[name]
    if not effect:
        return TechniqueCheck(name, f"wrong: it did nothing ({report})")
    for weight, untiled in expected.items():
        compared = difference(weight, untiled, gradients.get(weight), truth[weight], untiled.dtype)
        own, off = compared.untiled_error, compared.tiled_error
        if compared.problem or own is None or off is None or off > 2 * own + 1e-5:
            wrong = compared.problem or f"is off by {off:.1e}, untiled by {own:.1e}"
            return TechniqueCheck(name, f"wrong: the gradient of {weight} {wrong}")
    return TechniqueCheck(name, "", effect)


def _step(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], int]:
    """The gradients by name, without the compiler's prefix, and the bytes on the host before the backward."""
    loss = model(input_ids=ids, labels=ids).loss
    hosts = [checkpointing.host for checkpointing in standing_checkpointing(model)]
    parked = sum(host.parked_bytes for host in hosts if host is not None)
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, parked
