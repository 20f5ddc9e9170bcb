# Made from seqtile/devices.py by `python -m seqtile.integrations.hub_kernel`; do not edit.
"""What this machine is and has: each fact is read in one place, for every kind of accelerator.

Sizes are bytes, and 0 where the system does not say. torch is imported by the functions that ask it.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version


def package_version(name: str) -> str | None:
    """The version of an installed package, None without it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
