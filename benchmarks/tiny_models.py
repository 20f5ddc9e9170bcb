"""Tiny models of every architecture in transformers: configs made smaller by the names of their fields, and batches.

Nothing is downloaded. A config's own defaults are what is made smaller: widths, layers, heads, experts, vocabulary and
pictures, in nested configs too. Lists with one entry per layer keep one layer of each kind, so that a model that mixes
attention with state-space layers, or dense with sparse ones, still has both. What the names do not tell is in
``OVERRIDES``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

HIDDEN, INTERMEDIATE, EXPERT_INTERMEDIATE, HEADS, HEAD_DIM, VALUE_HEAD_DIM = 96, 136, 40, 4, 16, 12
VOCABULARY, POSITIONS = 120, 128
BATCH, LENGTH = 2, 13
MAX_PARAMETERS = 100_000_000
MAX_LAYERS = 4
"""Layers of a model that has this many kinds or more; two where all are of one kind."""

AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForPreTraining",
    "AutoModel",
    "AutoModelForTextToWaveform",
    "AutoModelForTextToSpectrogram",
    "AutoModelForObjectDetection",
    "AutoModelForDepthEstimation",
    "AutoModelForSemanticSegmentation",
    "AutoModelForUniversalSegmentation",
    "AutoModelForImageClassification",
    "AutoBackbone",
)

# (pattern of the field's whole name, its size in a tiny model); the first that matches counts, and none makes larger.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"\w*vocab_size\w*", VOCABULARY),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"\w*(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks|resampler_depth)"
     r"|depth|layers|prelude_layers|num_\w*_layers", 2),
    (r"mamba_n_heads|mamba_num_heads", 2 * HIDDEN // HEAD_DIM),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"n_group|topk_group|num_expert_groups?|n_groups|mamba_n_groups|mamba_ngroups", 1),
    (r"\w*(num_key_value_heads|num_kv_heads|n_kv_heads|n_head_kv|num_key_value_groups)", 2),
    (r"linear_num_key_heads", HEADS // 2),
    (r"\w*(num_attention_heads|n_heads?|num_heads|attention_heads|num_attn_heads|heads)|linear_num_\w+_heads", HEADS),
    (r"qk_rope_head_dim", HEAD_DIM // 2),
    (r"qk_nope_head_dim", 10),
    (r"(linear_)?(v|value)_head_dim", VALUE_HEAD_DIM),
    (r"\w*(head_dim|dim_head|d_kv|d_head|head_size|kv_channels)", HEAD_DIM),
    (r"(?!index_)\w*(num_experts_per_tok(en)?|experts_per_token|moe_top_?k|top_k_experts|moe_k|topk|top_k)", 2),
    (r"\w*(num|n|moe)\w*experts", 5),
    (r"(moe|expert|shared)\w*(intermediate_size|ffn\w*|hidden_size)\w*", EXPERT_INTERMEDIATE),
    (r"\w*(intermediate_(size|dim)\w*|ffn_dim|d_ff|mlp_dim|ffn_hidden_size|n_inner|d_inner|inner_dim|feedforward_dim"
     r"|feed_forward_(size|hidden_size)|linear_units|dim_feedforward|mlp_hidden_size|ffn_size)", INTERMEDIATE),
    (r"q_lora_rank", 28),
    (r"\w*(lora_rank|lowrank|low_rank_dim|laurel_rank|lora_r)", 20),
    (r"\w*(max_position_embeddings|n_positions|max_seq(uence)?_len(gth)?|n_ctx|max_(source|target)_positions"
     r"|max_text_len|num_position_embeddings)", POSITIONS),
    (r"\w*(d_state|state_size)|mamba_dt_rank|time_step_rank|rotary_dim", 6),
    (r"num_filters", 4),
    (r"(vision_|image_|input_)?image_size|input_size|resolution", 32),
    (r"\w*patch_size", 8),
    (r"window_size|attention_window|local_attention", 4),
    (r"\w*(hidden_(size|dim|channels)\w*|d_model|n_embd|embed_dim|embedding_size|emb_dim|embedding_dim|embd_dim"
     r"|proj(ection)?_(dim|size)\w*|model_dim|output_dim|word_embed_proj_dim|lru_width|d_embed|embed_dims?"
     r"|out_dim|fpn_hidden_size|query_dim|adapter_\w*dim|dim|encoder_dim|decoder_dim|ple_dim|width|upsample_groups)",
     HIDDEN),
)  # fmt: skip
_SIZES_OF = [(re.compile(pattern), size) for pattern, size in _SIZES]
_NOT_SIZES = {"transformers_version", "architectures", "dtype", "id2label", "label2id", "output_hidden_states"}
_TOKEN = re.compile(r"\w*(token_(id|ids|index)|_idx|_index|_id|token_id\w*)")
_LAYER_COUNT = re.compile(r"(num_hidden_layers|n_layers?|num_layers|depth|layers|encoder_layers|decoder_layers)")
_LAYERS = re.compile("layer|attention_types|first_k_dense_replace")
_RANDOM = re.compile(
    r"(?!.*(norm|position)).*(dropout|pdrop|layerdrop|drop_rate|drop_path|droppath|drop_|jitter|mask_(time|feature)_prob"
    r"|dropout_prob|drop_connect|label_noise|noise_scale).*"
)
"""Fields that make a training step random: dropouts of all kinds, and noise."""


def tiny_config(architecture: str, *, narrow: bool = True, random: bool = True) -> PreTrainedConfig:
    """The config of a tiny model of ``architecture`` (a ``model_type`` of transformers).

    Args:
        architecture: a key of ``CONFIG_MAPPING``.
        narrow: make widths smaller too; otherwise only layers, experts, vocabulary and positions.
        random: keep the dropout and noise that the config has by default; False switches all off.
    """
    config = _shrunk(CONFIG_MAPPING[architecture](**ARGUMENTS.get(architecture, {})), narrow, random, {})
    for one in _all(config):
        one.use_cache = False  # a training step needs none
        if getattr(config, "is_encoder_decoder", False):
            for name in ("decoder_start_token_id", "pad_token_id"):  # what makes the decoder's tokens of the labels
                if getattr(one, name, None) is None:
                    setattr(one, name, 0)
    return config


def released_config(architecture: str) -> PreTrainedConfig:
    """The default config of ``architecture``, in most families a released model's, with one layer of each kind."""
    config = _shrunk(CONFIG_MAPPING[architecture](**ARGUMENTS.get(architecture, {})), None, True, {})
    for one in _all(config):
        one.use_cache = False
    return config


