"""Datasets: local JSONL, Parquet, CSV, Arrow or text, or a Hub id, found and read before anything is trained."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqtile._errors import UserError
from seqtile._log import first_rank_logger

if TYPE_CHECKING:
    from datasets import Dataset

logger = first_rank_logger(__name__)

BUILDERS = {
    ".jsonl": "json", ".json": "json", ".ndjson": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv",
    ".arrow": "arrow",
}  # fmt: skip
"""What reads a file of rows, by its ending."""

METADATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""Files that datasets writes beside rows."""

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

SPLITS = {"dataset_split": "train", "eval_split": "test"}
"""Keys of the recipe that name a split, and their defaults, which fit data without splits too."""


class Loaded(NamedTuple):
    """Rows, and where they are from.

    Attributes:
        rows: what was read, unchecked; an ``IterableDataset`` where it is streamed.
        documents: whether they are whole documents from text files (to be packed, not cut off).
        files: the files of the rows, in order; empty where there are none.
    """

    rows: Dataset
    documents: bool
    files: tuple[Path, ...] = ()

    def place(self, index: int) -> str:
        """Where row ``index`` stands: its file and line as far as that is known. Reads the files up to there."""
        if self.documents:
            return f"file {str(self.files[index])!r}"
        for file in self.files:
            lines = _line_numbers(file)
            if lines is None:
                break
            if index < len(lines):
                of = f"file {file.name!r}, " if len(self.files) > 1 else ""
                return f"{of}{'row' if isinstance(lines, range) else 'line'} {lines[index]}"
            index -= len(lines)
        return f"row {index + 1}"

    def counts(self) -> list[int]:
        """The rows of each file; those of all where a file does not tell. Reads the files where there are several."""
        lines = [_line_numbers(file) for file in self.files] if len(self.files) > 1 and not self.documents else []
        counts = [len(numbers) for numbers in lines if numbers is not None]
        return counts if counts and sum(counts) == len(self.rows) else [len(self.rows)]


def load_rows(dataset: str, *, key: str = "dataset_split", split: str = "train", text_field: str = "text",
              streaming: bool = False) -> Loaded:  # fmt: skip
    """Load a dataset.

    Args:
        dataset: a file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``, ``.tsv``, ``.arrow``; anything else is read as
            one UTF-8 document), a directory of such files, a directory written by ``save_to_disk``, or a Hub id.
        key: the recipe's key of the split, for messages.
        split: which split; data without splits takes the default of ``key`` alone.
        text_field: name of the text column of documents.
        streaming: read nothing yet.

    Raises:
        UserError: nothing at that path, unreadable, empty, or no such split.
    """
    check_path(dataset)
    path = Path(dataset).expanduser()
    if not path.exists():
        loaded = Loaded(_load_from_hub(dataset, key, split, streaming), documents=False)
    elif path.is_dir() and _is_saved(path):
        loaded = Loaded(_load_saved(path, key, split, streaming), documents=False)
    else:
        splits = {} if path.is_file() else find_splits(path)
        if splits and split not in splits:
            raise _no_split(dataset, key, split, splits)
        if not splits:
            _check_unsplit(dataset, key, split)
            splits = {split: [path] if path.is_file() else _files_of(path)}
        loaded = _load_files(splits[split], text_field, streaming)
    if streaming:
        if loaded.documents:
            raise UserError(
                f"dataset {dataset!r} is whole text files, which are not streamed; drop --streaming, or write "
                f"JSONL rows with a column {text_field!r}"
            )
        return loaded
    if len(loaded.rows) == 0:
        raise UserError(f"dataset {dataset!r} holds no rows; give one with at least one example to train on")
    return loaded


def find_splits(directory: Path) -> dict[str, list[Path]]:
    """The files of each split of a directory, as datasets tells them from names and a README; empty without splits.

    Raises:
        UserError: no files, several kinds of them, or several configurations.
    """
    from datasets import load_dataset_builder

    files = _files_of(directory)
    with silent_datasets():
        try:
            data_files = load_dataset_builder(str(directory)).config.data_files or {}
        except FileNotFoundError:
            data_files = {}  # no file of a kind that datasets reads, such as source code
        except ValueError as error:
            reason = " ".join(str(error).split("\nExample")[0].split())
            raise UserError(
                f"dataset directory {str(directory)!r}: {reason}; give a directory of one of them"
            ) from None
    splits = {str(name): sorted({Path(file) for file in names} & set(files)) for name, names in data_files.items()}
    splits = {name: names for name, names in splits.items() if names}
    is_whole = len(splits.get("train", ())) == len(files) or not _builder(files[0])
    if not splits or (len(splits) == 1 and is_whole):
        return {}
    left = [file for file in files if not any(file in names for names in splits.values())]
    if left:
        logger.warning("dataset %s: %s and other files belong to no split, and are not read", directory, left[0].name)
    return splits


def _check_unsplit(dataset: str, key: str, split: str) -> None:
    if split != SPLITS[key]:
        raise UserError(f"dataset {dataset!r} has no splits, got {key} {split!r}; drop it, or give the file to read")


