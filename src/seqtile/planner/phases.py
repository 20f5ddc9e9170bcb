"""Label the phases of a training step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from seqtile._compat import tree_iter
from seqtile.counting.live import LiveBytes
from seqtile.devices import synchronize
from seqtile.models.causal import causal_model
from seqtile.recognise.decoder_layers import decoder_layers

if TYPE_CHECKING:
    from seqtile.blocks.install_blocks import Block

HEAD = "head and loss"
REST = "rest of the model"
OPTIMIZER_STEP = "optimizer step"
ATTENTION = "attention"
STATE = "layers with a state"
TOWER = "vision tower"
BLOCK = "MLP"
BLOCK_AND_NORMS = "MLP and norms"


@dataclass(frozen=True)
class Phase:
    """One part of a training step: a counter's label and a key; ``str`` is for people, ``"MLP#3, backward"``.

    Attributes:
        part: ``"MLP"``, ``"attention"``, ``"head and loss"``, ``"optimizer step"``, ...
        layer: the number of its decoder layer; None for what is in no layer, or in any.
        direction: ``"forward"``, ``"recompute"`` or ``"backward"``; "" for what has none.
        in_kernel: while a kernel runs that takes memory inside itself.
        past_mixer: whether a layer's backward is past its attention or state, where live memory grows differently.
    """

    part: str
    layer: int | None = None
    direction: str = ""
    in_kernel: bool = False
    past_mixer: bool = False

    def __str__(self) -> str:
        layer = "" if self.layer is None else f"#{self.layer}"
        return f"{self.part}{layer}{', ' if self.direction else ''}{self.direction}"

    def named(self, layers: int) -> str:
        """``"backward of attention in the last layer"``, for a model of ``layers`` layers."""
        if not self.direction:
            return self.part
        if self.layer is None:
            return f"{self.direction} of {self.part}"
        names = {0: "the first layer", layers - 1: "the last layer"}
        return f"{self.direction} of {self.part} in {names.get(self.layer, f'layer {self.layer + 1} of {layers}')}"


class _Labels:
    """Follows forward, recompute and backward through hooks, and names the running part to the counter.

    Forward hooks tell which module runs, in the recompute of an activation checkpoint too. In the backward, the
    gradient of a module's output marks the begin of its backward, that of its input the end.
    """

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self._running: list[Phase] = []
        self._backward: Phase | None = None
        self._phase: AbstractContextManager[None] | None = None
        self._hooks: list[Any] = []
        self._last_output: Callable[[], Tensor | None] = lambda: None

    def watch(self, module: nn.Module, label: Phase, outside: Phase) -> None:
        """Call what happens in ``module`` ``label``, and what follows it in the backward ``outside``."""

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(label)
            self.switch()
            first = next(_gradient_tensors((args, kwargs)), None)
            # One layer's output is the next one's input: its gradient begins the former's backward.
            if first is not None and first is not self._last_output():
                first.register_hook(lambda _: self._step_back(outside))

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            self._running.pop()
            self.switch()
            first = next(_gradient_tensors(output), None)
            if first is not None:
                self._last_output = weakref.ref(first)
                first.register_hook(lambda _: self._step_back(label))

        # A recompute that ends early leaves the module by an exception, hence always_call.
        self._hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def watch_output(self, layer: nn.Module, label: Phase) -> None:
        """Call the backward of ``layer`` ``label`` from the gradient of its output on, its recompute included.

        Else what runs in none of its parts counts as the layer after it, whose peak then has tensors of this one.
        """

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            first = next(_gradient_tensors(output), None)
            if first is not None and first is not self._last_output():
                first.register_hook(lambda _: self._step_back(label))

        self._hooks.append(layer.register_forward_hook(leave))

    def begin_backward(self) -> None:
        """The forward is over; the first thing in the backward is the loss."""
        self._backward = Phase(HEAD)
        self.switch()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._end_phase()

    def _step_back(self, label: Phase) -> None:
        self._backward = label
        self.switch()

    def switch(self) -> None:
        self._end_phase()
        backward = self._backward is not None
        label = self._running[-1] if self._running else self._backward or Phase(HEAD)
        when = ("recompute" if self._running else "backward") if backward else "forward"
        self._phase = self._live.phase(replace(label, direction=when))
        self._phase.__enter__()

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None


@contextmanager
def label_phases(
    live: LiveBytes, model: nn.Module, blocks: Iterable[Block], *, layers: bool = False, pictures: bool = False,
    chunked: bool = False,
) -> Iterator[_Labels]:  # fmt: skip
    """Name the parts of one step of ``model`` to ``live`` while the ``with`` lasts.

    A block that shares its tile with a norm gets no hooks, which would make the two run apart: there everything in
    its layer but the attention has one name.

    Args:
        live: a running counter.
        model: a Hugging Face causal language model, PEFT's wrapper or not.
        blocks: its position-wise blocks, from the report of :func:`seqtile.apply`.
        layers: put the number of the decoder layer behind each name, ``"MLP#3, backward"``.
        pictures: give what runs before the language model a name: its vision tower and projector.
        chunked: layers run in chunks, where a block always gets hooks: its norm runs apart, which holds as much.
    """
    labels = _Labels(live)
    decoder = decoder_layers(model)
    numbers = {layer.name: number for number, layer in enumerate(decoder)} if layers else {}
    mixers = {
        f"{layer.name}.{mixer.name}": STATE if mixer.has_state else ATTENTION
        for layer in decoder
        for mixer in layer.mixers
    }
    places = {}
    for block in blocks:
        alone = chunked or len(block.together) <= 1
        layer = block.name.rpartition(".")[0]
        label = BLOCK if alone else BLOCK_AND_NORMS
        places[block.name if alone else layer] = Phase(label, _number(numbers, block.name))
    backbone = getattr(causal_model(model), "base_model", model)
    in_order = {model.get_submodule(layer.name) for layer in decoder}
    towers = {module for module in backbone.children() if pictures and in_order.isdisjoint(module.modules())}
    try:
        for name, module in model.named_modules():
            if module is backbone and module is not model:
                labels.watch(module, Phase(REST), Phase(HEAD))
            elif module in towers:
                labels.watch(module, Phase(TOWER), Phase(TOWER))
            elif name in places:
                labels.watch(module, places[name], Phase(REST, _number(numbers, name)))
            elif name in mixers:
                number = _number(numbers, name)
                outside = places.get(name.rpartition(".")[0], Phase(REST, number))
                labels.watch(module, Phase(mixers[name], number), replace(outside, past_mixer=layers))
            if name in numbers and name not in places and not chunked:
                labels.watch_output(module, Phase(REST, numbers[name]))
        labels.switch()
        yield labels
    finally:
        labels.close()


def _number(numbers: dict[str, int], name: str) -> int | None:
    """The number of the layer that ``name`` is in, or None."""
    while name and name not in numbers:
        name = name.rpartition(".")[0]
    return numbers.get(name)


def _gradient_tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor) and leaf.requires_grad)


def run_step(model: nn.Module, batch: dict[str, Any], labels: _Labels | None = None) -> float:
    """Forward and backward of ``batch``; returns the loss and leaves the gradients on the weights."""
    loss: Tensor = model(**batch).loss
    if labels is not None:
        labels.begin_backward()
    loss.backward()
    synchronize(loss.device)
    return loss.item()
