"""Keep engines from gathering a weight inside a tile loop.

The operators do not depend on an engine: a weight is an input of an autograd node and gets one gradient. Only *when* a
sharding engine gathers matters: once before the block (right), or at every linear layer of every tile (a collective in
a loop whose length differs from rank to rank: a hang). Nothing here imports an engine; one that is not imported is not
in use.
"""
