"""Instances are changed, visibly and undoably; names, saved weights and hooks stay what they were."""

import ast
import copy
import io
import pickle
import re
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import seqtile
from refusals import refused
from seqtile.blocks.instance import Installed
from seqtile.options import WHOLE_LAYER
from watching import rows_of
from zoo import HEAD_DIM, HIDDEN, INTERMEDIATE, assert_same_gradients, causal_lm, gradients, tokens


def _attributes(model: nn.Module) -> dict[str, dict[str, object]]:
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def _tiled(model: nn.Module) -> int:
    return sum(isinstance(module.__dict__.get("forward"), Installed) for module in model.modules())


@pytest.mark.parametrize(("path", "operator"), [("generic", "generic"), ("auto", "fused")])
def test_report_is_one_line(path: str, operator: str) -> None:
    report = seqtile.apply(causal_lm("llama"), tile=8192, path=path)
    assert str(report) == f"tiled 2 of 2 MLPs (LlamaMLP), 8,192 tokens per tile, {operator}"
    assert [block.name for block in report.blocks] == ["model.layers.0.mlp", "model.layers.1.mlp"]


@pytest.mark.parametrize(
    ("tile", "words"),
    [
        ("auto", "1,024 tokens per tile"),
        ("shards:4", "4 tiles"),
        ("arctic", f"ceil(tokens / {HIDDEN}) tiles"),
        ("memory:1MiB", "384 tokens per tile"),
        (64, "64 tokens per tile"),
    ],
)
def test_every_rule_is_told_and_trains(tile: int | str, words: str) -> None:
    model, ids = causal_lm("llama"), tokens(length=70)
    _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=tile, path="generic")
    assert f", {words}, " in str(report)
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)


def test_a_report_can_be_pickled() -> None:
    model = causal_lm("llama")
    report = seqtile.apply(model, tile=8, keep=0.5, loss="tiled")
    sent = pickle.loads(pickle.dumps(report))
    assert sent == report and sent.summary == report.summary and sent.notes == report.notes[: len(sent.notes)]
    assert "gate and up" in str(sent)


def test_only_takes_names_patterns_and_predicates() -> None:
    model = causal_lm("llama")
    for only in (
        "model.layers.1.mlp",
        "*.1.mlp",
        ["model.layers.1.*", "*.1.mlp"],
        lambda name, module: name.endswith("1.mlp") and isinstance(module, nn.Module),
    ):
        report = seqtile.apply(model, only=only)
        assert [block.name for block in report.blocks] == ["model.layers.1.mlp"]
        assert [(left.name, left.why) for left in report.left] == [("model.layers.0.mlp", "not named in only=")]
        assert str(report).startswith("tiled 1 of 2 MLPs")
    with refused("only.no-match", "model.layers.0.mlp"):
        seqtile.apply(model, only="*.ffn")
    before = _attributes(model)
    with refused("only.no-match", "only=['model.layer.0.mlp']"):
        seqtile.apply(model, only=["model.layers.1.mlp", "model.layer.0.mlp"])
    assert _attributes(model) == before  # the tiling that stood still stands


def test_zero_matches_says_what_was_looked_for_and_found() -> None:
    with refused("blocks.nothing-to-tile", "gate, up, down", "Conv1d"):
        seqtile.apply(nn.Sequential(nn.Conv1d(2, 2, 1)))


class OwnMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("path", ["", "0", "0.1"])
def test_a_refusal_names_a_value_of_trust_that_tiles_the_block(path: str) -> None:
    model: nn.Module = OwnMLP()
    for part in reversed(path.split(".") if path else []):
        model = nn.Sequential(*[nn.Identity() for _ in range(int(part))], model)
    with refused("blocks.nothing-to-tile") as raised:
        seqtile.apply(model)
    named = re.search(r"found (.*?)OwnMLP.*trust=('.*?')", str(raised.value))
    assert named is not None and named[1] == (f"{path} (" if path else "")
    assert seqtile.apply(model, trust=ast.literal_eval(named[2])).tiled == 1


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt", "mixtral"])
def test_undo_restores_every_attribute(architecture: str) -> None:
    model = causal_lm(architecture)
    mlp = model.get_submodule("model.layers.0.mlp") if architecture == "llama" else None
    if mlp is not None:  # someone else's forward on the instance is kept, used and restored
        mlp.forward = types.MethodType(lambda self, x: 2 * type(self).forward(self, x), mlp)
        expected = model(tokens()).logits
    before = _attributes(model)
    report = seqtile.apply(model, tile=5, trust="*")
    assert _tiled(model) >= 2 and _attributes(model).keys() == before.keys()
    if mlp is not None:
        assert report.blocks[0].path == "generic" and "another formula" in report.blocks[0].not_fused
        with torch.no_grad(), rows_of(mlp.gate_proj.weight) as rows:
            torch.testing.assert_close(model(tokens()).logits, expected)
        assert rows == [5, 5, 4, 4, 4, 4]
    assert seqtile.undo(model) == report.tiled
    assert _attributes(model) == before
    assert seqtile.undo(model) == 0


