"""Run the vision towers of a model in groups of frames or pictures."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from seqtile._errors import UserError
from seqtile._technique import Technique, TechniqueResult
from seqtile.tiling import GROUP_PATCHES
from seqtile.vision.tower import MethodInGroups, VisionTower, find_towers


class VisionTechnique(Technique):
    """``vision``: features of pictures, computed a group of frames or pictures at a time."""

    name = "vision"

    def check(self) -> None:
        """Refuse ``vision=N`` for a model that computes no features of pictures.

        Raises:
            UserError: the model has no vision tower.
        """
        group = self.options.vision
        if group != "auto" and not [*find_towers(self.model)]:
            raise UserError(
                "vision.no-tower", f"vision={group}: {type(self.model).__name__} has no vision tower; drop vision"
            )

    def install(self, inside: Collection[str]) -> TechniqueResult:
        """Replace the methods that compute features, and any earlier replacement."""
        self.remove(self.model)
        group, class_names = self.options.vision or "auto", list[str]()
        for name, module, language in find_towers(self.model):
            VisionTower(module, name, group, language).install()
            class_names.append(type(module).__name__)
        if not class_names:
            return TechniqueResult("no vision tower")
        size = f"about {GROUP_PATCHES:,} patches" if group == "auto" else f"{group:,} frames or pictures"
        names = ", ".join(class_names)
        return TechniqueResult(f"vision tower of {names} in groups of {size}, verified at its first call")

    @classmethod
    def installed(cls, model: nn.Module) -> list[VisionTower]:
        """The towers of a model whose methods are replaced."""
        values = [value for module in model.modules() for value in module.__dict__.values()]
        return [*dict.fromkeys(value.tower for value in values if isinstance(value, MethodInGroups))]

    @classmethod
    def notes(cls, model: nn.Module) -> list[str]:
        """A sentence per tower that has run in groups so far."""
        return [tower.effect for tower in cls.installed(model) if tower.effect]
