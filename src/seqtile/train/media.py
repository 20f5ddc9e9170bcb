"""Pictures and videos of rows: where their files are, whether they can be read, and the tokens that they become.

Rows are read as TRL's ``SFTTrainer`` takes them (``images`` beside messages, parts of messages with a picture or a
video), and as LLaMA-Factory and ms-swift write them (``<image>`` and ``<video>`` in the text). What comes out has one
form: bare parts ``{"type": "image"}`` in the messages, and the columns :data:`MEDIA_COLUMNS` with the files in order.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from seqtile._errors import UserError
from seqtile._sentences import counted

PART_COLUMNS = {"image": "images", "image_url": "images", "video": "videos", "video_url": "videos"}
"""Types of a message's parts, and the column of their files."""

COLUMN_PARTS = {"images": "image", "videos": "video"}

MEDIA_COLUMNS = ("images", "videos", "sizes")
"""What is added to a row: files of pictures; of videos, or of their frames; (frames,) height and width of each."""

SOURCE_COLUMNS = {"image": "images", "images": "images", "video": "videos", "videos": "videos"}

ORIENTATION, QUARTER_TURNS = 0x0112, (5, 6, 7, 8)
"""The Exif tag of a picture's orientation, and its values that swap width and height."""

_SOURCES = ("image", "video", "url", "path", "base64", "image_url", "video_url")
"""Keys of a part that name its file."""


class RowError(ValueError):
    """What is wrong with a row, to follow its location in a message."""


def media_features() -> dict[str, Any]:
    """Types of :data:`MEDIA_COLUMNS`."""
    from datasets import Json, List, Value

    file = {"path": Value("string"), "bytes": Value("binary")}
    video = {"path": Value("string"), "frames": List(file), "fps": Value("float64")}
    return {"images": List(file), "videos": List(video), "sizes": Json()}


def without_decoding(features: Any) -> Any:
    """``features`` of a data set, whose pictures and videos are given as paths or bytes."""
    from datasets import Features, Image, List, Video

    if isinstance(features, Image):
        return Image(decode=False)
    if isinstance(features, Video):
        return Video(decode=False)
    if isinstance(features, List):
        return List(without_decoding(features.feature))
    if isinstance(features, Mapping):
        inside = {name: without_decoding(feature) for name, feature in features.items()}
        return Features(inside) if isinstance(features, Features) else inside
    return features


