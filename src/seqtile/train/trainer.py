"""TRL's trainer, with marks of complete checkpoints and checks of each step."""

from __future__ import annotations

import copy
import math
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from accelerate.utils import broadcast_object_list, gather_object
from datasets import IterableDataset
from transformers import TrainerCallback
from trl import SFTTrainer  # type: ignore[attr-defined]

from seqtile._compat import REDUCES_UNUSED, kept_in_fp32
from seqtile._errors import RunError, UserError, in_its_words, is_ours
from seqtile._log import first_rank_logger
from seqtile.models.causal import causal_model
from seqtile.ops.lm_loss.kept_tokens import IGNORED
from seqtile.recognise.decoder_layers import decoder_layers
from seqtile.train.data_summary import DataSummary, summarise
from seqtile.train.evaluation import Evaluated, exchange_in_evaluations
from seqtile.train.rendered_rows import check_ids, mask_messages
from seqtile.train.run_directory import (
    FSDP_SHARDS,
    MARK,
    RESULT,
    SAVE_TRIAL,
    TRAINER_STATE,
    CheckpointMark,
    disk_error,
    newest_whole,
    rotate,
    saved_names,
    set_aside,
    write_mark,
)
from seqtile.train.split_rows import SplitRows

if TYPE_CHECKING:
    from seqtile.train.read_data import Data
    from seqtile.train.retry import StepWatch

logger = first_rank_logger(__name__)

SHOWN_CHARACTERS = 120
SHOWN_SEQUENCES = 4


class _SplitLoss(transformers.Trainer):
    """Under Ulysses every token of a step weighs the same, whichever row, rank and micro-batch it is in.

    Transformers averages each row's tokens, and then the rows (``deepspeed_sp_compute_loss``):
    https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/deepspeed.py
    It also gathers the ranks' losses by an operation whose backward, with gloo, fails where a group does not begin at
    rank 0: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/nn/functional.py (``_AllGather``).
    TRL's trainer comes before this class and calls it for the loss of its fused head.
    """

    @property
    def _splits_rows(self) -> bool:
        split = getattr(self.accelerator, "parallelism_config", None)
        return split is not None and split.sp_enabled

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, count = super().get_batch_samples(*args, **kwargs)
        if self._splits_rows and batches:
            # Sum over ranks: each has counted its part, which Transformers takes for whole rows.
            rank_tokens = torch.stack([(batch["shift_labels"] != IGNORED).sum() for batch in batches]).sum()
            count = self.accelerator.gather(rank_tokens.to(self.args.device)).sum()
        return batches, count

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not self._splits_rows or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**{**inputs, "labels": inputs["shift_labels"]})
        # The engine divides the sum of the ranks' gradients by their number.
        loss = -outputs.log_probs.sum() * self.accelerator.num_processes / num_items_in_batch.clamp(min=1)
        return (loss, outputs) if return_outputs else loss


