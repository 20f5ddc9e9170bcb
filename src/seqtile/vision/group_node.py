"""Compute features of pictures one group after another, as one autograd node.

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

    The number of rows of a group is known only after it has run.
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
    """The identity, with a node that holds memory until it is freed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, nbytes: int) -> Tensor:
        ctx.kept = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class GroupedCall:
    """One call of a tower's method, computed in groups of pictures or sounds.

    Args:
        owner: the module that has the method.
        method: computes the features.
        units: pictures, crops or frames of the call; no group divides one.
        groups: first unit of each group, and the one after its last.
        form: form of the method's results.
        frozen: layers that a recompute leaves out.
    """

    def __init__(
        self, owner: nn.Module, method: Callable[..., Any], units: Units, groups: Sequence[tuple[int, int]], form: Form,
        *, frozen: FrozenLayers | None = None,
    ) -> None:  # fmt: skip
        self._method, self._units, self.groups, self._form, self._frozen = method, units, groups, form, frozen
        self._swap = ParameterSwap((owner,))
        self.shapes: dict[int, GroupShapes] = {}

    def run(self, weights: Weights, changed: Changed = str) -> Any:
        """Compute the result of the whole call, without what :data:`seqtile.vision.feature_form.INNER` names.

        Args:
            weights: the owner's live weights by name.
            changed: as for :func:`seqtile.ops.tile_checkpoint.run_in_tiles`.

        Cost:
            Under gradients the products of the tower under one checkpoint; with ``frozen`` only the trained modules
            run again. Memory between forward and backward: the pixels and the features, with ``frozen`` also the
            inputs of the trained modules; in a forward or backward also what the tower keeps of one group.
        """
        units = self._units
        cuts = GroupCuts(units, self.groups)
        rows = run_with_cuts(self._run_group, units.tensors, cuts, weights=weights, changed=changed)
        entries = []
        for number in range(len(self.shapes[0].entries)):
            counts = [0] * units.owner_count  # of each owner
            for index, group in enumerate(self.groups):
                for owner_number, count in zip(units.pieces(*group), self.shapes[index].entries[number], strict=True):
                    counts[owner_number] += count
            entries.append(counts)
        return restored(self._form, iter(rows), iter(entries), iter(self.shapes[0].tails), units.owner_count)

    def _run_group(
        self, tensors: Sequence[Tensor], aliases: Mapping[str, Tensor], _: State, index: int
    ) -> tuple[list[Tensor], State]:
        with inside():
            return self.compute(tensors, aliases, index), ()

    def compute(self, tensors: Sequence[Tensor], aliases: Mapping[str, Tensor], index: int) -> list[Tensor]:
        """The features of one group."""
        if not aliases:
            return self._features(tensors, index)
        named = {f"0.{name}": alias for name, alias in aliases.items()}
        features: list[Tensor] = call_with_weights(self._swap, named, (self._features, tensors, index))
        return features

    def _features(self, tensors: Sequence[Tensor], index: int) -> list[Tensor]:
        self.shapes[index] = GroupShapes()
        with nullcontext() if self._frozen is None else self._frozen.of(index):
            result = self._method(**self._units.arguments(tensors, *self.groups[index]))
            return [*rows_of(self._form, result, self.shapes[index])]


class PlannedCall(GroupedCall):
    """A call of a plan, whose pictures have one size: of more than four groups only the first two and the last run.

    The groups between allocate as much as they would return and keep, by ``live_bytes()`` around the second group.
    """

    def __init__(
        self, live_bytes: Callable[[], int], owner: nn.Module, method: Callable[..., Any], units: Units,
        groups: Sequence[tuple[int, int]], form: Form, *, frozen: FrozenLayers | None = None,
    ) -> None:  # fmt: skip
        super().__init__(owner, method, units, groups, form, frozen=frozen)
        self._live_bytes, self._live_at = live_bytes, dict[int, int]()
        self._second_group: list[tuple[int, int, torch.dtype]] = []  # rows, width and dtype of its features
        self._skips = len(self.groups) > 4
        if self._skips:
            self.groups = [*self.groups[:2], (self.groups[2][0], self.groups[-1][0]), self.groups[-1]]

    def compute(self, tensors: Sequence[Tensor], aliases: Mapping[str, Tensor], index: int) -> list[Tensor]:
        self._live_at.setdefault(index, self._live_bytes())
        if self._skips and index == 2:
            return self._allocate(aliases)
        features = super().compute(tensors, aliases, index)
        if index == 1:
            self._second_group = [(len(rows), rows.shape[-1], rows.dtype) for rows in features]
        return features

    def _allocate(self, aliases: Mapping[str, Tensor]) -> list[Tensor]:
        """Empty features of the skipped groups, and in the forward as many bytes as their graphs keep."""
        (begin, end), (first, last) = self.groups[2], self.groups[1]
        times, pieces = (end - begin) / (last - first), len(self._units.pieces(begin, end))
        kept_bytes = 0
        if 2 not in self.shapes:  # in the forward
            feature_bytes = sum(rows * width * dtype.itemsize for rows, width, dtype in self._second_group)
            kept_bytes = max(0, round((self._live_at[2] - self._live_at[1] - feature_bytes) * times))
        shapes = self.shapes[2] = GroupShapes()
        shapes.tails = self.shapes[1].tails
        shapes.entries = [[round(sum(entry) * times / pieces)] * pieces for entry in self.shapes[1].entries]
        sizes = [((round(rows * times), width), dtype) for rows, width, dtype in self._second_group]
        trained = [alias for alias in aliases.values() if alias.requires_grad]
        if not trained:
            device = self._units.tensors[0].device
            return [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]
        weight = min(trained, key=Tensor.numel)
        element = _Keeping.apply(weight.flatten()[:1], kept_bytes)  # type: ignore[no-untyped-call]
        return [element.to(dtype).expand(size).clone() for size, dtype in sizes]
