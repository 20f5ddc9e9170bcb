"""The interface of the techniques of :func:`seqtile.apply`.

A technique is a module or a folder with one class derived from :class:`Technique`, and one line in
:mod:`seqtile.install.techniques`. It is imported at its first use.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from seqtile.options import TilingOptions


@dataclass(frozen=True)
class Left:
    """A module that was left alone.

    Attributes:
        name: qualified name.
        class_name: its class.
        why: one sentence.
        unproven: whether it could not be proven (``trust=`` may name it), rather than refuted.
        custom: whether it is unproven because it is custom code.
    """

    name: str
    class_name: str
    why: str
    unproven: bool = False
    custom: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.class_name})" if self.name else self.class_name


@dataclass(frozen=True)
class TechniqueResult:
    """What one technique did in one call of :func:`seqtile.apply`.

    Attributes:
        what: a phrase for the report, or "".
        left: the modules that it left unchanged, with reasons.
    """

    what: str = ""
    left: Sequence[Left] = ()


class Technique:
    """The use of one technique by one call of :func:`seqtile.apply`.

    Args:
        model: the model to change.
        options: the options of this call, with the settings of an earlier call where those stay.
    """

    name: ClassVar[str]
    """Its key in :attr:`seqtile.Report.done`."""

    on_forwards: ClassVar[bool] = False
    """Whether it replaces the forwards of blocks and layers, over those of the techniques before it. It is then
    installed again where one of those is."""

    def __init__(self, model: nn.Module, options: TilingOptions) -> None:
        self.model, self.options = model, options
        self.inside: Collection[str] = ()
        """Qualified names of the modules that run inside an operator of its own; known after :meth:`check`."""

    def check(self) -> None:
        """Find what to change.

        Raises:
            UserError: the model does not support the technique.
        """

    def install(self, inside: Collection[str]) -> TechniqueResult:
        """Change the model.

        Args:
            inside: names of the modules that run inside an operator of some technique.
        """
        raise NotImplementedError

    @classmethod
    def installed(cls, model: nn.Module) -> Sequence[Any]:
        """The objects that it has installed on ``model``, each with ``remove()``, the outer one first."""
        raise NotImplementedError

    @classmethod
    def remove(cls, model: nn.Module) -> None:
        """Remove all that it has installed."""
        for change in cls.installed(model):
            change.remove()

    @classmethod
    def with_earlier_settings(cls, model: nn.Module, options: TilingOptions) -> TilingOptions:
        """``options``, with the technique's settings of an earlier call where they give none."""
        return options

    @classmethod
    def notes(cls, model: nn.Module) -> list[str]:
        """Sentences for the report on its objects on ``model``, in their present state."""
        return []

    @classmethod
    def without_effect(cls, forwards: Sequence[Any]) -> list[str]:
        """A sentence for each of its options that had no effect in a training forward that has just ended.

        Asked only of a technique that replaces forwards; the others warn by themselves.

        Args:
            forwards: those that it replaced.
        """
        return []
