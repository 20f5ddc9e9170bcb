"""Configuration of one step: trained weights, optimizer, tiling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from seqtile._errors import UserError
from seqtile.options import TilingOptions

Optimizer = Any

PLANNED = TilingOptions(loss="tiled", loss_tile=4096, checkpoint="layer")
"""How a step runs if nothing else is said."""


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters on the linear layers, and on parameters (of experts) by (name, rank)."""

    r: int = 16
    target_modules: str | tuple[str, ...] = "all-linear"
    alpha: float | None = None
    dropout: float = 0.0
    target_parameters: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Grpo:
    """How completions are generated and scored.

    Attributes:
        group: number of completions of each prompt.
        prompt: tokens of each prompt, which is computed once for its group; 0 for a row per completion.
        reference: whether there is a frozen reference (``beta`` above 0): a model of its own, or the adapters off.
        generator: one of :data:`seqtile.planner.names.GENERATORS`.
        memory: memory of a generator that shares the device: a fraction of the device's memory, as vLLM's
            ``gpu_memory_utilization``, or bytes where it is above 1; None for as much as one completion needs.
    """

    group: int = 8
    prompt: int = 0
    reference: bool = False
    generator: str = "server"
    memory: float | None = None

    @property
    def on_device(self) -> bool:
        """Whether an inference engine of its own is on the device."""
        return self.generator in ("colocate", "sleep")

    @property
    def passes(self) -> int:
        """Forwards without gradient over each row: the reference's, and the policy's beside what vLLM reported."""
        return int(self.reference) + int(self.generator != "model")

    @property
    def numbers(self) -> int:
        """Fp32 numbers that are kept for each token: those of each pass, vLLM's own and the ratio to them."""
        return self.passes + (0 if self.generator == "model" else 2)

    @property
    def branches(self) -> int:
        """Completions of each row of the model."""
        return self.group if self.prompt else 1

    def row_tokens(self, tokens: int) -> int:
        """Tokens of a row whose samples have ``tokens``; each completion repeats the last token of a shared prompt."""
        shared = self.prompt - 1
        return tokens if not self.prompt or tokens <= shared else shared + self.group * (tokens - shared)


@dataclass(frozen=True)
class TrainerStep:
    """What a trainer's step does beside a supervised one.

    Attributes:
        rows: rows of the model for each row of ``per_device_train_batch_size``.
        head: what the trainer computes from the last hidden states, one of :data:`HEADS`.
        reference: whether a frozen model computes the same rows, without gradient, while the model's graph exists.
        own_reference: whether the reference is a model as large as the policy, not the policy without its adapters.
        frozen: bytes of further frozen models on each device: a teacher, reward models.
        grpo: how completions are generated and scored; None if they are not.
        can_defer: whether :func:`seqtile.integrations.trl.tile_trainer` spares the trainer whole logits.
        margin: share of the device to leave free, for memory that no plan includes.
        notes: sentences for the user about the above.
    """

    rows: int = 1
    head: str = "loss"
    reference: bool = False
    own_reference: bool = False
    frozen: float = 0.0
    grpo: Grpo | None = None
    can_defer: bool = False
    margin: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def tiles_loss(self) -> bool:
        """Whether ``loss="tiled"`` has an effect."""
        return self.head in ("loss", "scores")


DIVERGENCE_TILE = 4096
"""Tokens in a tile of ``DistillationTrainer``'s own head (``trl/kernels/chunked_divergence.py``)."""

HEADS = ("loss", "scores", "hidden", "pairs", "divergence", "labels")
"""The model's own loss; log-probabilities of tokens by TRL's fused head, which the tiled loss replaces; a head of the
trainer's own, in tiles; log-probabilities and a loss from whole logits; a divergence from those of two models; a
number or a few for each sequence or token, without a vocabulary."""


@dataclass(frozen=True)
class Rollouts:
    """Tensors that generation and scoring leave for the steps of an update.

    Attributes:
        rows: completions with their prompts, of all micro-batches of one rank.
        numbers: fp32 numbers that are kept for each token.
        reference: whether one of these numbers is the reference's log-probability.
        group: completions behind the shared prompt of a row; 1 for a row per completion.
        prompt: the prompt's share of a row's tokens.
        at_once: share of the prompt's keys that attention reads at once.
    """

    rows: int
    numbers: int
    reference: bool
    group: int = 1
    prompt: float = 0.0
    at_once: float = 1.0


@dataclass(frozen=True)
class Pictures:
    """The pictures of each row.

    Attributes:
        count: number of pictures in a row.
        each: tokens of one picture.
        size: (height, width) of a picture in pixels, as the vision tower gets it.
        values: shape of the pixel values of one picture.
        grid: patches of a picture in (time, height, width); empty for a tower of one size.
        frames: frames of the one video of each row; 0 for pictures.
    """

    count: int
    each: int
    size: tuple[int, int]
    values: tuple[int, ...]
    grid: tuple[int, ...] = ()
    frames: int = 0

    @property
    def tokens(self) -> int:
        """Image tokens of each sequence."""
        return self.count * self.each


