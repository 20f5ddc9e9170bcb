"""Tiny models of every architecture the tests name, built from configs; nothing is downloaded."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    __version__,
)

FALCON_READS_POSITIONS = tuple(map(int, __version__.split(".")[:2])) >= (5, 24)
"""Whether Falcon's mask keeps packed documents apart."""

HIDDEN, INTERMEDIATE, VOCABULARY = 40, 88, 68
HEAD_DIM = 16
"""Queries are 64 wide, keys and values 32. Widths are equal only where an architecture makes them so, so that code that
reads a width from the wrong module raises."""

_BASE = dict(
    hidden_size=HIDDEN,
    intermediate_size=INTERMEDIATE,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)

ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": dict(head_dim=HEAD_DIM),
    "mistral": dict(head_dim=HEAD_DIM),
    "qwen2": dict(head_dim=HEAD_DIM),
    "qwen3": dict(head_dim=HEAD_DIM),
    "phi3": dict(head_dim=HEAD_DIM),
    "gemma2": dict(head_dim=HEAD_DIM),
    "gemma3_text": dict(head_dim=HEAD_DIM),
    "gpt2": dict(n_embd=HIDDEN, n_layer=2, n_head=4, n_inner=INTERMEDIATE),
    "opt": dict(ffn_dim=INTERMEDIATE, word_embed_proj_dim=HIDDEN),
    "falcon": dict(ffn_hidden_size=INTERMEDIATE),
    "gpt_neox": {},
    "cohere": dict(head_dim=HEAD_DIM),
    "olmo2": dict(head_dim=HEAD_DIM),
    "glm4": dict(head_dim=HEAD_DIM),
    "mixtral": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=HEAD_DIM),
    "qwen3_moe": dict(num_experts=6, head_dim=HEAD_DIM, decoder_sparse_step=1, **_EXPERTS),
    "deepseek_v3": dict(
        n_routed_experts=6,
        n_group=1,
        topk_group=1,
        q_lora_rank=20,
        kv_lora_rank=28,
        qk_rope_head_dim=8,
        qk_nope_head_dim=10,
        v_head_dim=14,
        first_k_dense_replace=1,
        **{**_EXPERTS, "num_key_value_heads": 4},
    ),
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=2, head_dim=HEAD_DIM),
}
_MAMBA = dict(mamba_n_heads=10, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=6, mamba_chunk_size=4)
HYBRIDS: dict[str, dict[str, object]] = {
    "qwen3_5_text": dict(
        head_dim=HEAD_DIM,
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        layer_types=["linear_attention", "full_attention"],
    ),
    "bamba": dict(attn_layer_indices=[1], head_dim=HEAD_DIM, **_MAMBA),
    "lfm2": dict(head_dim=HEAD_DIM, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
}
"""Models with a layer that carries a state and one with attention."""
TILED_BLOCKS = {name: 3 if name == "deepseek_v3" else 2 for name in ARCHITECTURES}
"""Blocks of each tiny model: one per layer, and DeepSeek-V3's dense MLP, experts and shared experts."""


EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Architectures with routed experts; their grouped product takes no float64."""


def exact_dtype(architecture: str) -> torch.dtype:
    return torch.float32 if architecture in EXPERTS else torch.float64


def causal_lm(architecture: str, dtype: torch.dtype = torch.float32, **config: object) -> nn.Module:
    """A tiny causal language model in training mode, without dropout unless ``config`` asks for it."""
    settings = {**_BASE, **ARCHITECTURES.get(architecture, {}), **HYBRIDS.get(architecture, {}), **config}
    for name in ("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"):
        settings.setdefault(name, 0.0)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **settings)).to(dtype).train()


_T5 = dict(d_model=HIDDEN, d_ff=INTERMEDIATE, d_kv=HEAD_DIM, num_heads=4, num_layers=2, dropout_rate=0.0)
_BART = dict(d_model=HIDDEN, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
             encoder_ffn_dim=INTERMEDIATE, decoder_ffn_dim=INTERMEDIATE, activation_dropout=0.0)  # fmt: skip
ENCODERS: dict[str, dict[str, object]] = {
    "bert": {},
    "roberta": {},
    "modernbert": dict(cls_token_id=1, sep_token_id=2),
    "mpnet": {},
}
SEQ2SEQ: dict[str, dict[str, object]] = {
    "t5": _T5,
    "mt5": dict(feed_forward_proj="gated-gelu", **_T5),
    "bart": _BART,
    "mbart": _BART,
    "pegasus": _BART,
    "switch_transformers": dict(
        num_experts=4,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        router_jitter_noise=0.0,
        **_T5,
    ),
}


def with_encoder(architecture: str, dtype: torch.dtype = torch.float32, **config: object) -> nn.Module:
    """A tiny encoder (masked language model) or encoder-decoder model in training mode, without dropout."""
    auto = AutoModelForMaskedLM if architecture in ENCODERS else AutoModelForSeq2SeqLM
    settings = {**_BASE, **(ENCODERS | SEQ2SEQ)[architecture]}
    settings |= dict(decoder_start_token_id=0, forced_eos_token_id=2) if architecture in SEQ2SEQ else {}
    for name in ("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout"):
        settings.setdefault(name, 0.0)
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model(architecture, **settings | config)).to(dtype).train()


def vision_language_model(dtype: torch.dtype = torch.float32, architecture: str = "qwen2_vl") -> nn.Module:
    """A tiny Qwen2-VL, Qwen2.5-VL or Qwen3.5: a vision tower with MLPs of its own beside the language model."""
    text = {
        **_BASE,
        **HYBRIDS.get(f"{architecture}_text", {}),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 2]},
    }
    vision = dict(depth=1, hidden_size=48, num_heads=4, patch_size=4)
    if architecture == "qwen2_vl":
        vision |= dict(embed_dim=48, hidden_size=HIDDEN, mlp_ratio=2)
    else:
        vision |= dict(out_hidden_size=HIDDEN, intermediate_size=56)
        vision |= dict(window_size=16) if architecture == "qwen2_5_vl" else {}
    marks = dict(image_token_id=60, video_token_id=61, vision_start_token_id=62, vision_end_token_id=63)
    config = AutoConfig.for_model(architecture, text_config=text, vision_config=vision, **marks)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).to(dtype).train()


def picture_and_text(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A batch for it: one picture of 4 by 4 patches, four tokens, in a text, with positions in three dimensions."""
    ids = torch.tensor([[5, 62, 60, 60, 60, 60, 63, 7, 8, 9, 10, 11, 12]])
    place = torch.arange(ids.shape[1])
    height, width = place.clone(), place.clone()
    height[2:6], width[2:6] = torch.tensor([2, 2, 3, 3]), torch.tensor([2, 3, 2, 3])
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator, device="cpu").to(ids.device, dtype)
    return {
        "input_ids": ids,
        "labels": ids,
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "position_ids": torch.stack([place, height, width]).unsqueeze(1),
    }


def tokens(batch: int = 2, length: int = 13, seed: int = 1) -> Tensor:
    """The same on every device: drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(3, VOCABULARY, (batch, length), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def gradients(model: nn.Module, batch: Tensor | dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one step from clean gradients, of token ids or a whole batch."""
    model.zero_grad()
    loss = model(**(batch if isinstance(batch, dict) else dict(input_ids=batch, labels=batch))).loss
    loss.backward()
    return loss.detach(), {name: copy.copy(p.grad) for name, p in model.named_parameters()}


def assert_same_gradients(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Equal as ``assert_close`` judges, on the scale of the largest gradient of the model (some are zero in theory)."""
    assert got.keys() == expected.keys()
    scale = max(g.abs().max().item() for g in expected.values() if g is not None)
    assert scale > 0
    for name, reference in expected.items():
        value = got[name]
        assert (value is None) == (reference is None), f"{name}: got {value}, expected {reference}"
        if reference is not None and value is not None:
            rtol = 1e-7 if value.dtype == torch.float64 else 1.3e-6
            torch.testing.assert_close(
                value, reference, rtol=rtol, atol=10 * rtol * scale, msg=lambda text, name=name: f"{name}: {text}"
            )
