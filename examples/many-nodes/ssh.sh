#!/bin/sh
# ssh.sh "node1 node2" [flags of seqtile train]: the same command on each host, node 0 first in the list. The directory is
# the same on all. PORT has to be free on the first host.
set -e
hosts=$1
shift
flags=
for flag; do flags="$flags '$(printf %s "$flag" | sed "s/'/'\\\\''/g")'"; done
count=$(echo "$hosts" | wc -w)
first=${hosts%% *}
rank=0
jobs=
for host in $hosts; do
    ssh "$host" "cd '$PWD' && seqtile train --nodes $count --node-rank $rank --rendezvous $first:${PORT:-29500}$flags" &
    jobs="$jobs $!"
    rank=$((rank + 1))
done
failed=0
for job in $jobs; do wait "$job" || failed=$?; done
exit $failed
