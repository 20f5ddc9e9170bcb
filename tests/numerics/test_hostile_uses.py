"""Blocks that use tensors, hooks, keywords and libraries in ways that a tile or a trace answers otherwise.

Each is equal to untiled, left untiled, or refused; none is silently wrong.
"""

from __future__ import annotations

import abc
import functools
import io
import logging
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.random import fork_rng as isolated

import seqtile
from numerics._outcomes import HIDDEN, INTERMEDIATE, Layer, center, gradients, outcome

between_calls = types.ModuleType("settings_of_a_user")
exec("flag = False\ndef act(x):\n    import torch\n    return torch.nn.functional.silu(x)\n", vars(between_calls))


class Mlp(nn.Module):
    """A gated MLP with a scale, and code of the test's between its products."""

    def __init__(self, between: Callable[[Any, Tensor, Tensor], Tensor] | None = None, **own: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(HIDDEN, INTERMEDIATE)
        self.down_proj, self.scale = nn.Linear(INTERMEDIATE, HIDDEN), nn.Parameter(torch.rand(INTERMEDIATE))
        self.between = between
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h if self.between is None else self.between(self, x, h))


class Backward(torch.autograd.Function):
    """The identity, whose backward is another function of the gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


class Settings:
    mask: Any = torch.zeros(3)
    scale = 1.0


LOGGER = logging.getLogger("a.users")


class Marked(abc.ABC):  # noqa: B024 - classes are registered with it
    pass


def _unfreeze(self: Any, x: Tensor, h: Tensor) -> Tensor:
    self.up_proj.requires_grad_(True)
    return h * self.up_proj.bias


def _print(self: Any, x: Tensor, h: Tensor) -> Tensor:
    print("called")
    return h


def _set_precision(self: Any, x: Tensor, h: Tensor) -> Tensor:
    torch.set_float32_matmul_precision("highest")
    return h


def _set_backend(self: Any, x: Tensor, h: Tensor) -> Tensor:
    torch.backends.mkldnn.verbose_of_ours = 1
    return h


def _count_on_a_function(self: Any, x: Tensor, h: Tensor) -> Tensor:
    F.silu.count = getattr(F.silu, "count", 0) + 1  # type: ignore[attr-defined]
    return h


def _draw_apart(self: Any, x: Tensor, h: Tensor) -> Tensor:
    with isolated(devices=[]):
        return h * F.dropout(torch.ones_like(h), 0.1, self.training) ** 0


def _differentiate(self: Any, x: Tensor, h: Tensor) -> Tensor:
    derivative: Tensor = torch.func.grad(lambda one: F.softplus(one).sum())(h)
    return derivative


def _caller_of(self: Any, x: Tensor, h: Tensor) -> Tensor:
    try:
        raise ValueError
    except ValueError as error:
        frame: Any = error.__traceback__
    return center(h) if frame.tb_frame.f_back.f_back.f_code.co_name == "_call_impl" else h


read_by_name, read_of_settings = getattr, Settings().__getattribute__
LINES = io.StringIO("1.0\n" * 100)

USES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "it rolls features by the number of tokens": lambda self, x, h: h.roll(x.shape[1], -1),
    "it draws from a generator that it puts back": _draw_apart,
    "it reads by another name than getattr": lambda self, x, h: h * read_by_name(self, "".join(("sca", "le"))),
    "it reads by a bound method": lambda self, x, h: h * read_of_settings("".join(("sca", "le"))),
    "it reads lines of a file": lambda self, x, h: h * float(next(LINES)),
    "it asks if its input is a view": lambda self, x, h: center(h) if x._is_view() else h,
    "it asks what its input is a view of": lambda self, x, h: h if x._base != 0 else center(h),
    "it asks how its input was made": lambda self, x, h: h if torch.is_inference(x) else h * 1.0,
    "it looks for a module in a list": lambda self, x, h: center(h) if self.up_proj in self.kept else h,
    "it counts a module in a list": lambda self, x, h: center(h) if self.kept.count(self.up_proj) else h,
    "a module is another": lambda self, x, h: center(h) if self.up_proj == self.kept[0] else h,
    "a module is another, by a function":
        lambda self, x, h: center(h) if operator.is_(self.up_proj, self.kept[0]) else h,
    "it asks who calls it": _caller_of,
    "it asks whether a backward runs": lambda self, x, h: h if torch._C._current_graph_task_id() == -1 else h * 2,
    "it differentiates a function": _differentiate,
    "a weight is a Parameter": lambda self, x, h: h * self.scale if isinstance(self.scale, nn.Parameter) else h,
    "a weight is a leaf": lambda self, x, h: h * self.scale if self.scale.is_leaf else h,
    "a weight has a graph": lambda self, x, h: h * self.scale if self.scale.grad_fn is None else h,
    "a weight is unfrozen": _unfreeze,
    "a gradient plus a number": lambda self, x, h: h * Backward.apply(self.scale, lambda g: g + 0.5),
    "a number minus a gradient": lambda self, x, h: h * Backward.apply(self.scale, lambda g: 0.5 - g),
    "a gradient divided to whole numbers":
        lambda self, x, h: h * Backward.apply(self.scale, lambda g: g.div(0.5, rounding_mode="floor") * 0.5),
    "a gradient as whole numbers": lambda self, x, h: h * Backward.apply(self.scale, lambda g: (g * 4).int() / 4.0),
    "a gradient's bits":
        lambda self, x, h: h * Backward.apply(self.scale, lambda g: (g.view(torch.int32) + 2**18).view(g.dtype)),
    "a padded gradient": lambda self, x, h: h * Backward.apply(self.scale, lambda g: F.pad(g[1:], (1, 0), value=1.0)),
    "it prints": _print,
    "it sets PyTorch's precision": _set_precision,
    "it sets an attribute of PyTorch": _set_backend,
    "it counts on a function of PyTorch": _count_on_a_function,
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_a_use_of_weights_or_of_pytorch_is_not_silently_wrong(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> nn.Module:
        mlp = Mlp(USES[name])
        mlp.up_proj.requires_grad_(name != "a weight is unfrozen")
        mlp.kept = [mlp.up_proj]
        return nn.Sequential(Layer(Mlp()), Layer(mlp))

    assert outcome(build, caplog) in ("equal", "left")
    left = [one.name for one in seqtile.apply(build(), tile=3).left]
    assert left == ([] if name == "a weight is a Parameter" else ["1.mlp"])


def test_what_a_decorator_counts_is_not_counted_by_apply() -> None:
    def counted(self: Any, x: Tensor, h: Tensor) -> Tensor:
        counted.calls += 1  # type: ignore[attr-defined]
        return h

    counted.calls = 0  # type: ignore[attr-defined]
    functools.update_wrapper(counted, center)
    report = seqtile.apply(nn.Sequential(Layer(Mlp()), Layer(Mlp(counted))), tile=3)
    assert counted.calls == 0 and "changes calls" in report.left[0].why  # type: ignore[attr-defined]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_are_cached_for_several_readers_are_not_a_tiles(first: bool, caplog: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with parametrize.cached():
            read = [
                lambda: x + self.mlp(self.norm(x)),
                lambda: (x @ self.mlp.up_proj.weight.t()).mean(-1, keepdim=True),
            ]
            one, other = [call() for call in (read if first else read[::-1])]
        return one + other

    def build() -> nn.Module:
        mlp = Mlp()
        parametrize.register_parametrization(mlp.up_proj, "weight", Doubled())
        return nn.Sequential(Layer(Mlp()), Layer(mlp, forward))

    assert outcome(build, caplog) == "left"


class Clipped(Mlp):
    """Sets its weight's data before it is used."""

    def forward(self, x: Tensor) -> Tensor:
        self.up_proj.weight.data = self.up_proj.weight.data.clamp(-0.05, 0.05)
        return super().forward(x)


