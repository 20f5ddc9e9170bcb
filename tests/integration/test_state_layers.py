"""``seqtile.apply(model, state=...)``: whole models whose layers with a state run in tiles."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import seqtile
from numerics._states import WHOLE, carrier_of, error, model_of
from refusals import refused
from seqtile.recognise.live_weights import has_foreign_hooks
from seqtile.state.tiled_state import StateForward

LENGTH, TILE = 50, 16
SETTINGS: dict[str, Any] = {"blocks": "none", "state": TILE}
THREE = ("qwen3_5_text", "bamba", "lfm2_moe")


def ids_of(model: Any, batch: int = 2, length: int = LENGTH) -> Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Loss and gradients of one batch."""
    model.zero_grad(set_to_none=True)
    ids = ids_of(model)
    loss = model(input_ids=ids, labels=ids, **inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def tiles_run(model: nn.Module) -> Callable[[], int]:
    """How many times a mixer has run since, forward and recompute."""
    runs = []
    mixer = model.get_submodule(carrier_of(model).mixer)
    first = next(module for module in mixer.modules() if isinstance(module, nn.Linear))
    forward = first.forward
    first.forward = lambda x: (runs.append(x.shape), forward(x))[1]
    return lambda: len(runs)


@pytest.mark.parametrize("family", THREE)
def test_a_model_trains_with_the_untiled_gradients(family: str) -> None:
    model = model_of(family)
    expected = gradients(model)
    report = seqtile.apply(model, **SETTINGS)
    assert "layers with a state in tiles of 16 tokens: 1 of 1" in str(report) and "whole layers" in str(report)
    assert "state=16" in repr(model)
    runs = tiles_run(model)
    assert error(gradients(model), expected) < 1e-4
    assert runs() == 8, "four tiles, forward and recompute"
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        model.train()
        assert error(gradients(model), expected) < 1e-4


@pytest.mark.parametrize("family", THREE)
def test_a_layers_checkpoint_costs_no_further_run(family: str) -> None:
    model = seqtile_model(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runs = tiles_run(model)
    gradients(model.train())
    assert runs() == 8


def seqtile_model(family: str, **settings: Any) -> Any:
    model = model_of(family)
    seqtile.apply(model, **{**SETTINGS, **settings})
    return model


@pytest.mark.parametrize("family", [*THREE, "falcon_h1", "zamba2", "granitemoehybrid"])
def test_every_technique_at_once(family: str) -> None:
    model = model_of(family)
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    blocks = {"blocks": "none"} if family == "zamba2" else {"tile": 12, "blocks": "mlp+norm+projections"}
    heads = {} if family == "zamba2" else {"heads": 1}
    report = seqtile.apply(
        model.train(), state=TILE, loss="tiled", loss_tile=7, offload=True, checkpoint="attention-saved",
        **blocks, **heads,
    )  # fmt: skip
    assert report.done["state"].count("of") and not [block for block in report.left if "state" in block.why]
    assert error(gradients(model), expected) < 1e-4
    assert seqtile.undo(model) is not None
    assert not any("forward" in vars(module) for module in model.modules())


REASONS = {
    "mamba": "the recurrent state or its gradient is not passed on",
    "jamba": "the recurrent state or its gradient is not passed on",
    "minimax": "(get_linear_cache)", "recurrent_gemma": "accepts no cache",
}  # fmt: skip


@pytest.mark.parametrize("family", WHOLE)
def test_a_layer_that_is_not_proven_stays_whole_and_is_named(family: str) -> None:
    model = model_of(family)
    expected = gradients(model)
    report = seqtile.apply(model, **SETTINGS)
    assert ": 0 of " in report.done["state"]
    [why] = [block.why for block in report.left if block.name == carrier_of(model).mixer]
    assert REASONS[family] in why
    got = gradients(model)
    assert all(torch.equal(got[name], gradient) for name, gradient in expected.items())


def test_a_kernel_that_ignores_the_states_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    kernel = qwen.torch_chunk_gated_delta_rule

    def ignoring(*args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        return kernel(*args, initial_state=None if initial_state is None else initial_state.detach(), **kwargs)

    def dropping(*args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        return kernel(*args, initial_state=None, **kwargs)

    for broken in (ignoring, dropping):
        monkeypatch.setattr(qwen, "torch_chunk_gated_delta_rule", broken)
        report = seqtile.apply(model_of("qwen3_5_text"), **SETTINGS)
        assert ": 0 of 1" in report.done["state"]
        assert "the recurrent state or its gradient is not passed on" in report.left[0].why


def test_evaluation_and_generation_are_untouched() -> None:
    model = seqtile_model("qwen3_5_text").eval()
    plain = model_of("qwen3_5_text").eval()
    runs, ids = tiles_run(model), ids_of(model, length=40)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits) and runs() == 1
        assert torch.equal(model.generate(ids, max_new_tokens=4, use_cache=True),
                           plain.generate(ids, max_new_tokens=4, use_cache=True))  # fmt: skip


def test_generation_of_a_checkpointed_model_in_training_mode_is_untouched() -> None:
    """From transformers 5.24 on it keeps its cache; before, the untiled model has none either."""
    results = []
    for model in (seqtile_model("qwen3_5_text"), model_of("qwen3_5_text")):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = ids_of(model, length=40)
        generated = model.train().generate(
            ids, max_new_tokens=4, do_sample=False, use_cache=True, output_logits=True, return_dict_in_generate=True
        )
        results.append(torch.stack(generated.logits))
    torch.testing.assert_close(*results)


def test_a_call_with_a_cache_runs_whole_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = seqtile_model("lfm2_moe").train()
    runs = tiles_run(model)
    with caplog.at_level(logging.WARNING):
        model(ids_of(model), use_cache=True)
    assert runs() == 1 and "it was called with a cache; pass use_cache=False" in caplog.text


def test_left_padding() -> None:
    model = model_of("qwen3_5_text")
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :21] = 0
    expected = gradients(model, attention_mask=mask)
    seqtile.apply(model, **SETTINGS)
    assert error(gradients(model, attention_mask=mask), expected) < 1e-4


def test_router_logits_are_captured_whole() -> None:
    """Hooks that watch inside a layer see whole outputs: the mixer alone runs in tiles."""
    model = model_of("qwen3_5_moe_text")
    ids = ids_of(model)

    def outputs() -> tuple[Any, ...]:
        model.zero_grad()
        output = model(ids, labels=ids, output_router_logits=True)
        output.loss.backward()
        return output.router_logits, output.aux_loss, gradients(model)

    routed, auxiliary, expected = outputs()
    seqtile.apply(model, **SETTINGS)
    for _ in range(2):
        tiled, loss, got = outputs()
        assert [logits.shape for logits in tiled] == [logits.shape for logits in routed]
        torch.testing.assert_close(loss, auxiliary)
        assert error(got, expected) < 1e-4
    runs = tiles_run(model)
    gradients(model)
    assert runs() == 8, "the hooks stay, and capture nothing"


def test_a_hook_inside_sees_whole_tensors(caplog: pytest.LogCaptureFixture) -> None:
    model = seqtile_model("bamba")
    seen = []
    layer = model.get_submodule(carrier_of(model).layer)
    layer.feed_forward.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert has_foreign_hooks(layer.feed_forward)
    with caplog.at_level(logging.WARNING):
        gradients(model)  # which tries the mixer alone first
    seen.clear()
    runs = tiles_run(model)
    gradients(model)
    assert [shape[1] for shape in seen] == [LENGTH] and "feed_forward has hooks" in caplog.text
    assert runs() == 8, "the mixer alone is tiled then"


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("bamba", marks=pytest.mark.slow)])
def test_lora(family: str) -> None:
    config = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)

    def adapted(tiled: bool) -> Any:
        torch.manual_seed(3)
        model = get_peft_model(model_of(family), config)
        if tiled:
            report = seqtile.apply(model, **SETTINGS)
            assert ": 1 of 1" in report.done["state"]
        return model.eval()  # dropout draws other masks per tile

    expected = gradients(adapted(False))
    assert error(gradients(adapted(True)), expected) < 1e-4


