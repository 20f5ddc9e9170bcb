"""Load, check and tile the model and tokenizer of a recipe."""

from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.checkpointing.reentrant import shares_keys
from seqtile.devices import device_type
from seqtile.engines.sequence_parallel import refuse_split_states, why_no_ring
from seqtile.models.configs import max_positions, refuse_encoder
from seqtile.models.layer_fields import experts_of
from seqtile.models.rope_scaling import lift, scale_positions
from seqtile.recognise.decoder_layers import states_of
from seqtile.recognise.known_code import is_known
from seqtile.recognise.packed_experts import (
    TOO_LARGE,
    packed_experts,
    quantization_of,
    whole_experts,
    why_experts_stay_whole,
)
from seqtile.rules import ModelFacts, check_combination
from seqtile.train import demo
from seqtile.train.check_early import existing_model
from seqtile.train.media import check_media_packages
from seqtile.train.recipe import DEMO, Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from seqtile.install.report import Report

logger = first_rank_logger(__name__)

HUB_KWARGS = ("revision", "code_revision", "cache_dir", "local_files_only", "force_download")
"""Arguments of ``from_pretrained`` by which every file of a model is found."""

OF_WEIGHTS = ("attn_implementation", "experts_implementation", "quantization_config")
"""Arguments for the weights that a configuration has a field for, too; Transformers writes it itself."""


