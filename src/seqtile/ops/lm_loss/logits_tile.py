"""The arithmetic of a language-model head over one tile of tokens: logits, losses, and the logits' gradient in place.

Everything after the product runs in fp32 (float64 for float64 states), over blocks of rows, so that a tile costs its
logits in the compute dtype and not two or three fp32 copies of them.

Shapes: ``t`` tokens of the tile, ``b`` of one block of rows, ``D`` features of a hidden state, ``V`` the vocabulary.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from seqtile._errors import expect_number

BLOCK_ELEMENTS = {"cpu": 2**20}
"""Elements of one fp32 block of rows: in the cache of a CPU core; elsewhere 2**25, enough to fill a device."""


@dataclass(frozen=True)
class LogitScaling:
    """What a model does to the head's product: ``softcap * tanh(scale * y / softcap) / temperature``.

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


@dataclass(frozen=True, eq=False)
class Objective:
    """What is summed per token; with ``w`` the class weights and ``W`` their sum (all 1 without them),

    ``(1 - s) * w[target] * (lse - z[target]) + s / V * (W * lse - sum(w * z)) + z_loss * lse**2``.

    Attributes:
        scaling: from product to logits.
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
    """What is known of each token that counts, ``[n]``.

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
    """What one pass is to find besides the loss of each token; the results, ``[n]`` each, are written here.

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


class HeadRows:
    """What happens to a tile's products, row by row; knows no weight.

    Args:
        objective: what is summed per token.
        vocabulary: ``V``.
        dtype: dtype of the products.
        device: where they are.
    """

    def __init__(self, objective: Objective, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        self.objective, self.vocabulary, self.dtype, self.device = objective, vocabulary, dtype, device
        self.wide = torch.promote_types(dtype, torch.float32)
        weights = objective.class_weights
        self.class_weights = None if weights is None else weights.detach().to(device, self.wide)
        self.weight_sum = float(vocabulary) if self.class_weights is None else self.class_weights.sum()

    def blocks(self, rows: int) -> Iterator[slice]:
        """Blocks of rows for what runs in fp32."""
        step = max(1, BLOCK_ELEMENTS.get(self.device.type, 2**25) // max(1, self.vocabulary))
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def logits(self, y: Tensor, temperature: Tensor | None = None) -> Tensor:
        """One block's logits in fp32, ``[b, V]``, a new tensor; ``temperature`` is ``[b]``."""
        scaling = self.objective.scaling
        z = y.to(self.wide, copy=True)  # [b, V]
        if scaling.before != 1.0:
            z.mul_(scaling.before)
        if scaling.softcap:
            z.tanh_().mul_(scaling.after)
        return z if temperature is None else z.div_(temperature.unsqueeze(-1))

    def losses(self, y: Tensor, targets: TileTargets, loss: Tensor, lse: Tensor, wanted: Wanted) -> None:
        """Write each row's loss, log-normaliser ``[t]`` and whatever else is wanted; ``y`` ``[t, V]`` stays."""
        for block in self.blocks(y.shape[0]):
            z = self.logits(y[block], targets[block].temperature)
            results = wanted.narrow(block)
            self._loss(z, targets[block], loss[block], lse[block], results)
            if results.entropy is not None or results.log_sum_squares is not None:
                _write_entropies(z, lse[block], results)

    def losses_and_gradient(
        self, y: Tensor, targets: TileTargets, factor: Tensor | None, loss: Tensor, lse: Tensor
    ) -> None:
        """Write each row's loss, and over its products their gradient times ``factor`` (None: 1)."""
        factor = lse.new_ones(()).expand(lse.shape) if factor is None else factor
        for block in self.blocks(y.shape[0]):
            z = self.logits(y[block], targets[block].temperature)
            self._loss(z, targets[block], loss[block], lse[block], Wanted())
            z.sub_(lse[block].unsqueeze(-1)).exp_()
            self._gradient(z, y[block], targets[block], factor[block], lse[block])  # z: probabilities, [b, V]

    def gradient(
        self, y: Tensor, targets: TileTargets, factor: Tensor, lse: Tensor, entropy: Tensor | None = None,
        entropy_factor: Tensor | None = None, candidates_factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the gradient, ``lse`` being known; ``*_factor`` are upstream gradients of entropies and candidates."""
        for block in self.blocks(y.shape[0]):
            z = self.logits(y[block], targets[block].temperature).sub_(lse[block].unsqueeze(-1))
            extra = None
            if entropy is not None and entropy_factor is not None:
                extra = z.exp().mul_(z + entropy[block].unsqueeze(-1)).mul_(-entropy_factor[block].unsqueeze(-1))
            z.exp_()
            of_candidates = None if candidates_factor is None else candidates_factor[block]
            self._gradient(z, y[block], targets[block], factor[block], lse[block], extra, of_candidates)

    def _loss(self, z: Tensor, targets: TileTargets, loss: Tensor, lse: Tensor, results: Wanted) -> None:
        """Write loss and log-normaliser, ``[b]``, of one block of logits, ``[b, V]``."""
        aim = self.objective
        top, best = z.max(-1) if results.argmax is not None else (z.amax(-1), None)  # [b]
        at_target = z.gather(-1, targets.ids.unsqueeze(-1)).squeeze(-1)  # [b, V] -> [b]
        lse.copy_((z - top.unsqueeze(-1)).exp_().sum(-1).log_().add_(top))
        value = (lse - at_target).mul_(self._own(targets.ids))
        if aim.label_smoothing:
            mean = z.sum(-1) if self.class_weights is None else torch.mv(z, self.class_weights)  # [b, V] -> [b]
            value += (self.weight_sum * lse - mean) * (aim.label_smoothing / self.vocabulary)
        if aim.z_loss:
            value += aim.z_loss * lse.square()
        loss.copy_(value)
        if results.argmax is not None and best is not None:
            results.argmax.copy_(best)
        if results.hit is not None:
            results.hit.copy_((z > at_target.unsqueeze(-1)).sum(-1) < results.top_k)
        if results.mean_logit is not None:
            results.mean_logit.copy_(z.mean(-1))
        if results.candidates is not None and targets.candidates is not None:
            results.candidates.copy_(z.gather(-1, targets.candidates) - lse.unsqueeze(-1))  # [b, k]
        if results.top_log_probs is not None and results.top_tokens is not None:
            values, tokens = z.topk(results.top_tokens.shape[-1], -1)  # [b, k] each
            results.top_log_probs.copy_(values - lse.unsqueeze(-1))
            results.top_tokens.copy_(tokens)

    def _own(self, ids: Tensor) -> Tensor | float:
        """Factor of the target's own term in the loss."""
        hard_weight = 1 - self.objective.label_smoothing
        return hard_weight if self.class_weights is None else hard_weight * self.class_weights[ids]

    def _gradient(
        self, p: Tensor, y: Tensor, targets: TileTargets, factor: Tensor, lse: Tensor, extra: Tensor | None = None,
        of_candidates: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Turn probabilities into the gradient of the products, times ``factor``, and write it over ``y``."""
        aim = self.objective
        smoothing = aim.label_smoothing / self.vocabulary
        target_factor = factor * self._own(targets.ids)  # [b]
        every = target_factor if not smoothing else target_factor + factor * (smoothing * self.weight_sum)
        if aim.z_loss:
            every = every + factor * (2 * aim.z_loss * lse)
        if of_candidates is not None:
            every = every - of_candidates.sum(-1)
        p.mul_(every.unsqueeze(-1))  # [b, V]
        if smoothing:
            weights = p.new_ones(self.vocabulary) if self.class_weights is None else self.class_weights
            p.addr_(factor, weights, alpha=-smoothing)
        at_target = target_factor if targets.is_local is None else target_factor * targets.is_local  # [b]
        p.scatter_add_(-1, targets.ids.unsqueeze(-1), -at_target.unsqueeze(-1))
        if of_candidates is not None and targets.candidates is not None:
            p.scatter_add_(-1, targets.candidates, of_candidates)
        if extra is not None:
            p.add_(extra)
        self.through_scaling(p, y, targets.temperature)
        y.copy_(p)

    def through_scaling(self, dz: Tensor, y: Tensor, temperature: Tensor | None = None) -> None:
        """Turn the gradient of logits into that of the products ``y`` they were made of, ``[b, V]``, in place."""
        scaling = self.objective.scaling
        if scaling.softcap:
            bent = y.to(self.wide, copy=True).mul_(scaling.before).tanh_().square_()
            dz.sub_(bent.mul_(dz))
        through = scaling.before * scaling.after
        if through != 1.0:
            dz.mul_(through)
        if temperature is not None:
            dz.div_(temperature.unsqueeze(-1))


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
        super().__init__(objective, weight.shape[0], dtype, weight.device)
        self.matrix = weight.detach().to(dtype)
        self.bias = None if bias is None else bias.detach().to(dtype)
        self._buffer = torch.empty(tile, self.vocabulary, dtype=dtype, device=weight.device)

    def product(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias`` of one tile, ``[t, D] -> [t, V]``, in the shared buffer."""
        y = self._buffer[: x.shape[0]]
        if self.bias is None:
            return torch.mm(x.to(self.dtype), self.matrix.t(), out=y)
        return torch.addmm(self.bias, x.to(self.dtype), self.matrix.t(), out=y)


def _write_entropies(z: Tensor, lse: Tensor, results: Wanted) -> None:
    """Entropy and the log of the summed squares of the probabilities, ``[b]``, of logits ``[b, V]``."""
    p = (z - lse.unsqueeze(-1)).exp_()
    if results.log_sum_squares is not None:
        results.log_sum_squares.copy_(p.square().sum(-1).log_())
    if results.entropy is not None:
        results.entropy.copy_(lse - p.mul_(z).sum(-1))