class Trainer(SFTTrainer, _SplitLoss):
    """``SFTTrainer`` that never leaves a checkpoint that looks whole and is not, or that holds a broken step.

    Attributes:
        run: what :func:`seqtile.train.resume.describe_run` says; goes into every mark.
        all_done: the checkpoint to continue from has every step; load it and train none.
        step: tracks the step, and repeats one that ran out of memory; None does neither.
        running_tokens: tokens of the micro-batch that was begun last, on this rank.
        data: what each data set is, ``"train"`` and ``"eval"``, in numbers.
        result_dtype: dtype of the result's weights; None keeps the dtype in which they were trained.

    Args:
        rows: rows to train and evaluate on, and the arguments that go with them.
        **kwargs: the others of ``SFTTrainer``.
    """

    def __init__(self, rows: Data, **kwargs: Any) -> None:
        self.data: dict[str, DataSummary] = {}
        self._rows, self._model = rows, kwargs["model"]
        # Transformers before 5.23 has the second name alone.
        checkpoint_settings: Any = getattr(rows.arguments, "activation_checkpointing_kwargs", None)
        checkpoint_settings = checkpoint_settings or rows.arguments.gradient_checkpointing_kwargs or {}
        evaluated = rows.sets["eval"].rows if "eval" in rows.sets else None
        super().__init__(args=rows.arguments, train_dataset=rows.sets["train"].rows, eval_dataset=evaluated, **kwargs)
        if rows.processor is not None:
            from seqtile.train.picture_batches import picture_collator

            pair, config = rows.sets["train"].row_format.is_pair, kwargs["model"].config
            self.data_collator = picture_collator(rows.processor, self.args, config, pair=pair, whole=False)
            self.data = {name: row_set.summary for name, row_set in rows.sets.items() if row_set.summary is not None}
        if "use_reentrant" not in checkpoint_settings:  # TRL forces it for adapters under ZeRO-3
            self.args.gradient_checkpointing_kwargs = {**checkpoint_settings, "use_reentrant": False}
            self.args.activation_checkpointing_kwargs = self.args.gradient_checkpointing_kwargs
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
            # Models list layer classes of towers that they may not have, and every class that must not be split.
            model = cast("torch.nn.Module", self.model)
            names = {type(model.get_submodule(layer.name)).__name__ for layer in decoder_layers(model)}
            plugin.transformer_cls_names_to_wrap = sorted(names) or None
        # Transformers has False here for models for pictures and under Ulysses. It would then not count the tokens of a
        # step, and average its micro-batches and ranks, whatever their tokens. TRL divides by that count itself.
        self.model_accepts_loss_kwargs = True
        self.run: dict[str, Any] = {}
        self.all_done = False
        self.step: StepWatch | None = None
        self.running_tokens = 0
        self.result_dtype: torch.dtype | None = None
        self._saves_result = False
        # Transformers counts incomplete checkpoints, and deletes old ones before the new one is complete.
        self._limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._saved_step = -1
        self.loaded = False
        self._begin_anywhere()
        self._losses: list[torch.Tensor] = []
        self._batches: list[torch.Tensor] = []
        self._evaluated: Evaluated | None = None
        self._norm: Any = None
        self.add_callback(_Checks(self))

    def _begin_anywhere(self) -> None:
        """Rows under Ulysses can be skipped: the trainer asks accelerate for DeepSpeed's adapter, and gets this one."""
        accelerator: Any = self.accelerator
        size = getattr(getattr(accelerator, "parallelism_config", None), "sp_size", 1)
        if size > 1:
            split = accelerator.deepspeed_ulysses_dl_adapter
            accelerator.deepspeed_ulysses_dl_adapter = lambda rows, model: SplitRows(
                rows, lambda batch: split(batch, model), size
            )

    def _prepare_dataset(  # type: ignore[no-untyped-def]
        self, dataset, processing_class, args, packing, formatting_func, dataset_name
    ) -> Any:
        """TRL's own, in two goes: the first tokenises, the second cuts and packs what it finds tokenised."""
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        prepare = super()._prepare_dataset
        tokenised = mask_messages(prepare(dataset, processing_class, whole, False, formatting_func, dataset_name))
        embedding: Any = cast("Any", self._model).get_input_embeddings()  # TRL may have added adapters and tokens
        vocabulary = int(getattr(embedding, "base_layer", embedding).num_embeddings)
        if isinstance(dataset, IterableDataset):  # a stream cannot be counted in advance
            if self._rows.stream is not None:
                self._rows.stream.vocabulary, self._rows.stream.tokenizer = vocabulary, processing_class
                self._rows.stream.summary.max_length = None if packing else args.max_length
                keep_end = {"keep_end": args.truncation_mode == "keep_end"}
                tokenised = tokenised.map(self._rows.stream.count_tokens, with_indices=True, fn_kwargs=keep_end)
            return prepare(tokenised, processing_class, args, packing, None, dataset_name)
        check_ids(tokenised, self._rows.sets[dataset_name], vocabulary, processing_class)
        prepared = prepare(tokenised, processing_class, args, packing, None, dataset_name)
        summary = self.data[dataset_name] = summarise(
            tokenised, prepared, args.max_length, args.packing_strategy if packing else None,
            self._rows.sets[dataset_name].left_out, self._rows.sets[dataset_name].row_format.trains_prompts,
        )  # fmt: skip
        if not summary.trained:
            raise UserError(
                "dataset.no-label",
                f"no token of the {dataset_name} data is in the loss ({summary}); use rows with more text or "
                "unmasked labels, or a larger --max-length",
            )
        return prepared

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Under Ulysses the parts of each row; Transformers (5.23) gives each rank whole ones."""
        rows = super().get_eval_dataloader(*args, **kwargs)
        return self.accelerator.deepspeed_ulysses_dl_adapter(rows, self.model) if self._splits_rows else rows

    def evaluation_loop(  # type: ignore[no-untyped-def]
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> Any:
        """Transformers' own, with the loss of one process: rows that only fill up the last batches do not count."""
        self._evaluated = Evaluated(dataloader, self.accelerator)
        if self._splits_rows:
            exchange_in_evaluations(causal_model(self.model))
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        metrics = {**(output.metrics or {}), f"{metric_key_prefix}_loss": self._evaluated.mean()}
        return output._replace(metrics=metrics, num_samples=len(self._evaluated.rows))

    def prediction_step(  # type: ignore[no-untyped-def]
        self, model, inputs, prediction_loss_only, ignore_keys=None
    ) -> Any:
        """The loss of a batch of the evaluation; under a ring each rank has its parts of it, as in a step (TRL's own,
        1.16, has the whole on each)."""
        assert self._evaluated is not None
        device = self.args.device
        batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        with torch.no_grad(), self.compute_loss_context_manager(), self._evaluated.split(batch) as rank_batch:
            loss = self.compute_loss(model, rank_batch)  # type: ignore[no-untyped-call]
        self._evaluated.add(loss, rank_batch)
        return loss, None, None

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Where each node has a directory of its own, its first rank saves the model there.

        Transformers' model saves on rank 0 alone, whatever it is told (``should_save_on_this_rank``, 5.23).
        """
        if not self.args.save_on_each_node:
            super().save_model(*args, **kwargs)
            return
        model: Any = causal_model(self.model)
        model.should_save_on_this_rank = bool
        try:
            super().save_model(*args, **kwargs)
        finally:
            del model.should_save_on_this_rank

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The result in ``result_dtype``, cast on the host, but for weights that Transformers keeps in fp32."""
        dtype = self.result_dtype if self._saves_result else None
        if dtype is None or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        model: Any = causal_model(self.model)
        weights = model.state_dict() if state_dict is None else state_dict
        as_trained, copies, result = kept_in_fp32(model, weights, dtype), dict[Any, torch.Tensor](), dict[str, Any]()
        for name, weight in weights.items():
            result[name] = weight
            if weight.is_floating_point() and name not in as_trained:
                place = weight.untyped_storage().data_ptr(), weight.storage_offset(), weight.shape
                if place not in copies:  # tied weights stay tied
                    copies[place] = weight.to("cpu", dtype)
                result[name] = copies[place]
        super()._save(output_dir, result)
        config = copy.deepcopy(model.config)
        for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            if part is not None:
                part.dtype = dtype
        config.save_pretrained(output_dir)  # Transformers has written the dtype of the weights that were trained

    def try_saving(self) -> None:
        """Write once, without weights, what is saved at the end, and remove it.

        Raises:
            UserError: something of it cannot be written, which would end the run after its last step.
        """
        if not self.args.should_save:
            return
        try:
            with tempfile.TemporaryDirectory(prefix=SAVE_TRIAL, dir=self.args.output_dir) as folder:
                self._save(folder, state_dict={})
                self.state.save_to_json(str(Path(folder) / TRAINER_STATE))
        except Exception as error:
            # tokenizers raises a bare Exception on a full disk
            if isinstance(error, OSError) or is_ours(error) or disk_error(error, Path(str(self.args.output_dir))):
                raise
            raise UserError(
                "output.model-not-saved",
                f"the trained model could not be saved: {in_its_words(error)}; fix the file of the model that it names",
            ) from error

    def train_all(self, resume_from: Path | None) -> None:
        """Train, from ``resume_from`` on if there is one."""
        self.loaded = resume_from is not None
        if resume_from is not None:
            self._save_in_shards((resume_from / FSDP_SHARDS).is_dir())
        with suppress(_NothingToTrain):
            self.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
            if self.state.global_step == 0:
                raise UserError(
                    "dataset.no-label",
                    "no step was trained: no token of any row is in the loss; use rows with more text, or a larger "
                    "--max-length",
                )

    def save_result(self, output: Path) -> None:
        """Save the trained model beside the checkpoints, and mark it as whole."""
        self._save_in_shards(False)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            (output / MARK).unlink(missing_ok=True)
        self._saves_result = True
        try:
            self.save_model(str(output))
        finally:
            self._saves_result = False
        if self.result_dtype is not None:
            dtype = str(self.result_dtype).removeprefix("torch.")
            logger.info(
                "saved the weights in %s, as the model's checkpoint has them; checkpoint-%d has them in float32, and "
                "'dtype: float32' saves them so", dtype, self.state.global_step,
            )  # fmt: skip
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_mark(output, CheckpointMark(step=self.state.global_step), only=RESULT)

    def _save_in_shards(self, in_shards: bool) -> None:
        """Under FSDP2: whether each rank saves its shard, which is written and read at once, or rank 0 everything."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            plugin.state_dict_config = plugin.optim_state_dict_config = None  # else those of the other kind stay
            plugin.set_state_dict_type("SHARDED_STATE_DICT" if in_shards else "FULL_STATE_DICT")

    def begin(self) -> None:
        """Before the first step: with retries a checkpoint to go on from.

        To save or load shards, PyTorch makes an optimizer's states by a step of zeros, which it counts: before the
        first step there are none.
        """
        save = self.step is not None and self.step.recipe.on_oom == "retry" and not self.loaded
        if save:
            self._save_checkpoint(self.model, None)
        if (save or self.loaded) and not self.is_deepspeed_enabled:
            optimizer: Any = self.optimizer
            getattr(optimizer, "optimizer", optimizer).state.clear()

    def reduce_unused(self) -> None:
        """Have FSDP2 reduce zeros for a vision tower that a rank's rows do not use, as TRL has DDP do.

        Otherwise ranks reduce buffers of different sizes, and gloo aborts the process.
        """
        wrapped: Any = self.model_wrapped
        if self._rows.processor is not None and hasattr(wrapped, REDUCES_UNUSED):
            getattr(wrapped, REDUCES_UNUSED)(True)

    def set_learning_rate(self) -> None:
        """After a resume: the rate of this run's schedule; the checkpoint has that of its own, 0 at its last step."""
        scheduler: Any = self.lr_scheduler
        scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's wrapper
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR) and scheduler.last_epoch:  # else it starts anew
            scheduler.last_epoch -= 1
            scheduler.step()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # PEFT loads adapters as new parameters in fp32; with 4-bit weights TRL trains bf16 ones, with bf16 states.
        module = cast("torch.nn.Module", self.model)
        dtypes = {name: weight.dtype for name, weight in module.named_parameters() if weight.requires_grad}
        if self._load_renamed(Path(resume_from_checkpoint)):
            return
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, weight in module.named_parameters():
            if weight.dtype != (dtype := dtypes.get(name, weight.dtype)):
                weight.data = weight.data.to(dtype)

    def _load_renamed(self, folder: Path) -> bool:
        """Load a whole model whose weights are saved under other names than it has; returns whether they are.

        Transformers saves pictures' models and experts under the names of their first release, and its Trainer (5.24)
        looks for the model's own names: it would go on from the weights of the start, and log nothing but a warning.
        """
        model: Any = causal_model(self.model)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or not (names := saved_names(folder)):
            return False
        if names >= {*model.state_dict()} - {*(getattr(model, "all_tied_weights_keys", None) or ())}:
            return False
        loaded = type(model).from_pretrained(folder, config=copy.deepcopy(model.config), dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        return True

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        if step == self._saved_step:
            return  # requested twice, at the end of a step and of its epoch: do not write it again
        output = Path(self._get_output_dir(trial))
        if self.args.should_save:
            set_aside(output, step)
            # Transformers checks that the best checkpoint exists before FSDP has written it.
            (output / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
        self.accelerator.wait_for_everyone()
        super()._save_checkpoint(model, trial)  # type: ignore[no-untyped-call]
        self.accelerator.wait_for_everyone()
        self._agree_on_best()
        self._saved_step = step
        if self.args.should_save:
            self._mark(output / f"checkpoint-{step}", step)
            rotate(output, self._limit, self.state.best_model_checkpoint)

    def _agree_on_best(self) -> None:
        """Take rank 0's best checkpoint: every rank has looked at the disk by itself, and all load it together."""
        if self.args.world_size > 1:
            best: list[Any] = [self.state.best_model_checkpoint, self.state.best_global_step, self.state.best_metric]
            broadcast_object_list(best)
            self.state.best_model_checkpoint, self.state.best_global_step, self.state.best_metric = best

    def _mark(self, folder: Path, step: int) -> None:
        ranks = self.args.world_size
        if ranks > 1 and not self.args.save_on_each_node and not self.args.save_only_model:
            missing = [rank for rank in range(ranks) if not (folder / f"rng_state_{rank}.pth").is_file()]
            if missing:
                raise RunError(
                    f"{folder} has no files of rank {', '.join(map(str, missing))}; all processes must write to one "
                    "shared directory, or under engine 'ddp' set 'trainer: {save_on_each_node: true}'"
                )
        write_mark(folder, CheckpointMark(step=step, processes=ranks, run=self.run))

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One micro-batch; its loss is looked at when the step is complete."""
        self.running_tokens = inputs["input_ids"].numel()
        if self.step is not None and self.step.in_place:
            run = super().training_step
            call = (model, inputs, *args)
            done = self.step.run(call, not self._batches, lambda step_args: run(*step_args, **kwargs))  # type: ignore[no-untyped-call]
            loss = done.pop()
            if done:  # repeated: drop the losses that were logged in the failed attempt
                loss, self._losses = loss + sum(done) - sum(self._losses), done
        else:
            loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[no-untyped-call]
        self._losses.append(loss.detach())
        self._batches.append(inputs["input_ids"])
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._norm = super()._get_grad_norm(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._norm

    def check_step(self) -> None:
        """Stop on every rank if the step gave any of them a loss or a gradient norm that is no number.

        Cost: one number per rank and step is reduced; only a run that stops says more.

        Raises:
            RunError: names the step, the rank and the batch; nothing of the step has been saved.
        """
        losses, batches, norm = self._losses, self._batches, self._norm
        self._losses, self._batches, self._norm = [], [], None
        finite = torch.isfinite(torch.stack([loss.float() for loss in losses])) if losses else torch.ones(1).bool()
        # A loss scaler finds its scale by overflowing, and skips those steps.
        norm_is_bad = norm is not None and not self.accelerator.optimizer_step_was_skipped and not math.isfinite(norm)
        broken = not bool(finite.all()) or norm_is_bad
        total = torch.tensor(float(broken), device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            total = self.accelerator.reduce(total, "sum")
        if not total.item():
            return
        what, culprits = [], []
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            what, culprits = [f"the loss is {losses[first].item()}"], [(first, batches[first])]
        elif norm_is_bad:
            # The norm is over all micro-batches and ranks, so its origin is unknown.
            what, culprits = [f"the gradient norm is {float(norm)}"], [*enumerate(batches)]
        for number, batch in culprits[:SHOWN_SEQUENCES]:
            what += self._told(batch, f"micro-batch {number + 1} of {len(batches)}")
        by_rank = gather_object([what]) if self.accelerator.num_processes > 1 else [what]
        raise RunError(self._sentence(by_rank))

    def _told(self, rows: torch.Tensor, name: str) -> list[str]:
        """Where a batch was, and how each of its sequences begins."""
        tokenizer: Any = self.processing_class
        lines = [f"  {name}, {' x '.join(map(str, rows.shape))} tokens, starting with:"]
        for row in rows[:SHOWN_SEQUENCES].tolist():
            lines.append(f"    {tokenizer.decode(row[:SHOWN_CHARACTERS])[:SHOWN_CHARACTERS]!r}...")
        return lines

    def _sentence(self, by_rank: list[list[str]]) -> str:
        step, output = self.state.global_step, Path(self.args.output_dir or "")
        lines = []
        # One rank's loss affects every rank's gradient, so only losses locate the origin.
        losses = [rank for rank, what in enumerate(by_rank) if what and what[0].startswith("the loss")]
        for rank in losses or range(len(by_rank)):
            on_rank = f" on rank {rank}" if len(by_rank) > 1 else ""
            lines += [f"stopped at step {step}: {by_rank[rank][0]}{on_rank}", *by_rank[rank][1:]]
        checkpoint, _ = newest_whole(output)
        if checkpoint is None:
            lines += ["nothing was saved; check these rows, or start again with a lower --learning-rate"]
        else:
            is_model = (checkpoint / "config.json").is_file()  # not for shards
            start = f"from there with a lower --learning-rate (--model {checkpoint} --output ANOTHER)"
            lines += [
                f"nothing of this step was saved; the last complete checkpoint is {checkpoint}",
                "--resume repeats the same steps, which helps after a hardware fault. Otherwise check these rows, "
                f"or start a new run {start if is_model else 'with a lower --learning-rate'}",
            ]
        return "\n".join(lines)


class _NothingToTrain(Exception):
    """Everything is loaded and no step is left: Transformers would train one more."""


class _Checks(TrainerCallback):
    """The trainer's own events: between a step and what is logged and saved of it."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A resumed state has the previous run's intervals; this recipe's replace them.
        state.compute_steps(args, state.max_steps)
        if self.trainer.all_done:
            raise _NothingToTrain
        self.trainer.reduce_unused()
        self.trainer.try_saving()
        self.trainer.set_learning_rate()
        if state.global_step == 0:
            self.trainer.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if isinstance(train_dataloader, SplitRows):
            train_dataloader.begin_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.check_step()
