"""Tiny models that take pictures and videos, with unequal widths, and batches for them; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE, VIDEO, START, END = 60, 61, 62, 63
_TEXT = dict(
    hidden_size=40,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=68,
    max_position_embeddings=4096,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_NARROW = {name: size for name, size in _TEXT.items() if name != "head_dim"}  # their heads are as wide as they come
_ROPE_10 = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 2]})
_ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]})
_LINEAR = dict(linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=8, linear_value_head_dim=12)
_MARKS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
_GRID = dict(depth=3, hidden_size=48, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
_CLIP = dict(
    hidden_size=48, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4
)
_CLIP_TOWER = dict(model_type="clip_vision_model", projection_dim=20, **_CLIP)
_LLAMA, _QWEN = dict(model_type="llama", **_TEXT), dict(model_type="qwen2", **_TEXT)
_QWEN3_GRID = dict(**_GRID, intermediate_size=56, out_hidden_size=40, num_position_embeddings=36)
_DEEPSTACK = dict(**_QWEN3_GRID, deepstack_visual_indexes=[0, 1])
_EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
_PINPOINTS = dict(image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]])

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": dict(
        text_config={**_NARROW, **_ROPE_10},
        vision_config={**_GRID, "embed_dim": 48, "hidden_size": 40, "mlp_ratio": 2},
        **_MARKS,
    ),
    "qwen2_5_vl": dict(
        text_config={**_NARROW, **_ROPE_10},
        vision_config=dict(
            **_GRID, intermediate_size=56, out_hidden_size=40, window_size=16, fullatt_block_indexes=[1]
        ),
        **_MARKS,
    ),
    "qwen3_vl": dict(text_config={**_TEXT, **_ROPE}, vision_config=_DEEPSTACK, **_MARKS),
    "qwen3_vl_moe": dict(text_config={**_TEXT, **_ROPE, **_EXPERTS}, vision_config=_DEEPSTACK, **_MARKS),
    "qwen3_5": dict(
        text_config={**_TEXT, **_ROPE, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        vision_config=_QWEN3_GRID,
        **_MARKS,
    ),
    "glm4v": dict(
        text_config={**_NARROW, "rope_parameters": {**_ROPE_10["rope_parameters"], "partial_rotary_factor": 1.0}},
        vision_config=dict(**_GRID, out_hidden_size=40, intermediate_size=56, image_size=16),
        **_MARKS,
    ),
    "llava": dict(text_config=_LLAMA, vision_config=_CLIP_TOWER, image_token_id=IMAGE),
    "llava_next": dict(text_config=_LLAMA, vision_config=_CLIP_TOWER, image_token_id=IMAGE, **_PINPOINTS),
    "llava_next_video": dict(
        text_config=_LLAMA, vision_config=_CLIP_TOWER, image_token_id=IMAGE, video_token_id=VIDEO, **_PINPOINTS
    ),
    "gemma3": dict(
        text_config=dict(model_type="gemma3_text", **_TEXT),
        vision_config=dict(model_type="siglip_vision_model", **_CLIP),
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_id=START,
        eoi_token_id=END,
    ),
    "internvl": dict(
        text_config=_QWEN,
        vision_config=dict(model_type="internvl_vision", **{**_CLIP, "image_size": [16, 16], "patch_size": [4, 4]}),
        image_token_id=IMAGE,
    ),
    "smolvlm": dict(text_config=_LLAMA, vision_config=_CLIP, image_token_id=IMAGE, scale_factor=2),
    "idefics3": dict(text_config=_LLAMA, vision_config=_CLIP, image_token_id=IMAGE, scale_factor=2),
    "mistral3": dict(
        text_config=dict(model_type="mistral", **_TEXT),
        vision_config=dict(model_type="pixtral", head_dim=12, **{**_CLIP, "image_size": 32}),
        spatial_merge_size=2,
        image_token_id=IMAGE,
    ),
    "paligemma": dict(
        text_config=dict(model_type="gemma", **_TEXT),
        vision_config=dict(model_type="siglip_vision_model", projection_dim=40, **_CLIP),
        projection_dim=40,
        image_token_id=IMAGE,
    ),
}

BY_GRID = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v")
"""Families whose pixels are flat patches with a grid."""

VIDEOS = (*BY_GRID, "llava_next_video")
"""Families that take videos apart from pictures."""


def picture_model(family: str, dtype: torch.dtype = torch.float32, **config: Any) -> nn.Module:
    """A tiny model of ``family`` in training mode."""
    torch.manual_seed(0)
    settings = AutoConfig.for_model(family, **{**FAMILIES[family], **config})
    return AutoModelForImageTextToText.from_config(settings).to(dtype).train()


def pixels_of(
    family: str, pictures: int, dtype: torch.dtype, *, video: bool = False, size: int = 1, seed: int = 3
) -> dict[str, Tensor]:
    """Pixels of pictures of unlike sizes where the family has such, or frames of one video, and what says where."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    name = "pixel_values_videos" if video else "pixel_values"
    if family in BY_GRID:
        grid = torch.tensor(
            [[pictures, 4 * size, 6 * size]] if video else [[1, 4 + 2 * (n % 3), 6] for n in range(pictures)]
        )
        return {name: draw(int(grid.prod(-1).sum()), 96), f"{'video' if video else 'image'}_grid_thw": grid}
    if video:
        return {name: draw(1, pictures, 3, 16, 16)}
    if family in ("smolvlm", "idefics3"):
        pixels = draw(2, pictures // 2 + 1, 3, 16, 16)
        pixels[1, -1] = 0  # fills the row up
        return {name: pixels}
    if family.startswith("llava_next"):
        sizes = torch.tensor([[16, 32], [30, 16], [32, 32]])[torch.arange(pictures) % 3]
        return {name: draw(pictures, 5, 3, 16, 16), "image_sizes": sizes}
    if family == "mistral3":
        sizes = torch.tensor([[16, 32], [24, 16], [32, 32]])[torch.arange(pictures) % 3]
        return {name: draw(pictures, 3, 32, 32), "image_sizes": sizes}
    return {name: draw(pictures, 3, 16, 16)}


def owner_of(model: nn.Module) -> nn.Module:
    """The module whose methods compute features."""
    return model.model  # type: ignore[return-value]


@torch.no_grad()
def features_of(model: nn.Module, pixels: Mapping[str, Tensor]) -> int:
    """How many tokens the pixels become."""
    method = "get_video_features" if any("video" in name for name in pixels) else "get_image_features"
    result = getattr(owner_of(model), method)(*pixels.values(), return_dict=True)
    pooled = result.pooler_output
    return sum(rows.shape[:-1].numel() for rows in ([pooled] if isinstance(pooled, Tensor) else pooled))


def batch_of(model: nn.Module, *every: Mapping[str, Tensor], rows: int = 2, text: int = 5) -> dict[str, Tensor]:
    """A batch whose first rows have the pictures between words, and whose last row of ``rows`` has none where it can.

    A row without pictures is filled up with padding behind its text.
    """
    ids: list[list[int]] = [[3 + number, *range(7, 7 + text)] for number in range(rows)]
    with_pictures = max(1, rows - 1)
    for pixels in every:
        mark = VIDEO if model.config.model_type != "glm4v" and any("video" in name for name in pixels) else IMAGE
        total = features_of(model, pixels)
        share = -(-total // with_pictures)
        for number in range(with_pictures):
            count = min(share, total - number * share)
            ids[number] += [START, *[mark] * count, END, 9, 10, 11]
    length = max(map(len, ids))
    padded = torch.tensor([row + [0] * (length - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in ids])
    labels = padded.masked_fill(mask == 0, -100)
    batch = {"input_ids": padded, "labels": labels, "attention_mask": mask}
    for pixels in every:
        batch |= pixels
    kind = torch.zeros_like(padded)
    family = model.config.model_type  # type: ignore[union-attr]
    if family in BY_GRID:
        place = torch.arange(length).expand(rows, -1)
        batch["position_ids"] = torch.stack([place, place // 2, place % 5])
    if family in ("gemma3", "paligemma"):
        batch["token_type_ids"] = kind.masked_fill(padded == IMAGE, 1) if family == "gemma3" else kind
    return batch


def sound_model(dtype: torch.dtype) -> nn.Module:
    """A tiny Qwen2.5-Omni, the part that listens."""
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    torch.manual_seed(0)
    layers = dict(encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=52, d_model=24)
    vision = FAMILIES["qwen2_5_vl"]["vision_config"]
    config = Qwen2_5OmniThinkerConfig(
        text_config={**_NARROW, **_ROPE_10},
        vision_config=vision,
        audio_config=dict(num_mel_bins=12, n_window=5, output_dim=40, max_source_positions=64, **layers),
        pad_token_id=0,
    )
    return Qwen2_5OmniThinkerForConditionalGeneration(config).to(dtype).train()
