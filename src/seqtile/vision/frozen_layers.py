"""Skip the frozen layers of a tower in recomputes: the input of the trained projector after them is kept instead.

In a recompute, frozen layers whose inputs need no gradient return zeros of the right shape, so that the code between
modules still runs. A trained module gets the inputs that it got in the forward. The trial of
:mod:`seqtile.vision.group_proof` detects models in which values of frozen layers matter elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import tree_leaves, tree_map
from seqtile.ops.rng import RandomState


class FrozenLayers:
    """The results of frozen layers of one call, group by group.

    Args:
        modules: the modules that compute features.
        trained: the weights that get a gradient.
    """

    def __init__(self, modules: Collection[nn.Module], trained: Collection[Tensor]) -> None:
        self._trained = {id(weight) for weight in trained}
        self._layers, self._heads = list[nn.Module](), list[nn.Module]()
        for module in modules:
            self._divide(module)
        self._inputs: dict[int, list[tuple[RandomState, Any]]] = {}
        self._results: dict[int, list[Any]] = {}

    def _divide(self, module: nn.Module) -> None:
        """Add a module to the frozen layers or to the trained modules; divide its children if it has both."""
        if self._is_frozen(module):
            self._layers += module.children() if isinstance(module, nn.ModuleList) else [module]
        elif isinstance(module, nn.ModuleList) or any(self._is_stack(submodule) for submodule in module.modules()):
            for child in module.children():
                self._divide(child)
        else:
            self._heads.append(module)

    def _is_stack(self, module: nn.Module) -> bool:
        """Whether the module is a list of frozen layers, which a tower has and a projector does not."""
        return isinstance(module, nn.ModuleList) and self._is_frozen(module)

    def _is_frozen(self, module: nn.Module) -> bool:
        return not any(id(weight) in self._trained for weight in module.parameters())

    def __bool__(self) -> bool:
        if any(getattr(head, "gradient_checkpointing", False) for head in self._heads):
            return False  # the head's own recompute would get the zeros
        return bool(self._heads) and any(True for layer in self._layers for _ in layer.parameters())

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Wrap one run of a group: the first one runs whole, a later one skips the frozen layers."""
        again = index in self._inputs
        if not again:
            self._inputs[index], self._results[index] = [], []
        inputs, results = iter([*self._inputs[index]]), iter([*self._results[index]])
        entered = False  # until a trained module runs, inputs require a gradient only by enable_input_require_grads

        def enter(head: nn.Module, args: Any, kwargs: Any) -> Any:
            nonlocal entered
            before, entered = entered, True
            if not again:
                random, keep = RandomState(_device_of_inputs(args, kwargs)), _kept if before else _detached
                self._inputs[index].append((random, tree_map(keep, (args, kwargs))))
                return None
            random, kept = next(inputs)
            random.restore()  # the frozen layers that are skipped may draw random numbers
            return _merged(kept, (args, kwargs))

        def layer_forward(forward: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                if again and (result := next(results)) is not None:
                    return tree_map(_with_zeros, result)
                is_frozen = not (entered and any(map(_needs_gradient, tree_leaves((args, kwargs)))))
                with torch.no_grad() if is_frozen else nullcontext():
                    result = forward(*args, **kwargs)
                if not again:
                    self._results[index].append(tree_map(_without_value, result) if is_frozen else None)
                return result

            return run

        with ExitStack() as stack:
            for head in self._heads:
                stack.callback(head.register_forward_pre_hook(enter, with_kwargs=True).remove)
            for layer in self._layers:
                before = layer.__dict__.get("forward")
                layer.__dict__["forward"] = layer_forward(layer.forward)
                stack.callback(_put_back, layer, before)
            yield


class _Blank:
    """Size, dtype and device of a tensor whose values are not needed."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device


def _without_value(value: Any) -> Any:
    return _Blank(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def _with_zeros(value: Any) -> Any:
    return torch.zeros(value.size, dtype=value.dtype, device=value.device) if isinstance(value, _Blank) else value


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _kept(value: Any) -> Any:
    """An input of a trained module; None if another trained module computes it."""
    return None if _needs_gradient(value) else _detached(value)


def _device_of_inputs(args: Any, kwargs: Any) -> torch.device:
    return next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _merged(kept: Any, inputs: Any) -> Any:
    """The inputs kept in the forward, and the new ones from trained modules."""
    if isinstance(inputs, tuple | list):
        return type(inputs)(_merged(old, new) for old, new in zip(kept, inputs, strict=True))
    if isinstance(inputs, dict):
        return {name: _merged(kept[name], new) for name, new in inputs.items()}
    return inputs if isinstance(inputs, Tensor) and kept is None else kept


def _put_back(layer: nn.Module, before: Any) -> None:
    if before is None:
        del layer.__dict__["forward"]
    else:
        layer.__dict__["forward"] = before
