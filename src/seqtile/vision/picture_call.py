"""One call that computes the features of pictures: where it can be cut, and its arguments for a part of them.

Models of Transformers compute them in one method, from the pixels to the features that replace image tokens: the tower,
the merger or projector behind it, and features for deeper layers. Pixels are flat patches with a grid (frames, height
and width of each picture), or a tensor with one picture, or one row of pictures, along its first dimension.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from seqtile._compat import active_fake_mode, disable_current_modes
from seqtile.state.tile_call import OF_DOCUMENTS


class NotCutError(Exception):
    """Why a call cannot be cut."""


class PictureCall:
    """The arguments of one call, by name.

    Args:
        method: the method that is called.
        args, kwargs: its arguments.
    """

    def __init__(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        names = [*inspect.signature(method).parameters]
        self.arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        self.name = names[0]
        pixels = self.arguments.get(self.name)
        if not isinstance(pixels, Tensor):
            raise NotCutError(f"its {self.name} is no tensor")
        self.pixels = pixels
        self.grid_name = next((name for name in self.arguments if name.endswith("grid_thw")), "")

    def others(self) -> dict[str, Any]:
        """Arguments that may have one entry per picture: tensors and lists."""
        special = (self.name, self.grid_name, *OF_DOCUMENTS)
        return {
            name: value for name, value in self.arguments.items()
            if name not in special and (isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim()))
        }  # fmt: skip


class Units(ABC):
    """The units into which a call can be cut.

    Attributes:
        noun: the units' name in messages, plural.
        tensors: the tensors that are cut along their first dimension, the pixels first.
        rows: rows of ``tensors`` in each unit.
        owners: number of the picture, or row of pictures, that each unit belongs to; a result has one entry per owner.
        owner_count: number of owners.
    """

    noun: ClassVar[str]
    tensors: list[Tensor]
    rows: list[int]
    owners: list[int]
    owner_count: int

    def __init__(self, call: PictureCall) -> None:
        self.call = call

    @classmethod
    @abstractmethod
    def sample(cls, call: PictureCall, patches: int) -> tuple[PictureCall, list[tuple[int, int]]]:
        """A small call like ``call`` with other pixels, and the groups to try it in.

        Args:
            call: the call.
            patches: number of patches, along one side, that are merged into one feature.
        """

    @abstractmethod
    def arguments(self, tensors: Sequence[Tensor], first: int, end: int) -> dict[str, Any]:
        """Arguments for the units from ``first`` up to ``end``, with their slices of :attr:`tensors`."""

    @abstractmethod
    def patches(self, patch_size: int) -> list[int]:
        """Approximate number of patches of each unit."""

    def pieces(self, first: int, end: int) -> list[int]:
        """The owners of a group's entries of a result."""
        return self.owners[first:end]

    def pixels_of(self, first: int, end: int) -> Tensor:
        """The pixels of some units in the call, as a view."""
        return self.call.pixels.narrow(0, *self.slices(first, end))

    def slices(self, first: int, end: int) -> tuple[int, int]:
        """(first row, number of rows) of a group in :attr:`tensors`."""
        return sum(self.rows[:first]), sum(self.rows[first:end])


