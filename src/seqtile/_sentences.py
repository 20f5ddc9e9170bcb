"""Counts in words, and results whose repr is their summary."""

from __future__ import annotations

import html


def counted(count: int, noun: str) -> str:
    """``1 row``, ``1,024 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class PrintsAsSentence:
    """Base of results: ``str(result)`` is what a prompt, a failed assertion and a notebook show, in place of fields."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """For notebooks: one line for each part of the sentence."""
        return f"<p>{'<br>'.join(html.escape(part) for part in str(self).split('; '))}</p>"
