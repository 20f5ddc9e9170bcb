"""Models that mix attention with layers that carry a state along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model
from torch import nn

import hybrid
import seqtile
from hybrid import KINDS, SETTINGS, adapted, difference, gradients, settings_of, tiled
from refusals import command_refused, refused
from seqtile._compat import attention_kind
from seqtile._errors import UserError
from seqtile.cli import main
from seqtile.engines.sequence_parallel import refuse_split_states
from seqtile.install.adapters import lora_config, without_adapters
from seqtile.integrations.callback import _check_trainer as check_in_trainer
from seqtile.options import TilingOptions
from seqtile.planner import memory_plan
from seqtile.planner.accelerators import find_device
from seqtile.planner.fake_step import build, fake_step
from seqtile.planner.memory_plan import Planner
from seqtile.planner.middle_tiles import MiddleTiles
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora, Setup
from seqtile.recognise.decoder_layers import STATES, UNKNOWN_STATE, decoder_layers, states_of
from seqtile.state.state_layers import can_carry
from seqtile.train.load import check_split
from seqtile.train.packing import check_packing
from seqtile.train.recipe import build_recipe
from tiny_models import tiny_config
from zoo import assert_same_gradients, picture_and_text, vision_language_model
from zoo import gradients as zoo_gradients

LOOPS = ("bailing_hybrid", "kimi_linear", "jamba", "recurrent_gemma")
"""Families whose loop over tokens in PyTorch takes up to half a minute for all techniques."""

TRAINED = [pytest.param(one, marks=[pytest.mark.slow] if one in LOOPS else []) for one in KINDS]


def model_of(family: str) -> Any:
    try:
        return hybrid.model_of(family)
    except ImportError as error:
        pytest.skip(f"{family} needs a package: {error}")


def known(family: str) -> None:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")


@cache
def truth(family: str, make: Callable[[str], Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients in float64, and how far the untiled ones are from them."""
    exact = gradients(make(family).double())
    return exact, difference(gradients(make(family)), exact)


def check(model: Any, family: str, what: str, make: Callable[[str], Any] = model_of) -> None:
    """The tiled gradients must be as near to those in float64 as the untiled ones, and 1e-5 more."""
    exact, untiled_error = truth(family, make)
    tiled_error = difference(gradients(model), exact)
    assert tiled_error < untiled_error + 1e-5, f"{what}: {tiled_error:.1e} off, untiled {untiled_error:.1e}"


@pytest.mark.parametrize("family", KINDS)
def test_decoder_layers_are_found_by_kind(family: str) -> None:
    known(family)
    model = model_of(family)
    layers = decoder_layers(model)
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    assert {layer.kind for layer in layers} == KINDS[family]
    assert all(type(model.get_submodule(layer.name)).__name__ == layer.class_name for layer in layers)


def test_a_state_is_noticed_where_no_name_tells_it() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1d = nn.Conv1d(8, 8, 4, groups=8)

    layers = nn.ModuleList([nn.ModuleDict({"odd": Odd(), "mlp": nn.Linear(8, 8)})])
    assert states_of(nn.ModuleDict({"layers": layers})) == {UNKNOWN_STATE: ["layers.0"]}


def test_a_layer_with_a_state_is_no_candidate() -> None:
    """Its two projections, wide and narrow, have the shapes of an MLP's."""
    model = model_of("zamba")
    report = seqtile.apply(model, tile=5)
    assert set(states_of(model)) == {"Mamba"} and report.tiled
    assert [one.name for one in report.left] == []


@pytest.mark.parametrize("family", TRAINED)
def test_every_technique_gives_the_untiled_gradients(family: str) -> None:
    known(family)
    for name in SETTINGS:
        if settings := settings_of(family, name):
            model = model_of(family)
            report = tiled(model, settings)
            again = "layers with a state" in str(report) and "recompute their scan" in str(report)
            assert again == (settings.get("checkpoint") == "attention-saved"), str(report)
            check(model, family, name)


@pytest.mark.parametrize("family", TRAINED)
def test_adapters_get_the_untiled_gradients(family: str) -> None:
    known(family)
    model_of(family)  # skips where a package is missing
    for name in SETTINGS:
        if settings := settings_of(family, name):
            model = adapted(family)
            tiled(model, settings)
            check(model, family, f"adapters, {name}", adapted)


@pytest.mark.parametrize(
    ("family", "left_out"),
    [("falcon_h1", {"out_proj"}), ("nemotron_h", {"out_proj"}), ("bamba", {"mamba.out_proj"}), ("lfm2_moe", None)],
)
def test_no_adapter_where_a_fused_kernel_would_pass_it_by(family: str, left_out: set[str] | None) -> None:
    known(family)
    model = model_of(family)
    config = lora_config(model, r=4, alpha=None, dropout=0.0, target_modules="all-linear")
    assert config.exclude_modules == (sorted(left_out) if left_out else None)
    said = without_adapters(model, config)
    assert said is None if left_out is None else f"no adapters on {', '.join(left_out)}: PEFT rejects them" in str(said)
    names = [name for name, part in get_peft_model(model, config).named_modules() if hasattr(part, "lora_A")]
    assert names and (left_out is None) == any(name.endswith("out_proj") for name in names)


