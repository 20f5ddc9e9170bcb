"""A proof by trying out, for what no trace can follow: routed experts, and operators without a rule.

The code runs on a few random tokens, whole and in tiles, in its own mode; outputs and gradients must agree, at two
lengths. That is a sample and no proof, and the report says so. Transformers' experts are tried out on a small instance
of their class, so that neither memory nor the values of their weights are needed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import children_of, tree_leaves
from seqtile.models.discover.chain import Chain
from seqtile.models.discover.python_code import Code
from seqtile.models.discover.recorder import unwatched
from seqtile.models.discover.sizes import NotPerToken, Untraceable
from seqtile.models.discover.views import Views
from seqtile.models.discover.widths import experts_widths
from seqtile.tiling import tile_ranges

LENGTHS = ((2, 7, (5, 1, 8)), (1, 37, (11, 26)))
"""(batch, tokens, tiles) of the two trials."""


def try_tiles(chain: Chain, inputs: Sequence[tuple[Sequence[int | str], torch.dtype]], code: Code) -> None:
    """Compare ``chain`` on tiles with ``chain`` on all tokens.

    Raises:
        NotPerToken: outputs or gradients differ, or something was changed.
        Untraceable: it cannot be run here.
    """
    module = chain.modules[0] if chain.kind == "experts" else None
    small = _small_experts(module) if module is not None else None
    views = Views(_RealTensors(small is None))
    for number, part in enumerate([small] if small is not None else chain.modules):
        views.of(part, str(number))
    if small is not None and module is not None:
        views.alias(module, small)
    weights = [weight for _, weight in views.weights() if weight.requires_grad and weight.is_floating_point()]
    device = weights[0].device if weights else torch.device("cpu")
    for batch, tokens, tiles in LENGTHS:
        generator = torch.Generator().manual_seed(tokens)
        given = [tensor.to(device) for tensor in _inputs(chain, views, inputs, batch * tokens, generator)]
        leading = _leading(inputs[0][0], batch, tokens)
        whole = _run(chain, views, weights, given, [batch * tokens], leading, code)
        parts = _run(chain, views, weights, given, tiles, leading, code)
        if len(whole) != len(parts):
            raise NotPerToken("it returns something else for another number of tokens")
        for one, other in zip(whole, parts, strict=True):
            if one.shape != other.shape:
                raise NotPerToken(f"{batch * tokens} tokens gave an output of shape {tuple(one.shape)}")
            loose = 1e-4 if one.dtype in (torch.float32, torch.float64) else 5e-2  # rounding of another order
            if (one - other).abs().max() > loose * one.abs().max() + 1e-30:
                raise NotPerToken("an output or a gradient depends on other tokens")
    if changed := views.changed():
        raise NotPerToken(f"its forward changes {changed}")


def _leading(dims: Sequence[int | str], batch: int, tokens: int) -> tuple[int, ...]:
    flat = len(dims) == 2
    return (batch * tokens,) if flat else (1,) * (len(dims) - 3) + (batch, tokens)


def _run(
    chain: Chain, views: Views, weights: list[Tensor], given: list[Tensor], tiles: Sequence[int],
    leading: tuple[int, ...], code: Code,
) -> list[Tensor]:  # fmt: skip
    """Outputs, one row per token, and the gradients of inputs and weights, summed over tiles."""
    outputs: list[list[Tensor]] = []
    gradients: list[Tensor | None] = []
    rows: list[list[Tensor]] = [[] for _ in given]
    for start, size in tile_ranges(tiles):
        lead = leading if len(tiles) == 1 else (1,) * (len(leading) - 1) + (size,)
        inputs = [part[start : start + size].reshape(*lead, part.shape[-1]) for part in given]
        leaves = [part.detach().requires_grad_(part.is_floating_point()) for part in inputs]
        with code.watching():
            result = chain.run(leaves, views.__getitem__)
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not found or any(leaf.dim() == 0 or leaf.numel() % size for leaf in found):
            raise NotPerToken(f"{size} tokens gave an output of shape {tuple(found[0].shape) if found else ()}")
        flat = [leaf.reshape(size, -1) if leaf.dim() > 1 else leaf for leaf in found]
        outputs.append([leaf.detach() for leaf in flat])
        wanted = [leaf for leaf in (*leaves, *weights) if leaf.requires_grad]
        upstream = [_upstream(leaf, start) for leaf in flat if leaf.requires_grad]
        grads = torch.autograd.grad([leaf for leaf in flat if leaf.requires_grad], wanted, upstream, allow_unused=True)
        mine = dict(zip(map(id, wanted), grads, strict=True))
        for number, leaf in enumerate(leaves):
            grad = mine.get(id(leaf))
            if grad is not None:
                rows[number].append(grad.reshape(size, -1))
        now = [mine.get(id(weight)) for weight in weights]
        gradients = now if not gradients else [one if two is None else two if one is None else one + two
                                               for one, two in zip(gradients, now, strict=True)]  # fmt: skip
    joined = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    return joined + [torch.cat(parts) for parts in rows if parts] + [grad for grad in gradients if grad is not None]


def _upstream(leaf: Tensor, start: int) -> Tensor:
    """A fixed gradient of the output: the same for a token wherever it is."""
    count = leaf.numel()
    first = start * (count // max(leaf.shape[0], 1))
    return (
        torch.arange(first, first + count, device=leaf.device, dtype=torch.float32).sin().to(leaf.dtype).view_as(leaf)
    )


def _inputs(
    chain: Chain,
    views: Views,
    inputs: Sequence[tuple[Sequence[int | str], torch.dtype]],
    rows: int,
    generator: torch.Generator,
) -> list[Tensor]:
    if chain.kind == "experts":
        module: Any = views[chain.modules[0]]
        stack = next(p for p in module.parameters() if p.dim() == 3)
        count, hidden = stack.shape[0], _hidden(module)
        index = torch.stack([torch.randperm(count, generator=generator)[: min(2, count)] for _ in range(rows)])
        share = torch.rand(index.shape, generator=generator).to(stack.dtype)
        return [torch.randn(rows, hidden, generator=generator).to(stack.dtype), index, share]
    if any(not dtype.is_floating_point for _, dtype in inputs):
        raise Untraceable("it takes tensors that are no hidden states")
    widths = [next(size for size in dims if isinstance(size, int)) for dims, _ in inputs]
    return [
        torch.randn(rows, width, generator=generator).to(dtype)
        for width, (_, dtype) in zip(widths, inputs, strict=True)
    ]


def _hidden(module: Any) -> int:
    while type(module).__name__ == "ParamWrapper":
        module = module.base_layer
    widths = experts_widths(module)
    assert widths is not None
    return widths[0]


class _RealTensors:
    """For :class:`Views`: the modules' own weights, which must be there; copies of their buffers."""

    def __init__(self, needed: bool) -> None:
        self._needed = needed

    def __call__(self, tensor: Tensor, device: Any) -> Tensor:
        if tensor.is_meta or tensor.numel() == 0 or type(tensor.data) is not Tensor:
            raise Untraceable("it could only be tried out, and its weights are not here (on meta, sharded or packed)")
        return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


_SIZES = {"hidden": 16, "inter": 24, "ffn": 24, "expert": 4}


def _small_experts(module: nn.Module) -> nn.Module | None:
    """A small instance of the class of Transformers' experts, with the module's own flags and activation."""
    config = getattr(module, "config", None)
    if not type(module).__module__.startswith("transformers.") or config is None:
        return None
    small = copy.deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 4:
            for word, size in _SIZES.items():
                if word in name and "per" not in name:
                    setattr(small, name, size)
    try:
        with unwatched(), torch.device("cpu"):
            made = type(module)(small).to(torch.float32)
    except Exception:  # noqa: BLE001 - another signature: its own weights will do
        return None
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / 4
    for name, value in vars(module).items():
        if isinstance(value, (bool, float, str)) or (callable(value) and name not in ("forward", "extra_repr")):
            made.__dict__[name] = value
    for name, child in children_of(module).items():
        if child is not None and not any(True for _ in child.parameters()):
            children_of(made)[name] = child
    made.train(module.training)
    return made if max(weight.numel() for weight in made.parameters()) < 2**20 else None
