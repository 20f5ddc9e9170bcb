"""``seqtile doctor``."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

import typer

from seqtile.devices import (
    GIB,
    accelerator,
    cpu_cores,
    device_name,
    package_version,
    total_device_bytes,
    total_host_bytes,
)

if TYPE_CHECKING:
    from seqtile.cli.doctor_checks import FeatureResult

CORE = ("torch", "transformers")
EXTRAS = {
    "train": ("accelerate", "trl", "datasets", "peft"),
    "deepspeed": ("deepspeed",),
    "liger": ("liger_kernel",),
}


def command(
    compat: bool = typer.Option(
        False, "--compat", help="Show the tested versions of each library, and check each feature here."
    ),
) -> None:
    """Show versions and devices, and run each technique once here."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if compat:
        _show_compat()
        return

    from seqtile import __version__
    from seqtile.engines.build_locks import stale_lock_message, stale_locks

    host_bytes = total_host_bytes()
    host_memory = f"{host_bytes / GIB:.1f} GiB memory" if host_bytes else "memory unknown"
    rows = [
        ("seqtile", __version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.machine()}, {cpu_cores()} CPU cores, {host_memory}"),
    ]
    rows += [(name, package_version(name) or f"missing: pip install {name}") for name in CORE]
    for extra, names in EXTRAS.items():
        rows += [(name, package_version(name) or f"not installed, for {extra}: pip install {name}") for name in names]
    rows += [("device", device) for device in _device_lines()]
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in rows:
        table.add_row(name, Text(value))  # plain text: rich would take [train] for a style
    Console().print(table)
    for lock in stale_locks():  # not in the table, whose line breaks prevent copying a path
        print(stale_lock_message(lock))
    if any(result.problem for result in _run_features()):
        raise typer.Exit(1)


def _run_features() -> list[FeatureResult]:
    """Check every feature of :data:`seqtile.cli.doctor_checks.FEATURES` in order, and print a line for each."""
    import logging

    import torch
    from transformers.utils import logging as transformers_logging

    from seqtile._log import log_level
    from seqtile.cli.doctor_checks import run_features

    device = accelerator() or torch.device("cpu")
    print(f"One training step of a tiny model on {device.type}, compared with untiled:")
    results = []
    transformers_logging.set_verbosity_error()
    with log_level("seqtile", logging.ERROR):
        for result in run_features(device):
            print(f"  {result.name:20} {result}", flush=True)
            results.append(result)
    return results


def _show_compat() -> None:
    """One line a library: its version, the range that tests have run with, and which features were right here."""
    from seqtile import _compat
    from seqtile.cli.doctor_checks import FEATURES

    results = _run_features()
    for library, (lowest, highest) in _compat.TESTED.items():
        version = _compat.installed(library)
        line = f"{library} {version}" if version else f"{library} is not installed"
        right = [result.name for result in results if FEATURES[result.name].library == library and not result.problem]
        print(f"{line}; tested {lowest} to {highest}{'; ok here: ' if right else ''}{', '.join(right)}")
    if _compat.untested():
        print(_compat.untested().partition(";")[0])
    if any(result.problem for result in results):
        raise typer.Exit(1)


def _device_lines() -> list[str]:
    """One line per accelerator, or one for the CPU."""
    import torch

    device = accelerator()
    if device is None:
        return [f"cpu only ({torch.get_num_threads()} threads): training runs in fp32"]
    lines = []
    for index in range(torch.accelerator.device_count()):
        total = total_device_bytes(index)
        memory = f", {total / GIB:.1f} GiB" if total else ""
        lines.append(f"{device.type}:{index} {device_name(index)}{memory}")
    return lines
