"""Selective activation checkpointing: save attention's output, recompute the rest.

Past 128K tokens the second attention forward of a plain activation checkpoint costs a sixth of the step and more; its
output and log-sum-exp are one hidden state and 4 bytes per head and token. Kept are the results of PyTorch's fused
attention kernels and of FlashAttention's registered operators. Attention from plain products has no such result.

Source: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from seqtile._compat import HOOKS_SEE_WHAT_IS_KEPT, SEEN, SavedValue, saved_values, sdpa_shares_keys, tree_iter
from seqtile.checkpointing.host_offload import HostMemory, OffloadedTensor
from seqtile.counting.watch import LettingCompile, name_of
from seqtile.ops.attention.backends import AllowedKernels, refuse_wrong
from seqtile.ops.attention.kernel_calls import Kept, is_attention, keeping
from seqtile.ops.rng import RandomState


def largest_of_layers(text_config: Any, name: str) -> Any:
    """A size of a language model's configuration, the largest where its layers differ; None where it has none.

    Transformers' heterogeneous configurations raise where such a size is read for all layers:
    https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/heterogeneity/configuration_utils.py
    """
    if name not in (getattr(text_config, "per_layer_attributes", None) or ()):
        return getattr(text_config, name, None)
    return max((size for layer in text_config.per_layer_config if (size := getattr(layer, name, None))), default=None)


WIDEST_FLASH_HEAD = 256
"""The widest head that FlashAttention and PyTorch's kernel of that name take."""


def wide_heads(config: Any) -> str:
    """One sentence where some layer's heads are wider than a flash kernel takes (Gemma 4: 512), else ""."""
    width = largest_of_layers(config.get_text_config(), "head_dim") if hasattr(config, "get_text_config") else None
    if not isinstance(width, int) or width <= WIDEST_FLASH_HEAD:
        return ""
    effect = "SDPA repeats keys and values for every query head for its memory-efficient kernel"
    if sdpa_shares_keys(width):
        effect = (
            "SDPA computes layers with fewer key-value heads by plain products, with a [tokens, tokens] matrix per "
            f"head, in this version of transformers; use {SEEN['transformers']} "
            "(https://github.com/huggingface/transformers/pull/46960)"
        )
    return f"heads of size {width}: flash kernels support at most {WIDEST_FLASH_HEAD}, and {effect}"


def kept_per_token(text_config: Any, itemsize: int, hidden: int = 0) -> int:
    """Bytes kept per token and layer: each head's attention output, and its log-sum-exp in fp32.

    ``hidden`` is the width for a configuration that does not name one.
    """
    heads = largest_of_layers(text_config, "num_attention_heads") or 1
    hidden = largest_of_layers(text_config, "hidden_size") or hidden
    width = max(
        largest_of_layers(text_config, "head_dim") or hidden // heads, largest_of_layers(text_config, "v_head_dim") or 0
    )
    return int(heads * (width * itemsize + 4))