def test_applied_undoes_also_after_an_error() -> None:
    model = causal_lm("llama")
    before = _attributes(model)
    with pytest.raises(RuntimeError, match="user"), seqtile.applied(model, tile=5) as report:
        assert report.tiled == 2 <= _tiled(model)
        raise RuntimeError("user")
    assert _attributes(model) == before


def test_apply_twice_is_the_second_one() -> None:
    model, ids = causal_lm("gemma2"), tokens()
    before = _attributes(model)
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5)
    report = seqtile.apply(model, tile=7)
    assert "7 tokens per tile" in str(report) and report.tiled == 2
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    seqtile.undo(model)
    assert _attributes(model) == before


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt", "mixtral"])
def test_nothing_is_renamed_or_saved_and_print_shows_it(architecture: str) -> None:
    model = causal_lm(architecture)

    def all_names() -> tuple[list[str], ...]:
        parameters, modules = model.named_parameters(), model.named_modules()
        return [name for name, _ in parameters], list(model.state_dict()), [name for name, _ in modules]

    names = all_names()
    classes = [type(module) for module in model.modules()]
    assert "tile=" not in str(model)
    seqtile.apply(model, tile=5)
    assert str(model).count("tile=5") >= 1
    assert classes == [type(module) for module in model.modules()]
    assert names == all_names()


@pytest.mark.parametrize(
    ("architecture", "how"),
    [
        ("llama", "torch.save"),
        *((name, how) for name in ("gemma2", "opt", "qwen3_moe") for how in ("deepcopy", "pickle")),
    ],
)
def test_a_copy_trains_itself_and_not_the_original(architecture: str, how: str) -> None:
    model, ids = causal_lm(architecture), tokens()
    seqtile.apply(model, tile=5)
    _, expected = gradients(model, ids)
    model.zero_grad()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert _tiled(twin) == _tiled(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    _, got = gradients(twin, ids)
    assert_same_gradients(got, expected)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert all(p.grad is None for p in model.parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    moved = [
        name
        for name, p in twin.named_parameters()
        if ("mlp" in name or "fc" in name) and not torch.equal(p, before[name])
    ]
    assert moved
    assert seqtile.undo(twin) == 2 and _tiled(model) > 0


@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_hooks_on_the_block_fire_once_with_whole_tensors(architecture: str, path: str) -> None:
    model, ids = causal_lm(architecture), tokens()
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5, path=path)
    seen: list[tuple[str, torch.Size, torch.Size]] = []
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda m, args, out: seen.append(("forward", args[0].shape, out.shape)))
    mlp.register_full_backward_hook(lambda m, gin, gout: seen.append(("backward", gin[0].shape, gout[0].shape)))
    with rows_of(mlp.gate_proj.weight) as rows:
        _, got = gradients(model, ids)
    assert rows[:6] == [5, 5, 4, 4, 4, 4]  # and the block stays tiled
    whole = torch.Size((2, 13, HIDDEN))
    assert seen == [("forward", whole, whole), ("backward", whole, whole)]
    assert_same_gradients(got, expected)


@pytest.mark.parametrize("path", ["generic", "auto"])
@pytest.mark.parametrize("architecture", ["llama", "opt", "qwen3_moe"])
def test_each_parameter_receives_one_gradient(architecture: str, path: str) -> None:
    model, ids = causal_lm(architecture), tokens()
    counts: dict[str, int] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: counts.__setitem__(name, counts.get(name, 0) + 1))
    seqtile.apply(model, tile=3, path=path)
    gradients(model, ids)
    assert counts and set(counts.values()) == {1}


