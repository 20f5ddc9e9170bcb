"""Layer inputs in host memory: the same numbers, counted bytes, and a host budget that is checked in time."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import seqtile
from refusals import refused
from seqtile.checkpointing import host_offload
from seqtile.checkpointing.host_offload import HostMemory
from seqtile.checkpointing.policies import installed_checkpointing
from zoo import ARCHITECTURES, EXPERTS, HIDDEN, causal_lm, tokens

BATCH, LENGTH, LAYERS = 2, 13, 2
INPUT = BATCH * LENGTH * HIDDEN * 4


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor | None]]:
    ids = tokens(BATCH, LENGTH)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: copy.copy(p.grad) for name, p in model.named_parameters()}


def assert_equal(got: Any, expected: Any) -> None:
    if got[0].device.type != "cpu":  # an attention backward may add in another order each time
        torch.testing.assert_close(got, expected)
        return
    assert torch.equal(got[0], expected[0])
    for name, value in expected[1].items():
        other = got[1][name]
        assert (value is None) == (other is None), name
        assert value is None or torch.equal(other, value), name


def checkpointed(architecture: str = "llama", **kwargs: Any) -> nn.Module:
    model = causal_lm(architecture, use_cache=False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **kwargs})
    return model


def memory(model: nn.Module) -> HostMemory:
    found = installed_checkpointing(model)[0].host
    assert found is not None
    return found


@pytest.mark.device
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in EXPERTS] + ["mixtral"])
def test_exact(architecture: str) -> None:
    expected = step(checkpointed(architecture))
    model = causal_lm(architecture, use_cache=False)
    report = seqtile.apply(model, blocks="none", offload=True)
    assert "layer inputs on the host" in str(report)
    assert_equal(step(model), expected)


@pytest.mark.device
def test_bytes_on_the_host_are_those_freed_on_the_device() -> None:
    """layers x tokens x hidden x bytes, and no layer's input is kept besides."""

    def run(offload: bool) -> tuple[int, int]:
        model, inputs = checkpointed(), []
        if offload:
            seqtile.apply(model, blocks="none", offload=True)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
        ids = tokens(BATCH, LENGTH)
        loss = model(input_ids=ids, labels=ids).loss
        kept = sum(storage.nbytes() for ref in inputs if (storage := ref()) is not None)
        parked = memory(model).parked_bytes if offload else 0
        loss.backward()
        assert not offload or memory(model).parked_bytes == 0
        return kept, parked

    assert run(offload=False) == (LAYERS * INPUT, 0)
    assert run(offload=True) == (0, LAYERS * INPUT)


@pytest.mark.device
@pytest.mark.parametrize("reentrant", [False, True])
def test_whoever_switches_checkpointing_on(reentrant: bool) -> None:
    expected = step(checkpointed(use_reentrant=reentrant))
    model = causal_lm("llama", use_cache=False)
    seqtile.apply(model, blocks="none", offload=True)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # a trainer
    parked: list[int] = []
    park = HostMemory.park
    patch = pytest.MonkeyPatch()
    patch.setattr(HostMemory, "park", lambda self, tensor: parked.append(tensor.nbytes) or park(self, tensor))
    assert_equal(step(model), expected)
    patch.undo()
    assert parked == [INPUT] * LAYERS
    seqtile.undo(model)
    assert model.is_gradient_checkpointing  # that is the trainer's, and stays
    assert_equal(step(model), expected)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


@pytest.mark.device
def test_adapters_and_accumulation() -> None:
    def build() -> nn.Module:
        model = causal_lm("llama", use_cache=False)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def accumulate(model: nn.Module) -> dict[str, Tensor | None]:
        ids = tokens(BATCH, LENGTH)
        losses = [model(input_ids=ids[:, :n], labels=ids[:, :n]).loss for n in (13, 7)]  # both forwards, then both back
        for loss in losses:
            loss.backward()
        return {name: copy.copy(p.grad) for name, p in model.named_parameters()}

    torch.manual_seed(1)
    expected = accumulate(build())
    torch.manual_seed(1)
    model = build()
    seqtile.apply(model, blocks="none", offload=True)
    got = accumulate(model)
    assert_equal((torch.zeros(()), got), (torch.zeros(()), expected))


