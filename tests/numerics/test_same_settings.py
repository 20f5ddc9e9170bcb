"""What is set between a forward and its backward: the gradients are those of the forward's settings, or none come.

Untiled autograd keeps what a forward computed; a recompute reads adapters, scaling, dropout and modes again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor, nn

import seqtile
from numerics.test_adapter_kinds import adapted, warm
from zoo import assert_same_gradients, causal_lm, exact_dtype, tokens

TARGETS = ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def two_adapters(architecture: str, targets: list[str], dropout: float) -> Any:
    model: Any = adapted(targets, causal_lm(architecture, exact_dtype(architecture)), lora_dropout=dropout)
    model.add_adapter("other", LoraConfig(r=3, lora_alpha=5, target_modules=targets, lora_dropout=dropout))
    for name, weight in model.named_parameters():
        if ".other" in name:
            weight.data = weight.data.to(exact_dtype(architecture))
    warm(model).train()
    model.set_adapter("default")
    return model


def loss_of(model: Any) -> Tensor:
    ids = tokens()
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def scores_of(model: Any) -> Tensor:
    """Log-probabilities under a head with adapters, which is recomputed tile by tile."""
    ids = tokens()
    with seqtile.deferred_logits(model):
        logits = model(input_ids=ids, use_cache=False).logits
        return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).sum()  # type: ignore[no-any-return]


WAYS: dict[str, tuple[str, list[str], dict[str, Any], Callable[[Any], Tensor]]] = {
    "generic": ("llama", TARGETS, {"tile": 5, "path": "generic"}, loss_of),
    "fused": ("llama", TARGETS, {"tile": 5}, loss_of),
    "projections": ("llama", TARGETS, {"tile": 5, "blocks": "mlp+norm+projections"}, loss_of),
    "heads": ("llama", TARGETS, {"blocks": "none", "heads": 1}, loss_of),
    "state": ("qwen3_5_text", ["in_proj_qkv", "out_proj"], {"blocks": "none", "state": 5}, loss_of),
    "chunks": ("llama", TARGETS, {"blocks": "none", "chunk": 5, "segment": 2}, loss_of),
    "head": ("llama", ["lm_head"], {"blocks": "none", "loss": "tiled", "loss_tile": 5}, scores_of),
}


def modules_with(model: nn.Module, name: str) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, name)]


def scaled(model: Any) -> None:
    for layer in modules_with(model, "lora_A"):
        layer.scaling["default"] *= 3


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()
    for name, weight in model.named_parameters():
        weight.requires_grad_(".default" in name)  # else autograd itself refuses


def switched(model: Any) -> None:
    model.set_adapter("other")
    for name, weight in model.named_parameters():
        weight.requires_grad_(".default" in name)


def other_dropout(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.9


def evaluating(model: Any) -> None:
    model.eval()


def reference_without_adapters(model: Any) -> None:
    with model.disable_adapter(), torch.no_grad():
        loss_of(model)


def reference_of_the_other_adapter(model: Any) -> None:
    model.set_adapter("other")
    with torch.no_grad():
        loss_of(model)
    model.set_adapter("default")


def evaluated(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model)
    model.train()


SET = [scaled, disabled, switched, other_dropout, evaluating]
SET_BACK = [reference_without_adapters, reference_of_the_other_adapter, evaluated]


def nothing(model: Any) -> None:
    pass


@cache
def gradients(way: str, dropout: float, change: Callable[[Any], None]) -> dict[str, Tensor | None]:
    architecture, targets, options, forward = WAYS[way]
    model = two_adapters(architecture, targets, dropout)
    seqtile.apply(model, **options)
    torch.manual_seed(3)
    result = forward(model)
    change(model)
    result.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
@pytest.mark.parametrize("change", [*SET, *SET_BACK], ids=lambda change: change.__name__)
@pytest.mark.parametrize("way", WAYS)
def test_settings_between_forward_and_backward(way: str, change: Callable[[Any], None]) -> None:
    if WAYS[way][0] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {WAYS[way][0]}")
    dropout = 0.3 if change in (other_dropout, evaluating) else 0.0
    expected = gradients(way, dropout, nothing)
    try:
        found = gradients(way, dropout, change)
    except RuntimeError as error:
        assert change in SET and "cannot recompute a tile: " in str(error)
    else:
        assert_same_gradients(found, expected)
