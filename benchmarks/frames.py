"""Memory of a vision tower by frames, whole and in groups: bytes of live tensors, counted on shapes.

Run it from the repository; no GPU and no weights are needed::

    python benchmarks/frames.py    # into benchmarks/results/frames.jsonl; then docs/tables.py

One forward and backward of the features of a video of 448 x 448 pixels, with 8 of the 32 layers of Qwen2.5-VL-7B's
tower and its projector, in bf16 and with flash attention. The model's own weights are not counted; gradients, pixels
and features are.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from environment import append_rows, environment, stamp
from seqtile.counting.fake import fake_tensors, make_fake
from seqtile.counting.live import count_live_bytes
from seqtile.options import TilingOptions
from seqtile.planner.fake_step import build
from seqtile.planner.pictures import add_pictures, known_grids, read_pictures
from seqtile.planner.step_config import Setup
from seqtile.vision.install_vision import VisionTechnique

RESULTS = Path(__file__).parent / "results" / "frames.jsonl"
FRAMES = (4, 16, 64, 180)
SIZE = (448, 448)
GROUP = 2
"""Of patches of two frames each: four frames."""


def config() -> Any:
    """Qwen2.5-VL-7B with one decoder layer and a quarter of its tower's layers."""
    text = dict(
        hidden_size=3584, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=1024, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )  # fmt: skip
    vision = dict(
        depth=8, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=3584, window_size=112, fullatt_block_indexes=[7],
    )  # fmt: skip
    marks = dict(image_token_id=1001, video_token_id=1002, vision_start_token_id=1003, vision_end_token_id=1004)
    return AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **marks)


def count(frames: int, group: int | None, *, trained: bool) -> dict[str, Any]:
    """Peak of the features' forward and backward, and the bytes of the features."""
    pictures = read_pictures(config(), size=SIZE, frames=frames)
    options = replace(TilingOptions(), blocks="none", vision=group)
    model = build(config(), Setup(torch.bfloat16, options=options, attention="flash", pictures=pictures), "meta").model
    owner: Any = model.model
    owner.visual.requires_grad_(trained)
    with fake_tensors(), known_grids(model, pictures.tokens, whole=True):
        make_fake(model)
        ids = torch.zeros(1, pictures.tokens + 1, dtype=torch.long)
        given = add_pictures(model, pictures, ids)
        arguments = given["pixel_values_videos"].bfloat16(), given["video_grid_thw"]
        del given, ids
        for again in (False, True):  # the first call verifies groups
            with count_live_bytes() as live:
                for tower in VisionTechnique.installed(model):
                    tower.live_bytes = lambda live=live: live.now
                features = owner.get_video_features(*arguments, return_dict=True).pooler_output
                size = sum(rows.numel() * rows.element_size() for rows in features)
                if trained:
                    torch.cat([*features]).sum().backward()
                del features
            if not again:
                owner.visual.zero_grad(set_to_none=True)
                gc.collect()
    return {"frames": frames, "group": group, "trained": trained, "tokens": pictures.tokens, "feature_bytes": size,
            "peak_bytes": live.peak}  # fmt: skip


def main() -> None:
    machine = environment()
    RESULTS.unlink(missing_ok=True)
    for frames in FRAMES:
        for trained in (True, False):
            for group in (None, GROUP):
                row = count(frames, group, trained=trained)
                print({**row, "peak_gib": round(row["peak_bytes"] / 2**30, 3)}, flush=True)
                append_rows(RESULTS, [{**stamp(machine), **row}])


if __name__ == "__main__":
    main()
