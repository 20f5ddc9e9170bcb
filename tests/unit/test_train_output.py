"""Whether an output can be written is tried by several nodes at once, on a disk that they share."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from seqtile._errors import UserError
from seqtile.train import output as train_output
from seqtile.train.output import check_writable


def test_another_node_makes_the_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir

    def already_there(path: Path) -> None:
        make(path)
        make(path)  # FileExistsError

    monkeypatch.setattr(Path, "mkdir", already_there)
    check_writable(tmp_path / "a" / "b")


def test_another_node_removes_the_directory_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = tempfile.TemporaryFile, []

    def removed_once(**asked: Any) -> Any:
        calls.append(asked)
        if len(calls) == 1:
            Path(asked["dir"]).rmdir()
        return real(**asked)

    monkeypatch.setattr(train_output.tempfile, "TemporaryFile", removed_once)
    check_writable(tmp_path / "a" / "b")
    assert len(calls) == 2 and not (tmp_path / "a").exists()


def test_what_is_not_there_for_good_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(**asked: Any) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(train_output.tempfile, "TemporaryFile", removed)
    with pytest.raises(UserError, match="No such file or directory"):
        check_writable(tmp_path / "a")
    assert not (tmp_path / "a").exists()
