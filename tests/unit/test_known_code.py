"""Library code is tiled, custom code is left alone and named, and what a proof rests on is seen to change."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import seqtile
from other_thread import backward_elsewhere
from refusals import refused
from seqtile.recognise import proof
from watching import rows_of
from zoo import EXPERTS, HIDDEN, INTERMEDIATE, assert_same_gradients, causal_lm, gradients, tokens

D, F_ = 8, 12
FULL = [5, 5, 4, 4, 4, 4]
"""Rows of the products of 26 tokens in tiles of 5."""


def llama_mlp() -> Any:
    return LlamaMLP(LlamaConfig(hidden_size=D, intermediate_size=F_, num_attention_heads=2))


class Swiglu(nn.Module):
    """An MLP as anyone writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, F_), nn.Linear(D, F_), nn.Linear(F_, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGateUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(D, 2 * F_, bias=False), nn.Linear(F_, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.gelu(gate, approximate="tanh") * up)


class Einops(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        einops = pytest.importorskip("einops", reason="einops is not installed")
        rows = einops.rearrange(x, "b s d -> (b s) d")
        return einops.rearrange(super().forward(rows), "(b s) d -> b s d", b=x.shape[0])


class LoraByHand(Swiglu):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, F_, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x) + 0.5 * self.b(self.a(x))) * self.up(x))


class OwnNorm(Swiglu):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale)


class Compiled(Swiglu):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.compile(F.silu, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


FORMULAS = {Swiglu: "fused", FusedGateUp: "fused", Einops: "fused", LoraByHand: "generic", OwnNorm: "generic",
            Compiled: "fused"}  # fmt: skip


def differentiated(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.pow(2).sum(), [x, *module.parameters()])]


REQUESTS: dict[str, Callable[[Any], seqtile.Report]] = {
    "trust": lambda model: seqtile.apply(model, tile=3, trust="*"),
    "tile_module": lambda model: seqtile.tile_module(model[0], tile=3),
}


