"""Run one training step, on real or on fake tensors."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._compat import FLASH_CPU_BACKWARD
from seqtile._errors import UserError
from seqtile._log import log_level
from seqtile.blocks.instance import logger as block_logger
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.chunks.layer_call import ChunkedCall
from seqtile.counting.fake import FAKE_RUN, callers_modes_off, fake_tensors, in_this_thread, make_fake
from seqtile.install.adapters import ALL_LINEAR, find_unread, leave_out, lora_config, without_adapters
from seqtile.install.apply import apply, apply_options, undo
from seqtile.models.causal import causal_model
from seqtile.models.configs import is_masked_lm, towers_of
from seqtile.models.layer_fields import first_layers
from seqtile.ops.attention.kernel_calls import is_attention
from seqtile.ops.attention.prefix import KeyValues
from seqtile.ops.grad_accumulator import LOW, as_on_an_accelerator, products_sum_in_fp32
from seqtile.ops.mlp_tile import Pass as MlpPass
from seqtile.options import layer_policies
from seqtile.planner.accelerator_functions import accelerator_functions, backward_in_modes
from seqtile.planner.flash_shapes import register_flash_shapes as register_flash
from seqtile.planner.kinds import step_kinds_of
from seqtile.planner.layer_structure import LayerSample
from seqtile.planner.liger_shapes import use_shapes as use_liger_shapes
from seqtile.planner.live_at_peaks import (
    CHECKPOINTS,
    CHUNK_STATES,
    GRADIENTS,
    KEPT,
    KEPT_TILES,
    KEY_GRADIENTS,
    KEYS,
    OPTIMIZER,
    PIECE_GRADIENTS,
    WEIGHTS,
    Tracker,
    Workspace,
    track,
)
from seqtile.planner.middle_tiles import MiddleTiles
from seqtile.planner.phases import OPTIMIZER_STEP, REST, Phase, label_phases
from seqtile.planner.pictures import ANY_SIZE, ONE_SIZE
from seqtile.planner.step_config import Built, Setup, make_optimizer
from seqtile.planner.step_run import StepRun
from seqtile.recognise.decoder_layers import decoder_layers
from seqtile.vision.install_vision import VisionTechnique


def build(config: Any, setup: Setup, device: str, sample: LayerSample | None = None) -> Built:
    """The model of ``config`` on ``device``, with random weights, ready to train as ``setup`` says.

    With a ``sample`` it has these layers only, all with one kind of checkpoint where those of the whole model differ.

    Raises:
        UserError: Transformers cannot build it, or it has nothing to tile.
    """
    model, notes = build_weights(config, setup, device, sample)
    options, blocks = setup.options, tuple[Any, ...]()
    if options.by_layer and sample is not None and len(sample.layers) < config.get_text_config().num_hidden_layers:
        options = replace(options, checkpoint="attention-saved" if options.saves_attention else "layer")
    if options.checkpoint is not None:
        base: Any = causal_model(model)
        if not base.supports_gradient_checkpointing:
            raise UserError(
                "plan.checkpoint-unsupported",
                f"{type(base).__name__} of the installed transformers does not support activation checkpointing; "
                "use checkpoint none",
            )
        with warnings.catch_warnings():
            # Transformers 5.23 has another name for it, and warns; 5.0 has this one alone:
            # https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if setup.liger:
        use_liger_shapes(model, tiled=options.tiled)
    # Traced in the mode of the step, with the functions that it calls; the plan reports what was tiled.
    functions = nullcontext() if setup.device_type == "cpu" else accelerator_functions()
    with log_level("seqtile", logging.ERROR), in_precision(setup, "cpu"), functions:
        if options.checkpoint == "layer":
            options = replace(options, checkpoint=None)  # what the model has now
        if options.loss is None:
            options = replace(options, loss_tile="auto")
        if options.tiled:
            report = apply_options(model, options)
            blocks = report.blocks
        else:
            with suppress(UserError):  # no block
                blocks = apply(model).blocks  # their phases are separated untiled too
                undo(model)
            if options.beside_blocks:
                apply_options(model, options.without_blocks())
    return Built(model, blocks, notes)


def build_weights(config: Any, setup: Setup, device: str, sample: LayerSample | None = None) -> tuple[Any, list[str]]:
    """The model of :func:`build` as far as its weights go, adapters too, untiled; and what is to be said of them."""
    model = build_bare(config, setup, device, sample)
    return (model, []) if setup.lora is None else _add_lora(model, setup, device)


def _refuse_config(config: Any, setup: Setup) -> None:
    """Refuse the configuration of a model that no plan can build."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    both = bool(getattr(config, "is_encoder_decoder", False))
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked_lm(config)
    if both or not (causal or setup.pictures is not None or hasattr(config, "auto_map")):
        what, instead = "not a causal language model of transformers", "the configuration of one"
        if both:
            what = "an encoder-decoder with two sequence lengths"
        elif is_masked_lm(config):
            what, instead = "an encoder", "the configuration of a model that generates text"
        elif config.model_type in ANY_SIZE + ONE_SIZE:
            what = "a language model with a vision tower"
            instead = "its pictures too (images= or frames= of seqtile.fit, --images N or --frames N)"
        elif towers_of(config) and type(text := config.get_text_config()) in MODEL_FOR_CAUSAL_LM_MAPPING:
            what = "a language model with a vision or audio tower"
            instead = f"that of its language model alone ({text.model_type}), and count image tokens as text"
        raise UserError(
            "plan.model-not-causal",
            f"model type {config.model_type!r} is {what}, and plans support causal language models; pass {instead}",
        )
    if getattr(config.get_text_config(), "hidden_size_per_layer_input", None):
        raise UserError(
            "plan.embeddings-per-layer",
            f"model type {config.model_type!r} has embeddings in each decoder layer (hidden_size_per_layer_input), "
            "which plans do not support; drop the plan (and --fit)",
        )
    if not isinstance(getattr(config.get_text_config(), "num_hidden_layers", None), int):
        raise UserError(
            "plan.no-layer-count",
            f"model type {config.model_type!r} has no number of decoder layers (num_hidden_layers), which plans need; "
            "use seqtile.apply",
        )


