"""Which blocks the fused operator takes: real models and adapters, and every reason to decline."""

from __future__ import annotations

import functools
import re
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import seqtile
from numerics._blocks import assert_same, gradients, random
from numerics._fused import Conv1D, Fused, GatedMLP, GateUpMLP, PlainMLP, fused_weights
from seqtile.blocks import instance
from seqtile.counting.products import count_products
from seqtile.ops.linear import Packed, Projection
from seqtile.ops.mlp import fused_mlp
from seqtile.recognise import formula, proof
from seqtile.recognise.live_weights import row_wise
from watching import rows_of
from zoo import ARCHITECTURES, HIDDEN, assert_same_gradients, causal_lm, tokens
from zoo import gradients as model_gradients

TILE = 4
FUSED = {
    "llama": "silu", "mistral": "silu", "qwen2": "silu", "qwen3": "silu", "phi3": "silu", "gemma2": "gelu_tanh",
    "gemma3_text": "gelu_tanh", "gpt2": "gelu_tanh", "falcon": "gelu", "gpt_neox": "gelu", "cohere": "silu",
    "olmo2": "silu", "glm4": "silu", "deepseek_v3": "silu", "starcoder2": "gelu_tanh", "nemotron": "relu2",
    "phi": "gelu_tanh", "stablelm": "silu", "granite": "silu",
}  # fmt: skip


def mlp_of(architecture: str, **config: Any) -> nn.Module:
    """The first MLP of a tiny model."""
    if architecture not in ARCHITECTURES:
        config = {"resid_pdrop": 0.0, **config}
    model = _causal_lm(architecture, **config)
    layer = next(m for name, m in model.named_modules() if name.endswith((".0.mlp", ".0.feed_forward")))
    return layer


def _causal_lm(architecture: str, **config: Any) -> nn.Module:
    ARCHITECTURES.setdefault(architecture, {})
    return causal_lm(architecture, torch.float64, **config)


def reason(module: nn.Module) -> str:
    found = fused_weights(module)
    assert isinstance(found, str), f"{type(module).__name__} was taken"
    return found


@pytest.mark.parametrize("architecture", FUSED)
def test_mlps_of_models(architecture: str) -> None:
    mlp = mlp_of(architecture)
    weights = fused_weights(mlp)
    assert not isinstance(weights, str), weights
    assert weights.activation.name == FUSED[architecture]
    x = random(2, 5, HIDDEN, dtype=torch.float64)
    upstream = random(2, 5, HIDDEN, dtype=torch.float64, seed=2, grad=False)
    assert_same(gradients(Fused(mlp, TILE), [x], upstream), gradients(mlp, [x], upstream))


def test_a_block_that_is_tiled_is_read_as_it_was() -> None:
    model = causal_lm("llama")
    mlp = model.model.layers[0].mlp
    seqtile.apply(model, tile=4)
    assert not isinstance(fused_weights(mlp), str)


def test_linear_layers_that_a_layer_calls_itself() -> None:
    model, ids = causal_lm("opt", torch.float64), tokens()
    _, expected = model_gradients(model, ids)
    report = seqtile.apply(model, tile=TILE)
    assert {(block.path, block.not_fused) for block in report.blocks} == {("fused", "")}
    assert_same_gradients(model_gradients(model, ids)[1], expected)


