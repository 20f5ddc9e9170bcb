"""Deferred logits: the hidden states, and the operations recorded on the product so far.

While a model with a tiled loss runs its own forward, its head returns one of these. Scales and soft-caps are written
down; whatever else is done to it makes the real logits, so that a model that does more than that is still right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqtile.ops.lm_loss.logits_tile import LogitScaling
from seqtile.ops.lm_loss.token_logprobs import TokenScores


class ScoreSource(Protocol):
    """The head behind logits that are not there yet."""

    def scores(self, logits: DeferredLogits, targets: Tensor, temperature: float, **options: Any) -> TokenScores:
        """The result of :func:`seqtile.token_logprobs`."""


class DeferredLogits:
    """Stands for ``scaling(head(hidden))``.

    Args:
        hidden: ``[..., D]``, the input of the head.
        vocabulary: ``V``.
        make: computes the product; its argument names the operation that forced it.
        source: scores tokens under the head; None where log-probabilities are not available.
    """

    def __init__(
        self, hidden: Tensor, vocabulary: int, make: Callable[[Tensor, str], Tensor], before: float = 1.0,
        after: float | None = None, source: ScoreSource | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.hidden, self.vocabulary, self.source = hidden, vocabulary, source
        self._make, self.before, self.after, self._dtype = make, before, after, dtype or hidden.dtype
        self.written: Tensor | None = None  # the real logits, once something was written into them

    @property
    def scaling(self) -> LogitScaling:
        """The model's scaling: a factor, a tanh, another factor."""
        if self.after is None:
            return LogitScaling(self.before)
        return LogitScaling(self.before * self.after, softcap=self.after)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.hidden.shape[:-1], self.vocabulary])

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def scores(self, targets: Tensor, *, temperature: float = 1.0, **options: Any) -> TokenScores:
        """Score tokens, ``[...]``, without the logits, as :func:`seqtile.token_logprobs` does.

        Raises:
            RuntimeError: something was written into the logits, so that they are there; or no head is behind them.
        """
        if self.source is None or self.written is not None:
            raise RuntimeError(
                "these logits were modified, or belong to a forward that has ended; they are only available as real "
                "tensors"
            )
        return self.source.scores(self, targets, temperature, **options)

    def real(self, why: str) -> Tensor:
        """The logits themselves, for something that this class does not know."""
        if self.written is not None:
            return self.written
        product = self._make(self.hidden, why)
        if self.after is None:
            return product if self.before == 1.0 else product * self.before
        return torch.tanh(product * self.before) * self.after

    def _times(self, factor: Any) -> Any:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or self.written is not None:
            return self.real("multiplied by a tensor") * factor
        if self.after is None:
            return self._with(self.before * factor, None)
        if self.after * factor <= 0:
            return self.real("negated") * factor
        return self._with(self.before, self.after * factor)

    def _with(
        self, before: float, after: float | None, hidden: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> DeferredLogits:
        rows = self.hidden if hidden is None else hidden
        return DeferredLogits(rows, self.vocabulary, self._make, before, after, self.source, dtype or self._dtype)

    def _of(self, hidden: Tensor, dtype: torch.dtype | None = None) -> DeferredLogits:
        """These logits for other tokens, or with another dtype to report."""
        return self._with(self.before, self.after, hidden, dtype)

    def __mul__(self, factor: Any) -> Any:
        return self._times(factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if isinstance(divisor, (int, float)) and not isinstance(divisor, bool):
            return self._times(1 / divisor)
        return self.real("divided by a tensor") / divisor

    def tanh(self) -> Any:
        if self.after is None and self.written is None:
            return self._with(self.before, 1.0)
        return self.real("a second tanh").tanh()

    def div_(self, divisor: Any) -> Any:
        """In place, as a statement: by a number it is written down too."""
        scaled = self / divisor
        if isinstance(scaled, DeferredLogits):
            self.before, self.after = scaled.before, scaled.after
        else:
            self.written = scaled
        return self

    def float(self) -> DeferredLogits:
        """The loss is computed in fp32 in any case."""
        return self.to(torch.float32)

    def contiguous(self, *_: Any, **__: Any) -> DeferredLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        return self._of(self.hidden, dtypes[0]) if dtypes and self.written is None else self

    def squeeze(self, dim: int) -> Any:
        """Without a leading dimension of one."""
        dim = dim % (self.hidden.dim())
        if dim == self.hidden.dim() - 1 or self.written is not None:
            return self.real("squeezed").squeeze(dim)
        return self._of(self.hidden.squeeze(dim))

    def log_softmax(self, dim: int = -1, dtype: torch.dtype | None = None) -> Any:
        """Log-probabilities that are not there yet either, until some tokens' are asked for."""
        last = dim in (-1, self.hidden.dim() - 1)
        if self.source is None or self.written is not None or not last or dtype not in (None, torch.float32):
            return self.real("log_softmax").log_softmax(dim, dtype=dtype)
        return DeferredLogProbs(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if isinstance(first, DeferredLogits) and not kwargs:
            if func is torch.tanh:
                return first.tanh()
            if func in (torch.log_softmax, F.log_softmax) and len(args) == 2:
                return first.log_softmax(args[1])
            if func in (torch.mul, torch.div, torch.true_divide) and len(args) == 2:
                return first * args[1] if func is torch.mul else first / args[1]
        why = getattr(func, "__name__", str(func))
        real = [value.real(why) if isinstance(value, DeferredLogits) else value for value in args]
        named = {k: v.real(why) if isinstance(v, DeferredLogits) else v for k, v in (kwargs or {}).items()}
        return func(*real, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        real = self.real(name)
        if name.endswith("_"):  # writes in place, perhaps as a statement whose result is unused
            self.written = real
        return getattr(real, name)

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        # Slices of leading dimensions alone, and the whole vocabulary.
        whole = len(keys) < self.hidden.dim() or len(keys) == self.hidden.dim() and keys[-1] == slice(None)
        if self.source is None or self.written is not None or not whole or any(type(k) is not slice for k in keys):
            return self.real("indexed")[key]
        return self._of(self.hidden[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written = self.real("written to")
        self.written[key] = value

    def __add__(self, other: Any) -> Tensor:
        return self.real("added to") + other  # type: ignore[no-any-return]

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return self.real("subtracted from") - other  # type: ignore[no-any-return]

    def __neg__(self) -> Tensor:
        return -self.real("negated")


class DeferredLogProbs:
    """``log_softmax`` of deferred logits, to gather some tokens from."""

    def __init__(self, logits: DeferredLogits) -> None:
        self.logits = logits

    @property
    def shape(self) -> torch.Size:
        return self.logits.shape

    def real(self, why: str) -> Tensor:
        return self.logits.real(why).log_softmax(-1)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """``[..., k]`` log-probabilities of the tokens ``index`` ``[..., k]``."""
        if dim not in (-1, len(self.shape) - 1) or index.shape[:-1] != self.shape[:-1]:
            return self.real("gather").gather(dim, index)
        first = index[..., 0]
        if index.shape[-1] == 1:
            return self.logits.scores(first).log_probs.unsqueeze(-1)
        candidates = self.logits.scores(first, candidates=index).candidates
        if candidates is None:  # the head runs as a module
            return self.real("several tokens of each position").gather(dim, index)
        return candidates

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.gather, torch.take_along_dim) and args and isinstance(args[0], DeferredLogProbs):
            call_arguments = dict(
                zip(("dim", "index") if func is torch.gather else ("indices", "dim"), args[1:], strict=False)
            )
            call_arguments |= kwargs
            index = call_arguments.pop("index", call_arguments.pop("indices", None))
            if call_arguments.keys() == {"dim"} and index is not None:
                return args[0].gather(call_arguments["dim"], index)
        why = getattr(func, "__name__", str(func))
        real = [value.real(why) if isinstance(value, DeferredLogProbs) else value for value in args]
        return func(*real, **{k: v.real(why) if isinstance(v, DeferredLogProbs) else v for k, v in kwargs.items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.real(name), name)


class DeferredHead(nn.Module):
    """Takes the head's place while the model's forward runs."""

    def __init__(
        self, head: nn.Module, make: Callable[[Tensor, str], Tensor], source: ScoreSource | None = None
    ) -> None:
        super().__init__()
        self.__dict__.update(_head=head, _make=make, _source=source)  # not submodules: they are not ours

    def forward(self, hidden: Tensor) -> DeferredLogits:
        return DeferredLogits(hidden, head_width(self._head), self._make, source=self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_head"], name)  # its weight, for models that read it


def head_width(head: nn.Module) -> int:
    """``V`` of a head, under whatever adapters.

    The weight's shape first: a head that PEFT ties to saved embeddings has the sizes of its layer swapped. Packed
    weights and transformers' Conv1D have another shape.
    """
    weight = getattr(head, "weight", None)
    if isinstance(weight, Tensor) and weight.is_floating_point() and not hasattr(head, "nf"):
        shape = getattr(weight, "ds_shape", weight.shape)
        if len(shape) == 2:
            return int(shape[0])
    return int(getattr(head, "nf", 0) or getattr(head, "out_features", 0))
