"""What a trace proves: that every token is treated by itself, what is computed, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import seqtile
from refusals import refused
from seqtile.recognise import formula, proof, trace, views
from seqtile.recognise.chain import Chain
from seqtile.recognise.proof import Mode, Proof, prove

D = 8


class Block(nn.Module):
    """An MLP around one function of its hidden layer ``h`` and its input ``x``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(D, 12), nn.Linear(12, D), function
        self.register_buffer("kept", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


def judge(module: nn.Module, dims: tuple[int | str, ...] = ("b", "s", D), **how: Any) -> Proof:
    return prove(Chain((("block", module),)), Mode(((dims, torch.float32),), torch.device("cpu"), **how), trusted=True)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over the sequence": lambda h: h - h.mean(1, keepdim=True),
    "mean over the batch": lambda h: h - h.mean(0, keepdim=True),
    "mean of all": lambda h: h - h.mean(),
    "sum added": lambda h: h + h.sum(1, keepdim=True),
    "largest": lambda h: h / h.amax(1, keepdim=True),
    "norm of all": lambda h: h / h.norm(),
    "variance": lambda h: h / h.var(1, keepdim=True),
    "softmax over the sequence": lambda h: h.softmax(1),
    "softmax over the batch": lambda h: h.softmax(0),
    "log-sum-exp": lambda h: h - h.logsumexp(1, keepdim=True),
    "cumulative sum": lambda h: h.cumsum(1),
    "flip": lambda h: h.flip(1),
    "roll": lambda h: h.roll(1, 1),
    "sorted": lambda h: h.sort(1).values,
    "largest ten": lambda h: h * (h >= h.topk(2, 1).values[:, -1:]),
    "shifted by padding": lambda h: F.pad(h, (0, 0, 1, 0))[:, :-1],
    "shifted by cat": lambda h: torch.cat([h[:, :1], h[:, :-1]], 1),
    "first token": lambda h: h + h[:, :1],
    "one token": lambda h: h + h[:, 0][:, None],
    "split of tokens": lambda h: torch.cat([part * (k + 1) for k, part in enumerate(h.split(4, 1))], 1),
    "window": lambda h: torch.cat([h[:, :512], 2 * h[:, 512:]], 1),
    "attention": lambda h: (h @ h.transpose(1, 2)).softmax(-1) @ h,
    "all pairs of the batch": lambda h: h + torch.einsum("bsf,csf->bsf", h, h),
    "convolution": lambda h: F.conv1d(h.transpose(1, 2), torch.ones(12, 1, 3), padding=1, groups=12).transpose(1, 2),
    "pairs by a reshape": lambda h: h.reshape(h.shape[0], -1, 24).flip(-1).reshape(h.shape),
    "scrambled by a reshape": lambda h: h.reshape(h.shape[1], h.shape[0], 12).transpose(0, 1).reshape(h.shape),
    "divided by the length": lambda h: h / h.shape[1],
    "positions": lambda h: h + torch.arange(h.shape[1])[:, None],
    "random numbers shared by tokens": lambda h: h * torch.rand(12),
    "random numbers of each sample": lambda h: h * torch.empty(h.shape[0], 1, 1).bernoulli_(0.5),
    "noise of its own": lambda h: h + torch.randn_like(h),
    "if the sum is positive": lambda h: h if h.sum() > 0 else -h,
    "an item": lambda h: h * h.mean().item(),
    "a mask picks": lambda h: h[h[..., 0] > 0].sum() + h,
    "batch norm": lambda h: F.batch_norm(h.flatten(0, 1), None, None, training=True).view(h.shape),
    "group norm over tokens": lambda h: F.group_norm(h.transpose(1, 2), 3).transpose(1, 2),
    "squeezed": lambda h: (h.squeeze(0) - h.squeeze(0).mean(0)).view(h.shape),
    "written over": lambda h: h.clone().fill_(1.0) * h.sum(),
    "unfolded": lambda h: h.unfold(1, 2, 1).sum(-1)[:, :1] + h,
    "loop over tokens": lambda h: torch.stack([h[:, t] * (t + 1) for t in range(h.shape[1])], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_not_proven(name: str) -> None:
    found = judge(Block(MIXING[name]))
    assert found.why_not, name


def _swap(h: Tensor) -> Tensor:
    return h.transpose(0, 1)


def _four(h: Tensor) -> Tensor:
    return h.view(*h.shape[:2], 3, 4)


ROW_WISE: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda h: h,
    "silu": F.silu,
    "every activation": lambda h: F.mish(F.elu(F.selu(F.hardswish(F.leaky_relu(F.softplus(torch.tanh(h))))))),
    "glu": lambda h: F.glu(torch.cat([h, h], -1)),
    "softmax over features": lambda h: h.softmax(-1),
    "log-softmax": lambda h: h.log_softmax(2),
    "mean over features": lambda h: h - h.mean(-1, keepdim=True),
    "norm over features": lambda h: h / h.norm(dim=-1, keepdim=True),
    "layer norm": lambda h: F.layer_norm(h, (12,)),
    "rms norm": lambda h: F.rms_norm(h, (12,)),
    "largest feature": lambda h: h - h.amax(-1, keepdim=True),
    "top two features": lambda h: h * (h >= h.topk(2, -1).values[..., -1:]),
    "cumulative over features": lambda h: h.cumsum(-1),
    "flipped features": lambda h: h.flip(-1),
    "dropout": lambda h: F.dropout(h, 0.5),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "scaled, shifted, clamped": lambda h: (h * 0.5 + 1).clamp(-3, 3),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "chunks": lambda h: torch.cat([part.relu() for part in h.chunk(2, -1)], -1),
    "unbound halves": lambda h: torch.cat(h.unflatten(-1, (2, 6)).unbind(-2), -1),
    "interleaved": lambda h: torch.cat([h[..., ::2], h[..., 1::2]], -1),
    "rows": lambda h: h.reshape(-1, 12).relu().view(h.shape),
    "rows by sizes": lambda h: h.view(h.shape[0] * h.shape[1], 12).relu().view(*h.shape),
    "transposed and back": lambda h: h.transpose(0, 1).relu().transpose(0, 1),
    "sequence first, rows": lambda h: _swap(_swap(h).reshape(-1, 12).relu().view(h.shape[1], h.shape[0], 12)),
    "features first": lambda h: h.permute(2, 0, 1).sigmoid().permute(1, 2, 0),
    "einsum": lambda h: torch.einsum("bsf,fg->bsg", h, torch.eye(12)),
    "heads of features": lambda h: h.view(*h.shape[:2], 3, 4).softmax(-1).flatten(2),
    "outer product of features": lambda h: (h[..., :, None] * h[..., None, :]).sum(-1),
    "products of features": lambda h: F.pad((_four(h) @ _four(h).mT).flatten(2), (0, 3)),
    "convolution of one": lambda h: F.conv1d(h.transpose(1, 2), torch.ones(12, 12, 1)).transpose(1, 2),
    "padded features": lambda h: F.pad(h, (0, 3))[..., :12],
    "zeros of its shape": lambda h: h + torch.zeros_like(h) + h.new_ones(h.shape),
    "zeros by sizes": lambda h: h + torch.zeros(h.shape[0], h.shape[1], 1),
    "written in place": lambda h: h.clone().mul_(2).add_(1).relu_(),
    "in another precision": lambda h: F.silu(h.double()).to(h.dtype),
    "detached": lambda h: h * torch.sigmoid(h).detach(),
    "straight through": lambda h: h + (h.round() - h).detach(),
    "a list of numbers": lambda h: h * torch.tensor([1.0, 2.0] * 6),
    "gathered features": lambda h: h.gather(-1, h.argsort(-1)),
    "checks its shape": lambda h: h if h.shape[-1] == 12 and h.dim() == 3 else None,
    "checks its size against its own": lambda h: h if h.shape[0] * h.shape[1] * 12 == h.numel() else None,
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_WISE)
def test_what_treats_rows_by_themselves_is_proven(name: str) -> None:
    assert judge(Block(ROW_WISE[name])).why_not == ""


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class _Centred(_Halved):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True)