@pytest.mark.parametrize("child", ["fc1", "fc2"])
def test_hooks_on_linear_layers_that_a_layer_calls_itself(child: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("opt", torch.float64), tokens()
    _, expected = model_gradients(model, ids)
    getattr(model.model.decoder.layers[0], child).register_forward_hook(lambda *_: None)
    first, second = seqtile.apply(model, tile=TILE, trust="*").blocks
    assert (first.path, first.not_fused, second.path) == ("generic", f"{child} has hooks", "fused")
    assert_same_gradients(model_gradients(model, ids)[1], expected)
    assert f"OPTDecoderLayer runs untiled: {child} has hooks" in caplog.text


def test_activations_with_hooks_or_weights_that_a_layer_calls_itself() -> None:
    model, ids = causal_lm("opt", torch.float64), tokens()
    for layer, act in zip(model.model.decoder.layers, (nn.PReLU().double(), nn.ReLU()), strict=True):
        layer.activation_fn = act
    act.register_forward_hook(lambda *_: None)
    _, expected = model_gradients(model, ids)
    report = seqtile.apply(model, tile=TILE, trust="*")
    assert [block.path for block in report.blocks] == ["generic", "generic"]
    assert "another formula" in report.blocks[0].not_fused
    assert report.blocks[1].not_fused == "activation_fn has hooks"
    assert_same_gradients(model_gradients(model, ids)[1], expected)


@pytest.mark.parametrize(("gate", "down"), [(0.5, 1.0), (1.0, 2.0)])
def test_multipliers_are_noticed(gate: float, down: float) -> None:
    """Falcon-H1 scales the gate and the output; with ones it is the plain formula."""
    ones = dict(mlp_multipliers=[1.0, 1.0], mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8)
    assert not isinstance(fused_weights(mlp_of("falcon_h1", **ones)), str)
    assert "another formula" in reason(mlp_of("falcon_h1", **{**ones, "mlp_multipliers": [gate, down]}))


class Clamped(GatedMLP):
    limit = 7.0

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).clamp(max=self.limit)
        return self.down(self.act(gate) * self.up(x).clamp(-self.limit, self.limit))


class Residual(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Dropping(GatedMLP):
    """Functional dropout between the products."""

    share = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.act(self.gate(x)) * self.up(x), self.share, self.training))


class NormInside(GatedMLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.act(self.gate(x)) * self.up(x)))


class Scaled(GatedMLP):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class TwoArguments(GatedMLP):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return residual + super().forward(x)


class Tupled(GatedMLP):
    def forward(self, x: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(x),)


