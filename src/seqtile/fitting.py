"""Choose the settings that a length needs on a device, by the plan, for a live model or for a recipe.

:func:`fit` is for a model in memory. ``seqtile train --fit`` describes its recipe as a plan's question and chooses by
the same :func:`choose`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn

from seqtile._compat import attention_kind
from seqtile._errors import RunError, UserError, expect_module
from seqtile._log import first_rank_logger
from seqtile.checkpointing.policies import installed_checkpointing, is_on
from seqtile.devices import (
    accelerator,
    available_host_bytes,
    device_type,
    is_accelerator,
)
from seqtile.engines.granularity import refuse_wrapped
from seqtile.install.apply import apply_options
from seqtile.install.report import Report
from seqtile.lm_loss.tiled_loss import find_causal_lms
from seqtile.models.causal import causal_model
from seqtile.models.configs import refuse_encoder
from seqtile.options import DEFAULTS, TilingOptions, changed, unknown_keys
from seqtile.planner.accelerators import DEVICES, Device, device_here, find_device
from seqtile.planner.chooser import CHOSEN, Chosen, DoesNotFit, choose_settings, fixed_settings
from seqtile.planner.estimate import Estimate
from seqtile.planner.explain import other_step, planned_offload
from seqtile.planner.memory_plan import Planner
from seqtile.planner.model_errors import in_one_sentence
from seqtile.planner.names import STATE_BYTES
from seqtile.planner.pictures import read_pictures
from seqtile.planner.request import Request
from seqtile.planner.step_config import DIVERGENCE_TILE, PLANNED, Lora, TrainerStep
from seqtile.recognise.packed_experts import packed_experts

logger = first_rank_logger(__name__)

TRAINER_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_bnb_8bit": "adamw-8bit", "adamw_8bit": "adamw-8bit",
    "lion_32bit": "lion", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
"""The trainer's optimizers that a plan knows."""


@dataclass(frozen=True)
class Choice:
    """The settings that were chosen, why, one sentence each, and what the plan expects of them."""

    options: TilingOptions
    why: tuple[str, ...]
    estimate: Estimate
    planner: Planner | None = field(default=None, repr=False, compare=False)

    def with_notes(self) -> Choice:
        """The choice with the plan's notes, and without the planner, which is of this process and holds a model."""
        notes = [] if self.planner is None else self.planner.notes()
        return replace(self, why=(*self.why, *notes), planner=None)


