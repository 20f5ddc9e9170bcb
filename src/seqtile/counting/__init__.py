"""Count what a piece of code costs: matrix products, and bytes of live tensors.

Both counters are dispatch modes: they see every operator that reaches a kernel, in the forward, in the
backward and in the recomputes of an activation checkpoint, and change nothing. They nest in either order::

    with count_products() as products, count_live_bytes() as live:
        loss = model(**batch).loss
        loss.backward()
    products.units(tokens, hidden, intermediate)  # 9.0 for an untiled gated MLP
    live.peak                                     # bytes above what was live at the `with`

Tensor subclasses that wrap other tensors (DTensor, quantised weights) are counted by the operators on the
tensors inside them, so what is counted is what this rank computes and holds.
"""
