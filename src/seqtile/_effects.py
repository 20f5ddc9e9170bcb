"""Find the models that an option acts on, and check that it had an effect in their first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from seqtile._compat import SET_CHECKPOINTING, active_fake_mode, tree_iter
from seqtile._log import first_rank_logger
from seqtile._stand_in import StandIn

logger = first_rank_logger(__name__)

Named = list[tuple[str, nn.Module]]
"""Modules with their qualified names."""


def outermost(model: nn.Module, matches: Callable[[Any], bool]) -> Named:
    """(name, module) of the modules in ``model`` that match, without those inside another that does."""
    outer: Named = []
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside and matches(module):
            outer.append((name, module))
            inside.update(module.modules())
    return outer


def find_checkpointed(model: nn.Module) -> Named:
    """(name, module) of the outermost models in ``model`` whose own class switches activation checkpointing on.

    Read from the class: wrappers such as PEFT's or ``torch.compile``'s hand any attribute on to the model inside,
    so an instance of theirs has the method too, but what is set on the wrapper reaches no layer.
    """

    def checkpoints(module: nn.Module) -> bool:
        model_class = type(module)
        return callable(getattr(model_class, SET_CHECKPOINTING, None)) and getattr(
            model_class, "supports_gradient_checkpointing", False
        )

    return outermost(model, checkpoints)


def split_frozen(models: Named) -> tuple[Named, Named]:
    """(models that an option acts on, frozen ones that it leaves): all of them where none has a weight that trains.

    A frozen model beside one that trains is a teacher or a reference: activation checkpoints would make it record a
    graph. A model alone may be frozen since its adapters come later.
    """
    frozen = [named for named in models if not any(weight.requires_grad for weight in named[1].parameters())]
    if len(frozen) == len(models):
        return models, []
    return [named for named in models if named not in frozen], frozen


def which(chosen: Named, frozen: Named) -> str:
    """For the report: which of several models an option acts on; "" where there is one."""
    if len(chosen) + len(frozen) == 1:
        return ""
    left = f"; {', '.join(name for name, _ in frozen)} not changed, its weights are frozen" if frozen else ""
    return f" (in {', '.join(name for name, _ in chosen)}{left})"


def backbone_of(module: nn.Module) -> nn.Module:
    """The part of a model whose forward runs whatever stands over the model's own."""
    backbone: nn.Module = getattr(module, "base_model", module)
    return backbone


class Watched(StandIn):
    """Stands in on a whole model, and warns after its first training forward of each option that had no effect.

    It watches through a forward hook on the model's backbone, since a trainer may replace the model's own forward. The
    hook comes off after that forward.
    """

    looks_while_compiling = False
    """Whether effects are known once torch.compile has traced the forward, which then runs no hook."""

    paused: ClassVar[bool] = False
    """Whether forwards are those of a verification now, and no training step's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.idle: list[str] = []
        """What did nothing in the first training forward, and why."""

    def watch(self) -> None:
        self._hook = backbone_of(self.module).register_forward_hook(self._look)

    def unwatch(self) -> None:
        self._hook.remove()

    def without_effect(self) -> list[str]:
        """A sentence for each option that did nothing in the forward that has just ended, with the reason."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """Describe the effects of the steps so far."""
        raise NotImplementedError

    def _look(self, backbone: nn.Module, args: Any, output: Any) -> None:
        if Watched.paused or not (backbone.training and torch.is_grad_enabled()):
            return
        if torch.compiler.is_compiling():
            if self.looks_while_compiling:
                self._look_outside_the_graph()
            return
        if active_fake_mode() is not None:  # a plan's step
            return
        if backbone is not backbone_of(self.module):  # a copy of it, with the copied hook
            return
        if any(isinstance(value, Tensor) and value.requires_grad for value in tree_iter(output)):
            self.unwatch()
            self._warn_of_idle()

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _look_outside_the_graph(self) -> bool:
        self._warn_of_idle()
        return True

    def _warn_of_idle(self) -> None:
        self.idle = self.without_effect()
        for sentence in self.idle:
            self.warn(sentence)

    @staticmethod
    @contextmanager
    def pause() -> Iterator[None]:
        """Inside, a forward is no training step."""
        Watched.paused = True
        try:
            yield
        finally:
            Watched.paused = False

    def warnings(self) -> list[str]:
        """The warnings that were logged, as far as they still hold."""
        still = self.without_effect() if self.idle else []
        return sorted(self.told - {*self.idle}) + still

    def warn(self, text: str) -> None:
        """Log ``text`` as a warning, once."""
        if self.is_news(text):
            logger.warning(text)
