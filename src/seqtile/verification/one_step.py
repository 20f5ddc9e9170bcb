"""One forward and backward: its gradients and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._errors import UserError
from seqtile.blocks.instance import Installed
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import Product, count_products
from seqtile.devices import synchronize
from seqtile.install.runs import forget_runs, what_ran
from seqtile.recognise.candidates import Candidate
from seqtile.recognise.widths import linear_widths
from seqtile.verification.result import Run
from seqtile.verification.state import without_dropout

Loss = Callable[[nn.Module, Any], Tensor]


class Measured:
    """One forward and backward of a model without gradients, which is left without them.

    Attributes:
        gradients: gradients by name of the parameter, ``"batch.NAME"`` of an input, or ``"loss"`` for the loss; on the
            host, None where a parameter that trains got none.
        tokens: batch times length.
        products, live: what was counted.
        ran: into how many tiles the blocks were cut.
        dropouts: how many dropouts the model has; they are off for the run unless ``dropout`` is True.
        drew_random_numbers: whether the random state moved all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Loss | None,
        seed: int,
        *,
        dropout: bool = False,
    ) -> None:
        inputs = fresh(batch)
        device = next(model.parameters()).device
        torch.manual_seed(seed)
        random_state = _random_state(device)
        synchronize(device)
        started = time.perf_counter()
        forget_runs(model)
        with without_dropout(model, off=not dropout) as self.dropouts:
            with count_products() as self.products, count_live_bytes(device) as self.live:
                loss = _loss_of(model, inputs) if loss_fn is None else _scalar(loss_fn(model, inputs), "loss_fn")
                loss.backward()
                synchronize(device)
        self.seconds = time.perf_counter() - started
        self.ran = what_ran(model)
        self.loss = float(loss.detach())
        self.drew_random_numbers = any(
            not start.equal(end) for start, end in zip(random_state, _random_state(device), strict=True)
        )
        named = inputs if isinstance(inputs, Mapping) else enumerate([inputs] if isinstance(inputs, Tensor) else inputs)
        leaves = {f"batch.{name}": value for name, value in dict(named).items() if isinstance(value, Tensor)}
        weights = dict(model.named_parameters())
        gradients = {name: leaf.grad for name, leaf in {**weights, **leaves}.items() if leaf.requires_grad}
        self.gradients: dict[str, Tensor | None] = {
            name: None if gradient is None else gradient.detach().cpu() for name, gradient in gradients.items()
        }
        self.gradients["loss"] = loss.detach().double().cpu()
        self.tokens = max((leaf.shape[:2].numel() for leaf in leaves.values() if leaf.dim() > 1), default=1)
        model.zero_grad(set_to_none=True)

    def run(self, sizes: BlockSizes) -> Run:
        """The numbers of this run, in the unit of the tiled blocks."""
        unit = 2 * self.tokens * sizes.elements  # 0 where the model has no block, as with a tiled loss alone
        flops = self.products.flops
        return Run(
            loss=self.loss,
            units=self.products.flops_where(sizes.match) / unit if unit and not sizes.clash(self.tokens) else None,
            step_units=flops / unit if unit else None,
            flops=flops,
            peak_bytes=self.live.peak,
            seconds=self.seconds,
        )


class BlockSizes:
    """The sizes of the weights inside and outside of the blocks, which identify their products.

    Blocks are those that were tiled and those left untiled that have the same sizes.
    """

    def __init__(self, model: nn.Module, tiled: Sequence[Candidate], candidates: Sequence[Candidate]) -> None:
        self.pairs = {pair for block in tiled for root in block.parts for pair in _weight_shapes(root, set())}
        self.elements = 0
        inside: set[nn.Module] = set()
        for block in candidates:
            roots = block.parts
            if not self.pairs.isdisjoint(pair for root in roots for pair in _weight_shapes(root, set())):
                self.elements += block.hidden * block.intermediate
                inside.update(module for root in roots for module in root.modules())
        self.others = set(_weight_shapes(model, inside))

    def match(self, product: Product) -> bool:
        """Whether the product has the sizes of a block's weight."""
        return any(product.has(*pair) for pair in self.pairs)

    def clash(self, tokens: int) -> str:
        """Why the products of the blocks cannot be told from others, or ""."""
        for rows, columns in sorted(self.others):
            if self.match(Product("mm", tokens, rows, columns, 1)):
                return f"a {rows:,} x {columns:,} weight elsewhere has the same product shapes over {tokens:,} tokens"
        return ""


def tiled_of(model: nn.Module, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are tiled now."""
    tiled = {id(module) for module in model.modules() if isinstance(module.__dict__.get("forward"), Installed)}
    return [block for block in candidates if id(block.module) in tiled]


def fresh(batch: Any, dtype: torch.dtype | None = None) -> Any:
    """The batch with leaves of its own, so that a run leaves no gradient on the user's; cast if ``dtype`` is given."""
    if isinstance(batch, Tensor):
        cast = dtype if dtype is not None and batch.is_floating_point() else batch.dtype
        return batch.detach().to(cast).requires_grad_(batch.requires_grad)
    if isinstance(batch, Mapping):
        return {name: fresh(value, dtype) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [fresh(value, dtype) for value in batch]
    return batch


def _loss_of(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        batch_kwargs = dict(batch)
        if "input_ids" in batch_kwargs:
            batch_kwargs.setdefault("labels", batch_kwargs["input_ids"])
        output = model(**batch_kwargs)
    else:
        output = model(batch) if isinstance(batch, Tensor) else model(*batch)
    return _scalar(getattr(output, "loss", output), type(model).__name__)


def _scalar(loss: Any, giver: str) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UserError(
            "verify.not-one-loss",
            f"{giver} returned {got}, expected one loss; add labels to the batch, or pass loss_fn=, a function of "
            "(model, batch) that returns a scalar",
        )
    return loss


def _weight_shapes(root: nn.Module, without: set[nn.Module]) -> Iterator[tuple[int, int]]:
    """Sizes of the weights that multiply tokens; what is inside a linear layer, adapters say, is left out."""
    if root in without:
        return
    if (widths := linear_widths(root)) is not None:
        yield widths
        return
    for weight in root.parameters(recurse=False):
        if weight.dim() == 3:  # experts
            yield weight.shape[-2], weight.shape[-1]
    for child in root.children():
        yield from _weight_shapes(child, without)


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