class Frames(Units):
    """Frames of flat patches with a grid."""

    noun = "frames"

    def __init__(self, call: PictureCall) -> None:
        super().__init__(call)
        if unknown := [*call.others()]:
            raise NotCutError(f"{unknown[0]} is given")
        self.grid: list[list[int]] = call.arguments[call.grid_name].tolist()
        self.tensors, self.owner_count = [call.pixels], len(self.grid)
        self._split()
        if sum(self.rows) != len(call.pixels):
            raise NotCutError(f"its pixels have {len(call.pixels):,} patches, and its grid {sum(self.rows):,}")

    def _split(self) -> None:
        self.owners = [number for number, (frames, _, _) in enumerate(self.grid) for _ in range(frames)]
        self.rows = [self.grid[owner][1] * self.grid[owner][2] for owner in self.owners]

    @classmethod
    def sample(cls, call: PictureCall, patches: int) -> tuple[PictureCall, list[tuple[int, int]]]:
        frames = (3, 2) if has_videos(call) else (1, 1)
        sizes = [(frames[0], 2 * patches, 3 * patches), (frames[1], 4 * patches, 2 * patches)]
        rows = sum(count * height * width for count, height, width in sizes)
        pixels = random_like(call.pixels.new_empty(rows, *call.pixels.shape[1:]))
        named = {**call.arguments, call.name: pixels, call.grid_name: _grid_like(call, sizes)}
        return _of(call, named), [(0, 2), (2, 4), (4, 5)] if has_videos(call) else [(0, 1), (1, 2)]

    def pieces(self, first: int, end: int) -> list[int]:
        return [owner for owner, _ in groupby(self.owners[first:end])]

    def arguments(self, tensors: Sequence[Tensor], first: int, end: int) -> dict[str, Any]:
        runs = [(owner, len([*frames])) for owner, frames in groupby(self.owners[first:end])]
        grid = [[frames, *self.grid[owner][1:]] for owner, frames in runs]
        return self._with_grid(tensors, grid)

    def _with_grid(self, tensors: Sequence[Tensor], grid: list[list[int]]) -> dict[str, Any]:
        part = _grid_like(self.call, grid)
        return {**self.call.arguments, self.call.name: tensors[0], self.call.grid_name: part}

    def patches(self, patch_size: int) -> list[int]:
        return self.rows


class Clips(Frames):
    """Whole videos and pictures of flat patches with a grid, if frames of one video depend on each other."""

    noun = "videos"

    def _split(self) -> None:
        self.owners = [*range(len(self.grid))]
        self.rows = [frames * height * width for frames, height, width in self.grid]

    @classmethod
    def sample(cls, call: PictureCall, patches: int) -> tuple[PictureCall, list[tuple[int, int]]]:
        return super().sample(call, patches)[0], [(0, 1), (1, 2)]

    def arguments(self, tensors: Sequence[Tensor], first: int, end: int) -> dict[str, Any]:
        return self._with_grid(tensors, self.grid[first:end])


class SinglePictures(Units):
    """Pictures along the first dimension of the pixels, each with its crops; or sounds."""

    noun = "pictures"

    def __init__(self, call: PictureCall) -> None:
        super().__init__(call)
        self.owner_count = len(call.pixels)
        self.owners = [*range(self.owner_count)]
        self.rows = [1] * self.owner_count
        self.tensors, self._cut, self._lists = [call.pixels], [call.name], dict[str, Any]()
        for name, value in call.others().items():
            if len(value) != self.owner_count:
                raise NotCutError(f"its {name} has no entry per picture")
            if isinstance(value, Tensor):
                self.tensors.append(value)
                self._cut.append(name)
            else:
                self._lists[name] = value

    @classmethod
    def sample(cls, call: PictureCall, patches: int) -> tuple[PictureCall, list[tuple[int, int]]]:
        cls(call)  # raises where it cannot be cut
        chosen = [0, 1 % len(call.pixels)]
        few = {
            name: value[chosen] if isinstance(value, Tensor) else type(value)(value[number] for number in chosen)
            for name, value in call.others().items()
        }
        named = {**call.arguments, **few, call.name: random_like(call.pixels[chosen])}
        return _of(call, named), [(0, 1), (1, 2)]

    def arguments(self, tensors: Sequence[Tensor], first: int, end: int) -> dict[str, Any]:
        lists = {name: value[first:end] for name, value in self._lists.items()}
        return {**self.call.arguments, **dict(zip(self._cut, tensors, strict=True)), **lists}

    def patches(self, patch_size: int) -> list[int]:
        pixels = self.call.pixels
        time_steps = pixels.shape[-1]  # of a sound
        per_picture = time_steps if pixels.dim() == 3 else pixels[0].numel() // (pixels.shape[-3] * patch_size**2)
        return [max(1, per_picture)] * len(self.rows)


