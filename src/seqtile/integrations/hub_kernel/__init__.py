"""The fused tiled MLP as a kernel for the Hub's ``kernels`` package: ``<org>/seqtile:TiledMLP``.

:mod:`seqtile.integrations.hub_kernel.layers` is the layer. ``python -m seqtile.integrations.hub_kernel FOLDER`` writes
it and what it needs of :mod:`seqtile.ops` as a folder that imports nothing but torch; ``hub_kernel/`` in the repository
is such a folder.
"""
