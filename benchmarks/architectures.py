"""Tile a tiny model of every architecture in transformers and write down what became of each.

    python benchmarks/architectures.py [--only NAME ...] [--write docs/architectures.jsonl]

Every model type of the installed transformers is built small, with random weights in float32 (``tiny_models.py``), and
without a network. ``seqtile.apply`` is called on the model in training mode as its config makes it, with its dropouts:
its report fills the line. Then loss and every gradient of one training step, tiled, are compared with an untiled
model's; dropout is off there, and ``apply`` is called in evaluation mode, as on a model that ``from_pretrained``
returns. Of causal language models it also writes whether every option tiles the same modules at released sizes. The
site shows the file as a table (``docs/architectures.md``). About twenty minutes on one core.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import logging
import os
import random
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

import seqtile
from seqtile._errors import UserError
from tiny_models import (
    MAX_PARAMETERS,
    Batch,
    auto_classes,
    batches,
    build,
    parameters_of,
    released_config,
    tiny_config,
)

SECONDS = 60
TILE = 3
RTOL = {torch.float32: 1.3e-6, torch.float64: 1e-7}
RELATIVE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Largest relative error (L2) of any one gradient that is not itself nearly zero."""


@dataclass
class Record:
    """What became of one architecture.

    Attributes:
        architecture: the ``model_type``.
        auto_class: transformers' class that built it, "" where none did.
        model_class: class of the model.
        parameters: their number.
        error: why it could not be built, or "".
        refused: why nothing was tiled, or "".
        blocks: of each tiled block name, class_name, kind, path, together, not_fused, why.
        left: of each block left alone name, class_name, why.
        inputs: names of the tensors in the batch.
        result: ``"equal"``, ``"WRONG ..."``, ``"raises: ..."`` or ``"could not be run: ..."``; "" if nothing was tiled.
        reached: number of tiled blocks whose weights got a gradient in the step that was compared.
        note: how the comparison was made where it was not in float32.
        released: of a causal language model, how what is tiled at released sizes differs from the tiny model.
    """

    architecture: str
    auto_class: str = ""
    model_class: str = ""
    parameters: int = 0
    error: str = ""
    refused: str = ""
    blocks: list[dict[str, Any]] = field(default_factory=list)
    left: list[dict[str, str]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    result: str = ""
    reached: int = 0
    note: str = ""
    released: str = ""

    @property
    def state(self) -> str:
        """One of the words in ``STATES``."""
        if self.error:
            return "not built"
        if self.refused:
            return "left untiled" if self.refused.startswith("nothing to tile") else "refused"
        return next((state for state in STATES if self.result.startswith(state)), "not compared")


STATES = ("equal", "WRONG", "raises", "not compared", "left untiled", "refused", "not built")
"""What they mean: ``docs/architectures.md``."""


class TookTooLong(BaseException):
    """An architecture used up its time; no ``except Exception`` on the way holds it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these architectures")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write one line of JSON per architecture")
    parser.add_argument("--date", default=str(datetime.date.today()), help="of the file; today unless given")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - set(CONFIG_MAPPING):
        parser.error(f"transformers {transformers.__version__} has no {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    quiet()
    records = []
    for number, name in enumerate(sorted(options.only or CONFIG_MAPPING)):
        if number % 10 == 0:
            gc.collect()  # 0.2 s: more than many of these models take
        if (record := examine(name)) is None:
            continue
        records.append(record)
        print(f"{name}: {record.state}{': ' if reason(record) else ''}{reason(record)}", flush=True)
        if options.only:
            print(json.dumps(line_of(record), indent=2, ensure_ascii=False))
    if options.write:
        options.write.write_text(lines(records, options.date), encoding="utf-8")
    print(summary(records))


def quiet() -> None:
    """No messages of transformers and of seqtile between the lines that are printed here."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("seqtile").setLevel(logging.ERROR)


def examine(architecture: str) -> Record | None:
    """Build, tile and compare one architecture; None where transformers has no model for its config alone."""
    record = Record(architecture)
    try:
        with at_most(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers has something to say about most tiny configs
            if (done := _examine(record)) is not None and done.auto_class == "AutoModelForCausalLM" and not done.error:
                done.released = released_coverage(architecture)
            return done
    except TookTooLong:
        record.error = f"took more than {SECONDS} s"
        return record


def _examine(record: Record) -> Record | None:
    errors: list[str] = []
    tried = False
    best: Record | None = None
    for narrow in (True, False):
        try:
            config = tiny_config(record.architecture, narrow=narrow)
        except Exception as error:  # noqa: BLE001 - whatever a config raises is the result
            errors.append(one_line(error))
            tried = True
            continue
        for auto in auto_classes(config):
            tried = True
            one = Record(record.architecture, auto.__name__)
            try:
                one.parameters = parameters_of(auto, config)
                if one.parameters > MAX_PARAMETERS:
                    raise ValueError(f"{one.parameters / 1e6:.0f} million parameters are too many for a tiny model")
                _tile(one, auto, narrow)
            except Exception as error:  # noqa: BLE001 - whatever a model raises is the result
                errors.append(one_line(error))
                continue
            if one.state != "not compared":
                return one
            best = best or one
        if best is not None:
            return best
    if not tried:
        return None
    record.error = errors[0]
    return record


OPTIONS: dict[str, dict[str, Any]] = {
    "tile": {"tile": 2048},
    "blocks": {"tile": 2048, "blocks": "mlp+norm+projections"},
    "loss": {"blocks": "none", "loss": "tiled"},
    "heads": {"blocks": "none", "heads": 1},
    "state": {"blocks": "none", "state": "auto"},
    "checkpoint": {"blocks": "none", "checkpoint": "attention-saved"},
}
"""Each option of ``apply`` that changes modules, by itself."""


def coverage(config: PreTrainedConfig) -> dict[str, Any]:
    """What each of :data:`OPTIONS` tiles in a causal language model of ``config``, without any size.

    Runs on the meta device. An option that is refused has the beginning of its sentence.
    """
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    tiled: dict[str, Any] = {}
    for option, settings in OPTIONS.items():
        try:
            report = seqtile.apply(model, **settings)
        except UserError as error:
            tiled[option] = str(error).partition("(")[0].strip()
            continue
        places = sorted(
            {(pattern(block.name), block.class_name, block.path, block.together) for block in report.blocks}
        )
        layers = re.search(r"(\d+ of \d+) \((.*)\)", report.done.get("state", ""))
        attention = sorted(set(re.findall(r"\w+(?=, \d+ query heads)", report.done.get("heads", ""))))
        words = re.sub(r"\d+ (norm|projection)s?", r"\1", report.done.get("blocks", ""))
        others = ["loss" in report.done, attention, layers and layers.groups(), report.done.get("checkpoint", "")]
        tiled[option] = [places, words, *others]
        seqtile.undo(model)
    return tiled


def released_coverage(architecture: str) -> str:
    """How coverage at released sizes differs from the tiny model's, "the same", or why it is not known."""
    try:
        released = coverage(released_config(architecture))
    except Exception as error:  # noqa: BLE001 - whatever a config raises is the result
        return f"not built: {one_line(error)}"
    tiny = coverage(tiny_config(architecture))
    different = [option for option in OPTIONS if released[option] != tiny[option]]
    return f"other coverage: {', '.join(different)}" if different else "the same"


def _tile(record: Record, auto: Any, narrow: bool) -> None:
    """Fill in what ``seqtile.apply`` says and does."""
    config = tiny_config(record.architecture, narrow=narrow)
    model = build(auto, config).train()
    record.model_class = type(model).__name__
    try:
        report = seqtile.apply(model, tile=TILE)
    except UserError as error:
        record.refused = " ".join(str(error).split())
        return
    except Exception as error:  # noqa: BLE001 - an error that is not meant for the user is what must be seen
        record.result = f"raises: {one_line(error)}"
        return
    for block in report.blocks:
        words = ("name", "class_name", "kind", "path", "not_fused", "why")
        record.blocks.append({**{word: getattr(block, word) for word in words}, "together": list(block.together)})
    record.left = [{"name": one.name, "class_name": one.class_name, "why": one.why} for one in report.left]
    if not record.blocks:
        seen = "; ".join(f"{one.name} ({one.class_name}): {one.why}" for one in report.left[:3])
        record.refused = f"nothing to tile in {record.model_class}; found {seen or 'nothing that resembles a block'}"
        return
    del model, report
    _compare(record, auto, narrow)


def _compare(record: Record, auto: Any, narrow: bool) -> None:
    """One training step tiled and untiled, each on a new model, so that neither sees what the other changed."""

    def model_of(dtype: torch.dtype) -> nn.Module:
        return build(auto, tiny_config(record.architecture, narrow=narrow, random=False)).to(dtype)

    def tiled_model_of(dtype: torch.dtype) -> tuple[nn.Module, list[str]]:
        model = model_of(dtype).eval()
        return model, [block.name for block in seqtile.apply(model, tile=TILE).blocks]

    error, fits, trial = "", False, model_of(torch.float32)
    for batch in batches(trial):
        try:
            step(trial, batch)
            fits = True
            break
        except Exception as failed:  # noqa: BLE001 - whatever a model raises on a batch is the result
            error = error or one_line(failed)
    if not fits:
        record.result = f"could not be run: {error or 'no batch of known inputs fits its forward'}"
        return
    del trial
    record.inputs = sorted(batch)
    expected = step(model_of(torch.float32), batch)
    try:
        model, names = tiled_model_of(torch.float32)
        got = step(model, batch)
    except Exception as failed:  # noqa: BLE001 - an error that only the tiled model raises is what must be seen
        record.result = f"raises: {one_line(failed)}"
        return
    record.reached = sum(_reached(model, name) for name in names)
    record.result = difference(got, expected)
    if record.result == "equal":
        return
    if difference(step(model_of(torch.float32), batch), expected) != "equal":
        record.result = "could not be run: two untiled steps from the same seed differ"
        return
    try:
        double = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
        exact = difference(step(tiled_model_of(torch.float64)[0], double), step(model_of(torch.float64), double))
    except Exception:  # noqa: BLE001 - float64 is not what every architecture can compute in
        return
    record.note, record.result = f"in float64; in float32 {record.result}", exact


def _reached(model: nn.Module, name: str) -> bool:
    weights = model.get_submodule(name).parameters()
    return any(weight.grad is not None and bool(weight.grad.any()) for weight in weights)


Step = tuple[Tensor, dict[str, Tensor | None]]


def step(model: nn.Module, batch: Batch) -> Step:
    """Loss and gradients of one training step; without a loss of its own, of a weighted mean of what it returns."""
    model.train()
    seed()
    outputs = model(**batch)
    loss = outputs.get("loss") if hasattr(outputs, "get") else None
    if loss is None:
        tensors = [tensor for tensor in _tensors(outputs) if tensor.requires_grad and tensor.is_floating_point()]
        if not tensors:
            raise ValueError("its outputs have no gradient")
        weights = torch.Generator().manual_seed(3)
        parts = ((t * torch.randn(t.shape, generator=weights).to(t)).mean() for t in tensors)
        loss = sum(parts, torch.zeros(()))
    loss = loss.sum()
    if not loss.isfinite():
        raise ValueError("its loss is not finite")
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def seed() -> None:
    import numpy

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def difference(got: Step, expected: Step) -> str:
    """``"equal"``, or ``"WRONG"`` with the largest relative error and the parameter that has it.

    Two bounds hold at once. On the scale of the model's largest gradient, which is what a step of training sees, each
    element as near as ``torch.testing.assert_close`` asks of one product; and each gradient that is not nearly zero on
    that scale (1e-4 of it) with a relative error below 1e-3, so that a wrong factor in a small gradient is seen too.
    """
    (loss, gradients), (expected_loss, references) = got, expected
    rtol, relative = RTOL[loss.dtype], RELATIVE[loss.dtype]
    scale = max((g.abs().max().item() for g in references.values() if g is not None and g.numel()), default=0.0)
    if scale == 0.0:
        return "could not be run: all gradients are zero"
    worst, name = 0.0, ""
    if not torch.allclose(loss, expected_loss, rtol=10 * rtol, atol=10 * rtol):
        worst, name = abs((loss - expected_loss) / expected_loss).item(), "loss"
    for parameter, reference in references.items():
        value = gradients[parameter]
        if (value is None) != (reference is None):
            return f"WRONG: a gradient where there is none, or none where there is one ({parameter})"
        if reference is None or value is None or not reference.numel():
            continue
        error = (value - reference).norm().item() / max(reference.norm().item(), 1e-4 * scale)
        far = ((value - reference).abs() > 10 * rtol * scale + rtol * reference.abs()).any()
        small = reference.abs().max().item() < 1e-4 * scale
        if not value.isfinite().all() or far or (error > relative and not small):
            if not error <= worst:
                worst, name = error, parameter
    return f"WRONG {worst:.1e} ({name})" if name else "equal"


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise :class:`TookTooLong` in the ``with`` block after so long; a timer that runs already goes on after it."""

    def stop(*_: object) -> None:
        raise TookTooLong

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.1) if left else 0.0, interval)
        signal.signal(signal.SIGALRM, handler)


def one_line(error: BaseException) -> str:
    """The first line of an error that says something, short and without folders."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else type(error).__name__
    if len(lines) > 1 and "validator" in line:  # of a config: the next line says what is wrong
        line = lines[1]
    line = re.sub(r"(?<![\w.])/[\w.+-][\w./+-]*/", "", line)
    line = re.sub(r"0x[0-9a-f]{6,}", "0x...", line)
    line = re.sub(r"\. (You can install|Please install|Check out the instructions).*", "", line)
    return line if len(line) <= 160 else line[:157] + "..."


def reason(record: Record) -> str:
    """Why there is no equal result; of a refusal only what was found in the model."""
    found = re.search(r"; found (.*?)(; name a block with |$)", record.refused)
    refused = one_line(ValueError(found[1] if found else record.refused)) if record.refused else ""
    return record.error or refused or ("" if record.result == "equal" else record.result)


def pattern(name: str) -> str:
    """A qualified name with the numbers of layers left open."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def line_of(record: Record) -> dict[str, Any]:
    """One architecture as the file has it: blocks that differ only in the number of their layer are counted."""
    detail = reason(record)
    if record.state == "equal" and record.reached < len(record.blocks):
        detail = f"{record.reached} of {len(record.blocks)} blocks had a gradient"
    tiled = Counter(
        (pattern(b["name"]), b["class_name"], b["path"], b["not_fused"] or "", " + ".join(b["together"]))
        for b in record.blocks
    )
    left = Counter((pattern(block["name"]), block["class_name"], block["why"]) for block in record.left)
    return {
        "architecture": record.architecture,
        "state": record.state,
        "detail": detail,
        "tiled": [
            {"blocks": n, **dict(zip(("where", "class_name", "operator", "why", "together"), key, strict=True))}
            for key, n in tiled.items()
        ],
        "left": [
            {"blocks": n, **dict(zip(("where", "class_name", "why"), key, strict=True))} for key, n in left.items()
        ],
        "released": record.released,
    }


def summary(records: Sequence[Record]) -> str:
    states = Counter(record.state for record in records)
    blocks = [block for record in records for block in record.blocks]
    paths = Counter(block["path"] for block in blocks)
    counts = ", ".join(f"{states[state]} {state}" for state in STATES)
    return (
        f"{len(records)} architectures: {counts}; {len(blocks)} tiled blocks, {paths['fused']} by the fused operator, "
        f"{paths['generic']} by the generic one."
    )


def lines(records: Sequence[Record], date: str) -> str:
    """The file: a line about the run, then one per architecture; the same for the same records."""
    header = {
        "date": date, "command": "python benchmarks/architectures.py --write docs/architectures.jsonl",
        "torch": torch.__version__, "transformers": transformers.__version__, "device": "cpu",
    }  # fmt: skip
    rows = [header, *map(line_of, sorted(records, key=lambda record: record.architecture))]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


if __name__ == "__main__":
    main()
