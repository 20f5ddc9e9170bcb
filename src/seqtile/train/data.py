"""Datasets: local JSONL, Parquet, CSV, Arrow or text, or a Hub id, found and read before anything is trained."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.devices import cpu_cores

if TYPE_CHECKING:
    from datasets import Dataset

logger = first_rank_logger(__name__)

BUILDERS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
    ".arrow": "arrow",
}  # fmt: skip
"""Readers of row files, by suffix."""

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

SPLIT_KEYS = {"dataset_split": "train", "eval_split": "test"}
"""Keys of the recipe that name a split, and their defaults, which fit data without splits too."""

CONFIG_KEYS = {"dataset_split": "dataset_config", "eval_split": "eval_config"}
"""Keys that name a configuration, by the key of the split."""

SAMPLE_OF_A_FILE, SAMPLE = 8, 256
"""Rows of each file, and of all, that are rendered and compared with what was rendered."""

ROWS_PER_PROCESS = 5_000
"""Fewer are checked, and tokenised, faster than another process starts."""


class Loaded(NamedTuple):
    """Rows, and where they are from.

    Attributes:
        dataset: its name in the recipe.
        rows: what was read, unchecked; an ``IterableDataset`` where it is streamed.
        documents: whether they are whole documents from text files (to be packed, not cut off).
        files: the files of the rows, in order, if any.
    """

    dataset: str
    rows: Dataset
    documents: bool = False
    files: tuple[Path, ...] = ()

    @property
    def folder(self) -> str:
        """Where relative paths in its rows begin."""
        path = Path(self.dataset).expanduser()
        return str(path if path.is_dir() else path.parent)

    def place(self, index: int) -> str:
        """The file and number of row ``index`` as far as they are known. Counts the rows of several files."""
        if self.documents:
            return f"file {str(self.files[index])!r}"
        for file in self.files if len(self.files) > 1 else ():
            count = _count_rows(file)
            if count is None:
                break
            if index < count:
                return f"file {file.name!r}, row {index + 1}"
            index -= count
        return f"row {index + 1}"

    def sample(self) -> list[int]:
        """The first row of each file, the last and some between. Counts the rows of several files."""
        counts = [] if self.documents or len(self.files) < 2 else [_count_rows(file) or 0 for file in self.files]
        if sum(counts) != len(self.rows):
            counts = [len(self.rows)]
        per_file = max(2, min(SAMPLE_OF_A_FILE, SAMPLE // len(counts)))
        indices, start = set[int](), 0
        for count in counts:
            if len(indices) < SAMPLE and count:
                indices |= {start + i * (count - 1) // (per_file - 1) for i in range(per_file)}
            start += count
        return sorted(indices)


def load_rows(dataset: str, *, key: str = "dataset_split", split: str = "train", text_field: str = "text",
              config: str | None = None, streaming: bool = False) -> Loaded:  # fmt: skip
    """Load a dataset.

    Args:
        dataset: a file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``, ``.tsv``, ``.arrow``; anything else is read as
            one UTF-8 document), a directory of such files, a directory written by ``save_to_disk``, or a Hub id.
        key: the recipe's key of the split, for messages.
        split: which split; data without splits takes the default of ``key`` alone.
        text_field: name of the text column of documents.
        config: which configuration, of data that has several.
        streaming: read nothing yet.

    Raises:
        UserError: nothing at that path, unreadable, empty, or no such split or configuration.
    """
    from datasets import load_dataset

    check_path(dataset)
    path, files = Path(dataset).expanduser(), list[Path]()
    if config is not None and path.is_file():
        raise UserError(
            "dataset.file-with-config", f"dataset {dataset!r} is one file, got {CONFIG_KEYS[key]} {config!r}; drop it"
        )
    try:
        if not path.exists():
            loaded = Loaded(dataset, load_dataset(dataset, config, split=split, streaming=streaming))
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = Loaded(dataset, _load_saved(path, key, split, streaming))
        else:
            files = _find_files(path, key, split, config)
            loaded = _load_files(dataset, files, text_field, streaming)
    except UserError:
        raise
    except Exception as error:  # the readers and the Hub's client raise many unrelated types
        configs = re.search(r"available configs: (\[.*?\])", str(error))
        if configs is not None:
            raise UserError(
                "dataset.several-configurations",
                f"dataset {dataset!r} has several configurations; set {CONFIG_KEYS[key]} to one of {configs[1]}",
            ) from None
        raise UserError(
            "dataset.unreadable",
            find_broken_line(files) or f"cannot read {dataset!r} ({key} {split!r}): {reason_of(error)}",
        ) from error
    if streaming and loaded.documents:
        raise UserError(
            "dataset.text-files-streamed",
            f"dataset {dataset!r} consists of text files, which cannot be streamed; drop --streaming",
        )
    if not streaming and len(loaded.rows) == 0:
        raise UserError("dataset.empty", f"dataset {dataset!r} has no rows")
    return loaded


def check_path(dataset: str) -> None:
    """Refuse what is neither there nor the name of something on the Hub, without reading it.

    Raises:
        UserError: nothing there.
    """
    path = Path(dataset).expanduser()
    if not path.exists() and (dataset.startswith((".", "/", "~")) or path.suffix or dataset.count("/") > 1):
        raise UserError(
            "dataset.not-found", f"dataset {dataset!r} does not exist; expected a file, a directory or a Hub id"
        )


def processes_for(rows: int) -> int | None:
    """Processes to go through so many rows with, as ``Dataset.map`` takes them; None is this one alone."""
    count = min(cpu_cores(), rows // ROWS_PER_PROCESS)
    return count if count > 1 else None


def reason_of(error: BaseException) -> str:
    """Describe a library's error in one line."""
    text = str(error.__cause__ or error).split("\nExample")[0]
    return " ".join(text.split())[:600] or type(error).__name__


