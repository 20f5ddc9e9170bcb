"""Estimate what a GPU will show: launches, FLOPs and bytes of every operation, on fake tensors.

    python benchmarks/gpu_estimates.py                          # one MLP by method
    python benchmarks/gpu_estimates.py --compare                # the rows that were measured, beside their estimates
    python benchmarks/gpu_estimates.py --steps                  # whole steps beside what people run
    python benchmarks/gpu_estimates.py --loss                   # the loss table of step.py
    python benchmarks/gpu_estimates.py --step --method seqtile+attention-saved --tokens 32768 --layers 4 --lora 16

Nothing runs on a GPU here. ``--step`` is one training step of Llama-8B's shape in bf16 (forward, backward, clipping,
AdamW) by a method of ``methods.py``; the other tables are of one layer's norm, MLP and residual under an activation
checkpoint. An operation that writes memory is one launch; its time is the longest of its FLOPs and its bytes (every
element read or written once) by :data:`RATES`, and of a launch.

A function that the compiler makes a kernel of is one launch over its buffers, and two more where it sums over tokens.
Liger's Triton kernels cannot run on fake tensors: :class:`LigerCounts` says what each reads and writes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import seqtile
from block import ResidualLayer, Upstream, add_adapters
from methods import build_model, install, install_step, step_method
from seqtile._compat import disable_current_modes, schema_of, storage_key
from seqtile._errors import UserError
from seqtile.counting.fake import fake_tensors, make_fake
from seqtile.counting.live import count_live_bytes
from seqtile.counting.watch import Watch, name_of, tensors_in
from seqtile.models.configs import read_config
from seqtile.ops import mlp_tile, pointwise
from seqtile.ops.grad_accumulator import as_on_an_accelerator
from seqtile.ops.kernels import Kernel, Kernels
from seqtile.ops.lm_loss import row_kernels
from seqtile.planner.accelerator_functions import accelerator_functions, backward_in_modes
from seqtile.planner.fake_step import prepare_optimizer, update
from seqtile.planner.step_config import make_optimizer
from seqtile.tiling import BlockShape

HIDDEN, INTERMEDIATE = 4096, 14336
TILE = 8192
GIB = 2**30
LOSS = (16_384, 2048, 248_320)
TOKENS = (8192, 32768, 131072, 262144)
METHODS = ("untiled", "tile-checkpoint", "generic", "fused")
STEP_METHODS = ("liger", "liger-tiled", "seqtile", "seqtile+attention-saved")
MEASURED = Path(__file__).parent / "results" / "h100-20261126.jsonl"
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_GATHERS = ("aten::embedding", "aten::gather", "aten::index_select", "aten::index")
_SCATTERS = ("aten::scatter_add_", "aten::scatter_", "aten::index_add_")
_OVERWRITES = ("aten::copy_", "aten::zero_", "aten::fill_")
_FREE = ("aten::empty", "aten::new_empty", "aten::detach")


@dataclass(frozen=True)
class Rates:
    """What operations reach inside long runs on one H100 80GB HBM3, fitted to the rows of :data:`MEASURED`.

    Alone, as ``machine.py`` measures them, the same operations reached more: products 764 TFLOP/s, into fp32 731, a
    copy 2,993 GB/s, attention 606 to 625 and 515 to 573 TFLOP/s.

    Attributes:
        products: bf16 matrix products, FLOP/s.
        products_into_fp32: the same where the product adds into fp32.
        memory: bytes/s.
        launch: seconds of the shortest operation.
        attention: causal SDPA (cuDNN) forward and backward, FLOP/s.
    """

    products: float = 700e12
    products_into_fp32: float = 670e12
    memory: float = 2.72e12
    launch: float = 6.6e-6
    attention: tuple[float, float] = (596e12, 527e12)


RATES = Rates()


@dataclass
class Total:
    """Sums over operations of one name."""

    launches: int = 0
    nbytes: int = 0
    flops: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, flops: int, seconds: float) -> None:
        """One more launch."""
        self.launches += 1
        self.nbytes += nbytes
        self.flops += flops
        self.seconds += seconds


@dataclass
class Record(Total):
    """What ran; its own sums are over everything.

    Attributes:
        operations: by name.
        peak: bytes of live tensors at once; of a step with its weights, of a layer above input and weights.
    """

    operations: dict[str, Total] = field(default_factory=dict)
    peak: int = 0

    def launch(self, name: str, nbytes: int, flops: int = 0, rate: float = RATES.products) -> None:
        """Note one launch."""
        seconds = max(RATES.launch, flops / rate, nbytes / RATES.memory)
        self.add(nbytes, flops, seconds)
        self.operations.setdefault(name, Total()).add(nbytes, flops, seconds)

    def see(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator that reached a kernel, if it writes memory."""
        name = name_of(func)
        read, outputs = tensors_in([*args, *kwargs.values()]), tensors_in([result])
        if name == "aten::_fused_adamw_":  # reads weights, gradients and two states; writes all but the gradients
            self.launch(name, sum(map(_bytes, tensors_in([*args[:4], args[0], *args[2:4]]))))
            return
        mutates = schema_of(func).is_mutable
        if not outputs and mutates:
            outputs = tensors_in(args[:1])
        storages = {storage_key(tensor.untyped_storage()) for tensor in read}
        is_view = not mutates and all(storage_key(tensor.untyped_storage()) in storages for tensor in outputs)
        if not outputs or is_view or name.startswith(_FREE):
            return
        if mutates:  # a buffer that is given for the result is not read, nor what is overwritten
            read = tensors_in(args)[name in _OVERWRITES or (name in PRODUCTS and kwargs.get("beta") == 0) :]
            read += [tensor for tensor in tensors_in(kwargs.values()) if not _is_in(tensor, outputs)]
        nbytes = sum(map(_bytes, [*read, *outputs]))
        flops, rate = 0, RATES.products
        if name in _GATHERS:  # rows are read, not the table
            nbytes = 2 * _bytes(outputs[0]) + _bytes(read[-1])
        elif name in _SCATTERS:
            nbytes = 3 * _bytes(read[-1]) + _bytes(read[1])
        elif name in PRODUCTS:
            left = read[-2]
            flops = 2 * outputs[0].numel() * left.shape[-1]
            rate = RATES.products_into_fp32 if outputs[0].dtype != left.dtype else rate
        elif name.startswith(ATTENTION):
            backward = name.endswith("_backward")
            query, key = read[1 if backward else 0], read[2 if backward else 1]
            flops = 2 * query.numel() * key.shape[-2]  # causal: half of 4 * T^2
            flops, rate = (5 * flops // 2 if backward else flops), RATES.attention[backward]
        self.launch(name, nbytes, flops, rate)


def _is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _bytes(tensor: Tensor) -> int:
    """Bytes of its distinct elements: what is expanded is read once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()


class KernelCounts:
    """Counts compiled kernels in place of :meth:`seqtile.ops.kernels.Kernels.ran`: by what their function touches."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self._launches: dict[Hashable, list[tuple[str, int]]] = {}

    def ran(self, variant: Hashable, build: Callable[[], Kernel], buffers: Sequence[Tensor | None]) -> bool:
        """See :meth:`Kernels.ran`."""
        shapes = tuple(None if buffer is None else (buffer.shape, buffer.dtype) for buffer in buffers)
        if (variant, shapes) not in self._launches:
            self._launches[variant, shapes] = _trace_kernel(variant, build(), buffers)
        for name, nbytes in self._launches[variant, shapes]:
            self.record.launch(name, nbytes)
        return True


def _trace_kernel(variant: Any, kernel: Kernel, buffers: Sequence[Tensor | None]) -> list[tuple[str, int]]:
    """Launches of a function that the compiler makes kernels of, and their bytes: each buffer once per access."""
    function = cast(FunctionType, kernel)
    scope = {**function.__globals__, "only_compiled": lambda: None}
    body = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    read, written = dict[int, int](), dict[int, int]()
    sums: list[Tensor] = []

    def see(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        for position, tensor in enumerate(tensors_in([*args, *kwargs.values()])):
            key = storage_key(tensor.untyped_storage())
            if key not in sizes:
                continue
            name, mutates = name_of(func), schema_of(func).is_mutable and position == 0
            if mutates:
                written[key] = sizes[key]
            if not (mutates and name in _OVERWRITES):
                read[key] = sizes[key]
        if name_of(func) == "aten::sum" and 0 in args[1] and args[0].dim() > 1:
            sums.append(result)

    with disable_current_modes(), torch.device("meta"):
        twins = [None if buffer is None else torch.empty_like(buffer, device="meta") for buffer in buffers]
        sizes = {storage_key(twin.untyped_storage()): twin.nbytes for twin in twins if twin is not None}
        with Watch(see):
            body(*twins)
    name = f"compiled {getattr(variant[0] if isinstance(variant, tuple) else variant.build, '__name__', body.__name__)}"
    launches = [(name.replace("_build_", "norm_"), sum(read.values()) + sum(written.values()))]
    for total in sums:  # over tokens: by blocks of them, which are then added up
        launches += [(f"{name} over tokens", sum(read.values())), (f"{name} over tokens", 2 * total.nbytes)]
    return launches


class LigerCounts:
    """Stands in for Liger's Triton kernels on a fake model: its shapes, and what each kernel reads and writes.

    Read from Liger-Kernel 0.8.5, one launch each; ``x`` is the tensor that the kernel is over:

    ==================== ============== =======================================================
    ``ops/rope.py``      forward 2 q, k  in place; backward the same over dq, dk
    ``ops/rms_norm.py``  forward 2 x     backward 3 x (dy, x, dx), and partial sums of the weight's gradient
    ``ops/swiglu.py``    forward 3 x     backward 5 x (dc, gate, up, and both gradients over them)
    ``ops/cross_entropy.py``  3 logits   maximum and sum, then the gradient over the logits
    ==================== ============== =======================================================

    Args:
        record: where they are noted.
        in_tiles: names of norms that run inside our tiles.
    """

    def __init__(self, record: Record, in_tiles: tuple[str, ...] = ()) -> None:
        self.record, self.in_tiles = record, in_tiles

    def install(self, model: Any, parts: tuple[str, ...]) -> None:
        """Put ``parts`` on a causal language model, as ``apply_liger_kernel_to_llama(model=model)`` does.

        Rope is a function of the model's module: :meth:`rope_in` replaces it for the length of a step.
        """
        for name, module in model.named_modules():
            is_norm = type(module).__name__.endswith("RMSNorm") and not name.endswith(self.in_tiles)
            if "rms_norm" in parts and is_norm and "forward" not in module.__dict__:
                module.__dict__["forward"] = self._norm(module)
            if "swiglu" in parts and name.endswith(".mlp"):
                module.__dict__["forward"] = self._mlp(module)
        if "fused_linear_cross_entropy" in parts:
            model.__dict__["forward"] = self._fused_loss(model)

    def rope_in(self, model: Any) -> Any:
        """Inside, the model's module calls Liger's rope."""

        def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            rotated: tuple[Tensor, Tensor] = _Rope.apply(q, k, self.record)  # type: ignore[no-untyped-call]
            return rotated

        return patch.object(sys.modules[type(model).__module__], "apply_rotary_pos_emb", rope)

    def _norm(self, module: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: _Norm.apply(x, module.weight, self.record)  # type: ignore[no-untyped-call]

    def _mlp(self, module: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: module.down_proj(_SwiGlu.apply(module.gate_proj(x), module.up_proj(x), self.record))  # type: ignore[no-untyped-call]

    def _fused_loss(self, model: Any) -> Callable[..., Any]:
        from transformers.modeling_outputs import CausalLMOutput

        def forward(input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
            hidden = model.model(input_ids=input_ids, **kwargs).last_hidden_state
            targets = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
            states = hidden.view(-1, hidden.shape[-1])
            loss = _FusedLoss.apply(states, model.lm_head.weight, targets, self.record)  # type: ignore[no-untyped-call]
            return CausalLMOutput(loss=loss)

        return forward


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, record: Record) -> tuple[Tensor, Tensor]:
        ctx.record = record
        record.launch("liger rope", 2 * (q.nbytes + k.nbytes))
        return q.view_as(q), k.view_as(k)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.record.launch("liger rope", 2 * (dq.nbytes + dk.nbytes))
        return dq, dk, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, record: Record) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.record = record
        record.launch("liger rms_norm", 2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        ctx.record.launch("liger rms_norm backward", 3 * x.nbytes)
        if not ctx.needs_input_grad[1]:
            return dy, None, None
        ctx.record.launch("liger rms_norm weight sum", 132 * 4 * weight.numel())  # a partial sum of each processor
        return dy, torch.empty_like(weight), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, record: Record) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.record = record
        record.launch("liger swiglu", 3 * gate.nbytes)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.record.launch("liger swiglu backward", 5 * dy.nbytes)
        return *ctx.saved_tensors, None


class _FusedLoss(torch.autograd.Function):
    """``ops/fused_linear_cross_entropy.py``: all gradients in the forward, logits of T * D numbers at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, record: Record) -> Tensor:
        tokens, width = hidden.shape
        at_once = min(tokens, 1 << (-(-tokens // -(-len(weight) // width)) - 1).bit_length())
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        logits = torch.empty(at_once, len(weight), dtype=hidden.dtype)
        for start in range(0, tokens, at_once):
            states = hidden[start : start + at_once]
            block = torch.mm(states, weight.t(), out=logits[: len(states)])
            record.launch("liger cross_entropy", 3 * block.nbytes)
            torch.mm(block, weight, out=grad_hidden[start : start + at_once])
            if grad_weight is not None:
                torch.addmm(grad_weight, block.t(), states, out=grad_weight)
        ctx.gradients = grad_hidden, grad_weight
        return torch.empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        return *ctx.gradients, None, None


def _shape_on_a_gpu(*args: Any, **kwargs: Any) -> BlockShape:
    return replace(BlockShape(*args, **kwargs), device_type="cuda")


@contextmanager
def _as_on_a_gpu(record: Record, *, norms: bool = True) -> Iterator[None]:
    """Inside, fake tensors on the CPU run what an accelerator runs, and our compiled kernels are counted."""
    with ExitStack() as stack:
        stack.enter_context(as_on_an_accelerator())
        stack.enter_context(accelerator_functions())
        # A plan leaves the head's kernels out, as they hold no memory.
        stack.enter_context(patch.object(row_kernels, "accelerator_meant", lambda: False))
        stack.enter_context(patch.object(mlp_tile, "pointwise_on", lambda device: pointwise.COMPILED))
        stack.enter_context(patch.object(Kernels, "ran", KernelCounts(record).ran))
        for name, module in list(sys.modules.items()):
            if not name.startswith("seqtile."):
                continue
            for table in (value for key, value in vars(module).items() if key.endswith("BY_DEVICE")):
                if norms or "norm" not in name:
                    stack.enter_context(patch.dict(table))
                    table.pop("cpu", None)  # the kernels of every device that it does not name
            if hasattr(module, "BlockShape"):
                stack.enter_context(patch.object(module, "BlockShape", _shape_on_a_gpu))
        yield


def record_step(method: str, tokens: int, layers: int, lora: int, *, model: str = "llama-8b") -> Record:
    """One training step on fake tensors, recorded.

    Args:
        method: a name of ``methods.py``.
        tokens: of the row.
        layers: decoder layers.
        lora: rank of the adapters, 0 to train all weights.
        model: as :func:`seqtile.models.configs.read_config` takes it.
    """
    chosen, record = step_method(method), Record()
    ours = chosen.options is not None
    liger = LigerCounts(record, ("post_attention_layernorm",) if ours else ())
    built = build_model(read_config(model), layers, lora, "meta")
    causal: Any = built.get_base_model() if lora else built
    # Stand-ins are code that nobody knows: ours proves the model before they are there.
    with _as_on_a_gpu(record):
        install_step(built, replace(chosen, liger=()) if ours else chosen, tokens, liger.install)
        if ours:
            liger.install(causal, chosen.liger)
    with fake_tensors(), _as_on_a_gpu(record), count_live_bytes("cpu") as live:
        make_fake(built)
        weights = [weight for weight in built.parameters() if weight.requires_grad]
        optimizer = make_optimizer("adamw", weights)
        prepare_optimizer(optimizer, weights)
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with Watch(record.see), liger.rope_in(causal) if "rope" in chosen.liger else nullcontext():
            loss = built(input_ids=ids, labels=ids, use_cache=False).loss
            backward_in_modes(loss)
            del loss
            update(optimizer, weights)
    record.peak = live.peak
    return record


def record_loss(way: str, tokens: int, hidden: int, vocabulary: int) -> Record:
    """Head and loss, forward and backward, recorded.

    Args:
        way: ``"full logits"``, ``"liger"`` or ``"seqtile"``.
        tokens: of the row.
        hidden: width of a state.
        vocabulary: rows of the head.
    """
    record = Record()
    with fake_tensors(), _as_on_a_gpu(record):
        states = torch.empty(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(tokens, dtype=torch.long)
        with count_live_bytes("cpu") as live, Watch(record.see):
            if way == "liger":
                loss = _FusedLoss.apply(states, weight, labels, record)  # type: ignore[no-untyped-call]
            elif way == "seqtile":
                loss = seqtile.linear_cross_entropy(states, weight, labels)
            else:
                loss = F.cross_entropy(F.linear(states, weight).float(), labels)
            torch.autograd.grad(loss, (states, weight))
    record.peak = live.peak
    return record


def record_layer(
    method: str, tokens: int, hidden: int, intermediate: int, tile: int, *, norms: bool = True, train: str = "full"
) -> Record:
    """One forward and backward of the layer, recorded.

    Args:
        method: one of :data:`cell.METHODS`.
        tokens: of the row.
        hidden: width of the layer.
        intermediate: width of its MLP.
        tile: tokens per tile.
        norms: by kernels where the fused operator has them.
        train: ``"full"`` or ``"lora"``.
    """
    layer = ResidualLayer(hidden, intermediate, device="meta", dtype=torch.bfloat16)
    if train == "lora":
        layer.requires_grad_(False)
        with torch.device("meta"):
            add_adapters(layer, 16)
        layer.to(torch.bfloat16)
    if method in ("fused", "generic"):
        seqtile.apply(layer, only=["mlp"], trust="*", tile=tile, path=method)
    else:
        install(layer, {"mlp": layer.mlp}, method, None, -(-tokens // tile))
    record = Record()
    with fake_tensors(), _as_on_a_gpu(record, norms=norms):
        make_fake(layer)
        x = torch.empty(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        upstream = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        with count_live_bytes("cpu") as live, Watch(record.see):
            backward_in_modes(Upstream.apply(checkpoint(layer, x, use_reentrant=False), upstream))  # type: ignore[no-untyped-call]
    record.peak = live.peak
    return record


def main() -> int:
    """Print the tables; 2 where the method is unknown."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, nargs="+", help=f"default: {TOKENS}, with --step 32768")
    options.add_argument("--list", action="store_true", help="each operation of the fused layer")
    options.add_argument("--compare", action="store_true", help=f"the rows of {MEASURED.name} beside their estimates")
    options.add_argument("--steps", action="store_true", help=f"training steps by {', '.join(STEP_METHODS)}")
    options.add_argument("--step", action="store_true", help="a training step, and its heaviest operations")
    options.add_argument("--loss", action="store_true", help=f"head and loss of {LOSS} tokens, width and vocabulary")
    options.add_argument("--method", default="seqtile", help="of the step; see methods.py")
    options.add_argument("--layers", type=int, default=4, help="of the step")
    options.add_argument("--lora", type=int, default=0, help="rank of the step's adapters; 0 trains all weights")
    options.add_argument("--model", default="llama-8b", help="of the step")
    options.add_argument("--top", type=int, default=25, help="operations that a step lists")
    asked = options.parse_args()
    warnings.filterwarnings("ignore")
    print(f"Estimates on fake tensors, torch {torch.__version__}, {datetime.date.today()}\n")
    try:
        if asked.compare:
            print_comparison()
        elif asked.steps:
            print_steps(asked.tokens or (32_768, 131_072), asked.layers)
        elif asked.loss:
            for way in ("full logits", "liger", "seqtile"):
                print_operations(f"{way}, {LOSS}", record_loss(way, *LOSS), asked.top)
        elif asked.step:
            for tokens in asked.tokens or (32768,):
                step = record_step(asked.method, tokens, asked.layers, asked.lora, model=asked.model)
                print_operations(f"{asked.method}, {tokens:,} tokens, {asked.layers} layers", step, asked.top)
        else:
            print_layers(asked.tokens or TOKENS, list_operations=asked.list)
    except UserError as error:
        print(f"gpu_estimates.py: {error}", file=sys.stderr)
        return 2
    return 0


def print_operations(title: str, record: Record, count: int) -> None:
    """A record's heaviest operations."""
    print(f"{title}: {1e3 * record.seconds:,.1f} ms, {record.launches:,} launches, {record.nbytes / 1e9:,.1f} GB read "
          f"and written, {record.flops / 1e12:,.1f} TFLOP, peak {record.peak / GIB:.2f} GiB\n")  # fmt: skip
    print("| operation | ms | launches | GB | TFLOP |\n|---|---|---|---|---|")
    heaviest = sorted(record.operations.items(), key=lambda item: -item[1].seconds)[:count]
    for name, total in heaviest:
        print(f"| {name} | {1e3 * total.seconds:.2f} | {total.launches:,} | {total.nbytes / 1e9:.2f} | "
              f"{total.flops / 1e12:.2f} |")  # fmt: skip
    print()


def estimate_measured(row: dict[str, Any]) -> Record:
    """The estimate of a row of :data:`MEASURED`."""
    if row["kind"] == "step":
        return record_step(row["method"], row["tokens"], row["layers"], row["lora"])
    return record_layer(row["method"], row["tokens"], HIDDEN, INTERMEDIATE, row["tile"], train=row["train"])


def print_comparison() -> None:
    """Measured rows beside their estimates."""
    print("| | tokens | trains | method | measured ms | estimated ms | off | measured GiB | estimated GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        estimate = estimate_measured(row)
        ms = 1e3 * estimate.seconds
        what = f"step, {row['layers']} layers" if row["kind"] == "step" else "MLP"
        trains = f"LoRA r{row['lora']}" if row.get("lora") else {"lora": "LoRA r16"}.get(row.get("train"), "all")
        off = ms / row["step_ms"] - 1
        print(f"| {what} | {row['tokens']:,} | {trains} | {row['method']} | {row['step_ms']:,.1f} | {ms:,.1f} | "
              f"{off:+.0%} | {row['peak_gib'] or ''} | {estimate.peak / GIB:.2f} |", flush=True)  # fmt: skip


def print_steps(lengths: Sequence[int], layers: int) -> None:
    """Training steps of Llama-8B's shape, with their share of the first method's time."""
    print(f"{layers} layers, ms / GiB\n\n| tokens | trains | {' | '.join(STEP_METHODS)} |\n|{'---|' * 6}")
    for tokens in lengths:
        for lora in (16, 0):
            records = [record_step(method, tokens, layers, lora) for method in STEP_METHODS]
            cells = [
                f"{1e3 * record.seconds:,.0f} ({record.seconds / records[0].seconds:.2f}) / {record.peak / GIB:.1f}"
                for record in records
            ]
            print(f"| {tokens:,} | {f'LoRA r{lora}' if lora else 'all'} | {' | '.join(cells)} |", flush=True)


def print_layers(lengths: Sequence[int], *, list_operations: bool) -> None:
    """The tables of one layer, and of a step made of it."""
    print(f"{HIDDEN} x {INTERMEDIATE}, tiles of {TILE:,} tokens\n")
    print("| tokens | | ms | peak GiB | launches | GB read and written | TFLOP |\n|---|---|---|---|---|---|---|")
    for tokens in lengths:
        for method in METHODS:
            layer = record_layer(method, tokens, HIDDEN, INTERMEDIATE, TILE)
            ms, peak = 1e3 * layer.seconds, layer.peak / GIB
            print(f"| {tokens:,} | {method} | {ms:.1f} | {peak:.1f} | {layer.launches:,} | "
                  f"{layer.nbytes / 1e9:.1f} | {layer.flops / 1e12:.0f} |", flush=True)  # fmt: skip
            if list_operations and method == "fused":
                print_operations(f"{method}, {tokens:,} tokens", layer, len(layer.operations))


if __name__ == "__main__":
    sys.exit(main())
