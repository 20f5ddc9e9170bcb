"""Read a module's weights by name, and call it with other weights, also while FSDP1 hides them.

While a unit of FSDP1 runs, each of its weights is a view of one flat parameter, stored in the instance's
``__dict__``. Without ``use_orig_params`` it is named nowhere else. With it, ``named_parameters`` names it in the
forward and not in the backward, and the attribute hides the entry that ``functional_call`` replaces. A weight that is
not named or not replaced would lose its gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from seqtile._compat import PARAMETERS, base_of, children_of, is_flat_parameter, is_view

_calls = threading.local()
"""``hidden``: (id of the instance's ``__dict__``, attribute name) of the weights that calls of this thread replaced."""


def named_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """``module.named_parameters()``, and tensors that now replace a parameter: FSDP1's views, and weights of a call.

    Cost:
        One look at the attributes of each module below.
    """
    weights: list[tuple[str, Tensor]] = [*module.named_parameters()]
    in_a_call = getattr(_calls, "hidden", ())
    for prefix, submodule in module.named_modules():
        for name, value in submodule.__dict__.items():
            if not isinstance(value, Tensor) or name in submodule.__dict__[PARAMETERS]:
                continue
            if is_flat_view(value) or (id(submodule.__dict__), name) in in_a_call:
                weights.append((f"{prefix}.{name}".lstrip("."), value))
    return weights


def call_with_weights(module: nn.Module, weights: Mapping[str, Tensor], arguments: tuple[Any, ...]) -> Any:
    """``torch.func.functional_call``, which also replaces weights that are attributes of the instance.

    A module with several names is visited once. ``functional_call`` would visit it once per name, and restore its own
    replacement instead of the parameter, which would be lost. Seen in torch 2.13:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/utils/stateless.py
    """
    hidden: list[tuple[dict[str, Any], str, Tensor]] = []  # attributes that hide or replace a parameter
    around: frozenset[tuple[int, str]] = getattr(_calls, "hidden", frozenset())
    try:
        for path, weight in weights.items():
            prefix, _, name = path.rpartition(".")
            attributes = module.get_submodule(prefix).__dict__
            if name in attributes:
                hidden.append((attributes, name, attributes[name]))
                attributes[name] = weight
        if hidden:
            _calls.hidden = around | {(id(attributes), name) for attributes, name, _ in hidden}
        return functional_call(module, _under_every_name(module, weights), arguments, tie_weights=False)
    finally:
        _calls.hidden = around
        for attributes, name, value in hidden:
            attributes[name] = value


class ParameterSwap(nn.Module):
    """Modules below a parent of their own, so that :func:`call_with_weights` replaces weights and runs no hook.

    A weight's name begins with the number of its module, ``"0.weight"``. The parent is called with a function and its
    arguments.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        children_of(self).update({str(number): module for number, module in enumerate(modules)})

    def __call__(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run no hook on every module either: PyTorch's FLOP counter fails in an operator's own forward."""
        return call(*arguments)


def _under_every_name(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights``, with each also under the parameter's other names."""
    by_name = dict(weights)
    parameters: dict[str, nn.Parameter] = {}
    replaced: dict[nn.Parameter, Tensor] = {}
    for prefix, submodule in module.named_modules():
        for name, parameter in submodule.__dict__[PARAMETERS].items():
            if parameter is not None:
                path = f"{prefix}.{name}".lstrip(".")
                parameters[path] = parameter
                if path in weights:
                    replaced[parameter] = weights[path]
    if len(parameters) > len(replaced):  # else each has one name
        for path, parameter in parameters.items():
            if parameter in replaced:
                by_name[path] = replaced[parameter]
    return by_name


def is_flat_view(value: Any) -> bool:
    """Whether an attribute replaces a parameter while a unit of FSDP1 runs."""
    return isinstance(value, Tensor) and is_view(value) and is_flat_parameter(base_of(value))
