"""Attention one group of key-value heads after another: tensors in, tensors out."""
