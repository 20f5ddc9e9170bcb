"""Tensors in, tensors out: operators that depend on no model and no engine."""
