"""What RL stacks do with log-probabilities, written down from their sources.

None of the stacks can be installed for these tests. Each stand-in names repository, file and commit, has the signature
that was read there, and computes with plain PyTorch what the real function computes. A function that takes its place is
called by the same lines; where an argument, a shape or a type were other than the real one's, these lines fail.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _plain(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


class Verl:
    """https://github.com/volcengine/verl at b178a3cd56f58b2d502255daba591e92833930a7."""

    @staticmethod
    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, reduction: str = "none",
        dist_process_group: Any = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``verl/utils/kernel/linear_cross_entropy.py``: flat results."""
        return _plain(F.linear(hidden, weight).flatten(0, -2) / temperature, labels.flatten())

    class FusedLinearForPPO(nn.Module):
        """``verl/utils/experimental/torch_functional.py``: results of the labels' shape."""

        def __init__(self, chunk_size: int = 512) -> None:
            super().__init__()

        def forward(
            self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
        ) -> tuple[Tensor, Tensor]:
            return _plain(F.linear(hidden_states, vocab_weights) / temperature, input_ids)

    @staticmethod
    def forward_with_triton_backend(function: Callable[..., Any], model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The end of that function of ``verl/models/transformers/dense_common.py``."""
        hidden = model.model(ids).last_hidden_state
        log_probs, entropy = function(hidden, model.lm_head.weight, torch.roll(ids, -1, -1), 0.7, "none")
        assert log_probs.shape == entropy.shape == (ids.numel(),)
        return log_probs.view(ids.shape), entropy.view(ids.shape)

    @staticmethod
    def forward_with_torch_backend(kind: Callable[..., Any], model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The end of that function of ``verl/models/transformers/dense_common.py``."""
        hidden = model.model(ids).last_hidden_state
        found: tuple[Tensor, Tensor] = kind().forward(
            hidden_states=hidden, vocab_weights=model.lm_head.weight, input_ids=torch.roll(ids, -1, -1), temperature=0.7
        )
        return found


class Slime:
    """https://github.com/THUDM/slime at 624b824a898ab0ec1fcb4d373004c7f3852bf515."""

    @staticmethod
    def calculate_log_probs_and_entropy(
        logits: Any, tokens: Tensor, tp_group: Any, with_entropy: bool = False, chunk_size: int = -1,
        log_prob_keep_mask: Any = None, with_entropy_grad: bool = True,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """``slime/utils/ppo_utils.py``."""
        log_probs, entropy = _plain(logits.contiguous(), tokens)
        return log_probs.unsqueeze(-1), entropy if with_entropy else None

    @staticmethod
    def get_log_probs_and_entropy(function: Callable[..., Any], logits: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The way through that function of ``slime/backends/megatron_utils/loss.py``: one packed row ``[1, T, V]``."""
        assert logits.dtype == torch.float32 and len(logits.shape) == 3 and logits.size(0) == 1
        logits = logits.squeeze(0)
        logits = logits / 0.7
        logits = logits.contiguous()
        assert logits.size(0) == ids.numel() and logits.device == ids.device and logits.size(-1) > 1
        log_probs, entropy = function(
            logits, torch.roll(ids, -1, -1).flatten(), None, with_entropy=True, with_entropy_grad=True, chunk_size=8,
            log_prob_keep_mask=None,
        )  # fmt: skip
        return log_probs.squeeze(-1)[2:5], entropy[2:5]


class SkyRL:
    """https://github.com/NovaSky-AI/SkyRL at a9564572eb8e91076be43c1bd5e4615e3de17265."""

    @staticmethod
    def logprobs_from_logits(logits: Any, labels: Tensor, inplace_backward: bool = True) -> Tensor:
        """``skyrl/backends/skyrl_train/utils/torch_utils.py``."""
        return _plain(logits, labels)[0]

    @staticmethod
    def chunked_entropy_from_logits(
        logits: Any, requires_grad: bool = False, attention_mask: Tensor | None = None, chunk_size: int = 1024
    ) -> Tensor:
        """``skyrl/backends/skyrl_train/utils/torch_utils.py``."""
        entropy = _plain(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))[1]
        entropy = entropy if requires_grad else entropy.detach()
        return entropy if attention_mask is None else entropy * attention_mask

    @staticmethod
    def forward(log_probs_of: Any, entropy_of: Any, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The lines of ``skyrl/backends/skyrl_train/workers/model_wrapper.py`` between the model and its outputs."""
        mask = torch.ones_like(ids)
        output = model(ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1)
        logits = output["logits"]
        logits.div_(0.7)
        log_probs = log_probs_of(logits, torch.roll(ids, -1, -1), inplace_backward=True)
        entropy = entropy_of(logits, requires_grad=True, attention_mask=mask, chunk_size=16)
        return log_probs, entropy


class OpenRLHF:
    """https://github.com/OpenRLHF/OpenRLHF at 3c3be6234e0cb353e76bb8019947db9dfe99fca7."""

    @staticmethod
    def log_probs_from_logits(logits: Any, labels: Tensor, temperature: float = 1.0) -> Tensor:
        """``openrlhf/models/utils.py``."""
        return _plain(logits / temperature, labels)[0]

    @staticmethod
    def compute_entropy(logits: Any) -> Tensor:
        """``openrlhf/models/utils.py``."""
        return _plain(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))[1]

    @staticmethod
    def forward(log_probs_of: Any, entropy_of: Any, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The lines of ``Actor.forward``, ``openrlhf/models/actor.py``, from the model on."""
        mask = torch.ones_like(ids)
        output = model(ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1)
        output["logits"] = output["logits"].to(torch.float32)
        entropy = entropy_of(output["logits"])
        setattr(output, "entropy", entropy[:, :-1])  # noqa: B010
        log_probs = log_probs_of(output["logits"], torch.roll(ids, -1, 1), temperature=0.7)
        return log_probs[:, :-1], output.entropy


class PrimeRL:
    """https://github.com/PrimeIntellect-ai/prime-rl at 559b44772e471d1538537b8805cc77f3824a5e64."""

    class FusedOutputLinear(nn.Linear):
        """``src/prime_rl/trainer/models/layers/lm_head.py``."""

        def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
            super().__init__(in_features, out_features, bias=False)

        def forward(  # type: ignore[override]
            self, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None
        ) -> dict[str, Tensor]:
            assert labels is not None and temperature is not None
            log_probs, entropy = _plain(F.linear(hidden_states, self.weight) / temperature.unsqueeze(-1), labels)
            return {"logprobs": log_probs, "entropy": entropy}

    @staticmethod
    def inject(kind: Callable[..., Any], model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``inject_prime_lm_head`` and its forward, ``src/prime_rl/trainer/models/layers/lm_head.py``."""
        old = model.lm_head
        model.lm_head = kind(in_features=old.in_features, out_features=old.out_features, chunk_size=8)
        model.lm_head.weight = old.weight
        temperature = torch.linspace(0.5, 1.5, ids.numel()).view(ids.shape)
        output = model.lm_head(
            model.model(ids).last_hidden_state, torch.roll(ids, -1, -1), temperature=temperature
        )  # fmt: skip
        model.lm_head = old
        return output.get("logprobs").float().contiguous(), output.get("entropy").float().contiguous()


STACKS = SimpleNamespace(verl=Verl, slime=Slime, skyrl=SkyRL, openrlhf=OpenRLHF, prime_rl=PrimeRL)