class FramesOfRows(Units):
    """Pictures or frames in rows of equal length, ``[rows, pictures, ...]``."""

    noun = "frames"
    drops_empty = False
    """Whether pictures whose pixels are all zero only pad a row, and have no features."""

    def __init__(self, call: PictureCall) -> None:
        super().__init__(call)
        lead = call.pixels.shape[:2]
        self._cut, tensors = [call.name], [call.pixels]
        for name, value in call.others().items():
            if not isinstance(value, Tensor) or value.shape[:2] != lead:
                raise NotCutError(f"its {name} has no entry per frame")
            self._cut.append(name)
            tensors.append(value)
        self.tensors = [tensor.reshape(-1, 1, *tensor.shape[2:]) for tensor in tensors]
        self.owner_count = lead[0]
        self.owners = [row for row in range(lead[0]) for _ in range(lead[1])]
        if self.drops_empty:
            is_picture = self.tensors[0].flatten(1).any(1)  # [rows * pictures]
            self.owners = [owner for owner, kept in zip(self.owners, is_picture.tolist(), strict=True) if kept]
            if not self.owners:
                raise NotCutError("it has no picture")
            if len(self.owners) < len(is_picture):
                self.tensors = [tensor[is_picture] for tensor in self.tensors]
        self.rows = [1] * len(self.owners)

    @classmethod
    def sample(cls, call: PictureCall, patches: int) -> tuple[PictureCall, list[tuple[int, int]]]:
        rows, pictures = ([0, 1 % size] for size in call.pixels.shape[:2])

        def few(tensor: Tensor) -> Tensor:
            return tensor[rows][:, pictures]

        pixels = random_like(few(call.pixels))
        pixels[-1, -1] = 0
        cls(call)  # raises where it cannot be cut
        named = {name: few(value) for name, value in call.others().items()}
        groups = [(0, 1), (1, 3)] if cls.drops_empty else [(0, 1), (1, 3), (3, 4)]
        return _of(call, {**call.arguments, **named, call.name: pixels}), groups

    def arguments(self, tensors: Sequence[Tensor], first: int, end: int) -> dict[str, Any]:
        return {**self.call.arguments, **dict(zip(self._cut, tensors, strict=True))}

    def pixels_of(self, first: int, end: int) -> Tensor:
        return self.call.pixels.flatten(0, 1)[first:end]

    def patches(self, patch_size: int) -> list[int]:
        per_frame = self.tensors[0][0].numel() // (self.tensors[0].shape[-3] * patch_size**2)
        return [max(1, per_frame)] * len(self.rows)


class PicturesOfRows(FramesOfRows):
    """Pictures in rows of equal length that empty pictures pad."""

    noun = "pictures"
    drops_empty = True


def ways_to_cut(call: PictureCall) -> list[type[Units]]:
    """The ways in which a call may be cut, the smallest parts first."""
    if call.grid_name:
        return [Frames, Clips]
    if call.pixels.dim() == 5:
        return [FramesOfRows, PicturesOfRows, SinglePictures]
    return [SinglePictures] if call.pixels.dim() in (3, 4) else []


def has_videos(call: PictureCall) -> bool:
    """Whether some of its pictures have more than one frame; a model may take those by another method."""
    return bool((call.arguments[call.grid_name][:, 0] > 1).any())


def _grid_like(call: PictureCall, grid: Sequence[Sequence[int]]) -> Tensor:
    """A grid tensor of other pictures; in a plan it has values like the call's grid, since shapes depend on them."""
    of_call = call.arguments[call.grid_name]
    with disable_current_modes() if active_fake_mode() is not None else nullcontext():
        return torch.tensor([*map(list, grid)], dtype=of_call.dtype, device=of_call.device)


def random_like(tensor: Tensor) -> Tensor:
    drawn = torch.randn(tensor.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return drawn.to(tensor.device, tensor.dtype)


def _of(call: PictureCall, arguments: dict[str, Any]) -> PictureCall:
    """A call like ``call`` with other arguments."""
    other = object.__new__(PictureCall)
    other.__dict__.update({**call.__dict__, "arguments": arguments, "pixels": arguments[call.name]})
    return other
