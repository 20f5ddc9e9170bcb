"""Blocks and layers that run in tiles: instances that replace modules' forwards."""
