"""Run a vision tower in groups of frames, pictures or videos, with the activations of one group at a time."""
