"""One training step, the real thing: on real tensors or on fake ones, by the same code."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqtile._compat import tree_iter
from seqtile._errors import UserError
from seqtile._log import log_level
from seqtile.activation_checkpointing.policies import standing_checkpointing
from seqtile.counting.fake import fake_tensors, make_fake
from seqtile.models.adapters import lora_config, without_adapters
from seqtile.models.apply import apply, apply_options, undo
from seqtile.models.discover.decoder_layers import decoder_layers
from seqtile.models.instance import Setting, installed_forwards
from seqtile.models.lm_loss.tiled_loss import standing_losses
from seqtile.ops.attention.group_core import Groups as HeadPasses
from seqtile.ops.attention.group_core import HeadGroup
from seqtile.ops.attention.head_groups import HeadGroupsPlan as HeadWiseCall
from seqtile.ops.attention.kernel_calls import is_attention
from seqtile.ops.grad_accumulator import LOW, as_on_an_accelerator, products_sum_in_fp32
from seqtile.ops.linear import Layer
from seqtile.ops.lm_loss.head_nodes import LossPlan as HeadCall
from seqtile.ops.lm_loss.logits_tile import BLOCK_ELEMENTS, HeadRows
from seqtile.ops.mlp_tile import MlpPlan as MlpCall
from seqtile.ops.mlp_tile import Pass as MlpPass
from seqtile.ops.token_tiles import Cuts
from seqtile.options import TilingOptions
from seqtile.planner.accelerator_functions import accelerator_functions
from seqtile.planner.encoders import add_masks, check_attention, lengthen_positions
from seqtile.planner.flash_shapes import register_flash_shapes as register_flash
from seqtile.planner.grpo import ROLLOUTS, make_rollouts, policy_loss
from seqtile.planner.layer_structure import LayerSample, first_layers
from seqtile.planner.liger_shapes import use_shapes as use_liger_shapes
from seqtile.planner.live_at_peaks import (
    CHECKPOINTS,
    GRADIENTS,
    KEPT,
    KEPT_TILES,
    OPTIMIZER,
    WEIGHTS,
    Held,
    PartPeak,
    Tracker,
    Workspace,
    track,
)
from seqtile.planner.model_shapes import is_masked_lm, towers_of
from seqtile.planner.phases import OPTIMIZER_STEP, causal_model, label_phases
from seqtile.planner.pictures import ANY_SIZE, ONE_SIZE, add_pictures, known_grids, tower_depths, with_tower
from seqtile.planner.scans import planned_scans
from seqtile.planner.step_config import Built, Setup, make_optimizer


class Trained(NamedTuple):
    """A weight that trains.

    Attributes:
        shape, dtype: its own.
        layer: the number of its decoder layer, None where it is in none.
        has_gradient: whether the step computes one.
    """

    shape: torch.Size
    dtype: torch.dtype
    layer: int | None
    has_gradient: bool


@dataclass(frozen=True)
class StepRun:
    """What one step held, part by part.

    Attributes:
        layers: number of decoder layers.
        tokens: tokens of the row (times rows).
        peaks: the peak of each phase of the step, by its name, such as ``"attention#0, backward"``.
        operators: names of all operators of the step in order.
        square: whether a tensor of ``[tokens, tokens]`` was seen at a peak.
        as_wide: whether a weight is as wide as a row is long, so that its hidden states look ``square`` too.
        trained: its weights that train.
        ran: how many operators ran in each phase.
        left, in_order: what decoder layers held when a part of the step ended, and whether those came in order, as of
            :class:`.Tracker`.
    """

    layers: int
    tokens: int
    peaks: Mapping[str, PartPeak]
    operators: tuple[str, ...]
    square: bool
    as_wide: bool = False
    trained: tuple[Trained, ...] = field(default=(), repr=False)
    ran: Mapping[str, int] = field(default_factory=dict, repr=False)
    left: Mapping[tuple[int | None, bool], Held] = field(default_factory=dict, repr=False)
    in_order: bool = True

    @property
    def peak(self) -> int:
        """Most bytes live at once, weights and all."""
        return max(part.total for part in self.peaks.values())

    def with_more(self, other: StepRun, times: int) -> StepRun:
        """This step with what ``other`` holds more, so many times."""

        def summed(one: Mapping[str, int], more: Mapping[str, int]) -> Counter[str]:
            counts = {what: one.get(what, 0) + times * (more.get(what, 0) - one.get(what, 0)) for what in {*one, *more}}
            return Counter(counts)

        peaks = {}
        for name, part in self.peaks.items():
            terms = summed(part.terms, other.peaks[name].terms)
            peaks[name] = replace(part, total=sum(terms.values()), terms=terms)
        return replace(self, peaks=peaks, square=self.square or other.square)


def build(config: Any, setup: Setup, device: str, sample: LayerSample | None = None) -> Built:
    """The model of ``config`` on ``device``, with random weights, ready to train as ``setup`` says.

    With a ``sample`` it has these layers only.

    Raises:
        UserError: Transformers cannot build it, or it has nothing to tile.
    """
    model, notes = build_weights(config, setup, device, sample)
    options, blocks = setup.options, tuple[Any, ...]()
    if options.checkpoint is not None:
        own: Any = causal_model(model)
        if not own.supports_gradient_checkpointing:
            raise UserError(
                f"{type(own).__name__} of the installed transformers has no activation checkpoints; use --checkpoint "
                "none"
            )
        with warnings.catch_warnings():
            # Transformers 5.23 has another name for it, and warns; 5.0 has this one alone:
            # https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if setup.liger:
        use_liger_shapes(model, tiled=options.tiled)
    # Proven in the mode of the step, with the functions that it calls; what was tiled is the plan's to say.
    functions = nullcontext() if setup.device_type == "cpu" else accelerator_functions()
    with log_level("seqtile.models", logging.ERROR), in_precision(setup, "cpu"), functions:
        if options.checkpoint == "full":
            options = replace(options, checkpoint=None)  # what the model has now
        if options.loss is None:
            options = replace(options, loss_tile="auto")
        if options.tiled:
            report = apply_options(model, options)
            blocks = report.blocks
        else:
            with suppress(UserError):  # there are none
                blocks = apply(model).blocks  # whose parts of the step are told apart untiled too
                undo(model)
            if options.beside_blocks:
                apply_options(model, options.without_blocks())
    return Built(model, blocks, notes)


def build_weights(config: Any, setup: Setup, device: str, sample: LayerSample | None = None) -> tuple[Any, list[str]]:
    """The model of :func:`build` as far as its weights go, adapters too, untiled; and what is to be said of them."""
    model = build_bare(config, setup, device, sample)
    return (model, []) if setup.lora is None else _add_lora(model, setup, device)


def build_bare(config: Any, setup: Setup, device: str, sample: LayerSample | None = None) -> Any:
    """The model as Transformers makes it, with all its layers or those of a ``sample``.

    Raises:
        UserError: it cannot, or it is no causal or masked language model.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMaskedLM,
    )

    masked = is_masked_lm(config) and not towers_of(config)
    both = bool(getattr(config, "is_encoder_decoder", False))
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not is_masked_lm(config)
    known = masked or causal or setup.pictures is not None or hasattr(config, "auto_map")
    if both or not known:
        what, instead = "no causal or masked language model of transformers", "the configuration of one"
        if both:
            what = "an encoder-decoder, whose rows have two lengths"
        elif is_masked_lm(config):
            what = "an encoder with a tower for pictures"
        elif config.model_type in ANY_SIZE + ONE_SIZE:
            what = "a language model with a tower for pictures"
            instead = "its pictures too (--images N)"
        elif towers_of(config) and type(text := config.get_text_config()) in MODEL_FOR_CAUSAL_LM_MAPPING:
            what = "a language model with a tower for pictures or sound"
            instead = f"that of its language model alone ({text.model_type}), and count the tokens of pictures as text"
        raise UserError(
            f"model type {config.model_type!r} is {what}, and a plan is of a causal or a masked language model; give "
            f"{instead}"
        )
    if masked:
        check_attention(config)

    if getattr(config.get_text_config(), "hidden_size_per_layer_input", None):
        raise UserError(
            f"model type {config.model_type!r} gives each decoder layer embeddings of its own "
            "(hidden_size_per_layer_input), whose gradients no plan counts; leave the plan out (and --fit)"
        )

    attention = register_flash() if setup.attention == "flash" else setup.attention
    whole, config = config, copy.deepcopy(config) if sample is None else first_layers(config, max(sample.like) + 1)
    if getattr(config, "sparse_prediction", False):  # ModernBERT's logits of masked tokens alone: no shape tells them
        config.sparse_prediction = False  # as many as tokens at most, which the plan's notes say
    config.use_cache = False
    config.get_text_config().use_cache = False
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            of_text: Any = AutoModelForMaskedLM if masked else AutoModelForCausalLM
            kind: Any = of_text if setup.pictures is None else AutoModelForImageTextToText
            model = kind.from_config(config, dtype=setup.dtype, attn_implementation=attention).train()
        # Transformers 5.0 leaves weights on the meta device untied:
        # https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/modeling_utils.py
        model.tie_weights()
        if sample is not None and sample.layers != tuple(range(config.get_text_config().num_hidden_layers)):
            sample.place(model, whole)
    except (ValueError, TypeError, ImportError, KeyError) as error:
        raise UserError(f"the model cannot be built from its configuration: {str(error).splitlines()[0]}") from None
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
            model, r=lora.r, alpha=lora.alpha, dropout=lora.dropout, target_modules=lora.target_modules
        )
        try:
            adapted = get_peft_model(model, adapters)
        except ValueError as error:
            raise UserError(f"the adapters cannot be made: {str(error).splitlines()[0]}") from None
    left_out = without_adapters(model, adapters)
    return adapted, [] if left_out is None else [left_out]


