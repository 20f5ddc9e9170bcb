"""Four steps on a video with a tiny Qwen2.5-VL made here, on the CPU, whole and with its tower in groups of frames.

python examples/scripts/long_video.py --frames 64 --group 4
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import seqtile
from seqtile.counting.live import count_live_bytes

VIDEO, START, END = 61, 62, 63
PATCHES, MERGED = 8 * 8, 4 * 4  # of a frame: a patch has 4 x 4 pixels, and 2 x 2 patches are one token


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, rope_parameters=rope)
    vision = dict(depth=4, num_heads=4, patch_size=4, out_hidden_size=64, spatial_merge_size=2, temporal_patch_size=2)
    ids = dict(image_token_id=60, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
    parts = dict(text_config={**sizes, **text}, vision_config={**sizes, **vision})
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen2_5_vl", **parts, **ids)).train()


def video(times: int) -> dict[str, torch.Tensor]:
    """A row with a video of noise and a few words, as a processor gives it; two frames are one patch in time."""
    ids = torch.tensor([[1, START, *[VIDEO] * (times * MERGED), END, 7, 8, 9]])
    row = {"input_ids": ids, "labels": ids.masked_fill(ids == VIDEO, -100), "mm_token_type_ids": (ids == VIDEO) * 2}
    return dict(row, pixel_values_videos=torch.randn(times * PATCHES, 96), video_grid_thw=torch.tensor([[times, 8, 8]]))


def main(words: list[str] | None = None) -> dict[str, int]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--group", type=int, default=4, help="frames per group of the tower")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(words)
    peaks = {}
    for name, vision in (("whole", None), (f"groups of {options.group} frames", options.group // 2)):
        model, batch = tiny_model(), video(options.frames // 2)
        print(name, "-", seqtile.apply(model, blocks="none", loss="tiled", vision=vision))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(options.steps):
            with count_live_bytes() as live:
                loss = model(**batch, use_cache=False).loss
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"  loss {loss.item():.5f}, peak {live.peak / 2**20:.2f} MiB above the weights")
        peaks[name] = live.peak
    return peaks


if __name__ == "__main__":
    main()
