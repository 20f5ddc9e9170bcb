"""One rank of ``test_hub_kernel.py``: FOLDER of the kernel, a file to meet at, and its number."""

import copy
import importlib.util
import sys
from datetime import timedelta
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import silu
from torch.nn.parallel import DistributedDataParallel


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


folder, store, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
spec = importlib.util.spec_from_file_location("_seqtile_kernel", folder / "__init__.py")
kernel = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = kernel
spec.loader.exec_module(kernel)
assert not any(name.partition(".")[0] in ("seqtile", "transformers") for name in sys.modules)

dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=100))
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(16, 16), MLP(), MLP()).double()
model = copy.deepcopy(plain)
for mlp in model[1:]:
    mlp.forward = MethodType(kernel.layers.TiledMLP.forward, mlp)
rows = torch.randn(2, 2, 1500, 16, dtype=torch.float64)  # [step, rank, tokens, D]: more than one tile
wrapped = DistributedDataParallel(model)
for step in range(2):
    for one, mine in ((wrapped, rows[step, rank : rank + 1]), (plain, rows[step])):
        one.zero_grad()
        one(mine).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
assert "_Fused" in type(model(rows[0]).grad_fn).__name__
dist.destroy_process_group()
