"""Batches of rows with pictures and videos, by TRL's collator, and how many tokens each row takes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from seqtile._compat import tokens_of_media, training_template
from seqtile._errors import UserError
from seqtile._sentences import counted
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.train.data import processes_for
from seqtile.train.data_summary import DataSummary
from seqtile.train.media import open_picture

if TYPE_CHECKING:
    from seqtile.train.rendered_rows import RowSet

VISUAL = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
"""Fields of a configuration with the ids of the tokens that features replace."""


@dataclass
class PictureCollator(DataCollatorForVisionLanguageModeling):
    """TRL's collator for the rows of :mod:`seqtile.train.media`.

    Files are opened here, also those of videos, which TRL (1.16) has no column for. The labels of tokens that features
    replace are -100: TRL would have the model predict them, and divide the loss by their number too.

    Attributes:
        visual: ids of these tokens.
        times: tokens of the text between frames, by the number of frames and how many come in a second.
    """

    visual: tuple[int, ...] = ()
    times: dict[tuple[int, float | None], int] = field(default_factory=dict)

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        settings = {each.name: getattr(self, each.name) for each in fields(DataCollatorForVisionLanguageModeling)}
        videos = [video for example in examples for video in example["videos"]]
        if videos and not videos[0]["path"]:
            # Else frames are sampled as those of a file: of 30 frames of a Qwen3-VL's video 4 are left.
            metadata = [
                {"total_num_frames": len(frames), "fps": fps, "frames_indices": [*range(len(frames))]}
                for frames, fps in ((video["frames"], video["fps"]) for video in videos)
            ]
            settings["processor"] = _WithFrames(self.processor, do_sample_frames=False, video_metadata=metadata)
        collator = DataCollatorForVisionLanguageModeling(**settings)
        batch: dict[str, Any] = collator.torch_call([_opened(example) for example in examples])
        is_visual = torch.isin(batch["input_ids"], torch.tensor(self.visual, dtype=torch.long))
        batch["labels"] = batch["labels"].masked_fill(is_visual, IGNORED)
        return batch


class _WithFrames:
    """A processor whose chat template takes more arguments for the videos of one batch."""

    def __init__(self, processor: Any, **more: Any) -> None:
        self._processor, self._more = processor, more

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
        if "processor_kwargs" in kwargs:
            kwargs["processor_kwargs"] = {**kwargs["processor_kwargs"], **self._more}
        else:  # Transformers before 5.4
            kwargs |= self._more
        return self._processor.apply_chat_template(messages, **kwargs)


def _opened(example: Mapping[str, Any]) -> dict[str, Any]:
    """A row as TRL takes it: with pictures in the parts of its messages, or in the column beside a prompt."""
    pictures = [open_picture(file) for file in example["images"]]
    if "messages" not in example:
        return {"prompt": example["prompt"], "completion": example["completion"], "images": pictures}
    files: dict[str, Any] = {
        "image": iter(pictures),
        "video": (video["path"] or [open_picture(frame) for frame in video["frames"]] for video in example["videos"]),
    }
    messages = []
    for message in example["messages"]:
        if isinstance(message.get("content"), list):
            parts = [
                {**part, part["type"]: next(files[part["type"]])} if part["type"] in files else part
                for part in message["content"]
            ]
            message = {**message, "content": parts}
        messages.append(message)
    return {"messages": messages, "images": []}


def picture_collator(processor: Any, arguments: Any, config: Any, *, pair: bool, whole: bool) -> PictureCollator:
    """The collator of a run.

    Args:
        processor: the model's.
        arguments: the trainer's (``SFTConfig``).
        config: the model's, which names the tokens that features replace.
        pair: whether rows are prompts with completions.
        whole: whether rows are not cut.
    """
    completion_only = pair if arguments.completion_only_loss is None else arguments.completion_only_loss
    return PictureCollator(
        processor=processor, max_length=None if whole else arguments.max_length,
        completion_only_loss=completion_only, pad_to_multiple_of=arguments.pad_to_multiple_of,
        dataset_text_field=arguments.dataset_text_field, assistant_only_loss=arguments.assistant_only_loss,
        chat_template=training_template(processor, arguments), visual=visual_tokens(config),
    )  # fmt: skip


def visual_tokens(config: Any) -> tuple[int, ...]:
    """Ids of the tokens that features of pictures and videos replace.

    Raises:
        UserError: the configuration names none.
    """
    ids = {getattr(config, name, None) for name in VISUAL}
    visual = tuple(sorted(token for token in ids if isinstance(token, int)))
    if not visual:
        raise UserError(
            "images.model-without-token",
            f"model type {config.model_type!r} names no token of pictures in its configuration (expected one of "
            f"{', '.join(VISUAL)}), so their labels would be trained; train it on text",
        )
    return visual


class RowTokens(NamedTuple):
    """Tokens of a row.

    Attributes:
        total: all of them.
        visual: those that features replace.
        needed: the first so many hold all of the visual ones.
        each: tokens of the largest frame, or of the largest picture of a row without videos.
        gap: other tokens from one picture, or frame, to the next.
        pictures: how many there are.
        frames: frames of all videos.
    """

    total: int
    visual: int
    needed: int
    each: int
    gap: int
    pictures: int
    frames: int


def count_row(row: Mapping[str, Any], collator: PictureCollator) -> RowTokens:
    """Count a row's tokens by processing its pictures."""
    sizes = row["sizes"]
    pictures, frames = len(sizes["image"]), sum(size[0] for size in sizes["video"] if size)
    ids = collator([{**row}])["input_ids"][0].tolist()
    places = [place for place, token in enumerate(ids) if token in collator.visual]
    each = len(places) // max(1, frames or pictures)
    return RowTokens(len(ids), len(places), max(places, default=-1) + 1, each, 0, pictures, frames)


