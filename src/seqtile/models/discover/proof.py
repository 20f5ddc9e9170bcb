"""Proofs that what runs in a tile treats every token by itself, what it computes, and for how long they hold.

A proof is made once for all modules whose code reads the same values, in one mode: training or evaluation, dtypes,
autocast, with or without gradients. At each call a block asks whether what the proof rests on is still so
(:meth:`Facts.hold`); where it is not, the proof is looked up or made again.
"""

from __future__ import annotations

import random
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from seqtile.models.discover.chain import Chain
from seqtile.models.discover.facts import Facts
from seqtile.models.discover.formula import Formula, formula_of, norm_of
from seqtile.models.discover.known_kernels import is_offloaded
from seqtile.models.discover.python_code import Code
from seqtile.models.discover.sizes import NoRule, NotPerToken, Untraceable
from seqtile.models.discover.trace import Graph, Tracer, in_a_thread
from seqtile.models.discover.trial import try_tiles
from seqtile.ops.norm import NormFormula


def process_switches() -> tuple[Any, ...]:
    """What PyTorch keeps for the whole process, and code may ask for."""
    return (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled())


def autocast_dtype(kind: str) -> torch.dtype | None:
    """The dtype that autocast has for this kind of device, None where it is off."""
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else None


@dataclass(frozen=True)
class Mode:
    """In what way a call runs.

    Attributes:
        inputs: dimensions and dtype of each tensor that is split; a word stands for token axes.
        device: where they are.
        autocast: dtype of autocast, None where it is off.
        gradients: whether a backward will follow.
        switches: the default dtype, whether deterministic algorithms are asked for, and whether autocast is on for
            the accelerator, on which the input need not be.
    """

    inputs: tuple[tuple[tuple[int | str, ...], torch.dtype], ...]
    device: torch.device
    autocast: torch.dtype | None = None
    gradients: bool = True
    switches: tuple[Any, ...] = field(default_factory=process_switches)


@dataclass(frozen=True)
class Proof:
    """What is known of a chain in one mode.

    Attributes:
        why_not: why it is not proven to treat every token by itself; "" if it is.
        refuted: whether it is known not to, rather than not known.
        graph: what it computes; None where no trace tells.
        formula: what the fused operator needs to know, or why it cannot run it.
        how: what proves it.
        norm: which norm it is, where it is one and nothing else.
    """

    why_not: str
    refuted: bool
    graph: Graph | None
    formula: Formula | str
    how: str = ""
    norm: NormFormula | None = None

    def why_untiled(self, name: str) -> str:
        """Why the block of this name is not tiled, and what its caller can do about it."""
        if self.refuted:
            return self.why_not
        return f"{self.why_not}; trust={name!r} tiles it if you know that it treats every token by itself"


BY_TRACE = "by its trace, forward and backward"
BY_TRIAL = "tried out at two lengths, outputs and gradients (no trace can follow it)"


@contextmanager
def for_training(model: nn.Module) -> Iterator[None]:
    """Inside, a model that is in evaluation mode, as ``from_pretrained`` gives it, is in the mode of training."""
    modules = [] if model.training else [module for module in model.modules() if not module.training]
    for module in modules:
        module.training = True
    try:
        yield
    finally:
        for module in modules:
            module.training = False


_Known = dict[Any, tuple[Code, list[tuple[Any, Proof]]]]
"""Proofs by what their code reads: that code, and the proof for each set of values."""

_proofs: OrderedDict[Any, _Known] = OrderedDict()
MOST, MOST_VALUES = 512, 64
"""Most kinds of chains whose proofs are remembered, and most proofs of one kind."""

_renewed: dict[int, dict[Mode, tuple[int, float]]] = {}
"""How often each module was proven again in a row, and when last."""

MOST_CHANGES, PAUSE = 32, 60.0
"""Most proofs of one module in one mode in a row, and the seconds after which another is not in a row."""


def prove(chain: Chain, mode: Mode) -> tuple[Proof, Facts | None]:
    """The proof of a chain in a mode, and what it rests on.

    Cost:
        Where one is known for modules like these, some 100 µs; else 10 to 100 ms.
    """
    modules = chain.modules
    if any(is_offloaded(part) for module in modules for part in module.modules()):
        why = "accelerate fetches its weights at each call and drops them (device_map), and every tile would be one"
        return Proof(why, False, None, why), None
    tree = tuple(weakref.ref(type(part), _forget) for module in modules for part in module.modules())
    key = (chain.key, tree, mode)
    known = _proofs.setdefault(key, {})
    _proofs.move_to_end(key)
    while len(_proofs) > MOST:
        _proofs.popitem(last=False)
    for code, proofs in list(known.values()):
        try:
            facts = Facts(modules, chain.functions, code)
        except Untraceable:
            continue
        for frozen, proof in proofs:
            if facts.frozen == frozen:
                return proof, facts
    if modules and _is_tiresome(modules[0], mode):
        why = f"what its forward reads changed {MOST_CHANGES} times in a row, and each proof takes longer than a call"
        return Proof(why, False, None, why), None
    if mode.switches[2] and mode.device.type != "cuda":
        why = "autocast is on for another device than its input's, which a trace does not copy"
        return Proof(why, False, None, why), None
    code = Code()
    proof = in_a_thread(lambda: _prove(chain, mode, code))
    code.refused = ""  # the proof says it
    try:
        facts = Facts(modules, chain.functions, code)
    except Untraceable as error:
        return Proof(str(error), False, None, str(error)), None
    if not code.mentioned:  # nothing ran, and so nothing is known of others
        return proof, facts
    if sum(len(proofs) for _, proofs in known.values()) >= MOST_VALUES:  # a value that changes all the time
        known.clear()
    known.setdefault(code.same_reading(), (code, []))[1].append((facts.frozen, proof))
    return proof, facts


