"""A user's own position-wise module: any token dimension, exact, visible, undoable, refused where it mixes tokens."""

import copy

import pytest
import torch
from torch import nn

import seqtile
from refusals import refused
from watching import shapes_of
from zoo import causal_lm

CHECK = torch.testing.assert_close


class Scaled(nn.Module):
    """Two linear layers, a norm between, and what else a caller hands over."""

    def __init__(self, share: float = 0.0) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 6)
        self.dropout = nn.Dropout(share)

    def forward(self, x, gate=None, *, mask=None, scale=1.0, shift=None):
        y = self.down(self.dropout(torch.tanh(self.norm(self.up(x))))) * scale
        y = y if gate is None else y * gate[..., :6]
        y = y if shift is None else y + shift
        return (y, {"kept": y * mask.unsqueeze(-1)}) if mask is not None else y


class Pointwise(nn.Module):
    """Features before tokens: ``[B, D, T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(8, 24, 1), nn.Conv1d(24, 8, 1)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class PerColumn(nn.Module):
    """Looks at the whole batch of each position, so that only the second dimension may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x, gate=None, *, shift=None):
        y = self.down(torch.relu(self.up(x - x.mean(0, keepdim=True))))
        y = y if gate is None else y * gate
        return y if shift is None else y + shift


def _random(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def _run(module: nn.Module, *inputs: torch.Tensor, **words: object) -> list[torch.Tensor]:
    """The outputs and every gradient."""
    outputs = [x for x in torch.utils._pytree.tree_leaves(module(*inputs, **words)) if isinstance(x, torch.Tensor)]
    loss = sum(((n + 1) * out).pow(2).sum() for n, out in enumerate(outputs))
    wanted = [x for x in (*inputs, *words.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, [*wanted, *module.parameters()])]


def _same(module: nn.Module, dim: int, *inputs: torch.Tensor, tile: int | str = 4, **words: object) -> seqtile.Report:
    weight = next(module.parameters())
    with shapes_of(weight) as whole:
        expected = _run(module, *inputs, **words)
    report = seqtile.tile_module(module, dim=dim, tile=tile)
    with shapes_of(weight) as tiles:
        got = _run(module, *inputs, **words)
    assert whole and len(tiles) > 2 * len(whole)  # several tiles ran, forward and backward
    assert max(shape.numel() for shape in tiles) < max(shape.numel() for shape in whole)
    for one, other in zip(got, expected, strict=True):
        CHECK(one, other)
    assert got[0].is_contiguous()
    return report


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_any_dimension_of_rows(dim: int) -> None:
    module, x = Scaled().double(), _random(7, 5, 8)
    report = _same(module, dim, x)
    assert str(report) == "tiled 1 of 1 modules (Scaled), 4 tokens per tile, generic"
    assert report.blocks[0].why == "by its trace, forward and backward"
    gate, mask = _random(7, 5, 8, seed=2), _random(7, 5, seed=3)
    _same(Scaled().double(), dim, x, gate, scale=2.0, shift=_random(6, seed=4))
    if dim >= 0:  # from the end, a [7, 5] mask has its tokens elsewhere
        _same(Scaled().double(), dim, x, mask=mask)


@pytest.mark.parametrize(
    ("module", "dim", "sizes"),
    [(Pointwise(), -1, (3, 8, 11)), (Pointwise(), 2, (3, 8, 11)), (PerColumn(), 1, (3, 11, 8)),
     (PerColumn(), -2, (2, 11, 8))],
    ids=["features first", "third", "second", "from the end"],
)  # fmt: skip
def test_a_dimension_that_is_not_all_rows(module: nn.Module, dim: int, sizes: tuple[int, ...]) -> None:
    _same(module.double(), dim, _random(*sizes))


def test_several_inputs_along_one_dimension() -> None:
    x, gate = _random(3, 11, 8), _random(1, 11, 8, seed=2)
    _same(PerColumn().double(), 1, x, gate, shift=_random(3, 1, 8, seed=3))
    columns = _random(11, 3, 8), _random(11, 3, 1, seed=2)
    _same(PerRow().double(), 0, *columns, mask=_random(11, 3, seed=4))


class PerRow(PerColumn):
    """The same with tokens first; a nest of outputs, of other dimensions too."""

    def forward(self, x, gate=None, *, mask=None):
        y = super().forward(x.transpose(0, 1), None if gate is None else gate.transpose(0, 1)).transpose(0, 1)
        return y if mask is None else (y, {"kept": y.sum(1) * mask.sum(1, keepdim=True), "mask": mask * 2, "word": 1})


def test_an_mlp_of_plain_linear_layers_runs_the_fused_operator() -> None:
    module, x = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8)).double(), _random(3, 7, 8)
    expected = _run(module, x)
    report = seqtile.tile_module(module, tile=4, keep=0.5)
    assert report.blocks[0].path == "fused" and "gate and up saved: 0.5" in str(report)
    for one, other in zip(_run(module, x), expected, strict=True):
        CHECK(one, other)


@pytest.mark.parametrize("dim", [0, 1])
def test_dropout_draws_the_same_mask_in_the_recompute(dim: int) -> None:
    module, x = Scaled(share=0.5).double(), _random(7, 5, 8)
    seqtile.tile_module(module, dim=dim, tile=3)

    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(4)
        return module(x)

    assert torch.autograd.gradcheck(seeded, (x,), fast_mode=True)
    module.eval()
    CHECK(module(x), type(module).forward(module, x))