def find_broken_line(files: Iterable[Path]) -> str:
    """The first line of JSON files that is no row, numbered from 1, and what is wrong with it; "" where all are rows.

    PyArrow counts from 0, inside a block of lines, and takes a cut line for a wrong encoding.
    """
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    for file in files:
        suffix = file.suffix.lower()
        if _builder(file) != "json" or (suffix in COMPRESSIONS and suffix not in openers):
            continue
        with openers.get(suffix, open)(file, "rb") as lines:
            is_first = True
            for number, line in enumerate(lines, 1):
                text = line.removeprefix(b"\xef\xbb\xbf") if is_first else line
                if not text.strip():
                    continue
                is_list = is_first and text.lstrip().startswith(b"[")
                content = text + lines.read() if is_list else text.rstrip(b"\r\n")
                broken, problem = _why_no_rows(content, number, list if is_list else dict)
                if problem:
                    return f"file {str(file)!r}, line {broken}: {problem}; fix it, or remove the line"
                is_first = False
    return ""


def _why_no_rows(content: bytes, line: int, kind: type) -> tuple[int, str]:
    """The number of the line that is wrong, of a text that begins at ``line``, and what is wrong."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names if len(set(names)) < len(names) else ():
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is there twice")
        return dict(pairs)

    try:
        rows = json.loads(content, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        return line + error.lineno - 1, f"{error.msg.removesuffix(' at')} at character {error.colno}"
    except UnicodeDecodeError as error:
        return line + content.count(b"\n", 0, error.start), f"byte {content[error.start]:#x} is not UTF-8"
    except ValueError as error:
        return line, str(error)
    return line, "" if isinstance(rows, kind) else f"expected an object with the columns of a row, got {rows!r:.40}"


def _load_saved(path: Path, key: str, split: str, streaming: bool) -> Any:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(path))
    _check_split(path, key, split, [*saved] if isinstance(saved, DatasetDict) else [])
    rows = saved[split] if isinstance(saved, DatasetDict) else saved
    return rows.to_iterable_dataset() if streaming else rows


def _find_files(path: Path, key: str, split: str, config: str | None) -> list[Path]:
    """The files of a split, as datasets tells splits from names and a README; without splits all files."""
    from datasets import load_dataset_builder
    from datasets.data_files import FILES_TO_IGNORE

    if not path.is_dir():
        _check_split(path, key, split, [])
        return [path]
    path = path.absolute()
    paths = [file.relative_to(path) for file in sorted(path.rglob("*")) if file.is_file()]
    files = [path / relative for relative in paths if not any(name.startswith((".", "__")) for name in relative.parts)]
    try:
        data_files = load_dataset_builder(str(path), config).config.data_files or {}
    except FileNotFoundError:
        data_files = {}  # no file of a kind that datasets reads, such as source code
    splits = {str(name): sorted(Path(file) for file in names) for name, names in data_files.items()}
    tables = [file for file in files if _builder(file) and file.name not in FILES_TO_IGNORE]
    unread = sorted({*tables} - {file for names in splits.values() for file in names})
    if unread:
        logger.warning("dataset %s: ignoring %s and other files that belong to no split", path, unread[0].name)
    _check_split(path, key, split, [] if splits.keys() <= {"train"} else [*splits])
    if splits.keys() <= {"train"}:
        return splits["train"] if tables else files
    return splits[split]


def _check_split(path: Path, key: str, split: str, splits: list[str]) -> None:
    if splits and split not in splits:
        raise UserError(
            "dataset.split-unknown",
            f"dataset {str(path)!r} has no split {split!r}; set {key} to one of {', '.join(splits)}",
        )
    if not splits and split != SPLIT_KEYS[key]:
        raise UserError(
            "dataset.no-splits", f"dataset {str(path)!r} has no splits, got {key} {split!r}; drop it, or pass the file"
        )


def _builder(file: Path) -> str | None:
    """The name of datasets' builder that reads a file of rows; None for a document."""
    ending = file.with_suffix("").suffix if file.suffix.lower() in COMPRESSIONS else file.suffix
    return BUILDERS.get(ending.lower())


