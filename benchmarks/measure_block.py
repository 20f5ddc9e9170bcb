"""Measure one block: time, peak bytes, matrix products, gradient error."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from block import PERIOD, Workload, reference_errors
from cell import Cell
from child import guarded
from methods import block_shape, install, tile_count, uninstall
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import count_products
from seqtile.devices import empty_cache, is_accelerator, synchronize

REFERENCE_BYTES = 2**33
"""The untiled reference in fp32 runs whole where its intermediates are smaller than this, else in slices."""


def measure_cell(cell: Cell) -> dict[str, Any]:
    """Everything about one cell, measured in this process.

    Returns:
        ``ran`` (the method in words), ``tiles``, ``step_ms`` (median) and ``step_ms_all``, ``peak_allocated_bytes`` and
        ``peak_reserved_bytes`` above what input and weights take, ``beyond_bytes`` (that without the weights'
        gradients), ``peak_from`` (the allocator, or counted), ``units``, ``gradient_error`` of the worst tensor,
        ``gradient_errors``, ``reference``.
    """
    workload = Workload(cell)
    costs = {**start(workload), **measure_costs(workload)}
    times = [timed_step(workload) for _ in range(cell.repeats)]
    return {**costs, "step_ms": statistics.median(times), "step_ms_all": times, **measure_error(workload)}


def measure_pairs(cell: Cell, methods: list[str], pairs: int) -> list[dict[str, Any]]:
    """Time each of ``methods`` against untiled, in turn: untiled, method, then method, untiled, and so on.

    All in one process, so that a machine whose speed drifts does so for both sides of a pair. Every method is measured
    as in :func:`measure_cell` first.

    Returns:
        One row per method, untiled first, with ``pairs_ms`` (untiled, method), ``ratios`` and ``ratio``, their median.
    """
    workload = Workload(cell)
    rows = [_first(workload, method) for method in ("untiled", *methods)]
    times: dict[str, list[tuple[float, float]]] = {method: [] for method in methods}
    compared = [row["method"] for row in rows[1:] if "error" not in row]
    if "error" in rows[0]:
        compared = []  # untiled does not fit: there is nothing to compare with
    for number in range(pairs):
        for method in compared:
            order = ("untiled", method) if number % 2 == 0 else (method, "untiled")
            step_ms = {}
            for name in order:
                _switch(workload, name)
                step_ms[name] = timed_step(workload)
            times[method].append((step_ms["untiled"], step_ms[method]))
    for row in rows[1:]:
        if measured := times[row["method"]]:
            ratios = [ours / untiled for untiled, ours in measured]
            row.update(pairs_ms=measured, ratios=ratios, ratio=statistics.median(ratios))
            row.update(step_ms=statistics.median(ours for _, ours in measured))
    untiled = [pair[0] for measured in times.values() for pair in measured]
    if untiled:
        rows[0].update(step_ms=statistics.median(untiled), step_ms_all=untiled)
    elif "error" in rows[0]:
        for row in rows[1:]:
            if "error" not in row:
                _switch(workload, row["method"])
                times_ms = [timed_step(workload) for _ in range(pairs)]
                row.update(step_ms=statistics.median(times_ms), step_ms_all=times_ms)
    return rows


def _first(workload: Workload, method: str) -> dict[str, Any]:
    """A method's costs and error; what stops it is its result."""

    def job(_: dict[str, Any]) -> dict[str, Any]:
        return {**_switch(workload, method), **measure_costs(workload), **measure_error(workload)}

    row = {"method": method, **guarded(job, {})}
    workload.clear()
    return row


def _switch(workload: Workload, method: str) -> dict[str, Any]:
    cell = workload.cell
    uninstall(workload.layer, [workload.mlp])
    keep = cell.options.keep if method == "fused" else 0.0
    workload.cell = cell.changed(method=method, keep=keep)
    try:
        return start(workload)
    finally:
        workload.cell = cell


