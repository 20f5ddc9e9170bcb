"""Run any function over tiles of tokens, and recompute each tile in backward.

Tiling is checkpointing at the grain of a tile. One small node, ``_Save``, saves the block's inputs *ahead* of the
tiles and returns an empty token; every tile then runs under PyTorch's own non-reentrant checkpoint and takes its
rows from those saved inputs when it is recomputed. That order has three consequences:

* An activation checkpoint around the layer sees one saved tensor of this block, the input. Its recompute stops
  there, before the block runs again: the tile's recompute is the only one.
* PyTorch's early stop ends each tile's recompute before its last product, whose output no gradient needs.
* ``_Save`` runs last in backward, after every tile. It hands over the input's gradient, which the tiles wrote into
  slices of one buffer, and one gradient per weight, summed over the tiles in fp32. So each parameter receives one
  gradient per backward, through autograd, whatever engine listens.

A tile may also hand a state to the next one (:func:`run_with_state`). It is an output of one tile's checkpoint and an
input of the next one's, so autograd hands its gradient back; like the rest of a tile's bookkeeping it is hidden from a
checkpoint around the layer, whose recompute would otherwise be a whole forward.

Source: the tiled MLP of Arctic Long Sequence Training, arXiv 2506.13996, and PyTorch's activation checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from seqtile._compat import backward_pass, call_parameter, early_stop
from seqtile.ops.grad_accumulator import Sum
from seqtile.ops.plain_tiles import RunTiles, run_compiled
from seqtile.ops.rng import TileStates
from seqtile.ops.same_weights import SameWeights
from seqtile.ops.tile_linear import SumsOfLinears
from seqtile.ops.token_tiles import Cuts, Outputs, SequenceCuts, is_differentiable, refuse_second_derivative

Weights = Callable[[], Mapping[str, Tensor]]
Changed = Callable[[], str]
State = tuple[Tensor, ...]
NO_TENSORS: Mapping[str, Tensor] = {}
"""A dict: dynamo cannot read a mapping proxy once the traced code has changed any dict."""

NO_TILES: Mapping[int, int] = {}

RunWithState = Callable[[Sequence[Tensor], Mapping[str, Tensor], State, int], tuple[Any, State]]

ParkState = Callable[[State, int], Sequence[Any]]
"""Takes one state, and how many states of a call it announces: all with the first one, later 0.

