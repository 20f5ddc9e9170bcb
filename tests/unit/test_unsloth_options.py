"""Unsloth's option strings: what each means here, and the cases that went wrong in the original."""

import copy
import sys
from types import MethodType

import pytest
import torch
from torch import nn

import seqtile
from seqtile.blocks.instance import TiledForward
from seqtile.integrations.unsloth import patch_mlp, patch_tiled_mlp
from seqtile.recognise import proof
from watching import rows_of
from zoo import causal_lm

CHECK = torch.testing.assert_close


class Gated(nn.Module):
    """A gated MLP without a config, three times as wide as its hidden size."""

    def __init__(self, hidden: int = 16, share: float = 0.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.down_proj, self.dropout = nn.Linear(3 * hidden, hidden), nn.Dropout(share)

    def forward(self, x):
        return self.down_proj(self.dropout(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Odd(nn.Module):
    """Position-wise and no MLP of a known shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return torch.tanh(x * self.scale) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ffn, self.Odd, self.visual = Gated(), Odd(), nn.ModuleDict({"mlp": Gated()})

    def forward(self, x):
        return self.visual["mlp"](self.Odd(self.ffn(x)))


def tiled(model: nn.Module) -> dict[str, str]:
    """Qualified name and rule of all that is tiled, but the norms outside it."""
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules() if "norm" not in name}
    return {name: str(f.setting.rule) for name, f in forwards.items() if isinstance(f, TiledForward)}


def run(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients, with an upstream gradient that is not 1."""
    x = x.clone().requires_grad_()
    y = module(x)
    (y * torch.arange(1.0, 1 + y.shape[-1], dtype=y.dtype)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("shape", [(2, 37, 16), (1, 1, 16), (3, 5, 16), (2, 0, 16), (33, 16)])
@pytest.mark.parametrize("option", ["arctic", "target:0.00001", "shards:7", "auto"])
def test_gradients_equal_untiled(option: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    assert patch_tiled_mlp(model, option, modules=["ffn", "mlp", "odd"]) is model
    assert set(tiled(model)) == {"ffn", "Odd", "visual.mlp"}
    x = torch.randn(*shape, dtype=torch.float64)
    for ours, theirs in zip(run(model, x), run(plain, x), strict=True):
        CHECK(ours, theirs)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("words", [{}, {"target_arctic": True}, {"target_arctic": False}, {"target_gb": 1e-5},
                                   {"num_shards": 64}])  # fmt: skip
def test_one_mlp(words: dict[str, object], share: float) -> None:
    torch.manual_seed(0)
    plain = Gated(share=share).double()
    module = copy.deepcopy(plain)
    assert patch_mlp(module, **words) is module
    x = torch.randn(2, 29, 16, dtype=torch.float64)
    if share:  # the mask of a tile is drawn again, so only the recompute can be checked: it draws the same one
        assert torch.autograd.gradcheck(lambda x: seeded(module, x), x.requires_grad_(), fast_mode=True)
        return
    for ours, theirs in zip(run(module, x), run(plain, x), strict=True):
        CHECK(ours, theirs)


def seeded(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return module(x)


@pytest.mark.parametrize(("option", "rule"), [
    ("arctic", "arctic"), ("1", "arctic"), ("ARCTIC", "arctic"), ("auto", "auto"), ("shards:4", "shards:4"),
    ("target:1", f"memory:{2**30}"), ("target:1GB", f"memory:{2**30}"), ("target:1.5gib", f"memory:{3 * 2**29}"),
])  # fmt: skip
def test_what_an_option_means(option: str, rule: str) -> None:
    model = causal_lm("llama")
    patch_tiled_mlp(model, option)
    assert set(tiled(model).values()) == {rule}
    assert seqtile.undo(model) == len(model.model.layers)


def test_target_without_a_number_is_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seqtile.integrations.unsloth.available_host_bytes", lambda: 6 * 2**30)
    model = causal_lm("llama")
    patch_tiled_mlp(model, "target")
    assert set(tiled(model).values()) == {f"memory:{3 * 2**30}"}


def test_a_count_of_shards_is_a_request() -> None:
    module = Odd()
    patch_mlp(module, num_shards=4)
    with torch.no_grad(), rows_of("tanh") as rows:
        module(torch.randn(1, 9, 16))
        module(torch.randn(1, 2, 16))
    assert rows == [3, 2, 2, 2, 1, 1]


def test_the_intermediate_size_is_read_from_the_weights() -> None:
    model = Model()
    patch_tiled_mlp(model, "target:0.001", modules=["ffn"])
    setting = model.ffn.forward.setting
    assert (setting.hidden, setting.intermediate) == (16, 48)  # not 4 * hidden


def test_names_in_the_option_string() -> None:
    model = Model()
    patch_tiled_mlp(model, "target:1:FFN,visual.*")
    assert set(tiled(model)) == {"ffn", "visual.mlp"}
    one_of_two = Model()
    patch_tiled_mlp(one_of_two, "target:1:no_such,*ffn,nor_this")
    assert set(tiled(one_of_two)) == {"ffn"}
    left_to_the_finder = Model()
    with pytest.raises(seqtile.UserError, match="Gated is custom code"):  # which needs its name
        patch_tiled_mlp(left_to_the_finder, "target:1")


@pytest.mark.parametrize(("option", "chosen"), [
    ("arctic::mlp", (0, 1)), ("arctic:1:layers.1.mlp", (1,)), ("1::mlp", (0, 1)), ("target::*.mlp", (0, 1)),
])  # fmt: skip
def test_names_beside_any_word(option: str, chosen: tuple[int, ...]) -> None:
    model = causal_lm("llama")
    patch_tiled_mlp(model, option)
    assert set(tiled(model)) == {f"model.layers.{number}.mlp" for number in chosen}
    assert ("arctic" in tiled(model).values()) == ("target" not in option)


def test_attention_is_refused_at_the_call() -> None:
    model = causal_lm("llama")
    for words in ({"modules": ["self_attn"]}, {"modules": [model.model.layers[0].self_attn]}):
        with pytest.raises(seqtile.UserError, match=r"model\.layers\.0\.self_attn, which takes .*mixes tokens"):
            patch_tiled_mlp(model, **words)
    assert not tiled(model)


def test_a_model_that_unsloth_has_tiled_is_refused() -> None:
    """Its ``patch_mlp`` binds a function of ``unsloth_zoo.tiled_mlp`` to the instance."""

    def tiled_forward(self, x):
        return type(self).forward(self, x)

    tiled_forward.__module__ = "unsloth_zoo.tiled_mlp"
    model = causal_lm("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = MethodType(tiled_forward, mlp)
    for call in (lambda: patch_tiled_mlp(model), lambda: patch_mlp(mlp), lambda: seqtile.apply(model)):
        with pytest.raises(seqtile.UserError, match="Unsloth's own tiled MLP already runs LlamaMLP"):
            call()
    seqtile.apply(model, blocks="none", loss="tiled")


def test_models_are_proven_beside_unsloths_torch_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks ``hasattr(torch, "hpu")`` in a trace, which runs what ``import unsloth`` put there (2026.10.9)."""
    original = vars(torch)["__getattr__"]

    def __getattr__(name: str) -> object:
        try:
            return original(name)
        except AttributeError:
            if sys._getframe(1).f_globals.get("__name__") == "no_such_module":
                raise RuntimeError("torch is too old") from None
            raise

    monkeypatch.setitem(vars(torch), "__getattr__", __getattr__)
    monkeypatch.setattr(proof, "_proofs", type(proof._proofs)())
    model = causal_lm("llama")
    patch_tiled_mlp(model, "shards:2")
    assert len(tiled(model)) == 2


@pytest.mark.parametrize(("option", "words", "said"), [
    ("arctic::", {}, "no module after its last colon"), ("arctic:2:mlp", {}, "expected"), ("auto::mlp", {}, "expected"),
    ("target:1:no,nor", {}, "'nor', which matches no module"),
    ("target:a lot", {}, "expected GB above 0"), ("target:-1", {}, "expected GB above 0"),
    ("target:nan", {}, "expected GB above 0"), ("target:0", {}, "expected GB above 0"),
    ("target:1:", {}, "no module after its last colon"), ("4", {}, 'expected "arctic"'), ("0", {}, 'expected "arctic"'),
    ("shards:0", {}, "is not a tile rule"), ("target:0.0000001:ffn", {}, "give at least"),
    ("target:1:ffn", {"modules": ["ffn"]}, "both name modules"), ("arctic", {"modules": ["attn"]}, "matches no module"),
    ("arctic", {"modules": []}, "names nothing"), ("arctic", {"modules": [nn.ReLU()]}, "a ReLU that is not in"),
    ("arctic", {"modules": ["visual"]}, "name visual.mlp"),
])  # fmt: skip
def test_wrong_options_are_refused(option: str, words: dict[str, object], said: str) -> None:
    model = Model()
    with pytest.raises(seqtile.UserError, match=said):
        patch_tiled_mlp(model, option, **words)
    assert not tiled(model)


def test_two_sizes_are_refused() -> None:
    with pytest.raises(seqtile.UserError, match="each set the tile size"):
        patch_mlp(Gated(), True, 1.0)


@pytest.mark.parametrize(("words", "said"), [
    ({"target_gb": "plenty"}, "target_gb='plenty'.* GB above 0"), ({"target_gb": 0}, "target_gb=0, "),
    ({"num_shards": 0}, "shards:0' is not a tile rule"), ({"num_shards": 2.5}, "shards:2.5' is not a tile rule"),
])  # fmt: skip
def test_a_wrong_size_is_named_as_it_was_given(words: dict[str, object], said: str) -> None:
    with pytest.raises(seqtile.UserError, match=said):
        patch_mlp(Gated(), **words)


class Mixing(nn.Module):
    def forward(self, x):
        return x.cumsum(-2)


def test_a_refused_module_leaves_the_others_as_they_were() -> None:
    model = Model()
    model.mixing = Mixing()
    with pytest.raises(seqtile.UserError, match="cannot tile Mixing"):
        patch_tiled_mlp(model, "shards:4", modules=["ffn", "odd", "mixing"])
    assert not tiled(model)
    patch_tiled_mlp(model, "shards:2", modules=["ffn", "odd"])
    with pytest.raises(seqtile.UserError, match="cannot tile Mixing"):
        patch_tiled_mlp(model, "shards:4", modules=["ffn", "odd", "mixing"])
    assert tiled(model) == {"ffn": "shards:2", "Odd": "shards:2"}
