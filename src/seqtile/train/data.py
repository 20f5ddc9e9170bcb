"""Datasets: local JSONL, Parquet, CSV or text, or a Hub id, found and read before anything is trained.

What comes out is a ``datasets.Dataset`` with the columns TRL understands: ``input_ids`` (pre-tokenised rows),
``messages`` or ``conversations`` (chat), ``prompt`` and ``completion``, or a text column.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from seqtile._errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
PARQUET_ENDINGS = (".parquet",)
CSV_ENDINGS = (".csv", ".tsv")
ROW_ENDINGS = JSON_ENDINGS + PARQUET_ENDINGS + CSV_ENDINGS

ROW_KINDS = (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"))
"""Columns that say by themselves what a row is; a text column is looked for after them."""


class Loaded(NamedTuple):
    """Rows, and where they are from.

    Attributes:
        rows: what was read, unchecked but for its columns; an ``IterableDataset`` where it is streamed.
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
            if index < len(lines):
                of = f"file {file.name!r}, " if len(self.files) > 1 else ""
                return f"{of}{'row' if isinstance(lines, range) else 'line'} {lines[index]}"
            index -= len(lines)
        return f"row {index + 1}"


def load_rows(dataset: str, *, split: str = "train", text_field: str = "text", streaming: bool = False) -> Loaded:
    """Load a dataset and check that its columns can be trained on.

    Args:
        dataset: a file (``.jsonl``, ``.json``, ``.parquet``, ``.csv``, ``.tsv``; anything else is read as one UTF-8
            document), a directory of such files, a directory written by ``Dataset.save_to_disk``, or a Hub id.
        split: which split of a Hub dataset.
        text_field: name of the text column.
        streaming: read nothing yet; columns and rows are for :class:`seqtile.train.stream.Stream` to check.

    Raises:
        UserError: nothing at that path, unreadable, empty, or no column that can be trained on.
    """
    check_path(dataset)
    path = Path(dataset).expanduser()
    if path.is_file():
        loaded = _load_files([path], text_field, streaming)
    elif path.is_dir():
        loaded = _load_directory(path, text_field, streaming)
    else:
        loaded = Loaded(_load_from_hub(dataset, split, streaming), documents=False)
    if streaming:
        if loaded.documents:
            raise UserError(
                f"dataset {dataset!r} is whole text files, which are not streamed; drop --streaming, or write "
                f"JSONL rows with a column {text_field!r}"
            )
        return loaded
    if len(loaded.rows) == 0:
        raise UserError(f"dataset {dataset!r} holds no rows; give one with at least one example to train on")
    row_kind(loaded.rows.column_names, dataset, text_field)
    return loaded


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
        for found in (bounds["min"], bounds["max"]):
            if found is not None and not 0 <= found < vocabulary:
                raise UserError(
                    f"dataset {dataset!r} has token id {found}, but the model knows 0 to {vocabulary - 1}; "
                    "tokenise it with the tokenizer of this model"
                )


def _load_directory(path: Path, text_field: str, streaming: bool) -> Loaded:
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        from datasets import load_from_disk

        saved = load_from_disk(str(path))
        return Loaded(saved.to_iterable_dataset() if streaming else saved, documents=False)
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    tables = [file for file in files if file.suffix.lower() in ROW_ENDINGS]
    if not files:
        raise UserError(f"dataset directory {str(path)!r} holds no files; put text, JSONL, CSV or Parquet files there")
    return _load_files(tables or files, text_field, streaming)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "__")) for part in relative.parts)