def test_a_backward_with_a_retained_graph() -> None:
    model, ids = checkpointed(), tokens(BATCH, LENGTH)
    seqtile.apply(model, blocks="none", offload=True)
    loss = model(input_ids=ids, labels=ids).loss
    weight = model.model.layers[0].mlp.up_proj.weight
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_undo_and_copies() -> None:
    model = checkpointed()
    functions = [layer._gradient_checkpointing_func for layer in model.model.layers]
    before = dict(model.__dict__)
    expected = step(model)
    seqtile.apply(model, tile=5, offload=True)
    other = copy.deepcopy(model)  # pickling such a model fails in transformers, with or without this
    step(other)
    one = installed_checkpointing(other)[0]
    assert one.module is other and other.model.layers[0]._gradient_checkpointing_func.func.__self__ is one
    assert seqtile.undo(model) == LAYERS
    assert dict(model.__dict__) == before
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == functions
    assert_equal(step(model), expected)
    off = causal_lm("llama", use_cache=False)
    with seqtile.applied(off, blocks="none", offload=True):
        assert off.is_gradient_checkpointing
    assert not off.is_gradient_checkpointing


def test_the_host_is_asked_before_the_first_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        host_offload.OffloadedTensor, "__init__", lambda *_: pytest.fail("copied before the budget was checked")
    )
    model = checkpointed()
    monkeypatch.setattr(host_offload, "available_host_bytes", lambda: 4 * INPUT)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for offload in (True, f"{2 * INPUT}"):  # a bound that the host cannot give is no better than none
        seqtile.apply(model, blocks="none", offload=offload)
        with refused("offload.exceeds-host-memory", "2 layer inputs", "3 ranks", "offload='"):
            step(model)


@pytest.mark.device
@pytest.mark.parametrize("checkpoint", ["layer", "attention-saved"])
def test_what_a_bound_has_no_room_for_stays_on_the_device(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpointed()
    expected = step(model)
    most = 0
    parked = HostMemory.park

    def park(self: HostMemory, tensor: torch.Tensor) -> host_offload.OffloadedTensor:
        nonlocal most
        one = parked(self, tensor)
        most = max(most, self.parked_bytes)
        return one

    monkeypatch.setattr(HostMemory, "park", park)
    for room, takes in ((LAYERS * INPUT, LAYERS * INPUT), (LAYERS * INPUT - 1, INPUT), (INPUT - 1, 0)):
        most = 0
        seqtile.apply(model, blocks="none", offload=f"{room}", checkpoint=checkpoint)
        assert_equal(step(model), expected)
        assert most == takes if checkpoint == "layer" else most <= room


def test_two_offloads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_lm("llama", use_cache=False)
    if not hasattr(model, "_activation_checkpointing_enable"):
        pytest.skip("this version of transformers has no offload of its own")
    model.activation_checkpointing_enable(offload=True)
    with refused("offload.given-twice"):
        seqtile.apply(model, blocks="none", offload=True)


def test_a_model_without_checkpoints_is_refused() -> None:
    with refused("checkpoint.model-unsupported", "Sequential"):
        seqtile.apply(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), offload=True)


def test_the_checker_notices_a_wrong_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    take = host_offload.OffloadedTensor.take
    monkeypatch.setattr(host_offload.OffloadedTensor, "take", lambda self: take(self) * 1.0001)
    with pytest.raises(AssertionError):
        test_exact("llama")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator, to copy to the host and back")
@pytest.mark.parametrize("settings", [{"offload": "1GiB"}, {"offload": True}], ids=["bound", "all"])
@pytest.mark.parametrize("policy", ["layer", "attention-saved"])
def test_on_a_device(settings: dict[str, Any], policy: str) -> None:
    device = torch.accelerator.current_accelerator()
    expected = None
    for change in ({}, {**settings, "checkpoint": policy}):
        model = causal_lm("llama", use_cache=False, attn_implementation="sdpa", num_hidden_layers=8).to(device)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if change:
            seqtile.apply(model, blocks="none", **change)
        for _ in range(2):  # the second step finds the memory of the first
            ids = tokens(4, 128).to(device)
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        got = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        expected = expected or got
        torch.testing.assert_close(got, expected)  # not equal: an attention backward may add in another order