class Odd(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def with_odd_linear() -> nn.Module:
    mlp = GatedMLP()
    mlp.up = Odd(6, 10)
    return mlp


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Clamped, "another formula"),
        (Residual, "another formula"),
        (Dropping, "another formula"),
        (NormInside, "another formula"),
        (lambda: Scaled(2.0), "another formula"),
        (TwoArguments, "it was called with more than hidden states"),
        (Tupled, "another formula"),
        (lambda: GatedMLP(act=nn.Softmax(-2)), "depends on other tokens: _softmax is taken over them"),
        (lambda: GatedMLP(act=nn.RReLU()), "draws random numbers outside dropout"),
        (lambda: GatedMLP(act=nn.PReLU()), "another formula"),
        (with_odd_linear, "another formula"),
        (lambda: nn.Sequential(nn.Linear(6, 6)), "1 linear layers where 2 or 3 were expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_formulas_are_declined(make: Callable[[], nn.Module], why: str) -> None:
    found = reason(make())
    assert re.search(why, found), found


def test_dropout_that_does_not_drop_now_is_no_reason() -> None:
    assert not isinstance(fused_weights(Dropping().eval()), str)
    none = Dropping()
    none.share = 0.0
    assert not isinstance(fused_weights(none), str)


def test_dropout_on_the_output_is_taken_and_elsewhere_declined() -> None:
    class Inside(PlainMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.dropout(self.act(self.up(x))))

    for share, training, expected in ((0.3, True, 0.3), (0.3, False, 0.0), (0.0, True, 0.0)):
        weights = fused_weights(PlainMLP(dropout=share).train(training))
        assert not isinstance(weights, str) and weights.dropout == expected
        found = fused_weights(Inside(dropout=share).train(training))
        assert isinstance(found, str) == (expected > 0)


def test_order_of_the_halves_is_found() -> None:
    for up_first in (False, True):
        weights = fused_weights(GateUpMLP(up_first=up_first))
        assert not isinstance(weights, str) and weights.up_first == up_first


def test_order_of_gate_and_up_is_found() -> None:
    class Turned(GatedMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.gate(x) * self.act(self.up(x)))

    mlp = Turned()
    weights = fused_weights(mlp)
    assert not isinstance(weights, str) and weights.first[0].weight is mlp.up.weight


class Configured(PlainMLP):
    """A forward that asks a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.scale


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale


def test_a_proof_holds_for_its_class_and_configuration() -> None:
    assert not isinstance(fused_weights(Configured(Config(1.0))), str)
    assert isinstance(fused_weights(Configured(Config(2.0))), str)
    assert not isinstance(fused_weights(Configured(Config(1.0))), str)
    one, other = GatedMLP(act=lambda z: F.relu(z)), GatedMLP(act=lambda z: F.relu(z).square())
    names = [w.activation.name for w in (fused_weights(one), fused_weights(other)) if not isinstance(w, str)]
    assert names == ["relu", "relu2"]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry per chain that is traced from now on; nothing is known at first."""
    monkeypatch.setattr(proof, "_proofs", OrderedDict())
    asked: list[object] = []
    prove = proof._prove

    def noting(*args: Any) -> object:
        asked.append(args[0])
        return prove(*args)

    monkeypatch.setattr(proof, "_prove", noting)
    return asked


def test_a_class_is_traced_once(traced: list[object]) -> None:
    model = causal_lm("gemma2", num_hidden_layers=3)
    for _ in range(2):
        for layer in model.model.layers:
            assert not isinstance(fused_weights(layer.mlp), str)
    assert len(traced) == 1


def test_a_tiled_model_is_traced_once(traced: list[object]) -> None:
    """With the norms around it, by ``apply`` and by two steps of three layers; the final norm has its own trace."""
    model, ids = causal_lm("gemma2", num_hidden_layers=3), tokens()
    seqtile.apply(model, tile=TILE)
    for _ in range(2):
        model_gradients(model, ids)
    assert len(traced) == 2


def test_an_activation_made_for_each_block_is_the_same(traced: list[object]) -> None:
    for number in range(2):
        weights = fused_weights(GatedMLP(act=functools.partial(F.gelu, approximate="tanh")))
        assert not isinstance(weights, str) and weights.activation.name == "gelu_tanh"
        assert len(traced) == 1, number
    weights = fused_weights(GatedMLP(act=functools.partial(F.gelu)))
    assert not isinstance(weights, str) and weights.activation.name == "gelu"
    assert len(traced) == 2


def test_the_trace_leaves_no_trace(traced: list[object]) -> None:
    """No random number drawn, no product counted, no attribute changed, whatever surrounds it."""
    mlp = PlainMLP(dropout=0.3).train()
    attributes, state = dict(vars(mlp)), torch.get_rng_state()
    with count_products() as products, torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert not isinstance(fused_weights(mlp), str)
    assert traced
    with pytest.raises(RuntimeError):
        assert products.calls
    assert torch.equal(torch.get_rng_state(), state)
    assert {k: v for k, v in vars(mlp).items() if v is not attributes[k]} == {}


def test_the_trace_runs_inside_a_checkpointed_forward(traced: list[object]) -> None:
    mlp, x = GatedMLP(), random(5, 6)
    checkpoint(Fused(mlp, TILE), x, use_reentrant=False).sum().backward()
    assert traced
    expected = torch.autograd.grad(mlp(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "forward hook": lambda m: m.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda *_: None),
    "own forward": lambda m: m.__dict__.update(forward=types.MethodType(lambda self, x: nn.Linear.forward(self, x), m)),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("child", ["gate", "up", "down", "act"])
def test_hooks_inside_the_block(child: str, hook: str) -> None:
    mlp = GatedMLP(act=nn.SiLU())
    HOOKS[hook](getattr(mlp, child))
    if (child, hook) == ("act", "own forward"):
        assert isinstance(fused_weights(mlp), str)
    else:
        assert reason(mlp) == f"{child} has hooks"


def test_a_replaced_forward_is_traced_like_any_other() -> None:
    mlp = GatedMLP()
    mlp.__dict__["forward"] = lambda x: 2 * x
    assert "another formula" in reason(mlp)
    mlp.__dict__["forward"] = types.MethodType(lambda self, x: type(self).forward(self, x), mlp)
    assert not isinstance(fused_weights(mlp), str)


def test_weights_that_are_no_plain_tensors() -> None:
    class Packed(nn.Parameter):
        pass

    mlp = GatedMLP()
    mlp.up.weight = Packed(mlp.up.weight.detach())
    assert reason(mlp) == "up: its weight is a Packed"
    mlp = GatedMLP()
    mlp.up.weight = nn.Parameter(torch.zeros(10, 6, dtype=torch.int8), requires_grad=False)
    assert reason(mlp) == "up: its weight is quantised (int8)"
    mlp = GatedMLP()
    mlp.down.weight.data = torch.empty(0)
    assert "failed to run" in reason(mlp)
    mlp.down.weight.ds_shape = torch.Size((6, 10))  # as ZeRO-3 says what the shards are of
    assert reason(mlp) == "down: its weight is not gathered"
    mlp = GatedMLP()
    mlp.up = nn.Bilinear(6, 6, 10)
    assert "Bilinear" in reason(mlp)


def test_inside_torch_compile_the_generic_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, run = [], instance.fused_mlp
    monkeypatch.setattr(instance, "fused_mlp", lambda *a, **k: fused.append(1) or run(*a, **k))
    mlp, x = GatedMLP(), random(2, 5, 6)
    expected = mlp(x)
    assert seqtile.apply(mlp, tile=TILE, trust="*").blocks[0].path == "fused"
    torch.testing.assert_close(torch.compile(mlp, backend="eager", fullgraph=True)(x), expected)
    assert not fused
    torch.testing.assert_close(mlp(x), expected)
    assert fused
    torch._dynamo.reset()


def test_conv1d_is_known_by_its_shape_not_by_its_module() -> None:
    weights = fused_weights(PlainMLP(transposed=True))
    assert not isinstance(weights, str) and all(p.transposed for p in (*weights.first, weights.down))
    assert Conv1D.__module__ != "transformers.pytorch_utils"


class TestAdapters:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        self.peft = pytest.importorskip("peft", reason="PEFT is not installed")

    def adapted(self, settings: Any = None, **config: Any) -> nn.Module:
        root = nn.Module()
        root.mlp = GatedMLP()
        lora = {"r": 2, "target_modules": ["gate", "up", "down"], **config}
        return self.peft.inject_adapter_in_model(settings or self.peft.LoraConfig(**lora), root).mlp

    def test_live_adapter(self) -> None:
        mlp = self.adapted(lora_dropout=0.25, lora_alpha=6)
        for training, dropout in ((True, 0.25), (False, 0.0)):
            weights = fused_weights(mlp.train(training))
            assert not isinstance(weights, str)
            adapter = weights.down.adapter
            assert adapter is not None and (adapter.scaling, adapter.dropout) == (3.0, dropout)
            assert adapter.down is mlp.down.lora_A["default"].weight
        for layer in (mlp.gate, mlp.up, mlp.down):
            layer.enable_adapters(False)
        weights = fused_weights(mlp)
        assert not isinstance(weights, str) and weights.down.adapter is None

    def test_several_active_adapters(self) -> None:
        mlp = self.adapted()
        mlp.gate.update_layer("second", 2, 2, config=self.peft.LoraConfig(r=2))
        mlp.gate.set_adapter(["default", "second"])
        assert reason(mlp) == "gate: 2 adapters are active"
        mlp.gate.set_adapter("second")
        assert not isinstance(fused_weights(mlp), str)

    @pytest.mark.parametrize(
        ("config", "why"),
        [({"use_dora": True}, "gate: its adapter is a variant"), ({"lora_bias": True}, "gate: its adapter has a bias")],
    )
    def test_variants(self, config: dict[str, Any], why: str) -> None:
        assert reason(self.adapted(**config)).startswith(why)

    def test_another_method(self) -> None:
        config = self.peft.IA3Config(target_modules=["up"], feedforward_modules=["up"])
        assert "ia3" in reason(self.adapted(config))

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (lambda mlp: mlp.up.merge(), "up: its adapters are merged"),
            (lambda mlp: mlp.down.lora_B["default"].register_forward_hook(lambda *_: None), "down's adapter has hooks"),
            (lambda mlp: mlp.down.base_layer.register_forward_hook(lambda *_: None), "down has hooks"),
            (lambda mlp: mlp.up.lora_dropout.update({"default": nn.AlphaDropout(0.1)}), "up: its adapter drops by"),
        ],
        ids=["merged", "hook on the adapter", "hook on the base", "another dropout"],
    )
    def test_what_else_is_declined(self, change: Callable[[Any], object], why: str) -> None:
        mlp = self.adapted()
        change(mlp)
        assert reason(mlp).startswith(why)