def _load_files(files: list[Path], text_field: str, streaming: bool) -> Loaded:
    """Rows of JSONL, CSV or Parquet files, or one document per text file."""
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    endings = {file.suffix.lower() for file in files}
    if not endings & set(ROW_ENDINGS):
        texts = {file: _read_text(file, skip_binary=len(files) > 1) for file in files}
        texts = {file: text for file, text in texts.items() if text}
        return Loaded(Dataset.from_dict({text_field: [*texts.values()]}), True, tuple(texts))
    for builder, wanted in (("json", JSON_ENDINGS), ("parquet", PARQUET_ENDINGS), ("csv", CSV_ENDINGS)):
        if endings <= set(wanted):
            filled = [file for file in files if file.stat().st_size]
            if not filled:
                return Loaded(Dataset.from_dict({text_field: []}), documents=False)
            for file in filled if builder == "json" else ():
                if not _begins_with(file, b"{["):  # PyArrow 26.0 ends the process on a file of nulls
                    _refuse_broken_json(file)
            try:
                how = _csv_format(filled) if builder == "csv" else {}
                names = [str(file) for file in filled]
                with silent_datasets():
                    rows = load_dataset(builder, data_files=names, split="train", streaming=streaming, **how)
                if builder == "json" and not streaming:
                    rows.data.validate(full=True)  # PyArrow reads text that is not UTF-8 without a word
            except (DatasetGenerationError, ValueError, OSError) as error:
                if isinstance(error, UserError):
                    raise
                refuse_broken_rows(filled)
                reason = str(error.__cause__ or error).strip().splitlines()[0]
                raise UserError(
                    f"cannot read {str(filled[0])!r} as {builder} rows ({reason}); "
                    "write one JSON object per line, a CSV file with a header, or a Parquet table"
                ) from None
            return Loaded(rows, False, tuple(filled))
    raise UserError(f"{str(files[0].parent)!r} mixes JSON, CSV and Parquet files; keep one kind, or name one file")


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
        UserError: no header, or a line of another length, which would shift its columns in silence.
    """
    from datasets import Features, Value

    columns: list[str] = []
    for file in files:
        for number, fields in _csv_rows(file):
            columns = columns or fields
            if len(fields) != len(columns):
                raise UserError(
                    f"dataset {str(file)!r}, line {number}: got {len(fields)} fields, expected the header's "
                    f"{len(columns)}; put fields that hold the separator or a line break into double quotes"
                )
    features = Features({column: Value("string") for column in columns})
    return {"features": features, "keep_default_na": False, "sep": _separator(files[0])}


def _separator(file: Path) -> str:
    return "\t" if file.suffix.lower() == ".tsv" else ","


def _csv_rows(file: Path, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """(number of its first line, fields) of each row, the header included; empty lines are none.

    Raises:
        UserError: text that is not UTF-8; with ``strict``, also a quote that is not closed.
    """
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter=_separator(file), strict=strict)
        begins = 1
        try:
            for fields in reader:
                if fields:
                    yield begins, fields
                begins = reader.line_num + 1
        except UnicodeDecodeError as error:
            # Text is decoded many lines at a time: the line of the byte is counted.
            raise UserError(_not_utf8(file, _line_of_bad_byte(file), error)) from None
        except csv.Error as error:
            reason = "a quote is not closed" if "unexpected end" in str(error) else error
            raise UserError(f"cannot read {str(file)!r}, line {begins} as CSV ({reason}); close or double it") from None


def refuse_broken_rows(files: Sequence[Path]) -> None:
    """Name the first line of these files that is no JSON object, or no row of a CSV file; Parquet is passed over.

    Raises:
        UserError: there is one.
    """
    for file in files:
        if file.suffix.lower() in JSON_ENDINGS:
            _refuse_broken_json(file)
        elif file.suffix.lower() in CSV_ENDINGS:
            for _ in _csv_rows(file, strict=True):
                pass


def _refuse_broken_json(file: Path) -> None:
    """Name the first line that is no JSON object.

    Raises:
        UserError: there is one.
    """
    if _begins_with(file, b"\xfe\xff"):
        raise UserError(f"cannot read {str(file)!r}: it is UTF-16, not UTF-8; save it as UTF-8")
    if _is_array(file):
        try:
            json.loads(file.read_bytes())
        except UnicodeDecodeError as error:
            raise UserError(_not_utf8(file, _line_of_bad_byte(file), error)) from None
        except json.JSONDecodeError as error:
            raise UserError(
                f"cannot read {str(file)!r}, line {error.lineno} ({_why(error)}); write valid JSON"
            ) from None
        return
    empty = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                empty = empty or number
                continue
            problem = ""
            try:
                if not isinstance(json.loads(line.rstrip()), dict):
                    problem = "not an object"
            except UnicodeDecodeError as error:
                raise UserError(_not_utf8(file, number, error)) from None
            except json.JSONDecodeError as error:
                problem = _why(error)
            if problem:
                raise UserError(
                    f"cannot read {str(file)!r}, line {number} ({problem}); write one JSON object per line"
                ) from None
    if empty:  # datasets reads over them, but not where a column holds values of several types
        raise UserError(f"cannot read {str(file)!r}, line {empty} (empty); remove empty lines")


def _why(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _not_utf8(file: Path, line: int, error: UnicodeDecodeError) -> str:
    byte = f"byte 0x{error.object[error.start]:02x}"
    return f"cannot read {str(file)!r}, line {line} (not UTF-8: {byte}); save the file as UTF-8"


def _line_of_bad_byte(file: Path) -> int:
    """The first line of a file that is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


def _is_array(file: Path) -> bool:
    """Whether a JSON file holds one list of objects and not an object per line."""
    return _begins_with(file, b"[")


def _begins_with(file: Path, signs: bytes) -> bool:
    with file.open("rb") as stream:
        return stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in {bytes([sign]) for sign in signs}


def _line_numbers(file: Path) -> range | list[int]:
    """The line of each row of a file; the number of the row where rows have no lines."""
    ending = file.suffix.lower()
    if ending in CSV_ENDINGS:
        return [number for number, _ in _csv_rows(file)][1:]
    if ending in PARQUET_ENDINGS:
        from pyarrow import parquet

        return range(1, parquet.read_metadata(file).num_rows + 1)
    if _is_array(file):
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


def _load_from_hub(dataset: str, split: str, streaming: bool) -> Dataset:
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
            raise UserError(
                f"dataset {dataset!r} has no split {split!r}; set dataset_split to one of {', '.join(splits)}"
            ) from None
        raise UserError(
            f"dataset {dataset!r} is neither a local path nor a Hub dataset that can be reached "
            f"({type(error).__name__}); check the spelling, or the network if it is on the Hub"
        ) from None


def row_kind(columns: Sequence[str], dataset: str, text_field: str) -> tuple[str, ...]:
    """The columns that say what a row is: the first of :data:`ROW_KINDS` that is there, or the text column.

    Raises:
        UserError: there is none that TRL can train on.
    """
    for kind in (*ROW_KINDS, (text_field,)):
        if set(kind) <= set(columns):
            return kind
    raise UserError(
        f"dataset {dataset!r} has columns {', '.join(sorted(columns))}; expected 'messages', "
        f"'prompt' and 'completion', 'input_ids' or {text_field!r} "
        "(name another text column with 'trainer: {dataset_text_field: NAME}')"
    )
