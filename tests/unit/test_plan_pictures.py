"""Plans of models that read pictures: the vision tower is in the step, and its tokens are in the row."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from refusals import command_refused, refused
from seqtile.cli import main
from seqtile.options import TilingOptions
from seqtile.planner.accelerators import find_device
from seqtile.planner.fake_step import build_bare, fake_step, real_step
from seqtile.planner.memory_plan import Planner, choose_attention_saved
from seqtile.planner.phases import REST, TOWER
from seqtile.planner.pictures import ANY_SIZE, ONE_SIZE, read_pictures
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora, Setup

pytestmark = pytest.mark.skipif(
    find_spec("transformers.vision_utils") is None, reason="this Transformers looks at values of pictures' tokens"
)
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
TOWER_OF_ONE_SIZE = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
}  # fmt: skip
TOWER_OF_ANY_SIZE = {
    "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64,
}  # fmt: skip
SETUP = Setup(
    dtype=torch.float32, options=TilingOptions(tile=64, loss="tiled", loss_tile=64, checkpoint="layer"), batch=2
)


def config_of(kind: str, depth: int = 2) -> Any:
    """A small model of this type, with a tower of so many layers."""
    text: dict[str, Any] = dict(TEXT)
    vision: dict[str, Any]
    if kind in ONE_SIZE:
        text["model_type"] = "llama" if kind == "llava" else "gemma3_text"
        vision = {**TOWER_OF_ONE_SIZE, "num_hidden_layers": depth}
        vision["model_type"] = "clip_vision_model" if kind == "llava" else "siglip_vision_model"
        more = {} if kind == "llava" else {"mm_tokens_per_image": 4}
        return AutoConfig.for_model(kind, text_config=text, vision_config=vision, image_token_index=250, **more)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {**TOWER_OF_ANY_SIZE, "depth": depth}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    if kind.startswith("qwen3"):
        vision["num_position_embeddings"] = 64
    if kind.startswith("qwen3_vl"):
        vision["deepstack_visual_indexes"] = [1]
    if kind.startswith("qwen3_5"):
        text |= {
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        }  # fmt: skip
    if "moe" in kind:
        text |= {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        }  # fmt: skip
    ids = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
    return AutoConfig.for_model(kind, text_config=text, vision_config=vision, **ids)


def save(config: Any, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["all weights", "adapters"])
@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=[pytest.mark.slow] if "moe" in one else []) for one in ANY_SIZE + ONE_SIZE]
)
def test_a_step_on_shapes_holds_what_a_real_one_does(kind: str, lora: Lora | None) -> None:
    config = config_of(kind)
    setup = replace(SETUP, lora=lora, pictures=read_pictures(config, 3, (112, 84)))
    planned, measured = fake_step(config, setup, 160), real_step(config, setup, 160)
    assert planned.peaks.keys() == measured.peaks.keys()
    assert any(phase.part == TOWER for phase in planned.peaks)
    high = 0.04 if kind.startswith("qwen3_5") else 0.011  # a scan's turns, and what a tower's backward frees in between
    for name, part in measured.peaks.items():
        assert -128 <= planned.peaks[name].total - part.total <= high * part.total, name
    if not kind.startswith("qwen3_5"):
        assert abs(planned.peak - measured.peak) <= 128


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_two_small_depths_tell_what_a_deep_tower_holds(kind: str) -> None:
    config = config_of(kind, depth=7)
    setup = replace(SETUP, pictures=read_pictures(config, 3, (112, 84)))
    planned, measured = fake_step(config, setup, 160), real_step(config, setup, 160)
    assert planned.peak == pytest.approx(measured.peak, abs=64)
    for name, part in measured.peaks.items():
        off = 0.05 if name.part in (TOWER, REST) else 1e-5
        assert planned.peaks[name].total == pytest.approx(part.total, rel=off, abs=64), name  # some numbers of the loss


CELLS = [("qwen2_5_vl", 12, 1), ("qwen2_5_vl", 0, 4), ("qwen3_vl", 12, 2), ("llava", 0, 1), ("gemma3", 0, 2),
         ("qwen2_vl", 9, 2)]  # fmt: skip
"""A model type, frames of a video (0: six pictures), and how many of them are a group."""


@pytest.mark.parametrize(
    ("kind", "frames", "group"),
    [pytest.param(*cell, marks=[] if cell[0] == "llava" else [pytest.mark.slow]) for cell in CELLS],
)
@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["all weights", "adapters"])
def test_a_tower_in_groups_holds_what_is_planned(kind: str, frames: int, group: int, lora: Lora | None) -> None:
    """Of many groups a plan runs three, and counts what the others give and keep."""
    config = config_of(kind)
    pictures = read_pictures(config, size=(112, 84), frames=frames) if frames else read_pictures(config, 6, (112, 84))
    options = replace(SETUP.options, vision=group)
    setup = replace(SETUP, pictures=pictures, lora=lora, options=options)
    planned, measured = fake_step(config, setup, 160), real_step(config, setup, 160)
    assert planned.peak == pytest.approx(measured.peak, rel=1e-3)
    assert planned.peaks.keys() == measured.peaks.keys()
    for name, part in measured.peaks.items():
        assert planned.peaks[name].total == pytest.approx(part.total, rel=0.01), name
    whole = fake_step(config, replace(setup, options=replace(options, vision=None)), 160)
    towers = [max(phase.total for name, phase in run.peaks.items() if name.part == TOWER) for run in (planned, whole)]
    assert towers[0] <= towers[1]


def test_frames_are_counted_as_the_processor_does() -> None:
    config = config_of("qwen2_5_vl")
    video = read_pictures(config, size=(112, 84), frames=7)  # two frames are one patch
    assert (video.frames, video.grid, video.tokens) == (7, (4, 8, 6), 4 * 12)
    with refused("images.size-missing", "--frame-size"):
        read_pictures(config, frames=7)


@pytest.mark.slow
def test_a_plan_of_frames_is_a_recipe_with_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", save(config_of("qwen2_5_vl"), tmp_path), "--device", "40GB", "--max-length", "512"]
    assert main([*command, "--frames", "16", "--frame-size", "112x84", "--vision", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"]["vision"] == 4
    assert any("16 frames of 112 x 84 pixels per sequence, 96 in all" in note for note in found["notes"])


def test_a_larger_picture_is_more_tokens_and_more_memory() -> None:
    config = config_of("qwen2_5_vl")
    small, large = (read_pictures(config, 2, (side, side)) for side in (56, 112))
    assert (small.each, small.tokens, large.each) == (4, 8, 16)
    assert read_pictures(config, 1, (100, 130)).size == (112, 140)  # to whole tokens, as the processor does
    assert read_pictures(config, tokens=8).tokens == 8
    assert read_pictures(config, 1, (1024, 1024)).each == 1369  # as docs/planning.md says
    setup = replace(SETUP, options=replace(SETUP.options, checkpoint=None))
    peaks = [fake_step(config, replace(setup, pictures=one), 160).peak for one in (small, large)]
    assert peaks[1] > peaks[0]


def test_towers_of_one_size_make_the_same_tokens_of_every_picture() -> None:
    assert read_pictures(config_of("llava"), 3, (999, 10)).each == 16
    assert read_pictures(config_of("gemma3"), tokens=12).count == 3
    with refused("images.partial-image", "10 image tokens", "multiple of 4,"):
        read_pictures(config_of("gemma3"), tokens=10)


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--images", "0"], ("images.count-out-of-range", "--images 0")),
        (["--images", "2", "--image-tokens", "8"], ("images.tokens-with-images",)),
        (["--image-size", "56x56"], ("images.size-without-count", "--images N")),
        (["--images", "2", "--image-size", "56"], ("images.size-malformed", "--image-size '56'")),
        (["--frames", "8"], ("frames.model-unsupported", "'llava'")),
        (["--frames", "8", "--images", "2"], ("frames.with-images",)),
        (["--frame-size", "56x56"], ("images.size-without-count", "--frames N")),
        (["--vision", "4"], ("vision.without-images",)),
        (["--images", "9", "--max-length", "144"], ("images.no-room-for-text", "144 tokens", "144 image tokens")),
        (
            ["--images", "2", "--engine", "zero3", "--gpus", "2", "--sp-size", "2"],
            ("images.with-sequence-parallel",),
        ),
        (["--images", "2", "--loss", "grpo"], ("images.with-grpo",)),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    flags: list[str], refusal: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command_refused(["plan", "--model", save(config_of("llava"), tmp_path / "model"), *flags], *refusal)


def test_models_without_a_known_tower_are_refused(tmp_path: Path) -> None:
    llama = AutoConfig.for_model("llama", **TEXT)
    command_refused(["plan", "--model", save(llama, tmp_path), "--images", "2"], "images.model-unsupported", "'llama'")
    with refused("plan.model-not-causal", "images="):
        build_bare(config_of("llava"), SETUP, "meta")
    with refused("images.size-missing", "--image-size"):
        read_pictures(config_of("qwen2_5_vl"), 2)


def test_the_vision_towers_attention_is_saved_too() -> None:
    config = config_of("llava")
    options = TilingOptions(loss="tiled", loss_tile="auto", checkpoint="layer")
    request = Request(model="m", config=config, device=find_device("40GB"), options=options)
    kept = {}
    for pictures in (None, read_pictures(config, 32)):
        planner = Planner(replace(request, config=config.get_text_config() if pictures is None else config,
                                  pictures=pictures))  # fmt: skip
        chosen, saving = choose_attention_saved(planner, 4096)
        assert saving.chosen
        kept[pictures is None] = chosen.estimate(4096).terms["kept attention outputs"]
        outputs = planner.attention_outputs(4096)
    assert kept[True] == outputs < kept[False]


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llava")
    monkeypatch.setattr("seqtile.planner.pictures.find_spec", lambda name: None)
    with refused("images.transformers-too-old"):
        read_pictures(config, 2)


def test_the_command_says_how_many_tokens_pictures_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save(config_of("llava"), tmp_path)
    command = [
        "plan",
        "--model",
        model,
        "--device",
        "2GiB",
        "--checkpoint",
        "layer",
        "--max-length",
        "512",
        "--images",
        "3",
    ]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["recipe"]["max_length"] == 512
    told = "3 images of 56 x 56 pixels per sequence, 16 tokens each, 48 in all"
    assert any(told in note for note in found["notes"])
    assert not any("pictures" in one for one in found["not_modelled"])
