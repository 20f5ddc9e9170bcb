"""Pictures in the rows of a vision-language model: how many tokens they are, and what the model is given of them."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import TorchDispatchMode, disable_current_modes
from seqtile._errors import UserError
from seqtile.devices import package_version

ANY_SIZE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose vision tower takes pictures of any size, as flat patches and a grid."""

ONE_SIZE = ("llava", "gemma3")
"""Model types whose processor makes every picture as large as the vision tower's ``image_size``."""

_TAPPED = "deepstack_visual_indexes"
"""Which layers of a tower hand their output to the language model besides."""

_HELPERS = "get_vision_"
"""How the functions begin that work out positions and lengths from the grid of patches."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of each row.

    Attributes:
        count: how many.
        each: tokens of one of them in the row.
        size: (height, width) in pixels, as the vision tower gets them.
        values: shape of the pixel values of one picture.
        grid: patches of a picture in (time, height, width); empty for a tower of one size.
    """

    count: int
    each: int
    size: tuple[int, int]
    values: tuple[int, ...]
    grid: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Of each row, those that are pictures."""
        return self.count * self.each


def read_pictures(
    config: Any, count: int | None = None, size: tuple[int, int] | None = None, tokens: int | None = None
) -> Pictures:
    """The pictures of each row of a model, by number and size, or by the tokens that they make together.

    Args:
        config: the model's configuration.
        count: pictures of each row.
        size: (height, width) of each in pixels; for a tower of one size it may be left out, and changes nothing.
        tokens: of each row, those that are pictures, instead of both.

    Raises:
        UserError: the model takes no pictures, or not so many tokens.
    """
    kind = config.model_type
    vision = getattr(config, "vision_config", None)
    if vision is None or kind not in ANY_SIZE + ONE_SIZE:
        what = "takes no pictures" if vision is None else "has a vision tower that is not known here"
        raise UserError(
            f"model type {kind!r} {what}; pictures are planned for {', '.join(ANY_SIZE + ONE_SIZE)}; for others count "
            "their tokens into the length"
        )
    if find_spec("transformers.vision_utils") is None:
        raise UserError(
            "pictures are planned with versions of Transformers that have transformers.vision_utils, which the "
            f"installed {package_version('transformers')} has not; use a newer one, or count the tokens of pictures as "
            "text"
        )
    if kind in ONE_SIZE:
        return _of_one_size(config, vision, count, tokens)
    patch, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    unit = patch * merge
    if tokens is not None:
        count, height, width = 1, merge, tokens * merge
    elif size is None:
        raise UserError(f"model type {kind!r} takes pictures of any size; give --image-size HEIGHTxWIDTH too")
    else:  # to the nearest whole number of tokens, as Transformers' processors resize
        height, width = (max(1, round(side / unit)) * merge for side in size)
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    return Pictures(
        count=count or 1,
        each=height * width // merge**2,
        size=(height * patch, width * patch),
        values=(height * width, channels * frames * patch**2),
        grid=(1, height, width),
    )


def _of_one_size(config: Any, vision: Any, count: int | None, tokens: int | None) -> Pictures:
    side = vision.image_size
    each = getattr(config, "mm_tokens_per_image", None)
    if each is None:
        each = (side // vision.patch_size) ** 2 + (getattr(config, "vision_feature_select_strategy", "") == "full")
    if tokens is not None:
        if tokens % each:
            raise UserError(
                f"{tokens:,} image tokens are no whole number of pictures of {each:,} tokens, which is what model type "
                f"{config.model_type!r} makes of each; use --images N"
            )
        count = tokens // each
    return Pictures(count or 1, each, (side, side), (3, side, side))


def add_pictures(model: Any, pictures: Pictures, ids: Tensor) -> dict[str, Tensor]:
    """Put the tokens of pictures first into ``ids`` ``[B, T]``; returns what the model is given besides."""
    rows, length = ids.shape
    ids[:, : pictures.tokens] = model.config.image_token_id
    count, (first, *rest) = rows * pictures.count, pictures.values
    values = (count * first, *rest) if pictures.grid else (count, first, *rest)
    given = {"pixel_values": torch.zeros(values, device=ids.device)}
    if "token_type_ids" in inspect.signature(type(model).forward).parameters:
        given["token_type_ids"] = torch.zeros_like(ids)
    if pictures.grid:
        with disable_current_modes():
            given["image_grid_thw"] = torch.tensor([pictures.grid] * count)
        # The model works these out from the grid and the ids, in integers.
        given["position_ids"] = torch.zeros(3, rows, length, dtype=torch.long, device=ids.device)
    return given


def tower_depths(config: Any) -> tuple[int, int, int] | None:
    """Two small depths of a vision tower and its own; None where it is hardly deeper."""
    vision = config.vision_config
    whole = getattr(vision, _depth_of(vision))
    few = max(2, len(getattr(vision, _TAPPED, None) or ()))
    return (few, few + 1, whole) if whole > few + 2 else None


def with_tower(config: Any, depth: int) -> Any:
    """A copy of ``config`` with a vision tower of ``depth`` layers."""
    config = copy.deepcopy(config)
    vision = config.vision_config
    setattr(vision, _depth_of(vision), depth)
    if tapped := getattr(vision, _TAPPED, None):
        setattr(vision, _TAPPED, list(range(len(tapped))))
    return config


def _depth_of(vision: Any) -> str:
    return "depth" if hasattr(vision, "depth") else "num_hidden_layers"


@contextmanager
def known_grids(model: nn.Module, tokens: int, *, whole: bool) -> Iterator[None]:
    """Inside, what depends on the grid of a picture's patches is worked out on numbers, though a step runs on shapes.

    The grid is a real tensor: how many patches there are decides the shapes that follow.

    Args:
        model: with a vision tower.
        tokens: of a batch, those that are pictures.
        whole: attention runs once for all windows and pictures, as FlashAttention does, and not once for each.
    """
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    found = [
        (module, name, function)
        for module in modules
        for name, function in vars(module).items()
        if name.startswith(_HELPERS) and inspect.isfunction(function)
    ]
    for module, name, function in found:
        setattr(module, name, _on_numbers(function, whole))
    try:
        with _PicturePlaces(tokens):
            yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)


class _PicturePlaces(TorchDispatchMode):
    """What a mask of the tokens that are pictures selects: as many rows as there are such tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens = tokens

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            values, mask = args[0], args[1][0]  # [B, T, ...], [B, T]; an index has other shapes
            if mask is not None and mask.dtype == torch.bool and mask.dim() == 2:
                return values.new_empty(self._tokens, *values.shape[2:])
        return func(*args, **(kwargs or {}))


def _on_numbers(function: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """``function`` on real tensors; of its results the shapes, but for lengths of sequences, which are asked for."""

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 1 and value.dtype == torch.int32:  # where each sequence begins
            with disable_current_modes():
                return value[[0, -1]] if whole else value
        return torch.empty(value.shape, dtype=value.dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes():
            found = function(*args, **kwargs)
        return tuple(map(given, found)) if isinstance(found, tuple) else given(found)

    return run
