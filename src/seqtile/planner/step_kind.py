"""The interface of a kind of step: GRPO, pictures, layers with a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from seqtile.planner.layer_structure import Counts
from seqtile.planner.phases import REST, Phase
from seqtile.planner.request import Request
from seqtile.planner.step_config import Setup
from seqtile.planner.step_run import StepRun

Terms = Mapping[str, float]


class StepKind:
    """How a kind of step differs from a supervised step of a causal language model on text.

    The planner asks every kind that applies; what is inherited changes nothing.

    Attributes:
        batch_purpose: what the batch's bytes are for.
        standing: terms that are there whatever runs, so that no allocator fragments them.
    """

    batch_purpose: str = REST
    standing: tuple[str, ...] = ()

    def applies(self, config: Any, setup: Setup) -> bool:
        """Whether a step of this model and setup is of this kind."""
        raise NotImplementedError

    # Used by the fake step.

    def auto_class(self, config: Any) -> Any:
        """The class of Transformers that builds the model; None for ``AutoModelForCausalLM``."""
        return None

    def run(self, config: Any, step: Callable[[Any], StepRun]) -> StepRun:
        """The step of ``config``, by ``step`` of it or of smaller ones."""
        return step(config)

    def change_batch(self, model: Any, setup: Setup, batch: dict[str, Tensor]) -> None:
        """Change ``input_ids`` and ``labels`` ``[B, T]`` to what the model is given."""

    def running(self, model: Any, setup: Setup, tokens: int) -> AbstractContextManager[Any]:
        """Entered while a step runs on fake tensors."""
        return nullcontext()

    def loss(self, model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> Tensor | None:
        """The loss; None for the model's own."""
        return None

    def after_forward(self, model: Any, setup: Setup, batch: Mapping[str, Tensor]) -> None:
        """Run what the step computes between the loss and the backward."""

    # Used by the plan.

    def check(self, request: Request, max_length: int | None) -> None:
        """Refuse, by a ``UserError``, what cannot run."""

    def least_tokens(self, request: Request) -> int:
        """Tokens of the shortest sequence."""
        return 1

    def most_tokens(self, request: Request, counts: Counts) -> int | None:
        """Tokens of the longest sequence, whatever memory is left; None for no bound."""
        return None

    def other_parts(self, request: Request, parts: Mapping[Phase, Terms]) -> dict[Phase, Terms]:
        """Parts of an update that are not in the step."""
        return {}

    def add_terms(
        self, request: Request, counts: Counts, terms: dict[str, float], phase: Phase, tokens: int, bound: str
    ) -> None:
        """Add to ``terms`` what is on one rank's device beside a part of the step."""

    def notes(self, request: Request, counts: Counts, states: Mapping[str, Sequence[str]]) -> list[str]:
        """Notes of the plan; ``states`` has the layers with a state by their kind."""
        return []

    def not_modelled(self, request: Request) -> list[str]:
        """What the plan does not include for this kind."""
        return []
