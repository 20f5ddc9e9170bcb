"""Norms outside the tiles run by our kernel wherever they are known: each once a forward, exact, in every setting.

On the CPU, whose type of device is given the kernels for the length of a test.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
import zoo
from numerics._compiled import compiling
from seqtile.blocks.norms_and_projections import KernelNorm
from seqtile.ops import norm as norms
from seqtile.verification import verify

BATCH, TOKENS = 2, 24
MODELS = ("llama", "mistral", "qwen3", "gemma3_text", "mixtral")


class Counted(norms.NormKernels):
    """Counts the rows of each weight's norm that a kernel computed, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
        self.calls: Counter[int] = Counter()

    def forward(self, norm: norms.NormFormula, x: Tensor, weights: Sequence[Tensor], out: Tensor) -> bool:
        ran = super().forward(norm, x, weights, out)
        self.rows[0][weights[0].data_ptr()] += len(x) * ran
        self.calls[weights[0].data_ptr()] += ran
        return ran

    def backward(self, norm: norms.NormFormula, x: Tensor, dy: Tensor, weights: Sequence[Tensor], *others: Any) -> bool:
        ran = super().backward(norm, x, dy, weights, *others)
        self.rows[1][weights[0].data_ptr()] += len(x) * ran
        return ran

    def clear(self) -> None:
        for counts in (*self.rows, self.calls):
            counts.clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    counted = Counted()
    monkeypatch.setitem(norms.BY_DEVICE, "cpu", counted)
    with compiling("aot_eager", monkeypatch):
        yield counted


