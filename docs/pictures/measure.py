"""`python docs/pictures/measure.py`: live memory over one step of the demo's model, into memory.json.

Half a minute on two CPU cores. `draw.py` makes the picture of it.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from seqtile.counting.live import LiveBytes, count_live_bytes
from seqtile.devices import device_name, package_version
from seqtile.install.apply import apply, undo
from seqtile.planner.phases import Phase, label_phases, run_step
from seqtile.train.demo import build_demo_model, demo_rows, load_tokenizer

TOKENS, SEED = 8192, 0
POINTS = 400
"""Columns of the picture: each keeps the most bytes of its part of the step."""

MIB = 2**20


def main() -> int:
    tokenizer = load_tokenizer()
    model = build_demo_model(SEED, tokenizer).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.tensor([demo_rows(tokenizer, TOKENS)[0]["input_ids"][:TOKENS]])
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    report = apply(model, loss="tiled")
    sides = {}
    for name in ("tiled", "untiled"):
        if name == "untiled":
            undo(model)
        with count_live_bytes("cpu") as live, label_phases(live, model, report.blocks) as labels:
            run_step(model, batch, labels)
        model.zero_grad(set_to_none=True)
        sides[name] = {"peak_bytes": live.peak, "points": points(live)}
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python docs/pictures/measure.py",
        "device": device_name(),
        "versions": {name: package_version(name) for name in ("seqtile", "torch", "transformers")},
        "model": f"{type(model).__name__}, {sum(weight.numel() for weight in model.parameters()):,} parameters",
        "tokens": ids.numel(),
        "report": str(report),
        **sides,
    }
    path = Path(__file__).with_name("memory.json")
    path.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print({name: f"{side['peak_bytes'] / MIB:.0f} MiB" for name, side in sides.items()}, path)
    return 0


def points(live: LiveBytes) -> list[tuple[int, str]]:
    """(most live bytes, part of the model) of each of :data:`POINTS` equal parts of the step."""
    samples = list(live.timeline())
    last = samples[-1].op + 1
    columns: list[Any] = [None] * POINTS
    for sample in samples:
        place = sample.op * POINTS // last
        if columns[place] is None or sample.live > columns[place].live:
            columns[place] = sample
    before = samples[0]
    found = []
    for column in columns:
        before = column or before
        found.append((before.live, Phase.read(before.phase).part))
    return found


if __name__ == "__main__":
    sys.exit(main())