def test_a_backward_of_its_own_is_followed_too() -> None:
    assert judge(Block(_Halved.apply)).why_not == ""
    assert "other tokens" in judge(Block(_Centred.apply)).why_not


GATED = {
    "plain": (lambda g, u: F.silu(g) * u, True),
    "the other way round": (lambda g, u: u * F.silu(g), True),
    "times one": (lambda g, u: F.silu(g) * u * 1.0, True),
    "reshaped": (lambda g, u: (F.silu(g.flatten(0, 1)) * u.flatten(0, 1)).unflatten(0, g.shape[:2]), True),
    "detached gate": (lambda g, u: F.silu(g).detach() * u, False),
    "detached up": (lambda g, u: F.silu(g) * u.detach(), False),
    "half the gradient": (lambda g, u: F.silu(_Halved.apply(g)) * u, False),
    "times two": (lambda g, u: 2 * F.silu(g) * u, False),
    "clamped far away": (lambda g, u: (F.silu(g) * u).clamp(-1e5, 1e5), False),
    "features turned round": (lambda g, u: F.silu(g) * u.flip(-1), False),
    "features scrambled": (lambda g, u: F.silu(g) * u.unflatten(-1, (3, 4)).transpose(-1, -2).flatten(-2), False),
    "in double precision": (lambda g, u: F.silu(g.double()).to(u.dtype) * u, False),
}


