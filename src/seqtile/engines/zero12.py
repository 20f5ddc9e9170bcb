"""Keep the order in which gradients arrive the same on every rank, for DeepSpeed ZeRO-1 and 2.

ZeRO-2 copies gradients into a bucket in the order in which autograd hands them over, and sums the ranks' buckets
element by element; ZeRO-1 does so with ``overlap_comm``. It relies on one order on all ranks. A tiled block
delivers the gradients of its weights together, an untiled one from the last to the first. If one rank's batch is tiled
and another's is not, different weights are summed, without an error. The number of tiles changes no order.

Source: DeepSpeed 0.19, ``runtime/zero/stage_1_and_2.py`` (``reduce_independent_p_g_buckets_and_remove_grads``).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from seqtile._compat import is_in_zero12


def reduces_as_they_arrive(weights: Iterable[Tensor]) -> bool:
    """Whether ZeRO-1 or 2 manages one of these weights, by an attribute that DeepSpeed sets."""
    return any(is_in_zero12(weight) for weight in weights)
