"""Estimate what a GPU will show: launches, FLOPs and bytes of every operation of one MLP layer, on fake tensors.

    python benchmarks/gpu_estimates.py                          # the tables of docs/gpu-estimates.md
    python benchmarks/gpu_estimates.py --tokens 131072 --list   # each operation of the fused layer

Nothing runs on a GPU here. A norm, a gated MLP and a residual under an activation checkpoint, forward and backward, all
weights trained, bf16, weight gradients summed in fp32 by the product. An operation that writes memory is one launch;
its time is the longer of its FLOPs and its bytes (every element read or written once) by the rates of ``RATES``, and at
least that of a launch. A compiled pointwise kernel of the fused operator counts as one, and so does a norm forward and
for its input's gradient; the gradient of its weight is two more, since it sums over the other dimension.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import seqtile
from block import ResidualLayer
from methods import install
from seqtile._compat import schema_of, storage_key
from seqtile.counting import count_live_bytes
from seqtile.counting.fake import fake_tensors, make_fake
from seqtile.counting.watch import Watch, name_of
from seqtile.ops import mlp_tile
from seqtile.ops.grad_accumulator import as_on_an_accelerator
from seqtile.ops.norm import BY_DEVICE, NormFormula, NormKernels
from seqtile.ops.pointwise import Activation, Eager, UseHidden, WriteGradient

HIDDEN, INTERMEDIATE = 4096, 14336
TILE = 8192
TOKENS = (8192, 32768, 131072, 262144)
METHODS = ("untiled", "tile-checkpoint", "generic", "fused")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True)
class Rates:
    """What is assumed of a device: guesses about one H200, none of them measured by this project.

    Attributes:
        products: bf16 matrix products, FLOP/s.
        products_into_fp32: the same where the product adds into fp32.
        memory: bytes/s.
        launch: seconds of the shortest operation.
    """

    products: float = 720e12
    products_into_fp32: float = 650e12
    memory: float = 4.3e12
    launch: float = 4e-6


RATES = Rates()


@dataclass
class Record:
    """What ran.

    Attributes:
        launches: operations that write memory.
        nbytes: that they read and write.
        flops: of matrix products.
        seconds: by :data:`RATES`.
        operations: (launches, bytes) by name.
        peak: bytes of live tensors at once, above input and weights.
    """

    launches: int = 0
    nbytes: int = 0
    flops: int = 0
    seconds: float = 0.0
    operations: dict[str, list[int]] = field(default_factory=dict)
    peak: int = 0

    def add(self, name: str, nbytes: int, flops: int = 0, rate: float = RATES.products) -> None:
        """Note one launch."""
        self.launches += 1
        self.nbytes += nbytes
        self.flops += flops
        self.seconds += max(RATES.launch, flops / rate, nbytes / RATES.memory)
        row = self.operations.setdefault(name, [0, 0])
        row[0] += 1
        row[1] += nbytes

    def see(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator that reached a kernel, if it writes memory."""
        name = name_of(func)
        reads, outputs = list(_tensors((args, kwargs.values()))), list(_tensors(result))
        there = {storage_key(one.untyped_storage()) for one in reads}
        known = all(storage_key(one.untyped_storage()) in there for one in outputs)
        is_view = known and not schema_of(func).is_mutable
        if not outputs or is_view or name.startswith(("aten::empty", "aten::new_empty", "aten::detach")):
            return
        if name in ("aten::copy_", "aten::zero_", "aten::fill_"):
            reads = reads[1:]  # what is overwritten is not read
        written = sum(_bytes(one) for one in outputs)
        nbytes = written + sum(_bytes(one) for one in reads if not any(one is other for other in outputs))
        flops, rate = 0, RATES.products
        if name in PRODUCTS:
            left = reads[-3 if kwargs.get("out") is not None else -2]
            flops = 2 * outputs[0].numel() * left.shape[-1]
            rate = RATES.products_into_fp32 if outputs[0].dtype != left.dtype else rate
            nbytes += outputs[0].nbytes if name == "aten::addmm" and kwargs.get("beta") != 0 else 0  # it is read too
        self.add(name, nbytes, flops, rate)


def _bytes(tensor: Tensor) -> int:
    """Bytes of its distinct elements: what is expanded is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)) or type(tree).__name__ == "dict_values":
        for branch in tree:
            yield from _tensors(branch)


class OneKernel(Eager):
    """The compiled kernels, of which nothing is run: one launch each over their buffers."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def forward(self, act: Activation, gate: Tensor, up: Tensor | None, out: Tensor) -> None:
        """See :meth:`Eager.forward`."""
        self.record.add("pointwise forward", gate.nbytes + out.nbytes + (0 if up is None else up.nbytes))

    def backward(
        self, act: Activation, gate: Tensor, up: Tensor | None, spare: Callable[[int], Tensor],
        use_hidden: UseHidden | None, write_gradient: WriteGradient | None,
    ) -> None:  # fmt: skip
        """See :meth:`Eager.backward`."""
        assert write_gradient is not None and up is not None
        gradient, hidden = spare(0), spare(1)
        write_gradient(gradient)
        self.record.add("pointwise backward", 2 * gate.nbytes + 2 * up.nbytes + gradient.nbytes + hidden.nbytes)
        if use_hidden is not None:
            use_hidden(hidden)


