"""The result of a verification."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from seqtile._sentences import PrintsAsSentence
from seqtile.install.runs import Runs


@dataclass(frozen=True)
class Difference:
    """How far one tiled gradient (or the loss) is from the untiled one.

    Attributes:
        name: the parameter, ``"batch.NAME"`` for an input that takes a gradient, or ``"loss"``.
        l2: ``||tiled - untiled|| / ||untiled||``.
        maximum: the largest difference over the largest untiled element.
        untiled_error: the untiled run's own L2 error against the truth, relative; None without a truth.
        tiled_error: the tiled run's.
        score: error over what is allowed, the worse of the two norms; above 1 the verdict is no.
        problem: what is wrong with it beyond numbers, or "".
        dropout: whether dropout was on; then ``untiled`` is the same tiles under plain autograd.
    """

    name: str
    l2: float
    maximum: float
    untiled_error: float | None
    tiled_error: float | None
    score: float
    problem: str = ""
    dropout: bool = False

    def what(self) -> str:
        """Describe the difference."""
        what = self.problem or f"relative difference {self.l2:.1e}, {self.score:.1f} times the tolerance"
        return f"{what} with dropout on" if self.dropout else what


@dataclass(frozen=True)
class Group:
    """The worst over the parameters of one kind, such as ``mlp.gate_proj`` of every layer."""

    parameters: int
    l2: float
    maximum: float
    untiled_error: float | None
    tiled_error: float | None
    score: float


@dataclass(frozen=True)
class Run:
    """One forward and backward.

    Attributes:
        loss: its loss.
        units: matrix products per block (tiled, or left untiled with the same sizes) in units of
            ``2 * tokens * hidden * intermediate``: 9 for an untiled gated MLP. Without what adapters multiply; None
            where another product of the model has the same sizes, or no block is there.
        step_units: all matrix products of the step, attention kernels left out, in the same unit; None without a block.
        flops: FLOPs of all matrix products of the step.
        peak_bytes: the most bytes live at once above weights, batch and what else was there before.
        seconds: time of this one run, counting included.
    """

    loss: float
    units: float | None
    step_units: float | None
    flops: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True, repr=False)
class VerifyResult(PrintsAsSentence):
    """Result of :func:`seqtile.verify`; ``str(result)`` is one line.

    Attributes:
        ok: every gradient and the loss are within the tolerance, and blocks ran in several tiles.
        worst: the parameter (or the loss) with the largest difference in units of the tolerance.
        untiled: the untiled run.
        tiled: the tiled run.
        groups: differences by kind of parameter.
        parameters: differences of every trainable parameter, and of the loss.
        with_dropout: the same with dropout on, against plain tiles; empty where there is no dropout.
        blocks: how many blocks were tiled.
        ran: how many tiles each block ran in; with one, nothing was compared.
        reference: dtype of the reference run, or None.
        notes: limits of the comparison.
    """

    ok: bool
    worst: Difference
    untiled: Run
    tiled: Run
    groups: dict[str, Group]
    parameters: tuple[Difference, ...]
    with_dropout: tuple[Difference, ...]
    blocks: int
    ran: Runs
    reference: str | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts, for JSON."""
        lists = {"parameters": self.parameters, "with_dropout": self.with_dropout}
        differences = {name: [asdict(each) for each in several] for name, several in lists.items()}
        return {**asdict(self), **differences, "notes": list(self.notes)}

    @property
    def cut(self) -> bool:
        """Whether a block ran in more than one tile."""
        return self.ran.cut > 0

    def __str__(self) -> str:
        worst, a, b = self.worst, self.untiled, self.tiled
        if not self.ok and worst.score <= 1 and not worst.problem:
            verdict = "NOT VERIFIED"
        elif self.ok:
            verdict = f"same gradients (largest relative difference {max(each.l2 for each in self.parameters):.1e})"
        else:
            verdict = f"GRADIENTS DIFFER: {worst.name}: {worst.what()}"
        units = "" if a.units is None or b.units is None else f"units per block {a.units:g} -> {b.units:g}, "
        peaks = f"peak {a.peak_bytes / 2**20:,.1f} -> {b.peak_bytes / 2**20:,.1f} MiB"
        numbers = f"{units}{peaks}, {a.seconds:.2f} -> {b.seconds:.2f} s"
        return "; ".join([verdict, f"untiled -> tiled: {numbers}", *self.notes])
