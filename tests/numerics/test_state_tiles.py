"""Layers with a state in tiles of the sequence against the same layers whole."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from numerics._states import FAMILIES, carrier_of, error, model_of, precision, results, tiled, whole
from seqtile.ops.tile_checkpoint import State, run_with_state
from seqtile.state import state_cache, tile_call
from seqtile.state.state_cache import CarriedState
from seqtile.state.tile_call import TileCall
from seqtile.tiling import state_tiles
from tiny_models import HIDDEN

ALL = [family for families in FAMILIES.values() for family in families]
ONE_EACH = [families[0] for families in FAMILIES.values()]
FAST = {"qwen3_5_text", "bamba", "lfm2_moe", "kimi_linear"}


def inputs(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randn(batch, tokens, HIDDEN, generator=torch.Generator().manual_seed(1), device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def module_of(family: str, part: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, dict[str, Any]]:
    """The first layer with a state, or its mixer, and the arguments that it wants besides."""
    model = model_of(family, dtype)
    name = getattr(carrier_of(model), part)
    module = model.get_submodule(name)
    wants = inspect.signature(type(module).forward).parameters if part == "mixer" else ("position_embeddings",)
    return module, {"position_embeddings": None} if "position_embeddings" in wants else {}


PARTS = [
    pytest.param(family, part, marks=[] if part == "whole" and family in FAST else [pytest.mark.slow])
    for family in ALL
    for part in ("whole", "mixer")
]


@pytest.mark.device
@pytest.mark.parametrize(("family", "part"), PARTS)
def test_tiles_that_hand_their_state_on_are_the_whole_layer(family: str, part: str) -> None:
    """Lengths that are no multiple of a kernel's chunk of 64, a first tile of two tokens, one to three rows.

    In float64 equal; in fp32 as near to that as the whole layer, some of whose gradients lose five digits.
    """
    exact, words = module_of(family, part, torch.float64)
    module, _ = module_of(family, part)
    for batch, sizes in ((1, (2, 67)), (2, (2, 2, 65, 20)), (3, (64, 33))):
        x = inputs(batch, sum(sizes))

        def both(module: nn.Module, x: Tensor, sizes: Sequence[int] = sizes) -> list[dict[str, Tensor]]:
            return [results(module, x, run) for run in (partial(whole, module, **words),
                                                        partial(tiled, module, sizes, **words))]  # fmt: skip

        with precision(torch.float64):
            truth, in_tiles = both(exact, x.double())
        assert error(in_tiles, truth) < 1e-12, (batch, sizes)
        untiled, in_tiles = both(module, x)
        for name, one in truth.items():
            own, got = (error({name: found[name].double()}, {name: one}) for found in (untiled, in_tiles))
            # Of the decays: a small difference of large numbers, which a cut inside a kernel's block of 64 rounds anew.
            factor = 4 if name.endswith(("A_log", "dt_bias")) else 2
            assert got < factor * own + 1e-5, (batch, sizes, name)


@pytest.mark.device
@pytest.mark.parametrize("family", ONE_EACH)
def test_padding_on_the_left_is_left_out(family: str) -> None:
    module, words = module_of(family, "whole", torch.float64)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :11] = 0
    with precision(torch.float64):
        x = inputs(2, 40, torch.float64)
        expected = results(module, x, lambda x: whole(module, x, attention_mask=mask, **words))
        got = results(module, x, lambda x: tiled(module, (9, 20, 11), x, attention_mask=mask, **words))
    assert error(got, expected) < 1e-12


@pytest.mark.device
@pytest.mark.parametrize("named", ["cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("family", ONE_EACH)
def test_a_packed_document_begins_without_a_state(family: str, named: str) -> None:
    module, words = module_of(family, "whole", torch.float64)
    lengths = (17, 1, 30, 2)
    if named == "seq_idx":
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        packed: dict[str, Any] = {"seq_idx": numbers[None]}
    else:
        starts = torch.tensor((0, *lengths)).cumsum(0).int()
        packed = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 30, "max_length_k": 30}
    call = TileCall((inputs(1, 50),), {**words, **packed}, ("cache", 9))
    assert call.documents == lengths
    cuts = state_tiles(call.tokens, call.batch, 8, call.documents)
    with precision(torch.float64):
        x = inputs(1, 50, torch.float64)

        def one_by_one(x: Tensor) -> Tensor:
            return torch.cat([whole(module, part, **words) for part in x.split(lengths, 1)], 1)

        got = results(module, x, lambda x: tiled(module, cuts, x, **words, **packed))
        assert error(got, results(module, x, one_by_one)) < 1e-12


@pytest.mark.device
@pytest.mark.parametrize("family", ONE_EACH)
def test_short_documents_share_a_call(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's collator makes a document of each token of padding: ``pad_to_multiple_of=64`` would be up to 63 calls."""
    module, words = module_of(family, "whole", torch.float64)
    lengths = (100, *[3] * 9, *[70] * 3, *[1] * 61)
    starts = torch.tensor((0, *lengths)).cumsum(0).int()
    calls, forward_of = [], tile_call.forward_of
    monkeypatch.setattr(tile_call, "forward_of", lambda module: calls.append(module) or forward_of(module))

    def one_by_one(x: Tensor) -> Tensor:
        return torch.cat([whole(module, document, **words) for document in x.split(lengths, 1)], 1)

    def in_tiles(x: Tensor) -> Tensor:
        call = TileCall((x,), {**words, "cu_seq_lens_q": starts}, ("cache", 9))
        cuts = state_tiles(call.tokens, call.batch, 2048, call.documents)
        return tiled(module, cuts, x, cu_seq_lens_q=starts, **words)

    with precision(torch.float64):
        x = inputs(1, sum(lengths), torch.float64)
        expected = results(module, x, one_by_one)
        calls.clear()
        assert error(results(module, x, in_tiles), expected) < 1e-12
    assert len(calls) == 2 * 5  # forward and recompute; 61 sequences of 64 tokens, to which kernels pad, are two calls