Returns what each tensor is kept as until the backward: itself, or an object whose ``take()`` returns it.
"""


def run_in_tiles(
    run: RunTiles, tensors: Sequence[Tensor], sizes: Sequence[int], weights: Weights = dict,
    computed: Mapping[str, Tensor] = NO_TENSORS, unpacked: Weights | None = None, changed: Changed = str,
) -> Any:  # fmt: skip
    """Compute ``run(tensors, computed)`` one tile of rows at a time.

    Replaces ``torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in x.split(sizes)])``.

    Args:
        run: position-wise function of (tile tensors, replaced weights) that returns a tensor or a nest of tensors,
            each with one row per token. The second argument maps the names that ``weights`` gave to tensors to use
            instead; these are ``computed`` alone when nothing needs a gradient.
        tensors: inputs that are split, each ``[..., D_i]`` with the same number of rows ``N`` (product of the
            leading dimensions). A tile keeps the number of dimensions: ``[1, ..., t, D_i]``.
        sizes: tokens of each tile, in order; they sum to ``N``; may be empty when ``N`` is 0.
        weights: returns the live weights by name: those that train, and others that have to be the same in backward.
            They are asked for again at every tile, so that an engine may free and gather them in between.
        computed: weights by name that were computed for this call alone, as a parametrisation does. They are saved with
            the inputs, so a checkpoint around the layer computes them again, and each gets one gradient.
        unpacked: computes frozen weights by name from packed ones. It is called once for all tiles of the forward and
            once for all tiles of the backward, and its result is released in between.
        changed: names a setting that ``run`` reads (an adapter's scaling, ``training``) and that is not what it was
            before the forward, or returns "". Not compared where the forward itself changes one.

    Returns:
        What ``run(tensors, computed)`` returns. Outputs shaped like the first input but for the last dimension keep its
        leading dimensions; other outputs are joined along dimension 0.

    Cost:
        Matrix products of a gated MLP in units of ``2 * N * D * F``: 11 (3 forward, 2 recomputed, 6 backward), 8 with
        frozen weights, the same inside a non-reentrant activation checkpoint; 14 inside a reentrant one. Memory
        beyond the inputs: the outputs, their gradients, the inputs' gradients, one fp32 sum per weight that trains,
        and one tile's intermediates.

    Autocast:
        A recompute runs in the forward's state, as PyTorch's checkpoint does; gradients in the backward's, as untiled.

    Randomness:
        The forward draws from the global random stream tile by tile, so masks differ from the untiled block's under the
        same seed. Backward restores each tile's state for its recompute and leaves the stream as it found it.

    Raises:
        ValueError: an output has no row per token, so the function is not position-wise.
        NotImplementedError: inside ``torch.jit.trace``, or for a backward with ``create_graph=True``.
        RuntimeError: a weight or setting has changed since the forward; a second backward without a retained graph.
    """
    cuts = Cuts(tensors, sizes)
    if torch.compiler.is_compiling():
        return run_compiled(run, tensors, cuts)
    live = weights() if torch.is_grad_enabled() else {}
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*tensors, *computed.values(), *live.values())):
        replaced = computed if unpacked is None else {**computed, **unpacked()}
        return _run_without_gradient(_without_state(run), tensors, cuts, computed=replaced)
    return _run_with_gradient(
        _without_state(run), tensors, cuts, weights, live, computed=computed, unpacked=unpacked, changed=changed
    )


def run_with_state(
    run: RunWithState,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    begins: Collection[int] = (),
    weights: Weights = dict,
    before_backward: Callable[[Sequence[Tensor]], None] | None = None,
    after_backward: Callable[[], None] | None = None,
    changed: Changed = str,
    continues: Mapping[int, int] = NO_TILES,
    park: ParkState | None = None,
) -> Any:
    """Compute a layer that carries a state along the sequence, one tile of the sequence at a time.

    Replaces a loop over tiles that hands each one the state that the tile before it left. In backward the tiles run in
    reverse, each recomputed from its slice of the input and the state at its beginning, and the state's gradient is
    handed back. A tile is recomputed and its weights' gradients are summed as :func:`run_in_tiles` does it.

    Args:
        run: function of (tile tensors, replaced weights, state, number of the tile) that returns (outputs, state after
            the tile). The state is a tuple of tensors, empty at the beginning of a sequence; it must not be written in
            place.
        tensors: inputs that are split, each ``[B, T, ...]`` or ``[1, T, ...]``; the first is ``[B, T, D]``.
        sizes: tokens of each tile, in order; they sum to ``T``.
        begins: numbers of the tiles besides the first at which a sequence begins: they get no state.
        weights, changed: as for :func:`run_in_tiles`.
        before_backward: called with ``tensors`` before the first tile of a backward is recomputed.
        after_backward: called after the last tile's backward.
        continues: earlier tile whose state a tile gets, by the tile's number, where that is not the one before it.
        park: moves the states at the cuts elsewhere until the backward, such as to the host.

    Returns:
        The outputs of ``run``, joined along dimension 1.

    Cost:
        Matrix products of the layer under PyTorch's non-reentrant checkpoint, whether one is around it or not. Memory
        between forward and backward: the inputs, and the state at each cut, which no checkpoint around the layer
        computes again; in backward also the output's and the inputs' gradients, one sum per weight that trains, and
        one tile's intermediates.

    Raises:
        ValueError: an output has not the tile's tokens along dimension 1.
        NotImplementedError, RuntimeError: as :func:`run_in_tiles`.
    """
    return run_with_cuts(
        run,
        tensors,
        SequenceCuts(tensors, sizes),
        begins,
        weights,
        before_backward=before_backward,
        after_backward=after_backward,
        changed=changed,
        continues=continues,
        park=park,
    )


def run_with_cuts(
    run: RunWithState,
    tensors: Sequence[Tensor],
    cuts: Cuts,
    begins: Collection[int] = (),
    weights: Weights = dict,
    before_backward: Callable[[Sequence[Tensor]], None] | None = None,
    after_backward: Callable[[], None] | None = None,
    changed: Changed = str,
    continues: Mapping[int, int] = NO_TILES,
    park: ParkState | None = None,
) -> Any:
    """:func:`run_with_state` where ``cuts`` say what a tile is, and how the outputs of tiles go back together."""
    live = weights() if torch.is_grad_enabled() else {}
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in (*tensors, *live.values())):
        return _run_without_gradient(run, tensors, cuts, _StatesOfTiles(begins, continues))
    return _run_with_gradient(
        run,
        tensors,
        cuts,
        weights,
        live,
        _StatesOfTiles(begins, continues, park, len(cuts.sizes)),
        before_backward=before_backward,
        after_backward=after_backward,
        changed=changed,
    )


class _StatesOfTiles:
    """The states that tiles have left and later ones begin with."""

    def __init__(
        self, begins: Collection[int] = (), continues: Mapping[int, int] = NO_TILES, park: ParkState | None = None,
        tiles: int = 0,
    ) -> None:  # fmt: skip
        self._begins, self._continues = begins, continues
        self._left: dict[int, State] = {}
        self._park, self._parked = park, dict[int, dict[int, Any]]()
        self._unannounced = len({self._source(index) for index in range(tiles)} - {None})

    def _source(self, index: int) -> int | None:
        """The tile whose state a tile begins with; None for one without a state."""
        if index in self._continues:
            return self._continues[index]
        return None if index in self._begins or not index else index - 1

    def before(self, index: int) -> State:
        """The state that a tile begins with."""
        source = self._source(index)
        return () if source is None else self._left[source]

    def keep(self, index: int, state: State) -> None:
        """Keep the state after a tile, and of those before it what further tiles begin with."""
        needed = {earlier for later, earlier in self._continues.items() if later > index}
        self._left = {earlier: left for earlier, left in self._left.items() if earlier in needed} | {index: state}
        self._parked = {earlier: parked for earlier, parked in self._parked.items() if earlier in self._left}

    def hooks(self, index: int) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Saved-tensor hooks around a tile's checkpoint: they keep its bookkeeping, with its state where it is parked.

        A state that several tiles begin with is parked once.
        """
        source, state = self._source(index), self.before(index)
        if self._park is None or source is None or not state:
            return _same, _same
        if source not in self._parked:
            saved = self._park(state, self._unannounced)
            self._parked[source] = {id(tensor): kept for tensor, kept in zip(state, saved, strict=True)}
            self._unannounced = 0
        parked = self._parked[source]
        return lambda tensor: parked.get(id(tensor), tensor), _unpack


def _without_state(run: RunTiles) -> RunWithState:
    return lambda tiles, aliases, *_: (run(tiles, aliases), ())


def _run_without_gradient(
    run: RunWithState, tensors: Sequence[Tensor], cuts: Cuts, states: _StatesOfTiles | None = None,
    computed: Mapping[str, Tensor] = NO_TENSORS,
) -> Any:  # fmt: skip
    rows = cuts.rows(tensors)  # [N, D_i] each; along a sequence [B, T, ...]
    output = cuts.outputs()
    states = states or _StatesOfTiles()
    for index in range(len(cuts.sizes)):
        result, state = run(cuts.tiles(rows, index), computed, states.before(index), index)
        states.keep(index, state)
        output.write(index, result)
    output.finish()
    return output.result(output.buffers)


def _run_with_gradient(
    run: RunWithState, tensors: Sequence[Tensor], cuts: Cuts, weights: Weights, live: Mapping[str, Tensor],
    states: _StatesOfTiles | None = None, computed: Mapping[str, Tensor] = NO_TENSORS,
    before_backward: Callable[[Sequence[Tensor]], None] | None = None,
    after_backward: Callable[[], None] | None = None, unpacked: Weights | None = None, changed: Changed = str,
) -> Any:  # fmt: skip
    rows = cuts.rows(tensors)  # [N, D_i] each; along a sequence [B, T, ...]
    trained = {name: weight for name, weight in live.items() if weight.requires_grad}
    names, same = tuple(trained), SameWeights(live)
    names += tuple(name for name, weight in computed.items() if weight.requires_grad)
    trained |= computed
    gradients = TileGradients(cuts, [(name, weight.dtype) for name, weight in trained.items()], after_backward)
    saved: list[Tensor] = []
    token = _Save.apply(gradients, saved, len(rows), len(computed), *rows, *trained.values())  # type: ignore[no-untyped-call]
    source = TileSource(cuts, token, rows, computed, saved, before_backward, unpacked)
    del trained, live, computed, token
    output, anchor = cuts.outputs(), rows[0].new_empty(0)
    random = TileStates(anchor.device)

    def run_tile(index: int, _: Tensor, *state: Tensor) -> Any:
        if source.recomputes and compares and index == last_index and (setting := changed()):
            raise RuntimeError(
                f"cannot recompute a tile: {setting} is set otherwise in backward than in the block's forward; change "
                "adapters, their scaling, dropout and training mode after backward"
            )
        computed = source.computed()
        tiles = source.tiles(index)
        live = {**(same.check(weights()) if source.recomputes else weights()), **computed}
        detached = [live[name].detach() for name in names]
        aliases = _enter_tile(source, gradients, index, tiles, names, detached)
        for name, alias in aliases.items():
            if isinstance(live[name], nn.Parameter):
                call_parameter(alias)
        with random.of(index), SumsOfLinears(aliases, gradients.sum_of):
            result = run(tiles, {**computed, **aliases}, state, index)
        if not source.recomputes:
            same.settle(live)
        return result

    states = states or _StatesOfTiles()
    last_index = len(cuts.sizes) - 1  # backward begins with it
    compares = False
    try:
        for index in range(len(cuts.sizes)):
            # The hooks hide the tile's own bookkeeping from a checkpoint around the layer, which would
            # otherwise have to recompute every tile but the last to get it back. The anchor carries the device.
            entering = states.before(index)
            with saved_tensors_hooks(*states.hooks(index)), _stopping_early():
                result, state = checkpoint(run_tile, index, anchor, *entering, use_reentrant=False, early_stop=True)
            leaves = output.write(index, result)
            source.token = _Put.apply(gradients, source, index, source.token, *leaves)  # type: ignore[no-untyped-call]
            states.keep(index, state)
            del result, leaves, entering, state
        del states
        compares = not changed()  # a block that counts its calls changes itself
    finally:
        last = source.end_forward()
    output.finish()
    joined = _Join.apply(gradients, output, last)  # type: ignore[no-untyped-call]
    return output.result(joined)


def _enter_tile(
    source: TileSource, gradients: TileGradients, index: int, tiles: list[Tensor], names: Sequence[str],
    weights: Sequence[Tensor],
) -> dict[str, Tensor]:  # fmt: skip
    """Put the tiles that need a gradient into the tile's graph, in place; return its aliases of the weights."""
    numbers = [number for number, needs in enumerate(source.needs_gradient) if needs]
    entered = _Enter.apply(source.token, gradients, index, numbers, names, *(tiles[n] for n in numbers), *weights)  # type: ignore[no-untyped-call]
    for number, tile in zip(numbers, entered[: len(numbers)], strict=True):
        tiles[number] = tile
    return dict(zip(names, entered[len(numbers) :], strict=True))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _unpack(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.take()


def _stopping_early() -> AbstractContextManager[None]:
    """Lift ``set_checkpoint_early_stop(False)`` where it is in force, as it outranks the argument.

    That switch belongs to the process, not to the thread, so it is left alone otherwise.
    """
    off = early_stop() is False
    return set_checkpoint_early_stop(True) if off else nullcontext()


class TileSource:
    """Where a tile's rows come from: the live inputs during the forward, the saved ones during a recompute.

    Attributes:
        token: what the next tile hangs on. It chains the tiles: in backward one begins when the one after it has ended.
            Were all ready at once, those still waiting when an exception ends the backward would stay in the
            engine's queue, and with them the graph.
        recomputes: the forward is over.
    """

    def __init__(
        self, cuts: Cuts, token: Tensor, rows: Sequence[Tensor], computed: Mapping[str, Tensor], saved: list[Tensor],
        before_backward: Callable[[Sequence[Tensor]], None] | None = None,
        unpacked: Weights | None = None,
    ) -> None:  # fmt: skip
        self.cuts = cuts
        self._inputs, self._names = len(rows), tuple(computed)
        self.needs_gradient = [row.requires_grad for row in rows]
        self.token, self.recomputes = token, False
        self._save = token.grad_fn
        self._live: list[Tensor] | None = [tensor.detach() for tensor in (*rows, *computed.values())]
        self._saved = saved
        self._before_backward = before_backward
        self._pass = -1
        self._unpack, self._unpacked = unpacked, NO_TENSORS

    def tiles(self, index: int) -> list[Tensor]:
        """The rows of one tile, outside any graph."""
        tiles = self.cuts.tiles(self._now()[: self._inputs], index)
        if index == 0 and self.recomputes:  # the last one to run
            self._saved.clear()
            self._unpacked = NO_TENSORS
        return tiles

    def computed(self) -> dict[str, Tensor]:
        """The weights that were computed for the call, outside any graph; asked for before the tile's rows."""
        if self._unpack is not None and not self._unpacked:
            self._unpacked = self._unpack()
        saved = dict(zip(self._names, self._now()[self._inputs :], strict=True)) if self._names else {}
        return {**saved, **self._unpacked}

    def _now(self) -> list[Tensor]:
        if self._live is not None:
            return self._live
        self.unpack()
        return self._saved

    def end_forward(self) -> Tensor:
        """Release the live inputs, from here on they come from the saved ones, and of the last token; return it."""
        last, self.token = self.token, self.token.detach().requires_grad_()
        self._live, self._unpacked, self.recomputes = None, NO_TENSORS, True
        return last

    def unpack(self) -> None:
        """Get the saved inputs back, once per backward pass: a layer checkpoint allows no second time."""
        current = backward_pass()
        if not self._saved or self._pass != current:
            assert self._save is not None
            self._saved[:] = [row.detach() for row in self._save.saved_tensors]  # type: ignore[attr-defined]
            self._pass = current
            if self._before_backward is not None:
                self._before_backward(self._saved[: self._inputs])


class TileGradients:
    """Gradients of one backward pass's tiles, until ``_Save`` returns them.

    Attributes:
        cuts: the tiles.
        weights: name and dtype of each weight that trains.
        after: called when the gradients have been taken.
        sums: the sum of each weight's gradient, by name, as far as tiles have added to it.
    """

    def __init__(
        self, cuts: Cuts, weights: Sequence[tuple[str, torch.dtype]], after: Callable[[], None] | None = None
    ) -> None:
        self.cuts = cuts
        self.weights = weights
        self.after = after
        self._clear()

    def _clear(self) -> None:
        self.sums: dict[str, Sum] = {}
        self._inputs: dict[int, Tensor] = {}
        self._written: dict[int, set[int]] = {}
        self._outputs: Sequence[Tensor | None] = ()

    def begin(self, outputs: Sequence[Tensor | None]) -> None:
        """Keep the gradients of the whole outputs while the tiles take their slices."""
        self._clear()
        self._outputs = [None if grad is None else self.cuts.of_whole(grad) for grad in outputs]

    def of_output(self, index: int) -> Iterator[Tensor | None]:
        """One tile's slice of each output's gradient."""
        for gradient in self._outputs:
            yield None if gradient is None else self.cuts.part(gradient, index)
        if index == 0:  # the last one to run
            self._outputs = ()

    def sum_of(self, name: str, weight: Tensor) -> Sum:
        """The sum of a weight's gradient over the tiles of this pass."""
        if name not in self.sums:
            self.sums[name] = Sum(weight)
        return self.sums[name]

    def add_weight(self, name: str, gradient: Tensor) -> None:
        """Add one tile's weight gradient to the sum: fp32 for weights of lower precision."""
        self.sum_of(name, gradient).add(gradient)

    def write_input(self, number: int, index: int, gradient: Tensor) -> None:
        """Write one tile's input gradient into its slice."""
        rows = self.cuts.of_tile(gradient)  # [t, D_i]; along a sequence [B, t, ...]
        whole = self._inputs.get(number)
        if whole is None:
            whole = self._inputs[number] = self.cuts.empty_for(rows)
        self.cuts.part(whole, index).copy_(rows)
        self._written.setdefault(number, set()).add(index)

    def take(self, inputs: int) -> list[Tensor | None]:
        """Every gradient of the pass, inputs first, and nothing kept."""
        result: list[Tensor | None] = []
        for number in range(inputs):
            whole = self._inputs.pop(number, None)
            if whole is not None:
                for index in range(len(self.cuts.sizes)):
                    if index not in self._written[number]:
                        self.cuts.part(whole, index).zero_()
            result.append(whole)
        for name, dtype in self.weights:
            total = self.sums.pop(name, None)
            result.append(None if total is None else total.result().to(dtype))
        self._clear()
        if self.after is not None:
            self.after()
        return result


class _Save(torch.autograd.Function):
    """Save the inputs ahead of the tiles; run last in backward and return every gradient."""

    @staticmethod
    def forward(
        ctx: Any, gradients: TileGradients, saved: list[Tensor], inputs: int, computed: int, *tensors: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.saved, ctx.inputs = gradients, saved, inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:inputs], *tensors[len(tensors) - computed :])
        return torch.empty(0, device=tensors[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any) -> Any:
        ctx.saved.clear()  # not cleared when a tile had nothing to recompute
        return None, None, None, None, *ctx.gradients.take(ctx.inputs)


class _Enter(torch.autograd.Function):
    """One tile of the inputs, and the weights as that tile sees them; takes their gradients.

    One node for all of them, so that nothing of the tile waits in the engine's queue while the tile runs backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        gradients: TileGradients,
        index: int,
        inputs: Sequence[int],
        names: Sequence[str],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.gradients, ctx.index, ctx.inputs, ctx.names = gradients, index, inputs, names
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        inputs = len(ctx.inputs)
        for number, gradient in zip(ctx.inputs, upstream[:inputs], strict=True):
            if gradient is not None:
                ctx.gradients.write_input(number, ctx.index, gradient)
        for name, gradient in zip(ctx.names, upstream[inputs:], strict=True):
            if gradient is not None:
                ctx.gradients.add_weight(name, gradient)
        return (None,) * (5 + len(upstream))


class _Put(torch.autograd.Function):
    """Stands for one tile's outputs, whose values are already in the joined buffers; passes their gradients down."""

    @staticmethod
    def forward(
        ctx: Any, gradients: TileGradients, source: TileSource, index: int, token: Tensor, *outputs: Tensor
    ) -> Tensor:
        ctx.gradients, ctx.source, ctx.index = gradients, source, index
        ctx.shapes = [output.shape if is_differentiable(output) else None for output in outputs]
        ctx.set_materialize_grads(False)
        return token.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any) -> Any:
        ctx.source.unpack()
        slices = ctx.gradients.of_output(ctx.index)
        gradients = [
            None if gradient is None or shape is None else gradient.reshape(shape)
            for gradient, shape in zip(slices, ctx.shapes, strict=True)
        ]
        return None, None, None, None, *gradients


class _Join(torch.autograd.Function):
    """The whole outputs; their gradients are kept for the tiles to take slices of."""

    @staticmethod
    def forward(ctx: Any, gradients: TileGradients, output: Outputs, token: Tensor) -> Any:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        buffers, output.buffers = output.buffers, []
        ctx.mark_non_differentiable(
            *(buffer for buffer, needs in zip(buffers, output.needs_gradient, strict=True) if not needs)
        )
        return tuple(buffers)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor | None) -> Any:
        refuse_second_derivative()
        ctx.gradients.begin(outputs)
        return None, None, None
