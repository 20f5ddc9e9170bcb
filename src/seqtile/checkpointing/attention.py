"""Selective activation checkpointing: attention's output is kept, the cheap rest is computed again.

Past 128K tokens the second attention forward of a plain activation checkpoint costs a sixth of the step and more; its
output and log-sum-exp are one hidden state and 4 bytes per head and token. Kept are the results of PyTorch's fused
attention kernels and of FlashAttention's registered operators. Attention from plain products has no such result.

Source: ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from seqtile.checkpointing.host import HostMemory, Parked

_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def is_attention(op: Any) -> bool:
    """Whether an operator is a fused attention forward."""
    space, _, name = op.name().partition("::") if hasattr(op, "name") else ("", "", "")
    name = name.partition(".")[0]
    if space == "aten":
        return name in _FUSED
    # FlashAttention's own operators, also under the hashed namespaces of downloaded kernels.
    return "flash_attn" in space and "backward" not in name and "bwd" not in name


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

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        self.calls += 1
        forward, recompute = create_selective_checkpoint_contexts(self._policy)
        if self.host is None:
            return forward, recompute
        away = _Away(self.host, forward)
        return _After(forward, away.park), _Before(recompute, away.fetch)

    def _policy(self, context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if not is_attention(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        output = getattr(context, "op_output", None)
        if not getattr(context, "is_recompute", False):
            self.saved += 1
            tensors = [t for t in tree_iter(output) if isinstance(t, Tensor)]
            self.saved_bytes += sum(t.numel() * t.element_size() for t in tensors)
        return CheckpointPolicy.MUST_SAVE


class _Away:
    """The kept results of one layer, moved out of PyTorch's store and back into it."""

    def __init__(self, host: HostMemory, mode: Any) -> None:
        self.host, self.mode = host, mode
        self.parked: list[tuple[Any, Parked]] = []

    def park(self) -> None:
        for wrapper in tree_iter(list(_values(self.mode.storage))):
            value = getattr(wrapper, "val", None)
            if isinstance(value, Tensor) and value.dim() > 2:
                self.parked.append((wrapper, self.host.park(value)))
                wrapper.val = None

    def fetch(self) -> None:
        for wrapper, parked in self.parked:
            wrapper.val = parked.take()
            wrapper.version = wrapper.val._version
        self.parked.clear()


def _values(tree: Any) -> Any:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _values(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _values(value)
    else:
        yield tree


class _After:
    """A context manager with something to do at its end."""

    def __init__(self, inner: Any, action: Any) -> None:
        self.inner, self.action = inner, action

    def __enter__(self) -> Any:
        return self.inner.__enter__()

    def __exit__(self, *reason: Any) -> Any:
        result = self.inner.__exit__(*reason)
        if reason[0] is None:
            self.action()
        return result


class _Before(_After):
    """The same with something to do at its beginning."""

    def __enter__(self) -> Any:
        with torch.no_grad():
            self.action()
        return self.inner.__enter__()

    def __exit__(self, *reason: Any) -> Any:
        return self.inner.__exit__(*reason)
