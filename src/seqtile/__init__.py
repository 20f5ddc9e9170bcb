"""Train Hugging Face language models on sequences that do not fit: same gradients, no lost speed, any engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqtile._errors import UserError as UserError
    from seqtile.blocks.install_blocks import Block as Block
    from seqtile.counting.live import count_live_bytes as count_live_bytes
    from seqtile.counting.products import count_products as count_products
    from seqtile.fitting import fit as fit
    from seqtile.install.apply import applied as applied
    from seqtile.install.apply import apply as apply
    from seqtile.install.apply import undo as undo
    from seqtile.install.module import tile_module as tile_module
    from seqtile.install.report import Report as Report
    from seqtile.integrations.callback import TilingCallback as TilingCallback
    from seqtile.lm_loss.tiled_loss import deferred_logits as deferred_logits
    from seqtile.ops.lm_loss.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from seqtile.ops.lm_loss.divergence import TeacherTopK as TeacherTopK
    from seqtile.ops.lm_loss.divergence import linear_divergence as linear_divergence
    from seqtile.ops.lm_loss.logits_tile import LogitScaling as LogitScaling
    from seqtile.ops.lm_loss.policy import importance_ratios as importance_ratios
    from seqtile.ops.lm_loss.policy import sequence_logprobs as sequence_logprobs
    from seqtile.ops.lm_loss.token_logprobs import HeadInput as HeadInput
    from seqtile.ops.lm_loss.token_logprobs import TokenScores as TokenScores
    from seqtile.ops.lm_loss.token_logprobs import token_logprobs as token_logprobs
    from seqtile.shared_prompts.model import SharedPrompts as SharedPrompts
    from seqtile.shared_prompts.model import share_prompts as share_prompts
    from seqtile.shared_prompts.rows import TreeRow as TreeRow
    from seqtile.shared_prompts.rows import collate_tree as collate_tree
    from seqtile.shared_prompts.rows import tree_row as tree_row
    from seqtile.verification import VerifyResult as VerifyResult
    from seqtile.verification import check_gradients as check_gradients
    from seqtile.verification import verify as verify
    from seqtile.verification.prompts import verify_shared_prompts as verify_shared_prompts

__version__ = "0.1.0"

_HOMES = {
    "Block": "seqtile.blocks.install_blocks",
    "HeadInput": "seqtile.ops.lm_loss.token_logprobs",
    "LogitScaling": "seqtile.ops.lm_loss.logits_tile",
    "Report": "seqtile.install.report",
    "SharedPrompts": "seqtile.shared_prompts.model",
    "TeacherTopK": "seqtile.ops.lm_loss.divergence",
    "TilingCallback": "seqtile.integrations.callback",
    "TokenScores": "seqtile.ops.lm_loss.token_logprobs",
    "TreeRow": "seqtile.shared_prompts.rows",
    "UserError": "seqtile._errors",
    "VerifyResult": "seqtile.verification",
    "applied": "seqtile.install.apply",
    "apply": "seqtile.install.apply",
    "check_gradients": "seqtile.verification",
    "collate_tree": "seqtile.shared_prompts.rows",
    "count_live_bytes": "seqtile.counting.live",
    "count_products": "seqtile.counting.products",
    "deferred_logits": "seqtile.lm_loss.tiled_loss",
    "fit": "seqtile.fitting",
    "importance_ratios": "seqtile.ops.lm_loss.policy",
    "linear_cross_entropy": "seqtile.ops.lm_loss.cross_entropy",
    "linear_divergence": "seqtile.ops.lm_loss.divergence",
    "sequence_logprobs": "seqtile.ops.lm_loss.policy",
    "share_prompts": "seqtile.shared_prompts.model",
    "token_logprobs": "seqtile.ops.lm_loss.token_logprobs",
    "tile_module": "seqtile.install.module",
    "tree_row": "seqtile.shared_prompts.rows",
    "undo": "seqtile.install.apply",
    "verify": "seqtile.verification",
    "verify_shared_prompts": "seqtile.verification.prompts",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'seqtile' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
