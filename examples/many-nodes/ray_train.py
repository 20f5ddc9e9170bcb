"""``python ray_train.py NODES [flags of seqtile train]``: Ray Train starts the same command once on each node."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

DEVICES = 8
"""Of each node; Ray gives the whole node to its one worker."""


def on_each_node(config: dict[str, Any]) -> None:
    """Runs in Ray's worker, which has set ``MASTER_ADDR`` and ``MASTER_PORT`` to worker 0's."""
    from ray import train

    context = train.get_context()
    place = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"  # Ray's own group has the port itself
    mine = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    command = ["seqtile", "train", *config["flags"], "--nodes", str(context.get_world_size()),
               "--node-rank", str(context.get_world_rank()), "--rendezvous", place]  # fmt: skip
    # What says which worker this is would be taken for a launcher's.
    environment = {name: value for name, value in os.environ.items() if name not in mine}
    subprocess.run(command, env=environment, check=True)


def main(words: list[str]) -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(
        num_workers=int(words[0]),
        resources_per_worker={"GPU": DEVICES},
        use_gpu=True,
        placement_strategy="STRICT_SPREAD",
    )
    TorchTrainer(on_each_node, train_loop_config={"flags": words[1:]}, scaling_config=scaling).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
