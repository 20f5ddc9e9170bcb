"""A callback for transformers' Trainer and for every trainer built on it, TRL's among them."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.devices import GIB, empty_cache, peak_resident_bytes
from seqtile.engines.sequence_parallel import refuse_split_states
from seqtile.fitting import Choice, apply_choice, choose_for, media_of
from seqtile.install.apply import apply, apply_options, carries, tiled_names
from seqtile.install.report import Report
from seqtile.install.runs import forget_runs, what_ran
from seqtile.integrations.trainer_steps import question_of
from seqtile.options import OF_BLOCKS, TilingOptions
from seqtile.planner.step_config import TrainerStep
from seqtile.recognise.decoder_layers import states_of
from seqtile.rules import Combination, check_combination

logger = first_rank_logger(__name__)

TRAINING, OPTIMIZER, EVALUATION = "forward_backward", "optimizer", "evaluation"


class TilingCallback(TrainerCallback):
    """Tile the trainer's model, and log what was tiled and the peak memory of each part of the step.

    ``Trainer(..., callbacks=[seqtile.TilingCallback(tile=8192)])``. The model is tiled when the trainer has been
    built: after TRL has added adapters, before training wraps it for an engine. A model that is not tiled when training
    starts is tiled then: one that ``model_init`` creates for every run, or one whose trainer got this callback later.
    ``trainer.ref_model`` and ``trainer.teacher_model`` are tiled too, except under DeepSpeed.

    The trainer's logs (``state.log_history``, the console, everything in ``report_to``) gain

    * ``seqtile``: the report, in the first log of a run, with what the steps before it have shown;
    * ``seqtile/forward_backward_peak_allocated_gib``, ``.../optimizer_...``, ``.../evaluation_...``: the allocator's
      peak in each part since the last log, on this process' accelerator. Forward and backward are one part, because
      the trainer has no event between them;
    * ``seqtile/peak_resident_gib`` on a CPU: the peak resident memory of the process.

    Garbage is collected and the allocator's cache emptied when training begins, so that memory from building the
    trainer does not count, and again at the first step if an evaluation ran before it. Later steps reuse the blocks.

    Args:
        report: result of :func:`seqtile.apply`, for a model that is tiled already: it is logged and nothing is tiled.
        max_length: tokens of the longest sequence, of each of a pair, or of a prompt with its completion; settings are
            chosen as by :func:`seqtile.fit` when the trainer is built, with the trainer's optimizer, engine, batch size
            and precision, and the rows and frozen models of TRL's trainers.
        device: device to plan for, as for :func:`seqtile.fit`; needs ``max_length``.
        images: pictures of each sequence, as for :func:`seqtile.fit`; needs ``max_length``.
        image_size: height and width of each in pixels.
        frames: frames of one video of each sequence, in place of pictures.
        frame_size: height and width of each in pixels.
        **settings: keyword arguments of :func:`seqtile.apply`.

    Attributes:
        report: what was tiled last, or None before the trainer is built.

    Cost:
        Two reads of the allocator's counters per step, which are reset in between; none where the trainer measures
        memory itself (``skip_memory_metrics=False``).

    Raises:
        UserError: a setting that :func:`seqtile.apply` does not have or accept, or, when training starts, a tiled
            forward that another library has replaced.
    """

    def __init__(
        self, report: Report | None = None, /, *, max_length: int | None = None, device: Any = None,
        images: int | None = None, image_size: tuple[int, int] | None = None, frames: int | None = None,
        frame_size: tuple[int, int] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        if report is not None and (settings or max_length is not None or not isinstance(report, Report)):
            raise UserError(
                "callback.report-and-settings",
                f"TilingCallback got {type(report).__name__} and the settings {sorted(settings)}; pass either the "
                "report of seqtile.apply or the settings",
            )
        self._media = media_of(images, image_size, frames, frame_size)
        if max_length is None and (device is not None or self._media is not None):
            raise UserError(
                "callback.without-max-length", "device, images and frames are for a plan, which needs max_length"
            )
        self._max_length, self._device, self._given = max_length, device, frozenset(settings)
        self._options = TilingOptions(**settings)  # each value is checked here, not when the trainer is built
        self._choice: Choice | None = None
        self.report = report
        self._by_hand = report is not None
        self._news: dict[str, Any] = {}
        self._references: list[str] | None = None  # for the first log of a run; None afterwards
        self._peaks: _Peaks | None = None
        self._at_start = self._collects_again = self._evaluated = False
        self._looks_for_longer, self._ranks = max_length is not None, 1  # ranks that share a sequence
        self._step = TrainerStep()

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """The trainer has been built."""
        trainer = _go_first(self)
        if not self._by_hand:
            self.report = self._tile(model, trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """The engine has wrapped the model; nothing has run."""
        trainer = _go_first(self)
        expected = self.report if self.report is not None and (self._by_hand or carries(model)) else None
        # use_liger_kernel=True patches the instances when training begins, after on_init_end.
        if expected is None or (not self._by_hand and _lost(model, expected)):
            self.report = self._tile(model, trainer)
        assert self.report is not None
        self._refuse_what_is_lost(model, expected or self.report)
        _check_trainer(trainer, model, self._options)
        self._references = [] if self._by_hand or trainer is None else self._tile_references(trainer)
        logger.info("%s", "; ".join([*str(self.report).splitlines(), *self._references]))
        _collect(args.device)
        self._at_start, self._collects_again = True, False
        self._peaks = _Peaks(args.device) if args.skip_memory_metrics else None

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Before the first micro-batch of a step."""
        if self._evaluated and self._looks_for_longer:
            forget_runs(model)  # rows of evaluation are in no plan
        self._evaluated = False
        if self._collects_again:
            _collect(args.device)
        self._at_start = self._collects_again = False
        self._end_of("")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Every micro-batch of the step has been through backward."""
        self._end_of(TRAINING)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The weights are new."""
        self._end_of(OPTIMIZER)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """A step is over: report the first batch that is longer than planned."""
        if not self._looks_for_longer or self._max_length is None:
            return
        planned = self._max_length * args.per_device_train_batch_size * self._step.rows // self._ranks
        if (tokens := what_ran(model).tokens) > planned:
            self._looks_for_longer = False
            logger.warning(
                "a batch has %s tokens on this process, max_length=%s plans for %s; its memory is not in the plan",
                f"{tokens:,}", self._max_length, f"{planned:,}",
            )  # fmt: skip

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A batch has been evaluated."""
        self._collects_again, self._evaluated = self._at_start, True
        self._end_of(EVALUATION)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """The trainer logs: in its history already, not yet at those whom it reports to."""
        if self._peaks is not None:
            self._news.update(self._peaks.take())
        if logs is not None and state.log_history:
            if self._references is not None:  # now, so that the report has the first steps' effects
                self._news["seqtile"] = "; ".join([*str(self.report).splitlines(), *self._references])
                self._references = None
            logs.update(self._news)
            state.log_history[-1].update(self._news)
            self._news = {}

    def _end_of(self, phase: str) -> None:
        if self._peaks is not None:
            self._peaks.end_of(phase)

    def _tile(self, model: nn.Module, trainer: Trainer | None) -> Report:
        """Tile ``model`` with the settings, or with those that ``max_length`` needs, which are chosen once."""
        if self._max_length is None:
            return apply_options(model, self._options)
        if self._choice is None:
            question = {} if trainer is None else question_of(trainer)
            self._ranks = question.get("sp_size", 1) * question.get("cp_size", 1)
            self._step = question.get("step", self._step)
            self._choice = choose_for(
                model, self._options, max_length=self._max_length, given=self._given, device=self._device,
                media=self._media, **question,
            )  # fmt: skip
            self._options = self._choice.options
        return apply_choice(model, self._choice)

    def _tile_references(self, trainer: Trainer) -> list[str]:
        """Tile what DPO, GRPO and distillation compare with, which is built after :meth:`on_init_end`."""
        done = []
        for attribute, name in (("ref_model", "reference model"), ("teacher_model", "teacher model")):
            model = getattr(trainer, attribute, None)
            if not isinstance(model, nn.Module) or tiled_names(model):
                continue
            if trainer.is_deepspeed_enabled:
                done.append(f"the {name} is not tiled: DeepSpeed has wrapped it already")
            elif self._options.tiled:
                # As the plan counts it, whose reference runs as the policy does.
                also = _OF_PLANNED_REFERENCE if self._choice is not None and self._step.head == "scores" else ()
                settings = {option: getattr(self._options, option) for option in (*_OF_REFERENCE, *also)}
                try:
                    done.append(f"{name}: {apply(model, **settings)}")
                except UserError as error:
                    done.append(f"the {name} is not tiled: {error}")
        return done

    def _refuse_what_is_lost(self, model: nn.Module, report: Report) -> None:
        """Raise if something that was tiled would not run in tiles any more."""
        lost = _lost(model, report)
        if lost:
            raise UserError(
                "callback.tiles-lost",
                f"{len(lost)} of {report.tiled} tiled blocks would run untiled (such as {lost[0]}): another library "
                "replaced their forward after tiling, or the report belongs to another model; pass seqtile.apply's "
                "settings to the callback instead of a report",
            )


_OF_REFERENCE = ("blocks", *(name for name in OF_BLOCKS if name != "keep"))
"""Options that apply to a reference or teacher model too, which has no backward."""

_OF_PLANNED_REFERENCE = ("loss", "loss_tile", "heads", "state", "chunk", "segment")


def _lost(model: nn.Module, report: Report) -> list[str]:
    """Blocks of a report that run in tiles no longer."""
    tiled = tiled_names(model)
    return [block.name for block in report.blocks if block.name not in tiled]


def _check_trainer(trainer: Trainer | None, model: nn.Module, options: TilingOptions) -> None:
    """Raise if what the trainer was asked for cannot run with the tiling, or with sequences that ranks share."""
    parallelism = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    sp_size, cp_size = getattr(parallelism, "sp_size", 1), getattr(parallelism, "cp_size", 1)
    arguments = getattr(getattr(trainer, "args", None), "__dict__", {})
    packing = arguments.get("packing") and arguments.get("packing_strategy", True)
    check_combination(Combination(options, sp_size=sp_size, cp_size=cp_size, trainer=arguments, packing=packing))
    for setting, size in (("sp_size", sp_size), ("cp_size", cp_size)):
        refuse_split_states(type(model).__name__, states_of(model), size, setting)


def _go_first(callback: TrainerCallback) -> Trainer | None:
    """Put ``callback`` before the trainer's others, so that those that report see what it adds to a log.

    Returns:
        The trainer, or None if another program calls. No event passes the trainer, so it is read from the call stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, Trainer):
            callbacks = trainer.callback_handler.callbacks
            if callback in callbacks:
                callbacks.remove(callback)
                callbacks.insert(0, callback)
            return trainer
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _collect(device: torch.device) -> None:
    gc.collect()
    empty_cache(device)


class _Peaks:
    """The most bytes in use in each part of a step, since they were last taken."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.peaks = device, dict[str, int]()
        self.counted = device.type != "cpu"
        try:
            self.end_of("")
        except (AttributeError, RuntimeError):  # a device whose allocator does not count
            self.counted = False

    def end_of(self, phase: str) -> None:
        """Assign the peak since the last call to ``phase``; ``""`` discards it."""
        if not self.counted:
            return
        peak = torch.accelerator.max_memory_allocated(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        if phase:
            self.peaks[phase] = max(peak, self.peaks.get(phase, 0))

    def take(self) -> dict[str, float]:
        """For a log, in GiB; forgets them."""
        peaks, self.peaks = self.peaks, {}
        if self.device.type == "cpu":
            resident = peak_resident_bytes()
            return {"seqtile/peak_resident_gib": round(resident / GIB, 4)} if resident else {}
        return {f"seqtile/{phase}_peak_allocated_gib": round(peak / GIB, 4) for phase, peak in peaks.items()}
