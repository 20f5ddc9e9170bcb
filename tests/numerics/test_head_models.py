"""``seqtile.apply(model, loss="tiled")`` on real architectures: same losses and gradients, no logits."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import seqtile
from numerics._births import births
from refusals import refused
from seqtile.lm_loss.tiled_loss import TiledLoss
from zoo import (
    ARCHITECTURES,
    EXPERTS,
    HIDDEN,
    VOCABULARY,
    assert_same_gradients,
    causal_lm,
    gradients,
    tokens,
    vision_language_model,
)

BATCH, LENGTH = 2, 13
TIED = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
"""PEFT 0.19, the lowest tested, says so of an untied head too."""


def loss_only(model: nn.Module, tile: int | str = 5) -> nn.Module:
    report = seqtile.apply(model, blocks="none", loss="tiled", loss_tile=tile)
    assert report.done["loss"].startswith("loss of ") and report.tiled == 0 and "loss of" in str(report)
    return model


def step(model: nn.Module, ids: Tensor, **kwargs: Any) -> tuple[Any, dict[str, Tensor | None]]:
    model.zero_grad()
    output = model(input_ids=ids, labels=kwargs.pop("labels", ids), **kwargs)
    output.loss.backward()
    return output, {name: copy.copy(p.grad) for name, p in model.named_parameters()}


SCALED = {
    "granite": dict(logits_scaling=4.0),
    "cohere": dict(logit_scale=0.25),
    "gemma2": dict(final_logit_softcapping=2.0),
}


def of_a_kind(architecture: str, **config: Any) -> nn.Module:
    sizes = dict(hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, use_cache=False)
    ids = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**sizes, **ids, **config})).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


KINDS: dict[str, dict[str, Any]] = {
    "bert": {"is_decoder": True},  # the head lies two modules deep, behind a transform, its bias tied
    "bloom": {"n_layer": 2, "n_head": 4},  # another name for everything
    "nemotron": {"num_key_value_heads": 2},
}
"""Kinds of architectures of transformers beyond those of the zoo."""


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *KINDS, "a vision-language model"])
def test_every_architecture(architecture: str) -> None:
    if architecture in KINDS:
        model = of_a_kind(architecture, **KINDS[architecture])
    elif architecture in ARCHITECTURES:
        model = causal_lm(architecture, **SCALED.get(architecture, {}))
    else:
        model = vision_language_model()
    ids = tokens(BATCH, LENGTH)
    loss, expected = gradients(model, ids)
    output, got = step(loss_only(model), ids)
    assert output.logits is None
    torch.testing.assert_close(output.loss.detach(), loss)
    assert_same_gradients(got, expected)


@pytest.mark.parametrize("architecture", [*SCALED, "llama"])
def test_scales_and_caps_and_the_cost(architecture: str, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"num_key_value_heads": 2, "num_attention_heads": 4}
    granite = architecture == "granite"
    model = of_a_kind("granite", **sizes, **SCALED["granite"]) if granite else causal_lm(
        architecture, **SCALED.get(architecture, {})
    )  # fmt: skip
    ids = tokens(BATCH, LENGTH)
    _, expected = step(model, ids)
    loss_only(model)
    with births() as born, seqtile.count_products() as products, caplog.at_level(logging.WARNING):
        _, got = step(model, ids)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert_same_gradients(got, expected)
    flops = products.flops_where(lambda product: product.has(HIDDEN, VOCABULARY))
    assert flops == 3 * 2 * BATCH * (LENGTH - 1) * HIDDEN * VOCABULARY  # the last token predicts nothing
    assert not [s for s in born.shapes if VOCABULARY in s and (LENGTH in s or BATCH * LENGTH in s)]


@pytest.mark.parametrize("architecture", [name for name in EXPERTS if name != "deepseek_v3"])  # which has none
def test_the_auxiliary_loss_is_kept(architecture: str) -> None:
    model, ids = causal_lm(architecture), tokens(BATCH, LENGTH)
    plain, expected = step(model, ids, output_router_logits=True)
    without, _ = step(model, ids, output_router_logits=False)
    output, got = step(loss_only(model), ids, output_router_logits=True)
    assert plain.loss > without.loss
    torch.testing.assert_close(output.loss, plain.loss)
    torch.testing.assert_close(output.aux_loss, plain.aux_loss)
    assert_same_gradients(got, expected)


def test_the_head_is_called_once_however_many_tiles() -> None:
    """Engines gather a weight around the call of its module: once per step, not once per tile."""
    model, ids = loss_only(causal_lm("llama"), tile=2), tokens(BATCH, LENGTH)
    calls: list[str] = []

    def out(*_: Any) -> None:
        calls.append("out")

    out.__module__ = "torch.distributed.fsdp._fully_shard"  # an engine's; anybody else's sees logits
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("in"))
    model.lm_head.register_forward_hook(out)
    step(model, ids)
    assert calls == ["in", "out"]


def test_a_hook_on_the_head_gets_logits(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    hook = model.lm_head.register_forward_hook(lambda module, given, logits: logits * 0.5)
    plain, expected = step(model, ids)
    loss_only(model)
    with caplog.at_level(logging.WARNING):
        output, got = step(model, ids)
    torch.testing.assert_close(output.loss, plain.loss)
    assert_same_gradients(got, expected)
    assert "a hook on the head" in caplog.text
    hook.remove()
    assert model(input_ids=ids, labels=ids).logits is None


def test_a_model_without_a_causal_loss_of_transformers_is_refused() -> None:
    bart = of_a_kind("bart", is_decoder=True, d_model=HIDDEN, decoder_attention_heads=4)
    for model in (bart, causal_lm("llama").model):
        with refused("loss.model-unsupported"):
            seqtile.apply(model, blocks="none", loss="tiled")
        assert "forward" not in model.__dict__


def test_labels_counts_and_shapes_of_the_output() -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    labels = ids.clone()
    labels[:, :5] = -100
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    calls: list[dict[str, Any]] = [
        {"labels": labels},
        {"labels": labels, "num_items_in_batch": torch.tensor(31)},
        {"labels": labels, "num_items_in_batch": 31},
        {"labels": labels, "shift_labels": shifted},
        {"labels": labels, "shift_labels": shifted.view(-1)},
        {"labels": labels, "ignore_index": int(ids[0, 3])},
    ]
    for kwargs in calls:
        seqtile.undo(model)
        if "ignore_index" in kwargs:
            kwargs["labels"] = ids
        plain, expected = step(model, ids, **kwargs)
        output, got = step(loss_only(model), ids, **kwargs)
        torch.testing.assert_close(output.loss, plain.loss)
        assert_same_gradients(got, expected)
    output = model(input_ids=ids, labels=labels, return_dict=False)
    assert (
        isinstance(output[0], Tensor)
        and output[0].shape == ()
        and not any(isinstance(value, Tensor) and VOCABULARY in value.shape for value in output)
    )


def test_logits_where_they_are_asked_for() -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    whole = (BATCH, LENGTH, VOCABULARY)
    plain = model(input_ids=ids, labels=ids)
    loss_only(model)
    assert model(input_ids=ids, labels=ids).logits is None
    assert torch.equal(model(input_ids=ids, labels=ids, return_logits=True).logits, plain.logits)
    assert torch.equal(model(input_ids=ids).logits, plain.logits)
    assert model(input_ids=ids, labels=ids[:, -3:], logits_to_keep=3).logits.shape == (BATCH, 3, VOCABULARY)
    model.eval()
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).logits.shape == whole
        quiet = model(input_ids=ids, labels=ids, return_logits=False)
        assert quiet.logits is None
        torch.testing.assert_close(quiet.loss, plain.loss)
        assert torch.equal(model(input_ids=ids, labels=ids).logits, plain.logits)


def test_generation_is_unchanged() -> None:
    model, ids = causal_lm("llama").eval(), tokens(BATCH, LENGTH)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    loss_only(model)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    with pytest.raises(ValueError, match="no_such_argument"):
        model.generate(ids, max_new_tokens=1, no_such_argument=1)


def test_undo_copy_and_print() -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    before, names = dict(model.__dict__), list(model.state_dict())
    _, expected = step(model, ids)
    loss_only(model)
    assert "loss=tiled" in repr(model) and list(model.state_dict()) == names
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.forward, TiledLoss) and other.forward.module is other
        output, got = step(other, ids)
        assert output.logits is None
        assert_same_gradients(got, expected)
    seqtile.undo(model)
    assert dict(model.__dict__) == before
    with seqtile.applied(model, blocks="none", loss="tiled"):
        assert model(input_ids=ids, labels=ids).logits is None
    assert dict(model.__dict__) == before


def test_together_with_tiled_blocks_under_a_checkpoint() -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    model.config.use_cache = False
    _, expected = step(model, ids)
    report = seqtile.apply(model, tile="shards:3", loss="tiled", loss_tile=5)
    assert report.tiled == 2 and "tiled 2 of 2" in str(report) and "loss of LlamaForCausalLM tiled" in str(report)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with seqtile.count_products() as products:
        _, got = step(model, ids)
    assert_same_gradients(got, expected)
    assert products.units(BATCH * LENGTH, HIDDEN, 88) == 22  # 11 in each of two layers
    assert seqtile.undo(model) == 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("frozen", ["nothing", "head", "trunk"])
def test_tied_and_frozen_heads(tied: bool, frozen: str) -> None:
    model, ids = causal_lm("qwen3", tie_word_embeddings=tied), tokens(BATCH, LENGTH)
    for name, p in model.named_parameters():
        head = name.startswith("lm_head") or (tied and "embed_tokens" in name)
        p.requires_grad_({"nothing": True, "head": not head, "trunk": head}[frozen])
    _, expected = step(model, ids)
    _, got = step(loss_only(model), ids)
    assert_same_gradients(got, expected)


@TIED
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters(target: str, options: dict[str, Any]) -> None:
    model, ids = causal_lm("llama", tie_word_embeddings=False), tokens(BATCH, LENGTH)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM", **options))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    plain, expected = step(model, ids)
    assert any("lora" in name and g is not None for name, g in expected.items())
    with births() as born:
        output, got = step(loss_only(model), ids)
    assert output.logits is None
    torch.testing.assert_close(output.loss, plain.loss)
    assert_same_gradients(got, expected)
    assert not [s for s in born.shapes if VOCABULARY in s and (LENGTH in s or BATCH * LENGTH in s)]
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, plain.loss)


@TIED
def test_a_head_that_was_saved_with_the_adapter() -> None:
    model, ids = causal_lm("llama", tie_word_embeddings=False), tokens(BATCH, LENGTH)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    _, expected = step(model, ids)
    assert any("lm_head.modules_to_save" in name and g is not None for name, g in expected.items())
    _, got = step(loss_only(model), ids)
    assert_same_gradients(got, expected)


@TIED
def test_autocast_keeps_no_cast_of_a_trained_head_per_tile() -> None:
    model = causal_lm("llama", tie_word_embeddings=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    ids, loss = tokens(BATCH, LENGTH), loss_only(model, tile=1)
    with torch.autocast("cpu", torch.bfloat16), births() as born:
        output = loss(input_ids=ids, labels=ids)
        assert output.loss.requires_grad
        assert born.alive().count((VOCABULARY, HIDDEN)) == 1  # the gradient's sum


@TIED
def test_dropout_in_the_heads_adapter_is_drawn_once() -> None:
    """The gradient comes from the very mask of the forward: a step against it lowers the loss as it says."""
    model, ids = causal_lm("llama", tie_word_embeddings=False), tokens(1, LENGTH)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"], lora_dropout=0.5)).double()
    torch.nn.init.normal_(model.base_model.model.lm_head.lora_B["default"].weight, std=0.3)
    loss_only(model)

    def loss() -> Tensor:
        torch.manual_seed(7)
        return model(input_ids=ids, labels=ids).loss

    weight = model.base_model.model.lm_head.lora_A["default"].weight
    gradient = torch.autograd.grad(loss(), weight)[0]
    change = 1e-5 * torch.randn_like(weight)
    with torch.no_grad():
        here = loss()
        weight += change
        there = loss()
    torch.testing.assert_close(there - here, (gradient * change).sum(), rtol=1e-3, atol=0.0)  # a first-order step


def test_a_model_that_does_more_with_its_logits_runs_untiled(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)

    class Shifted(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = self.lm_head(hidden) - 0.5 * self.lm_head.weight.sum()
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)
            return {"loss": loss, "logits": logits}

    model.__class__ = Shifted
    expected = torch.autograd.grad(model(ids, ids)["loss"], model.lm_head.weight)[0]
    loss_only(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            got = torch.autograd.grad(model(input_ids=ids, labels=ids)["loss"], model.lm_head.weight)[0]
    torch.testing.assert_close(got, expected)
    (warning,) = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert "the loss runs untiled" in warning  # once, not at every step


@pytest.mark.parametrize("how", ["item", "method"])
def test_a_model_that_writes_into_its_logits(how: str) -> None:
    """Chameleon masks its image tokens so."""
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)

    class Written(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            if how == "item":
                logits[:, :, [3, 4]] = torch.finfo(logits.dtype).min
            else:
                logits.mul_(0.5)
            logits = 2.0 * torch.tanh(logits / 2.0)
            return {"loss": self.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)}

    model.__class__ = Written
    expected = torch.autograd.grad(model(ids, ids)["loss"], model.lm_head.weight)[0]
    loss_only(model)
    got = torch.autograd.grad(model(input_ids=ids, labels=ids)["loss"], model.lm_head.weight)[0]
    torch.testing.assert_close(got, expected)


def test_a_loss_function_of_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    loss_only(model)
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with caplog.at_level(logging.WARNING):
        output = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.loss, output.logits.sum())
    assert "was replaced after seqtile.apply" in caplog.text
    seqtile.undo(model)
    with refused("loss.other-loss-function"):
        seqtile.apply(model, loss="tiled")
    assert model(input_ids=ids, labels=ids).logits is not None


def test_nothing_to_do_is_refused() -> None:
    with refused("blocks.nothing-to-do"):
        seqtile.apply(causal_lm("llama"), blocks="none")


def test_a_failed_second_apply_keeps_the_loss_of_the_first() -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    seqtile.apply(model, loss="tiled")
    with refused("tile.memory-too-small", "model.layers.0.mlp"):
        seqtile.apply(model, path="fused", tile="memory:1")
    assert model(input_ids=ids, labels=ids).logits is None


def test_the_checker_notices_a_broken_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    from numerics._heads import last_tile_dropped

    last_tile_dropped(monkeypatch)
    with pytest.raises(AssertionError):
        test_every_architecture("llama")


def test_verify_takes_the_loss_off_and_puts_it_back() -> None:
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    seqtile.apply(model, tile=5, loss="tiled", loss_tile=5)
    result = seqtile.verify(model, {"input_ids": ids, "labels": ids})
    assert result.ok, str(result)
    assert model(input_ids=ids, labels=ids).logits is None
    seqtile.undo(model)
    assert model(input_ids=ids, labels=ids).logits is not None


def test_under_accelerates_mixed_precision() -> None:
    """Accelerate puts autocast around the model's forward; the products run in bf16 tiled as untiled."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # a trainer in an earlier test has chosen its own precision

    def run(tiled: bool) -> tuple[nn.Module, Any, dict[str, Tensor | None]]:
        model = causal_lm("llama")
        if tiled:
            loss_only(model)
        prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        return (model, *step(prepared, tokens(BATCH, LENGTH)))

    with seqtile.count_products() as products:
        model, output, got = run(tiled=True)
    assert output.logits is None and products.calls
    _, plain, expected = run(tiled=False)
    _, exact = step(causal_lm("llama"), tokens(BATCH, LENGTH))
    for name, true in exact.items():
        error, allowed = ((g[name] - true).norm() for g in (got, expected))  # type: ignore[operator, union-attr]
        assert error <= 2 * allowed + 1e-5 * true.norm(), name  # type: ignore[union-attr]
    seqtile.undo(model)
    ids = tokens(BATCH, LENGTH)
    assert model(input_ids=ids, labels=ids).logits is not None


