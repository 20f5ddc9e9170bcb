"""Where a number was measured: device, versions, date and command."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from seqtile.devices import accelerator, device_name, device_type, package_version, total_device_bytes

PACKAGES = ("seqtile", "torch", "triton", "transformers", "accelerate", "peft", "liger-kernel", "deepspeed")


def environment() -> dict[str, Any]:
    """Device and versions of this process."""
    import torch

    device = accelerator()
    return {
        "device_name": device_name(),
        "device_count": torch.accelerator.device_count() if device is not None else 0,
        "device_type": device_type(),
        "device_bytes": total_device_bytes(),
        # The toolkit that torch was built for, such as "12.8".
        "driver": getattr(torch.version, device.type, None) if device is not None else None,
        "versions": {name: version for name in PACKAGES if (version := package_version(name))},
        "python": platform.python_version(),
    }


def stamp(machine: dict[str, Any], command: Sequence[str] | None = None) -> dict[str, Any]:
    """What every row of results starts with: date, command, device and versions."""
    line = list(command) if command is not None else ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    now = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": " ".join(line)}
    # How busy the machine was: times are worth little where this is above the number of cores.
    busy = {"load_average": list(os.getloadavg())} if hasattr(os, "getloadavg") else {}
    return {**now, **busy, **machine}


def append_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add rows to a file of JSON lines, which is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_strict(row), allow_nan=False) + "\n")


def _strict(value: Any) -> Any:
    """What is not finite as a string: JSON has no such number, and not every reader takes Python's spelling."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _strict(entry) for key, entry in value.items()}
    return [_strict(entry) for entry in value] if isinstance(value, (list, tuple)) else value
