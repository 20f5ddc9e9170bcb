"""Adapters and weights of every kind: loss, gradients and one optimizer step are the untiled ones."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, VBLoRAConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

import seqtile
from refusals import refused
from seqtile.install.runs import what_ran
from seqtile.verification import verify
from seqtile.verification.plain_autograd import without_recompute
from zoo import assert_same_gradients, causal_lm, tokens

ALL = ["q_proj", "gate_proj", "up_proj", "down_proj"]
RATE = 0.1
Step = tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]


def warm(model: nn.Module) -> nn.Module:
    """The same adapters in every copy, none zero: beside a zero second factor the first one's gradient is zero."""
    generator = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.1
    return model


def adapted(targets: Sequence[str] = ALL, base: nn.Module | None = None, **config: Any) -> PeftModel:
    base = causal_lm("llama", torch.float64) if base is None else base
    model = get_peft_model(base, LoraConfig(r=4, target_modules=list(targets), **config))
    assert isinstance(model, PeftModel)
    for p in model.parameters():  # PEFT makes adapters and copies in fp32
        if p.is_floating_point() and p.requires_grad:
            p.data = p.data.to(next(base.parameters()).dtype)
    warm(model)
    return model


def checkpointed(model: nn.Module, on: bool) -> nn.Module:
    if on:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


def step(model: nn.Module, *, learns: bool = True) -> Step:
    """Loss, gradients and weights after one step."""
    model.zero_grad()
    ids = tokens()
    loss = model(input_ids=ids, labels=ids).loss
    if learns:
        loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= RATE * p.grad
    return loss.detach(), found, {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_same(tiled: Step, untiled: Step, learns: bool = True) -> None:
    torch.testing.assert_close(tiled[0], untiled[0])
    if learns:
        assert_same_gradients(tiled[1], untiled[1])
    else:
        assert all(value is None for value in (*tiled[1].values(), *untiled[1].values()))
    for name, value in untiled[2].items():
        torch.testing.assert_close(tiled[2][name], value, msg=lambda text, name=name: f"{name}: {text}")


def compare(
    make: Callable[[], nn.Module], path: str = "auto", blocks: int = 2, trust: str | None = None
) -> tuple[nn.Module, nn.Module]:
    """One step of both; returns them for more."""
    untiled, tiled = make(), make()
    assert seqtile.apply(tiled, tile=5, path=path, trust=trust).tiled == blocks
    assert_same(step(tiled), step(untiled))
    assert seqtile.check_gradients(tiled) == []
    return tiled, untiled


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "bias": {"lora_bias": True},
    "gate": {"targets": ["gate_proj"]},
    "down": {"targets": ["down_proj"]},
    "up-and-attention": {"targets": ["up_proj", "v_proj"]},
    "one-layer": {"layers_to_transform": [1]},
    "head-saved": {"modules_to_save": ["lm_head"]},
    "projection-saved": {"targets": ["gate_proj", "q_proj"], "modules_to_save": ["down_proj"]},
    "block-saved": {"targets": ["q_proj"], "modules_to_save": ["mlp"]},
}


@pytest.mark.filterwarnings("ignore:.*has no bias. This means that merging")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer")
@pytest.mark.parametrize(
    ("kind", "checkpoint"), [*((kind, False) for kind in KINDS), ("lora", True), ("dora", True), ("block-saved", True)]
)
def test_kinds_of_adapters(kind: str, checkpoint: bool) -> None:
    blocks = 4 if kind == "block-saved" else 2  # the copies that train, and the originals that stand by
    compare(lambda: checkpointed(adapted(**KINDS[kind]), checkpoint), blocks=blocks)


@pytest.mark.parametrize("kind", ["lora", "dora", "projection-saved"])
def test_kinds_of_adapters_that_come_after_apply(kind: str) -> None:
    tiled = causal_lm("llama", torch.float64)
    seqtile.apply(tiled, tile=5)
    assert_same(step(adapted(base=tiled, **KINDS[kind])), step(adapted(**KINDS[kind])))


