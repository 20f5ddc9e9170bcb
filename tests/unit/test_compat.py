"""Versions that tests have run with, and the one warning outside of them. `tests/compat` has the private names."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import seqtile
from seqtile import _compat
from zoo import causal_lm

apply_module = importlib.import_module("seqtile.install.apply")
ROOT = Path(__file__).parents[2]


def test_what_is_installed_here_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_compat.TESTED, "torch", ("2.11", "9"))  # `make test-newest` is there to run beyond it
    assert _compat.untested.__wrapped__() == ""


@pytest.mark.parametrize(("version", "message"), [
    ("2.16.0", r"torch 2\.16\.0 \(tested: 2\.13 to 2\.15\)"), ("3.0", r"torch 3\.0"), ("2.9.1+cu130", r"torch 2\.9"),
    ("2.13.3+cu130", "^$"), ("2.13.0", "^$"), ("2.15.0+cu132", "^$"),
])  # fmt: skip
def test_a_version_outside_the_range_is_named(version: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compat, "installed", lambda library: version if library == "torch" else None)
    assert re.search(message, _compat.untested.__wrapped__())


def test_the_warning_comes_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(apply_module, "untested", lambda: "not tested with torch 9")
    apply_module._warn_of_versions.cache_clear()
    for _ in range(2):
        seqtile.apply(causal_lm("llama"))
    apply_module._warn_of_versions.cache_clear()
    messages = [record.message for record in caplog.records if "not tested" in record.message]
    assert messages == ["not tested with torch 9"]


def test_the_versions_are_the_highest_that_are_tested() -> None:
    """Who raises a pin reads the private names again."""
    files = [ROOT / "constraints" / name for name in ("torch.txt", "highest.txt")]
    if not files[0].is_file():
        pytest.skip("no constraints here: the tests run from an installed package")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", "\n".join(file.read_text() for file in files), re.MULTILINE))
    seen = {name: version for name, version in _compat.SEEN.items() if name != "python"}
    assert seen == {name: pins[name] for name in seen}
