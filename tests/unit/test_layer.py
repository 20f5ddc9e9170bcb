"""A norm or a dropout after the block runs in the same tile, whatever it is called, and exactly once."""

from typing import Any

import pytest
import torch
from torch import nn

import seqtile
from seqtile.blocks import layer as tiled_layer
from watching import dropout_that_scales, rows_of
from zoo import HIDDEN, assert_same_gradients, causal_lm, gradients, tokens

NEIGHBOURS = {
    "gemma2": ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    "gemma3_text": ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    "olmo2": ("", "mlp", "post_feedforward_layernorm"),
    "glm4": ("post_attention_layernorm", "mlp", "post_mlp_layernorm"),
    "opt": ("final_layer_norm", "fc1", "activation_fn", "fc2", "dropout"),
    "gpt2": ("ln_2", "mlp"),
    "llama": ("post_attention_layernorm", "mlp"),
    "phi3": ("post_attention_layernorm", "mlp"),
    "gpt_neox": ("post_attention_layernorm", "mlp"),
    "cohere": ("", "mlp"),  # attention reads the same norm
    "falcon": ("", "mlp"),
}


@pytest.mark.parametrize("architecture", NEIGHBOURS)
def test_neighbours_are_found_by_the_layers_trace(architecture: str) -> None:
    before, *rest = NEIGHBOURS[architecture]
    model = causal_lm(architecture)
    report = seqtile.apply(model, tile=5)
    assert {block.together for block in report.blocks} == {tuple(name for name in (before, *rest) if name)}
    followed = len(rest) > 1 and architecture != "opt"  # OPT's dropout is 0 here
    assert ("share a tile" in str(report)) == followed
    report = seqtile.apply(model, tile=5, blocks="mlp")
    assert {block.together for block in report.blocks} == {tuple(rest)}


