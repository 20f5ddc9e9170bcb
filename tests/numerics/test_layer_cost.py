"""What tiling costs in real decoder layers, in matrix products counted as they run.

A unit is one product over all tokens, ``2 * tokens * hidden * intermediate``; a gated MLP's forward is 3.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import seqtile
from seqtile.blocks import install_blocks
from watching import adapter_units
from zoo import HIDDEN, INTERMEDIATE, causal_lm, tokens

BATCH, LENGTH, LAYERS, RANK = 2, 24, 2, 5
COUNTS = (1, 3, 16)


def _checkpointed(model: nn.Module, reentrant: bool = False) -> nn.Module:
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def _freeze_mlps(model: nn.Module) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" not in name and ".fc" not in name)
    return model


def _units(model: nn.Module) -> float:
    """Units per layer of one step."""
    ids = tokens(BATCH, LENGTH)
    with seqtile.count_products() as products:
        model(input_ids=ids, labels=ids).loss.backward()
    return products.units(BATCH * LENGTH, HIDDEN, INTERMEDIATE) / LAYERS


def _tiled(model: nn.Module, count: int, path: str = "generic") -> nn.Module:
    report = seqtile.apply(model, tile=f"shards:{count}", path=path)
    assert report.tiled == LAYERS and {block.path for block in report.blocks} == {path}
    return model


PATHS = pytest.mark.parametrize("path", ["generic", "fused"])


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_untiled_layers_cost_what_the_table_says(architecture: str) -> None:
    assert _units(causal_lm(architecture)) == 9
    assert _units(_checkpointed(causal_lm(architecture))) == 11
    assert _units(_freeze_mlps(causal_lm(architecture))) == 6
    assert _units(_checkpointed(_freeze_mlps(causal_lm(architecture)))) == 8
    assert _units(_checkpointed(causal_lm(architecture), reentrant=True)) == 12


@PATHS
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_tiled_layers_add_nothing_under_a_checkpoint(architecture: str, count: int, path: str) -> None:
    assert _units(_tiled(causal_lm(architecture), count, path)) == 11
    assert _units(_checkpointed(_tiled(causal_lm(architecture), count, path))) == 11
    assert _units(_tiled(_freeze_mlps(causal_lm(architecture)), count, path)) == 8
    assert _units(_checkpointed(_tiled(_freeze_mlps(causal_lm(architecture)), count, path))) == 8


@PATHS
@pytest.mark.parametrize("count", COUNTS)
def test_reentrant_and_without_early_stop(count: int, path: str) -> None:
    assert _units(_checkpointed(_tiled(causal_lm("llama"), count), reentrant=True)) == 14
    with set_checkpoint_early_stop(False):
        assert _units(_checkpointed(_tiled(causal_lm("llama"), count, path))) == 14


@PATHS
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("architecture", ["gpt_neox", "falcon"])
def test_plain_mlps(architecture: str, count: int, path: str) -> None:
    """Two products forward, one recomputed, four backward; frozen two, one, two."""
    assert _units(_checkpointed(causal_lm(architecture))) == 7
    assert _units(_checkpointed(_tiled(causal_lm(architecture), count, path))) == 7
    assert _units(_checkpointed(_tiled(_freeze_mlps(causal_lm(architecture)), count, path))) == 5


@PATHS
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("architecture", ["gemma2", "glm4"])
def test_a_norm_after_the_mlp_runs_in_the_tile(
    architecture: str, count: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _units(_checkpointed(causal_lm(architecture))) == 12
    assert _units(_checkpointed(_tiled(causal_lm(architecture), count, path))) == 12
    assert _units(_checkpointed(_tiled(_freeze_mlps(causal_lm(architecture)), count, path))) == 9
    monkeypatch.setattr(install_blocks, "needs_output", lambda layer, near: False)
    assert (
        _units(_checkpointed(_tiled(causal_lm(architecture), count, path))) == 14
    )  # what tiling the MLP alone would cost


@PATHS
@pytest.mark.parametrize("count", COUNTS)
def test_a_dropout_after_a_plain_mlp_runs_in_the_tile(count: int, path: str) -> None:
    """OPT: two products forward, four backward; the generic operator recomputes both for the dropout's mask."""
    assert _units(_checkpointed(causal_lm("opt", dropout=0.25))) == 8
    tiled = _units(_checkpointed(_tiled(causal_lm("opt", dropout=0.25), count, path)))
    assert tiled == (8 if path == "generic" else 7)


@pytest.mark.parametrize("applied_first", [True, False], ids=["seqtile-peft", "peft-seqtile"])
@PATHS
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("targets", "units"),
    [(["gate_proj", "up_proj"], 8), (["gate_proj", "up_proj", "down_proj"], 9)],
    ids=["gate-up", "all"],
)
def test_adapters_add_only_their_own_products(
    targets: list[str], units: int, count: int, path: str, applied_first: bool
) -> None:
    def adapted(tile: int | None) -> nn.Module:
        model = causal_lm("llama")
        if tile and applied_first:
            _tiled(model, tile, path)
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, lora_dropout=0.0))
        if tile and not applied_first:
            _tiled(model, tile, path)
        return model

    def cost(model: nn.Module) -> tuple[float, float]:
        ids = tokens(BATCH, LENGTH)
        with seqtile.count_products() as products:
            model(input_ids=ids, labels=ids).loss.backward()
        trained = [p for name, p in model.named_parameters() if "lora" in name]
        assert trained and all(p.grad is not None for p in trained)
        sizes = BATCH * LENGTH, HIDDEN, INTERMEDIATE
        return products.units(*sizes) / LAYERS, adapter_units(products, *sizes, RANK) / LAYERS

    untiled_base, untiled_own = cost(adapted(None))
    tiled_base, tiled_own = cost(adapted(count))
    assert untiled_base == units
    assert tiled_base == (units if path == "generic" else 8)
    assert tiled_own <= untiled_own + 1e-9


def test_a_counter_that_sees_nothing_fails() -> None:
    with seqtile.count_products() as products:
        torch.ones(3).sum()
    with pytest.raises(RuntimeError, match="no matrix product"):
        products.units(1, HIDDEN, INTERMEDIATE)
