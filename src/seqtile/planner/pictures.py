"""Images in the sequences of a vision-language model: their tokens and inputs."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import TorchDispatchMode, disable_current_modes
from seqtile._errors import UserError
from seqtile._sentences import counted
from seqtile.counting.fake import in_this_thread
from seqtile.devices import package_version
from seqtile.planner.layer_structure import Counts
from seqtile.planner.request import Request
from seqtile.planner.step_config import Pictures, Setup
from seqtile.planner.step_kind import StepKind
from seqtile.planner.step_run import StepRun

ANY_SIZE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Model types whose vision tower takes pictures of any size, as flat patches and a grid."""

ONE_SIZE = ("llava", "gemma3")
"""Model types whose processor makes every picture as large as the vision tower's ``image_size``."""

_TAPPED = "deepstack_visual_indexes"
"""Which layers of a tower hand their output to the language model besides."""

_HELPERS = "get_vision_"
"""How the functions begin that work out positions and lengths from the grid of patches."""


def _vision_config(config: Any) -> Any:
    """The configuration of a tower that plans support."""
    model_type = config.model_type
    vision = getattr(config, "vision_config", None)
    if vision is None or model_type not in ANY_SIZE + ONE_SIZE:
        what = "takes no pictures" if vision is None else "has an unsupported vision tower"
        raise UserError(
            "images.model-unsupported",
            f"model type {model_type!r} {what}; plans support those of {', '.join(ANY_SIZE + ONE_SIZE)}; for others "
            "add the image tokens to the length",
        )
    if find_spec("transformers.vision_utils") is None:
        raise UserError(
            "images.transformers-too-old",
            f"--images needs transformers.vision_utils, which transformers {package_version('transformers')} does "
            "not have; use a newer version, or count image tokens as text",
        )
    return vision