class Forgetful(Mlp):
    """Forgets the gradients of its weight, which another batch gave it."""

    def forward(self, x: Tensor) -> Tensor:
        self.up_proj.zero_grad()
        return super().forward(x)


@pytest.mark.parametrize("kind", [Clipped, Forgetful])
def test_a_block_that_changes_its_weights_is_left(kind: type[Mlp], caplog: pytest.LogCaptureFixture) -> None:
    def later(model: Any) -> None:
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)

    assert outcome(lambda: nn.Sequential(Layer(Mlp()), Layer(kind())), caplog, later=later) in ("equal", "left")


def test_what_a_block_prints_or_counts_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(Layer(Mlp()), Layer(Mlp(_print)))
    report = seqtile.apply(model, tile=3)
    assert report.tiled == 1 and "does something outside" in report.left[0].why
    assert capsys.readouterr().out == ""
    gradients(model.train(), (3, 20, HIDDEN), 1.0)
    assert capsys.readouterr().out == "called\n"


def _change(name: str, now: bool) -> None:
    """Set what a block reads, as it was or as it is after ``apply``."""
    between_calls.flag = now  # type: ignore[attr-defined]
    Settings.mask = torch.zeros(4 if now else 3)
    LOGGER.disabled = now
    Settings.__switch__ = now  # type: ignore[attr-defined]