def build_bare(config: Any, setup: Setup, device: str, sample: LayerSample | None = None) -> Any:
    """The model as Transformers makes it, with all its layers or those of a ``sample``.

    Raises:
        UserError: it cannot, or it is no causal language model.
    """
    from transformers import AutoModelForCausalLM

    _refuse_config(config, setup)
    attention = register_flash() if setup.attention == "flash" else setup.attention
    classes = [auto for step_kind in step_kinds_of(config, setup) if (auto := step_kind.auto_class(config)) is not None]
    auto_class: Any = classes[0] if classes else AutoModelForCausalLM
    whole, config = config, copy.deepcopy(config) if sample is None else first_layers(config, max(sample.like) + 1)
    config.use_cache = False
    config.get_text_config().use_cache = False
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = auto_class.from_config(config, dtype=setup.dtype, attn_implementation=attention).train()
        # Transformers 5.0 leaves weights on the meta device untied:
        # https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/modeling_utils.py
        model.tie_weights()
        if sample is not None and sample.layers != tuple(range(config.get_text_config().num_hidden_layers)):
            sample.place(model, whole)
    except (ValueError, TypeError, ImportError, KeyError) as error:
        if error.args == (attention,):  # a model with a class for each kind of attention
            raise UserError(
                "plan.attention-unsupported",
                f"model type {config.model_type!r} has no {setup.attention} attention in transformers; try another "
                "attention, or use seqtile.apply",
            ) from None
        raise UserError(
            "plan.model-not-built", f"cannot build the model from its configuration: {str(error).splitlines()[0]}"
        ) from None
    return model


def _add_lora(model: Any, setup: Setup, device: str) -> tuple[Any, list[str]]:
    """The model with adapters, and what is to be said of them."""
    from peft import get_peft_model

    assert setup.lora is not None
    lora = setup.lora
    model.enable_input_require_grads()
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapters = lora_config(
            model, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, target_modules=lora.target_modules,
            packs_experts=setup.packs_experts,
            target_parameters=lora.target_parameters,
        )  # fmt: skip
        left_out = without_adapters(model, adapters, setup.packs_experts)
        if setup.pictures is not None and lora.target_modules == ALL_LINEAR:
            leave_out(adapters, model, find_unread(model))  # as seqtile train
        try:
            adapted = get_peft_model(model, adapters)
        except ValueError as error:
            raise UserError(
                "plan.adapters-not-added", f"cannot add the adapters: {str(error).splitlines()[0]}"
            ) from None
    return adapted, [] if left_out is None else [left_out]


