"""Run calls of TRL's fused head in the tiled head.

TRL's trainers (SFT, DPO, GRPO, KTO, RLOO) put a forward of their own on the model that answers ``fused_lm_head=True``
with log-probabilities. Where :func:`seqtile.apply` runs after the trainer was built, the tiled loss stands over that
forward and answers in its place. Where it ran before, TRL's forward stands over the tiled loss and hands on every call
that does not ask for TRL's head: a forward pre-hook on the model takes that argument out and passes what was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from seqtile._compat import trl_head_settings
from seqtile._errors import UserError
from seqtile.ops.lm_loss.logits_tile import LogitScaling
from seqtile.ops.lm_loss.token_logprobs import TokenScores


class TiledHead(Protocol):
    """The tiled loss of a model, which answers in TRL's place."""

    @property
    def module(self) -> Any: ...

    def run(self, forward: Any, args: Any, kwargs: dict[str, Any], compute: Any) -> Any: ...

    def score(
        self, head: Any, hidden: Tensor, targets: Tensor, scaling: LogitScaling, ignore_index: int, **wanted: Any
    ) -> TokenScores: ...


@dataclass
class TrlHead:
    """TRL's settings of its head.

    Attributes:
        forward: the model's forward below TRL's.
        temperature: divides the logits.
        in_fp32: the head runs in fp32, outside autocast.
        outputs: the per-token results it returns.
    """

    forward: Any
    temperature: float
    in_fp32: bool
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, forward: Any) -> TrlHead | None:
        """TRL's head behind a ``forward``, or None if it is something else.

        Raises:
            UserError: it is TRL's, but of a version that keeps its settings elsewhere.
        """
        try:
            settings = trl_head_settings(forward)
        except KeyError as error:
            raise UserError(
                "loss.trl-version",
                f"this version of TRL stores {error} of its fused head differently, which seqtile does not support; "
                "drop loss and use TRL's own",
            ) from None
        if settings is None:
            return None
        return cls(
            settings["original_forward"], settings["temperature"], settings["cast_lm_head_to_fp32"],
            tuple(settings["outputs"]),
        )  # fmt: skip

    def call(self, installed: TiledHead, args: Any, kwargs: dict[str, Any]) -> Any:
        """The output of TRL's own forward for ``fused_lm_head=True``."""
        from trl.trainer.utils import FusedCausalLMOutput

        if unknown := {*self.outputs} - {"log_probs", "entropy", "is_top1", "log_sum_sq_probs", "mean_logits"}:
            raise UserError(
                "loss.trl-head-request",
                f"TRL asks its head for {sorted(unknown)}, which the tiled head does not support",
            )
        shift = kwargs.get("shift_labels")
        labels = kwargs["labels"] if shift is None else shift
        kwargs.setdefault("labels", labels)
        config = installed.module.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        scored: dict[str, Any] = {}

        def compute(head: Any, later: Any, targets: Tensor, count: Any, ignore_index: int) -> Tensor:
            scaling = later.scaling
            asked_scaling = LogitScaling(scaling.scale, scaling.softcap, self.temperature)
            hidden = later.hidden.float() if self.in_fp32 else later.hidden
            device_type = hidden.device.type
            with torch.autocast(device_type, enabled=not self.in_fp32 and torch.is_autocast_enabled(device_type)):
                scores = installed.score(
                    head, hidden, targets, asked_scaling, ignore_index, entropy="entropy" in self.outputs,
                    argmax="is_top1" in self.outputs, log_sum_squares="log_sum_sq_probs" in self.outputs,
                    mean_logit="mean_logits" in self.outputs,
                )  # fmt: skip
            mask = targets != ignore_index
            scored.update(scores=scores, mask=mask, targets=targets)
            return -scores.log_probs.sum() / (mask.sum().clamp(min=1) if count is None else count)

        output = installed.run(self.forward, args, {**kwargs, "use_cache": False, "return_dict": True}, compute)
        # The last position predicts nothing, so TRL leaves it out where it shifts the labels itself.
        cut = slice(None) if shift is not None else slice(None, -1)
        scores, mask = scored["scores"], scored["mask"]
        top1 = None if scores.argmax is None else (scores.argmax == scored["targets"]) & mask
        outputs = {
            "log_probs": scores.log_probs, "entropy": scores.entropy, "is_top1": top1, "label_mask": mask,
            "log_sum_sq_probs": scores.log_sum_squares, "mean_logits": scores.mean_logit,
        }  # fmt: skip
        return FusedCausalLMOutput(
            loss=output.loss, aux_loss=getattr(output, "aux_loss", None),
            # Copies: FSDP2 warns of a module that returns views.
            **{name: None if value is None else value[..., cut].clone() for name, value in outputs.items()},
        )  # fmt: skip
