"""The arithmetic of a language-model head over one tile of tokens: logits, losses, and the logits' gradient in place.

Everything after the product runs in fp32 (float64 for float64 states): in compiled kernels on accelerators, else over
blocks of rows, so that a tile costs its logits in the compute dtype and not two or three fp32 copies of them.

Shapes: ``t`` tokens of the tile, ``b`` of one block of rows, ``D`` features of a hidden state, ``V`` the vocabulary.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from seqtile._errors import expect_number
from seqtile.ops.lm_loss.row_kernels import blocks_of_rows, run_over_rows


@dataclass(frozen=True)
class LogitScaling:
    """Scaling of the head's logits: ``softcap * tanh(scale * y / softcap) / temperature``.

    Attributes:
        scale: factor right after the product (Cohere, Granite).
        softcap: bound of the logits (Gemma 2 and 3), or None.
        temperature: divides the logits last.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        least, most = math.ulp(0.0), sys.float_info.max
        expect_number("scale", self.scale, -most, most, "a number")
        expect_number("temperature", self.temperature, least, most, "a number above 0")
        if self.softcap is not None:
            expect_number("softcap", self.softcap, least, most, "a number above 0, or None for no cap")

    @property
    def before(self) -> float:
        """Factor before the tanh, or the only factor."""
        return self.scale / self.softcap if self.softcap else self.scale / self.temperature

    @property
    def after(self) -> float:
        """Factor after the tanh."""
        return self.softcap / self.temperature if self.softcap else 1.0

    def on(self, y: Tensor) -> Tensor:
        """The logits as a new tensor, through autograd: the plain twin."""
        z = y * self.before if self.before != 1.0 else y
        return torch.tanh(z) * self.after if self.softcap else z

    def logits(self, y: Tensor, temperature: Tensor | None = None) -> Tensor:
        """The logits of some rows, ``[r, ...]``, as a new tensor in fp32; ``temperature`` is ``[r]``."""
        z = y.to(torch.promote_types(y.dtype, torch.float32), copy=True)
        if self.before != 1.0:
            z.mul_(self.before)
        if self.softcap:
            z.tanh_().mul_(self.after)
        return z if temperature is None else z.div_(temperature.unsqueeze(-1))

    def through(self, dz: Tensor, y: Tensor, temperature: Tensor | None = None) -> None:
        """Turn the gradient of logits into that of the products ``y`` they were made of, in place."""
        if self.softcap:
            bent = y.to(dz.dtype, copy=True).mul_(self.before).tanh_().square_()
            dz.sub_(bent.mul_(dz))
        factor = self.before * self.after
        if factor != 1.0:
            dz.mul_(factor)
        if temperature is not None:
            dz.div_(temperature.unsqueeze(-1))


@dataclass(frozen=True)
class LogNormaliser:
    """``logsumexp`` of each token's logits ``z`` in two numbers, ``[n]`` each.

    ``(z - top) - log_sum`` rounds at the size of a log-probability, ``z - logsumexp(z)`` at that of the logits: with
    logits around 1,000 the probabilities of a row would not sum to 1 in fp32.

    Attributes:
        top: the largest logit.
        log_sum: ``log(sum(exp(z - top)))``, at least 0.
    """

    top: Tensor
    log_sum: Tensor

    @classmethod
    def empty_like(cls, numbers: Tensor) -> LogNormaliser:
        return cls(torch.empty_like(numbers), torch.empty_like(numbers))

    def __getitem__(self, rows: slice) -> LogNormaliser:
        return LogNormaliser(self.top[rows], self.log_sum[rows])

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.top, self.log_sum

    def total(self) -> Tensor:
        """The ``logsumexp`` in one number."""
        return self.top + self.log_sum


def top_and_log_sum(z: Tensor) -> tuple[Tensor, Tensor]:
    """Both numbers of a :class:`LogNormaliser` for the logits ``z`` ``[r, V]``, ``[r, 1]`` each."""
    # The compiler makes one pass of maximum and sum where they are written in this way.
    top = z.amax(-1, keepdim=True)
    return top, (z - top).exp_().sum(-1, keepdim=True).log_()


def to_log_probs(z: Tensor, top: Tensor, log_sum: Tensor) -> Tensor:
    """Turn the logits ``z`` ``[r, V]`` into log-probabilities, in place."""
    return z.sub_(top.unsqueeze(-1)).sub_(log_sum.unsqueeze(-1))