def fake_step(
    config: Any, setup: Setup, tokens: int, workspace: Workspace | None = None, sample: LayerSample | None = None,
    built: Built | None = None,
) -> StepRun:  # fmt: skip
    """One step of ``tokens`` tokens on fake tensors: its shapes only, in a second or so.

    With a ``sample`` the model has these layers only; ``built`` is that model from :func:`build`, whose tiles may have
    other sizes and keep more or less, and stays as it is (but tiles with a state are tried out in its first step).
    A vision tower is run at two small depths, and what one more of its layers adds is counted for the others.

    The model is found and tiled on the meta device, where its structure is proof enough, and then gets fake weights.
    """
    if setup.pictures is not None and (depths := tower_depths(config)):
        first, second = (
            _fake_step(with_tower(config, depth), setup, tokens, workspace, sample) for depth in depths[:2]
        )
        return first.with_more(second, depths[2] - depths[0])
    return _fake_step(config, setup, tokens, workspace, sample, built)


def _fake_step(
    config: Any, setup: Setup, tokens: int, workspace: Workspace | None, sample: LayerSample | None,
    built: Built | None = None,
) -> StepRun:  # fmt: skip
    for dtype in LOW:
        products_sum_in_fp32("cpu", dtype)  # probed with numbers, so before there are none
    if built is None:
        built = build(config, setup, "meta", sample)
    with (
        _left_as_it_was(built.model),
        _tiles_of(setup.options, built.model),
        _sized_for(setup),
        fake_tensors() as shapes,
        track("cpu", workspace, tokens, shapes) as live,
    ):
        with live.phase(WEIGHTS):
            make_fake(built.model)
            if is_masked_lm(config):
                lengthen_positions(built.model, tokens)
        pictures: Any = nullcontext()
        if setup.pictures is not None:
            pictures = known_grids(built.model, setup.picture_tokens, whole=setup.attention == "flash")
        with planned_scans(built.model, setup.scans), pictures:
            return tracked_step(built, setup, tokens, live)


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Inside, weights and buffers may be replaced; at the end every module has its attributes of the beginning."""
    dictionaries = [own for module in model.modules() for own in (vars(module), *vars(module).values())]
    before = [(own, own.copy()) for own in dictionaries if isinstance(own, dict)]
    try:
        yield
    finally:
        for own, former in before:
            own.clear()
            own.update(former)


@contextmanager
def _tiles_of(options: TilingOptions, model: nn.Module) -> Iterator[None]:
    """Inside, a tiled model's blocks and head run in tiles of as many tokens as ``options`` say, if they do.

    As many of the blocks' tiles keep gate and up as they say, too.
    """
    tiled: list[tuple[Any, str, Any]] = []
    if isinstance(options.tile, int):
        blocks = [one for one in installed_forwards(model) if isinstance(one.setting, Setting)]
        rule, keep = options.tile_rule, options.keep_rule(1)
        tiled += [(one, "setting", replace(one.setting, rule=rule, keep=keep)) for one in blocks]
    if isinstance(options.loss_tile, int):
        tiled += [(one, "rule", options.loss_rule) for one in standing_losses(model)]
    before = [getattr(owner, name) for owner, name, _ in tiled]
    for owner, name, value in tiled:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), value in zip(tiled, before, strict=True):
            setattr(owner, name, value)


@lru_cache(64)
def fake_update(optimizer_name: str, device_type: str, trained: tuple[Trained, ...]) -> PartPeak:
    """What the optimiser's step of such weights holds, nothing else run."""
    with _sized_for(Setup(device_type=device_type)), fake_tensors() as shapes, track("cpu", shapes=shapes) as live:
        with live.phase(WEIGHTS):
            weights = [nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="cpu")) for one in trained]
        optimizer = make_optimizer(optimizer_name, weights)
        with live.phase(OPTIMIZER):
            prepare_optimizer(optimizer, weights)
        with live.phase(GRADIENTS):
            for weight, one in zip(weights, trained, strict=True):
                weight.grad = torch.zeros_like(weight) if one.has_gradient else None
        live.watching = True
        with live.phase(OPTIMIZER_STEP):
            update(optimizer, weights)
    return live.peaks[OPTIMIZER_STEP]


