"""After an out-of-memory: describe it, or continue with settings that use less.

In one process a step is done again where it stands, if it had not reached the optimizer: its gradients are dropped, the
random numbers are put back, and all its micro-batches run again. What the optimizer had begun cannot be taken back, and
ranks that wait for the failed one cannot be asked: then the run goes on from its last checkpoint, which may be the one
of step 0.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from seqtile._compat import restore_step_sums, step_sums
from seqtile._errors import RunError, UserError
from seqtile._log import first_rank_logger
from seqtile.devices import accelerator, empty_cache, is_out_of_memory
from seqtile.models.causal import causal_model
from seqtile.options import TilingOptions, offload_of
from seqtile.planner.chooser import TILE_STEP, changes, smaller_tiles, would_avoid
from seqtile.planner.step_config import Built, Setup
from seqtile.planner.tile_choice import largest_tile
from seqtile.train.fit import request_of, settings_of, updates_of
from seqtile.train.load import tile, tile_head
from seqtile.train.out_of_memory import Place, Whereabouts, device_memory, find_place, largest_tensors
from seqtile.train.ranks import launched_nodes
from seqtile.train.recipe import RECIPE_FILE, TRL_LOSS_TILE, Recipe, save_recipe
from seqtile.train.run_directory import newest_whole

if TYPE_CHECKING:
    from pathlib import Path

    from seqtile.install.report import Report

logger = first_rank_logger(__name__)

MOST_RETRIES = 8
"""Maximum per run; settings are exhausted earlier, unless sequences grow."""


class OutOfMemory(RunError):
    """A run that is out of memory.

    Attributes:
        retry: the next attempt, of :func:`next_retry`; None where no smaller setting is left or none was requested.
        done: what the run had gone on with before.
    """

    def __init__(self, message: str, retry: dict[str, Any] | None = None, done: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(message)
        self.retry, self.done = retry, list(done)


def next_retry(recipe: Recipe, location: Place, done: int) -> dict[str, Any] | None:
    """The next attempt: where it failed and the recipe keys that change; None where nothing smaller is left."""
    if recipe.on_oom != "retry" or not location.phase or done >= MOST_RETRIES:
        return None
    failed = current = _failed_settings(recipe, location)
    while (after := tighter(current, can_offload=accelerator() is not None)) is not None:
        keys = updates_of(after, recipe)
        now_set = recipe.model_dump()
        if any(now_set[key] != value for key, value in keys.items()):
            where = {name: getattr(location, name) for name in ("step", "phase", "block", "rank")}
            return {**where, "recipe": keys, "changed": changes(failed, after), "place": str(location)}
        current = after
    return None


def tighter(settings: TilingOptions, *, can_offload: bool) -> TilingOptions | None:
    """The next settings that use less memory, without a plan: smaller tiles, less kept, the host; None at the end."""
    smaller = replace(settings, **smaller_tiles(settings, TILE_STEP), keep=0.0)
    if smaller != settings:
        return smaller
    if settings.checkpoint != "layer":
        return replace(settings, checkpoint="layer")
    if not can_offload or settings.offload_room:
        return None
    return replace(settings, offload=offload_of(checkpoints=True, weights=settings.weights_on_host))


def _failed_settings(recipe: Recipe, location: Place) -> Any:
    """The numeric settings of the failed micro-batch."""
    tokens = location.tokens or recipe.max_length * recipe.batch_size
    settings = settings_of(recipe, location.tile or tokens)
    tile = min(settings.tile, tokens) if isinstance(settings.tile, int) else settings.tile
    return replace(settings, tile=tile, loss_tile=min(recipe.loss_tile or TRL_LOSS_TILE, tokens))


class StepWatch:
    """Watches the steps of one trainer: where they are, and how to do one again.

    Attributes:
        recipe: recipe with the current settings of the steps.
        tiling: what is tiled now.
    """

    def __init__(self, trainer: Any, recipe: Recipe, tiling: Report | None, output: Path) -> None:
        self.recipe, self.tiling = recipe, tiling
        self._trainer, self._output = trainer, output
        # A hook would break the graph of compiled layers.
        compiled = bool(getattr(trainer.args, "torch_compile", False))
        self._whereabouts = None if compiled else Whereabouts(causal_model(trainer.model))
        self._checkpoints = recipe.recomputes
        self._calls: list[Any] = []
        self._before: dict[str, Any] = {}

    @property
    def retries(self) -> list[dict[str, Any]]:
        """The retries of the run, in order; every checkpoint's mark has them."""
        return list(self._trainer.run.get("retries", []))

    @property
    def in_place(self) -> bool:
        """Whether a failed forward or backward can be done again here."""
        in_backward = "lomo" in str(self._trainer.args.optim)  # LOMO updates weights during backward
        return self.recipe.on_oom == "retry" and self.recipe.engine == "single" and not in_backward

    def run(self, call: Any, first: bool, step: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        """``[step(call)]``; or, with this optimizer step done again in smaller tiles, all its micro-batches' losses.

        Args:
            call: one micro-batch.
            first: whether it begins an optimizer step.
            step: forward and backward of a micro-batch.
        """
        if first:
            self._calls, self._before = [], _remember(self._trainer)
        self._calls.append(call)
        todo = [call]
        while True:
            try:
                return [step(micro_batch) for micro_batch in todo]
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                location = self.find(error)
                retry = next_retry(self.recipe, location, len(self.retries))
                if retry is None:
                    raise
            # The error is released here, and with it the failed step's tensors in its frames.
            self._go_on(retry)
            todo = self._calls

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._whereabouts is not None:
            self._whereabouts.close()

    def find(self, error: BaseException) -> Place:
        """Where ``error`` happened, with the batch that was running."""
        trainer = self._trainer
        location = find_place(error, trainer.model, self._whereabouts, trainer.state.global_step + 1)
        tokens = trainer.running_tokens
        rank = trainer.args.process_index if trainer.args.world_size > 1 else None
        return replace(location, tokens=tokens, tile=self._tile(tokens), rank=rank)

    def end(self, error: BaseException) -> OutOfMemory:
        """The error to raise in place of ``error``, with its description and the next attempt."""
        trainer, location = self._trainer, self.find(error)
        retry = next_retry(self.recipe, location, len(self.retries))
        memory = device_memory(trainer.model)
        tensors = largest_tensors(error, trainer.model, trainer.optimizer, self._whereabouts)
        live = ["largest live tensors:", *(f"  {line}" for line in tensors), *([memory] if memory else [])]
        error.__traceback__ = error.__context__ = error.__cause__ = (
            None  # their frames reference the failed step's tensors
        )
        release()
        if retry is not None:
            return OutOfMemory(describe_retry({**retry, "how": "from the last checkpoint"}), retry, self.retries)
        checkpoint, _ = newest_whole(self._output)
        return OutOfMemory(
            explain_out_of_memory(self.recipe, location, live, checkpoint, len(self.retries)), None, self.retries
        )

    def _tile(self, tokens: int) -> int | None:
        if self.tiling is None or not tokens:
            return None
        model = causal_model(self._trainer.model)
        weight = next(model.parameters())
        setup = Setup(dtype=weight.dtype, autocast=bool(self._trainer.args.bf16))
        return largest_tile(Built(model, self.tiling.blocks), setup, tokens, weight.device.type)

    def _go_on(self, retry: dict[str, Any]) -> None:
        trainer, retry = self._trainer, {**retry, "how": "in place"}
        trainer.model.zero_grad(set_to_none=True)
        release()
        self.recipe = self.recipe.changed(**retry["recipe"])
        switched_on = self.recipe.recomputes and not self._checkpoints
        self.tiling = tile(causal_model(trainer.model), self.recipe, checkpoint="layer" if switched_on else None)
        if self.recipe.loss_tile:
            tile_head(causal_model(trainer.model), self.recipe.loss_tile)
        trainer.run["retries"] = [*self.retries, retry]
        trainer.run["tiling"] = {key: self.recipe.model_dump(mode="json")[key] for key in trainer.run.get("tiling", {})}
        if trainer.args.should_save:
            save_recipe(self.recipe, self._output / RECIPE_FILE)
        _restore(trainer, self._before)
        logger.warning("%s", describe_retry(retry))


def describe_retry(retry: dict[str, Any]) -> str:
    """One sentence for the log."""
    return f"out of memory {retry['place']}: continuing {retry['how']} with {retry['changed']}"


def release() -> None:
    """Give the allocator back what the failed step held."""
    gc.collect()
    empty_cache()


def _remember(trainer: Any) -> dict[str, Any]:
    """State that a step changes before its optimizer: random numbers, and the trainer's sums."""
    import numpy

    device = torch.get_device_module().get_rng_state() if torch.accelerator.is_available() else None
    metrics, tokens = step_sums(trainer)
    return {
        "python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state(),
        "device": device, "metrics": metrics, "tokens": tokens,
    }  # fmt: skip


def _restore(trainer: Any, saved: dict[str, Any]) -> None:
    import numpy

    random.setstate(saved["python"])
    numpy.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["device"] is not None:
        torch.get_device_module().set_rng_state(saved["device"])
    restore_step_sums(trainer, saved["metrics"], saved["tokens"])


def explain_out_of_memory(
    recipe: Recipe, location: Place, live: list[str], checkpoint: Path | None, retried: int
) -> str:
    """Everything that is known of an out-of-memory that ends the run."""
    missing = f": could not allocate {location.asked / 2**30:,.2f} GiB" if location.asked else ""
    lines = [f"out of memory {location}{missing}", *live]
    if location.phase:
        lines += _by_plan(recipe, location)
    if recipe.on_oom == "retry" and location.phase:
        end = "; no smaller setting is left to try" if retried < MOST_RETRIES else ""
        lines.append(f"{retried} of at most {MOST_RETRIES} retries{end}")
    if checkpoint is None:
        lines.append("no checkpoint was saved yet")
    else:
        lines.append(f"the last complete checkpoint is {checkpoint}: continue from it with other settings and --resume")
    return "\n".join(lines)


def _by_plan(recipe: Recipe, location: Place) -> list[str]:
    """The plan of the recipe, and the setting that would have been enough."""
    tokens = -(-max(location.tokens, recipe.max_length * recipe.batch_size) // recipe.batch_size)
    try:
        request, settings = request_of(recipe, nodes=launched_nodes()), _failed_settings(recipe, location)
        estimate, avoided = would_avoid(request, settings, tokens, max(1, location.asked))
    except (UserError, RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        return [f"no plan is available: {(str(error).splitlines() or [type(error).__name__])[0]}"]
    device, gib = estimate.device, 2**30
    lines = [
        (
            f"planned for {tokens:,} tokens: {device.expected / gib:,.2f} GiB ({device.low / gib:,.2f} to "
            f"{device.high / gib:,.2f}) of {request.device.memory / gib:,.2f} GiB, peak in the {estimate.peak_at}"
        )
    ]
    if avoided is not None:
        by_itself = "; --on-oom retry continues by itself, with smaller tiles first" if recipe.on_oom == "stop" else ""
        lines.append(f"this would avoid it: {avoided}{by_itself}")
    else:
        lines.append(
            "no tile size, checkpointing or offload would be enough by the plan: use shorter sequences "
            "(--max-length), adapters (--lora 16) or more devices; seqtile plan shows what helps"
        )
    return lines