def test_an_optimizer_that_steps_inside_backward_gives_the_untiled_weights() -> None:
    def trained(tile: int | None) -> dict[str, torch.Tensor]:
        model, ids = causal_lm("llama", torch.float64), tokens()
        if tile:
            seqtile.apply(model, tile=tile)
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.5)

            def step(_: torch.Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.detach() for name, p in model.named_parameters()}

    untiled, tiled = trained(None), trained(4)
    for name, weight in untiled.items():
        torch.testing.assert_close(tiled[name], weight, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mode", ["no_grad", "inference", "eval"])
def test_evaluation_is_tiled_too(mode: str) -> None:
    model, ids = causal_lm("llama"), tokens()
    expected = model(ids).logits.detach()
    seqtile.apply(model, tile=5, path="generic")
    with rows_of("silu") as rows:
        if mode == "eval":
            got = model.eval()(ids).logits
        else:
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                got = model(ids).logits
    torch.testing.assert_close(got, expected)
    assert rows == [5, 5, 4, 4, 4, 4] * 2


@pytest.mark.parametrize(("path", "operator"), [("generic", "run_in_tiles"), ("auto", "fused_mlp")])
def test_auto_leaves_a_short_batch_untiled_and_tiles_a_long_one(
    path: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from seqtile.blocks import instance

    counts: list[int] = []
    run = getattr(instance, operator)
    monkeypatch.setattr(
        instance, operator, lambda f, t, sizes, *a, **k: counts.append(len(sizes)) or run(f, t, sizes, *a, **k)
    )
    model = causal_lm("llama", max_position_embeddings=4096)
    seqtile.apply(model, path=path)
    model(tokens(1, 64))
    assert counts == []
    with torch.no_grad():
        model(tokens(2, 1500))
    assert counts == [3, 3]


def test_generation_is_unchanged() -> None:
    model, ids = causal_lm("llama").eval(), tokens(1, 9)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    with seqtile.applied(model, tile=4):
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), expected)


def test_two_runs_with_one_seed_are_bitwise_equal() -> None:
    def run() -> dict[str, torch.Tensor | None]:
        model = causal_lm("gpt2", resid_pdrop=0.3)
        seqtile.apply(model, tile=4)
        torch.manual_seed(3)
        return gradients(model, tokens())[1]

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("path", ["generic", "auto"])
def test_frozen_from_the_first_layer_up(path: str) -> None:
    """No input gradient anywhere below: the first MLP's weights still get theirs."""
    model, ids = causal_lm("llama", torch.float64), tokens()
    for name, p in model.named_parameters():
        p.requires_grad_("mlp" in name)
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5, path=path)
    _, got = gradients(model, ids)
    assert got["model.layers.0.mlp.gate_proj.weight"] is not None
    assert_same_gradients(got, expected)


def test_a_reentrant_checkpoint_is_exact_and_the_report_says_what_it_costs() -> None:
    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5)
    assert "reentrant" not in str(report)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model.config.use_cache = False
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    assert "reentrant activation checkpointing" in str(report) and "14 GEMM units" in str(report)
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert "early stop of activation checkpointing is off" in str(report)
    assert "early stop" not in str(report)


def test_torch_compile_gives_the_same_numbers() -> None:
    model, ids = causal_lm("gemma2", num_hidden_layers=1), tokens()
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    compiled(input_ids=ids, labels=ids).loss.backward()
    assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, expected)
    torch._dynamo.reset()


def test_torch_compile_of_a_tiled_mlp_in_one_graph() -> None:
    model = causal_lm("llama", torch.float64)
    mlp = model.model.layers[0].mlp
    x = torch.randn(2, 13, HIDDEN, dtype=torch.float64, requires_grad=True)
    inputs = [x, *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x).pow(2).sum(), inputs)
    seqtile.apply(model, tile=5)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(x).pow(2).sum(), inputs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