def media_part(part: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A message's part with a picture or a video, as ``type`` and ``source``; None where a column has the file."""
    kind = COLUMN_PARTS[PART_COLUMNS[part["type"]]]
    source = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
    if kind == "video" and isinstance(source, list):
        source = {"frames": source, "fps": part.get("fps")}
        part = {key: value for key, value in part.items() if key != "fps"}
    others = sorted(key for key in {*part} - {"type", *_SOURCES} if part[key] is not None)
    if others:
        raise RowError(
            f"{name!r} has a part of type {part['type']!r} with {others[0]!r}, which the processor does not read; set "
            "it in the model's processor files, and drop it here"
        )
    if isinstance(source, Mapping) and "url" in source:  # OpenAI's
        source = source["url"]
    if part.get("base64") is not None:
        source = f"data:;base64,{source}"
    return {"type": kind, "source": source}


def place_media(
    messages: list[dict[str, Any]], columns: Mapping[str, Sequence[Any]], folder: str, *, decodes: bool = True
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages with bare parts, and the row's :data:`MEDIA_COLUMNS`.

    Args:
        messages: messages with texts, or lists of parts of which those of :func:`media_part` have a source or None.
        columns: the row's own columns of pictures and videos.
        folder: where relative paths begin, if the file is there.
        decodes: decode every picture once, which detects broken files; else read its size alone.

    Raises:
        RowError: as many parts as files are not there, or a file cannot be read.
    """
    for column, kind in COLUMN_PARTS.items():
        messages = _with_parts(messages, kind, len(columns.get(column) or ()))
    left = {column: list(columns.get(column) or ()) for column in COLUMN_PARTS}
    sources: dict[str, list[Any]] = {column: [] for column in COLUMN_PARTS}
    placed = []
    for message in messages:
        if isinstance(message["content"], list):
            parts = []
            for part in message["content"]:
                if part["type"] != "text":
                    column = PART_COLUMNS[part["type"]]
                    if part["source"] is None and not left[column]:
                        raise RowError(f"a message has more parts of type {part['type']!r} than {column!r} has entries")
                    sources[column].append(left[column].pop(0) if part["source"] is None else part["source"])
                    part = {"type": part["type"]}
                parts.append(part)
            message = {**message, "content": parts}
        placed.append(message)
    for column, files in left.items():
        if files:
            raise RowError(
                f"{column!r} has {len(sources[column]) + len(files)} entries, but the messages have "
                f"{counted(len(sources[column]), 'place')} for them"
            )
    images = [_read_picture(source, folder, decodes) for source in sources["images"]]
    videos = [_read_video(source, folder, decodes) for source in sources["videos"]]
    return placed, {
        "images": [file for file, _ in images],
        "videos": [video for video, _ in videos],
        "sizes": {
            "image": [size for _, size in images],
            "video": [size for _, size in videos],
            "fps": [video["fps"] for video, _ in videos],
        },
    }


def _with_parts(messages: list[dict[str, Any]], kind: str, count: int) -> list[dict[str, Any]]:
    """Messages with a part for each of ``count`` files, if they say nowhere else where these belong."""
    has_parts = any(
        part["type"] == kind
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
    )
    if not count or has_parts:
        return messages
    mark = f"<{kind}>"
    marks = sum(message["content"].count(mark) for message in messages if isinstance(message["content"], str))
    if marks not in (0, count):
        raise RowError(f"the text has {marks} marks {mark} for {counted(count, kind)}")
    user = next((number for number, message in enumerate(messages) if message["role"] == "user"), None)
    if not marks and user is None:
        raise RowError(f"no user message to put {counted(count, kind)} into")
    result = []
    for number, message in enumerate(messages):
        content = message["content"]
        if marks and isinstance(content, str) and mark in content:
            pieces = content.split(mark)
            parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
            for piece in pieces[1:]:
                parts += [{"type": kind, "source": None}, {"type": "text", "text": piece}]
            message = {**message, "content": [part for part in parts if part.get("text") != ""]}
        elif not marks and number == user:  # as TRL does
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            message = {**message, "content": [{"type": kind, "source": None}] * count + texts}
        result.append(message)
    return result


def _read_picture(source: Any, folder: str, decodes: bool) -> tuple[dict[str, Any], list[int]]:
    """A file as path or bytes, and its height and width."""
    file = _find_file(source, folder, "picture")
    try:
        width, height = open_picture(file).size if decodes else _size_in_header(file)
    except Exception as error:  # noqa: BLE001 - decoders raise many types
        name = f"file {file['path']!r}" if file["path"] else "in the row"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RowError(f"the picture {name} cannot be read ({reason})") from None
    return file, [height, width]


def media_paths(row: Mapping[str, Any]) -> list[str]:
    """Paths of a row's pictures, videos and frames; files given as bytes have none."""
    videos = row.get("videos") or []
    files = [*(row.get("images") or []), *videos, *(frame for video in videos for frame in video["frames"])]
    return [file["path"] for file in files if file["path"]]


def open_picture(file: Mapping[str, Any]) -> Any:
    """The picture of a file as Transformers' processors take it (``PIL.Image``, RGB, turned as its camera says)."""
    from transformers.image_utils import load_image

    with _open(file) as image:
        return load_image(image)


def _open(file: Mapping[str, Any]) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(file["bytes"]) if file["bytes"] else file["path"])


def _size_in_header(file: Mapping[str, Any]) -> tuple[int, int]:
    """Width and height of :func:`open_picture`'s result, without decoding the pixels."""
    with _open(file) as image:
        width, height = image.size
        return (height, width) if image.getexif().get(ORIENTATION) in QUARTER_TURNS else (width, height)


def _read_video(source: Any, folder: str, decodes: bool) -> tuple[dict[str, Any], list[int]]:
    """A video as a path or as frames; frames, height and width of it, if it has frames."""
    source = {"frames": source, "fps": None} if isinstance(source, list) else source
    if isinstance(source, Mapping) and "frames" in source:
        if not source["frames"]:
            raise RowError("a video has no frames")
        frames = [_read_picture(frame, folder, decodes) for frame in source["frames"]]
        sizes = {tuple(size) for _, size in frames}
        if len(sizes) > 1:
            raise RowError("a video has frames of several sizes")
        video = {"path": None, "frames": [file for file, _ in frames], "fps": source.get("fps")}
        return video, [len(frames), *frames[0][1]]
    file = _find_file(source, folder, "video")
    if not file["path"]:
        raise RowError("a video is given as bytes, expected the path of its file, or a list of its frames")
    if find_spec("torchcodec") is None:
        raise RowError(
            f"the video file {file['path']!r} needs a decoder; run: pip install torchcodec, or list its frames"
        )
    return {"path": file["path"], "frames": [], "fps": None}, []


def _find_file(source: Any, folder: str, what: str) -> dict[str, Any]:
    """Where a picture or a video is."""
    content = None
    if isinstance(source, Mapping):  # of datasets' Image or Video
        content, source = source.get("bytes"), source.get("path") or source.get("url")
    if content:
        return {"path": None, "bytes": content}
    if not isinstance(source, str) or not source:
        raise RowError(f"a {what} is {type(source).__name__}, expected the path of its file")
    if source.startswith("data:"):
        try:
            return {"path": None, "bytes": base64.b64decode(source.partition(",")[2], validate=True)}
        except ValueError:
            raise RowError(f"a {what} is not valid base64") from None
    source = source.removeprefix("file://")
    if "://" in source:
        raise RowError(f"the {what} {source!r} is not on this machine; download it, and give the path of its file")
    path = Path(folder, Path(source).expanduser())
    path = path if path.exists() else Path(source).expanduser()
    if not path.is_file():
        raise RowError(f"the {what} file {source!r} does not exist (looked in {folder or '.'!r})")
    return {"path": str(path.absolute()), "bytes": None}


def check_media_packages() -> None:
    """Refuse pictures where the package that reads them is missing.

    Raises:
        UserError: with the package to install.
    """
    if find_spec("PIL") is None:
        raise UserError("images.pillow-missing", "pictures need Pillow; run: pip install pillow")
