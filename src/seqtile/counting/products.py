"""Count matrix products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

from seqtile.counting.watch import Watch, name_of

# Operators whose result has the product's m and n as its last two dimensions, and where among the arguments
# the factor with k as its last dimension is.
_PRODUCTS = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::addmm": 1,
    "aten::addmm_": 1,
    "aten::baddbmm": 1,
    "aten::baddbmm_": 1,
    "aten::_addmm_activation": 1,
    "aten::_scaled_mm": 0,
    "aten::_scaled_mm_v2": 0,
    "aten::_grouped_mm": 0,
    "aten::_scaled_grouped_mm": 0,
    "aten::_scaled_grouped_mm_v2": 0,
    "aten::_foreach_mm": 0,
    "aten::_int_mm": 0,
    "aten::_weight_int8pack_mm": 0,
    "aten::_weight_int4pack_mm": 0,
    "aten::_weight_int4pack_mm_for_cpu": 0,
    "aten::mkldnn_linear": 0,
    "mkldnn::_linear_pointwise": 0,
    "mkl::_mkl_linear": 0,
}
_ATTENTION = (
    "_scaled_dot_product_",
    "_flash_attention_",
    "_efficient_attention_",
    "_cudnn_attention_",
    "flex_attention",
)


class Product(NamedTuple):
    """One matrix product: ``batch`` times ``[m, k] @ [k, n]``."""

    op: str
    m: int
    n: int
    k: int
    batch: int

    @property
    def flops(self) -> int:
        """Multiplications and additions: ``2 * batch * m * n * k``."""
        return 2 * self.batch * self.m * self.n * self.k

    def has(self, *sizes: int) -> bool:
        """Whether ``sizes`` are among m, n and k, each as often as it is given."""
        missing = Counter(sizes)
        missing.subtract((self.m, self.n, self.k))
        return all(count <= 0 for count in missing.values())


class Products:
    """The matrix products that ran inside ``count_products``.

    Counted are products of matrices (mm, bmm, addmm and their in-place, out=, scaled, grouped and packed
    kin). Not counted are products with a vector (mv, dot, outer) and attention kernels, which have a count
    of their own, ``attention_calls``; attention computed by plain products (the "eager" one) is counted as
    the products it runs. A grouped product counts the rows it is given.

    Every number raises ``RuntimeError`` when no product was seen: a count of nothing is a broken measurement.
    """

    def __init__(self) -> None:
        self._records: list[Product] = []
        self.attention_calls = 0

    @property
    def records(self) -> tuple[Product, ...]:
        """Every product in the order it ran."""
        if not self._records:
            raise RuntimeError("counted no matrix products; run the model inside the `with` block")
        return tuple(self._records)

    @property
    def calls(self) -> int:
        """How many products ran."""
        return len(self.records)

    @property
    def flops(self) -> int:
        """FLOPs of all products."""
        return sum(product.flops for product in self.records)

    def flops_where(self, predicate: Callable[[Product], bool]) -> int:
        """FLOPs of the products for which ``predicate`` holds; 0 if there are others but none of these."""
        return sum(product.flops for product in self.records if predicate(product))

    def units(self, tokens: int, hidden: int, intermediate: int, *, fused: bool = True) -> float:
        """Cost of an MLP in products over all tokens: FLOPs over ``2 * tokens * hidden * intermediate``.

        Counts the products that have both ``hidden`` and ``intermediate`` among their three sizes. So
        nothing else in the model may multiply these two sizes: a vocabulary or a projection as wide as
        ``intermediate`` (or, with ``fused``, twice it) would be counted too.

        Args:
            tokens: batch times length of the whole input, not of a tile.
            hidden: input width D of the MLP.
            intermediate: inner width F of the MLP.
            fused: count weights with gate and up in one (``2 * intermediate`` wide) too.

        Returns:
            9.0 for one untiled gated MLP, forward and backward.

        Raises:
            RuntimeError: no product of these sizes ran.
            ValueError: ``tokens`` equals a width, so a projection of the tokens cannot be told from the MLP.
        """
        widths = (intermediate, 2 * intermediate) if fused else (intermediate,)
        if tokens in widths:
            raise ValueError(
                f"tokens={tokens} equals a width of the MLP, so its products cannot be identified by shape; use a "
                f"number of tokens other than {' or '.join(str(width) for width in widths)}"
            )
        flops = self.flops_where(lambda product: any(product.has(hidden, width) for width in widths))
        if flops == 0:
            sizes = sorted({(product.m, product.n, product.k) for product in self.records})
            raise RuntimeError(
                f"counted no matrix product of hidden {hidden} with intermediate {intermediate}; "
                f"the {self.calls} products seen have (m, n, k) in {sizes[:8]}"
            )
        return flops / (2 * tokens * hidden * intermediate)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = name_of(func)
        position = _PRODUCTS.get(name)
        if position is not None:
            factors = args[position] if name == "aten::_foreach_mm" else [args[position]]
            results = result if name == "aten::_foreach_mm" else [result]
            for factor, out in zip(factors, results, strict=True):
                *leading, m, n = out.shape
                if "grouped" in name and factor.dim() == 2 and out.dim() == 3:
                    leading = []  # the groups split k between them
                self._records.append(Product(name.split("::")[1], m, n, factor.shape[-1], prod(leading)))
        elif any(kernel in name for kernel in _ATTENTION):
            self.attention_calls += 1


@contextmanager
def count_products() -> Iterator[Products]:
    """Count the matrix products that run inside the ``with``, the backward's and every recompute's too.

    Costs some microseconds per operator and one small record per product. Composes with
    ``count_live_bytes``, activation checkpoints and fake tensors.

    Yields:
        Products: readable inside and after the ``with``.
    """
    products = Products()
    with Watch(products.see):
        yield products