class Counted(nn.Module):
    """Changes a dict before its module runs, as a hook that counts calls does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, {"calls": 0}

    def forward(self, x: Any) -> Any:
        self.calls["calls"] += 1
        return self.inner(x)


@pytest.mark.parametrize("settings", [{"blocks": "mlp"}, {"path": "generic"}, {"blocks": WHOLE_LAYER}], ids=str)
def test_torch_compile_in_one_graph_after_a_dict_has_changed(settings: dict[str, Any]) -> None:
    layer = causal_lm("llama", torch.float64).model.layers[0]
    seqtile.apply(layer, tile=5, **settings)
    x = torch.randn(2, 13, HIDDEN, dtype=torch.float64, requires_grad=True)
    for block in (layer.mlp, layer.post_attention_layernorm, layer.self_attn.q_proj):
        [expected] = torch.autograd.grad(block(x).pow(2).sum(), [x])
        compiled = torch.compile(Counted(block), backend="aot_eager", fullgraph=True)
        [got] = torch.autograd.grad(compiled(x).pow(2).sum(), [x])
        torch.testing.assert_close(got, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(("path", "tile"), [("generic", 20), ("fused", "shards:3")])
def test_torch_compile_takes_every_length_beside_another_model(path: str, tile: int | str) -> None:
    """From the second length on the compiler knows the length as a symbol; another model was compiled before."""
    other = causal_lm("llama", num_hidden_layers=1)
    torch.compile(other, backend="eager")(input_ids=tokens(length=7))
    model = causal_lm("llama", torch.float64, num_hidden_layers=1)
    batches = [tokens(length=length) for length in (13, 16, 23, 40)]
    expected = [gradients(model, ids)[1] for ids in batches]
    seqtile.apply(model, tile=tile, path=path, blocks="mlp")
    compiled = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=64):  # which counts what every other model here compiles
        for ids, truth in zip(batches, expected, strict=True):
            model.zero_grad()
            compiled(input_ids=ids, labels=ids).loss.backward()
            assert_same_gradients({name: p.grad for name, p in model.named_parameters()}, truth)


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"tile": 0}, ("option.malformed", "tile=0")),
        ({"tile": "memory:1KiB"}, ("tile.memory-too-small", "model.layers.0.mlp", "42,240 bytes")),
        ({"keep": 1.5}, ("option.malformed", "keep=1.5")),
        ({"path": "fast"}, ("option.unknown-choice", "path='fast'")),
    ],
)
def test_a_wrong_setting_changes_nothing(settings: dict, refusal: tuple[str, ...]) -> None:
    model = causal_lm("llama", torch.bfloat16)
    with refused(*refusal):
        seqtile.apply(model, **settings)
    assert _tiled(model) == 0


def test_fused_is_refused_where_it_does_not_apply() -> None:
    model = causal_lm("mixtral")
    with refused("path.fused-unsupported", "model.layers.0.mlp.experts"):
        seqtile.apply(model, path="fused")
    assert _tiled(model) == 0


def test_a_hook_added_later_sees_whole_calls_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It is custom code, which may keep a state."""
    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5)
    shapes: list[torch.Size] = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda m, args, out: shapes.append(out.shape))
    for _ in range(2):
        _, got = gradients(model, ids)
        assert_same_gradients(got, expected)
    assert shapes == [torch.Size((2, 13, INTERMEDIATE))] * 2
    told = [r.message for r in caplog.records if "model.layers.0.mlp runs untiled: function" in r.message]
    assert len(told) == 1 and "custom code" in told[0]


