"""Which parts of a model treat every token by itself, proven from the trace of their own forward and backward."""
