"""Checks of ``seqtile doctor``: a step of a tiny model per feature, compared with the untiled one."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import seqtile
from seqtile.blocks.instance import installed_forwards, refusals
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.devices import package_version
from seqtile.verification.judge import difference

BATCH, TOKENS, LAYERS = 2, 192, 2


@dataclass(frozen=True)
class Feature:
    """One check: the library involved, arguments of :func:`seqtile.apply`, and whether the model has a state."""

    library: str
    options: dict[str, Any]
    with_state: bool = False


FEATURES: dict[str, Feature] = {
    "tiled MLP": Feature("torch", {"tile": 64}),
    "offload": Feature("torch", {"blocks": "none", "offload": True}),
    "compiled block": Feature("torch", {"tile": 64, "blocks": "mlp"}),
    "head-wise attention": Feature("transformers", {"blocks": "none", "heads": 1}),
    "tiled loss": Feature("transformers", {"blocks": "none", "loss": "tiled"}),
    "layers with a state": Feature("transformers", {"blocks": "none", "state": 64}, with_state=True),
    "LoRA adapters": Feature("peft", {"tile": 64}),
    "prepared model": Feature("accelerate", {"tile": 64}),
}


@dataclass(frozen=True)
class FeatureResult:
    """The result of one check.

    Attributes:
        name: one of :data:`FEATURES`.
        problem: what is wrong, or "".
        effect: description of what it did.
    """

    name: str
    problem: str
    effect: str = ""

    def __str__(self) -> str:
        return self.problem or f"ok: {self.effect}, gradients as accurate as untiled"


def run_features(device: torch.device) -> Iterator[FeatureResult]:
    """Run every feature whose library is installed on ``device``: in bf16, and in fp32 on a CPU."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    ids = torch.randint(0, 128, (BATCH, TOKENS)).to(device)
    with torch.device(device):
        plain_models = {with_state: _tiny_model(with_state).to(dtype) for with_state in (False, True)}
    for name, feature in FEATURES.items():
        version = package_version(feature.library)
        # Layers of transformers 5.0 pass their state differently, which seqtile does not tile.
        if version is None or (feature.with_state and version.startswith("5.0.")):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, and of transformers on its own names
            model = copy.deepcopy(plain_models[feature.with_state])
            try:
                yield _run_feature(name, feature.options, _prepared(name, model), ids)
            except Exception as error:  # noqa: BLE001 - one failing feature must not stop the other checks
                first_line = next(iter(str(error).strip().splitlines()), "")
                yield FeatureResult(name, f"failed: {type(error).__name__}: {first_line[:200]}")


def _tiny_model(with_state: bool) -> Any:
    """A Llama, or two short convolutions of LFM2, the cheapest layers with a state."""
    from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    if with_state:
        return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv"] * LAYERS)).train()
    return LlamaForCausalLM(LlamaConfig(**sizes)).train()


def _prepared(name: str, model: Any) -> Any:
    """The model as the feature's library passes it to a trainer."""
    if name == "LoRA adapters":
        from peft import LoraConfig, inject_adapter_in_model

        targets = ["gate_proj", "up_proj", "down_proj"]
        inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)
    elif name == "prepared model":
        from accelerate import Accelerator

        model = Accelerator(cpu=next(model.parameters()).device.type == "cpu").prepare_model(model)
    return model


def _run_feature(name: str, options: dict[str, Any], model: Any, ids: Tensor) -> FeatureResult:
    wide_dtype = torch.float64 if model.dtype == torch.float32 else torch.float32
    expected = _step_gradients(copy.deepcopy(model), ids)[0]
    truth = _step_gradients(copy.deepcopy(model).to(wide_dtype), ids)[0]
    report = seqtile.apply(model, **options)
    if name == "compiled block":
        model.model.layers[0].mlp.compile(backend="aot_eager")  # the graph; its kernels take ten seconds to build
    gradients, bytes_on_host = _step_gradients(model, ids)
    effect = {
        "offload": f"{bytes_on_host / 1024:,.0f} KiB on the host" if bytes_on_host else "",
        "compiled block": "a tiled MLP inside torch.compile"
        if any(forward.compiled for forward in installed_forwards(model))
        else "",
        "head-wise attention": "a pass per head" if report.done.get("heads") else "",
        "tiled loss": "a loss in tiles" if report.done.get("loss") else "",
        "layers with a state": f"{LAYERS} layers in tiles of 64 tokens"
        if report.done.get("state") and not (report.left or refusals(model))
        else "",
    }.get(name, f"{report.tiled} MLPs in tiles of 64 tokens" if report.tiled == LAYERS else "")
    if not effect:
        return FeatureResult(name, f"FAILED: had no effect ({report})")
    for weight, untiled in expected.items():
        compared = difference(weight, untiled, gradients.get(weight), truth[weight], untiled.dtype)
        untiled_error, tiled_error = compared.untiled_error, compared.tiled_error
        if compared.problem or untiled_error is None or tiled_error is None or tiled_error > 2 * untiled_error + 1e-5:
            problem = compared.problem or f"has error {tiled_error:.1e}, untiled {untiled_error:.1e}"
            return FeatureResult(name, f"FAILED: the gradient of {weight} {problem}")
    return FeatureResult(name, "", effect)


def _step_gradients(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], int]:
    """The gradients by name, without the compiler's prefix, and the bytes on the host before the backward."""
    loss = model(input_ids=ids, labels=ids).loss
    hosts = [checkpointing.host for checkpointing in installed_checkpointing(model)]
    bytes_on_host = sum(host.parked_bytes for host in hosts if host is not None)
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}, bytes_on_host
