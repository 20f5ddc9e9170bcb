"""``seqtile.fit`` of models for pictures: what is chosen runs, and holds what was planned."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments

import seqtile
from refusals import refused
from seqtile.fitting import Choice, choose_for
from seqtile.options import TilingOptions
from seqtile.planner.pictures import add_pictures, read_pictures
from seqtile.planner.sharding_terms import CONTEXT
from seqtile.vision.install_vision import VisionTechnique

pytestmark = pytest.mark.skipif(
    find_spec("transformers.vision_utils") is None, reason="this Transformers looks at values of pictures' tokens"
)
GIB, MIB = 2**30, 2**20
TOKENS = 2560
TEXT = dict(
    hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, vocab_size=256, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
QWEN = dict(
    text_config={**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    vision_config=dict(
        depth=4, hidden_size=96, intermediate_size=192, num_heads=4, patch_size=14, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=64,
    ),
    image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253,
)  # fmt: skip
LLAVA = dict(
    text_config=dict(model_type="llama", **TEXT),
    vision_config=dict(
        model_type="clip_vision_model", hidden_size=128, intermediate_size=320, num_hidden_layers=4,
        num_attention_heads=4, image_size=112, patch_size=14,
    ),
    image_token_index=250, vision_feature_layer=-1,
)  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (QWEN, dict(frames=48, frame_size=(224, 168))),
    "llava": (LLAVA, dict(images=36)),
}
GIVEN = dict(tile=512, keep=0.0, blocks="auto", heads=None, chunk=None, checkpoint=None, offload=False)
"""What is not of interest, so that few settings are tried."""


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **CASES[family][0])).train()


def choice_for(family: str, memory: int, **settings: Any) -> Choice:
    media = CASES[family][1]
    size = media.get("frame_size")
    return choose_for(
        model_of(family), TilingOptions(**settings), given=settings, max_length=TOKENS, device=f"{memory // MIB}MiB",
        media=dict(count=media.get("images"), size=size, frames=media.get("frames")),
    )  # fmt: skip


def held(model: nn.Module, family: str) -> int:
    """Bytes at the peak of the second step of a run, weights, the optimizer's states and the batch included."""
    media = CASES[family][1]
    pictures = read_pictures(model.config, media.get("images"), media.get("frame_size"), frames=media.get("frames"))
    ids = torch.randint(3, 250, (1, TOKENS))
    batch = {"input_ids": ids, **add_pictures(model, pictures, ids)}
    batch["labels"] = ids
    weights = [*model.parameters()]
    optimizer = torch.optim.AdamW(weights, fused=True)
    for _ in range(2):  # the first has the trial of the tower
        with seqtile.count_live_bytes() as live:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    standing = sum(tensor.numel() * tensor.element_size() for tensor in [*weights, *states, *batch.values()])
    return standing + live.peak


@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "llava"])
def test_a_tower_runs_whole_where_it_fits_and_else_in_groups_and_holds_what_was_planned(family: str) -> None:
    whole = choice_for(family, 16 * GIB, **GIVEN)
    grouped = choice_for(family, int(whole.estimate.device.high) - 8 * MIB, **GIVEN)
    assert (whole.options.vision, grouped.options.vision) == (None, "auto")
    peaks = []
    for choice in (whole, grouped):
        planned = sum(value for name, value in choice.estimate.terms.items() if name != CONTEXT)
        model = model_of(family)
        settings = {name: getattr(choice.options, name) for name in TilingOptions.__dataclass_fields__}
        seqtile.apply(model, **settings)
        peaks.append(held(model, family))
        assert 0.8 * planned < peaks[-1] <= 1.01 * planned
        groups = [tower.most_groups for tower in VisionTechnique.installed(model)]
        assert groups == ([] if choice is whole else groups) and all(count > 1 for count in groups)
    assert peaks[1] < peaks[0] - 8 * MIB


def test_a_trainer_with_the_callback_gets_the_same_choice(tmp_path: Path) -> None:
    memory = int(choice_for("llava", 16 * GIB, **GIVEN).estimate.device.high) - 8 * MIB
    model = model_of("llava")
    callback = seqtile.TilingCallback(max_length=TOKENS, images=36, device=f"{memory // MIB}MiB", **GIVEN)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, per_device_train_batch_size=1)
    Trainer(model, arguments, train_dataset=[0], callbacks=[callback])
    assert callback.report is not None and "vision auto" in "; ".join(callback.report.why)
    assert len(VisionTechnique.installed(model)) == 1


@pytest.mark.parametrize(
    ("family", "media", "refusal"),
    [
        ("qwen2_5_vl", dict(images=3), ("images.size-missing", "image_size=")),
        ("qwen2_5_vl", dict(frames=3), ("images.size-missing", "frame_size=")),
        ("qwen2_5_vl", dict(images=300, image_size=(112, 84)), ("images.no-room-for-text", "max_length=")),
        ("llava", dict(frames=3), ("frames.model-unsupported", "images=")),
        ("qwen2_5_vl", dict(images=3, frame_size=(112, 84)), ("frames.with-images", "image_size")),
        ("llava", dict(image_size=(112, 112)), ("frames.with-images", "image_size")),
    ],
)
def test_a_refusal_names_the_argument_of_fit_too(family: str, media: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        seqtile.fit(model_of(family), max_length=TOKENS, device="2GiB", **media)
