"""Run a recipe: check everything, train with TRL's ``SFTTrainer``, save."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqtile._errors import RunError, UserError, in_its_words, is_ours
from seqtile._log import first_rank_logger
from seqtile._sentences import counted
from seqtile.devices import accelerator, is_out_of_memory
from seqtile.train.recipe import DEMO_STEPS, RECIPE_FILE, Recipe, resolve, save_recipe

if TYPE_CHECKING:
    from filelock import BaseFileLock
    from transformers import TrainerCallback

    from seqtile.install.report import Report
    from seqtile.train.callbacks import Clock, StopOnSignal
    from seqtile.train.metrics import Display
    from seqtile.train.read_data import Data
    from seqtile.train.result_report import Outcome

logger = first_rank_logger(__name__)


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    display: Display | None = None,
    retries: Sequence[dict[str, Any]] = (),
    **how: Any,
) -> Outcome:
    """Train a recipe's model and save it.

    Nothing is written before every check has passed. Ctrl-C, SIGTERM and SIGHUP save a checkpoint after
    the running step.

    Args:
        recipe: the run's settings.
        resume: continue the run in ``recipe.output`` from its newest whole checkpoint, to the losses that it would
            have had without the interruption; from the first step if nothing of it was saved.
        overwrite: replace an earlier run in ``recipe.output``.
        callbacks: the trainer's, beside the run's own.
        display: shows the current stage, and the steps.
        retries: the settings that the launching command changed after each earlier out-of-memory.
        **how: arguments by which :func:`locate` finds the checkpoint.

    Raises:
        UserError: bad input, in one sentence.
        RunError: the loss or the gradient stopped being a number, a step is out of memory, or a disk takes no more.
    """
    from seqtile.engines.build_locks import check_build_locks
    from seqtile.train.ranks import is_first, join_launch

    require_packages()
    recipe = resolve(join_launch(recipe))
    if recipe.engine.startswith("zero") and is_first():
        check_build_locks()
    recipe, start = locate(recipe, resume=resume, overwrite=overwrite, **how)
    recipe = fitted(recipe, start, logger.info)
    return _train_with_retries(recipe, start, resume, overwrite, callbacks, retries, display)


def fitted(recipe: Recipe, start: Path | None, tell: Callable[[str], None], nodes: int = 1) -> Recipe:
    """``recipe`` with the settings that the planner chooses; a resumed run keeps its settings.

    ``fit=None`` chooses settings on accelerators, except for the demo, which compares one setting tiled and untiled,
    and keeps the recipe if planning fails.

    Raises:
        UserError: with ``fit=True``, the planner does not support a setting.
        RunError: with ``fit=True``, no setting fits.
    """
    if recipe.fit is False or (recipe.fit is None and (recipe.is_demo or accelerator() is None)):
        return recipe
    if start is not None:
        return recipe.model_copy(update={"fit": False})
    from seqtile.train.fit import fit_recipe

    try:
        choice = fit_recipe(recipe, nodes)
    except Exception as error:
        if recipe.fit is not None:  # else no plan was requested: a model that cannot be planned trains all the same
            raise
        tell(f"fit: settings are unchanged: {error}")
        return recipe.model_copy(update={"fit": False})
    for line in choice.why:
        tell(line)
    return choice.recipe


def _train_with_retries(
    recipe: Recipe, start: Path | None, resume: bool, overwrite: bool, callbacks: Sequence[TrainerCallback],
    retries: Sequence[dict[str, Any]], display: Display | None,
) -> Outcome:  # fmt: skip
    """Train; after an out-of-memory, continue from the newest checkpoint with settings that need less memory."""
    from filelock import FileLock

    from seqtile.train.retry import OutOfMemory, describe_retry, release
    from seqtile.train.run_directory import LOCK, newest_whole

    output = Path(str(recipe.output))
    lock = FileLock(output / LOCK)
    try:
        while True:
            try:
                with _reporting_disk_errors(output):
                    return _attempt(recipe, start, resume, overwrite, callbacks, retries, display, lock)
            except OutOfMemory as error:
                if error.retry is None or recipe.engine != "single":
                    raise
                retry, earlier_retries = error.retry, error.done
            # The error is released here, and with it the model and the trainer in its frames.
            release()
            start, _ = newest_whole(output)
            if start is None:
                raise RunError(f"out of memory, and no complete checkpoint in {output} to resume from")
            recipe, overwrite = recipe.changed(**retry["recipe"]), False
            retries = [*earlier_retries, {**retry, "how": f"from {start.name}"}]
            logger.warning("%s", describe_retry(retries[-1]))
    finally:
        with suppress(OSError):  # another error would hide how the run ended
            lock.release(force=True)


@contextmanager
def _reporting_disk_errors(output: Path) -> Iterator[None]:
    """Raise an error that the disk caused as one sentence that names the disk and the last checkpoint."""
    from torch.distributed.checkpoint.api import CheckpointException  # of sharded checkpoints, and no Exception

    from seqtile.train.retry import OutOfMemory
    from seqtile.train.run_directory import disk_error

    try:
        yield
    except (OutOfMemory, UserError):
        raise
    except (Exception, CheckpointException) as error:
        reported = disk_error(error, output)
        if reported is None:
            raise
        raise reported from None


def _attempt(
    recipe: Recipe, start: Path | None, resume: bool, overwrite: bool, callbacks: Sequence[TrainerCallback],
    retries: Sequence[dict[str, Any]], display: Display | None, lock: BaseFileLock,
) -> Outcome:  # fmt: skip
    """Train once, from ``start`` or from the first step."""
    from seqtile.train.metrics import Silent
    from seqtile.train.resume import check_same_run, describe_run
    from seqtile.train.retry import OutOfMemory
    from seqtile.train.run_directory import check_output, clear_output, nothing_saved, read_mark, take_lock

    output = Path(str(recipe.output))
    display = display or Silent()
    try:
        trainer, tiling = _build(recipe, output, start, display)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory while loading the model: {str(error).splitlines()[0]}") from None
    trainer.run = describe_run(recipe, trainer)
    mark = read_mark(start) if start is not None and not retries else None
    trainer.run["retries"] = list(retries) if mark is None else mark.run.get("retries", [])
    if start is not None:
        logger.info("resuming from %s", start)
        if recipe.trainer.get("save_only_model"):
            logger.warning("it has the model only (trainer.save_only_model): optimizer and schedule start anew")
        for note in check_same_run(trainer.run, start, recipe, trainer, tiling):
            logger.warning(note)
        trainer.all_done = _all_done(trainer, start, output)
    elif resume:
        logger.warning("no checkpoint was saved in %s; starting from the first step", output)
    if trainer.args.should_save:
        output.mkdir(parents=True, exist_ok=True)
        take_lock(lock)
        # A short run may have started and ended since the first check.
        if start is None and not resume:
            check_output(recipe, output, overwrite=overwrite)
        elif start is None and not nothing_saved(output):
            raise UserError(
                "output.written-meanwhile",
                f"another run has written to output {str(output)!r} in the meantime; use --resume again",
            )
        if overwrite:
            clear_output(output)
        save_recipe(recipe, output / RECIPE_FILE)
    return _train_and_save(recipe, output, trainer, tiling, start, callbacks, display)


def locate(
    recipe: Recipe,
    *,
    resume: bool,
    overwrite: bool,
    resume_from: str | None = None,
    trust_checkpoint: bool = False,
    checked: bool = False,
) -> tuple[Recipe, Path | None]:
    """``recipe`` with the directory of its result, and the checkpoint to continue from; writes nothing.

    Of several processes only the first one tries the directory, or each would find what the others leave there.

    Args:
        recipe: the run's settings.
        resume: continue the run in ``recipe.output``.
        overwrite: replace an earlier run there.
        resume_from: name of another checkpoint than the newest, marked whole or not; needs ``resume``.
        trust_checkpoint: let the checkpoint's pickles call any function; needs ``resume``.
        checked: whether the launching command has read ``resume_from`` to its end.

    Raises:
        UserError: the directory does not fit what is to be done.
    """
    from seqtile.train.ranks import is_first
    from seqtile.train.run_directory import (
        check_output,
        check_unlocked,
        check_writable,
        default_output,
        find_checkpoint,
        nothing_saved,
    )

    output = Path(recipe.output).expanduser() if recipe.output else default_output(recipe)
    if is_first():
        check_unlocked(output)
    start = None
    if resume and (resume_from is not None or not nothing_saved(output)):
        start = find_checkpoint(output, resume_from, trusted=trust_checkpoint, checked=checked)
    if is_first():
        if resume:
            check_writable(output, f"fix that, then resume from {start or 'its first step'}")
        else:
            check_output(recipe, output, overwrite=overwrite)
    return recipe.model_copy(update={"output": str(output)}), start


def require_packages() -> None:
    """Refuse to start without the packages of ``seqtile[train]``, naming all that are missing at once.

    Raises:
        UserError: with the command that installs them.
    """

    missing = [name for name in ("trl", "datasets", "peft") if find_spec(name) is None]
    if missing:
        raise UserError(
            "train.package-missing", f"seqtile train needs {', '.join(missing)}; run: pip install {' '.join(missing)}"
        )


def _build(recipe: Recipe, output: Path, start: Path | None, display: Display) -> tuple[Any, Report | None]:
    """Data, model, tiling and trainer; each refuses bad input before the next, slower one starts."""
    from seqtile.lm_loss.tiled_loss import find_causal_lms
    from seqtile.models.causal import causal_model
    from seqtile.train.arguments import adapter_config, describe_adapters, load_adapters
    from seqtile.train.load import check_split, result_dtype, tile, tile_head, use_liger
    from seqtile.train.ranks import agree, is_launched, prepare_on_cpu
    from seqtile.train.read_data import read_data

    if recipe.split > 1:
        check_split(recipe)  # for the first time under a launcher of the user's
    # The first process of each node decodes for all. With skip_bad_rows all do, so that they leave out the same rows.
    decodes = recipe.skip_bad_rows or not is_launched() or os.environ["LOCAL_RANK"] == "0"
    data = read_data(recipe, output, display.stage, decodes=decodes)
    agree(recipe, data, start)
    display.stage(f"loading the weights of {recipe.model}")
    model, tokenizer, unread = _load_checked(recipe, data)
    display.stage("tiling")
    if liger := use_liger(model, recipe):
        logger.info(liger)
    tiling = tile(model, recipe)
    if recipe.loss_tile:
        find_causal_lms(model)  # before the trainer is built, which takes longer
    prepare_on_cpu(recipe)
    if data.stream is not None or data.processor is not None:
        display.stage(f"reading {recipe.dataset}")
    else:
        display.stage(f"tokenizing {counted(len(data.sets['train'].rows), 'row')}")
    trainer = _trainer(model, data, data.processor or tokenizer, adapter_config(recipe.lora, model, unread))
    trainer.result_dtype = result_dtype(recipe)
    advice = {name: row_set.row_format.advice for name, row_set in data.sets.items()}
    if data.stream is not None:
        logger.info("data: streaming, in the dataset's order%s", advice["train"])
    for name, summary in trainer.data.items():
        logger.info("%s: %s%s", "data" if name == "train" else f"{name} data", summary, advice[name])
    if data.stream is not None:
        trainer.data["train"] = data.stream.summary
    if recipe.lora is not None:
        # TRL has added the adapters: blocks, projections and experts are checked with them.
        tiling = tile(causal_model(trainer.model), recipe)
        if recipe.lora.start is not None and start is None:
            load_adapters(trainer.model, recipe.lora)
        logger.info(describe_adapters(trainer.model))
        if unread and data.processor is not None and recipe.lora.target_modules == "all-linear":
            logger.info(
                "no adapters on what text does not reach: %s; lora.target_modules names others", ", ".join(unread)
            )
    if recipe.loss_tile:
        tile_head(causal_model(trainer.model), recipe.loss_tile)
    return trainer, tiling


def _load_checked(recipe: Recipe, data: Data) -> tuple[Any, Any, list[str]]:
    """The model, its tokenizer, and the names of modules that no text reaches, frozen if the data has no pictures."""
    from seqtile.install.adapters import find_unread
    from seqtile.train.load import check_checkpoints, load_model, repair_generation
    from seqtile.train.packing import check_packing

    model, tokenizer = load_model(recipe, pictures=data.processor is not None)
    if recipe.lora is None and (repaired := repair_generation(model, recipe.model)):
        logger.warning(repaired)
    unread = find_unread(model)
    if unread and data.processor is None:
        # Without a gradient they train nothing, DDP waits for them, and engines keep optimizer states for them.
        for name in unread:
            model.get_submodule(name).requires_grad_(False)
        logger.warning("frozen, because no text reaches them: %s", ", ".join(unread))
    check_packing(model, data.arguments)
    check_checkpoints(model, data.arguments)
    return model, tokenizer, unread


def _trainer(model: Any, data: Data, tokenizer: Any, adapters: Any) -> Any:
    from transformers.trainer_callback import PrinterCallback

    from seqtile.train.trainer import Trainer

    try:
        trainer = Trainer(data, model=model, processing_class=tokenizer, peft_config=adapters)
    except UserError:
        raise
    except Exception as error:
        if not _is_refusal(error, Path(str(data.arguments.output_dir))):
            raise
        raise UserError(
            "trainer.rejects", f"the trainer rejects this model, dataset or recipe: {in_its_words(error)}"
        ) from error
    trainer.remove_callback(PrinterCallback)
    return trainer


def _is_refusal(error: Exception, output: Path) -> bool:
    """Whether a library refused its arguments; memory, disks and other ranks have reports of their own."""
    from seqtile.train.run_directory import disk_error

    of_another_rank = "gloo" in str(error) or type(error).__name__.startswith("Dist")
    reported = (
        isinstance(error, UserError | RunError) or is_out_of_memory(error) or disk_error(error, output) is not None
    )
    return not (reported or of_another_rank or is_ours(error))


def _all_done(trainer: Any, resume_from: Path, output: Path) -> bool:
    """Whether no step is left to train and only the model is to be saved; refuses a run that is complete."""
    from seqtile.train.run_directory import TRAINER_STATE, why_not_whole

    state = json.loads((resume_from / TRAINER_STATE).read_text(encoding="utf-8"))
    steps = trainer.args.max_steps if trainer.args.max_steps > 0 else state["max_steps"]
    if state["global_step"] < steps:
        return False
    if state["global_step"] > steps:
        raise UserError(
            "resume.beyond-steps",
            f"{resume_from.name} has done {state['global_step']} steps, more than --steps {steps}; use more steps, or "
            "an earlier checkpoint (--from-checkpoint)",
        )
    if not why_not_whole(output):
        raise UserError("resume.finished", f"this run has finished its {steps} steps; use more --steps to continue")
    logger.info("all %d steps are done; saving the model", steps)
    return True


def _train_steps(trainer: Any, resume_from: Path | None, stop: StopOnSignal, clock: Clock, output: Path) -> None:
    """Train; a first step that is refused, and one that is out of memory, raise an error of ours."""

    failed: Exception | None = None
    with stop.listening():
        try:
            trainer.train_all(resume_from)
        except Exception as error:
            if not clock.seconds and _is_refusal(error, output):
                raise UserError(
                    "train.first-step-fails",
                    f"the first step failed, and nothing was trained: {in_its_words(error)}; change the setting or "
                    "the model that it names",
                ) from error
            if not is_out_of_memory(error):
                raise
            failed = error
    trainer.step.close()
    if failed is not None:
        raise trainer.step.end(failed)


def _train_and_save(
    recipe: Recipe, output: Path, trainer: Any, tiling: Report | None, resume_from: Path | None,
    callbacks: Sequence[TrainerCallback], display: Display,
) -> Outcome:  # fmt: skip
    import torch

    from seqtile.install.runs import what_ran
    from seqtile.train.callbacks import CheckFirstStep, CheckModel, Clock, EndSlowDemo, StopOnSignal
    from seqtile.train.metrics import Metrics
    from seqtile.train.ranks import is_first
    from seqtile.train.result_report import Outcome, write_report
    from seqtile.train.retry import StepWatch
    from seqtile.train.trainer_fields import best_metric

    stop, clock = StopOnSignal(), Clock()
    checks = [CheckModel(trainer, recipe), *([CheckFirstStep()] if tiling else [])]
    if recipe.is_demo and recipe.steps == DEMO_STEPS:
        checks.append(EndSlowDemo())
    for callback in (*checks, clock, Metrics(output, display), *callbacks, stop):
        trainer.add_callback(callback)
    trainer.step = StepWatch(trainer, recipe, tiling, output)
    display.stage("preparing the first step")
    _train_steps(trainer, resume_from, stop, clock, output)
    stop.agree(trainer.args.device)  # a signal since the last step may have reached only some ranks
    recipe, tiling = trainer.step.recipe, trainer.step.tiling
    ran = str(what_ran(trainer.model))  # before a comparison runs other tiles
    if stop.received is None:
        display.stage("saving the model")
        trainer.save_result(output)
    comparison = None
    if recipe.compares and stop.received is None:
        from seqtile.train.compare_untiled import compare

        batch = next(iter(trainer.get_train_dataloader()))
        comparison = compare(trainer.model, {**batch, "fused_lm_head": True}, recipe, display.stage)
    state = trainer.state
    outcome = Outcome(
        recipe=recipe,
        output=output if stop.received is None else output / f"checkpoint-{state.global_step}",
        tiling=tiling,
        losses=tuple((int(log["step"]), log["loss"]) for log in state.log_history if "loss" in log),
        step=state.global_step,
        step_seconds=clock.median(),
        peak_bytes=None if accelerator() is None else torch.accelerator.max_memory_allocated(),
        stopped_by=stop.received,
        comparison=comparison,
        data=trainer.data,
        best=None if state.best_metric is None else (int(state.best_global_step), float(state.best_metric)),
        best_metric=best_metric(recipe),
        ran=ran,
        retries=tuple(trainer.run["retries"]),
    )
    if recipe.report and is_first() and outcome.stopped_by is None:
        return write_report(outcome, output / "report")
    return outcome
