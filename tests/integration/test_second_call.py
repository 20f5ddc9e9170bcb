"""Two of seqtile's entry points on one model, in either order: a second call replaces only what it asks for.

What counts is what ran: rows of products, heads of attention's kernel, tensors on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import axolotl_standin
import seqtile
from numerics.test_effects import layer_inputs
from refusals import refused
from seqtile import host_weights
from seqtile.blocks.instance import installed_forwards
from seqtile.blocks.layer import TiledLayer
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.engines.zero3 import is_marked
from seqtile.fitting import Choice, apply_choice, choose_for
from seqtile.host_weights import installed_host_weights
from seqtile.install.apply import apply_options, carries
from seqtile.integrations import unsloth
from seqtile.integrations.ms_swift import make_callback
from seqtile.integrations.trl import tile_trainer
from seqtile.options import TilingOptions
from seqtile.state import state_layers
from zoo import HIDDEN, INTERMEDIATE, VOCABULARY, assert_same_gradients, causal_lm, tokens

BATCH, LENGTH = 2, 24
BLOCK, HEAD, STATE, MODULE = 5, 6, 7, 3  # rows of a tile of each
CONV = 3 * HIDDEN  # width of the product that only the layer with a convolution has


def build() -> nn.Module:
    """A layer with a convolution's state and one with attention, frozen, with adapters that train."""
    model = causal_lm("lfm2", use_cache=False, attn_implementation="sdpa")
    adapters = LoraConfig(r=2, target_modules=["q_proj", "w2"], task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, adapters)