def _shrunk(default: PreTrainedConfig, narrow: bool | None, random: bool, tokens: dict[int, int]) -> PreTrainedConfig:
    """A config with fewer layers; unless ``narrow`` is None smaller in other sizes too, in widths if it is true."""
    names = {field.name for field in dataclasses.fields(default)} - _NOT_SIZES
    fields = {name: value for name, value in vars(default).items() if name in names and value is not None}
    layers = next((v for k, v in fields.items() if _LAYER_COUNT.fullmatch(k) and isinstance(v, int)), 0)
    layers = layers or next((len(v) for k, v in fields.items() if re.search("layers?_(block_)?types?$", k)), 0)
    per_layer = {int(layer): changes for layer, changes in (default.to_dict().get("per_layer_config") or {}).items()}
    kept = _kept_layers(fields, layers, per_layer)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            small[name] = _shrunk(value, narrow, random, tokens)
        elif not random and _RANDOM.fullmatch(name) and isinstance(value, float):
            small[name] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _small_number(name, value, fields, narrow, tokens, len(kept))
        elif isinstance(value, list | tuple):
            small[name] = _small_list(name, value, layers, kept, narrow, tokens)
        else:
            small[name] = value
    if per_layer:
        small["per_layer_config"] = {
            place: {name: _in_proportion(value, fields.get(name), small.get(name))
                    for name, value in per_layer[layer].items()}
            for place, layer in enumerate(kept) if layer in per_layer
        }  # fmt: skip
    _fit_rope(fields, small)
    overrides = OVERRIDES.get(default.model_type or type(default).__name__, {}) if narrow is not False else {}
    if narrow is None:
        overrides = {name: value for name, value in overrides.items() if _LAYERS.search(name)}
    small |= {k: {**small.get(k, {}), **v} if k == "rope_parameters" else v for k, v in overrides.items()}
    return type(default)(**small)