def test_what_is_named_is_peft_s_to_refuse() -> None:
    known("falcon_h1")
    model = model_of("falcon_h1")
    config = lora_config(model, r=4, alpha=None, dropout=0.0, target_modules=["out_proj"])
    with pytest.raises(ValueError, match="'out_proj' is incompatible"):
        get_peft_model(model, config)


HEADWISE = ("qwen3_next", "qwen3_5_text", "bamba", "nemotron_h", "jamba", "lfm2_moe", "minimax", "recurrent_gemma")


@pytest.mark.parametrize("family", HEADWISE)
def test_attention_runs_head_by_head_and_states_are_named(family: str) -> None:
    known(family)
    model = model_of(family)
    report = seqtile.apply(model, tile=5, heads=1)
    attention = [layer for layer in decoder_layers(model) if layer.kind == "attention"]
    assert f"head-wise attention in {len(attention)} of {len(attention)}" in str(report)
    for kind, layers in states_of(model).items():
        assert f"{len(layers)} layers with a state ({kind}) run untiled" in str(report)
    check(model, family, "heads")


@pytest.mark.parametrize("state", [*STATES, UNKNOWN_STATE])
def test_sequence_parallelism_is_refused_for_every_state(state: str) -> None:
    states = {state: ["model.layers.0", "model.layers.1"]}
    refuse_split_states("it", states, 1)
    refuse_split_states("it", {}, 2)
    with refused("sp-size.model-with-state", "sp_size 2"):
        refuse_split_states("it", states, 2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the configuration of a hybrid model."""
    config = tiny_config("qwen3_5_text")
    config.max_position_embeddings = 4096
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_hybrid_model_is_planned(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", str(directory), "--device", "h200"]
    assert main([*asked, "--max-length", "2048", "--lora", "4"]) == 0
    printed = capsys.readouterr().out
    assert "Longest sequence that fits with these settings: 4,096 tokens" in printed
    assert "1 layer with a state (Gated DeltaNet) runs in flash-linear-attention" in " ".join(printed.split())


def test_a_model_without_mlps_to_tile_is_planned_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config("zamba2")
    config.max_position_embeddings = 4096
    config.save_pretrained(tmp_path)
    asked = ["plan", "--model", str(tmp_path), "--device", "h200", "--max-length", "2048"]
    command_refused(asked, "blocks.nothing-to-tile", "--tile none")
    assert main([*asked, "--tile", "none"]) == 0
    assert "2 layers with a state (Mamba-2) run in mamba-ssm" in " ".join(capsys.readouterr().out.split())


def test_a_hybrid_model_over_several_ranks_is_not_planned(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "check_ranks", lambda *_: pytest.fail("it was let through"))
    asked = ["plan", "--model", str(directory), "--device", "h200", "--gpus", "2", "--engine", "zero3"]
    command_refused([*asked, "--sp-size", "2"], "sp-size.model-with-state", "sp_size 2")


def test_a_plan_says_where_there_are_no_adapters() -> None:
    known("falcon_h1")
    config = tiny_config("falcon_h1")
    request = Request("falcon", config, find_device("h200"), lora=Lora(4))
    no_adapters, model = Planner(request).notes()
    assert no_adapters.startswith("no adapters on out_proj: PEFT rejects them")
    assert model.startswith("2 layers with a state (Mamba-2) run in mamba-ssm")
    *_, plain = Planner(replace(request, scans="pytorch")).notes()
    assert plain.startswith("2 layers with a state (Mamba-2) run in transformers' PyTorch path")


def test_a_language_part_beside_a_vision_tower() -> None:
    known("qwen3_5")
    batch = picture_and_text(torch.float64)
    model = vision_language_model(torch.float64, "qwen3_5")
    loss, expected = zoo_gradients(model, batch)
    assert {layer.kind for layer in decoder_layers(model)} == {"Gated DeltaNet", "attention"}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    report = seqtile.apply(model, heads=1, **SETTINGS["all"])
    assert "tiled 2 of 2 MLPs" in str(report) and "1 layers with a state (Gated DeltaNet) save" in str(report)
    tiled, got = zoo_gradients(model, batch)
    torch.testing.assert_close(tiled, loss, check_dtype=False, rtol=1e-6, atol=0.0)  # transformers' own is in fp32
    assert_same_gradients(got, expected)
    assert seqtile.verify(vision_language_model(architecture="qwen3_5"), picture_and_text(), tile=5).ok


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("recurrent_gemma", 96),
        pytest.param("jamba", 96, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 576, marks=pytest.mark.slow),
    ],
)
def test_a_scan_that_is_not_run_holds_what_its_loop_holds(
    family: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(family)
    config = tiny_config(family)
    config.max_position_embeddings = 1024
    setup = Setup(dtype=torch.float32, options=TilingOptions(tile=32, loss="tiled", loss_tile=32, checkpoint="layer"))
    planned = fake_step(config, setup, tokens)
    monkeypatch.setattr("seqtile.planner.scans.planned_scans", lambda model, scans: nullcontext())
    looped = fake_step(config, setup, tokens)
    assert len(planned.operators) < len(looped.operators)
    assert planned.peak == pytest.approx(looped.peak, rel=2e-3)
    for phase, part in looped.peaks.items():
        assert planned.peaks[phase].total == pytest.approx(part.total, rel=2e-2), phase


def test_kernels_hold_less_than_pytorch_s_paths() -> None:
    config = tiny_config("bamba")
    config.max_position_embeddings = 1024
    options = TilingOptions(tile=128, loss="tiled", loss_tile=128, checkpoint="layer")
    runs = {name: fake_step(config, Setup(options=options, scans=name), 512) for name in ("kernels", "pytorch")}
    assert runs["kernels"].peak < 0.8 * runs["pytorch"].peak


def test_a_language_part_beside_a_vision_tower_is_planned() -> None:
    known("qwen3_5")
    config = vision_language_model(architecture="qwen3_5").config
    planner = Planner(Request("qwen", config, find_device("h200")), 128)
    assert [layer.partition(".layers.")[2] for layer in planner.states["Gated DeltaNet"]] == ["0"]
    assert planner.counts.attentions == 1
    assert planner.fits(planner.estimate(128))


def test_a_run_over_several_ranks_is_refused_before_it_starts(directory: Path) -> None:
    ranks = {"engine": "zero3", "nproc": 2, "sp_size": 2}
    recipe, _ = build_recipe({}, {"model": str(directory), "dataset": "x", "max_length": 2048, **ranks})
    with refused("sp-size.model-with-state", "Gated DeltaNet"):
        check_split(recipe)


def test_a_trainer_that_splits_sequences_is_refused() -> None:
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=1, cp_size=2)))
    check_in_trainer(trainer, nn.Linear(4, 4), TilingOptions())  # type: ignore[arg-type]
    with refused("sp-size.model-with-state", "cp_size 2", "Lfm2MoeForCausalLM"):
        check_in_trainer(trainer, model_of("lfm2_moe"), TilingOptions())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear"])
def test_tiles_with_a_state_are_planned(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """What stands for a kernel takes a state and hands one on, as the kernel does."""
    known(family)
    config, tokens = tiny_config(family), 2048
    options = TilingOptions(tile=64, checkpoint="layer")
    whole, tiled = (
        fake_step(config, Setup(options=replace(options, state=state), scans="kernels"), tokens)
        for state in (None, 256)
    )
    assert "runs whole" not in caplog.text
    of_state, of_state_whole = (
        max(peak.total for phase, peak in run.peaks.items() if phase.part == "layers with a state")
        for run in (tiled, whole)
    )
    assert of_state < of_state_whole


@pytest.mark.parametrize(
    ("tokens", "lora"), [(12 * 64, None), (13 * 64 - 5, Lora(4))], ids=["", "short last, adapters"]
)
@pytest.mark.parametrize(
    "family", [one if one in ("qwen3_next", "lfm2") else pytest.param(one, marks=pytest.mark.slow) for one in KINDS]
)
def test_tiles_in_the_middle_are_not_run_and_hold_what_they_hold(
    family: str, tokens: int, lora: Lora | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte in each part of the step."""
    known(family)
    config = tiny_config(family)
    config.max_position_embeddings = 4096
    options = TilingOptions(tile=256, loss="tiled", loss_tile=256, checkpoint="layer", state=64)
    setup = Setup(dtype=torch.bfloat16, options=options, lora=lora, scans="kernels", device_type="cuda")
    try:
        few = fake_step(config, setup, tokens)
    except UserError as error:
        pytest.skip(f"cannot be planned in tiles: {error}")
    monkeypatch.setattr(MiddleTiles, "left_out", lambda self: nullcontext())
    every = fake_step(config, setup, tokens)
    assert {phase: part.terms for phase, part in few.peaks.items()} == {
        phase: part.terms for phase, part in every.peaks.items()
    }
    if can_carry(build(config, setup, "meta").model):
        assert len(few.operators) < len(every.operators)


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2_moe"])
def test_packed_documents_do_not_read_each_others_state(family: str, padding_free: bool) -> None:
    arguments = SimpleNamespace(padding_free=padding_free, packing=True, packing_strategy="bfd")
    with refused("packing.shared-state"):
        check_packing(model_of(family), arguments)
    check_packing(model_of(family), SimpleNamespace(padding_free=False, packing=True, packing_strategy="wrapped"))


def test_packing_is_refused_beside_flash_attention_too() -> None:
    """Flash attention does not run on the CPU, and the states beside it are asked all the same."""
    model = model_of("qwen3_next")
    vars(model.config)["_attn_implementation_internal"] = "flash_attention_2"
    generator_state = torch.get_rng_state()
    with refused("packing.shared-state"):
        check_packing(model, SimpleNamespace(padding_free=True, packing=False))
    assert attention_kind(model) == "flash_attention_2"
    assert torch.equal(torch.get_rng_state(), generator_state)