def _load_files(dataset: str, files: list[Path], text_field: str, streaming: bool) -> Loaded:
    """Rows of files of one kind, or one document per text file."""
    from datasets import Dataset, load_dataset

    files = [file for file in files if file.stat().st_size]
    if not files:
        return Loaded(dataset, Dataset.from_dict({}))
    builder = _builder(files[0])
    if builder is None:
        texts: dict[Path, str] = {}
        for file in files:
            try:
                texts[file] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                if len(files) == 1:  # in a directory, files that are not UTF-8 are skipped
                    raise
        return Loaded(dataset, Dataset.from_dict({text_field: [*texts.values()]}), True, tuple(texts))
    kwargs = _csv_kwargs(files[0]) if builder == "csv" else {}
    rows = load_dataset(builder, data_files=[str(file) for file in files], split="train", streaming=streaming, **kwargs)
    if builder == "json" and not streaming:
        rows.data.validate(full=True)  # PyArrow silently reads text that is not UTF-8
    return Loaded(dataset, rows, False, tuple(files))


def _csv_kwargs(file: Path) -> dict[str, Any]:
    """How CSV files are read: each column of the header as text, so that ``007`` and ``NA`` stay what they are."""
    import pandas  # type: ignore[import-untyped]
    from datasets import Features, Value

    separator = "\t" if ".tsv" in file.suffixes else ","
    columns = pandas.read_csv(file, sep=separator, nrows=0).columns
    features = Features({name: Value("string") for name in columns})
    return {"keep_default_na": False, "sep": separator, "features": features}


def _count_rows(file: Path) -> int | None:
    """The rows of a file; None where only reading all of it would tell."""
    builder = _builder(file)
    if builder == "parquet":
        from pyarrow import parquet  # type: ignore[import-untyped]

        return int(parquet.read_metadata(file).num_rows)
    if builder != "json" or file.suffix.lower() in COMPRESSIONS:
        return None
    with file.open("rb") as lines:
        count = sum(1 for line in lines if line.strip())
    with file.open("rb") as stream:
        is_list = stream.read(16).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    return len(json.loads(file.read_bytes())) if is_list else count