def start(workload: Workload) -> dict[str, Any]:
    """Install the cell's method."""
    cell = workload.cell
    shape = block_shape(workload.mlp, cell.hidden, cell.intermediate, workload.x.element_size(), cell.device)
    count = tile_count(cell.method, cell.options.tile, cell.tokens, shape)
    blocks = cell.options.blocks if cell.checkpoint else "mlp"
    ours = replace(cell.options, path=cell.method, blocks=blocks) if cell.ours else None
    ran = install(workload.layer, {"mlp": workload.mlp}, cell.method, ours, count)
    return {"ran": ran, "tiles": count}


def measure_costs(workload: Workload) -> dict[str, Any]:
    """Peak bytes and matrix products of one step, which is the warm-up too.

    Peaks are the allocator's, or on the CPU those of counted live bytes; ``units`` are all products of the step over
    ``2 * tokens * hidden * intermediate`` FLOPs, an adapter's own included.
    """
    cell = workload.cell
    workload.clear()
    if is_accelerator(workload.device):
        workload.step()
        peaks = _allocator_peak(workload)
        workload.clear()
        with count_products() as products:
            workload.step()
    else:
        with count_products() as products:
            peaks = _counted_peak(workload)
    return {**peaks, "units": products.flops / (2 * cell.tokens * cell.hidden * cell.intermediate)}


def _counted_peak(workload: Workload) -> dict[str, Any]:
    with count_live_bytes("cpu") as live:
        with live.phase("forward"):
            loss, output = workload.forward()
        with live.phase("backward"):
            loss.backward()
            del loss, output
    forward, backward = live.phases["forward"].peak, live.phases["backward"].peak
    return {**_peaks(workload, forward, backward, None), "peak_from": "counted live bytes"}


def _allocator_peak(workload: Workload) -> dict[str, Any]:
    workload.clear()
    device = workload.device
    empty_cache()
    start = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    loss, output = workload.forward()
    forward = torch.accelerator.max_memory_allocated(device) - start
    reserved = torch.accelerator.max_memory_reserved(device)
    torch.accelerator.reset_peak_memory_stats(device)
    loss.backward()
    backward = torch.accelerator.max_memory_allocated(device) - start
    reserved = max(reserved, torch.accelerator.max_memory_reserved(device))
    del loss, output
    return {**_peaks(workload, forward, backward, reserved), "peak_from": "allocator", "start_bytes": start}


def _peaks(workload: Workload, forward: int, backward: int, reserved: int | None) -> dict[str, Any]:
    gradients = [weight.grad for name, weight in workload.trained() if name != "input"]
    taken = sum(g.numel() * g.element_size() for g in gradients if g is not None)
    return {
        "peak_allocated_bytes": max(forward, backward), "peak_reserved_bytes": reserved,
        "beyond_bytes": max(forward, backward - taken), "weight_gradient_bytes": taken,
    }  # fmt: skip


def timed_step(workload: Workload) -> float:
    """Milliseconds of one forward and backward; gradients are forgotten before, so none is added up."""
    workload.clear()
    synchronize(workload.device)
    begin = time.perf_counter()
    workload.step()
    synchronize(workload.device)
    return 1e3 * (time.perf_counter() - begin)


def measure_error(workload: Workload) -> dict[str, Any]:
    """Gradients of the last step against the untiled block in fp32."""
    cell = workload.cell
    fits = max(PERIOD, REFERENCE_BYTES // (7 * 4 * cell.intermediate) // PERIOD * PERIOD)
    rows = min(cell.tokens, fits)
    errors = reference_errors(workload, rows)
    worst = max(errors, key=lambda name: errors[name])
    reference = "untiled fp32" if rows == cell.tokens else f"untiled fp32 in slices of {rows:,} tokens"
    return {
        "gradient_error": errors[worst],
        "gradient_error_worst": worst,
        "gradient_errors": errors,
        "reference": reference,
    }
