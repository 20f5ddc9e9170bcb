"""Write the README of a trained model."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._sentences import counted
from seqtile.devices import package_version
from seqtile.train.recipe import DEMO, Recipe
from seqtile.train.resume import PACKAGES
from seqtile.train.trainer_fields import best_metric

if TYPE_CHECKING:
    from seqtile.train.data_summary import DataSummary

TEMPLATE = Path(__file__).with_suffix(".md")


def write_card(folder: Path, recipe: Recipe, state: Any, data: Mapping[str, DataSummary], tiling: str) -> None:
    """Write ``README.md`` into ``folder`` through huggingface_hub's cards.

    Args:
        folder: of the model.
        recipe: that trained it.
        state: the trainer's, after its last step.
        data: what it was trained and evaluated on.
        tiling: description of what was tiled.
    """
    from huggingface_hub import ModelCard, ModelCardData

    on_hub = {name: name != DEMO and not Path(name).expanduser().exists() for name in (recipe.model, recipe.dataset)}
    # Adapters need their base model, so its directory is written too; the Hub rejects a card with a path.
    has_base = on_hub[recipe.model] or (
        recipe.lora is not None and recipe.model != DEMO and not recipe.trainer.get("push_to_hub")
    )
    card = ModelCard.from_template(
        ModelCardData(
            library_name="transformers" if recipe.lora is None else "peft",
            base_model=recipe.model if has_base else None,
            datasets=recipe.dataset if on_hub[recipe.dataset] else None,
            pipeline_tag="text-generation",
            tags=["trl", "sft", "seqtile"],
        ),
        template_path=str(TEMPLATE),
        model_name=folder.name,
        kind="Weights of" if recipe.lora is None else f"LoRA adapters of rank {recipe.lora.r} for",
        base=_link(recipe.model, "", on_hub),
        dataset=_link(recipe.dataset, "datasets/", on_hub),
        data=data,
        steps=counted(state.global_step, "optimizer step"),
        rows=counted(
            recipe.batch_size * recipe.gradient_accumulation * (recipe.nproc or 1) // recipe.split, "sequence"
        ),
        max_length=recipe.max_length,
        learning_rate=recipe.learning_rate,
        seed=recipe.seed,
        engine=recipe.engine if recipe.engine == "single" else f"{recipe.engine}, {recipe.nproc} processes",
        tiling=tiling,
        loss=next((f"{log['loss']:.4f}" for log in reversed(state.log_history) if "loss" in log), None),
        best=None if state.best_metric is None else (state.best_global_step, f"{state.best_metric:.4f}"),
        best_metric=best_metric(recipe).replace("_", " "),
        versions={
            **{name: version for name in ("seqtile", *PACKAGES, "datasets") if (version := package_version(name))},
            "python": platform.python_version(),
        },
    )
    card.save(folder / "README.md")


def _link(name: str, folder: str, on_hub: Mapping[str, bool]) -> str:
    if name == DEMO:
        return "the embedded demo"
    return f"[{name}](https://huggingface.co/{folder}{name})" if on_hub[name] else f"`{name}`"
