"""Words that a reader of the field would have to read twice are not used, in code, messages, tests and pages alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PLACES = ("src", "tests", "docs", "examples", "benchmarks", *PAGES)

INSTEAD = {
    r"longest rows?\b": "longest sequence",
    r"\bsurely\b": "at the high estimate",
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\banew\b": "again",
    r"\bnought\b": "zero",
    r"\btorsos?\b": "partial checkpoint",
    r"\blets? go of\b": "release",
    r"\bstands on\b": "is installed on",
    r"something listens to": "has hooks",
    r"by its caller's word": "not verified",
    r"\bshares? of the tiles\b": "fraction of the tiles",
    r"\bmatrix-product units?\b": "GEMM units",
    r"\bother people's kernels\b": "third-party kernels",
    r"\bone voice\b": "only rank 0 reports",
    r"\bhears what\b": "is called with what",
    r"\bpushes nothing\b": "zero gradient",
    r"\bdials?\b": "automatic settings",
    r"\blean\b": "minimal memory",
}


def found_in(text: str) -> list[str]:
    """What stands in ``text``, in names too, and what to write instead."""
    text = text.replace("_", " ")
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}, write {better!r}"
        for pattern, better in INSTEAD.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def test_the_standard_terms_are_used() -> None:
    if not (ROOT / "docs").is_dir():
        pytest.skip("no pages here: the tests run from an installed package")
    files = [ROOT / place for place in PLACES if (ROOT / place).is_file()]
    files += [file for place in PLACES for file in (ROOT / place).rglob("*")]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".md", ".yaml")}
    assert len(texts) > 300
    wrong = [f"{file}: {one}" for file, text in texts.items() if file != Path(__file__) for one in found_in(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("pattern", INSTEAD)
def test_each_word_is_seen(pattern: str) -> None:
    word = re.sub(r"\\b|\(s\|ed\|ing\)\?|s\?", "", pattern)
    assert len(found_in(f"a line\n{word}")) == 1
    assert len(found_in(f"def test_{word.replace(' ', '_')}_in_a_name(): ...")) == 1
