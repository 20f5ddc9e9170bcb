"""Blocks and layers that run in tiles: instances that stand in for modules."""