class Gated(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(D, 12), nn.Linear(D, 12), nn.Linear(12, D)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.gate(x), self.up(x)))


@pytest.mark.parametrize("name", GATED)
def test_only_the_formula_itself_is_fused(name: str) -> None:
    function, fused = GATED[name]
    found = judge(Gated(function))
    assert found.why_not == "" and isinstance(found.formula, formula.Formula) == fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_formula_holds_for_the_dtype_that_runs(dtype: torch.dtype) -> None:
    """SwiGLU computed in float32 is the formula for float32 weights, and another one for bfloat16."""
    block = Gated(lambda g, u: (F.silu(g.float()) * u.float()).to(g.dtype)).to(dtype)
    mode = Mode(((("b", "s", D), dtype),), torch.device("cpu"))
    found = prove(Chain((("block", block),)), mode, trusted=True)
    assert isinstance(found.formula, formula.Formula) == (dtype == torch.float32)


CHANGES: dict[str, Callable[[Any, Tensor], object]] = {
    "an attribute": lambda m, h: setattr(m, "aux", h.mean()),
    "a number": lambda m, h: setattr(m, "calls", getattr(m, "calls", 0) + 1),
    "a buffer": lambda m, h: m.kept.add_(1),
    "a buffer by name": lambda m, h: setattr(m, "kept", m.kept * 0.9),
    "a weight": lambda m, h: m.up.weight.data.mul_(0.9),
    "its input": lambda m, h: h.mul_(2),
}


class Changing(Block):
    def __init__(self, change: Callable[[Any, Tensor], object]) -> None:
        super().__init__(F.silu)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self, x)
        return super().forward(x)


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_is_seen_and_left_as_it_was(name: str) -> None:
    block = Changing(CHANGES[name])
    before, tensors = dict(vars(block)), {key: value.clone() for key, value in block.state_dict().items()}
    assert judge(block).why_not
    assert dict(vars(block)) == before
    for key, value in block.state_dict().items():
        assert torch.equal(value, tensors[key])