def real_step(config: Any, setup: Setup, tokens: int) -> StepRun:
    """The same step on real tensors on the CPU, followed by the same tracker."""
    with track("cpu", None, tokens) as live:
        with live.phase(WEIGHTS):
            built = build(config, setup, "cpu")
        return tracked_step(built, setup, tokens, live)


def tracked_step(built: Built, setup: Setup, tokens: int, live: Tracker) -> StepRun:
    """One step in the middle of a training run, followed by ``live``: the optimiser has its states already.

    Of several batches that are accumulated only the last one runs, which holds the most.
    """
    model = built.model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    layers = [model.get_submodule(layer.name) for layer in decoder_layers(model)]
    layer_of: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for held in (*layer.parameters(), *layer.buffers()):
            layer_of[id(held)] = number
            live.file(held, WEIGHTS, number)
    optimizer = make_optimizer(setup.optimizer, weights)
    device = weights[0].device
    if setup.rollouts is not None:
        with live.phase(ROLLOUTS):
            given = make_rollouts(setup.rollouts, tokens, device)
        batch = {name: values[: setup.batch] for name, values in given.items()}
    else:
        batch = make_batch(model, setup, tokens, device)
    with live.phase(OPTIMIZER):
        prepare_optimizer(optimizer, weights)
    for weight, states in optimizer.state.items():
        for one in tree_iter(states):
            if isinstance(one, Tensor):
                live.file(one, OPTIMIZER, layer_of.get(id(weight)))
    in_forward = True

    def enter(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)), None)
        if in_forward and setup.options.checkpoint and hidden is not None:
            live.file(hidden, CHECKPOINTS, number)

    handles: list[Any] = [
        layer.register_forward_pre_hook(partial(enter, number), with_kwargs=True) for number, layer in enumerate(layers)
    ]
    handles += [
        weight.register_post_accumulate_grad_hook(
            lambda weight: live.file(weight.grad, GRADIENTS, layer_of.get(id(weight)))
        )
        for weight in weights
    ]
    live.keeps = is_attention if setup.options.checkpoint == "attention-saved" else None
    for one in standing_checkpointing(model):
        if one.attention is not None:
            one.attention.told = lambda tensor: live.file(tensor, KEPT)
    if setup.accumulation > 1:  # the last of several batches: every gradient of those before is there throughout
        with live.phase(GRADIENTS):
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
                live.file(weight.grad, GRADIENTS, layer_of.get(id(weight)))
    live.watching = True
    on_cpu = setup.device_type == "cpu"
    try:
        with (
            count_generator_states(live) if on_cpu else nullcontext(),
            _file_kept_tiles(live),
            label_phases(live, model, built.blocks, layers=True, pictures=setup.pictures is not None) as labels,
        ):
            loss = compute_loss(model, setup, batch)
            in_forward = False
            labels.begin_backward()
            loss.backward()
            del loss
        trained = tuple(
            Trained(weight.shape, weight.dtype, layer_of.get(id(weight)), weight.grad is not None) for weight in weights
        )
        with live.phase(OPTIMIZER_STEP):
            update(optimizer, weights)
    finally:
        live.watching = False
        for handle in handles:
            handle.remove()
    as_wide = any(tokens in weight.shape for weight in model.parameters())
    peaks, operators, rows = dict(live.peaks), tuple(live.operators), tokens * setup.batch
    return StepRun(
        len(layers), rows, peaks, operators, live.square, as_wide, trained, live.ran, live.left, live.in_order
    )


