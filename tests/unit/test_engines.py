"""What is arranged for engines, without one running: leaf marks, refusals, names of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import seqtile
from refusals import refused
from seqtile.engines.flat import call_with_weights, named_weights
from seqtile.engines.granularity import refuse_gathering_inside
from seqtile.engines.zero3 import end_gradients_here, whole_shape
from zoo import causal_lm, tokens


def _leaves(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if getattr(module, "_z3_leaf", False)]


@pytest.mark.parametrize(
    ("architecture", "blocks", "leaves"),
    [
        ("llama", "auto", ["model.layers.0", "model.layers.1"]),
        ("llama", "mlp", ["model.layers.0.mlp", "model.layers.1.mlp"]),
        ("opt", "auto", ["model.decoder.layers.0", "model.decoder.layers.1"]),
    ],
)
def test_what_tiles_is_marked_as_a_leaf_and_undo_takes_the_mark_off(
    architecture: str, blocks: str, leaves: list[str]
) -> None:
    model = causal_lm(architecture)
    before = {name: (set(vars(m)), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    seqtile.apply(model, blocks=blocks)
    assert _leaves(model) == leaves == _leaves(copy.deepcopy(model))
    seqtile.undo(model)
    assert {name: (set(vars(m)), len(m._forward_pre_hooks)) for name, m in model.named_modules()} == before


def test_a_mark_that_zero3_goes_by_stays() -> None:
    model = causal_lm("llama")
    seqtile.apply(model)
    model.get_submodule("model.layers.0").ds_recompute_parameters = set()  # as DeepSpeed's registration sets it
    seqtile.undo(model)
    assert _leaves(model) == ["model.layers.0"]


def test_a_mark_of_the_users_stays() -> None:
    model = causal_lm("llama")
    model.get_submodule("model.layers.1")._z3_leaf = True
    seqtile.apply(model)
    seqtile.undo(model)
    assert _leaves(model) == ["model.layers.1"]


def test_zero3_that_has_taken_the_linear_layers_over_is_refused() -> None:
    model = causal_lm("llama")
    for module in model.modules():
        module.ds_recompute_parameters = set()
    with refused("engine.zero3-gathers-inside-block", "model.layers.0.mlp", "mlp.gate_proj"):
        seqtile.apply(model)


def test_a_leaf_whose_inputs_need_no_gradient_gets_one_that_does() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    assert end_gradients_here(layer, (x,)) is None  # no engine
    layer.ds_recompute_parameters = set()  # type: ignore[assignment]
    changed = end_gradients_here(layer, (x, "mask"))
    assert changed is not None and changed[0].requires_grad and changed[1] == "mask" and not x.requires_grad
    assert end_gradients_here(layer, (x.clone().requires_grad_(),)) is None
    with refused("engine.zero3-keyword-arguments"):
        end_gradients_here(layer, ())
    with torch.no_grad():
        assert end_gradients_here(layer, (x,)) is None
    layer.requires_grad_(False)
    assert end_gradients_here(layer, (x,)) is None


def test_a_weight_that_zero3_holds_elsewhere_has_its_whole_shape() -> None:
    weight = torch.empty(0)
    assert whole_shape(weight) == torch.Size([0])
    weight.ds_shape = torch.Size([4, 2])  # type: ignore[attr-defined]
    assert whole_shape(weight) == torch.Size([4, 2])


@pytest.mark.parametrize("named", [True, False])
def test_weights_that_are_views_of_a_flat_parameter_are_named_and_replaced(named: bool) -> None:
    flat = nn.Parameter(torch.arange(6.0))
    flat._is_flat_param = True  # type: ignore[attr-defined]
    layer = nn.Linear(3, 2, bias=False)
    del layer._parameters["weight"]
    view = flat.view(2, 3)
    layer.__dict__["weight"] = view
    if named:
        layer._parameters["weight"] = view  # type: ignore[assignment]
    layer.__dict__["kept"] = torch.ones(1, requires_grad=True)  # no weight
    assert [name for name, _ in named_weights(layer)] == ["weight"]
    other = torch.ones(2, 3, requires_grad=True)
    call_with_weights(layer, {"weight": other}, (torch.ones(1, 3),)).sum().backward()
    assert other.grad is not None and flat.grad is None
    assert layer.weight is view


def test_fsdp_units_inside_are_named() -> None:
    from torch.distributed.fsdp import FSDPModule

    class Unit(FSDPModule, nn.Linear):
        def __new__(cls) -> Unit:
            return object.__new__(cls)

        def __init__(self) -> None:
            nn.Linear.__init__(self, 2, 2)

    with refused("engine.fsdp2-shards-inside-block", "layers.0.mlp", "up_proj"):
        refuse_gathering_inside([("up_proj", Unit())], block="layers.0.mlp", layer="layers.0")
    refuse_gathering_inside([("up_proj", nn.Linear(2, 2))], block="layers.0.mlp", layer="layers.0")


@pytest.mark.parametrize("path", ["fused", "generic"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "mixtral"])
def test_under_zero2_gradients_of_tiled_and_untiled_batches_arrive_in_one_order(architecture: str, path: str) -> None:
    def order(tile: int | str, taken_over: bool = True) -> list[str]:
        model = causal_lm(architecture, use_cache=False)
        seqtile.apply(model, tile=tile, path="auto" if architecture == "mixtral" else path)
        arrived: list[str] = []
        for name, p in model.named_parameters():
            if taken_over:
                p._hp_mapping = None  # as DeepSpeed's ZeRO-1 and 2 set it
            p.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
        ids = tokens()
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(arrived) == len(list(model.parameters()))
        return arrived

    assert order(3) == order(5) == order("auto")
    assert order("auto", taken_over=False) != order("auto"), "nothing was left untiled"
