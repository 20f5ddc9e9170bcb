"""Recognise position-wise blocks: candidates, traces and formulas."""
