"""The weights of a module by name, and a call with others in their place, also while FSDP1 hides them.

While a unit of FSDP1 runs, each of its weights is a view of one flat parameter and stands in the instance's
``__dict__``. Without ``use_orig_params`` it is named nowhere else. With it, ``named_parameters`` names it in the
forward and not in the backward, and the attribute hides the entry that ``functional_call`` replaces. A weight that is
not named or not replaced would lose its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from seqtile._compat import base_of, is_flat_parameter, is_view, parameters_of


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """``module.named_parameters()``, and the views that stand for a parameter that is none at the moment.

    Cost:
        One look at the attributes of each module below.
    """
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        own = parameters_of(part)
        for name, value in vars(part).items():
            if name not in own and is_flat_view(value):
                yield f"{prefix}.{name}".lstrip("."), value


def call_with_weights(module: nn.Module, weights: Mapping[str, Tensor], arguments: tuple[Any, ...]) -> Any:
    """``torch.func.functional_call``, which also replaces weights that are attributes of the instance.

    A module that several names lead to is visited once. ``functional_call`` would visit it once per name and put its
    own stand-in back as what it had found: the parameter would be gone (seen in torch 2.13).
    """
    with _attributes(module, weights):
        return functional_call(module, _in_every_place(module, weights), arguments, tie_weights=False)


def _in_every_place(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights``, and each again where another module holds the same parameter."""
    places = {
        f"{prefix}.{name}".lstrip("."): weight
        for prefix, part in module.named_modules()
        for name, weight in parameters_of(part).items()
        if weight is not None
    }
    replaced = {places[name]: weight for name, weight in weights.items() if name in places}
    return {**weights, **{name: replaced[weight] for name, weight in places.items() if weight in replaced}}


def is_flat_view(value: Any) -> bool:
    """Whether an attribute stands for a parameter while a unit of FSDP1 runs."""
    return isinstance(value, Tensor) and is_view(value) and is_flat_parameter(base_of(value))


@contextmanager
def _attributes(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Attributes that hide a parameter, or stand for one, are ``weights`` inside the block."""
    hidden: list[tuple[dict[str, Any], str, Tensor]] = []
    try:
        for path, weight in weights.items():
            prefix, _, name = path.rpartition(".")
            attributes = module.get_submodule(prefix).__dict__
            if name in attributes:
                hidden.append((attributes, name, attributes[name]))
                attributes[name] = weight
        yield
    finally:
        for attributes, name, value in hidden:
            attributes[name] = value
