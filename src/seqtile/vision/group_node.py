"""Features of pictures, one group after another, as one node of the graph.

The node is that of tiled layers (:mod:`seqtile.ops.tile_checkpoint`): pixels are saved, each group is recomputed in
backward with its random numbers, and each weight gets one gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seqtile.blocks.instance import inside
from seqtile.engines.flat import ParameterSwap, call_with_weights
from seqtile.ops.tile_checkpoint import Changed, State, Weights, run_with_cuts
from seqtile.ops.token_tiles import Cuts, Outputs, refuse_trace
from seqtile.vision.feature_form import Form, GroupShapes, joined, restored, rows_of
from seqtile.vision.frozen_layers import FrozenLayers
from seqtile.vision.picture_call import Units


class GroupCuts(Cuts):
    """Groups of pictures: a tile is a slice of each input along its first dimension, an output has rows ``[R, D]``.

    How many rows a group has is known once it has run.
    """

    def __init__(self, units: Units, groups: Sequence[tuple[int, int]]) -> None:
        refuse_trace()
        self.sizes = tuple(end - first for first, end in groups)
        self.ranges = tuple(units.slices(*group) for group in groups)
        self.of_outputs: list[tuple[int, int]] = []

    @staticmethod
    def rows(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [*tensors]

    def tiles(self, rows: Sequence[Tensor], index: int) -> list[Tensor]:
        return [tensor.narrow(0, *self.ranges[index]) for tensor in rows]

    def of_whole(self, whole: Tensor) -> Tensor:
        return whole

    def part(self, whole: Tensor, index: int) -> Tensor:
        """A group's rows of an output's gradient."""
        return whole.narrow(0, *self.of_outputs[index])

    def outputs(self) -> Outputs:
        return GroupOutputs(self)


class GroupOutputs(Outputs):
    """Rows of features, joined after the last group."""

    def __init__(self, cuts: GroupCuts) -> None:
        super().__init__(cuts)
        self.of_outputs = cuts.of_outputs
        self._parts: list[list[Tensor]] = []

    def write(self, index: int, result: list[Tensor]) -> list[Tensor]:
        if not self._parts:
            self._parts = [[] for _ in result]
            self.needs_gradient = [False] * len(result)
        start = sum(self.of_outputs[-1]) if self.of_outputs else 0
        (size,) = {len(rows) for rows in result}
        self.of_outputs.append((start, size))
        for number, rows in enumerate(result):
            self._parts[number].append(rows.detach())
            self.needs_gradient[number] |= rows.requires_grad
        return result

    def finish(self) -> None:
        while self._parts:  # one tensor's parts are released before the next one's are joined
            self.buffers.append(joined(self._parts.pop(0)))

    def result(self, joined: Sequence[Tensor]) -> Any:
        return [*joined]


class _Keeping(torch.autograd.Function):
    """Its input, and a node that keeps memory until it is freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nbytes: int) -> Tensor:
        ctx.kept = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def features_in_groups(
    owner: nn.Module,
    method: Callable[..., Any],
    units: Units,
    groups: Sequence[tuple[int, int]],
    form: Form,
    weights: Weights,
    changed: Changed = str,
    *,
    frozen: FrozenLayers | None = None,
    live_bytes: Callable[[], int] | None = None,
) -> Any:
    """One call of ``method`` in groups.

    Args:
        owner: whose method it is.
        method: computes features.
        units: what its call is cut into.
        groups: first unit of each group, and the one after its last.
        form: of its results.
        weights: the owner's live weights by name.
        changed: as for :func:`seqtile.ops.tile_checkpoint.run_in_tiles`.
        frozen: layers that a recompute leaves out.
        live_bytes: counts live bytes, for plans, where pictures have one size: of more than four groups the first two
            and the last one run, and what those between give and keep is only allocated.

    Returns:
        The result of the whole call, but for what is in :data:`seqtile.vision.feature_form.INNER`.

    Cost:
        Under gradients the products of the tower under one checkpoint; with ``frozen`` only the trained modules run
        again. Memory between forward and backward: the pixels and the features, with ``frozen`` also the
        inputs of the trained modules; in a forward or backward also what the tower keeps of one group.
    """
    swap, shapes = ParameterSwap((owner,)), dict[int, GroupShapes]()
    few = live_bytes is not None and len(groups) > 4
    if few:
        groups = [*groups[:2], (groups[2][0], groups[-1][0]), groups[-1]]
    of_second: list[tuple[int, int, torch.dtype]] = []
    live_at: dict[int, int] = {}

    def features(tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        shapes[index] = GroupShapes()
        with nullcontext() if frozen is None else frozen.of(index):
            rows = [*rows_of(form, method(**units.arguments(tensors, *groups[index])), shapes[index])]
        if index == 1:
            of_second[:] = [(len(part), part.shape[-1], part.dtype) for part in rows]
        return rows

    def allocated(aliases: Mapping[str, Tensor]) -> list[Tensor]:
        """What the groups between the second and the last give."""
        (begin, end), (first, last) = groups[2], groups[1]
        times, pieces = (end - begin) / (last - first), len(units.pieces(*groups[2]))
        of_results = sum(rows * width * dtype.itemsize for rows, width, dtype in of_second)
        kept = 0 if 2 in shapes else max(0, round((live_at[2] - live_at[1] - of_results) * times))  # by a forward
        shapes[2] = GroupShapes()
        shapes[2].tails = shapes[1].tails
        shapes[2].entries = [[round(sum(entry) * times / pieces)] * pieces for entry in shapes[1].entries]
        trained = [alias for alias in aliases.values() if alias.requires_grad]
        weight = min(trained, key=Tensor.numel) if trained else None
        if weight is None:
            return [
                torch.empty(round(rows * times), width, dtype=dtype, device=units.tensors[0].device)
                for rows, width, dtype in of_second
            ]
        first_value = _Keeping.apply(weight.flatten()[:1], kept)  # type: ignore[no-untyped-call]
        return [first_value.to(dtype).expand(round(rows * times), width).clone() for rows, width, dtype in of_second]

    def run(tensors: Sequence[Tensor], aliases: Mapping[str, Tensor], _: State, index: int) -> tuple[Any, State]:
        with inside():
            if live_bytes is not None:
                live_at.setdefault(index, live_bytes())
            if few and index == 2:
                return allocated(aliases), ()
            if not aliases:
                return features(tensors, index), ()
            named = {f"0.{name}": alias for name, alias in aliases.items()}
            return call_with_weights(swap, named, (features, tensors, index)), ()

    rows = run_with_cuts(run, units.tensors, GroupCuts(units, groups), weights=weights, changed=changed)
    entries = []
    for number in range(len(shapes[0].entries)):
        of_owners = [0] * units.owner_count
        for index, group in enumerate(groups):
            for owner_number, count in zip(units.pieces(*group), shapes[index].entries[number], strict=True):
                of_owners[owner_number] += count
        entries.append(of_owners)
    return restored(form, iter(rows), iter(entries), iter(shapes[0].tails), units.owner_count)