def test_a_hook_of_a_trusted_block_moves_it_to_the_generic_operator(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    report = seqtile.apply(model, tile=5, trust="*.mlp")
    assert {block.path for block in report.blocks} == {"fused"}
    gate = model.model.layers[0].mlp.gate_proj
    gate.register_forward_hook(lambda m, args, out: None)
    for _ in range(2):
        with rows_of(gate.weight) as rows:
            _, got = gradients(model, ids)
        assert_same_gradients(got, expected)
        assert rows[:6] == [5, 5, 4, 4, 4, 4]
    told = [r.message for r in caplog.records if "switched to the generic operator: gate_proj has hooks" in r.message]
    assert len(told) == 1 and "untiled" not in caplog.text


def test_keep_is_told_with_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    assert "gate and up saved: 0.5" in str(seqtile.apply(model, tile=5, keep=0.5))
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    assert "memory:2,147,483,648 bytes per block" in str(seqtile.apply(model, tile=5, keep="memory:4GiB"))
    assert "auto:0 bytes per block" in str(seqtile.apply(model, tile=5, keep="auto"))
    assert "except 2 blocks" in str(seqtile.apply(model, tile=5, keep=1.0, path="generic"))


def test_a_failed_second_apply_leaves_the_first() -> None:
    model = causal_lm("gemma2")
    seqtile.apply(model, tile=5)
    before = _attributes(model)
    for code, settings in (("tile.memory-too-small", {"tile": "memory:1KiB"}), ("only.no-match", {"only": "*.ffn"})):
        with refused(code):
            seqtile.apply(model.bfloat16(), **settings)
        after = _attributes(model)
        for name in ("forward", "_z3_leaf"):
            stood = {module: attributes[name] for module, attributes in before.items() if name in attributes}
            assert stood == {module: attributes[name] for module, attributes in after.items() if name in attributes}
            assert stood


def test_undo_reaches_under_accelerates_hooks() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    model, ids = causal_lm("llama", torch.float64), tokens()
    _, expected = gradients(model, ids)
    seqtile.apply(model, tile=5, blocks="mlp")
    mlp = model.model.layers[0].mlp
    add_hook_to_module(mlp, ModelHook())
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    assert seqtile.undo(model) == 2
    assert not isinstance(mlp._old_forward, Installed)
    _, got = gradients(model, ids)
    assert_same_gradients(got, expected)
    remove_hook_from_module(mlp)
    assert "tile=" not in str(model)


def test_data_parallel_replicas_are_refused() -> None:
    model = causal_lm("llama")
    seqtile.apply(model, tile=5)
    with pytest.raises(NotImplementedError, match="one process per device"):
        model.model.layers[0].mlp._replicate_for_data_parallel()
    seqtile.undo(model)
    model.model.layers[0].mlp._replicate_for_data_parallel()


def test_verify_leaves_every_attribute() -> None:
    model, ids = causal_lm("gemma2"), tokens()
    seqtile.apply(model, tile=5)
    before = _attributes(model), [len(module._forward_pre_hooks) for module in model.modules()]
    assert seqtile.verify(model, {"input_ids": ids, "labels": ids}).ok
    after = _attributes(model), [len(module._forward_pre_hooks) for module in model.modules()]
    assert after == before


@pytest.mark.parametrize(("rank", "records"), [(None, 1), ("0", 1), ("1", 0)])
def test_only_the_first_rank_speaks(
    rank: str | None, records: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
    seqtile.apply(causal_lm("llama"), tile=5)
    assert len([record for record in caplog.records if "tiled 2 of 2" in record.message]) == records


def test_heads_wider_than_a_flash_kernel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = causal_lm("qwen3", head_dim=512)
    assert any(
        "heads of size 512" in note and "[tokens, tokens]" in note for note in notes_of(model, True, monkeypatch)
    )
    assert any("heads of size 512" in note and "repeats keys" in note for note in notes_of(model, False, monkeypatch))
    assert not any("flash kernels" in note for note in notes_of(causal_lm("qwen3"), True, monkeypatch))


def notes_of(model: Any, shares_keys: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr("seqtile.checkpointing.keep_attention.sdpa_shares_keys", lambda width: shares_keys)
    return seqtile.apply(model).notes


def note_on_attention(report: Any) -> str:
    return next((note for note in report.notes if "checkpoint='attention-saved'" in note), "")


def test_the_report_prices_attention_saved_where_checkpoints_compute_it_again() -> None:
    model = causal_lm("qwen3", use_cache=False, max_position_embeddings=16384)
    report = seqtile.apply(model, tile=4096)
    assert not note_on_attention(report), "without checkpoints"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the name that all supported transformers have
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kept = 4 * (HEAD_DIM * 2 + 4)  # 4 heads in bf16, and 4 bytes each of the log-sum-exp
    assert f"{kept} bytes per token (bf16) in each of 2 layers" in note_on_attention(report)
    with torch.no_grad():
        model(input_ids=tokens(1, 8192))
    assert f"{2 * kept * 8192 / 2**30:,.2f} GiB" in note_on_attention(report)
    assert not note_on_attention(seqtile.apply(model, checkpoint="layer")), "whoever asked for it knows"
    assert not note_on_attention(seqtile.apply(model, checkpoint="attention-saved"))
    report = seqtile.apply(model, tile=16)
    with torch.no_grad():
        model(input_ids=tokens(1, 64))
    assert not note_on_attention(report), "short rows"
    eager = causal_lm("qwen3", use_cache=False, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        eager.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert not note_on_attention(seqtile.apply(eager))
