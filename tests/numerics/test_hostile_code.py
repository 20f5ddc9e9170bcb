"""Code that asks how many tokens there are, catches what stops a trace, or uses an MLP's neighbours in other ways.

Every model here was wrong once without a word. It has to be equal to untiled, left untiled with a reason, or refused.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import hashlib
import logging
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import seqtile
from numerics._outcomes import HIDDEN, INTERMEDIATE, Layer, as_in_transformers, center, outcome


class Mlp(nn.Module):
    """A gated MLP whose features go through ``between(self, x, features)``."""

    def __init__(self, between: Callable[[Any, Tensor, Tensor], Tensor] = lambda self, x, h: h) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INTERMEDIATE, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        return self.down_proj(self.between(self, x, F.silu(self.gate_proj(x)) * self.up_proj(x)))


LENGTHS: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "in a table": (lambda x: x.shape[1] in {20: 1}, (3, 20, 8)),
    "its hash": (lambda x: hash(x.shape) == hash(torch.Size((3, 20, 8))), (3, 20, 8)),
    "an even batch": (lambda x: len(x) % 2 == 0, (2, 20, 8)),
    "one sequence of several tokens": (lambda x: x.shape[0] == 1 and x.shape[1] > 1, (1, 20, 8)),
    "several sequences of one token": (lambda x: x.shape[1] == 1 and x.shape[0] > 1, (20, 1, 8)),
    "between two numbers": (lambda x: 16 < x.shape[:-1].numel() < 10_000, (3, 20, 8)),
    "as text": (lambda x: f"{x.shape[1]}" == "20", (3, 20, 8)),
    "as text, by str": (lambda x: str(x.shape[1]) == "20", (3, 20, 8)),
    "its logarithm": (lambda x: 2 < math.log2(x.shape[1]) < 10, (3, 20, 8)),
    "its root": (lambda x: 3 < math.isqrt(x.shape[1]) < 30, (3, 20, 8)),
    "its divisors": (lambda x: math.gcd(x.shape[1], 4) == 4, (3, 20, 8)),
    "absolute": (lambda x: 10 < abs(x.shape[1]) < 100, (3, 20, 8)),
    "as an index": (lambda x: operator.index(x.shape[1]) == 20, (3, 20, 8)),
    "a range": (lambda x: len(range(x.shape[1])) == 20, (3, 20, 8)),
    "a list": (lambda x: len([0] * x.shape[1]) == 20, (3, 20, 8)),
    "its real part": (lambda x: x.shape[1].real == 20, (3, 20, 8)),
    "a digest": (lambda x: hashlib.md5(repr(x.shape).encode()).digest()[0] % 2 == 0, (3, 20, 8)),
    "strides": (lambda x: x.stride(0) == 160, (3, 20, 8)),
    "bytes": (lambda x: 640 < x.nbytes < 10**6, (3, 20, 8)),
    "storage": (lambda x: x.untyped_storage().nbytes() < 10**6, (3, 20, 8)),
    "contiguous": (lambda x: x.is_contiguous(), (3, 20, 8)),
    "its input needs no gradient": (lambda x: not x.requires_grad, (3, 20, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", LENGTHS)
def test_no_question_about_the_number_of_tokens_is_answered(name: str, caplog: pytest.LogCaptureFixture) -> None:
    asks, shape = LENGTHS[name]
    found = outcome(lambda: Layer(Mlp(lambda self, x, h: center(h) if asks(x) else h)), caplog, shape)
    assert found in ("left", "refused")


def _swallowed_length(self: Any, x: Tensor, h: Tensor) -> Tensor:
    try:
        return center(h) if x.shape[1] > 10 else h
    except Exception:  # noqa: BLE001 - the point
        return h


def _swallowed_value(self: Any, x: Tensor, h: Tensor) -> Tensor:
    try:
        return h / float(h.detach().abs().max())
    except Exception:  # noqa: BLE001 - the point
        return h


def _swallowed_view(self: Any, x: Tensor, h: Tensor) -> Tensor:
    try:
        windows = h.view(h.shape[0], -1, 5, INTERMEDIATE)
    except RuntimeError:
        return h
    return (windows - windows.mean(2, keepdim=True)).view(h.shape)


def _hooked(self: Any, x: Tensor, h: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> Tensor | None:
        with contextlib.suppress(Exception):
            return gradient / gradient.norm().item()
        return None

    if torch.is_grad_enabled():
        h.register_hook(hook)
    return h


def _counted(self: Any, x: Tensor, h: Tensor) -> Tensor:
    chosen = h[..., :4].argmax(-1).flatten()
    return h / (1 + torch.zeros(4).scatter_add(0, chosen, torch.ones_like(chosen, dtype=h.dtype)).max())


def _kernel_of_all(self: Any, x: Tensor, h: Tensor) -> Tensor:
    rows = h.detach().flatten(0, -2)
    return F.conv1d(h.transpose(1, 2), (rows.t() @ rows).unsqueeze(-1)).transpose(1, 2)


def _far(self: Any, x: Tensor, h: Tensor) -> Tensor:
    h = h.index_select(-1, torch.arange(INTERMEDIATE))
    return h + torch.tril(x.new_ones(x.shape[1], x.shape[1]), -64) @ h


FEATURES: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "divided by a tensor of it": (lambda self, x, h: h / torch.tensor(x.shape[1]), {}),
    "times a tensor of its logarithm": (lambda self, x, h: h * torch.tensor(math.log(x.shape[1])), {}),
    "plus its logarithm": (lambda self, x, h: h + math.log(x.shape[1]), {}),
    "caught: a length": (_swallowed_length, {}),
    "caught: a value": (_swallowed_value, {}),
    "caught: a view": (_swallowed_view, {}),
    "caught: in a hook": (_hooked, {}),
    "frozen weights show": (
        lambda self, x, h: h if self.gate_proj.weight.requires_grad else center(h),
        {"later": lambda model: model.mlp.gate_proj.requires_grad_(False)},
    ),
    "counts by scatter_add": (_counted, {}),
    "seen by scatter": (
        lambda self, x, h: h / (1 + torch.zeros(4).scatter(0, h[..., :4].argmax(-1).flatten(), 1.0).sum()),
        {},
    ),
    "a kernel made of all tokens": (_kernel_of_all, {}),
    "far tokens, after an operator without a rule": (_far, {"shape": (1, 100, 8)}),
    "all tokens when they are large, after an operator without a rule": (
        lambda self, x, h: (
            h.index_select(-1, torch.arange(INTERMEDIATE)) / (h.detach().abs().amax() / 100).clamp(min=1)
        ),
        {"scale": 50.0},
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_that_depend_on_other_tokens_are_not_silent(name: str, caplog: pytest.LogCaptureFixture) -> None:
    between, how = FEATURES[name]
    assert outcome(lambda: Layer(Mlp(between)), caplog, **how) in ("equal", "left", "refused")


class Counting(Mlp):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.shape[1]


def _divided(self: Any, x: Tensor) -> Tensor:
    y, count = self.mlp(self.norm(x))
    return x + y / count


def test_the_number_of_tokens_is_not_returned_by_a_tile(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(lambda: Layer(Counting(), _divided), caplog) in ("left", "refused")


class HookOnInput(Mlp):
    def forward(self, x: Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(x)


def test_a_hook_on_the_input_is_not_put_on_a_tile(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(lambda: Layer(HookOnInput(), lambda self, x: x + self.mlp(x)), caplog) in ("left", "refused")


def _without(part: str, by_flag: bool = False) -> Callable[[Any, Tensor], Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        on = by_flag and not self.flag
        with torch.set_grad_enabled(on or part != "norm"):
            h = self.norm(x)
        with torch.set_grad_enabled(on or part != "mlp"):
            h = self.mlp(h)
        return x + h

    return run


def _hooked_norm(self: Any, x: Tensor) -> Tensor:
    h = self.norm(x)
    if torch.is_grad_enabled():
        h.register_hook(lambda gradient: gradient * 0.5)
    return x + self.mlp(h)


def _dropping(effective: Callable[[Any], tuple[float, bool]]) -> Callable[[Any, Tensor], Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        share, training = effective(self)
        return x + F.dropout(self.mlp(self.norm(x)), p=share, training=training)

    return run


def _detached(when: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    def run(self: Any, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.mlp(h.detach() if when(self, x) else h)

    return run


def _skipping(self: Any, x: Tensor) -> Tensor:
    h = self.norm(x)
    return x + h if x.shape[1] > 10 else x + self.mlp(h)


class Extra(Mlp):
    def forward(self, x: Tensor, twice: bool = False) -> Any:
        return super().forward(x) * (2 if twice else 1)


RUNS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the norm without gradients": _without("norm"),
    "the mlp without gradients": _without("mlp"),
    "the norm without gradients by a flag": _without("norm", by_flag=True),
    "the mlp without gradients by a flag": _without("mlp", by_flag=True),
    "detached by a flag": _detached(lambda self, x: self.flag),
    "detached beyond ten tokens": _detached(lambda self, x: x.shape[1] > 10),
    "detached by values": _detached(lambda self, x: x.abs().max() > 0),
    "a hook between norm and mlp": _hooked_norm,
    "the mlp in a reentrant checkpoint": lambda self, x: x + checkpoint(self.mlp, self.norm(x), use_reentrant=True),
    "the norm in a reentrant checkpoint": lambda self, x: x + self.mlp(checkpoint(self.norm, x, use_reentrant=True)),
    "the mlp in a checkpoint": lambda self, x: x + checkpoint(self.mlp, self.norm(x), use_reentrant=False),
    "skipped beyond ten tokens": _skipping,
    "the norm's output is kept": lambda self, x: x + self.mlp(setattr(self, "kept", self.norm(x)) or self.kept),
}


@pytest.mark.parametrize("module", [__name__, "transformers.made_up"])
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_layer_that_uses_its_norm_in_another_way_is_not_silent(
    name: str, module: str, caplog: pytest.LogCaptureFixture
) -> None:
    def later(model: Any) -> None:
        model.flag = "flag" in name

    assert outcome(lambda: Layer(Mlp(), RUNS[name], module), caplog, later=later) in ("equal", "left", "refused")


STATE = {"scale": 1.0}
SCALES: dict[Any, float] = {}


class ScaledNorm(nn.RMSNorm):
    """Reads what a layer may set around its call."""

    def __init__(self) -> None:
        super().__init__(HIDDEN)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * STATE["scale"] * self.scale


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.rms_norm else result


@contextmanager
def _scaled(scale: float) -> Iterator[None]:
    before, STATE["scale"] = STATE["scale"], scale
    try:
        yield
    finally:
        STATE["scale"] = before


def _sets_a_global(self: Any, x: Tensor) -> Tensor:
    STATE["scale"] = 3.0
    h = self.norm(x)
    STATE["scale"] = 1.0
    return x + self.mlp(h)


def _in_a_context(self: Any, x: Tensor) -> Tensor:
    with _scaled(3.0):
        h = self.norm(x)
    return x + self.mlp(h)


def _in_a_mode(self: Any, x: Tensor) -> Tensor:
    with Doubling():
        h = self.norm(x)
    return x + self.mlp(h)


def _in_another_dtype(self: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    h = self.norm(x * torch.tensor(1.0).to(x.dtype) * (2 if torch.get_default_dtype() is torch.float64 else 1))
    torch.set_default_dtype(torch.float32)
    return x + self.mlp(h)


def _through_a_helper(self: Any, x: Tensor) -> Tensor:
    STATE.update(scale=3.0)
    h = self.norm(x)
    STATE.update(scale=1.0)
    return x + self.mlp(h)


def _sets_an_attribute(self: Any, x: Tensor) -> Tensor:
    self.norm.scale = 3.0
    return x + self.mlp(self.norm(x))


def _sets_an_attribute_by_a_flag(self: Any, x: Tensor) -> Tensor:
    if self.flag:
        self.norm.scale = 3.0
    return x + self.mlp(self.norm(x))


def _in_place(self: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    h = self.norm(x)
    x.mul_(0.5)
    return x + self.mlp(h)


def _in_place_by_a_flag(self: Any, x: Tensor) -> Tensor:
    x = x * 1.0
    h = self.norm(x)
    if self.flag:
        x.mul_(0.5)
    return x + self.mlp(h)


def _by_itself(self: Any, x: Tensor) -> Tensor:
    return x + self.mlp(self.norm(x)) * SCALES.get(self, 3.0)


def _by_its_type(self: Any, x: Tensor) -> Tensor:
    h = self.norm(x)
    return x + self.mlp(h * (1.0 if type(h) is Tensor else 3.0))


AROUND = (
    _sets_a_global, _in_a_context, _in_a_mode, _in_another_dtype, _through_a_helper, _sets_an_attribute,
    _sets_an_attribute_by_a_flag, _by_itself, _by_its_type,
)  # fmt: skip


@pytest.mark.parametrize("forward", AROUND, ids=lambda forward: forward.__name__)
def test_what_a_layer_does_around_its_norm_is_not_silent(forward: Any, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> nn.Module:
        SCALES.clear()
        layer: Any = Layer(Mlp(), forward)
        layer.norm = ScaledNorm()
        SCALES[layer] = 2.0
        return layer  # type: ignore[no-any-return]

    def later(model: Any) -> None:
        model.flag = True

    assert outcome(build, caplog, later=later) in ("equal", "left", "refused")


def test_a_residual_that_changes_in_place_takes_the_norm_out_of_the_tile() -> None:
    model, x = nn.Sequential(Layer(Mlp(), _in_place)), torch.randn(3, 20, HIDDEN)
    with torch.no_grad():
        expected = model(x)
        report = seqtile.apply(model, tile=3)
        assert report.blocks[0].together == ("mlp",)
        assert torch.allclose(model(x), expected, atol=1e-6)


@pytest.mark.parametrize("library", [False, True])
def test_a_library_whose_layers_are_trusted_is_still_watched_in_place(library: bool) -> None:
    module = "transformers.made_up" if library else __name__
    model = nn.Sequential(Layer(Mlp(), _in_place_by_a_flag, module))
    report = seqtile.apply(model, tile=3)
    assert report.blocks[0].together == ("norm", "mlp")
    model[0].flag = True
    with torch.no_grad(), pytest.raises(RuntimeError, match="in another way than when seqtile traced it"):
        model(torch.randn(3, 20, HIDDEN))


def _drops_in_training(self: Any, x: Tensor) -> Tensor:
    h = self.mlp(self.norm(x))
    if self.training:
        h = self.drop(h)
    return x + h


def test_a_layer_that_follows_its_mode_runs_in_both() -> None:
    layer: Any = Layer(Mlp(), _drops_in_training)
    layer.drop = nn.Dropout(0.5)
    model, x = nn.Sequential(layer), torch.randn(3, 20, HIDDEN)
    expected = model.eval()(x)
    report = seqtile.apply(model, tile=3)
    assert report.blocks[0].together == ("norm", "mlp")
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert not torch.allclose(model.train()(x), expected, atol=1e-6)


class ThreeLinears(nn.Module):
    """As Meta's Llama and torchtitan register them: the down projection in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False), nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DownFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_proj, self.c_fc = nn.Linear(INTERMEDIATE, HIDDEN), nn.Linear(HIDDEN, INTERMEDIATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class InAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](F.gelu(self.layers[0](x)))


