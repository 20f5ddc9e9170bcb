"""Run the vision towers of a model in groups of frames or pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from seqtile._errors import UserError
from seqtile.tiling import GROUP_PATCHES
from seqtile.vision.tower import VisionTower, find_towers


@dataclass(frozen=True)
class TowerChange:
    """One module whose features are computed in groups.

    Attributes:
        where: qualified name of the module.
        what: what was done to it.
        why: why it was left as it is, or "".
        tower: what stands in for its methods.
    """

    where: str
    what: str
    why: str
    tower: VisionTower

    def remove(self) -> None:
        """Put its methods back."""
        self.tower.remove()

    def effect(self) -> str | None:
        """What it did in the steps so far; None where it did nothing."""
        tower = self.tower
        return f"{tower.units} in up to {tower.groups:,} groups" if tower.groups > 1 else None


class Vision:
    """The technique: features of pictures, computed a group of frames or pictures at a time."""

    @staticmethod
    def wants(options: Any) -> bool:
        """Whether it is asked for."""
        return options.vision is not None

    @staticmethod
    def check(model: nn.Module, options: Any) -> None:
        """Refuse before anything is changed.

        Raises:
            UserError: a number of frames was asked for, and the model computes no features of pictures.
        """
        if options.vision != "auto" and not [*find_towers(model)]:
            raise UserError(f"vision={options.vision}: {type(model).__name__} has no vision tower; drop vision")

    @staticmethod
    def install(model: nn.Module, options: Any) -> list[TowerChange]:
        """Replace the methods that compute features; those that an earlier call replaced are replaced again."""
        remove_vision(model)
        changes = []
        size = f"{options.vision:,}" if options.vision != "auto" else f"about {GROUP_PATCHES:,} patches:"
        for name, module, language in find_towers(model):
            tower = VisionTower(module, name, options.vision, language)
            tower.install()
            what = f"features in groups of {size} frames or pictures, verified at their first call"
            changes.append(TowerChange(name, what, "", tower))
        return changes


def installed_towers(model: nn.Module) -> list[VisionTower]:
    """What stands in for methods of ``model``."""
    found = (getattr(value, "tower", None) for module in model.modules() for value in module.__dict__.values())
    return [*dict.fromkeys(tower for tower in found if isinstance(tower, VisionTower))]


def remove_vision(model: nn.Module) -> None:
    """Put all methods back."""
    for tower in installed_towers(model):
        tower.remove()
