"""Layers that carry a state along the sequence, over tiles of the sequence."""
