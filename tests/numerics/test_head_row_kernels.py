"""The kernels over a tile of logits: what the compiler makes of them, and that they find what eager code finds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqtile
from numerics._compiled import BACKENDS, compiling, graphs
from numerics._errors import assert_no_worse
from seqtile.ops.kernels import Kernels
from seqtile.ops.lm_loss import row_kernels
from seqtile.ops.lm_loss.divergence import linear_divergence
from seqtile.ops.lm_loss.logits_tile import LogitScaling
from seqtile.ops.lm_loss.token_logprobs import HeadInput

SCRIPT = Path(__file__).parents[1] / "generated_kernels.py"
OTHER_ORDER = 32
"""A kernel sums a row in another order than eager code, which adds in pairs: its error may be so much larger."""


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="tells PyTorch 2.13's compiler that a GPU is there; its private names were others before",
)
def test_each_is_one_kernel_that_reads_a_row_once() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 28
    for line in lines:
        assert (line["kernels"], line["passes"], line["buffers"]) == (1, 1, 0), line
        if line["dtype"] == "float32":  # the interpreter cuts bf16 off where a device rounds
            assert line["error"] <= OTHER_ORDER * line["eager"], line


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    made = Kernels("language-model head")
    monkeypatch.setitem(row_kernels.KERNELS_BY_DEVICE, "cpu", made)
    with compiling(request.param, monkeypatch):
        yield made


TOKENS, HIDDEN, VOCABULARY = 70, 24, 301


def results(dtype: torch.dtype, compute: Any, *, all_count: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16().to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16().to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    if not all_count:
        labels[::7] = -100
    values = compute(hidden, weight, labels)
    sum(value.sum() for value in values.values()).backward()
    assert hidden.grad is not None and weight.grad is not None
    return {**{name: value.detach() for name, value in values.items()}, "dx": hidden.grad, "dw": weight.grad}


def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(0.5, 1.5, VOCABULARY)
    scaling = LogitScaling(softcap=20.0, temperature=0.8)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "class_weights": weights, "scaling": scaling}
    return {"loss": seqtile.linear_cross_entropy(hidden, weight, labels, tile=32, **options)}  # type: ignore[arg-type]


def scores(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    scored = seqtile.token_logprobs(hidden, weight, labels, temperature=0.7, entropy=True, tile=32)
    assert scored.entropy is not None
    return {"log_probs": scored.log_probs, "entropy": scored.entropy}


def divergence(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, Tensor]:
    teacher = seqtile.HeadInput(hidden.detach().flip(0), weight.detach())
    return {"jsd": seqtile.linear_divergence(hidden, weight, labels, teacher, beta=0.4, tile=32)}


@pytest.mark.parametrize(("compute", "made"), [(loss, 2), (scores, 3), (divergence, 3)])
@pytest.mark.parametrize("all_count", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_find_what_eager_code_finds(
    dtype: torch.dtype, all_count: bool, compute: Any, made: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = results(dtype, compute, all_count=all_count)
    assert graphs() == made, "one for each function, for tiles of every size"
    assert not kernels.failed
    monkeypatch.setitem(row_kernels.KERNELS_BY_DEVICE, "cpu", None)
    expected, true = (results(each, compute, all_count=all_count) for each in (dtype, torch.float64))
    assert graphs() == made
    for name, value in expected.items():
        assert_no_worse(got[name], value, true[name], factor=4.0 if dtype == torch.float32 else 1.5, name=name)


def test_an_annealed_temperature_compiles_nothing_again(kernels: Kernels) -> None:
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    labels, teacher = torch.zeros(TOKENS, dtype=torch.long), HeadInput(hidden, weight.detach().flip(0))
    compiled = []
    for temperature in (2.0, 1.9, 1.8):
        linear_divergence(hidden, weight, labels, teacher, beta=0.5, temperature=temperature, tile=32)
        compiled.append(len(kernels._kernels))
    assert compiled == [compiled[0]] * 3 and compiled[0]