class OneNorm(NormKernels):
    """The same of a norm."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def forward(self, norm: NormFormula, x: Tensor, weights: Sequence[Tensor], out: Tensor) -> bool:
        """See :meth:`NormKernels.forward`."""
        self.record.add("norm forward", x.nbytes + out.nbytes + sum(weight.nbytes for weight in weights))
        return True

    def backward(
        self, norm: NormFormula, x: Tensor, dy: Tensor, weights: Sequence[Tensor], dx: Tensor | None,
        sums: Sequence[Tensor | None],
    ) -> bool:  # fmt: skip
        """See :meth:`NormKernels.backward`."""
        if dx is not None:
            self.record.add("norm backward", x.nbytes + dy.nbytes + dx.nbytes)
        for total in sums:
            if total is not None:
                self.record.add("norm weight gradient", x.nbytes + dy.nbytes)
                self.record.add("norm weight sum", 2 * total.nbytes)
        return True


@contextmanager
def _kernels(record: Record, *, norms: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(patch.object(mlp_tile, "pointwise_on", lambda device: OneKernel(record)))
        if norms:
            stack.enter_context(patch.dict(BY_DEVICE, cpu=OneNorm(record)))
        yield


def record_layer(method: str, tokens: int, hidden: int, intermediate: int, tile: int, *, norms: bool = True) -> Record:
    """One forward and backward of the layer, recorded.

    Args:
        method: one of :data:`METHODS`.
        tokens: of the row.
        hidden: width of the layer.
        intermediate: width of its MLP.
        tile: tokens per tile.
        norms: by kernels where the fused operator has them.
    """
    layer = ResidualLayer(hidden, intermediate, device="meta", dtype=torch.bfloat16)
    if method in ("fused", "generic"):
        seqtile.apply(layer, only=["mlp"], trust="*", tile=tile, path=method)
    else:
        install(layer, {"mlp": layer.mlp}, method, None, -(-tokens // tile))
    record = Record()
    with fake_tensors(), as_on_an_accelerator(), _kernels(record, norms=norms):
        make_fake(layer)
        x = torch.empty(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        with count_live_bytes("cpu") as live, Watch(record.see):
            output = checkpoint(layer, x, use_reentrant=False)
            torch.autograd.backward(output, torch.empty_like(output))
    record.peak = live.peak
    return record


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options.add_argument("--list", action="store_true", help="each operation of the fused layer")
    given = options.parse_args()
    print(f"Estimates on fake tensors, torch {torch.__version__}, {datetime.date.today()}; "
          f"{HIDDEN} x {INTERMEDIATE}, tiles of {TILE:,} tokens\n")  # fmt: skip
    print("| tokens | | ms | peak GiB | launches | GB read and written | TFLOP |\n|---|---|---|---|---|---|---|")
    layers = {}
    for tokens in given.tokens:
        for method in METHODS:
            found = record_layer(method, tokens, HIDDEN, INTERMEDIATE, TILE)
            print(row(tokens, method, found), flush=True)
            layers[tokens] = found
            if given.list and method == "fused":
                for name, (count, nbytes) in sorted(found.operations.items(), key=lambda item: -item[1][1]):
                    print(f"    {name}: {count}, {nbytes / 1e9:.1f} GB")
    print("\n| tokens | attention by | attention s | MLPs, their norms s | projections, head s | step s | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for tokens in given.tokens[1:3]:
        layer = layers[tokens]
        for kernel in ATTENTION:
            print(step_row(tokens, kernel, layer))


def row(tokens: int, method: str, found: Record) -> str:
    """A line of the first table."""
    return (f"| {tokens:,} | {method} | {1e3 * found.seconds:.1f} | {found.peak / 2**30:.1f} | {found.launches:,} | "
            f"{found.nbytes / 1e9:.1f} | {found.flops / 1e12:.0f} |")  # fmt: skip


LAYERS, VOCABULARY, PROJECTIONS = 32, 128256, 4096 * (4096 + 1024 + 1024 + 4096)
ATTENTION = {"FlashAttention-2": (400e12, 330e12), "cuDNN": (560e12, 470e12), "FlashAttention-3": (640e12, 540e12)}
"""FLOP/s forward and backward, guesses that decide the step."""


def step_row(tokens: int, kernel: str, layer: Record) -> str:
    """A line of the second table: a Llama-8B step in seconds, attention's output kept, one fused layer recorded."""
    forward, backward = ATTENTION[kernel]
    flops = 2 * tokens**2 * HIDDEN  # causal
    attention = LAYERS * (flops / forward + 2.5 * flops / backward)
    blocks = LAYERS * layer.seconds
    others = (LAYERS * 4 * PROJECTIONS + 3 * HIDDEN * VOCABULARY) * 2 * tokens / RATES.products
    whole = attention + blocks + others
    return (f"| {tokens:,} | {kernel} | {attention:.1f} | {blocks:.1f} | {others:.1f} | {whole:.1f} | "
            f"{tokens / whole:,.0f} |")  # fmt: skip


if __name__ == "__main__":
    main()
