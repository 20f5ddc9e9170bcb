"""What has to be arranged from outside, so that no engine gathers a weight inside a tile loop.

The operators know no engine: a weight is an input of an autograd node and gets one gradient. What is left is *when* a
sharding engine gathers: once before the block (right), or at every linear layer of every tile (a collective in a loop
whose length differs from rank to rank: a hang). Nothing here imports an engine; one that is not imported is not there.
"""