def test_dropout_in_a_tile_is_the_same_in_its_recompute() -> None:
    config = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(3)
    model = get_peft_model(model_of("qwen3_5_text"), config).train()
    seqtile.apply(model, **SETTINGS)
    weight = next(p for n, p in model.named_parameters() if "lora_B" in n and "in_proj_qkv" in n)
    step = torch.zeros_like(weight)

    def loss_at(scale: float) -> dict[str, Tensor]:
        with torch.no_grad():
            weight.add_(step, alpha=scale)
        torch.manual_seed(5)
        loss = gradients(model)["loss"]
        with torch.no_grad():
            weight.sub_(step, alpha=scale)
        return {"loss": loss, "gradient": weight.grad.clone()}

    gradient, small = loss_at(0.0)["gradient"], 1e-3
    step.copy_(gradient / gradient.norm())  # along it the loss changes most, beside the rounding of both losses
    slope = (loss_at(small)["loss"] - loss_at(-small)["loss"]) / (2 * small)
    assert abs(slope - gradient.norm()) < 0.03 * abs(slope)


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_autocast_is_proven_at_its_first_call(family: str) -> None:
    """Inside the layer's checkpoint, where a mixer alone runs in tiles."""
    model = model_of(family).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model)
    truth = gradients(model)
    seqtile.apply(model, **SETTINGS)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(model)
    assert error(got, truth) < 1.5 * error(expected, truth)


