"""`python docs/pictures/draw.py`: the pictures of README and docs, one SVG each, for light and dark pages.

`memory.svg` is drawn from `memory.json`, which `measure.py` measures, `ladder.svg` from rows of
`benchmarks/technique_ladder.py` in `benchmarks/results`; the others are schematic. `tests/unit/test_pictures.py`
compares the files with what this writes.
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
WIDTH = 440
"""Of every picture, in pixels: on a phone, 368 pixels for the page's text, the smallest letters are 10 pixels high."""

STYLE = """
svg { background: #ffffff; }
text { font: 14px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
.small { font-size: 12.5px; } .big { font-size: 16px; font-weight: 600; } .bold { font-weight: 600; }
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
        height: of the page, in pixels; its width is :data:`WIDTH`.
        title: what the picture shows, in a sentence: read out where it cannot be seen.
    """

    def __init__(self, height: int, title: str) -> None:
        self.shapes = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            f' role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
            f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto-start-reverse"><path class="head" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        ]  # fmt: skip

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line, its base line at ``y``."""
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def lines(self, x: float, y: float, words: str, kind: str = "small faint", anchor: str = "start") -> None:
        """Several lines, the first one's base line at ``y``."""
        for number, line in enumerate(words.split("\n")):
            self.text(x, y + 17 * number, line, kind, anchor)

    def box(
        self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "box", small: str = ""
    ) -> None:
        """A rectangle with lines in its middle."""
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
        432, f"Memory over one training step of {found['tokens']:,} tokens, above the weights: untiled it "
        f"peaks at {peaks['untiled']:.0f} MiB in the MLP, with seqtile at {peaks['tiled']:.0f} MiB",
    )  # fmt: skip
    picture.text(14, 26, "Memory over one training step", "big")
    picture.text(14, 48, f"{found['tokens']:,} tokens; peak {share:.0%} of untiled", "bold")
    left, width, height = 72, 354, 120
    scale = height / (1.1 * peaks["untiled"])
    for row, side in enumerate(("untiled", "tiled")):
        base = 204 + 160 * row
        picture.text(left, base - height + 4, "untiled" if side == "untiled" else "seqtile", "bold")
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
    picture.text(left, 386, "forward", "small faint")
    picture.text(left + width / 2, 386, "operations, in their order", "small faint", "middle")
    picture.text(left + width, 386, "backward", "small faint", "end")
    for at, (part, kind) in zip((72, 134, 226, 342), [*PARTS.items(), ("rest", "grey")], strict=True):
        picture.box(at, 404, 12, 12, kind=kind)
        picture.text(at + 17, 415, part, "small")
    return picture


def ladder() -> Picture:
    """The longest sequence of each rung, on one 80 GB card."""
    lines = LADDER.read_text(encoding="utf-8").splitlines()
    rungs = [(row["rung"], row["sure_length"], row["common"]["device_us_per_token"]) for row in map(json.loads, lines)]
    longest, first = max(length for _, length, _ in rungs), rungs[0][1]
    picture = Picture(
        100 + 46 * len(rungs), f"Longest sequence on one 80 GB H100 by the plan's high estimate, Llama-8B with LoRA: "
        f"{first:,} tokens untiled, {longest:,} with every technique",
    )  # fmt: skip
    picture.text(14, 24, "Longest sequence on one 80 GB H100", "big")
    picture.text(14, 44, "Llama-8B with LoRA, by the plan's high estimate", "small")
    before = rungs[0]
    for number, rung in enumerate(rungs):
        name, length, time = rung
        y, end = 56 + 46 * number, 14 + 270 * length / longest
        for_time = length < before[1] and time < before[2]
        picture.text(14, y + 13, name, "small")
        picture.box(14, y + 19, end - 14, 18, kind="gold" if for_time else "blue")
        more = f"  ({length / first:.1f}x)" if number else ""
        picture.text(end + 6, y + 33, f"{length:,}{more}", "small bold")
        if for_time:
            picture.text(426, y + 13, f"{1 - time / before[2]:.0%} less time a token", "small faint", "end")
        before = rung
    picture.lines(14, 74 + 46 * len(rungs), "Each rung adds one setting, the last takes one away;\n"
                  "yellow buys time, not length.")  # fmt: skip
    return picture


