"""`blocks="mlp+norm+projections"`: what else of a layer runs in tiles, and what is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, Exaone4Config, LlamaConfig, PretrainedConfig, Qwen3Config

import seqtile
from seqtile.blocks.norms_and_projections import TiledRows
from seqtile.options import WHOLE_LAYER
from watching import rows_of
from zoo import assert_same_gradients

SIZES: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=20, vocab_size=128, max_position_embeddings=16384,
)  # fmt: skip


def build(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    model.config.use_cache = False
    return model


def in_tiles(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if type(part.__dict__.get("forward")) is TiledRows]


def test_gradients_are_those_of_the_untiled_model() -> None:
    model = build(Qwen3Config(**SIZES))
    reference = copy.deepcopy(model)
    ids = torch.randint(0, 128, (2, 37))
    reference(input_ids=ids, labels=ids).loss.backward()
    exact = copy.deepcopy(reference).double()
    exact.zero_grad()
    exact(input_ids=ids, labels=ids).loss.backward()
    report = seqtile.apply(model, tile=16, blocks="mlp+norm+projections")
    assert (
        report.done["blocks"] == "3 norms and 8 projections tiled separately"
        and report.done["blocks"] in str(report)
        and report.tiled == 2
    )
    assert not any(name.endswith(("q_norm", "k_norm", "post_attention_layernorm")) for name in in_tiles(model))
    model(input_ids=ids, labels=ids).loss.backward()
    true = dict(exact.named_parameters())
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        error = (theirs.grad - true[name].grad).norm()
        # Both are fp32 sums in another order: the untiled model's own error is the measure, four times for luck.
        assert (mine.grad - true[name].grad).norm() <= 4 * error + 1e-7 * true[name].grad.norm(), name


@pytest.mark.parametrize("wrapping", ["once", "twice", "saved norm", "IA3"])
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_adapters_of_projections_run_in_tiles_in_either_order(order: str, wrapping: str) -> None:
    """PEFT wraps the projections, so that what stood on them would leave the adapters' part whole."""
    projections = ["q_proj", "k_proj", "v_proj", "o_proj"]

    def adapted(model: nn.Module) -> nn.Module:
        if wrapping == "IA3":
            return get_peft_model(model, IA3Config(target_modules=projections, feedforward_modules=["o_proj"]))
        saved = ["input_layernorm"] if wrapping == "saved norm" else None
        config = LoraConfig(r=3, target_modules=projections, modules_to_save=saved, init_lora_weights=False)
        model = get_peft_model(model, config)
        if wrapping == "twice":
            model.add_adapter("second", config)
        return model

    ids = torch.randint(0, 128, (2, 157))
    expected: dict[str, Any] = {}
    for tiled in (False, True):
        torch.manual_seed(1)
        model = build(LlamaConfig(**SIZES))
        if tiled and order == "apply first":
            report = seqtile.apply(model, tile=40, blocks=WHOLE_LAYER)
        torch.manual_seed(2)
        model = adapted(model).train()
        if tiled and order == "apply last":
            report = seqtile.apply(model, tile=40, blocks=WHOLE_LAYER)
        weights = [p for name, p in model.named_parameters() if p.dim() == 2 and "_proj" in name and "mlp" not in name]
        with rows_of(*weights) as rows:
            model(input_ids=ids, labels=ids).loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        if not tiled:
            expected = gradients
            continue
        assert max(rows) == 40
        assert sum(name.endswith("_proj") for name in in_tiles(model)) == 8
        assert not any("adapters were added" in note for note in report.notes)
        assert_same_gradients(gradients, expected)
        seqtile.undo(model)
        assert not in_tiles(model)


def test_auto_leaves_short_batches() -> None:
    model = build(LlamaConfig(**SIZES))
    seqtile.apply(model, blocks="mlp+norm+projections")
    installed = model.model.norm.__dict__["forward"]
    shape = installed.setting.shape(torch.empty(1, 1, 64), [], False)
    assert installed.setting.rule.tile_sizes(2048, shape) == ()
    assert installed.setting.rule.tile_sizes(4096, shape) == (2048, 2048)  # 4 * 512, frozen on a CPU


def test_undo_and_a_second_call_take_them_off() -> None:
    model = build(LlamaConfig(**SIZES))
    before = {name: sorted(part.__dict__) for name, part in model.named_modules()}
    seqtile.apply(model, blocks="mlp+norm+projections")
    assert len(in_tiles(model)) == 3 + 8
    assert "tile=auto" in repr(model.model.norm)
    assert list(model.state_dict()) == list(build(LlamaConfig(**SIZES)).state_dict())
    seqtile.apply(model, blocks="mlp+norm")
    assert in_tiles(model) == []
    seqtile.apply(model, blocks="mlp+norm+projections")
    assert seqtile.undo(model) == 2
    assert {name: sorted(part.__dict__) for name, part in model.named_modules()} == before


def test_only_some_layers_leave_the_last_norm_alone() -> None:
    model = build(LlamaConfig(**SIZES))
    seqtile.apply(model, only="*.layers.0.*", blocks="mlp+norm+projections")
    assert [name for name in in_tiles(model) if "proj" not in name] == ["model.layers.0.input_layernorm"]
    assert all(name.startswith("model.layers.0.") for name in in_tiles(model))


def test_head_wise_attention_runs_its_own_norm_and_projections() -> None:
    model = build(LlamaConfig(**SIZES))
    seqtile.apply(model, blocks="mlp+norm+projections", heads=1)
    assert in_tiles(model) == ["model.norm"]


def test_head_wise_attention_leaves_the_other_norms_of_its_layer_in_tiles() -> None:
    """Cohere's norm is read by the MLP too, EXAONE 4 norms attention's output: neither is attention's own."""
    for config in (CohereConfig(**SIZES), Exaone4Config(**SIZES)):
        config.pad_token_id = 0  # which transformers 5.0 leaves out
        model = build(config)
        seqtile.apply(model, blocks="mlp+norm+projections")
        norms = [name for name in in_tiles(model) if "norm" in name]
        seqtile.apply(model, blocks="mlp+norm+projections", heads=1)
        assert in_tiles(model) == norms and len(norms) > 1


def test_norms_that_keep_little_are_left() -> None:
    model = build(LlamaConfig(**SIZES))
    model.model.norm = nn.LayerNorm(64)
    seqtile.apply(model, blocks="mlp+norm+projections")
    assert "model.norm" not in in_tiles(model) and "model.layers.0.input_layernorm" in in_tiles(model)


def test_what_they_free() -> None:
    """Bytes of one step in bf16, in hidden-state rows per token: less with norms in tiles, less again with adapters'
    projections."""
    from peft import LoraConfig, get_peft_model

    tokens, rows = 2048, {}
    for blocks in ("mlp+norm", "mlp+norm+projections"):
        base = build(LlamaConfig(**{**SIZES, "hidden_size": 256, "intermediate_size": 896}), torch.bfloat16)
        model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"]))
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        seqtile.apply(model, tile=128, blocks=blocks, loss="tiled", loss_tile=128)
        ids = torch.randint(0, 128, (1, tokens))
        model(input_ids=ids, labels=ids).loss.backward()  # buffers that stay are made by the first step
        with seqtile.count_live_bytes() as live:
            model(input_ids=ids, labels=ids).loss.backward()
        rows[blocks] = live.peak / (tokens * 256 * 2)
    # Each of the three projections keeps an fp32 copy of its input (2 rows each), the norm about 3 rows.
    assert rows["mlp+norm+projections"] < rows["mlp+norm"] - 5, rows
