"""What PyTorch's compiler makes for a GPU, without one: its Triton code, counted, and run by Triton's interpreter.

    python tests/generated_kernels.py

Prints a line of JSON for each function of a tile of logits: kernels, passes over a row, buffers beside the arguments
and, where it ran, the largest errors of kernel and eager code to float64. A process of its own, since it tells the
compiler that an H100 is there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported

import torch
import triton.language as tl
from torch import Tensor
from torch._inductor import async_compile, config
from torch._inductor.fx_passes import post_grad
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import run_and_get_code
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from seqtile.ops.lm_loss import divergence, row_kernels
from seqtile.ops.lm_loss.logits_tile import LogitScaling, RowFormula

ROWS, VOCABULARY = 5, 3000
REDUCTION, POINTWISE = {"XBLOCK": 2, "R0_BLOCK": 512}, {"XBLOCK": 1024}
H100 = DeviceProperties(
    type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, warp_size=32,
)  # fmt: skip


class Driver:
    """Of an H100 that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


class Functions:
    """Of CUDA's libdevice, which the interpreter does not know."""

    @staticmethod
    def exp(x: Any) -> Any:
        return tl.exp(x)

    @staticmethod
    def log1p(x: Any) -> Any:
        return tl.log(1 + x)

    @staticmethod
    def tanh(x: Any) -> Any:
        return 2 * tl.sigmoid(2 * x) - 1


class Interpreted:
    """A generated kernel, run by Triton's interpreter."""

    def __init__(self, name: str, source: str, folder: Path) -> None:
        start, end = source.index("@triton_heuristics"), source.index("@triton.jit")
        path = folder / f"{name}.py"  # of which the interpreter reads the source
        path.write_text(source[:start].replace("triton_helpers.set_driver_to_cpu()", "") + source[end:])
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.libdevice = Functions
        self.kernel, self.sizes = getattr(module, name), dict(REDUCTION if "R0_BLOCK" in source else POINTWISE)

    def run(self, *arguments: Any, stream: Any) -> None:
        rows = arguments[-2] if "R0_BLOCK" in self.sizes else arguments[-1]
        self.kernel[(-(-rows // self.sizes["XBLOCK"]),)](*arguments, **self.sizes)


@contextmanager
def compiled_for_a_gpu() -> Iterator[None]:
    """Inside, torch.compile makes the kernels of an H100, and they run on the CPU's tensors."""
    driver.set_active(Driver())
    with TemporaryDirectory() as folder, mock.patch.multiple(
        async_compile.AsyncCompile, triton=lambda _, name, source, **__: Interpreted(name, source, Path(folder))
    ), mock.patch.object(DeviceProperties, "create", classmethod(lambda *_: H100)), mock.patch.object(
        post_grad, "prepare_softmax_extra_check", lambda _: True  # it looks for a device of type cuda
    ), mock.patch.object(triton_helpers, "libdevice", Functions), config.patch(
        cpu_backend="triton", fx_graph_cache=False
    ):  # fmt: skip
        yield


def normaliser_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    top = logits.amax(-1)
    return top, (logits - top.unsqueeze(-1)).logsumexp(-1)


def cases(
    dtype: torch.dtype,
) -> Iterator[tuple[str, Callable[..., None], Any, list[Any], list[Any]]]:
    """Name, function, formula, its tensors by row and its constants."""
    torch.manual_seed(0)
    y, teacher = ((3 * torch.randn(ROWS, VOCABULARY)).to(dtype) for _ in range(2))
    ids, numbers = torch.randint(VOCABULARY, (ROWS,)), torch.rand(6, ROWS) + 0.5
    normaliser, of_teacher = (normaliser_of(logits.float()) for logits in (y, teacher))
    weights = torch.rand(VOCABULARY)
    plain, full = RowFormula(LogitScaling(), 0.0, 0.0), RowFormula(LogitScaling(2.0, 30.0, 0.7), 0.1, 1e-2)

    def empty() -> Tensor:
        return torch.zeros(ROWS)

    constants = [weights, weights.sum()]
    for name, formula in (("plain", plain), ("every option", full)):
        yield f"losses, {name}", RowFormula.write_losses, formula, [y, ids, None, empty(), empty(), empty()], []
        yield f"gradient, {name}", RowFormula.write_gradient, formula, [y, ids, None, None, None, *normaliser], []
    rows = [y, ids, numbers[0], empty(), empty(), empty(), empty(), torch.zeros(ROWS, dtype=torch.bool)]
    yield "losses, weighted, with results", RowFormula.write_losses, replace(full, top_k=3), rows, constants
    yield "entropies", RowFormula.write_entropies, full, [y, numbers[0], *normaliser, empty(), empty()], []
    rows = [y, ids, numbers[0], ids > 9, numbers[1], *normaliser, numbers[2], numbers[3], None, None]
    yield "gradient, weighted, of entropies", RowFormula.write_gradient, full, rows, constants
    yield "normaliser", divergence._write_normaliser, full.scaling, [y, numbers[0], empty(), empty()], []
    for beta in (0.0, 0.5, 1.0):
        pair = divergence._PairFormula(LogitScaling(), LogitScaling(), beta)
        rows = [y, teacher, numbers[0], *normaliser, *of_teacher, empty(), empty()]
        yield f"divergence {beta}", divergence._PairFormula.write_divergences, pair, rows, []
        rows = [y, teacher, numbers[0], *normaliser, *of_teacher, numbers[4], numbers[5]]
        yield f"gradient of divergence {beta}", divergence._PairFormula.write_gradient, pair, rows, []


def copies(tensors: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> list[Tensor | None]:
    return [
        None if each is None else each.to(dtype if each.is_floating_point() else None, copy=True) for each in tensors
    ]


def error(got: Sequence[Tensor | None], true: Sequence[Tensor | None]) -> float:
    """The largest of all tensors, as a share of the largest number of its tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(got, true, strict=True) if a is not None and b is not None]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def main() -> None:
    with compiled_for_a_gpu():
        for name, function, formula, rows, constants in (*cases(torch.bfloat16), *cases(torch.float32)):
            tensors = [*rows, *constants]
            true, eager, got = copies(tensors, torch.float64), copies(tensors), copies(tensors)
            for each in (true, eager):
                function(formula, *each)
            kernel = torch.compile(row_kernels._build_rows(function, formula, VOCABULARY), dynamic=True, fullgraph=True)
            _, (code,) = run_and_get_code(kernel, *got)
            line = {
                "name": name,
                "dtype": str(rows[0].dtype).removeprefix("torch."),
                "kernels": len(re.findall(r"\.run\(.*stream=", code)),
                "passes": max(1, code.count("in tl.range(0, r0_numel")),
                "buffers": code.count("= empty_strided"),
                "error": error(got, true),
                "eager": error(eager, true),
            }
            print(json.dumps(line), flush=True)
            torch._dynamo.reset()


if __name__ == "__main__":
    main()