def fit(
    model: nn.Module,
    *,
    max_length: int,
    device: str | torch.device | None = None,
    optimizer: str = "adamw",
    engine: str | None = None,
    sp_size: int = 1,
    cp_size: int = 1,
    lora: Any = None,
    batch_size: int = 1,
    gradient_accumulation: int = 1,
    autocast: bool = True,
    images: int | None = None,
    image_size: tuple[int, int] | None = None,
    frames: int | None = None,
    frame_size: tuple[int, int] | None = None,
    **settings: Any,
) -> Report:
    """Choose the settings to train ``model`` on ``max_length`` tokens on this device, and apply them in place.

    Replaces the search for arguments of :func:`seqtile.apply`. Of the settings whose high estimate fits, those are
    taken with which a step takes least time by the plan: ``tile``, ``loss``, ``loss_tile``, ``checkpoint``,
    ``offload``, ``heads``, ``keep``, ``blocks``, ``state``, ``chunk`` and ``segment``; with pictures also ``vision``:
    the tower runs whole where that fits beside the others. Memory that is left is spent on
    computing less again, in as many layers as fit (``checkpoint="none:3+attention-saved:20"``). Call it before an
    engine wraps the model, before or after adapters are added, and on every rank: the first one chooses. Activation
    checkpointing that is on stays on.

    Args:
        model: a causal language model of transformers, or a sequence classifier (a reward model) of the same
            architectures. Parameters that require a gradient train; rank and layers of
            LoRA adapters are read from its modules.
        max_length: tokens of the longest sequence, over all ranks that share it.
        device: device to plan for: ``"h100"``, a size such as ``"80GiB"`` (of the accelerator, or the host), or a torch
            device. None is the parameters' device; for a model on the CPU the accelerator, if there is one, else
            the host.
        optimizer: ``"adamw"``, ``"adamw-8bit"``, ``"lion"``, ``"sgd"``, ``"sgd-momentum"``, ``"adafactor"``, or a
            name of Transformers' (``optim=``).
        engine: ``"single"``, ``"ddp"``, ``"fsdp2"``, ``"zero2"`` or ``"zero3"``; None is ``"ddp"`` where ``WORLD_SIZE``
            is above 1, else ``"single"``.
        sp_size: ranks that share one sequence by Ulysses.
        cp_size: ranks that share one sequence by ring attention.
        lora: adapters that will be added later: their rank, or a ``peft.LoraConfig``.
        batch_size: sequences per rank and micro-batch.
        gradient_accumulation: micro-batches per update; from 2 on gradients are there during all of a step.
        autocast: whether fp32 weights on an accelerator train under bf16 autocast, as in TRL; no effect for 16-bit
            weights and on a CPU.
        images: pictures of each sequence; their tokens are part of ``max_length``.
        image_size: height and width of each in pixels.
        frames: frames of one video of each sequence, in place of pictures.
        frame_size: height and width of each in pixels.
        **settings: arguments of :func:`seqtile.apply` to fix; the others are chosen.

    Returns:
        Report: as from :func:`seqtile.apply`; ``report.settings`` has the chosen arguments, ``report.why`` the reasons.

    Cost:
        Some seconds per setting that is tried. No weight is read and nothing runs on the device.

    Raises:
        UserError: a wrong argument, or a model that cannot be planned.
        RunError: nothing fits; names the longest length that does, and what would help.
    """
    if sentence := unknown_keys(settings):
        if loaded_with := [key for key in ("attention", "dtype", "qlora") if key in settings]:
            sentence = f"{' and '.join(loaded_with)} is read from the model; load it that way"
        raise UserError("option.unknown", f"fit: {sentence}")
    choice = choose_for(
        model, TilingOptions(**settings), given=settings, max_length=max_length, device=device, optimizer=optimizer,
        engine=engine, sp_size=sp_size, cp_size=cp_size, lora=lora, batch=batch_size, autocast=autocast,
        accumulation=gradient_accumulation, media=media_of(images, image_size, frames, frame_size),
    )  # fmt: skip
    return apply_choice(model, choice)


def apply_choice(model: nn.Module, choice: Choice) -> Report:
    """Apply what was chosen, and put it into the report."""
    settings = {name: getattr(choice.options, name) for name in DEFAULTS}
    chosen = {name: value for name, value in settings.items() if value != DEFAULTS[name]}
    for sentence in choice.why:
        logger.info("fit: %s", sentence)
    return replace(apply_options(model, choice.options, others_stay=False), settings=chosen, why=choice.why)


def media_of(
    images: int | None, image_size: tuple[int, int] | None, frames: int | None, frame_size: tuple[int, int] | None
) -> dict[str, Any] | None:
    """The pictures of each row as a plan reads them; None for rows of text.

    Raises:
        UserError: pictures and frames, or a size without either.
    """
    if (images or image_size) and (frames or frame_size) or (image_size and not images) or (frame_size and not frames):
        raise UserError(
            "frames.with-images",
            "got images beside frames, or a size alone; use images and image_size, or frames and frame_size",
        )
    return {"count": images, "size": image_size or frame_size, "frames": frames} if images or frames else None


