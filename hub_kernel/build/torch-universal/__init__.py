"""A tiled MLP for transformers: the same gradients in less memory. Made from seqtile; do not edit."""

from . import layers

__version__ = "0.1.0"
__all__ = ["layers"]