class _ReadByLayer:
    """A cache as a layer of transformers 5.8 to 5.20 reads it: in the list of its layers, of one state or by number."""

    def __init__(self, carried: CarriedState, numbered: bool) -> None:
        self._carried, self._numbered = carried, numbered

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        states = self._carried.layers[layer_idx].recurrent_states
        return states[state_idx] if self._numbered else states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        states = self._carried.layers[layer_idx].conv_states
        return states[state_idx] if self._numbered else states

    def is_recording_past(self, layer_idx: int) -> bool:
        return self._carried.layers[layer_idx].record_past

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carried, name)


@pytest.mark.parametrize("numbered", [False, True], ids=["one state", "by number"])
@pytest.mark.parametrize("family", ONE_EACH)
def test_a_layer_may_read_its_state_in_the_list_of_layers(
    family: str, numbered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, words = module_of(family, "whole", torch.float64)
    monkeypatch.setattr(state_cache, "numbers_states", lambda: numbered)
    monkeypatch.setattr(tile_call, "CarriedState", lambda tensors: _ReadByLayer(CarriedState(tensors), numbered))
    with precision(torch.float64):
        x = inputs(2, 40, torch.float64)
        expected = results(module, x, lambda x: whole(module, x, **words))
        got = results(module, x, lambda x: tiled(module, (13, 13, 14), x, **words))
    assert error(got, expected) < 1e-12


@pytest.mark.parametrize("numbered", [False, True], ids=["one state", "by number"])
def test_each_state_is_in_its_place_in_the_list_of_layers(numbered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_cache, "numbers_states", lambda: numbered)
    convolution, recurrent = torch.ones(1), torch.zeros(1)
    carried = CarriedState({("convolution", 0): convolution, ("recurrent", 0): recurrent})
    read = _ReadByLayer(carried, numbered)
    assert read.get_conv_state(3) is convolution and read.get_recurrent_state(3) is recurrent
    assert not read.is_recording_past(3)


def test_whether_transformers_numbers_its_states() -> None:
    """As its own cache has them."""
    layers = pytest.importorskip("transformers.cache_utils")
    if not hasattr(layers, "LinearAttentionLayer"):
        pytest.skip(f"transformers {transformers.__version__} has no cache for a state")
    own = layers.LinearAttentionLayer()
    own.update_conv_state(torch.ones(1, 2, 4))
    assert isinstance(own.conv_states, Tensor) != state_cache.numbers_states()


def test_no_tile_that_is_handed_a_state_is_one_token() -> None:
    for tokens in range(1, 40):
        for tile in range(2, 12):
            for documents in ((), (tokens, 1), (1, tokens, 3)):
                total = sum(documents) or tokens
                cuts = state_tiles(total, 1, tile, documents)
                assert sum(cuts.sizes) == total and max(cuts.sizes) <= tile + 1
                begins = {0, *cuts.begins}
                assert all(size > 1 or number in begins for number, size in enumerate(cuts.sizes))
                ends = [sum(cuts.sizes[:number]) for number in sorted(begins)]
                assert ends == [sum(documents[:number]) for number in range(len(documents or (1,)))]


@pytest.mark.parametrize("documents", [[1] * 61, [8] * 500, [300, 8, 8, 9, 9, 1, 1, 1, 700, 700, 64, 65, 65, 2049, 1]])
def test_equal_short_documents_are_one_tile(documents: list[int]) -> None:
    cuts = state_tiles(sum(documents), 1, 1024, documents)
    assert max(cuts.sizes) <= 1024 and max(cuts.documents.values()) <= 1024 // 64
    again: list[int] = []
    for number, size in enumerate(cuts.sizes):
        count = cuts.documents.get(number, 1)
        if number and number not in cuts.begins:
            assert count == 1
            again[-1] += size
        else:
            again += [size // count] * count
    assert again == documents and len(cuts.sizes) < len(documents)


# ---- what the comparison must notice ----


def not_handed_on(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    run = TileCall.run
    monkeypatch.setattr(TileCall, "run", lambda self, module, tiles, state, **_: run(self, module, tiles, ()))
    return (20, 20)


def gradient_dropped(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    run = TileCall.run

    def detached(self: TileCall, module: nn.Module, tiles: Any, state: Any, **_: Any) -> Any:
        return run(self, module, tiles, tuple(one.detach() for one in state))

    monkeypatch.setattr(TileCall, "run", detached)
    return (20, 20)


def one_token(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    return (20, 1, 19)


def written_in_place(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    def update(self: CarriedState, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        before = self.tensors.setdefault(("recurrent", state_idx), recurrent_states)
        return before.copy_(recurrent_states) if before is not recurrent_states else before

    monkeypatch.setattr(CarriedState, "update_recurrent_state", update)
    return (13, 13, 14)


@pytest.mark.parametrize("mutant", [not_handed_on, gradient_dropped, one_token, written_in_place])
def test_the_comparison_notices(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for family in ("bamba", "kimi_linear"):
        module, words = module_of(family, "whole")
        x = inputs(2, 40)
        expected = results(module, x, lambda x: whole(module, x, **words))  # noqa: B023
        with monkeypatch.context() as patch:
            sizes = mutant(patch)
            try:
                wrong = error(results(module, x, lambda x: tiled(module, sizes, x, **words)), expected)  # noqa: B023
            except RuntimeError:  # autograd's, or the checkpoint's
                wrong = float("inf")
            assert wrong > 1e-2, family
        assert error(results(module, x, lambda x: tiled(module, (20, 20), x, **words)), expected) < 1e-5  # noqa: B023


# ---- cost ----


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a checkpoint"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2_moe"])
def test_products_are_those_of_the_checkpointed_layer(family: str, around: bool) -> None:
    module, words = module_of(family, "whole")
    x = inputs(1, 2048)

    def products(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            results(module, x, run)
        return counter.get_total_flops()

    def tiles(x: Tensor) -> Tensor:
        return tiled(module, (512,) * 4, x, **words)

    untiled = products(lambda x: checkpoint(lambda x: whole(module, x, **words), x, use_reentrant=False))
    assert products((lambda x: checkpoint(tiles, x, use_reentrant=False)) if around else tiles) <= 1.01 * untiled


@pytest.mark.parametrize("around", [False, True], ids=["alone", "in a checkpoint"])
def test_only_input_and_states_wait_for_the_backward(around: bool) -> None:
    module, words = module_of("qwen3_5_text", "whole")
    x = inputs(1, 512).requires_grad_()
    waiting: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        waiting.append(tensor.untyped_storage().data_ptr())
        return tensor

    def tiles(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return tiled(module, (128,) * 4, x, **words)

    tiles(x) if not around else checkpoint(tiles, x, use_reentrant=False)
    assert {*waiting} == {x.untyped_storage().data_ptr()}


# ---- precision ----


@pytest.mark.device
@pytest.mark.parametrize("low", ["autocast", "bf16"])
def test_weight_gradients_are_as_near_to_fp32_as_the_whole_layers(low: str) -> None:
    """At 32 tiles: their sums are in fp32."""
    module, words = module_of("qwen3_5_text", "whole")
    x = inputs(1, 32 * 16)
    truth = results(module, x, lambda x: whole(module, x, **words))
    if low == "bf16":
        module, x = copy.deepcopy(module).bfloat16(), x.bfloat16()

    def distance(run: Any) -> dict[str, float]:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=low == "autocast"):
            found = results(module, x, run)
        return {name: float((found[name].float() - one).norm() / one.norm()) for name, one in truth.items()}

    got = distance(lambda x: tiled(module, (16,) * 32, x, **words))
    own = distance(lambda x: whole(module, x, **words))
    for name in truth.keys() - {"output", "input"}:
        assert got[name] < 1.15 * own[name] + 1e-3, (name, got[name], own[name])


@pytest.mark.device
def test_a_backward_can_be_run_twice() -> None:
    module, words = module_of("qwen3_5_text", "whole")
    x = inputs(2, 48).requires_grad_()
    y = tiled(module, (16, 16, 16), x, **words)
    first, second = (torch.autograd.grad(y.sum(), [x, *module.parameters()], retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


class Parked:
    """A tensor elsewhere, which every ``take`` brings back."""

    def __init__(self, tensor: Tensor) -> None:
        self.held = tensor.detach().clone()

    def take(self) -> Tensor:
        return self.held.clone()


def test_a_state_that_several_tiles_begin_with_is_parked_once() -> None:
    """Tiles 0, 1 and 2 go on from each other; 3 and 4 go on from tile 1, and 5 from nothing."""
    parked, announced = list[State](), list[int]()

    def park(state: State, states: int) -> list[Parked]:
        parked.append(state)
        announced.append(states)
        return [Parked(tensor) for tensor in state]

    def run(tiles: Sequence[Tensor], _: Any, state: State, index: int) -> tuple[Tensor, State]:
        before = state[0] if state else torch.zeros(1, 1, 3)
        output = torch.tanh(tiles[0] + before.square())
        return output, (output.sum(1, keepdim=True) + 0.1 * index,)

    def gradient(**settings: Any) -> Tensor:
        x = torch.linspace(-1, 1, 12 * 3).view(1, 12, 3).requires_grad_()
        output = run_with_state(run, [x], [2] * 6, begins=(3, 4, 5), continues={3: 1, 4: 1}, **settings)
        output.square().sum().backward()
        assert x.grad is not None
        return x.grad

    torch.testing.assert_close(gradient(park=park), gradient(), rtol=0, atol=0)
    assert len(parked) == 2 and announced == [2, 0]