def norm_weights(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each norm with a weight: where that is in memory, and the rows of one forward."""
    heads = {"q_norm": 4, "k_norm": 2}
    weights = {}
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            weights[name] = (module.weight.data_ptr(), BATCH * TOKENS * heads.get(name.rpartition(".")[2], 1))
    return weights


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]))
    adapted.enable_input_require_grads()  # else the first norm, which is frozen, has no backward
    return adapted


def checkpointed(model: nn.Module) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


Setting = Callable[[nn.Module], nn.Module]


def plain(model: nn.Module) -> nn.Module:
    seqtile.apply(model, tile=16)
    return model


def under_checkpoints(model: nn.Module) -> nn.Module:
    checkpointed(model)
    return plain(model)


def attention_saved(model: nn.Module) -> nn.Module:
    seqtile.apply(model, tile=16, checkpoint="attention-saved")
    return model


def head_wise(model: nn.Module) -> nn.Module:
    seqtile.apply(model, tile=16, heads=1)
    return model


def lora_before(model: nn.Module) -> nn.Module:
    return plain(with_lora(model))


def lora_after(model: nn.Module) -> nn.Module:
    checkpointed(model)
    return with_lora(plain(model))


def loss_of(model: nn.Module) -> Tensor:
    ids = zoo.tokens(BATCH, TOKENS)
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model).backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("setting", [plain, under_checkpoints, attention_saved, head_wise, lora_before, lora_after])
@pytest.mark.parametrize("architecture", MODELS)
def test_every_norm_runs_by_our_kernel_once_a_forward(architecture: str, setting: Setting, kernels: Counted) -> None:
    bare = zoo.causal_lm(architecture, use_cache=False)
    truth = copy.deepcopy(bare)
    model = setting(bare)
    weights = norm_weights(model)
    with torch.no_grad():
        loss_of(model)
    rows, calls = kernels.rows[0], kernels.calls
    in_passes = setting is head_wise
    for name, (weight, expected) in weights.items():
        assert rows[weight] == expected, name
        in_tile = rows[weight] > 0 and not isinstance(model.get_submodule(name).__dict__.get("forward"), KernelNorm)
        assert in_passes or calls[weight] == (3 if in_tile else 1), name
    kernels.clear()
    tiled = gradients(model)
    assert all(kernels.rows[1][weight] == expected for weight, expected in weights.values())
    if setting in (lora_before, lora_after):  # whose adapters are drawn anew; verified below
        return
    expected_gradients = gradients(truth)
    exact = gradients(truth_in_float64(architecture)) if architecture not in zoo.EXPERTS else None
    for name, gradient in expected_gradients.items():
        if exact is None:
            torch.testing.assert_close(tiled[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        else:  # no worse than the untiled model, twice for another order of its sums
            error = (gradient - exact[name]).norm()
            assert (tiled[name] - exact[name]).norm() <= 2 * error + 1e-6 * exact[name].norm(), name


def truth_in_float64(architecture: str) -> nn.Module:
    return zoo.causal_lm(architecture, use_cache=False).double()


@pytest.mark.parametrize("setting", [under_checkpoints, attention_saved, head_wise, lora_before, lora_after])
def test_verify_passes(setting: Setting, kernels: Counted) -> None:
    model = setting(zoo.causal_lm("qwen3", use_cache=False))
    result = verify(model, {"input_ids": zoo.tokens(BATCH, TOKENS)})
    assert result.ok, str(result)
    assert kernels.rows[1]


def test_a_wrong_kernel_is_seen(kernels: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_percent(norm: norms.NormFormula, x: Tensor, weights: Sequence[Tensor], out: Tensor) -> bool:
        out.copy_(1.01 * norm.plain(x, weights))
        return True

    monkeypatch.setattr(kernels, "forward", off_by_a_percent)
    model = zoo.causal_lm("llama", use_cache=False)
    seqtile.apply(model, tile=1024)  # the MLPs run untiled, the norms by the kernel
    untiled = zoo.causal_lm("llama", use_cache=False)
    assert (loss_of(model) - loss_of(untiled)).abs() > 1e-6


def test_off_the_kernels_device_the_models_own_norms_run(kernels: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain(zoo.causal_lm("qwen3", use_cache=False))
    monkeypatch.setitem(norms.BY_DEVICE, "cpu", None)
    gradients(model)
    assert not any(kernels.rows)


@pytest.mark.parametrize(("options", "count"), [({}, 7), ({"blocks": "mlp+norm"}, 0), ({"path": "generic"}, 0)])
def test_the_report_counts_what_stands(options: dict[str, Any], count: int, kernels: Counted) -> None:
    model = zoo.causal_lm("qwen3", use_cache=False)
    report = seqtile.apply(model, tile=16, **options)
    assert report.norms == count and (f"{count} other norms" in str(report)) == bool(count)
    seqtile.undo(model)
    assert report.norms == 0 and not any(isinstance(m.__dict__.get("forward"), KernelNorm) for m in model.modules())


class Custom(nn.Module):
    """A norm of the user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class CustomNorm(Custom):
    pass


def test_custom_norms_are_left_alone_and_named(kernels: Counted) -> None:
    model = zoo.causal_lm("qwen3", use_cache=False)
    names = ["model.norm", "model.layers.1.self_attn.k_norm"]
    model.model.norm = CustomNorm(zoo.HIDDEN)
    model.model.layers[1].self_attn.k_norm = CustomNorm(zoo.HEAD_DIM)
    report = seqtile.apply(model, tile=16)
    assert sorted(left.name for left in report.left if left.custom) == sorted(names)
    assert report.norms == 5 and "model.norm" in str(report) + str(report.left)
    gradients(model)
    assert not any(kernels.rows[0][model.get_submodule(name).weight.data_ptr()] for name in names)


def test_one_process_of_fsdp2(kernels: Counted) -> None:
    """Its weights are gathered in a layer's hooks, and reduced as they were."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    reference = gradients(zoo.causal_lm("qwen3", use_cache=False))
    model = plain(zoo.causal_lm("qwen3", use_cache=False))
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        loss_of(model).backward()
        assert sum(kernels.calls.values()) == 7 + 2 * 3 * 2, "outside the tiles, and by tile in forward and backward"
        for name, weight in model.named_parameters():
            torch.testing.assert_close(weight.grad.full_tensor(), reference[name], rtol=1e-4, atol=1e-6, msg=name)
    finally:
        destroy_process_group()
