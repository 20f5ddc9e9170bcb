"""Check that a recompute reads the weights that its forward read.

Looked up again at every tile, a weight may be another one by then: ``torch.func.functional_call`` puts its tensors in
for the length of the forward, a parameter is replaced, an optimizer steps too early. PyTorch's checkpoint recomputes
with whatever it finds, and the gradients are wrong without a word. Untiled autograd saves its operands and compares
versions.

Engines change tensors between forward and backward too, and the weight stays the same one: ZeRO-3 gives a parameter
other data, FSDP2 frees and fills the storage of one and the same parameter, FSDP1 makes new views of one and the same
storage. So a weight is the same if it is the same object, or if it begins at the same place of the same storage. One
that is computed at every look cannot be compared, nor can the version of a frozen weight that the forward itself writes
in place, as PEFT's ``target_parameters`` does to give it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from seqtile._compat import is_view, storage_key, version_of


class _WeightMark(NamedTuple):
    """Identity and version of a weight; keeps neither it nor its memory alive."""

    identity: int
    version: int | None
    address: tuple[int, int] | None
    computed: bool

    @classmethod
    def of(cls, weight: Tensor) -> _WeightMark:
        version = None if weight.is_inference() else version_of(weight)
        return cls(id(weight), version, _address(weight), _is_computed(weight))


def _is_computed(weight: Tensor) -> bool:
    """Whether it is the result of an operator, and no view of another tensor."""
    return weight.grad_fn is not None and not is_view(weight)


def _address(weight: Tensor) -> tuple[int, int] | None:
    """Storage and offset; None for a tensor that shows none."""
    try:
        return storage_key(weight.untyped_storage()), int(weight.storage_offset())
    except (NotImplementedError, RuntimeError):  # a subclass of another make, a sparse tensor
        return None


class SameWeights:
    """The weights of one forward, for the recomputes of its tiles.

    Identities are compared by number. A number is given away again only when its tensor is dead, and a module's own
    weights live as long as the module; so what the module holds in backward is never taken for a dead tensor of the
    forward.

    Args:
        live: the weights as the forward finds them, by name.

    Cost:
        About a microsecond per weight, here and at each tile.
    """

    def __init__(self, live: Mapping[str, Tensor]) -> None:
        self._names = set(live)
        self._marks = {name: _WeightMark.of(weight) for name, weight in live.items() if not weight.is_meta}

    def settle(self, live: Mapping[str, Tensor]) -> None:
        """After a tile of the forward: no longer compare versions of frozen weights that it wrote itself."""
        for name, mark in self._marks.items():
            weight = live.get(name)
            if weight is None or weight.is_meta or mark.version is None or weight.requires_grad:
                continue
            if id(weight) == mark.identity and version_of(weight) != mark.version:
                self._marks[name] = mark._replace(version=None)

    def check(self, live: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Check a recompute's weights against its forward's. Weights on the meta device are offloaded.

        Raises:
            RuntimeError: a weight came or went, is another tensor, or was modified in place.
        """
        for name in sorted(live.keys() ^ self._names):
            if name in self._names or live[name].requires_grad:
                how = "no trainable" if name in self._names else "a new"
                raise RuntimeError(
                    f"cannot recompute a tile: the block has {how} weight {name!r} in backward compared with its "
                    "forward; do not change weights, adapters or requires_grad before backward is done"
                )
        for name, mark in self._marks.items():
            weight = live[name]
            if weight.is_meta:
                continue
            if id(weight) == mark.identity:
                if mark.version is not None and version_of(weight) != mark.version:
                    raise RuntimeError(
                        f"cannot recompute a tile: weight {name!r} was modified in place after the forward (version "
                        f"{version_of(weight)}, expected {mark.version}); update weights after backward"
                    )
            elif (mark.address is None or _address(weight) != mark.address) and not (
                mark.computed and _is_computed(weight)
            ):
                raise RuntimeError(
                    f"cannot recompute a tile: weight {name!r} is a different tensor in backward than in forward "
                    "(torch.func.functional_call, or a replaced parameter); run backward with the same weights, or "
                    "call seqtile.undo"
                )
        return live
