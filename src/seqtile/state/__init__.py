"""Layers that carry a state from tile to tile."""