def fake_step(
    config: Any, setup: Setup, tokens: int, workspace: Workspace | None = None, sample: LayerSample | None = None
) -> StepRun:  # fmt: skip
    """One step of ``tokens`` tokens on fake tensors: its shapes only, in a second or so.

    With a ``sample`` the model has these layers only. The model is tiled on the meta device, where its structure is
    proof enough, and then gets fake weights. Threads run their steps one after another.
    """
    kinds = step_kinds_of(config, setup)

    def step(config: Any, *, whole: bool = False) -> StepRun:
        for dtype in LOW:
            products_sum_in_fp32("cpu", dtype)  # probed with real numbers, before fake tensors
        built = build(config, setup, "meta", sample)
        with (
            _as_on(setup.device_type),
            fake_tensors() as shapes,
            track(workspace, tokens, shapes) as live,
            ExitStack() as running,
        ):
            with live.phase(Phase(WEIGHTS)):
                make_fake(built.model)
            for step_kind in kinds:
                running.enter_context(step_kind.running(built.model, setup, tokens))
            for tower in VisionTechnique.installed(built.model):
                tower.live_bytes = lambda: live.now
            middle = MiddleTiles(live)
            if not whole:
                running.enter_context(middle.left_out())
            run = tracked_step(built, setup, tokens, live)
        return run if middle.alike else step(config, whole=True)

    for step_kind in kinds:
        step = partial(step_kind.run, step=step)
    with FAKE_RUN, callers_modes_off():
        return step(config)


def real_step(config: Any, setup: Setup, tokens: int) -> StepRun:
    """The same step on real tensors on the CPU, followed by the same tracker."""
    with track(tokens=tokens) as live:
        with live.phase(Phase(WEIGHTS)):
            built = build(config, setup, "cpu")
        return tracked_step(built, setup, tokens, live)


def tracked_step(built: Built, setup: Setup, tokens: int, live: Tracker) -> StepRun:
    """One step in the middle of a training run, followed by ``live``: the optimizer has its states already.

    Of several batches that are accumulated only the last one runs, which holds the most.
    """
    model = built.model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    layers = [model.get_submodule(layer.name) for layer in decoder_layers(model)]
    for tensor in (*model.parameters(), *(buffer for layer in layers for buffer in layer.buffers())):
        live.file(tensor, WEIGHTS)
    optimizer = make_optimizer(setup.optimizer, weights)
    purposes = [step_kind.batch_purpose for step_kind in step_kinds_of(causal_model(model).config, setup)]
    with live.phase(Phase(next((purpose for purpose in purposes if purpose != REST), REST))):
        batch = make_batch(model, setup, tokens, weights[0].device)
    if setup.options.vision is not None:  # the first call verifies groups, which takes memory that no later one does
        compute_loss(model, setup, batch)
    with live.phase(Phase(OPTIMIZER)):
        prepare_optimizer(optimizer, weights)
    if setup.accumulation > 1:  # the last of several batches: every gradient of those before is there throughout
        with live.phase(Phase(GRADIENTS)):
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
    chunked = setup.options.chunk is not None
    pictures = setup.pictures is not None
    with _file_step_tensors(model, layers, weights, setup, live) as end_forward:
        with (
            log_level(block_logger.name, logging.ERROR) if chunked else nullcontext(),  # our hooks are news to it
            _file_kept_tiles(live),
            _file_kept_of_chunks(live),
            label_phases(live, model, built.blocks, layers=True, pictures=pictures, chunked=chunked) as labels,
        ):
            loss = compute_loss(model, setup, batch)
            end_forward()
            with in_precision(setup, next(iter(batch.values())).device.type):
                for step_kind in step_kinds_of(causal_model(model).config, setup):
                    step_kind.after_forward(model, setup, batch)
            labels.begin_backward()
            backward_in_modes(loss)
            del loss
        with live.phase(Phase(OPTIMIZER_STEP)):
            update(optimizer, weights)
    return StepRun(len(layers), tokens * setup.batch, dict(live.peaks), tuple(live.operators), live.square)


