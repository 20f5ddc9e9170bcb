"""A directory with splits gives the one that was asked for, or names them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from refusals import refused
from seqtile.train.data import load_rows


def write(folder: Path, *names: str) -> Path:
    """Files of one row each, whose text is the file's name."""
    from datasets import Dataset

    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            Dataset.from_dict({"text": [name]}).to_parquet(folder / name)
        else:
            text = json.dumps({"text": name}) + "\n"
            (folder / name).write_text(name if name.endswith((".txt", ".py")) else text)
    return folder


def texts(path: Path, **how: str) -> list[str]:
    return sorted(load_rows(str(path), **how).rows["text"][:])


HUB = ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet")
SFT = ("data/train_sft-00000-of-00001-ab.parquet", "data/test_sft-00000-of-00001-ab.parquet")


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (HUB, "train", HUB[:1]),
        (HUB, "test", HUB[1:]),
        (SFT, "train_sft", SFT[:1]),
        (("train.jsonl", "validation.jsonl"), "train", ("train.jsonl",)),
        (("train.jsonl", "validation.jsonl"), "validation", ("validation.jsonl",)),
        (("train/a.jsonl", "test/b.jsonl"), "train", ("train/a.jsonl",)),
        (("train.txt", "test.txt"), "train", ("train.txt",)),
        (("a.jsonl", "b/c.jsonl"), "train", ("a.jsonl", "b/c.jsonl")),
        (("train.jsonl",), "train", ("train.jsonl",)),
        (("a.py", "b.txt"), "train", ("a.py", "b.txt")),
    ],
)
def test_the_split_of_a_directory_is_read(
    tmp_path: Path, files: tuple[str, ...], split: str, expected: tuple[str, ...]
) -> None:
    assert texts(write(tmp_path, *files), split=split) == sorted(expected)


def test_a_directory_without_splits_is_whole_for_evaluation_too(tmp_path: Path) -> None:
    assert texts(write(tmp_path, "a.jsonl", "b.jsonl"), key="eval_split", split="test") == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(("files", "refusal"), [
    (SFT, ("dataset.split-unknown", "test_sft, train_sft")),
    (("train.jsonl", "validation.jsonl"), ("dataset.split-unknown", "train, validation")),
    (("a.jsonl",), ("dataset.no-splits",)),
])  # fmt: skip
def test_another_split_is_refused_and_the_splits_are_named(
    tmp_path: Path, files: tuple[str, ...], refusal: tuple[str, ...]
) -> None:
    with refused(*refusal, "dataset_split", "'other'"):
        texts(write(tmp_path, *files), split="other")


def test_an_evaluation_without_its_split_names_its_own_key(tmp_path: Path) -> None:
    with refused("dataset.split-unknown", "eval_split", "train, validation"):
        texts(write(tmp_path, "train.jsonl", "validation.jsonl"), key="eval_split", split="test")


def test_a_split_of_one_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    with refused("dataset.no-splits", "dataset_split 'validation'"):
        texts(tmp_path / "a.jsonl", split="validation")


def test_files_of_no_split_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert texts(write(tmp_path, "train.jsonl", "extra.jsonl"), split="train") == ["train.jsonl"]
    assert "extra.jsonl" in caplog.text


def test_splits_that_datasets_saved(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "test")}
    DatasetDict(rows).save_to_disk(tmp_path / "splits")
    assert texts(tmp_path / "splits", split="test") == ["test"]
    with refused("dataset.split-unknown", "train, test"):
        texts(tmp_path / "splits", split="other")
    rows["train"].save_to_disk(tmp_path / "one")
    assert texts(tmp_path / "one") == ["train"]
    with refused("dataset.no-splits"):
        texts(tmp_path / "one", split="validation")
    assert [row["text"] for row in load_rows(str(tmp_path / "splits"), streaming=True).rows] == ["train"]


def test_several_configurations_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a/x.jsonl", "b/y.jsonl")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("a", "b"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with refused("dataset.several-configurations", "dataset_config", "['a', 'b']"):
        texts(tmp_path)
    with refused("dataset.several-configurations", "eval_config"):
        load_rows(str(tmp_path), key="eval_split", split="test")
    with refused("dataset.unreadable", "'c' not found"):
        texts(tmp_path, config="c")
    with refused("dataset.file-with-config", "dataset_config 'a'"):
        load_rows(str(tmp_path / "a" / "x.jsonl"), config="a")
    assert texts(tmp_path, config="b") == ["b/y.jsonl"] and texts(tmp_path, config="a") == ["a/x.jsonl"]


def test_files_with_different_columns_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"story": "x"}\n')
    with refused("dataset.unreadable"):
        texts(tmp_path)


def test_compressed_and_arrow_files_are_rows(tmp_path: Path) -> None:
    from datasets import Dataset

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
    assert texts(tmp_path / "a.jsonl.gz") == ["a"]
    Dataset.from_dict({"text": ["b"]}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    assert texts(arrow) == ["b"]
