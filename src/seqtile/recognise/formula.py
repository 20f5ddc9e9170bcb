"""Check that a block computes the fused operator's formula, forward and backward.

The block's trace must be that of the operator's plain twin on the same weights: outputs, the input's gradient, every
weight's gradient, and what is drawn at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import READ_NUMBER_NAME
from seqtile.engines.flat import named_weights
from seqtile.ops.mlp import FusedWeights, plain_mlp
from seqtile.ops.norm import KNOWN_NORMS, NormFormula
from seqtile.ops.pointwise import ACTIVATIONS, Activation
from seqtile.recognise.chain import Chain, ViewOf, itself
from seqtile.recognise.live_weights import differ_in_dtype, has_hooks, projection_of, row_wise
from seqtile.recognise.sizes import Untraceable
from seqtile.recognise.trace import Graph, Tracer
from seqtile.recognise.widths import linear_widths


@dataclass(frozen=True)
class Formula:
    """The children that a block calls, and how: ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))``.

    Attributes:
        first: names of gate and up, of gate_up, or of up.
        down: name of the down projection.
        activation: the known activation, or None if it is the block's child or attribute ``function``.
        form: the spelling of the known activation that the block uses, or None.
        function: name of an activation that is not known, or "".
        gated: whether there is a gate.
        up_first: order of the halves of gate_up.
        dropout: name of the dropout on the output that drops now, or "".
        norms: formulas of the norms before and after it, None without a norm or for an unknown one.
    """

    first: tuple[str, ...]
    down: str
    activation: Activation | None
    function: str
    gated: bool
    up_first: bool
    dropout: str
    form: Callable[[Tensor], Tensor] | None = None
    norms: tuple[NormFormula | None, NormFormula | None] = (None, None)

    def weights(self, chain: Chain, dtype: torch.dtype, view: ViewOf = itself) -> FusedWeights | str:
        """The live weights of a chain for the fused operator, or why it cannot run now."""
        parts, projections = chain.parts(view), []
        for name in (*self.first, self.down):
            projection = projection_of(name, parts[name], dtype, traced=True)
            if isinstance(projection, str):
                return projection
            projections.append(projection)
        if differ_in_dtype(projections):
            return "its linear layers differ in dtype"  # T5 casts before its last layer, which stays in float32
        dropout = float(parts[self.dropout].p) if self.dropout else 0.0
        last_dropout = chain.dropout if chain.training else 0.0
        after: Any = None if chain.after is None else view(chain.after)
        if isinstance(chain.after, nn.Dropout):
            last_dropout, after = (float(chain.after.p) if after.training else 0.0), None
        if dropout and last_dropout:
            return "a dropout follows a block that ends with one"
        norm_before = None if chain.before is None else row_wise(view(chain.before), self.norms[0])
        norm_after = None if after is None else row_wise(after, self.norms[1])
        if isinstance(norm_before, str):
            return norm_before
        if isinstance(norm_after, str):
            return norm_after
        return FusedWeights(
            tuple(projections[:-1]), projections[-1],
            self.activation or Activation(self.function, parts[self.function]), self.gated, self.up_first,
            before=norm_before, after=norm_after, dropout=dropout or last_dropout,
        )  # fmt: skip


def formula_of(chain: Chain, graph: Graph, tracer: Tracer) -> Formula | str:
    """The formula that a traced chain computes, or why it is not supported."""
    why = "its trace is another formula than down(act(gate(x)) * up(x)) or down(act(up(x)))"
    reasons = list[str]()
    trained = {name for name, gradient in graph.gradients if gradient is not None and not name.startswith("input ")}
    if len(tracer.inputs) > 1:
        return "it was called with more than hidden states"
    if READ_NUMBER_NAME in graph.operators:
        return "it looks at the values of its weights"
    hidden = tracer.inputs[0][0][-1]
    if not isinstance(hidden, int):
        return "its features are not in the last dimension"
    for formula in _candidates(chain.parts(), hidden, graph):
        if isinstance(formula, str):
            return formula
        try:
            if _computes(chain, formula, graph, tracer, trained):
                return _with_norms(chain, formula, graph, tracer, trained)
            reasons.append(why)
        except Untraceable as error:
            reasons.append(str(error))
        except Exception:  # noqa: BLE001 - a function that fails on rows is no activation
            continue
    return why if why in reasons or not reasons else reasons[0]


def _computes(chain: Chain, formula: Formula, graph: Graph, tracer: Tracer, trained: set[str]) -> bool:
    """Whether the plain form of the operator has the same trace as the chain."""
    used: set[str] = set()

    def plain(view: ViewOf, inputs: list[Tensor]) -> Tensor:
        weights = formula.weights(chain, tracer.inputs[0][1], view)
        if isinstance(weights, str):
            raise Untraceable(weights)
        used.update(tracer.names[id(weight)] for weight in weights.split[0])
        if formula.form is not None:
            weights = replace(weights, activation=replace(weights.activation, function=formula.form))
        for field, norm in (("before", weights.before), ("after", weights.after)):
            if norm is not None and norm.formula is not None:
                weights = replace(weights, **{field: replace(norm, function=norm.formula.plain)})  # type: ignore[arg-type]
        x = inputs[0]
        return plain_mlp(x.flatten(0, -2), weights).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]  # [tokens, D], as tiles are run

    return tracer.trace(plain, graph) == graph and trained <= used


def _with_norms(chain: Chain, formula: Formula, graph: Graph, tracer: Tracer, trained: set[str]) -> Formula:
    """Add to the formula each norm's formula with which its trace still equals the chain's."""
    for is_after, norm in enumerate((chain.before, chain.after)):
        for norm_formula in _norms(norm) if norm is not None else ():
            formula_before, formula_after = formula.norms
            candidate = replace(
                formula, norms=(formula_before, norm_formula) if is_after else (norm_formula, formula_after)
            )
            try:
                if _computes(chain, candidate, graph, tracer, trained):
                    formula = candidate
                    break
            except Exception:  # noqa: BLE001 - written for other weights or dtypes
                continue
    return formula


def norm_of(chain: Chain, graph: Graph, tracer: Tracer) -> NormFormula | None:
    """The norm formula of a traced chain that is a single norm."""
    if chain.kind != "block" or len(chain.modules) != 1 or len(tracer.inputs) > 1:
        return None
    module = chain.modules[0]

    def plain(norm: NormFormula, view: ViewOf, inputs: list[Tensor]) -> Tensor:
        return norm.plain(inputs[0], [weight for _, weight in named_weights(view(module))])

    for norm in _norms(module):
        try:
            if tracer.trace(partial(plain, norm), graph) == graph:
                return norm
        except Exception:  # noqa: BLE001 - written for other weights or dtypes
            continue
    return None


def _norms(module: nn.Module) -> Iterator[NormFormula]:
    """Candidate formulas of a norm: each known spelling, with each number of the module as epsilon."""
    shapes = [weight.dim() for _, weight in named_weights(module)]
    if len(shapes) > 2 or any(dim != 1 for dim in shapes) or next(module.children(), None) is not None:
        return
    numbers = {value for value in vars(module).values() if type(value) is float and 0 < value < 1}
    for written, flags in KNOWN_NORMS:
        for epsilon in numbers:
            yield NormFormula(written, epsilon, len(shapes), **flags)


def _candidates(parts: Mapping[str, Any], hidden: int, graph: Graph) -> Iterator[Formula | str]:
    linears = {name: widths for name, value in parts.items() if (widths := linear_widths(value)) is not None}
    if len(linears) not in (2, 3):
        yield f"{len(linears)} linear layers where 2 or 3 were expected"
        return
    hooked = [name for name, value in parts.items() if isinstance(value, nn.Module) and has_hooks(value)]
    if hooked:
        yield f"{hooked[0]} has hooks"
        return
    layouts = list[tuple[str, tuple[str, ...], bool, bool]]()  # (down, first, gated, up_first) that the widths allow
    for down, (inner, out) in reversed(linears.items()):
        names = tuple(name for name in linears if name != down)
        first_widths = {linears[name] for name in names}
        if out != hidden:
            continue
        if first_widths == {(hidden, inner)}:
            layouts += [(down, order, len(names) == 2, False) for order in dict.fromkeys((names, names[::-1]))]
        if first_widths == {(hidden, 2 * inner)} and len(names) == 1:
            layouts += [(down, names, True, up_first) for up_first in (False, True)]
    if not layouts:
        yield "its linear layers are not D -> F and F -> D"
        return
    drops = [name for name, value in parts.items() if type(value) is nn.Dropout and value.p > 0]
    functions = [name for name, value in parts.items() if callable(value) and name not in (*linears, *drops)]
    choices: list[tuple[Activation | None, str, Callable[[Tensor], Tensor] | None]] = [
        (activation, "", spelling)
        for activation in ACTIVATIONS
        for operator, spelling in activation.spellings
        if operator in graph.operators
    ]
    choices += [(None, name, None) for name in functions]
    for activation, function, form in choices:
        for drop in ["", *drops]:
            for down, first, gated, up_first in layouts:
                yield Formula(first, down, activation, function, gated, up_first, drop, form)
