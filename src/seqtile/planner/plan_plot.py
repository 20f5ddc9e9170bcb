"""Plot memory over length, by term."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from seqtile._errors import UserError
from seqtile.devices import GIB
from seqtile.planner.estimate import Estimate
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, KEPT, KEPT_TILES, OPTIMIZER, WEIGHTS
from seqtile.planner.memory_plan import Planner
from seqtile.planner.phases import TOWER
from seqtile.planner.sharding_terms import BUFFERS, CONTEXT

COLOURS = {
    WEIGHTS: "#30638e", GRADIENTS: "#4f8fc0", OPTIMIZER: "#87b5d9", BUFFERS: "#b79ab5", CONTEXT: "#bbbbbb",
    CHECKPOINTS: "#edae49", KEPT: "#f3cf8b", KEPT_TILES: "#a3c9ad", "attention working set": "#d1495b",
    "working set of layers with a state": "#e58a75", "MLP tile": "#5f9e6e", "MLP": "#5f9e6e", "loss tile": "#8e6c8a",
    "logits and loss": "#8e6c8a", TOWER: "#c08552", "other activations": "#d8c9a5",
}  # fmt: skip
OTHER_COLOURS = ("#6b7f82", "#8fa3a6", "#adbfc2", "#c9d6d8", "#dfe8ea")
"""For terms that are in few plans, such as those of GRPO, in order."""


def require_matplotlib() -> None:
    """Raise a :class:`UserError` where plots cannot be drawn."""
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib; run: pip install matplotlib")


def plot_lengths(planner: Planner, tokens: int, path: Path) -> None:
    """Write the plot: stacked terms over lengths up to a quarter beyond ``tokens``, and the device's line."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    lines = planner.lines(max(tokens, 2))
    lengths = [max(1, round(tokens * number / 40)) for number in range(1, 51)]
    estimates = [planner.estimate(length, lines) for length in lengths]
    colours = colours_of(estimates)
    figure = Figure(figsize=(5.6, 4.8), layout="constrained")
    axes = figure.subplots()
    stacks = [[estimate.terms.get(name, 0.0) / GIB for estimate in estimates] for name in colours]
    axes.stackplot(lengths, stacks, labels=[*colours], colors=[*colours.values()])
    axes.plot(
        lengths,
        [estimate.device.high / GIB for estimate in estimates],
        color="#222222",
        linestyle=":",
        linewidth=1.2,
        label="high",
    )
    memory = planner.request.device.memory / GIB
    axes.axhline(memory, color="#222222", linewidth=1.4)
    axes.text(lengths[0], memory, f" {planner.request.device.name}, {memory:.0f} GiB", va="bottom", fontsize=9)
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0, 1.25 * max(memory, estimates[39].device.expected / GIB))
    axes.set_xlabel("tokens in a row")
    axes.set_ylabel("GiB on one device at the peak")
    axes.xaxis.set_major_locator(MultipleLocator(_step(lengths[-1])))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:,.0f}K" if n >= 4096 else f"{n:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], fontsize=9, frameon=False, loc="outside lower left", ncols=2)
    request = planner.request
    trains = "adapters" if request.lora else "every weight"
    axes.set_title(f"{request.model}, {trains}, {request.gpus} x {request.device.name}, {request.engine}", fontsize=10)
    figure.savefig(path, dpi=180)


def colours_of(estimates: Sequence[Estimate]) -> dict[str, str]:
    """A colour for each term of more than a five-hundredth of some estimate, in the order in which they are stacked."""
    others = dict.fromkeys(name for estimate in estimates for name in estimate.terms if name not in COLOURS)
    colours = COLOURS | {name: OTHER_COLOURS[number % len(OTHER_COLOURS)] for number, name in enumerate(others)}
    return {
        name: colour for name, colour in colours.items()
        if any(estimate.terms.get(name, 0.0) > 0.002 * estimate.device.expected for estimate in estimates)
    }  # fmt: skip


def _step(top: int) -> int:
    """A power of two that gives five to ten marks."""
    return max(1, 2 ** ((top // 5).bit_length() - 1))  # type: ignore[no-any-return]
