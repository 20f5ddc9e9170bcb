"""The recorder of operations: what it counts of a step, and that it agrees with what one GPU measured."""

import json

import pytest
import torch

from gpu_estimates import MEASURED, PRODUCTS, RATES, Record, estimate_measured, record_layer, record_loss, record_step
from methods import step_method
from seqtile._errors import UserError
from seqtile.planner.model_shapes import read_config

TINY = "benchmarks/data/tiny-llama"
TOKENS = 512


def products_of(record: Record) -> int:
    return sum(total.flops for name, total in record.operations.items() if name in PRODUCTS)


def untiled_products(layers: int) -> int:
    """By hand, all weights trained under a checkpoint per layer: a forward, a recompute, two products backward.

    The down projection is computed again too, which :func:`test_products_of_a_step_are_those_by_hand` takes off.
    """
    config = read_config(TINY)
    width, heads = config.hidden_size, config.num_attention_heads
    kv_width = config.num_key_value_heads * (width // heads)
    weights = 2 * width * width + 2 * width * kv_width + 3 * width * config.intermediate_size
    return 2 * TOKENS * (4 * layers * weights + 3 * width * config.vocab_size)


def test_products_of_a_step_are_those_by_hand() -> None:
    # PyTorch's checkpoint stops early: the last product of each recompute is left out.
    config = read_config(TINY)
    last = 2 * TOKENS * config.hidden_size * config.intermediate_size
    assert products_of(record_step("transformers", TOKENS, 2, 0, model=TINY)) == untiled_products(2) - 2 * last


@pytest.mark.parametrize("method", ["liger", "seqtile"])
def test_no_method_without_tiled_recompute_has_more_products(method: str) -> None:
    assert products_of(record_step(method, TOKENS, 1, 0, model=TINY)) == products_of(
        record_step("transformers", TOKENS, 1, 0, model=TINY)
    )


def test_kernels_that_cannot_run_here_are_counted() -> None:
    liger = record_step("liger", TOKENS, 1, 0, model=TINY).operations
    assert {name for name in liger if name.startswith("liger")} == {
        "liger rope", "liger rms_norm", "liger rms_norm backward", "liger rms_norm weight sum", "liger swiglu",
        "liger swiglu backward", "liger cross_entropy",
    }  # fmt: skip
    config = read_config(TINY)
    assert liger["liger cross_entropy"].nbytes == 3 * 2 * TOKENS * config.vocab_size
    assert liger["liger rope"].launches == 3  # forward, recompute, backward

    ours = record_step("seqtile", TOKENS, 1, 0, model=TINY).operations
    logits = 2 * TOKENS * config.vocab_size
    assert logits <= ours["compiled write_losses"].nbytes < 1.1 * logits  # read once
    assert 2 * logits <= ours["compiled write_gradient"].nbytes < 2.2 * logits  # read, and written over
    assert ours["compiled rotary"].launches == 6  # queries and keys: forward, recompute, backward
    assert "compiled norm_forward" in ours

    layer = record_layer("fused", 2048, 256, 512, 512)
    gate = 2 * 512 * 512  # bytes of one tile's gate
    forward, backward = layer.operations["compiled _forward_kernel"], layer.operations["compiled _backward_kernel"]
    assert (forward.launches, forward.nbytes) == (4, 4 * 3 * gate)
    assert (backward.launches, backward.nbytes) == (4, 4 * 6 * gate)  # gate, up and gradient in, three buffers out


def test_a_loss_is_three_products_and_three_passes() -> None:
    product, logits = 2 * TOKENS * 128 * 4096, 2 * TOKENS * 4096
    for way in ("full logits", "liger", "seqtile"):
        assert products_of(record_loss(way, TOKENS, 128, 4096)) == 3 * product
    for way, kernel in (("liger", "liger"), ("seqtile", "compiled")):
        operations = record_loss(way, TOKENS, 128, 4096).operations
        passes = sum(total.nbytes for name, total in operations.items() if name.startswith(kernel))
        assert 3 * logits <= passes < 3.1 * logits


def test_attention_saved_runs_one_forward_a_layer() -> None:
    forwards = [
        next(total.launches for name, total in step.operations.items() if name.endswith("attention_for_cpu"))
        for step in (record_step(method, TOKENS, 2, 4, model=TINY) for method in ("seqtile", "seqtile+attention-saved"))
    ]
    assert forwards == [4, 2]


def test_what_an_operation_reads_and_writes() -> None:
    x, index = torch.zeros(64, 32), torch.zeros(8, dtype=torch.long)
    record = Record()
    cases = [
        (torch.ops.aten.exp_.default, (x,), {}, x, 2 * x.nbytes),
        (torch.ops.aten.copy_.default, (x, torch.zeros(64, 32)), {}, x, 2 * x.nbytes),
        (torch.ops.aten.mul.out, (x, x), {"out": (out := torch.zeros(64, 32))}, out, 3 * x.nbytes),
        (torch.ops.aten.embedding.default, (x, index), {}, torch.zeros(8, 32), 2 * 8 * 32 * 4 + index.nbytes),
        (torch.ops.aten.view.default, (x, [32, 64]), {}, x.view(32, 64), 0),
    ]
    for operator, args, kwargs, result, expected in cases:
        before = record.nbytes
        record.see(operator, args, kwargs, result)
        assert record.nbytes - before == expected, operator
    assert record.launches == 4
    assert record.seconds == 4 * RATES.launch


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(UserError, match="attention-savd"):
        step_method("seqtile+attention-savd")
    with pytest.raises(UserError, match="liger"):
        step_method("liger+offload")


ROWS = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
HOST_BOUND = [row for row in ROWS if row["method"] == "generic" and row.get("train") == "lora"]
"""A layer of 114 ms whose operations take 83: the device waits for Python, of which the recorder counts nothing."""


# Whole steps of ours are of the commit that was measured: later ones run other kernels.
@pytest.mark.parametrize(
    "row",
    [
        row
        for row in ROWS
        if row["tokens"] == 32768
        and row not in HOST_BOUND
        and "seqtile" not in row["method"]
        and row.get("layers") != 2
    ],
    ids=lambda row: f"{row['kind']}-{row['method']}-{row.get('lora', row.get('train'))}",
)
def test_measured_rows_are_within_a_tenth(row: dict[str, float]) -> None:
    estimate = estimate_measured(row)
    assert 1e3 * estimate.seconds == pytest.approx(row["step_ms"], rel=0.1)
    assert estimate.peak / 2**30 == pytest.approx(row["peak_gib"], rel=0.1)
