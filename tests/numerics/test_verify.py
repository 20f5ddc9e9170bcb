"""``verify`` passes what is right, names what is planted wrong, and leaves everything as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

import seqtile
import zoo
from refusals import refused
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import count_products
from seqtile.ops import tile_checkpoint
from seqtile.ops.rng import RandomState
from seqtile.verification import Difference, VerifyResult, compare, judge, plain_autograd, verify
from seqtile.verification.state import without_dropout

MLP = "model.layers.1.mlp"
DOWN = f"{MLP}.down_proj.weight"
Plant = Callable[[nn.Module], Any]


def tokens(batch: int = 2, length: int = 50) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, zoo.VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(3))}


def plant(monkeypatch: pytest.MonkeyPatch, fault: Plant) -> None:
    """Let the tiled run, and no other, have a fault; ``fault`` returns a handle whose ``remove`` takes it away."""
    applied = compare.tiled_for_comparison

    @contextmanager
    def faulty(model: nn.Module, **words: Any) -> Iterator[Any]:
        with applied(model, **words) as report:
            handle = fault(model)
            yield report
            handle.remove()

    monkeypatch.setattr(compare, "tiled_for_comparison", faulty)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient * ctx.factor, None


# --- what is right


def needs_a_truth(model: nn.Module) -> None:
    """Skip where the model draws random numbers with dropout off (transformers 5.0's OPT, for its layer drop)."""
    state = torch.get_rng_state()
    with without_dropout(model):
        model(**tokens())
    if not torch.equal(state, torch.get_rng_state()):
        pytest.skip(f"this transformers' {type(model).__name__} draws numbers without dropout: there is no truth")


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2", "opt", "mixtral"])
def test_a_right_tiling_passes_with_the_costs_counted(architecture: str) -> None:
    model = zoo.causal_lm(architecture)
    needs_a_truth(model)
    result = verify(model, tokens(), tile=16)
    assert result.ok and result.worst.score <= 1, str(result)
    assert result.blocks == 2
    assert result.reference == "float64"
    assert result.untiled.units == (6.0 if architecture == "opt" else 9.0)
    assert result.tiled.units is not None and result.tiled.units > result.untiled.units
    assert result.notes == ()
    assert {one.name for one in result.parameters} == {*dict(model.named_parameters()), "loss"}


def test_the_numbers_are_those_of_counting_by_hand() -> None:
    model, batch = zoo.causal_lm("llama"), tokens()
    result = verify(model, batch, tile=16)

    def count() -> tuple[int, float, int, float]:
        model.zero_grad(set_to_none=True)
        with count_products() as products, count_live_bytes("cpu") as live:
            loss = model(**batch, labels=batch["input_ids"]).loss
            loss.backward()
        units = products.units(100, zoo.HIDDEN, zoo.INTERMEDIATE) / 2
        return products.flops, units, live.peak, float(loss.detach())

    untiled, tiled = result.untiled, result.tiled
    assert (untiled.flops, untiled.units, untiled.peak_bytes, untiled.loss) == count()
    with seqtile.applied(model, tile=16):
        assert (tiled.flops, tiled.units, tiled.peak_bytes, tiled.loss) == count()
    long = verify(model, tokens(1, 1024), tile=64, reference=None)
    assert long.tiled.peak_bytes < 0.8 * long.untiled.peak_bytes
    assert tiled.step_units and untiled.step_units
    assert tiled.step_units - tiled.units == untiled.step_units - untiled.units > 0


def test_a_layer_checkpoint_costs_the_same_tiled() -> None:
    model = zoo.causal_lm("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    result = verify(model.eval(), tokens(), tile=16)
    assert (result.untiled.units, result.tiled.units) == (11.0, 11.0)
    assert not model.training


def test_low_precision_is_judged_against_fp32() -> None:
    result = verify(zoo.causal_lm("llama", torch.bfloat16), tokens(), tile=16)
    assert result.ok and result.reference == "float32", str(result)
    worst = result.groups["mlp.down_proj"]
    assert worst.parameters == 2
    assert worst.untiled_error is not None and 1e-4 < worst.untiled_error < 1e-1


def test_the_truth_is_computed_without_autocast() -> None:
    seen: dict[torch.dtype, bool] = {}

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen[next(model.parameters()).dtype] = torch.is_autocast_enabled("cpu")
        return model(**batch, labels=batch["input_ids"]).loss

    with torch.autocast("cpu", torch.bfloat16):
        assert verify(zoo.causal_lm("llama"), tokens(), tile=16, loss_fn=loss_of).ok
    assert seen == {torch.float64: False, torch.float32: True}


def test_without_a_truth_the_default_tolerance_judges() -> None:
    result = verify(zoo.causal_lm("llama"), tokens(), tile=16, reference=None)
    assert result.ok and result.reference is None
    assert result.worst.score == pytest.approx(max(result.worst.l2, result.worst.maximum) / (1.3e-6 + 1e-5))


def fails_in_float64(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if next(model.parameters()).dtype == torch.float64:
        raise RuntimeError("no kernel\nfor this")
    return model(**batch, labels=batch["input_ids"]).loss


def noisy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, labels=batch["input_ids"]).loss * (1 + torch.rand(()))


def twice_in_float64(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    factor = 2 if next(model.parameters()).dtype == torch.float64 else 1
    return factor * model(**batch, labels=batch["input_ids"]).loss


@pytest.mark.parametrize(
    ("loss_of", "reference", "note"),
    [
        (fails_in_float64, None, "no reference in float64 (no kernel)"),
        (noisy, None, "the model draws random numbers even with dropout off"),
        (twice_in_float64, "float64", "the untiled run itself is off by 50%"),
    ],
)
def test_what_is_wrong_with_the_truth_is_said(loss_of: Callable[..., Tensor], reference: str | None, note: str) -> None:
    """Every run starts from the same seed, so random numbers of the loss are the same in all of them."""
    result = verify(zoo.causal_lm("llama"), tokens(), tile=16, loss_fn=loss_of)
    assert result.ok and result.reference == reference, str(result)
    assert len(result.notes) == 1 and result.notes[0].startswith(note)


def test_inputs_that_take_a_gradient_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.causal_lm("llama")
    batch = {"inputs_embeds": torch.randn(2, 50, zoo.HIDDEN, requires_grad=True), "labels": tokens()["input_ids"]}
    result = verify(model, batch, tile=16)
    assert result.ok and result.reference == "float64"
    assert "batch.inputs_embeds" in result.groups
    assert batch["inputs_embeds"].grad is None


def test_any_module_with_a_loss_of_its_own() -> None:
    model = nn.Sequential(zoo.causal_lm("llama").model.layers[0].mlp)
    result = verify(model, torch.randn(3, 40, zoo.HIDDEN), tile=16, loss_fn=lambda model, x: model(x).square().mean())
    assert result.ok and (result.untiled.units, result.tiled.units) == (7.0, 9.0)  # the input takes no gradient


def test_a_reference_has_no_reentrant_checkpoints() -> None:
    """Layers that share keys and values lose gradients under reentrant checkpoints: untiled with them, too."""
    sharing = dict(num_kv_shared_layers=1, layer_types=["full_attention"] * 2, head_dim=8, global_head_dim=8,
                   hidden_size_per_layer_input=8, vocab_size_per_layer_input=zoo.VOCABULARY)  # fmt: skip
    for architecture, settings, same in (("llama", {}, True), ("gemma4_text", sharing, False)):
        if architecture not in CONFIG_MAPPING:
            pytest.skip(f"transformers has no {architecture}")
        model = zoo.causal_lm(architecture, **settings)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        model.config.use_cache = False
        result = verify(model, tokens(), tile=16)
        assert result.ok == same and any("reentrant" in note for note in result.notes)
        assert ("share keys and values" in str(seqtile.apply(model, tile=16))) == (not same)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert verify(model, tokens(), tile=16).ok


# --- what is planted wrong


def scaled(weight: str, factor: float) -> Plant:
    return lambda model: model.get_parameter(weight).register_hook(lambda gradient: gradient * factor)


def lost_tile(model: nn.Module) -> Any:
    """The last tile of one block computes its output and passes no gradient back."""

    def cut(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return torch.cat([output[:, :-16], output[:, -16:].detach()], 1)

    return model.get_submodule(MLP).register_forward_hook(cut)


def scaled_upstream(model: nn.Module) -> Any:
    return model.get_submodule(MLP).register_forward_hook(lambda _, __, output: Scaled.apply(output, 1.001))


def wrong_output(model: nn.Module) -> Any:
    return model.get_submodule(MLP).register_forward_hook(lambda _, __, output: output * 1.001)


class Frozen:
    """A weight that lost its gradient."""

    name = DOWN

    def __init__(self, model: nn.Module) -> None:
        self.weight = model.get_parameter(self.name).requires_grad_(False)

    def remove(self) -> None:
        self.weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        pytest.param(scaled(DOWN, 1.001), DOWN, id="a weight's gradient, a thousandth too large"),
        pytest.param(scaled(DOWN, 2.0), DOWN, id="counted twice"),
        pytest.param(scaled(DOWN, 0.0), DOWN, id="zero"),
        pytest.param(lost_tile, MLP, id="a tile lost"),
        pytest.param(scaled_upstream, "model.layers.1.", id="upstream gradient"),
        pytest.param(wrong_output, "", id="output, whatever it spoils most"),
        pytest.param(Frozen, DOWN, id="missing"),
        pytest.param(scaled(DOWN, math.nan), DOWN, id="nan"),
        pytest.param(scaled(DOWN, math.inf), DOWN, id="inf"),
    ],
)
@pytest.mark.parametrize("reference", ["fp32", None])
def test_a_planted_fault_is_named(monkeypatch: pytest.MonkeyPatch, fault: Plant, named: str, reference: str) -> None:
    plant(monkeypatch, fault)
    result = verify(zoo.causal_lm("llama"), tokens(), tile=16, reference=reference)
    assert not result.ok
    assert result.worst.name.startswith(named), str(result)
    assert str(result).startswith(f"GRADIENTS DIFFER: {result.worst.name}: ")
    if fault is lost_tile:
        result = verify(zoo.causal_lm("llama", torch.bfloat16), tokens(), tile=16, reference=reference)
        assert not result.ok and result.worst.name.startswith(named)


@pytest.mark.parametrize(
    ("untiled", "tiled", "problem"),
    [
        (torch.ones(2), None, "has a gradient in the untiled run but not in the tiled run"),
        (None, torch.ones(2), "has a gradient in the tiled run but not in the untiled run"),
        (torch.ones(2), torch.tensor([1, math.nan]), "is not finite in the tiled run"),
        (torch.full((2,), math.inf), torch.full((2,), math.inf), "is not finite in the untiled and the tiled run"),
    ],
)
def test_gradients_that_are_no_numbers_fail_by_name(untiled: Tensor | None, tiled: Tensor | None, problem: str) -> None:
    one = judge.difference("w", untiled, tiled, torch.ones(2), torch.float32)
    assert one.problem == problem
    assert judge.severity(one) == math.inf


@pytest.mark.parametrize(
    ("off", "score"),
    [
        (0.1, 0.1 / (2 * 0.1 + 1e-5)),  # as far from the truth as the untiled one, the other way
        (0.2, 0.2 / (2 * 0.1 + 1e-5)),
        (0.3, 0.3 / (2 * 0.1 + 1e-5)),
    ],
)
def test_the_verdict_is_twice_the_untiled_error(off: float, score: float) -> None:
    truth = torch.ones(4, dtype=torch.float64)
    one = judge.difference("w", truth + 0.1, truth - off, truth, torch.float32)
    assert one.score == pytest.approx(score)
    assert (one.untiled_error, one.tiled_error) == (pytest.approx(0.1), pytest.approx(off))


def test_one_element_off_fails_in_maximum_though_not_in_l2() -> None:
    truth = torch.ones(10_000, dtype=torch.float64)
    untiled, tiled = truth + 0.01, truth.clone()
    tiled[7] += 0.1
    one = judge.difference("w", untiled, tiled, truth, torch.float32)
    assert float((tiled - truth).norm()) < float((untiled - truth).norm())
    assert one.score == pytest.approx(0.1 / (2 * 0.01 + 1e-5))


def test_an_exact_untiled_gradient_leaves_the_slack() -> None:
    truth = torch.ones(4, dtype=torch.float64)
    assert judge.difference("w", truth, truth * (1 + 0.9e-5), truth, torch.float32).score == pytest.approx(0.9)
    assert judge.difference("w", truth, truth * (1 + 1.1e-5), truth, torch.float32).score == pytest.approx(1.1)


def test_a_gradient_that_is_all_noise_may_be_other_noise() -> None:
    noise = torch.full((4,), 1e-9)
    truth = torch.full((4,), 1e-12, dtype=torch.float64)
    assert judge.difference("w", noise, -5 * noise, truth, torch.float32).score < 1
    assert judge.difference("w", noise, -11 * noise, truth, torch.float32).score > 1


def test_gradients_of_zero_are_equal() -> None:
    zero = torch.zeros(4)
    assert judge.difference("w", zero, zero, zero, torch.float32) == Difference("w", 0.0, 0.0, 0.0, 0.0, 0.0)
    assert judge.difference("w", None, None, None, torch.float32).score == 0
    assert judge.difference("w", zero, zero + 1e-30, zero, torch.float32).score == math.inf


# --- what is said


@pytest.mark.parametrize("tile", [None, 100])
def test_a_batch_that_runs_in_one_tile_is_no_proof(tile: int | None) -> None:
    result = verify(zoo.causal_lm("llama"), tokens(), tile=tile)
    assert result.tiled.units == (9.0 if tile is None else 11.0)  # "auto" left so short a batch untiled
    assert not result.ok and result.ran.cut == 0
    words = f"batches of up to 100 tokens fit in one tile, uncut (tile={tile or 'auto'})"
    assert str(result).startswith("NOT VERIFIED") and f"nothing was compared: {words}" in str(result)


def test_tiles_are_counted_where_they_run() -> None:
    """And not by the sizes of products: here attention's scores have those of a block's weights."""
    model = zoo.causal_lm("llama", hidden_size=64, intermediate_size=256, head_dim=24, vocab_size=264)
    result = verify(model, tokens(1, 256), tile=64)
    assert result.ok and str(result.ran) == "batches of up to 256 tokens were cut into up to 4 tiles"
    with seqtile.applied(model, tile=64):
        model(**tokens(1, 256))
        short = verify(model, tokens(1, 32))  # what ran before is not what this ran
    assert not short.ok and short.ran.tokens == 32


@pytest.mark.parametrize(
    ("architecture", "config", "places"),
    [
        pytest.param("opt", dict(dropout=0.1, attention_dropout=0.2), 5, id="functional"),
        pytest.param("gpt2", dict(resid_pdrop=0.1), 4, id="modules"),
    ],
)
def test_dropout_is_off_and_said_and_on_again_afterwards(
    architecture: str, config: dict[str, float], places: int
) -> None:
    model = zoo.causal_lm(architecture, **config)
    needs_a_truth(model)
    before = [dict(vars(module)) for module in model.modules()]
    result = verify(model, tokens(), tile=16)
    assert result.ok, str(result)
    (note,) = result.notes
    assert note.startswith(
        f"dropout ({places} places) was off in this comparison; with it on, tiles were compared with"
    )
    assert {one.name for one in result.with_dropout} == {one.name for one in result.parameters}
    assert max(one.l2 for one in result.with_dropout) < 1e-5
    assert [dict(vars(module)) for module in model.modules()] == before


def test_products_that_cannot_be_told_apart_are_not_guessed() -> None:
    result = verify(zoo.causal_lm("llama", vocab_size=zoo.INTERMEDIATE), tokens(), tile=16)
    assert result.untiled.units is result.tiled.units is None
    [note] = result.notes
    assert note.startswith(f"no units per block: a {zoo.HIDDEN} x {zoo.INTERMEDIATE} weight")
    assert result.tiled.flops > result.untiled.flops


def test_a_tiled_loss_alone_is_compared() -> None:
    model, batch = zoo.causal_lm("llama"), tokens()
    seqtile.apply(model, blocks="none", loss="tiled")
    result = verify(model, {**batch, "labels": batch["input_ids"]})
    assert result.ok and result.untiled.units is result.tiled.step_units is None
    assert "same gradients" in str(result) and "units" not in str(result)


def test_a_result_is_one_line_and_plain_data() -> None:
    result = verify(zoo.causal_lm("llama"), tokens(), tile=16)
    line = str(result)
    assert line.startswith("same gradients (largest relative difference ") and "\n" not in line
    assert "units per block 9 -> 11, peak " in line
    data = json.loads(json.dumps(result.to_dict()))
    assert data["ok"] is True
    assert data["tiled"]["units"] == 11.0
    assert data["groups"]["mlp.gate_proj"]["parameters"] == 2
    assert data["worst"]["name"] == result.worst.name


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.3.mlp.gate_proj.weight", "mlp.gate_proj"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", "mlp.experts.up_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", "mlp.up_proj.lora_A"),
        ("transformer.h.0.mlp.c_fc.bias", "mlp.c_fc.bias"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("batch.inputs_embeds", "batch.inputs_embeds"),
        ("loss", "loss"),
        ("weight", "weight"),
    ],
)
def test_group_names(name: str, group: str) -> None:
    assert judge.group_of(name) == group