@pytest.mark.parametrize(
    ("architecture", "config", "follower"),
    [
        ("phi3", {"resid_pdrop": 0.5}, "resid_mlp_dropout"),
        ("gpt_neox", {"hidden_dropout": 0.5}, "post_mlp_dropout"),
        ("opt", {"dropout": 0.5}, "dropout"),
    ],
)
@pytest.mark.parametrize("path", ["generic", "fused"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpoint"])
def test_a_dropout_after_the_block_is_applied_once(
    architecture: str, config: dict, follower: str, checkpointing: bool, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = causal_lm(architecture, torch.float64, **config), tokens()
    with dropout_that_scales(monkeypatch):
        _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5, path=path)
    assert follower in report.blocks[0].together
    if checkpointing:
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    gradients(model, ids)  # proves what apply could not
    with dropout_that_scales(monkeypatch) as shares:
        _, got = gradients(model, ids)
    assert 0.5 in shares
    assert_same_gradients(got, expected)


def test_evaluation_drops_nothing() -> None:
    model, ids = causal_lm("opt", dropout=0.5).eval(), tokens()
    expected = model(ids).logits
    seqtile.apply(model, tile=5)
    torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("path", ["generic", "auto"])
def test_a_hook_on_a_member_takes_the_neighbours_out_of_the_tile(path: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("gemma2", torch.float64), tokens()
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5, path=path)
    seen: list[torch.Size] = []
    model.model.layers[0].post_feedforward_layernorm.register_forward_hook(lambda m, a, out: seen.append(out.shape))
    with rows_of(model.model.layers[0].mlp.gate_proj.weight) as rows:
        _, got = gradients(model, ids)
    assert rows[:6] == [5, 5, 4, 4, 4, 4]  # the block alone stays tiled
    gradients(model, ids)
    assert seen == [torch.Size((2, 13, HIDDEN))] * 2
    assert_same_gradients(got, expected)
    told = [record for record in caplog.records if "post_feedforward_layernorm has hooks" in record.message]
    assert len(told) == 1


def test_the_layer_itself_is_not_changed_by_a_call() -> None:
    model, ids = causal_lm("opt", dropout=0.5), tokens()
    seqtile.apply(model, tile=5)
    decoder = model.model.decoder.layers[0]
    before = {k: v for k, v in decoder.__dict__.items() if k != "_modules"}, dict(decoder._modules)
    gradients(model, ids)
    assert before == ({k: v for k, v in decoder.__dict__.items() if k != "_modules"}, dict(decoder._modules))
    assert decoder.dropout == 0.5


def test_a_follower_that_ran_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients test fails for a layer whose norm runs in the tile and again after it."""
    model, ids = causal_lm("gemma2", torch.float64), tokens()
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5)
    norm = model.model.layers[0].post_feedforward_layernorm
    begin = tiled_layer.Members.__init__

    def twice(self: Any, *args: Any) -> None:
        begin(self, *args)
        call = self.stand_ins[self.events[-1]]
        self.stand_ins[self.events[-1]] = lambda hidden_states: norm.forward(call(hidden_states))

    monkeypatch.setattr(tiled_layer.Members, "__init__", twice)
    _, got = gradients(model, ids)
    with pytest.raises(AssertionError):
        assert_same_gradients(got, expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize("path", ["generic", "auto"])
def test_the_models_own_checkpointing_still_checkpoints(architecture: str, path: str) -> None:
    """A layer that runs on a view of itself must still be checkpointed: its attention runs again in backward."""
    model, ids = causal_lm(architecture, dropout=0.1) if architecture == "opt" else causal_lm(architecture), tokens()
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    seqtile.apply(model, tile=5, path=path)
    calls: list[int] = []
    for name, module in model.named_modules():
        if name.endswith("self_attn.q_proj"):
            module.register_forward_hook(lambda *_: calls.append(1))
    gradients(model, ids)
    assert len(calls) == 2 * 2


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.post, self.mlp, self.calls = _Norm(), _Norm(), _MLP(), 0


class _SharedNorm(_Layer):
    def forward(self, x):
        h = self.norm(x)
        x = x + h.cumsum(1)
        h = x
        h = self.norm(h)
        h = self.mlp(h)
        return x + h


class _Twice(_Layer):
    def forward(self, x):
        h = x
        h = self.norm(h)
        h = self.mlp(h)
        x = x + h
        h = x
        h = self.post(h)
        h = self.mlp(h)
        return x + h


class _PostElsewhere(_Layer):
    def forward(self, x):
        h = self.mlp(x)
        h = self.post(h)
        return self.post(x) + h


class _Branches(_Layer):
    def forward(self, x):
        if x.shape[1] > 100:
            h = self.mlp(x)
            h = self.post(h)
        else:
            h = self.mlp(x)
            h = h * 2
        return x + h


class _ReadsWeight(_Layer):
    def forward(self, x):
        x = x.to(self.norm.weight.dtype)
        h = x
        h = self.norm(h)
        h = self.mlp(h)
        return x + h


class _Writes(_Layer):
    def forward(self, x):
        self.calls += 1
        h = self.mlp(x)
        h = self.post(h)
        return x + h


class _Helper(_Layer):
    def forward(self, x):
        h = self.mlp(x)
        h = self.post(h)
        return self.add(x, h)

    def add(self, x, h):
        return self.post(x) + h


@pytest.mark.parametrize(
    "kind", [_SharedNorm, _Twice, _PostElsewhere, _Branches, _ReadsWeight, _Writes, _Helper], ids=lambda k: k.__name__
)
def test_a_layer_that_uses_its_children_otherwise_keeps_them(kind: type[_Layer]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([kind()]).double()
    x = torch.randn(2, 13, 8, dtype=torch.float64, requires_grad=True)
    inputs = [x, *(p for p in model.parameters())]
    expected = torch.autograd.grad(model[0](x).pow(2).sum(), inputs, allow_unused=True)
    seqtile.apply(model, tile=5, trust="*")
    got = torch.autograd.grad(model[0](x).pow(2).sum(), inputs, allow_unused=True)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert model[0].calls in (0, 2)


class _CentredNorm(nn.Module):
    """Has the form of a norm, but reads other tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(1, keepdim=True)) * self.weight


@pytest.mark.parametrize(
    ("architecture", "name"), [("llama", "post_attention_layernorm"), ("gemma2", "post_feedforward_layernorm")]
)
def test_a_norm_that_mixes_tokens_stays_out_of_the_tile(architecture: str, name: str) -> None:
    model = causal_lm(architecture)
    for layer in model.model.layers:
        setattr(layer, name, _CentredNorm(model.config.hidden_size))
    ids = tokens()
    _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5)
    assert all(name not in block.together for block in report.blocks)
    assert_same_gradients(gradients(model, ids)[1], expected)
