"""Datasets: local JSONL, Parquet or text, or a Hub id, checked before anything is trained.

What comes out is a ``datasets.Dataset`` with the columns TRL understands: ``input_ids`` (pre-tokenised rows),
``messages`` or ``conversations`` (chat), ``prompt`` and ``completion``, or a text column.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
PARQUET_ENDINGS = (".parquet",)
ROW_ENDINGS = JSON_ENDINGS + PARQUET_ENDINGS

ROW_KINDS = (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"))
"""Columns that say by themselves what a row is; a text column is looked for after them."""


def load_rows(dataset: str, *, split: str = "train", text_field: str = "text") -> tuple[Dataset, bool]:
    """Load a dataset and check that it can be trained on.

    Args:
        dataset: a file (``.jsonl``, ``.json``, ``.parquet``; anything else is read as one UTF-8 document), a
            directory of such files, a directory written by ``Dataset.save_to_disk``, or a Hub id.
        split: which split of a Hub dataset.
        text_field: name of the text column.

    Returns:
        The rows, and whether they are whole documents from text files (to be packed, not cut off).

    Raises:
        UserError: nothing at that path, unreadable, empty, or no column that can be trained on.
    """
    path = Path(dataset).expanduser()
    if path.is_file():
        rows, documents = _load_files([path], text_field)
    elif path.is_dir():
        rows, documents = _load_directory(path, text_field)
    elif path.exists():
        raise UserError(f"dataset {dataset!r} is a device or a pipe; give a file, a directory or a Hub id")
    else:
        rows, documents = _load_from_hub(dataset, split), False
    if len(rows) == 0:
        raise UserError(f"dataset {dataset!r} holds no rows; give one with at least one example to train on")
    _check_columns(rows, dataset, text_field)
    return rows, documents


def check_ids(rows: Dataset, vocabulary: int, dataset: str) -> None:
    """Refuse rows that came tokenised with ids that the model does not have; on some devices they would only crash.

    Cost: one pass over the ids, about a second per 10**9 of them.

    Raises:
        UserError: with the first such id, or what is no id.
    """
    if "input_ids" not in rows.column_names:
        return
    from pyarrow import compute, types  # type: ignore[import-untyped]

    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=1000):
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


def _load_directory(path: Path, text_field: str) -> tuple[Dataset, bool]:
    if (path / "dataset_info.json").is_file() and (path / "state.json").is_file():
        from datasets import load_from_disk

        return load_from_disk(str(path)), False
    files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    tables = [file for file in files if file.suffix.lower() in ROW_ENDINGS]
    if not files:
        raise UserError(f"dataset directory {str(path)!r} holds no files; put text, JSONL or Parquet files there")
    return _load_files(tables or files, text_field)


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith((".", "__")) for part in relative.parts)


def _load_files(files: list[Path], text_field: str) -> tuple[Dataset, bool]:
    """Rows of JSONL or Parquet files, or one document per text file."""
    from datasets import Dataset, load_dataset
    from datasets.exceptions import DatasetGenerationError

    endings = {file.suffix.lower() for file in files}
    if not endings & set(ROW_ENDINGS):
        texts = [_read_text(file, skip_binary=len(files) > 1) for file in files]
        texts = [text for text in texts if text]
        return Dataset.from_dict({text_field: texts}), True
    for builder, wanted in (("json", JSON_ENDINGS), ("parquet", PARQUET_ENDINGS)):
        if endings <= set(wanted):
            filled = [str(file) for file in files if file.stat().st_size]
            if not filled:
                return Dataset.from_dict({text_field: []}), False
            try:
                return load_dataset(builder, data_files=filled, split="train"), False
            except (DatasetGenerationError, ValueError, OSError) as error:
                reason = str(error.__cause__ or error).splitlines()[0]
                raise UserError(
                    f"cannot read {filled[0]!r} as {builder} rows ({reason}); "
                    "write one JSON object per line, or a Parquet table"
                ) from None
    raise UserError(f"{str(files[0].parent)!r} mixes JSON and Parquet files; keep one kind, or name one file")


def _read_text(file: Path, *, skip_binary: bool) -> str:
    """A file's text; in a directory, what is not UTF-8 is passed over."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        if skip_binary:
            return ""
        raise UserError(f"dataset {str(file)!r} is not UTF-8 text; give text, .jsonl or .parquet") from None
    except OSError as error:
        raise UserError(f"cannot read dataset {str(file)!r} ({error.strerror}); check its permissions") from None


def _load_from_hub(dataset: str, split: str) -> Dataset:
    """A dataset by Hub id; a missing path and an unreachable Hub are told apart."""
    if dataset.startswith((".", "/", "~")) or Path(dataset).suffix or dataset.count("/") > 1:
        raise UserError(f"dataset {dataset!r} does not exist; give a file, a directory or a Hub id")
    from datasets import get_dataset_split_names, load_dataset

    try:
        return load_dataset(dataset, split=split)
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


def _check_columns(rows: Dataset, dataset: str, text_field: str) -> None:
    """At least one kind of row that TRL can train on, with something in the first one."""
    columns = set(rows.column_names)
    kind = next((kind for kind in ROW_KINDS if columns.issuperset(kind)), None)
    if kind is None:
        if text_field not in columns:
            raise UserError(
                f"dataset {dataset!r} has columns {', '.join(sorted(columns))}; expected 'messages', "
                f"'prompt' and 'completion', 'input_ids' or {text_field!r} "
                "(name another text column with 'trainer: {dataset_text_field: NAME}')"
            )
        kind = (text_field,)
    first: dict[str, Any] = rows[0]
    wanted: type | tuple[type, ...] = str if kind == (text_field,) else (list, str)
    for column in kind:
        if not isinstance(first[column], wanted):
            raise UserError(
                f"dataset {dataset!r} has {type(first[column]).__name__} in column {column!r} of its first "
                "row, expected text, a list of token ids or a list of messages"
            )