def test_undo_state_dict_print_and_copies() -> None:
    module, x = Scaled().double(), _random(7, 5, 8)
    before, names, expected = dict(module.__dict__), list(module.state_dict()), _run(module, x)
    seqtile.tile_module(module, dim=1, tile=2)
    assert "tile=2 along dim=1" in str(module) and list(module.state_dict()) == names
    twin = copy.deepcopy(module)
    for weight in module.parameters():
        weight.data.zero_()
    for one, other in zip(_run(twin, x), expected, strict=True):
        CHECK(one, other)
    assert seqtile.undo(module) == 1 and "tile=" not in str(module)
    assert dict(module.__dict__) == before
    assert seqtile.undo(twin) == 1


def test_apply_on_the_model_around_it_leaves_it() -> None:
    model = causal_lm("llama")
    own = model.model.layers[0].mlp
    seqtile.tile_module(own, tile=3)
    report = seqtile.apply(model, tile=5)
    assert report.tiled == 1 and [(one.name, one.why) for one in report.left] == [
        ("model.layers.0.mlp", "tiled by seqtile.tile_module")
    ]
    assert "tile=3 along dim=-2" in str(own)
    seqtile.apply(model, tile=7)
    assert "tile=3 along dim=-2" in str(own)
    assert seqtile.undo(model) == 2


class Shared(nn.Module):
    """One linear layer under two names, and its weight in a third place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second, self.third.weight = self.first, self.first.weight

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_a_layer_under_two_names_stays_a_parameter() -> None:
    module, x = Shared().double(), _random(2, 13, 8)
    expected, weights = _run(module, x), list(module.parameters())
    seqtile.tile_module(module, tile=5)
    for _ in range(2):  # the second step trains what the first left there
        for one, other in zip(_run(module, x), expected, strict=True):
            CHECK(one, other)
        assert all(one is other for one, other in zip(module.parameters(), weights, strict=True))


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x).cumsum(1)


@pytest.mark.parametrize(
    ("make", "settings", "refusal"),
    [
        (Mixing, {"dim": 1}, ("dim.not-tileable", "Mixing along dim=1", "cumsum")),
        (PerColumn, {"dim": 0}, ("dim.not-tileable", "mean")),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), {}, ("dim.not-tileable", "0.1.num_batches")),
        (lambda: nn.Linear(8, 8), {"dim": "1"}, ("dim.wrong-type", "str")),
        (Scaled, {"path": "fused"}, ("path.fused-unsupported", "Scaled")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_refusals_change_nothing(make, settings: dict, refusal: tuple[str, ...]) -> None:
    module = make()
    if isinstance(module, (Scaled, PerColumn)):  # the tiling that stood still stands
        seqtile.tile_module(module, dim=1, tile=9)
    before = module.__dict__.keys(), module.__dict__.get("forward"), str(module)
    with refused(*refusal):
        seqtile.tile_module(module, **settings)
    assert before == (module.__dict__.keys(), module.__dict__.get("forward"), str(module))


def test_what_only_a_call_can_show() -> None:
    with refused("model.not-a-module"):
        seqtile.tile_module(torch.relu)
    module = Scaled().double()
    seqtile.tile_module(module, dim=0, tile=4)
    with pytest.raises(ValueError, match=r"argument 'shift' has shape \(8,\) and the first tensor \(8, 8\)"):
        module(_random(8, 8), shift=_random(8))
    with pytest.raises(ValueError, match=r"argument 1 has shape \(5, 8\)"):
        module(_random(7, 8), _random(5, 8))
    seqtile.tile_module(module, dim=2, tile=4)
    with pytest.raises(ValueError, match=r"tiled along dim=2, but got a first tensor of shape \(7, 8\)"):
        module(_random(7, 8))


class Three(nn.Module):
    """Three inputs, of which nothing is known before the first call."""

    def __init__(self, mix) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x, other, third):
        return self.mix(x + other * third)


def _three(mix, **settings: object) -> tuple[nn.Module, seqtile.Report]:
    module = Three(mix)
    return module, seqtile.tile_module(module, dim=0, tile=4, **settings)


def test_what_is_proven_at_the_first_call_is_tiled_then() -> None:
    module, report = _three(torch.tanh)
    assert "trusted by the caller" in report.blocks[0].why
    x = _random(7, 3)
    with torch.no_grad(), shapes_of("tanh") as tiles:
        got = module(x, x, x)
    CHECK(got, torch.tanh(x + x * x).detach())
    assert [shape[0] for shape in tiles] == [4, 3]


def test_what_mixes_tokens_at_the_first_call_runs_untiled_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module, _ = _three(lambda x: x.cumsum(0))
    x = _random(7, 3)
    for _ in range(2):
        CHECK(module(x, x, x), (x + x * x).cumsum(0))
    told = [record for record in caplog.records if "Three runs untiled: one token's output depends" in record.message]
    assert len(told) == 1


def test_an_output_without_rows_runs_untiled_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    module, _ = _three(lambda x: x.sum(0))
    x = _random(7, 3)
    CHECK(module(x, x, x), (x + x * x).sum(0))
    assert "Three runs untiled" in caplog.text


@pytest.mark.parametrize("tile", ["auto", "shards:3"])
def test_no_token_and_one(tile: str) -> None:
    module = PerColumn().double()
    seqtile.tile_module(module, dim=1, tile=tile)
    assert module(_random(2, 0, 8)).shape == (2, 0, 8) and module(_random(2, 1, 8)).shape == (2, 1, 8)
