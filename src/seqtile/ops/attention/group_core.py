"""The computation between attention's projections, once per group of key-value heads, and its gradients.

What the kernels returned is recorded (:mod:`seqtile.ops.attention.kernel_calls`): a backward runs no kernel forward
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from seqtile.ops.attention.backends import AllowedKernels
from seqtile.ops.attention.kernel_calls import Position, Recorded, record, replayed
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.normed_linears import sums_for
from seqtile.ops.rng import Autocast, RandomState
from seqtile.ops.token_tiles import refuse_second_derivative, refuse_trace
from seqtile.tiling import even_sizes, tile_ranges

Between = Callable[["HeadGroup", Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Any]]
"""The computation between the projections: (cut, its ``(q, k, v)``, other weights) -> its output, and what the model's
forward returns beside it."""


@dataclass(frozen=True)
class HeadGroup:
    """Consecutive key-value heads, with the query heads that read them.

    Attributes:
        start: number of the first.
        size: how many.
        total: how many there are in all.
    """

    start: int
    size: int
    total: int

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """The slice of a tensor that has the heads along ``dim``, with or without their elements."""
        width = tensor.shape[dim] // self.total
        return tensor.narrow(dim, self.start * width, self.size * width)


@cache
def cut_heads(total: int, per_pass: int) -> tuple[HeadGroup, ...]:
    """``total`` key-value heads, ``per_pass`` at a time, as equal as they come."""
    sizes = even_sizes(total, -(-total // min(max(per_pass, 1), total)))
    return tuple([HeadGroup(start, size, total) for start, size in tile_ranges(sizes)])


@dataclass(frozen=True)
class Done:
    """State that the passes of one forward save for their backward.

    Attributes:
        whole: the output of all passes.
        beside: what the last pass returned beside its output.
        tensors: what their kernels returned beside it.
        recorded: what goes where.
        random: generator state before the passes, None when nothing was random.
        after: the same after them.
        kernels: SDPA's kernels that the forward could choose from.
    """

    whole: Tensor
    beside: Any
    tensors: Sequence[Tensor]
    recorded: tuple[Recorded, ...]
    random: RandomState | None
    after: RandomState | None
    kernels: AllowedKernels

    @property
    def notes(self) -> tuple[Any, ...]:
        """The arguments that are not tensors, which an autograd node may hold."""
        return self.recorded, self.random, self.after, self.kernels


@dataclass(frozen=True)
class Groups:
    """The passes over the heads of one attention.

    Attributes:
        between: what runs once per pass.
        cuts: the passes.
        heads_dim: where the heads are in ``q, k, v``.
        output_dim: where they are in what ``between`` returns.
        autocast: autocast state of the forward.
        draws: whether ``between`` draws random numbers.
    """

    between: Between
    cuts: tuple[HeadGroup, ...]
    heads_dim: int
    output_dim: int
    autocast: Autocast
    draws: bool

    def forward(self, qkv: Sequence[Tensor], weights: Sequence[Tensor], *, for_backward: bool) -> Done:
        """Run every pass; ``for_backward`` records what :meth:`backward` needs."""
        whole: Tensor | None = None
        beside: Any = None
        random = RandomState(qkv[0].device) if self.draws else None
        tensors: list[Tensor] = []
        notes = []
        for cut in self.cuts:
            output, beside, recorded, extra = self.run(cut, qkv, weights, for_backward)
            notes.append(recorded)
            tensors += extra
            if whole is None:
                shape = list(output.shape)
                shape[self.output_dim] = shape[self.output_dim] // cut.size * cut.total  # all heads
                whole = output if cut.size == cut.total else output.new_empty(shape)
            if whole is not output:
                cut.of(whole, self.output_dim).copy_(output)
            del output
        assert whole is not None
        after = RandomState(whole.device) if self.draws else None
        return Done(whole, beside, tensors, tuple(notes), random, after, AllowedKernels.now())

    def run(
        self, cut: HeadGroup, qkv: Sequence[Tensor], weights: Sequence[Tensor], for_backward: bool
    ) -> tuple[Tensor, Any, Recorded, Sequence[Tensor]]:
        """One pass: its output, what is beside it, and what its kernels returned."""
        heads = [cut.of(tensor, self.heads_dim) for tensor in qkv]
        if for_backward:
            heads = [tensor.detach().requires_grad_() for tensor in heads]
            weights = [weight.detach().requires_grad_(weight.requires_grad) for weight in weights]
        with self.autocast.on():
            return record(partial(self.between, cut, heads, weights), for_backward=for_backward)

    def recorded(self, done: Done) -> Iterator[tuple[HeadGroup, Recorded, Sequence[Tensor]]]:
        """Each pass with what its kernels returned in the forward."""
        left = 0
        for cut, recorded in zip(self.cuts, done.recorded, strict=True):
            count = sum(isinstance(leaf, Position) for *_, leaves in recorded.calls for leaf in leaves)
            yield cut, recorded, done.tensors[left : left + count]
            left += count

    def backward(
        self,
        qkv: Sequence[Tensor],
        into: Sequence[Tensor],
        weights: Sequence[tuple[Tensor, Sum | None]],
        done: Done,
        gradient_of: Callable[[HeadGroup], Tensor],
    ) -> None:
        """Write the gradients of ``q, k, v`` into ``into``, which may be themselves, and add those of the weights."""
        with done.random.replayed() if done.random else nullcontext(), done.kernels.allowed():
            for cut, recorded, extra in self.recorded(done):
                leaves = [cut.of(tensor, self.heads_dim).detach().requires_grad_() for tensor in qkv]
                others = [weight.detach().requires_grad_(total is not None) for weight, total in weights]
                with torch.enable_grad(), self.autocast.on():
                    with replayed(recorded, extra, cut.of(done.whole, self.output_dim)):
                        output, _ = self.between(cut, leaves, others)
                inputs = [*leaves, *(weight for weight in others if weight.requires_grad)]
                # Dense, as for every group: PyTorch's cache of cuDNN plans ignores the strides of output gradients, and
                # would read a slice with those of an earlier gradient.
                gradient = gradient_of(cut).to(output.dtype).reshape(output.shape).contiguous()
                del extra, recorded
                gradients = iter(torch.autograd.grad(output, inputs, gradient, allow_unused=True))
                del output, gradient, inputs
                for target in into:
                    self._write(cut, target, next(gradients))
                for _, total in weights:
                    if total is not None and (weight_gradient := next(gradients)) is not None:
                        total.add(weight_gradient)

    def _write(self, cut: HeadGroup, target: Tensor, gradient: Tensor | None) -> None:
        heads = cut.of(target, self.heads_dim)
        heads.zero_() if gradient is None else heads.copy_(gradient)


REFUSED = (
    "head-wise attention does not support double backward, got create_graph=True; call seqtile.undo for this "
    "backward, or drop create_graph"
)
"""How a second derivative is refused here."""


def in_groups(qkv: Sequence[Tensor], weights: Sequence[Tensor], groups: Groups) -> tuple[Tensor, Any]:
    """``groups.between`` on queries, keys and values that are there already, one pass after another.

    For projections that run as modules, and for heads that other ranks have sent. Costs their gradients beside them,
    which :func:`seqtile.ops.attention.head_groups.head_wise` does not.

    Args:
        qkv: queries, keys and values.
        weights: other weights that ``groups.between`` reads.
        groups: the passes.

    Returns:
        The output, and what the last pass returned beside it.
    """
    refuse_trace()
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*qkv, *weights)):
        done = groups.forward(qkv, weights, for_backward=False)
        return done.whole, done.beside
    result: tuple[Tensor, Any] = _InGroups.apply(groups, *qkv, *weights)  # type: ignore[no-untyped-call]
    return result


class _InGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: Groups, *tensors: Tensor) -> tuple[Tensor, Any]:
        ctx.groups = groups
        ctx.set_materialize_grads(False)
        done = groups.forward(tensors[:3], tensors[3:], for_backward=True)
        ctx.count, ctx.notes = len(tensors), done.notes
        ctx.save_for_backward(*tensors, done.whole, *done.tensors)
        return done.whole, done.beside

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> Any:
        refuse_second_derivative(REFUSED)
        if gradient is None:
            return (None,) * len(ctx.needs_input_grad)
        groups: Groups = ctx.groups
        saved, count = ctx.saved_tensors, ctx.count
        qkv, weights = saved[:3], saved[3:count]
        done = Done(saved[count], None, saved[count + 1 :], *ctx.notes)
        sums = sums_for(weights, ctx.needs_input_grad[4:])
        gradients = [torch.empty_like(tensor) for tensor in qkv]
        pairs = list(zip(weights, sums, strict=True))
        groups.backward(qkv, gradients, pairs, done, lambda cut: cut.of(gradient, groups.output_dim))
        return None, *gradients, *(None if total is None else total.result() for total in sums)