def tiles() -> Picture:
    """What exists at once in one MLP, untiled and in tiles."""
    picture = Picture(
        380, "An untiled MLP holds gate, up and their product for all tokens at once; in tiles only one slice "
        "of them exists at any time, while input and output are whole",
    )  # fmt: skip
    for row, (name, parts) in enumerate((("untiled", 1), ("in tiles", 4))):
        y = 34 + 160 * row
        picture.text(14, y - 12, name, "bold")
        picture.box(16, y, 42, 80, kind="soft-blue")
        picture.lines(37, y + 96, "input\n[T, D]", "small", "middle")
        for column, label in enumerate(("gate", "up", "product")):
            x = 94 + 92 * column
            if parts == 1:
                picture.box(x, y, 66, 80, kind="soft-red")
            else:
                picture.box(x, y, 66, 80, kind="line dashed")
                picture.box(x, y + 20, 66, 20, kind="soft-red")
            picture.lines(x + 33, y + 96, f"{label}\n[{'T' if parts == 1 else 'tile'}, F]", "small", "middle")
        picture.box(378, y, 42, 80, kind="soft-blue")
        picture.lines(399, y + 96, "output\n[T, D]", "small", "middle")
        middle = y + (40 if parts == 1 else 30)
        for start, end in ((60, 90), (162, 182), (254, 274), (346, 374)):
            picture.line([(start, middle), (end, middle)])
        if parts > 1:
            for edge in range(1, parts):
                at = y + 80 * edge / parts
                picture.line([(16, at), (58, at)], "dashed", "")
                picture.line([(378, at), (420, at)], "dashed", "")
    picture.lines(14, 338, "T tokens, D hidden size, F intermediate, 3 to 4 D.\n"
                  "Every tile uses the same memory again.")  # fmt: skip
    return picture


def graphs() -> Picture:
    """What autograd records of one MLP, untiled and tiled."""
    picture = Picture(
        346, "Untiled, autograd saves the intermediates of the whole MLP; with seqtile it saves the input alone, "
        "and each tile is computed again in backward, one after another",
    )  # fmt: skip
    picture.text(14, 24, "Untiled: one node for each operation,", "bold")
    picture.text(14, 42, "each keeps what its backward needs", "bold")
    for number, words in enumerate(("gate, up", "activation", "multiply", "down")):
        x = 34 + 98 * number
        picture.box(x, 58, 76, 34, words, small="small")
        picture.box(x - 4, 96, 84, 22, "keeps [T, F]" if number else "keeps x", "soft-red", "small")
        picture.line([(x + 76, 75), (x + 94, 75)])
    picture.text(8, 79, "x", "bold")
    picture.line([(18, 75), (30, 75)])
    picture.text(428, 79, "y", "bold")
    picture.text(14, 158, "Tiled: one node keeps the input,", "bold")
    picture.text(14, 176, "tiles follow one another", "bold")
    picture.text(8, 218, "x", "bold")
    picture.line([(18, 214), (30, 214)])
    picture.box(34, 192, 54, 44, "save", small="small")
    picture.box(34, 240, 54, 22, "keeps x", "soft-blue", "small")
    for number in range(3):
        x = 106 + 92 * number
        picture.line([(x - 18, 214), (x - 4, 214)])
        picture.box(x, 192, 74, 44, f"tile {number}:\nthe MLP", small="small")
        picture.box(x + 4, 240, 66, 38, "keeps\nnothing", "box", "small")
    picture.line([(364, 214), (376, 214)])
    picture.box(380, 192, 34, 44, "join", small="small")
    picture.line([(414, 214), (424, 214)])
    picture.text(428, 218, "y", "bold")
    picture.line([(364, 294), (106, 294)], "dashed")
    picture.lines(220, 314, "backward: one tile at a time is computed again from its\n"
                  "tokens of x, its weights' gradients are added to one sum", anchor="middle")  # fmt: skip
    return picture


def loss() -> Picture:
    """Head and loss in tiles."""
    picture = Picture(
        262, "The head's logits for all tokens would be [tokens, vocabulary]; in tiles one slice becomes "
        "losses and gradients at once and is gone",
    )  # fmt: skip
    picture.text(14, 24, "Tiled loss: no logits are ever whole", "bold")
    picture.box(20, 44, 40, 130, kind="soft-blue")
    picture.lines(40, 192, "hidden\n[T, D]", "small", "middle")
    picture.box(112, 44, 140, 130, kind="line dashed")
    picture.box(112, 70, 140, 44, "logits of one tile\n[tile, V]", "soft-gold", "small")
    picture.lines(182, 192, "logits [T, V]:\nnever made", "small", "middle")
    picture.line([(62, 92), (108, 92)])
    picture.text(85, 85, "head", "small faint", "middle")
    for y, words, kind in (
        (44, "sum of losses", "box"), (90, "gradient of\nhidden states", "soft-blue"),
        (136, "one fp32 sum\nfor the head", "box"),
    ):  # fmt: skip
        picture.line([(254, 92), (304, y + 19)])
        picture.box(308, y, 118, 38, words, kind, "small")
    picture.lines(14, 236, "V is 128 to 260 thousand: at 131,072 tokens the logits\n"
                  "of Llama-3 are 31 GiB in bf16.")  # fmt: skip
    return picture


