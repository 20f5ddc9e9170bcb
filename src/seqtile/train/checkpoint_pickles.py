"""Pickles in a checkpoint: what they would call is looked at before anybody loads them.

DeepSpeed unpickles its files, which runs whatever code they name. Each is read here first by an unpickler that has
nothing to call: every name it asks for is looked up in a list, and stands for an object that does nothing.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from seqtile._errors import UserError

UNREAD = ("training_args.bin",)
"""Written by Transformers, and loaded by nobody: its many classes are no reason to refuse it."""

TAGS = ("latest", "latest_universal")
"""Files in which DeepSpeed keeps the name of the directory to load, which it joins to its path as it stands."""

PICKLED = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".metadata")
"""Endings of files that a trainer loads as pickles, if only in part; a ``.metadata`` says what is in ``.distcp``."""


def check_pickles(folder: Path) -> None:
    """Refuse a checkpoint whose pickles ask for more than tensors, numbers and what DeepSpeed keeps of its settings.

    So is one with links, or whose ``latest`` leads out of it: what is loaded would not be what is looked at.

    Cost:
        Reads the pickles and not the tensors beside them: milliseconds.

    Raises:
        UserError: names the file, and what it would call.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            _refuse(path, folder, "is a link, so that what is loaded may be elsewhere")
        if path.name in TAGS and path.is_file() and not _is_tag(path):
            _refuse(path, folder, "names no directory beside it, so that DeepSpeed would load files from elsewhere")
        if path.name in UNREAD or not path.is_file() or not path.name.endswith(PICKLED):
            continue
        problem = _problem_of(path)
        if problem:
            _refuse(path, folder, problem)


def _is_tag(path: Path) -> bool:
    """Whether the file holds the name of a directory beside it, and not a path."""
    try:
        tag = path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return False
    return tag not in ("", ".", "..") and Path(tag).name == tag and "\\" not in tag and (path.parent / tag).is_dir()


def _refuse(path: Path, folder: Path, problem: str) -> NoReturn:
    raise UserError(
        f"{path.relative_to(folder.parent)} {problem}; loading it could run any code: give --trust-checkpoint "
        "if you know who wrote it, or --from-checkpoint another one"
    )


def _problem_of(path: Path) -> str:
    from seqtile._compat import pickle_of

    try:
        if path.name.endswith(".metadata"):
            content = path.read_bytes()
            _look(content)
            pickles: Iterable[bytes | None] = _pickles_of_shards(path.parent, pickle.loads(content))
        else:
            with path.open("rb") as file:
                pickles = [pickle_of(file)]
        for one in pickles:
            if one is None:
                return "is a pickle that is not looked into (no archive of torch.save)"
            _look(one)
    except _NotListed as error:
        return f"asks for {error}, which no checkpoint of Transformers, PyTorch or DeepSpeed holds"
    except Exception as error:  # noqa: BLE001 - a hostile pickle can end in any of them
        return f"holds a pickle that cannot be read ({type(error).__name__})"
    return ""


def _pickles_of_shards(folder: Path, metadata: Any) -> Iterator[bytes | None]:
    """What PyTorch's distributed checkpoints load whole: everything that is no tensor."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from seqtile._compat import pickle_of

    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[index.fqn], TensorStorageMetadata):
            continue
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        yield None if getattr(place, "transform_descriptors", None) else pickle_of(content)


def _look(content: bytes) -> None:
    _Looking(io.BytesIO(content)).load()


class _NotListed(Exception):
    """The name of something that no checkpoint of a trainer needs."""


class _Looking(pickle.Unpickler):
    """Goes through a pickle without making or calling anything that it names."""

    def find_class(self, module: str, name: str) -> Any:
        from seqtile._compat import PICKLED_KINDS, PICKLED_NAMES

        kind = PICKLED_KINDS.get(module)
        if name not in PICKLED_NAMES.get(module, ()) and not (kind and re.fullmatch(kind, name)):
            raise _NotListed(f"{module}.{name}"[:120])
        return _Nothing

    def persistent_load(self, _: Any) -> Any:
        return _Nothing()


class _Nothing:
    """Stands for whatever would have been made."""

    def __new__(cls, *_: Any, **__: Any) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, *_: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...
