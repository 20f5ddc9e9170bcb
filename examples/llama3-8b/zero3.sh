#!/bin/sh
# The recipe beside this script, on one machine; flags win: zero3.sh --dataset FILE_OR_ID --nproc 4 --max-length 65536
# seqtile starts accelerate with examples/accelerate/zero3.yaml (shipped in the package) and prints the command.
set -e
# Long rows of changing length leave holes in a fixed-size allocator.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
exec seqtile train --recipe "$(dirname "$0")/zero3.yaml" "$@"
