"""Runs an entry of ``hostile`` untiled and tiled, and says what came of the tiling.

The words, of which the last two are failures:

* ``equal``: outputs, every gradient and everything that can be observed are the untiled run's.
* ``left``: equal too, since the block runs untiled, and the report or a warning says so.
* ``refused``: seqtile itself raised, in one sentence.
* ``unclear``: an error that seqtile did not raise itself, or that is not one sentence.
* ``SILENT``: something differs and nobody said a word.
"""

from __future__ import annotations

import logging
import os
import random
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import seqtile
from hostile import BACKWARD, CATALOGUE, FAMILIES, FORWARD, HARMLESS, HIDDEN, INTERMEDIATE, Entry, entries

EQUAL, LEFT, REFUSED, UNCLEAR, SILENT = "equal", "left", "refused", "unclear", "SILENT"
REFUSALS = (seqtile.UserError, RuntimeError, ValueError, NotImplementedError)

LEARNING_RATE = 0.05

Apply = Callable[[nn.Module, Entry], Any]


@dataclass(frozen=True)
class Outcome:
    """What came of tiling an entry.

    Attributes:
        word: one of the words above.
        tiled: whether the report names the block and nothing said that it runs untiled.
        detail: the first difference, the reason or the error.
        beside: whether the plain MLP that every model of ``seqtile.apply`` has beside the block is tiled.
    """

    word: str
    tiled: bool
    detail: str = ""
    beside: bool = True


def tile(model: nn.Module, entry: Entry) -> Any:
    """What a user calls."""
    if entry.dim is not None:
        return seqtile.tile_module(model, dim=entry.dim, tile=entry.tile, path=entry.path)
    return seqtile.apply(model, tile=entry.tile, path=entry.path)


def judge(entry: Entry, apply: Apply = tile) -> Outcome:
    """Run ``entry`` untiled and tiled by ``apply``, and compare."""
    environment = dict(os.environ)
    try:
        with _warnings() as said:
            compare = {"exact": _steps_differ, "random": _draws_differ, "sharing": _sharing_differs}[entry.judge]
            reports: list[Any] = []

            def noted(model: nn.Module, entry: Entry) -> Any:
                reports.append(apply(model, entry))
                return reports[-1]

            try:
                difference = compare(entry, noted)
            except Exception as error:  # noqa: BLE001 - what was raised is what is judged
                return _outcome_of(error)
        untiled = [text for text in said if "untiled" in text]
        blocks = [one for one in reports[-1].blocks if entry.dim is not None or _is_near(one.name, entry.block)]
        tiled = bool(blocks) and not untiled
        beside = entry.dim is not None or any(one.name in ("layers.0.mlp", "plain") for one in reports[-1].blocks)
        left = [one.why for one in reports[-1].left if _is_near(one.name, entry.block)]
        if difference:
            return Outcome(SILENT, tiled, difference, beside)
        if not tiled and (left or untiled):
            return Outcome(LEFT, tiled, [*left, *untiled][0], beside)
        return Outcome(EQUAL, tiled, blocks[0].path if tiled else "untiled, and not mentioned", beside)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def _is_near(name: str, block: str) -> bool:
    """Whether ``name`` is the block, something inside it, or the layer around it."""
    return name == block or name.startswith(f"{block}.") or block.startswith(f"{name}.")


def _outcome_of(error: Exception) -> Outcome:
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and Path(frames[-1].filename).is_relative_to(Path(seqtile.__file__).parent)
    ours = ours and (frames[-1].line or "").startswith("raise")  # and not a call of torch's that failed there
    text = f"{type(error).__name__}: {error}"
    clear = ours and isinstance(error, REFUSALS) and 20 <= len(str(error)) <= 600 and "\n" not in str(error)
    if not clear and frames:
        text += f" ({Path(frames[-1].filename).name}, in {frames[-1].name})"
    return Outcome(REFUSED if clear else UNCLEAR, False, text)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the loggers below "seqtile" warned of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("seqtile")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def built(entry: Entry) -> Any:
    """The entry's model, in evaluation mode, with the same weights every time."""
    seed_everything(0)
    return entry.build().eval()


