"""Functions with the signatures that RL stacks call for log-probabilities, computed in tiles.

What they call with logits is called with deferred ones: :func:`seqtile.deferred_logits` for a Hugging Face model,
:func:`seqtile.integrations.rl.logits.logits_of` for hidden states and a weight.
"""
