"""``seqtile verify``: a model by name, adapters, a random batch, and the comparison."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from seqtile._errors import UserError
from seqtile.train.recipe import DEMO, Recipe, build_recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

    from seqtile.verification import VerifyResult

DEFAULT_TILE = "shards:8"
"""``"auto"`` leaves a short batch whole, and then there is nothing to verify."""

DEFAULT_TOKENS = 2048


def check_recipe(values: dict[str, Any]) -> Recipe:
    """The settings of a check as a recipe, validated like one of ``seqtile train``.

    Raises:
        UserError: a value is out of range, or PEFT is missing for adapters.
    """
    if values.get("max_length", 2) < 2:
        raise UserError("max-length.too-small", f"got --tokens {values['max_length']}, expected at least 2")
    recipe, _ = build_recipe({}, {"dataset": DEMO, "tile": DEFAULT_TILE, **values})
    if recipe.lora is not None and find_spec("peft") is None:
        raise UserError("verify.peft-missing", "--lora needs peft; run: pip install peft")
    return recipe


def with_default_length(recipe: Recipe) -> Recipe:
    """``recipe`` with a batch of :data:`DEFAULT_TOKENS`, or of the model's positions if fewer."""
    from seqtile.models.configs import max_positions
    from seqtile.train.load import bare_config

    positions = None if recipe.model == DEMO else max_positions(bare_config(recipe)[1])
    return recipe.changed(max_length=min(DEFAULT_TOKENS, positions or DEFAULT_TOKENS))


def check(recipe: Recipe) -> VerifyResult:
    """Load the model and run :func:`seqtile.verify` on random tokens.

    Args:
        recipe: ``max_length`` is the length of the batch and ``batch_size`` its rows.

    Raises:
        UserError: bad input, or the batch was not cut, so that nothing was tested.
    """
    from seqtile.verification import verify

    model = build_model(recipe)
    result = verify(model, build_batch(recipe, model), tile=recipe.options.tile, seed=recipe.seed)
    if not result.cut:
        raise UserError(
            "verify.nothing-compared", f"nothing to verify: {result.ran}; use more --tokens or a smaller --tile"
        )
    return result


def build_model(recipe: Recipe) -> nn.Module:
    """The model on its device, with fresh adapters if the recipe has some.

    The adapters' second factor is random and not zero, else their first factor would have no gradient to compare.
    """
    import torch

    from seqtile.train.arguments import adapter_config  # they import torch, which refusing a flag does not need
    from seqtile.train.load import load_bare

    model: Any = load_bare(recipe)
    adapters = adapter_config(recipe.lora, model)
    if adapters is not None:
        from peft import get_peft_model

        adapters.init_lora_weights = False
        torch.manual_seed(recipe.seed)
        try:
            model = get_peft_model(model, adapters)
        except (ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError("lora.rejected", f"PEFT rejects these adapters for this model: {reason}") from None
    if recipe.recomputes and getattr(model, "supports_gradient_checkpointing", True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name is changing; both are understood
            model.gradient_checkpointing_enable({"use_reentrant": False})
    if torch.accelerator.is_available():
        model.to(torch.accelerator.current_accelerator())
    model.config.use_cache = False
    trained: nn.Module = model.train()
    return trained


def build_batch(recipe: Recipe, model: nn.Module) -> dict[str, Tensor]:
    """Random tokens."""
    import torch

    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[operator,union-attr]
    generator = torch.Generator().manual_seed(recipe.seed)
    ids = torch.randint(0, vocabulary, (recipe.batch_size, recipe.max_length), generator=generator)
    return {"input_ids": ids.to(next(model.parameters()).device)}
