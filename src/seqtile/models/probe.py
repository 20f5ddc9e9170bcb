"""A numeric proof that a block is position-wise: permuted tokens must give permuted outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

TOKENS = 4


def mixes_tokens(module: nn.Module, kind: str, hidden: int) -> str | None:
    """Why the block is not known to be position-wise; None if the probe proved it.

    Runs ``module.forward`` (no hooks) on two sequences of four random tokens in evaluation mode, then on the same
    tokens as one sequence in another order, and on the first two alone. A reason that starts with "not " refutes; any
    other says why nothing could be run (weights on the meta device, or sharded), where the structure is the only proof.
    """
    if kind == "inline":
        return None
    weights = [p for p in module.parameters() if p.is_floating_point()]
    reference = weights[0] if weights else torch.empty(0)
    if any(p.is_meta for p in weights):
        return "by its structure: the weights are on the meta device"
    if any(p.numel() == 0 or type(p.data) is not Tensor for p in weights):
        return "by its structure: the weights are sharded or packed"
    dtype = reference.dtype if reference.dtype in (torch.float64, torch.bfloat16, torch.float16) else torch.float32
    generator = torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        return torch.randn(2 * TOKENS, hidden, generator=generator).to(reference.device, dtype)

    rows: list[Tensor] = [tokens() for _ in range(_inputs(module))]
    lead: tuple[int, ...] = (2, TOKENS)
    if kind == "experts":
        count = next(p.shape[0] for p in module.parameters() if p.dim() == 3)
        index = torch.stack([torch.randperm(count, generator=generator)[: min(2, count)] for _ in range(2 * TOKENS)])
        share = torch.rand(index.shape, generator=generator)
        rows, lead = [rows[0], index.to(reference.device), share.to(reference.device, dtype)], (2 * TOKENS,)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4], device=reference.device)
    one = lead[:-2] + (1,) if len(lead) > 1 else ()
    try:
        with _evaluating(module), torch.no_grad():
            whole = _rows(module, rows, lead)
            permuted = _rows(module, [part[order] for part in rows], (*one, 2 * TOKENS))
            cut = _rows(module, [part[:2] for part in rows], (*one, 2))
    except Exception as error:  # noqa: BLE001 - whatever a stranger's module raises, it is no block of ours
        return f"not position-wise: it cannot be called on hidden states alone ({type(error).__name__}: {error})"
    loose = 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2  # rounding of another summation order
    for first, other, part in zip(whole, permuted, cut, strict=True):
        if first.dim() == 0 or first.shape[0] != 2 * TOKENS or part.shape[0] != 2:
            return f"not position-wise: {2 * TOKENS} tokens gave an output of shape {tuple(first.shape)}"
        bound = loose * first.abs().max().item() + 1e-30
        if (first[order] - other).abs().max() > bound or (first[:2] - part).abs().max() > bound:
            return "not position-wise: an output depends on other tokens"
    return None


def mixes_along(module: nn.Module, dim: int, hidden: int) -> str | None:
    """Why the module is not known to treat each token along ``dim`` by itself; None if the probe proved it.

    The module sees three dimensions. The features, ``hidden`` of them, are the last, or the second where the tokens are
    the last. A reason that starts with "not " refutes; any other says why nothing could be run.
    """
    weights = [p for p in module.parameters() if p.is_floating_point()]
    if any(p.is_meta or p.numel() == 0 or type(p.data) is not Tensor for p in weights) or not -3 <= dim < 3:
        return "by its caller's word: it cannot be run here"
    reference = weights[0] if weights else torch.empty(0)
    sizes = [3, hidden, 5] if dim in (-1, 2) else [3, 3, hidden]
    sizes[dim] = 5
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sizes, generator=generator).to(reference.device, reference.dtype) for _ in range(_inputs(module))
    ]
    order = torch.tensor([3, 1, 4, 0, 2], device=reference.device)
    try:
        with _evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            runs = [
                [leaf for leaf in tree_leaves(module.forward(*tokens)) if isinstance(leaf, Tensor)]
                for tokens in (
                    inputs,
                    [part.index_select(dim, order) for part in inputs],
                    [part.narrow(dim, 0, 2) for part in inputs],
                )
            ]
    except Exception as error:  # noqa: BLE001 - it may want other inputs than three dimensions of random numbers
        return f"by its caller's word: the probe could not call it ({type(error).__name__})"
    loose = 1e-4 if reference.dtype in (torch.float32, torch.float64) else 5e-2  # rounding of another order
    place = dim % 3
    for whole, permuted, cut in zip(*runs, strict=True):
        if whole.dim() <= place or whole.shape[place] != 5 or cut.shape[place] != 2:
            return f"not position-wise: 5 tokens along it gave an output of shape {tuple(whole.shape)}"
        bound = loose * whole.abs().max().item() + 1e-30
        moved, first = whole.index_select(place, order) - permuted, whole.narrow(place, 0, 2) - cut
        if moved.abs().max() > bound or first.abs().max() > bound:
            return "not position-wise: an output depends on other tokens"
    return None


def _rows(module: nn.Module, rows: list[Tensor], lead: tuple[int, ...]) -> list[Tensor]:
    """The outputs, one row per token, for inputs of these leading dimensions."""
    inputs = [part.reshape(*lead, part.shape[-1]) for part in rows]
    leaves = [leaf for leaf in tree_leaves(module.forward(*inputs)) if isinstance(leaf, Tensor)]
    if not leaves:
        raise TypeError("no tensor returned")
    return [leaf.double().reshape(-1, leaf.shape[-1]) if leaf.dim() > 1 else leaf.double() for leaf in leaves]


def _inputs(module: nn.Module) -> int:
    """How many arguments the forward cannot do without; Bloom's and MPT's MLPs take the residual too."""
    try:
        words = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return 1
    needed = [w for w in words if w.default is w.empty and w.kind in (w.POSITIONAL_ONLY, w.POSITIONAL_OR_KEYWORD)]
    return max(1, min(2, len(needed)))


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[Any]:
    training = {part: part.training for part in module.modules()}
    try:
        for part in training:
            # bitsandbytes' 4-bit layer on the CPU repacks its weight for good when it runs in evaluation mode, and from
            # then on passes no gradient. It has no dropout.
            part.training = hasattr(part, "support_avx512bf16_for_cpu")
        yield
    finally:
        for part, was in training.items():
            part.training = was