def finite(z: Tensor) -> Tensor:
    """``z`` with the logits of tokens that cannot be, -inf, as numbers, in place: 0 times one of them is 0."""
    return z.clamp_(min=torch.finfo(z.dtype).min)


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss per token; with ``w`` the class weights and ``W`` their sum (all 1 without them),

    ``(1 - s) * w[target] * (lse - z[target]) + s / V * (W * lse - sum(w * z)) + z_loss * lse**2``.

    Attributes:
        scaling: scaling from product to logits.
        ignore_index: target of tokens that count nothing.
        label_smoothing: share ``s`` of the target that is spread over the vocabulary.
        z_loss: weight of the squared log-normaliser (arXiv 2202.08906).
        class_weights: ``[V]``, a constant factor for each target, or None.
    """

    scaling: LogitScaling = field(default_factory=LogitScaling)
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weights: Tensor | None = None

    def __post_init__(self) -> None:
        expect_number("label_smoothing", self.label_smoothing, 0.0, 1.0, "a share from 0.0 to 1.0")
        expect_number("z_loss", self.z_loss, 0.0, sys.float_info.max, "a weight of at least 0.0")
        if not isinstance(self.scaling, LogitScaling):
            raise ValueError(f"scaling is of type {type(self.scaling).__name__}, expected a LogitScaling or None")
        least, most = -(2**63), 2**63 - 1
        expect_number("ignore_index", self.ignore_index, least, most, "an integer, as the labels are", whole=True)


@dataclass(frozen=True)
class TileTargets:
    """Inputs of each token that is not ignored, ``[n]``.

    Attributes:
        ids: its target.
        temperature: divides its logits after everything else, or None.
        candidates: ``[n, k]``, other tokens whose log-probabilities are wanted, or None.
        is_local: whether the target is among the rows of this rank's weight, or None where the weight is whole.
    """

    ids: Tensor
    temperature: Tensor | None = None
    candidates: Tensor | None = None
    is_local: Tensor | None = None

    def __getitem__(self, rows: slice) -> TileTargets:
        return TileTargets(*(None if tensor is None else tensor[rows] for tensor in self.tensors()))  # type: ignore[arg-type]

    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.ids, self.temperature, self.candidates, self.is_local


@dataclass
class Wanted:
    """Further outputs of one pass besides the loss of each token, ``[n]`` each, written in place.

    Attributes:
        entropy: entropy of the next-token distribution, or None.
        argmax: the most likely token, or None.
        hit: whether the target is among the ``top_k`` most likely, or None. Ties count for the target.
        log_sum_squares: ``log(sum(p**2))``, or None.
        mean_logit: mean of the logits over the vocabulary, or None.
        candidates: ``[n, k]``, log-probabilities of the targets' candidates, or None.
        top_log_probs: ``[n, k]``, the ``k`` largest log-probabilities, or None.
        top_tokens: ``[n, k]``, their tokens; None without ``top_log_probs``.
        top_k: ``k`` of ``hit``.
    """

    entropy: Tensor | None = None
    argmax: Tensor | None = None
    hit: Tensor | None = None
    log_sum_squares: Tensor | None = None
    mean_logit: Tensor | None = None
    candidates: Tensor | None = None
    top_log_probs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_k: int = 1

    def narrow(self, rows: slice) -> Wanted:
        """The results of some of the tokens."""
        cut = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Wanted(**cut, top_k=self.top_k)


@dataclass(frozen=True)
class RowFormula:
    """The arithmetic of one row of products, in numbers: what a kernel is compiled for.

    Each method writes over some rows, ``[r, V]`` and ``[r]``, in place and in fp32 inside: eagerly over a block, or as
    one kernel over a whole tile. Optional tensors are None.

    Attributes:
        scaling: scaling from product to logits.
        smoothing: ``s`` of :class:`Objective`.
        z_loss: ``z_loss`` of :class:`Objective`.
        top_k: ``k`` of ``hit``.
    """

    scaling: LogitScaling
    smoothing: float
    z_loss: float
    top_k: int = 1

    def write_losses(
        self, y: Tensor, ids: Tensor, temperature: Tensor | None, loss: Tensor, top: Tensor, log_sum: Tensor,
        mean_logit: Tensor | None = None, hit: Tensor | None = None, class_weights: Tensor | None = None,
        weight_sum: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Loss and log-normaliser of each row."""
        z = self.scaling.logits(y, temperature)
        at_target = self.scaling.logits(y.gather(-1, ids.unsqueeze(-1)), temperature)  # [r, 1]
        if hit is not None:
            hit.copy_((z > at_target).sum(-1) < self.top_k)
        if mean_logit is not None:
            mean_logit.copy_(z.mean(-1))
        largest, rest = top_and_log_sum(z)
        cross_entropy = (rest + (largest - at_target)).squeeze(-1)
        top.copy_(largest.squeeze(-1))
        log_sum.copy_(rest.squeeze(-1))
        value = cross_entropy * self._own(ids, class_weights)
        if self.smoothing:
            # Differences to the target's logit: sums of the logits themselves would round at the logits' size.
            above = z - at_target  # [r, V]
            spread = above.sum(-1) if class_weights is None else (above * class_weights).sum(-1)
            count = y.shape[1] if weight_sum is None else weight_sum
            value = value + (count * cross_entropy - spread) * (self.smoothing / y.shape[1])
        if self.z_loss:
            value = value + self.z_loss * (rest + largest).squeeze(-1).square()
        loss.copy_(value)

    def write_entropies(
        self, y: Tensor, temperature: Tensor | None, top: Tensor, log_sum: Tensor, entropy: Tensor | None,
        log_sum_squares: Tensor | None,
    ) -> None:  # fmt: skip
        """Entropy and the log of the summed squares of the probabilities of each row."""
        below = finite(self.scaling.logits(y, temperature)).sub_(top.unsqueeze(-1))  # at most 0
        p = (below - log_sum.unsqueeze(-1)).exp_()
        if log_sum_squares is not None:
            log_sum_squares.copy_(p.square().sum(-1).log_())
        if entropy is not None:
            entropy.copy_(log_sum - p.mul_(below).sum(-1))  # two numbers of at least 0: nothing cancels

    def write_gradient(
        self, y: Tensor, ids: Tensor, temperature: Tensor | None, is_local: Tensor | None, factor: Tensor | None,
        top: Tensor, log_sum: Tensor, entropy: Tensor | None = None, entropy_factor: Tensor | None = None,
        candidates: Tensor | None = None, candidates_factor: Tensor | None = None, class_weights: Tensor | None = None,
        weight_sum: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Over the products, the gradient of the losses times ``factor`` (None: 1) and of what else has a factor."""
        p = to_log_probs(self.scaling.logits(y, temperature), top, log_sum)
        of_entropy = None
        if entropy is not None and entropy_factor is not None:
            of_entropy = finite(p).exp().mul_(p + entropy.unsqueeze(-1)).mul_(-entropy_factor.unsqueeze(-1))
        p.exp_()
        factor = torch.ones_like(top) if factor is None else factor
        smoothing = self.smoothing / y.shape[1]
        at_target = factor * self._own(ids, class_weights)  # [r]
        every = at_target
        if smoothing:
            every = every + factor * (smoothing * (y.shape[1] if weight_sum is None else weight_sum))
        if self.z_loss:
            every = every + factor * (2 * self.z_loss * (top + log_sum))
        if candidates_factor is not None:
            every = every - candidates_factor.sum(-1)
        p.mul_(every.unsqueeze(-1))
        if smoothing:
            spread = (factor * smoothing).unsqueeze(-1)  # [r, 1]
            p.sub_(spread if class_weights is None else spread * class_weights)
        if is_local is not None:
            at_target = at_target * is_local
        if torch.compiler.is_compiling():  # a scatter would be a kernel of its own, over an fp32 copy
            tokens = torch.arange(y.shape[1], device=y.device)
            p = torch.where(tokens == ids.unsqueeze(-1), p - at_target.unsqueeze(-1), p)
        else:
            p.scatter_add_(-1, ids.unsqueeze(-1), -at_target.unsqueeze(-1))
        if candidates is not None and candidates_factor is not None:
            p.scatter_add_(-1, candidates, candidates_factor)
        if of_entropy is not None:
            p.add_(of_entropy)
        self.scaling.through(p, y, temperature)
        y.copy_(p)

    def _own(self, ids: Tensor, class_weights: Tensor | None) -> Tensor | float:
        """Factor of the target's own term in the loss."""
        hard_weight = 1 - self.smoothing
        return hard_weight if class_weights is None else hard_weight * class_weights[ids]


class HeadRows:
    """Row-wise computation on a tile's logits, independent of the weight.

    On accelerators one kernel reads a tile to find its losses, another reads it again and writes their gradient over
    it: three passes over memory beside the products. Where no kernel runs, the same is done over blocks of rows.

    Args:
        objective: what is summed per token.
        dtype: dtype of the products.
        device: where they are.
    """

    def __init__(self, objective: Objective, dtype: torch.dtype, device: torch.device) -> None:
        self.objective, self.dtype, self.device = objective, dtype, device
        self.wide = torch.promote_types(dtype, torch.float32)
        self.formula = RowFormula(objective.scaling, objective.label_smoothing, objective.z_loss)
        weights = objective.class_weights
        self._weights: tuple[Tensor | None, Tensor | None] = (None, None)
        if weights is not None:
            self._weights = (weights.detach().to(device, self.wide), weights.detach().to(device, self.wide).sum())

    def losses(self, y: Tensor, targets: TileTargets, loss: Tensor, normaliser: LogNormaliser, wanted: Wanted) -> None:
        """Write each row's loss, log-normaliser ``[t]`` and whatever else is wanted; ``y`` ``[t, V]`` stays."""
        formula = replace(self.formula, top_k=wanted.top_k)
        rows = (y, targets.ids, targets.temperature, loss, *normaliser.tensors(), wanted.mean_logit, wanted.hit)
        run_over_rows(RowFormula.write_losses, formula, rows, self._weights)
        if wanted.entropy is not None or wanted.log_sum_squares is not None:
            entropies = (y, targets.temperature, *normaliser.tensors(), wanted.entropy, wanted.log_sum_squares)
            run_over_rows(RowFormula.write_entropies, formula, entropies)
        if wanted.candidates is not None and targets.candidates is not None:
            z = formula.scaling.logits(y.gather(-1, targets.candidates), targets.temperature)  # [t, k]
            wanted.candidates.copy_(to_log_probs(z, *normaliser.tensors()))
        if wanted.argmax is None and wanted.top_log_probs is None:
            return
        for block in blocks_of_rows(y):
            z, best = formula.scaling.logits(y[block], targets[block].temperature), wanted.narrow(block)
            if best.argmax is not None:
                best.argmax.copy_(z.argmax(-1))
            if best.top_log_probs is not None and best.top_tokens is not None:
                values, tokens = z.topk(best.top_tokens.shape[-1], -1)  # [b, k] each
                best.top_log_probs.copy_(to_log_probs(values, *normaliser[block].tensors()))
                best.top_tokens.copy_(tokens)

    def losses_and_gradient(
        self, y: Tensor, targets: TileTargets, factor: Tensor | None, loss: Tensor, normaliser: LogNormaliser
    ) -> None:
        """Write each row's loss, and over its products their gradient times ``factor`` (None: 1)."""
        self.losses(y, targets, loss, normaliser, Wanted())
        self.gradient(y, targets, factor, normaliser)

    def gradient(
        self, y: Tensor, targets: TileTargets, factor: Tensor | None, normaliser: LogNormaliser,
        entropy: Tensor | None = None, entropy_factor: Tensor | None = None, candidates_factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the gradient over ``y``; ``*_factor`` are upstream gradients of entropies and candidates."""
        candidates = None if candidates_factor is None else targets.candidates
        # Autograd's gradient of a sum is one number, expanded, which the kernels do not support.
        factor, entropy_factor = (None if each is None else each.contiguous() for each in (factor, entropy_factor))
        rows = (y, targets.ids, targets.temperature, targets.is_local, factor, *normaliser.tensors(), entropy,
                entropy_factor, candidates, candidates_factor)  # fmt: skip
        run_over_rows(RowFormula.write_gradient, self.formula, rows, self._weights)


class HeadPass(HeadRows):
    """One pass over all tiles of one plain head.

    Args:
        objective: what is summed per token.
        weight: ``[V, D]``.
        bias: ``[V]`` or None.
        dtype: compute dtype of the products.
        tile: rows of the longest tile; its logits buffer is shared by all.
    """

    def __init__(
        self, objective: Objective, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, tile: int
    ) -> None:
        super().__init__(objective, dtype, weight.device)
        self.matrix = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self._buffer = torch.empty(tile, weight.shape[0], dtype=dtype, device=weight.device)

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` of one tile, ``[t, D] -> [t, V]``, in the shared buffer."""
        y = self._buffer[: x.shape[0]]
        if self.bias is None:
            return torch.mm(x.to(self.dtype), self.matrix.t(), out=y)
        return torch.addmm(self.bias, x.to(self.dtype), self.matrix.t(), out=y)