@dataclass(frozen=True)
class Setup:
    """One way of running a training step.

    Attributes:
        dtype: dtype of the weights.
        autocast: whether products run in bf16 whatever the weights' dtype.
        options: options of :func:`seqtile.apply`; ``checkpoint`` is non-reentrant, and None is no checkpointing.
            Resolved for a length (:func:`seqtile.planner.tile_choice.resolve_tiles`), its tiles are numbers of tokens.
        lora: adapters on a frozen model; None trains every weight.
        packs_experts: whether the frozen model's experts are in 4 bits, and have no adapters.
        optimizer: name of the optimizer, one of :data:`OPTIMIZERS`.
        attention: ``"flash"``, the shapes of FlashAttention, or Transformers' name of an attention function.
        batch: number of rows.
        accumulation: number of batches whose gradients one update sums.
        scans: how layers with a state run, one of :data:`seqtile.planner.names.SCANS`.
        rollouts: rollouts of a GRPO step; None for a supervised step.
        pictures: pictures of each row; None for text alone.
        trainer: what a trainer's step does beside a supervised step; None for nothing.
        liger: whether Liger's norm and SwiGLU kernels run, as shapes on fake tensors.
        device_type: type of the device that the step is sized for; fake tensors themselves are on the CPU.
    """

    dtype: torch.dtype = torch.bfloat16
    autocast: bool = False
    options: TilingOptions = PLANNED
    lora: Lora | None = None
    packs_experts: bool = False
    optimizer: str = "adamw"
    attention: str = "sdpa"
    batch: int = 1
    accumulation: int = 1
    device_type: str = "cpu"
    scans: str = "pytorch"
    liger: bool = False
    rollouts: Rollouts | None = None
    pictures: Pictures | None = None
    trainer: TrainerStep | None = None

    @property
    def loss_tile(self) -> int:
        """Tokens per tile of the head, which are a number before the step runs."""
        assert isinstance(self.options.loss_tile, int)
        return self.options.loss_tile

    @property
    def picture_tokens(self) -> int:
        """Image tokens of a batch."""
        return 0 if self.pictures is None else self.batch * self.pictures.tokens


class _StatesOnly(torch.optim.Optimizer):
    """An optimizer of somebody else's, as far as memory goes: its states, updated by one kernel."""

    def __init__(self, parameters: Iterable[Tensor], states: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__(parameters, {})
        self._states = states

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and not self.state[weight]:
                    self.state[weight]["states"] = self._states(weight)
                torch.empty_like(weight, dtype=torch.float32)  # the update, one weight after another


def _eight_bit(weight: Tensor) -> list[Tensor]:
    """Two states of a byte per element with an fp32 scale per 256, as bitsandbytes keeps from 4,096 elements on."""
    count = weight.numel()
    if count < 4096:
        return [torch.empty(count) for _ in range(2)]
    return [t for _ in range(2) for t in (torch.empty(count, dtype=torch.uint8), torch.empty(-(-count // 256)))]


def _adafactor(weights: Sequence[Tensor]) -> Optimizer:
    """Transformers' own, as its trainer sets it up."""
    from transformers.optimization import Adafactor

    return Adafactor(weights, lr=1e-5, scale_parameter=False, relative_step=False)


OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-5, fused=True),
    "adamw-8bit": lambda weights: _StatesOnly(weights, _eight_bit),
    "lion": lambda weights: _StatesOnly(weights, lambda weight: [torch.empty_like(weight)]),
    "adafactor": _adafactor,
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-5, fused=True),
    "sgd-momentum": lambda weights: torch.optim.SGD(weights, lr=1e-5, momentum=0.9, fused=True),
}
"""Each optimizer that can be planned; ``adamw`` is PyTorch's fused one, which the trainer uses."""


def make_optimizer(name: str, weights: Sequence[Tensor]) -> Optimizer:
    """The optimizer called ``name``.

    Raises:
        UserError: not in the list.
    """
    if name not in OPTIMIZERS:
        raise UserError("optimizer.unknown", f"got optimizer {name!r}, expected one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](weights)


@dataclass
class Built:
    """A model made ready for its step.

    Attributes:
        model: the model on the meta device or a real one, with adapters, checkpoints and tiles.
        blocks: position-wise blocks of the model, tiled or not.
        notes: sentences about the blocks for the user.
    """

    model: nn.Module
    blocks: tuple[Any, ...] = ()
    notes: list[str] = field(default_factory=list)
