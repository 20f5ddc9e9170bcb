"""Proofs that a chain is position-wise, with its formula, and when they expire.

A proof is made once for all modules of the same classes and settings, in one mode: training or evaluation, dtypes,
autocast, with or without gradients. It holds for an instance while the objects in its snapshot
(:mod:`seqtile.recognise.snapshot`) are the same.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from seqtile.ops.norm import NormFormula
from seqtile.recognise.chain import Chain
from seqtile.recognise.formula import Formula, formula_of, norm_of
from seqtile.recognise.known_code import custom_code
from seqtile.recognise.known_kernels import is_offloaded
from seqtile.recognise.sizes import NotPerToken, Untraceable
from seqtile.recognise.snapshot import description, parts_of, setting
from seqtile.recognise.trace import Graph, Tracer, in_a_thread


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast has for this kind of device, None where it is off."""
    casts = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if casts else None


@dataclass(frozen=True)
class Mode:
    """The mode of a call.

    Attributes:
        inputs: dimensions and dtype of each tensor that is split; a name represents token axes.
        device: where they are.
        autocast: dtype of autocast, None where it is off.
        gradients: whether a backward will follow.
    """

    inputs: tuple[tuple[tuple[int | str, ...], torch.dtype], ...]
    device: torch.device
    autocast: torch.dtype | None = None
    gradients: bool = True


@dataclass(frozen=True)
class Proof:
    """The result of proving a chain in one mode.

    Attributes:
        why_not: why it is not proven to treat every token by itself; "" if it is.
        refuted: whether it is known to mix tokens, rather than not proven.
        graph: the trace of its forward and backward; None if there is none.
        formula: the formula for the fused operator, or why that operator cannot run the chain.
        how: how the chain was proven, or "".
        norm: the norm's formula, if the chain is a single norm.
        custom: whether it is unproven because custom code is not traced.
    """

    why_not: str
    refuted: bool
    graph: Graph | None
    formula: Formula | str
    how: str = ""
    norm: NormFormula | None = None
    custom: bool = False

    @staticmethod
    def of_custom(code: str) -> Proof:
        """The result for a block with this custom class or function, which is not traced."""
        return Proof(f"{code} is custom code", False, None, "", custom=True)

    def why_untiled(self, name: str) -> str:
        """Why the block of this name is not tiled, and what its caller can do about it."""
        if self.refuted:
            return self.why_not
        pattern = name or "*"  # a root module has no name
        return (
            f"{self.why_not}; trust={pattern!r} tiles it if it is position-wise, and seqtile.verify compares the "
            "gradients of the whole model"
        )


BY_TRACE = "by its trace, forward and backward"
BY_LIBRARY = "a library's experts, each token with its own routes"


@contextmanager
def for_training(model: nn.Module) -> Iterator[None]:
    """Inside, a model in evaluation mode (as from ``from_pretrained``) is in training mode."""
    modules = [] if model.training else [module for module in model.modules() if not module.training]
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


_proofs: OrderedDict[Any, Proof] = OrderedDict()
MOST = 512
"""Maximum number of cached proofs."""


def prove(chain: Chain, mode: Mode, *, trusted: bool = False) -> Proof:
    """The proof of a chain in a mode.

    Args:
        chain: the modules that run.
        mode: the mode in which they run.
        trusted: trace custom code too: its caller vouches for it.

    Cost:
        About 100 µs if a proof of modules like these is cached, else 10 to 100 ms.
    """
    modules = chain.modules
    if any(is_offloaded(module) for module in parts_of(modules)):
        why = "accelerate loads its weights at each call (device_map), so every tile would load them"
        return Proof(why, False, None, why)
    if any(isinstance(module, torch.jit.ScriptModule) for module in parts_of(modules)):
        return Proof("cannot be traced: TorchScript hides its operations", False, None, "")
    if not trusted and (custom := custom_code(modules, chain.functions, chain.called)):
        return Proof.of_custom(custom)
    key = (chain.key, mode, tuple(map(setting, chain.functions)), description(modules))
    if key not in _proofs:
        _proofs[key] = in_a_thread(partial(_prove, chain, mode))
    _proofs.move_to_end(key)
    while len(_proofs) > MOST:
        _proofs.popitem(last=False)
    return _proofs[key]


def _prove(chain: Chain, mode: Mode) -> Proof:
    try:
        return _routed(chain) if chain.kind == "experts" else _traced(chain, mode)
    except NotPerToken as error:
        return Proof(str(error), True, None, "")
    except Untraceable as error:
        return Proof(f"not proven: {error}", False, None, "")
    except Exception as error:  # noqa: BLE001 - any error on tensors without memory leaves it unproven
        first_line = str(error).splitlines()[0][:200] if str(error) else ""
        return Proof(f"cannot be traced: it failed to run ({type(error).__name__}: {first_line})", False, None, "")


def _routed(chain: Chain) -> Proof:
    """A library's experts: grouped products cannot be traced, but none reads another token's row."""
    experts: Any = chain.modules[0]
    while type(experts).__name__ == "ParamWrapper":  # PEFT's
        experts = experts.base_layer
    if custom := custom_code([experts]):
        raise Untraceable(f"{custom} is custom code, and experts cannot be traced")
    _, *names = inspect.signature(type(experts).forward).parameters
    routes = names[0] == "hidden_states" and len(names) == 3 and "ind" in names[1] and "weight" in names[2]
    if not routes:  # Llama 4's experts get the rows of each expert instead
        raise Untraceable("it is not called with hidden states and the experts and weights of each token")
    return Proof("", False, None, "experts run in the generic operator", BY_LIBRARY)


def _traced(chain: Chain, mode: Mode) -> Proof:
    tracer = Tracer(chain.modules, mode.inputs, mode.device, mode.autocast, mode.gradients)
    graph = tracer.judge(lambda view, inputs: chain.run(inputs, view))
    _check_rows(graph, chain, mode)
    formula = chain.why_not_fusable() or formula_of(chain, graph, tracer)
    return Proof("", False, graph, formula, BY_TRACE, norm_of(chain, graph, tracer))


def _check_rows(graph: Graph, chain: Chain, mode: Mode) -> None:
    """Every output must have its tokens where the first input has them, or all of them in its first dimension."""
    input_dims = mode.inputs[0][0]
    leading = tuple(tuple(dim) if isinstance(dim, str) else () for dim in input_dims[:-1])
    axes = tuple(axis for dim in leading for axis in dim)
    for _, dims, _ in graph.outputs[2:]:
        token_dim = chain.call[1] if chain.call and chain.call[0] == "along" else None
        kept = dims[token_dim] == ("s",) if token_dim is not None else dims[:-1] == leading and not dims[-1]
        rows = token_dim is None and dims[0] == axes and not any(dims[1:]) and (len(dims) == 2 or len(leading) == 1)
        if not kept and not rows:
            raise NotPerToken("it returns its tokens in other dimensions than it takes them")
