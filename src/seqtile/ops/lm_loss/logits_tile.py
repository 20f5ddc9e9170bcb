"""The arithmetic of a language-model head over one tile of tokens: logits, losses, and the logits' gradient in place.

Everything after the product runs in fp32 (float64 for float64 states), over blocks of rows, so that a tile costs its
logits in the compute dtype and not two or three fp32 copies of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}: expected a number above 0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap}: expected a number above 0, or None for no cap")

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


@dataclass(frozen=True)
class Objective:
    """What is summed per token: ``lse - (1 - s) * z[target] - s * mean(z) + z_loss * lse**2``.

    Attributes:
        scaling: from product to logits.
        ignore_index: target of tokens that count nothing.
        label_smoothing: share ``s`` of the target that is spread over the vocabulary.
        z_loss: weight of the squared log-normaliser (arXiv 2202.08906).
    """

    scaling: LogitScaling = field(default_factory=LogitScaling)
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing}: expected a share from 0.0 to 1.0")
        if not self.z_loss >= 0.0:
            raise ValueError(f"z_loss={self.z_loss}: expected a weight of at least 0.0")

    def targets(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens count, and a target inside the vocabulary for each."""
        valid = labels != self.ignore_index
        return valid, torch.where(valid, labels, 0)


@dataclass
class Wanted:
    """What one pass is to find besides the loss of each token; the results, ``[N]`` each, are written here.

    Attributes:
        entropy: entropy of the next-token distribution, or None.
        argmax: the most likely token, or None.
        hit: whether the target is among the ``top_k`` most likely, or None. Ties count for the target.
        log_sum_squares: ``log(sum(p**2))``, or None.
        mean_logit: mean of the logits over the vocabulary, or None.
        top_k: ``k`` of ``hit``.
    """

    entropy: Tensor | None = None
    argmax: Tensor | None = None
    hit: Tensor | None = None
    log_sum_squares: Tensor | None = None
    mean_logit: Tensor | None = None
    top_k: int = 1

    def narrow(self, part: slice) -> Wanted:
        """The same for some of the tokens."""
        names = ("entropy", "argmax", "hit", "log_sum_squares", "mean_logit")
        cut = {name: None if getattr(self, name) is None else getattr(self, name)[part] for name in names}
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

    def blocks(self, rows: int) -> Iterator[slice]:
        """Blocks of rows for what runs in fp32."""
        step = max(1, BLOCK_ELEMENTS.get(self.device.type, 2**25) // max(1, self.vocabulary))
        for start in range(0, rows, step):
            yield slice(start, min(start + step, rows))

    def logits(self, y: Tensor) -> Tensor:
        """One block's logits in fp32, a new tensor."""
        scaling = self.objective.scaling
        z = y.to(self.wide, copy=True)
        if scaling.before != 1.0:
            z.mul_(scaling.before)
        if scaling.softcap:
            z.tanh_().mul_(scaling.after)
        return z

    def losses(self, y: Tensor, target: Tensor, valid: Tensor, loss: Tensor, lse: Tensor, wanted: Wanted) -> None:
        """Write each row's loss, log-normaliser and whatever else is wanted; ``y`` stays."""
        for part in self.blocks(y.shape[0]):
            z = self.logits(y[part])
            found = wanted.narrow(part)
            self._loss(z, target[part], valid[part], loss[part], lse[part], found)
            if found.entropy is not None or found.log_sum_squares is not None:
                _spread(z, lse[part], found)
            for name in ("entropy", "mean_logit", "log_sum_squares", "argmax", "hit"):
                tensor = getattr(found, name)
                if tensor is not None:
                    tensor.masked_fill_(~valid[part], 0)

    def losses_and_gradient(
        self, y: Tensor, target: Tensor, valid: Tensor, factor: Tensor, loss: Tensor, lse: Tensor
    ) -> None:
        """Write each row's loss, and over its products their gradient times ``factor``."""
        for part in self.blocks(y.shape[0]):
            z = self.logits(y[part])
            self._loss(z, target[part], valid[part], loss[part], lse[part], Wanted())
            z.sub_(lse[part].unsqueeze(-1)).exp_()
            self._gradient(z, y[part], target[part], valid[part], factor[part], lse[part])

    def gradient(
        self, y: Tensor, target: Tensor, valid: Tensor, factor: Tensor | None, lse: Tensor,
        entropy: Tensor | None = None, entropy_factor: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The same when log-normalisers are known; ``entropy_factor`` is the upstream gradient of the entropy."""
        for part in self.blocks(y.shape[0]):
            z = self.logits(y[part]).sub_(lse[part].unsqueeze(-1))
            extra = None
            if entropy is not None and entropy_factor is not None:
                extra = z.exp().mul_(z + entropy[part].unsqueeze(-1)).mul_(-entropy_factor[part].unsqueeze(-1))
            z.exp_()
            none = lse.new_zeros(()).expand(lse.shape)[part] if factor is None else factor[part]
            self._gradient(z, y[part], target[part], valid[part], none, lse[part], extra)

    def _loss(self, z: Tensor, target: Tensor, valid: Tensor, loss: Tensor, lse: Tensor, found: Wanted) -> None:
        """Write loss and log-normaliser of one block of logits."""
        aim = self.objective
        top, best = z.max(-1) if found.argmax is not None else (z.amax(-1), None)
        at_target = z.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        lse.copy_((z - top.unsqueeze(-1)).exp_().sum(-1).log_().add_(top))
        value = lse - (1 - aim.label_smoothing) * at_target
        if aim.label_smoothing:
            value -= aim.label_smoothing * z.mean(-1)
        if aim.z_loss:
            value += aim.z_loss * lse.square()
        loss.copy_(value.masked_fill_(~valid, 0))
        if found.argmax is not None and best is not None:
            found.argmax.copy_(best)
        if found.hit is not None:
            found.hit.copy_((z > at_target.unsqueeze(-1)).sum(-1) < found.top_k)
        if found.mean_logit is not None:
            found.mean_logit.copy_(z.mean(-1))

    def _gradient(
        self, p: Tensor, y: Tensor, target: Tensor, valid: Tensor, factor: Tensor, lse: Tensor,
        extra: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Turn probabilities into the gradient of the products, times ``factor``, and write it over ``y``."""
        aim, scaling = self.objective, self.objective.scaling
        every = factor * (1 + 2 * aim.z_loss * lse) if aim.z_loss else factor
        p.mul_(every.unsqueeze(-1))
        if aim.label_smoothing:
            p.sub_((factor * (aim.label_smoothing / self.vocabulary)).unsqueeze(-1))
        p.scatter_add_(-1, target.unsqueeze(-1), ((aim.label_smoothing - 1) * factor).unsqueeze(-1))
        if extra is not None:
            p.add_(extra)
        if scaling.softcap:
            bent = y.to(self.wide, copy=True).mul_(scaling.before).tanh_().square_()
            p.sub_(bent.mul_(p))
        through = scaling.before * scaling.after
        if through != 1.0:
            p.mul_(through)
        y.copy_(p.masked_fill_(~valid.unsqueeze(-1), 0))  # whatever an ignored row holds, infinities too


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
        """``x @ weight.T + bias`` of one tile, in the shared buffer."""
        y = self._buffer[: x.shape[0]]
        if self.bias is None:
            return torch.mm(x.to(self.dtype), self.matrix.t(), out=y)
        return torch.addmm(self.bias, x.to(self.dtype), self.matrix.t(), out=y)


def _spread(z: Tensor, lse: Tensor, found: Wanted) -> None:
    """Entropy and the log of the summed squares of the probabilities."""
    p = (z - lse.unsqueeze(-1)).exp_()
    if found.log_sum_squares is not None:
        found.log_sum_squares.copy_(p.square().sum(-1).log_())
    if found.entropy is not None:
        found.entropy.copy_(lse - p.mul_(z).sum(-1))