def _no_split(dataset: str, key: str, split: str, splits: Mapping[str, Any]) -> UserError:
    return UserError(f"dataset {dataset!r} has no split {split!r}; set {key} to one of {', '.join(splits)}")


def check_path(dataset: str) -> None:
    """Refuse what is neither there nor the name of something on the Hub, without reading it.

    Raises:
        UserError: nothing there, or no file, directory or Hub id.
    """
    path = Path(dataset).expanduser()
    if path.is_file() or path.is_dir():
        return
    if path.exists():
        raise UserError(f"dataset {dataset!r} is a device or a pipe; give a file, a directory or a Hub id")
    if dataset.startswith((".", "/", "~")) or path.suffix or dataset.count("/") > 1:
        raise UserError(f"dataset {dataset!r} does not exist; give a file, a directory or a Hub id")


def check_ids(rows: Dataset, vocabulary: int, dataset: str) -> None:
    """Refuse rows that came tokenised with ids that the model does not have; on some devices they would only crash.

    Cost: one pass over the ids, about a second per 10**9 of them.

    Raises:
        UserError: with the first such id, or what is no id; or a row with more or fewer labels than ids.
    """
    if "input_ids" not in rows.column_names:
        return
    from pyarrow import compute, types  # type: ignore[import-untyped]

    labels = [name for name in ("labels",) if name in rows.column_names]
    first = 0
    for table in rows.select_columns(["input_ids", *labels]).with_format("arrow").iter(batch_size=1000):
        for name in labels:
            lengths = (compute.list_value_length(table[column]) for column in ("input_ids", name))
            equal = compute.fill_null(compute.equal(*lengths), False).to_pylist()
            if not all(equal):
                raise UserError(
                    f"dataset {dataset!r}, row {first + equal.index(False) + 1}: 'input_ids' and {name!r} are of two "
                    "lengths; give one label for each token"
                )
        first += len(table)
        ids = table["input_ids"].combine_chunks().flatten()
        if not types.is_integer(ids.type):
            raise UserError(f"dataset {dataset!r} has {ids.type} in column 'input_ids', expected lists of token ids")
        bounds = compute.min_max(ids).as_py()
        for token in (bounds["min"], bounds["max"]):
            if token is not None and not 0 <= token < vocabulary:
                raise UserError(
                    f"dataset {dataset!r} has token id {token}, but the model knows 0 to {vocabulary - 1}; "
                    "tokenise it with the tokenizer of this model"
                )


def _is_saved(path: Path) -> bool:
    """Whether ``save_to_disk`` of a data set, or of several splits, wrote a directory."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _load_saved(path: Path, key: str, split: str, streaming: bool) -> Any:
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"cannot read {str(path)!r}, written by save_to_disk ({_reason(error)}); save it again"
        ) from None
    if not isinstance(saved, DatasetDict):
        _check_unsplit(str(path), key, split)
    elif split not in saved:
        raise _no_split(str(path), key, split, saved)
    else:
        saved = saved[split]
    return saved.to_iterable_dataset() if streaming else saved


def _files_of(directory: Path) -> list[Path]:
    """Files of rows of one kind, or, where there are none, all files as text."""
    files = sorted(
        file for file in directory.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(directory))
    )
    if not files:
        raise UserError(
            f"dataset directory {str(directory)!r} holds no files; put text, JSONL, CSV or Parquet files there"
        )
    tables = [file for file in files if _builder(file) and file.name not in METADATA]
    if len({_builder(file) for file in tables}) > 1:
        raise UserError(f"{str(directory)!r} mixes JSON, CSV and Parquet files; keep one kind, or name one file")
    return tables or files


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "__")) for part in relative.parts)


def _builder(file: Path) -> str | None:
    """The name of datasets' builder that reads a file of rows; None for a document."""
    ending = file.with_suffix("").suffix if file.suffix.lower() in COMPRESSIONS else file.suffix
    return BUILDERS.get(ending.lower())


def _load_files(files: list[Path], text_field: str, streaming: bool) -> Loaded:
    """Rows of files of one kind, or one document per text file."""
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    builder = _builder(files[0])
    if builder is None:
        texts = {file: _read_text(file, skip_binary=len(files) > 1) for file in files}
        texts = {file: text for file, text in texts.items() if text}
        return Loaded(Dataset.from_dict({text_field: [*texts.values()]}), True, tuple(texts))
    files = [file for file in files if file.stat().st_size]
    if not files:
        return Loaded(Dataset.from_dict({text_field: []}), documents=False)
    for file in files:
        if builder == "json" and file.suffix.lower() not in COMPRESSIONS and _begin(file) not in (b"{", b"["):
            raise unreadable(files, ValueError("no JSON object"))  # of nulls, PyArrow 26.0 ends the process
    try:
        how = _csv_format(files) if builder == "csv" else {}
        with silent_datasets():
            rows = load_dataset(
                builder, data_files=[str(file) for file in files], split="train", streaming=streaming, **how
            )
        if builder == "json" and not streaming:
            rows.data.validate(full=True)  # PyArrow reads text that is not UTF-8 without a word
    except (DatasetGenerationError, ValueError, OSError) as error:
        raise unreadable(files, error) from None
    return Loaded(rows, False, tuple(files))


