"""The language-model head and its loss over tiles of tokens: tensors in, tensors out."""
