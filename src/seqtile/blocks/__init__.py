"""Tiled forwards of blocks and of decoder layers, each put on one instance."""