class Quantised(nn.Module):
    """A stand-in for a quantised linear layer: frozen, in integers, and made dense for each product."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.scale = layer.weight.detach().abs().max().item() / 127
        self.weight = nn.Parameter((layer.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)

    def dense(self) -> Tensor:
        return self.weight.float() * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dense(), self.bias)


@pytest.mark.parametrize(
    ("keep", "calls"),
    [(0.0, 3 + 3), (0.5, 3 + 3), ("memory:96KiB", 3 + 3), ("memory:95KiB", 3 * 3 + 2 * 3 + 5), ("auto", 3 * 3 + 3 * 5),
     ("memory:160KiB", 3 + 3)],
)  # fmt: skip
def test_keep_decides_whether_dense_weights_stay(
    keep: float | str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three 64 x 128 weights in float32 are 96 KiB; the CPU's free memory is not read, so "auto" spares nothing."""
    torch.manual_seed(0)
    mlp = GatedMLP(64, 128)
    for name in ("gate", "up", "down"):
        setattr(mlp, name, Quantised(getattr(mlp, name)))
    plain = formula.projection_of

    def packed(name: str, layer: nn.Module, dtype: torch.dtype | None = None, **words: Any) -> Projection | str:
        if not isinstance(layer, Quantised):
            return plain(name, layer, dtype, **words)
        return Projection(Packed(layer.dense, (layer.out_features, layer.in_features)), layer.bias)

    monkeypatch.setattr(formula, "projection_of", packed)
    monkeypatch.setattr(proof, "_proofs", OrderedDict())
    kept: list[float] = []
    run = instance.fused_mlp
    monkeypatch.setattr(instance, "fused_mlp", lambda *a, **k: kept.append(k["keep"]) or run(*a, **k))
    x, upstream = random(2, 50, 64), random(2, 50, 64, seed=2, grad=False)
    (expected,) = torch.autograd.grad(mlp(x), x, upstream)
    report = seqtile.apply(mlp, tile=40, keep=keep, trust="*")
    assert report.blocks[0].path == "fused", report.blocks[0].not_fused
    mlp(x)  # any proof that is still missing is made now
    kept.clear()
    with rows_of("_to_copy") as asked:
        (got,) = torch.autograd.grad(mlp(x), x, upstream)
    assert len(asked) == calls
    # Gate and up of a token are 1 KiB, tiles of 34, 33 and 33: dense weights leave 64 of 160 KiB, which hold one tile;
    # 95 hold no dense weights, but two tiles.
    share = {0.5: 0.5, "memory:160KiB": 1 / 3, "memory:95KiB": 2 / 3}.get(keep, 0.0)
    assert kept == [pytest.approx(share)]
    torch.testing.assert_close(got, expected, rtol=1.3e-6, atol=1e-5 * expected.abs().max().item())


