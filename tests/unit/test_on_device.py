"""`make test-gpu`: no marked file is forgotten, and a part that fails or hangs is one line among the others."""

from __future__ import annotations

from pathlib import Path

import pytest

import on_device


def test_every_marked_file_is_in_a_part() -> None:
    marked = {
        path.relative_to(on_device.TESTS).as_posix()
        for path in on_device.TESTS.glob("*/test_*.py")
        if "mark.device" in (text := path.read_text(encoding="utf-8")) or "mark.gpu" in text
    }
    started = {word for arguments in on_device.PARTS.values() for word in arguments if word.endswith(".py")}
    # The first looks for the mark, the second is a benchmark of ten minutes.
    assert marked - started == {"unit/test_on_device.py", "integration/test_bench.py"}
    assert started <= marked


def test_each_part_ends_in_its_time_and_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "import pytest, time\npytestmark = pytest.mark.device\n"
    tests = {
        "right": "def test_it(device):\n    assert device.type == 'cpu'\n",
        "wrong": "def test_it():\n    assert False\n",
        "hangs": "def test_it():\n    time.sleep(600)\n",
    }
    for name, test in tests.items():
        (tmp_path / f"test_{name}.py").write_text(body + test)
    parts = {name: [str(tmp_path / f"test_{name}.py"), "--rootdir", str(on_device.TESTS.parent), "-c",
                    str(on_device.TESTS.parent / "pyproject.toml"), "--confcutdir", str(on_device.TESTS),
                    "-p", "conftest"] for name in tests}  # fmt: skip
    limits = {"right": 600, "wrong": 600, "hangs": 1}
    right, wrong, hangs = (
        outcome
        for name, seconds in limits.items()
        for outcome in on_device.run({name: parts[name]}, "cpu", jobs=2, seconds=seconds, folder=tmp_path / "out")
    )
    shown = capsys.readouterr().out
    assert (right.code, wrong.code, hangs.code) == (0, 1, None), shown
    assert right.ok and not wrong.ok and not hangs.ok
    assert "1 passed" in right.summary() and "FAILED" in wrong.summary() and "time was up" in hangs.summary()
    assert all(outcome.summary() in shown for outcome in (right, wrong, hangs))