def test_a_copy_and_a_pickle_run_in_tiles_too() -> None:
    model = seqtile_model("qwen3_5_text")
    expected = gradients(model)
    names = model_of("qwen3_5_text").state_dict().keys()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.state_dict().keys() == names
        assert error(gradients(copied), expected) < 1e-6
        runs = tiles_run(copied)
        gradients(copied)
        assert runs() == 8
        forwards = {module: vars(module).get("forward") for module in copied.modules()}
        assert all(forward.module is m for m, forward in forwards.items() if isinstance(forward, StateForward))
    seqtile.undo(model)
    assert not any({"forward", "extra_repr"} & vars(module).keys() for module in model.modules())


def test_a_second_apply_replaces_the_first_and_a_refused_one_does_not() -> None:
    model = seqtile_model("qwen3_5_text", blocks="auto", tile=12)
    expected = gradients(model)
    with refused("only.no-match"):
        seqtile.apply(model, only="nothing.like.this", state=8)
    assert "state=16" in repr(model) and error(gradients(model), expected) < 1e-6
    seqtile.apply(model, tile=12, state=8)
    assert "state=8" in repr(model) and "state=16" not in repr(model)
    seqtile.apply(model, tile=6)  # which asks for blocks alone
    assert "state=8" in repr(model) and "tile=6" in repr(model)


@pytest.mark.parametrize("wrong", [1, "big"])
def test_a_wrong_tile_is_refused(wrong: Any) -> None:
    with refused("option.not-a-count", f"state={wrong!r}"):
        seqtile.apply(model_of("qwen3_5_text"), state=wrong)


@pytest.mark.slow
def test_fifty_steps_end_where_the_untiled_ones_do() -> None:
    ends = []
    for settings in ({}, SETTINGS):
        model = model_of("qwen3_5_text").train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings:
            seqtile.apply(model, **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(50):
            losses.append(gradients(model)["loss"])
            optimizer.step()
        ends.append(torch.stack(losses))
    assert ends[0][-1] < 0.7 * ends[0][0], "nothing was learned"
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("trial", "options"),
    [("state.state_proof._compare_tiles", SETTINGS), ("chunks.chunk_proof._compare", {"blocks": "none", "chunk": 16})],
    ids=["state", "chunk"],
)
def test_memory_that_runs_out_in_a_trial_is_raised_and_the_trial_comes_again(
    trial: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("qwen3_5_text")
    with monkeypatch.context() as patched:
        patched.setattr(f"seqtile.{trial}", raise_cpu_out_of_memory)
        with pytest.raises(RuntimeError, match="can't allocate"):
            seqtile.apply(model, **options)
            gradients(model)
    seqtile.apply(model, **options)
    runs = tiles_run(model)
    gradients(model)
    assert runs() >= 8  # the trial's too


def raise_cpu_out_of_memory(*_: Any) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory")