class Dropping(Block):
    """One draw for every token, or for every sequence."""

    def __init__(self, per_token: bool) -> None:
        super().__init__(self.drop)
        self.per_token = per_token

    def drop(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        return h * h.new_empty(h.shape[0], h.shape[1] if self.per_token else 1, 1).bernoulli_(0.5)


def test_a_proof_is_of_the_mode_that_runs() -> None:
    for per_token in (True, False):
        block = Dropping(per_token).eval()
        assert judge(block).why_not == ""
        with proof.for_training(block):
            assert (judge(block).why_not == "") == per_token
        assert judge(block).why_not == "" and not block.training
        assert (judge(block.train()).why_not == "") == per_token


def test_equal_blocks_share_one_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    prove_once = proof._prove
    monkeypatch.setattr(proof, "_prove", lambda *args: made.append(args) or prove_once(*args))
    monkeypatch.setattr(proof, "_proofs", type(proof._proofs)())
    for _ in range(3):
        judge(Gated(GATED["plain"][0]))
    judge(Gated(GATED["times two"][0]))
    assert len(made) == 2


def _no_gradients(self: Any, *arguments: Any) -> Any:
    self.gradients, kept = False, self.gradients
    try:
        return _backward(self, *arguments)
    finally:
        self.gradients = kept


_backward = trace.Tracer._backward

MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "gradients are not compared": (
        lambda m: m.setattr(trace.Tracer, "_backward", _no_gradients),
        lambda: test_only_the_formula_itself_is_fused("detached gate"),
    ),
    "no backward of its own is followed": (
        lambda m: m.setattr(trace.Tracer, "_backward", _no_gradients),
        test_a_backward_of_its_own_is_followed_too,
    ),
    "states are not compared": (
        lambda m: m.setattr(views.Views, "changed", lambda self: ""),
        lambda: test_a_state_is_seen_and_left_as_it_was("a number"),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_part_of_a_proof_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, test = MUTANTS[name]
    proof._proofs.clear()
    mutate(monkeypatch)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            test()
    finally:
        proof._proofs.clear()


class Mean(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(1, keepdim=True))


class OwnMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(12, D)), nn.Parameter(torch.randn(D, 12))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


@pytest.mark.parametrize("option", ["only", "trust"])
def test_a_block_that_is_named_and_cannot_be_tiled_is_refused_with_the_reason(option: str) -> None:
    model = nn.ModuleDict({"mlp": Gated(GATED["plain"][0]), "mean": Mean(GATED["plain"][0])})
    with refused("only.cannot-be-tiled", "mean (Mean)"):
        seqtile.apply(model, **{"tile": 3, "trust": "*", option: "mean"})


def test_matrices_that_are_parameters_of_their_module_are_named() -> None:
    model = nn.ModuleDict({"mlp": Gated(GATED["plain"][0]), "own": OwnMatrices()})
    [left] = seqtile.apply(model, tile=3, trust="mlp").left
    assert (left.name, "bare parameters" in left.why, left.unproven) == ("own", True, False)


class ScaledHeads(nn.LayerNorm):
    """A norm of each head with a scale and a shift of its own, as Chameleon has."""

    def __init__(self) -> None:
        super().__init__(D)
        self.weight, self.bias = nn.Parameter(torch.ones(3, D)), nn.Parameter(torch.zeros(3, D))


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(D, 1)), nn.Parameter(torch.zeros(D, 1))


@pytest.mark.parametrize("other", [nn.LSTM(D, D, 2), nn.GRUCell(D, D), ScaledHeads(), Affine()])
def test_recurrent_layers_norms_and_scales_are_not_taken_for_mlps(other: nn.Module) -> None:
    report = seqtile.apply(nn.ModuleDict({"mlp": Gated(GATED["plain"][0]), "other": other}), tile=3, trust="mlp")
    assert report.tiled == 1 and report.left == ()


def test_a_checkpoint_inside_a_block_is_followed() -> None:
    block = Block(lambda h: checkpoint(F.silu, h, use_reentrant=False))
    assert judge(block).why_not == ""
    block = Block(lambda h: checkpoint(lambda one: one - one.mean(1, keepdim=True), h, use_reentrant=False))
    assert "other tokens" in judge(block).why_not


def _cast(x: Tensor, weight: Tensor) -> Any:
    """What gave a product its weight in the autocast's type: the same node where the copy was kept."""
    product = F.linear(x, weight).grad_fn
    assert product is not None
    (transposed, _), *_ = product.next_functions[1:]
    return transposed.next_functions[0][0]


def test_a_proof_leaves_the_copies_of_weights_that_the_callers_autocast_keeps() -> None:
    """Made again they would be one more copy of each weight: a process's first step would hold more than its next."""
    linear, x = nn.Linear(8, 8), torch.randn(3, 8)

    def inside() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return _cast(x, linear.weight)

    with torch.autocast("cpu", torch.bfloat16):
        before = _cast(x, linear.weight)
        trace.in_a_thread(inside)
        assert _cast(x, linear.weight) is before
    assert trace.in_a_thread(inside) is not trace.in_a_thread(inside)  # nothing stays behind
