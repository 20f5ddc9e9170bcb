"""The vision tower in groups of frames, pictures or clips: its activations are those of one group at a time."""
