"""Summarise how many tiles the blocks ran in, for logs and reports."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from seqtile.blocks.instance import installed_forwards
from seqtile.blocks.norms_and_projections import TiledRows


@dataclass(frozen=True)
class Runs:
    """The calls since :func:`forget_runs`; ``str(runs)`` is one phrase.

    Attributes:
        blocks: tiled blocks, and decoder layers that ran in chunks in place of the blocks inside.
        cut: those of them that ran in more than one tile.
        tiles: the most tiles of a call.
        tokens: the most tokens of a call, batch times length on this rank.
        rule: the tile rule of the blocks, or the tokens of a chunk, as it was given.
    """

    blocks: int
    cut: int
    tiles: int
    tokens: int
    rule: str

    def __str__(self) -> str:
        if not self.cut:
            what = (
                f"batches of up to {self.tokens:,} tokens fit in one tile, uncut"
                if self.tokens
                else "no tiled block ran"
            )
            return f"{what} ({self.rule})"
        # The tokens are those of a whole batch, not of a tile, so each number comes with its unit.
        batches, tiles = f"batches of up to {self.tokens:,} tokens", f"into up to {self.tiles:,} tiles"
        if self.cut == self.blocks:
            return f"{batches} were cut {tiles}"
        return f"{self.cut} of {self.blocks} blocks cut {batches} {tiles}"


def forget_runs(model: nn.Module) -> None:
    """Reset the counts."""
    for forward in installed_forwards(model):
        forward.most_tiles = forward.most_tokens = 0


def what_ran(model: nn.Module) -> Runs:
    """The calls of the model's tiled blocks, of those that ran outside of compiled code.

    Norms, projections, layers with a state and attention that runs in passes are no blocks.
    """
    forwards = installed_forwards(model)
    in_chunks = {forward.setting.name for forward in forwards if forward.technique == "chunk" and forward.most_tiles}
    tiles: dict[str, int] = {}
    rules: dict[str, None] = {}
    tokens = 0
    for forward in forwards:
        if isinstance(forward, TiledRows) or forward.technique in ("heads", "state"):
            continue
        if forward.technique == "chunk":
            if not forward.most_tiles:  # its blocks ran instead, or nothing did
                continue
            rule = f"chunk={forward.setting.tokens}"  # type: ignore[attr-defined]
        elif forward.setting.layer in in_chunks:
            continue
        else:
            rule = f"tile={forward.setting.rule}"
        name = forward.setting.name
        tiles[name] = max(forward.most_tiles, tiles.get(name, 0))
        tokens = max(tokens, forward.most_tokens)
        rules[rule] = None
    return Runs(
        len(tiles), sum(n > 1 for n in tiles.values()), max(tiles.values(), default=0), tokens, ", ".join(rules)
    )
