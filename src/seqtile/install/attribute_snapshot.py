"""Snapshots of the attributes and hooks of a model's modules, and of our replacements, to undo later changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from seqtile._compat import HOOK_CONTAINERS
from seqtile._stand_in import StandIn

_ABSENT = object()


class AttributeSnapshot:
    """The attributes and hooks of a model's modules as they are now; no tensor is copied."""

    def __init__(self, model: nn.Module) -> None:
        self._namespaces = [(namespace, dict(namespace)) for namespace in _namespaces_of(model)]

    def changed(self) -> AttributeChanges:
        """The changes since the snapshot."""
        return AttributeChanges(
            [
                (now, before, {name: value for name, value in before.items() if now.get(name, _ABSENT) is not value},
                 now.keys() - before.keys())
                for now, before in self._namespaces
            ]
        )  # fmt: skip


class AttributeChanges:
    """Changes of attributes and hooks between two moments; :meth:`undo` keeps changes that were made later."""

    def __init__(self, changes: list[tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any], set[Any]]]) -> None:
        self._changes = [change for change in changes if change[2] or change[3]]

    def undo(self) -> None:
        """Restore the former attributes and hooks, hooks in their former order."""
        for now, before, values, added in self._changes:
            entries = {name: value for name, value in now.items() if name not in added} | values
            now.clear()
            now.update({name: entries[name] for name in before if name in entries} | entries)


def _namespaces_of(model: nn.Module) -> Iterator[dict[Any, Any]]:
    for module in model.modules():
        attributes = module.__dict__
        yield attributes
        yield from (attributes[name] for name in HOOK_CONTAINERS)
        for value in attributes.values():
            while isinstance(value, StandIn):
                yield value.__dict__
                yield value.before
                value = value.before.get("forward")
