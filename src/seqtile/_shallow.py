"""Shallow copies of modules without finalizers."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def view_of(module: nn.Module) -> Any:
    """A shallow copy with its class's forward, which shares weights, children and settings with the module.

    It runs no destructor, which would act on what the copy shares: PEFT's OSF layer takes the hooks off its weights.
    """
    module_class: Any = type(module)
    view = object.__new__(_without_destructor(module_class))
    view.__dict__.update(module.__dict__)
    view.__dict__.pop("forward", None)
    return view


@cache
def _without_destructor(cls: Any) -> Any:
    if not hasattr(cls, "__del__"):
        return cls
    members = {"__del__": lambda self: None, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), members)