class Ran(TorchDispatchMode):
    """Rows of the products by the width of their result, and the query heads of attention's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, set[int]] = {}
        self.heads: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if "_scaled_dot_product" in name and "backward" not in name:
            self.heads.add(args[0].shape[1])
        if name in ("aten::mm", "aten::addmm", "aten::bmm"):
            width = result.shape[-1]
            self.rows.setdefault(width, set()).add(result.numel() // width)
        return result


def step(model: nn.Module) -> tuple[set[str], dict[str, Tensor | None]]:
    """The effects of one step, and its gradients."""
    ids = tokens(BATCH, LENGTH)
    model.zero_grad()
    with Ran() as ran, layer_inputs(model) as on_device:
        loss = model.train()(input_ids=ids, labels=ids).loss
        alive = on_device()
        loss.backward()
    [policy] = installed_checkpointing(model) or [None]
    [weights] = installed_host_weights(model) or [None]
    effects = {
        "blocks": BLOCK in ran.rows[INTERMEDIATE],
        "module": MODULE in ran.rows[INTERMEDIATE],
        "loss": max(ran.rows[VOCABULARY]) <= HEAD,
        "heads": max(ran.heads) < 4,
        "state": max(ran.rows[CONV]) <= BATCH * STATE,
        "saved": policy is not None and policy.attention is not None and policy.attention.saved > 0,
        "offload": alive == 0,
        "weights": weights is not None and weights.stream is not None and weights.stream.fetched_bytes > 0,
    }
    return {name for name, acted in effects.items() if acted}, {name: p.grad for name, p in model.named_parameters()}


def apply(**settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: seqtile.apply(model, **{"blocks": "none", **settings})


def trainer_is_built(model: nn.Module, callback: Any) -> None:
    callback.on_init_end(None, None, None, model=model)


def last_mlp(model: nn.Module) -> nn.Module:
    """Of the layer with attention; the other one runs in tiles as a whole where its state does."""
    return model.get_submodule("base_model.model.model.layers.1.feed_forward")


@functools.cache
def chosen() -> Choice:
    """What ``fit`` chooses, which takes seconds."""
    options = TilingOptions(tile=BLOCK, loss_tile=HEAD)
    return choose_for(build(), options, given=["keep"], max_length=LENGTH, batch=BATCH, device="8GiB")


def axolotl(model: nn.Module) -> None:
    from seqtile.integrations.axolotl import SeqtilePlugin

    SeqtilePlugin().post_model_load(axolotl_standin.DictDefault(seqtile={"tile": BLOCK}), model)


ENTRIES: dict[str, tuple[Callable[[nn.Module], Any], set[str]]] = {
    "blocks": (lambda model: seqtile.apply(model, tile=BLOCK, path="generic"), {"blocks"}),
    "loss": (apply(loss="tiled", loss_tile=HEAD), {"loss"}),
    "attention-saved": (apply(checkpoint="attention-saved"), {"saved"}),
    "offload": (apply(offload=True), {"offload"}),
    "weights": (apply(offload="weights"), {"weights"}),
    "heads": (apply(heads=1), {"heads"}),
    "state": (apply(state=STATE), {"state"}),
    "fit": (lambda model: apply_choice(model, chosen()), {"blocks", "loss"}),
    "tile_trainer": (lambda model: tile_trainer(SimpleNamespace(model=model), loss_tile=HEAD), {"loss"}),
    "tile_module": (lambda model: seqtile.tile_module(last_mlp(model), tile=MODULE), {"module"}),
    "callback": (lambda model: trainer_is_built(model, seqtile.TilingCallback(tile=BLOCK)), {"blocks"}),
    "ms-swift": (lambda model: trainer_is_built(model, make_callback(None, None, tile=BLOCK)), {"blocks"}),
    "axolotl": (axolotl, {"blocks"}),
    "patch_tiled_mlp": (
        lambda model: unsloth.patch_tiled_mlp(model, f"shards:{-(-BATCH * LENGTH // BLOCK)}"), {"blocks"}
    ),
}  # fmt: skip
"""What is called, and the effects that it has alone."""


@pytest.fixture(autouse=True)
def with_axolotl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    axolotl_standin.install(monkeypatch)
    yield


@functools.cache
def expected() -> dict[str, Tensor | None]:
    effects, gradients = step(build())
    assert effects == set()
    return gradients


@pytest.mark.parametrize("first", ENTRIES)
def test_both_stay_in_either_order(first: str) -> None:
    call, own = ENTRIES[first]
    alone = build()
    call(alone)
    ran, _ = step(alone)
    assert ran == own
    for second, (call_second, others) in ENTRIES.items():
        model = build()
        call(model)
        call_second(model)
        ran, gradients = step(model)
        stays = own & {"module"} if second == "fit" else own  # fit chooses all that apply can set
        assert ran == stays | others, second
        assert_same_gradients(gradients, expected())
        seqtile.undo(model)
        assert not carries(model), second


# ---- a refused call changes nothing ----

ALL: dict[str, Any] = dict(
    tile=BLOCK, path="generic", loss="tiled", loss_tile=HEAD, checkpoint="attention-saved", offload=True, heads=1,
    state=STATE,
)  # fmt: skip


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module, hooks one by one, and where the weights are."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            state[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
        if isinstance(forward := module.__dict__.get("forward"), TiledLayer):
            state[f"{name}.attention"] = forward.attention
    return state | {name: weight.data_ptr() for name, weight in model.named_parameters()}


def reentrant(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})  # type: ignore[operator]


def no_pinned_memory(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(host_weights, "_pinned", fail)


def no_host_memory(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_weights, "available_host_bytes", lambda: 1)


def no_state(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_layers, "find_carriers", lambda model: iter(()))


def broken(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(state_layers, "mark_leaf", fail)


def eager(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model.set_attn_implementation("eager")  # type: ignore[operator]


REFUSALS: dict[str, tuple[dict[str, Any], Any]] = {
    "a tile too small": (dict(tile="memory:1KiB"), None),
    "no such block": (dict(only="*.ffn", loss="tiled"), None),
    "no such block to trust": (dict(trust="*.ffn", offload="weights"), None),
    "nothing to do": (dict(blocks="none"), None),
    "too many heads": (dict(heads=9, tile=3), None),
    "a kernel that the head does not take": (dict(loss="tiled", loss_impl="unknown"), None),
    "attention-saved without a kernel": (dict(checkpoint="attention-saved", loss="tiled"), eager),
    "attention-saved, reentrant": (dict(tile=3, checkpoint="attention-saved", loss="tiled"), reentrant),
    "no room on the host": (dict(tile=3, heads=2, offload="weights", loss="tiled"), no_host_memory),
    "no pinned memory": (dict(tile=3, state=3, offload="checkpoints+weights"), no_pinned_memory),
    "no state": (dict(tile=3, state=3, heads=2, offload="weights", loss="tiled"), no_state),
    "an error of ours": (dict(tile=3, state=3, heads=2, offload="weights", loss="tiled"), broken),
    "heads for standing blocks": (dict(blocks="none", heads=2, state=3, offload="weights"), broken),
    "state for standing blocks": (dict(blocks="none", state=3, offload="weights"), broken),
}


@pytest.mark.parametrize("others_stay", [True, False])
@pytest.mark.parametrize(
    ("refusal", "weights"),
    [(name, where) for name, (_, spoil) in REFUSALS.items() for where in ("device", "host")
     if where == "device" or spoil not in (no_host_memory, no_pinned_memory)],
)  # fmt: skip
def test_a_refused_call_changes_nothing(
    refusal: str, weights: str, others_stay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, spoil = REFUSALS[refusal]
    standing = {**ALL, "offload": "checkpoints+weights" if weights == "host" else True}
    if spoil is reentrant:  # which attention-saved would refuse
        standing["checkpoint"] = "layer"
    model = build()
    seqtile.apply(model, **standing)
    if spoil is not None:
        spoil(model, monkeypatch)
    before = snapshot(model)
    with pytest.raises((seqtile.UserError, KeyError)):
        apply_options(model, TilingOptions(**settings), others_stay=others_stay)
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert not [name for name in before if not same(before[name], after[name])]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
    return one is other or (isinstance(one, int) and one == other)


def chunked(model: nn.Module) -> None:
    """Chunks whose guard hangs on the module around the layers, and a hook of accelerate's over a tiled forward."""
    seqtile.apply(model, tile=BLOCK, loss="tiled", chunk=8, segment=2)
    add_hook_to_module(last_mlp(model), ModelHook())