def count_by_size(row: Mapping[str, Any], collator: PictureCollator) -> RowTokens | None:
    """Count a row's tokens by the sizes of its pictures; None where the processor cannot tell.

    Right for a processor that puts features, and times of frames, in the place of one token.
    """
    processor, sizes = collator.processor, row["sizes"]
    pictures, frames = len(sizes["image"]), sum(size[0] for size in sizes["video"] if size)
    messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
    counts = tokens_of_media(processor, sizes) if isinstance(messages, list) else None
    if counts is None or any(len(counts[kind]) < len(sizes[kind]) for kind in counts):
        return None
    ids = _text_ids(messages, processor)
    places = [place for place, token in enumerate(ids) if token in collator.visual]
    visual = sum(map(sum, counts.values()))
    times = [_times_of(size[0], fps, collator) for size, fps in zip(sizes["video"], sizes["fps"], strict=True) if size]
    extra = visual - pictures - len(sizes["video"]) + sum(times)  # each has one token in the text
    per_frame = [-(-count // max(1, size[0])) for count, size in zip(counts["video"], sizes["video"], strict=True)]
    gap = min((later - place - 1 for place, later in itertools.pairwise(places)), default=0)
    return RowTokens(
        total=len(ids) + extra,
        visual=visual,
        needed=max(places, default=len(ids) - 1) + 1 + extra if visual else 0,
        each=max(per_frame or counts["image"], default=0),
        gap=_time_of_a_frame(frames, sizes["fps"], collator) if frames else gap,
        pictures=pictures,
        frames=frames,
    )


def _text_ids(messages: Sequence[Mapping[str, Any]], processor: Any) -> list[int]:
    """Token ids of messages before pictures and videos are put into their places."""
    text = processor.apply_chat_template(_parts_everywhere(messages), tokenize=False)
    return [*processor.tokenizer(text, add_special_tokens=False)["input_ids"]]


def _times_of(frames: int, fps: float | None, collator: PictureCollator) -> int:
    """Tokens of the text that a processor writes between the frames of a video, such as their times."""
    key = (frames, fps)
    if key not in collator.times:
        messages = [{"role": "user", "content": [{"type": "video"}]}]
        picture = io.BytesIO()
        Image.new("RGB", (32, 32)).save(picture, "png")
        video = {"path": None, "frames": [{"path": None, "bytes": picture.getvalue()}] * frames, "fps": fps}
        ids = collator([{"messages": messages, "images": [], "videos": [video]}])["input_ids"][0].tolist()
        written = [token for token in ids if token not in collator.visual]
        before = [token for token in _text_ids(messages, collator.processor) if token not in collator.visual]
        collator.times[key] = len(written) - len(before)
    return collator.times[key]


def _time_of_a_frame(frames: int, fps: Sequence[float | None], collator: PictureCollator) -> int:
    """Tokens of this text for one frame more."""
    half = max(1, frames // 2)
    more = _times_of(frames, fps[0], collator) - _times_of(half, fps[0], collator)
    return -(-more // max(1, frames - half))


def _parts_everywhere(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are lists of parts, as TRL gives them to templates."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str) else dict(message)
        for message in messages
    ]  # fmt: skip


def count_tokens(row_set: RowSet, collator: PictureCollator, max_length: int | None, *, skip: bool) -> DataSummary:
    """Count the tokens of every row, and refuse or leave out those whose pictures do not fit.

    Args:
        row_set: rows as :func:`seqtile.train.read_data.check_rows` gave them; changed where rows are left out.
        collator: that does not cut.
        max_length: most tokens of a row.
        skip: leave out rows whose pictures do not fit.

    Raises:
        UserError: the first row whose pictures do not fit, with how many would.
    """
    rows = row_set.rows
    kinds = [(bool(sizes["image"]), bool(sizes["video"])) for sizes in rows["sizes"][:]]
    first_rows = [rows[kinds.index(kind)] for kind in {*kinds}]
    # Gemma 3 and InternVL, for example, write tokens around each picture, so their rows are processed.
    by_size = all(
        (tokens := count_by_size(row, collator)) is not None and tokens[:3] == count_row(row, collator)[:3]
        for row in first_rows
    )
    if by_size:
        rows = rows.remove_columns(["images", "videos"])  # their files are not looked at
    counts = rows.map(
        _counted_row, fn_kwargs={"collator": collator, "by_size": by_size}, remove_columns=rows.column_names,
        num_proc=processes_for(len(rows)), load_from_cache_file=False, desc="Counting tokens",
    )  # fmt: skip
    summary = DataSummary(rows=len(counts), max_length=max_length, trained=None)
    summary.trains_prompts = row_set.row_format.trains_prompts
    kept: list[int] = []
    for index, row in enumerate(counts):
        tokens = RowTokens(**row)
        if max_length is not None and tokens.needed > max_length:
            number = index if row_set.numbers is None else row_set.numbers[index]
            if not skip:
                place = f"dataset {row_set.source.dataset!r}, {row_set.source.place(number)}"
                raise UserError("images.row-too-long", f"{place}: {_what_fits(tokens, max_length)}")
            reason = "pictures do not fit max_length"
            row_set.left_out[reason] = row_set.left_out.get(reason, 0) + 1
            continue
        kept.append(index)
        summary.add_row(tokens.total)
        least, most = summary.visual or (tokens.visual, tokens.visual)
        summary.visual = (min(least, tokens.visual), max(most, tokens.visual))
        summary.pictures += tokens.pictures
        summary.frames += tokens.frames
        if tokens.frames:
            summary.largest_frame = max(summary.largest_frame, tokens.each)
        else:
            summary.largest_picture = max(summary.largest_picture, tokens.each)
    if not kept:
        raise UserError(
            "images.no-row-fits",
            f"dataset {row_set.source.dataset!r}: the pictures of no row fit max_length {max_length}",
        )
    if len(kept) < len(counts):
        row_set.numbers = kept if row_set.numbers is None else [row_set.numbers[index] for index in kept]
        row_set.rows = row_set.rows.select(kept)
    summary.left_out, summary.sequences = dict(row_set.left_out), len(kept)
    return summary


def _counted_row(row: Mapping[str, Any], collator: PictureCollator, by_size: bool) -> dict[str, Any]:
    tokens = count_by_size(row, collator) if by_size else count_row(row, collator)
    assert tokens is not None
    return tokens._asdict()


def _what_fits(tokens: RowTokens, max_length: int) -> str:
    number, noun = (tokens.frames, "frame") if tokens.frames else (tokens.pictures, "picture")
    each, with_gap = tokens.each, tokens.each + tokens.gap
    beside = tokens.needed - number * each
    first = tokens.needed - number * with_gap  # before the first one, less a gap
    fitting = max(0, (max_length - first) // with_gap)
    return (
        f"{counted(number, noun)} of up to {counted(each, 'token')} and {counted(beside, 'token')} beside them do not "
        f"fit max_length {max_length:,}; {fitting:,} would, or smaller ones, or --max-length {tokens.needed:,}"
    )
