"""``apply``, ``tile_module`` and ``undo``: a model's blocks are changed, reported and restored."""
