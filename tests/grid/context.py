"""PyTorch's context parallelism over FSDP2: keys and values travel round the ranks (ring attention).

accelerate and PyTorch offer it on accelerators only, so ``start`` opens it to the CPU: accelerate's type of
distribution, and a ring for the operator that CPU attention calls. Both are for this test alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from grid.cases import SDPA, WORLD, Case, Trained, named
from grid.sequence import LENGTH, Rows, Shared, usual_rows

CASES = [
    *usual_rows({}),
    Rows("heads", "head-wise attention asked for: left whole", config=SDPA, steps=2, more={"heads": 1}),
]

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE = 2
"""Dimension of the tokens in [B, H, T, E]."""


def missing() -> str:
    """Why these cases cannot run here, or "": they need a private part of PyTorch."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    except ImportError:
        return f"torch {torch.__version__} keeps its ring attention elsewhere"
    names = ("custom_ops", "_templated_ring_attention", "_templated_ring_attention_backward")
    gone = [name for name in names if not hasattr(ring, name)]
    return f"torch {torch.__version__} has no {', '.join(gone)} in its ring attention" if gone else ""


def start() -> None:
    """Once per process."""
    open_ring_to_the_cpu()
    _let_accelerate_shard_on_the_cpu()


def open_ring_to_the_cpu() -> None:
    """PyTorch's ring takes the operators of accelerators alone."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring.custom_ops[_ATTENTION] = _ring(ring._templated_ring_attention, _ATTENTION, results=2)
    ring.custom_ops[_BACKWARD] = _ring(ring._templated_ring_attention_backward, _BACKWARD, results=3)


def _ring(attention: Callable[..., Any], operator: Any, results: int) -> Callable[..., tuple[DTensor, ...]]:
    """The handler of ``operator``: its arguments by name, as local tensors, to the ring."""
    names = [argument.name for argument in operator._schema.arguments]

    def handler(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        mesh = arguments["query"].device_mesh
        arguments = {
            name: value.to_local() if isinstance(value, DTensor) else value for name, value in arguments.items()
        }
        arguments.pop("attn_mask", None)
        if "grad_out" in arguments:
            arguments["grad_out_name"] = "grad_out"
        results_of_ring = attention(mesh.get_group(), _SEQUENCE, operator, **arguments)[:results]
        return tuple(DTensor.from_local(value, mesh, [Shard(_SEQUENCE)], run_check=False) for value in results_of_ring)

    return handler


def _let_accelerate_shard_on_the_cpu() -> None:
    """accelerate takes FSDP up on accelerators only, and is plain DDP on the CPU without a word."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        plugin = inspect.signature(plain).bind(self, *args, **kwargs).arguments.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


class Context(Shared):
    @classmethod
    def arguments(cls, case: Case) -> dict[str, Any]:
        from accelerate import ParallelismConfig

        return {
            "parallelism_config": ParallelismConfig(cp_size=WORLD),
            "fsdp": True,
            "fsdp_config": {"version": 2, "reshard_after_forward": True},
        }

    @classmethod
    def check(cls, trainer: Any) -> None:
        accelerator = trainer.accelerator
        assert accelerator.distributed_type == "FSDP" and accelerator.is_fsdp2 and accelerator.num_processes == WORLD
        assert accelerator.torch_device_mesh["cp"].size() == WORLD
        for name, p in trainer.model.named_parameters():
            assert isinstance(p, DTensor) and p.placements == (Shard(0),) and p.device_mesh.size() == WORLD, name
            numel = torch.tensor([p.to_local().numel()])
            dist.all_reduce(numel)
            assert numel == p.numel(), name

    @classmethod
    @contextmanager
    def watching(cls, trainer: Any, seen: Trained) -> Iterator[None]:
        lengths = []
        layer = trainer.model.get_submodule("model.layers.0")
        hook = layer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
        try:
            yield
        finally:
            hook.remove()
        assert lengths and set(lengths) == {LENGTH // WORLD}, lengths
        if trainer.accelerator.sync_gradients:
            seen.gradients.append({name: p.grad.full_tensor() for name, p in named(trainer.model).items()})

    @classmethod
    def whole_weights(cls, trainer: Any) -> dict[str, Tensor]:
        return {name: p.detach().full_tensor().clone() for name, p in named(trainer.model).items()}


ENGINE = Context
