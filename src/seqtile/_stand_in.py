"""Replace a method on one instance, and restore it.

They live in the instance's ``__dict__``: the class is untouched, no parameter is renamed, nothing enters
``state_dict``. They refer to their module weakly and find it again after ``copy.deepcopy`` and pickling.
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch import nn

from seqtile._compat import CALL_CODE, REPLICATE


class StandIn:
    """Base of them all: the module, what stood in the changed attributes before, and what was said already."""

    changed: ClassVar[tuple[str, ...]] = ()
    """Attributes of the instance that are replaced."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.before: dict[str, Any] = {name: module.__dict__[name] for name in self.changed if name in module.__dict__}
        self.told: set[str] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        """Itself where only a part of the module is copied, such as a layer with its model's checkpoint function."""
        module = self._module()
        if module is None or id(module) not in memo:
            return self
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._module = weakref.ref(state["_module"])

    @property
    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise RuntimeError(_COPIED)
        return module

    def refuse_copies(self) -> Any:
        """The module; raises where a shallow copy of it calls: ``copy.copy`` copies the attribute as it is."""
        module = self._module()
        frame: types.FrameType | None = sys._getframe(1)
        for _ in range(_FRAMES):
            if frame is None:
                break
            if frame.f_code is CALL_CODE:
                caller = frame.f_locals["self"]
                if caller is not module and caller.__dict__.get("forward") is self:
                    raise RuntimeError(_COPIED)
                break
            frame = frame.f_back
        return module

    def is_news(self, text: str) -> bool:
        """Whether ``text`` was not said before; from now on it was."""
        news = text not in self.told
        self.told.add(text)
        return news


_COPIED = (
    "this module is a shallow copy (copy.copy) of a tiled one and would read the original's weights; use "
    "copy.deepcopy, or call seqtile.undo on the original, copy it, and call seqtile.apply on both"
)
_FRAMES = 8
"""Between a call of a module and the call of its forward's replacement."""


class ForwardStandIn(StandIn):
    """Base class of replacements of ``forward``."""

    changed: ClassVar[tuple[str, ...]] = ("forward", "extra_repr", REPLICATE)

    def install(self) -> None:
        self.module.__dict__.update({"forward": self, "extra_repr": _Note(self), REPLICATE: refuse_replicas})

    def take_out(self) -> None:
        """Put back what the instance had before, also where another replacement was put over this one since."""
        attributes = self.module.__dict__
        above = attributes.get("forward")
        while isinstance(above, ForwardStandIn) and above is not self and above.before.get("forward") is not self:
            above = above.before.get("forward")
        if isinstance(above, ForwardStandIn) and above is not self:
            attributes = above.before
        for name in self.changed:
            attributes.pop(name, None)
        attributes.update(self.before)

    @property
    def original(self) -> Callable[..., Any]:
        """The forward that the instance had: its own if one was set before, else its class's.

        A bound method would do, but ``torch.compile`` writes one down as ``module.forward``, which is ours.
        """
        module = self._module() or self.module  # the property raises
        return self.before.get("forward") or partial(type(module).forward, module)

    def note(self) -> str:
        """Representation for ``print(model)``."""
        return ""


def attributes_without_stand_ins(module: nn.Module) -> dict[str, Any]:
    """The attributes of an instance without its forward's replacement."""
    attributes = dict(module.__dict__)
    while isinstance(stand_in := attributes.get("forward"), ForwardStandIn):
        for name in stand_in.changed:
            attributes.pop(name, None)
        attributes |= stand_in.before
    return attributes


class _Note:
    """``extra_repr`` of a changed instance."""

    def __init__(self, installed: ForwardStandIn) -> None:
        self.installed = installed

    def __call__(self) -> str:
        module = self.installed.module
        original = self.installed.before.get("extra_repr") or type(module).extra_repr.__get__(module)
        return ", ".join(text for text in (original(), self.installed.note()) if text)


def refuse_replicas() -> nn.Module:
    """``nn.DataParallel`` copies a module's attributes, and the copies would run the original's weights."""
    raise NotImplementedError(
        "nn.DataParallel does not support tiled models; start one process per device with torchrun or accelerate "
        "launch, or make one device visible"
    )
