"""Benchmarks: every cell in a process of its own, an out-of-memory is a result, every number beside its error."""
