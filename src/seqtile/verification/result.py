"""What a verification found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
    """

    name: str
    l2: float
    maximum: float
    untiled_error: float | None
    tiled_error: float | None
    score: float
    problem: str = ""


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
            where another product of the model has the same sizes.
        step_units: all matrix products of the step, attention kernels left out, in the same unit.
        flops: FLOPs of all matrix products of the step.
        peak_bytes: the most bytes live at once above weights, batch and what else was there before.
        seconds: of this one run, counting included.
    """

    loss: float
    units: float | None
    step_units: float
    flops: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class VerifyResult:
    """What :func:`verify` found; ``str(result)`` is one line.

    Attributes:
        ok: every gradient and the loss are within what is allowed.
        worst: the parameter (or the loss) that is nearest to, or furthest beyond, what is allowed.
        untiled: the untiled run.
        tiled: the tiled run.
        groups: differences by kind of parameter.
        parameters: differences of every parameter that trains, and of the loss.
        blocks: how many blocks were tiled.
        reference: dtype of the truth, or None.
        notes: what the numbers do not show.
    """

    ok: bool
    worst: Difference
    untiled: Run
    tiled: Run
    groups: dict[str, Group]
    parameters: tuple[Difference, ...]
    blocks: int
    reference: str | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dicts, for JSON."""
        return {**asdict(self), "parameters": [asdict(one) for one in self.parameters], "notes": list(self.notes)}

    def __str__(self) -> str:
        worst, a, b = self.worst, self.untiled, self.tiled
        if self.ok:
            verdict = f"same gradients (largest relative difference {max(one.l2 for one in self.parameters):.1e})"
        else:
            what = worst.problem or f"relative difference {worst.l2:.1e}, {worst.score:.1f} times what is allowed"
            verdict = f"GRADIENTS DIFFER: {worst.name}: {what}"
        units = "" if a.units is None or b.units is None else f"units per block {a.units:g} -> {b.units:g}, "
        peaks = f"peak {a.peak_bytes / 2**20:,.1f} -> {b.peak_bytes / 2**20:,.1f} MiB"
        numbers = f"{units}{peaks}, {a.seconds:.2f} -> {b.seconds:.2f} s"
        return "; ".join([verdict, f"untiled -> tiled: {numbers}", *self.notes])