def experts_adapted(base: nn.Module, both: bool = True) -> PeftModel:
    """Adapters on 3-D weights, which PEFT puts on the experts for the length of a call."""
    names = ["gate_up_proj", "down_proj"] if both else ["down_proj"]
    return adapted(["q_proj"], base, target_parameters=[f"mlp.experts.{name}" for name in names])


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("order", ["apply first", "adapters first"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_adapters_on_experts(kind: str, order: str, checkpoint: bool) -> None:
    both = not checkpoint
    untiled = checkpointed(experts_adapted(causal_lm(kind, torch.float32), both), checkpoint).train()
    base = causal_lm(kind, torch.float32)
    if order == "apply first":
        seqtile.apply(base, tile=5)
    tiled = checkpointed(experts_adapted(base, both), checkpoint).train()
    if order == "adapters first":
        seqtile.apply(tiled, tile=5)
    assert_same(step(tiled), step(untiled))
    assert what_ran(tiled).cut == 2 and what_ran(tiled).tiles > 1
    for other in (tiled.eval(), untiled.eval()):  # without gradients, and without the adapters
        with torch.no_grad():
            other.whole = other(input_ids=tokens()).logits
            with other.disable_adapter():
                other.bare = other(input_ids=tokens()).logits
    torch.testing.assert_close(tiled.whole, untiled.whole)
    torch.testing.assert_close(tiled.bare, untiled.bare)
    assert not torch.allclose(tiled.whole, tiled.bare)
    for p in (*tiled.parameters(), *untiled.parameters()):
        p.requires_grad_(True)
    assert_same(step(tiled.train()), step(untiled.train()))


@pytest.mark.filterwarnings("ignore:.*reduce_op:FutureWarning")
def test_no_weights_of_experts_wait_for_the_backward_under_a_checkpoint() -> None:
    """A whole stack of experts per layer would, were it kept beside what the checkpoint saves."""

    def stacks(model: nn.Module) -> int:
        gc.collect()
        shapes = {p.shape for p in model.parameters() if p.dim() == 3}
        return sum(type(one) in (Tensor, nn.Parameter) and one.shape in shapes for one in gc.get_objects())

    model = experts_adapted(causal_lm("qwen3_moe", torch.float32))
    seqtile.apply(model, tile=5)
    checkpointed(model, True).train()
    before = stacks(model)
    assert before >= 4
    loss = model(input_ids=tokens(), labels=tokens()).loss
    assert stacks(model) == before
    loss.backward()


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("config", [{}, {"use_dora": True}], ids=["fused", "generic"])
def test_dropout(config: dict[str, Any], checkpoint: bool) -> None:
    """Against the same tiles under plain autograd, which draw the same masks and recompute nothing."""
    models = [checkpointed(adapted(lora_dropout=0.4, **config), checkpoint).train() for _ in range(2)]
    for model in models:
        seqtile.apply(model, tile=5)
    torch.manual_seed(3)
    tiled = step(models[0])
    torch.manual_seed(3)
    with without_recompute(models[1]):
        plain = step(models[1])
    assert_same(tiled, plain)
    torch.manual_seed(4)
    assert not torch.equal(step(models[0])[0], plain[0])  # it does drop


def test_a_vector_bank_that_every_layer_shares() -> None:
    """VB-LoRA: one module under a name in each linear layer."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = VBLoRAConfig(r=4, target_modules=ALL, vector_length=8, num_vectors=16)
        return get_peft_model(causal_lm("llama", torch.float64), config).double()

    compare(make)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
def test_adapters_invoked_by_a_token_run_untiled_and_say_so(checkpoint: bool, caplog: pytest.LogCaptureFixture) -> None:
    """aLoRA is on from a token of each sequence; a tile does not know where that is."""

    def make() -> nn.Module:
        model = adapted(task_type="CAUSAL_LM", alora_invocation_tokens=[int(tokens()[0, 4])])
        model.enable_input_require_grads()
        return checkpointed(model, checkpoint)

    tiled, untiled = make(), make()
    expected = step(untiled)
    report = seqtile.apply(tiled, tile=5)
    assert report.tiled == 0 and len(report.left) == 2 and all(one.unproven for one in report.left)
    assert "base_model.model.model.layers.0.mlp (LlamaMLP): cannot be traced: " in caplog.text
    assert_same(step(tiled), expected)
    trusted = make()
    assert seqtile.apply(trusted, tile=5, trust="*.mlp").tiled == 2
    assert_same(step(trusted), expected)
    assert "layers.0.mlp runs untiled: PEFT passes its adapters one entry per sequence (alora_offsets)" in caplog.text


def test_an_adapter_per_row_runs_untiled() -> None:
    model, names = two_adapters().eval(), {"adapter_names": ["other", "default"]}
    expected = model(tokens(), **names).logits
    seqtile.apply(model, tile=5)
    torch.testing.assert_close(model(tokens(), **names).logits, expected)


def two_adapters() -> PeftModel:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["gate_proj", "down_proj"]))
    for p in model.parameters():
        p.data = p.data.double()
    warm(model)
    return model


def test_the_adapter_is_switched() -> None:
    tiled, untiled = compare(two_adapters)
    for name in ("other", "default"):
        for model in (tiled, untiled):
            model.set_adapter(name)  # type: ignore[operator]
        got, expected = step(tiled), step(untiled)
        assert_same(got, expected)
        trained = {key for key, value in got[1].items() if value is not None}
        assert trained and all(f".{name}." in key for key in trained)


def test_two_adapters_at_once() -> None:
    def both() -> nn.Module:
        model = two_adapters()
        model.base_model.set_adapter(["default", "other"])
        return model

    tiled, _ = compare(both)
    got = step(tiled)[1]
    assert {"default", "other"} <= {part for key, value in got.items() if value is not None for part in key.split(".")}


def test_merged_and_unmerged() -> None:
    tiled, untiled = compare(adapted)
    for model in (tiled, untiled):
        model.merge_adapter()  # type: ignore[operator]
    assert_same(step(tiled, learns=False), step(untiled, learns=False), learns=False)
    for model in (tiled, untiled):
        model.unmerge_adapter()  # type: ignore[operator]
    assert_same(step(tiled), step(untiled))


def test_disabled_adapters_are_the_base_model() -> None:
    tiled, untiled = compare(adapted)
    base = causal_lm("llama", torch.float64)
    with tiled.disable_adapter(), torch.no_grad():  # type: ignore[operator]
        torch.testing.assert_close(tiled(tokens()).logits, base(tokens()).logits)
    assert_same(step(tiled), step(untiled))


def test_full_weights_under_autocast() -> None:
    """fp32 master weights, bf16 products: judged by the untiled run's own error."""
    for model in (causal_lm("llama"), adapted(base=causal_lm("llama"))):
        with torch.autocast("cpu", torch.bfloat16):
            result = verify(model, {"input_ids": tokens(2, 40)}, tile=16)
        assert result.ok and result.reference == "float64", str(result)
        errors = [one.untiled_error for one in result.parameters if ".mlp." in one.name]
        assert all(error is not None and error > 1e-4 for error in errors)  # it did run in bf16


def tied_in_head() -> nn.Module:
    return causal_lm("llama", torch.float64, tie_word_embeddings=True)


def tied_in_blocks() -> nn.Module:
    model = causal_lm("llama", torch.float64)
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


def tied_within_a_block() -> nn.Module:
    model = causal_lm("llama", torch.float64)
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight
    return model


@pytest.mark.parametrize(("path", "checkpoint"), [("auto", True), ("generic", False)])
@pytest.mark.parametrize("make", [tied_in_head, tied_in_blocks, tied_within_a_block])
def test_tied_weights(make: Callable[[], nn.Module], path: str, checkpoint: bool) -> None:
    compare(lambda: checkpointed(make(), checkpoint), path)


@pytest.mark.parametrize("path", ["auto", "generic"])
@pytest.mark.parametrize("trains", ["", "embed_tokens", "down_proj", "layers.0"])
def test_frozen_weights(trains: str, path: str) -> None:
    def make() -> nn.Module:
        model = causal_lm("llama", torch.float64)
        for name, p in model.named_parameters():
            p.requires_grad_(bool(trains) and trains in name)
        return model

    if trains:
        compare(make, path)
        return
    tiled = make()
    seqtile.apply(tiled, tile=5, path=path)
    assert_same(step(tiled, learns=False), step(make(), learns=False), learns=False)


class StandInQuantised(nn.Linear):
    """Stands in for bitsandbytes' 8-bit layer where that is not installed: int8 rows with a scale each, frozen."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.weight = nn.Parameter((layer.weight.detach() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, make(child))
    return model


def test_adapters_on_a_stand_in_for_quantised_layers() -> None:
    def make() -> nn.Module:
        base = causal_lm("llama", torch.float64)
        return adapted(base=replace_linears(base, StandInQuantised))

    tiled, _ = compare(make, trust="*.mlp")
    assert "generic" in str(seqtile.apply(tiled, tile=5, trust="*.mlp"))


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("kind", ["4-bit", "8-bit"])
def test_adapters_on_bitsandbytes_layers(kind: str, checkpoint: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: the stand-in is tested instead")

    def quantise(layer: nn.Linear) -> nn.Module:
        if kind == "4-bit":
            made = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            made.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=made)
        else:
            made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, bias=False, has_fp16_weights=False)
            made.weight = bnb.nn.Int8Params(layer.weight.data, requires_grad=False, has_fp16_weights=False)
        return made.to("cpu")

    def make() -> nn.Module:
        base = replace_linears(causal_lm("llama", hidden_size=64, intermediate_size=128, head_dim=24), quantise)
        base.eval()  # as from_pretrained leaves it
        with seqtile.applied(base, tile=5):
            pass  # looking at a block must not repack its weights
        base.train()
        base.is_loaded_in_4bit, base.is_loaded_in_8bit = kind == "4-bit", kind == "8-bit"
        return checkpointed(adapted(base=base), checkpoint)

    compare(make)


# Merging needs a model that Transformers quantised; training does not.
@pytest.mark.filterwarnings("ignore:.*without `get_apply_tensor_subclass`:UserWarning")
@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
def test_adapters_on_torchao_int8_weights(checkpoint: bool) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

    def make() -> nn.Module:
        base = causal_lm("llama")
        head = base.lm_head
        torchao.quantize_(base, torchao.Int8WeightOnlyConfig(), lambda m, _: type(m) is nn.Linear and m is not head)
        return checkpointed(adapted(base=base), checkpoint)

    compare(make)


# --- who trains


def test_parameters_without_a_gradient_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = two_adapters()
    seqtile.apply(model, tile=5)
    idle = [name for name, p in model.named_parameters() if ".other." in name]
    for name in idle:
        model.get_parameter(name).requires_grad_(True)  # trains, and its adapter is not active
    step(model)
    caplog.clear()
    assert seqtile.check_gradients(model) == idle and len(idle) == 8
    (record,) = caplog.records
    assert record.message.startswith(f"8 trainable parameters inside tiled blocks have no gradient: {idle[0]}, ")
    assert f"{idle[4]} and 3 more; " in record.message


def test_parameters_outside_of_blocks_are_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    model = causal_lm("llama")
    model.idle = nn.Parameter(torch.ones(1))
    seqtile.apply(model, tile=5)
    step(model)
    caplog.clear()
    assert seqtile.check_gradients(model) == [] and not caplog.records


@pytest.mark.parametrize("architecture", ["opt", "gemma2"])
def test_neighbours_that_share_the_tile_are_looked_at(architecture: str) -> None:
    model = causal_lm(architecture)
    seqtile.apply(model, tile=5)
    layer = model.get_submodule("model.decoder.layers.0" if architecture == "opt" else "model.layers.0")
    inside = layer.fc1.weight if architecture == "opt" else layer.post_feedforward_layernorm.weight
    step(model)
    inside.grad = None
    (name,) = seqtile.check_gradients(model)
    assert model.get_parameter(name) is inside


def test_what_cannot_be_looked_at_is_said() -> None:
    with refused("verify.no-tiled-block"):
        seqtile.check_gradients(causal_lm("llama"))
    model = copy.deepcopy(causal_lm("llama"))
    seqtile.apply(model, tile=5)
    model.model.layers[0].mlp.up_proj.weight.ds_id = 1  # as ZeRO-3 marks it
    with refused("verify.under-deepspeed"):
        seqtile.check_gradients(model)


def test_a_forward_put_on_the_adapters_that_calls_the_one_before() -> None:
    """As ms-swift 4.6.0 does to follow the input's device (``swift/tuners/peft.py``, ``keep_device_forward``)."""

    def keep_device_forward(self: Any, x: Tensor) -> Any:
        return self.forward_origin(x.to(self.weight.device) if self.weight.device != x.device else x)

    keep_device_forward = FunctionType(keep_device_forward.__code__, {"__name__": "swift.tuners.peft"})

    def made() -> PeftModel:
        model = adapted()
        for name, module in model.named_modules():
            if name.endswith((".lora_A.default", ".lora_B.default")):
                module.forward_origin = module.forward  # type: ignore[assignment]
                module.forward = MethodType(keep_device_forward, module)
        return model

    tiled = made()
    assert str(seqtile.apply(tiled, tile=7)).startswith("tiled 2 of 2 MLPs (LlamaMLP), 7 tokens per tile, generic")
    (loss, gradients, _), (expected, untiled, _) = step(tiled), step(made())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, untiled)