def prepare_optimizer(optimizer: Any, weights: Sequence[Tensor]) -> None:
    """Make the optimiser's states, as its first step does."""
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def update(optimizer: Any, weights: Sequence[Tensor]) -> None:
    """What trainers do after a backward: clip the gradient's norm, step, forget the gradients."""
    nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def make_batch(model: Any, setup: Setup, tokens: int, device: torch.device) -> dict[str, Tensor]:
    """What the model is given of a supervised step: ``input_ids`` and ``labels`` ``[B, T]``, and of pictures more."""
    ids = torch.zeros(setup.batch, tokens, dtype=torch.long, device=device)
    own = causal_model(model)
    if is_masked_lm(own.config):
        return {"input_ids": ids, "labels": ids.clone(), **add_masks(own, ids)}
    more = {} if setup.pictures is None else add_pictures(own, setup.pictures, ids)
    return {"input_ids": ids, "labels": ids, **more}


def in_precision(setup: Setup, device_type: str) -> AbstractContextManager[Any]:
    """Autocast to bf16 where the step runs under it."""
    return torch.autocast(device_type, torch.bfloat16) if setup.autocast else nullcontext()


def compute_loss(model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> Tensor:
    """Forward of one batch up to its loss; of GRPO, with what was generated and scored."""
    device = next(iter(batch.values())).device
    with in_precision(setup, device.type):
        if setup.rollouts is not None:
            return policy_loss(model, setup.rollouts, batch)
        loss: Tensor = model(**batch).loss
        return loss


def _ends(parts: Callable[..., Iterator[Any]], last_tells: bool = True) -> Callable[..., Iterator[Any]]:
    """The first, the second and the last of what ``parts`` yields.

    For parts of which nothing outlives its turn: those in between hold what the second holds, and a plan has some ten
    thousand of them. Where that is also what the last of its length holds (``last_tells``), the second is left out.
    """

    def ends(*args: Any) -> Iterator[Any]:
        found = list(parts(*args))
        if last_tells and len(found) > 2 and (size := _size_of(found[1])) and size == _size_of(found[-1]):
            found = [found[0], found[-1]]
        yield from found if len(found) <= 3 else (*found[:2], found[-1])

    return ends


def _kept_as_one(parts: Callable[[MlpCall], Iterator[Any]]) -> Callable[[MlpCall], Iterator[Any]]:
    """The ends of an MLP's tiles that keep gate and up, and of the others; those in between that keep them are one."""

    def some(call: MlpCall) -> Iterator[Any]:
        tiles = list(parts(call))
        kept, rest = tiles[: call.keep], tiles[call.keep :]
        if len(kept) > 4:  # nothing of it runs, what it keeps is held: see _unless_several
            start, size = kept[2][1][0], sum(tokens for _, (_, tokens) in kept[2:-1])
            kept[2:-1] = [(2, (start, size))]
        yield from (*kept, *_ends(lambda: iter(rest))())

    return some


def _unless_several(run: Callable[..., Any], instead: Callable[[MlpPass, int], Any]) -> Callable[..., Any]:
    """A forward or a backward of an MLP's tile; of several tiles in one, ``instead`` makes what it returns."""

    def some(self: MlpPass, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        several = x.shape[0] > max(self.plan.sizes)
        return instead(self, x.shape[0]) if several else run(self, x, *args, **kwargs)

    return some


def _size_of(part: Any) -> int:
    """Tokens of a tile that is a slice, (start, tokens) or (number, (start, tokens)), heads of a pass; 0 for others."""
    if isinstance(part, slice):
        return int(part.stop - part.start)
    if isinstance(part[0], HeadGroup):
        return part[0].size
    last = part[-1]
    last = last[-1] if isinstance(last, tuple) and last else last
    return last if isinstance(last, int) else 0


def _like_the_second(run: Callable[..., Any]) -> Callable[..., Any]:
    """Passes over heads: from the third to the last but one with new tensors like the second's results, without a run.

    What a pass returns stays until the backward, its output until it is copied.
    """
    second: dict[int, Callable[[], Any]] = {}  # by the call

    def some(self: HeadPasses, cut: Any, *args: Any) -> Any:
        number, last = self.cuts.index(cut), len(self.cuts) - 1
        if number == last:
            second.pop(id(self), None)
        elif number > 1 and cut.size == self.cuts[1].size and id(self) in second:
            return second[id(self)]()
        output, beside, recorded, extra = run(self, cut, *args)
        alone = not any(isinstance(one, Tensor) for one in tree_iter(beside))
        if number == 1 < last and alone and all(map(_fills_its_storage, (output, *extra))):
            made = [(one.shape, one.stride(), one.dtype) for one in (output, *extra)]

            def again(device: Any = output.device) -> Any:
                first, *more = (torch.empty_strided(*laid, dtype=dtype, device=device) for *laid, dtype in made)
                return first, beside, recorded, more

            second[id(self)] = again
        return output, beside, recorded, extra

    return some


def _fills_its_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@contextmanager
def _file_kept_tiles(live: Tracker) -> Iterator[None]:
    """Inside, what an MLP's tile keeps is filed as :data:`.KEPT_TILES`."""
    run = MlpPass.forward

    def forward(self: MlpPass, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        values = run(self, *args, **kwargs)
        for value in values:
            live.file(value, KEPT_TILES)
        return values

    MlpPass.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        MlpPass.forward = run  # type: ignore[method-assign]


@contextmanager
def count_generator_states(live: Tracker) -> Iterator[None]:
    """Count the states of the CPU's generator: PyTorch's checkpoint keeps one per call, 5,056 bytes, in host memory."""
    former = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = former()
        live.add(state)
        return state

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = former


@contextmanager
def _sized_for(setup: Setup) -> Iterator[None]:
    """The head's blocks of rows as large as on the device, and weight gradients summed as there.

    Of the head's tiles, of a tile's blocks of logits, of a product's pieces, of the tiles around head-wise attention
    and the passes of its backward, of those of its forward unless a checkpoint keeps what they return, of the tiles of
    an MLP, and of those of the generic operator unless they hand on a state, only the first and the last are run, and
    the second where it may differ. Of an MLP that goes for the tiles that keep gate and up and for the others.
    """
    device_type = setup.device_type
    if device_type == "cpu":
        yield
        return
    replaced: list[tuple[Any, str, Any]] = [
        (owner, name, _ends(getattr(owner, name)))
        for owner, name in (
            (HeadCall, "parts"), (HeadRows, "blocks"), (Layer, "cuts"), (HeadWiseCall, "tiles"),
            (HeadPasses, "recorded"),
        )
    ]  # fmt: skip
    if not setup.options.state:  # in backward the first frees what others hold, and what the last makes stays
        replaced.append((Cuts, "numbered", _ends(Cuts.numbered, last_tells=False)))
    replaced += [
        (MlpCall, "tiles", _kept_as_one(MlpCall.tiles)),
        (MlpPass, "forward", _unless_several(MlpPass.forward, MlpPass.kept_values)),
        (MlpPass, "backward", _unless_several(MlpPass.backward, lambda *_: None)),
    ]
    if setup.options.checkpoint != "attention-saved":
        replaced.append((HeadPasses, "run", _like_the_second(HeadPasses.run)))
    before = [getattr(owner, name) for owner, name, _ in replaced]
    elements = BLOCK_ELEMENTS["cpu"]
    BLOCK_ELEMENTS["cpu"] = BLOCK_ELEMENTS.get(device_type, 2**25)
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        with as_on_an_accelerator(), accelerator_functions():
            yield
    finally:
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)
        BLOCK_ELEMENTS["cpu"] = elements
