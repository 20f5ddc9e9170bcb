"""The worker of ``seqtile train --engine``, which then continues its run in the same processes, as a launch costs more.

Beside the result it writes what the engine made of the model, seen from outside of seqtile.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from seqtile.cli import worker


def held(model: Any) -> float:
    """The part of all weights that this process keeps between two steps."""
    mine = total = 0
    for p in model.parameters():
        total += getattr(p, "ds_numel", p.numel())
        kept = getattr(p, "ds_tensor", None)
        mine += p.to_local().numel() if hasattr(p, "to_local") else p.numel() if kept is None else kept.numel()
    return mine / total


def train_and_continue(folder: Path) -> None:
    import torch.distributed as dist
    from accelerate.state import AcceleratorState

    from seqtile.cli.train_command import quiet, run
    from seqtile.train import arguments, callbacks, ranks
    from seqtile.train.recipe import RECIPE_FILE, build_recipe, read_recipe

    def stingy(*words: Any, **named: Any) -> Any:
        """The trainer's arguments, with which ZeRO-3 keeps no weight that nobody runs: not even a small one."""
        made = chosen(*words, **named)
        if made.deepspeed_plugin is not None and made.deepspeed_plugin.zero_stage == 3:
            from grid.zero3 import STINGY

            made.deepspeed_plugin.deepspeed_config["zero_optimization"].update(
                {key: value for key, value in STINGY.items() if key != "stage"}
            )
        return made

    chosen, arguments.trainer_arguments = arguments.trainer_arguments, stingy
    seen: list[dict[str, Any]] = []
    began = callbacks.CheckModel.on_train_begin

    def look(self: Any, args: Any, state: Any, control: Any, **words: Any) -> None:
        began(self, args, state, control, **words)
        wrapped = self._trainer.model_wrapped
        seen.append(
            {
                "type": AcceleratorState().distributed_type.value,
                "world": dist.get_world_size(),
                "held": held(wrapped),
                "stage": getattr(wrapped, "zero_optimization_stage", lambda: None)(),
                "step": state.global_step,
            }
        )

    callbacks.CheckModel.on_train_begin = look  # type: ignore[method-assign]
    recipe, _ = build_recipe(read_recipe(folder / RECIPE_FILE), {})
    quiet()
    run(recipe, resume=False, resume_from=None, overwrite=False)
    longer = recipe.model_copy(update={"steps": int(recipe.steps or 0) + 1})
    run(longer, resume=True, resume_from=None, overwrite=False)
    ranks.leave()
    Path(str(recipe.output), f"seen-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    worker._train = train_and_continue
    sys.exit(worker.main(Path(sys.argv[1])))
