"""Shallow copies of modules, whose end is no event."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


def bare_instance(module: nn.Module) -> Any:
    """An instance of the module's class without state, to be given the module's own attributes; runs no destructor.

    A destructor acts on what the copy shares: PEFT's OSF layer takes the hooks off its weights when it goes.
    """
    kind: Any = type(module)
    return object.__new__(_without_destructor(kind))


@cache
def _without_destructor(kind: type) -> type:
    if not hasattr(kind, "__del__"):
        return kind
    members = {"__del__": lambda self: None, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), members)