def choose_for(
    model: nn.Module,
    options: TilingOptions,
    *,
    max_length: int,
    given: Container[str] = (),
    recomputes: bool | None = None,
    **question: Any,
) -> Choice:
    """Choose what :func:`fit` applies; ``question`` is for :func:`describe`.

    Args:
        options: those that are not at their default are kept.
        given: names of options that are kept at their default too.
        recomputes: whether activation checkpointing will be on whatever is chosen; None reads the model.
    """
    expect_module(model, "fit")
    refuse_wrapped(model)
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise UserError("max-length.too-small", f"got max_length={max_length!r}, expected an int of at least 2")
    request, notes = describe(model, options, **question)
    step = request.trainer or TrainerStep()
    loss, no_loss = _loss(model, options, "loss" in given, step)
    notes += no_loss
    if loss is None and step.head not in ("scores", "hidden"):  # whose own heads run in tiles
        request = replace(request, options=replace(request.options, loss=None, loss_tile="auto"))
    fixed = fixed_settings(options, given)
    if step.head == "hidden":
        fixed["loss_tile"] = DIVERGENCE_TILE
    checkpointed = bool(recomputes)
    if recomputes is None:  # what an earlier call switched on is switched off before the choice is applied
        checkpointed = is_on(causal_model(model)) and not any(p.switched_on for p in installed_checkpointing(model))

    def choose_here() -> Choice:
        with in_one_sentence(request.config):
            return choose(request, max_length, fixed, checkpointed=checkpointed).with_notes()

    choice = _by_first_rank(choose_here)
    chosen = {name: getattr(choice.options, name) for name in CHOSEN if name not in fixed}
    if loss is None:
        chosen.pop("loss_tile", None)
    chosen_options = replace(options, loss=loss, vision=choice.options.vision, **chosen)
    if step.head in ("pairs", "divergence"):
        whole = choice.estimate.terms.get("logits and loss", 0.0)
        defer = "; seqtile.integrations.trl.tile_trainer(trainer) computes them in tiles" if step.can_defer else ""
        notes.append(f"loss whole: the trainer computes whole logits, {whole / 2**30:,.2f} GiB at the peak{defer}")
    if checkpointed:
        notes.append("activation checkpointing was on already and stays on for every layer")
        if chosen_options.checkpoint == "layer" and not chosen_options.offload_room and "checkpoint" not in fixed:
            chosen_options = replace(chosen_options, checkpoint=None)  # nothing to change
    return replace(choice, options=chosen_options, why=(*choice.why, *notes))


def _by_first_rank(choose: Callable[[], Choice]) -> Choice:
    """The first rank's choice on every rank: what is free on a host differs from one moment to the next."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return choose()
    answer: list[Any] = [None]
    error: Exception | None = None
    if distributed.get_rank() == 0:
        try:
            answer = [choose()]
        except Exception as raised:  # noqa: BLE001 - whatever it is, the other ranks wait for an answer
            error = raised
            answer = [str(raised) or type(raised).__name__]
    distributed.broadcast_object_list(answer)
    if error is not None:
        raise error
    if isinstance(answer[0], str):
        raise RunError(answer[0])
    return cast(Choice, answer[0])


def _loss(model: nn.Module, options: TilingOptions, is_given: bool, step: TrainerStep) -> tuple[str | None, list[str]]:
    """The loss to apply: as given, or tiled where the step calls the model's loss or head; and a note if not."""
    if is_given or options.loss is not None:
        return options.loss, []
    if not step.tiles_loss:
        return None, []
    try:
        find_causal_lms(model)
    except UserError:
        return None, [f"loss whole: {type(causal_model(model)).__name__} computes its loss in its own code"]
    return "tiled", []


