"""QLoRA of a mixture of experts: what ``seqtile train`` loads in 4 bits, trains and saves, and that the plan agrees."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

import tiny_run
from refusals import refused
from seqtile.fitting import describe
from seqtile.options import TilingOptions
from seqtile.planner.accelerators import Device
from seqtile.planner.memory_plan import Planner
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora
from seqtile.recognise import packed_experts as packing
from seqtile.train.arguments import adapter_config
from seqtile.train.load import load_config, load_model
from seqtile.train.recipe import Recipe, build_recipe
from seqtile.train.run import train

pytest.importorskip("bitsandbytes", "0.50", reason="bitsandbytes is not installed, or cannot train packed experts")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_experts(tmp_path_factory.mktemp("model"))


def save_experts(directory: Path) -> Path:
    """Write a Qwen3-MoE of two layers, no two widths of which are equal."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=tiny_run.save_tokenizer(directory), hidden_size=72, intermediate_size=112, moe_intermediate_size=48,
        num_experts=6, num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=20, max_position_embeddings=tiny_run.POSITIONS, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny_run.text_rows())


def recipe_of(model: Path, **values: Any) -> Recipe:
    given = {"model": str(model), "max_length": tiny_run.LENGTH, "tile": 16, "steps": 4, "learning_rate": 1e-2,
             "report": False, "qlora": True, "dataset": "rows", **values}  # fmt: skip
    return build_recipe(given, {})[0]


class Looks(TrainerCallback):
    """Remembers what the model that trains is made of, and stops after some steps."""

    def __init__(self, last: int = 4) -> None:
        self.last, self.packed, self.trained = last, list[str](), list[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.packed = packing.packed_experts(model)
        self.trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        if state.global_step == self.last:
            control.should_save = control.should_training_stop = True


def test_experts_train_in_four_bits_and_resume(
    model: Path, dataset: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from peft import PeftModel

    looks = Looks()
    values = {"dataset": str(dataset), "dtype": "float32"}
    whole = train(recipe_of(model, **values, output=str(tmp_path / "whole")), callbacks=[looks])
    assert len(looks.packed) == 4 and whole.tiling is not None and whole.tiling.tiled == 2
    assert looks.trained and all("self_attn" in name and "lora_" in name for name in looks.trained)
    assert "no adapters on the experts" in caplog.text
    untiled = train(recipe_of(model, **values, output=str(tmp_path / "untiled"), tiled_mlp=False, tile=None))
    torch.testing.assert_close(dict(whole.losses), dict(untiled.losses))
    parts = recipe_of(model, **values, output=str(tmp_path / "parts"))
    train(parts, callbacks=[Looks(2)])
    resumed = train(parts, resume=True)
    assert resumed.losses == whole.losses and len(whole.losses) == 4
    saved = load_file(whole.output / "adapter_model.safetensors")
    assert saved and all("lora_" in name for name in saved)
    again = load_file(resumed.output / "adapter_model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in saved.items())
    base = transformers.AutoModelForCausalLM.from_pretrained(model)
    assert not PeftModel.from_pretrained(base, whole.output).peft_config["default"].target_parameters


def test_each_weight_is_packed_before_the_next_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqtile.train import four_bit_experts

    read: list[weakref.ref[torch.Tensor]] = []
    quantize = four_bit_experts.quantize_4bit

    def recorded(weight: torch.Tensor, **kwargs: Any) -> Any:
        assert all(earlier() is None for earlier in read)
        read.append(weakref.ref(weight))
        return quantize(weight, **kwargs)

    monkeypatch.setattr(four_bit_experts, "quantize_4bit", recorded)
    load_model(recipe_of(model, dtype="float32"))
    assert len(read) == 4


def bytes_of(model: nn.Module) -> int:
    """Bytes of weights with the scales of packed ones, without the tables of 4- and 8-bit numbers that each has."""
    total = sum(weight.nbytes for weight in model.parameters())
    states = [state for weight in model.parameters() if (state := getattr(weight, "quant_state", None)) is not None]
    states += [module.quant_state for module in model.modules() if type(module).__name__ == "Bnb4bitParametrization"]
    for state in states:
        total += state.absmax.nbytes + state.state2.absmax.nbytes
    return total


@pytest.mark.parametrize("experts", ["packed", "half", "whole"])
def test_plans_count_what_is_loaded(model: Path, experts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if experts == "whole":
        monkeypatch.setattr(packing, "package_version", lambda name: "0.49.2")
    if experts == "half":
        monkeypatch.setattr(packing, "MOST_ELEMENTS", 6 * 72 * 48)
    recipe = recipe_of(model, dtype="float32", lora={"r": 5, "target_modules": ["q_proj", "v_proj"]})
    loaded, _ = load_model(recipe)
    assert len(packing.packed_experts(loaded)) == {"packed": 4, "half": 2, "whole": 0}[experts]
    loaded = get_peft_model(loaded, adapter_config(recipe.lora, loaded))
    device = Device("device", 2**34, None, "test")
    config = load_config(recipe)
    lora = Lora(5, ("q_proj", "v_proj"))
    ahead = Request("tiny", config, device, lora=lora, qlora=True, precision="float32", device_type="cpu")
    live, _ = describe(loaded, TilingOptions(), device="16GiB")
    for request in (ahead, live):
        planner = Planner(request)
        # Scales are counted as if every weight filled its last block of scales.
        assert planner.estimate(64).terms["weights"] == pytest.approx(bytes_of(loaded), rel=0.005)
        assert planner.counts.trained == sum(w.numel() for w in loaded.parameters() if w.requires_grad)
        assert any("not in 4 bits" in note for note in planner.notes()) == (experts != "packed")


def test_weights_that_are_quantized_already_are_refused(model: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(model, tmp_path / "model")
    config = json.loads((copied / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with refused("qlora.already-quantized", "(mxfp4)"):
        load_model(recipe_of(copied))
