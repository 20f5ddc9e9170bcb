"""``seqtile.fit`` of any model ends in a choice or in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

import seqtile
from refusals import refused
from seqtile import UserError
from seqtile._errors import RunError
from seqtile.cli import main
from seqtile.fitting import describe, find_adapters
from seqtile.options import TilingOptions
from seqtile.planner.memory_plan import Planner
from tiny_models import tiny_config
from zoo import causal_lm, vision_language_model

CAUSAL = sorted(name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING)
FAST = ("blt", "bart", "git", "gpt_neo", "mpt", "prophetnet", "qwen4_exp_text")
"""Models with layers of several stacks, with a loss in their own code, or that a step on shapes does not run."""


def on_meta(architecture: str) -> nn.Module:
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(tiny_config(architecture)).train()
    except Exception as error:  # noqa: BLE001 - whatever transformers raises: there is no model to fit
        pytest.skip(f"transformers {transformers.__version__} cannot build it: {type(error).__name__}")


@pytest.mark.filterwarnings("ignore")  # of models' own code
@pytest.mark.parametrize(
    "architecture", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CAUSAL]
)
def test_every_causal_model_ends_in_a_choice_or_one_sentence(architecture: str) -> None:
    model = on_meta(architecture)
    try:
        report = seqtile.fit(model, max_length=64, device="80GiB")
    except (UserError, RunError) as error:
        assert "\n" not in str(error)
    else:
        assert report.settings is not None and report.why


@pytest.mark.filterwarnings("ignore")  # of models' own code
@pytest.mark.parametrize("architecture", [*FAST, "inkling_text", "longcat_flash", "musicgen", "qwen3_next"])
def test_the_command_plans_or_refuses_in_one_sentence_too(
    architecture: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        tiny_config(architecture).save_pretrained(tmp_path)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises: there is no model to plan
        pytest.skip(f"transformers {transformers.__version__} cannot write it: {type(error).__name__}")
    code = main(["plan", "--model", str(tmp_path), "--device", "2GiB"])
    shown = capfd.readouterr()
    sentences = [line for line in shown.err.splitlines() if line.startswith("seqtile: ")]
    if code == 0:
        assert "Longest sequence that fits" in shown.out and not sentences
    else:
        assert code == 2 and not shown.out and len(sentences) == 1 and shown.err.endswith(f"{sentences[0]}\n")
    assert "Traceback" not in shown.err


LFM2_LAYERS = ["conv", "conv", "full_attention", "conv"] * 8
"""As of the released models: the default config has no convolutions."""

REAL: dict[str, dict[str, Any]] = {
    name: {"layer_types": LFM2_LAYERS} if name == "lfm2" else {}
    for name in (
        "deepseek_v3", "gemma3_text", "glm4_moe", "gpt_oss", "jamba", "lfm2", "llama", "phi3", "qwen3",
        "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
    )
}  # fmt: skip
"""Default configs, which have the widths and the depth of released models."""


@pytest.mark.filterwarnings("ignore")  # of models' own code
@pytest.mark.parametrize(
    "architecture", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in REAL]
)
def test_a_real_size_is_fitted_and_planned(
    architecture: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG_MAPPING[architecture](**REAL[architecture])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    layers, bytes_to_train = (
        config.num_hidden_layers,
        8 * model.num_parameters(),
    )  # bf16: weights, gradients, Adam's two
    report = seqtile.fit(model, max_length=2048, device=f"{2 * bytes_to_train >> 30}GiB")
    assert report.tiled >= layers and report.done["loss"]
    config.dtype, config.architectures = torch.bfloat16, [type(model).__name__]
    config.save_pretrained(tmp_path)
    given = ("--device", "h200", "--gpus", "256", "--nodes", "32", "--engine", "fsdp2", "--max-length", "2048")
    assert main(["plan", "--model", str(tmp_path), *given]) == 0, capfd.readouterr().err


def classifier(kind: str) -> nn.Module:
    auto: Any = getattr(transformers, f"AutoModelFor{kind}Classification")
    model: nn.Module = auto.from_config(causal_lm("llama").config)
    return model


@pytest.mark.parametrize(
    ("model", "refusal"),
    [
        (lambda: classifier("Token"), ("fit.model-unsupported", "LlamaForTokenClassification")),
        (lambda: vision_language_model(architecture="qwen2_5_vl"), ("plan.model-not-causal", "images=")),
    ],
)
def test_another_model_is_refused_by_what_it_is(model: Any, refusal: tuple[str, ...]) -> None:
    """Not by a setting that nobody gave, or by a flag of another command alone."""
    with refused(*refusal) as raised:
        seqtile.fit(model(), max_length=64, device="16GiB")
    assert "drop loss" not in str(raised.value)


@pytest.mark.parametrize(
    "build",
    [lambda: classifier("Sequence"), lambda: transformers.AutoModel.from_config(causal_lm("llama").config)],
    ids=["reward", "embedding"],
)
def test_a_model_without_a_vocabulary_is_fitted(build: Any) -> None:
    report = seqtile.fit(build(), max_length=64, device="16GiB")
    assert report.tiled == 2 and report.settings is not None and "loss" not in report.done


def test_a_loss_of_none_stays() -> None:
    report = seqtile.fit(causal_lm("llama"), max_length=64, device="16GiB", loss=None)
    assert "loss" not in report.done and "loss_tile" not in dict(report.settings)
    assert "loss" in seqtile.fit(causal_lm("llama"), max_length=64, device="16GiB").done


def test_a_device_is_a_name_a_size_or_torchs() -> None:
    with refused("device.malformed", "device=24"):
        seqtile.fit(causal_lm("llama"), max_length=64, device=24)  # type: ignore[arg-type]


def test_weights_on_the_meta_device_cannot_wait_on_the_host() -> None:
    with torch.device("meta"):
        model = causal_lm("llama")
    with refused("offload.weights-no-layers", "meta device"):
        seqtile.apply(model.requires_grad_(False), offload="weights", checkpoint="layer")


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # PEFT's, of its own patterns
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], []])
def test_adapters_on_experts_are_planned_as_peft_adds_them(targets: Any) -> None:
    """Also without any on a linear layer; ranks of fused experts are PEFT's own."""
    peft = pytest.importorskip("peft", reason="peft is not installed: it comes with seqtile[train]")
    parameters = None if targets == "all-linear" else ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, target_parameters=parameters, task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal_lm("qwen3_moe"), config)
    adapters = find_adapters(model)
    assert adapters is not None and adapters.r == 4
    request, _ = describe(model, TilingOptions(), device="16GiB")
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert Planner(request, 64).counts.trained == trained
    assert seqtile.fit(model, max_length=64, device="16GiB").tiled
