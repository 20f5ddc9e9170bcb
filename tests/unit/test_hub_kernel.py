"""The kernel for the Hub: made from the source, without other packages, and equal to the untiled MLP."""

import ast
import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import MethodType, ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP
from transformers.models.nemotron.modeling_nemotron import NemotronConfig, NemotronMLP
from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3MLP

from refusals import refused
from zoo import causal_lm

if not (Path(__file__).parents[2] / "hub_kernel").is_dir():
    pytest.skip("no hub_kernel here: the tests run from an installed package", allow_module_level=True)
make = importlib.import_module("make")
TOKENS = 2100  # "auto" cuts them on a CPU
SHAPE = {"hidden_size": 16, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of the kernel, made as `make hub-kernel` makes them."""
    root: Path = tmp_path_factory.mktemp("kernel")
    make.write(root)
    return root / make.VARIANT


def test_it_needs_nothing_but_torch(folder: Path) -> None:
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            foreign = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"torch"}
            assert not foreign, f"{path.name} imports {foreign}"


def test_it_is_not_written_among_other_files(tmp_path: Path) -> None:
    make.write(tmp_path)
    make.write(tmp_path)
    (tmp_path / make.VARIANT / "mine.py").touch()
    with refused("hub-kernel.folder-not-empty", "mine.py"):
        make.write(tmp_path)


@pytest.fixture(scope="module")
def kernel(folder: Path) -> ModuleType:
    """The folder, imported as the ``kernels`` package imports it: by its file, under a name of its own."""
    spec = importlib.util.spec_from_file_location("_seqtile_kernel_of_this_test", folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def bind(kernel: ModuleType, module: nn.Module) -> nn.Module:
    """What ``kernelize`` does to a layer."""
    module.forward = MethodType(kernel.layers.TiledMLP.forward, module)
    return module


class UpFirst(nn.Module):
    """A fused layer with up in its first half, biases, and ReLU squared."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(16, 128), nn.Linear(64, 16)

    def forward(self, x):
        up, gate = self.wi(x).chunk(2, dim=-1)
        return self.wo(up * F.gelu(gate, approximate="tanh"))


MODULES = {
    "llama": lambda: LlamaMLP(LlamaConfig(**SHAPE)),
    "llama with bias": lambda: LlamaMLP(LlamaConfig(**SHAPE, mlp_bias=True)),
    "gemma": lambda: GemmaMLP(GemmaConfig(**SHAPE)),
    "nemotron": lambda: NemotronMLP(NemotronConfig(**SHAPE)),
    "phi3": lambda: Phi3MLP(Phi3Config(**SHAPE)),
    "up first": UpFirst,
}


@pytest.mark.parametrize("name", MODULES)
def test_it_equals_untiled(name: str, kernel: ModuleType) -> None:
    torch.manual_seed(0)
    plain = MODULES[name]().double()
    ours = bind(kernel, copy.deepcopy(plain))
    x, upstream = torch.randn(3, TOKENS // 3, 16, dtype=torch.float64), torch.randn(16, dtype=torch.float64)
    results = []
    for module in (ours, plain):
        given = x.clone().requires_grad_()
        y = module(given)
        (y * upstream).sum().backward()
        results.append([y.detach(), given.grad, *(p.grad for p in module.parameters())])
        assert ("_Fused" in type(y.grad_fn).__name__) == (module is ours)
    torch.testing.assert_close(results[0], results[1])


def test_a_short_batch_runs_the_modules_own_forward(kernel: ModuleType) -> None:
    module = bind(kernel, MODULES["llama"]())
    assert "_Fused" not in type(module(torch.randn(1, 5, 16)).grad_fn).__name__


class Clamped(UpFirst):
    def forward(self, x):
        up, gate = self.wi(x).chunk(2, dim=-1)
        return self.wo(up.clamp(max=7) * F.silu(gate))


class Residual(UpFirst):
    def forward(self, x):
        up, gate = self.wi(x).chunk(2, dim=-1)
        return self.wo(up * F.silu(gate)) + x


class Branches(UpFirst):
    def forward(self, x):
        return self.wo(self.wi(x)[..., :64]) if x.sum() > 0 else x


class OtherHalf(UpFirst):
    def forward(self, x):
        up, gate = self.wi(x).chunk(2, dim=-1)
        return self.wo(gate * F.silu(gate))


class AlongTokens(UpFirst):
    def forward(self, x):
        up, gate = self.wi(x).chunk(2, dim=1)
        return self.wo(up * F.silu(gate))


@pytest.mark.parametrize("kind", [Clamped, Residual, Branches, OtherHalf, AlongTokens])
def test_another_formula_is_refused(kind: type[nn.Module], kernel: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=f"cannot tile {kind.__name__}: its forward .*seqtile.apply"):
        bind(kernel, kind())(torch.randn(1, TOKENS, 16))


class Switched(UpFirst):
    """An activation and a clamp that may change after the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.other, self.limit = nn.GELU(), F.silu, None

    def forward(self, x):
        up, gate = self.wi(x).chunk(2, dim=-1)
        up = up if self.limit is None else up.clamp(max=self.limit)
        return self.wo(up * (self.act if self.other is None else self.other)(gate))


def test_what_changes_after_the_first_call_is_read_again(kernel: ModuleType) -> None:
    torch.manual_seed(0)
    module, x = bind(kernel, Switched().double()), torch.randn(1, TOKENS, 16, dtype=torch.float64)
    for change in ({}, {"other": F.relu}, {"other": None}, {"act": nn.GELU("tanh")}):
        vars(module).update({key: one for key, one in change.items() if key != "act"})
        module.act = change.get("act", module.act)
        y = module(x)
        assert "_Fused" in type(y.grad_fn).__name__
        torch.testing.assert_close(y, Switched.forward(module, x))
    module.act.register_forward_hook(lambda _, __, y: y.clamp(max=1e-3))
    with pytest.raises(NotImplementedError, match="cannot tile Switched"):
        module(x)
    module.act, module.limit = nn.ReLU(), 1e-3
    with pytest.raises(NotImplementedError, match="cannot tile Switched"):
        module(x)


def test_layers_that_are_not_plain_are_refused(kernel: ModuleType) -> None:
    x = torch.randn(1, TOKENS, 16)
    module = bind(kernel, MODULES["llama"]())
    module(x)  # known by now: what changes afterwards is seen all the same

    class Low(nn.Linear):
        pass

    handle = module.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(NotImplementedError, match="up_proj has hooks"):
        module(x)
    handle.remove()
    module.up_proj.forward = lambda x: x
    with pytest.raises(NotImplementedError, match="up_proj has hooks or a forward of its own"):
        module(x)
    del module.up_proj.forward
    module.gate_proj = Low(16, 64)
    with pytest.raises(NotImplementedError, match="gate_proj is a Low"):
        module(x)


def test_a_checkpoint_and_autocast_around_it(kernel: ModuleType) -> None:
    torch.manual_seed(0)
    model, plain = causal_lm("llama"), causal_lm("llama")
    plain.load_state_dict(model.state_dict())
    for layer in model.model.layers:
        bind(kernel, layer.mlp)
    ids = torch.randint(0, model.config.vocab_size, (1, TOKENS))
    for one in (model, plain):
        one.train().gradient_checkpointing_enable({"use_reentrant": False})
        with torch.autocast("cpu", torch.bfloat16):
            one(ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 0.02 * theirs.grad.norm()  # bf16 products, in another order


@pytest.mark.distributed
def test_ddp_on_two_processes(folder: Path, tmp_path: Path) -> None:
    """Each rank has rows of its own; the averaged gradients are those of one process with both."""
    script = Path(__file__).parents[1] / "distributed" / "_hub_kernel_ranks.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        said, _ = rank.communicate(timeout=200)
        assert rank.returncode == 0, said
