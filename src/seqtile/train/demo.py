"""The embedded default: a small Qwen3 model on the source files of the running interpreter's standard library.

Real text and long documents on every machine, and nothing is downloaded. The tokenizer (byte-level BPE, 2,048
tokens) is trained on the same text, in about two seconds.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from seqtile._errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3Config

VOCAB_SIZE = 2048
MAX_POSITIONS = 32768
END_OF_TEXT = "<|endoftext|>"
TEXT_BYTES = 4_000_000
"""How much source text is read: about 1.5M tokens, six times what the default run sees."""


def library_text() -> list[str]:
    """The first :data:`TEXT_BYTES` of the standard library's top-level source files, one string per file."""
    texts, left = [], TEXT_BYTES
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        # _sysconfigdata has the build's settings, which differ between machines.
        if left > 0 and file.stat().st_size and not file.name.startswith("_sysconfigdata"):
            texts.append(file.read_bytes()[:left].decode("utf-8", errors="replace"))
            left -= len(texts[-1].encode())
    return texts


def load_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_tokenizer(),
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
    )


def demo_rows(tokenizer: PreTrainedTokenizerBase, max_length: int) -> Dataset:
    """The library's text, tokenised, joined with end-of-text tokens and cut into rows of ``max_length`` tokens."""
    from datasets import Dataset

    tokens: list[int] = []
    for text in library_text():
        tokens += tokenizer(text, verbose=False)["input_ids"] + [tokenizer.eos_token_id]
    rows = [tokens[start : start + max_length] for start in range(0, len(tokens) - max_length + 1, max_length)]
    if not rows:
        raise UserError(
            "demo.max-length-too-large",
            f"the demo's dataset has {len(tokens):,} tokens, fewer than max_length {max_length:,}; use a smaller "
            "--max-length",
        )
    return Dataset.from_dict({"input_ids": rows})


def build_demo_model(seed: int, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A Qwen3 model of 2.5M parameters with random weights, the same for the same seed."""
    import torch
    from transformers import Qwen3ForCausalLM

    config = build_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def build_config(tokenizer: PreTrainedTokenizerBase | None = None) -> Qwen3Config:
    """The model's sizes; its special tokens where the tokenizer is known."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
        pad_token_id=None if tokenizer is None else tokenizer.pad_token_id,
    )


@functools.cache
def _train_tokenizer() -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    # Source code: a line break with its indentation is one piece, so that 30 steps already learn where words begin.
    pieces = pre_tokenizers.Split(Regex(r"\n[ ]*|[ ]+|\w+|[^\w\s]|\s"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(library_text(), trainer)
    return tokenizer