def _is_tiresome(module: nn.Module, mode: Mode) -> bool:
    """Count a proof that no other will do for; whether there were too many of this module in this mode."""
    if id(module) not in _renewed:
        _renewed[id(module)] = {}
        weakref.finalize(module, _renewed.pop, id(module), None).atexit = False
    count, last = _renewed[id(module)].get(mode, (0, 0.0))
    now = time.monotonic()
    count = count + 1 if now - last < PAUSE else 1
    _renewed[id(module)][mode] = (count, now)
    return count > MOST_CHANGES


def _forget(gone: weakref.ref[type]) -> None:
    """Drop what is known of a class that is gone."""
    for key in [key for key in list(_proofs) if gone in key[1]]:
        del _proofs[key]


def _prove(chain: Chain, mode: Mode, code: Code) -> Proof:
    before, drawn = generators(), ""
    try:
        proof = _tried_out(chain, mode, code) if chain.kind == "experts" else _traced(chain, mode, code)
    except NotPerToken as error:
        return Proof(str(error), True, None, "")
    except Untraceable as error:
        return Proof(str(error), False, None, "")
    except Exception as error:  # noqa: BLE001 - whatever a custom module raises
        text = str(error).splitlines()[0][:200] if str(error) else ""
        return Proof(f"it could not be executed here ({type(error).__name__}: {text})", False, None, "")
    finally:
        drawn = restored(before)
    return Proof(f"its forward draws from {drawn}", True, None, "") if drawn else proof


def _traced(chain: Chain, mode: Mode, code: Code) -> Proof:
    tracer = Tracer(chain.modules, mode.inputs, mode.device, mode.autocast, mode.gradients)
    try:
        graph = tracer.judge(lambda view, inputs: chain.run(inputs, view), code, chain.functions)
    except NoRule as error:
        if why := _written_by_others(code):
            raise Untraceable(f"{error}, and {why}") from None
        return replace(_tried_out(chain, mode, code), formula=str(error))
    _check_rows(graph, chain, mode)
    names = code.mentioned | {name for name, _ in chain.members}  # a layer calls the parts of an inline block itself
    formula = chain.fusable() or formula_of(chain, graph, tracer, names)
    return Proof("", False, graph, formula, BY_TRACE, norm_of(chain, graph, tracer))


def _check_rows(graph: Graph, chain: Chain, mode: Mode) -> None:
    """Every output must have its tokens where the first input has them, or all of them in its first dimension."""
    given = mode.inputs[0][0]
    leading = tuple(tuple(one) if isinstance(one, str) else () for one in given[:-1])
    axes = tuple(axis for dim in leading for axis in dim)
    for _, dims, _ in graph.outputs[2:]:
        place = chain.call[1] if chain.call and chain.call[0] == "along" else None
        kept = dims[place] == ("s",) if place is not None else dims[:-1] == leading and not dims[-1]
        rows = place is None and dims[0] == axes and not any(dims[1:]) and (len(dims) == 2 or len(leading) == 1)
        if not kept and not rows:
            raise NotPerToken("it returns its tokens in other dimensions than it takes them")


def _tried_out(chain: Chain, mode: Mode, code: Code) -> Proof:
    written = Code.written(chain.modules, chain.functions)
    if not (why := _written_by_others(written)):
        before = Facts(chain.modules, chain.functions, written)
        try:
            try_tiles(chain, mode.inputs, code)
        finally:
            changed = before.restore()
        if changed:
            raise NotPerToken(f"its forward changes {changed}")
        why = _written_by_others(code)
    if why:
        raise Untraceable(f"it can only be tried out, and {why}")
    return Proof("", False, None, "experts run in the generic operator", BY_TRIAL)


def _written_by_others(code: Code) -> str:
    """Why trying code out proves too little: custom code may do other things at other lengths."""
    return "its code belongs to no library whose code is known" if code.custom_names else ""


def generators() -> list[tuple[str, Any, bytes, Any]]:
    """(whose, state, the same to compare, how to put it back) of the generators that others share with a trace."""
    state = torch.get_rng_state()
    known: list[tuple[str, Any, bytes, Any]]
    known = [("PyTorch's", state, state.numpy().tobytes(), torch.set_rng_state),
             ("Python's", random.getstate(), repr(random.getstate()).encode(), random.setstate)]  # fmt: skip
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"].random
        known.append(("NumPy's", numpy.get_state(), numpy.get_state()[1].tobytes(), numpy.set_state))
    return known


def restored(before: list[tuple[str, Any, bytes, Any]]) -> str:
    """The generator that moved on since then, "" for none; all are put back."""
    moved = ""
    for (whose, state, then, put_back), (_, _, now, _) in zip(before, generators(), strict=False):
        if then != now:
            moved = moved or f"{whose} random generator"
            put_back(state)
    return moved