def test_after_accelerate_has_taken_its_mixed_precision_off() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    _, expected = step(causal_lm("llama"), tokens(BATCH, LENGTH))
    model = causal_lm("llama")
    loss_only(model)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
    output, got = step(model, tokens(BATCH, LENGTH))
    assert output.logits is None
    assert_same_gradients(got, expected)
    seqtile.undo(model)
    assert step(model, tokens(BATCH, LENGTH))[0].logits is not None


@pytest.mark.slow
def test_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """The whole model compiled runs its loss untiled and says so; compiled layers leave it tiled."""
    model, ids = causal_lm("llama"), tokens(BATCH, LENGTH)
    _, expected = step(model, ids)
    loss_only(model)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    output, got = step(model, ids)
    assert output.logits is None
    assert_same_gradients(got, expected)
    with caplog.at_level(logging.WARNING):
        whole = torch.compile(model, backend="eager")(input_ids=ids, labels=ids)
    torch.testing.assert_close(whole.loss, output.loss)
    assert whole.logits is not None and "loss='tiled' runs untiled" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["layer", "attention-saved"])
def test_compiled_with_checkpoints_that_break_the_graph(checkpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where the compiler hands a call back, it finds the model's forward and not the one that stands over it."""
    model, ids = causal_lm("llama", num_hidden_layers=1, use_cache=False, attn_implementation="sdpa"), tokens(2, 9)
    plain, expected = step(model, ids)
    seqtile.apply(model, blocks="none", loss="tiled", offload=True, checkpoint=checkpoint)
    model.compile(backend="eager")
    with caplog.at_level(logging.WARNING):
        output, got = step(model, ids)
    torch.compiler.reset()
    torch.testing.assert_close(output.loss, plain.loss)
    assert_same_gradients(got, expected)
    assert "runs the decoder layers uncompiled" in caplog.text


def test_replicas_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="one process per device"):
        loss_only(causal_lm("llama"))._replicate_for_data_parallel()
