"""Tensors in, tensors out: operators that know no model and no engine."""
