"""One process of ``test_kernelize.py``: FOLDER of the kernel, a file to meet at, its number, of how many.

``kernelize`` of transformers puts the layer of the local folder, loaded by the ``kernels`` package, on a tiny Llama.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from kernels import LocalLayerRepository, Mode
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.hub_kernels import kernelize
from transformers.models.llama.modeling_llama import LlamaMLP


class Config:
    """The mapping that ``KernelConfig`` writes itself for every device but a CPU, which it refuses."""

    use_local_kernel, inherit_mapping = True, False

    def __init__(self, folder: Path) -> None:
        layer = LocalLayerRepository(folder, layer_name="TiledMLP")
        self.kernel_mapping = {"LlamaMLP": {"cpu": {Mode.TRAINING: layer}}}


folder, store, rank, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=100)
)
sizes = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, max_position_embeddings=4096)  # fmt: skip
torch.manual_seed(0)
plain = LlamaForCausalLM(sizes).double().train()
model = LlamaForCausalLM(sizes).double().train()
model.load_state_dict(plain.state_dict())
LlamaMLP.kernel_layer_name = "LlamaMLP"  # as replace_kernel_forward_from_hub leaves it
model.kernel_config = Config(folder)
kernelize(model)
assert not any(name.partition(".")[0] == "seqtile" for name in sys.modules)
nodes: list[str] = []
"""The autograd node behind each block's output."""
for layer in model.model.layers:
    assert layer.mlp.forward.__func__.__qualname__ == "TiledMLP.forward"
    layer.mlp.register_forward_hook(lambda _, __, y: nodes.append(type(y.grad_fn).__name__))
wrapped = DistributedDataParallel(model)
ids = torch.randint(0, 64, (2, ranks, 2100))  # [step, rank, tokens]: "auto" cuts them on a CPU
for step in range(2):
    for one, mine in ((wrapped, ids[step, rank : rank + 1]), (plain, ids[step])):
        one.zero_grad()
        one(mine, labels=mine).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
assert len(nodes) == 4 and all("_Fused" in name for name in nodes), nodes
print(", ".join(f"{name} {version(name)}" for name in ("transformers", "kernels", "torch")))
dist.destroy_process_group()
