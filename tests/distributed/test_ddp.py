"""Two gloo processes with batches of different lengths and different tile counts give one process's gradients."""

import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import seqtile
from zoo import assert_same_gradients, causal_lm, gradients, tokens

LENGTHS, TILES = (13, 7), (3, 7)


def _rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    assert dist.get_world_size() == 2
    model = causal_lm("llama", torch.float64)
    seqtile.apply(model, tile=TILES[rank])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        ids = tokens(2, LENGTHS[rank], seed=rank)
        parallel(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.save({name: p.grad for name, p in model.named_parameters()}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_unequal_lengths_and_tile_counts_under_ddp(tmp_path: Path) -> None:
    model = causal_lm("llama", torch.float64)
    each = [gradients(model, tokens(2, LENGTHS[rank], seed=rank))[1] for rank in range(2)]
    expected = {name: (each[0][name] + each[1][name]) / 2 for name in each[0]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, args=(port, str(tmp_path)), nprocs=2, join=True)
    for rank in range(2):
        assert_same_gradients(torch.load(tmp_path / f"{rank}.pt"), expected)