def _in_proportion(value: Any, before: Any, after: Any) -> Any:
    """A layer's own size, as much larger or smaller than the model's as it was."""
    if isinstance(value, bool) or not isinstance(value, int) or not isinstance(before, int) or not before:
        return value
    return max(1, value * after // before)


def _kept_layers(fields: dict[str, Any], layers: int, per_layer: dict[int, Any]) -> list[int]:
    """The layers that stay: two, or the first of each kind where lists with one entry per layer tell kinds."""
    lists = [value for value in fields.values() if isinstance(value, list | tuple) and len(value) == layers]
    kinds = [repr((per_layer.get(index), *(one[index] for one in lists))) for index in range(layers)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:MAX_LAYERS]
    others = [index for index in range(layers) if index not in first]
    return sorted([*first, *others[: max(0, 2 - len(first))]])


def _small_number(
    name: str, value: int, fields: dict[str, Any], narrow: bool | None, tokens: dict[int, int], layers: int
) -> int:
    if narrow is None and not (_LAYERS.search(name) or _LAYER_COUNT.fullmatch(name)):
        return value
    if _TOKEN.fullmatch(name) and "vocab" not in name:
        return _token(value, tokens)
    if name == "num_kv_shared_layers" and value == fields.get("num_hidden_layers"):
        return layers
    size = next((size for pattern, size in _SIZES_OF if pattern.fullmatch(name)), None)
    if size is None:
        return value
    if _LAYER_COUNT.fullmatch(name):
        return min(value, max(layers, 2))
    if narrow is False and size not in (2, VOCABULARY) and "expert" not in name:
        return value
    if "key_value_heads" in name and value == fields.get(name.replace("key_value", "attention")):
        return min(value, HEADS)
    return min(value, size)


def _token(value: int, tokens: dict[int, int]) -> int:
    """A special token's id inside the small vocabulary, the same for the same id in every nested config."""
    if value < 8:
        return value
    return tokens.setdefault(value, VOCABULARY - 1 - len(tokens))


def _small_list(
    name: str, value: Any, layers: int, kept: list[int], narrow: bool | None, tokens: dict[int, int]
) -> Any:
    kind = type(value)
    if layers > 2 and len(value) == layers:
        entries = [value[index] for index in kept]
        if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
            entries = [_small_number(name, entry, {}, narrow, tokens, len(kept)) for entry in entries]
            if re.search(r"layers|indices", name) and entries != [0] * len(entries):
                entries = sorted({min(entry, len(kept) - 1) for entry in entries}) if entries == kept else entries
        return kind(entries)
    if narrow is None or not value or not all(isinstance(e, int) and not isinstance(e, bool) for e in value):
        return value
    if _TOKEN.fullmatch(name) and "idx" not in name:
        return kind(_token(entry, tokens) for entry in value)
    if layers > 2 and re.search(r"ind(ex|ic)|idx|layers|block", name) and all(0 <= entry < layers for entry in value):
        return kind(sorted({min(entry, len(kept) - 1) for entry in value}))
    if name in ("depths", "stage_num_blocks", "blocks_per_stage"):
        return kind(1 for _ in value)
    if name in ("num_heads", "num_attention_heads") and narrow:
        return kind(2**place for place in range(len(value)))
    if name in ("image_size", "patch_size") and narrow:
        return kind(min(entry, 32 if name == "image_size" else 8) for entry in value)
    return value


def _fit_rope(fields: dict[str, Any], small: dict[str, Any]) -> None:
    """Sections of a rotary embedding (``mrope_section``) in the proportions that they had, for the small heads."""
    rope = small.get("rope_parameters")
    if not isinstance(rope, dict) or not isinstance(rope.get("mrope_section"), list | tuple):
        return
    before = fields.get("head_dim") or fields.get("hidden_size", 0) // max(1, fields.get("num_attention_heads", 1))
    after = small.get("head_dim") or small.get("hidden_size", 0) // max(1, small.get("num_attention_heads", 1))
    section = rope["mrope_section"]
    total = sum(section) * after // before
    parts = [total // len(section)] * len(section)
    parts[-1] += total - sum(parts)
    small["rope_parameters"] = {**rope, "mrope_section": parts}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "nougat": {"encoder": {"model_type": "donut-swin"}, "decoder": {"model_type": "mbart"}},
}
"""Arguments without which a config cannot be made; they are made smaller too."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": {"mrope_section": [3, 4, 5]}}  # pairs of a head of 24 for time, height and width
_HALF_SECTIONS = {"rope_parameters": {"mrope_section": [1, 2, 3]}}  # where half of the head is rotated

OVERRIDES: dict[str, dict[str, Any]] = {
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "kv_n_heads": 2},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": HIDDEN // 4},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "autoformer": {"prediction_length": 4},
    "bamba": {"attn_layer_indices": [1]},
    "bros": {"hidden_size": 64},
    "blip-2": {"image_token_index": VOCABULARY - 1},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "chameleon": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "head_dim": HEAD_DIM // 2},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": EXPERT_INTERMEDIATE},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": HIDDEN},
    "dots3_note_text": {"head_dim": 23},
    "ernie4_5_vl_moe_text": {"rope_parameters": {"mrope_section": [5, 5, 2]}},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"head_dim": HIDDEN // HEADS},
    "exaone4_5_vision": {"window_size": 32},
    "falcon_h1": {"mamba_d_head": HEAD_DIM},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4v_moe_text": _HALF_SECTIONS,
    "glm4v_text": _SECTIONS,
    "glm_image_text": _SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "helium": {"head_dim": HIDDEN // HEADS},
    "hrm_text": {"num_hidden_layers": 8, "num_layers_per_stack": 1},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM},
    "hunyuan_vl_text": {"head_dim": HEAD_DIM, "rope_parameters": {"xdrope_section": [2, 2, 2, 2]}},
    "informer": {"prediction_length": 4},
    "inkling_vision": {"num_hidden_layers": 2},
    "instructblip": {"image_token_index": VOCABULARY - 1},
    "instructblipvideo": {"video_token_index": VOCABULARY - 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"qk_head_dim": 10 + HEAD_DIM // 2, "head_dim": HEAD_DIM // 2},
    "mamba2": {"head_dim": 2 * HIDDEN // HEADS},
    "ministral": {"head_dim": HEAD_DIM},
    "mistral4": {"qk_nope_head_dim": 8},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "nemotron": {"num_key_value_heads": 2},
    "paddleocr_vl_text": {"rope_parameters": {"mrope_section": [1, 3, 4]}},
    "perceiver": {"d_latents": HIDDEN, "num_self_attends_per_block": 2, "num_latents": 8},
    "pix2struct_text_model": {"d_kv": HIDDEN // HEADS},
    "pix2struct_vision_model": {"d_kv": HIDDEN // HEADS, "patch_embed_hidden_size": 192},
    "qwen2_5_omni_text": _SECTIONS,
    "qwen2_5_omni_vision_encoder": {"window_size": 32},
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_5_vl_vision": {"window_size": 32},
    "qwen2_vl_text": _SECTIONS,
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": EXPERT_INTERMEDIATE},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 1000,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ("local", "lsh"),
        "attention_head_size": HEAD_DIM,
        "axial_pos_embds": False,
        "hash_seed": 0,
        "is_decoder": True,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "step3p5": {"sliding_window": 8},
    "t5gemma2_text": {"dropout_rate": 0.1},
    "time_series_transformer": {"prediction_length": 4},
    "xlnet": {"d_head": HIDDEN // HEADS},
    "xlstm": {"chunk_size": LENGTH},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HIDDEN // HEADS,
        "n_mamba_heads": 2,
    },
}
"""Fields that the rules above do not get right, by ``model_type`` (or class) of the config, nested ones included."""


def auto_classes(config: PreTrainedConfig) -> Iterator[Any]:
    """The auto classes that build a model of ``config``, the one that trains a language model first."""
    names = list(AUTO_CLASSES)
    if getattr(config, "is_encoder_decoder", False):  # its decoder alone is what the causal class would build
        for name in ("AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM"):
            names.insert(0, names.pop(names.index(name)))
    for name in names:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            yield auto


def build(auto: Any, config: PreTrainedConfig) -> nn.Module:
    """The model in float32 with weights that depend on nothing but the config's shapes.

    Weights are drawn wider than transformers draws them, and norms and biases are moved from their ones and zeros:
    with a standard deviation of 0.02 a tiny block's gradients are too small beside the head's to be judged.
    """
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config, dtype=torch.float32)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=draw, device="cpu").to(parameter.device)
            if parameter.dim() > 1:
                parameter.copy_(noise / HIDDEN**0.5)
            else:
                parameter.add_(0.1 * noise)
    return model


def parameters_of(auto: Any, config: PreTrainedConfig) -> int:
    """Number of parameters, without memory for them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto.from_config(config).parameters())


