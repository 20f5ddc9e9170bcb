"""What a run writes at its end: tried before its first step, and in the dtype of the checkpoint that it was given."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig, TrainerCallback

import tiny_run
from refusals import refused
from seqtile.train.recipe import build_recipe
from seqtile.train.resume import resumed_recipe
from seqtile.train.run import train


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_run.save_model(tmp_path / "model")


class StepsRun(TrainerCallback):
    """Remember which steps were trained."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


def run(model: Path, tmp_path: Path, *, steps: StepsRun | None = None, **values: Any) -> Path:
    """Train two steps; returns the directory of the result."""
    data = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    defaults = dict(max_length=tiny_run.LENGTH, tile=16, steps=2, learning_rate=1e-2, report=False)
    paths = {"model": str(model), "dataset": str(data), "output": str(tmp_path / "out")}
    return train(build_recipe({**defaults, **paths, **values}, {})[0], callbacks=[steps] if steps else []).output


LORA = {"lora": {"r": 2}}
SAVERS: list[tuple[Any, str, dict[str, Any]]] = [
    (transformers.LlamaConfig, "save_pretrained", {}), (GenerationConfig, "save_pretrained", {}),
    (transformers.PreTrainedTokenizerFast, "save_pretrained", {}), (peft.LoraConfig, "save_pretrained", LORA),
    (transformers.PreTrainedTokenizerFast, "save_pretrained", LORA),
    (transformers.trainer_callback.TrainerState, "save_to_json", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "values"), SAVERS, ids=[f"{o.__name__}-{'lora' if v else 'full'}" for o, _, v in SAVERS]
)
def test_what_cannot_be_saved_is_refused_before_the_first_step(
    owner: Any, name: str, values: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("cannot be written")

    monkeypatch.setattr(owner, name, refuse)
    steps = StepsRun()
    with refused("output.model-not-saved", "cannot be written"):
        run(model, tmp_path, steps=steps, **values)
    assert not steps.steps
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {"recipe.yaml", "run.lock"}


@pytest.mark.parametrize("values", [{}, LORA], ids=["full", "lora"])
def test_the_trial_before_the_first_step_writes_no_weights(
    values: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors: list[set[str]] = []

    def look(_: Any, path: str) -> None:
        tensors.append({name for file in Path(path).parent.glob("*.safetensors") for name in load_file(file)})
        Path(path).write_text("{}")

    monkeypatch.setattr(transformers.trainer_callback.TrainerState, "save_to_json", look)
    run(model, tmp_path, **values)
    in_trial, *_, in_result = tensors
    assert not in_trial and in_result


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
@pytest.mark.parametrize(
    "unusable", [{"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"early_stopping": True}, {"min_p": 0.1}]
)
def test_a_generation_config_that_transformers_would_not_write_back(
    unusable: dict[str, Any], lora: dict[str, int] | None, model: Path, tmp_path: Path
) -> None:
    """Values without effect go, so that generation is what it was; the others stay."""
    file = model / "generation_config.json"
    file.write_text(json.dumps({"max_new_tokens": 5, "eos_token_id": [0, 3], **unusable}))
    output = run(model, tmp_path, lora=lora)
    if lora is None:
        saved = GenerationConfig.from_pretrained(output)
        saved.validate(strict=True)
        assert saved.max_new_tokens == 5 and set(saved.eos_token_id) == {0, 3}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_saved_in_the_dtype_of_the_checkpoint(
    dtype: torch.dtype, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The result is the fp32 weights rounded once; a resumable checkpoint keeps them whole."""
    model = tiny_run.save_model(tmp_path / "model", tie_word_embeddings=tied)
    AutoModelForCausalLM.from_pretrained(model, dtype=dtype).save_pretrained(model)
    with caplog.at_level(logging.INFO, "seqtile"):
        output = run(model, tmp_path)
    kept, saved = tiny_run.load_weights(output / "checkpoint-2"), tiny_run.load_weights(output)
    assert {weight.dtype for weight in kept.values()} == {torch.float32}
    assert saved.keys() == kept.keys()
    for name, weight in saved.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, kept[name].to(dtype)), name
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert json.loads((output / "checkpoint-2" / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(output).dtype == dtype
    assert "dtype: float32" in caplog.text


@pytest.mark.parametrize(("values", "dtype"), [({"dtype": "float32"}, torch.float32), (LORA, torch.float32)])
def test_weights_keep_the_dtype_that_was_asked_for(
    values: dict[str, Any], dtype: torch.dtype, model: Path, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    output = run(model, tmp_path, **values)
    weights = load_file(next(output.glob("*model.safetensors")))
    assert {weight.dtype for weight in weights.values()} == {dtype}


def test_what_a_model_keeps_in_fp32_stays_so(tmp_path: Path) -> None:
    """As Transformers loads it: the router's bias of DeepSeek-V3 is in fp32 in a bf16 checkpoint."""
    directory = tmp_path / "model"
    vocabulary = tiny_run.save_tokenizer(directory)
    config = transformers.DeepseekV3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=96, moe_intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=20, qk_rope_head_dim=8,
        qk_nope_head_dim=10, v_head_dim=14, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    expected = AutoModelForCausalLM.from_pretrained(directory)
    output = run(directory, tmp_path)
    saved, given = tiny_run.load_weights(output), {name: w.dtype for name, w in expected.state_dict().items()}
    again = AutoModelForCausalLM.from_pretrained(output)
    assert {name: weight.dtype for name, weight in again.state_dict().items()} == given
    assert {weight.dtype for weight in saved.values()} == {*given.values()} == {torch.bfloat16, torch.float32}


def test_a_finished_run_that_is_resumed_saves_the_same_dtype(model: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    output = run(model, tmp_path)
    first = tiny_run.load_weights(output)
    (output / "complete.json").unlink()
    train(resumed_recipe({}, {"output": str(output)})[0], resume=True)
    for name, weight in tiny_run.load_weights(output).items():
        assert torch.equal(weight, first[name]), name