def choose(
    request: Request, max_length: int, fixed: Mapping[str, Any], *, packed: bool = False, checkpointed: bool = False
) -> Choice:
    """The settings that cost least time among those that fit, by :func:`seqtile.planner.chooser.choose_settings`.

    A vision tower is first planned in groups, and runs whole if it fits beside the chosen settings. Checkpoints and
    weights go to a host whose memory is known.

    Args:
        fixed: settings that stay, from :func:`seqtile.planner.chooser.fixed_settings`.
        packed: whether rows hold several documents.
        checkpointed: whether every layer is checkpointed whatever is chosen.

    Raises:
        DoesNotFit: with the longest length that does, and what would help.
    """
    cuts_tower = request.pictures is not None and request.options.vision is None and "vision" not in fixed
    if cuts_tower:
        request = changed(request, vision="auto")
    try:
        chosen = choose_settings(
            request, max_length, fixed, can_offload=request.host_memory is not None, checkpointed=checkpointed
        )
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}; {_what_helps(error)}", error.planner, error.longest) from None
    whole = _with_whole_tower(request, chosen, max_length) if cuts_tower and chosen.sure else None
    chosen = whole or chosen
    estimate = chosen.estimate
    device_count = f"{request.gpus} x " if request.gpus > 1 else ""
    memory_gib = request.device.memory / 2**30
    why = [
        (
            f"{max_length:,} tokens per sequence on {device_count}{request.device.name} with {memory_gib:,.2f} GiB: "
            f"{estimate.device.expected / 2**30:,.2f} GiB expected, {estimate.device.high / 2**30:,.2f} GiB at "
            f"most, peak in the {estimate.peak_at}"
        )
    ]
    if not chosen.sure:
        why.append("the high estimate does not fit; smaller tiles use less if this runs out of memory")
    if estimate.square or (request.attention == "sdpa" and packed):
        why.append("not included: the [tokens, tokens] mask that sdpa attention builds for packed documents")
    options = chosen.settings
    if options.offload:
        options = replace(options, offload=planned_offload(chosen.planner, estimate))
    chosen_values = {
        "tile": options.tile if options.tiled else "none", "loss_tile": options.loss_tile,
        "checkpoint": options.checkpoint or "none", "keep": options.keep,
        "offload": options.offload if isinstance(options.offload, str) else str(options.offload).lower(),
        "blocks": options.blocks, "heads": options.heads or "all", "state": options.state or "whole",
        "chunk": options.chunk, "segment": options.segment,
    }  # fmt: skip
    why += [f"{name} {chosen_values[name]}: {chosen.reasons[name]}" for name in chosen_values if name in chosen.reasons]
    if cuts_tower:
        vision, verb = ("none", "fits") if whole else ("auto", "does not fit")
        why.append(f"vision {vision}: the whole tower {verb} beside these settings")
    return Choice(options, tuple(why), estimate, chosen.planner)


def _with_whole_tower(request: Request, chosen: Chosen, max_length: int) -> Chosen | None:
    """The same settings with the vision tower whole; None where that does not fit."""
    settings = replace(chosen.settings, vision=None)
    planner = Planner(replace(request, options=settings), max_length, like=chosen.planner)
    estimate = planner.estimate(max_length)
    if not planner.fits_at_the_high_estimate(estimate):
        return None
    return replace(chosen, settings=settings, planner=planner, estimate=estimate)


def _what_helps(error: DoesNotFit) -> str:
    """What buys most length beside the settings, or devices and adapters."""
    step = other_step(error.planner, error.longest)
    if step is None:
        return "use more or larger devices, or adapters (lora, qlora)"
    setting = re.sub(r"--(\S+) (\S+)", lambda flag: f"{flag[1].replace('-', '_')}: {flag[2]}", step.flags)
    return f"with {setting.replace(' ', ', ').replace(':,', ':')} {step.length:,} tokens fit ({step.why})"