Batch = dict[str, Tensor]


def batches(model: nn.Module) -> Iterator[Batch]:
    """Batches that may fit the model's forward, the likeliest first."""
    config: Any = model.config
    wanted = inspect.signature(model.forward).parameters
    needed = [name for name, parameter in wanted.items() if parameter.default is inspect.Parameter.empty]
    main = str(model.main_input_name)
    takes_text = "input_ids" in wanted or "kwargs" in wanted
    others = [name for name in _MAIN if name in wanted and name not in (main, "input_ids")]
    media = [name for name in others if name != "inputs_embeds"]
    text = ["input_ids"] if takes_text else []
    groups = [[main], [main, *text], text, *([name] for name in others), *([name, *text] for name in media)]
    beside = [name for name in _BESIDE if name in wanted]
    groups = [[*group, *names] for names in (needed, beside) for group in groups]
    seen: set[tuple[str, ...]] = set()
    for group in groups:
        names = tuple(dict.fromkeys(name for name in group if name in _MAIN or name in _BESIDE))
        if names in seen or not set(names) & _MAIN.keys():
            continue
        seen.add(names)
        for makers in product(*(_MAIN.get(name) or (_BESIDE[name],) for name in names)):
            batch: dict[str, Any] = {name: make(config) for name, make in zip(names, makers, strict=True)}
            yield from _with_targets(batch, batch.get("input_ids", _token_ids(config)), wanted)
    dummies = getattr(model, "dummy_inputs", None)
    if isinstance(dummies, dict):
        yield {name: value for name, value in dummies.items() if isinstance(value, Tensor)}