# --- as it was found


def state(model: nn.Module) -> list[Any]:
    attributes = [
        {name: value for name, value in vars(module).items() if not name.startswith("_")} for module in model.modules()
    ]
    gradients = [(id(weight.grad), weight.grad is None or weight.grad.clone()) for weight in model.parameters()]
    values = [value.clone() for value in model.state_dict().values()]
    return [attributes, gradients, values, torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.equal(b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def used_model() -> nn.Module:
    """A model in the middle of things: gradients, one part in eval mode, one weight frozen, a buffer that moves."""
    model = zoo.causal_lm("llama", attention_dropout=0.1)
    model.model.layers[0].eval()
    model.model.norm.weight.requires_grad_(False)
    model.model.embed_tokens.register_buffer("calls", torch.zeros(()))
    model.model.embed_tokens.register_forward_hook(lambda module, *_: module.calls.add_(1) and None)
    model(**tokens(), labels=tokens()["input_ids"]).loss.backward()
    return model


@pytest.mark.parametrize("tiled_before", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_left_as_it_was(tiled_before: bool, fails: bool) -> None:
    model = used_model()
    if tiled_before:
        seqtile.apply(model, tile=24)
    before = state(model)

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if fails:
            raise KeyError("a user's own mistake")
        return model(**batch, labels=batch["input_ids"]).loss

    if fails:
        with pytest.raises(KeyError):
            verify(model, tokens(), tile=16, loss_fn=loss_of)
    else:
        assert verify(model, tokens(), tile=16, loss_fn=loss_of).ok
    assert same(state(model), before)


def test_the_tiling_that_stands_is_the_one_that_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.causal_lm("llama")
    seqtile.apply(model, tile=16, only=MLP)
    monkeypatch.setattr(compare, "tiled_for_comparison", None)
    result = verify(model, tokens())
    assert result.blocks == 1
    assert (result.untiled.units, result.tiled.units) == (9.0, 10.0)  # per block of these sizes, one of two tiled


# --- what is refused


def no_weights(model: nn.Module) -> Any:
    return model.requires_grad_(False)


def steps_inside(model: nn.Module) -> Any:
    return model.lm_head.weight.register_post_accumulate_grad_hook(lambda weight: None)


@pytest.mark.parametrize(
    ("spoil", "kwargs", "refusal"),
    [
        (no_weights, {}, ("verify.nothing-trains",)),
        (steps_inside, {}, ("verify.gradient-hook", "lm_head.weight")),
        (lambda model: model.to("meta"), {}, ("verify.meta-weights", "model.embed_tokens.weight")),
        (lambda model: None, {"reference": "fp64"}, ("verify.unknown-reference", "'fp64'")),
        (
            lambda model: None,
            {"loss_fn": lambda model, batch: model(**batch).logits},
            ("verify.not-one-loss", f"(2, 50, {zoo.VOCABULARY})"),
        ),
        (lambda model: seqtile.apply(model), {"only": MLP}, ("verify.only-without-tile",)),
        (lambda model: None, {"only": "nowhere"}, ("only.no-match",)),
    ],
)
def test_what_cannot_be_compared_is_refused(spoil: Plant, kwargs: dict[str, Any], refusal: tuple[str, ...]) -> None:
    model = zoo.causal_lm("llama")
    spoil(model)
    with refused(*refusal):
        verify(model, tokens(), **kwargs)


def test_a_model_without_a_loss_is_told_what_to_give() -> None:
    model = zoo.causal_lm("llama").model
    with refused("verify.not-one-loss", "LlamaModel", "BaseModelOutputWithPast"):
        verify(model, {"inputs_embeds": torch.randn(1, 50, zoo.HIDDEN)}, tile=16)


def adapted(**config: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    words = {"r": 4, "target_modules": ["q_proj", "gate_proj", "down_proj"], "init_lora_weights": False, **config}
    return peft.get_peft_model(zoo.causal_lm("llama"), peft.LoraConfig(**words))


def test_adapters_are_compared_and_a_missing_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    result: VerifyResult = verify(model, tokens(), tile=16)
    assert result.ok, str(result)
    assert (result.untiled.units, result.tiled.units) == (6.0, 8.0)  # the base's products, without the adapters' own

    class Lost(Frozen):
        name = "base_model.model.model.layers.1.mlp.gate_proj.lora_A.default.weight"

    plant(monkeypatch, Lost)
    result = verify(model, tokens(), tile=16)
    assert not result.ok and result.worst.name == Lost.name


class Patched:
    """A fault that replaces an attribute of the library until it is removed."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.undo = pytest.MonkeyPatch()
        self.undo.setattr(owner, name, value)

    def remove(self) -> None:
        self.undo.undo()


@pytest.mark.parametrize("layer_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("config", "fault"),
    [
        pytest.param({}, lambda _: Patched(RandomState, "replayed", lambda self: nullcontext()), id="fused"),
        pytest.param(
            {"use_dora": True},  # which the fused operator does not run
            lambda _: Patched(
                tile_checkpoint, "checkpoint", partial(torch.utils.checkpoint.checkpoint, preserve_rng_state=False)
            ),
            id="generic",
        ),
    ],
)
def test_a_wrong_dropout_mask_is_named(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], fault: Plant, layer_checkpoint: bool
) -> None:
    model = adapted(lora_dropout=0.5, **config)
    if layer_checkpoint:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert verify(model, tokens(), tile=16).ok
    plant(monkeypatch, fault)
    result = verify(model, tokens(), tile=16)
    assert not result.ok and result.worst.dropout
    assert "lora" in result.worst.name
    assert any(one.score > 1 for one in result.with_dropout if ".mlp." in one.name)
    assert all(one.score <= 1 for one in result.parameters)  # nothing else shows it
    assert str(result).startswith(f"GRADIENTS DIFFER: {result.worst.name}: relative difference ")
    assert " times the tolerance with dropout on" in str(result)


def test_tiles_that_draw_in_another_order_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(input: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        return input * torch.rand(input.shape).ge(p) / (1 - p)

    plant(monkeypatch, lambda _: Patched(plain_autograd, "_drop_by_tile", other))
    result = verify(adapted(lora_dropout=0.5), tokens(), tile=16)
    assert result.ok and result.with_dropout == ()
    assert result.notes[-1].endswith("which cannot be compared")
