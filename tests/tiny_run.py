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
        num_key_value_heads=1, max_position_embeddings=POSITIONS, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**values, **config})).save_pretrained(directory)
    return directory


def load_weights(directory: Path) -> dict[str, Any]:
    """The weights of a directory that :func:`save_model` wrote."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def text_rows(count: int = 12) -> list[dict[str, Any]]:
    """Documents of about 80 characters, and so of about 80 tokens."""
    return [{"text": " ".join(SENTENCES[(7 * row + k) % len(SENTENCES)] for k in range(4))} for row in range(count)]
