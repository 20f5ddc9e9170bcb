"""Finds the position-wise blocks of a model, changes instances, undoes, reports."""