class TestFourBits:
    """Frozen 4-bit layers of bitsandbytes, with adapters: QLoRA."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        self.bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def packed(self, dtype: torch.dtype, computes: torch.dtype | None, adapters: bool) -> nn.Module:
        peft = pytest.importorskip("peft", reason="PEFT is not installed")
        torch.manual_seed(0)
        mlp = GatedMLP(64, 128)
        for name in ("gate", "up", "down"):
            dense = getattr(mlp, name)
            layer = self.bnb.nn.Linear4bit(dense.in_features, dense.out_features, compute_dtype=computes)
            layer.weight = self.bnb.nn.Params4bit(dense.weight.detach().to(dtype), requires_grad=False)
            layer.bias = nn.Parameter(dense.bias.detach().to(dtype), requires_grad=False)
            setattr(mlp, name, layer.to("cpu"))
        root = nn.Module()
        root.mlp = mlp
        if adapters:
            config = peft.LoraConfig(r=4, target_modules=["gate", "up", "down"])
            root = peft.inject_adapter_in_model(config, root)
            for name, weight in root.named_parameters():
                if "lora_" in name:
                    nn.init.normal_(weight, std=0.2)
        return root.mlp

    @pytest.mark.parametrize("adapters", [False, True])
    def test_the_block(self, adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        mlp = self.packed(torch.float32, None, adapters)
        weights = fused_weights(mlp, torch.float32)
        assert not isinstance(weights, str), weights
        asked = []
        dense = self.bnb.functional.dequantize_4bit
        x, upstream = random(2, 50, 64), random(2, 50, 64, seed=2, grad=False)
        with monkeypatch.context() as patch:
            patch.setattr(self.bnb.functional, "dequantize_4bit", lambda *a: asked.append(None) or dense(*a))
            output = fused_mlp(x, weights, (40, 40, 20))
            trained = [x, *(w for w in mlp.parameters() if w.requires_grad)]
            ours = torch.autograd.grad(output, trained, upstream)
        assert len(asked) == 6, "three weights, forward and backward"
        expected = mlp(x)
        torch.testing.assert_close(output, expected)
        for got, true in zip(ours, torch.autograd.grad(expected, trained, upstream), strict=True):
            torch.testing.assert_close(got, true, rtol=1.3e-6, atol=1e-5 * true.abs().max().item())

    def test_a_dtype_of_its_own(self) -> None:
        mlp = self.packed(torch.bfloat16, torch.bfloat16, adapters=False)
        assert not isinstance(fused_weights(mlp, torch.bfloat16), str)
        assert "computes in torch.bfloat16" in str(fused_weights(mlp, torch.float32))
        with torch.autocast("cpu", torch.float16):
            assert isinstance(fused_weights(mlp, torch.bfloat16), str)
        with torch.autocast("cpu", torch.bfloat16):
            assert not isinstance(fused_weights(mlp, torch.bfloat16), str)


def test_norms_in_the_tile() -> None:
    norm = nn.LayerNorm(6)
    found = row_wise(norm)
    assert not isinstance(found, str) and found.weights == (norm.weight, norm.bias)
    x = random(5, 6)
    torch.testing.assert_close(found.function(x, found.weights), norm(x))
    norm.register_forward_hook(lambda *_: None)
    assert row_wise(norm) == "LayerNorm has hooks"
    assert row_wise(GatedMLP()) == "GatedMLP is no row-wise norm"
    norm = nn.LayerNorm(6)
    norm.weight.data = torch.empty(0)
    assert row_wise(norm) == "LayerNorm: its weight is not gathered"
