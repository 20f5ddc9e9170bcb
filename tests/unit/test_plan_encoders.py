"""Plans of encoders, which train as masked language models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoConfig

from seqtile._compat import attention_is_exchangeable
from seqtile._errors import UserError
from seqtile.cli import main
from seqtile.options import TilingOptions, changed
from seqtile.planner.accelerators import find_device
from seqtile.planner.explain import next_step, not_modelled, proposals
from seqtile.planner.fake_step import build, build_bare, fake_step, make_batch, real_step
from seqtile.planner.memory_plan import Planner
from seqtile.planner.model_shapes import BEHIND_PADDING, is_masked_lm, max_positions
from seqtile.planner.phases import HEAD, Phase
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora, Setup
from seqtile.planner.techniques import MINIMAL_MEMORY, TILED_LOSS
from seqtile.train.fit import request_of
from seqtile.train.recipe import build_recipe, resolve

# ModernBERT and DeBERTa in transformers 5.0 import torch.compile and torch.jit, which torch's own code warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 512, "pad_token_id": 0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1},
    "modernbert": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 32,
                   "num_hidden_layers": 3},
    "electra": {"embedding_size": 64},
    "distilbert": {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "attention_dropout": 0.0},
}  # fmt: skip
FORWARD = Phase(HEAD, direction="forward")
SETUP = Setup(
    dtype=torch.float32, options=TilingOptions(tile=64, loss_tile=64, loss="tiled", checkpoint="layer"), batch=2
)
SETUP = replace(SETUP, options=replace(SETUP.options, loss=None))


def config_of(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **changes})


def needs(kind: str) -> None:
    model = MODEL_FOR_MASKED_LM_MAPPING[CONFIG_MAPPING[kind]]
    if not attention_is_exchangeable(model):
        pytest.skip(f"{model.__name__} of this Transformers computes attention in code of its own")


def save(config: Any, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def request(kind: str, **changes: Any) -> Request:
    options = TilingOptions(loss=None, checkpoint="layer")
    found = Request(model=kind, config=config_of(kind), device=find_device("2GiB"), options=options)
    return changed(found, **changes)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    return " ".join(shown.split())


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["all weights", "adapters"])
@pytest.mark.parametrize("attention", ["sdpa", "flash", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_shapes_holds_what_a_real_one_does(kind: str, attention: str, lora: Lora | None) -> None:
    needs(kind)
    setup = replace(SETUP, lora=lora, attention=attention)
    planned, measured = fake_step(config_of(kind), setup, 160), real_step(config_of(kind), setup, 160)
    assert planned.operators == measured.operators
    assert planned.peaks.keys() == measured.peaks.keys()
    for name, part in measured.peaks.items():
        assert planned.peaks[name].total == pytest.approx(part.total, abs=128), name
    assert planned.square == (attention == "eager" or (kind == "modernbert" and attention == "sdpa"))


def test_a_batch_is_what_the_collator_gives() -> None:
    given = {kind: make_batch(build_bare(config_of(kind), SETUP, "meta"), SETUP, 8, torch.device("meta"))
             for kind in ("bert", "roberta")}  # fmt: skip
    assert given["roberta"].keys() == {"input_ids", "labels", "attention_mask"}
    assert given["bert"].keys() == given["roberta"].keys() | {"token_type_ids"}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_shapes_may_be_longer_than_the_model_can_read(kind: str) -> None:
    """Those of a plan are multiples of a tile of all rows together."""
    needs(kind)
    short, longer = (
        fake_step(config_of(kind, max_position_embeddings=size), replace(SETUP, attention="flash"), 640).peak
        for size in (256, 1024)
    )
    table = 0 if kind == "modernbert" else 3 * 4 * 64 * (1024 - 256)  # its gradient comes after the peak
    buffers = {"bert": 16, "roberta": 16, "electra": 16, "distilbert": 8}.get(kind, 0) * (1024 - 256)
    assert longer - short == pytest.approx(table + buffers, abs=64)


def test_a_row_of_roberta_has_two_positions_fewer_than_its_configuration() -> None:
    assert max_positions(config_of("roberta")) == 512 == max_positions(config_of("bert"))
    for kind, model in (
        (one, MODEL_FOR_MASKED_LM_MAPPING[CONFIG_MAPPING[one]])
        for one in BEHIND_PADDING
        if one in CONFIG_MAPPING and CONFIG_MAPPING[one] in MODEL_FOR_MASKED_LM_MAPPING
    ):
        with torch.device("meta"):
            config = AutoConfig.for_model(kind, **{**SIZES, "max_position_embeddings": 514, "pad_token_id": 1})
            tables = [
                part
                for name, part in model(config).named_modules()
                if name.endswith("position_embeddings") and "entity" not in name  # LUKE's
            ]
        assert [getattr(part, "padding_idx", None) for part in tables] == [1], kind
        assert max_positions(config) == 512


def test_attention_reads_the_whole_row() -> None:
    planner = Planner(request("bert"))
    layers, width, tokens = 2, 64, 512
    assert planner.work(tokens).attention == (1 + 2.5 + 1) * layers * 4 * tokens**2 * width
    llama = AutoConfig.for_model("llama", **SIZES)
    assert Planner(replace(planner.request, config=llama)).work(tokens).attention == planner.work(tokens).attention / 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--recipe", "r.yaml"], "which trains causal language models on text; drop it"),
        (["--loss", "grpo"], "GRPO trains causal language models, but 'bert' is an encoder; drop --loss grpo"),
        (["--engine", "zero3", "--gpus", "2", "--sp-size", "2"], "sp-size 2 is for causal language models"),
        (["--engine", "fsdp2", "--gpus", "2", "--cp-size", "2"], "cp-size 2 is for causal language models"),
        (["--images", "2"], "model type 'bert' takes no pictures"),
        (["--loss-tile", "64"], "use loss full, without a loss tile"),
        (["--max-length", "513"], "513 tokens exceed the 512 positions"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", save(config_of("bert"), tmp_path / "model"), *flags]) == 2
    assert told in said(capsys)


def test_training_plans_no_encoder(tmp_path: Path) -> None:
    recipe, _ = build_recipe({"model": save(config_of("bert"), tmp_path), "dataset": "d.jsonl", "max_length": 128}, {})
    with pytest.raises(UserError, match="seqtile train trains causal language models, but .* is an encoder"):
        request_of(resolve(recipe), memory=2**30)


def test_an_encoder_whose_layers_share_weights_is_refused() -> None:
    shared = AutoConfig.for_model("albert", **SIZES, embedding_size=32)
    with pytest.raises(UserError, match="AlbertForMaskedLM has 1 distinct layers for a depth of 2"):
        Planner(replace(request("bert"), config=shared))
    with pytest.raises(
        UserError, match="AlbertForMaskedLM .* does not support activation checkpointing; use checkpoint none"
    ):
        build(shared, SETUP, "meta")


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet", "roformer"])
def test_an_encoder_with_attention_of_its_own_is_refused(kind: str) -> None:
    config = AutoConfig.for_model(kind, **SIZES)
    with pytest.raises(UserError, match="computes attention in its own code"):
        Planner(replace(request("bert"), config=config))


def test_an_encoder_that_reads_numbers_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = AutoConfig.for_model("xmod", **{**SIZES, "pad_token_id": 1}, default_language="en_XX")
    assert main(["plan", "--model", save(config, tmp_path), "--max-length", "128"]) == 2
    assert "cannot plan model type 'xmod': a step does not run on fake tensors" in said(capsys)


def test_the_command_plans_an_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", save(config_of("bert"), tmp_path), "--device", "40GB", "--batch-size", "4"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["max_length"] == 512 and found["limited_by"] == "positions" and found["next"] is None
    assert found["recipe"] is None and found["recipe_lacks"] == [] and found["command"] is None
    assert any("masked language model" in note for note in found["notes"])
    assert not any("pictures" in one or "packed" in one for one in found["not_modelled"])
    assert "logits and loss" in found["terms"]["device_gib"]
    for rows, words in (("4", "Step of 4 sequences: "), ("1", "Step of 1 sequence: ")):
        assert main([*command[:-1], rows]) == 0 and words in capsys.readouterr().out


def test_what_is_proposed_runs() -> None:
    planner = Planner(request("bert", attention="sdpa", gpus=4, engine="zero3", checkpoint=None, batch=64))
    found = proposals(planner)
    assert TILED_LOSS not in found and not any("sp-size" in one.flags for one in found)
    assert any("sp-size" in one.flags for one in proposals(Planner(replace(
        planner.request, config=AutoConfig.for_model("llama", **SIZES, num_key_value_heads=4)
    ))))  # fmt: skip
    tight = Planner(request("bert", checkpoint=None, batch=256, device=find_device("1500MiB")))
    better = next_step(tight, tight.longest()[0])
    assert better is not None and better.flags == "--checkpoint layer"
    assert MINIMAL_MEMORY in found  # which is tried last, and only where attention runs on some heads
    assert any("padded sequences" in one for one in not_modelled(planner.request, planner.estimate(128)))


def test_logits_of_masked_tokens_alone_are_said() -> None:
    needs("modernbert")
    sparse = replace(request("modernbert"), config=config_of("modernbert", sparse_prediction=True))
    assert any("sparse_prediction is counted" in note for note in Planner(sparse).notes())
    assert not any("sparse" in note for note in Planner(request("modernbert")).notes())


def test_what_is_an_encoder() -> None:
    """One that may be a decoder too counts by what its configuration says."""
    assert is_masked_lm(config_of("bert")) and not is_masked_lm(config_of("bert", is_decoder=True))
    assert not is_masked_lm(AutoConfig.for_model("bart")) and not is_masked_lm(AutoConfig.for_model("llama"))


@pytest.mark.parametrize(("dropout", "more"), [("hidden_dropout_prob", 1), ("attention_probs_dropout_prob", 0)])
def test_dropout_on_an_accelerator_keeps_a_byte_an_element(dropout: str, more: int) -> None:
    """In fp32 the CPU keeps four, and an attention kernel keeps none."""
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    setup = replace(SETUP, attention="flash", device_type="cuda", options=TilingOptions(loss_tile=64).without_blocks())
    setup = replace(setup, options=replace(setup.options, loss_tile=64))
    steps = [fake_step(config_of("bert", **{**off, **on}), setup, 160) for on in ({}, {dropout: 0.1})]
    assert not any(step.square for step in steps)
    # Embeddings, and after attention and MLP of both layers; a dropout's result takes the place of its input.
    grown = steps[1].peaks[FORWARD].total - steps[0].peaks[FORWARD].total
    assert grown == more * 5 * 2 * 160 * 64


def test_autocast_on_an_accelerator_norms_in_fp32() -> None:
    """Adapters on a frozen model in bf16: its LayerNorms return fp32 there, bf16 on a CPU."""
    setup = replace(SETUP, dtype=torch.bfloat16, autocast=True, lora=Lora(4), attention="flash")
    here, there = (
        fake_step(config_of("bert"), replace(setup, device_type=kind), 160).peaks[FORWARD] for kind in ("cpu", "cuda")
    )
    kept = "checkpointed hidden states"
    assert there.terms[kept] == 2 * here.terms[kept] == 2 * 4 * 2 * 160 * 64