READS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "of a module whose code runs":
        lambda self, x, h: center(between_calls.act(h)) if between_calls.flag else between_calls.act(h),
    "the size of a tensor of a class": lambda self, x, h: center(h) if Settings.mask.numel() == 4 else h,
    "a logger's switch": lambda self, x, h: center(h) if LOGGER.disabled else h,
    "a class attribute with underscores": lambda self, x, h: center(h) if Settings.__switch__ else h,
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_what_a_block_reads_and_later_changes_is_seen(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> nn.Module:
        _change(name, False)
        return nn.Sequential(Layer(Mlp(READS[name])), Layer(Mlp()))

    try:
        found = outcome(build, caplog, later=lambda model: _change(name, True))
    finally:
        _change(name, False)
    assert found in ("left", "refused")


def test_a_class_that_is_registered_later_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []

    def build() -> nn.Module:
        made.append(type("Late", (), {})())
        late = made[-1]
        return nn.Sequential(Layer(Mlp(lambda self, x, h: center(h) if isinstance(late, Marked) else h)), Layer(Mlp()))

    found = outcome(build, caplog, later=lambda model: Marked.register(type(made[-1])))
    assert found in ("equal", "left", "refused")


def test_a_hook_on_a_module_that_is_no_child_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    other = nn.Identity()

    def build() -> nn.Module:
        other._forward_hooks.clear()
        return nn.Sequential(Layer(Mlp(lambda self, x, h: h + self.others[0](h), others=[other])), Layer(Mlp()))

    def later(model: Any) -> None:
        other.register_forward_hook(lambda module, args, output: center(output))

    assert outcome(build, caplog, later=later) in ("equal", "left", "refused")


class ByKeyword(Mlp):
    """Does another thing with its second argument."""

    def forward(self, x: Tensor | None = None, raw: Tensor | None = None) -> Tensor:
        h = center(raw) if x is None else x
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


@pytest.mark.parametrize("word", ["x", "raw"])
def test_an_argument_by_keyword_is_that_argument(word: str, caplog: pytest.LogCaptureFixture) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.mlp(**{word: self.norm(x)})

    found = outcome(lambda: nn.Sequential(Layer(ByKeyword(), forward), Layer(Mlp())), caplog)
    assert found == {"x": "equal", "raw": "left"}[word]


def test_a_call_of_its_own_is_not_skipped(caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(Mlp):
        def __call__(self, x: Tensor) -> Tensor:
            return 2 * super().__call__(x)

    assert outcome(lambda: nn.Sequential(Layer(Doubled()), Layer(Mlp())), caplog) == "equal"


def test_a_layers_forward_that_is_replaced_later_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    def later(model: Any) -> None:
        type(model[0]).forward = lambda self, x: x + 2 * self.mlp(3 * self.norm(x))

    assert outcome(lambda: nn.Sequential(Layer(Mlp()), Layer(Mlp())), caplog, later=later) == "equal"
    assert "another than seqtile read" in caplog.text


class ScaledNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Settings.scale


class Helped(nn.Module):
    """A layer that calls a method of its own between its norm and its block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = ScaledNorm(HIDDEN), Mlp()

    def between(self) -> None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        self.between()
        return x + self.mlp(h)


def test_a_method_of_a_layer_that_is_replaced_later_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    former = Helped.between

    def build() -> nn.Module:
        Helped.between, Settings.scale = former, 1.0  # type: ignore[method-assign]
        return nn.Sequential(Helped(), Layer(Mlp()))

    def later(model: Any) -> None:
        Helped.between = lambda self: setattr(Settings, "scale", 3.0)  # type: ignore[method-assign]
        Settings.scale = 1.0

    try:
        assert outcome(build, caplog, later=later) in ("equal", "left", "refused")
    finally:
        Helped.between, Settings.scale = former, 1.0  # type: ignore[method-assign]


class Rows(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, -2).unsqueeze(1)


def test_rows_in_another_place_are_left() -> None:
    """``[N, 1, D]`` for an input ``[B, S, D]``: a tile of one sequence cannot be told from one of several."""
    model = nn.Sequential(Rows(), nn.Identity())
    with pytest.raises(seqtile.UserError, match="returns its tokens in other dimensions"):
        seqtile.apply(model, tile=3)


def test_an_output_that_is_the_input_is_left() -> None:
    class Same(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            return x

    with pytest.raises(seqtile.UserError, match="shares memory"):
        seqtile.apply(nn.Sequential(Same()), tile=3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_tangents_and_transforms_run_untiled(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Layer(Mlp()))
    seqtile.apply(model.requires_grad_(False), tile=3)
    x, tangent = torch.randn(2, 3, 20, HIDDEN).unbind()

    def derivative() -> Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent

    def rows() -> Tensor:
        return torch.func.vmap(model)(x[:, None])[:, 0]

    got = derivative(), rows()
    seqtile.undo(model)
    for one, other in zip(got, (derivative(), rows()), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert "torch.func" in caplog.text and "forward-mode" in caplog.text


def test_compiled_calls_are_of_the_block_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Layer(Mlp(lambda self, x, h: center(h) if self.flag else h, flag=False)))
    seqtile.apply(model, tile=3)
    x = torch.randn(3, 20, HIDDEN)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(x)
        model[0].mlp.flag = True
        got = compiled(x)
        seqtile.undo(model)
        assert torch.allclose(got, model(x), atol=1e-6)
    assert "runs untiled" in caplog.text


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_mask_of_one_number_per_token_is_split(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    class Masked(Mlp):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * mask.unsqueeze(-1)

    mlp, x = Masked(), torch.randn(3, 20, HIDDEN, requires_grad=True)
    mask = (torch.rand(3, 20) > 0.5).to(dtype)
    expected = mlp(x, mask)
    seqtile.tile_module(mlp, tile=3)
    assert torch.allclose(mlp(x, mask), expected, atol=1e-6)
    assert "runs untiled:" not in caplog.text


def test_apply_works_where_anomalies_are_looked_for() -> None:
    class Unproven(Mlp):  # a class of its own, which no other test has proven
        pass

    with torch.autograd.set_detect_anomaly(True):
        assert seqtile.apply(nn.Sequential(Layer(Unproven())), tile=3).tiled == 1


def test_a_constant_argument_that_changes_before_the_backward_is_an_error() -> None:
    class Shifted(Mlp):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * shift)

    mlp, shift = Shifted(), torch.rand(HIDDEN)
    seqtile.tile_module(mlp, tile=3)
    loss = mlp(torch.randn(3, 20, HIDDEN, requires_grad=True), shift).sum()
    shift.mul_(2)
    with pytest.raises(RuntimeError, match="changed between forward and backward|modified by an inplace"):
        loss.backward()