def load_model(recipe: Recipe, *, pictures: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load what ``recipe.model`` names; the configuration is checked before any weight is read.

    Args:
        recipe: recipe of the run.
        pictures: load the model for pictures, where the configuration is that of a language model too.

    Raises:
        UserError: not there, unreachable, needs code of its own, or too few positions for ``max_length``.
    """
    if recipe.model == DEMO:
        if recipe.weights_kwargs or recipe.rope_scaling or recipe.dtype not in (None, "mixed", "float32"):
            raise UserError(
                "demo.model-settings",
                "model_kwargs, attention, qlora, rope_scaling and dtype do not apply to the demo's model; set model",
            )
        tokenizer = tokenizer_of(recipe)
        model = demo.build_demo_model(recipe.seed, tokenizer)
        check_positions(model.config, recipe)
        return model, tokenizer

    path = existing_model(recipe.model)
    config, kwargs = _configured(path, recipe)
    tokenizer = tokenizer_of(recipe)
    if recipe.sp_size > 1:  # Ulysses replaces one attention by name: the model must have been loaded with that one
        kwargs = {"attn_implementation": recipe.attn_implementation, **kwargs}
    kwargs = {"config": config, "dtype": weights_dtype(recipe), **_with_experts(kwargs, config, recipe)}
    model = _load_weights(path, recipe, pictures=pictures, **kwargs)
    if packed := packed_experts(model):
        logger.info("experts: %d weights are in 4 bits (bitsandbytes)", len(packed))
        if whole := whole_experts(model):
            logger.warning("experts: %d weights are not in 4 bits: %s", len(whole), TOO_LARGE)
    return model, tokenizer


def _with_experts(kwargs: dict[str, Any], config: Any, recipe: Recipe) -> dict[str, Any]:
    """``kwargs`` with a configuration that packs experts too, where 4-bit weights are requested for a model of experts.

    Raises:
        UserError: the weights are quantized already, by another library.
    """
    requested = kwargs.get("quantization_config")
    if not isinstance(requested, dict) or not requested.get("load_in_4bit"):
        return kwargs
    method = quantization_of(config)
    if method and method != "bitsandbytes":
        raise UserError(
            "qlora.already-quantized",
            f"the weights of {recipe.model!r} are quantized already ({method}), and 4-bit loading (qlora) needs 16-bit "
            "ones; use a 16-bit copy of the model",
        )
    if not experts_of(config.get_text_config()):
        return kwargs
    if why := why_experts_stay_whole(config):
        logger.warning("experts are not in 4 bits: %s", why)
        return kwargs
    from seqtile.train.four_bit_experts import WithExperts

    return {**kwargs, "quantization_config": WithExperts(**requested)}


def tokenizer_of(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer alone.

    Raises:
        UserError: not there, unreachable, needs code of its own, or without an end-of-text token.
    """
    if recipe.model == DEMO:
        return demo.load_tokenizer()
    import transformers

    path = existing_model(recipe.model)
    tokenizer = _load("tokenizer", transformers.AutoTokenizer, path, recipe, **_hub_kwargs(recipe))
    if tokenizer.eos_token is None:
        raise UserError(
            "model.tokenizer-without-end",
            f"the tokenizer of {recipe.model!r} has no end-of-text token; set eos_token in its files",
        )
    return tokenizer  # type: ignore[no-any-return]


def processor_of(recipe: Recipe) -> Any:
    """The model's processor of pictures and text; its tokenizer writes chats by the same template.

    Raises:
        UserError: the model has none, or a package is missing.
    """
    import transformers

    check_media_packages()
    processor = _load(
        "processor", transformers.AutoProcessor, existing_model(recipe.model), recipe, **_hub_kwargs(recipe)
    )
    if not isinstance(processor, transformers.ProcessorMixin):
        raise UserError(
            "model.processor-missing",
            f"model {recipe.model!r} has no processor of pictures; add its preprocessor_config.json",
        )
    tokenizer = processor.tokenizer
    processor.chat_template = processor.chat_template or tokenizer.chat_template
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return processor


def stop_tokens(recipe: Recipe, config: Any, tokenizer: Any) -> frozenset[int]:
    """Ids at which the trained model stops: the model's own, and the tokenizer's, which the trainer adds to them."""
    from transformers import GenerationConfig

    if recipe.model == DEMO:
        return frozenset()
    try:
        source: Any = GenerationConfig.from_pretrained(existing_model(recipe.model), **_hub_kwargs(recipe))
    except (OSError, ValueError):  # it has none, or one that generation cannot use
        source = config.get_text_config()
    own = source.eos_token_id
    return frozenset({tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None})


def bare_config(recipe: Recipe) -> tuple[str, Any]:
    """The path and the configuration of what :func:`load_bare` loads."""
    import transformers

    file = Path(recipe.model).expanduser()
    path = str(file) if file.suffix == ".json" and file.is_file() else existing_model(recipe.model)
    return path, _load("configuration", transformers.AutoConfig, path, recipe)


def load_bare(recipe: Recipe) -> PreTrainedModel:
    """The model alone, for a check on random tokens: no tokenizer is needed, nor are weights.

    A ``config.json``, or a directory with one and without weights, gives a model with random weights.

    Raises:
        UserError: not there, unreachable, needs code of its own, or too few positions for ``max_length`` tokens.
    """
    if recipe.model == DEMO:
        return load_model(recipe)[0]
    import torch

    path, config = bare_config(recipe)
    check_positions(config, recipe)
    maker, file = auto_class(config, recipe), Path(path)
    has_weights = not file.is_dir() or any(entry.suffix in (".safetensors", ".bin") for entry in file.iterdir())
    if has_weights and not file.is_file():
        return _load_weights(path, recipe, config=config, dtype=weights_dtype(recipe))
    torch.manual_seed(recipe.seed)
    dtype = weights_dtype(recipe)
    try:
        model: PreTrainedModel = maker.from_config(
            config, dtype=config.dtype if dtype == "auto" else dtype, trust_remote_code=recipe.trust_remote_code
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            "model.not-buildable",
            f"cannot build a causal language model from {path!r} ({reason}); expected the config.json of one",
        ) from None
    return model


def tile(model: Any, recipe: Recipe, checkpoint: str | None = None) -> Report | None:
    """Tile the blocks of ``model`` as the recipe says, and install its checkpoints, or those of ``checkpoint``."""
    from seqtile.install.apply import apply_options

    options = recipe.tiling
    if checkpoint is not None:
        options = replace(options, checkpoint=checkpoint)
    if not options.tiled and not options.beside_blocks:
        return None
    report = apply_options(model, options)
    return report if options.tiled else None


WANTED_OF_LIGER = ("rope", "rms_norm", "layer_norm", "model")
"""Arguments of Liger's functions that keep their defaults: some models have no rotary kernel. All others are off: the
MLP and the loss are tiled here."""


def use_liger(model: Any, recipe: Recipe) -> str:
    """Put Liger's rotary embedding and norms into ``model`` on CUDA, by the function behind ``use_liger_kernel``.

    A recipe's ``trainer.use_liger_kernel``, true or false, is left to the trainer.

    Returns:
        What was done, in a sentence; "" where Liger is not installed, or has no function for this model.
    """
    chosen = recipe.trainer.get("use_liger_kernel") is not None or recipe.model_kwargs.get("use_kernels")
    if chosen or device_type() != "cuda" or find_spec("liger_kernel") is None or not is_known(type(model)):
        return ""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
        from transformers.integrations.liger import apply_liger_kernel

        function = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model.config.model_type)
        parameters = {} if function is None else inspect.signature(function).parameters
        # One that hands arguments on (**kwargs) does not name the kernels of the model inside, which would stay on.
        if not parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return ""
        apply_liger_kernel(model, {name: False for name in parameters if name not in WANTED_OF_LIGER})
    except Exception as error:  # noqa: BLE001 - a Liger that does not fit this transformers: the model trains without
        logger.warning("Liger's kernels are not used: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return ""
    return "Liger's kernels run the rotary embedding and the norms; turn them off with trainer.use_liger_kernel: false"


def tile_head(model: Any, tokens: int) -> None:
    """Answer TRL's calls of its fused head, which the trainer put on ``model``, in tiles of ``tokens`` tokens.

    TRL never builds the whole logits, but scores 4,096 tokens by up to 32,768 vocabulary entries at a time. Where the
    model is small against that (a small hidden size on a CPU), this one buffer is the step's peak and hides
    everything else. The head belongs to the run and not to its tiling: :func:`seqtile.undo` leaves it, so that a
    comparison with the untiled model compares the blocks. A second call changes the size.
    """
    from seqtile._compat import PREPARED_FORWARD
    from seqtile.lm_loss.tiled_loss import TiledLoss
    from seqtile.tiling import TileRule

    rule = TileRule("tokens", tokens)
    for forward in (model.__dict__.get("forward"), model.__dict__.get(PREPARED_FORWARD)):  # below accelerate's
        if isinstance(forward, TiledLoss):
            forward.rule = rule
            return
    TiledLoss(model, rule).install(marked=False)


def check_positions(config: PretrainedConfig, recipe: Recipe) -> None:
    """Refuse a ``max_length`` beyond the model's positions.

    Raises:
        UserError: with the limit and how to lift it.
    """
    facts = ModelFacts(repr(recipe.model), max_positions(config), lift(config, recipe.max_length))
    check_combination(replace(recipe.combination, model=facts))


def check_checkpoints(model: Any, arguments: Any) -> None:
    """Refuse reentrant activation checkpoints where they would lose gradients.

    Raises:
        UserError: the trainer would make them, over layers that share keys and values.
    """
    kwargs = arguments.gradient_checkpointing_kwargs or {}
    if arguments.gradient_checkpointing and kwargs.get("use_reentrant") and shares_keys(model):
        raise UserError(
            "checkpoint.reentrant-shared-keys",
            f"layers of {type(model).__name__} share keys and values, so reentrant activation checkpointing loses "
            "part of their gradient; drop use_reentrant, or with adapters under zero3 upgrade DeepSpeed to 0.19.4",
        )


def load_config(recipe: Recipe) -> Any:
    """The model's configuration alone, with the recipe's scaled positions.

    Raises:
        UserError: not there, unreachable, needs code of its own, or too few positions for ``max_length``.
    """
    if recipe.model != DEMO:
        return _configured(existing_model(recipe.model), recipe)[0]
    config: Any = demo.build_config()
    check_positions(config, recipe)
    return config


def _configured(path: str, recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """The configuration with the fields that ``model_kwargs`` sets, and the arguments left for the weights."""
    import transformers

    fields = {key: value for key, value in recipe.weights_kwargs.items() if key not in (*HUB_KWARGS, *OF_WEIGHTS)}
    config, unused = _load(
        "configuration",
        transformers.AutoConfig,
        path,
        recipe,
        return_unused_kwargs=True,
        **_hub_kwargs(recipe),
        **fields,
    )
    text = config.get_text_config()
    for key in fields.keys() & unused.keys():  # of the text model in a model for pictures
        if hasattr(text, key):
            setattr(text, key, unused.pop(key))
    auto_class(config, recipe)
    if recipe.rope_scaling is not None:
        scale_positions(config, recipe.rope_scaling, recipe.model)
    check_positions(config, recipe)
    return config, {key: value for key, value in recipe.weights_kwargs.items() if key not in fields or key in unused}


def auto_class(config: Any, recipe: Recipe, *, pictures: bool = False) -> Any:
    """The class of Transformers that loads the model: a causal language model, or one for pictures.

    Raises:
        UserError: it is neither.
    """
    import transformers

    refuse_encoder(config, recipe.model)
    code = getattr(config, "auto_map", None) or {}
    if pictures and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in code:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder:
        return transformers.AutoModelForImageTextToText
    raise UserError(
        "model.not-causal",
        f"{recipe.model!r} is not a causal language model ({config.model_type}); train it with transformers' "
        "Trainer after seqtile.apply",
    )


def why_attention_is_missing(recipe: Recipe) -> str:
    """Why the recipe's attention cannot run on this machine, in Transformers' words; "" if it can, or was not named."""
    import torch

    if recipe.model == DEMO or recipe.attention is None:
        return ""
    config = load_config(recipe)
    try:
        with torch.device("meta"):
            auto_class(config, recipe).from_config(
                config, attn_implementation=recipe.attn_implementation, trust_remote_code=recipe.trust_remote_code
            )
    except (ImportError, ValueError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return ""


def check_split(recipe: Recipe) -> None:
    """Refuse a model whose sequences cannot be split over processes, from its configuration alone.

    Raises:
        UserError: it has layers with a state, the heads do not divide, or its attention would lose a mask or cannot
            go round a ring.
    """
    import torch

    config = load_config(recipe)
    text = config.get_text_config()
    with torch.device("meta"):  # to look at its modules
        bare = auto_class(config, recipe).from_config(config, trust_remote_code=recipe.trust_remote_code)
    refuse_split_states(
        repr(recipe.model), states_of(bare), recipe.split, "cp_size" if recipe.cp_size > 1 else "sp_size"
    )
    heads = text.num_attention_heads
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    facts = ModelFacts(
        repr(recipe.model), heads=heads, key_heads=getattr(text, "num_key_value_heads", None) or heads,
        window=getattr(text, "sliding_window", None) if slides else None, no_ring=why_no_ring(bare),
    )  # fmt: skip
    check_combination(replace(recipe.combination, model=facts))


def _hub_kwargs(recipe: Recipe) -> dict[str, Any]:
    return {key: recipe.model_kwargs[key] for key in HUB_KWARGS if key in recipe.model_kwargs}


def _load(what: str, loader: Any, path: str, recipe: Recipe, **kwargs: Any) -> Any:
    """``from_pretrained``, its many ways of saying no turned into one sentence."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        return loader.from_pretrained(path, trust_remote_code=recipe.trust_remote_code, **kwargs)
    except UnpicklingError:
        raise UserError(
            "model.unsafe-file",
            f"cannot load the {what} of model {recipe.model!r}: a .bin file contains more than tensors, so loading "
            "it could run arbitrary code; use .safetensors files",
        ) from None
    except (SafetensorError, EOFError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamReader" not in str(error):
            raise
        raise UserError(
            "model.corrupt-file",
            f"cannot load the {what} of model {recipe.model!r}: a file is corrupt or truncated ({error}); download "
            "it again",
        ) from None
    except (OSError, ValueError, KeyError, TypeError, ImportError, StrictDataclassError) as error:
        # A value of a wrong type or size in config.json: the last line names it.
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in recipe.model_kwargs:
            close = difflib.get_close_matches(unknown[1], vars(kwargs["config"]), n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else "drop it"
            raise UserError(
                "model-kwargs.unknown",
                f"model_kwargs.{unknown[1]} is neither an argument of from_pretrained nor a field of the model's "
                f"configuration; {hint}",
            ) from None
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[-1].strip() if isinstance(error, StrictDataclassError) else lines[0]
        if isinstance(error, ImportError):
            raise UserError(
                "model.package-missing",
                f"cannot load the {what} of model {recipe.model!r}: a package is missing ({reason}); install it, or "
                + (
                    f"use attention sdpa in place of {recipe.attention}"
                    if recipe.attention
                    else "change the setting that needs it (in model_kwargs or the model's configuration)"
                ),
            ) from None
        if "trust_remote_code" in str(error):
            raise UserError(
                "model.custom-code",
                f"model {recipe.model!r} needs its own code; review it, then set 'trust_remote_code: true' in the "
                "recipe or pass --trust-remote-code",
            ) from None
        files = " with the tokenizer's files (tokenizer.json)" if what == "tokenizer" else ""
        raise UserError(
            "model.not-loaded",
            f"cannot load the {what} of model {recipe.model!r} ({reason}); expected a model directory{files}, or a Hub "
            "id and a network",
        ) from None


def _load_weights(path: str, recipe: Recipe, *, pictures: bool = False, **kwargs: Any) -> PreTrainedModel:
    """The model, with every weight of its configuration; Transformers would train random ones for missing ones."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # of which its table would say the same
    try:
        loading = {"output_loading_info": True, "ignore_mismatched_sizes": True, **kwargs}
        model_class = auto_class(kwargs["config"], recipe, pictures=pictures)
        model, info = _load("weights", model_class, path, recipe, **loading)
    finally:
        logging.set_verbosity(level)
    mismatched, missing, unused = (sorted(info[f"{kind}_keys"]) for kind in ("mismatched", "missing", "unexpected"))
    problem = ""
    if mismatched and not kwargs.get("ignore_mismatched_sizes"):
        name, file_shape, model_shape = mismatched[0]
        problem = f"{name} has shape {[*file_shape]}, expected {[*model_shape]} ({len(mismatched)} such weights)"
    elif missing:
        problem = f"{missing[0]} is missing ({len(missing)} such weights)"
    if problem:
        raise UserError(
            "model.weights-mismatch",
            f"the weights of model {recipe.model!r} do not match its configuration: {problem}; use the config.json "
            "that belongs to them",
        )
    if unused:
        logger.warning("%d weights of %r are not used, for example %s", len(unused), recipe.model, unused[0])
    return model  # type: ignore[no-any-return]


def result_dtype(recipe: Recipe) -> Any:
    """The dtype of the model's checkpoint, where its weights train in fp32 because the recipe names no dtype."""
    import torch

    if recipe.model == DEMO or recipe.lora is not None or recipe.dtype not in (None, "mixed"):
        return None
    config = load_config(recipe)
    dtype = config.dtype or config.get_text_config().dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def repair_generation(model: Any, name: str) -> str:
    """Unset what generation ignores in the model's ``generation_config``: Transformers reads it, but does not write it.

    Returns:
        What was unset, in a sentence; "" if nothing.
    """
    config = getattr(model, "generation_config", None)
    if config is None:
        return ""
    try:
        config.validate(strict=True)
    except ValueError as error:
        ignored = re.findall(r"^- `(\w+)`", str(error), re.MULTILINE)
        for key in ignored:
            setattr(config, key, None)
        if ignored:
            return (
                f"generation_config.json of {name!r} sets {', '.join(ignored)}, which generation ignores and "
                "Transformers does not save; the trained model is saved without"
            )
    return ""


def weights_dtype(recipe: Recipe) -> Any:
    """Weights in fp32, which train with bf16 products on an accelerator; a frozen base in bf16 there."""
    import torch

    if recipe.dtype == "auto":
        return "auto"
    if recipe.dtype not in (None, "mixed"):
        return getattr(torch, recipe.dtype)
    return torch.bfloat16 if recipe.lora and torch.accelerator.is_available() else torch.float32
