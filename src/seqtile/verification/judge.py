"""Tolerances of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from seqtile.verification.result import Difference, Group

SLACK = 1e-5
"""Share of a gradient's own size that is allowed beyond a multiple of the untiled error, which may be zero."""

TIMES = 2
"""The multiple: sums in another order have another rounding error of the same size."""

TIMES_NOISE = 10
"""The multiple where the untiled gradient is off by half its size or more: zero in exact arithmetic (the bias of a key
projection, say), so both runs are rounding noise and how much of it is a matter of chance."""

_WITHOUT_TRUTH = {torch.float64: 1e-7, torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}
"""Allowed relative difference, beside the slack, where there is no truth: as in ``torch.testing.assert_close``."""


def difference(
    name: str,
    untiled: Tensor | None,
    tiled: Tensor | None,
    truth: Tensor | None,
    dtype: torch.dtype,
    *,
    more: float = 0.0,
    dropout: bool = False,
) -> Difference:
    """Compare one gradient of two runs.

    Args:
        name: how the result calls it.
        untiled: gradient of the untiled run, None if it got none.
        tiled: the tiled run's.
        truth: the same in higher precision, or None.
        dtype: dtype of the parameter, which gives the tolerance without a reference.
        more: relative difference that is allowed beyond that, without a truth.
        dropout: whether it was on.
    """
    if untiled is None and tiled is None:
        return Difference(name, 0.0, 0.0, None, None, 0.0, dropout=dropout)
    if untiled is None or tiled is None:
        has, lacks = ("untiled", "tiled") if tiled is None else ("tiled", "untiled")
        return _broken(name, f"has a gradient in the {has} run but not in the {lacks} run", dropout)
    a, b = untiled.double(), tiled.double()
    bad = [run for run, gradient in (("untiled", a), ("tiled", b)) if not gradient.isfinite().all()]
    if bad:
        return _broken(name, f"is not finite in the {' and the '.join(bad)} run", dropout)
    l2, maximum = (_ratio(norm(b - a), norm(a)) for norm in _NORMS)
    if truth is None:
        allowed = _WITHOUT_TRUTH.get(dtype, 1.6e-2) + SLACK + more
        return Difference(name, l2, maximum, None, None, max(l2, maximum) / allowed, dropout=dropout)
    t = truth.double()
    untiled_error, tiled_error = (_ratio(_l2(x - t), _l2(t)) for x in (a, b))
    times = TIMES if untiled_error < 0.5 else TIMES_NOISE
    score = max(_ratio(norm(b - t), times * norm(a - t) + SLACK * norm(t)) for norm in _NORMS)
    return Difference(name, l2, maximum, untiled_error, tiled_error, score)


def severity(difference: Difference) -> float:
    """Sort key of the worst difference."""
    return math.inf if difference.problem else difference.score


def groups(differences: Sequence[Difference]) -> dict[str, Group]:
    """The worst of each kind of parameter, in the order in which the kinds appear."""
    members: dict[str, list[Difference]] = {}
    for difference in differences:
        members.setdefault(group_of(difference.name), []).append(difference)
    return {
        name: Group(
            parameters=len(group),
            l2=max(each.l2 for each in group),
            maximum=max(each.maximum for each in group),
            untiled_error=_worst([each.untiled_error for each in group]),
            tiled_error=_worst([each.tiled_error for each in group]),
            score=max(severity(each) for each in group),
        )
        for name, group in members.items()
    }


def group_of(name: str) -> str:
    """``mlp.gate_proj`` for ``model.layers.3.mlp.gate_proj.weight``."""
    names = [step for step in name.split(".") if step not in ("weight", "default")]
    numbers = [position for position, step in enumerate(names) if step.isdigit()]
    if numbers:
        names = [step for step in names[numbers[0] + 1 :] if not step.isdigit()]
    elif not name.startswith("batch."):
        names = names[-1:]
    return ".".join(names) or name


def _broken(name: str, problem: str, dropout: bool) -> Difference:
    return Difference(name, math.inf, math.inf, None, None, math.inf, problem, dropout)


def _l2(x: Tensor) -> float:
    return float(x.norm())


def _max(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


_NORMS = (_l2, _max)


def _ratio(size: float, whole: float) -> float:
    return size / whole if whole else (math.inf if size else 0.0)


def _worst(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return max(numbers) if numbers else None
