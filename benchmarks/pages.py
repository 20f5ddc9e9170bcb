"""Tables that a command writes into a page of the documentation, between two marks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write_between(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Put ``lines`` between the marks ``begin`` and ``end`` of a page, in place of what is there."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    page.write_text("\n".join([before + begin, "", *lines, "", end + after]), encoding="utf-8")
