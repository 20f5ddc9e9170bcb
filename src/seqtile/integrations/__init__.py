"""seqtile in the tools that people already use."""