@pytest.mark.parametrize("request_by", REQUESTS)
@pytest.mark.parametrize("kind", FORMULAS, ids=lambda kind: kind.__name__)
def test_an_ordinary_custom_mlp_is_tiled_where_its_author_says_so(
    kind: type[Swiglu], request_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList([kind()]).double(), torch.randn(2, 7, D, dtype=torch.float64, requires_grad=True)
    expected = differentiated(model[0], x)
    report = REQUESTS[request_by](model)
    assert report.blocks[0].path == FORMULAS[kind]
    with rows_of(model[0].down.weight) as rows:
        got = differentiated(model[0], x)
    assert max(rows) == 3 and "untiled" not in caplog.text
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_custom_code_is_left_alone_and_named_beside_a_librarys() -> None:
    model = nn.ModuleDict({"known": llama_mlp(), "mlp": Swiglu()})
    before = dict(vars(model["mlp"]))
    report = seqtile.apply(model, tile=3)
    assert [block.name for block in report.blocks] == ["known"]
    [left] = report.left
    assert left.name == "mlp" and left.unproven and vars(model["mlp"]) == before
    for words in ("Swiglu is custom code", "trust='mlp'", "seqtile.verify"):
        assert words in left.why
    assert "custom code left untiled: mlp (Swiglu), see report.left" in str(report)


def test_a_model_of_nothing_but_custom_code_is_refused_with_the_ways_out() -> None:
    with refused("blocks.nothing-to-tile", "Swiglu", "trust='mlp'"):
        seqtile.apply(nn.ModuleDict({"mlp": Swiglu()}), tile=3)


def _halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def halved(self: Any, x: Tensor) -> Tensor:
        return forward(self, x) / 2

    return halved


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


CUSTOM_PARTS: dict[str, Callable[[Any], object]] = {
    "an activation": lambda mlp: setattr(mlp, "act_fn", lambda x: F.silu(x)),
    "a forward": lambda mlp: setattr(mlp, "forward", lambda x: type(mlp).forward(mlp, x)),
    "a hook inside": lambda mlp: mlp.up_proj.register_forward_hook(lambda *_: None),
    "a child": lambda mlp: setattr(mlp, "up_proj", type("Mine", (nn.Linear,), {"__module__": __name__})(D, F_)),
    "a forward with a library's name": lambda mlp: setattr(mlp, "forward", _halved(type(mlp).forward).__get__(mlp)),
    "a function of autograd": lambda mlp: setattr(mlp, "act_fn", OwnFunction.apply),
    "an argument of a partial": lambda mlp: setattr(mlp, "act_fn", functools.partial(checkpoint, lambda x: x * 2)),
    "a method of a module elsewhere": lambda mlp: setattr(mlp, "act_fn", nn.GELU("tanh").forward),
}


@pytest.mark.parametrize("name", CUSTOM_PARTS)
def test_a_librarys_block_with_a_custom_part_is_custom(name: str) -> None:
    mlp = llama_mlp()
    if name not in ("a forward", "a hook inside", "a child", "a forward with a library's name"):
        del mlp.act_fn
    CUSTOM_PARTS[name](mlp)
    assert proof.prove(chain_of(mlp), MODE).custom
    assert not proof.prove(chain_of(mlp), MODE, trusted=True).refuted


def chain_of(mlp: nn.Module) -> proof.Chain:
    return proof.Chain((("mlp", mlp),))


MODE = proof.Mode(((("b", "s", D), torch.float32),), torch.device("cpu"))


def test_a_hook_around_the_block_is_none_inside_it() -> None:
    mlp = llama_mlp()
    mlp.register_forward_hook(lambda *_: None)
    assert proof.prove(chain_of(mlp), MODE).why_not == ""


CHANGES: dict[str, Callable[[Any], object]] = {
    "another activation": lambda mlp: setattr(mlp, "act_fn", nn.ReLU()),
    "a frozen weight": lambda mlp: mlp.up_proj.weight.requires_grad_(False),
    "another layer": lambda mlp: setattr(mlp, "up_proj", nn.Linear(HIDDEN, INTERMEDIATE, dtype=torch.float64)),
    "a custom activation": lambda mlp: setattr(mlp, "act_fn", nn.Sequential(nn.Softplus())),
    "a custom hook": lambda mlp: mlp.gate_proj.register_forward_hook(lambda m, args, out: out * 2),
    "another weight": lambda mlp: setattr(mlp.gate_proj, "weight", nn.Parameter(mlp.gate_proj.weight.detach() * 3)),
    "another forward": lambda mlp: setattr(mlp.gate_proj, "forward", lambda x: F.linear(x, mlp.gate_proj.weight) + 1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_calls_is_seen(name: str) -> None:
    model, ids = causal_lm("llama", torch.float64), tokens()
    seqtile.apply(model, tile=5)
    gradients(model, ids)
    torch.manual_seed(0)
    CHANGES[name](model.model.layers[0].mlp)
    _, got = gradients(model, ids)
    seqtile.undo(model)
    _, expected = gradients(model, ids)
    assert_same_gradients(got, expected)


def test_a_class_whose_forward_is_replaced_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = causal_lm("llama", torch.float64), tokens()
    seqtile.apply(model, tile=5)
    gradients(model, ids)
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 2 * forward(self, x))
    _, got = gradients(model, ids)
    seqtile.undo(model)
    _, expected = gradients(model, ids)
    assert_same_gradients(got, expected)


class CountsOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.rows.append(args[0].shape[0])
        return func(*args, **(kwargs or {}))


class CountsFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


WATCHERS: dict[str, Callable[[], Any]] = {
    "a mode of operators": CountsOperators,
    "a mode of functions": CountsFunctions,
    "a profiler": lambda: profile(activities=[ProfilerActivity.CPU]),
    "a default device": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("name", WATCHERS)
def test_whoever_watches_changes_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("llama", torch.float64), tokens()
    seqtile.apply(model, tile=5)
    up = model.model.layers[0].mlp.up_proj.weight
    with WATCHERS[name](), rows_of(up) as rows:
        gradients(model, ids)
    assert rows[:6] == FULL and "untiled" not in caplog.text


def _everything() -> Iterator[tuple[str, dict[str, Any]]]:
    yield from ((name, dict(vars(sys.modules[name]))) for name in (modeling_llama.__name__, F.__name__, torch.__name__))
    for kind in (nn.Module, nn.Linear, LlamaMLP, LlamaRMSNorm, Tensor, nn.Parameter):
        yield kind.__qualname__, dict(vars(kind))


@pytest.mark.parametrize("options", [{}, {"heads": 1}, {"loss": "tiled"}, {"checkpoint": "attention-saved"}], ids=str)
def test_nothing_that_is_not_ours_is_written_to(options: dict[str, Any]) -> None:
    model, ids = causal_lm("llama"), tokens()
    gradients(model, ids)
    before = dict(_everything())
    written: list[str] = []

    def observe(when: str) -> None:
        for name, content in _everything():
            known = before[name]
            changed = content.keys() ^ known.keys() | {key for key in content if content[key] is not known.get(key)}
            written.extend(f"{name}.{key}, {when}" for key in sorted(changed))

    seqtile.apply(model, tile=5, **options)
    observe("after apply")
    gradients(model, ids)
    observe("after a step")
    seqtile.undo(model)
    observe("after undo")
    assert not written


def test_the_first_compilation_of_a_process_is_no_change() -> None:
    """It puts attributes on ``nn.Module``; between forward and backward that made a checkpoint's recompute another."""
    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    seqtile.apply(model, tile=5)
    loss = model(input_ids=ids, labels=ids).loss
    nn.Module.of_somebody = 1  # type: ignore[attr-defined]
    try:
        torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2))
        model.zero_grad()
        loss.backward()
    finally:
        del nn.Module.of_somebody  # type: ignore[attr-defined]
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_tangents_and_transforms_run_untiled(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([Swiglu()]).requires_grad_(False)
    seqtile.apply(model, tile=3, trust="*")
    x, tangent = torch.randn(2, 3, 20, D).unbind()

    def derivative() -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model[0](forward_ad.make_dual(x, tangent))).tangent

    def rows() -> Tensor:
        return torch.func.vmap(model[0])(x[:, None])[:, 0]

    got = derivative(), rows()
    seqtile.undo(model)
    for one, other in zip(got, (derivative(), rows()), strict=True):
        torch.testing.assert_close(one, other)
    assert "torch.func" in caplog.text


def test_apply_works_where_anomalies_are_looked_for() -> None:
    proof._proofs.clear()
    with torch.autograd.set_detect_anomaly(True):
        assert seqtile.apply(causal_lm("llama"), tile=5).tiled == 2


def test_a_compiled_block_that_changes_is_compiled_as_it_is() -> None:
    model, x = nn.ModuleList([llama_mlp()]), torch.randn(3, 20, D)
    seqtile.apply(model, tile=3)
    compiled = torch.compile(model[0], backend="eager")
    with torch.no_grad():
        compiled(x)
        model[0].act_fn = nn.ReLU()
        got = compiled(x)
        seqtile.undo(model)
        torch.testing.assert_close(got, model[0](x))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_of_one_number_per_token_is_split(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    class Masked(Swiglu):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * mask.unsqueeze(-1)

    caplog.set_level(logging.WARNING)
    mlp, x = Masked(), torch.randn(3, 20, D, requires_grad=True)
    mask = (torch.rand(3, 20) > 0.5).to(dtype)
    expected = mlp(x, mask)
    seqtile.tile_module(mlp, tile=3)
    torch.testing.assert_close(mlp(x, mask), expected)
    assert "runs untiled:" not in caplog.text


def test_what_runs_untiled_runs_on_the_arguments_themselves() -> None:
    """A module that writes into its input, of which no trace can be made before it is called."""

    class Writes(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return x.mul_(scale).add_(shift)

    module, x = Writes(), torch.ones(4, 6)
    seqtile.tile_module(module, dim=0, tile=2)
    with torch.no_grad():
        module(x, torch.full((4, 6), 2.0), torch.ones(4, 6))
    assert torch.equal(x, torch.full((4, 6), 3.0))


@pytest.mark.parametrize("architecture", ["llama", *EXPERTS])
def test_a_backward_outside_of_the_forwards_autocast(architecture: str) -> None:
    """As everybody runs it, and on an accelerator in a thread of its own."""
    model, ids = causal_lm(architecture), tokens()
    exact = {name: grad for name, grad in gradients(model, ids)[1].items() if grad is not None}

    def under_autocast() -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        backward_elsewhere(loss)
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    untiled = under_autocast()
    assert seqtile.apply(model, tile=5).tiled >= 2
    tiled = under_autocast()
    errors = {name: float((untiled[name] - grad).norm() / grad.norm()) for name, grad in exact.items()}
    typical = median(errors.values())  # a bias of six numbers may be rounded well by chance
    for name, grad in exact.items():
        assert (tiled[name] - grad).norm() <= 2 * max(errors[name], typical) * grad.norm(), name


def test_weights_of_three_dimensions_do_not_make_experts() -> None:
    """A class token and positions have three as well; a call of experts names each token's routes and weights."""
    from transformers import ViTConfig, ViTModel

    sizes = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    report = seqtile.apply(ViTModel(ViTConfig(**sizes)), tile=5)
    assert len(report.blocks) == 1 and report.blocks[0].kind in ("mlp", "pair")  # without a module of its own in 5.0
    assert [left.name for left in report.left] == ["embeddings"]


def test_a_wrapped_forward_of_a_class_is_custom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", _halved(LlamaMLP.forward))
    assert proof.prove(chain_of(llama_mlp()), MODE).custom


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_activation_is_left() -> None:
    mlp = llama_mlp()
    mlp.act_fn = torch.jit.script(nn.SiLU())  # type: ignore[no-untyped-call]
    model = nn.ModuleDict({"known": llama_mlp(), "mlp": mlp})
    report = seqtile.apply(model, tile=3)
    assert [left.name for left in report.left] == ["mlp"] and "TorchScript" in report.left[0].why


def test_settings_inside_of_objects_tell_blocks_apart() -> None:
    class Configured(Swiglu):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.config = SimpleNamespace(text=SimpleNamespace(act=kind))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.gate(x), approximate=self.config.text.act) * self.up(x))

    torch.manual_seed(0)
    model, x = nn.ModuleList([Configured("none"), Configured("tanh")]).double(), torch.randn(2, 7, D).double()
    expected = [mlp(x) for mlp in model]
    seqtile.apply(model, tile=3, trust="*")
    for mlp, y in zip(model, expected, strict=True):
        torch.testing.assert_close(mlp(x), y, rtol=1e-12, atol=1e-12)


def test_proofs_keep_neither_models_nor_weights() -> None:
    mlp = llama_mlp()
    model = nn.ModuleDict({"mlp": mlp})
    holder = [model]
    handle = mlp.register_forward_hook(lambda *_: holder and None)  # a closure over the model
    seqtile.apply(model, tile=3)
    x = torch.randn(2, 7, D)
    with torch.no_grad():
        mlp.eval()(x)
    mlp.train()(x).sum().backward()
    old = weakref.ref(mlp.up_proj.weight)
    mlp.up_proj.weight = nn.Parameter(torch.zeros(F_, D))
    mlp(x).sum().backward()
    gc.collect()
    assert old() is None
    handle.remove()
    seqtile.undo(model)
    alive = weakref.ref(mlp)
    holder.clear()
    del mlp, model, handle
    gc.collect()
    assert alive() is None
