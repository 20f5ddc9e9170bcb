"""A tiny model directory and datasets, for tests that run the trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

POSITIONS = 256
LENGTH = 64
SENTENCES = [f"the {noun} {verb} the {thing}." for noun in ("cat", "dog", "bird", "child", "king")
             for verb in ("sees", "wants", "finds") for thing in ("house", "river", "old book")]  # fmt: skip


def save_tokenizer(directory: Path) -> int:
    """Write a byte-level tokenizer without merges; returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<end>{% endfor %}"
    fast.save_pretrained(directory)
    return len(symbols)


def save_model(directory: Path, **config: Any) -> Path:
    """Write a Llama of two layers, hidden 32 and MLP 96, with the tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab = save_tokenizer(directory)
    values = dict(
        vocab_size=vocab, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=20, max_position_embeddings=POSITIONS, bos_token_id=None,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**values, **config})).save_pretrained(directory)
    return directory


def save_llava(directory: Path, chat_template: str | None = None) -> Path:
    """Write a LLaVA of two decoder layers over a CLIP tower of two, for pictures of 28 x 28, with its processor."""
    import torch
    import transformers
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    save_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = dict(hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    tower = {**sizes, "hidden_size": 24, "intermediate_size": 60}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**tower, image_size=28, patch_size=14),
        text_config=LlamaConfig(**sizes, vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=20,
                                max_position_embeddings=4096, bos_token_id=None, eos_token_id=0, pad_token_id=0),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"), vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(directory)
    pictures = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    transformers.LlavaProcessor(
        pictures, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=chat_template or tokenizer.chat_template,
    ).save_pretrained(directory)  # fmt: skip
    return directory


PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<end>{% endfor %}"
)
"""A chat template for texts, pictures and videos."""


def save_qwen_vl(directory: Path, family: str = "qwen2_5_vl") -> Path:
    """Write a Qwen2.5-VL of two decoder layers over a tower of three, with a processor that needs Pillow alone."""
    import transformers

    from tiny_processor import TinyProcessor
    from vision_zoo import FAMILIES, picture_model

    save_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    names = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    keys = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = {**FAMILIES[family]["text_config"], "vocab_size": len(tokenizer), "eos_token_id": 0}
    marks = dict(zip(keys, tokenizer.convert_tokens_to_ids(names), strict=True))
    picture_model(family, text_config=text, **marks).save_pretrained(directory)
    pictures = transformers.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 64, "longest_edge": 4096}
    )
    TinyProcessor.register_for_auto_class()
    TinyProcessor(pictures, tokenizer, chat_template=PARTS_TEMPLATE).save_pretrained(directory)
    return directory


def save_picture(path: Path, seed: int, height: int = 28, width: int = 28) -> Path:
    """Write a PNG of random pixels."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(path)
    return path


def picture_rows(folder: Path, pictures: int = 20, videos: int = 5) -> list[dict[str, Any]]:
    """Rows about a picture of unlike sizes, and about a video of four frames; files are in ``folder``."""
    rows: list[dict[str, Any]] = []
    for number in range(pictures):
        save_picture(folder / f"{number}.png", number, 16 + 8 * (number % 3), 24)
        rows.append(_about({"type": "image", "image": f"{number}.png"}, f"the cat{' sees' * (number % 4)} {number}."))
    for number in range(videos):
        names = [f"video{number}-{frame}.png" for frame in range(4)]
        for frame, name in enumerate(names):
            save_picture(folder / name, 100 + 4 * number + frame, 16, 24)
        rows.append(_about({"type": "video", "video": names}, f"the dog {number}."))
    return rows


def _about(part: dict[str, Any], answer: str) -> dict[str, Any]:
    asked = {"role": "user", "content": [part, {"type": "text", "text": "what is it?"}]}
    return {"messages": [asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]}


def load_weights(directory: Path) -> dict[str, Any]:
    """The weights of a directory that :func:`save_model` wrote."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def mean_loss(saved: Path, data: Path, batch_size: int, max_length: int) -> float:
    """The mean over texts of a token's mean loss in their batch, by Transformers' model on each text alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(saved), AutoTokenizer.from_pretrained(saved)
    texts = [json.loads(line)["text"] for line in data.read_text(encoding="utf-8").splitlines()]
    total = 0.0
    for first in range(0, len(texts), batch_size):
        batch = texts[first : first + batch_size]
        losses: list[Any] = []
        for text in batch:
            ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id][:max_length]])
            with torch.no_grad():
                losses += torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        total += len(batch) * float(torch.stack(losses).mean())
    return total / len(texts)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text_rows(count: int = 12) -> list[dict[str, Any]]:
    """Documents of about 80 characters, and so of about 80 tokens."""
    return [{"text": " ".join(SENTENCES[(7 * row + k) % len(SENTENCES)] for k in range(4))} for row in range(count)]