class AttentionSaved:
    """``context_fn`` of ``torch.utils.checkpoint``.

    Args:
        host: where the kept results wait, or None to keep them on their device.
    """

    def __init__(self, host: HostMemory | None = None) -> None:
        self.host = host
        self.calls = 0
        self.saved = 0
        self.saved_bytes = 0
        self.operators: set[str] = set()
        self.on_kept: Callable[[Tensor], object] | None = None
        """Called with every tensor that is kept."""

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        kept = Kept()
        forward, recompute = create_selective_checkpoint_contexts(partial(_policy, kept))
        vars(forward).update(HOOKS_SEE_WHAT_IS_KEPT)
        away = _Away(self.host, forward, kept)
        return _Forward(forward, kept, away, self), _Recompute(recompute, kept, away)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the bytes of kept tensors."""
        self.saved += 1
        for tensor in tensors:
            self.saved_bytes += tensor.numel() * tensor.element_size()
            if self.on_kept is not None:
                self.on_kept(tensor)


def _policy(kept: Kept, _: Any, op: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    saves = is_attention(op) and not kept.computing
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


class _Away:
    """The kept results of one layer, moved from PyTorch's and head-wise attention's storage to the host, and back."""

    def __init__(self, host: HostMemory | None, mode: Any, kept: Kept) -> None:
        self.host, self.mode, self.kept = host, mode, kept
        self.parked: list[tuple[SavedValue, OffloadedTensor]] = []
        self.outputs: list[tuple[Any, list[Any]]] = []

    def park(self) -> None:
        if self.host is None:
            return
        for saved in saved_values(self.mode):
            value = saved.get()
            if isinstance(value, Tensor) and value.dim() > 2 and self.host.has_room(value):
                self.parked.append((saved, self.host.park(value)))
                saved.drop()
        for done in self.kept.outputs:
            away = [self._move(t) for t in (done.whole, *done.tensors)]
            self.outputs.append((done, away))
        self.kept.outputs.clear()

    def _move(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        assert self.host is not None
        return self.host.park(tensor) if tensor.dim() > 2 and self.host.has_room(tensor) else tensor

    def fetch(self) -> None:
        for saved, parked in self.parked:
            saved.put(parked.take())
        for done, away in self.outputs:
            whole, *tensors = [value.take() if isinstance(value, OffloadedTensor) else value for value in away]
            self.kept.outputs.append(replace(done, whole=whole, tensors=tensors))
        self.parked.clear()
        self.outputs.clear()


class _Forward:
    """PyTorch's context of the forward, with a place for head-wise attention's outputs."""

    def __init__(self, inner: Any, kept: Kept, away: _Away, saved: AttentionSaved) -> None:
        self.inner, self.kept, self.away, self.saved = inner, kept, away, saved

    def __enter__(self) -> None:
        self.saved.calls += 1
        self.contexts = ExitStack()
        self.contexts.enter_context(keeping(self.kept, replaying=False))
        self.contexts.enter_context(self.inner)
        self.contexts.enter_context(_KernelCount(self.kept, self.saved))

    def __exit__(self, *reason: Any) -> Any:
        self.contexts.__exit__(*reason)
        # Not before the layer: on Hopper the first call of a process puts cuDNN first in SDPA's order of preference.
        self.kept.kernels = AllowedKernels.now()
        if reason[0] is None:
            for done in self.kept.outputs:
                self.saved.add((done.whole, *done.tensors))
            self.away.park()


class _KernelCount(LettingCompile):
    """Counts the bytes that attention kernels return, and records the random state after each.

    The policy cannot do this: torch 2.11 calls it without the operator's results.
    """

    supports_higher_order_operators = True  # which are handed on as they are

    def __init__(self, kept: Kept, saved: AttentionSaved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.saved = kept, saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func):
            return func(*args, **(kwargs or {}))
        refuse_wrong(func, args)
        result = func(*args, **(kwargs or {}))
        self.saved.operators.add(name_of(func))
        if not self.kept.computing:
            tensors = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
            self.saved.add(tensors)
            if tensors and not tensors[0].is_meta:
                self.kept.random.append(RandomState(tensors[0].device))
        return result


class _Recompute:
    """Context of the recompute: attention returns the outputs that the forward kept."""

    def __init__(self, inner: Any, kept: Kept, away: _Away) -> None:
        self.inner, self.kept, self.away = inner, kept, away

    def __enter__(self) -> None:
        with torch.no_grad():
            self.away.fetch()
        self.contexts = ExitStack()
        if self.kept.kernels is not None:
            self.contexts.enter_context(self.kept.kernels.allowed())
        # The stream is at the state where the forward began: if the last kernel left it there, no kernel has drawn.
        drew = not all(state.is_now for state in self.kept.random[-1:])
        self.contexts.enter_context(keeping(self.kept, replaying=True))
        self.contexts.enter_context(self.inner)
        if drew:
            self.contexts.enter_context(_GoingOn(self.kept))

    def __exit__(self, *reason: Any) -> None:
        self.contexts.__exit__(*reason)


class _GoingOn(LettingCompile):
    """Advances the random stream as the kernel did, where its kept results are returned instead."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.states = kept, iter(kept.random)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_attention(func) and not self.kept.computing:
            state = next(self.states, None)
            if state is not None:
                state.restore()
        return result