@contextmanager
def _file_step_tensors(
    model: Any, layers: Sequence[nn.Module], weights: Sequence[Tensor], setup: Setup, live: Tracker
) -> Iterator[Callable[[], None]]:
    """Inside, ``live`` files checkpoints, kept attention outputs and gradients; call its result after the forward."""
    in_forward, policies = True, dict(zip(layers, layer_policies(setup.options.checkpoint, len(layers)), strict=True))
    policy = "layer" if setup.options.by_layer else setup.options.checkpoint  # of what runs: first a vision tower

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal policy
        policy = policies[module]
        hidden_states = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if in_forward and policy is not None and hidden_states is not None:
            live.file(hidden_states, CHECKPOINTS)

    def end_forward() -> None:
        nonlocal in_forward
        in_forward = False

    handles: list[Any] = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles += [
        weight.register_post_accumulate_grad_hook(lambda weight: live.file(weight.grad, GRADIENTS))
        for weight in weights
    ]
    if setup.options.saves_attention:
        live.purpose_of = lambda func: (
            KEPT if in_forward and policy == "attention-saved" and is_attention(func) else None
        )
    if setup.options.chunk is not None:
        live.purpose_of = lambda func: PIECE_GRADIENTS if func is FLASH_CPU_BACKWARD else None
    for checkpointing in installed_checkpointing(model):
        if checkpointing.attention is not None:
            checkpointing.attention.on_kept = lambda tensor: live.file(tensor, KEPT)
    live.watching = True
    try:
        yield end_forward
    finally:
        live.watching = False
        for handle in handles:
            handle.remove()


def prepare_optimizer(optimizer: Any, weights: Sequence[Tensor]) -> None:
    """Make the optimizer's states, as its first step does."""
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def update(optimizer: Any, weights: Sequence[Tensor]) -> None:
    """The end of a trainer's step: clip the gradient's norm, step, zero the gradients."""
    nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_batch(model: Any, setup: Setup, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """The model's inputs: ``input_ids`` and ``labels`` ``[B, T]``, as the kind of step changes them."""
    ids = torch.zeros(setup.batch, tokens, dtype=torch.long, device=device)
    batch = {"input_ids": ids, "labels": ids}
    causal = causal_model(model)
    for step_kind in step_kinds_of(causal.config, setup):
        step_kind.change_batch(causal, setup, batch)
    return batch


def in_precision(setup: Setup, device_type: str) -> AbstractContextManager[Any]:
    """Autocast to bf16 where the step runs under it."""
    return torch.autocast(device_type, torch.bfloat16) if setup.autocast else nullcontext()


def compute_loss(model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> Tensor:
    """Forward of one batch up to its loss."""
    with in_precision(setup, next(iter(batch.values())).device.type):
        for step_kind in step_kinds_of(causal_model(model).config, setup):
            loss = step_kind.loss(model, setup, batch)
            if loss is not None:
                return loss
        own_loss: Tensor = model(**batch).loss
        return own_loss


@contextmanager
def _file_kept_tiles(live: Tracker) -> Iterator[None]:
    """Inside, what an MLP's tile keeps is filed as :data:`.KEPT_TILES`, while it is made too."""
    make = MlpPass.kept_value

    def kept(self: MlpPass, *args: Any) -> Tensor:
        values = make(self, *args)
        live.file(values, KEPT_TILES)
        return values

    MlpPass.kept_value = in_this_thread(kept, make)  # type: ignore[method-assign]
    try:
        yield
    finally:
        MlpPass.kept_value = make  # type: ignore[method-assign]


@contextmanager
def _file_kept_of_chunks(live: Tracker) -> Iterator[None]:
    """Inside, keys and values of chunks, their gradients, and states at chunks' starts are filed as such."""
    write, gradients, run = KeyValues.write, KeyValues.gradients, ChunkedCall.run

    def filed(purpose: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for tensor in tensors:
            live.file(tensor, purpose)
        return tensors

    def run_filed(self: ChunkedCall, *args: Any, **kwargs: Any) -> Any:
        result, state = run(self, *args, **kwargs)
        return result, filed(CHUNK_STATES, state)

    KeyValues.write = in_this_thread(lambda *args: filed(KEYS, write(*args)), write)  # type: ignore[method-assign]
    KeyValues.gradients = in_this_thread(  # type: ignore[method-assign]
        lambda *args: filed(KEY_GRADIENTS, gradients(*args)), gradients
    )
    ChunkedCall.run = in_this_thread(run_filed, run)  # type: ignore[method-assign]
    try:
        yield
    finally:
        KeyValues.write, KeyValues.gradients, ChunkedCall.run = (  # type: ignore[method-assign]
            write, gradients, run,
        )  # fmt: skip


@contextmanager
def _as_on(device_type: str) -> Iterator[None]:
    """Weight gradients summed, logits read and functions computed as on the device."""
    if device_type == "cpu":
        yield
        return
    with as_on_an_accelerator(), accelerator_functions():
        yield
