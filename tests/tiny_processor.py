"""A processor as Qwen2.5-VL's, for pictures and lists of frames, that needs Pillow alone; saved beside a tiny model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BatchFeature
from transformers.processing_utils import MultiModalData, ProcessorMixin

OF_TEXT = ("padding", "padding_side", "truncation", "max_length", "add_special_tokens", "pad_to_multiple_of")


class TinyProcessor(ProcessorMixin):
    """Every frame is a grid of its own; real processors join two, and write a time before each, not before a video."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])

    def __call__(self, images: Any = None, text: Any = None, videos: Any = None, **kwargs: Any) -> BatchFeature:
        data: dict[str, Any] = {}
        texts = [text] if isinstance(text, str) else [*text]
        texts = self._place(
            texts, self.image_token, [[picture] for row in images or () for picture in row], "image", data
        )
        clips = [video for row in videos or () for video in row]
        if kwargs.get("do_sample_frames", True):  # as Qwen3-VL's does with a list of frames, too
            clips = [video[::2] for video in clips]
        for number, metadata in enumerate(kwargs.get("video_metadata", ())):
            # Qwen3-VL writes the time of each frame.
            mark, length = f"<video {number}>", metadata["total_num_frames"]
            texts = "\0".join(texts).replace(self.video_token, mark, 1).split("\0")
            seconds = f"<{length / (metadata['fps'] or 24):.1f} seconds>"
            texts = [text.replace(mark, seconds + "<placed>") for text in texts]
        texts = [text.replace("<placed>", self.video_token) for text in texts]
        texts = self._place(texts, self.video_token, clips, "video", data)
        tokens = self.tokenizer(texts, **{name: kwargs[name] for name in OF_TEXT if name in kwargs})
        ids = tokens["input_ids"]
        kinds = {self.image_token_id: 1, self.video_token_id: 2}
        data |= {**tokens, "mm_token_type_ids": [[kinds.get(token, 0) for token in row] for row in ids]}
        return BatchFeature(data, tensor_type=kwargs.get("return_tensors"))

    def _place(
        self, texts: list[str], token: str, clips: list[list[Any]], kind: str, data: dict[str, Any]
    ) -> list[str]:
        if sum(text.count(token) for text in texts) != len(clips):
            raise ValueError(f"{len(clips)} files for other places of {token}")
        if not clips:
            return texts
        pixels, grids = [], []
        for frames in clips:
            every = [self.image_processor(frame, return_tensors="pt") for frame in frames]
            pixels += [one["pixel_values"] for one in every]
            _, height, width = every[0]["image_grid_thw"][0].tolist()
            grids.append([len(frames), height, width])
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        data |= {name: torch.cat(pixels), f"{kind}_grid_thw": torch.tensor(grids)}
        counts = iter(frames * height * width // 4 for frames, height, width in grids)
        return ["".join(self._repeated(text.split(token), token, counts)) for text in texts]

    @staticmethod
    def _repeated(pieces: list[str], token: str, counts: Any) -> list[str]:
        return [pieces[0], *(token * next(counts) + piece for piece in pieces[1:])]

    def _get_num_multimodal_tokens(self, image_sizes: Any = (), video_sizes: Any = ()) -> MultiModalData:
        def patches(height: int, width: int) -> int:
            return int(self.image_processor.get_number_of_image_patches(height, width, {}))

        return MultiModalData(
            num_image_tokens=[patches(*size) // 4 for size in image_sizes],
            num_video_tokens=[frames * patches(*size) // 4 for frames, *size in video_sizes],
        )
