"""Samples with common prefixes in one row, each prefix computed once: groups of GRPO, pairs of DPO, agents' branches.

:func:`tree_row` packs samples, :func:`share_prompts` lets a model run the row. ``import seqtile`` does not import this.
"""

from seqtile.shared_prompts.model import SharedPrompts, share_prompts
from seqtile.shared_prompts.rows import TreeRow, collate_tree, tree_row

__all__ = ["SharedPrompts", "TreeRow", "collate_tree", "share_prompts", "tree_row"]
