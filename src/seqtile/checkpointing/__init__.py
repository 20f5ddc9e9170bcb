"""Activation checkpoints: what is kept, recomputed or copied to the host."""