def unreadable(files: tuple[Path, ...] | list[Path], error: Exception) -> UserError:
    """What datasets says of files that it cannot read, and the first broken line where they are JSON."""
    if isinstance(error, UserError):
        return error
    for file in files:
        if _builder(file) == "json" and (broken := _first_broken_line(file)):
            return UserError(f"cannot read {str(file)!r}, {broken}; write one JSON object per line, in UTF-8")
    if "column names don't match" in str(error.__cause__ or error):
        return UserError(
            f"{', '.join(repr(file.name) for file in files[:3])} do not have the same columns; give all files the same "
            "columns, or name one"
        )
    return UserError(
        f"cannot read {str(files[0])!r} as {_builder(files[0])} rows ({_reason(error)}); "
        "write one JSON object per line, a CSV file with a header, or a Parquet table"
    )


def _reason(error: BaseException) -> str:
    return (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]


def _first_broken_line(file: Path) -> str:
    """The first line of a JSONL file that holds no JSON object, "" for none; the fault of another JSON file."""
    if file.suffix.lower() in COMPRESSIONS:
        return ""
    try:
        if _begin(file) == b"[":
            json.loads(file.read_bytes())
            return ""
    except ValueError as error:
        return f"line {getattr(error, 'lineno', 1)} ({error})"
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip() and not isinstance(json.loads(line.strip()), dict):
                    return f"line {number} (not an object)"
            except ValueError as error:  # of JSON, or of UTF-8
                return f"line {number} ({error})"
    return ""


@contextmanager
def silent_datasets() -> Iterator[None]:
    """Without the line that datasets logs about a file that it cannot read: the error says it."""
    from datasets.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _csv_format(files: list[Path]) -> dict[str, Any]:
    """How the files are to be read: every column as text, whatever it looks like, as its header names it.

    Raises:
        UserError: a line of another length, which would shift its columns in silence.
    """
    from datasets import Features, Value

    separator = "\t" if ".tsv" in files[0].suffixes else ","
    columns: list[str] = []
    for file in files:
        if file.suffix.lower() in COMPRESSIONS:
            continue
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter=separator)
            for fields in reader:
                columns = columns or fields
                if fields and len(fields) != len(columns):
                    raise UserError(
                        f"dataset {str(file)!r}, line {reader.line_num}: got {len(fields)} fields, expected "
                        f"{len(columns)} as in the header; put a field that holds the separator into double quotes"
                    )
    how: dict[str, Any] = {"keep_default_na": False, "sep": separator}
    return {**how, "features": Features({column: Value("string") for column in columns})} if columns else how


def _begin(file: Path) -> bytes:
    """The first byte of a JSON file: ``[`` of one list of objects, ``{`` of an object per line."""
    with file.open("rb") as stream:
        return stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


def _line_numbers(file: Path) -> range | list[int] | None:
    """The line of each row of a file; the number of the row where rows have no lines; None where it is not counted."""
    builder = _builder(file)
    if builder == "parquet":
        from pyarrow import parquet

        return range(1, parquet.read_metadata(file).num_rows + 1)
    if builder != "json" or file.suffix.lower() in COMPRESSIONS:
        return None
    if _begin(file) == b"[":
        return range(1, len(json.loads(file.read_bytes())) + 1)
    with file.open("rb") as lines:
        return [number for number, line in enumerate(lines, 1) if line.strip()]


def _read_text(file: Path, *, skip_binary: bool) -> str:
    """A file's text; in a directory, what is not UTF-8 is passed over."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        if skip_binary:
            return ""
        raise UserError(f"dataset {str(file)!r} is not UTF-8 text; give text, .jsonl, .csv or .parquet") from None
    except OSError as error:
        raise UserError(f"cannot read dataset {str(file)!r} ({error.strerror}); check its permissions") from None


def _load_from_hub(dataset: str, key: str, split: str, streaming: bool) -> Dataset:
    """A dataset by Hub id; a missing path and an unreachable Hub are told apart."""
    from datasets import get_dataset_split_names, load_dataset

    try:
        return load_dataset(dataset, split=split, streaming=streaming)
    except Exception as error:  # noqa: BLE001 - the Hub client raises many unrelated types, all meaning "not there"
        try:
            splits = get_dataset_split_names(dataset)
        except Exception:  # noqa: BLE001 - same
            splits = []
        if splits and split not in splits:
            raise _no_split(dataset, key, split, dict.fromkeys(splits)) from None
        if "available configs" in str(error):
            reason = " ".join(str(error).split("\nExample")[0].split())
            raise UserError(f"dataset {dataset!r}: {reason} Download one of them, and give its directory") from None
        raise UserError(
            f"dataset {dataset!r} is neither a local path nor a Hub dataset that can be reached "
            f"({type(error).__name__}); check the spelling, or the network if it is on the Hub"
        ) from None