# ---------------------------------------------------------------------------------------------------------------------
# Two training steps, compared number by number
# ---------------------------------------------------------------------------------------------------------------------


def _steps_differ(entry: Entry, apply: Apply) -> str:
    expected, _ = run_steps(entry, None)
    got, model = run_steps(entry, apply)
    del model
    return first_difference(expected, got, entry.tolerance)


def run_steps(entry: Entry, apply: Apply | None) -> tuple[dict[str, Any], nn.Module]:
    """Outputs, gradients and state of two training steps by name; and the model.

    ``apply`` sees the model in evaluation mode, as ``from_pretrained`` gives it.
    """
    model = built(entry)
    generators = _global_generators()
    if apply is not None:
        apply(model, entry)
    moved = _difference(generators, _global_generators(), 0)
    seen: dict[str, Any] = {"generators after tiling": moved or "as before"}
    seen |= {f"before training: {name}": value for name, value in observed(model, entry).items()}
    model.train()
    for step, shape in enumerate(entry.shapes):
        changes = entry.change if step == 1 else None
        if changes and entry.when == FORWARD:
            changes(model)
        weights = dict(model.named_parameters())
        inputs = make_inputs(entry, step, shape)
        seed_everything(entry.seeds[step])
        outputs = [leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
        if changes and entry.when == BACKWARD:
            changes(model)
        backward(outputs, entry.upstreams[step])
        seen |= {f"step {step}: output {n}": leaf.detach().clone() for n, leaf in enumerate(outputs)}
        seen |= {f"step {step}: gradient of input {n}": x.grad for n, x in enumerate(inputs)}
        seen |= {f"step {step}: gradient of {name}": weight.grad for name, weight in weights.items()}
        seen |= {f"step {step}: {name}": value for name, value in observed(model, entry).items()}
        _descend(weights)
    return seen, model


def _global_generators() -> Any:
    return _copied([random.getstate(), np.random.get_state(), torch.get_rng_state()])


def make_inputs(entry: Entry, step: int, shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    if entry.inputs is not None:
        made = entry.inputs(shape, generator)
    else:
        made = (torch.randn(shape, generator=generator),)
    return [(x * entry.scales[step] if entry.scales[step] != 1 else x).requires_grad_() for x in made]


def backward(outputs: list[Tensor], factor: float = 1.0) -> None:
    """Backward from a fixed gradient of each output."""
    generator = torch.Generator().manual_seed(7)
    wanted = [leaf for leaf in outputs if leaf.requires_grad]
    given = [factor * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for leaf in wanted]
    torch.autograd.backward(wanted, given)


def _descend(weights: dict[str, Tensor]) -> None:
    """One SGD step, of bounded length, so that a large gradient does not spoil the next step."""
    with torch.no_grad():
        for weight in weights.values():
            if weight.grad is not None:
                weight -= LEARNING_RATE * weight.grad / weight.grad.abs().max().clamp(min=1.0)
            weight.grad = None


_MODULES_OWN = (set(vars(nn.Module())) | {"forward", "extra_repr"}) - {"training"}


def observed(model: nn.Module, entry: Entry) -> dict[str, Any]:
    """Copies of all that a forward may have changed: buffers, attributes, those of classes of the catalogue."""
    state = {f"buffer {name}": buffer.detach().clone() for name, buffer in model.named_buffers()}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _MODULES_OWN:
                state[f"attribute {name}.{key}"] = _copied(value)
        for made in type(module).__mro__:
            if made.__module__ == "hostile":
                state |= {f"{made.__name__}.{key}": _copied(value) for key, value in vars(made).items()}
    if entry.state is not None:
        state["state"] = _copied(entry.state(model))
    return state


def _copied(value: Any) -> Any:
    """A copy of plain data, a description of the state of a generator, and None for what is neither."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _copied(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return [_copied(one) for one in value]
    if isinstance(value, SimpleNamespace):
        return _copied(vars(value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, torch.Generator):
        return value.get_state()
    return repr(value) if isinstance(value, count) else None


def first_difference(expected: dict[str, Any], got: dict[str, Any], tolerance: float) -> str:
    """The first of ``expected`` that is another in ``got``, in words; "" where none is."""
    for name, value in expected.items():
        if name not in got:
            return f"{name} is missing"
        if what := _difference(value, got[name], tolerance):
            return f"{name}: {what}"
    return ""


def _difference(expected: Any, got: Any, tolerance: float) -> str:
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        if expected.shape != got.shape or expected.dtype != got.dtype:
            return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
        if not expected.is_floating_point() and not expected.is_complex():
            return "" if torch.equal(expected, got) else f"{got} instead of {expected}"
        whole = expected.to(torch.complex128), got.to(torch.complex128)
        if not torch.equal(whole[0].isfinite(), whole[1].isfinite()):
            return "infinite or no number in other places"
        one, other = (torch.where(part.isfinite(), part, 0.0) for part in whole)
        error = float((one - other).abs().max()) if one.numel() else 0.0
        largest = float(one.abs().max()) if one.numel() else 0.0
        if error <= tolerance * largest:
            return ""
        return f"relative error {error / largest:.1e}" if largest else f"{error:.1e} instead of zeros"
    if type(expected) is not type(got):
        return f"{_short(got)} instead of {_short(expected)}"
    if isinstance(expected, list):
        if len(expected) != len(got):
            return f"{len(got)} entries instead of {len(expected)}"
        return next((what for pair in zip(expected, got, strict=True) if (what := _difference(*pair, tolerance))), "")
    if isinstance(expected, dict):
        return first_difference(expected, got, tolerance)
    if isinstance(expected, float):
        return "" if abs(expected - got) <= 10 * tolerance * abs(expected) else f"{got} instead of {expected}"
    return "" if expected == got else f"{_short(got)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)[:60]


# ---------------------------------------------------------------------------------------------------------------------
# Random blocks, compared by what does not depend on the numbers drawn
# ---------------------------------------------------------------------------------------------------------------------

DRAWS = 24


def _sharing_differs(entry: Entry, apply: Apply) -> str:
    """The tokens of one long batch of equal tokens take one branch, and in a thousand batches both are taken."""
    model = built(entry)
    apply(model, entry)
    model.train()
    for _ in range(4):
        y = _of_equal_tokens(model, (1, 600, HIDDEN), torch.float32)
        if (y - y[:1]).abs().max() > 1e-5 * y.abs().max():
            return "tokens of one batch took different branches"
    first = _of_equal_tokens(model, (1, 3, HIDDEN), torch.float32)
    for _ in range(1000):
        y = _of_equal_tokens(model, (1, 3, HIDDEN), torch.float32)
        if (y - first).abs().max() > 1e-5 * y.abs().max():
            return ""
    return "the rare branch is never taken"


def _draws_differ(entry: Entry, apply: Apply) -> str:
    """In float64: which tokens share a draw, mean and spread of the outputs, and the gradient at a fixed seed."""
    plain = built(entry).double().train()
    tiled = built(entry)
    apply(tiled, entry)
    tiled = tiled.double().train()
    tokens = (3, 7, HIDDEN)
    drawn = []
    for model in (plain, tiled):
        runs = []
        for seed in range(DRAWS):
            seed_everything(seed)
            runs.append(_of_equal_tokens(model, tokens, torch.float64))
        drawn.append(torch.stack(runs))  # [draws, tokens, D]
    expected, got = (_always_equal(runs) for runs in drawn)
    if not torch.equal(expected, got):
        return f"{int((expected != got).sum())} of {expected.numel()} pairs of tokens share draws otherwise"
    spread = [runs.std(dim=(0, 1)) for runs in drawn]
    # 24 draws: a mean is within one half of the spread of the true one, and the spread is known within a factor.
    if ((drawn[0] - drawn[1]).mean((0, 1)).abs() > spread[0] + 1e-9).any():
        return "another mean of the outputs"
    if (spread[1] > 2 * spread[0] + 1e-9).any() or (spread[0] > 2 * spread[1] + 1e-9).any():
        return "another spread of the outputs"
    return _gradient_differs(tiled, tokens)


def _of_equal_tokens(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The outputs [tokens, D] of a training forward on equal tokens."""
    token = torch.linspace(-1, 1, shape[-1], dtype=dtype)
    return model(token.expand(shape).clone().requires_grad_()).detach().flatten(0, -2)


def _always_equal(runs: Tensor) -> Tensor:
    """[tokens, tokens]: which pairs had the same output in every draw."""
    apart = (runs[:, :, None] - runs[:, None]).abs().amax((0, -1))
    return apart <= 1e-9


def _gradient_differs(model: nn.Module, shape: tuple[int, ...]) -> str:
    """Each gradient at a fixed seed against differences of the loss."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    share = torch.randn(shape, generator=generator, dtype=torch.float64)

    def loss() -> Tensor:
        seed_everything(5)
        return (model(x) * share).sum()

    model.zero_grad()
    loss().backward()
    wanted = {"the input": x, **{name: weight for name, weight in model.named_parameters() if weight.requires_grad}}
    for name, place in wanted.items():
        way = torch.randn(place.shape, generator=generator, dtype=torch.float64)
        claimed = float((place.grad * way).sum()) if place.grad is not None else 0.0
        ends, before = [], place.detach().clone()
        for step in (1e-5, -1e-5):
            place.data.copy_(before + step * way)
            ends.append(float(loss().detach()))
        place.data.copy_(before)
        measured = (ends[0] - ends[1]) / 2e-5
        if abs(claimed - measured) > 1e-5 * max(abs(measured), 1.0):
            return f"gradient of {name}: {claimed:.6g}, by differences {measured:.6g}"
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# Whether tiles really run
# ---------------------------------------------------------------------------------------------------------------------


class _Widest(TorchDispatchMode):
    """The most rows that a tensor of the block's inner width had."""

    observes_only = True

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                for wide in (INTERMEDIATE, 2 * INTERMEDIATE):
                    if wide in leaf.shape:
                        self.rows = max(self.rows, leaf.numel() // wide)
        return result


def rows_at_once(entry: Entry) -> tuple[int, int]:
    """(most rows of the inner width that one tensor held in a tiled step, number of tokens)."""
    model = built(entry)
    tile(model, entry)
    model.train()
    for _ in range(2):  # what is looked at once, when a block is first called, is not the step
        inputs = make_inputs(entry, 1, entry.shapes[1])
        with _Widest() as widest:
            backward([leaf for leaf in tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)])
        model.zero_grad()
    return widest.rows, inputs[0].numel() // HIDDEN


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------


def print_table() -> None:
    """One line per entry: name, family, what came of it."""
    torch.set_num_threads(1)  # the tensors are tiny
    words: dict[str, Counter[str]] = {family: Counter() for family in (*FAMILIES, HARMLESS)}
    for entry in CATALOGUE:
        outcome = judge(entry)
        words[entry.family][outcome.word] += 1
        tiled = "tiled" if outcome.tiled else ""
        print(f"{entry.name:60} {entry.family:30} {outcome.word:8} {tiled:6} {outcome.detail[:110]}", flush=True)
    print()
    for family, counted in words.items():
        print(f"{family:30} {len(entries(family)):3}: {', '.join(f'{n} {word}' for word, n in counted.most_common())}")