def heads() -> Picture:
    """Attention for a few heads at a time."""
    picture = Picture(
        260, "Head-wise attention projects queries, keys and values of all heads once, then runs norms, rotary "
        "embedding and attention for one group of key-value heads after another, so that copies and gradients exist "
        "for one group only",
    )  # fmt: skip
    picture.text(14, 24, "Head-wise attention: one group of key-value", "bold")
    picture.text(14, 42, "heads at a time", "bold")
    picture.box(8, 92, 54, 76, "input\n[T, D]", "soft-blue", "small")
    picture.box(82, 92, 66, 76, "q, k, v,\nall heads", "soft-blue", "small")
    picture.line([(62, 130), (78, 130)])
    for number in range(3):
        y = 54 + 54 * number
        now = number == 1
        kind = "soft-red" if now else "line dashed"
        picture.box(170, y, 118, 42, f"group {number}: rotary,\nattention", kind, "small")
        if now:
            picture.line([(148, y + 21), (166, y + 21)])
            picture.line([(288, y + 21), (306, y + 21)])
    picture.box(310, 92, 54, 76, "output,\nall\nheads", "soft-blue", "small")
    picture.line([(364, 130), (376, 130)])
    picture.box(380, 92, 54, 76, "output\nprojec-\ntion", "box", "small")
    picture.lines(14, 230, "Solid: in memory now. Dashed: freed, or still to come.\n"
                  "In backward gradients of q, k, v are written over them.")  # fmt: skip
    return picture


def offload() -> Picture:
    """Copies to the host while the device computes."""
    picture = Picture(
        316, "Layer inputs are copied to the host while the next layer runs, and come back one layer ahead in "
        "backward, so that the device waits for no copy",
    )  # fmt: skip
    picture.text(14, 24, "Offload: copies run beside the layers", "bold")
    for y, name in ((44, "forward"), (162, "backward")):
        picture.text(14, y + 12, name, "bold")
        picture.text(14, y + 38, "device", "small")
        picture.text(14, y + 84, "copies", "small")
    for number in range(3):
        x = 74 + 108 * number
        picture.box(x, 62, 96, 30, f"layer {number}", "soft-blue", "small")
        picture.box(x + 50, 108, 90, 30, f"input {number} out", "soft-gold", "small")
        picture.line([(x + 24, 92), (x + 48, 114)])
        layer = 2 - number
        picture.box(x, 180, 96, 30, f"layer {layer}", "soft-blue", "small")
        if layer:
            picture.box(x, 226, 90, 30, f"input {layer - 1} back", "soft-gold", "small")
            picture.line([(x + 92, 236), (x + 116, 214)])
    picture.line([(74, 272), (426, 272)])
    picture.text(426, 288, "time", "small faint", "end")
    picture.text(14, 306, "Schematic: the overlap depends on the link to the host.", "small faint")
    return picture


def chunks() -> Picture:
    """What a step keeps of layers and tokens: with checkpoints, and in chunks."""
    layers, parts, row, width = 8, 6, 22, 120
    picture = Picture(
        386, "Layers by tokens: checkpoints keep the input of every layer and run one layer for all tokens; in chunks "
        "one layer runs on one chunk, and its keys and values are there for the time of its backward; a segment of "
        "four layers keeps one input, and keys and values of three of its layers",
    )  # fmt: skip
    picture.text(14, 24, "What a step holds while a layer runs backward", "bold")
    columns = (("checkpoints", 0), ("segment=1", 1), ("segment=4", 4))
    for column, (name, segment) in enumerate(columns):
        x, top, now = 18 + 140 * column, 62, 6  # the layer, or the first of the segment, that runs
        together = max(segment, 1)
        first = now // together * together
        picture.text(x, 50, name, "small bold")
        chunk = width / parts if segment else width
        for layer in range(layers):
            y = top + row * (layers - 1 - layer)
            picture.box(x, y, width, row, kind="line dashed")
            runs = first <= layer < first + together
            if layer % together == 0 and layer <= now:
                picture.box(x, y + row - 5, width, 5, kind="blue")
            keeps = segment and (runs or (segment > 1 and layer % together and layer < first))
            if keeps:
                picture.box(x, y + 8, width, 4, kind="gold")
            if runs:
                picture.box(x + (3 * chunk if segment else 0), y + 1, chunk, row - 7, kind="soft-red")
        for part in range(1, parts if segment else 1):
            picture.line([(x + part * chunk, top), (x + part * chunk, top + row * layers)], "grid", "")
        picture.text(x + width / 2, top + row * layers + 18, "tokens", "small faint", "middle")
    picture.lines(14, 284, "rows: layers, the first one at the bottom", "small faint")
    for number, (kind, words) in enumerate((
        ("blue", "hidden states that enter a layer, or a segment"),
        ("gold", "keys and values; where a layer runs, their gradients too"),
        ("soft-red", "everything else in a layer: queries, norms, MLP"),
    )):  # fmt: skip
        picture.box(18, 300 + 26 * number, 16, 14, kind=kind)
        picture.text(42, 312 + 26 * number, words, "small")
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "memory": memory, "ladder": ladder, "tiles": tiles, "graphs": graphs, "loss": loss, "heads": heads,
    "offload": offload, "chunks": chunks,
}  # fmt: skip


def main() -> int:
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(str(draw()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
