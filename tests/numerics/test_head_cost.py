"""What the tiled head costs: matrix products and live bytes, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from numerics._births import births
from numerics._heads import IGNORE, TILED, inputs, twin
from seqtile.counting.fake import fake_tensors
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import count_products
from seqtile.ops.lm_loss import row_kernels
from seqtile.ops.lm_loss.token_logprobs import token_logprobs

TOKENS, HIDDEN, VOCABULARY = 200, 24, 168
TRAINED = 160
"""Of the tokens of ``inputs``, every fifth is ignored."""
MIB = 2**20


def _units(function: Callable[..., Tensor], given: dict[str, Tensor], **kwargs: Any) -> float:
    with count_products() as products:
        loss = function(**given, **kwargs)
        if loss.requires_grad:
            loss.sum().backward()
    return products.units(TRAINED, HIDDEN, VOCABULARY)


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_matrix_products(count: int) -> None:
    tile = f"shards:{count}"
    for settings, units in (({}, 3), ({"reduction": "sum", "label_smoothing": 0.1}, 3), ({"reduction": "none"}, 4)):
        assert _units(TILED, inputs(TOKENS, HIDDEN, VOCABULARY), tile=tile, **settings) == units
    for frozen, units in (("weight", 2), ("hidden", 2)):
        given = inputs(TOKENS, HIDDEN, VOCABULARY, bias=False)
        given[frozen].requires_grad_(False)
        assert _units(TILED, given, tile=tile) == units
    with torch.no_grad():
        assert _units(TILED, inputs(TOKENS, HIDDEN, VOCABULARY), tile=tile) == 1
    assert _units(twin, inputs(TOKENS, HIDDEN, VOCABULARY)) == 3 * TOKENS / TRAINED


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize(("reduction", "units"), [("mean", 3), ("none", 4)])
def test_an_activation_checkpoint_around_it_computes_nothing_again(count: int, reduction: str, units: int) -> None:
    def loss(hidden: Tensor, **rest: Tensor) -> Tensor:
        return TILED(hidden * 1.5, **rest, tile=f"shards:{count}", reduction=reduction)

    def checkpointed(**given: Tensor) -> Tensor:
        return checkpoint(loss, **given, use_reentrant=False)

    assert _units(checkpointed, inputs(TOKENS, HIDDEN, VOCABULARY)) == units
    given, again = inputs(TOKENS, HIDDEN, VOCABULARY), inputs(TOKENS, HIDDEN, VOCABULARY)
    loss(**given).sum().backward()
    checkpointed(**again).sum().backward()
    for name in ("hidden", "weight", "bias"):
        assert torch.equal(given[name].grad, again[name].grad)  # type: ignore[arg-type]


def test_no_tensor_has_the_tokens_and_the_vocabulary() -> None:
    for reduction in ("mean", "none"):
        given = inputs(TOKENS, HIDDEN, VOCABULARY)
        with births() as born:
            TILED(**given, tile=32, reduction=reduction).sum().backward()
        assert not [shape for shape in born.shapes if TOKENS in shape and VOCABULARY in shape]
        assert (32, VOCABULARY) in born.shapes  # the tiles
    with births() as born:
        twin(**inputs(TOKENS, HIDDEN, VOCABULARY)).backward()
    assert (TOKENS, VOCABULARY) in born.shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [2, 8])
def test_the_peak_is_one_tile_of_logits_and_the_gradients(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, hidden, vocabulary = 2048, 32, 4096
    monkeypatch.setitem(row_kernels.BLOCK_ELEMENTS, "cpu", 16 * vocabulary)
    given = inputs(tokens, hidden, vocabulary, dtype=dtype, bias=False)
    size = dtype.itemsize
    trained = int((given["labels"] != IGNORE).sum())
    tile = trained // count * vocabulary * size
    # the states' gradient; the head's, and where it is of low precision its fp32 sum beside it
    gradients = tokens * hidden * size + vocabulary * hidden * (size + (4 if size == 2 else 0))
    blocks = 3 * 16 * vocabulary * 4
    per_token = 8 * 8 * tokens
    with count_live_bytes() as live:
        TILED(**given, tile=f"shards:{count}").backward()
    assert tile < live.peak <= tile + gradients + blocks + per_token
    given = inputs(tokens, hidden, vocabulary, dtype=dtype, bias=False)
    with count_live_bytes() as live:
        twin(**given).backward()
    assert live.peak >= tokens * vocabulary * (8 if size == 4 else 10)  # what plain PyTorch holds


def test_nothing_but_gradients_is_left_between_forward_and_backward() -> None:
    given = inputs(TOKENS, HIDDEN, VOCABULARY, bias=False)
    with births() as born:
        loss = TILED(**given, tile=32)
        left = born.alive(loss)
    large = [shape for shape in left if sum(shape) > 1]
    assert large == sorted([(TOKENS, HIDDEN), (VOCABULARY, HIDDEN)])
    with births() as born:
        loss = TILED(**given, tile=32, reduction="none")
        left = born.alive(loss)
    assert all(len(shape) <= 1 for shape in left), left  # a log-normaliser per token


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trained", [0, 1, 31, 32, 33, 100, TOKENS])
def test_only_tokens_that_count_are_computed(trained: int, reduction: str) -> None:
    """In tiles of equal work, whichever tokens they are."""
    given = inputs(TOKENS, HIDDEN, VOCABULARY, bias=False)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    labels = torch.full((TOKENS,), IGNORE)
    labels[order[:trained]] = torch.arange(trained) % VOCABULARY
    given["labels"] = labels
    with count_products() as products:
        TILED(**given, tile=32, reduction=reduction).sum().backward()
    units = 3 if reduction == "mean" else 4
    if trained:
        assert products.flops == units * 2 * trained * HIDDEN * VOCABULARY
    else:
        with pytest.raises(RuntimeError, match="no matrix product"):
            _ = products.flops
    assert all(given[name].grad is not None for name in ("hidden", "weight"))  # nothing to train is still a gradient
    with births() as born:
        TILED(**given, tile=32, reduction=reduction)
    tiles = {shape[0] for shape in born.shapes if len(shape) == 2 and shape[1] == VOCABULARY and shape[0] != HIDDEN}
    assert max(tiles, default=0) <= 32 and (trained != 33 or 17 in tiles)


class _HostReads(TorchFunctionMode):
    """Notes every call that waits for a device to hand numbers or sizes over."""

    WAITS = ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy", "nonzero", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.WAITS or name == "__getitem__" and _is_mask(args[1]):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _is_mask(key: Any) -> bool:
    return any(
        isinstance(one, Tensor) and one.dtype == torch.bool for one in (key if isinstance(key, tuple) else (key,))
    )


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"num_items": 7}, {"z_loss": 0.1}, {"impl": "native"}])
def test_the_host_waits_once(options: dict[str, Any]) -> None:
    given = inputs(TOKENS, HIDDEN, VOCABULARY)
    with _HostReads() as reads:
        TILED(**given, tile=32, **options).sum().backward()
    assert reads.seen == ["cpu", "tolist"]  # the second one of a tensor that is on the host
    given["targets"] = given.pop("labels")
    with _HostReads() as reads:
        token_logprobs(
            **given, tile=32, entropy=True, argmax=True, top_k=3, top_log_probs=2, temperature=0.7,
            candidates=torch.zeros(TOKENS, 2, dtype=torch.long), reference=given["hidden"],
        ).log_probs.sum().backward()  # fmt: skip
    assert reads.seen == ["cpu", "tolist"]  # the second one of a tensor that is on the host


def test_fake_tensors_count_every_token() -> None:
    """They have no labels to look at: the upper bound."""
    given = inputs(TOKENS, HIDDEN, VOCABULARY, bias=False)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(tensor) for name, tensor in given.items()}
        with count_products() as products:
            TILED(**fake, tile=32).backward()
    assert products.units(TOKENS, HIDDEN, VOCABULARY) == 3


def test_a_plan_of_a_large_vocabulary_runs_one_block_of_rows_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU a vocabulary of 262,144 has four rows in a block: a plan of 32,768 tokens ran 8,192 of them."""
    monkeypatch.setitem(row_kernels.BLOCK_ELEMENTS, "cpu", 4 * VOCABULARY)
    given = inputs(TOKENS, HIDDEN, VOCABULARY, bias=False)
    heights: list[int] = []
    run = lambda _, y: heights.append(len(y))  # noqa: E731
    with fake_tensors():
        row_kernels.run_over_rows(run, None, [torch.empty(TOKENS, HIDDEN)])
    assert heights == [4 * VOCABULARY // HIDDEN]
    heights.clear()
    with FakeTensorMode() as mode:  # a tracer's
        row_kernels.run_over_rows(run, None, [mode.from_tensor(given["hidden"])])
    assert sum(heights) == TOKENS and len(heights) > 1


def test_scores_cost_four_products_whatever_is_asked() -> None:
    given = inputs(TOKENS, HIDDEN, VOCABULARY)
    given["targets"] = given.pop("labels")
    with count_products() as products:
        scores = token_logprobs(**given, tile=32, entropy=True, argmax=True, top_k=5)
        (scores.log_probs.sum() + scores.entropy.sum()).backward()  # type: ignore[union-attr]
    assert products.units(TOKENS, HIDDEN, VOCABULARY) == 4 * TRAINED / TOKENS
    with torch.no_grad(), count_products() as products:
        token_logprobs(**given, tile=32, entropy=True, argmax=True, top_k=5)
    assert products.units(TRAINED, HIDDEN, VOCABULARY) == 1