class WithScale(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@pytest.mark.parametrize(
    ("kind", "path"), [(ThreeLinears, "fused"), (DownFirst, "fused"), (InAList, "generic"), (WithScale, "generic")]
)
def test_layers_are_found_in_whatever_order_they_were_made(kind: Any, path: str, caplog: Any) -> None:
    assert outcome(lambda: Layer(kind()), caplog) == "equal"
    (block,) = seqtile.apply(Layer(kind()), tile=3).blocks
    assert (block.path, block.hidden, block.intermediate) == (path, HIDDEN, INTERMEDIATE)


def test_a_shallow_copy_says_so() -> None:
    model = nn.Sequential(Layer(Mlp()))
    seqtile.apply(model, tile=3)
    for part in (model[0], model[0].mlp):
        with pytest.raises(RuntimeError, match="shallow copy"):
            copy.copy(part)(torch.randn(3, 20, HIDDEN))
    alone = copy.copy(model[0].mlp)
    del model, part
    gc.collect()
    with pytest.raises(RuntimeError, match="shallow copy"):
        alone(torch.randn(3, 20, HIDDEN))


def test_a_forward_that_is_put_over_ours_runs_untiled(caplog: pytest.LogCaptureFixture) -> None:
    def wrap(model: Any) -> None:
        inner = model.mlp.forward
        model.mlp.forward = lambda x: 2 * inner(x)

    assert outcome(lambda: Layer(Mlp()), caplog, later=wrap) == "left"
    assert "put over it" in caplog.text


class DoublingOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.silu.default else result


def test_a_mode_over_operators_is_not_run_per_tile(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Layer(Mlp()), torch.randn(3, 20, HIDDEN)
    with DoublingOperators():
        expected = model(x)
    seqtile.apply(model, tile=3)
    with DoublingOperators(), caplog.at_level(logging.WARNING):
        assert torch.equal(model(x), expected)
    assert "runs untiled: DoublingOperators is active" in caplog.text
    y = model(x)
    with DoublingOperators(), pytest.raises(RuntimeError, match="in its backward DoublingOperators is active"):
        y.sum().backward()


def test_an_mlp_with_another_argument_behind_a_norm_is_tiled(caplog: pytest.LogCaptureFixture) -> None:
    assert outcome(lambda: Layer(Extra(), lambda self, x: x + self.mlp(self.norm(x), True)), caplog) == "equal"


DROPS: dict[str, tuple[Callable[[Any], tuple[float, bool]], bool, float]] = {
    "as written": (lambda self: (self.dropout, self.training), True, 0.4),
    "0 in evaluation": (lambda self: (self.dropout if self.training else 0.0, True), True, 0.4),
    "its complement is read too": (lambda self: (self.dropout * (1 - self.dropout > 0), self.training), True, 0.4),
    "switched off": (lambda self: (self.dropout, self.training and not self.flag), True, 0.0),
    "always on": (lambda self: (self.dropout, True), False, 0.4),
}


@pytest.mark.parametrize("name", DROPS)
def test_a_functional_dropout_drops_as_the_layer_says(name: str) -> None:
    effective, training, expected = DROPS[name]
    torch.manual_seed(0)
    model = nn.Sequential(Layer(Mlp(), _dropping(effective)))
    seqtile.apply(model, tile=64)
    model.train(training)
    model[0].flag = name == "switched off"
    x = torch.randn(8, 512, HIDDEN)
    dropped = (model(x) == x).float().mean().item()
    assert abs(dropped - expected) < 0.02, f"{dropped:.2f} of the outputs were dropped"


class Bart(nn.Module):
    """``norm(x + fc2(act(fc1(x))))``, halved where there are more than ten tokens."""

    __module__ = "transformers.made_up"  # of a library that we know, whose layers' code is not read

    def __init__(self, change: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(HIDDEN, INTERMEDIATE), nn.GELU(), nn.Linear(INTERMEDIATE, HIDDEN)
        self.norm, self.first = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.code, self.flag = (change,), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        residual, h = self.code[0](self, x, self.fc2(self.act(self.fc1(x))))
        return self.norm(residual + h)


class Half(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.dense = nn.Linear(HIDDEN, INTERMEDIATE) if first else nn.Linear(INTERMEDIATE, HIDDEN)
        if not first:
            self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return F.gelu(self.dense(x)) if other is None else self.norm(self.dense(x) + other)


class Bert(Bart):
    __module__ = Bart.__module__

    """The same in two children of the layer."""

    def __init__(self, change: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(change)
        del self.fc1, self.act, self.fc2, self.norm
        self.intermediate, self.output = Half(True), Half(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        residual, h = self.code[0](self, x, self.intermediate(x))
        return self.output(h, residual)


for _kind in (Bart, Bert):
    _kind.forward = as_in_transformers(_kind.forward)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nothing": lambda self, x, h: (x, h),
    "halved beyond ten tokens": lambda self, x, h: (x, h * 0.5 if x.shape[1] > 10 else h),
    "halved by a flag": lambda self, x, h: (x, h * 0.5 if self.flag else h),
    "another residual by a flag": lambda self, x, h: (x.detach() if self.flag else x, h),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("kind", [Bart, Bert])
def test_a_sum_with_the_input_is_not_taken_for_another(kind: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def later(model: Any) -> None:
        model.flag = "flag" in name

    found = outcome(functools.partial(kind, CHANGES[name]), caplog, later=later)
    assert found in (("equal",) if name == "nothing" else ("equal", "left", "refused"))


class Squeezing(Mlp):
    """Gives two dimensions back where a sequence has one token, as every tile may have."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).squeeze(1)


def test_a_shape_that_one_token_changes_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    for shape in ((3, 1, HIDDEN), (3, 20, HIDDEN)):
        assert outcome(lambda: Layer(Squeezing()), caplog, shape) in ("left", "refused")


class Resetting(nn.Module):
    """A child that changes what the norm reads."""

    def forward(self, x: Tensor) -> Tensor:
        STATE["scale"] *= 2
        return x


def _between(self: Any, x: Tensor) -> Tensor:
    h = self.norm(x)
    return x + self.other(x) + self.mlp(h)


RESETTING = Resetting()


def _calls_what_it_is_given(self: Any, x: Tensor, call: Any = RESETTING) -> Tensor:
    h = self.norm(x)
    call(x)
    return x + self.mlp(h)


def _by_identity(self: Any, x: Tensor) -> Tensor:
    h = self.other(x)
    return x + self.mlp(h) * (2.0 if h is x else 1.0)


def _through_an_object(self: Any, x: Tensor) -> Tensor:
    h = self.norm(x)
    self.meter.double()
    return x + self.mlp(h)


def _sets_an_entry(self: Any, x: Tensor) -> Tensor:
    h = self.norm(x)
    self.meter.state["scale"] = 3.0
    return x + self.mlp(h)


class Meter:
    def double(self) -> None:
        STATE["scale"] *= 2


@pytest.mark.parametrize(
    "forward",
    [_between, _calls_what_it_is_given, _by_identity, _through_an_object, _sets_an_entry],
    ids=lambda one: one.__name__,
)
def test_what_runs_between_norm_and_mlp_is_not_silent(forward: Any, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> nn.Module:
        STATE["scale"] = 1.0
        layer: Any = Layer(Mlp(), forward)
        layer.norm, layer.meter = ScaledNorm(), Meter()
        if forward is _sets_an_entry:
            layer.meter = nn.Identity()
            layer.meter.state = STATE  # a child, whose attributes may be read
        layer.other = nn.Identity() if forward is _by_identity else Resetting()
        return layer  # type: ignore[no-any-return]

    try:
        assert outcome(build, caplog) in ("equal", "left", "refused")
    finally:
        STATE["scale"] = 1.0


def test_an_mlp_in_a_checkpoint_behind_its_norm_trains() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=False)

    model, x = nn.Sequential(Layer(Mlp(), forward)), torch.randn(3, 20, HIDDEN)
    report = seqtile.apply(model, tile=3)
    assert report.blocks[0].together == ("mlp",)
    model(x).sum().backward()
    assert model[0].norm.weight.grad is not None
