"""Adapters (PEFT) for a model, without the layers in which they would not train or not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import functional_call

from seqtile._compat import drop_expert_targets, refuses_adapter
from seqtile.models.configs import towers_of
from seqtile.recognise.decoder_layers import decoder_layers
from seqtile.recognise.packed_experts import packable_experts, packed_experts

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR = "all-linear"
_MAMBA_2 = "mamba2"
"""The model type for PEFT's check of every Mamba-2 mixer, in any model."""


def lora_config(
    model: nn.Module, *, r: int, alpha: float | None, dropout: float, target_modules: str | Sequence[str],
    packs_experts: bool = False,
    target_parameters: Sequence[tuple[str, int]] = (),
) -> LoraConfig:  # fmt: skip
    """PEFT's configuration of low-rank adapters for ``model``.

    With ``"all-linear"`` two kinds of layers are left out. The fused kernel of Mamba-2 takes the weight of ``out_proj``
    itself and passes the adapter by: PEFT refuses it in five model types, here in every Mamba-2 mixer. A router that
    inherits from ``nn.Linear`` returns scores and choices, to which PEFT cannot add. Layers that are given by name are
    PEFT's to refuse.

    Experts in 4 bits get no adapters, under any name. In a model with two adapted weights per layer PEFT 0.21 reads one
    of them from a cache without its adapter, and its second call fails: it does not take its own parametrization off
    one that was there before (``ParamWrapper._remove_parametrizations``).

    Args:
        model: without adapters; its weights may be on the meta device.
        r: rank.
        alpha: scale; None is twice the rank.
        dropout: dropout on the adapters' inputs.
        target_modules: which layers get one, as PEFT takes them.
        packs_experts: whether the experts will be in 4 bits; if they are already, this makes no difference.
        target_parameters: which parameters get one, as PEFT takes them, and their ranks.
    """
    from peft import LoraConfig

    config = LoraConfig(
        r=r,
        lora_alpha=alpha or 2 * r,  # type: ignore[arg-type]
        lora_dropout=dropout,
        target_modules=target_modules if isinstance(target_modules, str) else list(target_modules),
        target_parameters=[name for name, _ in target_parameters] or None,
        rank_pattern={f".*\\.{name}": rank for name, rank in target_parameters if rank != r},
        task_type="CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None,  # an encoder has no task
    )
    if target_modules == ALL_LINEAR:
        config.exclude_modules = sorted({*_refused_by_peft(model, config), *_not_linear(model)}) or None
    if _has_packed_experts(model, packs_experts):
        drop_expert_targets(config, model)
    return config


def find_unread(model: Any) -> list[str]:
    """Names of modules that text never reaches in a model for pictures or sound."""
    if not towers_of(model.config):
        return []
    read = {model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()}
    used = {weight for module in read for weight in module.parameters()}
    unread: list[str] = []
    for name, module in model.named_modules():
        weights = set(module.parameters())
        if weights and used.isdisjoint(weights) and not any(name.startswith(f"{tower}.") for tower in unread):
            unread.append(name)
    return unread


def leave_out(config: LoraConfig, model: nn.Module, modules: Sequence[str]) -> None:
    """Put no adapters on linear layers inside ``modules``."""
    inside = tuple(f"{module}." for module in modules)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    config.exclude_modules = [*(config.exclude_modules or ()), *(name for name in linear if name.startswith(inside))]


def without_adapters(model: nn.Module, config: LoraConfig | None, packs_experts: bool = False) -> str | None:
    """One sentence on the layers that :func:`lora_config` left out, None where every one got its adapters."""
    if config is None:
        return None
    left_out = []
    if _has_packed_experts(model, packs_experts):
        left_out.append("no adapters on the experts: PEFT cannot add them to 4-bit experts")
    if not config.exclude_modules:
        return "; ".join(left_out) or None
    routers = _not_linear(model)
    reasons = {
        "PEFT rejects them, because Mamba's fused kernel would bypass them": {*config.exclude_modules} - routers,
        "their class inherits from nn.Linear but computes something else": {*config.exclude_modules} & routers,
    }
    left_out += [f"no adapters on {', '.join(sorted(names))}: {why}" for why, names in reasons.items() if names]
    return "; ".join(left_out)


def _has_packed_experts(model: nn.Module, packs_experts: bool) -> bool:
    """Whether ``model`` has experts in 4 bits, or will have some."""
    return bool(packed_experts(model) or (packs_experts and packable_experts(model)))


def _not_linear(model: nn.Module) -> set[str]:
    """Ends of the names of modules that inherit from ``nn.Linear`` and do not map features to features."""
    # Only the model's own classes are run: PEFT supports libraries' quantised layers.
    of_model = {type(module).__module__ for module in model.modules() if hasattr(module, "config")}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    cannot = {
        name for name, module in linear.items()
        if type(module).forward is not nn.Linear.forward and type(module).__module__ in of_model
        and not _maps_features(module)
    }  # fmt: skip
    ends = {name.rpartition(".")[2] for name in linear.keys() - cannot}
    return {name if (end := name.rpartition(".")[2]) in ends else end for name in cannot}


def _maps_features(module: nn.Linear) -> bool:
    """Whether ``[tokens, in_features]`` gives ``[tokens, out_features]``, tried on the meta device."""
    like: dict[str, Any] = {"dtype": module.weight.dtype, "device": "meta"}
    features = torch.empty(3, module.in_features, **like)
    weights = {name: torch.empty_like(weight, device="meta") for name, weight in module.named_parameters()}
    weights["weight"] = torch.empty(module.out_features, module.in_features, **like)  # ZeRO-3 holds none of it here
    try:
        with torch.no_grad():
            output = functional_call(module, weights, features)
    except Exception:  # noqa: BLE001 (a model's own code: any error means that it does not accept such an input)
        return False
    return isinstance(output, torch.Tensor) and output.shape == (3, module.out_features)


def _refused_by_peft(model: nn.Module, config: Any) -> set[str]:
    """Ends of the names of the linear layers that PEFT refuses."""
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    refused = {name for name in names if refuses_adapter(config, model_type, name)}
    for layer in decoder_layers(model):
        for mixer in layer.mixers:
            if mixer.kind != "Mamba-2":
                continue
            for name, child in model.get_submodule(f"{layer.name}.{mixer.name}").named_children():
                if isinstance(child, nn.Linear) and name not in refused and refuses_adapter(config, _MAMBA_2, name):
                    refused.add(f"{mixer.name.rpartition('.')[2]}.{name}")
    return refused