def _with_targets(batch: Batch, ids: Tensor, wanted: Any) -> Iterator[Batch]:
    """With labels, with the decoder's tokens, and as it is."""
    if "labels" in wanted and ("input_ids" in batch or "decoder_input_ids" in wanted):
        yield {**batch, "labels": ids}
    if "decoder_input_ids" in wanted:
        yield {**batch, "decoder_input_ids": ids}
    yield batch


def _all(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _all(value)


def _first(config: PreTrainedConfig, *names: str) -> Any:
    """The first of these fields that the config or one inside it has."""
    for name in names:
        for one in _all(config):
            if (value := vars(one).get(name)) is not None:
                return value
    return None


def _token_ids(config: PreTrainedConfig) -> Tensor:
    """Token ids that no config uses for a special token."""
    sizes = [v for one in _all(config) for k, v in vars(one).items() if k.endswith("vocab_size") and isinstance(v, int)]
    special = {v for one in _all(config) for k, v in vars(one).items() if _TOKEN.fullmatch(k) and isinstance(v, int)}
    size = min([*(size for size in sizes if size > 16), VOCABULARY])
    usual = [token for token in range(8, size) if token not in special]
    chosen = torch.randint(0, len(usual), (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return torch.tensor(usual)[chosen]


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _side(value: Any, place: int) -> int:
    return int(value if isinstance(value, int) else value[place])


def _channels(config: PreTrainedConfig) -> int:
    channels = _first(config, "num_channels", "in_channels")
    return channels if isinstance(channels, int) else 3


def _picture(config: PreTrainedConfig) -> Tensor:
    size = _first(config, "image_size", "img_size", "pretrain_image_size", "input_size") or 32
    return _normal(BATCH, _channels(config), _side(size, 0), _side(size, -1))


def _video(config: PreTrainedConfig) -> Tensor:
    frames = _first(config, "num_frames", "frames_per_clip") or 4
    return _picture(config).unsqueeze(1).repeat(1, frames, 1, 1, 1)


def _patches(config: PreTrainedConfig) -> Tensor:
    """One picture of 4 by 4 patches, a row each, as Qwen2-VL's tower takes it."""
    size = _side(_first(config, "patch_size") or 8, 0)
    return _normal(16, _channels(config) * (_first(config, "temporal_patch_size") or 1) * size**2)


def _rows_of_patches(config: PreTrainedConfig) -> Tensor:
    return _normal(BATCH, 16, _channels(config) * _side(_first(config, "patch_size") or 8, 0) ** 2)


def _series(config: PreTrainedConfig) -> Tensor:
    return _normal(BATCH, _first(config, "context_length") or 32, _first(config, "num_input_channels") or 1)


def _grid(config: PreTrainedConfig) -> Tensor:
    return torch.tensor([[1, 4, 4]])


def _mels(config: PreTrainedConfig) -> tuple[int, int]:
    """Mel bins and frames."""
    mels = _first(config, "feature_projection_input_dim", "num_mel_bins", "input_feat_per_channel", "n_mels")
    positions = _first(config, "max_source_positions")
    return mels or 80, 2 * positions if positions else 200


def _spectrogram(config: PreTrainedConfig) -> Tensor:
    return _normal(BATCH, *_mels(config))


def _frames(config: PreTrainedConfig) -> Tensor:
    return _spectrogram(config).transpose(1, 2).contiguous()


def _waveform(config: PreTrainedConfig) -> Tensor:
    return _normal(BATCH, 3840)


def _channel_of_waveform(config: PreTrainedConfig) -> Tensor:
    return _waveform(config).unsqueeze(1)


def _hidden_states(config: PreTrainedConfig) -> Tensor:
    return _normal(BATCH, LENGTH, _first(config, "hidden_size", "d_model") or HIDDEN)


Maker = Callable[[PreTrainedConfig], Tensor]
_MAIN: dict[str, tuple[Maker, ...]] = {
    "input_ids": (_token_ids,),
    "pixel_values": (_picture, _video, _patches, _rows_of_patches),
    "input_features": (_spectrogram, _frames),
    "input_values": (_waveform, _channel_of_waveform, _frames),
    "pixel_values_videos": (_video,),
    "flattened_patches": (lambda config: torch.cat([torch.ones(BATCH, 16, 2), _rows_of_patches(config)], dim=-1),),
    "past_values": (_series,),
    "hidden_states": (_patches, _hidden_states),
    "inputs_embeds": (_hidden_states,),
}
"""What carries a batch, each in the shapes that models take it in."""
_BESIDE: dict[str, Maker] = {
    "bbox": lambda config: torch.zeros(BATCH, LENGTH, 4, dtype=torch.long),
    "grid_thw": _grid,
    "image_grid_thw": _grid,
    "image_embeds_position_mask": lambda config: (torch.arange(LENGTH) < 4).expand(BATCH, -1),
    "input_features_mask": lambda config: torch.ones(BATCH, _mels(config)[1], dtype=torch.long),
    "merge_sizes": lambda config: torch.ones(1, dtype=torch.long),
    "mm_token_type_ids": lambda config: torch.zeros(BATCH, LENGTH, dtype=torch.long),
    "pixel_attention_mask": lambda config: torch.ones(BATCH, 16, dtype=torch.long),
    "qformer_input_ids": _token_ids,
    "query_embeds": _hidden_states,
    "spatial_shapes": lambda config: torch.full((BATCH, 2), 4),
    "visual_feats": lambda config: _normal(BATCH, 4, _first(config, "visual_feat_dim") or HIDDEN),
    "visual_pos": lambda config: _normal(BATCH, 4, 4).abs(),
}
"""What some models need beside it."""
