"""`python docs/pictures/draw.py`: the pictures of README and docs, one SVG each, for light and dark pages.

`memory.svg` is drawn from `memory.json`, which `measure.py` measures, `ladder.svg` from rows of `seqtile bench
ladder` in `benchmarks/results`; the others are schematic. `tests/unit/test_pictures.py` compares the files with what
this writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
LADDER = HERE.parents[1] / "benchmarks" / "results" / "ladder-h100.jsonl"
MIB = 2**20

STYLE = """
svg { background: #ffffff; }
text { font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
.small { font-size: 11px; } .big { font-size: 15px; font-weight: 600; } .bold { font-weight: 600; }
.faint { fill: #59636e; } .line { stroke: #59636e; fill: none; stroke-width: 1.3; } .grid { stroke: #d1d9e0; }
.box { fill: #f6f8fa; stroke: #818b98; } .red { fill: #d1495b; } .blue { fill: #30638e; } .gold { fill: #d9982b; }
.grey { fill: #9aa5ab; } .soft-red { fill: #f4d5d9; stroke: #d1495b; } .soft-blue { fill: #d3e0ea; stroke: #30638e; }
.soft-gold { fill: #f9ead0; stroke: #d9982b; } .head { fill: #59636e; } .on { fill: #ffffff; }
.dashed { stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117; } text { fill: #f0f6fc; } .faint { fill: #9198a1; } .line { stroke: #9198a1; }
  .head { fill: #9198a1; } .grid { stroke: #3d444d; } .box { fill: #151b23; stroke: #656c76; } .on { fill: #ffffff; }
  .soft-red { fill: #4d2128; } .soft-blue { fill: #1c3244; } .soft-gold { fill: #443215; }
}
"""


class Picture:
    """Shapes on a page, from left to right and top to bottom.

    Args:
        width, height: of the page, in pixels.
        title: what the picture shows, in a sentence: read out where it cannot be seen.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
            f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        ]  # fmt: skip

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line, its base line at ``y``."""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "box", small: str = ""
    ) -> None:
        """A rectangle with up to two lines in its middle."""
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{kind}"/>')
        on = " on" if kind in ("red", "blue", "gold", "grey") else ""
        lines = [(words, f"{small}{on}") for words in words.split("\n") if words]
        for number, (line, style) in enumerate(lines):
            at = y + height / 2 + 4.5 + 15 * (number - (len(lines) - 1) / 2)
            self.text(x + width / 2, at, line, style, "middle")

    def line(self, points: Sequence[tuple[float, float]], kind: str = "", ends: str = "end") -> None:
        """A line through ``points``, with a head at its end, or at none."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if ends == "end" else ""
        self.shapes.append(f'<polyline points="{path}" class="line {kind}"{head}/>')

    def area(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """A filled outline."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(f'<polygon points="{path}" class="{kind}"/>')

    def __str__(self) -> str:
        return "\n".join([*self.shapes, "</svg>", ""])


PARTS = {"MLP": "red", "attention": "blue", "head and loss": "gold"}
"""Parts of the model by the colour that stands for them in every picture; the rest is grey."""


def colour(part: str) -> str:
    """Of a part of the model; "MLP and norms" is the MLP."""
    return next((kind for name, kind in PARTS.items() if part.startswith(name)), "grey")


def memory() -> Picture:
    """Live memory over one step, untiled and tiled."""
    found: dict[str, Any] = json.loads((HERE / "memory.json").read_text(encoding="utf-8"))
    peaks = {side: found[side]["peak_bytes"] / MIB for side in ("untiled", "tiled")}
    share = peaks["tiled"] / peaks["untiled"]
    picture = Picture(
        760, 400, f"Memory over one training step of {found['tokens']:,} tokens, above the weights: untiled it "
        f"peaks at {peaks['untiled']:.0f} MiB in the MLP, with seqtile at {peaks['tiled']:.0f} MiB",
    )  # fmt: skip
    picture.text(14, 26, f"Memory over one training step of {found['tokens']:,} tokens", "big")
    picture.text(746, 26, f"peak with seqtile: {share:.0%} of untiled", "bold", "end")
    left, width, height = 70, 676, 120
    scale = height / (1.1 * peaks["untiled"])
    for row, side in enumerate(("untiled", "tiled")):
        base = 180 + 160 * row
        name = "untiled" if side == "untiled" else "seqtile"
        picture.text(left, base - height + 6, name, "bold")
        for mib in (100, 200, 300):
            picture.line([(left, base - mib * scale), (left + width, base - mib * scale)], "grid", "")
            picture.text(left - 6, base - mib * scale + 4, f"{mib} MiB", "small faint", "end")
        points = found[side]["points"]
        step = width / len(points)
        columns = [(left + number * step, live / MIB, part) for number, (live, part) in enumerate(points)]
        for part, run in groupby(columns, key=lambda column: colour(column[2])):
            mine = list(run)
            top = [(at, base - live * scale) for x, live, _ in mine for at in (x, x + step)]
            picture.area([(mine[0][0], base), *top, (mine[-1][0] + step, base)], part)
        x, live, _ = max(columns, key=lambda column: column[1])
        picture.text(x, base - live * scale - 6, f"{peaks[side]:.0f} MiB", "bold", "start")
        picture.line([(left, base), (left + width, base)], "", "")
    picture.text(left, 360, "forward", "small faint")
    picture.text(left + width, 360, "backward", "small faint", "end")
    for number, (part, kind) in enumerate([*PARTS.items(), ("rest", "grey")]):
        picture.box(84 + 130 * number, 376, 12, 12, kind=kind)
        picture.text(102 + 130 * number, 387, part, "small")
    return picture


def ladder() -> Picture:
    """The longest sequence of each rung, on one 80 GB card."""
    lines = LADDER.read_text(encoding="utf-8").splitlines()
    rungs = [(row["rung"], row["max_length"], row["common"]["device_us_per_token"]) for row in map(json.loads, lines)]
    longest, first = max(length for _, length, _ in rungs), rungs[0][1]
    picture = Picture(
        760, 62 + 32 * len(rungs), f"Longest sequence on one 80 GB H100 by the plan, Llama-8B with LoRA: "
        f"{first:,} tokens untiled, {longest:,} with every technique",
    )  # fmt: skip
    picture.text(14, 24, "Longest sequence on one 80 GB H100, Llama-8B with LoRA, by the plan", "big")
    before = rungs[0]
    for number, rung in enumerate(rungs):
        name, length, time = rung
        y, end = 42 + 32 * number, 214 + 380 * length / longest
        for_time = length < before[1] and time < before[2]
        picture.text(206, y + 15, name, "small", "end")
        picture.box(214, y, end - 214, 22, kind="gold" if for_time else "blue")
        more = f"  ({length / first:.1f}x)" if number else ""
        picture.text(end + 6, y + 15, f"{length:,}{more}", "small bold")
        if for_time:
            picture.text(746, y + 15, f"{1 - time / before[2]:.0%} less time a token", "small faint", "end")
        before = rung
    note = "Each rung adds one setting, the last takes one away; yellow buys time, not length."
    picture.text(14, 54 + 32 * len(rungs), note, "small faint")
    return picture


def tiles() -> Picture:
    """What exists at once in one MLP, untiled and in tiles."""
    picture = Picture(
        760, 306, "An untiled MLP holds gate, up and their product for all tokens at once; in tiles only one slice "
        "of them exists at any time, while input and output are whole",
    )  # fmt: skip
    for row, (name, parts) in enumerate((("untiled", 1), ("in tiles", 4))):
        y = 36 + 138 * row
        picture.text(14, y - 12, name, "bold")
        picture.box(60, y, 46, 80, kind="soft-blue")
        picture.text(83, y + 96, "input [T, D]", "small", "middle")
        for column, label in enumerate(("gate [T, F]", "up [T, F]", "product [T, F]")):
            x = 190 + 148 * column
            if parts == 1:
                picture.box(x, y, 110, 80, kind="soft-red")
            else:
                picture.box(x, y, 110, 80, kind="line dashed")
                picture.box(x, y + 20, 110, 20, kind="soft-red")
            picture.text(x + 55, y + 96, label if parts == 1 else label.replace("T", "tile"), "small", "middle")
        picture.box(640, y, 46, 80, kind="soft-blue")
        picture.text(663, y + 96, "output [T, D]", "small", "middle")
        middle = y + (40 if parts == 1 else 30)
        for start, end in ((110, 184), (304, 332), (452, 480), (600, 634)):
            picture.line([(start, middle), (end, middle)])
        if parts > 1:
            for edge in range(1, parts):
                at = y + 80 * edge / parts
                picture.line([(60, at), (106, at)], "dashed", "")
                picture.line([(640, at), (686, at)], "dashed", "")
    picture.text(14, 296, "T tokens, D hidden size, F intermediate size: F is 3 to 4 times D. Every tile uses the same "
                 "memory again.", "small faint")  # fmt: skip
    return picture


def graphs() -> Picture:
    """What autograd records of one MLP, untiled and tiled."""
    picture = Picture(
        760, 262, "Untiled, autograd saves the intermediates of the whole MLP; with seqtile it saves the input alone, "
        "and each tile is computed again in backward, one after another",
    )  # fmt: skip
    picture.text(14, 24, "Untiled: one node for each operation, each keeps what its backward needs", "bold")
    for number, words in enumerate(("gate, up", "activation", "multiply", "down")):
        x = 130 + 150 * number
        picture.box(x, 40, 104, 34, words)
        picture.box(x + 10, 78, 84, 20, "keeps [T, F]" if number else "keeps x", "soft-red", "small")
        picture.line([(x + 104, 57), (x + 146, 57)])
    picture.text(60, 61, "x", "bold")
    picture.line([(76, 57), (126, 57)])
    picture.text(734, 61, "y", "bold")
    picture.text(14, 136, "Tiled: one node keeps the input, tiles follow one another", "bold")
    picture.text(14, 173, "x", "bold")
    picture.line([(28, 169), (58, 169)])
    picture.box(62, 152, 84, 34, "save")
    picture.box(66, 190, 76, 20, "keeps x", "soft-blue", "small")
    for number in range(3):
        x = 190 + 172 * number
        picture.line([(x - 42 if number == 0 else x - 40, 169), (x - 4, 169)])
        picture.box(x, 152, 128, 34, f"tile {number}: the MLP")
        picture.box(x + 22, 190, 84, 20, "keeps nothing", "box", "small")
    picture.line([(662, 169), (682, 169)])
    picture.box(686, 152, 44, 34, "join")
    picture.line([(732, 169), (748, 169)])
    picture.line([(650, 228), (190, 228)], "dashed")
    picture.text(420, 246, "backward: one tile at a time is computed again from its rows of x, its weights' gradients "
                 "are added to one sum", "small faint", "middle")  # fmt: skip
    return picture


def loss() -> Picture:
    """Head and loss in tiles."""
    picture = Picture(
        760, 210, "The head's logits for all tokens would be [tokens, vocabulary]; in tiles one slice becomes "
        "losses and gradients at once and is gone",
    )  # fmt: skip
    picture.text(14, 24, "Tiled loss: no logits are ever whole", "bold")
    picture.box(40, 44, 60, 120, kind="soft-blue")
    picture.text(70, 182, "hidden [T, D]", "small", "middle")
    picture.box(220, 44, 260, 120, kind="line dashed")
    picture.box(220, 74, 260, 30, "logits of one tile [tile, V]", "soft-gold", "small")
    picture.text(350, 182, "logits [T, V]: never made", "small", "middle")
    picture.line([(104, 89), (214, 89)])
    picture.text(158, 82, "head", "small faint", "middle")
    picture.line([(484, 89), (556, 76)])
    picture.box(560, 56, 178, 34, "sum of losses", "box", "small")
    picture.line([(484, 96), (556, 116)])
    picture.box(560, 100, 178, 34, "gradient of hidden rows", "soft-blue", "small")
    picture.line([(484, 100), (556, 158)])
    picture.box(560, 144, 178, 34, "one fp32 sum for the head", "box", "small")
    picture.text(14, 202, "V is 128 to 260 thousand: at 131,072 tokens the logits of Llama-3 are 31 GiB in bf16.",
                 "small faint")  # fmt: skip
    return picture


def heads() -> Picture:
    """Attention for a few heads at a time."""
    picture = Picture(
        760, 232, "Head-wise attention projects, attends and adds into the output for one group of key-value heads "
        "after another, so that queries, keys and values exist for one group only",
    )  # fmt: skip
    picture.text(14, 24, "Head-wise attention: one group of key-value heads at a time", "bold")
    picture.box(30, 76, 70, 80, "input\n[T, D]", "soft-blue", "small")
    for number in range(3):
        y = 44 + 56 * number
        now = number == 1
        kind = "soft-blue" if now else "line dashed"
        picture.box(180, y, 150, 42, f"q, k, v of group {number}", kind, "small")
        picture.box(372, y, 110, 42, "attention", kind, "small")
        picture.box(524, y, 90, 42, "its part of\no_proj", kind, "small")
        if now:
            picture.line([(104, 116), (176, 121)])
            for start, end in ((334, 368), (486, 520), (618, 652)):
                picture.line([(start, y + 21), (end, y + 21)])
    picture.box(656, 76, 76, 80, "output\n[T, D], sum", "soft-blue", "small")
    picture.text(14, 224, "Solid: in memory now. Dashed: done and freed, or still to come.", "small faint")
    return picture


def offload() -> Picture:
    """Copies to the host while the device computes."""
    picture = Picture(
        760, 190, "Layer inputs are copied to the host while the next layer runs, and come back one layer ahead in "
        "backward, so that the device waits for no copy",
    )  # fmt: skip
    picture.text(14, 24, "Offload: copies run beside the layers", "bold")
    picture.text(14, 66, "device", "small")
    picture.text(14, 116, "copies", "small")
    for number in range(3):
        x = 90 + 92 * number
        picture.box(x, 46, 84, 32, f"layer {number}", "soft-blue", "small")
        picture.box(x + 46, 96, 84, 32, f"input {number} out", "soft-gold", "small")
        picture.line([(x + 20, 78), (x + 46, 104)])
    for number in range(3):
        x = 440 + 104 * number
        layer = 2 - number
        picture.box(x, 46, 96, 32, f"backward {layer}", "soft-blue", "small")
        if layer:
            picture.box(x - 6, 96, 84, 32, f"input {layer - 1} back", "soft-gold", "small")
            picture.line([(x + 78, 112), (x + 108, 82)])
    picture.line([(90, 150), (744, 150)])
    picture.text(744, 166, "time", "small faint", "end")
    picture.text(
        14, 184, "Schematic: how far copies and layers overlap depends on the link to the host.", "small faint"
    )
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "memory": memory, "ladder": ladder, "tiles": tiles, "graphs": graphs, "loss": loss, "heads": heads,
    "offload": offload,
}  # fmt: skip


def main() -> int:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(str(draw()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