def describe(
    model: nn.Module, options: TilingOptions, *, device: str | torch.device | None = None, engine: str | None = None,
    lora: Any = None, autocast: bool = True, media: Mapping[str, Any] | None = None, step: TrainerStep | None = None,
    **fields: Any,
) -> tuple[Request, list[str]]:  # fmt: skip
    """Build the plan's request for a live model, and notes where the plan deviates from it; refuse other models.

    Args:
        model, device, engine, lora, autocast: as in :func:`fit`.
        media: pictures of each row, as :func:`seqtile.planner.pictures.read_pictures` takes them.
        step: what a trainer does beside a supervised step; None is nothing.
        **fields: fields of the request: ``optimizer`` (or the trainer's name of it), ``sp_size``, ``cp_size``,
            ``batch`` (rows of the trainer) and ``accumulation``.
    """
    causal = causal_model(model)
    config, step = _config_and_step(causal, step)
    model_name = str(getattr(config, "name_or_path", "") or type(causal).__name__)
    refuse_encoder(config, model_name)
    parameters = [*model.parameters()]
    experts_packed = bool(packed_experts(model))
    four_bit = _is_four_bit(causal, parameters, experts_packed)
    adapters = find_adapters(model) if lora is None else _adapters_to_come(lora)
    notes = _check_trainable(parameters, four_bit) if adapters is None else []
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    engine = engine or ("ddp" if world_size > 1 else "single")
    processes = 1 if engine == "single" else world_size
    on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", str(processes))) if processes > 1 else 1
    planned_device, planned_type = find_planned_device(model, device, on_this_host)
    fields["optimizer"] = planned_optimizer(fields.get("optimizer", Request.optimizer))
    fields["batch"] = fields.get("batch", Request.batch) * (step.rows if step else 1)
    # Without adapters in it yet, all of the model will be frozen.
    frozen = [weight for weight in parameters if lora is not None or not weight.requires_grad]
    dtype = _most_common_dtype(parameters if adapters is None else frozen)
    precision = planned_precision(dtype, planned_type, adapters is not None, four_bit, autocast)
    if adapters is not None:
        # PEFT's modules_to_save, which no plan includes
        reserved = _fully_trained_bytes(model, lora, fields["optimizer"])
        if precision != "float32":  # k-bit training's fp32 norms and embeddings
            reserved += sum(2 * weight.numel() for weight in frozen if weight.dtype == torch.float32)
        if reserved:
            planned_device = replace(planned_device, memory=max(1, planned_device.memory - int(reserved)))
            notes.append(f"{reserved / 2**30:,.2f} GiB are reserved for weights that train fully or are frozen in fp32")
    attention = planned_attention(attention_kind(config) or "sdpa")
    if step is not None:
        taken = int(step.frozen + step.margin * planned_device.memory)
        planned_device = replace(planned_device, memory=max(1, planned_device.memory - taken))
        notes += step.notes
        if step.head not in ("loss", "labels") and attention == "sdpa":
            notes.append("not included: the [tokens, tokens] mask that sdpa attention builds for padded rows")
    request = Request(
        model=model_name, config=config, device=planned_device, gpus=processes, nodes=max(1, processes // on_this_host),
        engine=engine, lora=adapters, qlora=four_bit, experts_packed=experts_packed, grpo=step.grpo if step else None,
        trainer=step, options=planned_options(options), scans="installed", precision=precision, attention=attention,
        device_type=planned_type, host_memory=None if planned_type == "cpu" else available_host_bytes() or None,
        pictures=None if media is None else read_pictures(config, **media), **fields,
    )  # fmt: skip
    return request, notes


def _config_and_step(causal: nn.Module, step: TrainerStep | None) -> tuple[Any, TrainerStep | None]:
    """The model's config, and the trainer's step; that of a classifier or a bare decoder has no language-model head."""
    config = getattr(causal, "config", None)
    has_head = getattr(causal, "get_output_embeddings", lambda: None)() is not None
    if not has_head and (is_classifier(causal) or is_bare_decoder(causal)):
        step, has_head = replace(step or TrainerStep(), head="labels"), True
    if config is None or not hasattr(config, "get_text_config") or not has_head:
        raise UserError(
            "fit.model-unsupported",
            f"fit got {type(causal).__name__}, expected a causal language model, or its decoder or a sequence "
            "classifier of transformers (the plan builds one from its config); use seqtile.apply",
        )
    return config, step


def _is_four_bit(causal: nn.Module, parameters: list[nn.Parameter], experts_packed: bool) -> bool:
    """Whether weights are bitsandbytes' 4-bit ones; refuse other quantizations."""
    four_bit = experts_packed or any(type(weight).__name__ == "Params4bit" for weight in parameters)
    if getattr(causal, "is_quantized", False) and not four_bit:
        raise UserError(
            "fit.quantization-unsupported",
            "fit supports no other quantized weights than bitsandbytes' 4-bit ones; use seqtile.apply",
        )
    return four_bit


def _check_trainable(parameters: list[nn.Parameter], four_bit: bool) -> list[str]:
    """Refuse a model without adapters and without a weight to train; return notes on frozen weights."""
    if four_bit:
        raise UserError(
            "fit.four-bit-without-adapters",
            "fit got 4-bit weights without adapters, which cannot train; add adapters, or pass lora=16",
        )
    if not any(weight.requires_grad for weight in parameters):
        raise UserError(
            "fit.nothing-trains", "fit got a model without trainable parameters; add adapters first, or pass lora=16"
        )
    if all(weight.requires_grad for weight in parameters):
        return []
    return ["some weights are frozen, but the plan counts all as trained, which overestimates memory"]


def _fully_trained_bytes(model: nn.Module, lora: Any, optimizer: str) -> float:
    """Bytes of weights that train fully beside adapters (PEFT's ``modules_to_save``), with gradients and states."""
    named, to_save = [*model.named_parameters()], set(getattr(lora, "modules_to_save", None) or ())
    if lora is None:
        fully_trained = [weight for name, weight in named if weight.requires_grad and "lora_" not in name]
    else:
        fully_trained = [weight for name, weight in named if to_save & set(name.split("."))]
    state_bytes = 2 + STATE_BYTES[optimizer] / 4
    return sum(weight.numel() * weight.element_size() * state_bytes for weight in fully_trained)


def is_classifier(model: nn.Module) -> bool:
    """Whether ``model`` returns a few numbers for each sequence, from the hidden states of its last token."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    classes: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.values()
    return type(model) in classes


def is_bare_decoder(model: nn.Module) -> bool:
    """Whether ``model`` is a decoder that returns hidden states, as embedding models do: planned as a classifier."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING

    config: Any = type(getattr(model, "config", None))
    mappings: tuple[Any, ...] = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    bare: Any = MODEL_MAPPING.get(config, None)
    return type(model) is bare and all(config in mapping for mapping in mappings)


def find_adapters(model: nn.Module) -> Lora | None:
    """The LoRA adapters in ``model`` that train: the largest rank, and the ends of their layers' names."""
    ranks, dropouts, layers, parameters = [0], [0.0], set(), dict[str, int]()
    for name, module in model.named_modules():
        adapters = getattr(module, "lora_A", None)
        if not isinstance(adapters, nn.ModuleDict):
            continue
        trained_adapters = [
            adapter for adapter, down in adapters.items() if any(w.requires_grad for w in down.parameters())
        ]
        if not trained_adapters:
            continue
        while name.endswith(".base_layer"):  # wrappers of one module's parameters are nested
            name = name.removesuffix(".base_layer")
        trained_ranks = [int(getattr(module, "r", {}).get(adapter, 0)) for adapter in trained_adapters]
        if parameter := getattr(module, "parameter_name", None):
            parameters[f"{name.rpartition('.')[2]}.{parameter}"] = max(trained_ranks)
        else:
            layers.add(name.rpartition(".")[2])
            ranks += trained_ranks
            dropouts += [float(getattr(drop, "p", 0.0)) for drop in getattr(module, "lora_dropout", {}).values()]
    if not layers and not parameters:
        return None
    return Lora(
        max(ranks) or min(parameters.values()), tuple(sorted(layers)), dropout=max(dropouts),
        target_parameters=tuple(sorted(parameters.items())),
    )  # fmt: skip


def _adapters_to_come(lora: Any) -> Lora:
    if isinstance(lora, int) and not isinstance(lora, bool) and lora > 0:
        return Lora(lora)
    targets = getattr(lora, "target_modules", None) or Lora.target_modules
    if not isinstance(getattr(lora, "r", None), int):
        raise UserError(
            "fit.lora-wrong-type", f"got lora={lora!r}, expected the rank of the adapters to add, or a peft.LoraConfig"
        )
    rank = max([lora.r, *(getattr(lora, "rank_pattern", None) or {}).values()])
    return Lora(
        rank, targets if isinstance(targets, str) else tuple(sorted(targets)),
        dropout=float(getattr(lora, "lora_dropout", 0.0)),
    )  # fmt: skip


def find_planned_device(model: nn.Module, device: str | torch.device | None, processes: int) -> tuple[Device, str]:
    """The device that is planned for, and its type.

    Raises:
        UserError: no such device, or the system does not report its memory.
    """
    if isinstance(device, str):
        device_name_or_size = device
        try:
            device = torch.device(device_name_or_size)
        except RuntimeError:
            preset = find_device(device_name_or_size)
            return preset, "cuda" if preset.name in DEVICES else device_type()
    if device is not None and not isinstance(device, torch.device):
        raise UserError(
            "device.malformed", f"got device={device!r}, expected 'h100', a size such as '80GiB', or a torch device"
        )
    if device is None:
        device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        if device.type in ("cpu", "meta"):  # which a trainer moves to the accelerator
            device = accelerator() or torch.device("cpu")
    if is_accelerator(device):
        return device_here(device.index), device.type
    if device.type != "cpu":
        raise UserError(
            "device.absent", f"device {str(device)!r} is not on this machine; pass its memory, such as device='80GiB'"
        )
    model_bytes = sum(w.numel() * w.element_size() for w in model.parameters() if w.device.type == "cpu")
    return host_as_device(processes, model_bytes), "cpu"


def host_as_device(processes: int, model_bytes: int = 0) -> Device:
    """The host as a device of one of its ``processes``: its part of the free memory, and what its model has already.

    Raises:
        UserError: the system does not report its memory.
    """
    free = available_host_bytes()
    if not free:
        raise UserError(
            "device.memory-unreported",
            "this system does not report its free memory; pass it with --fit-memory, or device='16GiB'",
        )
    return Device(
        "this host", free // processes + model_bytes, None, "free memory of the host, divided by its processes"
    )


def planned_attention(implementation: str) -> str:
    """A plan's name of ``attn_implementation``, kernels of the Hub included."""
    kernel = implementation.rpartition("/")[2].partition("@")[0]
    if "flash" not in kernel:
        return kernel
    return "flash3" if "3" in kernel else "flash"


def planned_optimizer(name: str, arguments: Any = None) -> str:
    """A plan's name of an optimizer, which may be the trainer's.

    Raises:
        UserError: no plan knows it.
    """
    if name in STATE_BYTES and name != "sgd":
        return name
    if name not in TRAINER_OPTIMIZERS:
        names = ", ".join([*STATE_BYTES, *(other for other in TRAINER_OPTIMIZERS if other not in STATE_BYTES)])
        shown = repr(name) if isinstance(name, str) else type(name).__name__
        raise UserError("optimizer.unknown", f"got optimizer {shown}, expected one of {names}, or use seqtile.apply")
    return "sgd-momentum" if name == "sgd" and "momentum" in str(arguments) else TRAINER_OPTIMIZERS[name]


def planned_precision(
    dtype: torch.dtype, planned_type: str, adapters: bool, four_bit: bool = False, autocast: bool = True
) -> str:
    """A plan's precision for weights of ``dtype``; of a model with adapters, those of the frozen part."""
    low = dtype in (torch.bfloat16, torch.float16)
    if planned_type == "cpu":
        return "bfloat16" if low else "float32"
    if adapters:
        return "mixed" if low or four_bit else "float32"
    return "bfloat16" if low else "mixed" if autocast else "float32"


def _most_common_dtype(weights: Iterable[Tensor]) -> torch.dtype:
    """The floating dtype that most elements have; fp32 without any."""
    elements: Counter[torch.dtype] = Counter({torch.float32: 0})
    for weight in weights:
        if weight.is_floating_point():
            elements[weight.dtype] += max(weight.numel(), 1)  # ZeRO-3 holds none of it here
    return elements.most_common(1)[0][0]


def planned_options(options: TilingOptions) -> TilingOptions:
    """``options`` as a plan takes them, with what is chosen at its start."""
    options = options.for_plan()
    loss_tile = options.loss_tile if options.loss_tile != DEFAULTS["loss_tile"] else PLANNED.loss_tile
    return replace(
        options, loss="tiled", loss_tile=loss_tile, checkpoint=options.checkpoint or PLANNED.checkpoint,
        keep=0.0 if options.keep == "auto" else options.keep,
    )  # fmt: skip