def test_a_refused_call_leaves_hooks_and_forwards_under_them() -> None:
    model, untouched = build(), build()
    chunked(model)
    chunked(untouched)
    before = snapshot(model)
    with refused("tile.memory-too-small"):
        seqtile.apply(model, tile="memory:1B")
    after = snapshot(model)
    assert not [name for name in before if not same(before[name], after[name])]
    assert_same_gradients(step(model)[1], step(untouched)[1])
    seqtile.undo(model)
    assert not installed_forwards(model)


@pytest.mark.parametrize("weights", [False, True])
def test_verify_leaves_what_stands(weights: bool) -> None:
    model = build()
    if weights:
        seqtile.apply(model, tile=BLOCK, loss="tiled", heads=1, state=STATE, offload="checkpoints+weights")
        step(model)  # after it nothing is watched any more
    else:
        chunked(model)
    before = snapshot(model)
    ids = tokens(BATCH, LENGTH)
    for settings in ({}, {"tile": MODULE}):
        assert seqtile.verify(model, {"input_ids": ids, "labels": ids}, **settings)
        after = snapshot(model)
        assert not [name for name in before if not same(before[name], after[name])], settings
    assert bool(installed_host_weights(model)) == weights


@pytest.mark.parametrize(("second", "code"), [
    ({"chunk": 8}, "chunk.with-keep"), ({"checkpoint": "attention-saved"}, "chunk.bounded-twice"),
    ({"keep": 0.5}, "chunk.with-keep"),
])  # fmt: skip
def test_two_calls_are_refused_as_one_would_be(second: dict[str, Any], code: str) -> None:
    first = {"checkpoint": "attention-saved", "keep": 0.5} if "chunk" in second else {"chunk": 8}
    model = build()
    seqtile.apply(model, **first)
    before = snapshot(model)
    blocks = {} if "keep" in second else {"blocks": "none"}
    with refused(code):
        seqtile.apply(model, **blocks, **second)
    after = snapshot(model)
    assert not [name for name in before if not same(before[name], after[name])]


def test_layers_stay_marked_for_zero3_when_another_technique_comes_off() -> None:
    expected, model = build(), build()
    seqtile.apply(expected, tile=BLOCK, state=STATE)
    seqtile.apply(model, tile=BLOCK, chunk=8)
    seqtile.apply(model, blocks="none", state=STATE)
    marked = [[name for name, module in one.named_modules() if is_marked(module)] for one in (expected, model)]
    assert marked[0] == marked[1] and len(marked[0]) > 1