def read_pictures(
    config: Any,
    count: int | None = None,
    size: tuple[int, int] | None = None,
    tokens: int | None = None,
    frames: int | None = None,
) -> Pictures:
    """The pictures of each row of a model, by number and size, or by the tokens that they make together.

    Args:
        config: the model's configuration.
        count: pictures of each row.
        size: (height, width) of each in pixels; for a tower of one size it may be left out, and changes nothing.
        tokens: picture tokens of each row, instead of both.
        frames: frames of the one video of this size in each row, instead of pictures.

    Raises:
        UserError: the model takes no pictures, or not so many tokens.
    """
    model_type = config.model_type
    vision = _vision_config(config)
    if model_type in ONE_SIZE:
        if frames is not None:
            raise UserError(
                "frames.model-unsupported",
                f"model type {model_type!r} takes no videos; use --images N, or images=N in Python",
            )
        return _of_one_size(config, vision, count, tokens)
    patch, merge, together = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    unit = patch * merge
    if tokens is not None:
        count, height, width = 1, merge, tokens * merge
    elif size is None:
        what = "image" if frames is None else "frame"
        raise UserError(
            "images.size-missing",
            f"model type {model_type!r} takes images of any size; add --{what}-size HEIGHTxWIDTH, or "
            f"{what}_size=(height, width) in Python",
        )
    else:  # to the nearest whole number of tokens, as Transformers' processors resize
        height, width = (max(1, round(side / unit)) * merge for side in size)
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    times = -(-(frames or 1) // together)  # so many frames are one patch
    return Pictures(
        count=count or 1,
        each=times * height * width // merge**2,
        size=(height * patch, width * patch),
        values=(times * height * width, channels * together * patch**2),
        grid=(times, height, width),
        frames=frames or 0,
    )


def pictures_like(config: Any, tokens: int, picture: int, frame: int) -> Pictures:
    """Pictures for a plan: a vision tower takes no less memory for them than for those of a row of data.

    Args:
        config: the model's configuration.
        tokens: visual tokens of the row.
        picture: tokens of the largest picture; 0 if there is none.
        frame: tokens of the largest frame of a video; 0 if there is none.

    Raises:
        UserError: as :func:`read_pictures`.
    """
    if config.model_type not in ANY_SIZE:
        return read_pictures(config, -(-tokens // read_pictures(config, 1).each))
    vision = config.vision_config
    each = max(picture, frame * vision.temporal_patch_size)  # so many frames are the patches of one picture
    height = max(side for side in range(1, math.isqrt(each) + 1) if each % side == 0)
    unit = vision.patch_size * vision.spatial_merge_size
    return read_pictures(config, -(-tokens // each), (height * unit, each // height * unit))


def _of_one_size(config: Any, vision: Any, count: int | None, tokens: int | None) -> Pictures:
    side = vision.image_size
    each = getattr(config, "mm_tokens_per_image", None)
    if each is None:
        each = (side // vision.patch_size) ** 2 + (getattr(config, "vision_feature_select_strategy", "") == "full")
    if tokens is not None:
        if tokens % each:
            raise UserError(
                "images.partial-image",
                f"{tokens:,} image tokens are not a multiple of {each:,}, the tokens per image of model type "
                f"{config.model_type!r}; use --images N",
            )
        count = tokens // each
    return Pictures(count or 1, each, (side, side), (3, side, side))


def add_pictures(model: Any, pictures: Pictures, ids: Tensor) -> dict[str, Tensor]:
    """Put the tokens of pictures first into ``ids`` ``[B, T]``; returns what the model is given besides."""
    rows, length = ids.shape
    kind, name = ("video", "pixel_values_videos") if pictures.frames else ("image", "pixel_values")
    ids[:, : pictures.tokens] = getattr(model.config, f"{kind}_token_id")
    count, (first, *rest) = rows * pictures.count, pictures.values
    values = (count * first, *rest) if pictures.grid else (count, first, *rest)
    inputs = {name: torch.zeros(values, device=ids.device)}
    if "token_type_ids" in inspect.signature(type(model).forward).parameters:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if pictures.grid:
        with disable_current_modes():
            inputs[f"{kind}_grid_thw"] = torch.tensor([pictures.grid] * count)
        # The model works these out from the grid and the ids, in integers.
        inputs["position_ids"] = torch.zeros(3, rows, length, dtype=torch.long, device=ids.device)
    return inputs


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
        model: a model with a vision tower.
        tokens: picture tokens of a batch.
        whole: attention runs once for all windows and pictures, as FlashAttention does, and not once for each.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    functions = [
        (module, name, function)
        for module in files
        for name, function in vars(module).items()
        if name.startswith(_HELPERS) and inspect.isfunction(function)
    ]
    for module, name, function in functions:
        setattr(module, name, in_this_thread(_on_numbers(function, whole), function))
    try:
        with _PicturePlaces(tokens):
            yield
    finally:
        for module, name, function in functions:
            setattr(module, name, function)


class _PicturePlaces(TorchDispatchMode):
    """The rows that a mask of image tokens selects."""

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

    def shape_of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 1 and value.dtype == torch.int32:  # where each sequence begins
            with disable_current_modes():
                return value[[0, -1]] if whole else value
        return torch.empty(value.shape, dtype=value.dtype)

    def run(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes():
            result = function(*args, **kwargs)
        return tuple(map(shape_of, result)) if isinstance(result, tuple) else shape_of(result)

    return run


class PictureStep(StepKind):
    """A step of a vision-language model on text and pictures."""

    def applies(self, config: Any, setup: Setup) -> bool:
        return setup.pictures is not None

    def auto_class(self, config: Any) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def run(self, config: Any, step: Callable[[Any], StepRun]) -> StepRun:
        """By two small depths of the vision tower: one more of its layers adds the same each time."""
        depths = tower_depths(config)
        if depths is None:
            return step(config)
        shallow, deeper, whole = depths
        return step(with_tower(config, shallow)).with_more(step(with_tower(config, deeper)), whole - shallow)

    def change_batch(self, model: Any, setup: Setup, batch: dict[str, Tensor]) -> None:
        assert setup.pictures is not None
        batch |= add_pictures(model, setup.pictures, batch["input_ids"])

    def running(self, model: Any, setup: Setup, tokens: int) -> AbstractContextManager[Any]:
        return known_grids(model, setup.picture_tokens, whole=setup.attention == "flash")

    def check(self, request: Request, max_length: int | None) -> None:
        if request.split > 1:
            raise UserError("images.with-sequence-parallel", "--images does not support sp-size and cp-size; drop one")
        if request.grpo is not None:
            raise UserError(
                "images.with-grpo", "--images does not support --loss grpo; drop it, and count image tokens as text"
            )
        assert request.pictures is not None
        if max_length is not None and max_length <= request.pictures.tokens:
            raise UserError(
                "images.no-room-for-text",
                f"{max_length:,} tokens leave no room for text after {request.pictures.tokens:,} image tokens; use a "
                "longer row (--max-length, or max_length= in Python), or fewer or smaller images",
            )

    def least_tokens(self, request: Request) -> int:
        assert request.pictures is not None
        return request.pictures.tokens + 1

    def notes(self, request: Request, counts: Counts, states: Mapping[str, Sequence[str]]) -> list[str]:
        pictures = request.pictures
        assert pictures is not None
        noun, number, each = "image", pictures.count, f"{pictures.each:,} tokens each, "
        if pictures.frames:
            noun, number, each = "frame", pictures.frames, ""
        return [
            f"{counted(number, noun)} of {pictures.size[0]:,} x {pictures.size[1]:,} pixels per sequence, "
            f"{each}{pictures.tokens:,} in all; the FLOPs do not include the vision tower"
        ]
